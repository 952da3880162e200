"""Short transitions by paths, and long ones by everything else, against references that know no paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fokker_planck import transition_density
from scipy import integrate, linalg, stats

import roughflow as rf
from roughflow._programs import jit
from roughflow.transition import InCoordinates, Transition, curvature, short_time

SWIRL = np.array([[-0.2, -1.1], [1.1, -0.2]])
START = np.array([1.0, 0.0])
LOG_PROBS = jit(lambda base, x: jax.vmap(base.log_prob)(x), level=1)


def turned_noise(t, z):
    """0.4 times a rotation that depends on the state: isotropic, so in the Itô sense it changes nothing."""
    cos, sin = jnp.cos(2.6 * z[0]), jnp.sin(2.6 * z[0])
    return 0.4 * jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])


TURNED = rf.ItoSDE(lambda t, z: jnp.asarray(SWIRL, z.dtype) @ z, turned_noise)


def turned_log_prob(x, dt, start=START):
    """That of the linear SDE with the noise 0.4 dB."""
    spread = 0.4 * np.sqrt((1 - np.exp(-0.4 * dt)) / 0.4)
    return stats.norm.logpdf(x, linalg.expm(SWIRL * dt) @ start, spread).sum(axis=-1)


def turned_places(dt, count, seed=0):
    rng = np.random.default_rng(seed)
    spread = 0.4 * np.sqrt((1 - np.exp(-0.4 * dt)) / 0.4)
    return linalg.expm(SWIRL * dt) @ START + spread * rng.normal(size=(count, 2))


@pytest.mark.slow  # with `make test`, grids from a point start with it
def test_the_density_a_short_while_after_a_point_starts_a_flow(key):
    first, error = short_time(TURNED, jnp.asarray(START), 1.0)
    span = float(first.dt)
    assert error < 0.02
    assert 0.005 < span < 0.2
    # Itself, near and far: with the functions that noises which do not commute ask for it is off by `error`.
    x = np.concatenate([turned_places(span, 6), [[1.0, 30.0]]])
    found = LOG_PROBS(first, x)
    np.testing.assert_allclose(found[:-1], turned_log_prob(x[:-1], span), atol=5 * error)
    assert found[-1] < -1000  # out of reach
    drawn = jax.jit(lambda key: first.sample(key=key, shape=(4000,)))(key)
    mean = linalg.expm(SWIRL * span) @ START
    np.testing.assert_allclose(np.mean(drawn, axis=0), mean, atol=0.03 * np.std(drawn[:, 0]) + 1e-3)
    assert np.std(drawn[:, 0]) == pytest.approx(0.4 * np.sqrt(span), rel=0.05)
    # The rest of the span is counted from its end.
    sde = rf.ItoSDE(lambda t, z: t * jnp.ones(1), lambda t, z: jnp.eye(1))
    later = rf.transition.ShortTime(sde, jnp.zeros(1), 0.25).later
    assert float(later.drift(0.5, jnp.zeros(1))[0]) == 0.75


def test_one_noise_moves_a_chain_of_three_integrators_in_all_directions():
    """With two functions, the first part of the path would have two coefficients for three dimensions."""
    rate = np.array([[0.0, 1, 0], [0, 0, 1], [-1, -1, -1]])
    noise = np.diag([0.0, 0, 1])
    sde = rf.ItoSDE(lambda t, z: jnp.asarray(rate, z.dtype) @ z, lambda t, z: jnp.eye(3)[:, 2:])
    first, error = short_time(sde, jnp.array([1.0, 0, 0]), 1.0)
    block = linalg.expm(float(first.dt) * np.block([[-rate, noise], [np.zeros((3, 3)), rate.T]]))
    grown = block[3:, 3:].T
    truth = stats.multivariate_normal(grown @ [1, 0, 0], grown @ block[:3, 3:])
    x = truth.rvs(4, random_state=0)
    assert error < 0.01
    np.testing.assert_allclose(LOG_PROBS(first, x), truth.logpdf(x), atol=0.01)


@pytest.mark.slow
def test_points_that_a_grid_does_not_resolve_start_a_short_time_later(key):
    sde = rf.ItoSDE(lambda t, z: 0.1 * z, lambda t, z: 0.8 * z[:, None])
    truth = stats.lognorm(0.8, scale=np.exp(0.1 - 0.32))
    x = truth.ppf([0.05, 0.5, 0.95])
    estimate = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1))).estimate(x[:, None], key=key, start=[1.0])
    assert np.all(np.abs(estimate.log_prob - truth.logpdf(x)) < 3 * estimate.total_error)
    assert np.all(estimate.total_error < 0.1)


def test_a_start_needs_brownian_motion_and_concrete_values(key):
    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.eye(3))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(3)))
    with pytest.raises(TypeError, match="start cannot be used inside jit"):
        jax.jit(lambda x: flow.estimate(x, key=key, start=np.ones(3)).log_prob)(np.zeros(3))
    flow = flow.with_driver(rf.FractionalBrownian(0.7, 8))
    with pytest.raises(ValueError, match="start requires Brownian motion"):
        flow.estimate(np.zeros(3), key=key, start=np.ones(3))


def test_curvature_has_no_unit_and_is_zero_for_linear_sdes():
    def of(sde, start, dt):
        step = Transition(jnp.asarray(start), jnp.asarray(start), jnp.zeros(()), jnp.asarray(dt))
        return float(jit(curvature, level=0)(sde, rf.transition.Unchanged(), step))

    linear = rf.ItoSDE(lambda t, z: jnp.asarray(3 * SWIRL) @ z, lambda t, z: jnp.diag(jnp.array([1.0, 1e-6])))
    assert of(linear, START, 2.0) < 1e-6
    scaled = lambda a: rf.ItoSDE(lambda t, z: z - z**3 / a**2, lambda t, z: 0.5 * a * jnp.eye(1))
    values = [of(scaled(a), [0.3 * a], 1.0) for a in (1e-6, 1.0, 1e6)]
    np.testing.assert_allclose(values, values[1], rtol=1e-6)
    assert 0.1 < values[1] < 0.5
    assert of(TURNED, START, 1.0) > 3 * of(TURNED, START, 0.03) > 0.1


def test_an_sde_in_coordinates_is_the_stratonovich_one():
    """Itô's formula for y = log x of dX = μX dt + σX dB: dY = (μ − σ²/2) dt + σ dB."""
    sde = rf.ItoSDE(lambda t, z: 0.1 * t * z, lambda t, z: 0.3 * z[:, None])
    inner = InCoordinates(sde, rf.transition.Logarithm(), 2.0)
    y = jnp.array([0.7])
    np.testing.assert_allclose(inner.drift(1.0, y), 0.3 - 0.045, rtol=1e-12)
    np.testing.assert_allclose(inner.diffusion(1.0, y), 0.3, rtol=1e-12)


