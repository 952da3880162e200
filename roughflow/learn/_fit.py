"""One fitting loop, for any objective."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray
from tqdm.auto import tqdm

from .._checks import NonFiniteError, check_count, check_finite, check_key, check_positive
from .._programs import jit
from ._checkpoint import Checkpoint, Progress
from ._history import History
from ._interrupt import Interrupt
from ._maximum_likelihood import MaximumLikelihood
from ._objective import AbstractObjective, Leaving, Prepared, Remembering
from ._trainable import trainable

DISPATCH = 256  # steps on the device between two looks at it, at most
SECONDS = 1.0  # that such a stretch should take
HOPELESS = 20  # steps in a row that are not finite end a run


@runtime_checkable
class Sampler(Protocol):
    """A law that gives fresh data in each step, such as those of `rf.datasets`."""

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array: ...


@runtime_checkable
class Known(Sampler, Protocol):
    """A law whose entropy is known: no model has a smaller expected loss."""

    @property
    def entropy(self) -> float: ...


@dataclass(frozen=True)
class Fitted:
    """What a fit returns: the `model`; the `objective`, with what it learned itself; the `history`; and
    `interrupted`, whether it was stopped by hand before its time."""

    model: Any
    objective: AbstractObjective
    history: History
    interrupted: bool


def fit(
    model: Any,
    data: Array | np.ndarray | Sampler | None = None,
    *,
    key: PRNGKeyArray,
    objective: AbstractObjective | None = None,
    steps: int = 2000,
    batch_size: int = 256,
    learning_rate: float = 3e-3,
    optimiser: optax.GradientTransformation | None = None,
    clip: float | None = 10.0,
    frozen: Callable[[Any], Any] | None = None,
    validation: float | Array | np.ndarray = 0.0,
    every: int = 100,
    patience: int | None = None,
    checkpoint: str | PathLike | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Fitted:
    """Make an objective small over the parameters of a model: all its floating-point arrays but those of a
    target it is given.

    The same key gives the same numbers, wherever the run is cut in two. Ctrl-C ends it after the present
    stretch of steps (a second or so) and returns what was reached.

    **Arguments:**

    - `model`: a pytree, usually an `rf.StochasticFlow`.
    - `data`: an array with one row a sample, or a law to draw fresh samples from in each step.
    - `objective`: `rf.MaximumLikelihood()` if none is given.
    - `steps`, `batch_size`: how many, and of how many rows (drawn with replacement; all, if there are no
      more).
    - `learning_rate`: of Adam, which rises to it and falls to zero along a cosine; or give any
      `optimiser` of optax (`optax.adagrad(0.05)` is the paper's).
    - `clip`: the largest norm of a gradient; a longer one is shortened. None for no limit.
    - `frozen`: a function of the model that returns the part, or tuple of parts, not to train.
    - `validation`: data to look at every `every` steps, or what share of `data` to set aside for it.
      The model with the lowest loss there is the one returned, and `patience` looks without a lower
      one end the run.
    - `checkpoint`: a file to keep the state of the run in; `resume=True` goes on from it.
    - `progress`: show a bar.

    A step whose loss or gradient is not finite is skipped and counted; twenty in a row are an error.

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
    steps, batch_size = check_count("steps", steps), check_count("batch_size", batch_size)
    every, patience = check_count("every", every), None if patience is None else int(patience)
    key_split, key_run, key_validation, key_objective = jax.random.split(check_key(key), 4)
    if isinstance(objective, Prepared):
        objective = objective.prepare(model, key=key_objective)
    train, held_out = _split(data, validation, objective, key_split)
    if patience is not None and held_out is None:
        raise ValueError("patience needs validation data: set validation, to 0.1 say")
    transform = _optimiser(optimiser, learning_rate, steps, clip)
    parameters, rest = eqx.partition((model, objective), _trained(model, objective, frozen))
    loop = _Loop(rest, transform, train, batch_size, key_run)
    start = Progress.start(parameters, transform.init(parameters))
    store = None
    if checkpoint is not None:
        settings = {"steps": steps, "batch_size": batch_size, "every": every, "patience": patience}
        settings |= {"learning_rate": float(learning_rate), "clip": None if clip is None else float(clip)}
        fixed = {"data": train, "validation": held_out, "key": key, "model": rest[0], "objective": rest[1]}
        store = Checkpoint.open(checkpoint, settings, start, fixed | {"optimiser": transform})
    now = _begin(store, start, resume)
    look = None if held_out is None else lambda p: _validate(p, rest, held_out, key_validation)
    with Interrupt() as interrupt, _bar(now.step, steps, progress) as bar:
        now = _run(loop, now, steps, every, patience, look, store, interrupt, bar, train)
    judged = np.any(now.history.validation_loss < np.inf)
    chosen = now.best if judged else now.parameters
    best_model, best_objective = eqx.combine(chosen, rest)
    leaving: Any = best_objective
    if isinstance(leaving, Leaving):
        best_model = leaving.leave(best_model)
    return Fitted(best_model, best_objective, now.history, interrupt.wanted and now.step < steps)


def _run(loop, now, steps, every, patience, look, store, interrupt, bar, data) -> Progress:
    """Stretches of steps on the device, until the end or a reason to stop."""
    length = 1
    while now.step < steps and not interrupt.wanted and not now.stale(patience):
        if look is not None and now.step == 0 and not now.history.validation_loss.size:
            now = now.validated(look(now.parameters))
        stop = min(steps, (now.step // every + 1) * every)
        began = time.perf_counter()
        count = min(length, DISPATCH, stop - now.step)
        now, streak = loop.advance(now, count)
        seconds = time.perf_counter() - began
        # The first stretch compiles: it says nothing about the next.
        length = max(1, int(count * SECONDS / seconds)) if length > 1 else 2
        bar.update(count)
        bar.set_postfix_str(_figures(now.history, data))
        if streak >= HOPELESS:
            _save(store, now, at_once=True)
            loop.explain(now, streak)
        if look is not None and (now.step % every == 0 or now.step == steps):
            now = now.validated(look(now.parameters))
        _save(store, now)
    _save(store, now, at_once=True)
    return now


class _Loop:
    """The steps themselves, many at a time on the device."""

    def __init__(self, rest: Any, transform, data: Array | Sampler | None, batch_size: int, key):
        self.rest, self.transform, self.data, self.key = rest, transform, data, key
        self.batch_size = batch_size

    def advance(self, now: Progress, count: int) -> tuple[Progress, int]:
        """`count` more steps, or fewer if too many in a row come to nothing; how many in a row did."""
        state = (now.parameters, now.optimiser, jnp.asarray(now.streak))
        # As arrays: a plain number would be compiled in.
        span = jnp.asarray(now.step), jnp.asarray(count)
        state, taken, loss, figures = _advance(
            state, self.rest, self.transform, self.data, self.batch_size, self.key, *span
        )
        taken = int(taken)
        parameters, optimiser, streak = state
        series = {name: np.asarray(values[:taken], float) for name, values in figures.items()}
        history = now.history.with_steps(np.asarray(loss[:taken], float), series)
        return now.advanced(parameters, optimiser, int(streak), history), int(streak)

    def explain(self, now: Progress, streak: int) -> None:
        """Raise, with the reason if a solve outside the jit gives one."""
        model, objective = eqx.combine(now.parameters, self.rest)
        advice = "lower learning_rate or clip, or start from smaller networks"
        told = f"{streak} steps in a row up to step {now.step} were not finite"
        key_batch, key_loss = jax.random.split(jax.random.fold_in(self.key, now.step - 1))
        try:
            objective(model, _batch(self.data, self.batch_size, key_batch), key=key_loss)
        except Exception as error:
            raise NonFiniteError(f"{told}: {error}; {advice}") from error
        raise NonFiniteError(f"{told}: the loss or its gradient overflows, or is NaN; {advice}")


@jit
def _advance(state, rest, transform, data, batch_size: int, key, first, count):
    """`count` steps from the step `first` on, as one program: the count may vary without compiling."""

    remembers = isinstance(eqx.combine(state[0], rest)[1], Remembering)

    def loss_of(parameters, x, key):
        model, objective = eqx.combine(parameters, rest)
        return objective(model, x, key=key)

    def one(carry):
        (parameters, optimiser, streak), done, losses, figures = carry
        key_batch, key_loss = jax.random.split(jax.random.fold_in(key, first + done))
        x = _batch(data, batch_size, key_batch)
        (loss, report), slope = jax.value_and_grad(loss_of, has_aux=True)(parameters, x, key_loss)
        memory = report.pop("memory", None) if remembers else None
        fine = _all_finite((loss, slope))
        updates, moved = transform.update(slope, optimiser, parameters)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)
        stepped = _remember(optax.apply_updates(parameters, updates), rest, memory)
        parameters = keep(stepped, parameters)
        state = (parameters, keep(moved, optimiser), jnp.where(fine, 0, streak + 1))
        losses = losses.at[done].set(jnp.where(fine, loss, jnp.nan))
        return state, done + 1, losses, {n: a.at[done].set(report[n]) for n, a in figures.items()}

    going = lambda carry: (carry[1] < count) & (carry[0][2] < HOPELESS)
    example = jax.eval_shape(lambda: _batch(data, batch_size, key))
    loss, report = jax.eval_shape(loss_of, state[0], example, key)
    if remembers:
        report.pop("memory")
    blank = lambda like: jnp.full(DISPATCH, jnp.nan, like.dtype)
    carry = (state, jnp.asarray(0), blank(loss), {name: blank(value) for name, value in report.items()})
    return jax.lax.while_loop(going, one, carry)


def _remember(parameters: Any, rest: Any, memory: Any) -> Any:
    """The parameters, with what a step leaves behind for the next in their objective's part of them."""
    model, objective = eqx.combine(parameters, rest)
    if not isinstance(objective, Remembering):
        return parameters
    trained = jax.tree.map(lambda leaf: leaf is not None, parameters, is_leaf=lambda leaf: leaf is None)
    return eqx.filter((model, objective.remember(memory)), trained)


def _all_finite(tree: Any) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _batch(data: Array | Sampler | None, size: int, key: PRNGKeyArray) -> Array | None:
    if data is None:
        return None
    if isinstance(data, Sampler):
        return data.sample(key=key, shape=(size,))
    return data if len(data) <= size else data[jax.random.randint(key, (size,), 0, len(data))]


@jit
def _validate(parameters, rest, data: Array, key: PRNGKeyArray) -> Array:
    model, objective = eqx.combine(parameters, rest)
    return objective(model, data, key=key)[0]


def _split(data, validation, objective: AbstractObjective, key: PRNGKeyArray):
    """Data to train on and, if asked for, data to validate on."""
    if (data is not None) != objective.uses_data:
        need = "needs data" if objective.uses_data else "takes no data"
        raise ValueError(f"{type(objective).__name__} {need}: call fit(model, data, ...) accordingly")
    if data is None or isinstance(data, Sampler):
        if isinstance(validation, float | int):
            if validation:
                raise ValueError("a share to validate on must come from an array: give validation data")
            return data, None
        return data, _rows("validation", validation)
    rows = _rows("data", data)
    if not isinstance(validation, float | int):
        return rows, _rows("validation", validation)
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be a share of the data between 0 and 1, got {validation}")
    aside = round(validation * len(rows))
    if aside in (0, len(rows)):
        return rows, None
    order = jax.random.permutation(key, len(rows))
    return rows[order[aside:]], rows[order[:aside]]


def _rows(name: str, data) -> Array:
    data = jnp.asarray(data, float)
    if data.ndim != 2 or not data.size:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {data.shape}")
    check_finite(name, data)
    return data


def _optimiser(optimiser, learning_rate: float, steps: int, clip: float | None):
    if optimiser is None:
        check_positive("learning_rate", learning_rate)
        warm = min(100, steps // 10)
        optimiser = optax.adam(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warm, steps + 1))
    if clip is None:
        return optimiser
    check_positive("clip", clip)
    return optax.chain(optax.clip_by_global_norm(clip), optimiser)


def _trained(model: Any, objective: AbstractObjective, frozen: Callable[[Any], Any] | None) -> Any:
    """For each leaf of model and objective, whether it is to be trained."""
    trained = trainable((model, objective))
    if frozen is None:
        return trained
    still = lambda parts: jax.tree.map(lambda _: False, parts)
    return eqx.tree_at(lambda pair: frozen(pair[0]), trained, replace_fn=still)


def _begin(store: Checkpoint | None, start: Progress, resume: bool) -> Progress:
    if store is None:
        if resume:
            raise ValueError("resume needs a checkpoint to go on from")
        return start
    return store.load(start) if resume else store.begin(start)


def _save(store: Checkpoint | None, now: Progress, at_once: bool = False) -> None:
    if store is not None:
        store.save(now, at_once)


def _bar(done: int, steps: int, progress: bool):
    return tqdm(total=steps, initial=done, disable=not progress, unit="step", dynamic_ncols=True)


def _figures(history: History, data) -> str:
    """What the bar says beside the time that is left."""
    parts = [f"loss {history.recent():.4f}"]
    if isinstance(data, Known):
        parts.append(f"excess {history.recent() - data.entropy:.4f}")
    parts += [f"{name.replace('_', ' ')} {history.recent(name):.3g}" for name in history.figures]
    if history.validation_loss.size:
        parts.append(f"validation {history.validation_loss[-1]:.4f}")
    if history.skipped:
        parts.append(f"skipped {history.skipped}")
    return ", ".join(parts)
