"""Error bars of the default estimate on random SDEs: `python -m benchmarks.random_sdes [--count 500]`.

The SDEs have one to three dimensions and full, diagonal or degenerate noise. Rates, scales and noise vary
over two orders of magnitude. Neither of the two references depends on paths or drivers:

- *transformed*: X = ψ(Y), where Y solves a linear SDE with constant noise and ψ is a random diffeomorphism. X
  solves a nonlinear SDE with state-dependent noise, and its density is a transformed normal density.
- *neural*: drift and diffusion are random networks. The reference is the solution of the Fokker–Planck
  equation (`rf.density.Grid`, total error below 0.005). In three dimensions, a neural SDE in two dimensions
  is combined with one in one dimension, and the state is rotated. The density is the product of both
  densities.

Points are drawn from the process itself. An estimate counts as wrong if its error exceeds three error bars
(its own and those of the reference combined) and it is not flagged as suspect.
"""

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from scipy import linalg, stats

import roughflow as rf

NOISES = ("full", "diagonal", "degenerate")
POINTS = 4  # number of points per SDE
BARS, FLOOR = 3.0, 1e-3  # error bars; nats, smaller errors do not count


class Diffeomorphism(eqx.Module):
    """xᵢ = scaleᵢ · sinh(bendᵢ yᵢ)/bendᵢ + gᵢ(x₁, …, xᵢ₋₁), in units of the scales, then rotated."""

    scale: Array
    bend: Array
    weights: list[Array]
    rotation: Array

    def _shift(self, before: list[Array], i: int) -> Array:
        return jnp.sum(jnp.tanh(self.weights[i][:, 1:] @ jnp.stack(before)) * self.weights[i][:, 0])

    def __call__(self, y: Array) -> Array:
        u: list[Array] = []
        for i in range(len(y)):
            own = jnp.sinh(self.bend[i] * y[i]) / self.bend[i]
            u.append(own + (self._shift(u, i) if i else 0))
        return self.rotation @ (self.scale * jnp.stack(u))

    def inverse(self, x: Array) -> Array:
        u = (self.rotation.T @ x) / self.scale
        own = [u[i] - (self._shift([*u[:i]], i) if i else 0) for i in range(len(x))]
        return jnp.stack([jnp.arcsinh(self.bend[i] * own[i]) / self.bend[i] for i in range(len(x))])


class TransformedDrift(eqx.Module):
    """Dψ(y)(Ay + b) at y = ψ⁻¹(x): the Stratonovich drift of X."""

    map: Diffeomorphism
    rate: Array
    push: Array

    def __call__(self, t: Array, x: Array) -> Array:
        y = self.map.inverse(x)
        return jax.jvp(self.map, (y,), (self.rate @ y + self.push,))[1]


class TransformedDiffusion(eqx.Module):
    """Dψ(y) G at y = ψ⁻¹(x)."""

    map: Diffeomorphism
    noise: Array

    def __call__(self, t: Array, x: Array) -> Array:
        y = self.map.inverse(x)
        column = lambda g: jax.jvp(self.map, (y,), (g,))[1]
        return jnp.stack([column(self.noise[:, j]) for j in range(self.noise.shape[1])], axis=1)


class TransformedBase(eqx.Module):
    """ψ(Y₀) for a normal Y₀."""

    map: Diffeomorphism
    normal: rf.Normal

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        y = self.normal.sample(key=key, shape=shape)
        return jnp.vectorize(self.map, signature="(d)->(d)")(y)

    def log_prob(self, x: Array) -> Array:
        slope = jax.jacfwd(self.map.inverse)(x)
        return self.normal.log_prob(self.map.inverse(x)) + jnp.linalg.slogdet(slope)[1]


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def noise_matrix(rng: np.random.Generator, d: int, noise: str) -> np.ndarray:
    size = log_uniform(rng, 0.1, 2)
    if noise == "full":
        return size * (np.eye(d) + 0.5 * rng.normal(size=(d, d)))
    return size * (np.diag(rng.uniform(0.5, 1.5, d)) if noise == "diagonal" else np.eye(d, max(1, d - 1)))


