"""Proposals, the distributions from which paths are drawn: that of the driver, or a mixture of normal
distributions for each x."""

import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_fields, check_instance
from .._linear import UNROLL, log_abs_det, orthonormal, solve
from ..flow import AbstractStochasticFlow
from ..sde import MLP, Activation, tanh
from ._draws import AbstractDraws, Independent, uniform_of

SPARE = 1  # number of additional standard normal numbers per draw, which choose the component


class Mixture(eqx.Module):
    """For each of B points, a mixture of M normal distributions of ω `(W,)`, the coefficients of a path.

    Component m is ω = c + S u with S diagonal and u normal with precision I + GᵀG, G `(d, W)`. A normal
    distribution of ξ = (start, path) on a plane has this marginal distribution of the path: if N = (N₀, N₁)
    are orthonormal directions orthogonal to the plane, then G = N₀⁻¹N₁, u = ε₁ − N₁ᵀ(N₀ε₀ + N₁ε₁), and the
    root of the determinant of the covariance of u is |det N₀|. N = (I, 0) makes u standard normal. The prior
    is one more component of the mixture, with weight `prior`.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    mixture = rf.density.Mixture.of(jnp.zeros((3, 6)), jnp.ones((3, 6)), dimension=2)  # for three points
    mixture.log_prob(jnp.zeros((3, 10, 6))).shape  # (3, 10), for ten paths each
    ```
    """

    centre: Array  # c, (B, M, W)
    scale: Array  # S, (B, M, W)
    normal: Array  # N, (B, M, d, d + W)
    log_share: Array  # (B, M), log of the shares of the components, without the prior
    prior: Array  # (B,)

    @staticmethod
    def of(centre: Array, scale: Array, dimension: int) -> "Mixture":
        """A single component with independent normal coefficients, with `centre` and `scale` `(B, W)`, and no
        prior."""
        batch, size = centre.shape
        frame = jnp.eye(dimension, dimension + size, dtype=centre.dtype)
        return Mixture(
            centre[:, None],
            scale[:, None],
            jnp.broadcast_to(frame, (batch, 1, *frame.shape)),
            jnp.zeros((batch, 1), centre.dtype),
            jnp.zeros(batch, centre.dtype),
        )

    @property
    def dimension(self) -> int:
        return self.normal.shape[2]

    @property
    def num_normals(self) -> int:
        """Number of standard normal numbers per draw."""
        return self.normal.shape[-1] + SPARE

    def with_prior(self, share: float) -> "Mixture":
        """The mixture with at least this share of the prior."""
        return eqx.tree_at(lambda m: m.prior, self, jnp.maximum(self.prior, share))

    def sample(self, noise: Array) -> Array:
        """Draws of ω `(B, K, W)`, computed from standard normal numbers `(B, K, num_normals)`."""
        centre, kick = self._drawn(noise, self._pick(noise))
        return centre + kick

    def log_prob(self, omega: Array) -> Array:
        """The log-density at ω `(B, K, W)`."""
        share = self.prior[:, None]
        own = _log(1 - share) + jax.nn.logsumexp(self.log_share[:, None] + self._each(omega), axis=-1)
        return jnp.logaddexp(own, _log(share) + log_standard(omega))

    def _drawn(self, noise: Array, pick: Array) -> tuple[Array, Array]:
        """The centre of the chosen component, and a draw from it minus this centre."""
        noise, pick = noise[..., :-SPARE], pick.astype(noise.dtype)
        across = jnp.einsum("bmij,bkj->bkmi", self.normal, noise) * pick[..., None]
        path = noise[..., self.dimension :]
        unit = path - jnp.einsum("bkmi,bmij->bkj", across, self.normal[..., self.dimension :])
        # If the prior is chosen, `pick` is zero, which gives centre 0 and scale 1.
        centre = jnp.einsum("bkm,bmw->bkw", pick, self.centre)
        scale = 1 + jnp.einsum("bkm,bmw->bkw", pick, self.scale - 1)
        return centre, scale * unit

    def _each(self, omega: Array) -> Array:
        """The log-density of every component at ω, `(B, K, M)`."""
        unit = (omega[:, :, None] - self.centre[:, None]) / self.scale[:, None]
        start, path = jnp.split(self.normal, [self.dimension], axis=-1)
        flat = lambda a: jnp.reshape(a, (math.prod(a.shape[:2]), *a.shape[2:]))
        slope = jnp.reshape(solve(flat(start), flat(path)), path.shape)
        across = jnp.einsum("bmij,bkmj->bkmi", slope, unit)
        squares = jnp.sum(unit**2, axis=-1) + jnp.sum(across**2, axis=-1)
        log_volume = self._log_volume() + jnp.sum(jnp.log(self.scale), axis=-1)
        return -0.5 * squares - 0.5 * omega.shape[-1] * math.log(2 * math.pi) - log_volume[:, None]

    def _log_volume(self) -> Array:
        """log |det N₀|, `(B, M)`."""
        shape = self.log_share.shape
        start = jnp.reshape(self.normal[..., : self.dimension], (math.prod(shape), *(self.dimension,) * 2))
        return jnp.reshape(log_abs_det(start), shape)

    def _pick(self, noise: Array) -> Array:
        """The component of each draw as one-hot vectors `(B, K, M)`, zero for the prior."""
        uniform = uniform_of(noise[..., -1:])
        share = jnp.exp(self.log_share) * (1 - self.prior)[:, None]
        upper = jnp.cumsum(share, axis=1)
        lower = upper - share
        # If the prior has no share, rounding errors must not leave a gap below 1.
        upper = jnp.where((self.prior == 0)[:, None] & (upper >= upper[:, -1:]), 2, upper)
        return (uniform >= lower[:, None]) & (uniform < upper[:, None]) & (share > 0)[:, None]


