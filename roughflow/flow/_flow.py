"""A stochastic normalizing flow: an SDE, its base distribution, its driver and its integrator."""

import math
from functools import partial
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    as_real,
    as_shape,
    check_fields,
    check_finite,
    check_instance,
    check_key,
    check_positive,
    check_vector,
    is_traced,
    shown,
    warn,
)
from .._programs import jit
from .._show import listed, named, num_parameters, number, settings
from ..driver import AbstractDriver, KarhunenLoeve, Path
from ..faq import see
from ..sde import (
    AbstractCorrection,
    AbstractItoSDE,
    AbstractSDE,
    AbstractStratonovichSDE,
    check_kinks,
    checked_correction,
    depends_on,
    noise_dimension,
    noise_sizes,
    with_explicit_parameters,
)
from ._base_distribution import Base, dimension_of, log_prob_of, some_points
from ._field import AbstractDivergence, ExactDivergence, Field, NoDivergence, draw, signs, split
from ._fixed_grid import AbstractIntegrator, FixedGrid
from ._outcome import Outcome, Status, failed, raise_failures


def described(flow: Any) -> str:
    """A summary of the SDE, the base and the solver; `eqx.tree_pprint` shows every array."""
    if not isinstance(flow.sde, AbstractSDE):  # a pytree of other values with the structure of a flow
        return eqx.tree_pformat(flow)
    start = f"Z(0) ~ {named(flow.base)}({flow.dimension}-D), t in [0, {number(flow.t1)}]"
    parts = flow.sde.parts()
    if flow.noise_dimension:
        parts.append(("driver", f"{settings(flow.driver)}, {flow.noise_dimension}-D noise"))
    parts.append(("integrator", settings(flow.integrator)))
    if not isinstance(flow.divergence, ExactDivergence):
        parts.append(("divergence", settings(flow.divergence)))
    if flow.proposal is not None:
        parts.append(("proposal", named(flow.proposal)))
    parts.append(("parameters", f"{num_parameters(flow):,}"))
    return listed(f"{type(flow).__name__}: {flow.sde.equation()}, {start}", parts)


MIN_HURST = 1 / 3  # Hurst exponent above which a path and its areas determine the solution


def check_driven(sde: AbstractSDE, driver: AbstractDriver, dimension: int) -> None:
    """Raise a `ValueError` if the SDE is not defined for the driver."""
    columns = noise_dimension(sde, dimension)
    if not columns:
        return
    if isinstance(sde, AbstractItoSDE) and not driver.brownian:
        raise ValueError(
            f"{type(driver).__name__} is not Brownian motion, which Itô SDEs require: use a "
            "StratonovichSDE, whose solution is the limit along smooth paths" + see("other-drivers")
        )
    rough = driver.hurst <= MIN_HURST and columns > 1
    if rough and depends_on(lambda z: sde.noise(jnp.zeros((), z.dtype), z), jnp.zeros(dimension)):
        raise ValueError(
            f"a driver with hurst = {driver.hurst:g} is too rough: state-dependent "
            "multidimensional noise requires hurst > 1/3" + see("other-drivers")
        )


LARGE_BATCH = 4096  # number of samples above which compilation is optimised for run time