def transformed(rng: np.random.Generator, d: int, noise: str) -> tuple[rf.StochasticFlow, Any]:
    scale, rate = log_uniform(rng, 0.1, 10), log_uniform(rng, 0.05, 5)
    weights = [rng.normal(size=(4, i + 1)) / 2 for i in range(d)]
    bend = np.array([log_uniform(rng, 0.05, 1.5) for _ in range(d)])
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    map = Diffeomorphism(*jax.tree.map(jnp.asarray, (scale * np.ones(d), bend, weights, rotation)))
    a = -rate * np.eye(d) + 0.7 * rate * rng.normal(size=(d, d))
    b, g = rng.normal(size=d), noise_matrix(rng, d, noise)
    mean, spread = rng.normal(size=d), rng.uniform(0.3, 1, d)
    sde = rf.StratonovichSDE(
        TransformedDrift(map, jnp.asarray(a), jnp.asarray(b)), TransformedDiffusion(map, jnp.asarray(g))
    )
    flow = rf.StochasticFlow(sde, TransformedBase(map, rf.Normal(jnp.asarray(mean), jnp.asarray(spread))))
    # Van Loan's matrix exponential: e^A and ∫ e^{As} GGᵀ e^{Aᵀs} ds, with one more column for the constant
    # drift.
    block = linalg.expm(np.block([[-a, g @ g.T], [np.zeros((d, d)), a.T]]))
    grown = block[d:, d:].T
    covariance = grown @ block[:d, d:] + grown @ np.diag(spread**2) @ grown.T
    moved = linalg.expm(np.block([[a, b[:, None]], [np.zeros((1, d + 1))]]))[:d, d]
    end = stats.multivariate_normal(grown @ mean + moved, 0.5 * (covariance + covariance.T))

    def refer(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y = np.asarray(jax.vmap(map.inverse)(x))
        slope = np.asarray(jax.vmap(jax.jacfwd(map.inverse))(x))
        return end.logpdf(y).reshape(len(x)) + np.linalg.slogdet(slope)[1], np.zeros(len(x))

    return flow, refer


class Network(eqx.Module):
    layers: list[tuple[Array, Array]]

    @staticmethod
    def random(rng: np.random.Generator, d: int, out: int) -> "Network":
        sizes = [(d, 16), (16, 16), (16, out)]
        make = lambda a, b: (
            jnp.asarray(rng.normal(size=(b, a)) / a**0.5),
            jnp.asarray(0.3 * rng.normal(size=b)),
        )
        return Network([make(a, b) for a, b in sizes])

    def __call__(self, z: Array) -> Array:
        for w, b in self.layers[:-1]:
            z = jnp.tanh(w @ z + b)
        return self.layers[-1][0] @ z + self.layers[-1][1]


class NeuralDrift(eqx.Module):
    network: Network
    gain: Array
    scale: Array

    def __call__(self, t: Array, z: Array) -> Array:
        return self.scale * self.gain * self.network(z / self.scale)


class NeuralDiffusion(eqx.Module):
    network: Network
    size: Array
    scale: Array
    kind: str = eqx.field(static=True)

    def __call__(self, t: Array, z: Array) -> Array:
        d, out = len(z), self.network(z / self.scale)
        if self.kind == "full":
            matrix = jnp.eye(d) + 0.3 * jnp.reshape(out, (d, d))
        elif self.kind == "diagonal":
            matrix = jnp.diag(1 + 0.3 * jnp.tanh(out[:d]))
        else:
            matrix = (1 + 0.3 * jnp.tanh(out[0])) * jnp.eye(d, max(1, d - 1))
        return self.scale * self.size * matrix


def plain(rng: np.random.Generator, d: int, noise: str) -> rf.StochasticFlow:
    scale, gain, size = (jnp.asarray(log_uniform(rng, *ends)) for ends in ((0.1, 10), (0.1, 4), (0.1, 1.5)))
    drift = NeuralDrift(Network.random(rng, d, d), gain, scale)
    diffusion = NeuralDiffusion(Network.random(rng, d, d * d), size, scale, noise)
    return rf.StochasticFlow(rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(d), float(scale) * jnp.ones(d)))


class Joined(eqx.Module):
    """Two independent SDEs in a rotated coordinate system."""

    parts: tuple[Any, Any]
    rotation: Array

    def __call__(self, t: Array, x: Array) -> Array:
        u = self.rotation.T @ x
        first, second = self.parts[0](t, u[:2]), self.parts[1](t, u[2:])
        both = (
            jnp.concatenate([first, second])
            if first.ndim == 1
            else jax.scipy.linalg.block_diag(first, second)
        )
        return self.rotation @ both


class JoinedBase(eqx.Module):
    parts: tuple[rf.Normal, rf.Normal]
    rotation: Array

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        keys = jax.random.split(key)
        u = jnp.concatenate(
            [b.sample(key=k, shape=shape) for b, k in zip(self.parts, keys, strict=True)], axis=-1
        )
        return u @ self.rotation.T

    def log_prob(self, x: Array) -> Array:
        u = x @ self.rotation
        return self.parts[0].log_prob(u[..., :2]) + self.parts[1].log_prob(u[..., 2:])


