"""Names of classes in files, and files of old versions."""

import importlib
import json
import zipfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved import Pull, flow_of, rewritten

import roughflow as rf

FILES = Path(__file__).parent / "files"


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
    assert {"equinox.nn:MLP", "roughflow.datasets:Banana", f"{Pull.__module__}:Pull"} <= names
    assert not [name for name in names if "._" in name]
    assert len(rf.load(file, classes=[Pull])) == 4


def test_public_names_mean_one_class_each():
    """A class is found by its name alone, so no two namespaces may use one name for two."""
    from roughflow.files import NAMESPACES

    for spaces in NAMESPACES.values():
        found = {}
        for space in spaces:
            for name, value in vars(importlib.import_module(space)).items():
                if isinstance(value, type) and issubclass(value, eqx.Module):
                    assert found.setdefault(name, value) is value, name


def test_every_class_a_model_may_hold_has_a_public_name(key):
    from roughflow.files import name_of

    for sde in (rf.underdamped_langevin(Pull(jnp.array(1.0)), 1), rf.to_stratonovich(flow_of(key).sde)):
        for part in (sde, sde.drift, getattr(sde, "log_density", sde), getattr(sde, "skew", sde)):
            if type(part).__module__.startswith("roughflow"):
                assert name_of(type(part)).startswith("roughflow")


def test_a_class_that_has_moved_is_known_by_its_name(tmp_path):
    file = tmp_path / "pull.rf"
    rf.save(file, Pull(jnp.array(2.0)))
    rewritten(file, lambda header: header["structure"].update(module="__main__:Pull"))
    assert isinstance(rf.load(file, classes=[Pull]), Pull)


OLD_FLOWS = ("mlp_full", "restoring", "diagonal", "no_noise", "fitted")


def old_flow(name):
    model = rf.load(FILES / f"{name}.rf")
    return model.flow if isinstance(model, rf.tables.Standardised) else model


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
    pull_back = rf.load(FILES / "pull_back.rf")
    assert isinstance(pull_back, rf.PullBack)
    assert (pull_back.num_paths, type(pull_back.proposal)) == (8, rf.Laplace)
    assert isinstance(rf.load(FILES / "amortised.rf"), rf.Amortised)


@pytest.mark.parametrize(
    ("name", "removed"), [("endpoint", "Endpoint"), ("proportional", "ProportionalDiffusion")]
)
def test_a_removed_class_is_named(name, removed):
    told = (
        rf"^[^\n]*holds [^\n]*{removed}[A-Za-z]*, which the installed roughflow lacks \(see faq: loading\)$"
    )
    with pytest.raises(ValueError, match=told):
        rf.load(FILES / f"{name}.rf")


def test_samplers_and_targets_of_version_0_1_0_load():
    expected = json.loads((FILES / "expected.json").read_text())
    sampler, sde = rf.load(FILES / "sampler.rf"), rf.load(FILES / "momenta.rf")
    assert isinstance(sampler, rf.mcmc.FlowSampler)
    assert (sampler.dt, sampler.num_substeps) == (0.5, 4)
    t, z = jnp.array(0.5), jnp.array([0.3, -0.2])
    values = np.concatenate([np.ravel(sampler.sde.noise(t, z)), np.ravel(sampler.sde.skew(t, z))])
    np.testing.assert_allclose(values, expected["sampler"], rtol=1e-9)
    np.testing.assert_allclose(np.ravel(sde.noise(t, jnp.ones(4))), expected["momenta"], rtol=1e-9)
