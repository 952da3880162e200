"""Small systems, many at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roughflow._linear import SMALL, log_abs_det, solve


@pytest.mark.parametrize("size", [1, SMALL, SMALL + 1])
def test_systems_and_their_derivatives_are_those_of_numpy(size):
    """With a zero where the first pivot would be, too."""
    rng = np.random.default_rng(size)
    matrix, right = rng.normal(size=(5, size, size)), rng.normal(size=(5, size, 2))
    if size > 1:
        matrix[:, 0, 0] = 0
    inverse = np.linalg.inv(matrix)
    np.testing.assert_allclose(jax.jit(solve)(matrix, right), inverse @ right, rtol=1e-9)
    value, slope = jax.jit(jax.value_and_grad(lambda a: jnp.sum(log_abs_det(a))))(matrix)
    np.testing.assert_allclose(value, np.linalg.slogdet(matrix)[1].sum(), rtol=1e-9)
    np.testing.assert_allclose(slope, np.swapaxes(inverse, 1, 2), rtol=1e-8, atol=1e-10)
