"""Transition densities against the Fokker–Planck equation: are their error bars honest?

    python -m benchmarks.transition_reference [SDE …]

For spans from 0.01 to 10, transitions between places all over the state space, without those of a log-density
below −12. It prints how many are flagged (`suspect`), how many of all are within three error bars or flagged,
and the largest error of those that are not flagged. References are eigenfunctions of the generator: for
Jacobi its polynomials, for the others on a grid.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from scipy import integrate, special

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.timing import verdict

SPANS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
LEAST = -12.0  # log-density of a transition that counts
SHARE = 0.99
TABLE: Columns = (
    ("SDE", 20),
    ("dt", 6),
    ("count", 6),
    ("flagged", 8),
    ("honest", 7),
    ("largest error", 14),
    ("mean bar", 9),
)


@dataclass(frozen=True)
class Case:
    """An SDE, places to go from and to, and the log-densities `(k, k)` between them after a span."""

    sde: rf.AbstractSDE
    places: np.ndarray
    log_density: Callable[[float], np.ndarray]


def with_even_noise(
    sde, drift: Callable, sigma: float, ends: tuple[float, float], places: list[float]
) -> Case:
    """For dX = drift dt + σ dB, negligible at both ends.

    With the drift f = σ² ∂Φ the kernel is e^{Φ(x₁) − Φ(x₀)} times that of the symmetric generator ½σ²∂² − V,
    V = ½f²/σ² + ½f′, here on a grid with sinc functions, which converge exponentially.
    """
    size = 1 + int((ends[1] - ends[0]) / (0.35 * sigma * np.sqrt(SPANS[0])))
    grid, h = np.linspace(*ends, size, retstep=True)
    slope = jax.vmap(jax.grad(drift))(grid)
    gap = np.arange(size)[:, None] - np.arange(size)[None, :]
    second = -2 * (-1.0) ** gap / np.where(gap == 0, 1, gap) ** 2 / h**2
    np.fill_diagonal(second, -(np.pi**2) / (3 * h**2))
    potential = 0.5 * drift(grid) ** 2 / sigma**2 + 0.5 * slope
    values, vectors = np.linalg.eigh(0.5 * sigma**2 * second - np.diag(np.asarray(potential)))
    x = np.array(places)
    at = np.sinc((x[:, None] - grid[None, :]) / h) @ vectors
    phi = np.array([integrate.quad(lambda u: float(drift(u)), 0, end)[0] for end in x]) / sigma**2

    def log_density(dt: float) -> np.ndarray:
        kernel = (at * np.exp(values * dt)) @ at.T / h
        return np.log(np.maximum(kernel, 1e-300)) + phi[None, :] - phi[:, None]

    return Case(sde, x, log_density)


def jacobi(kappa: float, mu: float, sigma: float) -> Case:
    places = np.array([0.02, 0.1, 0.3, 0.5, 0.8, 0.95])
    return Case(rf.Jacobi(kappa, mu, sigma), places, lambda dt: spectral(kappa, mu, sigma, places, dt))


def spectral(kappa: float, mu: float, sigma: float, x: np.ndarray, dt: float) -> np.ndarray:
    """Σₙ e^{−λₙ dt} Pₙ(x₀) Pₙ(x₁) w(x₁)/|Pₙ|², with w the stationary density, of Beta(a, b)."""
    a, b = 2 * kappa * mu / sigma**2, 2 * kappa * (1 - mu) / sigma**2
    n = np.arange(1 + int(np.sqrt(100 / (sigma**2 * dt))))
    decay = np.exp(-0.5 * sigma**2 * n * (n - 1 + a + b) * dt)
    log_norm = special.gammaln(n + a) + special.gammaln(n + b) - special.gammaln(n + 1)
    log_norm -= special.gammaln(n + a + b - 1) + np.log(np.abs(2 * n + a + b - 1))
    log_norm[0] = special.betaln(a, b)
    # On (0, 1) with weight x^{a − 1}(1 − x)^{b − 1}.
    values = special.eval_jacobi(n[None], b - 1, a - 1, 2 * x[:, None] - 1) * np.exp(-0.5 * log_norm)
    kernel = (values * decay) @ values.T
    weight = (a - 1) * np.log(x) + (b - 1) * np.log1p(-x)
    return np.log(np.maximum(kernel, 1e-300)) + weight[None, :]


def cases() -> dict[str, Case]:
    well = [-1.4, -1.0, -0.5, 0.0, 0.4, 1.0, 1.3]
    sine = rf.ParametricSDE(
        lambda t, x, p: p["a"] * jnp.sin(x), lambda t, x, p: p["s"] * jnp.eye(1), {"a": 1.0, "s": 1.0}
    )
    return {
        "double well, slow": with_even_noise(
            rf.DoubleWell(1.0, 1.0, 0.5), lambda x: x - x**3, 0.5, (-3, 3), well
        ),
        "double well, fast": with_even_noise(
            rf.DoubleWell(2.0, 2.0, 0.8), lambda x: 2 * x - 2 * x**3, 0.8, (-3, 3), well
        ),
        "sine": with_even_noise(sine, jnp.sin, 1.0, (-16, 20), [-4.0, -2.0, 0.0, 1.0, 3.14, 5.0, 8.0]),
        "Jacobi, 8.9": jacobi(1.0, 0.4, 0.3),
        "Jacobi, 1.2": jacobi(1.0, 0.4, 0.8),
        "Jacobi, 0.4": jacobi(0.5, 0.3, 0.9),
    }


def main(only: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    print(
        "Transition densities against references; the number of Jacobi is 2κμ/σ², below 1 zero is reached\n"
    )
    print_header(TABLE)
    honest, total = 0, 0
    for name, case in cases().items():
        if only and not any(word in name for word in only):
            continue
        for dt in SPANS:
            good, count = row(name, case, dt)
            honest, total = honest + good, total + count
    share = honest / total
    print(
        verdict(share >= SHARE, f"{SHARE:.0%} within three error bars or flagged", f"{share:.2%} of {total}")
    )


def row(name: str, case: Case, dt: float) -> tuple[int, int]:
    k = len(case.places)
    reference = case.log_density(dt).ravel()
    x0, x1 = np.repeat(case.places, k)[:, None], np.tile(case.places, k)[:, None]
    counts = reference > LEAST
    found = rf.transition_estimate(case.sde, x0, x1, dt, key=jax.random.key(0))
    error = np.abs(np.asarray(found.log_prob) - reference)[counts]
    bar, flagged = np.asarray(found.standard_error)[counts], np.asarray(found.suspect)[counts]
    good = flagged | (error < 3 * bar + 1e-3)  # the accuracy of the reference
    silent = error[~flagged]
    shown = [f"{silent.max():.3f}", f"{bar[~flagged].mean():.1e}"] if len(silent) else ["", ""]
    print_row(TABLE, name, f"{dt:g}", f"{counts.sum()}", f"{flagged.sum()}", f"{good.mean():.0%}", *shown)
    return int(good.sum()), int(counts.sum())


if __name__ == "__main__":
    main(sys.argv[1:])
