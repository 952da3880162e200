"""Given a path, an SDE is a normalizing flow: densities, inverses, batches, end times."""

from types import SimpleNamespace

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import PROBLEMS, gbm_1d, gbm_2d, nonlinear_3d, ou_1d
from scipy import stats

import roughflow as rf

DRIVERS = [rf.KarhunenLoeve(5), rf.PiecewiseLinear([0.0, 0.15, 0.5, 0.7, 1.0])]
FINE = rf.FixedGrid(steps=120)


@eqx.filter_jit
def density_two_ways(flow, x, path):
    """log p(x | path), and the same from the dense Jacobian of the inverse map."""
    inverse = lambda y: flow.pull_back(y, path)[0]
    log_det = jax.vmap(lambda y: jnp.linalg.slogdet(jax.jacfwd(inverse)(y))[1])(x)
    z, _ = flow.pull_back(x, path)
    return flow.log_prob_given_path(x, path), flow.base.log_prob(z) + log_det


# Problems that are like another, and the second driver, have their turn with `make test-all`.
ALIKE = ("OU 1-D", "OU 4-D, 4x3 noise", "Brownian motion with drift", "GBM 1-D", "GBM 2-D, correlated")


@pytest.mark.parametrize(
    "driver",
    [DRIVERS[0], *(pytest.param(driver, marks=pytest.mark.slow) for driver in DRIVERS[1:])],
    ids=lambda d: type(d).__name__,
)
@pytest.mark.parametrize(
    "problem",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.name in ALIKE)) for p in PROBLEMS],
    ids=lambda p: p.name,
)
def test_density_is_base_plus_dense_log_determinant(problem, driver, key):
    x = jnp.asarray(problem.x)
    flow = rf.StochasticFlow(problem.ito, problem.base, problem.t1, driver, integrator=FINE)
    path = flow.sample_path(key=key)
    got, dense = density_two_ways(flow, x, path)
    np.testing.assert_allclose(got, dense, rtol=0, atol=1e-7)
    other = rf.StochasticFlow(problem.stratonovich, problem.base, problem.t1, driver, integrator=FINE)
    np.testing.assert_allclose(other.log_prob_given_path(x, path), got, rtol=0, atol=1e-7)


ROUND_TRIPS = {
    "fixed": rf.FixedGrid(steps=200),
    "reversible": rf.FixedGrid(steps=200, gradient=rf.flow.ConstantMemory()),
    "adaptive": rf.Adaptive(rtol=1e-11, atol=1e-11),
}


@pytest.mark.parametrize(
    ("integrator", "driver"),
    [
        pytest.param(
            ROUND_TRIPS[name],
            driver,
            id=f"{name}-{type(driver).__name__}",
            marks=[pytest.mark.slow] * ((name, driver) != ("fixed", DRIVERS[1])),
        )
        for name in ROUND_TRIPS
        for driver in DRIVERS
    ],
)
def test_forward_and_backward_invert_each_other(integrator, driver, key):
    problem = nonlinear_3d()
    flow = rf.StochasticFlow(problem.ito, problem.base, problem.t1, driver, integrator=integrator)
    x, joint, path = flow.sample_and_log_prob_given_path(key=key, shape=(20,))
    z0, _ = flow.pull_back(x, path)
    again, _ = flow.push_forward(z0, path)
    np.testing.assert_allclose(again, x, rtol=0, atol=1e-8)
    np.testing.assert_allclose(joint, flow.log_prob_given_path(x, path), rtol=0, atol=1e-8)


def test_geometric_brownian_motion_given_a_path_is_exact(key):
    """Z_T = z₀ exp((μ − σ²/2) T + σ B_T): the density given the path in closed form."""
    problem = gbm_1d(mu=0.3, sigma=0.6)
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, integrator=FINE)
    path = flow.sample_path(key=key)
    growth = np.exp(0.3 - 0.18 + 0.6 * path.evaluate(1.0))
    expected = stats.norm.logpdf(problem.x / growth, 2.0, 0.1) - np.log(growth)
    np.testing.assert_allclose(flow.log_prob_given_path(problem.x, path), expected[:, 0], rtol=1e-9)


def test_average_over_paths_is_the_density_of_the_sde(key):
    """Ornstein–Uhlenbeck: E p(x | path) is the normal density; also catches a wrong driver scale."""
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, rf.PiecewiseLinear(32))
    paths = flow.sample_path(key=key, shape=(40_000,))
    given = np.exp(flow.log_prob_given_path(jnp.array([0.2]), paths))
    variance = 0.25 * np.exp(-4.0) + 1.3**2 / 4 * (1 - np.exp(-4.0))
    truth = stats.norm.pdf(0.2, np.exp(-2.0), np.sqrt(variance))
    assert abs(given.mean() - truth) < 3 * given.std() / np.sqrt(given.size) + 1e-3


