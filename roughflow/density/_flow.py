"""A stochastic normalizing flow with its density, averaged over all paths."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._checks import check_instance, finite_array, is_traced
from ..driver import AbstractDriver
from ..flow import AbstractDivergence, AbstractIntegrator, AbstractStochasticFlow, Base
from ..sde import AbstractCorrection, AbstractSDE
from ..transition import short_time
from ._estimate import AbstractEstimator, Accuracy, Estimate
from ._grid import Grid, applies as grid_applies
from ._ladder import Ladder
from ._paths import is_inside_jit


class StochasticFlow(AbstractStochasticFlow):
    __doc__ = AbstractStochasticFlow.__doc__

    # Repeated, because type checkers do not see that the constructor is inherited.
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
        super().__init__(sde, base, t1, driver, divergence, correction, integrator)

    def estimate(
        self,
        x: Array,
        *,
        key: PRNGKeyArray,
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
        max_paths: int = 2**16,
        start: ArrayLike | None = None,
    ) -> Estimate:
        """log p(x) = log E p(x | path), with error bars: an `rf.Estimate`.

        **Arguments:**

        - `x`: points, shape `(..., d)`.
        - `estimator`: by default `rf.density.Ladder()`, which uses the cheapest sufficient method for each
          point; without noise, a single pull-back, which is exact.
        - `tolerance`: the total error to reach; the default target is 0.05. If `max_paths` paths per point do
          not suffice for a given tolerance, `warning` says so.
        - `start`: a fixed initial state `(d,)`, in place of the base. In one or two dimensions, a grid is
          used; otherwise, and where the grid fails, the approximate density a short time after the start is
          the base of a flow over the remaining time (`rf.transition.ShortTime`). The driver must be
          Brownian.

        ```python
        import jax, jax.numpy as jnp
        import roughflow as rf

        sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
        estimate = flow.estimate(jnp.zeros((3, 1)), key=jax.random.key(0))
        estimate.log_prob, estimate.total_error, estimate.warning
        ```
        """
        accuracy = Accuracy(tolerance, max_paths)
        if start is None:
            return self._estimate(x, key, estimator, accuracy)
        start = finite_array("start", start)
        if start.shape != (self.dimension,):
            raise ValueError(
                f"start must have shape ({self.dimension},) to match the flow, got {start.shape}"
            )
        if not self.driver.brownian:
            raise ValueError(
                f"start requires Brownian motion, because the paths of {type(self.driver).__name__} have "
                "memory: use a narrow base such as rf.Normal(start, 0.01)"
            )
        if estimator is not None or grid_applies(self) is not None:
            return self._estimate_from(start, x, key, estimator, accuracy)
        found = Grid(start=start).estimate(self, x, key=key, accuracy=accuracy)
        if is_traced(found.log_prob) or not (lost := ~np.isfinite(found.total_error)).any():
            return found
        others = self._estimate_from(start, np.asarray(x)[lost], key, None, accuracy)

        def merged(part: Array, other: Array) -> Array:
            values = np.array(part)
            values[lost] = other
            return jnp.asarray(values)

        return jax.tree.map(merged, found, others)

    def log_prob(self, x: Array, *, key: PRNGKeyArray, estimator: AbstractEstimator | None = None) -> Array:
        """log p(x), shape `(...)`: the value of `estimate` without its error bars."""
        return self._estimate(x, key, estimator, Accuracy(errors=False)).log_prob

    def _estimate(
        self, x: Array, key: PRNGKeyArray, estimator: AbstractEstimator | None, accuracy: Accuracy
    ) -> Estimate:
        estimator = Ladder() if estimator is None else estimator
        check_instance("estimator", estimator, AbstractEstimator, "an estimator such as rf.PullBack(64)")
        return estimator.estimate(self, x, key=key, accuracy=accuracy)

    def _estimate_from(
        self, start: Array, x: Any, key: PRNGKeyArray, estimator: AbstractEstimator | None, accuracy: Accuracy
    ) -> Estimate:
        """The estimate from a fixed initial state by a flow that starts a short time after it."""
        if is_inside_jit(self, start):
            raise TypeError(
                "start cannot be used inside jit or vmap, because it needs concrete values: call estimate "
                "outside, or use rf.transition.ShortTime(sde, start, dt) as the base"
            )
        flow, error = self._from_point(start)
        estimate = flow._estimate(x, key, estimator, accuracy)
        return eqx.tree_at(lambda e: e.solver_error, estimate, estimate.solver_error + error)

    def _from_point(self, start: Array) -> tuple["StochasticFlow", float]:
        """The flow that starts a short time after a fixed initial state, and the error of its base in
        nats."""
        base, error = short_time(self.sde, start.astype(float), self.t1)
        flow = StochasticFlow(base.later, base, self.t1 - float(base.dt), self.driver, self.divergence)
        parts = lambda f: (f.correction, f.integrator)
        return eqx.tree_at(parts, flow, (self.correction, self.integrator)), error
