"""Models as files: the same model comes back, nothing is executed, and no file is ever half there."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import roughflow as rf

FILES = Path(__file__).parent / "files"


class Pull(eqx.Module):
    """A user's own drift."""

    rate: Array
    power: int = eqx.field(static=True, default=1)

    def __call__(self, t, z):
        return -self.rate * z**self.power


def flow_of(key, drift=None):
    drift = rf.MLP(2, 2, width=4, depth=1, activation=jax.nn.softplus, key=key) if drift is None else drift
    return rf.StochasticFlow(
        rf.ItoSDE(drift, rf.FullDiffusion(2, width=4, scale=0.3, key=key)),
        rf.Normal(jnp.array([0.5, -1.0]), jnp.array([1.0, 2.0])),
        t1=0.7,
        driver=rf.PiecewiseLinear(3),
        divergence=rf.HutchinsonDivergence(2),
        integrator=rf.FixedGrid(diffrax.Tsit5(), steps=5),
    )


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) and jnp.asarray(a).dtype == jnp.asarray(b).dtype for a, b in leaves)


def test_a_flow_comes_back_as_it_was(key, tmp_path):
    flow, file = flow_of(key), tmp_path / "flow.rf"
    rf.save(file, flow)
    again = rf.load(file)
    assert same(flow, again)
    draw = lambda f: f.sample(key=key, shape=(3,))
    assert np.array_equal(draw(flow), draw(again))


# ------------------------------------------------------------------------------ files of old versions


def test_files_of_version_0_1_0_load_and_give_the_same_densities():
    """Written by version 0.1.0 from flows of every kind, with their densities at two points on one path."""
    points = np.array([[0.3, -0.2, 0.5], [1.0, 0.4, -0.7]])
    expected = json.loads((FILES / "expected.json").read_text())
    for name in ("mlp_full", "restoring", "diagonal", "proportional", "no_noise", "fitted"):
        model = rf.load(FILES / f"{name}.rf")
        flow = model.flow if isinstance(model, rf.Standardised) else model
        size = flow.driver.num_functions, flow.noise_dim
        path = flow.driver.path(jnp.cos(jnp.arange(size[0] * size[1])).reshape(size), flow.t1)
        x = jnp.asarray(points[:, : flow.dimension])
        value = flow.log_prob_given_path(x, path, key=jax.random.key(3))
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, err_msg=name)


def test_parts_of_models_of_version_0_1_0_load():
    assert rf.load(FILES / "fitted.rf").columns == ("a", "b")
    endpoint, pull_back = (rf.load(FILES / f"{name}.rf") for name in ("endpoint", "pull_back"))
    assert isinstance(endpoint, rf.Endpoint)
    assert (endpoint.num_paths, type(endpoint.proposal)) == (16, rf.Prior)
    assert np.array_equal(endpoint.start, [0.5, 1.0])
    assert isinstance(pull_back, rf.PullBack)
    assert (pull_back.num_paths, type(pull_back.proposal)) == (8, rf.Laplace)
    assert isinstance(rf.load(FILES / "amortised.rf"), rf.Amortised)


def test_samplers_and_targets_of_version_0_1_0_load():
    expected = json.loads((FILES / "expected.json").read_text())
    sampler, sde = rf.load(FILES / "sampler.rf"), rf.load(FILES / "momenta.rf")
    assert isinstance(sampler, rf.AdjustedFlow)
    assert (sampler.dt, sampler.substeps) == (0.5, 4)
    t, z = jnp.array(0.5), jnp.array([0.3, -0.2])
    values = np.concatenate([np.ravel(sampler.sde.noise(t, z)), np.ravel(sampler.sde.skew(t, z))])
    np.testing.assert_allclose(values, expected["sampler"], rtol=1e-9)
    np.testing.assert_allclose(np.ravel(sde.noise(t, jnp.ones(4))), expected["momenta"], rtol=1e-9)


def test_a_standardised_model_comes_back_with_its_columns(key, tmp_path):
    model = rf.Standardised(rf.neural_flow(2, width=4, depth=1, key=key), *rf.standardising(DATA), ("a", "b"))
    rf.save(tmp_path / "m.rf", model)
    again = rf.load(tmp_path / "m.rf")
    assert same(model, again)
    assert again.columns == ("a", "b")


def test_own_classes_are_named_by_the_reader(key, tmp_path):
    file, flow = tmp_path / "flow.rf", flow_of(key, Pull(jnp.array(2.0), 3))
    rf.save(file, flow)
    with pytest.raises(ValueError, match=r"^the file holds a Pull of .*: give it, as load\(path"):
        rf.load(file)
    again = rf.load(file, classes=[Pull])
    assert same(flow, again)
    assert again.sde.drift.power == 3


def test_a_function_cannot_be_saved_and_leaves_the_old_file(key, tmp_path):
    file = tmp_path / "flow.rf"
    file.write_text("old")
    with pytest.raises(
        ValueError, match=r"^model.sde.drift cannot be saved, it is .*<lambda>: make it an eqx.Module"
    ):
        rf.save(file, flow_of(key, lambda t, z: -z))
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["flow.rf"]


def rewritten(file, change):
    """The file with its header changed."""
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(parts["header.json"])
    change(header)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (parts | {"header.json": json.dumps(header)}).items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:system", r"^the file holds a system of os: give it"),
        ("subprocess:Popen", r"^the file holds a Popen of subprocess: give it"),
        ("roughflow:fit", r"^the file names roughflow:fit, which is not a part of a model"),
        ("equinox:filter_jit", r"^the file names equinox:filter_jit, which is not a part of a model"),
        ("roughflow.learn._save:importlib.import_module", r"which is not a part of a model"),
        ("roughflow:Nothing", r"^the file holds roughflow:Nothing, which the installed roughflow lacks"),
    ],
)
def test_a_file_runs_nothing(key, tmp_path, name, message):
    """Whatever class or function a file names, only modules are built, and none is called."""
    file = tmp_path / "flow.rf"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    rewritten(file, lambda header: header["structure"].update(module=name))
    with pytest.raises(ValueError, match=message):
        rf.load(file)