@pytest.mark.slow  # with `make test`, densities given paths average to it
def test_samples_follow_the_distribution_of_the_sde(key):
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, rf.KarhunenLoeve(20))
    x = np.asarray(flow.sample(key=key, shape=(20_000,)))[:, 0]
    variance = 0.25 * np.exp(-4.0) + 1.3**2 / 4 * (1 - np.exp(-4.0))
    assert stats.kstest((x - np.exp(-2.0)) / np.sqrt(variance), "norm").pvalue > 1e-3


def test_batches_broadcast_and_agree_with_single_points(key):
    problem = gbm_2d()
    flow = rf.StochasticFlow(problem.ito, problem.base, integrator=rf.FixedGrid(steps=20))
    paths = flow.sample_path(key=key, shape=(4,))
    x = jax.random.normal(key, (3, 1, 2))
    table = flow.log_prob_given_path(x, paths)
    assert table.shape == (3, 4)
    lone = eqx.tree_at(lambda p: p.coefficients, paths, paths.coefficients[2])
    np.testing.assert_allclose(table[1, 2], flow.log_prob_given_path(x[1, 0], lone), rtol=1e-12)
    np.testing.assert_allclose(table[:, 2], flow.log_prob_given_path(x[:, 0], lone), rtol=1e-12)


def test_blocks_of_a_large_batch_agree_with_small_batches(monkeypatch, key):
    """Ends, keys and paths of their own, in blocks that do not come out even: values and gradients."""
    monkeypatch.setattr("roughflow.flow._fixed_grid.BLOCK_SIZE", 4)
    problem, integrator = gbm_2d(), rf.FixedGrid(rf.flow.RK4(), steps=8)
    flow = rf.StochasticFlow(
        problem.ito, problem.base, divergence=rf.HutchinsonDivergence(), integrator=integrator
    )
    x = 1 + 0.1 * jax.random.normal(key, (11, 2))
    path, keys = flow.sample_path(key=key, shape=(11,)), jax.random.split(key, 11)
    stops = jnp.linspace(0.2, 1.0, 11)

    @jax.jit
    def log_probs(x, path, stops, keys):
        def loss(x):
            values = flow.log_prob_given_path(x, path, t1=stops, key=keys)
            return jnp.sum(jnp.sin(values)), values

        slope, values = jax.grad(loss, has_aux=True)(x)
        return jnp.concatenate([slope, values[:, None]], axis=1)

    together = log_probs(x, path, stops, keys)
    for some in (slice(0, 6), slice(5, 11)):
        paths = eqx.tree_at(lambda p: p.coefficients, path, path.coefficients[some])
        apart = log_probs(x[some], paths, stops[some], keys[some])
        np.testing.assert_allclose(together[some], apart, rtol=1e-10)


@pytest.mark.parametrize(
    "driver", [pytest.param(DRIVERS[0], marks=pytest.mark.slow), DRIVERS[1]], ids=lambda d: type(d).__name__
)
@pytest.mark.parametrize(
    "integrator",
    [rf.FixedGrid(steps=100), pytest.param(rf.Adaptive(rtol=1e-10, atol=1e-10), marks=pytest.mark.slow)],
    ids=["fixed", "adaptive"],
)
def test_per_sample_end_times(integrator, driver, key):
    """Stopping along a path, and a horizon per path, agree with one solve for each."""
    problem = nonlinear_3d()
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, driver, integrator=integrator)
    x = jnp.asarray(problem.x)
    stops = jnp.array([0.3, 0.8])
    path = flow.sample_path(key=key)
    together = flow.log_prob_given_path(x, path, t1=stops)
    apart = [flow.log_prob_given_path(x[i], path, t1=stops[i]) for i in range(2)]
    np.testing.assert_allclose(together, jnp.stack(apart), rtol=0, atol=1e-7)

    paths = flow.sample_path(key=key, shape=(2,), t1=stops)
    together = flow.log_prob_given_path(x, paths)
    for i in range(2):
        alone = driver.path(paths.coefficients[i], stops[i])
        np.testing.assert_allclose(together[i], flow.log_prob_given_path(x[i], alone), atol=1e-7)


