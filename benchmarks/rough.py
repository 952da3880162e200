"""Rough paths and drivers other than Brownian motion: `python -m benchmarks.rough [--only algebra davie …]`.

- algebra: the defects of Chen's relation and of geometricity of each lift.
- davie: strong orders of Davie's scheme with and without Lévy areas for noise that does not commute, and the
  difference from the random ODE along the same path.
- drivers: strong error and bias of log p as functions of n, for three drivers and three SDEs.
- learning: held-out log-likelihood of a neural SDE with the right Hurst exponent and of one with H = ½.
- gaussian: log p of fractional Ornstein–Uhlenbeck processes against their normal distribution.
- hurst: how often the confidence interval of the Hurst exponent covers the truth, in 100 series of 600 steps.
- speed: time for 10,000 paths of 1024 steps of fractional noise, compared with the package fbm.

The last lines state the requirements and whether they are met.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg, stats

import roughflow as rf
from benchmarks.rough_drivers import compare
from benchmarks.rough_learning import learn
from benchmarks.tables import verdict

ROUND_OFF = 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    jax.config.update("jax_enable_x64", True)
    lines = []
    for name in parser.parse_args().only:
        print(f"\n{name}", flush=True)
        lines += list(PARTS[name]())
    print("\n" + "\n".join(lines), flush=True)


def algebra() -> Iterator[str]:
    key = jax.random.key(0)
    brownian = rf.rough.brownian_lift(128, key=key, noise_dimension=3, t1=2.0)
    rough = {"Brownian, Stratonovich": brownian, "Brownian, Itô": brownian.ito()}
    for driver in (
        rf.Legendre(12),
        rf.KarhunenLoeve(12),
        rf.PiecewiseLinear(12),
        rf.FractionalBrownian(0.4, 96),
    ):
        path = driver.sample(key=key, noise_dimension=3, t1=2.0)
        rough[f"{type(driver).__name__}({driver.num_functions})"] = rf.rough.lift(path, 128)
    for name, one in rough.items():
        chen, geometric = float(one.chen_defect()), float(one.geometric_defect())
        print(f"  {name:24} Chen {chen:.1e}   geometric {geometric:.1e}")
        expected = 0.0 if one.geometric else 1.0  # half of the horizon
        holds = chen < ROUND_OFF and abs(geometric - expected) < ROUND_OFF
        yield verdict(holds, f"{name}: Chen's defect {chen:.0e}, geometric defect {geometric:.3g}")
    ito = rough["Brownian, Itô"]
    starts, ends = np.triu_indices(129, 1)
    spans = np.asarray(ito.times[ends] - ito.times[starts])[:, None, None]
    gap = float(np.abs(0.5 * np.asarray(ito.bracket(starts, ends)) - 0.5 * spans * np.eye(3)).max())
    yield verdict(
        gap < ROUND_OFF, f"the Itô lift differs from ½X⊗X by ½(t − s)I for all s and t, up to {gap:.0e}"
    )


def drift(t, z):
    return jnp.stack([0.5 * z[1] - z[0], -z[1]])


def noise(t, z):
    return jnp.stack([jnp.stack([jnp.cos(2 * z[1]), 0.6 * z[1]]), jnp.stack([0.7, jnp.sin(2 * z[0])])])


def rms(a, b) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.sum((a - b) ** 2, axis=-1))))


def davie() -> Iterator[str]:
    steps, count, sizes = 8192, 400, (16, 32, 64, 128, 256, 512)
    z0 = jnp.broadcast_to(jnp.array([0.5, -0.3]), (count, 2))
    path = rf.PiecewiseLinear(steps).sample(key=jax.random.key(0), noise_dimension=2, shape=(count,))
    rough = rf.rough.lift(path, steps)
    models = {"Stratonovich": (rf.StratonovichSDE, rough), "Itô": (rf.ItoSDE, rough.ito())}
    truth = {name: rf.simulate(make(drift, noise), z0, path=one) for name, (make, one) in models.items()}
    for name, (make, one) in models.items():
        errors, flat = [], []
        for n in sizes:
            coarse = one.coarser(steps // n)
            symmetric = 0.5 * (coarse.areas + jnp.swapaxes(coarse.areas, -1, -2))
            without = rf.rough.RoughPath(coarse.times, coarse.increments, symmetric, coarse.geometric)
            errors.append(rms(rf.simulate(make(drift, noise), z0, path=coarse), truth[name]))
            flat.append(rms(rf.simulate(make(drift, noise), z0, path=without), truth[name]))
        order, order_flat = (-np.polyfit(np.log(sizes), np.log(e), 1)[0] for e in (errors, flat))
        for what, error in (("with areas", errors), ("without", flat)):
            print(f"  {name:13}{what:11}" + " ".join(f"{e:9.2e}" for e in error))
        yield verdict(abs(order - 1) < 0.1, f"{name}: strong order {order:.2f} with Lévy areas, about 1")
        yield verdict(
            abs(order_flat - 0.5) < 0.1, f"{name}: strong order {order_flat:.2f} without Lévy areas, about ½"
        )
    base = rf.Normal(jnp.array([0.5, -0.3]), 1e-3)
    few = path.driver.path(path.coefficients[:50], 1.0)
    ode = rf.StochasticFlow(rf.StratonovichSDE(drift, noise), base, driver=few.driver)
    gap = rms(ode.push_forward(z0[:50], few)[0], truth["Stratonovich"][:50])
    apart = rms(truth["Stratonovich"], truth["Itô"])
    yield verdict(gap < 2e-3 * apart, f"Davie and the random ODE: {gap:.1e} apart on {steps} steps")
    euler = rf.simulate(
        rf.ItoSDE(drift, noise), z0, increments=rough.increments, scheme=rf.flow.EulerMaruyama()
    )
    gap = rms(euler, truth["Itô"])
    yield verdict(
        gap < 0.05 * apart,
        f"Davie and Euler–Maruyama, Itô: {gap:.1e} apart; Itô and Stratonovich: {apart:.2f}",
    )


def covariance(rates: np.ndarray, scale: np.ndarray, hurst: float, horizon: float) -> np.ndarray:
    """The covariance of ∫ e^{A(T − t)} S dB, from increments on a fine grid."""
    cells = 3000
    knots = horizon * (0.5 - 0.5 * np.cos(np.pi * np.arange(cells + 1) / cells))
    gap = np.abs(knots[:, None] - knots) ** (2 * hurst)
    steps = 0.5 * (gap[1:, :-1] + gap[:-1, 1:] - gap[1:, 1:] - gap[:-1, :-1])
    left = horizon - 0.5 * (knots[1:] + knots[:-1])
    weights = linalg.expm(rates * left[:, None, None]) @ scale
    return np.einsum("ajm,ab,bkm->jk", weights, steps, weights, optimize=True)


def gaussian() -> Iterator[str]:
    # Only one bundle of paths leads to x.
    horizon, spread, estimator = 1.5, 0.4, rf.PullBack(64, rf.Laplace(num_starts=1))
    models = {
        1: (np.array([[-1.2]]), np.array([[0.7]])),
        2: (np.array([[-1.0, 0.8], [-0.5, -0.4]]), np.array([[0.7, 0.2], [0.0, 0.5]])),
    }
    for d, (rates, scale) in models.items():
        for hurst in (0.4, 0.5, 0.7):
            decay, start = linalg.expm(rates * horizon), np.full(d, 0.3)
            matrix = spread**2 * decay @ decay.T + covariance(rates, scale, hurst, horizon)
            end = stats.multivariate_normal(decay @ start, matrix)
            x = end.mean + 1.5 * np.random.default_rng(0).normal(size=(8, d)) @ np.linalg.cholesky(matrix).T
            sde = rf.StratonovichSDE(
                lambda t, z, a=rates: jnp.asarray(a) @ z, lambda t, z, s=scale: jnp.asarray(s)
            )
            for driver in (rf.driver.FractionalLegendre(hurst, 8), rf.FractionalBrownian(hurst, 32)):
                flow = rf.StochasticFlow(sde, rf.Normal(jnp.asarray(start), spread), horizon, driver)
                log_prob = flow.log_prob(x, key=jax.random.key(0), estimator=estimator)
                gap = float(np.abs(log_prob - end.logpdf(x)).max())
                name = f"{d}-D, H = {hurst:g}, {type(driver).__name__}({driver.num_functions})"
                yield verdict(gap < 5e-3, f"{name}: largest error of log p {gap:.1e} nats")
    for hurst in (0.4, 0.7):
        driver, s = rf.FractionalBrownian(hurst, 64), np.linspace(0, 1, 65)
        values = np.asarray(driver.integrals(s))
        power = lambda a, h=hurst: np.abs(a) ** (2 * h)
        exact = 0.5 * (power(s[:, None]) + power(s) - power(s[:, None] - s))
        gap = float(np.abs(values @ values.T - exact).max())
        yield verdict(gap < 1e-12, f"H = {hurst:g}: error of the covariance on the grid {gap:.0e}")
    ours, other = rf.driver.FractionalLegendre(0.5, 16).integrals(s), rf.Legendre(16).integrals(s)
    gap = float(jnp.abs(ours - other).max())
    yield verdict(gap < 1e-11, f"H = ½: difference from Brownian motion {gap:.0e}")


def hurst() -> Iterator[str]:
    times = 0.05 * np.arange(601)
    for exponent in (0.15, 0.35, 0.7):
        model = rf.FractionalOrnsteinUhlenbeck(1.0, 0.0, 0.5, exponent)
        series = np.asarray(model.sample(0.0, 0.05, 600, key=jax.random.key(1), shape=(100,)))
        fits = [rf.fit_sde(model, times, x, key=jax.random.key(2), num_starts=1) for x in series]
        inside = sum(low < exponent < high for low, high in (fit.confint()["hurst"] for fit in fits))
        found = np.array([fit.params["hurst"] for fit in fits])
        error = np.mean([fit.standard_errors["hurst"] for fit in fits])
        told = f"mean {found.mean():.4f}, deviation {found.std():.4f}, mean standard error {error:.4f}"
        yield verdict(90 <= inside <= 98, f"H = {exponent:g}: {inside} of 100 intervals cover it; {told}")


def speed() -> Iterator[str]:
    try:
        import fbm
    except ImportError:
        print("  needs fbm: pip install fbm")
        return
    paths, steps, some = 10_000, 1024, 200
    draw = lambda seed: rf.driver.fractional_noise(0.4, steps, key=jax.random.key(seed), shape=(paths,))
    draw(0).block_until_ready()
    ours = min(_timed(lambda seed=seed: draw(seed).block_until_ready()) for seed in range(1, 4))
    other = fbm.FBM(n=steps, hurst=0.4, length=1, method="daviesharte")
    other.fgn()
    theirs = min(_timed(lambda: [other.fgn() for _ in range(some)]) for _ in range(3)) * paths / some
    print(f"  {paths} paths of {steps} steps: {ours:.2f} s, fbm {theirs:.1f} s (from {some} paths)")
    yield verdict(
        theirs > 5 * ours, f"fractional noise {theirs / ours:.0f} times as fast as fbm (at least 5)"
    )


def _timed(function: Callable) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


PARTS: dict[str, Callable] = {
    "algebra": algebra,
    "davie": davie,
    "drivers": compare,
    "learning": learn,
    "gaussian": gaussian,
    "hurst": hurst,
    "speed": speed,
}

if __name__ == "__main__":
    main()
