"""Density estimation for a table."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key, check_positive, grouped_arguments, is_whole
from .._programs import split
from ..faq import see
from ..flow import ExactDivergence
from ..train import (
    History,
    Interpolant,
    RunOptions,
    TrainingOptions,
    best_noise,
    rng_of,
    velocity_flow,
)
from ._arrays import frame_names, is_frame, parts_of, real_numbers, take
from ._columns import ColumnType, OfKept, WithRelations, is_mixed
from ._families import FAMILIES, ClosedForm, Comparison, Family
from ._fitted_density import SCORED_ROWS, FittedDensity, HeldOut, Score
from ._large_tables import ParquetTable
from ._marginals import check_full_rank, fit_marginals, has_far_rows
from ._mixture import MixedDensity, fit_mixed
from ._stages import (
    BATCH_ROWS,
    LEARNING_RATE,
    PATIENCE,
    FlowOptions,
    Sizes,
    Smoothed,
    Stages,
    UnitBatches,
    smoothed,
)
from ._standardised import Standardised
from ._table import Bound, Rounding, Table

MAX_MIXTURE_ROWS = 5000  # maximum number of rows for which a mixture is tried, because it is slow
SAMPLED_ROWS = 100_000  # number of rows of a table on disk from which moments and maps are computed


@grouped_arguments(flow=FlowOptions, training=TrainingOptions, run=RunOptions)
def fit_density(
    data: ArrayLike | ParquetTable,
    *,
    key: PRNGKeyArray,
    given: ArrayLike | None = None,
    groups: ArrayLike | str | None = None,
    types: Mapping[Any, ColumnType] | None = None,
    weights: ArrayLike | str | None = None,
    family: Family | None = None,
    noise: float | Literal["best"] = 0.0,
    bounds: Mapping[Any, Bound] | None = None,
    rounding: Rounding | None = None,
    columns: Sequence[str] = (),
    validation: float | ArrayLike | tuple[ArrayLike, ArrayLike] = 0.1,
    steps: int | None = None,
    seconds: float | None = None,
    progress: bool = True,
    flow: FlowOptions | None = None,
    training: TrainingOptions | None = None,
    run: RunOptions | None = None,
) -> FittedDensity:
    """Fit a density to the rows of a table, in the original units of its columns.

    Three families of densities are compared on rows that are not used for fitting:

    - "gaussian": a Gaussian whose covariance is shrunk and widened if there are few rows;
    - "marginals": a Gaussian of columns that are transformed separately (`rf.tables.Marginals`);
    - "flow": a normalizing flow, trained in two stages. **Regression** (`rf.Interpolant`) learns the velocity
      that carries a normal distribution to the standardised rows. Regression solves no differential equation,
      so thousands of steps take a minute. **Likelihood** (`rf.MaximumLikelihood`) then gains the last few
      tenths of a nat. Each stage returns the model with the lowest validation loss.

    For a table of fewer than 500 distinct rows or groups, the default is the family with the best
    cross-validated score, which may also be a mixture (see below). For a larger table, the default is a flow,
    unless the Gaussian is better on the validation rows. A more flexible family is chosen only if it is
    better by more than one standard error. By default, no flow is trained on fewer than 64 distinct rows, or
    on fewer than 10 per column. `fitted.score` is the score of the chosen density.

    A fourth family is for tables with missing cells (None or NaN), text, integers or point masses:

    - "mixture": a mixture (`rf.tables.MixedDensity`) whose components are Gaussians of the numeric columns
      times probabilities of the categories, fitted by expectation–maximisation, also to incomplete rows.
      Densities of incomplete rows, `fitted.impute` and `fitted.conditional` are in closed form. A mixture is
      the default for tables with text or missing cells, and with `types=` or `weights=`. The number of
      components is chosen on unseen rows.

    Copies of a row, and rows of one group, are always on the same side of a split. Defaults that depend on
    the size of the table use the number of distinct rows.

    Noise (`noise=`) is added after training and does not change the distribution (`rf.with_noise`). The
    density with noise may be more accurate, but each value needs many paths and has an error bar. Noise can
    also be added or removed later (`fitted.with_noise`).

    Constant columns, copies of a column and linear functions of other columns are removed before the fit and
    restored in samples (`rf.tables.WithRelations`). A new row that violates such a relation has density zero.

    **Arguments:**

    - `data`: one row per sample: an array, a DataFrame, or an `rf.tables.ParquetTable`, whose rows need not
      fit in memory. For a `ParquetTable`, moments and monotone maps of columns are computed from
      at most 100,000 of its rows.
    - `given`: the rows to condition on, or names of columns of `data`, for the conditional density p(data |
      given). The methods of the model then take `given` too.
    - `groups`: a label for each row, or the name of a column of `data`, which is not modelled. Rows of one
      group are on the same side of every split. Copies of a row are always grouped, and so are rows with the
      same values in two continuous columns, as after a join.
    - `types`: types of columns by name or index, "continuous", "integer", "category" or "zero-inflated", such
      as `{"age": "integer"}`; types of other columns are detected, and `fitted.model.encoding.described()`
      shows all types. With `types`, the family is "mixture".
    - `weights`: a weight for each row, or the name of a column of `data`, which is not modelled, for the
      family "mixture".
    - `family`: "gaussian", "marginals", "flow" or "mixture". By default the best one, as described above, or
      a flow if `steps` or `seconds` is set.
    - `noise`: the size of the noise in units of the standardised data; 0 for none; "best" for the size among
      0, 0.25, 0.5 and 1 with the highest likelihood on the validation rows.
    - `bounds`: bounds of columns by name or index, such as `{"share": (0, 1), "income": (0, None)}`. The
      density is zero outside the bounds, and every row must lie inside.
    - `rounding`: steps of rounded columns by name or index, such as `{"age": 1.0}`. Uniform noise as wide as
      the step is added to the column, because rounded values have no density. "auto" detects rounded columns
      and their steps.
    - `columns`: names for the columns of an array, given ones last; for a DataFrame, the columns to use, by
      default all.
    - `validation`: the fraction of the rows to use for validation, or the validation rows; with `given`, a
      pair of arrays.
    - `steps`: number of steps of the regression; by default four per row, but at least 2,000 and at most
      20,000, or 4,000 for fewer than 2,000 rows.
    - `seconds`: time budget of both stages after compilation, instead of `steps`. A few steps are timed; the
      likelihood stage, if there is one, gets a quarter of the budget.
    - `progress`: show a progress bar, which names the stage.
    - `flow`: an `rf.tables.FlowOptions`: the network, maps of columns, regularisation, and the number of
      steps of the likelihood stage.
    - `training`: an `rf.train.TrainingOptions` for both stages. By default, the regression uses batches of
      512 rows, or fewer if the table has fewer, and a learning rate of 2e-3. The likelihood stage always uses
      batches of 256 rows and a quarter of the learning rate. Parameters are averaged over the steps. A stage
      ends after 5 validation checks without improvement. A check runs every 5 % of the steps of the
      regression, at least 25 apart, and every 10 % of the steps of the likelihood stage.
    - `run`: an `rf.train.RunOptions`: devices and checkpoints, with a second file for the likelihood stage.

    Returns an `rf.FittedDensity` with `log_prob`, `sample`, `estimate`, `score`, and the `model`, an
    `rf.tables.Standardised`. `history` is the history of the last stage, and `stages` has the histories of
    all stages by name.

    ```python
    import jax
    import roughflow as rf

    data = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(500,))
    flow = rf.tables.FlowOptions(width=8, depth=1, likelihood_steps=2)
    settings = {"flow": flow, "steps": 20, "progress": False}
    fitted = rf.fit_density(data, key=jax.random.key(1), **settings)
    fitted.log_prob(data[:5])
    fitted.score.mean, fitted.score.standard_error
    second = rf.fit_density(data[:, 1:], given=data[:, :1], key=jax.random.key(1), **settings)
    second.log_prob(data[:5, 1:], given=data[:5, :1])
    ```
    """
    key_split, key_model, *keys = split(check_key(key), 4)
    _check(family, noise, steps, seconds)
    others = {"given": given, "bounds": bounds, "rounding": rounding, "steps": steps, "seconds": seconds}
    others |= {"noise": noise or None} | _changed_options(flow=flow, training=training, run=run)
    if types is not None or weights is not None or family == "mixture":
        _check_mixed(family, data, others)
    if _is_for_a_mixture(data, family, types, weights, list(others.values())):
        return _mixed_fit(data, tuple(columns), types or {}, weights, groups, validation, key_split)
    flow, training, run = flow or FlowOptions(), training or TrainingOptions(), run or RunOptions()
    tables = (data, given, groups, columns, bounds or {}, rounding or {}, validation)
    source, whole, table = _tables(*tables, key_split)
    if noise == "best" and not len(table.held_out):
        message = "noise='best' needs validation rows: set validation, for example to 0.1"
        raise ValueError(message + see("budgets-and-validation"))
    own = isinstance(validation, float | int)  # the validation rows were split off the table
    links = whole.links
    counts = (links.distinct, links.count) if source is None else (len(source),) * 2
    accelerated = jax.default_backend() != "cpu"
    sizes = Sizes(counts[0], table.dimension, table.num_given, counts[1], accelerated)
    comparison = Comparison(whole, table, sizes.small and source is None, own)
    free = family is None and steps is None and seconds is None
    plain = free and flow.marginals is None and not noise and not (bounds or rounding)
    if family in ("gaussian", "marginals") or (free and sizes.tiny):
        maps = flow.marginals if family is None else family == "marginals"
        best = _best_closed(comparison, maps, plain)
        return _restored(_closed_fit(comparison, best, noise), whole)
    training = training.with_defaults({"batch_size": sizes.batch_size})
    stages = Stages(None, None, training, run, progress, seconds)
    trainer = _Trainer(sizes, flow.resolved(sizes), key_model, stages)
    fitted = trainer.fit(comparison, source, sizes.steps if steps is None else steps, *keys)
    if free and not fitted.interrupted and (comparison.cross or len(table.held_out)):
        fitted = _compared(fitted, comparison, trainer, plain)
    if fitted.family == "flow" and noise == "best":
        noise = best_noise(fitted.model.flow, fitted.model.unit(table.held_out), keys[1])
    return _restored(fitted.with_noise(noise) if noise and noise != "best" else fitted, whole)


def _restored(fitted: FittedDensity, table: Table) -> FittedDensity:
    """The density of all columns of the table, including the columns that its relations remove."""
    relations = table.relations
    if relations is None or fitted.held_out is None:
        return fitted
    aside = fitted.held_out
    held_out = HeldOut(relations.restore(aside.rows), aside.labels, OfKept(aside.gaussian, relations))
    model = WithRelations(fitted.model, relations, table.all_names)
    return dataclasses.replace(fitted, model=model, held_out=held_out)


def _tables(
    data: Any,
    given: Any,
    groups: Any,
    columns: Any,
    bounds: Mapping[Any, Bound],
    rounding: Rounding,
    validation: Any,
    key: PRNGKeyArray,
) -> tuple[ParquetTable | None, Table, Table]:
    """The table on disk from which batches are drawn (or None), the table in memory, and the latter split
    into training and validation rows."""
    source = None
    if isinstance(data, ParquetTable):
        columns = columns or data.columns
        source, data, given, validation = _sampled(data, given, groups, validation, key)
    data, given, groups, names = parts_of(data, given, groups, columns)
    whole = Table.of(data, given, groups, names, bounds, rounding)
    if source is not None:
        check_full_rank(np.asarray(data, float), names)
        whole.check_bounds(source.extremes)
    whole = whole.dequantised(key)
    return source, whole, whole.split(validation, key)


@dataclasses.dataclass(frozen=True)
class _Trainer:
    """Trains flows on tables with settings that do not depend on the rows."""

    sizes: Sizes
    options: FlowOptions
    key: PRNGKeyArray  # key of the network
    stages: Stages

    def fit(
        self, comparison: Comparison, source: ParquetTable | None, steps: int, *keys: PRNGKeyArray
    ) -> FittedDensity:
        """Train in both stages on the training rows of a table, or on batches of a table on disk."""
        table = comparison.split
        model = self.untrained(comparison.whole, table)
        if source is None:
            train = smoothed(model.unit(table.train), *self._noise, table.num_given)
        else:
            train = UnitBatches(source, model, table.rounding, *self._noise)
        stages = dataclasses.replace(self.stages, train=train, held_out=model.unit(table.held_out))
        last = stages.both(model.flow, table.num_given, steps, self.options.likelihood_steps or 0, *keys)
        parts = {
            name: getattr(last, name) for name in ("objective", "history", "interrupted", "state", "stages")
        }
        return FittedDensity(_with_flow(model, last.model), **parts, held_out=comparison.held_out)

    def fold(self, steps: int, key: PRNGKeyArray) -> Callable[[Table], Any]:
        """Return a function that trains a flow on a table by regression alone, for cross-validation."""

        def fit(table: Table) -> _FoldModel:
            model = self.untrained(table, table)
            # Rows are padded, so that folds of different sizes do not cause recompilation.
            train = Smoothed(model.unit(table.train), *self._noise, table.num_given)
            held_out = model.unit(table.held_out[:0])
            stages = dataclasses.replace(self.stages, train=train, held_out=held_out, progress=False)
            last = stages.regression(model.flow, table.num_given, key, None, steps)
            if last.interrupted:
                raise KeyboardInterrupt
            return _FoldModel(_with_flow(model, last.model))

        return fit

    @property
    def _noise(self) -> tuple[float, float]:
        return float(self.options.smoothing or 0), float(self.options.outliers or 0)

    def untrained(self, whole: Table, table: Table) -> Standardised:
        """An untrained flow: the Gaussian of the whole table, with maps of the columns if the training rows
        justify them."""
        flow = velocity_flow(
            table.dimension,
            num_given=table.num_given,
            width=self.options.width or self.sizes.width,
            depth=self.options.depth or self.sizes.depth,
            num_features=self.sizes.num_features,
            key=self.key,
        )
        min_gain = {True: -np.inf, False: np.inf, None: self.sizes.worth}[self.options.marginals]
        maps = fit_marginals(table.train, table.dimension, min_gain, table.bounds, table.links)
        return Standardised(flow, *whole.units(maps), table.names, table.num_given, maps)


@dataclasses.dataclass(frozen=True)
class _FoldModel:
    model: Standardised

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        """Log-densities, in padded batches, so that folds of different sizes do not cause recompilation."""
        size = 2 ** max(5, int(np.ceil(np.log2(len(rows)))))
        padded = rows[np.arange(size) % len(rows)]
        return HeldOut(padded, np.arange(size), None).values(self.model)[: len(rows)]


def _with_flow(model: Standardised, flow: Any) -> Standardised:
    # Training may use a random estimate of the divergence; the final density uses the exact divergence.
    flow = eqx.tree_at(lambda f: f.divergence, flow, ExactDivergence())
    return eqx.tree_at(lambda m: m.flow, model, flow)


@dataclasses.dataclass(frozen=True)
class _Closed:
    """A closed-form family, its log-densities of unseen rows, and the fitted mixture if the family is
    "mixture"."""

    family: Family
    values: np.ndarray
    mixture: MixedDensity | None = None
    far: bool = True  # whether columns with extreme values have Pareto tails


def _best_closed(comparison: Comparison, marginals: bool | None, plain: bool) -> _Closed:
    """The best closed-form family: a Gaussian, a Gaussian of mapped columns or, if `plain` (neither maps nor
    noise, bounds or rounding are set), a mixture."""
    fits = {name: partial(ClosedForm.of, name) for name in ("gaussian", "marginals")}
    if marginals is not None:
        # With marginals=False, the Gaussian has no maps at all.
        name, far = ("marginals", True) if marginals else ("gaussian", False)
        return _Closed(name, comparison.values(partial(fits[name], far=far)), far=far)
    best = _Closed("gaussian", comparison.values(fits["gaussian"]))
    if not comparison.cross:
        return best  # with many rows, a flow learns the marginals, and choosing maps takes long
    others = [_Closed("marginals", comparison.values(fits["marginals"]))]
    table = comparison.whole
    fits_mixture = plain and not table.num_given and table.relations is None
    # Under a mixture of Gaussians, extreme rows have a very low density.
    if fits_mixture and len(table.train) < MAX_MIXTURE_ROWS and not has_far_rows(table.train):
        types = dict.fromkeys(range(table.dimension), "continuous")
        labels = table.links.labels
        found = fit_mixed(table.train, table.names, types, None, labels, 0.0, jax.random.key(0))
        others.append(_Closed("mixture", found.values, found.model))
    for other in others:
        best = other if comparison.is_better(other.values, best.values) else best
    # Columns with extreme values are not normal, so maps are chosen even if their gain is not significant.
    maps = ClosedForm.of("gaussian", table).maps
    if best.family == "gaussian" and maps is not None and maps.tails is not None:
        best = max(best, others[0], key=lambda closed: np.mean(closed.values))
    return best


def _closed_fit(comparison: Comparison, best: _Closed, noise: float | str = 0.0) -> FittedDensity:
    """The fitted density of a closed-form family: a mixture, or an untrained flow."""
    table, held_out, score = comparison.table, comparison.held_out, None
    closed = None if best.family == "mixture" else ClosedForm.of(best.family, table, best.far)
    if comparison.cross and comparison.own:
        held_out, score = held_out.first(0), comparison.score(best.values)
    elif len(held_out.rows):
        few = held_out.first(SCORED_ROWS)
        score = few.judged((closed or best.mixture).log_prob(few.rows))  # pyright: ignore[reportOptionalMemberAccess]
    fitted = FittedDensity(
        model=best.mixture if closed is None else closed.model(table),
        objective=Interpolant(num_given=table.num_given),
        history=History(),
        interrupted=False,
        stages={"regression": History(ended="before the first step: no flow was trained")},
        family=best.family,
        held_out=held_out,
        known_score=score,
    )
    return fitted.with_noise(noise) if noise and noise != "best" else fitted


def _is_for_a_mixture(data: Any, family: Any, types: Any, weights: Any, others: Sequence[Any]) -> bool:
    """Whether a mixture is requested or needed for the table. If an option applies only to flows, a flow is
    fitted instead; its error message names the cell that it does not support."""
    if types is not None or weights is not None or family == "mixture":
        return True
    free = family is None and all(value is None for value in others)
    return free and not isinstance(data, ParquetTable) and is_mixed(data)


def _changed_options(**groups: Any) -> dict[str, Any]:
    """The fields of groups of options that differ from their defaults, named as in a call."""
    defaults = {"batch_size": BATCH_ROWS, "learning_rate": LEARNING_RATE, "patience": PATIENCE}
    return {
        f"{argument}={type(group).__name__}({field.name}=...)": value
        for argument, group in groups.items()
        if group is not None
        for field in dataclasses.fields(group)
        if (value := getattr(group, field.name)) not in (field.default, defaults.get(field.name))
    }


def _check_mixed(family: Any, data: Any, others: Mapping[str, Any]) -> None:
    """Reject options that a mixture does not support."""
    if family not in (None, "mixture"):
        raise ValueError(f"types= and weights= need family 'mixture', not {family!r}{see('no-density')}")
    why = "a mixture (family 'mixture', types= or weights=) does not support"
    if isinstance(data, ParquetTable):
        raise ValueError(f"{why} ParquetTable: load the table into memory")
    found = [name for name, value in others.items() if value is not None]
    if found:
        option = found[0] if "=" in found[0] else f"{found[0]}="
        raise ValueError(f"{why} {option}: omit it, or fit another family{see('no-density')}")


def _mixed_fit(
    data: Any,
    names: tuple[str, ...],
    types: Any,
    weights: Any,
    groups: Any,
    validation: Any,
    key: PRNGKeyArray,
) -> FittedDensity:
    """Fit a mixture to a table, which may have text and missing cells."""
    named = [name for name in (groups, weights) if isinstance(name, str)]
    if named:
        if not is_frame(data):
            raise ValueError("groups and weights can be names only for a DataFrame")
        names = tuple(name for name in names or frame_names("data", data) if name not in named)
        if not names:
            raise ValueError("groups and weights include all columns of data: no column is left to model")
        column = lambda name: np.asarray(take("data", data, [name]))[:, 0] if isinstance(name, str) else name
        groups, weights = column(groups), column(weights)
    if weights is not None:
        weights = real_numbers("weights", weights)
    types = {int(name) if is_whole(name) else name: kind for name, kind in types.items()}
    found = fit_mixed(data, names, types, weights, groups, validation, key)
    method = "cross-validation" if found.cross else "validation rows"
    return FittedDensity(
        model=found.model,
        objective=Interpolant(),
        history=History(),
        interrupted=False,
        stages={"regression": History(ended="before the first step: no flow was trained")},
        family="mixture",
        known_score=Score.of(found.values, found.gaussian, found.labels, method),
    )


def _compared(fitted: FittedDensity, comparison: Comparison, trainer: _Trainer, plain: bool) -> FittedDensity:
    """The flow if it is better than all closed-form densities, otherwise the best closed-form density."""
    best = _best_closed(comparison, trainer.options.marginals, plain)
    regression = fitted.stages["regression"]
    steps = regression.loss.size if regression.best_step is None else regression.best_step
    try:
        if comparison.cross and steps == 0:
            values = best.values  # the flow has not learned anything
        elif comparison.cross:
            values = comparison.values(trainer.fold(steps, trainer.key), best.values)
        else:
            values = comparison.held_out.first(SCORED_ROWS).values(fitted.model)
    except KeyboardInterrupt:
        return dataclasses.replace(fitted, interrupted=True)
    if not comparison.is_better(values, best.values):
        closed = _closed_fit(comparison, best)
        return dataclasses.replace(closed, history=fitted.history, stages=fitted.stages)
    if comparison.cross and not comparison.own:
        return fitted
    return dataclasses.replace(fitted, known_score=comparison.score(values))


def _sampled(
    table: ParquetTable, given: Any, groups: Any, validation: Any, key: PRNGKeyArray
) -> tuple[ParquetTable, np.ndarray, np.ndarray | None, Any]:
    """The table on disk without its validation rows, a sample of its rows (modelled and given columns) for
    moments and maps, and the validation rows."""
    if given is not None:
        raise ValueError("for a table on disk, set given in rf.tables.ParquetTable(path, given=[...])")
    if groups is not None:
        raise ValueError("groups does not support tables on disk: load the table, or pass validation rows")
    own = len(table.columns) - table.num_given
    parts = lambda rows: (rows[:, :own], rows[:, own:] if table.num_given else None)
    if isinstance(validation, float | int):
        table, held_out = table.split(validation, key=key)
        validation = (parts(held_out) if table.num_given else held_out) if len(held_out) else 0.0
    return table, *parts(table.subsample(SAMPLED_ROWS, rng_of(key, 1)).astype(np.float64)), validation


def _check(family: Any, noise: Any, steps: Any, seconds: Any) -> None:
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(map(repr, FAMILIES))}, or None, got {family!r}")
    if isinstance(noise, str) and noise != "best":
        raise ValueError(f'noise must be a number of at least 0, or "best", got {noise!r}')
    if noise not in (0, "best"):
        check_positive("noise", noise)
    if steps is not None:
        check_count("steps", steps)
    if seconds is None:
        return
    check_positive("seconds", seconds)
    if steps is not None:
        message = "steps and seconds are alternatives: set only one of them"
        raise ValueError(message + see("budgets-and-validation"))
