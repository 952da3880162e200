"""Particles moved from a proposal to a distribution whose constant is known."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import made
from scipy import stats

from roughflow.density import Mixture
from roughflow.density._particles import PARTICLES, RUNS, parts_of, systematic, tempered

POINTS, WIDTH = 48, 3
LOG_CONSTANT = -4.0
MEAN = np.array([2.0, -1.0, 1.5])
ROOT = np.array([[0.4, 0, 0], [0.3, 0.3, 0], [-0.2, 0.1, 0.5]])


def bell(omega, mean=MEAN):
    """A normal density with correlated coordinates, times e⁻⁴."""
    unit = jnp.einsum("ij,bkj->bki", np.linalg.inv(ROOT), omega - jnp.asarray(mean)[None, None])
    return (
        LOG_CONSTANT
        - 0.5 * jnp.sum(unit**2, axis=-1)
        - 0.5 * np.log(np.linalg.det(2 * np.pi * ROOT @ ROOT.T))
    )


class Joint(NamedTuple):
    """A share at the mean, the rest at its mirror image; up to `lowest` in the first coordinate there is
    nothing, and `lacking` is the logarithm of what is left. Numbers, so that one program serves all."""

    share: float = 1.0
    lowest: float = -np.inf
    lacking: float = 0.0

    def __call__(self, omega):
        both = jnp.logaddexp(jnp.log(self.share) + bell(omega), jnp.log1p(-self.share) + bell(omega, -MEAN))
        return jnp.where(omega[..., 0] > self.lowest, both - self.lacking, -jnp.inf)


NORMAL, TWO, NOTHING = Joint(), Joint(share=0.25), Joint(lowest=np.inf)
# Where most particles start there is nothing.
CUT = Joint(lowest=1.2, lacking=float(stats.norm.logcdf(2.0)))


def proposal():
    """The prior, and a component off to the side with a tilt, for every run."""
    rows = jnp.array([[0.8, 0.6, 0, 0]])
    repeat = lambda a: jnp.broadcast_to(a, (POINTS * RUNS, *a.shape))
    return Mixture(
        repeat(jnp.array([[0.5, -0.5, 0.0]])),
        repeat(jnp.ones((1, WIDTH))),
        repeat(rows[None]),
        jnp.zeros((POINTS * RUNS, 1)),
        jnp.full(POINTS * RUNS, 0.5),
    )


@jax.jit
def moved(joint, mixture, noise, keys):
    return tempered(joint, mixture.log_prob, mixture.sample(noise), keys)


@functools.cache
def estimates(joint):
    """Of the runs for each point; computed once for all tests of one density."""
    key, mixture = jax.random.key(20), proposal()
    noise = jax.random.normal(key, (POINTS * RUNS, PARTICLES, mixture.num_normals))
    return np.asarray(moved(joint, mixture, noise, jax.random.split(key, POINTS * RUNS))).reshape(
        POINTS, RUNS
    )


@pytest.mark.parametrize(
    "joint",
    [*(pytest.param(joint, marks=pytest.mark.slow) for joint in (NORMAL, CUT)), TWO],
    ids=["normal", "cut", "two"],
)
def test_the_constant_comes_out_within_its_error_bar(joint):
    """Over many runs: unbiased, and within two error bars nineteen times in twenty, or suspect."""
    weights = estimates(joint)
    ratio = np.exp(weights.ravel() - LOG_CONSTANT)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(ratio.size)
    estimate = made(jnp.asarray(weights), parts_of(weights))
    trusted = ~np.asarray(estimate.suspect)
    assert np.mean(trusted) > 0.5
    score = (np.abs(estimate.log_prob - LOG_CONSTANT) / estimate.standard_error)[trusted]
    print(f"{np.mean(score < 2):.3f} within two; {np.mean(trusted):.2f} trusted")
    assert np.mean(score < 2) > 0.9  # of 64
    assert np.sqrt(np.mean(score**2)) > 0.3


def test_shares_that_are_equal_but_for_rounding_choose_no_particle():
    """Every one is taken, whatever its share is in the tenth digit."""
    excess = np.random.default_rng(0).normal(size=(512, PARTICLES))
    uniform = jax.random.uniform(jax.random.key(20), 512)
    places = np.asarray(jax.vmap(systematic)(jnp.asarray((1 + 1e-10 * excess) / PARTICLES), uniform))
    assert np.all(np.diff(places, axis=1) == 1)


def test_weights_that_are_all_lost_are_zero_and_end():
    """A density that is zero everywhere: no NaN, no endless loop."""
    assert np.all(np.isneginf(estimates(NOTHING)))
