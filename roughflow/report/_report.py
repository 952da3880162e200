"""A fit as one page of HTML to send on: what was done, how good it is, what to beware of."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

import roughflow as rf

from . import _figures as draw, _page as html

COLUMNS = 5  # shown; ten pairs
DRAWN = 4000  # rows and samples
SCORED, NOISY = 1000, 64  # rows to score, without noise and with it, where each takes many paths
OUTSIDE = 0.005  # share of samples beyond the range of the data above which bounds are suggested
MEANING = (
    "The log-likelihood is the mean of log p over rows; higher is better. It is measured in nats: a gain of "
    "1 nat per row means that the density at a typical row is e = 2.7 times as high. Its value depends on "
    "the units of the columns, so compare it only with other models of the same table, such as the Gaussian. "
    "A gain of less than two standard errors (±) may be due to chance."
)


def write_report(
    path: str | os.PathLike,
    fitted: rf.FittedDensity,
    data: np.ndarray,
    *,
    key: PRNGKeyArray,
    held_out: np.ndarray | None = None,
    title: str = "A density",
    made: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write what became of an `rf.fit_density` as one HTML file, images and all.

    **Arguments:**

    - `data`: the rows it was fitted to, with what is given as their last columns.
    - `held_out`: other rows to judge it by; if None, its own `score`, or, without one, the rows it was fitted
      to.
    - `made`: how it was made, as names and texts (the command, the seed, the seconds).
    - `notes`: warnings that came up on the way.

    ```python
    import jax
    import roughflow as rf
    from roughflow.report import write_report

    data = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(300,))
    settings = {"width": 8, "depth": 1, "steps": 20, "likelihood_steps": 2, "progress": False}
    fitted = rf.fit_density(data[:200], key=jax.random.key(1), **settings)
    write_report("report.html", fitted, data[:200], held_out=data[200:], key=jax.random.key(2))
    ```
    """
    data, keys = np.asarray(data, float), jax.random.split(key, 3)
    assert fitted.held_out is not None
    aside = fitted.held_out.rows
    own = aside if len(aside) else data
    judged = _Judged.of(fitted, own if held_out is None else np.asarray(held_out, float), keys[:2])
    score = (fitted.score if held_out is None else None) or judged.score(held_out is not None)
    counts = f"{len(data):,}, " + (f"{len(aside):,} of them for validation" if len(aside) else "all to fit")
    noted = [*notes, *([judged.estimate.warning] if judged.estimate.warning else [])]
    with warnings.catch_warnings():
        # Letters that a font lacks, and axes of a single step: the page shows what there is.
        warnings.simplefilter("ignore", UserWarning)
        sections = [
            html.section("How it was made", html.pairs(_made(fitted.model, counts, made or {}))),
            html.section("How good it is", html.pairs(_numbers(fitted, score)), html.paragraph(MEANING)),
            html.section("Warnings", html.bullets(noted) if noted else html.paragraph("None.")),
            *_samples(fitted.model, data, keys[2]),
            _training(fitted),
            judged.section(),
        ]
    with rf.whole_file(path) as draft:
        draft.write_text(html.page(title, sections), encoding="utf-8")
    return Path(path)


@dataclass(frozen=True)
class _Judged:
    """Two independent estimates at the same rows, and the Gaussian's log densities there."""

    estimate: rf.Estimate
    again: rf.Estimate
    gaussian: np.ndarray
    noisy: bool

    @staticmethod
    def of(fitted: rf.FittedDensity, rows: np.ndarray, keys: PRNGKeyArray) -> "_Judged":
        assert fitted.held_out is not None
        model = fitted.model
        noisy = model.flow.noise_dimension > 0
        rows = rows[: NOISY if noisy else SCORED]
        own = rows.shape[1] - model.context
        given = rows[:, own:] if model.context else None
        first = model.estimate(rows[:, :own], key=keys[0], given=given)
        second = model.estimate(rows[:, :own], key=keys[1], given=given) if noisy else first
        return _Judged(first, second, fitted.held_out.gaussian.log_prob(rows), noisy)

    def score(self, unseen: bool) -> rf.Score:
        values = np.asarray(self.estimate.log_prob, float)
        method = "rows it was not fitted to" if unseen else "rows it was fitted to"
        return rf.Score.of(values, self.gaussian, np.arange(len(values)), method)

    def section(self) -> str:
        return self._error_bars() if self.noisy else self._solver()

    def _solver(self) -> str:
        errors = np.asarray(self.estimate.solver_error)
        told = (
            "The model has no noise, so its density is exact but for the steps of the solver. They move "
            f"log p by {np.mean(errors):.2g} nats on average, by {np.max(errors):.2g} at most."
        )
        fine = errors[np.isfinite(errors)]
        drawn = {f"The solver's error at {fine.size:,} rows.": draw.solver_errors(fine)} if fine.size else {}
        return html.section("Error of the densities", html.paragraph(told), html.figures(drawn))

    def _error_bars(self) -> str:
        bars = np.hypot(self.estimate.standard_error, self.again.standard_error)
        gap = np.asarray(self.estimate.log_prob - self.again.log_prob)
        known = np.isfinite(bars) & np.isfinite(gap) & (bars > 0)
        scaled = gap[known] / bars[known]
        within = lambda count: f"{np.mean(np.abs(scaled) <= count):.0%}" if scaled.size else "none"
        told = (
            "The model has noise, so each density is a mean over random paths and has an error bar. Two "
            f"independent estimates at {scaled.size} rows differ by less than one error bar at {within(1)} "
            f"of them and by less than two at {within(2)}; honest error bars give 68% and 95% or more."
        )
        size = (
            f"The error bar of log p is {np.median(self.estimate.total_error):.2g} nats in the middle, on "
            f"{np.median(self.estimate.effective_paths):.0f} effective paths of "
            f"{int(np.max(self.estimate.num_paths))}."
        )
        drawn = {"Differences of two estimates, in units of their error bar.": draw.calibration(scaled)}
        parts = (html.paragraph(told), html.paragraph(size), html.figures(drawn))
        return html.section("Calibration of the error bars", *parts)


