"""Bounds on log p from both sides, against the law of a linear SDE."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import SHAKEN, THREE, linear, ou, ou_law

import roughflow as rf
from roughflow.density._bounds import _log_mean_of_found

COUNT = 2048
# From a narrow start one path says little, from a wide one its endpoint does.
NARROW, WIDE = {"scale": 0.3}, {"scale": 1.5}


def mean_and_error(values):
    assert np.all(np.isfinite(values))
    return values.mean(), values.std() / np.sqrt(values.size)


def above(first, second):
    """Whether one mean, given with its standard error, lies above another for sure."""
    return first[0] - second[0] > 3 * np.hypot(first[1], second[1])


def close(first, value):
    return abs(first[0] - value) < 3 * first[1]


def check_gradient(value, rate=1.0, h=1e-5):
    """In a parameter of the drift, random numbers held fixed."""
    slope = jax.grad(value)(rate)
    np.testing.assert_allclose(slope, (value(rate + h) - value(rate - h)) / (2 * h), rtol=1e-6)


# ------------------------------------------------------------------------------------ from below


def lower(count, key, rate=1.0):
    return rf.LowerBound(rf.PullBack(count))(ou(rate, **NARROW), jnp.full((COUNT, 1), 0.9), key=key)


def test_the_bound_from_below_rises_with_its_paths_and_stays_below(key):
    truth = (ou_law(**NARROW, driver=THREE).logpdf([0.9]), 0.0)
    one, eight, many = (mean_and_error(lower(count, key)) for count in (1, 8, 64))
    assert above(eight, one)
    assert above(many, eight)
    assert above(truth, many)
    assert truth[0] - many[0] < 0.2
    # Of one path it is E log p(x | path): the noise in Z₀ = e (x − ∫) makes the mean of a square.
    added = ou_law(scale=0.0, driver=THREE).cov[0, 0] * np.exp(2.0)
    expected = 1 - 0.5 * np.log(2 * np.pi * 0.09) - ((0.9 * np.e - 1.0) ** 2 + added) / (2 * 0.09)
    assert close(one, expected)


def test_the_bound_from_below_keeps_the_shape_of_a_batch(key):
    x = jnp.reshape(jnp.linspace(-1, 2, COUNT), (2, -1, 1))
    values = rf.LowerBound(rf.PullBack(8))(ou(), x, key=key)
    assert values.shape == (2, COUNT // 2)
    flat = rf.LowerBound(rf.PullBack(8))(ou(), jnp.reshape(x, (-1, 1)), key=key)
    np.testing.assert_array_equal(jnp.ravel(values), flat)


def test_gradient_of_the_bound_from_below(key):
    check_gradient(lambda rate: jnp.mean(lower(8, key, rate)))


@pytest.mark.slow
def test_the_bound_from_below_trains_an_amortised_proposal(key):
    """Its gradient reaches the network and points towards a tighter bound."""
    x = jnp.asarray(ou_law(driver=THREE).rvs(COUNT, random_state=0))[:, None]
    bound = lambda proposal: jnp.mean(rf.LowerBound(rf.PullBack(8, proposal))(ou(), x, key=key))
    before, slope = jax.value_and_grad(bound)(SHAKEN)
    h = 1e-5
    moved = lambda size: bound(jax.tree.map(lambda a, b: a + size * b, SHAKEN, slope))
    squares = sum(jnp.sum(a**2) for a in jax.tree.leaves(slope))
    assert squares > 0
    np.testing.assert_allclose((moved(h) - moved(-h)) / (2 * h), squares, rtol=1e-6)
    assert moved(0.05) > before


# ------------------------------------------------------------------------------------ from above


LAW = ou_law(**WIDE, driver=THREE)
# What is left to chance by the start and the path but for B(T), and by the whole path.
LEFT = {
    rf.UpperBound: ou_law(scale=0.0, driver=rf.KarhunenLoeve(1)).cov[0, 0],
    rf.PullBackUpperBound: np.exp(-2.0) * 1.5**2,
}
every_form = pytest.mark.parametrize("form", LEFT)


def upper(bound, key, rate=1.0):
    z, value = bound(ou(rate, **WIDE), key=key, shape=(COUNT,))
    assert z.shape == (COUNT, 1)
    assert value.shape == (COUNT,)
    return z, value


def excess(bound, key):
    """The bound over E log p(Z), sample by sample: that leaves less to chance."""
    z, value = upper(bound, key)
    return mean_and_error(value - LAW.logpdf(z))


@every_form
def test_the_bound_from_above_falls_with_its_paths_and_stays_above(form, key):
    none, few = (excess(form(fresh), key) for fresh in (0, 4))
    # Alone with what made it, the sample has a normal law of known variance.
    assert close(none, 0.5 * np.log(LAW.cov[0, 0] / LEFT[form]))
    assert above(none, few)
    assert above(few, (0.0, 0.0))


@pytest.mark.slow
@every_form
def test_the_bound_from_above_comes_near_with_many_paths(form, key):
    few, many = (excess(form(fresh), key) for fresh in (4, 32))
    assert above(few, many)
    assert many[0] > -3 * many[1]
    assert many[0] < few[0] / 2


def test_the_endpoint_form_is_tighter(key):
    assert above(excess(rf.PullBackUpperBound(4), key), excess(rf.UpperBound(4), key))


@every_form
def test_the_samples_of_a_bound_from_above_are_those_of_the_flow(form, key):
    z = np.asarray(upper(form(4), key)[0])[:, 0]
    deviation = np.sqrt(LAW.cov[0, 0])
    assert abs(z.mean() - LAW.mean[0]) < 4 * deviation / np.sqrt(COUNT)
    assert abs(z.var() / LAW.cov[0, 0] - 1) < 4 * np.sqrt(2 / COUNT)


@every_form
def test_gradient_of_the_bound_from_above(form, key):
    """Through the samples too: they move with the parameter."""
    check_gradient(lambda rate: jnp.mean(upper(form(4), key, rate)[1]))


def test_the_bound_from_above_takes_as_many_noises_as_dimensions(key):
    flow = linear(-np.eye(2), np.ones((2, 1)), rf.Normal(jnp.zeros(2)))
    with pytest.raises(ValueError, match=r"^[^\n]*2 x 1 diffusion[^\n]*rf\.PullBack[^\n]*$"):
        rf.UpperBound()(flow, key=key)


@every_form
@pytest.mark.parametrize("fresh", [-1, 1.5])
def test_a_number_of_fresh_paths_that_is_none_is_refused(form, fresh):
    with pytest.raises(ValueError, match=r"^fresh must be a positive whole number"):
        form(fresh)


def test_a_path_that_is_not_found_does_not_lower_the_bound_from_above():
    """Two conditions with densities 2 and 4, a third from which no path was found: log 3, not log 2."""
    given = jnp.log(jnp.array([[2.0], [4.0], [0.0]]))
    np.testing.assert_allclose(_log_mean_of_found(given), np.log(3), rtol=1e-12)