def by_grid(flow: rf.StochasticFlow, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    estimate = flow.estimate(x, key=jax.random.key(0), estimator=rf.density.Grid(), tolerance=0.005)
    return np.asarray(estimate.log_prob, float), np.asarray(estimate.total_error, float)


def neural(rng: np.random.Generator, d: int, noise: str) -> tuple[rf.StochasticFlow, Any]:
    if d < 3:
        flow = plain(rng, d, noise)
        return flow, lambda x: by_grid(flow, x)
    one, other = plain(rng, 2, noise), plain(rng, 1, noise)
    rotation = jnp.asarray(np.linalg.qr(rng.normal(size=(3, 3)))[0])
    sde = rf.ItoSDE(
        Joined((one.sde.drift, other.sde.drift), rotation),
        Joined((one.sde.diffusion, other.sde.diffusion), rotation),
    )

    def refer(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u = x @ np.asarray(rotation)
        found = [by_grid(one, u[:, :2]), by_grid(other, u[:, 2:])]
        return found[0][0] + found[1][0], found[0][1] + found[1][1]

    return rf.StochasticFlow(sde, JoinedBase((one.base, other.base), rotation)), refer


KINDS = {"transformed": transformed, "neural": neural}
GROUPS = [group for group in product(KINDS, (1, 2, 3), NOISES) if group[1:] != (1, "degenerate")]


class Tally(NamedTuple):
    """Results for the points of a group, `(k,)` each, and the seconds for the group."""

    error: np.ndarray
    bar: np.ndarray
    suspect: np.ndarray
    known: np.ndarray  # whether the reference is accurate enough
    seconds: float

    @property
    def wrong(self) -> np.ndarray:
        return self.known & ~self.suspect & ~(np.abs(self.error) <= BARS * self.bar + FLOOR)


def run(group: tuple[str, int, str], count: int, seed: int, seconds: float) -> Tally:
    jax.config.update("jax_enable_x64", True)
    kind, d, noise = group
    rng, rows, began = np.random.default_rng([GROUPS.index(group), seed]), [], time.perf_counter()
    for number in range(count):
        if number and time.perf_counter() - began > seconds:
            break
        flow, refer = KINDS[kind](rng, d, noise)
        x = np.asarray(flow.sample(key=jax.random.key(int(rng.integers(2**31))), shape=(POINTS,)))
        truth, doubt = refer(x)
        estimate = flow.estimate(x, key=jax.random.key(number))
        error = np.asarray(estimate.log_prob) - truth
        bar, suspect = np.asarray(estimate.total_error) + doubt, np.asarray(estimate.suspect)
        rows.append((error, bar, suspect, np.isfinite(truth) & (doubt < 0.02)))
        tally = Tally(*rows[-1], 0.0)
        for i in np.flatnonzero(tally.wrong | tally.known & suspect):
            what = f"{'suspect' if suspect[i] else 'wrong'}: {group} {number}, point {i}"
            print(f"  {what}: {error[i]:+.4f} ± {bar[i]:.4f}, {estimate.method[i]}", flush=True)
    columns = (np.concatenate(column) for column in zip(*rows, strict=True))
    tally = Tally(*columns, time.perf_counter() - began)
    fine = tally.known & ~tally.suspect
    rms = np.sqrt(np.mean(tally.error[fine] ** 2))
    print(
        f"{' '.join(map(str, group)):26s} {fine.size:6d} {tally.wrong.sum():6d} "
        f"{(tally.known & tally.suspect).sum():8d} {(~tally.known).sum():8d} {rms:10.4f} "
        f"{np.median(tally.bar[fine]):11.4f} {tally.seconds:8.0f}",
        flush=True,
    )
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seed", type=int, default=0, help="of the SDEs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit for each group")
    options = parser.parse_args()
    groups = [group for group in GROUPS if group[1] in options.dimensions]
    print(
        "kind, dimension, noise     points  wrong  suspect  unknown  rms error  median bar  seconds",
        flush=True,
    )
    count = -(-options.count // len(GROUPS))
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run, group, count, options.seed, options.seconds) for group in groups]
        tallies = [job.result() for job in jobs]
    known, wrong, suspect = (
        sum(int(np.sum(part(tally))) for tally in tallies)
        for part in (lambda t: t.known, lambda t: t.wrong, lambda t: t.known & t.suspect)
    )
    print(
        f"{known} points: {100 * wrong / known:.2f} % wrong and not flagged (at most 0.5), "
        f"{100 * suspect / known:.2f} % flagged (at most 2)"
    )


if __name__ == "__main__":
    main()
