"""From a table of numbers to a density."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key, check_positive
from ..flow import ExactDivergence, HutchinsonDivergence, StochasticFlow, velocity_flow, with_noise
from ._fit import Fitted, fit
from ._interpolant import Interpolant
from ._maximum_likelihood import MaximumLikelihood
from ._standardised import Standardised
from ._table import Table

SMALL = 2000  # rows below which a smaller network learns less by heart
MANY = 8  # columns above which likelihood is trained with probes of the divergence
LOOKED_AT = 4096  # rows to validate the regression on: those set aside, as often as it takes
LOOKS = 20  # at them, in the course of a stage


def fit_density(
    data: ArrayLike,
    *,
    key: PRNGKeyArray,
    given: ArrayLike | None = None,
    noise: float = 0.0,
    width: int | None = None,
    depth: int = 3,
    columns: Sequence[str] = (),
    validation: float | ArrayLike | tuple[ArrayLike, ArrayLike] = 0.1,
    patience: int | None = 5,
    steps: int | None = None,
    likelihood_steps: int | None = None,
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
    - `noise`: its size, in units of the standardised data; 0 for none.
    - `width`, `depth`: of the network; the width is 128, or 64 with few rows, unless told otherwise.
    - `columns`: names to keep with the model.
    - `validation`: what share of the rows to set aside, or such rows; with `given` a pair of both.
    - `patience`: looks at them, one every twentieth of a stage, without a better one that end it.
    - `steps`, `likelihood_steps`: of the stages; if None, up to 20,000 and 300, fewer with few rows and with
      many columns. Without any steps of likelihood that stage is left out.
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
    if noise:
        check_positive("noise", noise)
    whole = Table.of(data, given, columns)
    table = whole.split(validation, key_split)
    small = len(table.train) < SMALL
    flow = velocity_flow(
        table.dimension,
        context=table.context,
        width=(64 if small else 128) if width is None else width,
        depth=depth,
        features=0 if small else 64,
        key=key_model,
    )
    model = Standardised(flow, *whole.units(), tuple(columns), table.context)
    train, held_out = (model.unit(rows) for rows in (table.train, table.held_out))
    files = _Files.beside(checkpoint)
    stages = _Stages(train, held_out, learning_rate, patience, progress, resume)
    count = _regression_steps(len(train)) if steps is None else check_count("steps", steps)
    first = stages.regression(flow, table.context, count, batch_size, key_first, files.first)
    count = _likelihood_steps(table.dimension) if likelihood_steps is None else int(likelihood_steps)
    if count and not first.interrupted:
        last = stages.likelihood(first.model, count, key_second, files.second)
        histories = {"regression": first.history, "likelihood": last.history}
    else:
        last, histories = first, {"regression": first.history}
    # Probes are for training: a density is worth its exact divergence.
    flow = eqx.tree_at(lambda f: f.divergence, last.model, ExactDivergence())
    flow = with_noise(flow, noise) if noise else flow
    return dataclasses.replace(last, model=eqx.tree_at(lambda m: m.flow, model, flow), stages=histories)


@dataclasses.dataclass(frozen=True)
class _Stages:
    """What the two stages share."""

    train: Array
    held_out: Array
    learning_rate: float
    patience: int | None
    progress: bool
    resume: bool

    def regression(
        self,
        flow: StochasticFlow,
        context: int,
        steps: int,
        batch_size: int,
        key: PRNGKeyArray,
        file: Path | None,
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

    def likelihood(self, flow: StochasticFlow, steps: int, key: PRNGKeyArray, file: Path | None) -> Fitted:
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
            **self._shared("likelihood", steps, self.held_out, file),
        )

    def _shared(self, name: str, steps: int, held_out: Array, file: Path | None) -> dict[str, Any]:
        some = len(held_out) > 0
        return {
            "validation": held_out if some else 0.0,
            "every": -(-steps // LOOKS),
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


def _regression_steps(rows: int) -> int:
    return min(20_000, max(2000, 4 * rows))


def _likelihood_steps(columns: int) -> int:
    """Each takes a backward solve with a tangent for each column."""
    return 300 if columns <= 3 else 150
