"""Bounds on log p from both sides, against the distribution of a linear SDE."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import SHAKEN, THREE, linear, linear_distribution, ou, ou_distribution

import roughflow as rf

COUNT = 1024
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
    both = jax.jit(jax.value_and_grad(value))
    slope, (ahead, behind) = both(rate)[1], (both(rate + side * h)[0] for side in (1, -1))
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * h), rtol=1e-6)


# ------------------------------------------------------------------------------------ from below


def lower(count, key, rate=1.0, points=COUNT):
    return rf.density.LowerBound(rf.PullBack(count))(ou(rate, **NARROW), jnp.full((points, 1), 0.9), key=key)


def test_the_bound_from_below_rises_with_its_paths_and_stays_below(key):
    truth = (ou_distribution(**NARROW, driver=THREE).logpdf([0.9]), 0.0)
    one, many = (mean_and_error(lower(count, key)) for count in (1, 64))
    assert above(many, one)
    assert above(truth, many)
    assert truth[0] - many[0] < 0.2
    # Of one path it is E log p(x | path): the noise in Z₀ = e (x − ∫) makes the mean of a square.
    added = ou_distribution(scale=0.0, driver=THREE).cov[0, 0] * np.exp(2.0)
    expected = 1 - 0.5 * np.log(2 * np.pi * 0.09) - ((0.9 * np.e - 1.0) ** 2 + added) / (2 * 0.09)
    assert close(one, expected)


@pytest.mark.slow
def test_the_bound_from_below_rises_with_each_path_more(key):
    one, eight, many = (mean_and_error(lower(count, key)) for count in (1, 8, 64))
    assert above(eight, one)
    assert above(many, eight)


def test_the_bound_from_below_keeps_the_shape_of_a_batch(key):
    x = jnp.reshape(jnp.linspace(-1, 2, 8), (2, -1, 1))
    bound = jax.jit(lambda x: rf.density.LowerBound(rf.PullBack(8))(ou(), x, key=key))
    values, flat = bound(x), bound(jnp.reshape(x, (-1, 1)))
    assert values.shape == (2, 4)
    np.testing.assert_array_equal(jnp.ravel(values), flat)


def test_gradient_of_the_bound_from_below(key):
    check_gradient(lambda rate: jnp.mean(lower(8, key, rate, points=8)))


@pytest.mark.slow
def test_the_bound_from_below_trains_an_amortised_proposal(key):
    """Its gradient reaches the network and points towards a tighter bound."""
    x = jnp.asarray(ou_distribution(driver=THREE).rvs(COUNT, random_state=0))[:, None]
    bound = lambda proposal: jnp.mean(rf.density.LowerBound(rf.PullBack(8, proposal))(ou(), x, key=key))
    before, slope = jax.value_and_grad(bound)(SHAKEN)
    h = 1e-5
    moved = lambda size: bound(jax.tree.map(lambda a, b: a + size * b, SHAKEN, slope))
    squares = sum(jnp.sum(a**2) for a in jax.tree.leaves(slope))
    assert squares > 0
    np.testing.assert_allclose((moved(h) - moved(-h)) / (2 * h), squares, rtol=1e-6)
    assert moved(0.05) > before


# ------------------------------------------------------------------------------------ from above


TRUTH = ou_distribution(**WIDE, driver=THREE)
PRIOR = rf.Prior()


def upper(bound, key, rate=1.0, points=COUNT):
    z, value = bound(ou(rate, **WIDE), key=key, shape=(points,))
    assert z.shape == (points, 1)
    assert value.shape == (points,)
    return z, value


def excess(bound, key):
    """The bound over E log p(Z), sample by sample: that leaves less to chance."""
    z, value = upper(bound, key)
    return mean_and_error(value - TRUTH.logpdf(z))


def test_the_bound_from_above_falls_with_its_paths_and_stays_above(key):
    none, few = (excess(rf.density.UpperBound(fresh, PRIOR), key) for fresh in (0, 4))
    # Alone with the path that made it, the sample has a normal distribution of known variance.
    assert close(none, 0.5 * np.log(TRUTH.cov[0, 0] / (np.exp(-2.0) * 1.5**2)))
    assert above(none, few)
    assert above(few, (0.0, 0.0))


@pytest.mark.slow
def test_the_bound_from_above_comes_near_with_many_paths(key):
    few, many = (excess(rf.density.UpperBound(fresh, PRIOR), key) for fresh in (4, 32))
    assert above(few, many)
    assert many[0] > -3 * many[1]
    assert many[0] < few[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [0, 2])
def test_around_the_likeliest_path_the_bound_from_above_is_exact_on_a_linear_sde(fresh, key):
    """The tangent proposal is p(path | Z), in one dimension and with fewer noises than dimensions."""
    z, value = upper(rf.density.UpperBound(fresh), key)
    np.testing.assert_allclose(value, TRUTH.logpdf(z), rtol=0, atol=1e-5)


@pytest.mark.parametrize("proposal", [PRIOR, SHAKEN], ids=["Prior", "Amortised"])
def test_the_samples_of_a_bound_from_above_are_those_of_the_flow(proposal, key):
    """Whatever the proposal; and the bound is one."""
    z, value = (np.asarray(a) for a in upper(rf.density.UpperBound(4, proposal), key))
    deviation = np.sqrt(TRUTH.cov[0, 0])
    assert abs(z.mean() - TRUTH.mean[0]) < 4 * deviation / np.sqrt(COUNT)
    assert abs(z.var() / TRUTH.cov[0, 0] - 1) < 4 * np.sqrt(2 / COUNT)
    assert above(mean_and_error(value - TRUTH.logpdf(z)), (0.0, 0.0))


@pytest.mark.slow  # with `make test`, a step along the gradient in the proposal lowers the bound
@pytest.mark.parametrize("proposal", [PRIOR, SHAKEN], ids=["Prior", "Amortised"])
def test_gradient_of_the_bound_from_above(proposal, key):
    """Through the samples too: they move with the parameter, and the proposal's distribution with them."""
    check_gradient(lambda rate: jnp.mean(upper(rf.density.UpperBound(4, proposal), key, rate, points=8)[1]))


