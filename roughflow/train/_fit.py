"""Fit a model with any objective."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    check_callable,
    check_count,
    check_flag,
    check_instance,
    check_key,
    check_number,
    check_path,
    grouped_arguments,
)
from .._devices import Devices, DevicesLike, is_leader
from .._functions import trainable
from .._programs import fold_in, split as split_key
from .._show import count, listed, named, num_parameters
from ..density import StochasticFlow
from ..faq import see
from ..files import Interrupt, file_lock
from ._checkpoint import Checkpoint, History, Progress
from ._data import Batches, DataSource, check_columns, split
from ._loop import GridChoice, Loop, with_no_fewer
from ._maximum_likelihood import MaximumLikelihood
from ._objective import AbstractStatefulObjective
from ._optimiser import make_optimiser, start_of


@dataclass(frozen=True)
class Fitted:
    """The result of a fit.

    - `model`: the fitted model.
    - `objective`: the trained objective.
    - `history`: the `rf.train.History` of the fit.
    - `interrupted`: whether the user interrupted the fit.
    - `state`: the final state of the objective.
    - `stages`: the history of each stage by name, if the fit had several stages.
    """

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
        parts = [(name, history.summary()) for name, history in histories.items()]
        # Training changes only the flow of an `rf.tables.Standardised`.
        trained = getattr(self.model, "flow", self.model)
        is_flow = isinstance(trained, StochasticFlow)
        model = repr(self.model).splitlines()[0] if is_flow else named(self.model)
        size = f"{num_parameters(trained):,}"
        title = "Fitted, interrupted" if self.interrupted else "Fitted"
        return listed(title, [("model", model), *first, ("parameters", size), *parts, *last])


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of the optimiser and of early stopping, for `rf.fit`, `rf.fit_density` and `rf.tune_sampler`. A
    field that is None takes the default of the function that the options are passed to.

    - `batch_size`: rows per step, drawn with replacement; all rows if there are fewer.
    - `learning_rate`: peak learning rate of Adam, with linear warm-up and cosine decay to zero.
    - `optimiser`: an optax optimiser instead of Adam, such as the paper's `optax.adagrad(0.05)`.
    - `clip`: maximum norm of a gradient; larger gradients are scaled down. `math.inf` for no limit.
    - `average`: decay per step of an exponential moving average of the parameters, such as 0.999; 0 for no
      average. The average is validated and returned, which reduces the noise of minibatches.
    - `patience`: number of validation checks without improvement before stopping; 0 for no early stopping.
      The run then continues from its best model for a few steps, while the learning rate decays to zero.
    - `validate_every`: number of steps between two validation checks.

    ```python
    import roughflow as rf

    training = rf.train.TrainingOptions(batch_size=64, learning_rate=1e-3, average=0.99)
    ```
    """

    batch_size: int | None = None
    learning_rate: float | None = None
    optimiser: optax.GradientTransformation | None = None
    clip: float | None = None
    average: float | None = None
    patience: int | None = None
    validate_every: int | None = field(default=None, metadata={"was": "every"})

    def __post_init__(self) -> None:
        checks: dict[str, Callable[[str, Any], Any]] = {
            "batch_size": check_count,
            "validate_every": check_count,
            "patience": partial(check_count, least=0),
            "learning_rate": partial(check_number, above=0),
            "average": partial(check_number, least=0, below=1),
        }
        for name, check in checks.items():
            if getattr(self, name) is not None:
                check(name, getattr(self, name))
        if self.clip not in (None, math.inf):
            check_number("clip", self.clip, above=0)
        if self.optimiser is not None:
            wanted = "an optax optimiser, such as optax.adam(1e-3)"
            check_instance("optimiser", self.optimiser, optax.GradientTransformation, wanted)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "TrainingOptions":
        """These options, with fields that are None taken from `defaults`."""
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)