def holds(found, truth, accuracy=1e-3):
    """Within three error bars, given the accuracy of the reference."""
    return np.abs(np.asarray(found.log_prob) - truth) < 3 * np.asarray(found.total_error) + accuracy


@pytest.mark.slow  # with `make test`, a grid from a point has this noise, and a double well takes the grid
def test_noise_that_turns_is_no_single_likeliest_path(key):
    """Over a span of one, paths around the likeliest one are wrong by up to two nats."""
    x = turned_places(1.0, 5, seed=1)
    found = rf.transition_estimate(TURNED, START, x, 1.0, key=key)
    assert set(found.method) == {"grid"}
    assert np.all(holds(found, turned_log_prob(x, 1.0), 1e-9))
    assert np.all(found.total_error < 0.02)
    assert found.warning is None


@pytest.mark.slow
def test_both_bundles_to_a_point_are_seen(key):
    """dZ₁ = dB₁, dZ₂ = 3Z₁² dt + 0.3 dB₂ from 0 to (0, v): Z₁ is a bridge, of either sign."""
    sde = rf.ItoSDE(
        lambda t, z: jnp.stack([0 * z[0], 3 * z[0] ** 2]), lambda t, z: jnp.diag(jnp.array([1.0, 0.3]))
    )
    x = np.array([[0.0, 1.0], [0.0, 3.0]])
    found = rf.transition_estimate(sde, np.zeros(2), x, 1.0, key=key)
    # 3∫Z₁² = Σ ωⱼ² 3/(jπ)²: the density by its characteristic function.
    s, size = np.linspace(0, 40, 8001), 3 / (np.pi * np.arange(1, 4001)) ** 2
    log_phi = -0.5 * sum(np.log1p(-2j * s * one) for one in size) - 0.045 * s**2
    waves = np.exp(log_phi - 1j * np.outer(x[:, 1], s)).real
    truth = np.log(integrate.trapezoid(waves, s, axis=1) / np.pi) + stats.norm.logpdf(0)
    assert np.all(holds(found, truth))
    assert not np.any(found.suspect)


