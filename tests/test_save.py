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
    equal = lambda a, b: np.array_equal(a, b) and jnp.asarray(a).dtype == jnp.asarray(b).dtype
    return all(a is b if callable(a) else equal(a, b) for a, b in leaves)


def test_a_flow_comes_back_as_it_was(key, tmp_path):
    flow, file = flow_of(key), tmp_path / "flow.rf"
    rf.save(file, flow)
    again = rf.load(file)
    assert same(flow, again)
    draw = lambda f: f.sample(key=key, shape=(3,))
    assert np.array_equal(draw(flow), draw(again))


class Anything(eqx.Module):
    value: object


class Network(eqx.Module):
    """A drift with a network of equinox inside."""

    network: eqx.nn.MLP

    def __call__(self, t, z):
        return self.network(z)


KEPT = {
    "bfloat16": jnp.array([1.5, -2.0], jnp.bfloat16),
    "float8": jnp.array([1.5, -2.0], jnp.float8_e4m3fn),
    "complex array": jnp.array([1 + 2j]),
    "complex": 3 - 1j,
    "single": np.float32(0.1),
    "half as a scalar": jnp.bfloat16(0.1),
    "numpy complex": np.complex128(1j),
    "numpy integer": np.int16(7),
    "truth": np.bool_(True),
    "no rows": np.zeros((0, 3)),
    "empty": {},
    "named as a tag": {"array": 1.0, "module": None},
    "infinite": float("inf"),
    "function": jax.nn.relu,
}


@pytest.mark.parametrize("name", KEPT)
def test_values_come_back_as_they_were(name, tmp_path):
    file, value = tmp_path / "m.rf", KEPT[name]
    rf.save(file, Anything(value))
    again = rf.load(file, classes=[Anything]).value
    assert type(again) is type(value)
    assert getattr(again, "dtype", None) == getattr(value, "dtype", None)
    assert np.array_equal(again, value) if hasattr(value, "dtype") else again == value


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_random_keys_come_back(kind, tmp_path):
    keys = jax.random.split(jax.random.key(3, impl=kind), 2)
    rf.save(tmp_path / "m.rf", Anything(keys))
    again = rf.load(tmp_path / "m.rf", classes=[Anything]).value
    assert again.dtype == keys.dtype
    assert np.array_equal(jax.random.uniform(again[1]), jax.random.uniform(keys[1]))


