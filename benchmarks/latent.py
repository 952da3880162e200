"""Latent SDEs against exact likelihoods and published errors: `python -m benchmarks.latent --part lorenz`.

- `linear`: a noisy oscillator observed in one of four columns at a time. The likelihood of a fitted linear
  model is compared with that of the Kalman filter, and the bound is printed for increasing numbers of
  particles.
- `lorenz`: a stochastic Lorenz system with three states and ten noisy columns. The held-out log-likelihood is
  compared with that of the true model, computed by a bootstrap particle filter.
- `mocap`: motion capture (`--file mocap35.mat`); mean squared error of forecasts from three frames.
- `adjoint`: training on the Lorenz problem by SDE matching and by simulation with the adjoint equation. The
  output is drift evaluations and seconds until the same held-out bound, on the GPU or with
  `JAX_PLATFORMS=cpu`.
- `many`: 10,000 series of 100 irregular observations, half of the cells missing.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.interpolate
import scipy.io
import scipy.linalg
import scipy.optimize

import roughflow as rf
from roughflow.latent._bound import lower_bound
from roughflow.latent._posterior import Series


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
    one, key = ([times] * 16, list(held)), jax.random.key(1)
    for particles in (64, 256, 1024):
        got = fitted.model.log_likelihood(*one, key=key, num_particles=particles)
        shown = f"{got.total:.1f} ± {got.total_error:.1f}, bound {got.bound.sum():.1f}"
        print(f"held out, {particles} particles: {shown}")
    print(f"bound of training: {fitted.model.lower_bound(*one, key=key).sum():.1f}")
    truth = [
        bootstrap_filter(times, jnp.asarray(held), jnp.asarray(loadings), jnp.asarray(rest), 0.5, 50_000, key)
        for key in jax.random.split(jax.random.key(2), 2)
    ]
    print(f"true model: {truth[0].sum():.1f}, {truth[1].sum():.1f}")
    print(f"ratio {got.total / np.mean([one.sum() for one in truth]):.4f}")
    if out is not None:
        drawn = fitted.model.sample(0.02 * np.arange(1500), key=jax.random.key(3), num_samples=1)
        options = {"key": jax.random.key(4), "t1": 30.0, "steps": 15000, "trajectory": True}
        truth = rf.simulate(lorenz_sde(), jnp.asarray(rest[0]), **options)
        mean = np.asarray(jax.vmap(lambda z: fitted.model.decoder(z).mean)(jnp.asarray(drawn.states[0])))
        # The states in the coordinates of the true states, by least squares on the means of the values.
        np.savez(out / "lorenz.npz", learned=mean @ np.linalg.pinv(loadings).T, true=np.asarray(truth)[::10])
        rf.save(out / "lorenz.rf", fitted.model)


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
    times, values = oscillator(count + 8, 40, 0, pairs)
    key = jax.random.key(0)
    drift = rf.MLP(2, 2, depth=0, key=key)
    drift = jax.tree.map(lambda leaf: 0.3 * leaf, drift)
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(0.7 * jnp.eye(2)))
    loadings = 0.5 * jax.random.normal(key, (4, 2))
    decoder = rf.latent.NormalDecoder(jnp.zeros(4), jnp.ones(4), loadings, depth=0, key=key)
    began = time.perf_counter()
    fitted = rf.fit_latent(times[8:], values[8:], dimension=2, key=key, sde=sde, decoder=decoder, steps=steps)
    told(f"{count} series of 40, {steps} steps", began, fitted)
    exact = sum(kalman(fitted.model, *one) for one in zip(times[:8], values[:8], strict=True))
    bound = fitted.model.lower_bound(times[:8], values[:8], key=key).sum()
    print(f"held out, Kalman filter {exact:.3f}; bound of training {bound:.3f}")
    for particles in (1, 16, 256, 4096):
        got = fitted.model.log_likelihood(times[:8], values[:8], key=key, num_particles=particles)
        shown = f"{got.total:.3f} ± {got.total_error:.3f}, bound {got.bound.sum():.3f}"
        print(f"  {particles:5} particles: {shown}")


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


def walks(
    series: np.ndarray, count: int, spread: float, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Frames, and walks that mix two of the series, from a random phase and at a random speed. This augments
    the data, because a few walkers show few starts, gaits and speeds. After the first three frames, a random
    third of the frames is kept."""
    speeds, gait, rest = gaits(series)
    rates, drawn, length = np.log(speeds), [], series.shape[1]
    for _ in range(count):
        # The covariance of deviations from the mean gait is unchanged, because the squares of the weights sum
        # to 1.
        pair, turn = rng.choice(len(series), 2, replace=False), rng.uniform(0, 2 * np.pi)
        weights = np.array([np.cos(turn), np.sin(turn)])
        blend = lambda each, w=weights, i=pair: each.mean(0) + np.tensordot(w, each[i] - each.mean(0), 1)
        speed = np.exp(blend(rates) + spread * rng.normal())
        kept = np.concatenate([np.arange(3), 3 * np.arange(1, 99) + rng.integers(0, 3, 98)])
        kept = kept[kept < length]
        values = angles(rng.uniform(0, 2 * np.pi) + speed * kept) @ blend(gait)
        shifted = (kept + rng.integers(0, length)) % (2 * length)
        reflected = np.minimum(shifted, 2 * length - 1 - shifted)
        drawn.append((kept, values + rng.choice([-1, 1]) * rest[rng.integers(len(rest)), reflected]))
    return drawn


