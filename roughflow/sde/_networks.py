"""Networks for drift, diffusion and velocity. All are smooth, because their derivatives enter the correction
and the divergence."""

import itertools
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    check_callable,
    check_count,
    check_flag,
    check_key,
    check_number,
    check_positive,
    finite_array,
)
from .._programs import jit, split
from ..faq import see
from ._jets import has_kernel, network
from ._noise import Noise

# Metadata of a field whose arrays are not trained, such as the data of a target: `eqx.field(metadata=GIVEN)`.
# Such arrays are excluded from weight decay too.
GIVEN = {"given": True}


@partial(jit, level=0)
def random_weights(
    key: PRNGKeyArray, sizes: tuple[int, ...], scale: float
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Draw random weights, multiplied by `scale` in the last layer, and zero biases, in one compiled
    program."""
    keys = jax.random.split(key, len(sizes) - 1)
    weights = [
        jax.random.normal(k, (i, o)) / np.sqrt(i)
        for k, (i, o) in zip(keys, itertools.pairwise(sizes), strict=True)
    ]
    return (*weights[:-1], scale * weights[-1]), tuple(jnp.zeros(o) for o in sizes[1:])


@partial(jit, level=0)
def normal_matrix(key: PRNGKeyArray, rows: int, columns: int, scale: float) -> Array:
    """A matrix of independent normal entries with standard deviation `scale`."""
    return scale * jax.random.normal(key, (rows, columns))


Activation = Callable[[Array], Array]
MAX_THIN_SIZE = 4  # maximum number of inputs or outputs of a thin layer


def tanh(x: Array) -> Array:
    """y = tanh x with the derivative 1 − y², which needs fewer passes over memory than JAX's rule."""
    return _tanh(x)  # a plain function, so that networks can be pickled


@jax.custom_jvp
def _tanh(x: Array) -> Array:
    return jnp.tanh(x)


@_tanh.defjvp
def _tanh_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = _tanh(primals[0])  # not jnp.tanh, so that higher derivatives use this rule too
    return y, tangents[0] * (1 - y * y)


def silu(x: Array) -> Array:
    """SiLU x/(1 + e⁻ˣ), as a plain function so that networks can be pickled."""
    return x * jax.nn.sigmoid(x)


def check_smooth(activation: Activation) -> None:
    """Raise a `ValueError` if an activation has a discontinuous derivative.

    The random ODE contains Dσ and its log-density the derivative of Dσ. Where Dσ jumps, that derivative is a
    delta function, which automatic differentiation misses, so the density would be silently wrong.
    """
    if activation in (tanh, silu):
        return
    with jax.ensure_compile_time_eval():
        points = jnp.asarray(np.linspace(-8.0, 8.0, 16_001), jnp.float32)
        slopes = np.asarray(jax.jit(jax.vmap(jax.grad(activation)))(points))
    if not np.all(np.isfinite(slopes)) or np.max(np.abs(np.diff(slopes))) > 0.05:
        name = getattr(activation, "__name__", repr(activation))
        raise ValueError(
            f"activation {name} has a discontinuous derivative, so the derivative of the Itô correction "
            "would be silently wrong; use a smooth one such as tanh, softplus, silu or gelu" + see("kinks")
        )


class MLP(eqx.Module):
    """A multi-layer perceptron `(t, z) -> (out_size,)` with smooth activations, by default tanh.

    The network ignores t, as in a time-homogeneous SDE, unless `time_dependent=True`.

    **Arguments:**

    - `in_size`, `out_size`: number of inputs, without t, and of outputs.
    - `width`, `depth`: width and number of hidden layers.
    - `activation`: any smooth scalar function; ReLU raises an error.
    - `time_dependent`: whether t is an additional input.
    - `scale`: factor on the initial weights of the last layer.

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
        # Weights are stored as (in, out) and applied as z @ W, which under a vmap is one matrix product.
        self.weights, self.biases = random_weights(check_key(key), sizes, scale)
        self.activation = activation
        self.time_dependent = time_dependent

    def __check_init__(self):
        # Leading axes belong to a stack of networks, as made by `eqx.filter_vmap`.
        shapes = [weight.shape for weight in self.weights]
        joined = all(one[-1] == two[-2] for one, two in itertools.pairwise(shapes))
        if not joined or [bias.shape for bias in self.biases] != [(*s[:-2], s[-1]) for s in shapes]:
            raise ValueError(f"weights of shapes {shapes} do not match the biases")

    def __call__(self, t: Array, z: Array) -> Array:
        if self.time_dependent:
            z = jnp.concatenate([z, jnp.reshape(jnp.asarray(t, z.dtype), (1,))])
        if self.activation is tanh and has_kernel(self.weights, z):
            return network(z, self.weights, self.biases[:-1]) + self.biases[-1]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            z = self.activation(_product(z, weight) + bias)
        return _product(z, self.weights[-1]) + self.biases[-1]


def _product(z: Array, weight: Array) -> Array:
    """z W. On a GPU, a product with few rows or columns is faster as a sum, because XLA fuses it with other
    operations."""
    rows, columns = weight.shape
    if jax.default_backend() != "cpu":
        if rows <= MAX_THIN_SIZE:
            return sum((z[k] * weight[k] for k in range(1, rows)), z[0] * weight[0])
        if columns <= MAX_THIN_SIZE:
            return jnp.stack([jnp.sum(z * weight[:, k]) for k in range(columns)])
    # The weights come first: with few outputs, the matrix in the gradient is tall and thin, and its product
    # is ten times faster on a CPU in this order.
    return weight.T @ z if columns <= MAX_THIN_SIZE else z @ weight


class FullDiffusion(eqx.Module):
    """The full matrix λ (I + N(t, z)) of Hodgkinson et al. (2020), with m = d and λ = `scale`. The diagonal
    of N is zero; a network computes the other entries.

    In two dimensions, it is λ [[1, σ₁(z)], [σ₂(z), 1]]. The ones prevent the noise from vanishing.

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
            raise ValueError(
                "FullDiffusion needs at least 2 dimensions; use DiagonalDiffusion in one dimension"
            )
        check_number("scale", scale)
        size = dimension * (dimension - 1)
        self.network = MLP(dimension, size, width, depth, activation, time_dependent=time_dependent, key=key)
        self.scale = scale
        self.dimension = dimension

    def __call__(self, t: Array, z: Array) -> Array:
        entries = self.network(t, z)
        # The off-diagonal entries are in row-major order. Without its first entry, the matrix in this order
        # consists of d−1 blocks, each of d off-diagonal entries and one diagonal entry.
        d = self.dimension
        rows = jnp.concatenate([jnp.reshape(entries, (d - 1, d)), jnp.ones((d - 1, 1), z.dtype)], axis=1)
        flat = jnp.concatenate([jnp.ones(1, z.dtype), jnp.ravel(rows)])
        return self.scale * jnp.reshape(flat, (d, d))


class DiagonalDiffusion(eqx.Module):
    """Diagonal noise σ = diag(s(t, z)), where s is the softplus of a network. A product with σ costs O(d).

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
    """No noise, m = 0: the flow is a continuous normalizing flow.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    drift = rf.MLP(2, 2, key=jax.random.key(0))
    flow = rf.StochasticFlow(rf.ItoSDE(drift, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    ```
    """

    def __call__(self, t: Array, z: Array) -> Array:
        del t
        return jnp.zeros((z.size, 0), z.dtype)


class ConstantDiffusion(eqx.Module):
    """Constant noise: σ is a trainable (d, m) matrix, which needs no correction.

    A `matrix` of shape (d,) is the diagonal of a diagonal σ, which stays diagonal in training; a product with
    it costs O(d).

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
            raise ValueError(f"matrix must have shape (d, m), or (d,) if diagonal, got {self.matrix.shape}")

    def __call__(self, t: Array, z: Array) -> Array | lx.DiagonalLinearOperator:
        del t, z
        return lx.DiagonalLinearOperator(self.matrix) if self.matrix.ndim == 1 else self.matrix


class RestoringDrift(eqx.Module):
    """Drift μ(t, z) = −½ c² z + N(t, z), with a network N that is initially zero.

    With constant noise of size c = `noise`, the first term leaves N(0, I) invariant, so an untrained flow
    with a standard normal base has that distribution at all times.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    drift = rf.sde.RestoringDrift(2, noise=0.5, key=jax.random.key(0))
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


LATE = 1.02  # keeps log(LATE − s) finite up to the end


class VelocityNetwork(eqx.Module):
    """A velocity v(t, z) from a network with high resolution in space and near the end time.

    With s = t/T it is a multi-layer perceptron of z, s, log(1.02 − s), the sine and cosine of πs and 2πs, and
    sines and cosines of fixed random projections of z (Fourier features, Tancik et al. 2020). Without these
    features, a network is slow to learn fine detail. The velocity is the network plus

        (2s − 1)/((1 − s)² + s²) z/T,

    which is the velocity of straight lines from N(0, I) to N(0, I). The network is initially zero and learns
    how the data differ from a normal distribution.

    With `num_given=k`, the last k coordinates of z are given (conditioned on) and do not move.

    **Arguments:**

    - `dimension`: number of coordinates of z, without the given ones.
    - `width`, `depth`: width and number of hidden layers.
    - `activation`: a smooth function.
    - `num_features`: number of projections, each with a sine and a cosine; 0 for none.
    - `frequency`: standard deviation of the entries of the projections, for z of about unit size.
    - `t1`: the end time T.
    - `num_given`: k, the number of given coordinates.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    velocity = rf.sde.VelocityNetwork(2, width=32, depth=2, key=jax.random.key(0))
    flow = rf.StochasticFlow(rf.ItoSDE(velocity, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    ```
    """

    network: MLP
    waves: Array = eqx.field(metadata=GIVEN)  # (d, num_features)
    t1: float
    num_given: int = eqx.field(static=True)

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
        num_given: int = 0,
        key: PRNGKeyArray,
    ):
        check_count("dimension", dimension)
        check_positive("frequency", frequency)
        check_positive("t1", t1)
        check_count("num_features", num_features, least=0)
        check_count("num_given", num_given, least=0)
        key_waves, key_network = split(check_key(key))
        inputs = dimension + num_given
        self.waves = normal_matrix(key_waves, inputs, num_features, frequency)
        self.num_given = num_given
        self.network = MLP(
            inputs + 6 + 2 * num_features, dimension, width, depth, activation, scale=0.0, key=key_network
        )
        self.t1 = t1

    def __call__(self, t: Array, z: Array) -> Array:
        s = jnp.reshape(jnp.asarray(t, z.dtype) / self.t1, (1,))
        # Empty arrays are left out, because they make the compiler of JAX 0.11 crash with several devices.
        waves = [z @ self.waves.astype(z.dtype)] if self.waves.size else []
        angles = jnp.concatenate([*waves, np.pi * s, 2 * np.pi * s])
        # Beyond the end time, this feature is constant in time.
        haste = jnp.log(LATE - jnp.minimum(s, 1))
        out = self.network(t, jnp.concatenate([z, s, haste, jnp.sin(angles), jnp.cos(angles)]))
        own = z.shape[0] - self.num_given
        normal = (2 * s - 1) / ((1 - s) ** 2 + s**2) / self.t1 * z[:own]
        given = [jnp.zeros(self.num_given, z.dtype)] if self.num_given else []
        return jnp.concatenate([out + normal, *given])


MAX_FULL_DIMENSION = 16  # maximum dimension in which the shears N are included by default
MAX_LOG_SCALE = 15.0  # bound on the logarithm of a scale


class LocalDiffusion(eqx.Module):
    """σ(z) = S E(u) (I + N(u)) at u = S⁻¹(z − c), with a constant matrix S and local scales and shears.

    E = diag(exp g), where g is a network plus a linear function of asinh u and ½ log(1 + u²), so that scales
    extrapolate as powers of the distance. N is strictly lower triangular: a network plus Aᵢⱼrᵢ + Bᵢⱼrⱼ with r
    = E⁻¹u, the position in local units. A stretches a coordinate as an earlier one changes, as in a funnel; B
    shifts it, as in a banana. (A triangular σ is determined by σσᵀ; a full σ is not, and would drift during
    training.) Initially N = 0 and E = I, so σ = S. S and c are not trained.

    **Arguments:**

    - `dimension`: d.
    - `width`, `depth`, `activation`, `time_dependent`: as for `rf.MLP`.
    - `centre`: c, shape `(d,)`; by default zero.
    - `scale`: S, shape `(d, d)`; by default the identity.
    - `full`: whether to include N; by default in 2 to 16 dimensions.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    diffusion = rf.sde.LocalDiffusion(2, scale=3 * jnp.eye(2), key=jax.random.key(0))
    diffusion(0.0, jnp.ones(2))  # 3 I, before training
    ```
    """

    network: MLP
    slopes: Array  # (d, 2d), of g
    shears: Array | None  # (2, d, d), of N
    centre: Array = eqx.field(metadata=GIVEN)
    scale: Array = eqx.field(metadata=GIVEN)
    inverse: Array = eqx.field(metadata=GIVEN)

    def __init__(
        self,
        dimension: int,
        width: int = 32,
        depth: int = 1,
        activation: Activation = tanh,
        *,
        time_dependent: bool = False,
        centre: Array | None = None,
        scale: Array | None = None,
        full: bool | None = None,
        key: PRNGKeyArray,
    ):
        d = check_count("dimension", dimension)
        full = 1 < d <= MAX_FULL_DIMENSION if full is None else full
        sizes = 2 * d, d * d if full else d
        self.network = MLP(
            *sizes, width, depth, activation, time_dependent=time_dependent, scale=0.0, key=key
        )
        self.slopes = jnp.zeros((d, 2 * d))
        self.shears = jnp.zeros((2, d, d)) if full else None
        self.centre = jnp.zeros(d) if centre is None else finite_array("centre", centre)
        self.scale = jnp.eye(d) if scale is None else finite_array("scale", scale)
        if self.scale.shape != (d, d) or self.centre.shape != (d,):
            raise ValueError(
                f"centre and scale must have shapes ({d},) and ({d}, {d}), got {self.centre.shape} and "
                f"{self.scale.shape}"
            )
        self.inverse = jnp.asarray(np.linalg.inv(np.asarray(self.scale, np.float64)), self.scale.dtype)

    def __call__(self, t: Array, z: Array) -> Array:
        centre, scale, inverse = jax.lax.stop_gradient((self.centre, self.scale, self.inverse))
        d = z.shape[0]
        u = inverse @ (z - centre)
        features = jnp.concatenate([jnp.arcsinh(u), 0.5 * jnp.log1p(u**2)])
        out = self.network(t, features)
        linear = self.slopes @ features
        if self.shears is None:
            return scale * jnp.exp(_bounded(out + linear))[None]
        # The diagonal of the output of the network is used for g, and the part below it for N.
        matrix = jnp.reshape(out, (d, d))
        g = _bounded(jnp.diagonal(matrix) + linear)
        eye = jnp.eye(d, dtype=z.dtype)
        r = u * jnp.exp(-g)
        stretch, bend = self.shears
        shear = jnp.tril(matrix + stretch * r[:, None] + bend * r[None], -1)
        return (scale * jnp.exp(g)[None]) @ (eye + shear)


def _bounded(g: Array) -> Array:
    return MAX_LOG_SCALE * jnp.tanh(g / MAX_LOG_SCALE)


class FadingDiffusion(eqx.Module):
    """Noise that fades to zero at time T: σ(t, z) = (1 − t/T)^p Σ(t, z).

    `rf.sde.TransportSDE` needs p ≥ ½, because the score grows as 1/(1 − t/T) and σσᵀ times the score must
    stay finite. With p = ½ the score acts up to the end. With p = 1 its effect fades too, and σ is smooth in
    time, so high-order solvers keep their order.

    **Arguments:**

    - `diffusion`: Σ, any diffusion `(t, z) -> (d, m)`.
    - `t1`: the end time T.
    - `power`: p.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    diffusion = rf.sde.FadingDiffusion(rf.FullDiffusion(2, width=8, key=jax.random.key(0)))
    diffusion(0.75, jnp.zeros(2))  # half of what it is at time 0
    ```
    """

    diffusion: Callable[[Array, Array], Noise]
    t1: float
    power: float = eqx.field(static=True)

    def __init__(self, diffusion: Callable[[Array, Array], Noise], t1: float = 1.0, power: float = 0.5):
        check_positive("t1", t1)
        check_callable("diffusion", diffusion, "(t, z) -> (d, m)")
        check_number("power", power)
        self.diffusion = diffusion
        self.t1 = t1
        self.power = float(power)

    def __check_init__(self):
        if not self.power >= 0.5:
            raise ValueError(f"power must be at least 0.5, so that the drift is finite, got {self.power}")

    def __call__(self, t: Array, z: Array) -> Noise:
        sigma, factor = self.diffusion(t, z), self.faded(t, z, self.power)
        if isinstance(sigma, lx.DiagonalLinearOperator):
            return lx.DiagonalLinearOperator(factor * lx.diagonal(sigma))
        return sigma * factor if isinstance(sigma, lx.AbstractLinearOperator) else factor * sigma

    def faded(self, t: Array, z: Array, power: float) -> Array:
        """(1 − t/T)^power, in the precision of z."""
        left = remaining(t, self.t1, z)
        if power in (0.0, 1.0):
            return left if power else jnp.ones_like(left)
        # The derivative of a root at zero is set to zero, since ∞ times zero would be NaN.
        return jnp.where(left > 0, jnp.where(left > 0, left, 1) ** power, 0)


def remaining(t: Array, t1: float | Array, z: Array) -> Array:
    """1 − t/T in the precision of z, clipped at zero because of rounding."""
    return jnp.maximum(1 - jnp.asarray(t, z.dtype) / t1, 0)
