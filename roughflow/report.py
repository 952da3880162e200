"""An HTML report on a fit, in a single file."""

import base64
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

import roughflow as rf
from roughflow import plots

DPI = 180

STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2329; --soft: #5b6670; --paper: #fff; --line: #d9dee3; --warn: #fff4e5 }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 64rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line) }
p { margin: .4rem 0; max-width: 46rem }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .25rem 1.2rem; margin: 0 }
dt { color: var(--soft) }
dd { margin: 0; font-variant-numeric: tabular-nums }
ul { margin: .4rem 0; padding: .6rem 1rem .6rem 2rem; background: var(--warn); border-radius: .4rem }
.figures { display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0; max-width: 32rem }
figcaption { font-size: .9rem; color: var(--soft) }
img { display: block; width: 100%; height: auto }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #9aa5af; --paper: #171717; --line: #363d44; --warn: #3a2e1c }
  img { filter: invert(.91) hue-rotate(180deg) }  /* white turns into the page's own dark; hues stay */
}
"""


def html_page(title: str, sections: Sequence[str]) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *sections])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def html_section(heading: str, *parts: str) -> str:
    """An HTML section with a heading and the elements below it."""
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *parts, "</section>"])


def html_paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def html_pairs(entries: Mapping[str, str]) -> str:
    """An HTML list of names and values, in two columns."""
    rows = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries.items())
    return f"<dl>\n{rows}\n</dl>"


def html_bullets(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def html_figures(drawn: Mapping[str, Figure]) -> str:
    """HTML for figures with captions, side by side if there is room."""
    return '<div class="figures">\n' + "\n".join(_figure(*one) for one in drawn.items()) + "\n</div>"


def _figure(caption: str, figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    image = base64.b64encode(buffer.getvalue()).decode()
    text = escape(caption)
    return (
        f'<figure><img src="data:image/png;base64,{image}" alt="{text}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


WIDTH = 4.6  # inches
NUM_BINS = 40
MAX_ERROR_BARS = 4.0  # range of the plot on either side of zero, in error bars
SMALLEST_ERROR = 1e-8  # nats; smaller errors are drawn at this value
MAX_LEVELS = 10  # maximum number of levels of a categorical column that are drawn
MAX_LABEL = 28  # maximum number of characters of a column name on an axis


def draw_pair(data: np.ndarray, model: np.ndarray, names: tuple[str, str]) -> Figure:
    """Scatter plots of two columns of the data and of the model's samples, with the same axes."""
    figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    extent = (*_window(data[:, 0]), *_window(data[:, 1]))
    for ax, rows, title in zip(axes, (data, model), ("data", "model"), strict=True):
        plots.samples(rows, ax=ax).set_aspect("auto")
        ax.set(xlim=extent[:2], ylim=extent[2:])
        ax.set_title(title, fontsize=plots.TEXT)
        ax.set_xlabel(_plain(names[0]))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    axes[0].set_ylabel(_plain(names[1]))
    axes[1].set_ylabel("")
    return figure


def draw_marginal(data: np.ndarray, model: np.ndarray, name: str) -> Figure:
    """Histograms of one column of the data and of the model's samples."""
    figure, ax = _curves(_plain(name), "density")
    bins = np.linspace(*_window(data), NUM_BINS + 1)
    # Histograms are normalised by the number of all rows, including those outside the window, so that they
    # are comparable.
    heights = [np.histogram(part, bins)[0] / len(part) / np.diff(bins) for part in (data, model)]
    ax.stairs(heights[0], bins, fill=True, color=plots.SKY, alpha=0.5, label="data")
    ax.stairs(heights[1], bins, color=plots.VERMILION, linewidth=1.5, label="model")
    ax.set_xlim(bins[0], bins[-1])
    ax.legend(frameon=False, fontsize=plots.SMALL)
    return figure


def draw_training(history: rf.train.History) -> Figure:
    figure, ax = _curves("step", "loss")
    plots.training(history, ax=ax).set_ylabel("loss")
    return figure