def log_standard(omega: Array) -> Array:
    """The standard normal log-density over the last axis."""
    return -0.5 * jnp.sum(omega**2, axis=-1) - 0.5 * omega.shape[-1] * math.log(2 * math.pi)


def _log(share: Array) -> Array:
    some = share > 0
    return jnp.where(some, jnp.log(jnp.where(some, share, 1)), -jnp.inf)


class AbstractProposal(eqx.Module):
    """The interface of proposals, the distributions from which paths to x are drawn, such as `rf.Prior`.

    ```python
    from typing import ClassVar
    import jax, jax.numpy as jnp
    import roughflow as rf

    class Wider(rf.density.AbstractProposal):
        # twice the spread of the prior, whatever x is
        draws: rf.density.AbstractDraws = rf.density.Independent()

        def distribution(self, flow, x, cloud):
            zeros = jnp.zeros((len(x), flow.driver.num_functions * flow.noise_dimension), x.dtype)
            return rf.density.Mixture.of(zeros, zeros + 2, flow.dimension)

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
    estimator = rf.PullBack(1000, proposal=Wider())
    flow.log_prob(jnp.zeros((3, 1)), key=jax.random.key(0), estimator=estimator)
    ```
    """

    draws: eqx.AbstractVar[AbstractDraws]
    wants_cloud: ClassVar[bool] = False  # whether the proposal uses forward draws of the flow

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def distribution(self, flow: AbstractStochasticFlow, x: Array, cloud: Any) -> Mixture | None:
        """The distribution of paths for each point of x `(B, d)`; None for the prior."""


class Prior(AbstractProposal):
    """Draw paths from the distribution of the driver, regardless of x. `draws` may be
    `rf.density.Independent()` (the default) or `rf.density.Sobol()`.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1024, proposal=rf.Prior(rf.density.Sobol()))
    ```
    """

    draws: AbstractDraws = Independent()

    def distribution(self, flow: AbstractStochasticFlow, x: Array, cloud: Any) -> None:
        del flow, x, cloud


class Amortised(AbstractProposal):
    """Draw the coefficients of a path as ω = m + S u, with S diagonal and u normal with precision I + GᵀG. A
    network maps x and the end time of the flow to m, S and G `(d, nm)`.

    For a linear SDE, the distribution of the path given x has this form with S = I, and G describes how the
    start depends on the path, in units of the spread of the base. In more than 8 dimensions, G is set to
    zero.

    An untrained network gives the prior. Train it with the model: the K-path bound (`rf.density.LowerBound`)
    is largest when the proposal is the distribution of the path given x (Burda et al. 2016), and its gradient
    trains the network.

    If the driver is refined, the coefficients of the added functions are drawn from the prior.

    **Arguments:** `flow`, which determines the sizes; `width`, `depth` and `activation` of the network;
    `draws`, as for `rf.Prior`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    proposal = rf.Amortised(flow, width=16, depth=1, key=jax.random.key(0))
    flow.log_prob(jnp.zeros(1), key=jax.random.key(1), estimator=rf.PullBack(100, proposal))
    ```
    """

    network: MLP
    sizes: tuple[int, int, int] = eqx.field(static=True)  # d, n, m
    draws: AbstractDraws

    def __init__(
        self,
        flow: AbstractStochasticFlow,
        width: int = 32,
        depth: int = 2,
        activation: Activation = tanh,
        *,
        draws: AbstractDraws | None = None,
        key: PRNGKeyArray,
    ):
        check_instance("flow", flow, AbstractStochasticFlow, "an rf.StochasticFlow")
        self.sizes = (flow.dimension, flow.driver.num_functions, flow.noise_dimension)
        path = flow.driver.num_functions * flow.noise_dimension
        outputs = 2 * (flow.dimension + path) + (flow.dimension * path if flow.dimension <= UNROLL else 0)
        sizes = flow.dimension, outputs
        self.network = MLP(*sizes, width, depth, activation, time_dependent=True, scale=0.0, key=key)
        self.draws = Independent() if draws is None else draws

    def distribution(self, flow: AbstractStochasticFlow, x: Array, cloud: Any) -> Mixture:
        del cloud
        d, n, m = self.sizes
        if (flow.dimension, flow.noise_dimension) != (d, m) or flow.driver.num_functions < n:
            raise ValueError(
                f"the proposal was made for {d} dimensions, {n} functions and {m} noise components, but the "
                f"flow has {flow.dimension}, {flow.driver.num_functions} and {flow.noise_dimension}: make a "
                f"new proposal with rf.Amortised(flow, key=key)"
            )
        out = jax.vmap(lambda point: self.network(jnp.asarray(flow.t1, point.dtype), point))(x)
        # The network also has outputs for the start, but they are not used, because path and x determine the
        # start.
        mean, log_scale, tilt = jnp.split(out, [d + n * m, 2 * (d + n * m)], axis=1)
        more = ((0, 0), (0, (flow.driver.num_functions - n) * m))
        mean, log_scale = (jnp.pad(part[:, d:], more) for part in (mean, log_scale))
        distribution = Mixture.of(mean, jnp.exp(log_scale), d)
        if not tilt.size:  # many dimensions, or an old file without G
            return distribution
        slope = jnp.pad(jnp.reshape(tilt, (-1, d, n * m)), ((0, 0), *more))
        eye = jnp.broadcast_to(jnp.eye(d, dtype=slope.dtype), (len(slope), d, d))
        across, _ = orthonormal(jnp.concatenate([eye, slope], axis=2))
        return eqx.tree_at(lambda d: d.normal, distribution, across[:, None])
