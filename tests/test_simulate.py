"""Plain simulation: strong orders, the two calculi, and the limit that solvers on random paths reach."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import gbm_1d, gbm_2d, nonlinear_3d, ou_1d

import roughflow as rf

LEVELS = (4, 6, 8)
PATHS = 4000
SCHEMES = {
    "Euler-Maruyama": (rf.flow.EulerMaruyama(), 0.5),
    "Heun": (rf.flow.StratonovichHeun(), 1.0),
    "midpoint": (rf.flow.StratonovichMidpoint(), 1.0),
    "Milstein": (rf.flow.Milstein(), 1.0),
    "linearly implicit": (rf.flow.LinearlyImplicitEuler(), 0.5),
}
every_scheme = pytest.mark.parametrize(("scheme", "order"), SCHEMES.values(), ids=SCHEMES.keys())


def brownian(level, paths, noise_dimension, seed=0):
    """Increments over [0, 1] on 2^level steps."""
    normal = np.random.default_rng(seed).normal(size=(paths, 2**level, noise_dimension))
    return normal * 2 ** (-level / 2)


def coarsened(increments, level):
    paths, _, noise_dimension = increments.shape
    return jnp.asarray(increments.reshape(paths, 2**level, -1, noise_dimension).sum(axis=2))


def strong_order(sde, z0, truth, increments, scheme):
    """The slope of log E|error| at T = 1 against log dt, along the same Brownian paths."""
    errors = []
    for level in LEVELS:
        z = rf.simulate(sde, z0, increments=coarsened(increments, level), scheme=scheme)
        errors.append(np.mean(np.linalg.norm(z - truth, axis=-1)))
    return -np.polyfit(LEVELS, np.log2(errors), 1)[0]


# ------------------------------------------------------------------------------ strong orders


@every_scheme
def test_strong_order_on_geometric_brownian_motion(scheme, order):
    mu, sigma = 0.2, 0.8
    increments = brownian(8, PATHS, 1)
    truth = np.exp(mu - sigma**2 / 2 + sigma * increments.sum(axis=1))
    found = strong_order(gbm_1d(mu, sigma).ito, jnp.ones((PATHS, 1)), truth, increments, scheme)
    assert abs(found - order) < 0.15


def test_milstein_has_strong_order_one_for_diagonal_noise():
    rates, sigmas = np.array([0.2, -0.3]), np.array([0.8, 0.5])
    sde = rf.ItoSDE(lambda t, z: jnp.asarray(rates) * z, lambda t, z: jnp.diag(jnp.asarray(sigmas) * z))
    increments = brownian(8, PATHS, 2)
    truth = np.exp(rates - sigmas**2 / 2 + sigmas * increments.sum(axis=1))
    found = strong_order(sde, jnp.ones((PATHS, 2)), truth, increments, rf.flow.Milstein())
    assert abs(found - 1) < 0.15


def test_noise_that_does_not_commute():
    """dX = dB₁, dY = X ∘ dB₂: the Lévy area cannot be had from increments, so Heun's order is ½."""
    sde = rf.StratonovichSDE(
        lambda t, z: 0 * z,
        lambda t, z: jnp.stack([jnp.array([1.0, 0.0]), jnp.stack([jnp.zeros_like(z[0]), z[0]])]),
    )
    increments = brownian(12, 1000, 2)
    x = np.cumsum(increments[..., 0], axis=1) - 0.5 * increments[..., 0]
    truth = np.stack([increments[..., 0].sum(axis=1), np.sum(x * increments[..., 1], axis=1)], axis=-1)
    found = strong_order(sde, jnp.zeros((1000, 2)), truth, increments, rf.flow.StratonovichHeun())
    assert abs(found - 0.5) < 0.15
    with pytest.raises(ValueError, match=r"Milstein needs commutative noise.*StratonovichHeun") as caught:
        rf.simulate(sde, jnp.zeros((1000, 2)), increments=coarsened(increments, 4), scheme=rf.flow.Milstein())
    assert "\n" not in str(caught.value)