def draw_solver_errors(errors: np.ndarray) -> Figure:
    """A histogram of the change in log p, over rows, when the solver's steps are halved."""
    figure, ax = _curves("solver error of log p (nats)", "rows")
    shown = np.log10(np.maximum(errors, SMALLEST_ERROR))
    # The limits are whole decades, because a logarithmic scale over a smaller range has hardly any labels.
    ends = np.floor(shown.min()), np.floor(shown.max()) + 1
    ax.hist(10**shown, np.logspace(*ends, NUM_BINS + 1), color=plots.BLUE)
    ax.set_xscale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())
    return figure


def draw_calibration(scaled: np.ndarray) -> Figure:
    """A histogram of the differences of two estimates in units of their error bars, with the standard normal
    density, which is expected if error bars are correct."""
    figure, ax = _curves("difference / error bar", "density")
    bins = np.linspace(-MAX_ERROR_BARS, MAX_ERROR_BARS, NUM_BINS // 2 + 1)
    heights = np.histogram(scaled, bins)[0] / max(1, scaled.size) / np.diff(bins)
    ax.stairs(heights, bins, fill=True, color=plots.SKY, alpha=0.5, label="this model")
    x = np.linspace(-MAX_ERROR_BARS, MAX_ERROR_BARS, 200)
    normal = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    ax.plot(x, normal, color=plots.VERMILION, linewidth=1.5, label="correct error bars")
    ax.legend(frameon=False, fontsize=plots.SMALL)
    return figure


def _curves(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    ax = figure.subplots()
    ax.set_xlabel(xlabel, fontsize=plots.TEXT)
    ax.set_ylabel(ylabel, fontsize=plots.TEXT)
    ax.tick_params(labelsize=plots.SMALL)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def _window(column: np.ndarray) -> tuple[float, float]:
    """The limits of a plot of a column, without a few outliers that would compress the plot."""
    low, high = np.quantile(column, [0.002, 0.998])
    if low == high:
        low, high = column.min() - 0.5, column.max() + 0.5
    return float(low - 0.06 * (high - low)), float(high + 0.06 * (high - low))


def _plain(name: str) -> str:
    """A name as plain text, shortened if it is long; matplotlib reads text between two dollar signs as
    mathematics."""
    short = name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"
    return short.replace("$", r"\$")


MAX_COLUMNS = 5  # maximum number of columns shown; five columns make ten pairs
DRAWN_ROWS = 4000  # number of rows and of samples drawn
SCORED, NOISY = 1000, 64  # number of rows to score, without and with noise
MIN_SHARE_OUTSIDE = 0.005  # bounds are suggested if a larger share of the samples lies outside the data
SCORE_EXPLANATION = (
    "The log-likelihood is the mean of log p over rows; higher is better. It is measured in nats: a gain of "
    "1 nat per row means that the density at a typical row is e = 2.7 times as high. Its value depends on "
    "the units of the columns, so compare it only with other models of the same table, such as the Gaussian. "
    "A gain of less than two standard errors (±) may be due to chance."
)


def write_report(
    path: str | os.PathLike,
    fitted: rf.FittedDensity,
    data: Any,
    *,
    key: PRNGKeyArray,
    held_out: Any = None,
    title: str = "A density",
    made: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write a report on the result of `rf.fit_density` as one HTML file, including its images.

    **Arguments:**

    - `data`: the rows to which the model was fitted, with given columns last; a DataFrame or an array of
      objects for an `rf.tables.MixedDensity`.
    - `held_out`: other rows on which to evaluate the model; by default, the report shows `fitted.score` or,
      without one, the score of the training rows.
    - `made`: names and texts that describe the run (command, seed, seconds).
    - `notes`: warnings issued during the run.

    ```python
    import jax
    import roughflow as rf
    from roughflow.report import write_report

    data = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(300,))
    flow = rf.tables.FlowOptions(width=8, depth=1, likelihood_steps=2)
    fitted = rf.fit_density(data[:200], key=jax.random.key(1), flow=flow, steps=20, progress=False)
    write_report("report.html", fitted, data[:200], held_out=data[200:], key=jax.random.key(2))
    ```
    """
    if isinstance(fitted.model, rf.tables.MixedDensity):
        rows = data if held_out is None else held_out
        sections = _mixed_sections(fitted, fitted.model, data, rows, key, made or {}, notes)
        return _written(path, title, sections)
    data, keys = np.asarray(data, float), jax.random.split(key, 3)
    assert fitted.held_out is not None
    aside = fitted.held_out.rows
    own = aside if len(aside) else data
    judged = _Judged.of(fitted, own if held_out is None else np.asarray(held_out, float), keys[:2])
    score = (fitted.score if held_out is None else None) or judged.score(held_out is not None)
    use = f"{len(aside):,} of them for validation" if len(aside) else "all used in the fit"
    counts = f"{len(data):,}, {use}"
    noted = [*notes, *([judged.estimate.warning] if judged.estimate.warning else [])]
    with warnings.catch_warnings():
        # Ignore warnings about missing glyphs and about axes with a single step.
        warnings.simplefilter("ignore", UserWarning)
        sections = [
            html_section("How it was made", html_pairs(_made(fitted.model, counts, made or {}))),
            html_section(
                "How good it is", html_pairs(_numbers(fitted, score)), html_paragraph(SCORE_EXPLANATION)
            ),
            html_section("Warnings", html_bullets(noted) if noted else html_paragraph("None.")),
            *_samples(fitted.model, data, keys[2]),
            _training(fitted),
            judged.section(),
        ]
    return _written(path, title, sections)


def _written(path: str | os.PathLike, title: str, sections: Sequence[str]) -> Path:
    with rf.files.whole_file(path) as draft:
        draft.write_text(html_page(title, sections), encoding="utf-8")
    return Path(path)


@dataclass(frozen=True)
class _Judged:
    """Two independent estimates at the same rows, and the log-densities of a Gaussian at these rows."""

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
        own = rows.shape[1] - model.num_given
        given = rows[:, own:] if model.num_given else None
        first = model.estimate(rows[:, :own], key=keys[0], given=given)
        second = model.estimate(rows[:, :own], key=keys[1], given=given) if noisy else first
        return _Judged(first, second, fitted.held_out.gaussian.log_prob(rows), noisy)

    def score(self, unseen: bool) -> rf.tables.Score:
        values = np.asarray(self.estimate.log_prob, float)
        method = "rows not used in the fit" if unseen else "rows used in the fit"
        return rf.tables.Score.of(values, self.gaussian, np.arange(len(values)), method)

    def section(self) -> str:
        return self._error_bars() if self.noisy else self._solver()

    def _solver(self) -> str:
        errors = np.asarray(self.estimate.solver_error)
        text = (
            "The model has no noise, so its density is exact up to solver error: "
            f"{np.mean(errors):.2g} nats in log p on average and {np.max(errors):.2g} at most."
        )
        fine = errors[np.isfinite(errors)]
        drawn = {f"The solver error at {fine.size:,} rows.": draw_solver_errors(fine)} if fine.size else {}
        return html_section("Error of the densities", html_paragraph(text), html_figures(drawn))

    def _error_bars(self) -> str:
        bars = np.hypot(self.estimate.standard_error, self.again.standard_error)
        gap = np.asarray(self.estimate.log_prob - self.again.log_prob)
        known = np.isfinite(bars) & np.isfinite(gap) & (bars > 0)
        scaled = gap[known] / bars[known]
        within = lambda count: f"{np.mean(np.abs(scaled) <= count):.0%}" if scaled.size else "none"
        text = (
            "The model has noise, so each density is a mean over random paths and has an error bar. Two "
            f"independent estimates at {scaled.size} rows differ by less than one error bar at {within(1)} "
            f"of them and by less than two at {within(2)}; if the error bars are correct, these shares are "
            "at least 68% and 95%."
        )
        size = (
            f"The median error bar of log p is {np.median(self.estimate.total_error):.2g} nats, with "
            f"{np.median(self.estimate.effective_paths):.0f} effective paths out of "
            f"{int(np.max(self.estimate.num_paths))}."
        )
        drawn = {"Differences of two estimates, in units of their error bar.": draw_calibration(scaled)}
        parts = (html_paragraph(text), html_paragraph(size), html_figures(drawn))
        return html_section("Calibration of the error bars", *parts)


def _names(model: rf.tables.Standardised | rf.tables.WithRelations) -> list[str]:
    return list(model.columns or (f"x{i + 1}" for i in range(model.num_columns)))


def _made(
    model: rf.tables.Standardised | rf.tables.WithRelations, rows: str, made: Mapping[str, str]
) -> dict[str, str]:
    names = _names(model)
    own = len(names) - model.num_given
    pairs = dict(made) | {"rows": rows, "columns": ", ".join(names[:own])}
    if model.num_given:
        pairs["given"] = ", ".join(names[own:])
    if isinstance(model, rf.tables.WithRelations):
        pairs["relations"] = "; ".join(model.relations.described(names)) + " (removed, restored in samples)"
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return pairs | {"version": f"roughflow {rf.__version__}", "date": when}


def _numbers(fitted: rf.FittedDensity, score: rf.tables.Score) -> dict[str, str]:
    numbers = {
        "family": fitted.family,
        "log-likelihood": f"{score.mean:.4f} ± {score.standard_error:.2g} nats per row, over "
        f"{score.num_rows:,} rows ({score.method})",
        "Gaussian": f"{score.gaussian:.4f}, with the mean and covariance of the data",
        "gain": f"{score.gain:.4f} ± {score.gain_error:.2g}, over the Gaussian",
    }
    for name, history in fitted.stages.items():
        skipped = f", {history.skipped:,} skipped" if history.skipped else ""
        end = f"ended {history.ended}" if history.ended else "completed all steps"
        numbers[name] = f"{history.loss.size:,} steps{skipped}; {end}"
    return numbers


def _samples(
    model: rf.tables.Standardised | rf.tables.WithRelations, data: np.ndarray, key: PRNGKeyArray
) -> list[str]:
    """Report sections that show data and samples of the model, by column and by pair of columns."""
    names, chosen = _names(model), np.random.default_rng(0).permutation(len(data))[:DRAWN_ROWS]
    data = data[chosen]
    own = data.shape[1] - model.num_given
    if model.num_given:
        drawn = np.asarray(model.sample(key=key, given=data[:, own:]), float)
        drawn = np.concatenate([drawn, data[:, own:]], axis=1)
    else:
        drawn = np.asarray(model.sample(key=key, shape=(len(data),)), float)
    drawn = drawn[np.isfinite(drawn).all(axis=1)]
    shown = range(min(MAX_COLUMNS, len(names)))
    left_out = ", ".join(names[MAX_COLUMNS:])
    remarks = [html_paragraph(f"The first {MAX_COLUMNS} columns; not shown: {left_out}.")] if left_out else []
    outside = _outside(names[:own], data, drawn)
    if model.num_given:
        remarks.append(html_paragraph("The model is sampled once for each row, with the same given values."))
    single = {names[i]: draw_marginal(data[:, i], drawn[:, i], names[i]) for i in shown if i < own}
    double = {
        f"{names[i]} and {names[j]}": draw_pair(data[:, [i, j]], drawn[:, [i, j]], (names[i], names[j]))
        for i, j in combinations(shown, 2)
        if i < own
    }
    sections = [
        html_section("Columns", *remarks, *([html_bullets(outside)] if outside else []), html_figures(single))
    ]
    return (
        [*sections, html_section("Pairs of columns", *remarks, html_figures(double))] if double else sections
    )


def _outside(names: Sequence[str], data: np.ndarray, drawn: np.ndarray) -> list[str]:
    """Suggestions of bounds, one line for each column whose samples are often outside the range of the
    data."""
    lines = []
    for i, name in enumerate(names):
        low, high = data[:, i].min(), data[:, i].max()
        below, above = np.mean(drawn[:, i] < low), np.mean(drawn[:, i] > high)
        # Even under the true density, a new row is below the smallest of n with probability 1/(n + 1).
        share = max(MIN_SHARE_OUTSIDE, 5 / (len(data) + 1))
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


def _training(fitted: rf.train.Fitted) -> str:
    drawn = {
        f"The smoothed loss in the {name} stage, and the loss on the validation rows.": draw_training(history)
        for name, history in fitted.stages.items()
        if np.isfinite(history.loss).sum() > 1
    }
    return html_section("Training", html_figures(drawn) if drawn else html_paragraph("Too short to plot."))


# ---------------------------------------------------------------------------------- tables of mixed types

CHECKED_ROWS, CHECK_DRAWS = 300, 200  # number of rows, and draws per row, to check the coverage of intervals
COVERAGES = (0.5, 0.9)
COVERAGE_EXPLANATION = (
    "The share of values inside the central 50% and 90% intervals of their column, given all other columns "
    "of the row. The shares are near 50% and 90% if the model is calibrated, lower if the intervals are too "
    "narrow, and higher if they are too wide."
)


def _mixed_sections(
    fitted: rf.FittedDensity,
    model: rf.tables.MixedDensity,
    data: Any,
    rows: Any,
    key: PRNGKeyArray,
    made: Mapping[str, str],
    notes: Sequence[str],
) -> list[str]:
    """The sections of a report on a model of a table with numeric and categorical columns."""
    numbers, labels = _columns_of(model, data)
    drawn, drawn_labels = _columns_of(model, model.sample(key=key, shape=(DRAWN_ROWS,)))
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    pairs = {"rows": f"{len(data):,}", "version": f"roughflow {rf.__version__}", "date": when}
    score = fitted.score
    good = _numbers(replace(fitted, stages={}), score) if score is not None else {}
    good["Gaussian"] = (
        f"{score.gaussian:.4f}, for one Gaussian and the frequencies of levels" if score else ""
    )
    good["components"] = f"{len(model.mixture.weights)} products of a Gaussian and categorical distributions"
    shown = list(numbers)[:MAX_COLUMNS]
    figures = {name: draw_marginal(_present(numbers[name]), drawn[name], name) for name in shown}
    figures |= {
        name: draw_levels(labels[name], drawn_labels[name], name) for name in list(labels)[:MAX_COLUMNS]
    }
    double = {}
    for a, b in combinations(shown, 2):
        both = np.column_stack([numbers[a], numbers[b]])
        both, other = both[np.isfinite(both).all(axis=1)][:DRAWN_ROWS], np.column_stack([drawn[a], drawn[b]])
        if len(both):
            double[f"{a} and {b}"] = draw_pair(both, other[: len(both)], (a, b))
    types = _types(model, len(data), numbers, labels)
    coverage = _coverage(model, rows, key)
    unseen = "" if rows is data else " The rows were not used to fit the model."
    sections = [
        html_section("How it was made", html_pairs(dict(made) | pairs)),
        html_section("Columns and their types", html_pairs(types)),
        html_section("How good it is", html_pairs(good), html_paragraph(SCORE_EXPLANATION)),
        html_section("Warnings", html_bullets(notes) if notes else html_paragraph("None.")),
        html_section("Single columns", html_figures(figures)),
    ]
    if coverage:
        text = html_paragraph(COVERAGE_EXPLANATION + unseen)
        sections.insert(3, html_section("Coverage of intervals", text, html_pairs(coverage)))
    return [*sections, html_section("Pairs of columns", html_figures(double))] if double else sections


def _columns_of(
    model: rf.tables.MixedDensity, rows: Any
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """The numeric columns, with NaN for missing cells, and the labels in the categorical columns, without
    missing cells."""
    encoding = model.encoding
    numbers, codes = model.encode(rows)
    own: dict[str, np.ndarray] = {}
    labels: dict[str, list[str]] = {}
    for j, i in enumerate(encoding.numeric):
        own[encoding.columns[i]] = encoding.loc[i] + encoding.scale[i] * numbers[:, j]
    for j, i in enumerate(encoding.coded):
        name, levels = encoding.columns[i], encoding.levels[i]
        if encoding.types[i] == "zero-inflated":
            own[name] = np.where(codes[:, j] == 1, levels[0], own[name])
        else:
            labels[name] = [str(levels[code]) for code in codes[:, j] if code >= 0]
    return own, labels


def _present(column: np.ndarray) -> np.ndarray:
    return column[np.isfinite(column)]


def _types(
    model: rf.tables.MixedDensity, total: int, numbers: dict[str, np.ndarray], labels: dict[str, list[str]]
) -> dict[str, str]:
    """The type of each column and its share of missing cells."""
    encoding, types = model.encoding, {}
    for i, (name, kind) in enumerate(zip(model.columns, encoding.types, strict=True)):
        detail = {
            "category": f", {len(encoding.levels[i])} levels",
            "integer": f", in steps of {encoding.widths[i]:g}",
            "zero-inflated": f", point mass at {(encoding.levels[i] or (0,))[0]}",
        }
        seen = len(_present(numbers[name])) if name in numbers else len(labels[name])
        missing = f", {1 - seen / total:.1%} missing" if seen < total else ""
        types[name] = kind + detail.get(kind, "") + missing
    return types


def _coverage(model: rf.tables.MixedDensity, rows: Any, key: PRNGKeyArray) -> dict[str, str]:
    """For each numeric column, the share of values inside their central intervals, given the other
    columns."""
    chosen = np.random.default_rng(0).permutation(len(rows))[:CHECKED_ROWS]
    rows = rows.iloc[chosen] if hasattr(rows, "iloc") else np.asarray(rows, object)[chosen]
    numbers, _ = _columns_of(model, rows)
    rng, found = np.random.default_rng(0), {}
    for name, values in numbers.items():
        others = [other for other in model.columns if other != name]
        draws = model.conditional(rows, others).sample(CHECK_DRAWS, key=key) if others else None
        seen = np.isfinite(values)
        if draws is None or not seen.any():
            continue
        own = draws[:, seen, model.columns.index(name)].astype(float)
        # Ties, for example of integers, are broken at random.
        ties = rng.random(seen.sum()) * np.mean(np.isclose(own, values[seen]), axis=0)
        level = np.mean((own < values[seen]) & ~np.isclose(own, values[seen]), axis=0) + ties
        shares = [f"{np.mean(np.abs(level - 0.5) < width / 2):.0%}" for width in COVERAGES]
        found[name] = f"{shares[0]} in 50% intervals, {shares[1]} in 90% intervals ({seen.sum()} rows)"
    return found


def draw_levels(data: Sequence[str], model: Sequence[str], name: str) -> Figure:
    """A bar chart of the shares of the most frequent levels of a categorical column, in the data and in the
    model's samples."""
    figure, ax = _curves(_plain(name), "share")
    levels, counts = np.unique(np.asarray(data), return_counts=True)
    levels = levels[np.argsort(-counts)][:MAX_LEVELS]
    for part, shift, colour, label in (
        (data, -0.2, plots.SKY, "data"),
        (model, 0.2, plots.VERMILION, "model"),
    ):
        shares = [np.mean(np.asarray(part) == level) for level in levels]
        ax.bar(np.arange(len(levels)) + shift, shares, 0.4, color=colour, label=label)
    ax.set_xticks(range(len(levels)), [_plain(str(level))[:12] for level in levels])
    ax.tick_params(axis="x", rotation=30 if max(map(len, map(str, levels))) > 5 else 0)
    ax.legend(frameon=False, fontsize=plots.SMALL)
    return figure
