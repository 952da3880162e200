"""Data sets: the density has mass one and is that of the samples, and the entropy is its own."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import roughflow as rf
from roughflow.datasets import DISTRIBUTIONS, entropy_on_grid

# What each entropy is: in closed form, or from −∫ p log p on a grid seven times as fine as the library's.
ENTROPIES = {
    "banana": 1 + math.log(2 * math.pi) + 0.5 * math.log(2),
    "star": 2.084671,
    "moons": 2.393879,
    "eight-gaussians": 2.831578,
    "checkerboard": math.log(32),
    "two-spirals": 2.540618,
    "pinwheel": 2.320588,
    "rings": 2.623183,
    "swiss-roll": 2.669646,
}
CELL, NODES = 0.4, 10
WINDOWS = {name: (-4.8, 4.8, -4.8, 4.8) for name in DISTRIBUTIONS} | {"banana": (-4.8, 4.8, -24.0, 5.2)}

every_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)
# One of each kind of code: a formula, polar coordinates, a mask, and quadrature along a curve.
KINDS = ("banana", "star", "checkerboard", "two-spirals")
every_kind = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in KINDS)) for name in DISTRIBUTIONS]
)


def edges(name):
    """Of cells whose sides lie on those of the checkerboard's squares."""
    left, right, bottom, top = WINDOWS[name]
    return [np.arange(round((b - a) / CELL) + 1) * CELL + a for a, b in ((left, right), (bottom, top))]


@functools.cache
def cell_masses(name):
    """The density integrated over each cell, by Gauss–Legendre in it."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    sides = [a[:-1, None] + 0.5 * CELL * (nodes + 1) for a in edges(name)]
    grid = np.stack(np.meshgrid(*(side.ravel() for side in sides), indexing="ij"), axis=-1)
    density = np.exp(log_prob(name)(grid))
    shape = (len(sides[0]), NODES, len(sides[1]), NODES)
    return np.einsum("injm,n,m->ij", density.reshape(shape), weights, weights) * (0.5 * CELL) ** 2


@functools.cache
def samples(name):
    draw = jax.jit(lambda key: DISTRIBUTIONS[name].sample(key=key, shape=(30_000,)))
    return np.asarray(draw(jax.random.key(20)))


@functools.cache
def log_prob(name):
    """Compiled once for all tests; they call it with 64 points."""
    return jax.jit(DISTRIBUTIONS[name].log_prob)


def agreement(name, points):
    """The p-value of a chi-squared test of points against the density; rare and outer cells make one."""
    expected = cell_masses(name).ravel() * len(points)
    counts = np.histogram2d(*points.T, bins=edges(name))[0].ravel()
    often = expected > 10
    expected, counts = (np.append(a[often], len(points) - a[often].sum()) for a in (expected, counts))
    # The checkerboard leaves nothing outside, to rounding.
    return stats.chi2.sf(np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-6)), len(expected) - 1)


@every_distribution
def test_density_has_mass_one(name):
    assert cell_masses(name).sum() == pytest.approx(1, abs=1e-4)


@every_distribution
def test_samples_have_the_density(name):
    points = samples(name)
    assert points.shape == (30_000, 2)
    assert agreement(name, points) > 1e-4
    # The test would see a distribution that is only a little different.
    assert agreement(name, 1.03 * points) < 1e-6


@every_distribution
def test_entropy(name):
    distribution = DISTRIBUTIONS[name]
    assert isinstance(distribution.entropy, float)
    assert distribution.entropy == pytest.approx(ENTROPIES[name], abs=5e-5)
    surprise = -np.asarray(log_prob(name)(samples(name)))
    error = surprise.std() / math.sqrt(surprise.size)
    assert abs(surprise.mean() - distribution.entropy) < 4 * error + 1e-12


def test_entropy_by_another_road():
    """Eight normals that hardly overlap: ln 8 more than one; and the star's by polar coordinates."""
    one = math.log(2 * math.pi * math.e / 8)
    assert DISTRIBUTIONS["eight-gaussians"].entropy == pytest.approx(one + math.log(8), abs=0.01)
    # H(r, θ) + E ln r, with r > 0 but for a chance below 1e-26.
    angle = np.linspace(0, 2 * np.pi, 2000, endpoint=False)
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    radius = (2 / np.sqrt(1 + 0.5 * np.sin(10 * angle)))[:, None] + 0.15 * nodes[None]
    log_radius = np.mean(np.log(radius) @ weights) / weights.sum()
    entropy = 0.5 * math.log(2 * math.pi * math.e * 0.15**2) + math.log(2 * math.pi) + log_radius
    assert DISTRIBUTIONS["star"].entropy == pytest.approx(entropy, abs=5e-5)


def turn(radius, angle):
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)


