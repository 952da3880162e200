"""How many steps the log-densities of a flow need, seen at a few points."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_real, check_count, check_instance, check_key, check_positive, check_vector
from .._programs import jit
from ..driver import Path
from ._fixed_grid import CountedGrid, FixedGrid
from ._flow import AbstractStochasticFlow

# Nats by which steps may move log p(x | path). Without noise that is all the error there is; with it Monte
# Carlo error and the driver's finite number of functions are far larger.
STILL, NOISY = 1e-5, 5e-4
LEAST, MOST = 2, 64  # steps, or between two jumps of the path's slope
POINTS = 256  # looked at


def suited_grid(
    flow: AbstractStochasticFlow,
    x: Array,
    *,
    key: PRNGKeyArray,
    tolerance: float | None = None,
    least: int = LEAST,
) -> AbstractStochasticFlow:
    """The flow with as few steps of its `rf.FixedGrid` as leave log p(x | path) where twice as many have it.

    Few of the points x are looked at, each with a path of its own: the root mean square of the change is to
    be below the tolerance. A flow that is trained changes: look again from time to time. Where 64 steps do
    not suffice, and for any other integrator, the flow comes back as it is.

    **Arguments:**

    - `x`: points `(k, d)`, 256 of which are looked at.
    - `tolerance`: in nats; 1e-5 without noise, where it is all the error there is, else 5e-4.
    - `least`: steps to begin with.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    flow = rf.StochasticFlow(rf.ItoSDE(rf.MLP(2, 2, key=key), rf.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    rf.suited_grid(flow, jax.random.normal(key, (100, 2)), key=key).integrator.steps
    ```
    """
    check_instance("flow", flow, AbstractStochasticFlow, "an rf.StochasticFlow")
    check_vector("x", as_real("x", x), flow.dimension)
    check_count("least", least)
    steps = suited_steps(flow, jnp.asarray(x), key, tolerance, least)
    return flow if steps is None else with_steps(flow, steps)


def suited_steps(
    flow: AbstractStochasticFlow, x: Array, key: PRNGKeyArray, tolerance: float | None, least: int
) -> int | None:
    """How many steps; None if there is no such number."""
    grid = flow.integrator
    if not isinstance(grid, FixedGrid):
        return None
    tolerance = (NOISY if flow.noise_dimension else STILL) if tolerance is None else tolerance
    check_positive("tolerance", tolerance)
    key_path, key_solve = jax.random.split(check_key(key))
    x = x[:POINTS]
    path = flow.sample_path(key=key_path, shape=x.shape[:1])
    pieces = flow.driver.jumps.size + 1
    value = lambda each: np.asarray(_values(flow, jnp.asarray(each), x, path, key_solve))
    each, coarse = max(1, -(-least // pieces)), None
    while each <= MOST:
        coarse = value(each) if coarse is None else coarse
        fine = value(2 * each)
        if _change(coarse, fine) <= tolerance:
            between = range(max(-(-least // pieces), each // 2 + 1), each)
            fewer = (count for count in between if _change(value(count), fine) <= tolerance)
            return pieces * next(fewer, each)
        each, coarse = 2 * each, fine
    return None


def with_steps(flow: AbstractStochasticFlow, steps: int) -> AbstractStochasticFlow:
    """The flow with so many steps of its fixed grid."""
    assert isinstance(flow.integrator, FixedGrid)
    return eqx.tree_at(lambda flow: flow.integrator, flow, flow.integrator.with_steps(steps))


def _change(coarse: np.ndarray, fine: np.ndarray) -> float:
    """The root mean square difference. A point that is lost by one of them counts a nat, as does any change
    that is larger; points lost by both say nothing, and if most are, so do all."""
    lost = ~np.isfinite(coarse), ~np.isfinite(fine)
    if np.mean(lost[0] & lost[1]) > 0.5:
        return np.inf
    with np.errstate(invalid="ignore"):
        change = np.where(lost[0] & lost[1], 0.0, np.abs(coarse - fine))
    return float(np.sqrt(np.mean(np.where(change < 1, change, 1.0) ** 2)))


@jit
def _values(flow: AbstractStochasticFlow, each: Array, x: Array, path: Path, key: PRNGKeyArray) -> Array:
    grid = flow.integrator
    assert isinstance(grid, FixedGrid)
    flow = eqx.tree_at(lambda flow: flow.integrator, flow.without_errors(), CountedGrid.of(grid, each))
    return flow.log_prob_given_path(x, path, key=key)
