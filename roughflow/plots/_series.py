"""Figures of an SDE fitted to a series."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import integrate, stats

import roughflow as rf

from .._checks import as_real, check_instance, check_key, check_number, is_whole
from ..series import Observed
from ._figures import BLUE, COLUMN, GREY, SKY, SMALL, TEXT, VERMILION, curves

BAND_POINTS = 200


def bands(
    result: rf.FittedSDE,
    x: ArrayLike | None = None,
    *,
    level: float = 0.95,
    time: float = 0.0,
    figure: Figure | None = None,
    value_label: str = "x",
) -> Figure:
    """The drift and the noise of a fitted one-dimensional SDE, with pointwise bands from
    `FittedSDE.delta_method`; ticks at the bottom mark the observed values.

    **Arguments:** `x`, the states `(n,)`, by default over the range of the series; `time`, for a
    time-dependent SDE.

    ```python
    import jax, numpy as np
    import roughflow as rf
    from roughflow import plots

    x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(60) / 12, x, key=jax.random.key(0))
    drift, noise = plots.bands(result).axes
    drift.axhline(0.0, color=plots.GREY)
    ```
    """
    check_instance("result", result, rf.FittedSDE, "the result of rf.fit_sde")
    values = np.concatenate([np.asarray(one.values) for one in result.series])
    if values.shape[1] != 1:
        raise ValueError(f"bands require a one-dimensional SDE; this one has dimension {values.shape[1]}")
    check_number("level", level, above=0, below=1)
    x = np.linspace(values.min(), values.max(), BAND_POINTS) if x is None else np.asarray(x, float)
    states, when = jnp.asarray(x)[:, None], jnp.asarray(time, float)

    def coefficients(sde: rf.AbstractSDE) -> Array:
        """The drift and the logarithm of the noise; the logarithm keeps the band of the noise positive."""
        drift = jax.vmap(lambda z: sde.drift(when, z)[0])(states)
        noise = jax.vmap(lambda z: jnp.linalg.norm(jnp.asarray(sde.diffusion(when, z))))(states)  # pyright: ignore[reportCallIssue]
        return jnp.stack([drift, jnp.log(noise)])

    (drift, log_noise), (drift_error, noise_error) = result.delta_method(coefficients)
    width = stats.norm.ppf(0.5 + 0.5 * level)
    if figure is None:
        figure = plt.figure(figsize=(2 * COLUMN + 0.3, 0.75 * COLUMN), layout="constrained")
    left, right = figure.subplots(1, 2)
    parts = [(left, "drift", drift, drift_error), (right, "noise", log_noise, noise_error)]
    for ax, name, middle, error in parts:
        drawn = np.array([middle, middle - width * error, middle + width * error])
        _band(curves(ax, value_label, name), x, np.exp(drawn) if ax is right else drawn, level)
        ticks = {"color": GREY, "alpha": 0.5, "transform": ax.get_xaxis_transform()}
        ax.plot(values[:, 0], np.zeros(len(values)), "|", **ticks)
        ax.set_xlim(x.min(), x.max())
    right.set_ylim(bottom=0.0)
    left.legend(frameon=False, fontsize=SMALL)
    return figure


def _band(ax: Axes, x: np.ndarray, drawn: np.ndarray, level: float) -> None:
    middle, low, high = drawn
    ax.fill_between(x, low, high, color=SKY, alpha=0.35, linewidth=0, label=f"{100 * level:g} % bands")
    ax.plot(x, middle, color=BLUE, linewidth=1.5, label="estimate")


BANDS = (0.9, 0.5)  # fractions of paths inside the bands of a fan
LAGS, BINS, PATHS = 20, 20, 2000
# Grid of a stationary density: extent beyond the series, as a multiple of its range; number of points.
REACH, POINTS = 3.0, 4001
NEGLIGIBLE = 1e-3  # relative density at the ends of the grid below which tails outside the grid are ignored
# Lengths of the forecast and of the part of the series that is shown with it, as fractions of the series.
AHEAD, SHOWN = 0.25, 0.5
MIN_YEARS = 3.0  # shorter series are shown with calendar dates


def fan(times: ArrayLike, paths: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """A fan chart of one-dimensional `paths`, `(K, T)`, over `times`, `(T,)`: the median and the central
    ranges of 50 % and 90 % of the paths. NaN values of paths that left the state space are ignored.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow import plots

    times = jnp.linspace(0, 1, 50)
    brownian = rf.KarhunenLoeve(20).sample(key=jax.random.key(0), shape=(1000,))
    plots.fan(times, jax.vmap(brownian.evaluate, out_axes=1)(times)[..., 0])
    ```
    """
    times, paths = np.asarray(as_real("times", times)), np.asarray(as_real("paths", paths))
    if paths.ndim != 2 or times.shape != paths.shape[1:]:
        raise ValueError(f"paths must have shape (K, T) for times (T,), got {paths.shape} and {times.shape}")
    ax = curves(ax, "time", "value")
    for share, alpha in zip(BANDS, (0.3, 0.5), strict=True):
        low, high = np.nanquantile(paths, [0.5 - share / 2, 0.5 + share / 2], axis=0)
        ax.fill_between(
            times, low, high, color=SKY, alpha=alpha, linewidth=0, label=f"{100 * share:g} % of paths"
        )
    ax.plot(times, np.nanmedian(paths, axis=0), color=BLUE, linewidth=1.5, label="median")
    return ax


def fitted_sde(
    result: rf.FittedSDE,
    *,
    key: PRNGKeyArray,
    residuals: rf.series.Residuals | None = None,
    figure: Figure | None = None,
    origin: float | None = None,
    time_label: str | None = None,
    value_label: str = "value",
) -> Figure:
    """Diagnostics of a fit to a one-dimensional series: the series with its unexpected values, and the
    stationary distribution of the SDE if it has one; the residuals and their autocorrelation; and a forecast.

    **Arguments:** `residuals`, if already computed; `origin`, the label of time 0, by default 0. Series with
    dates have an axis of years, or of calendar dates if they are shorter than three years.

    ```python
    import jax, numpy as np
    import roughflow as rf
    from roughflow import plots

    x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(60) / 12, x, key=jax.random.key(0))
    plots.fitted_sde(result, key=jax.random.key(1), time_label="year")
    ```
    """
    check_instance("result", result, rf.FittedSDE, "the result of rf.fit_sde")
    if len(result.series) != 1 or result.series[0].values.shape[1] != 1:
        raise ValueError("result must be a fit to a single one-dimensional series")
    axis = TimeAxis.of(result.series[0], origin)
    times, values = result.series[0].times, result.series[0].values[:, 0]
    key_residuals, key_forecast = jax.random.split(check_key(key))
    residuals = residuals or result.residuals(key=key_residuals)
    uniform = np.asarray(residuals.uniform)
    span = times[-1] - times[0]
    ahead = np.linspace(0, AHEAD * span, 41)[1:]
    paths = np.asarray(result.forecast(ahead, key=key_forecast, num_paths=PATHS))[..., 0]
    if figure is None:
        figure = plt.figure(figsize=(2 * COLUMN + 0.3, 1.8 * COLUMN), layout="constrained")
    axes = figure.subplot_mosaic(
        [["series", "series"], ["histogram", "autocorrelation"], ["forecast", "forecast"]]
    )
    _series(axes["series"], axis(times), values, uniform, _stationary(result.sde, values))
    _histogram(axes["histogram"], uniform, residuals.uniformity)
    _autocorrelation(axes["autocorrelation"], stats.norm.ppf(uniform), residuals.ljung_box)
    recent = times >= times[-1] - SHOWN * span
    last = np.full((len(paths), 1), values[-1])
    later = times[-1] + np.concatenate([[0.0], ahead])
    fan(axis(later), np.hstack([last, paths]), ax=axes["forecast"])
    axes["forecast"].plot(axis(times[recent]), values[recent], color=GREY, linewidth=1.0, label="observed")
    axes["forecast"].set_title("forecast", fontsize=TEXT, loc="left")
    for name in ("series", "forecast"):
        axis.label(curves(axes[name], "", value_label), time_label).margins(x=0.01)
        axes[name].legend(frameon=False, fontsize=SMALL, loc="center left", bbox_to_anchor=(1.0, 0.5))
    names = ", ".join(f"{name} {value:.4g}" for name, value in result.params.items())
    figure.suptitle(f"{type(result.sde).__name__}: {names}", fontsize=TEXT, x=0.01, ha="left")
    return figure


def states(
    result: rf.FittedSDE,
    *,
    level: float = 0.95,
    series: int = 0,
    figure: Figure | None = None,
    time_label: str | None = None,
) -> Figure:
    """The components of the state given all observations (`FittedSDE.smoothed`), each with a pointwise band,
    and the observed values.

    Bands assume that each component is normally distributed or, if it is positive and very uncertain, that
    its logarithm is.

    ```python
    import jax, numpy as np
    import roughflow as rf
    from roughflow import plots

    x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
    sde, times = rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(60) / 12
    result = rf.fit_sde(sde, times, x, measurement_noise=0.1, num_starts=1, key=jax.random.key(0))
    plots.states(result, time_label="year")
    ```
    """
    check_instance("result", result, rf.FittedSDE, "the result of rf.fit_sde")
    check_number("level", level, above=0, below=1)
    if not is_whole(series) or not 0 <= series < len(result.series):
        raise ValueError(f"series must be the index of one of {len(result.series)} series, got {series}")
    one = result.series[series]
    counted = getattr(getattr(result.likelihood, "of_sde", None), "observe", None) is not None
    if result.has_hidden_states:
        rows = slice(*np.cumsum([0, *(len(s.times) for s in result.series)])[series : series + 2])
        mean, deviation = (part[rows] for part in result.smoothed)
        if not np.isfinite(mean).any():
            raise ValueError(
                "the smoothed states are not finite: if a noise parameter is on its boundary, fix it at "
                "another value with fixed="
            )
    else:
        mean, deviation = one.values, np.zeros_like(one.values)
    axis = TimeAxis.of(one)
    times = axis(one.times)
    d, width = mean.shape[1], stats.norm.ppf(0.5 + 0.5 * level)
    if figure is None:
        figure = plt.figure(figsize=(2 * COLUMN + 0.3, (0.2 + 0.55 * d) * COLUMN), layout="constrained")
    names = getattr(result.sde, "components", ())
    names = names if len(names) == d else [f"component {i}" for i in range(d)]
    axes = figure.subplots(d, 1, sharex=True, squeeze=False)[:, 0]
    for i, (ax, name) in enumerate(zip(axes, names, strict=True)):
        axis.label(curves(ax, "", name), time_label if i == d - 1 else "")
        uncertain = (deviation[:, i] > 0).any()
        if uncertain:
            relative = (np.nanmin(mean[:, i]) > 0) and (deviation[:, i] > 0.3 * mean[:, i]).any()
            half = width * np.where(relative, deviation[:, i] / mean[:, i], deviation[:, i])
            low, high = (
                mean[:, i] * np.exp(side * half) if relative else mean[:, i] + side * half for side in (-1, 1)
            )
            ax.fill_between(times, low, high, color=SKY, alpha=0.35, lw=0, label=f"{100 * level:g} % band")
        ax.plot(
            times,
            mean[:, i],
            color=BLUE,
            linewidth=1.0,
            label="given all values" if uncertain else "observed",
        )
        if uncertain and not counted and i < one.values.shape[1] and np.isfinite(one.values[:, i]).any():
            ax.plot(times, one.values[:, i], ".", color=GREY, markersize=2.5, label="observed", zorder=1)
        ax.margins(x=0.01)
        ax.legend(frameon=False, fontsize=SMALL, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@dataclass(frozen=True)
class TimeAxis:
    """The axis of the times of a series: numbers; years, if the times are dates; or calendar dates, if they
    span less than `MIN_YEARS`."""

    start: float
    unit: float
    default_label: str

    @staticmethod
    def of(one: Observed, origin: float | None = None) -> "TimeAxis":
        if one.origin is None or origin is not None:
            return TimeAxis(origin or 0.0, 1.0, "time" if one.origin is None else "year")
        if np.ptp(one.times) < MIN_YEARS:
            return TimeAxis(float(dates.date2num(one.origin)), 365.25, "date")
        year = one.origin.astype("datetime64[Y]")
        passed = float((one.origin - year) / np.timedelta64(1, "D")) / 365.25
        return TimeAxis(1970.0 + float(year.astype(int)) + passed, 1.0, "year")

    def __call__(self, times: np.ndarray) -> np.ndarray:
        return self.start + self.unit * times

    def label(self, ax: Axes, text: str | None) -> Axes:
        """Label the axis of time; the default is used for None."""
        ax.set_xlabel(self.default_label if text is None else text, fontsize=TEXT)
        if self.default_label == "date":
            locator = dates.AutoDateLocator()
            ax.xaxis.set_major_locator(locator)
            ax.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
        return ax


def _series(
    ax: Axes,
    times: np.ndarray,
    values: np.ndarray,
    uniform: np.ndarray,
    stationary: tuple[float, float] | None,
) -> None:
    """The series, with the values outside their one-step 95 % intervals marked."""
    if stationary is not None:
        ax.axhspan(
            *stationary, color=SKY, alpha=0.25, linewidth=0, label="95 % of the\nstationary distribution"
        )
    ax.plot(times, values, color=BLUE, linewidth=1.0, label="observed")
    outside = np.flatnonzero(np.abs(uniform - 0.5) > 0.475) + 1
    legend = f"outside one-step\n95 % intervals: {100 * outside.size / uniform.size:.1f} %"
    ax.plot(times[outside], values[outside], "o", color=VERMILION, markersize=3, mew=0, label=legend)
    ax.set_title("series", fontsize=TEXT, loc="left")


def _histogram(ax: Axes, uniform: np.ndarray, p: float) -> None:
    bins = max(5, min(BINS, uniform.size // 10))
    # The range that contains 95 % of the bars if the residuals are uniform.
    low, high = stats.binom.ppf([0.025, 0.975], uniform.size, 1 / bins) * bins / uniform.size
    ax.axhspan(low, high, color=GREY, alpha=0.2, linewidth=0)
    density, edges = np.histogram(uniform, bins, (0, 1), density=True)
    ax.stairs(density, edges, baseline=None, color=BLUE, linewidth=1.2)
    ax.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    curves(ax, "residual", "density").set(xlim=(0, 1), ylim=(0, 1.1 * max(high, density.max())))
    ax.set_title(f"residuals; uniform, p = {p:.2g}", fontsize=TEXT, loc="left")


def _autocorrelation(ax: Axes, normal: np.ndarray, p: float) -> None:
    centred = normal - normal.mean()
    lags = np.arange(1, min(LAGS, normal.size // 2) + 1)
    rho = np.array([centred[k:] @ centred[:-k] for k in lags]) / (centred @ centred)
    bound = 1.96 / normal.size**0.5
    ax.axhspan(-bound, bound, color=GREY, alpha=0.2, linewidth=0)
    ax.vlines(lags, 0, rho, color=BLUE, linewidth=2.0)
    ax.axhline(0.0, color=GREY, linewidth=0.8)
    widest = max(1.3 * np.abs(rho).max(), 2 * bound)
    curves(ax, "lag", "correlation").set(xlim=(0, lags[-1] + 1), ylim=(-widest, widest))
    ax.set_title(f"autocorrelation; Ljung–Box, p = {p:.2g}", fontsize=TEXT, loc="left")


def _stationary(sde: rf.AbstractSDE, values: np.ndarray) -> tuple[float, float] | None:
    """The central 95 % interval of the stationary distribution; None if the distribution extends far beyond
    the values.

    Its density is σ⁻² exp(∫ 2μ/σ² dx) up to a constant, on a grid that is uniform in the coordinates of the
    SDE.
    """
    if not isinstance(sde, rf.series.AbstractNamedSDE):
        return None
    coordinates, time = sde.coordinates, jnp.zeros(())
    known = jnp.asarray(values)[:, None]
    known = known[np.asarray(coordinates.contains(known))]  # with measurement noise, values may lie outside
    known = np.asarray(coordinates.from_state(known))[:, 0]
    wide = REACH * np.ptp(known)
    grid = jnp.linspace(known.min() - wide, known.max() + wide, POINTS)[:, None]
    states = coordinates.to_state(grid)
    # Coordinates are not monotone beyond the boundary of the state space.
    within = np.isclose(coordinates.from_state(states), grid)[:, 0] & np.asarray(coordinates.contains(states))
    y = grid[within]

    def parts(y: Array) -> tuple[Array, Array]:
        x = coordinates.to_state(y)
        drift, noise = sde.drift(time, x)[0], jnp.asarray(sde.diffusion(time, x))[0, 0]  # pyright: ignore[reportCallIssue]
        return 2 * drift / noise**2, -2 * jnp.log(noise)

    slope, log_noise = map(np.asarray, jax.vmap(parts)(y))
    x, y = np.asarray(coordinates.to_state(y))[:, 0], np.asarray(y)[:, 0]
    log_density = integrate.cumulative_trapezoid(slope, x, initial=0) + log_noise
    log_density += np.log(np.abs(np.gradient(x, y)))
    density = np.exp(log_density - log_density.max())
    # A density may be large at the boundary of the state space.
    if not np.isfinite(density).all() or (density[[0, -1]] * within[[0, -1]] > NEGLIGIBLE).any():
        return None
    share = integrate.cumulative_trapezoid(density, y, initial=0)
    low, high = np.interp([0.025, 0.975], share / share[-1], x)
    return float(low), float(high)