def test_the_bound_from_above_trains_an_amortised_proposal(key):
    """Without fresh paths it is E log p(Z) + KL(p(ω | Z) ‖ q): its slope reaches the network, downhill."""
    bound = lambda proposal: jnp.mean(upper(rf.density.UpperBound(0, proposal), key)[1])
    before, slope = jax.value_and_grad(bound)(SHAKEN)
    assert bound(jax.tree.map(lambda a, b: a - 0.01 * b, SHAKEN, slope)) < before


@pytest.mark.slow
def test_the_bound_from_above_takes_any_number_of_noises(key):
    """One noise for two dimensions: a start belongs to each path all the same."""
    drift, noise = np.array([[-1.0, 0.5], [0.0, -0.7]]), np.array([[0.6], [0.3]])
    flow = linear(drift, noise, rf.Normal(jnp.zeros(2), 0.5))
    distribution = linear_distribution(drift, noise, np.zeros(2), 0.25 * np.eye(2), THREE)
    z, value = rf.density.UpperBound(2)(flow, key=key, shape=(16,))
    np.testing.assert_allclose(value, distribution.logpdf(z), rtol=0, atol=1e-5)


@pytest.mark.parametrize("fresh", [-1, 1.5])
def test_a_number_of_fresh_paths_that_is_none_is_refused(fresh):
    with pytest.raises(ValueError, match=r"^num_paths must be a non-negative whole number"):
        rf.density.UpperBound(fresh)