def written_out(name, u):
    """Points of the curve at equally likely places u, and the noise."""
    if name == "moons":
        arc = turn(2.0, np.pi * u) - [1.0, 0.5]
        return np.concatenate([arc, -arc]), 0.2
    if name == "two-spirals":
        t = 3 * np.pi * np.sqrt(u)
        arm = np.stack([-t * np.cos(t), t * np.sin(t)], axis=-1) / 3
        return np.concatenate([arm, -arm]), 0.1
    if name == "rings":
        return np.concatenate([turn(0.75 * k, 2 * np.pi * u) for k in (1, 2, 3, 4)]), 0.08
    t = 1.5 * np.pi * (1 + 2 * u)
    return turn(t / 5, t), 0.2


@pytest.mark.parametrize("name", ["moons", "two-spirals", "rings", "swiss-roll"])
def test_density_along_a_curve(name):
    """A plain mean over many places on the curve, against the library's quadrature or Bessel function."""
    curve, noise = written_out(name, (np.arange(200_000) + 0.5) / 200_000)
    points = samples(name)[:64]
    densities = [np.mean(np.exp(-0.5 * np.sum((z - curve) ** 2, axis=-1) / noise**2)) for z in points[:16]]
    expected = np.log(densities) - math.log(2 * math.pi * noise**2)
    np.testing.assert_allclose(log_prob(name)(points)[:16], expected, rtol=0, atol=1e-8)


@every_kind
def test_gradient_is_that_of_the_density(name):
    points, h = samples(name)[:64].copy(), 1e-5
    points[0] = 0  # where polar coordinates are not smooth
    gradient = np.asarray(jax.jit(jax.vmap(jax.grad(DISTRIBUTIONS[name].log_prob)))(points))
    assert np.all(np.isfinite(gradient))
    for axis, shift in enumerate(h * np.eye(2)):
        quotient = (log_prob(name)(points + shift) - log_prob(name)(points - shift)) / (2 * h)
        np.testing.assert_allclose(gradient[1:, axis], quotient[1:], rtol=1e-5, atol=1e-4)


@every_kind
def test_either_precision_and_never_nan(name):
    points = samples(name)[:64].copy()
    points[:4] = [[0.0, 0.0], [30.0, -30.0], [-1e3, 1e3], [1e25, 1e25]]
    exact, rough = log_prob(name)(points), log_prob(name)(points.astype(np.float32))
    assert (exact.dtype, rough.dtype) == (jnp.float64, jnp.float32)
    np.testing.assert_allclose(rough[4:], exact[4:], rtol=1e-4, atol=1e-3)
    for found in (exact, rough):
        assert not np.any(np.isnan(found))
        assert np.all(found[1:4] < -1e3)


@every_distribution
def test_shapes(name):
    distribution = DISTRIBUTIONS[name]
    for shape in [(), (3, 4), (0,)]:
        drawn = jax.eval_shape(lambda shape=shape: distribution.sample(key=jax.random.key(0), shape=shape))
        assert drawn.shape == (*shape, 2)
        assert jax.eval_shape(distribution.log_prob, drawn).shape == shape
    assert jax.eval_shape(distribution.log_prob, np.zeros(2, int)).dtype == jnp.float64


def test_checkerboard_has_no_density_off_its_squares():
    points = jnp.array([[1.0, 1.0], [-3.0, 1.0], [1.0, -1.0], [5.0, 5.0], [-5.0, 3.0]])
    expected = [-math.log(32)] * 2 + [-math.inf] * 3
    np.testing.assert_allclose(DISTRIBUTIONS["checkerboard"].log_prob(points), expected)


@pytest.mark.parametrize("over_points", [lambda f: f, jax.vmap], ids=["array", "vmap"])
def test_memory_does_not_grow_with_the_quadrature(over_points):
    """10,000 points and their gradients, along 1024 nodes: not a fifth of the points × nodes matrix."""
    total = lambda z: jnp.sum(over_points(DISTRIBUTIONS["two-spirals"].log_prob)(z))
    compiled = jax.jit(jax.grad(total)).lower(jnp.zeros((10_000, 2))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10_000 * 1024 * 8 / 5


def test_entropy_is_a_number_inside_a_jit():
    entropy_on_grid.cache_clear()
    excess = jax.jit(lambda x: x - DISTRIBUTIONS["star"].entropy)(3.0)
    assert float(excess) == pytest.approx(3.0 - ENTROPIES["star"], abs=5e-5)


def test_a_flow_starts_from_a_distribution(key):
    flow = rf.StochasticFlow(
        rf.ItoSDE(lambda t, z: -z, lambda t, z: 0.1 * jnp.eye(2)), DISTRIBUTIONS["moons"]
    )
    path = flow.driver.path(jnp.zeros((6, 2)))  # dz/dt = −z: z(1) = z(0)/e
    x = samples("moons")[:64]
    given = jax.jit(flow.log_prob_given_path)(x / math.e, path)
    np.testing.assert_allclose(given, log_prob("moons")(x) + 2, rtol=0, atol=1e-4)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"jax\.random\.key"):
        DISTRIBUTIONS["moons"].sample(key=jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"\(\.\.\., 2\), got \(5, 3\)"):
        DISTRIBUTIONS["moons"].log_prob(jnp.zeros((5, 3)))
