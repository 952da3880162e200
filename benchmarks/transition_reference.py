"""Calibration of the error bars of transition densities, against the Fokker–Planck equation.

    python -m benchmarks.transition_reference [SDE …]

One-dimensional transitions over times from 0.01 to 10 connect points all over the state space; those with a
log-density below −12 are omitted. Two SDEs in two dimensions have transitions over time one with three keys.
The output is the number of flagged estimates (`suspect`), the number of estimates within three error bars or
flagged, and the largest error of those that are not flagged. References are eigenfunctions of the generator
on a grid, and closed forms.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from scipy import integrate, linalg, stats
from scipy.interpolate import CubicSpline

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.fokker_planck import line_kernel
from benchmarks.timing import verdict

SPANS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
LEAST = -12.0  # minimum log-density of a transition that counts
SHARE = 0.99
FLAGGED = 0.02
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
    """An SDE, starting and end points, and the log-densities `(k, k)` of transitions between them."""

    sde: rf.AbstractSDE
    places: np.ndarray
    log_density: Callable[[float], np.ndarray]


@dataclass(frozen=True)
class PlaneCase:
    """An SDE in two dimensions, its start, and points with their log-densities after time one."""

    sde: rf.AbstractSDE
    start: np.ndarray
    x: np.ndarray
    log_density: Callable[[np.ndarray], np.ndarray]


def with_even_noise(
    sde, drift: Callable, sigma: float, ends: tuple[float, float], places: list[float]
) -> Case:
    """The case of dX = drift dt + σ dB with a density that is negligible at both ends."""
    x = np.array(places)
    return Case(sde, x, line_kernel(drift, sigma, ends, SPANS[0], x, x))


def jacobi(kappa: float, mu: float, sigma: float) -> Case:
    """The Jacobi process by finite volumes in y, where x = sin²(y/2) and the noise is constant, with
    reflection at both ends."""
    places = np.array([0.02, 0.1, 0.3, 0.5, 0.8, 0.95])
    y = 2 * np.arcsin(np.sqrt(places))

    def drift(y: np.ndarray) -> np.ndarray:
        x = np.sin(y / 2) ** 2
        return (kappa * (mu - x) - sigma**2 / 4 * (1 - 2 * x)) / np.sqrt(x * (1 - x))

    def log_density(dt: float) -> np.ndarray:
        coarse, fine = (
            np.stack([finite_volumes(drift, sigma, start, dt, y, size) for start in y])
            for size in (1500, 3000)
        )
        # Densities below the rounding errors of the larger ones are unknown.
        value = np.where(np.minimum(coarse, fine) > LEAST - 4, (4 * fine - coarse) / 3, -np.inf)
        return value - 0.5 * np.log(places * (1 - places))[None, :]

    return Case(rf.Jacobi(kappa, mu, sigma), places, log_density)


def finite_volumes(
    drift: Callable, sigma: float, start: float, dt: float, ends: np.ndarray, size: int
) -> np.ndarray:
    """log p of dY = drift dt + σ dB on (0, π) after dt: rates between cells are in detailed balance with the
    stationary density, and their symmetric generator is exponentiated with its eigenvectors."""
    edges = np.linspace(1e-9, np.pi - 1e-9, size + 1)
    centres, h = 0.5 * (edges[1:] + edges[:-1]), edges[1] - edges[0]
    change = (drift(centres[:-1]) + 4 * drift(edges[1:-1]) + drift(centres[1:])) / 3 * h / sigma**2
    log_stationary = np.append(0, np.cumsum(change))
    rate = 0.5 * sigma**2 / h**2
    diagonal = np.zeros(size)
    diagonal[:-1] -= rate * np.exp(0.5 * change)
    diagonal[1:] -= rate * np.exp(-0.5 * change)
    values, vectors = eigen(diagonal.tobytes(), rate)
    root = np.exp(0.5 * (log_stationary - log_stationary.max()))
    # Cubic interpolation in start and end, so that only the discretisation error remains for the
    # extrapolation.
    near = int(np.searchsorted(centres, start)) + np.arange(-2, 2)
    weights = [
        np.prod([(start - centres[k]) / (centres[j] - centres[k]) for k in near if k != j]) for j in near
    ]
    density = sum(
        weight * (vectors @ (np.exp(values * dt) * vectors[j])) * root / root[j]
        for j, weight in zip(near, weights, strict=True)
    )
    logs, around = np.log(np.maximum(density / h, 1e-300)), np.searchsorted(centres, ends)[:, None]
    around = np.clip(around + np.arange(-3, 3), 0, size - 1)
    return np.array([CubicSpline(centres[i], logs[i])(end) for i, end in zip(around, ends, strict=True)])


@functools.cache
def eigen(diagonal: bytes, rate: float) -> tuple[np.ndarray, np.ndarray]:
    values = np.frombuffer(diagonal)
    return linalg.eigh_tridiagonal(values, np.full(len(values) - 1, rate))


def plane_cases() -> dict[str, PlaneCase]:
    swirl = np.array([[-0.2, -1.1], [1.1, -0.2]])

    def noise(t, z):
        cos, sin = jnp.cos(2.6 * z[0]), jnp.sin(2.6 * z[0])
        return 0.4 * jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])

    def turned(x: np.ndarray) -> np.ndarray:
        """Noise that only rotates gives the distribution of a linear Itô SDE."""
        spread = 0.4 * np.sqrt((1 - np.exp(-0.4)) / 0.4)
        return stats.norm.logpdf(x, linalg.expm(swirl) @ np.array([1.0, 0.0]), spread).sum(axis=-1)

    def bundles(x: np.ndarray) -> np.ndarray:
        """Transitions from (0, 0) to (0, v): the density of 3∫Z₁² = Σ ωⱼ² 3/(jπ)², from its characteristic
        function."""
        s, size = np.linspace(0, 40, 8001), 3 / (np.pi * np.arange(1, 4001)) ** 2
        log_phi = -0.5 * sum(np.log1p(-2j * s * one) for one in size) - 0.045 * s**2
        waves = np.exp(log_phi - 1j * np.outer(x[:, 1], s)).real
        return np.log(integrate.trapezoid(waves, s, axis=1) / np.pi) + stats.norm.logpdf(0)

    rotation = rf.ItoSDE(lambda t, z: jnp.asarray(swirl) @ z, noise)
    two = rf.ItoSDE(
        lambda t, z: jnp.stack([0 * z[0], 3 * z[0] ** 2]), lambda t, z: jnp.diag(jnp.array([1.0, 0.3]))
    )
    around = np.array([[0.4, 0.7], [0.0, 1.0], [0.8, 0.3], [-0.2, 0.4], [0.9, 1.2]])
    return {
        "rotation": PlaneCase(rotation, np.array([1.0, 0.0]), around, turned),
        "two bundles": PlaneCase(two, np.zeros(2), np.array([[0.0, 1.0], [0.0, 3.0]]), bundles),
    }


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
        "Transition densities against references; the number after the name Jacobi is 2κμ/σ² (below 1, paths "
        "reach zero)\n"
    )
    print_header(TABLE)
    counts = np.zeros(3, int)
    for name, case in cases().items():
        if not only or any(word in name for word in only):
            counts += np.sum([row(name, case, dt) for dt in SPANS], axis=0)
    for name, case in plane_cases().items():
        if not only or any(word in name for word in only):
            counts += np.sum([plane_row(name, case, seed) for seed in range(3)], axis=0)
    honest, flagged = counts[:2] / counts[2]
    print(
        verdict(
            honest >= SHARE,
            f"{SHARE:.0%} within three error bars or flagged",
            f"{honest:.2%} of {counts[2]}",
        )
    )
    print(verdict(flagged <= FLAGGED, f"at most {FLAGGED:.0%} flagged", f"{flagged:.2%}"))


def row(name: str, case: Case, dt: float) -> tuple[int, int, int]:
    k = len(case.places)
    reference = case.log_density(dt).ravel()
    x0, x1 = np.repeat(case.places, k)[:, None], np.tile(case.places, k)[:, None]
    counts = reference > LEAST
    found = rf.transition_estimate(case.sde, x0[counts], x1[counts], dt, key=jax.random.key(0))
    return compared(name, dt, found, reference[counts])


def plane_row(name: str, case: PlaneCase, seed: int) -> tuple[int, int, int]:
    found = rf.transition_estimate(case.sde, case.start, case.x, 1.0, key=jax.random.key(seed))
    return compared(name, 1.0, found, case.log_density(case.x))


def compared(name: str, dt: float, found: rf.Estimate, reference: np.ndarray) -> tuple[int, int, int]:
    """Print a row. Return the numbers of estimates within three error bars or flagged, of flagged ones, and
    of all."""
    error = np.abs(np.asarray(found.log_prob) - reference)
    bar, flagged = np.asarray(found.total_error), np.asarray(found.suspect)
    good = flagged | (error < 3 * bar + 1e-3)  # 1e-3 is the accuracy of the reference
    silent = error[~flagged]
    shown = [f"{silent.max():.3f}", f"{bar[~flagged].mean():.1e}"] if len(silent) else ["", ""]
    print_row(TABLE, name, f"{dt:g}", f"{len(good)}", f"{flagged.sum()}", f"{good.mean():.0%}", *shown)
    return int(good.sum()), int(flagged.sum()), len(good)


if __name__ == "__main__":
    main(sys.argv[1:])
