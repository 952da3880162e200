"""SDEs that contract strongly: backwards a solve spreads, so that paths are bent to x, forwards."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from problems import made, ou_distribution
from roughflow.density.estimators import _remedies
from roughflow.density.estimators._weights import EstimatorRun
from roughflow.density.surface import Latent, Target, Turned, end_along
from roughflow.density.surface._end import find_on_line, solve_near

import roughflow as rf

X = jnp.array([[-0.7], [0.6]])


class Wells(eqx.Module):
    """Drift `depth` sin 3z − `rate` z."""

    depth: float
    rate: float

    def __call__(self, t, z):
        return self.depth * jnp.sin(3 * z) - self.rate * z


class Ripples(eqx.Module):
    """Noise 1 + `height` sin 4z, from one source or several."""

    height: float
    sources: int = eqx.field(static=True, default=1)

    def __call__(self, t, z):
        size = (1 + self.height * jnp.sin(4 * z))[:, None]
        return jnp.broadcast_to(size / self.sources**0.5, (1, self.sources))


def contracting(depth=3.0, rate=0.0, height=0.7, scale=1.0, sources=1):
    sde = rf.ItoSDE(Wells(depth, rate), Ripples(height, sources))
    grid = rf.FixedGrid(steps=16)
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1), scale), driver=rf.KarhunenLoeve(2), integrator=grid)


def by_quadrature(flow, points, size=41):
    """p(x) = ∫∫ φ(z₀) φ(ω₁) φ(ω₀) / |∂Z/∂ω₀| over start and second coefficient, ω₀ by bisection: Z grows with
    it. By the trapezoidal rule, at each of the points."""
    side = np.linspace(-5, 5, size)
    start, second = (jnp.asarray(a.ravel())[:, None] for a in np.meshgrid(side, side))

    def end(first):
        path = flow.driver.path(jnp.stack([first, second], axis=1), flow.t1)
        return flow.push_forward(start, path)[0]

    @jax.jit
    def terms(x):
        def halve(_, sides):
            middle = 0.5 * (sides[0] + sides[1])
            below = end(middle) < x
            return jnp.where(below, middle, sides[0]), jnp.where(below, sides[1], middle)

        far = jnp.full_like(start, 8.0)
        root = jax.lax.fori_loop(0, 36, halve, (-far, far))[0]
        value, slope = jax.jvp(end, (root,), (jnp.ones_like(root),))
        logpdf = jax.scipy.stats.norm.logpdf
        density = logpdf(root) + logpdf(start) + logpdf(second) - jnp.log(jnp.abs(slope))
        return jnp.where(jnp.abs(value - x) < 1e-6, density, -jnp.inf)

    sums = [scipy.special.logsumexp(np.asarray(terms(x[0]))) for x in points]
    return np.array(sums) + 2 * np.log(side[1] - side[0])


def test_bent_paths_have_the_density():
    """Wells with slopes of nine. The density of the particles' coordinates and x, summed over the former by
    the trapezoidal rule, is that of x."""
    flow, side = contracting(), jnp.linspace(-5, 5, 21)
    u = jnp.stack(jnp.meshgrid(side, side), axis=-1).reshape(-1, 2)
    distribution = rf.Prior().distribution(Latent(flow), X, None, None)
    log_joint = eqx.filter_jit(_remedies.BentParticles().log_joint)
    joint = log_joint(flow, Target(X, None), distribution, jnp.broadcast_to(u, (2, *u.shape)), None)
    found = scipy.special.logsumexp(np.asarray(joint), axis=1) + 2 * np.log(side[1] - side[0])
    np.testing.assert_allclose(found, by_quadrature(flow, X, size=21), atol=1e-3)


def test_where_paths_may_be_missed_that_is_told():
    estimate = dataclasses.replace(made(jnp.zeros((64, 2))), steep=np.array([False, True]))
    np.testing.assert_array_equal(estimate.suspect, [False, True])
    assert "1 lie where the SDE contracts strongly" in str(estimate.warning)


@pytest.mark.slow
def test_wells_are_estimated_forwards(key):
    """Wells with slopes of nine: backwards a solve spreads by e⁹, and particles pulled back miss paths."""
    flow = contracting()
    estimate = flow.estimate(X, key=key, solver=False)
    assert np.all(estimate.tempered)
    assert not np.any(estimate.suspect)
    assert np.all(np.abs(estimate.log_prob - by_quadrature(flow, X)) < 3 * estimate.total_error)
    assert np.all(estimate.total_error < 0.5)
    pulled = EstimatorRun(rf.Tempered(), flow, X, key)
    assert np.all(_remedies.uphill(pulled.distribution)[:2])


@pytest.mark.slow
def test_wells_inside_jit_and_their_gradient(key):
    def log_prob(depth):
        return contracting(depth).estimate(X, key=key, estimator=rf.Tempered(256), solver=False).log_prob

    value, slope = jax.jit(lambda depth: jax.jvp(log_prob, (depth,), (1.0,)))(3.0)
    np.testing.assert_allclose(value, log_prob(3.0), rtol=1e-6)
    quadrature = lambda depth: by_quadrature(contracting(depth), X)
    np.testing.assert_allclose(slope, (quadrature(3.01) - quadrature(2.99)) / 0.02, atol=0.1)


@pytest.mark.slow
def test_where_paths_cannot_be_bent_that_is_told(key):
    """From two sources the end of the noise is not determined by that of the path."""
    estimate = contracting(sources=2).estimate(X[1:], key=key, solver=False)
    assert np.all(estimate.steep)
    assert np.all(estimate.suspect)
    assert "contracts strongly" in str(estimate.warning)


@pytest.mark.slow
def test_a_linear_sde_that_contracts_is_exact(key):
    """Backwards the solver's errors grow by e⁹, forwards they do not."""
    estimate = contracting(0.0, 9.0, 0.0, 1.0).estimate(X, key=key, solver=False)
    np.testing.assert_allclose(estimate.standard_error, 0, atol=5e-3)
    assert not np.any(estimate.steep)
    truth = ou_distribution(9.0, 1.0, 0.0, 1.0, driver=rf.KarhunenLoeve(2)).logpdf(np.asarray(X))
    np.testing.assert_allclose(estimate.log_prob, np.ravel(truth), atol=2e-3)
    assert not np.any(contracting(0.0, 1.0, 0.0, 0.01).estimate(X, key=key, solver=False).steep)


