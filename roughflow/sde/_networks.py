"""Networks for drift and diffusion, smooth ones only: the correction and the divergence differentiate
them."""

import itertools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count, check_flag, check_key, check_number, finite_array
from ..faq import see
from ._jets import has_kernel, network
from ._random_weights import random_weights

Activation = Callable[[Array], Array]
THIN = 4  # inputs, or outputs, that are few


def tanh(x: Array) -> Array:
    """tanh, with its derivative as t·(1 − y²): fewer passes over memory than JAX's own rule."""
    return _tanh(x)  # a plain function, so that a network that holds it can be pickled


@jax.custom_jvp
def _tanh(x: Array) -> Array:
    return jnp.tanh(x)


@_tanh.defjvp
def _tanh_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = _tanh(primals[0])  # not jnp.tanh: higher derivatives follow this rule too
    return y, tangents[0] * (1 - y * y)


def silu(x: Array) -> Array:
    """x/(1 + e⁻ˣ); a plain function, which JAX's own is not: a network that holds it can be pickled."""
    return x * jax.nn.sigmoid(x)


def check_smooth(activation: Activation) -> None:
    """Refuse an activation whose derivative jumps.

    The random ODE contains Dσ and its log-density the derivative of Dσ. Where Dσ jumps, that
    derivative is a delta function automatic differentiation does not see, so the density would be
    silently wrong.
    """
    if activation in (tanh, silu):
        return
    with jax.ensure_compile_time_eval():
        points = jnp.asarray(np.linspace(-8.0, 8.0, 16_001), jnp.float32)
        slopes = np.asarray(jax.jit(jax.vmap(jax.grad(activation)))(points))
    if not np.all(np.isfinite(slopes)) or np.max(np.abs(np.diff(slopes))) > 0.05:
        name = getattr(activation, "__name__", repr(activation))
        raise ValueError(
            f"activation {name} has a derivative that jumps, so the Itô correction's own derivative "
            "would be silently wrong; use a smooth one such as tanh, softplus, silu or gelu" + see("kinks")
        )


class MLP(eqx.Module):
    """A multi-layer perceptron `(t, z) -> (out_size,)` with smooth activations, tanh unless told otherwise.

    It ignores t (the SDE is time-homogeneous, as in the paper) unless `time_dependent=True`.

    **Arguments:** `in_size`, `out_size`; `width` and `depth` of the hidden layers; `activation`, any
    smooth scalar function (a ReLU is refused); `scale`, a factor on the last layer's initial weights.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    drift = rf.MLP(2, 2, width=64, depth=3, key=jax.random.key(0))
    drift(0.0, jnp.zeros(2)).shape  # (2,)
    ```
    """

    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    activation: Activation = eqx.field(static=True)
    time_dependent: bool = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        out_size: int,
        width: int = 64,
        depth: int = 3,
        activation: Activation = tanh,
        *,
        time_dependent: bool = False,
        scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        for name, size in {"in_size": in_size, "width": width}.items():
            check_count(name, size)
        check_count("out_size", out_size, least=0)
        check_count("depth", depth, least=0)
        check_number("scale", scale)
        check_flag("time_dependent", time_dependent)
        check_callable("activation", activation, "of one number, such as jnp.tanh")
        check_smooth(activation)
        sizes = (in_size + time_dependent, *(width,) * depth, out_size)
        # Stored (in, out) and applied as z @ W: under a vmap this is one plain matrix product.
        self.weights, self.biases = random_weights(check_key(key), sizes, scale)
        self.activation = activation
        self.time_dependent = time_dependent

    def __check_init__(self):
        # Axes before the last two are those of many networks in one, as `eqx.filter_vmap` makes them.
        shapes = [weight.shape for weight in self.weights]
        joined = all(one[-1] == two[-2] for one, two in itertools.pairwise(shapes))
        if not joined or [bias.shape for bias in self.biases] != [(*s[:-2], s[-1]) for s in shapes]:
            raise ValueError(f"weights of shapes {shapes} do not make a network with the biases")

    def __call__(self, t: Array, z: Array) -> Array:
        if self.time_dependent:
            z = jnp.concatenate([z, jnp.reshape(jnp.asarray(t, z.dtype), (1,))])
        if self.activation is tanh and has_kernel(self.weights, z):
            return network(z, self.weights, self.biases[:-1]) + self.biases[-1]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            z = self.activation(_product(z, weight) + bias)
        return _product(z, self.weights[-1]) + self.biases[-1]


def _product(z: Array, weight: Array) -> Array:
    """z W. On a GPU a product with few rows or columns, for a whole batch, is faster written out: it fuses
    with what comes before or after."""
    rows, columns = weight.shape
    if jax.default_backend() != "cpu":
        if rows <= THIN:
            return sum((z[k] * weight[k] for k in range(1, rows)), z[0] * weight[0])
        if columns <= THIN:
            return jnp.stack([jnp.sum(z * weight[:, k]) for k in range(columns)])
    # Weights first: few outputs make the gradient's product tall and thin, which a CPU does ten times
    # faster this way round.
    return weight.T @ z if columns <= THIN else z @ weight