def test_samples_that_escape_have_no_value(key):
    """Forward paths of this drift go to infinity: where one does, there is no density to bound."""
    sde = rf.ItoSDE(lambda t, z: 8 * z**3, rf.ConstantDiffusion(0.5 * jnp.eye(1)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1), 0.5), driver=THREE)
    z, value = rf.density.UpperBound(2, PRIOR)(flow, key=key, shape=(64,))
    escaped = np.isinf(z[:, 0])
    assert 0 < escaped.sum() < 64
    np.testing.assert_array_equal(np.isneginf(value), escaped)
    assert np.all(np.isfinite(value[~escaped]))


def test_a_field_that_overflows_far_out_leads_nowhere(key):
    """Backwards this drift takes prior paths out to where it is not a number."""
    drift = lambda t, z: jnp.where(jnp.abs(z) > 20, jnp.nan, -4 * z)
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(jnp.eye(1)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1), 0.5), driver=THREE)
    _, value = rf.density.UpperBound(8, PRIOR)(flow.without_errors(), key=key, shape=(64,))
    assert np.all(np.isfinite(value))


# ------------------------------------------------------------------------------------ both sides


def folded():
    """Drift 3|z|²Jz turns the faster the further out: to x lead paths with any number of turns."""
    drift = lambda t, z: 3 * jnp.sum(z**2) * jnp.stack([-z[1], z[0]])
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(jnp.eye(2)))
    return rf.StochasticFlow(
        sde, rf.Normal(jnp.zeros(2), 0.5), driver=THREE, integrator=rf.FixedGrid(steps=16)
    )


@pytest.mark.slow
def test_bounds_where_many_paths_lead_to_a_point(key):
    """Against a long run of pull-backs, which leaves no path out, at the samples of each bound."""
    flow, count, long = folded(), 256, rf.PullBack(8192)
    z, value = rf.density.UpperBound(8)(flow, key=key, shape=(count,))
    truth = flow.log_prob(z, key=jax.random.key(1), estimator=long)
    over = mean_and_error(value - truth)
    assert over[0] > -3 * over[1]
    assert over[0] < 0.5
    under = mean_and_error(rf.density.LowerBound(rf.PullBack(8, rf.Laplace()))(flow, z, key=key) - truth)
    assert above((0.0, 0.0), under)
    assert under[0] > -1


def test_the_unbiased_estimate_and_its_slope_have_no_bias(key):
    """The rate of the drift is the parameter. The lower bound of as many paths fails the same check."""
    truth = lambda rate: ou_distribution(rate, driver=THREE).logpdf([0.9])
    slope = (truth(1 + 1e-5) - truth(1 - 1e-5)) / 2e-5
    x = jnp.full((16, 1), 0.9)
    estimator = rf.Unbiased(rf.PullBack(1), num_replicates=20)

    def value(rate):
        estimate = ou(rate).estimate(x, key=key, estimator=estimator)
        return estimate.log_prob, estimate

    in_errors = lambda values, truth: (values.mean() - truth) / (values.std() / np.sqrt(values.size))
    values, slopes, estimate = jax.jvp(value, (1.0,), (1.0,), has_aux=True)
    assert abs(in_errors(values, truth(1.0))) < 3
    assert abs(in_errors(slopes, slope)) < 3
    assert 0.6 < np.sqrt(np.mean(((values - truth(1.0)) / estimate.standard_error) ** 2)) < 1.6
    bound = rf.density.LowerBound(rf.PullBack(1))(ou(), jnp.full((320, 1), 0.9), key=key)
    assert in_errors(bound, truth(1.0)) < -5


def test_the_unbiased_estimate_refuses_a_tolerance_and_jit(key):
    with pytest.raises(ValueError, match=r"^Unbiased takes no tolerance"):
        ou().estimate(jnp.zeros(1), key=key, estimator=rf.Unbiased(), tolerance=0.1)
    with pytest.raises(ValueError, match=r"^Unbiased draws a random number of paths: call it outside of jit"):
        jax.eval_shape(lambda key: ou().log_prob(jnp.zeros(1), key=key, estimator=rf.Unbiased()), key)