def at_best_speed(curve: np.ndarray, one: np.ndarray) -> float:
    """The error of a forecast after its speed (within 10 %) and its phase (within 8 frames) have been
    optimised; the remaining error is not an error of the speed."""
    shown = np.arange(len(one))
    read = scipy.interpolate.interp1d(np.arange(len(curve)), curve, axis=0)
    place = lambda speed, shift: np.clip(speed * shown + shift, 0, len(curve) - 1)
    tried = [(speed, shift) for speed in np.linspace(0.9, 1.1, 21) for shift in np.linspace(-8, 8, 17)]
    return min(float(np.mean((read(place(*each)) - one) ** 2)) for each in tried)


def mocap(
    file: Path,
    seed: int,
    steps: int,
    forecast_steps: int,
    dimension: int,
    count: int,
    spread: float,
    fold: int | None,
) -> None:
    """Fit all series except the test series; with `fold`, fit 14 or 15 of these 19 and test on the others."""
    data = scipy.io.loadmat(file)
    series, test = np.concatenate([data["Xtr"], data["Xval"]]).astype(float), data["Xtest"]
    if fold is not None:
        apart = np.arange(len(series)) % 4 == fold
        series, test = series[~apart], series[apart]
    train = walks(series, count, spread, np.random.default_rng(seed))
    times = 0.05 * np.arange(400)
    began = time.perf_counter()
    fitted = rf.fit_latent(
        [times[kept] for kept, _ in train],
        [values for _, values in train],
        dimension=dimension,
        key=jax.random.key(seed),
        steps=steps,
        num_given=3,
        forecast_steps=forecast_steps,
        validation=0.0,
        progress=False,
        training=rf.train.TrainingOptions(batch_size=32),
    )
    seconds, errors, left = time.perf_counter() - began, [], []
    for one in test:
        paths = fitted.model.forecast(times[:3], one[:3], times[1:340], key=jax.random.key(9))
        mean = jax.vmap(jax.vmap(lambda z: fitted.model.decoder(z).mean))(jnp.asarray(paths.states))
        curve, rest = np.asarray(mean).mean(0), one[3:]
        errors.append((curve[: len(rest)] - rest) ** 2)
        left.append(at_best_speed(curve, rest))
    shown = f"seed {seed}, fold {fold}, {dimension} states, {count} walks, spread {spread}"
    each = np.mean(errors, axis=(1, 2))
    print(f"{shown}, {steps}+{forecast_steps} steps: {each.mean():.2f}, of {np.round(each, 2)}")
    thirds = [np.mean(part) for part in np.split(np.array(errors), 3, axis=1)]
    print(f"  by thirds of the time {np.round(thirds, 2)}; at the best speed and phase {np.round(left, 2)}")
    print(f"  {seconds:.0f} s, loss {fitted.history.loss[-20:].mean():.4f}", flush=True)
    if fold is None:
        for particles in (256, 2048, 16384):
            options = {"key": jax.random.key(1), "num_particles": particles}
            got = fitted.model.log_likelihood([times[: len(one)] for one in test], list(test), **options)
            shown = f"{got.total:.0f} ± {got.total_error:.1f}, bound {got.bound.sum():.0f}; {got.warning}"
            print(f"  log-likelihood of the test series, {particles} particles: {shown}", flush=True)