@pytest.mark.slow
def test_several_ends_of_the_noise_are_told(monkeypatch, key):
    """A drift that turns the faster the further out: x is reached with any number of turns. Paths pulled back
    see them all; bent ones do not, and say so."""
    drift = lambda t, z: 3 * jnp.sum(z**2) * jnp.stack([-z[1], z[0]])
    flow = rf.StochasticFlow(
        rf.ItoSDE(drift, lambda t, z: jnp.eye(2)), rf.Normal(jnp.zeros(2), 0.5), driver=rf.KarhunenLoeve(2)
    )
    x = jnp.array([[2.2, 0.0]])
    run = EstimatorRun(rf.Tempered(), flow, x, key)
    monkeypatch.setattr(_remedies, "UPHILL", 0.0)
    distribution = jax.tree.map(lambda a: a[:1], run.distribution)
    distribution = eqx.tree_at(lambda d: d.poor, distribution, jnp.ones(1, bool))
    improved = _remedies.BentParticles().improve(flow, Target(x, None), distribution, run.keys[:1], 64)
    assert np.all(improved.doubt)


@pytest.mark.parametrize(
    "driver", [rf.KarhunenLoeve(3), rf.PiecewiseLinear(4), rf.FractionalBrownian(0.3, 4)], ids=repr
)
def test_coordinates_begin_with_the_end_of_the_noise(driver, key):
    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    latent = Latent(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), driver=driver))
    turned = Turned(latent, jnp.float64)
    xi = jax.random.normal(key, (5, latent.size))
    np.testing.assert_allclose(turned.back(turned.turn(xi)), xi, atol=1e-14)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned.turn(xi), axis=1), jnp.linalg.norm(xi, axis=1), rtol=1e-14
    )
    size = jnp.linalg.norm(driver.integrals(jnp.ones(())))
    end = driver.value(jnp.ones(()), latent.coefficients(xi))
    np.testing.assert_allclose(size * turned.turn(xi)[:, :2], end, atol=1e-13)
    np.testing.assert_allclose(turned.directions, turned.back(jnp.eye(latent.size))[:2], atol=1e-14)


