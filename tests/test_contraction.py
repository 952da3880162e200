"""SDEs that contract strongly: backwards a solve spreads, and paths drawn at random miss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fokker_planck import evolved, log_density_at
from problems import made, right_or_suspect, turned
from scipy import stats

U = np.array([[-0.7, 0.6, 0.1], [0.5, -0.2, 0.9]])


def test_where_paths_may_be_missed_that_is_told():
    estimate = dataclasses.replace(made(jnp.zeros((64, 2))), steep=np.array([False, True]))
    np.testing.assert_array_equal(estimate.suspect, [False, True])
    assert "lie where the SDE contracts strongly" in str(estimate.warning)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0.5, 3.0])
def test_wells(depth, key):
    """Drift `depth` sin 3u, with slopes of 1.5 and of 9, where backwards a solve spreads by e⁹, in three
    coordinates that are turned. The density is a product of three, each by finite volumes."""
    y, p = evolved(lambda u: depth * np.sin(3 * u), lambda u: 1.0, stats.norm.pdf, (-9, 9), 1.0)
    flow, x = turned(lambda u: depth * jnp.sin(3 * u), lambda u: jnp.ones(3), U)
    estimate = flow.estimate(x, key=key)
    right_or_suspect(estimate, np.sum(log_density_at(U, y, p), axis=1), trusted=0.5 if depth < 1 else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [5.0, 9.0])
def test_a_linear_sde_that_contracts(rate, key):
    """From its stationary distribution, in three dimensions: the tangent Gaussian is exact."""
    flow, x = turned(lambda u: -rate * u, lambda u: (2 * rate) ** 0.5 * jnp.ones(3), U)
    estimate = flow.estimate(x, key=key)
    right_or_suspect(estimate, np.sum(stats.norm.logpdf(U), axis=1))


@pytest.mark.slow
def test_wells_inside_jit(key):
    """Right or suspect there too, and the same with other random numbers."""
    y, p = evolved(lambda u: 3 * np.sin(3 * u), lambda u: 1.0, stats.norm.pdf, (-9, 9), 1.0)
    flow, x = turned(lambda u: 3 * jnp.sin(3 * u), lambda u: jnp.ones(3), U)
    estimate = jax.jit(lambda x: flow.estimate(x, key=key))(x)
    right_or_suspect(estimate, np.sum(log_density_at(U, y, p), axis=1), trusted=0.0)
