"""Networks and their derivatives by kernels: the numbers of the plain way, kernel by kernel and rule by rule.

Kernels run interpreted here; that they compile and what they gain is for `python -m benchmarks.gpu`.
"""

import itertools
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from roughflow.sde import _jets

KERNEL = 1e-4  # relative to the largest: products of bfloat16 in three parts


def parameters(sizes, seed=0):
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(i, o)) / np.sqrt(i) for i, o in itertools.pairwise(sizes)]
    biases = [0.3 * rng.normal(size=o) for o in sizes[1:-1]]
    return [jnp.asarray(a, jnp.float32) for a in weights], [jnp.asarray(b, jnp.float32) for b in biases]


def points(count, d):
    return jnp.asarray(np.random.default_rng(1).normal(size=(count, d)), jnp.float32)


def assert_close(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        pytest.param((2, 16, 16, 16, 2), 1, marks=pytest.mark.slow),
        ((3, 32, 1), 2),
        pytest.param((2, 16, 16, 3), 0, marks=pytest.mark.slow),
        pytest.param((1, 16, 16, 1), 2, marks=pytest.mark.slow),
    ],
)
def test_kernels_agree_with_the_plain_jets_and_their_pull_back(sizes, order, monkeypatch):
    monkeypatch.setattr(_jets, "at_once", lambda: 3)  # each goes through blocks of its own
    weights, biases = parameters(sizes)
    z = points(150, sizes[0])  # no multiple of a block's rows
    assert _jets.fits(sizes, order)
    expected, pull = jax.vjp(lambda *a: _jets.plain_jets(*a, order=order)[0], z, *weights, *biases)
    found = _jets.forward(z, weights, biases, order, interpret=True)
    assert_close(found, expected, KERNEL)
    ct = jnp.asarray(np.random.default_rng(2).normal(size=expected.shape), jnp.float32)
    assert_close(_jets.pull_back(z, weights, biases, ct, order, interpret=True), pull(ct), KERNEL)


def test_large_networks_have_no_kernel():
    assert not _jets.fits((2, 128, 128, 2), 0)
    assert not _jets.fits((2, 64, 32, 2), 0)
    assert not _jets.fits((8, 64, 2), 0)
    assert not _jets.fits((3, 64, 64, 3), 2)  # products of ten kinds


def test_where_there_are_kernels(monkeypatch):
    weights, _ = parameters((2, 16, 2))
    z = points(1, 2)[0]
    assert not _jets.has_kernel(weights, z)  # no GPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    device = SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert _jets.has_kernel(weights, z)
    assert not _jets.has_kernel(weights, z.astype(float))
    for other in ("7.5", "gfx90a", ""):  # no bfloat16, another maker
        device.compute_capability = other
        assert not _jets.has_kernel(weights, z)
    device.compute_capability = "10.0"
    with jax.default_matmul_precision("highest"):
        assert not _jets.has_kernel(weights, z)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not _jets.has_kernel(weights, z)


def use_primitives(monkeypatch):
    """Networks as on a GPU, but for the kernels themselves."""
    monkeypatch.setattr("roughflow.sde._networks.has_kernel", lambda weights, z: True)
    jax.clear_caches()  # what was traced knows nothing of it


def derivatives():
    """A loss, its gradient in the weights, and how it moves with x, of a flow with an Itô correction."""
    keys = jax.random.split(jax.random.key(0))
    sde = rf.ItoSDE(rf.MLP(2, 2, width=16, depth=2, key=keys[0]), rf.FullDiffusion(2, width=16, key=keys[1]))
    grid = rf.FixedGrid(rf.flow.RK4(), steps=2)
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), driver=rf.KarhunenLoeve(1), integrator=grid)
    x, path = points(5, 2), flow.sample_path(key=jax.random.key(1))

    @jax.jit
    def found(arrays):
        model = eqx.combine(arrays, flow)
        loss = lambda model, x: -jnp.mean(model.log_prob_given_path(x, path))
        forwards = jax.jvp(lambda x: loss(model, x), (x,), (jnp.ones_like(x),))
        return eqx.filter_value_and_grad(loss)(model, x), forwards

    return found(eqx.filter(flow, eqx.is_inexact_array))


@pytest.mark.slow
def test_a_flow_has_the_same_densities_and_gradients(monkeypatch):
    plain = derivatives()
    use_primitives(monkeypatch)
    assert_close(derivatives(), plain, 2e-5)


def test_higher_derivatives_and_weights_of_many_networks(monkeypatch):
    use_primitives(monkeypatch)
    network = rf.MLP(2, 1, width=16, depth=1, key=jax.random.key(0))
    weights, biases = network.weights, network.biases
    value = lambda z: (jnp.tanh(z @ weights[0] + biases[0]) @ weights[1] + biases[1])[0]
    ours = lambda z: network(0.0, z)[0]
    z = jnp.array([0.3, -0.7])
    thrice = lambda f: jax.jit(jax.jacfwd(jax.hessian(f)))(z)
    np.testing.assert_allclose(thrice(ours), thrice(value), rtol=2e-4, atol=1e-5)
    # As in a flow: the weights' gradient of a slope, and how it moves with z.
    slope = lambda network, y: jnp.sum(jax.grad(lambda y: network(0.0, y)[0])(y))
    plain = lambda weights, y: jnp.sum(
        jax.grad(lambda y: (jnp.tanh(y @ weights[0] + biases[0]) @ weights[1])[0])(y)
    )
    gradient = lambda f, at: lambda y: jax.tree.leaves(eqx.filter_grad(f)(at, y))[:2]
    moved = lambda f, at: jax.jit(lambda y: jax.jvp(gradient(f, at), (y,), (y + 1,)))(z)
    assert_close(moved(slope, network), moved(plain, weights), 1e-4)
    many = eqx.filter_vmap(lambda key: rf.MLP(2, 1, width=16, depth=1, key=key))(
        jax.random.split(jax.random.key(1), 3)
    )
    found = eqx.filter_jit(eqx.filter_vmap(lambda one: jax.grad(lambda y: one(0.0, y)[0])(z)))(many)
    for i in range(3):
        one = jax.tree.map(lambda a, i=i: a[i], eqx.filter(many, eqx.is_array))
        first, last = one.weights
        slope = 1 - jnp.tanh(z @ first + one.biases[0]) ** 2
        np.testing.assert_allclose(found[i], first @ (slope * last[:, 0]), rtol=1e-4)


def test_gradients_of_each_sample():
    weights, biases = parameters((2, 16, 2))
    loss = lambda w, z: jnp.sum(_jets.network(z, w, biases) ** 2)
    z = points(4, 2)
    each = jax.vmap(jax.grad(loss), in_axes=(None, 0))(weights, z)
    for i in range(4):
        assert_close([a[i] for a in each], jax.grad(loss)(weights, z[i]), 1e-5)
