"""The two training stages of `fit_density`, regression and likelihood, and defaults by table size."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_flag, check_number
from .._devices import Devices
from ..density import StochasticFlow
from ..flow import HutchinsonDivergence
from ..train import (
    Fitted,
    Interpolant,
    MaximumLikelihood,
    RunOptions,
    TrainingOptions,
    fit,
    steps_of,
)
from ._large_tables import ParquetTable
from ._standardised import Standardised

MIN_ROWS_FOR_WAVES = 2000  # minimum number of rows for high-frequency features, for at most two columns
MIN_ROWS_FOR_LIKELIHOOD = 2000  # minimum number of rows for the likelihood stage
MIN_ROWS_FOR_WIDE = 20_000  # minimum number of rows for the wider network
MIN_CELLS_FOR_WIDEST = 1_000_000  # minimum number of cells (rows times columns) for the widest network
SPARSE_ROWS_PER_COLUMN = 30  # with fewer rows per column, a network overfits without regularisation
SMALL_TABLE = 500  # number of sets of linked rows below which densities are compared by cross-validation
TINY_TABLE, TINY_PER_COLUMN = 64, 10  # minimum number of rows, and of rows per column, for a flow


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """Options of the flow that `rf.fit_density` trains. None stands for a default that depends on the table.

    - `width`, `depth`: width and depth of the network. The default is 128 and 3. For at least 20,000 rows and
      three columns, it is 256 and 3; if there are also at least a million cells, 512 and 4, or on a GPU 1,024
      and 4, with batches of 2,048 rows and 12,000 steps.
    - `marginals`: whether to map each column to a nearly normal one first (`rf.tables.Marginals`), with a
      number of knots chosen by cross-validation. The flow then need not learn heavy tails, edges and spikes.
      By default, columns are mapped if that gains 0.5 nats per column, or 0.05 with fewer than 30 rows per
      column. The option also applies to small tables for which no flow is trained.
    - `smoothing`: standard deviation of noise that is added to the rows in each training step, to prevent
      overfitting, in units of the standardised data. Default: 0.3 with fewer than 30 rows per column,
      otherwise 0.
    - `outliers`: fraction of rows to which each training step adds large noise, of twice the standard
      deviation of the table, so that the density does not vanish between the data. Default: 0.02 for four or
      more columns, otherwise 0.
    - `likelihood_steps`: number of maximum-likelihood steps after the regression. Default: up to 100; 0 with
      fewer than 2,000 rows or 30 rows per column, and 0 for the wider network with four or more columns,
      where the small gain is not worth the time.

    ```python
    import roughflow as rf

    flow = rf.tables.FlowOptions(width=64, depth=2, likelihood_steps=0)
    ```
    """

    width: int | None = None
    depth: int | None = None
    marginals: bool | None = None
    smoothing: float | None = None
    outliers: float | None = None
    likelihood_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.likelihood_steps is not None:
            check_count("likelihood_steps", self.likelihood_steps, 0)
        if self.smoothing is not None:
            check_number("smoothing", self.smoothing, least=0)
        if self.outliers is not None:
            check_number("outliers", self.outliers, least=0, below=1)
        if self.marginals is not None:
            check_flag("marginals", self.marginals)

    def resolved(self, sizes: "Sizes") -> "FlowOptions":
        """These options, with the defaults for a table of this size."""
        names = ("width", "depth", "smoothing", "outliers", "likelihood_steps")
        return dataclasses.replace(
            self, **{name: getattr(sizes, name) for name in names if getattr(self, name) is None}
        )


@dataclass(frozen=True)
class Sizes:
    """The size of a table: the numbers of distinct rows, of modelled and given columns, and of sets of linked
    rows; and whether the flow is trained on an accelerator."""

    rows: int
    columns: int
    num_given: int
    sets: int
    accelerated: bool = False

    @property
    def tiny(self) -> bool:
        return self.rows < max(TINY_TABLE, TINY_PER_COLUMN * (self.columns + self.num_given))

    @property
    def small(self) -> bool:
        return self.sets < SMALL_TABLE

    @property
    def sparse(self) -> bool:
        return self.rows < SPARSE_ROWS_PER_COLUMN * self.columns

    @property
    def plane(self) -> bool:
        return self.columns + self.num_given <= 2

    @property
    def wide(self) -> bool:
        return self.rows >= MIN_ROWS_FOR_WIDE and not self.plane

    @property
    def widest(self) -> bool:
        """Whether to use the widest network, which gains 4 nats on BSDS300 (144,000 × 63)."""
        return self.wide and self.rows * self.columns >= MIN_CELLS_FOR_WIDEST

    @property
    def largest(self) -> bool:
        """Whether to use an even wider network and larger batches, which need an accelerator. They gain
        another 1.6 nats on BSDS300."""
        return self.widest and self.accelerated

    @property
    def width(self) -> int:
        return 1024 if self.largest else 512 if self.widest else 256 if self.wide else 128

    @property
    def depth(self) -> int:
        return 4 if self.widest else 3

    @property
    def num_features(self) -> int:
        return 64 if self.plane and self.rows >= MIN_ROWS_FOR_WAVES else 0

    @property
    def worth(self) -> float:
        """Gain, in nats per column, above which columns are mapped. With enough rows a flow learns the
        marginals itself, and maps would distort linear relations."""
        return 0.05 if self.sparse else 0.5

    @property
    def smoothing(self) -> float:
        return 0.3 if self.sparse else 0.0

    @property
    def outliers(self) -> float:
        """Default fraction of outliers. With few columns there are no empty regions; with many columns, a
        flow may put almost no mass in an empty region and lose 100 nats on a row that falls there."""
        return 0.0 if self.columns + self.num_given <= 3 else 0.02

    @property
    def steps(self) -> int:
        if self.largest:
            return 12_000
        max_steps = 20_000 if self.rows >= MIN_ROWS_FOR_LIKELIHOOD else 4000
        return min(max_steps, max(2000, 4 * self.rows))

    @property
    def batch_size(self) -> int:
        """Default number of rows per step of the regression."""
        return 4 * BATCH_ROWS if self.largest else min(BATCH_ROWS, 2 ** int(math.log2(self.rows)))

    @property
    def likelihood_steps(self) -> int:
        """Default number of likelihood steps. Each step needs a backward solve with one tangent per column.
        After a long regression of a wide network these steps gain little. With fewer than 2,000 rows they
        gain at most 0.03 nats and double the time, and with few rows per column they overfit."""
        if self.sparse or self.rows < MIN_ROWS_FOR_LIKELIHOOD:
            return 0
        return 100 if self.columns <= 3 else 0 if self.wide else 60


OUTLIER_NOISE = 2.0  # standard deviation of the noise on outliers, in units of the standardised rows


class Smoothed(eqx.Module):
    """A kernel density estimate as training data: rows drawn with replacement, with normal noise of standard
    deviation `width` on all but the last `num_given` columns. A fraction `outliers` of the rows has noise of
    standard deviation `OUTLIER_NOISE`, which exceeds that of the standardised rows."""

    rows: Array  # padded with zeros to a power of two, so that other row counts do not cause recompilation
    count: Array
    width: float
    outliers: float
    num_given: int = eqx.field(static=True)

    def __init__(self, rows: Array, width: float, outliers: float, num_given: int = 0):
        self.count = jnp.asarray(len(rows))
        self.rows = jnp.pad(rows, ((0, 2 ** math.ceil(math.log2(len(rows))) - len(rows)), (0, 0)))
        self.width, self.outliers, self.num_given = width, outliers, num_given

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        key_row, key_noise, key_far = jax.random.split(key, 3)
        rows = self.rows[jax.random.randint(key_row, shape, 0, self.count)]
        own = rows.shape[-1] - self.num_given
        far = jax.random.bernoulli(key_far, self.outliers, (*shape, 1))
        noise = jnp.where(far, OUTLIER_NOISE, self.width) * jax.random.normal(
            key_noise, (*shape, own), rows.dtype
        )
        return rows.at[..., :own].add(noise)


def smoothed(rows: Array, width: float, outliers: float, num_given: int) -> Array | Smoothed:
    """The rows with noise, or unchanged if there is none."""
    return rows if width == outliers == 0 else Smoothed(rows, width, outliers, num_given)


@dataclass(frozen=True, eq=False)
class UnitBatches:
    """Batches of a table on disk for training. Uniform noise as wide as `rounding` is added to rounded
    columns; a `model` standardises the rows; then noise is added as in `Smoothed`."""

    table: ParquetTable
    model: Standardised
    rounding: np.ndarray
    width: float
    outliers: float

    def batch(self, size: int, rng: np.random.Generator) -> np.ndarray:
        rows = self.table.batch(size, rng)
        if np.any(self.rounding):
            rows = rows + self.rounding * rng.uniform(-0.5, 0.5, rows.shape)
        unit = np.array(self.model.unit(rows))
        own = unit.shape[1] - self.table.num_given
        if self.width or self.outliers:
            far = rng.random((size, 1)) < self.outliers
            unit[:, :own] += np.where(far, OUTLIER_NOISE, self.width) * rng.normal(size=(size, own))
        return unit


MAX_EXACT_COLUMNS = 8  # with more columns, the likelihood stage uses Hutchinson's divergence estimator
REGRESSION_ROWS = 4096  # validation rows of the regression stage are repeated up to about this number
# Maximum number of validation rows of the likelihood stage, each of which needs a solve.
LIKELIHOOD_ROWS = 1000
LIKELIHOOD_TIME = 0.25  # fraction of the time budget for the likelihood stage
TIMED_STEPS = 40  # number of steps that are timed to convert seconds to steps
BATCH_ROWS = 512  # number of rows per step of the regression, or fewer for smaller tables
LEARNING_RATE, PATIENCE = 2e-3, 5  # learning rate of the regression, and patience of both stages
LIKELIHOOD_BATCH = 256  # number of rows per step of the likelihood stage
LIKELIHOOD_RATE = 0.25  # learning rate, relative to that of the regression
AVERAGE = {"regression": 0.999, "likelihood": 0.98}  # decay of the average of the parameters, per step
NUM_VALIDATIONS = {"regression": 20, "likelihood": 10}
# Minimum number of steps between two validation checks.
MIN_STEPS_BETWEEN_VALIDATIONS = {"regression": 25, "likelihood": 1}


@dataclasses.dataclass(frozen=True)
class Stages:
    """Trains a flow by regression, then by likelihood, on the same rows."""

    train: Any  # an array, `Smoothed` rows or `UnitBatches`
    held_out: Any
    training: TrainingOptions
    run: RunOptions
    progress: bool
    seconds: float | None

    def both(
        self,
        flow: StochasticFlow,
        num_given: int,
        steps: int,
        likelihood_steps: int,
        key: PRNGKeyArray,
        key_likelihood: PRNGKeyArray,
    ) -> Fitted:
        """Train in both stages; return the result of the last one, with the histories of both."""
        settings = (flow, num_given, key)
        file = None if self.run.checkpoint is None else Path(self.run.checkpoint)
        share = LIKELIHOOD_TIME if likelihood_steps else 0.0
        last = self._stage(self.regression, settings, file, steps, 1 - share)
        histories = {"regression": last.history}
        if likelihood_steps and not last.interrupted:
            file = None if file is None else second_file(file)
            settings = (last.model, key_likelihood)
            last = self._stage(self.likelihood, settings, file, likelihood_steps, share)
            histories["likelihood"] = last.history
        return dataclasses.replace(last, stages=histories)

    def _stage(
        self,
        stage: Callable[..., Fitted],
        settings: tuple[Any, ...],
        file: Path | None,
        steps: int,
        share: float,
    ) -> Fitted:
        if self.seconds is not None:
            steps = self._affordable(share * self.seconds, stage, settings, file)
        return stage(*settings, file, steps)

    def _affordable(
        self, seconds: float, stage: Callable[..., Fitted], settings: tuple[Any, ...], file: Path | None
    ) -> int:
        """Number of steps of a stage within its budget of seconds; a resumed run keeps its original
        number."""
        if self.run.resume and file is not None and file.exists():
            return steps_of(file)
        quiet = partial(stage.__func__, dataclasses.replace(self, progress=False))  # pyright: ignore[reportFunctionMemberAccess]
        quiet(*settings, None, TIMED_STEPS)  # compiles the program
        began = time.perf_counter()
        quiet(*settings, None, TIMED_STEPS)
        afforded = int(seconds * TIMED_STEPS / (time.perf_counter() - began))
        return Devices.of(self.run.devices).all_reduce_min([max(1, afforded)])[0]

    def regression(
        self, flow: StochasticFlow, num_given: int, key: PRNGKeyArray, file: Path | None, steps: int
    ) -> Fitted:
        # The loss uses each row at only one time and with only one base point, so validation rows are
        # repeated if there are few.
        often = max(1, REGRESSION_ROWS // max(1, len(self.held_out)))
        return fit(
            flow,
            self.train,
            key=key,
            objective=Interpolant(num_given=num_given),
            steps=steps,
            **self._options("regression", steps, np.tile(self.held_out, (often, 1)), file),
        )

    def likelihood(self, flow: StochasticFlow, key: PRNGKeyArray, file: Path | None, steps: int) -> Fitted:
        if flow.dimension > MAX_EXACT_COLUMNS:
            flow = eqx.tree_at(lambda f: f.divergence, flow, HutchinsonDivergence())
        held_out = np.asarray(self.held_out)[:LIKELIHOOD_ROWS]
        return fit(
            flow,
            self.train,
            key=key,
            objective=MaximumLikelihood(1),
            steps=steps,
            frozen=lambda flow: flow.base,
            **self._options("likelihood", steps, held_out, file),
        )

    def _options(self, name: str, steps: int, held_out: np.ndarray, file: Path | None) -> dict[str, Any]:
        """The arguments of `rf.fit` for the stage with this name."""
        every = max(MIN_STEPS_BETWEEN_VALIDATIONS[name], -(-steps // NUM_VALIDATIONS[name]))
        defaults = {"learning_rate": LEARNING_RATE, "patience": PATIENCE}
        training = self.training.with_defaults(defaults | {"average": AVERAGE[name], "validate_every": every})
        if name == "likelihood":
            rate = LIKELIHOOD_RATE * (training.learning_rate or LEARNING_RATE)
            training = dataclasses.replace(training, learning_rate=rate, batch_size=LIKELIHOOD_BATCH)
        if not len(held_out):
            training = dataclasses.replace(training, patience=0)
        resume = self.run.resume and file is not None and file.exists()
        return {
            "validation": held_out if len(held_out) else 0.0,
            "progress": name if self.progress else False,
            "training": training,
            "run": RunOptions(checkpoint=file, resume=resume, devices=self.run.devices),
        }


def second_file(checkpoint: Path) -> Path:
    """The checkpoint file of the second stage."""
    return checkpoint.with_name(checkpoint.name + ".likelihood")
