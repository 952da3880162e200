"""Fit a latent SDE to one or many series."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .._checks import check_callable, check_count, check_key, grouped_arguments, shown
from ..flow import MultivariateNormal, dimension_of
from ..sde import (
    AbstractItoSDE,
    AbstractSDE,
    DiagonalDiffusion,
    ItoSDE,
    RestoringDrift,
    check_sde,
    noise_dimension,
)
from ..series import Observed, panel
from ..series.hidden._state_space import driven_by
from ..train import Fitted, RunOptions, TrainingOptions, fit, rng_of
from ._bound import Forecasting, SDEMatching
from ._latent_sde import MAX_ROUNDING, PRECISION, LatentSDE, input_table, padded
from ._posterior import DrivenSDE, Encoder, InputTable, NormalDecoder, Posterior

DEFAULTS = {"batch_size": 64, "learning_rate": 3e-3, "clip": 1.0, "average": 0.99}
FEWEST_TO_VALIDATE = 10  # minimum number of series for a validation set
LONGEST = 0.1  # maximum time step for computing likelihoods, in units of the SDE
LENGTH = 0.05  # averaging time of the posterior before training, in units of the SDE
FIRST_DRAW = 1024  # number of series drawn from a function to initialise a model
ROUNDING = 1e-7  # a column with a smaller relative deviation is constant up to rounding errors


@grouped_arguments(training=TrainingOptions, run=RunOptions)
def fit_latent(
    times: Any,
    values: Any = None,
    *,
    dimension: int,
    key: PRNGKeyArray,
    sde: AbstractSDE | None = None,
    decoder: Any = None,
    initial: Any = None,
    inputs: Any = None,
    num_given: int | None = None,
    forecast_steps: int = 2000,
    window: int | None = None,
    width: int = 64,
    num_times: int = 32,
    steps: int = 5000,
    validation: float | None = None,
    progress: bool | str = True,
    training: TrainingOptions | None = None,
    run: RunOptions | None = None,
) -> Fitted:
    """Fit a latent SDE: hidden states that follow a neural SDE, observed with noise through a decoder.

    The SDE, the decoder and an approximate posterior of the states are trained together by maximising a lower
    bound on the log-likelihood. The posterior has Gaussian marginals given by networks, and the drift that
    produces them is known, so the bound needs no simulation: it compares the drifts of the posterior and of
    the SDE at random times (SDE matching; Bartosh, Vetrov and Naesseth 2025, arXiv:2502.02472).
    `fitted.model.log_likelihood` then estimates the likelihood itself.

    **Arguments:**

    - `times`, `values`: `(N,)` and `(N, p)`, or lists of them, one entry per series. Times are numbers or
      dates and may be irregular; NaN marks a missing value. For series that do not fit in memory, pass a
      function as `times` and omit `values`. The function takes the number of series and a NumPy generator and
      returns two such lists, with numbers as times. It is called for 1,024 series to initialise the model,
      and for one batch in every step.
    - `dimension`: the number of hidden states.
    - `sde`: an SDE with a square matrix σ, which uses the times of the data. The default is
      `rf.ItoSDE(rf.sde.RestoringDrift(...), rf.DiagonalDiffusion(...))`, where each series starts at time 0
      and the unit of time is the decorrelation time of the values.
    - `decoder`: a function from a state to a distribution of the values, with `log_prob(y)` of shape `(p,)`
      and `sample(key)`. The default is an `rf.latent.NormalDecoder` that starts from principal components.
    - `inputs`: known u(t) that drive the states: a function, a tuple (times, columns) for inputs that are
      constant from one time to the next, or an `rf.series.Inputs`; or a list of them, one entry per series.
      u is then the last argument of drift and diffusion, and the default SDE is an `rf.latent.DrivenSDE`.
      Forecasts need the inputs at future times.
    - `initial`: the distribution of the first states; by default a trained `rf.MultivariateNormal`.
    - `num_given`, `forecast_steps`: after `steps` steps, fine-tune the model for `forecast_steps` steps to
      forecast each series from its first `num_given` observations (`rf.latent.Forecasting`), by simulation.
    - `window`: number of observations in the windows into which series are cut for training.
    - `width`: width of all networks.
    - `num_times`: number of random times per series and step at which drifts are compared.
    - `validation`: fraction of series, or of windows, used to choose the best step; by default 0.1, or 0 if
      there are fewer than ten.
    - `steps`, `progress`, `training`, `run`: as for `rf.fit`. By default, batches have 64 series, the
      learning rate is 3e-3, gradients are clipped at 1, and parameters are averaged with decay 0.99.

    The loss is the negative bound per observed value. The `model` of the result is an `rf.latent.LatentSDE`.

    ```python
    import jax, numpy as np
    import roughflow as rf

    rng, times, key = np.random.default_rng(0), np.arange(20.0), jax.random.key(0)
    waves = np.sin(0.5 * times + rng.uniform(0, 6, (16, 1)))
    values = list(waves[:, :, None] + 0.1 * rng.normal(size=(16, 20, 3)))
    fitted = rf.fit_latent([times] * 16, values, dimension=2, key=key, steps=20, progress=False)
    estimate = fitted.model.log_likelihood(times, values[0], key=key, num_particles=32)
    estimate.log_likelihood, estimate.standard_error
    ```
    """
    check_count("dimension", dimension)
    for name, number in {"width": width, "num_times": num_times, "forecast_steps": forecast_steps}.items():
        check_count(name, number)
    for name, number in {"num_given": num_given, "window": window}.items():
        if number is not None:
            check_count(name, number, least=2)
    source: Any = times if callable(times) else None
    if source is not None:
        if values is not None or window is not None or validation or inputs is not None:
            raise ValueError("times is a function: omit values, window, validation and inputs")
        times, values = drawn_from(source, FIRST_DRAW, rng_of(check_key(key)))
    elif values is None:
        raise ValueError("values are missing: pass times and values, or a function that draws both as times")
    parts, inputs = windows(panel(times, values, partial=True, fewest=2), inputs, window)
    longest = max(len(part.times) for part in parts)
    if num_given is not None and num_given >= longest:
        raise ValueError(f"num_given must be less than {longest}, the length of the longest series")
    key_model, key_fit, key_tune = jax.random.split(check_key(key), 3)
    time = decorrelation_time(parts)
    unit, max_step = (time, LONGEST) if sde is None else (None, LONGEST * time)
    table = input_table(inputs, parts, unit, max_step)
    model = initial_model(parts, dimension, unit, sde, decoder, initial, width, key_model, table)
    share = validation if validation is not None else 0.1 if len(parts) >= FEWEST_TO_VALIDATE else 0.0
    location = np.asarray(model.posterior.encoder.location)
    series = padded(parts, unit, location, table)
    rows = series.rows()
    if source is not None:
        share, rows = 0.0, Drawn(source, unit, location, longest)
    options = {"validation": share, "progress": progress, "run": run}
    options["training"] = (training or TrainingOptions()).with_defaults(DEFAULTS)
    matching = SDEMatching(model.columns, num_times, series.input_shape)
    fitted = fit(model, rows, key=key_fit, objective=matching, steps=steps, **options)
    if num_given is None or fitted.interrupted:
        return fitted
    num_steps = fitted.model.num_steps(series.times, series.inputs)
    forecasting = Forecasting(model.columns, num_given, num_steps, num_times, series.input_shape)
    options["run"] = None if run is None else second_run(run)
    tuned = fit(fitted.model, rows, key=key_tune, objective=forecasting, steps=forecast_steps, **options)
    return replace(tuned, stages={"SDE matching": fitted.history, "forecasting": tuned.history})


def drawn_from(source: Callable[[int, np.random.Generator], Any], size: int, rng: np.random.Generator) -> Any:
    """Lists of times and values from a function of the user's."""
    drawn = source(size, rng)
    if not isinstance(drawn, tuple | list) or len(drawn) != 2:
        raise ValueError(f"the function must return a list of times and a list of values, got {shown(drawn)}")
    return drawn