def test_stopping_a_path_is_the_semigroup(key):
    """A solve to T equals a solve to t followed by one on the rest of the path (drift free of time)."""
    flow = rf.StochasticFlow(gbm_1d().ito, gbm_1d().base, 2.0, rf.PiecewiseLinear(4), integrator=FINE)
    path = flow.sample_path(key=key)
    half, log_half = flow.push_forward(jnp.array([2.0]), path, t1=1.0)
    rest = rf.PiecewiseLinear(2).path(path.coefficients[2:], 1.0)
    end, log_rest = flow.push_forward(half, rest)
    whole, log_whole = flow.push_forward(jnp.array([2.0]), path)
    np.testing.assert_allclose(end, whole, rtol=1e-10)
    np.testing.assert_allclose(log_half + log_rest, log_whole, rtol=1e-10)


def test_with_driver_keeps_the_model(key):
    problem = gbm_1d()
    trained = rf.StochasticFlow(problem.ito, problem.base, driver=rf.KarhunenLoeve(6))
    tested = trained.with_driver(rf.PiecewiseLinear(50))
    assert tested.sample_path(key=key).coefficients.shape == (50, 1)
    assert eqx.tree_equal((tested.sde, tested.base), (trained.sde, trained.base))


def test_any_base_with_two_methods_will_do(key):
    class Laplace(eqx.Module):
        def sample(self, *, key, shape=()):
            return jax.random.laplace(key, (*shape, 1))

        def log_prob(self, z):
            return jnp.sum(jax.scipy.stats.laplace.logpdf(z))

    still = rf.ItoSDE(lambda t, z: 0 * z, lambda t, z: jnp.zeros((1, 1)))
    flow = rf.StochasticFlow(still, Laplace())
    x, log_prob, _ = flow.sample_and_log_prob_given_path(key=key, shape=(5,))
    np.testing.assert_allclose(log_prob, stats.laplace.logpdf(x[:, 0]), rtol=1e-12)


def test_same_key_same_numbers(key):
    problem = nonlinear_3d()
    flow = rf.StochasticFlow(problem.ito, problem.base)
    np.testing.assert_array_equal(flow.sample(key=key, shape=(7,)), flow.sample(key=key, shape=(7,)))
    assert not np.allclose(flow.sample(key=key, shape=(7,)), flow.sample(key=jax.random.key(1), shape=(7,)))


@pytest.mark.parametrize(
    "integrator",
    [
        rf.FixedGrid(steps=20),
        pytest.param(rf.FixedGrid(steps=20, gradient=rf.flow.ConstantMemory()), marks=pytest.mark.slow),
        pytest.param(rf.Adaptive(), marks=pytest.mark.slow),
    ],
    ids=["fixed", "reversible", "adaptive"],
)
def test_float32_throughout(integrator, key):
    """A float32 model and float32 data give float32 answers, close to the float64 ones."""
    sde = rf.ItoSDE(rf.MLP(2, 2, 8, 1, key=key), rf.FullDiffusion(2, 8, key=key))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), integrator=integrator)
    path = flow.sample_path(key=key, shape=(6,))
    x = jax.random.normal(key, (6, 2))
    to32 = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, tree)
    single = to32(flow).log_prob_given_path(x.astype(jnp.float32), to32(path))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, flow.log_prob_given_path(x, path), rtol=0, atol=2e-4)


def test_sampling_stops_where_told_along_a_given_path_and_along_its_own(key):
    flow = rf.StochasticFlow(gbm_1d().ito, rf.Normal(jnp.array([2.0]), 1e-9), 1.0)
    path = flow.sample_path(key=key)
    expected, _ = flow.push_forward(jnp.array([2.0]), path, t1=0.4)
    np.testing.assert_allclose(flow.sample(key=key, path=path, t1=0.4), expected, rtol=1e-6)
    x, _, _ = flow.sample_and_log_prob_given_path(key=key, path=path, t1=0.4)
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    x, _, path = flow.sample_and_log_prob_given_path(key=key, t1=0.4)
    assert path.t1 == 1.0
    np.testing.assert_array_equal(flow.sample(key=key, t1=0.4), x)
    np.testing.assert_allclose(flow.push_forward(jnp.array([2.0]), path, t1=0.4)[0], x, rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "order"),
    [
        (diffrax.Heun(), 2),
        pytest.param(diffrax.Midpoint(), 2, marks=pytest.mark.slow),
        pytest.param(rf.flow.RK4(), 4, marks=pytest.mark.slow),
        pytest.param(diffrax.Dopri5(), 5, marks=pytest.mark.slow),
    ],
    ids=["heun", "midpoint", "rk4", "dopri5"],
)
def test_order_of_every_fixed_grid_method(method, order, key):
    """Halving the step divides the error of log p by 2^order."""
    sde = rf.StratonovichSDE(lambda t, z: jnp.sin(t + z), lambda t, z: jnp.cos(z)[:, None])
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2))
    path = flow.sample_path(key=key)

    def log_prob(method, steps):
        solver = rf.FixedGrid(method, steps=steps)
        return eqx.tree_at(lambda f: f.integrator, flow, solver).log_prob_given_path(x, path)

    x = jnp.linspace(-3, 3, 64)[:, None]  # many points, since one error may pass through zero
    steps = {2: 64, 4: 16, 5: 12, 6: 8}[order]
    truth = log_prob(diffrax.Dopri8(), 100)
    coarse, fine = (np.sqrt(np.mean((log_prob(method, n) - truth) ** 2)) for n in (steps, 2 * steps))
    assert abs(np.log2(coarse / fine) - order) < 0.35