def test_a_network_of_equinox_comes_back(key, tmp_path):
    for activation in (jax.nn.relu, jax.nn.elu):
        drift = Network(eqx.nn.MLP(2, 2, 4, 1, activation=activation, key=key))
        flow, file = flow_of(key, drift), tmp_path / "flow.rf"
        rf.save(file, flow)
        again = rf.load(file, classes=[Network])
        assert same(flow, again)
        assert np.array_equal(again.sde.drift(0.0, jnp.ones(2)), drift(0.0, jnp.ones(2)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["a"]), r"^model.value cannot be saved, it is an array of <U1"),
        (
            rf.ExactCorrection().draw,
            r"^model.value cannot be saved: BoundMethod is no public class of equinox",
        ),
        (zipfile.ZipFile, r"^model.value cannot be saved, it is ZipFile"),
    ],
)
def test_what_cannot_be_saved_is_named(value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        rf.save(tmp_path / "m.rf", Anything(value))
    assert os.listdir(tmp_path) == []


def test_what_a_fit_returns_is_not_a_model(tmp_path):
    fitted = rf.Fitted(rf.Normal(jnp.zeros(1)), rf.MaximumLikelihood(), rf.History(), False)
    with pytest.raises(ValueError, match=r"save fitted\.model"):
        rf.save(tmp_path / "m.rf", fitted)


def test_many_flows_in_one_come_back(key, tmp_path):
    flows = eqx.filter_vmap(flow_of)(jax.random.split(key, 3))
    rf.save(tmp_path / "flows.rf", flows)
    assert same(flows, rf.load(tmp_path / "flows.rf"))


# ------------------------------------------------------------------------------------- names of classes


def names_in(structure):
    if isinstance(structure, dict):
        yield from [structure["module"]] if "module" in structure else []
        structure = list(structure.values())
    if isinstance(structure, list):
        for part in structure:
            yield from names_in(part)


def test_files_name_classes_as_users_do(key, tmp_path):
    """No private module is named, so that code may move."""
    file = tmp_path / "flow.rf"
    sde = rf.underdamped_langevin(Pull(jnp.array(1.0)), 1)
    rf.save(file, (flow_of(key), sde, eqx.nn.MLP(1, 1, 1, 1, key=key), rf.datasets.Banana()))
    with zipfile.ZipFile(file) as archive:
        names = set(names_in(json.loads(archive.read("header.json"))["structure"]))
    assert {"roughflow:Normal", "roughflow:MLP", "diffrax:Tsit5", "roughflow.sde:WithMomenta"} <= names
    assert {"equinox.nn:MLP", "roughflow.datasets:Banana", f"{__name__}:Pull"} <= names
    assert not [name for name in names if "._" in name]
    assert len(rf.load(file, classes=[Pull])) == 4


def test_public_names_mean_one_class_each():
    """A class is found by its name alone, so no two namespaces may use one name for two."""
    from roughflow.learn._names import NAMESPACES

    for spaces in NAMESPACES.values():
        found = {}
        for space in spaces:
            for name, value in vars(sys.modules[space]).items():
                if isinstance(value, type) and issubclass(value, eqx.Module):
                    assert found.setdefault(name, value) is value, name


def test_every_class_a_model_may_hold_has_a_public_name(key):
    from roughflow.learn._names import name_of

    for sde in (rf.underdamped_langevin(Pull(jnp.array(1.0)), 1), rf.to_stratonovich(flow_of(key).sde)):
        for part in (sde, sde.drift, getattr(sde, "log_density", sde), getattr(sde, "skew", sde)):
            if type(part).__module__.startswith("roughflow"):
                assert name_of(type(part)).startswith("roughflow")


def test_a_class_that_has_moved_is_known_by_its_name(tmp_path):
    file = tmp_path / "pull.rf"
    rf.save(file, Pull(jnp.array(2.0)))
    rewritten(file, lambda header: header["structure"].update(module="__main__:Pull"))
    assert isinstance(rf.load(file, classes=[Pull]), Pull)


# ------------------------------------------------------------------------------ files of old versions


OLD_FLOWS = ("mlp_full", "restoring", "diagonal", "proportional", "no_noise", "fitted")


def old_flow(name):
    model = rf.load(FILES / f"{name}.rf")
    return model.flow if isinstance(model, rf.Standardised) else model


# Each is compiled: with `make test` one has its turn, and the others are loaded and asked for a drift.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "mlp_full")) for name in OLD_FLOWS]
)
def test_flows_of_version_0_1_0_give_the_same_densities(name):
    """Written by version 0.1.0 from flows of every kind, with their densities at two points on one path."""
    points, flow = np.array([[0.3, -0.2, 0.5], [1.0, 0.4, -0.7]]), old_flow(name)
    expected = json.loads((FILES / "expected.json").read_text())
    size = flow.driver.num_functions, flow.noise_dimension
    path = flow.driver.path(jnp.cos(jnp.arange(size[0] * size[1])).reshape(size), flow.t1)
    x = jnp.asarray(points[:, : flow.dimension])
    value = flow.log_prob_given_path(x, path, key=jax.random.key(3))
    np.testing.assert_allclose(value, expected[name], rtol=1e-9)


@pytest.mark.parametrize("name", OLD_FLOWS)
def test_flows_of_version_0_1_0_load(name):
    flow = old_flow(name)
    z = jnp.full(flow.dimension, 0.3)
    assert np.all(np.isfinite(flow.sde.drift(jnp.asarray(0.5), z)))
    assert np.all(np.isfinite(flow.base.log_prob(z)))


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
    assert isinstance(sampler, rf.FlowSampler)
    assert (sampler.dt, sampler.num_substeps) == (0.5, 4)
    t, z = jnp.array(0.5), jnp.array([0.3, -0.2])
    values = np.concatenate([np.ravel(sampler.sde.noise(t, z)), np.ravel(sampler.sde.skew(t, z))])
    np.testing.assert_allclose(values, expected["sampler"], rtol=1e-9)
    np.testing.assert_allclose(np.ravel(sde.noise(t, jnp.ones(4))), expected["momenta"], rtol=1e-9)