def _names(model: rf.Standardised) -> list[str]:
    return list(model.columns or (f"x{i + 1}" for i in range(model.flow.dimension)))


def _made(model: rf.Standardised, rows: str, made: Mapping[str, str]) -> dict[str, str]:
    names = _names(model)
    own = len(names) - model.context
    told = dict(made) | {"rows": rows, "columns": ", ".join(names[:own])}
    if model.context:
        told["given"] = ", ".join(names[own:])
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return told | {"version": f"roughflow {rf.__version__}", "date": when}


def _numbers(fitted: rf.FittedDensity, score: rf.Score) -> dict[str, str]:
    told = {
        "family": fitted.family,
        "log-likelihood": f"{score.mean:.4f} ± {score.standard_error:.2g} nats per row, over "
        f"{score.num_rows:,} rows ({score.method})",
        "Gaussian": f"{score.gaussian:.4f}, with the mean and covariance of the data",
        "gain": f"{score.gain:.4f} ± {score.gain_error:.2g}, over the Gaussian",
    }
    for name, history in fitted.stages.items():
        skipped = f", {history.skipped:,} skipped" if history.skipped else ""
        end = f"ended {history.ended}" if history.ended else "took all its steps"
        told[name] = f"{history.loss.size:,} steps{skipped}; {end}"
    return told


def _samples(model: rf.Standardised, data: np.ndarray, key: PRNGKeyArray) -> list[str]:
    """Data and samples of the model: column by column, and for each pair of columns."""
    names, chosen = _names(model), np.random.default_rng(0).permutation(len(data))[:DRAWN]
    data = data[chosen]
    own = data.shape[1] - model.context
    if model.context:
        drawn = np.asarray(model.sample(key=key, given=data[:, own:]), float)
        drawn = np.concatenate([drawn, data[:, own:]], axis=1)
    else:
        drawn = np.asarray(model.sample(key=key, shape=(len(data),)), float)
    drawn = drawn[np.isfinite(drawn).all(axis=1)]
    shown = range(min(COLUMNS, len(names)))
    left_out = ", ".join(names[COLUMNS:])
    told = [html.paragraph(f"The first {COLUMNS} columns; left out: {left_out}.")] if left_out else []
    outside = _outside(names[:own], data, drawn)
    if model.context:
        told.append(html.paragraph("For each row, one sample of the model given the same."))
    single = {names[i]: draw.marginal(data[:, i], drawn[:, i], names[i]) for i in shown if i < own}
    double = {
        f"{names[i]} and {names[j]}": draw.pair(data[:, [i, j]], drawn[:, [i, j]], (names[i], names[j]))
        for i, j in combinations(shown, 2)
        if i < own
    }
    sections = [
        html.section("Columns", *told, *([html.bullets(outside)] if outside else []), html.figures(single))
    ]
    return [*sections, html.section("Pairs of columns", *told, html.figures(double))] if double else sections


def _outside(names: Sequence[str], data: np.ndarray, drawn: np.ndarray) -> list[str]:
    """A line with suggested bounds for every column whose samples often leave the range of the data."""
    lines = []
    for i, name in enumerate(names):
        low, high = data[:, i].min(), data[:, i].max()
        below, above = np.mean(drawn[:, i] < low), np.mean(drawn[:, i] > high)
        # A new row is beyond the smallest of n with probability 1/(n + 1), even under the true density.
        share = max(OUTSIDE, 5 / (len(data) + 1))
        bounds: list[float | None] = [None, None]
        if below > share:
            bounds[0] = 0.0 if low >= 0 > drawn[:, i].min() else float(low)
        if above > share:
            bounds[1] = float(high)
        if bounds != [None, None]:
            python = "({}, {})".format(*("None" if bound is None else f"{bound:.6g}" for bound in bounds))
            lines.append(
                f"{below + above:.1%} of the samples of {name} are outside the range of the data, {low:.6g} "
                f"to {high:.6g}. If such values are impossible, fit again with bounds={{{name!r}: {python}}}."
            )
    return lines


def _training(fitted: rf.Fitted) -> str:
    drawn = {
        f"The loss in the {name} stage, smoothed, and on the validation rows.": draw.training(history)
        for name, history in fitted.stages.items()
        if np.isfinite(history.loss).sum() > 1
    }
    return html.section("Training", html.figures(drawn) if drawn else html.paragraph("Too short to draw."))
