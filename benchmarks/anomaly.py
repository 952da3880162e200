"""Anomaly detection on the tables of a folder: `python -m benchmarks.anomaly FOLDER`.

Each table is a .npz file with rows `X` and labels `y` (1 for anomalies), as in ADBench. Half of the ordinary
rows are used for training; the other half and the anomalies are scored. The columns are the AUROC of
`StochasticFlowOutlier`, of the distance to the fifth nearest neighbour (standardised columns) and of
scikit-learn's isolation forest, averaged over the seeds. For columns with "+5 %", 5 % of the training rows
are anomalies, which are not scored, and `StochasticFlowOutlier` has `contamination=0.05`. `--density` adds
the log-density of `rf.fit_density` with default settings, which takes minutes per table.

`--table K` runs only the K-th table.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

import roughflow as rf
from roughflow.interop.sklearn import StochasticFlowOutlier

NEIGHBOUR = 5
CONTAMINATION = 0.05
Scorer = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # higher for anomalies


def ours(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    return -StochasticFlowOutlier(random_state=seed).fit(train).score_samples(test)


def ours_robust(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    outliers = StochasticFlowOutlier(contamination=CONTAMINATION, random_state=seed)
    return -outliers.fit(train).score_samples(test)


def density(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    fitted = rf.fit_density(train, key=jax.random.key(seed), progress=False)
    return -np.asarray(fitted.log_prob(test, violation="penalty"), float)


def neighbour(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    del seed
    loc, scale = train.mean(axis=0), train.std(axis=0)
    scale[scale == 0] = 1
    search = NearestNeighbors(n_neighbors=NEIGHBOUR).fit((train - loc) / scale)
    return search.kneighbors((test - loc) / scale)[0][:, -1]


def forest(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    return -IsolationForest(random_state=seed).fit(train).score_samples(test)


def split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of training rows, of anomalies to add to them, and of rows to score."""
    rng = np.random.default_rng(seed)
    ordinary, anomalies = (rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1))
    half = len(ordinary) // 2
    added = min(round(CONTAMINATION / (1 - CONTAMINATION) * half), len(anomalies) // 2)
    return ordinary[:half], anomalies[:added], np.concatenate([ordinary[half:], anomalies])


def areas(rows: np.ndarray, labels: np.ndarray, scorers: dict[str, Scorer], seed: int) -> list[float]:
    train, added, test = split(labels, seed)
    rest = np.setdiff1d(test, added)
    values = [roc_auc_score(labels[test], run(rows[train], rows[test], seed)) for run in scorers.values()]
    mixed = rows[np.concatenate([train, added])]
    robust = {**scorers, "roughflow": ours_robust}
    return values + [roc_auc_score(labels[rest], run(mixed, rows[rest], seed)) for run in robust.values()]


def main(arguments: argparse.Namespace) -> None:
    scorers: dict[str, Scorer] = {"roughflow": ours, "neighbour": neighbour, "forest": forest}
    if arguments.density:
        scorers["density"] = density
    files = sorted(Path(arguments.folder).glob("*.npz"))
    files = files if arguments.table is None else files[arguments.table : arguments.table + 1]
    names = [*scorers, *(f"{name} +5 %" for name in scorers)]
    print(f"{'table':<20}" + "".join(f"{name:>15}" for name in names), flush=True)
    results = []
    for file in files:
        with np.load(file) as table:
            rows, labels = table["X"].astype(float), table["y"]
        seeds = range(arguments.seeds)
        results.append(np.mean([areas(rows, labels, scorers, seed) for seed in seeds], axis=0))
        print(f"{file.stem:<20}" + "".join(f"{value:15.3f}" for value in results[-1]), flush=True)
    table = np.array(results)
    print(f"{'mean':<20}" + "".join(f"{value:15.3f}" for value in table.mean(axis=0)))
    for start, label in ((0, "clean"), (len(scorers), "with 5 % of anomalies")):
        gap = table[:, start] - table[:, start + 1 : start + 3].max(axis=1)
        print(f"worst difference from the better of neighbour and forest, {label}: {gap.min():.3f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", type=int)
    parser.add_argument("--density", action="store_true")
    main(parser.parse_args())