def test_a_standardised_model_comes_back_with_its_columns(key, tmp_path):
    model = rf.Standardised(
        rf.neural_flow(2, width=4, depth=1, key=key), *rf.standardisation(DATA), ("a", "b")
    )
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
        ("roughflow:learn._save.read_archive", r"which is not a part of a model"),
        ("roughflow:plots", r"which the installed roughflow lacks"),
        ("roughflow.cli.__main__:Exit", r"which the installed roughflow lacks"),
        ("roughflow.experiments._run:Trained", r"which the installed roughflow lacks"),
        ("roughflow:AbstractDriver", r"is damaged: TypeError Can't instantiate abstract class"),
        ("roughflow:Nothing", r"^the file holds roughflow:Nothing, which the installed roughflow lacks"),
    ],
)
def test_a_file_runs_nothing(key, tmp_path, name, message):
    """Whatever class or function a file names, only modules are built, and none is called."""
    file = tmp_path / "flow.rf"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    rewritten(file, lambda header: header["structure"].update(module=name))
    before = set(sys.modules)
    with pytest.raises(ValueError, match=message):
        rf.load(file)
    assert not [module for module in set(sys.modules) - before if module.startswith("roughflow")]


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path):
    """A zip bomb: 80 megabytes of zeros in a few dozen kilobytes."""
    file = tmp_path / "bomb.rf"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("array/9.npy", bytes(80_000_000))
    with pytest.raises(ValueError, match=r"damaged \(\d+ bytes that unpack to 80\d+\)"):
        rf.load(file)


