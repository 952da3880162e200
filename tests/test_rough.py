"""Rough paths: Chen's relation, what is geometric, lifts, distances, and the scheme that follows them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf

DRIVERS = {
    "Karhunen-Loeve": rf.KarhunenLoeve(6),
    "Legendre": rf.Legendre(5),
    "grid": rf.PiecewiseLinear(5),
    "fractional": rf.FractionalBrownian(0.4, 7),
}
ROUND_OFF = 1e-13
every_driver = pytest.mark.parametrize(
    "driver",
    [
        pytest.param(driver, id=name, marks=[pytest.mark.slow] * (name not in ("Legendre", "grid")))
        for name, driver in DRIVERS.items()
    ],
)


@pytest.fixture
def brownian(key):
    return rf.rough.brownian_lift(32, key=key, noise_dimension=2, shape=(3,), t1=2.0)


# --------------------------------------------------------------------------------- algebra


def test_chen_and_geometricity_of_brownian_motion(brownian):
    assert brownian.chen_defect() < ROUND_OFF
    assert brownian.geometric_defect() < ROUND_OFF
    ito = brownian.ito()
    assert ito.chen_defect() < ROUND_OFF
    # Itô: Sym 𝕏 − ½ X ⊗ X = −½(t − s)I.
    places = np.array([0, 5, 20]), np.array([3, 32, 21])
    expected = 2 / 32 * np.diff(places, axis=0)[0][:, None, None] * np.eye(2)
    bracket = ito.bracket(*places)
    np.testing.assert_allclose(bracket, np.broadcast_to(expected, bracket.shape), atol=1e-13)
    np.testing.assert_allclose(ito.geometric_defect(), 0.5 * 2.0, rtol=1e-12)
    np.testing.assert_allclose(ito.stratonovich().areas, brownian.areas, atol=1e-15)
    with pytest.raises(ValueError, match="but this is an Itô lift"):
        ito.ito()


def test_a_defect_is_seen():
    """Areas that belong to no path of these increments."""
    rough = rf.rough.RoughPath(jnp.linspace(0, 1, 3), jnp.ones((2, 2)), jnp.zeros((2, 2, 2)))
    assert rough.chen_defect() < ROUND_OFF
    np.testing.assert_allclose(rough.geometric_defect(), 1.0)


@every_driver
def test_the_lift_of_a_path_is_its_integrals(driver, key):
    """Against sums over a fine grid, and between any two times by Chen's relation."""
    path = driver.sample(key=key, noise_dimension=2, t1=2.0)
    rough = rf.rough.lift(path, 4)
    assert rough.chen_defect() < ROUND_OFF
    assert rough.geometric_defect() < (ROUND_OFF if driver.jumps.size else 1e-9)
    fine = 20_000
    values = jax.vmap(path.evaluate)(2.0 * jnp.arange(fine + 1) / fine)
    steps, middle = np.diff(values, axis=0), 0.5 * np.asarray(values[1:] + values[:-1])
    for start, end in ((0, 4), (1, 3), (2, 3)):
        inside = slice(fine // 4 * start, fine // 4 * end)
        expected = (middle[inside] - np.asarray(values[inside.start])).T @ steps[inside]
        first, second = rough.levels(start, end)
        np.testing.assert_allclose(second, expected, atol=1e-6)
        np.testing.assert_allclose(first, steps[inside].sum(axis=0), atol=1e-12)
    # One interval or many: the same path.
    whole = rf.rough.lift(path, 1)
    np.testing.assert_allclose(whole.areas, rough.coarser(4).areas, atol=1e-8)


def test_levy_area_has_its_distribution(key):
    """Mean 0, variance h²/4 and kurtosis 5, whatever the number of functions."""
    for count, kurtosis in ((1, 3.0), (8, 5.0)):
        rough = rf.rough.brownian_lift(
            1, key=key, noise_dimension=2, shape=(40_000,), t1=3.0, num_functions=count
        )
        area = 0.5 * np.asarray(rough.areas[:, 0, 0, 1] - rough.areas[:, 0, 1, 0])
        assert abs(area.mean()) < 4 * area.std() / 200
        np.testing.assert_allclose(area.var(), 9 / 4, rtol=0.06)
        np.testing.assert_allclose(np.mean(area**4) / area.var() ** 2, kurtosis, rtol=0.1)


def test_areas_of_an_expansion_are_those_of_its_lift(key):
    """Without the part left out, they are the integrals of the polynomial path."""
    omega = rf.Legendre(6).sample(key=key, noise_dimension=3).coefficients
    areas = rf.rough._polynomial_areas(omega)
    lifted = rf.rough.lift(rf.Legendre(6).path(omega), 1).areas[0]
    np.testing.assert_allclose(areas, 0.5 * (lifted - lifted.T), atol=1e-13)


def test_time_reversal(brownian):
    backwards = brownian.reversed()
    assert backwards.chen_defect() < ROUND_OFF
    assert backwards.geometric_defect() < ROUND_OFF
    np.testing.assert_allclose(backwards.increments, -brownian.increments[..., ::-1, :], atol=1e-14)
    np.testing.assert_allclose(backwards.reversed().areas, brownian.areas, atol=1e-13)
    # There and back again is nothing: 𝕏_{s,t} + 𝕏_{t,s} + X_{s,t} ⊗ X_{t,s} = 0.
    (first, second), (back, second_back) = brownian.levels(0, 32), backwards.levels(0, 32)
    whole = second + second_back + first[..., :, None] * back[..., None, :]
    np.testing.assert_allclose(whole, 0, atol=1e-13)


def test_norm_and_distance():
    """A straight line of slope v: |v| T^{1−α} and √(½|v|² T^{2−2α})."""
    v = jnp.array([3.0, 4.0])
    line = rf.rough.lift(rf.PiecewiseLinear(1).path(v[None] * 2**0.5, 2.0), 4)
    np.testing.assert_allclose(line.holder_norm(0.4), 5 * 2**0.6 * (1 + 0.5**0.5), rtol=1e-12)
    assert line.distance(line, 0.4) == 0
    still = rf.rough.RoughPath(line.times, 0 * line.increments, 0 * line.areas)
    np.testing.assert_allclose(line.distance(still, 0.4), 5 * 2**0.6 + 12.5 * 2**1.2, rtol=1e-12)
    with pytest.raises(ValueError, match="on the same grid"):
        line.distance(line.coarser(2), 0.4)


@pytest.mark.parametrize(
    "driver", [rf.KarhunenLoeve, pytest.param(rf.PiecewiseLinear, marks=pytest.mark.slow)]
)
def test_smooth_paths_converge_in_rough_path_distance(driver, key):
    fine = rf.PiecewiseLinear(256).sample(key=key, noise_dimension=2)
    truth = rf.rough.lift(fine, 32)
    apart = [float(rf.rough.lift(driver(n).project(fine), 32).distance(truth, 0.35)) for n in (4, 32)]
    assert apart[1] < 0.7 * apart[0]


# --------------------------------------------------------------------------------- Davie's scheme


def drift(t, z):
    return jnp.stack([0.5 * z[1] - z[0], -z[1]])


def noise(t, z):
    return jnp.stack([jnp.stack([jnp.cos(2 * z[1]), 0.6 * z[1]]), jnp.stack([0.7, jnp.sin(2 * z[0])])])


def test_davie_is_milstein_where_noise_commutes(key):
    """For both lifts, and whatever the areas."""
    diagonal = lambda t, z: jnp.diag(1 + 0.3 * jnp.sin(z))
    rough = rf.rough.brownian_lift(16, key=key, noise_dimension=2)
    for kind, path in ((rf.StratonovichSDE, rough), (rf.ItoSDE, rough.ito())):
        sde, z0 = kind(drift, diagonal), jnp.array([0.2, -0.4])
        got = rf.simulate(sde, z0, path=path)
        expected = rf.simulate(sde, z0, increments=rough.increments, scheme=rf.flow.Milstein())
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def rms(a, b):
    return float(jnp.sqrt(jnp.mean(jnp.sum((a - b) ** 2, axis=-1))))


@pytest.mark.slow
def test_strong_order_with_and_without_areas(key):
    """One and a half, for noise that does not commute; the limit is that of the random ODE."""
    steps, z0 = 1024, jnp.broadcast_to(jnp.array([0.5, -0.3]), (200, 2))
    rough = rf.rough.brownian_lift(steps, key=key, noise_dimension=2, shape=(200,))
    sde, ito = rf.StratonovichSDE(drift, noise), rf.ItoSDE(drift, noise)
    truth = {sde: rf.simulate(sde, z0, path=rough), ito: rf.simulate(ito, z0, path=rough.ito())}
    assert rms(truth[sde], truth[ito]) > 0.1
    for model, path in ((sde, rough), (ito, rough.ito())):
        errors, without = [], []
        for count in (16, 128):
            coarse = path.coarser(steps // count)
            errors.append(rms(rf.simulate(model, z0, path=coarse), truth[model]))
            symmetric = 0.5 * (coarse.areas + jnp.swapaxes(coarse.areas, -1, -2))
            flat = rf.rough.RoughPath(coarse.times, coarse.increments, symmetric, coarse.geometric)
            without.append(rms(rf.simulate(model, z0, path=flat), truth[model]))
        order = lambda e: -np.polyfit(np.log([16, 128]), np.log(e), 1)[0]
        assert 0.85 < order(errors) < 1.2
        assert 0.35 < order(without) < 0.7
        assert without[-1] > 3 * errors[-1]


def test_davie_and_the_random_ode_agree(key):
    sde = rf.StratonovichSDE(drift, noise)
    fine = rf.PiecewiseLinear(256).sample(key=key, noise_dimension=2, shape=(20,))
    base = rf.Normal(jnp.array([0.5, -0.3]), 1e-6)
    z0 = jnp.broadcast_to(jnp.array([0.5, -0.3]), (20, 2))
    ode = rf.StochasticFlow(sde, base, driver=fine.driver).push_forward(z0, fine)[0]
    errors = [
        rms(rf.simulate(sde, z0, path=rf.rough.lift(fine, 256).coarser(256 // count)), ode)
        for count in (32, 128)
    ]
    assert errors[1] < 0.4 * errors[0] < 0.4 * 0.1


def test_simulate_draws_areas_by_itself(key):
    """Both calculi, with the mean of geometric Brownian motion as a witness."""
    linear = lambda t, z: 0.5 * z[:, None]
    for kind, mean in ((rf.ItoSDE, 1.0), (rf.StratonovichSDE, np.exp(0.125))):
        z = rf.simulate(
            kind(lambda t, z: 0 * z, linear), jnp.ones((5000, 1)), key=key, steps=16, scheme=rf.flow.Davie()
        )
        assert abs(float(z.mean()) - mean) < 4 * float(z.std()) / 5000**0.5 + 2e-3


def test_a_path_of_the_wrong_kind_is_refused(key):
    rough, z0 = rf.rough.brownian_lift(4, key=key, noise_dimension=2), jnp.zeros(2)
    ito, stratonovich = rf.ItoSDE(drift, noise), rf.StratonovichSDE(drift, noise)
    with pytest.raises(ValueError, match=r"geometric rough path .* rf\.to_stratonovich\(sde\)"):
        rf.simulate(ito, z0, path=rough)
    with pytest.raises(ValueError, match=r"Itô lift .* rf\.to_ito\(sde\)"):
        rf.simulate(stratonovich, z0, path=rough.ito())
    with pytest.raises(ValueError, match=r"requires scheme=rf\.flow\.Davie\(\), not Milstein"):
        rf.simulate(stratonovich, z0, path=rough, scheme=rf.flow.Milstein())
    with pytest.raises(ValueError, match=r"increments of shape \(3, 'steps', 2\)"):
        rf.simulate(stratonovich, jnp.zeros((3, 2)), path=rough)
    with pytest.raises(TypeError, match="needs the areas"):
        rf.simulate(stratonovich, z0, increments=rough.increments, scheme=rf.flow.Davie())
    with pytest.raises(ValueError, match=r"increments of shape \(\.\.\., 4, m\)"):
        rf.rough.RoughPath(rough.times, rough.increments[:3], rough.areas)
