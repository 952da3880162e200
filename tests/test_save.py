"""Models as files: the same model comes back."""

import os
import zipfile
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved import Pull, flow_of, same

import roughflow as rf


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
        (np.array(["a"]), r"^model.value cannot be saved: it is an array of <U1"),
        (
            rf.sde.ExactCorrection().draw,
            r"^model.value cannot be saved: BoundMethod is not a public class of equinox",
        ),
        (zipfile.ZipFile, r"^model.value cannot be saved: it is ZipFile"),
    ],
)
def test_what_cannot_be_saved_is_named(value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        rf.save(tmp_path / "m.rf", Anything(value))
    assert os.listdir(tmp_path) == []


def test_what_a_fit_returns_is_not_a_model(tmp_path):
    fitted = rf.train.Fitted(rf.Normal(jnp.zeros(1)), rf.MaximumLikelihood(), rf.train.History(), False)
    with pytest.raises(ValueError, match=r"save its \.model"):
        rf.save(tmp_path / "m.rf", fitted)
    with pytest.raises(ValueError, match=r"save its \.sde"):
        rf.save(tmp_path / "m.rf", SimpleNamespace(sde=rf.BrownianMotion(0.0, 1.0)))


def test_a_named_sde_comes_back_in_a_new_process(tmp_path, monkeypatch):
    """Where nothing has used its name yet."""
    rf.save(tmp_path / "m.rf", rf.CoxIngersollRoss(1.0, 0.05, 0.1))
    monkeypatch.delitem(vars(rf), "CoxIngersollRoss")
    assert rf.load(tmp_path / "m.rf").sigma == 0.1


def test_the_same_model_gives_the_same_bytes(tmp_path, monkeypatch):
    rf.save(tmp_path / "m.rf", rf.Normal(jnp.zeros(1)))
    monkeypatch.setattr("time.localtime", lambda *_: (2001, 2, 3, 4, 5, 6, 0, 0, 0))
    rf.save(tmp_path / "again.rf", rf.Normal(jnp.zeros(1)))
    assert (tmp_path / "m.rf").read_bytes() == (tmp_path / "again.rf").read_bytes()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write here: .*file/m\.rf"):
        rf.save(tmp_path / "file" / "m.rf", rf.Normal(jnp.zeros(1)))


def test_many_flows_in_one_come_back(key, tmp_path):
    flows = eqx.filter_vmap(flow_of)(jax.random.split(key, 3))
    rf.save(tmp_path / "flows.rf", flows)
    assert same(flows, rf.load(tmp_path / "flows.rf"))


def test_own_classes_are_named_by_the_reader(key, tmp_path):
    file, flow = tmp_path / "flow.rf", flow_of(key, Pull(jnp.array(2.0), 3))
    rf.save(file, flow)
    with pytest.raises(
        ValueError, match=r"^the file contains an object of .*\.Pull: pass its class, as in load\(path"
    ):
        rf.load(file)
    again = rf.load(file, classes=[Pull])
    assert same(flow, again)
    assert again.sde.drift.power == 3