class Simulated(eqx.Module):
    """A latent SDE with a posterior dZ = f(t, Z, features) dt + σ dB that is simulated (Li et al. 2020).

    Encoder, prior, decoder and the distribution of the first state are those of `rf.latent.LatentSDE`. σ is
    constant, so the Itô and Stratonovich equations agree.
    """

    model: rf.latent.LatentSDE
    drift: rf.MLP
    steps: int = eqx.field(static=True)  # number of steps between two observations

    def bound(self, series: Series, key: jax.Array) -> jax.Array:
        """The bound on the log-likelihood of one series, by one path and the adjoint equation."""
        model, times, keys = self.model, series.times, jax.random.split(key)
        reading = model.posterior.read(series)
        first, _ = model.posterior.at(reading, times[0])
        u = jax.random.normal(keys[0], (model.dimension,))
        z = first.mean + first.root @ u

        def velocity(t, y, args):
            own, features, times = args
            place = jnp.clip((t - times[0]) / (times[1] - times[0]), 0, len(times) - 1.001)
            i = place.astype(int)
            now = features[i] + (place - i) * (features[i + 1] - features[i])
            f = own.drift(t, jnp.concatenate([y[:-1], now]))
            gap = (f - own.model.drift(t, y[:-1])) / own.noise()
            return jnp.append(f, 0.5 * jnp.sum(gap**2))

        spread = lambda t, y, args: jnp.eye(model.dimension + 1, model.dimension) * args[0].noise()
        path = diffrax.VirtualBrownianTree(times[0], times[-1], 1e-3, (model.dimension,), keys[1])
        out = diffrax.diffeqsolve(
            diffrax.MultiTerm(diffrax.ODETerm(velocity), diffrax.ControlTerm(spread, path)),
            diffrax.Heun(),
            times[0],
            times[-1],
            (times[1] - times[0]) / self.steps,
            jnp.append(z, 0.0),
            (self, reading.features, times),
            saveat=diffrax.SaveAt(ts=times),
            adjoint=diffrax.BacksolveAdjoint(solver=diffrax.Heun()),
            max_steps=None,
        )
        states = out.ys[:, :-1]
        start = model.initial.log_prob(z) - first.log_prob_at(u)
        seen = jnp.sum(jax.vmap(model.observed)(states, series.values, series.seen))
        return seen + start - out.ys[-1, -1]

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


def race(
    name: str, train, bound, model, series, held, evaluations: int, every: int, limit: float, target: float
):
    """Train until the held-out bound, evaluated every `every` steps, reaches `target`, or for `limit` seconds
    including these checks. Return rows of (bound, drift evaluations, seconds of training)."""
    optimiser, batch = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)), 32

    @eqx.filter_jit
    def advance(model, state, key):
        arrays, rest = eqx.partition(model, eqx.is_inexact_array)
        keys = jax.random.split(key)
        rows = jax.random.randint(keys[0], (batch,), 0, len(series.times))
        some = jax.tree.map(lambda leaf: leaf[rows], series)
        gradient = jax.grad(lambda arrays: -train(eqx.combine(arrays, rest), some, keys[1]))(arrays)
        updates, state = optimiser.update(gradient, state, arrays)
        return eqx.combine(eqx.apply_updates(arrays, updates), rest), state

    measured = eqx.filter_jit(lambda model, key: bound(model, held, key))
    state, began = optimiser.init(eqx.filter(model, eqx.is_inexact_array)), time.perf_counter()
    jax.block_until_ready(advance(model, state, jax.random.key(0)))
    start = float(measured(model, jax.random.key(1)))
    print(f"    {name}: compiled in {time.perf_counter() - began:.0f} s, bound {start:.0f}", flush=True)
    rows, seconds, steps, first = [], 0.0, 0, time.perf_counter()
    while not rows or (time.perf_counter() - first < limit and rows[-1][0] < target):
        began = time.perf_counter()
        for _ in range(every):
            steps += 1
            model, state = advance(model, state, jax.random.key(steps))
        jax.block_until_ready(state)
        seconds += time.perf_counter() - began
        rows.append((float(measured(model, jax.random.key(1))), steps * batch * evaluations, seconds))
        if steps % (10 * every) == 0:
            print(f"    {name}, {steps} steps: bound {rows[-1][0]:.0f}, {seconds:.1f} s", flush=True)
    return rows


def adjoint(count: int, limit: float) -> None:
    """Print drift evaluations and seconds until the same held-out bound, with at most `limit` seconds per
    method."""
    times, _, values, _ = lorenz_series(count, 40, 1)
    _, _, held, _ = lorenz_series(16, 40, 2)
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
    slow = race("adjoint", simulated_bound, fine, solver, *data, solver_cost, 5, limit, np.inf)
    target = max(bound for bound, *_ in slow)
    fast = race("SDE matching", matched_bound, exact, model, *data, num_times, 1, limit, target)
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dimension", type=int, default=6)
    parser.add_argument("--spread", type=float, default=0.02)
    parser.add_argument("--forecast-steps", type=int, default=2000)
    parser.add_argument("--fold", type=int)
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
        steps = given.steps, given.forecast_steps
        mocap(given.file, given.seed, *steps, given.dimension, given.count, given.spread, given.fold)
    elif given.part == "adjoint":
        adjoint(given.count, given.seconds)
    else:
        many(given.steps)
