"""Fit a model with any objective."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count, check_flag, check_instance, check_key, check_path
from .._devices import Devices, DevicesLike, leads
from .._functions import trainable
from .._programs import fold_in, split as split_key
from .._show import count, listed, named, num_parameters
from ..density import StochasticFlow
from ..faq import see
from ..files import Interrupt, file_lock
from ._checkpoint import Checkpoint, Progress
from ._data import Batches, DataSource, check_columns, split
from ._loop import GridLook, Loop, with_no_fewer
from ._maximum_likelihood import MaximumLikelihood
from ._objective import AbstractStatefulObjective
from ._optimiser import make_optimiser, start_of
from ._progress import History


@dataclass(frozen=True)
class Fitted:
    """The result of a fit: the `model`; the trained `objective`; the `history`; `interrupted`, whether the
    user stopped it; the final `state` of the objective; and the histories of its `stages` by name, if it had
    several."""

    model: Any
    objective: AbstractStatefulObjective
    history: History
    interrupted: bool
    state: Any = ()
    stages: Mapping[str, History] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self._listed()

    def _listed(self, first: Sequence[tuple[str, str]] = (), last: Sequence[tuple[str, str]] = ()) -> str:
        histories = self.stages or {named(self.objective): self.history}
        parts = [(name, history.told()) for name, history in histories.items()]
        # Training changes only the flow of an `rf.tables.Standardised`.
        trained = getattr(self.model, "flow", self.model)
        is_flow = isinstance(trained, StochasticFlow)
        model = repr(self.model).splitlines()[0] if is_flow else named(self.model)
        size = f"{num_parameters(trained):,}"
        title = "Fitted, interrupted" if self.interrupted else "Fitted"
        return listed(title, [("model", model), *first, ("parameters", size), *parts, *last])


def fit(
    model: Any,
    data: Array | np.ndarray | DataSource | Batches | None = None,
    *,
    key: PRNGKeyArray,
    objective: AbstractStatefulObjective | None = None,
    steps: int = 2000,
    batch_size: int = 256,
    learning_rate: float = 3e-3,
    optimiser: optax.GradientTransformation | None = None,
    clip: float | None = 10.0,
    average: float | None = None,
    frozen: Callable[[Any], Any] | None = None,
    validation: float | Array | np.ndarray = 0.0,
    every: int = 100,
    patience: int | None = None,
    checkpoint: str | PathLike | None = None,
    resume: bool = False,
    progress: bool | str = True,
    devices: DevicesLike = None,
) -> Fitted:
    """Make an objective small over the parameters of a model: all its floating-point arrays but those of a
    target it is given.

    The same key gives the same numbers, wherever the run is cut in two. Ctrl-C ends it after the present
    stretch of steps (a second or so) and returns what was reached.

    **Arguments:**

    - `model`: a pytree, usually an `rf.StochasticFlow`.
    - `data`: an array with one row a sample, an `rf.tables.ParquetTable`, or a distribution to draw fresh
      samples from in each step.
    - `objective`: `rf.MaximumLikelihood()` if none is given.
    - `steps`, `batch_size`: how many, and of how many rows (drawn with replacement; all, if there are no
      more).
    - `learning_rate`: of Adam, which rises to it and falls to zero along a cosine; or give any
      `optimiser` of optax (`optax.adagrad(0.05)` is the paper's).
    - `clip`: the largest norm of a gradient; a longer one is shortened. None for no limit.
    - `average`: 0.999, say, to validate and return an average of the parameters over the steps, with weights
      that decay by this factor a step: it smooths out the noise of minibatches.
    - `frozen`: a function of the model that returns the part, or tuple of parts, not to train.
    - `validation`: data to look at every `every` steps, or what share of `data` to set aside for it.
      The model with the lowest loss there is the one returned. After `patience` looks without a lower
      one the run goes back to that model and ends soon, with steps at a rate that falls to zero.
    - `checkpoint`: a file to keep the state of the run in; `resume=True` goes on from it.
    - `progress`: show a bar; a text is shown before it.
    - `devices`: how many devices to split each batch between, or which, or a `jax.sharding.Mesh` of them; see
      the page on scale. The numbers are those of one device, to rounding, and a run may go on with others.

    A step whose loss or gradient is not finite is skipped and counted; twenty in a row are an error.

    Of a flow whose `rf.FixedGrid` leaves the number of its steps open, a fit of 200 steps or more sees to
    that itself, at the start and every `every` steps: as few as move log-densities by less than 0.001, and
    more as the flow learns to move faster. On a grid that is too coarse a flow would learn to make use of its
    errors. The fitted flow has no fewer steps than it was trained with.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    sde = rf.ItoSDE(rf.MLP(2, 2, width=8, depth=1, key=key), rf.ConstantDiffusion(0.3 * jnp.eye(2)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)))
    fitted = rf.fit(flow, rf.datasets.Banana(), key=key, steps=10, batch_size=32, progress=False)
    fitted.model, fitted.history.loss
    ```
    """
    objective = MaximumLikelihood() if objective is None else objective
    _check(objective, frozen, patience, checkpoint, resume)
    steps, batch_size, every = (
        check_count(name, value)
        for name, value in (("steps", steps), ("batch_size", batch_size), ("every", every))
    )
    key_split, *keys, key_objective = split_key(check_key(key), 4)
    objective = objective.prepare(model, key=key_objective)
    train, held_out = split(data, validation, objective, key_split)
    check_columns(model, train, held_out)
    if patience is not None and held_out is None:
        raise ValueError(
            "patience needs validation data: set validation, such as validation=0.1"
            + see("budgets-and-validation")
        )
    moves = make_optimiser(optimiser, learning_rate, steps, clip, average)
    parameters, rest = eqx.partition((model, objective), _trained(model, objective, frozen))
    state = objective.start(model, key=fold_in(key_objective, 1))
    start = Progress.start(parameters, start_of(moves, parameters), state)
    look = GridLook.of(model, objective, train, steps, fold_in(key_objective, 2))
    budget = (batch_size, steps, every, patience)
    loop = Loop(rest, moves, train, held_out, *budget, look, Devices.of(devices), *keys)
    store = None
    if checkpoint is not None:
        settings = {"steps": steps, "batch_size": batch_size, "every": every, "patience": patience}
        settings |= {"learning_rate": float(learning_rate), "clip": moves.clip, "average": moves.decay}
        fixed = {"data": train, "validation": held_out, "key": key, "model": rest[0], "objective": rest[1]}
        store = Checkpoint.open(checkpoint, settings, start, fixed | {"optimiser": moves})
    with _alone(checkpoint), Interrupt() as interrupt:
        now = loop.run(_begin(store, start, resume), store, interrupt, progress)
    judged = np.any(now.history.validation_loss < np.inf)
    best_model, best_objective = eqx.combine(now.best if judged else loop.settled(now), rest)
    stopped = interrupt.wanted and now.step < loop.cooling(now)[1]
    history = replace(now.history, ended=_ended(now.step, steps, patience, stopped))
    best_model = with_no_fewer(best_objective.leave(best_model), now.grid)
    return Fitted(best_model, best_objective, history, stopped, now.state)


def _check(objective: Any, frozen: Any, patience: Any, checkpoint: Any, resume: Any) -> None:
    check_instance("objective", objective, AbstractStatefulObjective, "one such as rf.MaximumLikelihood()")
    if frozen is not None:
        check_callable("frozen", frozen, "from the model to the part not to train")
    if patience is not None:
        check_count("patience", patience)
    if checkpoint is not None:
        check_path("checkpoint", checkpoint)
    check_flag("resume", resume)


def _ended(step: int, steps: int, patience: int | None, stopped: bool) -> str | None:
    """The reason for stopping early, or None."""
    if step >= steps:
        return None
    why = "interrupted" if stopped else f"validation loss did not improve in {count(patience or 0, 'check')}"
    return f"at step {step:,} of {steps:,}: {why}"


def _trained(
    model: Any, objective: AbstractStatefulObjective, frozen: Callable[[Any], Any] | None
) -> tuple[Any, Any]:
    """Whether each leaf of the model and the objective is trained."""
    can = trainable(model)
    still = lambda parts: jax.tree.map(lambda _: False, parts)
    learned = eqx.tree_at(objective.learns, still(model), replace=objective.learns(can))
    if frozen is not None:
        learned = eqx.tree_at(frozen, learned, replace_fn=still)
    return learned, trainable(objective)


def _alone(checkpoint: str | PathLike | None) -> AbstractContextManager[None]:
    """Refuse to share a checkpoint with another run."""
    message = f"checkpoint {checkpoint} is in use by another run: wait for it, or choose another file"
    if checkpoint is None or not leads():
        return nullcontext()
    return file_lock(checkpoint, message + see("checkpoints"))


def _begin(store: Checkpoint | None, start: Progress, resume: bool) -> Progress:
    if store is None:
        if resume:
            raise ValueError("resume needs a checkpoint" + see("checkpoints"))
        return start
    return store.load(start) if resume else store.begin(start)