@pytest.mark.parametrize(
    "dt", [pytest.param(0.01, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow), 10.0]
)
def test_a_double_well_over_any_span(dt, key):
    well, x1 = rf.DoubleWell(1.0, 1.0, 0.5), np.array([-1.2, -0.9, 0.2, 1.0])
    x1 = x1 if dt > 0.1 else np.array([-1.1, -1.02, -0.95])
    found = rf.transition_estimate(well, -np.ones(1), x1[:, None], dt, key=key)
    centres, density = transition_density(lambda x: x - x**3, 0.5, (-2.6, 2.6), -1.0, dt)
    truth = np.log(np.interp(x1, centres, density))
    assert np.all(holds(found, truth, 5e-3 if dt < 0.1 else 1e-3))
    assert np.all(found.total_error < 0.02)


def test_jacobi_reflects_at_boundaries_over_any_span(key):
    """In y with x = sin²(y/2), where the noise is even, with reflection at both ends."""
    kappa, mu, sigma = 0.5, 0.3, 0.9
    places = np.array([0.05, 0.3, 0.9])
    y = 2 * np.arcsin(np.sqrt(places))

    def drift(y):
        x = np.sin(y / 2) ** 2
        return (kappa * (mu - x) - sigma**2 / 4 * (1 - 2 * x)) / np.sqrt(x * (1 - x))

    ends = (1e-9, np.pi - 1e-9)
    for dt in (0.3, 2.0):
        found = rf.transition_estimate(
            rf.Jacobi(kappa, mu, sigma), np.array([0.1]), places[:, None], dt, key=key
        )
        start = 2 * np.arcsin(np.sqrt(0.1))
        coarse, fine = (transition_density(drift, sigma, ends, start, dt, size) for size in (750, 1500))
        values = [np.log(np.interp(y, *one)) for one in (coarse, fine)]
        truth = 2 * values[1] - values[0] - 0.5 * np.log(places * (1 - places))
        assert np.all(holds(found, truth, 0.01))
        assert set(found.method) == {"exact"}


def test_a_fit_knows_a_long_gap_of_jacobi(key):
    """The likelihood of a series with a long gap is that of its expansion, with derivatives."""
    sde, times = rf.Jacobi(1.0, 0.4, 0.5), np.array([0.0, 0.1, 0.2, 6.0])
    values = np.array([0.3, 0.35, 0.32, 0.6])
    likelihood = rf.series_likelihood(sde, times, values, key=key)
    value, errors = likelihood.log_probs(sde)
    gap = jax.jit(lambda *ends: sde.expansion(*ends))(jnp.array([0.32]), jnp.array([0.6]), jnp.asarray(5.8))[
        0
    ]
    assert float(value[-1]) == pytest.approx(float(gap), abs=1e-12)
    # After so long it is close to the stationary distribution, Beta(2κμ/σ², 2κ(1 − μ)/σ²).
    assert float(value[-1]) == pytest.approx(stats.beta.logpdf(0.6, 3.2, 4.8), abs=0.01)
    assert float(errors[-1]) < 1e-6
