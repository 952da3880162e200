"""The experiments write what they say, and keep the work they have done."""

import json

import jax
import numpy as np
import pytest

from roughflow import experiments
from roughflow.datasets import Banana
from roughflow.experiments._run import Run, paper_flow


def test_figure_1_and_its_numbers(tmp_path):
    """Both approximations end where the Brownian path ends, and miss it on the way."""
    figures = experiments.run("fig1", tmp_path)
    assert json.loads((tmp_path / "fig1.json").read_text()) == figures
    assert (tmp_path / "fig1.png").stat().st_size > 10_000
    np.testing.assert_allclose(list(figures["endpoint"].values()), figures["endpoint"]["Brownian"], rtol=1e-5)
    assert all(0.05 < gap < 2 for gap in figures["largest_gap"].values())


def test_an_unknown_experiment_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"^there is no experiment fig9: choose from fig1, fig2, fig3, fig4, toys"
    ):
        experiments.run("fig9", tmp_path)


def test_a_trained_model_is_kept_and_scored(key, tmp_path, monkeypatch):
    """Resumed, the experiment reads its model and does not train again; the truth itself has no excess."""
    law, flow = Banana(), paper_flow(0.0, key=key, width=4, depth=1)
    run = Run(tmp_path, "trial", None, 0, progress=False, resume=True)
    trained = run.train("a", flow, law, steps=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trial-a.rf"]
    monkeypatch.setattr("roughflow.fit", lambda *a, **k: pytest.fail("trained again"))
    again = run.train("a", flow, law, steps=3)
    pairs = zip(jax.tree.leaves(trained.flow), jax.tree.leaves(again.flow), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    figures = run.excess(again, law, count=500)
    x = law.sample(key=run.key("test"), shape=(500,))
    given = again.flow.log_prob_given_path(x, again.flow.sample_path(key=key))
    np.testing.assert_allclose(figures["excess"], np.mean(law.log_prob(x) - given), atol=1e-5)
    assert figures["training_steps"] == 3
    assert figures["lost_points"] == 0
    np.testing.assert_allclose(figures["excess_learned_proposal"], figures["excess"], atol=1e-5)
    assert figures["integration_error"] < 0.01