@pytest.mark.parametrize("driver", [rf.KarhunenLoeve(3), rf.PiecewiseLinear(3)], ids=["smooth", "pieces"])
def test_steps_that_shrink_towards_the_end(driver, key):
    """Even in u where 1 − s = (1 − u)², and no step crosses a jump of the path's slope."""
    path = driver.sample(key=key)
    times = np.asarray(rf.FixedGrid(steps=6, late=2.0).grid(path, None))
    knots = np.concatenate([[0.0], driver.jumps, [1.0]])
    assert np.all(np.isin(knots, times))
    even = 1 - np.sqrt(1 - times)
    each = 6 // (len(knots) - 1)
    for i in range(len(knots) - 1):
        inside = even[each * i : each * (i + 1) + 1]
        np.testing.assert_allclose(np.diff(inside), (inside[-1] - inside[0]) / each, atol=1e-9)
    plain = rf.FixedGrid(steps=6).grid(path, None)
    np.testing.assert_allclose(plain, np.arange(7) / 6, atol=1e-15)
    assert rf.FixedGrid(steps=6, late=2.0).finer(driver, 1).late == 2.0


@pytest.mark.slow
def test_noise_that_fades_as_a_root_costs_less_order_on_late_steps(key):
    """Its error is that of the last step, h^3/2: h is 1/n with even steps, 1/n² with late ones."""
    faded = rf.sde.FadingDiffusion(lambda t, z: jnp.cos(z)[:, None])
    sde = rf.StratonovichSDE(lambda t, z: jnp.sin(t + z), faded)
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2))
    path, x = flow.sample_path(key=key), jnp.linspace(-3, 3, 64)[:, None]

    def log_prob(steps, late):
        solver = rf.FixedGrid(rf.flow.RK4(), steps=steps, late=late)
        return eqx.tree_at(lambda f: f.integrator, flow, solver).log_prob_given_path(x, path)

    truth = log_prob(400, 2.0)
    error = {
        late: [np.sqrt(np.mean((log_prob(n, late) - truth) ** 2)) for n in (16, 32)] for late in (1.0, 2.0)
    }
    order = {late: np.log2(coarse / fine) for late, (coarse, fine) in error.items()}
    np.testing.assert_allclose([order[1.0], order[2.0]], [1.5, 3.0], atol=0.2)
    assert error[2.0][1] < 0.05 * error[1.0][1]


def test_known_values_inside_a_jit_are_checked_without_tracing(key):
    """x and an end time that a jitted function closes over are known, and must not become tracers."""
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base)
    path, x = flow.sample_path(key=key), jnp.asarray(problem.x)
    inside = jax.jit(lambda: flow.log_prob_given_path(x, path, t1=0.5))()
    np.testing.assert_allclose(inside, flow.log_prob_given_path(x, path, t1=0.5), rtol=1e-12)


def one_point(*, key, shape=()):
    return jax.random.normal(key, (2,))


def points(*, key, shape=()):
    return jax.random.normal(key, (*shape, 2))


@pytest.mark.parametrize(
    ("sample", "log_prob", "message"),
    [
        (
            one_point,
            lambda z: -0.5 * jnp.sum(z**2),
            r"base.sample must return shape \(2, 2\) for shape=\(2,\)",
        ),
        (points, lambda z: -0.5 * z**2, r"base.log_prob must return one number for a point"),
    ],
    ids=["shape ignored", "components not summed"],
)
def test_a_base_of_the_users_is_checked(sample, log_prob, message):
    base = SimpleNamespace(sample=sample, log_prob=log_prob)
    with pytest.raises(ValueError, match=message):
        rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2)), base)
