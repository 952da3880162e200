"""Latent SDEs against exact likelihoods and published errors: `python -m benchmarks.latent --part lorenz`.

- `linear`: a noisy oscillator observed in one of four columns at a time. The likelihood of a fitted linear
  model is compared with that of the Kalman filter, and the bound is printed for increasing numbers of
  particles.
- `lorenz`: a stochastic Lorenz system with three states and ten noisy columns. The held-out log-likelihood is
  compared with that of the true model, computed by a bootstrap particle filter.
- `mocap`: motion capture (`--file mocap35.mat`); mean squared error of forecasts from three frames. `--folds`
  also leaves out each training walk in turn, and `--ordinary` trains a latent ODE instead.
- `adjoint`: training on the Lorenz problem by SDE matching and by simulation with the adjoint equation. The
  output is drift evaluations and seconds until the same held-out bound, on the GPU or with
  `JAX_PLATFORMS=cpu`.
- `many`: 10,000 series of 100 irregular observations, half of the cells missing.
"""

import argparse
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.io
import scipy.linalg
import scipy.optimize

import roughflow as rf
from roughflow._functions import trainable
from roughflow.latent._bound import Forecasting, SDEMatching, lower_bound
from roughflow.latent._fit_latent import decorrelation_time, initial_model
from roughflow.latent._particles import simulated
from roughflow.latent._posterior import Series
from roughflow.series import panel
from roughflow.train import AbstractObjective


def lorenz_sde() -> rf.ItoSDE:
    drift = lambda t, z: jnp.stack(
        [10 * (z[1] - z[0]), z[0] * (28 - z[2]) - z[1], z[0] * z[1] - 8 / 3 * z[2]]
    )
    return rf.ItoSDE(drift, lambda t, z: 1.5 * jnp.eye(3))


def lorenz_series(count: int, length: int, seed: int, dt: float = 0.05, noise: float = 0.5):
    """Times, states, values and the decoder of `count` series of the stochastic Lorenz system."""
    keys, sde = jax.random.split(jax.random.key(seed), 3), lorenz_sde()
    start = jnp.array([0.0, 0.0, 25.0]) + 8 * jax.random.normal(keys[0], (count, 3))
    start = rf.simulate(sde, start, key=keys[1], t1=3.0, steps=1500)
    times = dt * np.arange(length)
    span, steps = float(times[-1]), 10 * (length - 1)
    states = rf.simulate(sde, start, key=keys[2], t1=span, steps=steps, trajectory=True)
    states = np.asarray(states)[:, ::10]
    loadings = np.random.default_rng(0).normal(size=(10, 3)) / 8
    values = states @ loadings.T + noise * np.random.default_rng(seed).normal(size=(count, length, 10))
    return times, states, values, loadings


def bootstrap_filter(times, values, loadings, states, noise, num_particles, key) -> np.ndarray:
    """Log-likelihoods of the true model, by particles that ignore the next observation. They start from 2,000
    states of other series, which represent the stationary distribution."""
    sde, substeps = lorenz_sde(), 10

    def one(values, key):
        keys = jax.random.split(key, len(times))
        z = states[jax.random.choice(keys[0], len(states), (num_particles,))]

        def weigh(z, y):
            residual = (y[None] - z @ loadings.T) / noise
            return jnp.sum(-0.5 * residual**2 - jnp.log(noise) - 0.5 * jnp.log(2 * jnp.pi), axis=1)

        def picked(z, logs, key):
            """Particles of equal weight, and the logarithm of the mean weight."""
            places = (jnp.arange(num_particles) + jax.random.uniform(key)) / num_particles
            chosen = jnp.searchsorted(jnp.cumsum(jax.nn.softmax(logs)), places)
            gain = jax.nn.logsumexp(logs) - jnp.log(num_particles)
            return z[jnp.minimum(chosen, num_particles - 1)], gain

        def step(carry, inputs):
            z, total = carry
            y, key = inputs
            key_pick, key_move = jax.random.split(key)
            dt = (times[1] - times[0]) / substeps

            def euler(z, key):
                drift = jax.vmap(lambda z: sde.drift(0.0, z))(z)
                return z + dt * drift + 1.5 * jnp.sqrt(dt) * jax.random.normal(key, z.shape), None

            z, _ = jax.lax.scan(euler, z, jax.random.split(key_move, substeps))
            z, gain = picked(z, weigh(z, y), key_pick)
            return (z, total + gain), None

        start = picked(z, weigh(z, values[0]), jax.random.fold_in(key, 1))
        return jax.lax.scan(step, start, (values[1:], keys[1:]))[0][1]

    run, keys = jax.jit(one), jax.random.split(key, len(values))
    return np.array([float(run(y, k)) for y, k in zip(values, keys, strict=True)])