def test_milstein_refuses_noise_that_commutes_only_where_it_starts():
    """dX = dB₁, dY = X² dB₂ from X = 0, where (Dσ₂)σ₁ = 2X vanishes."""
    sde = rf.StratonovichSDE(
        lambda t, z: 0 * z,
        lambda t, z: jnp.stack([jnp.array([1.0, 0.0]), jnp.stack([jnp.zeros_like(z[0]), z[0] ** 2])]),
    )
    with pytest.raises(ValueError, match="Milstein needs commutative noise"):
        rf.simulate(sde, jnp.zeros((3, 2)), increments=jnp.ones((3, 4, 2)), scheme=rf.flow.Milstein())
    with pytest.raises(ValueError, match="Milstein needs commutative noise"):
        rf.sample_chain(
            rf.UnadjustedSampler(sde, 0.1, rf.flow.Milstein()),
            jnp.zeros(2),
            key=jax.random.key(0),
            num_steps=1,
        )


# ------------------------------------------------------------------------------ both calculi


@every_scheme
def test_either_form_of_an_sde_gives_the_same_steps(scheme, order):
    # Milstein's scheme is for noise that commutes.
    problem = gbm_2d() if isinstance(scheme, rf.flow.Milstein) else nonlinear_3d()
    z0 = jnp.asarray(problem.x)
    increments = coarsened(brownian(5, len(z0), 2), 5)
    forms = (problem.ito, problem.stratonovich)
    one, two = (rf.simulate(sde, z0, increments=increments, scheme=scheme) for sde in forms)
    assert np.max(np.abs(one - z0)) > 0.1
    np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-13)


def test_default_scheme_fits_the_calculus():
    problem = gbm_1d()
    increments = jnp.asarray(brownian(4, 3, 1))
    z0 = jnp.ones((3, 1))
    for sde, scheme in (
        (problem.ito, rf.flow.EulerMaruyama()),
        (problem.stratonovich, rf.flow.StratonovichHeun()),
    ):
        default, named = (rf.simulate(sde, z0, increments=increments, scheme=s) for s in (None, scheme))
        np.testing.assert_array_equal(default, named)


# --------------------------------------------------------------------- trajectories and batches


def test_trajectory_starts_at_the_start_and_ends_at_the_end(key):
    problem = nonlinear_3d()
    z0 = jax.random.normal(key, (2, 4, 3))
    end = rf.simulate(problem.ito, z0, key=key, t1=0.7, steps=10)
    whole = rf.simulate(problem.ito, z0, key=key, t1=0.7, steps=10, trajectory=True)
    assert whole.shape == (2, 4, 11, 3)
    np.testing.assert_array_equal(whole[..., 0, :], z0)
    np.testing.assert_array_equal(whole[..., -1, :], end)
    chain = rf.sample_chain(problem.ito, z0[0], key=key, num_steps=10, dt=0.07)
    assert chain.samples.shape == whole[0, :, 1:].shape  # the same axes


def test_batch_shapes_and_given_increments(key):
    """A batch of any shape is its samples one by one on their own increments."""
    sde = nonlinear_3d().ito
    z0 = jax.random.normal(key, (2, 4, 3))
    increments = 0.3 * jax.random.normal(key, (2, 4, 10, 2))
    together = rf.simulate(sde, z0, increments=increments, t1=0.7)
    assert together.shape == (2, 4, 3)
    alone = rf.simulate(sde, z0[1, 2], increments=increments[1, 2], t1=0.7)
    np.testing.assert_allclose(together[1, 2], alone, rtol=1e-12)


def test_euler_maruyama_by_hand():
    """Times included: the drift here is sin t."""
    sde = rf.ItoSDE(lambda t, z: jnp.sin(t) * z, lambda t, z: jnp.stack([z, jnp.ones(1)], axis=1))
    increments = np.array([[0.1, -0.2], [0.3, 0.5], [-0.4, 0.0]])
    z, expected = 1.0, [1.0]
    for k, (a, b) in enumerate(increments):
        z = z + np.sin(0.5 * k) * z * 0.5 + z * a + b
        expected.append(z)
    got = rf.simulate(sde, jnp.ones(1), increments=jnp.asarray(increments), t1=1.5, trajectory=True)
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-13)


def test_a_key_draws_increments_of_the_right_size(key):
    """Brownian motion at t1 = 2.5 has variance 2.5 and its two components are independent."""
    still = rf.ItoSDE(lambda t, z: 0 * z, lambda t, z: jnp.eye(2))
    z = np.asarray(rf.simulate(still, jnp.zeros((20_000, 2)), key=key, t1=2.5, steps=7))
    covariance = np.cov(z, rowvar=False)
    error = 3 * 2.5 * np.sqrt((1 + np.eye(2)) / 20_000)
    assert np.all(np.abs(covariance - 2.5 * np.eye(2)) < error)
    again = rf.simulate(still, jnp.zeros((20_000, 2)), key=key, t1=2.5, steps=7)
    np.testing.assert_array_equal(z, again)