class AbstractStochasticFlow(eqx.Module):
    """A stochastic normalizing flow: Z₀ ~ base, transported to time t1 by an SDE driven by smooth random
    paths.

    Given the path, the SDE is the ODE dZ/dt = μ̃(t, Z) + σ(t, Z) Ḃ(t) with the Stratonovich drift μ̃, and the
    flow is a continuous normalizing flow (Hodgkinson et al. 2020, Algorithm 1):

        log p(x | path) = log p₀(z(0)) − ∫₀ᵀ div(μ̃ + σḂ) dt,   z solved backwards from z(T) = x.

    **Arguments:**

    - `sde`: an `ItoSDE` or `StratonovichSDE`.
    - `base`: the distribution of Z₀, such as `rf.Normal(loc, scale)` or any object with `sample(*, key,
      shape=())` and `log_prob(z)`; its parameters are trained too.
    - `t1`: the end time T. The initial time is 0; for another one, shift the time of the coefficients, as in
      `lambda t, z: drift(t0 + t, z)`.
    - `driver`: the distribution of the path. Drivers other than Brownian motion require a `StratonovichSDE`.
    - `divergence`: `rf.ExactDivergence()`, or `rf.HutchinsonDivergence()` in high dimension.
    - `correction`: `rf.sde.ExactCorrection()`, or `rf.sde.SampledCorrection()` if each noise component moves
      one coordinate and depends only on it.
    - `integrator`: `rf.FixedGrid()` (fast) or `rf.Adaptive()` (error-controlled); both take a `gradient`
      method.

    Methods take single points, or arrays with any batch axes in front; the batch axes of points and paths
    broadcast. `t1` is the time at which Z is evaluated, one for all samples or one per sample; by default it
    is the end of the path. Samples that diverge in finite time have density zero, that is, log-density −inf.
    A drift or diffusion that returns NaN, or a solver that runs out of steps, raises an error.

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
    noise_dimension: int = eqx.field(static=True)
    proposal: Any = None  # a proposal learned with the flow, from which paths to x are drawn

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
        kinds = AbstractItoSDE | AbstractStratonovichSDE
        check_instance("sde", sde, kinds, "an ItoSDE or StratonovichSDE")
        self.dimension = dimension_of(base)
        check_positive("t1", t1)
        if np.ndim(t1):
            raise ValueError(
                f"t1 must be one number, got shape {np.shape(t1)}; pass an array of end times to sample_path "
                f"or to the density method instead"
            )
        self.noise_dimension = noise_dimension(sde, self.dimension)
        check_kinks(sde, self.dimension)
        driver = KarhunenLoeve(6) if driver is None else driver
        _check_driver(driver)
        check_driven(sde, driver, self.dimension)
        self.sde = sde
        self.base = base
        # A Python number, so that the end time is not trained.
        self.t1 = float(t1)
        self.driver = driver
        self.divergence = ExactDivergence() if divergence is None else divergence
        self.correction = checked_correction(sde, correction, base)
        self.integrator = FixedGrid() if integrator is None else integrator
        self.raises = True
        self.proposal = None
        check_fields(self)

    def __repr__(self) -> str:
        return described(self)

    def with_driver(self, driver: AbstractDriver) -> Self:
        """The same flow with another driver, for example to test on piecewise linear paths."""
        _check_driver(driver)
        check_driven(self.sde, driver, self.dimension)
        return eqx.tree_at(lambda flow: flow.driver, self, driver)

    def with_proposal(self, proposal: Any) -> Self:
        """The same flow with another proposal for densities; None removes a learned one."""
        if proposal is not None and not hasattr(proposal, "distribution"):
            raise TypeError(
                f"proposal must be a proposal such as rf.Laplace(), or None, got {shown(proposal)}"
            )
        return eqx.tree_at(lambda flow: flow.proposal, self, proposal, is_leaf=lambda leaf: leaf is None)

    def with_finer_steps(self) -> Self:
        """The same flow, solved with half the step, or a sixteenth of the tolerance."""
        finer = self.integrator.finer(self.driver, self.noise_dimension)
        return eqx.tree_at(lambda flow: flow.integrator, self, finer)

    def without_errors(self) -> Self:
        """The same flow, with NaN instead of an error if a solve fails, so that a training step can be
        skipped."""
        return eqx.tree_at(lambda flow: flow.raises, self, False)

    def sample_path(
        self, *, key: PRNGKeyArray, shape: tuple[int, ...] = (), t1: float | Array | None = None
    ) -> Path:
        """Draw paths from the driver on [0, t1], by default up to the end time of the flow. `t1` is a number,
        or an array of shape `shape` with one end time per path."""
        horizon = self.t1 if t1 is None else t1
        return self.driver.sample(
            key=check_key(key), shape=shape, noise_dimension=self.noise_dimension, t1=horizon
        )

    def log_prob_given_path(
        self,
        x: Array,
        path: Path,
        *,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Array:
        """log p(x | path) by Algorithm 1: one backward solve from the end of the path.

        `x` has shape `(..., d)` and the path coefficients `(..., n, m)`; batch axes broadcast. `key`, one for
        all or one per sample, is needed only if the divergence or correction is random.
        """
        z, log_change = self.pull_back(x, path, t1=t1, key=key)
        log_base = log_prob_of(self.base, z)
        # An escaped sample keeps a finite z, so the gradient of this `where` contains no NaN.
        return jnp.where(jnp.isneginf(log_change), -jnp.inf, log_base + log_change)

    def sample(
        self,
        *,
        key: PRNGKeyArray,
        shape: tuple[int, ...] = (),
        path: Path | None = None,
        t1: float | Array | None = None,
    ) -> Array:
        """Draw samples of Z at time `t1`, each along its own path or along the given paths.

        By default paths end at the end time of the flow; for longer paths pass `path=flow.sample_path(...,
        t1=...)`.

        Samples have the truncation error of the driver: if an SDE forgets its state in a time of 1/a, the
        default driver makes their standard deviation too small by 3 % for a·t1 = 10, and by 12 % for 20. Use
        a driver with more functions, or `rf.simulate`. With stiff drifts, they need more solver steps
        (`rf.flow.tune_steps`). Samples that escape are infinite, with a warning.
        """
        flow = eqx.tree_at(lambda f: f.divergence, self, NoDivergence())
        z, path, key = self._draw(key, shape, path)
        outcome = flow.solve(z, path, t1=t1, key=key, reverse=False)
        if self.raises and not is_traced(outcome.status) and (lost := int(np.sum(outcome.has_escaped))):
            warn(
                f"{lost:,} of {outcome.status.size:,} samples are infinite: unless the SDE diverges, use "
                "more solver steps, rf.FixedGrid(steps=...), or rf.simulate"
            )
        return _at_infinity(outcome)[0]

    def sample_and_log_prob_given_path(
        self,
        *,
        key: PRNGKeyArray,
        shape: tuple[int, ...] = (),
        path: Path | None = None,
        t1: float | Array | None = None,
    ) -> tuple[Array, Array, Path]:
        """Draw samples and compute log p(Z | path) in one forward solve; also return the paths."""
        z, path, key = self._draw(key, shape, path)
        x, log_change = self.push_forward(z, path, t1=t1, key=key)
        return x, log_prob_of(self.base, z) - log_change, path

    def _draw(
        self, key: PRNGKeyArray, shape: tuple[int, ...], path: Path | None
    ) -> tuple[Array, Path, PRNGKeyArray]:
        """Starting points, their paths, and a key for the solve."""
        if path is not None:
            check_path_of_driver(path)
        return _drawn(self, check_key(key), as_shape(shape, 2 * self.dimension), path)

    def push_forward(
        self,
        z: Array,
        path: Path,
        *,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """Z_T from Z₀ = z, and the log-determinant of this map, ∫₀ᵀ div dt.

        A sample that escapes ends at infinity, with an infinite log-determinant.
        """
        outcome = self.solve(z, path, t1=t1, key=key, reverse=False)
        return _at_infinity(outcome)

    def pull_back(
        self,
        x: Array,
        path: Path,
        *,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """Z₀ from Z_T = x, and the log-determinant of this inverse map, −∫₀ᵀ div dt.

        If the backward solve escapes, x is not in the image of the flow: the log-determinant is −inf, and the
        returned point is the last finite one.
        """
        outcome = self.solve(x, path, t1=t1, key=key, reverse=True)
        return outcome.z, jnp.where(outcome.has_escaped, -jnp.inf, outcome.log_change)

    def solve(
        self,
        z: Array,
        path: Path,
        *,
        reverse: bool,
        t1: float | Array | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Outcome:
        """The solve that all methods use, with the status of each sample."""
        return solve(self, z, path, t1, key, reverse)


@partial(jit, level=0)
def _at_infinity(outcome: Outcome) -> tuple[Array, Array]:
    """States and log-determinants, infinite for samples that have escaped."""
    end = jnp.where(outcome.has_escaped[..., None], jnp.inf, outcome.z)
    return end, jnp.where(outcome.has_escaped, jnp.inf, outcome.log_change)


@partial(jit, level=0)
def _drawn(
    flow: "AbstractStochasticFlow", key: PRNGKeyArray, shape: tuple[int, ...], path: Path | None
) -> tuple[Array, Path, PRNGKeyArray]:
    key_base, key_path, key_solve = jax.random.split(key, 3)
    path = flow.sample_path(key=key_path, shape=shape) if path is None else path
    batch = jnp.broadcast_shapes(shape, path.batch_shape)
    return flow.base.sample(key=key_base, shape=batch), path, key_solve


def _check_driver(driver: AbstractDriver) -> None:
    check_instance("driver", driver, AbstractDriver, "a driver such as rf.KarhunenLoeve(6)")


def solve(
    flow: AbstractStochasticFlow,
    z: Array,
    path: Path,
    t1: float | Array | None,
    key: PRNGKeyArray | None,
    reverse: bool,
) -> Outcome:
    """Solve from z along the path, up to `t1` if given, with the status of each sample."""
    name = "x" if reverse else "z"
    z = jnp.asarray(as_real(name, z))
    _check(flow, name, z, path, t1, key)
    stops = () if t1 is None else jnp.shape(t1)
    batch = jnp.broadcast_shapes(z.shape[:-1], path.batch_shape, stops)
    run = _solve_many if math.prod(batch) >= LARGE_BATCH else _solve_few
    outcome, status = run(flow, z, path, t1, _one_for_each(key, batch), reverse)
    return raise_failures(outcome, status, flow.sde, path) if flow.raises else outcome


def _solve(
    flow: AbstractStochasticFlow,
    z: Array,
    path: Path,
    t1: float | Array | None,
    key: PRNGKeyArray | None,
    reverse: bool,
) -> tuple[Outcome, Array]:
    """The outcome, and its status without failures that are due to NaN in z. Batches are formed only here;
    the solvers receive a single leading axis."""
    stops = () if t1 is None else jnp.shape(t1)
    batch = jnp.broadcast_shapes(z.shape[:-1], path.batch_shape, stops)
    flat = math.prod(batch)
    dtype = jnp.result_type(z.dtype, path.coefficients.dtype)
    points = jnp.reshape(jnp.broadcast_to(z, (*batch, flow.dimension)), (flat, flow.dimension))
    path = path.reshape(batch, flat)
    fraction = None
    if t1 is not None:
        t1 = jnp.asarray(t1, dtype)
        t1 = jnp.reshape(jnp.broadcast_to(t1, batch), (flat,)) if t1.ndim else t1
        fraction = t1 / path.t1
    # Under jit, a NaN in x cannot raise an error: the solve replaces it by 0, and the result is NaN.
    nan = jnp.any(jnp.isnan(points), axis=-1)
    points = jnp.where(nan[:, None], 0, points).astype(dtype)
    outcome = _integrate(flow, points, path, fraction, key, reverse)
    nan = nan if flow.raises else nan | failed(outcome)
    marked = Outcome(
        jnp.where(nan[:, None], jnp.nan, outcome.z),
        jnp.where(nan, jnp.nan, outcome.log_change),
        jnp.where(nan & ~failed(outcome), Status.NON_FINITE, outcome.status),
        outcome.time,
    )
    return jax.tree.map(lambda a: jnp.reshape(a, (*batch, *a.shape[1:])), (marked, outcome.status))


_solve_few, _solve_many = jit(_solve, level=1), jit(_solve)


def _one_for_each(key: PRNGKeyArray | None, batch: tuple[int, ...]) -> PRNGKeyArray | None:
    """A single key is returned unchanged; an array of keys, one per sample, is flattened to one axis."""
    if key is None or not key.ndim:
        return key
    if key.shape != batch:
        raise TypeError(
            f"key must be a single key, got an array of keys of shape {key.shape}; one key for each "
            f"sample would have shape {batch}{see('keys')}"
        )
    return jnp.reshape(key, (math.prod(batch),))


def _check(
    flow: AbstractStochasticFlow,
    name: str,
    z: Array,
    path: Path,
    t1: float | Array | None,
    key: PRNGKeyArray | None,
) -> None:
    """Raise an error for invalid arguments before anything is compiled."""
    check_path_of_driver(path)
    check_vector(name, z, flow.dimension)
    if path.noise_dimension != flow.noise_dimension:
        raise ValueError(
            f"path coefficients must have shape (..., n, {flow.noise_dimension}) to match the "
            f"diffusion's shape {(flow.dimension, flow.noise_dimension)}, got {path.coefficients.shape}"
        )
    if t1 is not None:
        check_positive("t1", t1)
        known = not is_traced(t1) and not is_traced(path.t1)
        if known and np.any(np.asarray(t1) > np.asarray(path.t1) * (1 + 1e-6)):
            raise ValueError(
                f"t1 must not lie beyond the path's end at {path.t1}, got {t1}: draw a longer path with "
                f"flow.sample_path(key=key, t1=...)"
            )
    check_finite(name, z)
    check_finite("path coefficients", path.coefficients)
    if key is not None:
        check_key(key, many=True)


def check_path_of_driver(path: Any) -> None:
    wanted = "a path from flow.sample_path or driver.path (driver.project converts a diffrax path)"
    check_instance("path", path, Path, wanted)


def centre_and_scale(
    sde: AbstractSDE, base: Base, dimension: int, horizon: Array, dtype: Any
) -> tuple[Array, Array, Array]:
    """A starting point of samples, their centre, and the spread of each coordinate at the end, which is the
    unit of distances; `(d,)` each. The spread is not differentiated. Where the spread is zero, the distance
    that the drift covers is used instead.
    """
    points = jax.lax.stop_gradient(some_points(base, dimension)).astype(dtype)
    t, span = jnp.zeros((), dtype), jax.lax.stop_gradient(jnp.max(horizon)).astype(dtype)
    spread = jnp.std(points, axis=0) + jnp.sqrt(span) * noise_sizes(sde.noise(t, points[0]))
    far = span * jnp.abs(sde.drift(t, points[0]))
    usable = lambda size: jnp.isfinite(size) & (size > 0)
    scale = jnp.where(usable(spread), spread, jnp.where(usable(far), far, 1))
    return points[0], jnp.mean(points, axis=0), jax.lax.stop_gradient(scale)


def _integrate(
    flow: AbstractStochasticFlow,
    z: Array,
    path: Path,
    fraction: Array | None,
    key: PRNGKeyArray | None,
    reverse: bool,
) -> Outcome:
    keys = (None, None) if key is None else split(key)
    batch = z.shape[:1]
    sde = with_explicit_parameters(flow.sde, jnp.zeros(flow.dimension, z.dtype))
    safe, centre, scale = centre_and_scale(sde, flow.base, flow.dimension, path.t1, z.dtype)
    field = Field(
        sde=sde,
        correction=flow.correction,
        divergence=flow.divergence,
        path=path,
        signs=signs(flow.sde, flow.correction, keys[0], batch, flow.noise_dimension),
        probes=draw(flow.divergence, keys[1], batch, flow.dimension),
        safe=safe,
        centre=centre,
        scale=scale,
        escape_rate=flow.integrator.escape_rate,
    )
    return flow.integrator.integrate(field, z, fraction, reverse=reverse)