def told(what: str, began: float, fitted: rf.train.Fitted) -> None:
    print(f"{what}: {time.perf_counter() - began:.0f} s, {fitted.history.summary()}", flush=True)


def lorenz(steps: int, count: int, out: Path | None) -> None:
    times, _, values, loadings = lorenz_series(count, 100, 1)
    _, _, held, _ = lorenz_series(16, 100, 2)
    rest = lorenz_series(2000, 2, 3)[1][:, 0]
    began = time.perf_counter()
    fitted = rf.fit_latent([times] * count, list(values), dimension=3, key=jax.random.key(0), steps=steps)
    told(f"{count} series of 100, {steps} steps", began, fitted)
    if out is not None:
        drawn = fitted.model.sample(0.02 * np.arange(1500), key=jax.random.key(3), num_samples=1)
        options = {"key": jax.random.key(4), "t1": 30.0, "steps": 15000, "trajectory": True}
        path = rf.simulate(lorenz_sde(), jnp.asarray(rest[0]), **options)
        mean = np.asarray(jax.vmap(lambda z: fitted.model.decoder(z).mean)(jnp.asarray(drawn.states[0])))
        # The states in the coordinates of the true states, by least squares on the means of the values.
        np.savez(out / "lorenz.npz", learned=mean @ np.linalg.pinv(loadings).T, true=np.asarray(path)[::10])
        rf.save(out / "lorenz.rf", fitted.model)
    one, key = ([times] * 16, list(held)), jax.random.key(1)
    truth = [
        bootstrap_filter(times, jnp.asarray(held), jnp.asarray(loadings), jnp.asarray(rest), 0.5, 50_000, key)
        for key in jax.random.split(jax.random.key(2), 2)
    ]
    print(f"true model: {truth[0].sum():.1f}, {truth[1].sum():.1f}", flush=True)
    print(f"bound of training: {fitted.model.lower_bound(*one, key=key).sum():.1f}", flush=True)
    for particles in (64, 256, 1024, 4096):
        got = fitted.model.log_likelihood(*one, key=key, num_particles=particles)
        shown = f"{got.total:.1f} ± {got.total_error:.1f}, bound {got.bound.sum():.1f}"
        ratio = got.total / np.mean([one.sum() for one in truth])
        print(f"held out, {particles} particles: {shown}, ratio {ratio:.4f}", flush=True)


def oscillator(count: int, length: int, seed: int, pairs: bool = False):
    """A damped oscillator with noise, at irregular times, with half of four columns missing. With `pairs`,
    every other gap is 100 times shorter."""
    rng, rate = np.random.default_rng(seed), np.array([[0.2, -1.5], [1.5, 0.2]])
    loadings = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, -1.0]])
    all_times, all_values = [], []
    for _ in range(count):
        gaps = rng.exponential(0.3, length)
        gaps[1::2] /= 100 if pairs else 1
        times = np.cumsum(gaps)
        z, states = rng.normal(size=2), []
        for gap in np.diff(times, prepend=times[0]):
            turn = scipy.linalg.expm(-rate * gap)
            # dZ = −R Z dt + σ dB has the stationary covariance I for σ² = 2 · 0.2.
            z = turn @ z + np.sqrt(1 - np.exp(-0.4 * gap)) * rng.normal(size=2)
            states.append(z)
        values = np.array(states) @ loadings.T + 0.3 * rng.normal(size=(length, 4))
        values[rng.uniform(size=values.shape) < 0.5] = np.nan
        values[0] = np.array(states[0]) @ loadings.T + 0.3 * rng.normal(size=4)
        all_times.append(times)
        all_values.append(values)
    return all_times, all_values


