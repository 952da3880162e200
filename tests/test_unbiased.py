"""log p without the bias of a logarithm, and so its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import THREE, ou, ou_distribution

import roughflow as rf

X = 0.9
POINTS = 64


def in_errors(values, truth):
    """How many standard errors the mean is from the truth."""
    return (values.mean() - truth) / (values.std() / np.sqrt(values.size))


def check(replicates, key):
    """The same x many times over; the slope is in the rate of the drift."""
    truth = lambda rate: ou_distribution(rate, driver=THREE).logpdf([X])
    slope = (truth(1 + 1e-5) - truth(1 - 1e-5)) / 2e-5
    estimator = rf.Unbiased(rf.PullBack(8), replicates)

    def value(rate):
        estimate = ou(rate).estimate(jnp.full((POINTS, 1), X), key=key, estimator=estimator)
        return estimate.log_prob, estimate

    values, slopes, estimate = jax.jvp(value, (1.0,), (1.0,), has_aux=True)
    print(f"off by {in_errors(values, truth(1)):.2f} and {in_errors(slopes, slope):.2f} standard errors")
    assert abs(in_errors(values, truth(1.0))) < 3
    assert abs(in_errors(slopes, slope)) < 3
    assert 0.7 < np.sqrt(np.mean(((values - truth(1.0)) / estimate.standard_error) ** 2)) < 1.4
    # Σⱼ 2ʲ pⱼ blocks of eight paths, with a tail that the mean of a few thousand hardly sees.
    blocks = (2**1.5 - 1) / (2**0.5 - 1)
    assert abs(np.mean(estimate.num_paths) / (replicates * 8 * blocks) - 1) < 0.25
    bound = rf.density.LowerBound(rf.PullBack(8))(ou(), jnp.full((POINTS * replicates, 1), X), key=key)
    assert in_errors(bound, truth(1.0)) < -5


@pytest.mark.slow
def test_the_mean_of_twenty_thousand_has_no_bias(key):
    check(320, key)


def test_levels_have_the_probability_they_are_divided_by(key):
    unbiased = rf.Unbiased()
    levels = unbiased._levels(key, 100_000)
    for level in (1, 2, 3, 4):
        expected = float(unbiased._probability(level))
        assert abs(np.mean(levels == level) - expected) < 4 * np.sqrt(expected / 100_000)
    assert levels.min() == 1
    np.testing.assert_allclose(np.sum(unbiased._probability(np.arange(1, 60))), 1, rtol=1e-12)


def test_what_it_cannot_do_is_refused(key):
    for wrong in (1.0, 2.0):
        with pytest.raises(ValueError, match=r"^decay must lie between 1 and 2"):
            rf.Unbiased(decay=wrong)
    with pytest.raises(ValueError, match=r"^Unbiased takes no tolerance"):
        ou().estimate(jnp.zeros(1), key=key, estimator=rf.Unbiased(), tolerance=0.1)
    with pytest.raises(ValueError, match=r"^Unbiased draws how many paths.*outside jit"):
        jax.eval_shape(lambda key: ou().log_prob(jnp.zeros(1), key=key, estimator=rf.Unbiased()), key)