def test_a_root_on_a_line_is_found_and_that_there_is_none(key):
    """Where the end hardly moves for long and then at once, as between wells."""
    latent = Latent(contracting())
    delta = jax.random.normal(key, (40, latent.size)).at[:, 1].set(0)
    along = jnp.zeros((40, 1, latent.size)).at[:, :, 1].set(1)
    x = jnp.concatenate([jnp.linspace(-2.5, 2.5, 39), jnp.array([500.0])])[:, None]
    r, found = find_on_line(latent, Target(x, None), along, delta, delta)
    end = lambda r: latent.end(delta + r * along[:, 0], None)[0]
    np.testing.assert_array_equal(found, ((end(-32.0) <= x) & (x <= end(32.0)))[:, 0])
    assert not found[39]
    near = found & (np.abs(r[:, 0]) < 8)  # further out the steps are too long for the ends to be smooth
    assert np.sum(near) > 25
    np.testing.assert_allclose(end(r)[near], x[near], atol=1e-9)


def test_a_root_does_not_depend_on_what_is_searched_for_beside_it(key):
    """Searches that have failed do not go on for as long as others do."""
    latent, size = Latent(contracting()), 1024
    delta = jax.random.normal(key, (size, latent.size)).at[:, 1].set(0)
    along = jnp.zeros((size, 1, latent.size)).at[:, :, 1].set(1)
    x = jnp.linspace(-2.5, 2.5, size)[:, None]
    begin = 2 * jax.random.normal(jax.random.fold_in(key, 1), (size, 1))
    search = lambda given: solve_near(latent, Target(given[0], None), *given[1:])[::2]
    given = (x, along, delta, begin)
    (xi, found), (alone, found_alone) = jax.jit(lambda: (search(given), one_by_one(search, given)))()
    np.testing.assert_array_equal(found, found_alone)
    assert 0.2 < np.mean(found) < 0.8
    np.testing.assert_allclose(xi[found], alone[found], atol=1e-12)


def one_by_one(function, batch):
    alone = lambda entry: jax.tree.map(lambda a: a[0], function(jax.tree.map(lambda a: a[None], entry)))
    return jax.lax.map(alone, batch)


INTEGRATORS = {
    "backpropagation": rf.FixedGrid(steps=16),
    "constant memory": rf.FixedGrid(steps=16, gradient=rf.ConstantMemory()),
    "adaptive": rf.Adaptive(rtol=1e-8, atol=1e-8),
}


def along_the_start(name, xi):
    """How ends move with ξ₁, and the ends' map."""
    flow = rf.StochasticFlow(
        rf.ItoSDE(Wells(0.5, 0.8), Ripples(0.3)),
        rf.Normal(jnp.zeros(1)),
        1.0,
        rf.KarhunenLoeve(3),
        integrator=INTEGRATORS[name],
    )
    directions = jnp.eye(4)[None, :1].repeat(2, axis=0)
    end = lambda h: Latent(flow).end(xi + h * directions[:, 0], None)[0]
    return end_along(Latent(flow), Target(X, None), directions, xi)[..., 0], end


@pytest.mark.parametrize(
    "name", ["backpropagation", "constant memory", pytest.param("adaptive", marks=pytest.mark.slow)]
)
def test_a_path_can_be_bent_whatever_solves_it(name, key):
    """Not every solve has a forward mode."""
    along, end = along_the_start(name, jax.random.normal(key, (2, 4)))
    np.testing.assert_allclose(along, (end(1e-4) - end(-1e-4)) / 2e-4, rtol=1e-4)


def test_a_second_derivative_of_an_adaptive_solve_is_refused(key):
    """XLA would not finish compiling it."""
    slope = jax.grad(lambda xi: jnp.sum(along_the_start("adaptive", xi)[0]))
    with pytest.raises(TypeError, match=r"give the flow an rf\.FixedGrid"):
        jax.make_jaxpr(slope)(jax.random.normal(key, (2, 4)))