@dataclass(frozen=True)
class Drawn:
    """Batches of series, drawn by a function of their number and a NumPy generator."""

    source: Callable[[int, np.random.Generator], tuple[Any, Any]]
    unit: float | None
    location: np.ndarray
    length: int  # maximum number of observations of a series

    def batch(self, size: int, rng: np.random.Generator) -> np.ndarray:
        parts = panel(*drawn_from(self.source, size, rng), partial=True, fewest=2)
        longest = max(len(part.times) for part in parts)
        if longest > self.length:
            most = f"at most {self.length}, as in the first {FIRST_DRAW:,} series"
            raise ValueError(
                f"a series has {longest} observations, but may have {most}: return shorter series"
            )
        return padded(parts, self.unit, self.location, length=self.length).rows()


def second_run(run: RunOptions) -> RunOptions:
    """The run of the second stage, with a checkpoint in the folder of the first. A run that was killed in the
    first stage has no such file yet."""
    if run.checkpoint is None:
        return run
    file = Path(run.checkpoint).with_name(f"{Path(run.checkpoint).name}.forecast")
    return replace(run, checkpoint=file, resume=run.resume and file.exists())


def initial_model(
    parts: list[Observed],
    dimension: int,
    unit: float | None,
    sde: AbstractSDE | None,
    decoder: Any,
    initial: Any,
    width: int,
    key: PRNGKeyArray,
    inputs: InputTable | None = None,
) -> LatentSDE:
    """An untrained model whose states are principal components of the values."""
    if inputs is not None and sde is not None and not isinstance(sde, AbstractItoSDE):
        raise ValueError("inputs require an SDE in the Itô sense: use rf.to_ito")
    if sde is not None:
        check_sde(sde)
        given = sde if inputs is None else driven_by(sde, jax.tree.map(lambda leaf: leaf[0], inputs))
        if noise_dimension(given, dimension, f"dimension is {dimension}") != dimension:
            raise ValueError("sde must have as many Brownian motions as states")
    if decoder is not None:
        check_callable("decoder", decoder, "from a state to a distribution of the values")
        check_decoder(decoder, dimension, parts[0].values.shape[1])
    if initial is not None and (given := dimension_of(initial, "initial")) != dimension:
        raise ValueError(f"initial must have dimension {dimension}, as the states; got {given}")
    keys = jax.random.split(key, 5)
    location, scale, loadings, direct = components(parts, dimension)
    scaling = None
    if inputs is not None:
        spans, middle = jnp.diff(inputs.times), 0.5 * (inputs.columns[:, 1:] + inputs.columns[:, :-1])
        average = lambda values: jnp.einsum("sk,skm->m", spans, values) / jnp.sum(spans)  # over time
        mean = average(middle)
        deviation = jnp.sqrt(average((middle - mean[None, None]) ** 2))
        scaling = jnp.stack([mean, jnp.where(deviation > ROUNDING * jnp.abs(mean), deviation, 1)])
    if sde is None and scaling is not None:
        sde = DrivenSDE(dimension, scaling, width, key=keys[0])
    elif sde is None:
        # The networks are bounded (tanh), so the restoring drift dominates far away.
        drift = RestoringDrift(dimension, 1.0, width, 2, key=keys[0])
        sde = ItoSDE(drift, DiagonalDiffusion(dimension, width, key=keys[1]))
    if decoder is None:
        decoder = NormalDecoder(location, scale, loadings, width=width, key=keys[2])
    if initial is None:
        initial = MultivariateNormal(jnp.zeros(dimension), jnp.eye(dimension))
    time = decorrelation_time(parts) if unit is None else 1.0  # in units of the SDE
    encoder = Encoder(location, scale, width, unit=time, input_scaling=scaling, key=keys[3])
    posterior = Posterior(encoder, direct, width, LENGTH * time, key=keys[4])
    return LatentSDE(sde, initial, decoder, posterior, unit, LONGEST * time)


