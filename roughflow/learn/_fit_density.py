"""From a table of numbers to a density."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import numpy as np
from jaxtyping import PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key, check_positive
from .._devices import DevicesLike
from .._keys import split
from ..faq import see
from ..flow import ExactDivergence, velocity_flow, with_noise
from ._batches import UnitBatches
from ._best_noise import best_noise
from ._fit import Fitted
from ._marginals import fit_marginals
from ._numbers import names_of
from ._parquet import ParquetTable, rng_of
from ._sizes import Sizes
from ._smoothed import smoothed
from ._stages import Stages
from ._standardised import Standardised
from ._table import Bound, Table

LOOKED_AT = 100_000  # rows of a table on disk that stand for all of them


def fit_density(
    data: ArrayLike | ParquetTable,
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
    devices: DevicesLike = None,
) -> Fitted:
    """The density of a table's rows, in two stages, in the table's own units.

    1. **Regression** (`rf.Interpolant`): the velocity that carries a normal distribution to the standardised
       rows. No equation is solved, so thousands of steps take a minute.
    2. **Likelihood** (`rf.MaximumLikelihood`): a few steps more, for the last tenths of a nat.

    Each stage returns what was best on the rows set aside. Before the first step the model is the normal
    distribution with the mean and covariance of the data, so few rows leave it near that distribution.
    `noise` is added at the end and leaves the distribution as it is (`rf.with_noise`): a stochastic flow may
    be the better density, but each value takes many paths and has an error bar. It can be added later too, or
    taken away.

    **Arguments:**

    - `data`: one row per sample; or an `rf.ParquetTable`, whose rows need not fit in memory. What depends on
      all rows is then found from 100,000 of them, and what is given goes by the names of columns.
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
    - `patience`: looks at them, one every twentieth of the regression (but 25 steps) and every tenth of the
      likelihood stage, without a better one, after which a stage goes back to the best and ends (`rf.fit`).
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
    - `devices`: to split each batch between, as for `rf.fit`.

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
    key_split, key_model, key_first, key_second = split(check_key(key), 4)
    _check(noise, steps, seconds)
    source = None
    if isinstance(data, ParquetTable):
        source, data, given, validation = _looked_at(data, given, validation, key_split)
    columns = names_of(columns or getattr(source, "columns", ()), data, given)
    whole = Table.of(data, given, columns, bounds or {}, rounding or {})
    if source is not None:
        whole.check_bounds(source.extremes)
    whole = whole.dequantised(key_split)
    table = whole.split(validation, key_split)
    if noise == "best" and not len(table.held_out):
        told = "the best noise is chosen on rows set aside: set validation, to 0.1 say"
        raise ValueError(told + see("budgets-and-validation"))
    chosen = Sizes(len(table.train if source is None else source), table.dimension, table.context)
    model = _untrained(whole, table, chosen, width, depth, marginals, columns, key_model)
    held_out, spread = model.unit(table.held_out), chosen.noise(smoothing, outliers)
    if source is None:
        train = smoothed(model.unit(table.train), *spread, chosen.context)
    else:
        train = UnitBatches(source, model, table.rounding, *spread)
    file = None if checkpoint is None else Path(checkpoint)
    stages = Stages(train, held_out, learning_rate, patience, progress, resume, seconds, file, devices)
    last = stages.both(
        model.flow,
        table.context,
        batch_size,
        chosen.steps if steps is None else check_count("steps", steps),
        chosen.likelihood_steps if likelihood_steps is None else int(likelihood_steps),
        key_first,
        key_second,
    )
    flow = _finished(last.model, noise, held_out, key_second)
    return dataclasses.replace(last, model=eqx.tree_at(lambda m: m.flow, model, flow))


def _finished(flow: Any, noise: float | Literal["best"], held_out: Any, key: PRNGKeyArray) -> Any:
    """What was fitted, with noise if any is asked for."""
    # Probes are for training: a density is worth its exact divergence.
    flow = eqx.tree_at(lambda f: f.divergence, flow, ExactDivergence())
    noise = best_noise(flow, held_out, key) if noise == "best" else noise
    return with_noise(flow, noise) if noise else flow


def _looked_at(
    table: ParquetTable, given: Any, validation: Any, key: PRNGKeyArray
) -> tuple[ParquetTable, np.ndarray, np.ndarray | None, Any]:
    """The table to draw batches from, some of its rows, in place of all of them, and rows to validate on."""
    if given is not None:
        raise ValueError("given goes with an array: rf.ParquetTable(path, given=[...]) names columns")
    own = len(table.columns) - table.context
    parts = lambda rows: (rows[:, :own], rows[:, own:] if table.context else None)
    if isinstance(validation, float | int):
        table, held_out = table.split(validation, key=key)
        validation = (parts(held_out) if table.context else held_out) if len(held_out) else 0.0
    return table, *parts(table.some(LOOKED_AT, rng_of(key, 1)).astype(np.float64)), validation


def _check(noise: float | Literal["best"], steps: int | None, seconds: float | None) -> None:
    if noise not in (0, "best"):
        check_positive("noise", noise)
    if seconds is None:
        return
    check_positive("seconds", seconds)
    if steps is not None:
        told = "steps and seconds are two budgets for one fit: give one of them"
        raise ValueError(told + see("budgets-and-validation"))


def _untrained(
    whole: Table,
    table: Table,
    chosen: Sizes,
    width: int | None,
    depth: int,
    marginals: bool | None,
    columns: tuple[str, ...],
    key: PRNGKeyArray,
) -> Standardised:
    """The normal distribution of the whole table, with a velocity yet to be learned, and the maps of its
    columns that the rows to train on bear out."""
    flow = velocity_flow(
        table.dimension,
        context=table.context,
        width=chosen.width if width is None else width,
        depth=depth,
        num_features=chosen.num_features,
        key=key,
    )
    least = {True: -np.inf, False: np.inf, None: chosen.worth}[marginals]
    maps = fit_marginals(table.train, table.dimension, least, table.bounds)
    return Standardised(flow, *whole.units(maps), columns, table.context, maps)
