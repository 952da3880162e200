"""`roughflow estimate`: fit a named SDE to a time series."""

import argparse
import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

import roughflow as rf
from roughflow.faq import see
from roughflow.train import progress_bar

from .arguments import MODELS, SYSTEMS
from .files import check_writable, with_figures
from .series import Series
from .startup import Refused
from .tables import write_table

FIGURES, NUMBERS, FORECAST = "estimate.png", "estimate.json", "forecast.csv"
UNIT_INTERVAL_MODELS = {"jacobi"}  # models for values between 0 and 1
POSITIVE_MODELS = {"gbm", "cir", "ckls", "cev"} | UNIT_INTERVAL_MODELS
EFFORT_FIELDS = ("num_functions", "num_paths", "num_steps")
AIC_TIE = 0.5  # models whose AIC differs by less are tied
QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
FORECAST_PATHS = 10_000
KINDS: dict[str, type[rf.series.AbstractNamedSDE]] = {
    "brownian": rf.BrownianMotion,
    "gbm": rf.GeometricBrownianMotion,
    "vasicek": rf.OrnsteinUhlenbeck,
    "cir": rf.CoxIngersollRoss,
    "ckls": rf.CKLS,
    "cev": rf.ConstantElasticity,
    "jacobi": rf.Jacobi,
    "double-well": rf.DoubleWell,
}
SYSTEM_KINDS: dict[str, type[rf.series.AbstractNamedSDE]] = {
    "heston": rf.Heston,
    "stochastic-volatility": rf.series.StochasticVolatility,
    "lotka-volterra": rf.LotkaVolterra,
    "fitzhugh-nagumo": rf.FitzHughNagumo,
    "sir": rf.series.SIR,
    "compartments": rf.series.Compartments,
}
POSITIVE_SYSTEMS = {"lotka-volterra", "sir"}


def estimate(arguments: argparse.Namespace) -> int:
    if arguments.model is None and not arguments.compare:
        raise Refused(
            f"choose a model, --model {'|'.join([*MODELS, *SYSTEMS])}, or --compare one-component models"
        )
    if arguments.compare and (arguments.model in SYSTEMS or arguments.hidden or len(arguments.value) > 1):
        raise Refused("--compare is available only for models with one observed component")
    if arguments.parameter_uncertainty and arguments.forecast is None:
        raise Refused("--parameter-uncertainty needs --forecast TIMES")
    names = [FIGURES, NUMBERS, *([] if arguments.forecast is None else [FORECAST])]
    files = [] if arguments.out is None else [arguments.out / name for name in names]
    if arguments.out is not None and not arguments.out.exists():
        files = [arguments.out]  # a folder, which will be created
    for file in [*files, *([] if arguments.json is None else [arguments.json])]:
        check_writable(file, force=arguments.force, inputs=[arguments.data])
    plots = None if arguments.out is None else with_figures("roughflow.plots")
    with warnings.catch_warnings():
        warnings.showwarning = lambda text, *_: _warn(text)
        return _estimate(arguments, arguments.table, plots)


def _warn(text: object) -> None:
    print(f"roughflow: warning: {text}", file=sys.stderr)


def _estimate(arguments: argparse.Namespace, series: Series, plots: Any) -> int:
    ahead = None if arguments.forecast is None else series.times_ahead(arguments.forecast)
    compared = _compare(arguments, series) if arguments.compare else {}
    name = arguments.model or _best(compared)
    result = compared.get(name) or _fit(name, arguments, series)
    if isinstance(result, str):
        raise Refused(f"{name}: {result}")
    if not result.identified:
        raise Refused(f"{name}: {result.warning}")
    forecast = {} if ahead is None else _forecast(arguments, series, result, ahead)
    if compared:
        print(_comparison(compared), end="\n\n")
    print(result.summary())
    if forecast:
        print(_forecast_table(forecast))
    if result.warning:
        _warn(result.warning)
    if arguments.out is not None or arguments.json is not None:
        _write(arguments, series, name, result, compared, forecast, plots)
    return 0