DEFAULTS = {
    "batch_size": 256,
    "learning_rate": 3e-3,
    "clip": 10.0,
    "average": 0.0,
    "patience": 0,
    "validate_every": 100,
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Checkpoints and devices of a training run, for `rf.fit`, `rf.fit_density` and `rf.tune_sampler`.

    - `checkpoint`: a file for the state of the run.
    - `resume`: whether to continue the run in `checkpoint`.
    - `devices`: number of devices to split each batch between, a list of devices, or a `jax.sharding.Mesh`;
      see the page on scale. The results are those of one device, up to rounding, and a run can be resumed on
      other devices.

    ```python
    import roughflow as rf

    run = rf.train.RunOptions(checkpoint="model.checkpoint", resume=False)
    ```
    """

    checkpoint: str | PathLike | None = None
    resume: bool = False
    devices: DevicesLike = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            check_path("checkpoint", self.checkpoint)
        check_flag("resume", self.resume)
        if self.resume and self.checkpoint is None:
            raise ValueError("resume needs a checkpoint" + see("checkpoints"))


@grouped_arguments(training=TrainingOptions, run=RunOptions)
def fit(
    model: Any,
    data: Array | np.ndarray | DataSource | Batches | None = None,
    *,
    key: PRNGKeyArray,
    objective: AbstractStatefulObjective | None = None,
    steps: int = 2000,
    frozen: Callable[[Any], Any] | None = None,
    validation: float | Array | np.ndarray = 0.0,
    progress: bool | str = True,
    training: TrainingOptions | None = None,
    run: RunOptions | None = None,
) -> Fitted:
    """Minimise an objective over the parameters of a model: all its floating-point arrays, except those of a
    target.

    The same key gives the same result, even if the run is interrupted and resumed. Ctrl-C stops the run
    within about a second and returns the current model.

    **Arguments:**

    - `model`: a pytree, usually an `rf.StochasticFlow`.
    - `data`: an array with one row per sample, an `rf.tables.ParquetTable`, or a distribution, from which new
      samples are drawn in each step.
    - `objective`: default `rf.MaximumLikelihood()`.
    - `steps`: number of training steps.
    - `frozen`: a function of the model that returns the part, or tuple of parts, not to train.
    - `validation`: validation data, or the fraction of the rows of `data` to use for validation. The model
      with the lowest validation loss is returned.
    - `progress`: whether to show a progress bar, or a text to show before the bar.
    - `training`: an `rf.train.TrainingOptions`. By default: batches of 256 rows, a learning rate of 3e-3,
      gradients clipped at norm 10, no average, a validation check every 100 steps, no early stopping.
    - `run`: an `rf.train.RunOptions`: checkpoints and devices.

    A step whose loss or gradient is not finite is skipped and counted; twenty in a row raise an error.

    If the number of steps of the flow's `rf.FixedGrid` is not set, a fit of 200 steps or more chooses it at
    the start and at every validation check: the smallest number for which the error of log-densities is below
    0.001. With too few steps, a flow would learn to exploit the errors of the solver. The number never
    decreases, and the fitted flow has at least as many steps as in training.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    sde = rf.ItoSDE(rf.MLP(2, 2, width=8, depth=1, key=key), rf.ConstantDiffusion(0.3 * jnp.eye(2)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)))
    training = rf.train.TrainingOptions(batch_size=32)
    fitted = rf.fit(flow, rf.datasets.Banana(), key=key, steps=10, training=training, progress=False)
    fitted.model, fitted.history.loss
    ```
    """
    objective = MaximumLikelihood() if objective is None else objective
    check_instance(
        "objective", objective, AbstractStatefulObjective, "an objective such as rf.MaximumLikelihood()"
    )
    if frozen is not None:
        check_callable("frozen", frozen, "from the model to the part not to train")
    steps = check_count("steps", steps)
    training, run = (training or TrainingOptions()).with_defaults(DEFAULTS), run or RunOptions()
    key_split, *keys, key_objective = split_key(check_key(key), 4)
    objective = objective.prepare(model, key=key_objective)
    train, held_out = split(data, validation, objective, key_split)
    check_columns(model, train, held_out)
    if training.patience and held_out is None:
        raise ValueError(
            "patience needs validation data: set validation, such as validation=0.1"
            + see("budgets-and-validation")
        )
    rate, clip, average = (float(getattr(training, name)) for name in ("learning_rate", "clip", "average"))
    moves = make_optimiser(training.optimiser, rate, steps, clip, average)
    parameters, rest = eqx.partition((model, objective), _trained(model, objective, frozen))
    state = objective.start(model, key=fold_in(key_objective, 1))
    # Steps return strongly typed arrays; weakly typed ones would cause a separate compilation for one step.
    parameters, state = jax.tree.map(_strongly_typed, (parameters, state))
    start = Progress.start(parameters, start_of(moves, parameters), state)
    grid_choice = GridChoice.of(model, objective, train, steps, fold_in(key_objective, 2))
    batch_size, every = (
        check_count(name, getattr(training, name)) for name in ("batch_size", "validate_every")
    )
    patience, devices = training.patience or None, Devices.of(run.devices)
    loop = Loop(rest, moves, train, held_out, batch_size, steps, every, patience, grid_choice, devices, *keys)
    store = None
    if run.checkpoint is not None:
        budget = {"batch_size": batch_size, "steps": steps, "every": every, "patience": patience}
        rates = {"learning_rate": rate, "clip": moves.clip, "average": moves.decay}
        fixed = {"data": train, "validation": held_out, "key": key, "model": rest[0], "objective": rest[1]}
        store = Checkpoint.open(run.checkpoint, budget | rates, start, fixed | {"optimiser": moves})
    with _alone(run.checkpoint), Interrupt() as interrupt:
        now = loop.run(_begin(store, start, run.resume), store, interrupt, progress)
    judged = np.any(now.history.validation_loss < np.inf)
    best_model, best_objective = eqx.combine(now.best if judged else loop.settled(now), rest)
    stopped = interrupt.wanted and now.step < loop.cooling(now)[1]
    history = replace(now.history, ended=_ended(now.step, steps, patience, stopped))
    best_model = with_no_fewer(best_objective.leave(best_model), now.grid)
    return Fitted(best_model, best_objective, history, stopped, now.state)


def _ended(step: int, steps: int, patience: int | None, stopped: bool) -> str | None:
    """The reason for stopping early, or None."""
    if step >= steps:
        return None
    why = "interrupted" if stopped else f"validation loss did not improve in {count(patience or 0, 'check')}"
    return f"at step {step:,} of {steps:,}: {why}"


def _strongly_typed(leaf: Any) -> Any:
    return leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _trained(
    model: Any, objective: AbstractStatefulObjective, frozen: Callable[[Any], Any] | None
) -> tuple[Any, Any]:
    """For each leaf of the model and of the objective, whether it is trained."""
    can = trainable(model)
    still = lambda parts: jax.tree.map(lambda _: False, parts)
    learned = eqx.tree_at(objective.learns, still(model), replace=objective.learns(can))
    if frozen is not None:
        learned = eqx.tree_at(frozen, learned, replace_fn=still)
    return learned, trainable(objective)


def _alone(checkpoint: str | PathLike | None) -> AbstractContextManager[None]:
    """Lock the checkpoint file; raise an error if another run is using it."""
    message = f"checkpoint {checkpoint} is in use by another run: wait for it, or choose another file"
    if checkpoint is None or not is_leader():
        return nullcontext()
    return file_lock(checkpoint, message + see("checkpoints"))


def _begin(store: Checkpoint | None, start: Progress, resume: bool) -> Progress:
    if store is None:
        return start
    return store.load(start) if resume else store.begin(start)