class FullDiffusion(eqx.Module):
    """The paper's full matrix: λ (I + N(t, z)), N with zero diagonal and a network off it, so m = d.

    In two dimensions λ [[1, σ₁(z)], [σ₂(z), 1]]. The ones keep the noise from shrinking to zero.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    diffusion = rf.FullDiffusion(2, width=64, key=jax.random.key(0))
    diffusion(0.0, jnp.zeros(2)).shape  # (2, 2)
    ```
    """

    network: MLP
    scale: float
    dimension: int = eqx.field(static=True)

    def __init__(
        self,
        dimension: int,
        width: int = 64,
        depth: int = 1,
        activation: Activation = tanh,
        *,
        time_dependent: bool = False,
        scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        if check_count("dimension", dimension) < 2:
            raise ValueError("FullDiffusion needs dimension ≥ 2; use DiagonalDiffusion in one")
        check_number("scale", scale)
        size = dimension * (dimension - 1)
        self.network = MLP(dimension, size, width, depth, activation, time_dependent=time_dependent, key=key)
        self.scale = scale
        self.dimension = dimension

    def __call__(self, t: Array, z: Array) -> Array:
        entries = self.network(t, z)
        # Row-major off-diagonal entries: a matrix less its first entry is d−1 rows of
        # (d off-diagonal entries, one diagonal entry).
        d = self.dimension
        rows = jnp.concatenate([jnp.reshape(entries, (d - 1, d)), jnp.ones((d - 1, 1), z.dtype)], axis=1)
        flat = jnp.concatenate([jnp.ones(1, z.dtype), jnp.ravel(rows)])
        return self.scale * jnp.reshape(flat, (d, d))


class DiagonalDiffusion(eqx.Module):
    """σ = diag(s(t, z)), s = softplus of a network, so positive; applied in O(d).

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    diffusion = rf.DiagonalDiffusion(3, key=jax.random.key(0))
    diffusion(0.0, jnp.zeros(3)).as_matrix().shape  # (3, 3)
    ```
    """

    network: MLP

    def __init__(
        self,
        dimension: int,
        width: int = 64,
        depth: int = 1,
        activation: Activation = tanh,
        *,
        time_dependent: bool = False,
        key: PRNGKeyArray,
    ):
        check_count("dimension", dimension)
        self.network = MLP(
            dimension, dimension, width, depth, activation, time_dependent=time_dependent, key=key
        )

    def __call__(self, t: Array, z: Array) -> lx.DiagonalLinearOperator:
        return lx.DiagonalLinearOperator(jax.nn.softplus(self.network(t, z)))


class NoDiffusion(eqx.Module):
    """No noise at all, m = 0: the flow is an ordinary continuous normalizing flow.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    drift = rf.MLP(2, 2, key=jax.random.key(0))
    flow = rf.StochasticFlow(rf.ItoSDE(drift, rf.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    ```
    """

    def __call__(self, t: Array, z: Array) -> Array:
        del t
        return jnp.zeros((z.size, 0), z.dtype)


class ConstantDiffusion(eqx.Module):
    """σ = one trainable (d, m) matrix, the same everywhere: no correction is computed for it.

    Or a diagonal one, given by its entries (d,): applied in O(d), and diagonal it stays.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    diffusion = rf.ConstantDiffusion(jnp.eye(2))
    diagonal = rf.ConstantDiffusion(jnp.ones(2))
    ```
    """

    matrix: Array

    def __init__(self, matrix: Array):
        matrix = finite_array("matrix", matrix)
        if matrix.ndim not in (1, 2):
            raise ValueError(f"matrix must have shape (d, m), or (d,) if diagonal, got {matrix.shape}")
        self.matrix = matrix

    def __check_init__(self):
        if self.matrix.ndim < 1:
            raise ValueError(f"matrix has shape {self.matrix.shape}")

    def __call__(self, t: Array, z: Array) -> Array | lx.DiagonalLinearOperator:
        del t, z
        return lx.DiagonalLinearOperator(self.matrix) if self.matrix.ndim == 1 else self.matrix


class RestoringDrift(eqx.Module):
    """μ(t, z) = −½ c² z + N(t, z), N a network whose output starts at zero.

    With constant noise of size c the first term alone keeps N(0, I) as it is, so that a flow from a
    standard normal base starts to learn as that normal distribution.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    drift = rf.RestoringDrift(2, noise=0.5, key=jax.random.key(0))
    drift(0.0, jnp.ones(2))  # -0.125
    ```
    """

    network: MLP
    rate: float

    def __init__(
        self,
        dimension: int,
        noise: float,
        width: int = 64,
        depth: int = 3,
        activation: Activation = tanh,
        *,
        time_dependent: bool = False,
        key: PRNGKeyArray,
    ):
        check_count("dimension", dimension)
        check_number("noise", noise, least=0)
        self.network = MLP(
            dimension, dimension, width, depth, activation, time_dependent=time_dependent, scale=0.0, key=key
        )
        self.rate = 0.5 * float(noise) ** 2

    def __call__(self, t: Array, z: Array) -> Array:
        return self.network(t, z) - self.rate * z
