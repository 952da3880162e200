"""Small tables, and tables with copies of rows: the score of a default fit compared with that of new rows.

1. Random tables of 4 to 60 rows and 1 to 8 columns, from Gaussian, correlated, skewed, heavy-tailed and mixed
   distributions: the mean log-density of 2,000 new rows, compared with that of the sample Gaussian (whose
   covariance has the better of the denominators n and n − 1).
2. Bootstrapped, upsampled and joined tables: `fitted.score` compared with the score of 4,000 new rows.

`python -m benchmarks.small_tables [--tables 30] [--seed 0]`
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from scipy import stats

import roughflow as rf

ROWS, COLUMNS = (4, 60), (1, 8)
NEW_ROWS, NEW_COPIES = 2000, 4000
Draw = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(rng: np.random.Generator, columns: int) -> Draw:
    scale = rng.lognormal(size=columns)
    return lambda rng, count: scale * rng.normal(size=(count, columns))


def correlated(rng: np.random.Generator, columns: int) -> Draw:
    mix = rng.normal(size=(columns, columns)) + 0.5 * np.eye(columns)
    return lambda rng, count: rng.normal(size=(count, columns)) @ mix


def skewed(rng: np.random.Generator, columns: int) -> Draw:
    sigma = rng.uniform(0.4, 1.0, columns)
    return lambda rng, count: np.exp(sigma * rng.normal(size=(count, columns)))


def heavy_tailed(rng: np.random.Generator, columns: int) -> Draw:
    freedom = rng.uniform(3.0, 6.0)
    return lambda rng, count: rng.standard_t(freedom, size=(count, columns))


def mixture(rng: np.random.Generator, columns: int) -> Draw:
    centres = rng.normal(0, 2.5, (2, columns))
    return lambda rng, count: centres[rng.integers(0, 2, count)] + rng.normal(size=(count, columns))


FAMILIES = (gaussian, correlated, skewed, heavy_tailed, mixture)


def random_table(seed: int) -> tuple[str, np.ndarray, np.ndarray]:
    """The name of a distribution, a table from it, and new rows."""
    rng = np.random.default_rng(seed)
    make = FAMILIES[seed % len(FAMILIES)]
    rows, columns = (int(rng.integers(low, high + 1)) for low, high in (ROWS, COLUMNS))
    draw = make(rng, columns)
    return make.__name__, draw(rng, rows), draw(rng, NEW_ROWS)


def sample_gaussian(rows: np.ndarray, new: np.ndarray) -> float:
    """The mean log-density of new rows; −∞ if the covariance is singular."""
    if len(rows) <= rows.shape[1]:
        return -np.inf
    covariances = (np.atleast_2d(np.cov(rows.T, bias=bias)) for bias in (True, False))
    normal: Any = stats.multivariate_normal
    fits = (normal(rows.mean(axis=0), covariance) for covariance in covariances)
    return max(float(fit.logpdf(new).mean()) for fit in fits)


def copies(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A table with copies, and new rows of the same distribution."""
    covariance = np.array([[1.0, 0.5], [0.5, 1.0]])
    rows, new = (rng.multivariate_normal([0, 0], covariance, count) for count in (100, NEW_COPIES))
    if kind == "bootstrapped":
        return rows[rng.integers(0, 100, 200)], new
    if kind == "upsampled":
        return np.repeat(rows, 20, axis=0), new
    joined = np.column_stack([np.repeat(rows, 5, axis=0), rng.normal(size=500)])
    return joined, np.column_stack([new, rng.normal(size=NEW_COPIES)])


def fit(rows: np.ndarray, seed: int) -> rf.FittedDensity:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rf.fit_density(rows, key=jax.random.key(seed), progress=False)


def small(tables: int, seed: int) -> None:
    print("table              family     score   new rows  Gaussian   gain")
    gains, errors = [], []
    for i in range(seed, seed + tables):
        name, rows, new = random_table(i)
        fitted = fit(rows, i)
        reached, other = float(np.mean(fitted.log_prob(new))), sample_gaussian(rows, new)
        assert fitted.score is not None
        gains.append(reached - other)
        errors.append((reached - fitted.score.mean) / fitted.score.standard_error)
        shape = f"{name} {len(rows)} × {rows.shape[1]}"
        told = f"{fitted.score.mean:8.3f} {reached:9.3f} {other:9.3f} {gains[-1]:7.3f}"
        print(f"{shape:<19}{fitted.family:<10}{told}", flush=True)
    gains = np.array(gains)
    finite = gains[np.isfinite(gains)]
    print(f"{len(gains) - len(finite)} of {len(gains)} tables have too few rows for a sample Gaussian")
    middle, worst = np.median(finite), finite.min()
    print(f"mean gain {finite.mean():.3f} nats per row, median {middle:.3f}, worst {worst:.3f}")
    within = f"{np.mean(np.abs(errors) < 2):.0%}"
    print(f"gain below 0 in {np.sum(gains < 0)} tables; score within 2 standard errors in {within}")


def repeated(seed: int) -> None:
    print("\ntable         family     score ± error     new rows ± error   difference / error   seconds")
    for kind in ("bootstrapped", "upsampled", "joined"):
        rows, new = copies(kind, np.random.default_rng(seed))
        began = time.perf_counter()
        fitted = fit(rows, seed)
        seconds = time.perf_counter() - began
        values, score = np.asarray(fitted.log_prob(new), float), fitted.score
        assert score is not None
        error = values.std() / len(values) ** 0.5
        gap = (score.mean - values.mean()) / np.hypot(error, score.standard_error)
        told = f"{score.mean:.3f} ± {score.standard_error:.3f}    {values.mean():.3f} ± {error:.3f}"
        print(f"{kind:<14}{fitted.family:<10}{told}{gap:15.2f}{seconds:16.0f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    small(arguments.tables, arguments.seed)
    repeated(arguments.seed)