def _forecast(
    arguments: argparse.Namespace, series: Series, result: rf.FittedSDE, ahead: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns of the forecast by name: the times as text, and the quantiles."""
    key = jax.random.fold_in(jax.random.key(arguments.seed), 2)
    options = {"num_paths": FORECAST_PATHS, "parameter_uncertainty": arguments.parameter_uncertainty}
    try:
        paths = result.forecast(ahead, key=key, **options)[..., 0]
    except ValueError as error:
        raise Refused(f"--forecast: {error}") from None
    quantiles = np.nanquantile(paths, list(QUANTILES.values()), axis=0)
    times = np.array([series.shown(time) for time in ahead])
    return {"time": times, **dict(zip(QUANTILES, quantiles, strict=True))}


def _forecast_table(forecast: dict[str, np.ndarray]) -> str:
    width = max(12, *(len(time) for time in forecast["time"]))
    lines = [f"  {'forecast':<{width}}" + "".join(f" {name:>12}" for name in list(forecast)[1:])]
    for time, *numbers in zip(*forecast.values(), strict=True):
        lines.append(f"  {time:<{width}}" + "".join(f" {number:>12.6g}" for number in numbers))
    return "\n".join(lines)


def _write(
    arguments: argparse.Namespace,
    series: Series,
    name: str,
    result: rf.FittedSDE,
    compared: dict[str, rf.FittedSDE | str],
    forecast: dict[str, np.ndarray],
    plots: Any,
) -> None:
    """Write the requested files, after all their content has been computed."""
    key = jax.random.fold_in(jax.random.key(arguments.seed), 1)
    partial = bool(arguments.hidden or arguments.observe or len(arguments.value) > 1)
    residuals = None if partial and len(arguments.value) > 1 else result.residuals(key=key)
    if residuals is not None:
        tests = f"Ljung–Box p = {residuals.ljung_box:.3g}, uniformity p = {residuals.uniformity:.3g}"
        print(f"  residuals: {tests}")
    numbers = _numbers(arguments, series, name, result, residuals, compared)
    numbers |= {"forecast": {part: column.tolist() for part, column in forecast.items()}} if forecast else {}
    text = json.dumps(_finite(numbers), indent=2, ensure_ascii=False) + "\n"
    if arguments.out is not None:
        scale = "" if arguments.scale == 1 else f" × {arguments.scale:g}"
        time = None if series.dated else arguments.time  # dates have their own label
        if partial:
            figure = plots.states(result, time_label=time)
        else:
            labels = {"time_label": time, "value_label": arguments.value[0] + scale}
            figure = plots.fitted_sde(result, key=key, residuals=residuals, **labels)
        plots.save(figure, arguments.out / FIGURES)
        if forecast:
            write_table(arguments.out / FORECAST, list(forecast), [list(forecast.values())])
        _write_text(arguments.out / NUMBERS, text)
        print(f"written to {arguments.out}")
    if arguments.json is not None:
        _write_text(arguments.json, text)


def _fit(name: str, arguments: argparse.Namespace, series: Series) -> rf.FittedSDE | str:
    """The fit, or the reason why the model could not be fitted."""
    values = series.observed()[1]
    positive = name in POSITIVE_MODELS and arguments.observe is None
    if (positive and values.min() <= 0) or (name in UNIT_INTERVAL_MODELS and values.max() >= 1):
        wanted = "between 0 and 1" if name in UNIT_INTERVAL_MODELS else "above 0"
        given = f"{values.min():g} to {values.max():g}"
        return f"values must lie {wanted}, but they range from {given}{see('series')}"
    key = jax.random.key(arguments.seed)
    try:
        sde, times, values, options = _model(name, arguments, series)
        options |= {"exact": arguments.exact, "measurement_noise": arguments.measurement_noise}
        return rf.fit_sde(sde, times, values, key=key, fixed=arguments.fix, **options)
    except ValueError as error:
        return str(error)


def _model(name: str, arguments: argparse.Namespace, series: Series) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The SDE with starting values, the times, the values of all its components, and options that describe
    how they are observed."""
    (times, values), hidden = series.observed(), arguments.hidden
    kind = {**KINDS, **SYSTEM_KINDS}[name]
    components = [*arguments.value, *hidden] if name == "compartments" else kind.components
    if unknown := [one for one in hidden if one not in components]:
        raise ValueError(f"--hidden takes components of the model, {', '.join(components)}; got {unknown[0]}")
    seen = tuple(i for i, one in enumerate(components) if one not in hidden)
    if len(seen) != values.shape[1]:
        wanted = ", ".join(components[i] for i in seen)
        raise ValueError(f"--value must name a column for {wanted or 'at least one observed component'}")
    options: dict[str, Any] = {}
    states = np.full((len(values), len(components)), np.nan)
    states[:, seen] = values
    if arguments.observe is not None:
        log = name not in POSITIVE_MODELS | POSITIVE_SYSTEMS
        many = {"dispersion": 10.0} if arguments.observe == "negative-binomial" else {}
        options["observe"] = rf.series.Counts(seen, log=log, **many)
        states[:, seen] = np.log(values + 0.5) if log else np.maximum(values, 0.5)
    else:
        values = states
    if arguments.initial is not None:
        unobserved = components if arguments.observe or arguments.measurement_noise else hidden
        options["initial"] = _initial(arguments.initial, [one for one in components if one in unobserved])
    if name == "compartments":
        if arguments.inputs is None:
            raise ValueError("--inputs FILE is missing")
        names, inputs = arguments.inputs
        options["inputs"] = (inputs.times, inputs.values)
        return _compartments(arguments, names), times, values, options
    if arguments.inputs is not None:
        raise ValueError("--inputs requires --model compartments")
    return _start(kind, times, states, arguments.start), times, values, options


def _initial(given: str | dict[str, float], unobserved: list[str]) -> str | list[float]:
    """The argument `initial` of `rf.fit_sde`: initial values of the components that are not observed
    exactly."""
    if isinstance(given, str):
        return given
    if set(given) != set(unobserved):
        raise ValueError(
            "--initial needs " + ",".join(f"{name}=…" for name in unobserved) + ", or stationary"
        )
    return [given[name] for name in unobserved]


def _start(kind: type[rf.series.AbstractNamedSDE], times: Any, states: np.ndarray, given: dict) -> Any:
    """The SDE with its starting values: those of --start, and for other parameters values from the moments of
    the series."""
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := set(given) - set(names):
        raise ValueError(f"--start takes {', '.join(names)}; got {', '.join(sorted(unknown))}")
    if set(given) == set(names):
        return kind(**given)
    try:
        found = kind.from_series(times, states)
    except (TypeError, ValueError):
        missing = ",".join(f"{name}=…" for name in names if name not in given)
        raise ValueError(
            f"this model has no default starting values for this series: set --start {missing}"
        ) from None
    return dataclasses.replace(found, **given)


def _compartments(arguments: argparse.Namespace, inputs: tuple[str, ...]) -> rf.series.Compartments:
    """The compartment model with the terms listed in --start, as in "exchange.room walls=0.5", "gain.room
    heating=2" or "sigma.room=0.1"."""
    parts: dict[str, dict[str, float]] = {"exchange": {}, "gain": {}, "sigma": {}}
    for name, value in arguments.start.items():
        field, _, pair = name.partition(".")
        if field not in parts or not pair:
            raise ValueError(
                "--start takes values such as 'exchange.room walls=0.5', 'gain.room heating=2' and "
                f"'sigma.room=0.1'; got {name!r}"
            )
        parts[field][pair] = value
    order = [*arguments.value, *arguments.hidden]
    if set(parts["sigma"]) != set(order):
        raise ValueError("--start needs " + ",".join(f"sigma.{name}=…" for name in order))
    parts["sigma"] = {name: parts["sigma"][name] for name in order}
    return rf.series.Compartments(**parts, inputs=inputs)


def _compare(arguments: argparse.Namespace, series: Series) -> dict[str, rf.FittedSDE | str]:
    results = {}
    with progress_bar(len(MODELS), name="compare", unit="model", shown=not arguments.quiet) as bar:
        for name in MODELS:
            results[name] = _fit(name, arguments, series)
            bar.update(1)
            bar.set_postfix_str(name)
    return results


def _reliable(compared: dict[str, rf.FittedSDE | str]) -> dict[str, rf.FittedSDE]:
    """The reliable fits, sorted by AIC. Fits on a boundary are left out, because they represent simpler
    models."""
    fits = {name: r for name, r in compared.items() if isinstance(r, rf.FittedSDE)}
    names = [name for name, r in fits.items() if r.reliable and not r.boundary]
    return {name: fits[name] for name in sorted(names, key=lambda name: fits[name].aic)}


def _tied(compared: dict[str, rf.FittedSDE | str]) -> dict[str, rf.FittedSDE]:
    """The reliable fits with the lowest AIC: more than one if the differences are small or uncertain."""
    fits = _reliable(compared)
    if not fits:
        return {}
    least = next(iter(fits.values()))
    error = lambda r: 2 * (r.likelihood_error + least.likelihood_error)
    return {name: r for name, r in fits.items() if r is least or r.aic - least.aic < AIC_TIE + error(r)}


def _best(compared: dict[str, rf.FittedSDE | str]) -> str:
    """The model with the fewest parameters among those with the lowest AIC."""
    tied = _tied(compared)
    if not tied:
        whys = "; ".join(f"{name}, {why}" for name, why in _whys(compared))
        raise Refused(f"no model could be fitted reliably: {whys}")
    return min(tied, key=lambda name: (len(tied[name].params), tied[name].aic))


def _whys(compared: dict[str, rf.FittedSDE | str]) -> list[tuple[str, str]]:
    """For each model with a warning or a failed fit, its name and the reason."""
    remarks = {name: r if isinstance(r, str) else r.warning for name, r in compared.items()}
    return [(name, why) for name, why in remarks.items() if why]


def _comparison(compared: dict[str, rf.FittedSDE | str]) -> str:
    """A table of the fits, sorted by AIC with unreliable fits last, followed by warnings."""
    reliable, tied = _reliable(compared), _tied(compared)
    fits = reliable | {name: r for name, r in compared.items() if isinstance(r, rf.FittedSDE)}
    marks = dict.fromkeys(fits, "  see below") | dict.fromkeys(reliable, "")
    marks |= dict.fromkeys(tied, "  tied" if len(tied) > 1 else "  best")
    head = f"{'log-likelihood':>14} {'parameters':>10} {'AIC':>12} {'ΔAIC':>8} {'BIC':>12}"
    lines = [f"  {'model':<12} {head}"]
    for name, r in fits.items():
        change = f"{r.aic - next(iter(reliable.values())).aic:.2f}" if name in reliable else "–"
        numbers = f"{r.log_likelihood:>14.3f} {len(r.params):>10} {r.aic:>12.2f} {change:>8} {r.bic:>12.2f}"
        lines.append(f"  {name:<12} {numbers}{marks[name]}")
    if len(tied) > 1:
        lines.append(f"  {', '.join(tied)} are tied; the summary is for {_best(compared)}")
    return "\n".join([*lines, *(f"  {name}: {why}" for name, why in _whys(compared))])


def _numbers(arguments, series: Series, name: str, result: rf.FittedSDE, residuals, compared) -> dict:
    effort = result.effort
    return {
        "version": rf.__version__,
        "series": {
            "file": str(arguments.data),
            "time": arguments.time,
            "value": ", ".join(arguments.value),
            "first": series.shown(series.times[0]),
            "last": series.shown(series.times[-1]),
            "rows": len(series.times),
            "missing": series.missing,
            "scale": arguments.scale,
        },
        "seed": arguments.seed,
        **_described(name, result),
        "standard_errors": result.standard_errors,
        "robust_errors": result.robust_errors,
        "intervals_95": result.confint(),
        "correlation": result.correlation.tolist(),
        "converged": result.converged,
        "transitions": result.num_transitions,
        "effort": None if effort is None else {part: getattr(effort, part) for part in EFFORT_FIELDS},
        "log_likelihood_error": result.likelihood_error,
        "residuals": None
        if residuals is None
        else {"ljung_box": residuals.ljung_box, "uniformity": residuals.uniformity},
        "compared": [
            {"model": other, "warning": r} if isinstance(r, str) else _described(other, r)
            for other, r in compared.items()
        ],
    }


def _described(name: str, result: rf.FittedSDE) -> dict:
    fit = {part: getattr(result, part) for part in ("params", "log_likelihood", "aic", "bic", "warning")}
    return {"model": name, "equation": {**MODELS, **SYSTEMS}[name], **fit}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with null, because JSON supports neither."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_text(path: Path, text: str) -> None:
    with rf.files.whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")
