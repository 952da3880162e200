"""The experiments write what they say, and keep the work they have done."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from roughflow import experiments
from roughflow.datasets import Banana
from roughflow.experiments import Run, paper_flow


def test_figure_1_and_its_numbers(tmp_path):
    """Both approximations end where the Brownian path ends, and miss it on the way."""
    metrics = experiments.run("fig1", tmp_path)
    assert json.loads((tmp_path / "fig1.json").read_text()) == metrics
    assert (tmp_path / "fig1.png").stat().st_size > 10_000
    np.testing.assert_allclose(list(metrics["endpoint"].values()), metrics["endpoint"]["Brownian"], rtol=1e-5)
    assert all(0.05 < gap < 2 for gap in metrics["largest_gap"].values())


def test_an_unknown_experiment_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^there is no experiment fig9: choose from fig1, fig2, fig3, fig4"):
        experiments.run("fig9", tmp_path)


def test_a_trained_model_is_kept_and_scored(key, tmp_path, monkeypatch):
    """Resumed, the experiment reads its model and does not train again; the truth itself has no excess."""
    distribution, flow = Banana(), paper_flow(0.0, key=key, width=4, depth=1)
    run = Run(tmp_path, "trial", None, 0, progress=False, resume=True)
    trained = run.train("a", flow, distribution, steps=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trial-a.rf"]
    monkeypatch.setattr("roughflow.fit", lambda *a, **k: pytest.fail("trained again"))
    again = run.train("a", flow, distribution, steps=3)
    pairs = zip(jax.tree.leaves(trained.flow), jax.tree.leaves(again.flow), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    metrics = run.excess(again, distribution, count=500)
    x = distribution.sample(key=run.key("test"), shape=(4000,))[:500]
    given = again.flow.log_prob_given_path(x, again.flow.sample_path(key=key))
    np.testing.assert_allclose(metrics["excess"], np.mean(distribution.log_prob(x) - given), atol=1e-5)
    assert metrics["training_steps"] == 3
    assert metrics["lost_points"] == 0
    assert metrics["solver_error"] < 0.01


@pytest.fixture
def small(monkeypatch):
    """Little data and few points, as many for one purpose as for another: what is compiled serves all."""
    sizes = {"ROWS": 3000, "TEST": 4, "NOISY_TEST": 4, "SCORED": 32, "HISTOGRAM": 2000, "PIXELS": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(experiments, name, value)
    return monkeypatch


@pytest.mark.slow
def test_a_regression_is_kept_and_scored_with_noise_and_without(tmp_path, small):
    """Two steps of ten are asked for, and so ten of fifty."""
    distribution, run = Banana(), Run(tmp_path, "trial", 2, 0, progress=False, resume=True)
    regressed = run.regress("a", distribution, steps=50, beside=10, width=4)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trial-a.rf"]
    small.setattr("roughflow.fit_density", lambda *a, **k: pytest.fail("trained again"))
    again = run.regress("a", distribution, steps=50, beside=10, width=4)
    plain, noisy = run.excess_with(again, distribution, 0.0), run.excess_with(again, distribution, 0.5)
    assert (plain["test_points"], noisy["test_points"], noisy["num_paths"]) == (4, 4, 64)
    x = distribution.sample(key=run.key("test"), shape=(4,))
    values = regressed.model.log_prob(x, key=run.key("any"))
    np.testing.assert_allclose(plain["excess"], np.mean(distribution.log_prob(x) - values), atol=1e-5)
    assert plain["training_steps"] == 10
    assert abs(noisy["excess"] - plain["excess"]) < 1
    assert again.noisy(0.5).flow.noise_dimension == 2
    density = np.exp(run.histogram(again.noisy(0.5), (-4.0, 4.0, -8.0, 4.0)))
    assert density.shape == (64, 43)  # the lowest row first, cells that are square
    cell = (8 / 43) * (12 / 64)
    assert 0.8 < density.sum() * cell <= 1


def test_paths_that_have_the_distribution_of_the_data_are_near_it_and_forget_at_the_known_rate(key):
    """An Ornstein–Uhlenbeck process: correlations e^(−t/τ), and the time 2τ."""
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: 2**0.5 * jnp.eye(2))
    start = jax.random.normal(key, (32, 2))
    paths = np.asarray(rf.simulate(sde, start, key=key, t1=100.0, steps=1000, trajectory=True))
    assert abs(experiments.autocorrelation_time(paths, 100.0) - 2.0) < 0.3
    data = np.asarray(jax.random.normal(key, (20_000, 2)))
    near, far = (experiments.distances(paths + shift, data) for shift in (0.0, 1.0))
    assert max(near["pooled_kolmogorov"]) < 0.05
    assert min(far["pooled_kolmogorov"]) > 0.3


@pytest.fixture
def tiny(small):
    """Small networks, short paths, pictures of four points."""
    for module, name, value in (
        (experiments, "PIXELS", 2),
        (experiments, "paper_flow", partial(paper_flow, width=4, depth=1)),
        (experiments, "WIDTH", 4),
        (experiments, "FIG2_WIDTH", 4),
        (experiments, "FIG2_REGRESSION", experiments.FIG2_STEPS),
        (experiments, "FIG3_REGRESSION", experiments.FIG3_STEPS),
        (experiments, "FIG2_WALK", 100),
        (experiments, "FIG2_CHAINS", 4),
        (experiments, "FIG2_HORIZONS", {"staying-identity": 2.0, "staying-along": 1.0}),
        (experiments, "PAPER_HORIZON", 1.0),
        (experiments, "FIG3_IN_TRAINING", (0.0, 0.5)),
        (experiments, "FIG3_AFTERWARDS", (0.0, 0.5)),
        (experiments, "FIG4_BATCH", 8),
        (experiments, "FIG4_WIDTH", 4),
        (experiments, "FIG4_DEPTH", 1),
        (experiments, "FIG4_SAMPLES", 50),
        (experiments, "FIG4_LONG", 50),
        (experiments, "FIG4_WALK", 100),
    ):
        small.setattr(module, name, value)


# The models each keeps, and one of its numbers by the way to it.
WRITTEN = {
    "fig2": (["identity", "learned", "one-path", "regression"], ["staying-along", "pooled_kolmogorov"]),
    "fig3": (["0", "0.5", "regression"], ["regression", "0.5", "excess"]),
    "fig4": (["seed-0", "seed-1", "seed-2"], ["long_run_kolmogorov_distance", "printed"]),
}


# Each of them trains several models; with `make test` the one that trains none has its turn, above.
@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_the_experiments_write_their_figures_and_numbers(name, tmp_path, tiny):
    models, way = WRITTEN[name]
    metrics = experiments.run(name, tmp_path, steps=2, progress=False)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == metrics
    figures = ["fig3.png", "fig3-noise.png"] if name == "fig3" else [f"{name}.png"]
    assert {file.name for file in tmp_path.iterdir()} == {
        *figures,
        f"{name}.json",
        *(f"{name}-{model}.rf" for model in models),
    }
    assert all((tmp_path / file).stat().st_size > 10_000 for file in figures)
    found = metrics
    for step in way:
        found = found[step]
    assert np.all(np.isfinite(found))
    steps = [part["training_steps"] for part in _scored(metrics)]
    assert steps == [2] * len(steps)


def _scored(metrics):
    """All entries that tell how a model was trained."""
    parts = [part for part in metrics.values() if isinstance(part, dict)]
    own = [metrics] if "training_steps" in metrics else []
    return [*own, *(found for part in parts for found in _scored(part))]