def test_an_array_larger_than_its_bytes_is_refused(tmp_path):
    file = tmp_path / "base.rf"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    head = np.lib.format.magic(1, 0) + b"\x76\x00"
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (900000000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("array/9.npy", head + text)
    with pytest.raises(ValueError, match=r"is not a roughflow model, or is damaged"):
        rf.load(file)


@pytest.mark.parametrize("depth", [120, 3000, 100_000])
def test_a_file_that_nests_without_end_is_refused(depth, tmp_path):
    file = tmp_path / "deep.rf"
    structure = '{"list":[' * depth + "null" + "]}" * depth
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.json", f'{{"kind":"model","version":1,"structure":{structure}}}')
    with pytest.raises(ValueError, match=r"is damaged: .* within one another"):
        rf.load(file)


def test_a_model_that_nests_without_end_is_not_saved(tmp_path):
    model = None
    for _ in range(500):
        model = [model]
    with pytest.raises(ValueError, match=r"more than 100 parts lie within one another"):
        rf.save(tmp_path / "m.rf", model)


def fields_of(header, *names):
    part = header["structure"]
    for name in names:
        part = part["fields"][name]
    return part["fields"]


DAMAGE = {
    "text for an array": lambda h: fields_of(h, "base").update(loc="haha"),
    "a module for a number": lambda h: fields_of(h).update(t1=fields_of(h)["base"]),
    "nothing for a module": lambda h: fields_of(h).update(driver=None),
    "a number for a module": lambda h: fields_of(h).update(integrator=3),
    "another kind of module": lambda h: fields_of(h).update(driver=fields_of(h)["integrator"]),
    "a number for a function": lambda h: fields_of(h, "sde", "drift").update(activation=1.0),
    "text for a whole number": lambda h: fields_of(h).update(noise_dimension="2"),
    "an array that is static": lambda h: fields_of(h, "sde", "diffusion").update(scale={"array": "array/0"}),
    "a list for a tuple": lambda h: fields_of(h, "sde", "drift").update(weights={"list": []}),
    "a tuple of text": lambda h: fields_of(h, "sde", "drift").update(weights={"tuple": ["a", "b"]}),
    "one array for another": lambda h: fields_of(h, "base").update(loc={"array": "array/0"}),
    "weights that do not fit": lambda h: fields_of(h, "sde", "drift")["weights"]["tuple"].reverse(),
    "too few layers": lambda h: [
        fields_of(h, "sde", "drift")[n]["tuple"].pop() for n in ("weights", "biases")
    ],
    "another dimension": lambda h: fields_of(h).update(dimension=3),
    "no such array": lambda h: fields_of(h, "base").update(loc={"array": "array/99"}),
    "no such function": lambda h: fields_of(h, "sde", "drift").update(activation={"function": "exec"}),
    "no such dtype": lambda h: fields_of(h, "base").update(loc={"array": "array/0", "dtype": "object"}),
    "a bare list": lambda h: fields_of(h, "base").update(loc=[1.0, 2.0]),
    "no fields": lambda h: h["structure"].update(fields=None),
    "no structure": lambda h: h.pop("structure"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_parts_that_cannot_belong_together_are_refused(name, key, tmp_path):
    file = tmp_path / "flow.rf"
    rf.save(file, flow_of(key))
    rewritten(file, DAMAGE[name])
    with pytest.raises(ValueError, match=r"flow.rf is damaged: [^\n]+$"):
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


def test_ctrl_c_waits_until_a_file_is_written(tmp_path, key, monkeypatch):
    """Half an archive could not even be closed."""
    writestr = zipfile.ZipFile.writestr

    def pressed(archive, name, data):
        writestr(archive, name, data)
        if name == "header.json":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(zipfile.ZipFile, "writestr", pressed)
    # A shell that runs the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rf.save(tmp_path / "flow.rf", flow_of(key))
    finally:
        signal.signal(signal.SIGINT, before)
    assert rf.load(tmp_path / "flow.rf").dimension == 2


def test_files_are_written_through_links_and_not_over_pipes(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    rf.save(tmp_path / "link", rf.Normal(jnp.zeros(2)))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").is_file()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a device or a pipe, not a file to write"):
        rf.save(tmp_path / "pipe", rf.Normal(jnp.zeros(2)))


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    """A process that saves one model after another is killed, again and again; each is a copy of one that has
    imported what it needs."""
    file = tmp_path / "model.rf"
    script = textwrap.dedent(f"""
        import itertools, os, sys
        import numpy as np
        from roughflow.learn._files import write_archive
        for _ in sys.stdin:
            writer = os.fork()
            if writer == 0:
                for i in itertools.count(1):
                    header = {{"kind": "model", "version": 1, "i": i}}
                    write_archive({str(file)!r}, header, {{"a": np.full(300_000, i)}})
            print(writer, flush=True)
            os.waitpid(writer, 0)
            print("killed", flush=True)
    """)
    from roughflow.learn._files import read_archive

    seen, rng = set(), np.random.default_rng(0)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(8):
            print("another", file=process.stdin, flush=True)
            writer = int(process.stdout.readline())
            while not file.exists():
                time.sleep(0.01)
            time.sleep(rng.uniform(0.02, 0.2))
            os.kill(writer, signal.SIGKILL)
            assert process.stdout.readline() == "killed\n"
            header, arrays = read_archive(file, "model", 1)
            assert np.all(arrays["a"] == header["i"])
            seen.add(header["i"])
    assert len(seen) > 1


# ------------------------------------------------------------------------------------ standardised

DATA = np.random.default_rng(1).multivariate_normal([100.0, -3.0], [[25.0, 4.0], [4.0, 2.0]], 400)


@pytest.mark.parametrize("noise", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_densities_are_in_the_units_of_the_data(noise, key):
    """An untrained neural flow is N(0, I), so the model is the normal with the data's moments."""
    flow = rf.neural_flow(2, noise=noise, width=4, depth=1, key=key).with_driver(rf.Legendre(4))
    model = rf.Standardised(flow, *rf.standardisation(DATA))
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
        rf.standardisation(np.stack([np.arange(5.0), np.full(5, 7.0)], axis=1))
    with pytest.raises(ValueError, match=r"^the columns are linearly dependent"):
        rf.standardisation(np.stack([np.arange(5.0), 2 * np.arange(5.0)], axis=1))
    with pytest.raises(ValueError, match=r"^data must have shape .* at least two rows"):
        rf.standardisation(np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"^data has a value that is not finite, first in row 0"):
        rf.standardisation(np.array([[np.nan, 1.0], [1.0, 2.0]]))


def test_a_small_spread_around_a_large_number_keeps_its_digits(key):
    """Ten million and one: single precision has no digits left for the one."""
    flow = rf.neural_flow(1, noise=0.0, width=4, depth=1, key=key)
    rows = np.random.default_rng(2).normal(size=(200, 1))
    plain, far = (rf.Standardised(flow, *rf.standardisation(rows + shift)) for shift in (0, 1e7))
    with jax.enable_x64(False):
        single = eqx.tree_at(lambda m: m.flow, far, jax.tree.map(to_single, flow))
        moved = single.log_prob(rows + 1e7, key=key)
    assert moved.dtype == jnp.float32
    np.testing.assert_allclose(moved, plain.log_prob(rows, key=key), atol=1e-4)


def to_single(leaf):
    return jnp.asarray(leaf, jnp.float32) if eqx.is_inexact_array(leaf) else leaf


def test_a_standardised_model_may_be_an_argument_of_a_jit(key):
    model = rf.Standardised(
        rf.neural_flow(2, noise=0.0, width=4, depth=1, key=key), *rf.standardisation(DATA)
    )
    inside = eqx.filter_jit(lambda model, x: model.log_prob(x, key=key))(model, jnp.asarray(DATA[:3]))
    np.testing.assert_allclose(inside, model.log_prob(DATA[:3], key=key), rtol=1e-9)


def test_fields_and_metrics_by_their_old_names_are_read(tmp_path):
    file = tmp_path / "laplace.rf"
    rf.save(file, rf.Laplace(num_starts=3))
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["header.json"] = parts["header.json"].replace(b'"num_starts"', b'"starts"')
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert rf.load(file).num_starts == 3
    history = rf.History.from_arrays({"loss": np.zeros(2), "figures/lost": np.ones(2)})
    np.testing.assert_array_equal(history.metrics["lost"], 1)
