"""Steps of the optimiser."""

import jax
import jax.numpy as jnp
import numpy as np

from roughflow.train._optimiser import make_optimiser


def test_a_step_of_packed_parameters_is_that_of_each_array():
    """Of two types, with a gap where something is not trained, and an average beside them."""
    parameters = {"a": jnp.ones((2, 3)), "b": None, "c": (jnp.arange(2.0, dtype="float32"), jnp.asarray(3.0))}
    slope = jax.tree.map(lambda a: a - 0.5, parameters)
    optimiser = make_optimiser(None, 0.1, 10, clip=1.0, average=0.9)
    state = optimiser.init(parameters)
    pack = optimiser.packing(parameters)
    expected = optimiser.step(slope, state, parameters, jnp.asarray(1.0))
    packed = optimiser.step(pack(slope), *pack((state, parameters)), jnp.asarray(1.0))
    assert len(jax.tree.leaves(packed[0])) == 2
    done = pack.undone(packed)
    assert jax.tree.structure(done) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(done), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6)