def test_float32_in_float32_out(key):
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2, dtype=z.dtype))
    assert rf.simulate(sde, jnp.zeros((3, 2), jnp.float32), key=key, steps=4).dtype == jnp.float32


# --------------------------------------------------------------- the same limit by random ODEs


METHODS = [diffrax.Heun(), diffrax.Midpoint(), rf.flow.RK4(), diffrax.Dopri5(), diffrax.Tsit5()]
QUICK = ("Heun-KarhunenLoeve", "Dopri5-PiecewiseLinear")


@pytest.mark.parametrize(
    ("method", "driver"),
    [
        pytest.param(method, driver, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for method in METHODS
        for driver in (rf.KarhunenLoeve(6), rf.PiecewiseLinear(64))
        for name in [f"{type(method).__name__}-{type(driver).__name__}"]
    ],
)
def test_every_fixed_grid_method_has_the_mean_of_the_ito_equation(method, driver, key):
    """E Z₁ = e^μ for σ = 1, at the default number of steps; Euler's method would lose two fifths."""
    mu, count = 0.1, 5000
    sde = gbm_1d(mu, 1.0).ito
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1), 1e-3), 1.0, driver, integrator=rf.FixedGrid(method))
    z = flow.sample(key=key, shape=(count,))
    assert abs(np.mean(z) - np.exp(mu)) < 3 * np.std(z) / np.sqrt(count)


def test_euler_is_refused_on_a_random_path():
    with pytest.raises((TypeError, ValueError), match=r"Euler.*different equation") as caught:
        rf.FixedGrid(diffrax.Euler())
    assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="explicit Runge–Kutta"):
        rf.FixedGrid(diffrax.Kvaerno5())


def test_output_times_and_a_later_start(key):
    """dZ = 2t dt + dB from 1 at t0 = 1 has mean t² and variance t − 1; output times need not be steps."""
    sde = rf.ItoSDE(lambda t, z: 2 * t * jnp.ones(1), lambda t, z: jnp.eye(1))
    times = np.array([1.0, 1.37, 2.5, 3.0])
    z = np.asarray(rf.simulate(sde, jnp.ones((5000, 1)), key=key, t0=1.0, t1=3.0, steps=200, saveat=times))
    assert z.shape == (5000, 4, 1)
    np.testing.assert_allclose(z[..., 0].mean(axis=0), times**2, atol=0.05)
    np.testing.assert_allclose(z[..., 0].var(axis=0), times - 1, rtol=0.05, atol=1e-12)
    whole = rf.simulate(sde, jnp.ones((5, 1)), key=key, t0=1.0, t1=3.0, steps=4, trajectory=True)
    some = rf.simulate(sde, jnp.ones((5, 1)), key=key, t0=1.0, t1=3.0, steps=4, saveat=[1.5, 3.0])
    np.testing.assert_allclose(some, whole[:, [1, 4]], rtol=1e-12)


def test_output_times_end_at_t1_in_single_precision(key):
    """0.8 is larger once rounded."""
    with jax.enable_x64(False):
        z = rf.simulate(ou_1d().ito, np.zeros(1), key=key, t1=0.8, steps=4, saveat=[0.1, 0.8])
    assert z.shape == (2, 1)


def test_steps_far_from_time_zero_in_single_precision(key):
    """The times are rounded, to 128 here, but not the lengths of the steps."""
    with jax.enable_x64(False):
        early, late = (
            rf.simulate(ou_1d().ito, np.ones(1), key=key, t0=t0, t1=t0 + 1, steps=4) for t0 in (0.0, 1.7e9)
        )
    np.testing.assert_allclose(early, late, rtol=1e-6)


def test_terms_for_diffrax_give_the_same_path(key):
    sde, steps = gbm_2d().ito, 16
    columns = rf.StochasticFlow(sde, rf.Normal(jnp.ones(2))).noise_dimension
    control = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-4, shape=(columns,), key=key)
    times = jnp.linspace(0, 1, steps + 1)
    values = jax.vmap(control.evaluate)(times)
    ours = rf.simulate(sde, jnp.ones(2), increments=jnp.diff(values, axis=0), scheme=rf.flow.EulerMaruyama())
    terms = rf.to_diffrax(sde, control)
    theirs = diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 1 / steps, jnp.ones(2)).ys[-1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
