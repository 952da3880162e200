"""Noise added after training keeps the distribution: `python -m benchmarks.noise [--only banana star moons]`.

Three distributions are fitted by regression only. Then `rf.with_noise` adds noise λ = 0.25, 0.5 and 1, and a
full σ(t, z) from a random network. For each noise, the output is the mean log-likelihood of new points minus
that of the ODE, with the standard error of the difference (default estimator); the number of flagged
estimates; and the p-value of a two-sample test of 4,000 samples of the SDE and 4,000 samples of the ODE
(Kolmogorov–Smirnov along 20 directions with Bonferroni correction). Models are stored in the temporary
directory. The last lines state the requirements and whether they are met.
"""

import argparse
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.kept import FOLDER, kept_file
from benchmarks.tables import standard_error, verdict

NAMES = ("banana", "star", "moons")
ROWS, STEPS, POINTS, SAMPLES, DIRECTIONS = 100_000, 8000, 200, 4000, 20
LOSS, LEVEL = 0.02, 0.01
TABLE: Columns = (("data", 8), ("noise", 8), ("gain", 18), ("flagged", 7), ("p-value", 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    print_header(TABLE)
    lines = []
    for name in parser.parse_args().only:
        lines += list(examine(name, fitted(name)))
    print("\n" + "\n".join(lines), flush=True)


def fitted(name: str) -> rf.tables.Standardised:
    """A density of the distribution, fitted by regression."""
    file = kept_file("noise", name, ROWS, STEPS).with_suffix(".rf")
    if not file.exists():
        distribution, keys = rf.datasets.DISTRIBUTIONS[name], jax.random.split(jax.random.key(0))
        data = np.asarray(distribution.sample(key=keys[0], shape=(ROWS,)))
        model = rf.fit_density(
            data,
            key=keys[1],
            steps=STEPS,
            training=rf.train.TrainingOptions(patience=0),
            flow=rf.tables.FlowOptions(likelihood_steps=0),
        ).model
        FOLDER.mkdir(exist_ok=True)
        rf.save(file, model)
    return rf.load(file)


def noises() -> dict[str, float | rf.FullDiffusion]:
    full = rf.FullDiffusion(2, width=16, scale=0.5, key=jax.random.key(1))
    return {"0.25": 0.25, "0.5": 0.5, "1": 1.0, "full": full}


def examine(name: str, plain: rf.tables.Standardised) -> Iterator[str]:
    keys = jax.random.split(jax.random.key(2), 4)
    x = np.asarray(rf.datasets.DISTRIBUTIONS[name].sample(key=keys[0], shape=(POINTS,)))
    before = np.asarray(plain.log_prob(x, key=keys[1]))
    draw = lambda model, key: np.asarray(model.sample(key=key, shape=(SAMPLES,)))
    own = draw(plain, keys[2])
    for label, noise in noises().items():
        model = dataclasses.replace(plain, flow=rf.with_noise(plain.flow, noise))
        estimate = model.estimate(x, key=keys[1])
        gain = np.asarray(estimate.log_prob) - before
        told = f"{gain.mean():+.4f} ± {standard_error(gain):.4f}"
        p = two_samples(own, draw(model, keys[3]))
        print_row(TABLE, name, label, told, f"{int(jnp.sum(estimate.suspect))}", f"{p:.3f}")
        yield verdict(gain.mean() >= -LOSS, f"{name}, noise {label}: at most {LOSS:g} lost, gain {told}")
        yield verdict(p >= LEVEL, f"{name}, noise {label}: samples pass at level {LEVEL:g}, p = {p:.3f}")


def two_samples(first: np.ndarray, second: np.ndarray) -> float:
    directions = np.random.default_rng(0).normal(size=(first.shape[1], DIRECTIONS))
    pairs = zip((first @ directions).T, (second @ directions).T, strict=True)
    least = min(stats.ks_2samp(*pair).pvalue for pair in pairs)
    return min(1.0, DIRECTIONS * float(least))


if __name__ == "__main__":
    main()