def check_decoder(decoder: Any, dimension: int, columns: int) -> None:
    """Raise an error unless the decoder returns a distribution with a log-density for each column, which is
    what missing values need."""
    blank, key = jnp.zeros(columns), jax.random.key(0)
    decoded = lambda z: (decoder(z).log_prob(blank), decoder(z).sample(key))
    try:
        log_prob, sample = jax.eval_shape(decoded, jnp.zeros(dimension))
    except (AttributeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ValueError(
            f"decoder must map a state of shape ({dimension},) to a distribution with log_prob(y) and "
            f"sample(key): {message}"
        ) from error
    shapes = {"log_prob(y)": log_prob.shape, "sample(key)": sample.shape}
    for name, shape in shapes.items():
        if shape != (columns,):
            raise ValueError(
                f"{name} of the distribution that decoder returns must have shape ({columns},), one entry "
                f"per column of values, got {shape}"
            )


def windows(parts: list[Observed], inputs: Any, window: int | None) -> tuple[list[Observed], Any]:
    """Cut all series into windows. Return the windows, and the inputs of each window if each series has its
    own."""
    pieces = [cut(part, window) for part in parts]
    if isinstance(inputs, list) and len(inputs) == len(parts):
        inputs = [given for given, some in zip(inputs, pieces, strict=True) for _ in some]
    return [piece for some in pieces for piece in some], inputs


def cut(part: Observed, window: int | None) -> list[Observed]:
    """Cut a series into consecutive windows. The last one has at least two rows; windows without values are
    dropped."""
    if window is None or len(part.times) <= window:
        return [part]
    starts = range(0, len(part.times) - 1, window)
    pieces = [slice(start, start + window) for start in starts]
    return [
        Observed(part.times[piece], part.values[piece], part.kind, part.origin)
        for piece in pieces
        if np.isfinite(part.values[piece]).any()
    ]


def components(parts: list[Observed], dimension: int) -> tuple[np.ndarray, ...]:
    """Mean and standard deviation of the values, the loadings `(p, d)` of their principal components, and the
    map `(p, d)` from standardised values to components of variance 1. Components beyond p are zero."""
    values = np.concatenate([part.values for part in parts])
    counts = np.maximum(np.sum(np.isfinite(values), axis=0), 1)
    location = np.nansum(values, axis=0) / counts
    scale = np.sqrt(np.nansum((values - location) ** 2, axis=0) / counts)
    largest = np.nanmax(np.abs(values), axis=0, initial=0.0)
    scale = np.where(scale > ROUNDING * largest, scale, 1.0)  # 1 for a constant column
    kind = jax.dtypes.canonicalize_dtype(float)
    rounding = np.finfo(kind).eps * largest
    if np.any((rounding > MAX_ROUNDING * scale) & (scale != 1.0)):
        column = int(np.argmax(rounding / scale))
        raise ValueError(
            f"column {column} of values varies too little, compared with its size, for JAX's precision, "
            f"{kind}: {PRECISION}"
        )
    standard = np.nan_to_num((values - location) / scale)
    sizes, axes = np.linalg.eigh(standard.T @ standard / len(standard))
    sizes, axes = np.sqrt(np.maximum(sizes[::-1], 0)), axes[:, ::-1]
    kept = np.flatnonzero(sizes[:dimension] > 1e-3 * sizes[0])
    loadings, direct = np.zeros((2, len(location), dimension))
    loadings[:, kept] = axes[:, kept] * sizes[kept]
    direct[:, kept] = axes[:, kept] / sizes[kept]
    return location, scale, loadings, direct


def decorrelation_time(parts: list[Observed]) -> float:
    """The time after which the mean squared increment of the values reaches the variance (half of its limit),
    but at most the length of the longest series."""
    longest = max(len(part.times) for part in parts)
    _, scale, *_ = components(parts, 1)
    lag = 1
    while True:
        pairs = [part for part in parts if len(part.times) > lag]
        moved = [((part.values[lag:] - part.values[:-lag]) / scale) ** 2 for part in pairs]
        spans = [part.times[lag:] - part.times[:-lag] for part in pairs]
        reached = np.nanmean(np.concatenate(moved)) if moved else np.inf
        if reached >= 1 or 2 * lag >= longest:
            return float(np.mean(np.concatenate(spans)))
        lag = max(lag + 1, int(1.25 * lag))
