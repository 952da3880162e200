"""A network for velocities."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_flag, check_key, check_positive
from .._keys import split
from ._networks import MLP, Activation, silu
from ._random_weights import normal_matrix
from ._untrained import GIVEN

LATE = 1.02  # where log(LATE − s) would be infinite: beyond the end, so that it is fine up to it


class VelocityNetwork(eqx.Module):
    """v(t, z) from a network that sees fine detail in space and haste at the end.

    With s = t/T it is a multi-layer perceptron of z, of s, log(1.02 − s), the sine and cosine of πs and 2πs,
    and of sines and cosines of random projections of z (Tancik et al. 2020), which are given and not trained.
    Without these a network learns smooth functions first, and fine ones hardly at all. To it is added

        (2s − 1)/((1 − s)² + s²) z/T,

    the velocity of straight lines from N(0, I) to N(0, I), so that the network, which starts at zero, learns
    how the data differ from a normal distribution.

    With a `context` of k > 0, the last k coordinates of z are what is given: they do not move.

    **Arguments:**

    - `dimension`: of z, without the context.
    - `width`, `depth`: of the hidden layers.
    - `activation`: a smooth one.
    - `num_features`: how many projections, each with a sine and a cosine; 0 for none.
    - `frequency`: standard deviation of the projections' entries, for z of about unit size.
    - `t1`: T.
    - `context`: k.
    - `score`: with twice the outputs, the second half for `rf.LearnedTransport`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    velocity = rf.VelocityNetwork(2, width=32, depth=2, key=jax.random.key(0))
    flow = rf.StochasticFlow(rf.ItoSDE(velocity, rf.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    ```
    """

    network: MLP
    waves: Array = eqx.field(metadata=GIVEN)  # (d, num_features)
    t1: float
    context: int = eqx.field(static=True)

    def __init__(
        self,
        dimension: int,
        width: int = 128,
        depth: int = 3,
        activation: Activation = silu,
        *,
        num_features: int = 64,
        frequency: float = 1.5,
        t1: float = 1.0,
        context: int = 0,
        score: bool = False,
        key: PRNGKeyArray,
    ):
        check_count("dimension", dimension)
        check_positive("frequency", frequency)
        check_positive("t1", t1)
        check_count("num_features", num_features, least=0)
        check_count("context", context, least=0)
        check_flag("score", score)
        key_waves, key_network = split(check_key(key))
        if context and score:
            raise ValueError("a score is learned for a density without a context")
        inputs = dimension + context
        self.waves = normal_matrix(key_waves, inputs, num_features, frequency)
        sizes = inputs + 6 + 2 * num_features, (2 if score else 1) * dimension
        self.context = context
        self.network = MLP(*sizes, width, depth, activation, scale=0.0, key=key_network)
        self.t1 = t1

    def __call__(self, t: Array, z: Array) -> Array:
        s = jnp.reshape(jnp.asarray(t, z.dtype) / self.t1, (1,))
        # Nothing rather than arrays without entries: between devices they make JAX 0.11's compiler crash.
        waves = [z @ self.waves.astype(z.dtype)] if self.waves.size else []
        angles = jnp.concatenate([*waves, np.pi * s, 2 * np.pi * s])
        # Beyond the end, where nothing was learned, it goes on as at the end.
        haste = jnp.log(LATE - jnp.minimum(s, 1))
        out = self.network(t, jnp.concatenate([z, s, haste, jnp.sin(angles), jnp.cos(angles)]))
        own = z.shape[0] - self.context
        normal = (2 * s - 1) / ((1 - s) ** 2 + s**2) / self.t1 * z[:own]
        more = [out[own:]] if len(out) > own else []
        given = [jnp.zeros(self.context, z.dtype)] if self.context else []
        return jnp.concatenate([out[:own] + normal, *more, *given])