def test_pickles_are_refused(tmp_path):
    """An array of objects is a pickle in disguise."""
    file, bomb = tmp_path / "flow.rf", tmp_path / "bomb.npy"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    np.save(bomb, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(file, "a") as archive:
        archive.write(bomb, "array/9.npy")
    with pytest.raises(ValueError, match=r"is not a roughflow model, or is damaged"):
        rf.load(file)


def test_wrong_files_get_one_line(key, tmp_path):
    file = tmp_path / "flow.rf"
    with pytest.raises(FileNotFoundError, match=r"^there is no file"):
        rf.load(file)
    file.write_text("not a model")
    with pytest.raises(ValueError, match=r"is not a roughflow model, or is damaged"):
        rf.load(file)
    rf.save(file, rf.Normal(jnp.zeros(1)))
    rewritten(file, lambda header: header.update(version=99))
    with pytest.raises(ValueError, match=r"was written by a later roughflow \(format 99"):
        rf.load(file)
    rf.save(file, rf.Normal(jnp.zeros(1)))
    rewritten(file, lambda header: header["structure"]["fields"].pop("loc"))
    with pytest.raises(ValueError, match=r"is damaged: .*loc is missing"):
        rf.load(file)


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    """A process that saves one model after another is killed, again and again."""
    file = tmp_path / "model.rf"
    script = textwrap.dedent(f"""
        import numpy as np
        from roughflow.learn._files import write_archive
        i = 0
        print("ready", flush=True)
        while True:
            i += 1
            header = {{"kind": "model", "version": 1, "i": i}}
            write_archive({str(file)!r}, header, {{"a": np.full(300_000, i)}})
    """)
    from roughflow.learn._files import read_archive

    seen, rng = set(), np.random.default_rng(0)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        while not file.exists():
            time.sleep(0.01)
        time.sleep(rng.uniform(0.02, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        header, arrays = read_archive(file, "model", 1)
        assert np.all(arrays["a"] == header["i"])
        seen.add(header["i"])
    assert len(seen) > 1


# ------------------------------------------------------------------------------------ standardised

DATA = np.random.default_rng(1).multivariate_normal([100.0, -3.0], [[25.0, 4.0], [4.0, 2.0]], 400)


def test_densities_are_in_the_units_of_the_data(key):
    """An untrained neural flow is N(0, I), so the model is the normal law with the data's moments."""
    flow = rf.neural_flow(2, noise=0.5, width=4, depth=1, key=key).with_driver(rf.Legendre(4))
    model = rf.Standardised(flow, *rf.standardising(DATA))
    mean, covariance = DATA.mean(axis=0), np.cov(DATA.T, bias=True)
    gap = np.linalg.solve(covariance, (DATA[:5] - mean).T).T
    truth = -0.5 * np.sum(gap * (DATA[:5] - mean), axis=1) - 0.5 * np.log(
        np.linalg.det(2 * np.pi * covariance)
    )
    np.testing.assert_allclose(model.log_prob(DATA[:5], key=key), truth, atol=1e-4)
    samples = np.asarray(model.sample(key=key, shape=(4000,)))
    np.testing.assert_allclose(samples.mean(axis=0), mean, atol=4 * np.sqrt(np.diag(covariance) / 4000).max())
    np.testing.assert_allclose(np.cov(samples.T), covariance, rtol=0.2)


def test_data_without_a_density_are_refused():
    with pytest.raises(ValueError, match=r"^column 1 is constant"):
        rf.standardising(np.stack([np.arange(5.0), np.full(5, 7.0)], axis=1))
    with pytest.raises(ValueError, match=r"^the columns are linearly dependent"):
        rf.standardising(np.stack([np.arange(5.0), 2 * np.arange(5.0)], axis=1))
    with pytest.raises(ValueError, match=r"^data must have shape .* at least two rows"):
        rf.standardising(np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"^data has a value that is not finite, first in row 0"):
        rf.standardising(np.array([[np.nan, 1.0], [1.0, 2.0]]))


def test_a_small_spread_around_a_large_number_keeps_its_digits(key):
    """Ten million and one: single precision has no digits left for the one."""
    flow = rf.neural_flow(1, noise=0.0, width=4, depth=1, key=key)
    rows = np.random.default_rng(2).normal(size=(200, 1))
    plain, far = (rf.Standardised(flow, *rf.standardising(rows + shift)) for shift in (0, 1e7))
    with jax.enable_x64(False):
        single = eqx.tree_at(lambda m: m.flow, far, jax.tree.map(to_single, flow))
        moved = single.log_prob(rows + 1e7, key=key)
    assert moved.dtype == jnp.float32
    np.testing.assert_allclose(moved, plain.log_prob(rows, key=key), atol=1e-4)


def to_single(leaf):
    return jnp.asarray(leaf, jnp.float32) if eqx.is_inexact_array(leaf) else leaf


def test_a_standardised_model_may_be_an_argument_of_a_jit(key):
    model = rf.Standardised(rf.neural_flow(2, noise=0.0, width=4, depth=1, key=key), *rf.standardising(DATA))
    inside = eqx.filter_jit(lambda model, x: model.log_prob(x, key=key))(model, jnp.asarray(DATA[:3]))
    np.testing.assert_allclose(inside, model.log_prob(DATA[:3], key=key), rtol=1e-9)
