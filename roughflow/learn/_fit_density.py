"""From a table of numbers to a density."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key, check_positive
from ..faq import see
from ..flow import ExactDivergence, HutchinsonDivergence, StochasticFlow, velocity_flow, with_noise
from ._checkpoint import steps_of
from ._fit import Fitted, fit
from ._interpolant import Interpolant
from ._marginals import fit_marginals
from ._maximum_likelihood import MaximumLikelihood
from ._numbers import names_of
from ._sizes import Sizes
from ._smoothed import Smoothed
from ._standardised import Standardised
from ._table import Bound, Table

MANY = 8  # columns above which likelihood is trained with probes of the divergence
LOOKED_AT = 4096  # rows to validate the regression on: those set aside, as often as it takes
LIKELIHOOD_ROWS = 1000  # rows to validate likelihood on, at most: each takes a solve
SHARES = {"regression": 0.75, "likelihood": 0.25}  # of a budget of seconds
TIMED = 40  # steps that say how many a budget of seconds allows
WORTHWHILE = 0.002  # nats that noise must gain
NOISES, NOISED = (0.25, 0.5, 1.0), 500  # sizes of noise to choose from, and the rows to choose by
LOOKS = {"regression": 20, "likelihood": 10}  # at them


def fit_density(
    data: ArrayLike,
    *,
    key: PRNGKeyArray,
    given: ArrayLike | None = None,
    noise: float | Literal["best"] = 0.0,
    bounds: Mapping[Any, Bound] | None = None,
    rounding: Mapping[Any, float] | None = None,
    marginals: bool | None = None,
    smoothing: float | None = None,
    outliers: float | None = None,
    width: int | None = None,
    depth: int = 3,
    columns: Sequence[str] = (),
    validation: float | ArrayLike | tuple[ArrayLike, ArrayLike] = 0.1,
    patience: int | None = 5,
    steps: int | None = None,
    likelihood_steps: int | None = None,
    seconds: float | None = None,
    batch_size: int = 512,
    learning_rate: float = 2e-3,
    checkpoint: str | os.PathLike | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Fitted:
    """The density of a table's rows, in two stages, in the table's own units.

    1. **Regression** (`rf.Interpolant`): the velocity that carries a normal law to the standardised rows. No
       equation is solved, so thousands of steps take a minute.
    2. **Likelihood** (`rf.MaximumLikelihood`): a few steps more, for the last tenths of a nat.

    Each stage returns what was best on the rows set aside. Before the first step the model is the normal law
    with the mean and covariance of the data, so few rows leave it near that law. `noise` is added at the
    end and leaves the law as it is (`rf.with_noise`): a stochastic flow may be the better density, but
    each value takes many paths and has an error bar. It can be added later too, or taken away.

    **Arguments:**

    - `data`: one row per sample.
    - `given`: for the conditional density p(data | given), the rows of what is given. The model's methods
      then take `given` too.
    - `noise`: its size, in units of the standardised data; 0 for none; "best" for the one of 0, 0.25,
      0.5 and 1 with the highest likelihood on the rows set aside.
    - `bounds`: of columns, by name or number, `{"share": (0, 1), "income": (0, None)}`: the density is zero
      beyond them. Every row must lie within.
    - `rounding`: of columns, `{"age": 1.0}`: uniform noise of that width is added to rows that were rounded,
      which have no density as they are.
    - `marginals`: whether each column is first mapped to a nearly normal one, with as many knots as
      cross-validation bears out (`rf.Marginals`): heavy tails, edges and spikes of a column are then not for
      the flow to learn. If None, where that alone gains 0.5 nats per column, or 0.05 with less than 30 rows
      per column: given rows enough, a flow does better by itself.
    - `smoothing`: noise that is added to the rows in training, anew in each step, in units of the
      standardised data: few rows are then not learned by heart. If None, 0.3 for tables with less than 30
      rows per column, otherwise none.
    - `outliers`: what share of the rows, drawn anew in each step, has noise of twice the width of the whole
      table: new rows may lie where none was seen, which a flow would rule out with all confidence. If None,
      0.02 from four columns on.
    - `width`, `depth`: of the network; the width is 128, or 256 from 20,000 rows on, unless told otherwise.
    - `columns`: names of all columns to keep with the model, those given last; if none, a DataFrame's own.
    - `validation`: what share of the rows to set aside, or such rows; with `given` a pair of both.
    - `patience`: looks at them, one every twentieth of the regression and every tenth of the likelihood
      stage, without a better one, after which a stage goes back to the best and ends (`rf.fit`).
    - `steps`, `likelihood_steps`: of the stages; if None, up to 20,000 and 100, fewer with few rows and with
      many columns. None of likelihood with less than 30 rows per column, which it would learn by heart, nor
      for the wider network with four columns or more, where it gains little for its time. Without any that
      stage is left out.
    - `seconds`: in place of `steps`, how long both stages may take together, once they are compiled: a few
      steps are timed, and as many taken as the budget allows, three in four of its seconds for the
      regression.
    - `batch_size`, `learning_rate`: of the regression; likelihood takes batches of 256 and a quarter of the
      rate.
    - `checkpoint`: a file to keep the state of the run in, with another beside it for the second stage;
      `resume=True` goes on from them.
    - `progress`: show a bar, which names the stage.

    The `model` of the result is an `rf.Standardised`; `history` is that of the last stage, and `stages` has
    all of them by name.

    ```python
    import jax
    import roughflow as rf

    data = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(500,))
    settings = {"width": 8, "depth": 1, "steps": 20, "likelihood_steps": 2, "progress": False}
    fitted = rf.fit_density(data, key=jax.random.key(1), **settings)
    fitted.model.log_prob(data[:5], key=jax.random.key(2))
    second = rf.fit_density(data[:, 1:], given=data[:, :1], key=jax.random.key(1), **settings)
    second.model.log_prob(data[:5, 1:], given=data[:5, :1], key=jax.random.key(2))
    ```
    """
    key_split, key_model, key_first, key_second = jax.random.split(check_key(key), 4)
    if noise not in (0, "best"):
        check_positive("noise", noise)
    if seconds is not None and steps is not None:
        told = "steps and seconds are two budgets for one fit: give one of them"
        raise ValueError(told + see("budgets-and-validation"))
    columns = names_of(columns, data, given)
    whole = Table.of(data, given, columns, bounds or {}, rounding or {})
    whole = whole.dequantised(jax.random.fold_in(key_split, 2))
    table = whole.split(validation, key_split)
    if noise == "best" and not len(table.held_out):
        told = "the best noise is chosen on rows set aside: set validation, to 0.1 say"
        raise ValueError(told + see("budgets-and-validation"))
    chosen = Sizes(len(table.train), table.dimension, table.context)
    flow = velocity_flow(
        table.dimension,
        context=table.context,
        width=chosen.width if width is None else width,
        depth=depth,
        features=chosen.features,
        key=key_model,
    )
    least = {True: -np.inf, False: np.inf, None: chosen.worth}[marginals]
    maps = fit_marginals(table.train, table.dimension, least, table.bounds)
    model = Standardised(flow, *whole.units(maps), columns, table.context, maps)
    train, held_out = (model.unit(rows) for rows in (table.train, table.held_out))
    train = _smoothed(
        train,
        chosen.smoothing if smoothing is None else smoothing,
        chosen.outliers if outliers is None else outliers,
        table.context,
    )
    files = _Files.beside(checkpoint)
    stages = _Stages(train, held_out, learning_rate, patience, progress, resume)
    settings = (flow, table.context, batch_size, key_first)
    count = chosen.steps if steps is None else check_count("steps", steps)
    count = stages.affordable(stages.regression, settings, files.first, seconds, count)
    first = stages.regression(*settings, files.first, count)
    count = chosen.likelihood_steps if likelihood_steps is None else int(likelihood_steps)
    last, histories = first, {"regression": first.history}
    if count and not first.interrupted:
        settings = (first.model, key_second)
        count = stages.affordable(stages.likelihood, settings, files.second, seconds, count)
        last = stages.likelihood(*settings, files.second, count)
        histories["likelihood"] = last.history
    # Probes are for training: a density is worth its exact divergence.
    flow = eqx.tree_at(lambda f: f.divergence, last.model, ExactDivergence())
    if noise == "best":
        noise = _best_noise(flow, held_out[:NOISED], key_second)
    flow = with_noise(flow, noise) if noise else flow
    model = eqx.tree_at(lambda m: m.flow, model, flow)
    return dataclasses.replace(last, model=model, stages=histories)


def _best_noise(flow: StochasticFlow, rows: Array, key: PRNGKeyArray) -> float:
    """The size of noise with the highest likelihood; what is not clearly better than none, or better by next
    to nothing, is not worth its paths."""
    plain = flow.log_prob(rows, key=key)
    best, gain = 0.0, WORTHWHILE
    for size in NOISES:
        gains = np.asarray(with_noise(flow, size).log_prob(rows, key=key) - plain)
        if gains.mean() > max(gain, 2 * gains.std() / len(gains) ** 0.5):
            best, gain = size, float(gains.mean())
    return best


@dataclasses.dataclass(frozen=True)
class _Stages:
    """What the two stages share."""

    train: Array | Smoothed
    held_out: Array
    learning_rate: float
    patience: int | None
    progress: bool
    resume: bool

    def affordable(
        self,
        stage: Callable[..., Fitted],
        settings: tuple[Any, ...],
        file: Path | None,
        seconds: float | None,
        otherwise: int,
    ) -> int:
        """How many steps of a stage its share of the seconds pays for; a run that is resumed keeps what it
        began with."""
        if seconds is None:
            return otherwise
        check_positive("seconds", seconds)
        if self.resume and file is not None and file.exists():
            return steps_of(file)
        quiet = partial(stage.__func__, dataclasses.replace(self, progress=False, resume=False))  # pyright: ignore[reportFunctionMemberAccess]
        quiet(*settings, None, TIMED)  # compiles
        began = time.perf_counter()
        quiet(*settings, None, TIMED)
        return max(1, int(SHARES[stage.__name__] * seconds * TIMED / (time.perf_counter() - began)))

    def regression(
        self,
        flow: StochasticFlow,
        context: int,
        batch_size: int,
        key: PRNGKeyArray,
        file: Path | None,
        steps: int,
    ) -> Fitted:
        # A row is seen at one time and with one start of the base: few rows must be seen often.
        often = max(1, LOOKED_AT // max(1, len(self.held_out)))
        return fit(
            flow,
            self.train,
            key=key,
            objective=Interpolant(context=context),
            steps=steps,
            batch_size=batch_size,
            learning_rate=self.learning_rate,
            average=0.999,
            **self._shared("regression", steps, jnp.tile(self.held_out, (often, 1)), file),
        )

    def likelihood(self, flow: StochasticFlow, key: PRNGKeyArray, file: Path | None, steps: int) -> Fitted:
        if flow.dimension > MANY:
            flow = eqx.tree_at(lambda f: f.divergence, flow, HutchinsonDivergence())
        return fit(
            flow,
            self.train,
            key=key,
            objective=MaximumLikelihood(1),
            steps=check_count("likelihood_steps", steps),
            batch_size=256,
            learning_rate=self.learning_rate / 4,
            average=0.98,
            frozen=lambda flow: flow.base,
            **self._shared("likelihood", steps, self.held_out[:LIKELIHOOD_ROWS], file),
        )

    def _shared(self, name: str, steps: int, held_out: Array, file: Path | None) -> dict[str, Any]:
        some = len(held_out) > 0
        return {
            "validation": held_out if some else 0.0,
            "every": -(-steps // LOOKS[name]),
            "patience": self.patience if some else None,
            "progress": name if self.progress else False,
            "checkpoint": file,
            "resume": self.resume and file is not None and file.exists(),
        }


@dataclasses.dataclass(frozen=True)
class _Files:
    """Where the stages keep their state."""

    first: Path | None
    second: Path | None

    @staticmethod
    def beside(checkpoint: str | os.PathLike | None) -> "_Files":
        if checkpoint is None:
            return _Files(None, None)
        first = Path(checkpoint)
        return _Files(first, second_file(first))


def second_file(checkpoint: Path) -> Path:
    """Where the second stage of a run that is kept in `checkpoint` is kept."""
    return checkpoint.with_name(checkpoint.name + ".likelihood")


def _smoothed(rows: Array, width: float, outliers: float, context: int) -> Array | Smoothed:
    if width < 0:
        raise ValueError(f"smoothing must not be negative, got {width}")
    if not 0 <= outliers < 1:
        raise ValueError(f"outliers must be a share of the rows between 0 and 1, got {outliers}")
    return rows if width == outliers == 0 else Smoothed(rows, float(width), float(outliers), context)
