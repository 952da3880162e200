"""Particles moved from a proposal to a distribution whose constant is known."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import made
from scipy import stats

from roughflow.density import Mixture, log_mean
from roughflow.density._particles import Particles, _resample, particle_parts, temper

RUNS, KEPT, PARTICLES, WIDTH = 256, 64, 256, 3
LOG_CONSTANT = -4.0
MEAN = np.array([2.0, -1.0, 1.5])
ROOT = np.array([[0.4, 0, 0], [0.3, 0.3, 0], [-0.2, 0.1, 0.5]])
TRUTH = stats.multivariate_normal(MEAN, ROOT @ ROOT.T)


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
    repeat = lambda a: jnp.broadcast_to(a, (RUNS, *a.shape))
    return Mixture(
        repeat(jnp.array([[0.5, -0.5, 0.0]])),
        repeat(jnp.ones((1, WIDTH))),
        repeat(rows[None]),
        jnp.zeros((RUNS, 1)),
        jnp.full(RUNS, 0.5),
    )


@jax.jit
def tempered(joint, mixture, noise, keys):
    return temper(joint, mixture, mixture.sample(noise), keys, KEPT)


@functools.cache
def moved(joint):
    """Run once for all tests of one density."""
    key = jax.random.key(20)
    mixture, keys = proposal(), jax.random.split(key, RUNS)
    noise = jax.random.normal(key, (RUNS, PARTICLES, mixture.num_normals))
    return tempered(joint, mixture, noise, keys)


@pytest.mark.parametrize(
    "joint", [NORMAL, pytest.param(CUT, marks=pytest.mark.slow), TWO], ids=["normal", "cut", "two"]
)
def test_the_constant_comes_out_within_its_error_bar(joint):
    """Over many runs: unbiased, and within two error bars nineteen times in twenty, or suspect."""
    weights = moved(joint).log_weights
    ratio = np.exp(log_mean(weights.T) - LOG_CONSTANT)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(RUNS)
    estimate = made(weights, particle_parts(np.asarray(weights)))
    trusted = ~np.asarray(estimate.suspect)
    assert np.mean(trusted) > 0.5
    score = (np.abs(estimate.log_prob - LOG_CONSTANT) / estimate.standard_error)[trusted]
    print(f"{np.mean(score < 2):.3f} within two; {np.mean(trusted):.2f} trusted")
    assert np.mean(score < 2) > 0.93
    assert np.sqrt(np.mean(score**2)) > 0.3


def test_particles_follow_the_distribution():
    """Its mean and covariance, over all runs; and both of two places have the share they should."""
    omega = np.asarray(moved(NORMAL).omega)
    middle = omega.mean(axis=1)
    assert np.all(np.abs(middle.mean(axis=0) - MEAN) < 4 * middle.std(axis=0) / np.sqrt(RUNS))
    second = np.einsum("rki,rkj->rij", omega - MEAN, omega - MEAN) / KEPT
    error = second.std(axis=0) / np.sqrt(RUNS)
    assert np.all(np.abs(second.mean(axis=0) - TRUTH.cov) < 4 * error)
    assert np.all(error < 0.02)
    both = moved(TWO)
    share = np.mean(np.asarray(both.omega)[..., 0] > 0, axis=1)
    # Weighed by what each run says of p(x): runs that found more of one place count as they should.
    weight = np.exp(log_mean(both.log_weights.T) - LOG_CONSTANT)
    gap = weight * (share - 0.25)
    assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(RUNS)


def test_shares_that_are_equal_but_for_rounding_choose_no_particle():
    """Every fourth is taken, whatever its share is in the tenth digit."""
    excess = np.random.default_rng(0).normal(size=(512, PARTICLES))
    keys = jax.random.split(jax.random.key(20), 512)
    places = _resample(jnp.asarray((1 + 1e-10 * excess) / PARTICLES), keys, KEPT)
    taken = np.take_along_axis(excess, np.asarray(places), axis=1)
    assert abs(taken.mean()) < 4 / np.sqrt(taken.size)


def test_weights_that_are_all_lost_are_zero_and_end():
    """A density that is zero everywhere: no NaN, no endless loop."""
    weights = moved(NOTHING).log_weights
    assert np.all(np.isneginf(weights))


def test_runs_are_averaged_and_paths_taken_by_their_share():
    """The first has nothing before it; the last says three times as much as the others."""
    run = lambda value, at: Particles(
        jnp.full((1, 64, 2), at), jnp.full((1, 64), value), jnp.log(jnp.linspace(0.5, 1.5, 64))[None] + value
    )
    now = run(0.0, 7.0)
    for i, value in enumerate([0.0, 0.0, np.log(3.0)]):
        now = now.pooled(run(value, float(i)), jnp.asarray(i))
    np.testing.assert_allclose(log_mean(now.log_weights.T), np.log(5 / 3), rtol=1e-12)
    assert abs(np.sum(now.omega[0, :, 0] == 2) - 0.6 * 64) < 2
    assert not np.any(now.omega == 7)
    np.testing.assert_allclose(now.joint, jnp.where(now.omega[..., 0] == 2, np.log(3.0), 0))
    lost = run(-jnp.inf, 1.0)
    assert np.all(np.isneginf(lost.pooled(lost, jnp.asarray(1)).log_weights))
