"""A stochastic normalizing flow: an SDE, where it starts, what drives it, and how it is solved."""

import math
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_shape, check_finite, check_key, check_positive, check_vector, is_traced
from .._programs import jit
from ..driver import AbstractDriver, KarhunenLoeve, Path
from ..faq import see
from ..sde import (
    AbstractCorrection,
    AbstractItoSDE,
    AbstractSDE,
    AbstractStratonovichSDE,
    checked_correction,
    noise_dimension,
    with_explicit_parameters,
)
from ._base import Base
from ._described import described
from ._divergence import AbstractDivergence, ExactDivergence, NoDivergence
from ._estimate import AbstractEstimator, Accuracy, Estimate, default_estimator
from ._field import Field, draw, signs, split
from ._fixed_grid import FixedGrid
from ._integrator import AbstractIntegrator
from ._outcome import FINE, Outcome, failed, raise_failures


class StochasticFlow(eqx.Module):
    """Z₀ ~ base carried to time t1 by an SDE whose Brownian motion is a smooth random path.

    Given the path, the SDE is the ODE dZ/dt = μ̃(t, Z) + σ(t, Z) Ḃ(t) with the Stratonovich drift μ̃,
    and the flow a continuous normalizing flow (Hodgkinson et al. 2020, Algorithm 1):

        log p(x | path) = log p₀(z(0)) − ∫₀ᵀ div(μ̃ + σḂ) dt,   z solved backwards from z(T) = x.

    **Arguments:**

    - `sde`: an `ItoSDE` or `StratonovichSDE`.
    - `base`: the law of Z₀, `rf.Normal(loc, scale)` or any object with `sample(*, key, shape=())` and
      `log_prob(z)`; its parameters are trained with the rest.
    - `t1`: the end time T.
    - `driver`: the law of the path.
    - `divergence`: `rf.ExactDivergence()`, or `rf.HutchinsonDivergence()` in high dimension.
    - `correction`: `rf.ExactCorrection()`, or `rf.SampledCorrection()` where each noise moves one coordinate.
    - `integrator`: `rf.FixedGrid()` (fast) or `rf.Adaptive()` (error-controlled); each takes the way
      gradients are computed.

    Methods take one point or any leading batch axes; batch axes of points and of paths broadcast.
    Samples that leave for infinity in finite time have density zero, log-density −inf. A drift or
    diffusion that returns NaN, or a solver out of steps, is an error.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.array([[1.0, jnp.sin(z[1])], [0.0, 1.0]]))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), t1=1.0)
    path = flow.sample_path(key=jax.random.key(0))
    flow.log_prob_given_path(jnp.ones((5, 2)), path).shape  # (5,)
    ```
    """

    sde: AbstractSDE
    base: Any
    t1: float
    driver: AbstractDriver
    divergence: AbstractDivergence
    correction: AbstractCorrection
    integrator: AbstractIntegrator
    raises: bool
    dimension: int = eqx.field(static=True)
    noise_dim: int = eqx.field(static=True)
    proposal: Any = None  # where to look for paths to x, if that was learned with the flow

    def __init__(
        self,
        sde: AbstractSDE,
        base: Base,
        t1: float = 1.0,
        driver: AbstractDriver | None = None,
        divergence: AbstractDivergence | None = None,
        correction: AbstractCorrection | None = None,
        integrator: AbstractIntegrator | None = None,
    ):
        if not isinstance(sde, AbstractItoSDE | AbstractStratonovichSDE):
            raise TypeError(f"sde must be an ItoSDE or StratonovichSDE, got {type(sde).__name__}")
        if not isinstance(base, Base):
            raise TypeError(
                f"base must have sample(*, key, shape=()) and log_prob(z), got {type(base).__name__}"
            )
        check_positive("t1", t1)
        if jnp.ndim(t1):
            raise ValueError(
                f"t1 must be one number, got shape {jnp.shape(t1)}; end times that differ between samples "
                "go to sample_path or to the density's method"
            )
        point = jax.eval_shape(lambda: base.sample(key=jax.random.key(0)))
        if len(point.shape) != 1:
            raise ValueError(f"base.sample must return shape (d,) for shape=(), got {point.shape}")
        self.dimension = point.shape[0]
        self.noise_dim = noise_dimension(sde, self.dimension)
        self.sde = sde
        self.base = base
        # A plain number, so that nothing mistakes the end time for a parameter to train.
        self.t1 = float(t1)
        self.driver = KarhunenLoeve(6) if driver is None else driver
        self.divergence = ExactDivergence() if divergence is None else divergence
        self.correction = checked_correction(sde, correction, base)
        self.integrator = FixedGrid() if integrator is None else integrator
        self.raises = True
        self.proposal = None

    def __repr__(self) -> str:
        return described(self)

    def with_driver(self, driver: AbstractDriver) -> Self:
        """The same flow on other paths: train on Karhunen–Loève, test on piecewise linear ones."""
        return eqx.tree_at(lambda flow: flow.driver, self, driver)

    def with_proposal(self, proposal: Any) -> Self:
        """The same flow, with densities from paths of this proposal; None takes a learned one away."""
        return eqx.tree_at(lambda flow: flow.proposal, self, proposal, is_leaf=lambda leaf: leaf is None)

    def with_finer_steps(self) -> Self:
        """The same flow, solved with half the step, or a sixteenth of the tolerance."""
        finer = self.integrator.finer(self.driver, self.noise_dim)
        return eqx.tree_at(lambda flow: flow.integrator, self, finer)

    def without_errors(self) -> Self:
        """The same flow, but a solve that fails, by a NaN of the model or for want of steps, gives NaN
        where it would raise: a training step can then be skipped, and the next one taken."""
        return eqx.tree_at(lambda flow: flow.raises, self, False)

    def sample_path(
        self, *, key: PRNGKeyArray, shape: tuple[int, ...] = (), t1: float | Array | None = None
    ) -> Path:
        """Draw paths from the driver's law. `t1`, if given, replaces the flow's end time: a number,
        or an array of `shape` for a horizon per path."""
        horizon = self.t1 if t1 is None else t1
        return self.driver.sample(key=check_key(key), shape=shape, noise_dim=self.noise_dim, t1=horizon)

    def log_prob_given_path(
        self,
        x: Array,
        path: Path,
        *,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Array:
        """log p(x | path), Algorithm 1: one solve backwards from the end of the path.

        `x` has shape `(..., d)` and the path coefficients `(..., n, m)`; batch axes broadcast. With
        `t1`, the density at that earlier time along the same path, one for all or one a sample. `key`,
        one for all or one a sample, is needed only by a divergence or correction that draws random
        numbers.
        """
        z, log_change = self.pull_back(x, path, t1=t1, key=key)
        log_base = _over_batch(self.base.log_prob, z)
        # An escaped sample keeps a finite z, so no NaN can come back through this `where`.
        return jnp.where(jnp.isneginf(log_change), -jnp.inf, log_base + log_change)

    def estimate(
        self,
        x: Array,
        *,
        key: PRNGKeyArray,
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
        max_paths: int = 2**16,
        truncation: bool = False,
        solver: bool = True,
    ) -> Estimate:
        """log p(x) = log E p(x | path), with error bars: an `rf.Estimate`.

        **Arguments:**

        - `x`: points, shape `(..., d)`.
        - `estimator`: if none is given, `rf.Tempered()`, with the proposal that was learned with the flow, if
          one was; without noise one pull-back, which is exact.
        - `tolerance`: add paths to each point until its standard error is below this, or `max_paths`
          are spent; `warning` says if they were.
        - `truncation`: also estimate what the driver's finite number of functions leaves out, at about
          three times the cost.
        - `solver`: look at a few paths with steps half as long, to see what the solver's steps leave out.

        ```python
        import jax, jax.numpy as jnp
        import roughflow as rf

        sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
        estimate = flow.estimate(jnp.zeros((3, 1)), key=jax.random.key(0))
        estimate.log_prob, estimate.total_error, estimate.warning
        ```
        """
        estimator = default_estimator(self) if estimator is None else estimator
        if not isinstance(estimator, AbstractEstimator):
            raise TypeError(f"estimator must be one, such as rf.Tempered(64), got {estimator!r}")
        accuracy = Accuracy(tolerance, max_paths, truncation, solver)
        return estimator.estimate(self, x, key=key, accuracy=accuracy)

    def log_prob(self, x: Array, *, key: PRNGKeyArray, estimator: AbstractEstimator | None = None) -> Array:
        """log p(x), shape `(...)`: the value of `estimate` without its error bars."""
        return self.estimate(x, key=key, estimator=estimator, solver=False).log_prob

    def sample(
        self,
        *,
        key: PRNGKeyArray,
        shape: tuple[int, ...] = (),
        path: Path | None = None,
        t1: float | Array | None = None,
    ) -> Array:
        """Draw Z_T, each sample on a path of its own, or on the given path or paths.

        `t1` replaces the end time: of the paths drawn, or, along a given path, the time to stop at.
        """
        flow = eqx.tree_at(lambda f: f.divergence, self, NoDivergence())
        stop = None if path is None else t1
        z, path, key = self._draw(key, shape, path, t1)
        return flow.push_forward(z, path, t1=stop, key=key)[0]

    def sample_and_log_prob_given_path(
        self,
        *,
        key: PRNGKeyArray,
        shape: tuple[int, ...] = (),
        path: Path | None = None,
        t1: float | Array | None = None,
    ) -> tuple[Array, Array, Path]:
        """Draw Z_T and log p(Z_T | path) in one forward solve; also returns the path or paths."""
        stop = None if path is None else t1
        z, path, key = self._draw(key, shape, path, t1)
        x, log_change = self.push_forward(z, path, t1=stop, key=key)
        return x, _over_batch(self.base.log_prob, z) - log_change, path

    def _draw(
        self, key: PRNGKeyArray, shape: tuple[int, ...], path: Path | None, t1: float | Array | None
    ) -> tuple[Array, Path, PRNGKeyArray]:
        """Starting points, their paths, and a key for the solve."""
        key_base, key_path, key_solve = jax.random.split(check_key(key), 3)
        path = self.sample_path(key=key_path, shape=shape, t1=t1) if path is None else path
        batch = jnp.broadcast_shapes(as_shape(shape), path.batch_shape)
        return self.base.sample(key=key_base, shape=batch), path, key_solve

    def push_forward(
        self,
        z: Array,
        path: Path,
        *,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """Z_T from Z₀ = z, and the log-determinant of that map, ∫₀ᵀ div dt.

        A sample that escapes ends at infinity, with an infinite log-determinant.
        """
        outcome = self.solve(z, path, t1=t1, key=key, reverse=False)
        end = jnp.where(outcome.escaped[..., None], jnp.inf, outcome.z)
        return end, jnp.where(outcome.escaped, jnp.inf, outcome.log_change)

    def pull_back(
        self,
        x: Array,
        path: Path,
        *,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """Z₀ from Z_T = x, and the log-determinant of that inverse map, −∫₀ᵀ div dt.

        Where the backward solve escapes, x is not in the image of the flow: the log-determinant
        is −inf and the point returned is the last finite one.
        """
        outcome = self.solve(x, path, t1=t1, key=key, reverse=True)
        return outcome.z, jnp.where(outcome.escaped, -jnp.inf, outcome.log_change)

    def solve(
        self,
        z: Array,
        path: Path,
        *,
        reverse: bool,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Outcome:
        """The solve behind every method, with what became of each sample."""
        z = jnp.asarray(z)
        self._check("x" if reverse else "z", z, path, t1, key)
        # The one place where batches are formed: everything below sees one leading axis.
        stops = () if t1 is None else jnp.shape(t1)
        batch = jnp.broadcast_shapes(z.shape[:-1], path.batch_shape, stops)
        flat = math.prod(batch)
        dtype = jnp.result_type(z.dtype, path.coefficients.dtype)
        points = jnp.reshape(jnp.broadcast_to(z, (*batch, self.dimension)), (flat, self.dimension))
        path = path.reshape(batch, flat)
        fraction = None
        if t1 is not None:
            t1 = jnp.asarray(t1, dtype)
            t1 = jnp.reshape(jnp.broadcast_to(t1, batch), (flat,)) if t1.ndim else t1
            fraction = t1 / path.t1
        if key is not None and key.ndim:
            if key.shape != batch:
                raise TypeError(
                    f"key must be a single key, got an array of keys of shape {key.shape}; one key for each "
                    f"sample would have shape {batch}{see('keys')}"
                )
            key = jnp.reshape(key, (flat,))
        # Inside a jit a NaN in x could not be refused: the solve goes without it, and it comes out a NaN.
        nan = jnp.any(jnp.isnan(points), axis=-1)
        points = jnp.where(nan[:, None], 0, points).astype(dtype)
        outcome = _integrate(self, points, path, fraction, key, reverse)
        if self.raises:
            outcome = raise_failures(outcome, self.sde, path)
        else:
            nan = nan | failed(outcome)
        outcome = Outcome(
            jnp.where(nan[:, None], jnp.nan, outcome.z),
            jnp.where(nan, jnp.nan, outcome.log_change),
            jnp.where(nan, FINE, outcome.status),
            outcome.time,
        )
        return jax.tree.map(lambda a: jnp.reshape(a, (*batch, *a.shape[1:])), outcome)

    def _check(
        self, name: str, z: Array, path: Path, t1: float | Array | None, key: PRNGKeyArray | None
    ) -> None:
        """Refuse what cannot be solved, before anything is compiled."""
        if not isinstance(path, Path):
            raise TypeError(
                f"path must come from flow.sample_path or driver.path, got {type(path).__name__}; "
                "driver.project turns any diffrax path into one"
            )
        check_vector(name, z, self.dimension)
        if path.noise_dim != self.noise_dim:
            raise ValueError(
                f"path coefficients must have shape (..., n, {self.noise_dim}) to match the "
                f"diffusion's shape {(self.dimension, self.noise_dim)}, got {path.coefficients.shape}"
            )
        if t1 is not None:
            check_positive("t1", t1)
            known = not is_traced(t1) and not is_traced(path.t1)
            if known and np.any(np.asarray(t1) > np.asarray(path.t1) * (1 + 1e-6)):
                raise ValueError(f"t1 must not lie beyond the path's end at {path.t1}, got {t1}")
        check_finite(name, z)
        check_finite("path coefficients", path.coefficients)
        if key is not None:
            check_key(key, many=True)


@jit
def _integrate(
    flow: StochasticFlow,
    z: Array,
    path: Path,
    fraction: Array | None,
    key: PRNGKeyArray | None,
    reverse: bool,
) -> Outcome:
    keys = (None, None) if key is None else split(key)
    batch = z.shape[:1]
    field = Field(
        sde=with_explicit_parameters(flow.sde, jnp.zeros(flow.dimension, z.dtype)),
        correction=flow.correction,
        divergence=flow.divergence,
        path=path,
        signs=signs(flow.sde, flow.correction, keys[0], batch, flow.noise_dim),
        probes=draw(flow.divergence, keys[1], batch, flow.dimension),
        safe=flow.base.sample(key=jax.random.key(0)).astype(z.dtype),
        escape_rate=flow.integrator.escape_rate,
    )
    return flow.integrator.integrate(field, z, fraction, reverse=reverse)


def _over_batch(function: Callable[[Array], Array], z: Array) -> Array:
    """Apply a function of one point to a batch of any shape."""
    flat = jax.vmap(function)(jnp.reshape(z, (-1, z.shape[-1])))
    return jnp.reshape(flat, z.shape[:-1])
