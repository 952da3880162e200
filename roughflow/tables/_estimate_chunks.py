"""Estimates of more points than fit in memory, in chunks, on one or several devices."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from .._checks import check_count, check_instance, check_key
from .._devices import Devices, DevicesLike
from ..density import AbstractEstimator, Estimate, StochasticFlow
from ._columns import WithRelations
from ._standardised import Standardised

TableModel = Standardised | WithRelations
QUEUED_CHUNKS = 2  # chunks per device that are in progress or waiting


def estimate_chunks(
    model: StochasticFlow | Standardised | WithRelations,
    chunks: Iterable[Any],
    *,
    key: PRNGKeyArray,
    first: int = 0,
    devices: DevicesLike = None,
    estimator: AbstractEstimator | None = None,
    tolerance: float | None = None,
    max_paths: int = 2**16,
) -> Iterator[Estimate]:
    """Yield the estimates of chunks of points, one after the other, in the memory of a few chunks.

    Random numbers depend on the key and the index of a chunk, not on the number of devices.

    **Arguments:**

    - `model`: a flow, or the result of `rf.fit_density`; for a conditional density, the last columns of a
      chunk are the given ones.
    - `chunks`: a list or an iterator of points `(rows, dimension)`. A few thousand rows each are efficient;
      chunks of different sizes recompile.
    - `first`: index of the first chunk, to continue an interrupted run with the same random numbers.
    - `devices`: a number or a list of devices, which take turns.
    - other arguments: as for `StochasticFlow.estimate`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    chunks = (jnp.full((4, 1), x) for x in range(3))
    estimator = rf.PullBack(num_paths=16)
    for estimate in rf.tables.estimate_chunks(flow, chunks, key=jax.random.key(0), estimator=estimator):
        print(estimate.log_prob)
    ```
    """
    check_instance("model", model, StochasticFlow | TableModel, "a flow, or the result of rf.fit_density")
    check_instance("chunks", chunks, Iterable, "a list or an iterator of arrays (rows, dimension)")
    check_count("first", first, least=0)
    key = check_key(key)
    settings: dict[str, Any] = {"estimator": estimator, "tolerance": tolerance, "max_paths": max_paths}
    own = Devices.of(devices).own

    def estimate(i: int, x: Any) -> Estimate:
        given = {}
        if isinstance(model, TableModel) and model.num_given:
            x, given["given"] = x[:, : -model.num_given], x[:, -model.num_given :]
        return model.estimate(x, key=jax.random.fold_in(key, i), **given, **settings)

    def on(device: Any, i: int, x: Any) -> Estimate:
        with jax.default_device(device):
            return jax.tree.map(np.asarray, estimate(i, x))

    if len(own) < 2:
        yield from (estimate(i, x) for i, x in enumerate(chunks, first))
        return
    waiting: deque[Future[Estimate]] = deque()
    with ThreadPoolExecutor(len(own)) as pool:
        try:
            for i, x in enumerate(chunks, first):
                waiting.append(pool.submit(on, own[i % len(own)], i, x))
                if len(waiting) == QUEUED_CHUNKS * len(own):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
