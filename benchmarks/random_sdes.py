"""The default estimate on random SDEs: `python -m benchmarks.random_sdes`.

SDEs in one to three dimensions with full, diagonal or degenerate noise, from a random Fourier drift and noise,
with gains and scales over two orders of magnitude. Eight points of each, drawn from the SDE, are estimated, and
compared with a reference of another kind: the mean of a Gaussian last step over 2^17 simulated paths
(Pedersen 1995), with its own error. Counted are points beyond three error bars that are not flagged, and points
that are.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf

STEPS, PATHS, POINTS = 256, 2**17, 8


class Drift(eqx.Module):
    gain: jax.Array
    rate: jax.Array
    inner: jax.Array
    shift: jax.Array
    outer: jax.Array

    def __call__(self, t, z):
        return self.gain * (jnp.sin(z @ self.inner + self.shift + t) @ self.outer) - self.rate * z


class Noise(eqx.Module):
    scale: jax.Array
    inner: jax.Array
    shift: jax.Array
    outer: jax.Array
    kind: str = eqx.field(static=True)

    def __call__(self, t, z):
        d = len(z)
        waves = 1 + 0.4 * (jnp.sin(z @ self.inner + self.shift) @ self.outer)
        if self.kind == "diagonal":
            return self.scale * jnp.diag(waves[:d])
        full = self.scale * (jnp.eye(d) * 0.5 + 0.3 * jnp.reshape(waves[: d * d], (d, d)))
        return full[:, : d - 1] if self.kind == "degenerate" else full


def random_sde(seed: int) -> tuple[rf.ItoSDE, int, str]:
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 4))
    kind = str(rng.choice(["full", "diagonal", "degenerate"] if d > 1 else ["full", "diagonal"]))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), "float32")
    gain, scale = 10 ** rng.uniform(-1, 1, 2) * np.array([0.6, 0.3])
    drift = Drift(
        jnp.float32(gain),
        jnp.float32(10 ** rng.uniform(-1, 0.7)),
        normal(d, 16),
        normal(16),
        normal(16, d) / 4,
    )
    return (
        rf.ItoSDE(drift, Noise(jnp.float32(scale), normal(d, 16), normal(16), normal(16, d * d) / 4, kind)),
        d,
        kind,
    )


@eqx.filter_jit
def simulated(sde, d: int, key):
    """Paths up to the last step, mean and covariance of which are known."""
    h = 1 / STEPS
    key_start, key = jax.random.split(key)
    z = jax.random.normal(key_start, (PATHS, d), "float32")

    def step(i, z):
        noise = jax.vmap(lambda z: sde.noise(i * h, z))(z)
        kick = jax.random.normal(jax.random.fold_in(key, i), (PATHS, noise.shape[-1]), "float32")
        drift = jax.vmap(lambda z: sde.drift(i * h, z))(z)
        return z + h * drift + h**0.5 * jnp.einsum("pij,pj->pi", noise, kick)

    return jax.lax.fori_loop(0, STEPS, step, z)


@eqx.filter_jit
def reference(ends, x):
    """log p and its error from a kernel of the ends, whitened: bandwidths w and w/2, extrapolated."""
    mean, cov = jnp.mean(ends, axis=0), jnp.cov(ends.T).reshape(x.shape[1], x.shape[1])
    root = jnp.linalg.cholesky(cov)
    u = jnp.linalg.solve(root, (ends - mean).T).T
    at = jnp.linalg.solve(root, (x - mean).T).T
    d = x.shape[1]
    half = jnp.sum(jnp.log(jnp.diag(root)))

    def one(y, width):
        squares = jnp.sum((u - y) ** 2, axis=1) / width**2
        k = jnp.exp(-0.5 * squares) / (2 * jnp.pi * width**2) ** (d / 2)
        return jnp.mean(k), jnp.std(k) / len(k) ** 0.5

    wide = 0.25
    a, _ = jax.vmap(lambda y: one(y, wide))(at)
    b, e = jax.vmap(lambda y: one(y, wide / 2))(at)
    value = (4 * b - a) / 3
    return jnp.log(value) - half, (4 / 3 * e + jnp.abs(value - b)) / value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    a = parser.parse_args()
    began, wrong, flagged, compared, total, done = time.perf_counter(), [], [], 0, 0, 0
    for seed in range(a.first, a.first + a.count):
        if time.perf_counter() - began > a.seconds:
            break
        sde, d, kind = random_sde(seed)
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(d)))
        ends = simulated(sde, d, jax.random.key(seed))
        x = ends[:POINTS]
        estimate = flow.estimate(x, key=jax.random.key(seed + 1))
        truth, error = (np.asarray(part) for part in reference(ends[POINTS:], x))
        suspect, bars = np.asarray(estimate.suspect), np.asarray(estimate.total_error)
        miss = np.abs(np.asarray(estimate.log_prob) - truth)
        usable = np.isfinite(truth) & (error < 0.3)
        bad = usable & ~suspect & ~(miss <= 3 * np.hypot(bars, error))
        total, compared, done = total + POINTS, compared + usable.sum(), done + 1
        wrong += [(seed, d, kind, int(i)) for i in np.flatnonzero(bad)]
        flagged += [(seed, d, kind, int(i)) for i in np.flatnonzero(suspect)]
        for i in np.flatnonzero(bad):
            print(
                f"seed {seed} {d}-D {kind}: {estimate.log_prob[i]:.3f} ± {bars[i]:.3f} ({estimate.method[i]}), "
                f"reference {truth[i]:.3f} ± {error[i]:.3f}",
                flush=True,
            )
        for why, where, _ in estimate.reasons():
            if np.any(where):
                print(f"seed {seed} {d}-D {kind}: flagged {why}: {int(np.sum(where))}", flush=True)
    print(
        f"{done} SDEs, {total} points, {compared} compared: {len(wrong)} wrong and not flagged, {len(flagged)} flagged"
    )
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
