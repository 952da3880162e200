"""Noise added to a velocity afterwards: the distribution does not feel it, at any time."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import roughflow as rf

# From N(M0, diag(C0²)) to N(M1, S1) along straight lines in the time T, independently: all is known.
M0, C0 = np.array([0.5, -1.0]), np.array([0.8, 1.5])
M1, S1 = np.array([1.0, 2.0]), np.array([[1.2, 0.5], [0.5, 0.6]])
T = 2.0
BASE = rf.Normal(jnp.asarray(M0), jnp.asarray(C0))


def mean(t):
    return M0 + t / T * (M1 - M0)


def covariance(t):
    s = t / T
    return (1 - s) ** 2 * jnp.diag(C0**2) + s**2 * S1


def inverse(a):
    """Of a 2 × 2 matrix, written out: it compiles in no time."""
    adjugate = jnp.array([[a[1, 1], -a[0, 1]], [-a[1, 0], a[0, 0]]])
    return adjugate / determinant(a)


def determinant(a):
    return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]


def velocity(t, y):
    """E[x − z | y]/T = (M1 − M0 + (s S1 − (1 − s) C0²) cov⁻¹ (y − mean))/T."""
    s = t / T
    change = s * S1 - (1 - s) * jnp.diag(C0**2)
    return (M1 - M0 + change @ inverse(covariance(t)) @ (y - mean(t))) / T


def log_density(t, y):
    gap, square = y - mean(t), covariance(t)
    return -0.5 * gap @ inverse(square) @ gap - 0.5 * jnp.log(determinant(2 * np.pi * square))


def exact_score(t, y):
    return -inverse(covariance(t)) @ (y - mean(t))


TRANSPORTS = {
    "normal": rf.sde.NormalTransport(velocity, jnp.asarray(M0), jnp.asarray(C0), T),
    "given": rf.sde.GivenTransport(velocity, exact_score),
}


def swirling(t, z):
    """A full matrix that depends on time and place, with more noises than dimensions."""
    return jnp.array([[1 + 0.3 * jnp.sin(z[1]), 0.4 * z[0], 0.2], [0.5 * jnp.cos(t + z[0]), 0.7, 0.1 * z[1]]])


def diffusions(key):
    return {
        "swirling": rf.sde.FadingDiffusion(swirling, T),
        "smooth": rf.sde.FadingDiffusion(swirling, T, power=1.0),
        "network": rf.sde.FadingDiffusion(
            rf.FullDiffusion(2, width=8, time_dependent=True, key=key), T, 0.75
        ),
        "diagonal": rf.sde.FadingDiffusion(rf.DiagonalDiffusion(2, width=8, key=key), T),
        "plain": swirling,
    }


def moved(sde, t, z):
    """∇·(μp − ½ ∇·(σσᵀp))/p at z: minus the rate at which the distribution changes, by exact derivatives."""

    def flux(y):
        p = lambda x: jnp.exp(log_density(t, x) - jax.lax.stop_gradient(log_density(t, z)))

        def spread(x):
            sigma = sde.noise(t, x)
            sigma = sigma.as_matrix() if isinstance(sigma, lx.AbstractLinearOperator) else sigma
            return sigma @ sigma.T * p(x)

        return sde.drift(t, y) * p(y) - 0.5 * jnp.trace(jax.jacfwd(spread)(y), axis1=1, axis2=2)

    return jnp.trace(jax.jacfwd(flux)(z))


@eqx.filter_jit
def rates(sde, times, points):
    return jax.vmap(lambda t, z: moved(sde, t, z))(times, points)


@pytest.fixture
def places(key):
    times = jnp.linspace(0.0, 0.99 * T, 16)
    return times, jax.random.normal(key, (16, 2)) + jax.vmap(mean)(times)


@pytest.mark.parametrize("kind", list(TRANSPORTS))
def test_the_score_is_that_of_the_distribution(kind, places):
    pull = jax.vmap(lambda t, z: TRANSPORTS[kind].velocity_and_pull(t, z)[1])(*places)
    left = 1 if kind == "given" else (1 - places[0] / T)[:, None]
    np.testing.assert_allclose(pull / left, jax.vmap(exact_score)(*places), atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "swirling",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("smooth", "network", "diagonal", "plain")),
    ],
)
def test_the_distribution_does_not_feel_the_noise(name, places, key):
    """The velocity alone moves the distribution as it should, and so it does with any noise."""
    without = rates(rf.ItoSDE(velocity, rf.sde.NoDiffusion()), *places)
    truth = -jax.vmap(jax.grad(log_density))(*places)
    np.testing.assert_allclose(without, truth, atol=1e-9)
    for transport in TRANSPORTS.values() if name == "swirling" else (TRANSPORTS["normal"],):
        sde = rf.sde.TransportSDE(transport, diffusions(key)[name])
        np.testing.assert_allclose(rates(sde, *places), truth, atol=1e-8)


@pytest.mark.parametrize("kind", list(TRANSPORTS))
@pytest.mark.parametrize("power", [0.5, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.75, 1.0))])
def test_all_is_finite_up_to_the_end(kind, power):
    """At T itself drift and derivatives are what they come to just before it."""
    sde = rf.sde.TransportSDE(TRANSPORTS[kind], rf.sde.FadingDiffusion(swirling, T, power))
    z = jnp.array([0.3, -0.7])
    np.testing.assert_array_equal(sde.noise(jnp.asarray(T), z), np.zeros((2, 3)))
    last, near = jnp.asarray(T), jnp.asarray(T * (1 - 1e-9))
    values = eqx.filter_jit(lambda t: (sde.drift(t, z), *jax.jacfwd(sde.drift, argnums=(0, 1))(t, z)))
    at_last, at_near = values(last), values(near)
    for one, two in zip(at_last[::2], at_near[::2], strict=True):
        np.testing.assert_allclose(one, two, atol=1e-3)
    assert np.all(np.isfinite(at_last[1]))
    # With p = ½ and a score that grows as 1/(1 − s), its pull lasts to the end.
    spread = 0.5 * swirling(last, z) @ swirling(last, z).T
    start = z - last * velocity(last, z)  # E[z₀ | z]
    pull = spread @ ((M0 - start) / C0**2) if power == 0.5 and kind != "given" else 0
    np.testing.assert_allclose(sde.drift(last, z), velocity(last, z) + pull, atol=1e-9)


def flow_of(diffusion, **settings):
    sde = rf.sde.TransportSDE(TRANSPORTS["normal"], rf.sde.NoDiffusion())
    flow = rf.StochasticFlow(
        sde, BASE, T, rf.KarhunenLoeve(4), integrator=rf.FixedGrid(rf.flow.RK4(), steps=24)
    )
    return rf.with_noise(flow, diffusion, **settings)


def test_steps_shrink_towards_the_end_where_noise_fades():
    """As many as were asked for; a grid that shrinks in its own way, and one without noise, stay."""
    plain = flow_of(None)
    assert plain.integrator == rf.FixedGrid(rf.flow.RK4(), steps=24)
    assert flow_of(0.5).integrator == rf.FixedGrid(rf.flow.RK4(), steps=24, late=2.0)
    assert flow_of(0.5, fading=None).integrator == plain.integrator
    for given, expected in [
        (rf.FixedGrid(), rf.FixedGrid(steps=16, late=2.0)),
        (rf.FixedGrid(steps=5, late=1.5), rf.FixedGrid(steps=5, late=1.5)),
        (rf.Adaptive(), rf.Adaptive()),
    ]:
        flow = eqx.tree_at(lambda f: f.integrator, plain, given)
        assert rf.with_noise(flow, 0.5).integrator == expected


@pytest.mark.parametrize(
    ("noise", "fading"),
    [(0.5, 1.0), (swirling, 0.5), (swirling, 1.0)],
    ids=["constant", "swirling-root", "swirling-smooth"],
)
@pytest.mark.slow
def test_paths_go_there_and_back_along_the_noisy_flow(noise, fading, key):
    flow = flow_of(noise, fading=fading)
    path = flow.sample_path(key=key, shape=(64,))
    z = BASE.sample(key=key, shape=(64,))
    x, log_det = flow.push_forward(z, path)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def log_prob(flow):
        back, log_inverse = flow.pull_back(x, path)
        return jnp.sum(jax.vmap(flow.base.log_prob)(back) + log_inverse), (back, log_inverse)

    (_, (back, log_inverse)), slope = log_prob(flow)
    np.testing.assert_allclose(back, z, atol=5e-3)
    np.testing.assert_allclose(log_inverse, -log_det, atol=5e-3)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slope))


@pytest.mark.parametrize("power", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_simulated_paths_have_the_moments_of_the_distribution_at_every_time(power, key):
    """With the noise, and without it, at a third of the way and at the end."""
    flow = flow_of(0.7, fading=power)
    key_start, key_noise = jax.random.split(key)
    z = BASE.sample(key=key_start, shape=(8000,))
    for t in (T / 3, T):
        x = rf.simulate(flow.sde, z, key=key_noise, t1=t, steps=64)
        np.testing.assert_allclose(np.mean(x, axis=0), mean(t), atol=0.05)
        np.testing.assert_allclose(np.cov(x.T), covariance(t), atol=0.06)


@pytest.mark.slow
def test_the_density_of_the_noisy_flow_is_the_closed_form(key):
    """At the end it is N(M1, S1), with constant noise and without; the driver leaves a little out."""
    x = M1[None] + jax.random.normal(key, (8, 2)) @ np.linalg.cholesky(S1).T
    truth = jax.vmap(lambda y: log_density(T, y))(x)
    ode = flow_of(None).estimate(x, key=key)
    np.testing.assert_allclose(ode.log_prob, truth, atol=1e-6)
    noisy = flow_of(0.5, fading=1.0).estimate(x, key=key)
    assert np.all(np.abs(noisy.log_prob - truth) < 4 * noisy.total_error + 0.02)


def test_noise_is_turned_up_down_and_off(key):
    flow = flow_of(None)
    assert flow.noise_dimension == 0
    louder = rf.with_noise(rf.with_noise(flow, 0.5), swirling)
    assert louder.noise_dimension == 3
    assert louder.sde.diffusion.t1 == T
    off = rf.with_noise(louder, None)
    assert off.noise_dimension == 0
    z = jnp.ones(2)
    np.testing.assert_array_equal(off.sde.drift(0.3, z), velocity(0.3, z))
    fading = rf.sde.FadingDiffusion(swirling, T, 2.0)
    assert rf.with_noise(flow, fading).sde.diffusion is fading
    assert rf.with_noise(flow, swirling, fading=None).sde.diffusion is swirling


def test_velocity_and_score_are_one_network(key):
    """Were the velocity held twice, training would move the copies apart."""
    network = rf.sde.VelocityNetwork(2, width=4, depth=1, num_features=3, key=key)
    transport = rf.sde.NormalTransport(network, jnp.zeros(2), jnp.ones(2))
    flow = rf.with_noise(rf.StochasticFlow(rf.sde.TransportSDE(transport), rf.Normal(jnp.zeros(2))), 0.5)
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
    assert count(flow.sde) == count(network) + 2 + 2 + 4


def test_a_noisy_flow_is_saved_and_loaded(key, tmp_path):
    network = rf.sde.VelocityNetwork(2, width=4, key=key)
    transport = rf.sde.NormalTransport(network, jnp.zeros(2), jnp.ones(2))
    flow = rf.StochasticFlow(rf.sde.TransportSDE(transport), rf.Normal(jnp.zeros(2)))
    noisy = rf.with_noise(flow, rf.FullDiffusion(2, width=4, key=key), fading=1.0)
    rf.save(tmp_path / "flow", noisy)
    back = rf.load(tmp_path / "flow")
    drift = eqx.filter_jit(lambda flow: flow.sde.drift(0.3, jnp.array([0.2, 0.4])))
    np.testing.assert_array_equal(drift(back), drift(noisy))
    assert rf.with_noise(back, None).noise_dimension == 0


def test_what_cannot_be_is_refused(key):
    flow = rf.neural_flow(2, key=key)
    with pytest.raises(TypeError, match=r"^with_noise needs a flow with a known score, .* got ItoSDE: fit"):
        rf.with_noise(flow, 0.5)
    with pytest.raises(ValueError, match=r"^power must be at least 0.5, .* got 0.25"):
        rf.sde.FadingDiffusion(swirling, power=0.25)
    with pytest.raises(ValueError, match=r"^the transport ends at t1 = 2.0, but its noise fades until 1.0"):
        rf.sde.TransportSDE(TRANSPORTS["normal"], rf.sde.FadingDiffusion(swirling))


def test_a_velocity_network_starts_as_that_of_a_normal_distribution_and_its_waves_are_given(key):
    network = rf.sde.VelocityNetwork(3, width=8, depth=2, num_features=5, t1=T, key=key)
    z = jax.random.normal(key, (3,))
    s = 0.4 / T
    np.testing.assert_allclose(network(0.4, z), (2 * s - 1) / ((1 - s) ** 2 + s**2) * z / T, rtol=1e-12)
    half = rf.sde.VelocityNetwork(2, width=8, depth=2, num_features=5, num_given=1, key=key)
    assert half(0.4, z).shape == (3,)
    assert half(0.4, z)[2] == 0
    awake = eqx.tree_at(lambda n: n.network.weights[-1], network, replace_fn=lambda w: w + 1)
    assert all(np.all(np.isfinite(slope)) for slope in jax.jit(jax.jacfwd(awake, argnums=(0, 1)))(T, z))
    assert not np.allclose(awake(0.4, z), awake(0.5, z))
    trained = rf._functions.trainable(network)
    assert trained.waves is False
    assert all(trained.network.weights)