def kalman(model: rf.latent.LatentSDE, times: np.ndarray, values: np.ndarray) -> float:
    """The log-likelihood of a model with linear drift, constant noise and a linear decoder."""
    d = model.dimension
    zero = jnp.zeros(d)
    rate = np.asarray(jax.jacobian(lambda z: model.drift(jnp.asarray(0.0), z))(zero), float)
    drift = np.asarray(model.drift(jnp.asarray(0.0), zero), float)
    noise = np.asarray(rf.sde.noise_matrix(model.sde.noise(jnp.asarray(0.0), zero)), float)
    loadings = np.asarray(jax.jacobian(lambda z: model.decoder(z).mean)(zero), float)
    decoded = model.decoder(zero)
    level, deviation = np.asarray(decoded.mean, float), np.asarray(decoded.deviation, float)
    mean, covariance = np.asarray(model.initial.loc, float), np.asarray(model.initial.covariance, float)
    total = 0.0
    for gap, y in zip(np.diff(times, prepend=times[0]) / (model.unit or 1.0), values, strict=True):
        block = np.zeros((2 * d + 1, 2 * d + 1))
        block[:d, :d], block[:d, d : 2 * d], block[d : 2 * d, d : 2 * d] = rate, noise @ noise.T, -rate.T
        block[:d, -1] = drift
        power = scipy.linalg.expm(gap * block)
        step = power[:d, :d]
        mean = step @ mean + power[:d, -1]
        covariance = step @ covariance @ step.T + power[:d, d : 2 * d] @ step.T
        seen = np.isfinite(y)
        rows = loadings[seen]
        gap_values = y[seen] - level[seen] - rows @ mean
        spread = rows @ covariance @ rows.T + np.diag(deviation[seen] ** 2)
        gain = np.linalg.solve(spread, rows @ covariance).T
        square = gap_values @ np.linalg.solve(spread, gap_values)
        total -= 0.5 * (square + np.linalg.slogdet(2 * np.pi * spread)[1])
        mean, covariance = mean + gain @ gap_values, covariance - gain @ rows @ covariance
    return total


def linear(steps: int, count: int, pairs: bool) -> None:
    times, values = oscillator(32 + count, 40, 0, pairs)
    key = jax.random.key(0)
    drift = rf.MLP(2, 2, depth=0, key=key)
    drift = jax.tree.map(lambda leaf: 0.3 * leaf, drift)
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(0.7 * jnp.eye(2)))
    loadings = 0.5 * jax.random.normal(key, (4, 2))
    decoder = rf.latent.NormalDecoder(jnp.zeros(4), jnp.ones(4), loadings, depth=0, key=key)
    began = time.perf_counter()
    fitted = rf.fit_latent(
        times[32:], values[32:], dimension=2, key=key, sde=sde, decoder=decoder, steps=steps
    )
    told(f"{count} series of 40, {steps} steps", began, fitted)
    held = times[:32], values[:32]
    exact = np.array([kalman(fitted.model, *one) for one in zip(*held, strict=True)])
    bound = fitted.model.lower_bound(*held, key=key).sum()
    print(f"32 series held out, Kalman filter {exact.sum():.2f}; bound of training {bound:.2f}")
    for particles in (1, 16, 256, 4096):
        got = fitted.model.log_likelihood(*held, key=key, num_particles=particles)
        shown = f"{got.total:.2f} ± {got.total_error:.2f}, bound {got.bound.sum():.2f}"
        apart = np.abs(got.log_likelihood - exact) / got.standard_error
        shares = ", ".join(f"{np.mean(apart < k):.0%} within {k}" for k in (1, 2, 3))
        print(f"  {particles:5} particles: {shown}; errors {shares}, {got.suspect.sum()} flagged", flush=True)


def angles(times: np.ndarray, harmonics: int = 6) -> np.ndarray:
    """1, sin and cos of multiples of phases."""
    multiples = np.arange(1, harmonics + 1) * times[..., None]
    return np.concatenate([np.ones((*times.shape, 1)), np.sin(multiples), np.cos(multiples)], axis=-1)


