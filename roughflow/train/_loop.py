"""The training loop: steps, validation, the grid of a flow, and stopping criteria."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError
from .._devices import Devices, is_leader, together
from .._programs import jit, split
from ..density import StochasticFlow
from ..faq import see
from ..files import Interrupt
from ..flow import MIN_STEPS, FixedGrid, sufficient_steps, with_steps
from ._checkpoint import Checkpoint, History, Progress, progress_bar
from ._data import Batches, Data, Drawn, KnownEntropy, draw, rng_of
from ._maximum_likelihood import MaximumLikelihood
from ._objective import AbstractStatefulObjective
from ._optimiser import Optimiser

GRID_ROWS = 256  # rows on which the grid is chosen
MIN_STEPS_FOR_GRID = 200  # training steps; in a shorter fit, choosing a grid would take too long to compile
# Acceptable discretisation error of log p, in nats. On too coarse a grid a model learns to exploit solver
# errors: the loss on banana data fell 0.6 nats below the entropy.
GRID_TOLERANCE = 1e-3
GRID_GROWTH = 1.25  # minimum growth factor of a grid, because each new number of steps causes recompilation


@dataclass(frozen=True)
class GridChoice:
    """Chooses the number of solver steps that a model needs. Errors are measured at fixed rows of the data,
    or at samples of the model, and along fixed paths."""

    x: Array | None
    key: PRNGKeyArray

    @staticmethod
    def of(
        model: Any, objective: AbstractStatefulObjective, data: Data, steps: int, key: PRNGKeyArray
    ) -> "GridChoice | None":
        """The grid choice of a training run; None if the run is short, if its objective uses no
        log-densities, or if the number of steps is set."""
        if steps < MIN_STEPS_FOR_GRID or not (objective.solves and _is_open(model)):
            return None
        key_rows, key = split(key)
        drawn = isinstance(data, Batches)
        x = data.batch(GRID_ROWS, rng_of(key_rows, 0)) if drawn else draw(data, GRID_ROWS, key_rows)
        return GridChoice(None if x is None else jnp.asarray(x, float), key)

    def needed(self, model: StochasticFlow, now: int | None) -> int | None:
        """The number of solver steps that the model needs, never below the current number `now`; None to keep
        the number of the model."""
        x = model.without_errors().sample(key=self.key, shape=(GRID_ROWS,)) if self.x is None else self.x
        minimum = MIN_STEPS if now is None else now
        needed = sufficient_steps(model, x, self.key, GRID_TOLERANCE, minimum)
        if now is None or needed == now:
            return needed
        # If no number of steps suffices, the model has diverged, and finer steps would not help.
        return now if needed is None else max(needed, math.ceil(GRID_GROWTH * now))


def _is_open(model: Any) -> bool:
    grid = model.integrator if isinstance(model, StochasticFlow) else None
    return isinstance(grid, FixedGrid) and grid.steps is None


def solved_with(model: Any, steps: int | None) -> Any:
    """The model with this number of solver steps, or unchanged if `steps` is None."""
    return model if steps is None else with_steps(model, steps)


def with_no_fewer(model: Any, steps: int | None) -> Any:
    """The model with its number of solver steps raised to `steps` if it is lower."""
    if steps is None or steps <= model.integrator.count(model.driver, model.noise_dimension):
        return model
    return with_steps(model, steps)


MAX_DISPATCH_STEPS = 256  # training steps per call of the compiled program
MAX_HOST_NUMBERS = 2**22  # maximum number of values drawn on the host for one call
DISPATCH_SECONDS = 1.0  # target duration of a call
COOLING_RATIO = 4  # earlier steps per step of the final phase, in which the learning rate decays to zero
SHORT_RUN = 16  # training steps; in shorter runs compilation dominates
MAX_NONFINITE_STREAK = 20  # number of consecutive steps that are not finite after which a run fails


@dataclass(frozen=True)
class Loop:
    """A training run: takes steps, validates, and decides when to stop."""

    rest: Any  # the untrained part of model and objective
    optimiser: Optimiser
    data: Data
    held_out: Array | None
    batch_size: int
    steps: int
    every: int
    patience: int | None
    grid_choice: GridChoice | None
    devices: Devices
    key: PRNGKeyArray
    key_validation: PRNGKeyArray

    def placed(self) -> "Loop":
        """The run with all its constant arrays on its devices."""
        names = ("rest", "data", "held_out", "key", "key_validation")
        return replace(self, **{name: self.devices.put(getattr(self, name)) for name in names})

    def run(
        self, now: Progress, store: Checkpoint | None, interrupt: Interrupt, progress: bool | str
    ) -> Progress:
        """Train from the current state to the end, or until a stopping criterion."""
        with together():
            now = self.placed()._run(now.moved(self.devices.put), store, interrupt, progress)
            return now.moved(self.devices.back)

    def _run(
        self, now: Progress, store: Checkpoint | None, interrupt: Interrupt, progress: bool | str
    ) -> Progress:
        """Train in chunks of steps on the device."""
        save = lambda at_once=False: None if store is None else store.save(now, at_once)
        length = 1
        name = progress if isinstance(progress, str) else ""
        with progress_bar(self.steps, done=now.step, name=name, shown=bool(progress) and is_leader()) as bar:
            while now.step < self.cooling(now)[1]:
                length, going = self.devices.all_reduce_min((length, not interrupt.wanted))
                if not going:
                    interrupt.wanted = True
                    break
                if now.step == 0 and not now.history.validation_loss.size:
                    now = self._validated(self._resolved(now))
                stop = min(self.cooling(now)[1], (now.step // self.every + 1) * self.every)
                began = time.perf_counter()
                count = min(length, self._longest, stop - now.step)
                now = self._advance(now, count)
                seconds = time.perf_counter() - began
                # The first chunk includes compilation, so its time is not representative.
                length = max(1, int(count * DISPATCH_SECONDS / seconds)) if length > 1 else 2
                bar.update(count)
                bar.set_postfix_str(self._metrics(now.history))
                if now.streak >= MAX_NONFINITE_STREAK:
                    save(at_once=True)
                    self._explain(now)
                if now.step in (stop, self.steps):
                    now = self._validated(self._resolved(now))
                save()
        save(at_once=True)
        return now

    def cooling(self, now: Progress) -> tuple[int, int]:
        """The first and the last step of the final phase, in which the learning rate decays to zero after
        patience runs out."""
        start = now.stale_from(self.patience)
        if start is None:
            return self.steps, self.steps
        return start, min(self.steps, start + max(1, start // COOLING_RATIO))

    def settled(self, now: Progress) -> Any:
        """The parameters to validate and to return."""
        return self.optimiser.settled(now.parameters, now.optimiser)

    def _resolved(self, now: Progress) -> Progress:
        """Choose the number of solver steps again if a validation check is due."""
        if self.grid_choice is None:
            return now
        model = self.devices.back(eqx.combine(now.parameters[0], self.rest[0]))
        needed = self.devices.all_reduce_min([self.grid_choice.needed(model, now.grid) or 0])[0]
        return replace(now, grid=needed or None)

    def _advance(self, now: Progress, count: int) -> Progress:
        """Take `count` more steps, or fewer if too many in a row are not finite."""
        carried = (now.parameters, now.optimiser, now.state, self.devices.put(jnp.asarray(now.streak)))
        # Arrays, because Python numbers would become constants of the compiled program.
        span = self.devices.put(tuple(jnp.asarray(n) for n in (now.step, count, *self.cooling(now))))
        data = self._drawn(now.step, count)
        advance, _ = self._programs
        carried, taken, loss, metrics = advance(
            self.devices, carried, self.rest, now.grid, self.optimiser, data, self.batch_size, self.key, *span
        )
        parameters, optimiser, state, streak = carried
        taken = int(taken)
        series = {name: np.asarray(values, float)[:taken] for name, values in metrics.items()}
        history = now.history.with_steps(np.asarray(loss, float)[:taken], series)
        return now.advanced(parameters, optimiser, state, int(streak), history)

    @property
    def _programs(self) -> tuple[Callable[..., Any], Callable[..., Array]]:
        """The compiled functions that take steps and validate."""
        return (_advance_soon, _validate_soon) if self.steps <= SHORT_RUN else (_advance, _validate)

    @functools.cached_property
    def _longest(self) -> int:
        """Maximum number of steps of a chunk."""
        if not isinstance(self.data, Batches):
            return MAX_DISPATCH_STEPS
        return max(1, min(MAX_DISPATCH_STEPS, MAX_HOST_NUMBERS // self._batch(self.data, 0).size))

    def _drawn(self, first: int, count: int) -> Any:
        """The data for the next steps; batches from the host are drawn in advance."""
        if not isinstance(self.data, Batches):
            return self.data
        rows = np.stack([self._batch(self.data, first + i) for i in range(count)])
        # The number of batches is constant, so that one compiled program suffices.
        rows = np.pad(rows, ((0, self._longest - count), (0, 0), (0, 0)))
        return Drawn(self.devices.put_rows(rows, axis=1))

    def _batch(self, data: Batches, step: int) -> np.ndarray:
        rows = data.batch(self.batch_size, rng_of(self.key, step))
        return rows.astype(jax.dtypes.canonicalize_dtype(float))

    def _validated(self, now: Progress) -> Progress:
        """Evaluate the validation loss, if there are validation data."""
        if self.held_out is None:
            return now
        parameters = self.settled(now)
        _, validate = self._programs
        setting = (parameters, self.rest, now.grid, now.state)
        loss = validate(self.devices, *setting, self.held_out, self.key_validation)
        now = now.validated(float(loss), parameters)
        judged = np.any(now.history.validation_loss < np.inf)
        if now.step != now.stale_from(self.patience) or not judged:
            return now
        # The final steps start from the best parameters, which belong to an earlier step.
        return replace(now, parameters=now.best, optimiser=self.optimiser.back_to(now.best, now.optimiser))

    def _explain(self, now: Progress) -> None:
        """Raise an error for a failing run. If a step outside `jax.jit` reveals the reason, include it."""
        model, objective = _combined(now.parameters, self.rest, now.grid)
        advice = "lower learning_rate or clip of rf.train.TrainingOptions, or use smaller initial weights"
        advice += see("training-not-finite")
        message = f"{now.streak} steps in a row up to step {now.step} were not finite"
        key_batch, key_loss = jax.random.split(jax.random.fold_in(self.key, now.step - 1))
        try:
            x = draw(self._drawn(now.step - 1, 1), self.batch_size, key_batch)
            objective.step(model, x, now.state, key=key_loss)
        except Exception as error:
            raise NonFiniteError(f"{message}: {error}; {advice}") from error
        raise NonFiniteError(f"{message}: the loss or its gradient overflows, or is NaN; {advice}")

    def _metrics(self, history: History) -> str:
        """The metrics shown in the progress bar."""
        parts = [f"loss {history.recent():.4f}"]
        if isinstance(self.data, KnownEntropy) and isinstance(self.rest[1], MaximumLikelihood):
            parts.append(f"excess {history.recent() - self.data.entropy:.4f}")
        parts += [f"{name.replace('_', ' ')} {history.recent(name):.3g}" for name in history.metrics]
        if history.validation_loss.size:
            parts.append(f"validation {history.validation_loss[-1]:.4f}")
        if history.skipped:
            parts.append(f"skipped {history.skipped}")
        return ", ".join(parts)


def _take_steps(
    devices: Devices,
    carried,
    rest,
    grid: int | None,
    optimiser: Optimiser,
    data,
    batch_size: int,
    key,
    first,
    count,
    start,
    end,
):
    """Take `count` steps, starting with step `first`, in one compiled program, which is the same for every
    `count`. The learning rate decays to zero from step `start` to step `end`."""

    pack = optimiser.packing(carried[0])

    def loss_of(parameters, state, x, key):
        model, objective = _combined(parameters, rest, grid)
        with devices.at_work(parameters):
            return objective.step(model, x, state, key=key)

    def one(carry):
        (parameters, moments, state, streak), done, losses, metrics = carry
        key_batch, key_loss = jax.random.split(jax.random.fold_in(key, first + done))
        x = devices.split(draw(data, batch_size, key_batch, done))
        value = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (moved, report)), slope = value(pack.undone(parameters), state, x, key_loss)
        slope = pack(slope)
        fine = _all_finite((loss, slope))
        left = (end - first - done) / jnp.maximum(end - start, 1)
        stepped = (
            *optimiser.step(slope, moments, parameters, jnp.where(first + done < start, 1, left)),
            moved,
        )
        keep = lambda new, old: jnp.where(fine, new, old)
        kept = jax.tree.map(keep, stepped, (parameters, moments, state))
        losses = losses.at[done].set(jnp.where(fine, loss, jnp.nan))
        metrics = {name: values.at[done].set(report[name]) for name, values in metrics.items()}
        return (*kept, jnp.where(fine, 0, streak + 1)), done + 1, losses, metrics

    going = lambda carry: (carry[1] < count) & (carry[0][3] < MAX_NONFINITE_STREAK)
    example = jax.eval_shape(lambda: draw(data, batch_size, key))
    loss, (_, report) = jax.eval_shape(loss_of, carried[0], carried[2], example, key)
    blank = lambda like: jnp.full(MAX_DISPATCH_STEPS, jnp.nan, like.dtype)
    metrics = {name: blank(value) for name, value in report.items()}
    carry = ((*pack(carried[:2]), *carried[2:]), jnp.asarray(0), blank(loss), metrics)
    carried, *series = jax.lax.while_loop(going, one, carry)
    return devices.same(((*pack.undone(carried[:2]), *carried[2:]), *series))


def _validation_loss(
    devices: Devices, parameters, rest, grid: int | None, state, data: Array, key: PRNGKeyArray
) -> Array:
    model, objective = _combined(parameters, rest, grid)
    with devices.at_work():
        return devices.same(objective.step(model, devices.split(data), state, key=key)[0])


# In short runs, faster programs do not make up for their longer compilation.
_advance, _advance_soon = jit(_take_steps), jit(_take_steps, level=1)
_validate, _validate_soon = jit(_validation_loss), jit(_validation_loss, level=1)


def _combined(parameters: Any, rest: Any, grid: int | None) -> tuple[Any, Any]:
    """Model and objective, with this number of solver steps."""
    model, objective = eqx.combine(parameters, rest)
    return solved_with(model, grid), objective


def _all_finite(tree: Any) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