def gaits(series: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The speeds, coefficients and residuals when each walk is fitted by a Fourier series in a linear
    phase."""
    frames = np.arange(series.shape[1])
    axes = np.linalg.svd(series.reshape(-1, series.shape[2]), full_matrices=False)[2]
    first, second = np.moveaxis(series @ axes[:2].T, -1, 0)
    lines = np.polyfit(frames, np.unwrap(np.arctan2(second, first), axis=1).T, 1).T
    for _ in range(3):
        inputs = angles(lines[:, :1] * frames + lines[:, 1:]).reshape(series.shape[0] * len(frames), -1)
        common = np.linalg.lstsq(inputs, series.reshape(len(inputs), -1))[0]

        def miss(line: np.ndarray, one: np.ndarray, common: np.ndarray) -> np.ndarray:
            return (angles(line[0] * frames + line[1]) @ common - one).ravel()

        found = [
            scipy.optimize.least_squares(miss, line, args=(one, common), x_scale=(0.001, 0.1))
            for line, one in zip(lines, series, strict=True)
        ]
        lines = np.stack([one.x for one in found])
    phases = lines[:, :1] * frames + lines[:, 1:]
    own = np.stack([np.linalg.lstsq(angles(x), y)[0] for x, y in zip(phases, series, strict=True)])
    return lines[:, 0], own, series - angles(phases) @ own


class Walkers(eqx.Module):
    """Logarithms of speeds, Fourier coefficients and residuals of walks, and which of them are used."""

    rates: jax.Array
    gait: jax.Array
    rest: jax.Array
    used: jax.Array

    def walk(self, kept: np.ndarray, spread: float, inflation: float, key: jax.Array) -> jax.Array:
        """Some frames of a walk that blends two of the walks, from any phase and at another speed: a small
        number of walkers has few starts, gaits and speeds. The variance of the residuals in the first three
        frames, from which the others are forecast, is `inflation` times larger."""
        keys, share = jax.random.split(key, 8), self.used / jnp.sum(self.used)
        count, length = self.rest.shape[:2]
        # Deviations from the mean gait keep their covariance, as the squares of the weights sum to 1.
        pair = jax.random.choice(keys[0], count, (2,), replace=False, p=share)
        turn = jax.random.uniform(keys[1], maxval=2 * jnp.pi)
        weights = jnp.stack([jnp.cos(turn), jnp.sin(turn)])

        def blend(each):
            mean = jnp.tensordot(share, each, 1)
            return mean + jnp.tensordot(weights, each[pair] - mean, 1)

        speed = jnp.exp(blend(self.rates) + spread * jax.random.normal(keys[2]))
        phase = jax.random.uniform(keys[3], maxval=2 * jnp.pi)
        multiples = (phase + speed * kept)[:, None] * jnp.arange(1, 7)
        waves = jnp.concatenate([jnp.ones((len(kept), 1)), jnp.sin(multiples), jnp.cos(multiples)], axis=1)
        shifted = (kept + jax.random.randint(keys[4], (), 0, length)) % (2 * length)
        reflected = jnp.minimum(shifted, 2 * length - 1 - shifted)
        sign = jax.random.rademacher(keys[5], (), float)
        rest = sign * self.rest[jax.random.choice(keys[6], count, p=share), reflected]
        return waves @ blend(self.gait) + jnp.where(kept < 3, inflation**0.5, 1.0)[:, None] * rest


def stacked(models: list) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x) if eqx.is_array(x[0]) else x[0], *models)


def some(models: Any, i: int | slice) -> Any:
    return jax.tree.map(lambda x: x[i] if eqx.is_array(x) else x, models)


def train_together(models, sources, draw, objective, seconds, key, every=10, report=None):
    """Train several stacked models at once, each on draws from its own source, for a given time: an average
    of the parameters. The learning rate falls to zero like a cosine."""
    learned, began = trainable(models), time.perf_counter()
    arrays, rest = eqx.partition(models, learned)
    given, rest = eqx.partition(rest, eqx.is_array)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())

    def one(arrays, state, mean, given, source, key, rate):
        keys = jax.random.split(key)
        rows = jax.vmap(lambda key: draw(source, key))(jax.random.split(keys[0], 32))
        loss = lambda arrays: objective(eqx.combine(arrays, given, rest), rows, key=keys[1])[0]
        value, gradient = jax.value_and_grad(loss)(arrays)
        updates, new_state = optimiser.update(gradient, state, arrays)
        finite = jnp.isfinite(value) & jnp.isfinite(optax.global_norm(gradient))
        new = (jax.tree.map(lambda x, u: x - rate * u, arrays, updates), new_state)
        arrays, state = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, (arrays, state))
        return arrays, state, jax.tree.map(lambda m, x: 0.99 * m + 0.01 * x, mean, arrays), value

    @jax.jit
    def advance(carry, given, sources, key, rate):
        def step(carry, key):
            keys = jax.random.split(key, len(jax.tree.leaves(sources)[0]))
            *carry, values = jax.vmap(lambda *x: one(*x, rate))(*carry, given, sources, keys)
            return tuple(carry), values

        return jax.lax.scan(step, carry, jax.random.split(key, every))

    carry, steps, shown, first = (arrays, jax.vmap(optimiser.init)(arrays), arrays), 0, 0.0, None
    while first is None or time.perf_counter() - first < seconds:
        share = 0.0 if first is None else (time.perf_counter() - first) / seconds
        rate = 3e-3 * min(1, (steps + 1) / 100) * 0.5 * (1 + math.cos(math.pi * share))
        carry, values = advance(carry, given, sources, jax.random.fold_in(key, steps), rate)
        values, steps = np.asarray(values).mean(0), steps + every
        if first is None:
            first = time.perf_counter()
            print(f"  compiled in {first - began:.0f} s", flush=True)
        if report and time.perf_counter() - first > shown + 60:
            shown += 60
            spent = time.perf_counter() - first
            models = eqx.combine(carry[2], given, rest)
            print(f"  {steps} steps, {spent:.0f} s, loss {values}: {report(models)}", flush=True)
    print(f"  {steps} steps, {time.perf_counter() - first:.0f} s, loss {values}", flush=True)
    return eqx.combine(carry[2], given, rest)


class OrdinaryForecasting(AbstractObjective):
    """The negative bound per value of a latent ODE: the first state is drawn from the posterior given the
    first observations, and follows the drift without noise."""

    columns: int = eqx.field(static=True)
    num_given: int = eqx.field(static=True)
    uses_data: ClassVar[bool] = True

    def __call__(self, model, x, *, key):
        def bound(one, key):
            given, _ = one.split(self.num_given)
            first, _ = model.posterior.at(model.posterior.read(given), given.times[0])
            u = jax.random.normal(key, (model.dimension,))
            z = first.mean + first.root @ u
            path = simulated(without_noise(model), z, one.times, 1, key=key)
            start = model.initial.log_prob(z) - first.log_prob_at(u)
            return start + jnp.sum(jax.vmap(model.observed)(path, one.values, one.seen))

        series = Series.of_rows(x, self.columns)
        return -jnp.sum(jax.vmap(bound)(series, jax.random.split(key, len(x)))) / jnp.sum(series.seen), {}


def without_noise(model):
    still = rf.ItoSDE(model.sde.drift, rf.ConstantDiffusion(jnp.zeros(model.dimension)))
    return eqx.tree_at(lambda m: m.sde, model, still)


def mocap(
    file: Path,
    seeds: int,
    folds: bool,
    seconds: float,
    dimension: int,
    inflation: float,
    ordinary: bool,
    out: Path | None,
) -> None:
    """Forecasts of the test walks from three frames, by models with several seeds that are trained at once on
    all other walks, a tenth of the time by SDE matching alone. With `folds`, one model per other walk is
    trained without it and forecasts it."""
    data = scipy.io.loadmat(file)
    series, test = np.concatenate([data["Xtr"], data["Xval"]]).astype(float), data["Xtest"].astype(float)
    speeds, gait, rest = gaits(series)
    used = np.ones((seeds, len(series)))
    if folds:
        used = np.concatenate([used, 1 - np.eye(len(series))])
    kept, times = np.concatenate([np.arange(3), np.arange(4, 300, 2)]), 0.05 * np.arange(300)
    sources = [Walkers(*map(jnp.asarray, (np.log(speeds), gait, rest, row))) for row in used]
    draw = lambda source, key: source.walk(kept, 0.02, inflation, key)
    drawn, models = jax.jit(jax.vmap(draw, (None, 0))), []
    for seed, source in enumerate(sources):
        values = list(np.asarray(drawn(source, jax.random.split(jax.random.key(seed), 200))))
        parts = panel([times[kept]] * len(values), values, partial=True, fewest=2)
        unit = decorrelation_time(parts) if seed == 0 else unit
        models.append(initial_model(parts, dimension, unit, None, None, None, 64, jax.random.key(seed)))
    models, sources, columns = stacked(models), stacked(sources), test.shape[2]
    name = "latent ODE" if ordinary else "latent SDE"
    print(f"{name}: {dimension} states, inflation {inflation}, {seeds} seeds, unit {unit:.3f}", flush=True)

    def draw_row(source, key):
        values = draw(source, key)
        return jnp.concatenate([times[kept, None] / unit, values, jnp.ones_like(values)], axis=1).ravel()

    def curves(model, one, key):
        """Draws of the decoded forecast of one walk, from its fourth frame on."""
        given = Series(jnp.asarray(times[:3] / unit), one[:3], jnp.ones((3, columns), bool))
        state, _ = model.posterior.at(model.posterior.read(given), given.times[0 if ordinary else -1])
        moving, keys = without_noise(model) if ordinary else model, jax.random.split(key, 2 * 128)
        z = state.mean + jax.random.normal(key, (128, dimension)) @ state.root.T
        when = jnp.asarray(times[0 if ordinary else 2 : len(one)] / unit)
        paths = jax.vmap(lambda z, key: simulated(moving, z, when, 1, key=key))(z, keys[:128])
        return jax.vmap(jax.vmap(lambda z: model.decoder(z).mean))(paths)[:, -(len(one) - 3) :]

    @eqx.filter_jit
    def errors(models, tests):
        """Squared errors of the mean draw, and mean squared errors of the draws: (seeds, tests, frames)."""
        arrays, rest = eqx.partition(models, eqx.is_array)

        def each(arrays, one):
            drawn = curves(eqx.combine(arrays, rest), one, jax.random.key(9))
            squares = lambda drawn: jnp.mean((drawn - one[3:]) ** 2, axis=-1)
            return squares(jnp.mean(drawn, axis=0)), jnp.mean(squares(drawn), axis=0)

        return jax.vmap(lambda a: jax.lax.map(lambda one: each(a, one), tests))(arrays)

    def report(models):
        mean, single = (np.asarray(e) for e in errors(some(models, slice(seeds)), jnp.asarray(test)))
        each = mean.mean(axis=(1, 2))
        shown = f"{each.mean():.2f} ± {each.std(ddof=1) / np.sqrt(len(each)):.2f}, seeds {each.round(2)}"
        thirds = [float(part.mean().round(2)) for part in np.split(mean, 3, axis=2)]
        shown += f", walks {mean.mean(axis=(0, 2)).round(2)}, thirds {thirds}, draws {single.mean():.2f}"
        if folds:
            mean = np.asarray(errors(some(models, slice(seeds, None)), jnp.asarray(series))[0]).mean(axis=2)
            left_out = np.diagonal(mean)
            shown += f", left out {left_out.mean():.2f}, median {np.median(left_out):.2f}"
        return shown

    fitting = OrdinaryForecasting(columns, 3) if ordinary else Forecasting(columns, 3, 1)
    if not ordinary:
        matching = SDEMatching(columns)
        models = train_together(models, sources, draw_row, matching, 0.1 * seconds, jax.random.key(1))
    models = train_together(models, sources, draw_row, fitting, seconds, jax.random.key(2), 10, report)
    print(f"mean squared error of the mean forecast: {report(models)}", flush=True)
    if ordinary:
        return
    found = []
    for i in range(seeds if out else 0):
        rf.save(out / f"mocap{i}.rf", some(models, i))
    for i in range(seeds):
        model, e = some(models, i), []
        for one in test:
            paths = model.forecast(times[:3], one[:3], times[1:298], key=jax.random.key(9))
            mean = jax.vmap(jax.vmap(lambda z: model.decoder(z).mean))(jnp.asarray(paths.states))  # noqa: B023
            e.append(np.mean((np.asarray(mean).mean(0) - one[3:]) ** 2))
        found.append(np.mean(e))
        print(f"  seed {i}, rf.latent.LatentSDE.forecast: {found[-1]:.2f}, of {np.round(e, 2)}", flush=True)
    print(f"  {np.mean(found):.2f} ± {np.std(found, ddof=1) / np.sqrt(seeds):.2f}", flush=True)
    for particles in (256, 4096):
        options = {"key": jax.random.key(1), "num_particles": particles}
        got = some(models, 0).log_likelihood([times[: len(one)] for one in test], list(test), **options)
        shown = f"{got.total:.0f} ± {got.total_error:.1f}, bound {got.bound.sum():.0f}"
        shown += f", series {got.log_likelihood.round(1)} ± {got.standard_error.round(1)}"
        print(f"  log-likelihood of the test series, {particles} particles: {shown}", flush=True)


BATCH = 32  # series per training step


def heun(step, t, state, dt, noise):
    change = step(t, state, dt, noise)
    later = jax.tree.map(jnp.add, state, change)
    return jax.tree.map(lambda y, a, b: y + 0.5 * (a + b), state, change, step(t + dt, later, dt, noise))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def solved(step, arrays, t, y, dt, noises):
    """y after a step of Heun's method for each row of `noises`. The gradient is that of the adjoint equation
    (Li et al. 2020), solved backwards in time from y along the same Brownian path."""
    advance = lambda y, x: (heun(partial(step, arrays), t + x[0] * dt, y, dt, x[1]), None)
    return jax.lax.scan(advance, y, (jnp.arange(len(noises)), noises))[0]


def solved_forwards(step, arrays, t, y, dt, noises):
    y = solved(step, arrays, t, y, dt, noises)
    return y, (arrays, t, y, dt, noises)


def solved_backwards(step, kept, slope):
    arrays, t, y, dt, noises = kept

    def augmented(s, state, dt, noise):
        y, slope, _ = state
        change, pull = jax.vjp(lambda arrays, y: step(arrays, s, y, dt, noise), arrays, y)
        slope_arrays, slope_y = pull(jax.tree.map(jnp.negative, slope))
        return change, slope_y, slope_arrays

    back = lambda state, x: (heun(augmented, t + (x[0] + 1) * dt, state, -dt, -x[1]), None)
    start = y, slope, jax.tree.map(jnp.zeros_like, arrays)
    places = jnp.arange(len(noises))
    _, slope, slope_arrays = jax.lax.scan(back, start, (places, noises), reverse=True)[0]
    return slope_arrays, None, slope, None, None


solved.defvjp(solved_forwards, solved_backwards)


class Simulated(eqx.Module):
    """A latent SDE with a posterior dZ = f(t, Z, features) dt + σ dB that is simulated (Li et al. 2020).

    Encoder, prior, decoder and the distribution of the first state are those of `rf.latent.LatentSDE`. σ is
    constant, so the Itô and Stratonovich equations agree.
    """

    model: rf.latent.LatentSDE
    drift: rf.MLP
    steps: int = eqx.field(static=True)  # number of steps between two observations

    def bound(self, series: Series, key: jax.Array) -> jax.Array:
        """The bound on the log-likelihood of one series, by one path."""
        model, times, keys = self.model, series.times, jax.random.split(key)
        reading = model.posterior.read(series)
        first, _ = model.posterior.at(reading, times[0])
        u = jax.random.normal(keys[0], (model.dimension,))
        z = first.mean + first.root @ u
        arrays, rest = eqx.partition(self, eqx.is_inexact_array)

        def step(arrays, t, y, dt, noise):
            own, (start, gap, features) = eqx.combine(arrays[0], rest), arrays[1:]
            now = features[0] + (t - start) / gap * (features[1] - features[0])
            f = own.drift(t, jnp.concatenate([y[0], now]))
            mismatch = (f - own.model.drift(t, y[0])) / own.noise()
            return f * dt + own.noise() * noise, 0.5 * jnp.sum(mismatch**2) * dt

        def between(y, x):
            start, gap, features, noises = x
            dt = gap / self.steps
            y = solved(step, (arrays, start, gap, features), start, y, dt, jnp.sqrt(dt) * noises)
            return y, y

        gaps = jnp.diff(times)
        noises = jax.random.normal(keys[1], (len(gaps), self.steps, model.dimension))
        pairs = jnp.stack([reading.features[:-1], reading.features[1:]], axis=1)
        first_y = z, jnp.zeros(())
        (_, cost), rows = jax.lax.scan(between, first_y, (times[:-1], gaps, pairs, noises))
        states = jnp.concatenate([z[None], rows[0]])
        start = model.initial.log_prob(z) - first.log_prob_at(u)
        seen = jnp.sum(jax.vmap(model.observed)(states, series.values, series.seen))
        return seen + start - cost

    def noise(self) -> jax.Array:
        zero = jnp.zeros(self.model.dimension)
        return jnp.diagonal(rf.sde.noise_matrix(self.model.sde.noise(jnp.zeros(()), zero)))


def simulated_bound(model: Simulated, series: Series, key: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model.bound)(series, jax.random.split(key, len(series.times))))


def matched_bound(
    model: rf.latent.LatentSDE, series: Series, key: jax.Array, num_times: int = 32
) -> jax.Array:
    keys = jax.random.split(key, len(series.times))
    return jnp.mean(jax.vmap(lambda one, k: lower_bound(model, one, num_times, key=k))(series, keys))


class Race:
    """Training by one method: its compiled functions and the first state."""

    def __init__(self, train, bound, model, series, held):
        optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
        self.arrays, rest = eqx.partition(model, eqx.is_inexact_array)
        self.state, key = optimiser.init(self.arrays), jax.random.key(0)

        def advance(arrays, state, key):
            keys = jax.random.split(key)
            rows = jax.random.randint(keys[0], (BATCH,), 0, len(series.times))
            some = jax.tree.map(lambda leaf: leaf[rows], series)
            gradient = jax.grad(lambda arrays: -train(eqx.combine(arrays, rest), some, keys[1]))(arrays)
            updates, state = optimiser.update(gradient, state, arrays)
            return eqx.apply_updates(arrays, updates), state

        measured = lambda arrays: bound(eqx.combine(arrays, rest), held, jax.random.key(1))
        first = jax.jit(advance).lower(self.arrays, self.state, key)
        self.programs = [first, jax.jit(measured).lower(self.arrays)]

    def run(self, name: str, evaluations: int, every: int, limit: float, target: float) -> list[tuple]:
        """Train until the held-out bound, evaluated every `every` steps, reaches `target`, or for `limit`
        seconds including these checks. Return rows of (bound, drift evaluations, seconds of training)."""
        (advance, measured), arrays, state = self.programs, self.arrays, self.state
        jax.block_until_ready(advance(arrays, state, jax.random.key(0)))
        print(f"    {name}: bound {float(measured(arrays)):.0f}", flush=True)
        rows, seconds, steps, first = [], 0.0, 0, time.perf_counter()
        while not rows or (time.perf_counter() - first < limit and rows[-1][0] < target):
            began = time.perf_counter()
            for _ in range(every):
                steps += 1
                arrays, state = advance(arrays, state, jax.random.key(steps))
            jax.block_until_ready(state)
            seconds += time.perf_counter() - began
            rows.append((float(measured(arrays)), steps * BATCH * evaluations, seconds))
            if steps % (10 * every) == 0:
                print(f"    {name}, {steps} steps: bound {rows[-1][0]:.0f}, {seconds:.1f} s", flush=True)
        return rows


def adjoint(count: int, length: int, limit: float) -> None:
    """Print drift evaluations and seconds until the same held-out bound, with at most `limit` seconds per
    method."""
    times, _, values, _ = lorenz_series(count, length, 1)
    _, _, held, _ = lorenz_series(16, length, 2)
    key, num_times, substeps = jax.random.key(0), 32, 2
    sde = rf.ItoSDE(rf.sde.RestoringDrift(3, 1.0, 64, 2, key=key), rf.ConstantDiffusion(1.5 * jnp.ones(3)))
    options = {"dimension": 3, "key": key, "steps": 1, "progress": False, "sde": sde}
    model = rf.fit_latent([times] * count, list(values), **options).model
    solver = Simulated(model, rf.MLP(3 + 3 + 128, 3, 64, 2, scale=0.1, key=key), substeps)
    # A step of Heun's method evaluates the drift twice, forwards and backwards.
    solver_cost = 2 * 2 * substeps * (len(times) - 1)
    fine = lambda model, some, key: simulated_bound(replace(model, steps=4 * substeps), some, key)
    exact = lambda model, some, key: matched_bound(model, some, key, 1024)
    data = [model.arrays([times] * len(v), list(v))[0] for v in (values, held)]
    began = time.perf_counter()
    slow = Race(simulated_bound, fine, solver, *data)
    fast = Race(matched_bound, exact, model, *data)
    with ThreadPoolExecutor() as pool:  # the compiler runs in parallel
        done = list(pool.map(lambda program: program.compile(), slow.programs + fast.programs))
    slow.programs, fast.programs = done[:2], done[2:]
    print(f"    compiled in {time.perf_counter() - began:.0f} s", flush=True)
    slow = slow.run("adjoint", solver_cost, 5, limit, np.inf)
    target = max(bound for bound, *_ in slow)
    fast = fast.run("SDE matching", num_times, 1, limit, target)
    kind = jax.devices()[0].device_kind
    print(f"{kind}: held-out bound per series, drift evaluations, seconds of training")
    compare(slow, fast)


def compare(slow: list[tuple], fast: list[tuple]) -> None:
    for level in np.quantile([bound for bound, *_ in slow], [0.5, 0.75, 0.9, 1.0]):
        one, other = (next((row for row in rows if row[0] >= level), None) for rows in (slow, fast))
        shown = f"  {level:8.1f}: adjoint {one[1]:.2e}, {one[2]:.1f} s; SDE matching "
        if other is None:
            print(shown + f"not reached (best {max(bound for bound, *_ in fast):.1f})", flush=True)
            continue
        ratios = f"{one[1] / other[1]:.0f} times fewer, {one[2] / other[2]:.1f} times faster"
        print(shown + f"{other[1]:.2e}, {other[2]:.1f} s: {ratios}", flush=True)


def many(steps: int) -> None:
    _, _, values, _ = lorenz_series(10_000, 100, 4)
    rng = np.random.default_rng(5)
    times = [np.sort(rng.uniform(0, 5, 100)) for _ in range(10_000)]
    values[rng.uniform(size=values.shape) < 0.5] = np.nan
    began = time.perf_counter()
    fitted = rf.fit_latent(times, list(values), dimension=3, key=jax.random.key(0), steps=steps)
    told(f"10,000 series of 100, {steps} steps", began, fitted)
    stats = jax.devices()[0].memory_stats() or {}
    print(f"peak memory {stats.get('peak_bytes_in_use', 0) / 2**30:.2f} GiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["linear", "lorenz", "mocap", "adjoint", "many"], required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dimension", type=int, default=6)
    parser.add_argument("--inflation", type=float, default=1.0)
    parser.add_argument("--folds", action="store_true")
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.part == "lorenz":
        lorenz(given.steps, given.count, given.out)
    elif given.part == "linear":
        linear(given.steps, given.count, given.pairs)
    elif given.part == "mocap":
        options = given.dimension, given.inflation, given.ordinary, given.out
        mocap(given.file, given.seeds, given.folds, given.seconds, *options)
    elif given.part == "adjoint":
        adjoint(given.count, given.length, given.seconds)
    else:
        many(given.steps)
