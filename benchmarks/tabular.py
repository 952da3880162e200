"""Densities of small tables: `python -m benchmarks.tabular [--only iris wine breast_cancer]`.

scikit-learn's iris, wine and breast-cancer data, standardised, five folds: the mean log-likelihood of test
rows under the default `StochasticFlowDensity`, beside a Gaussian and a Gaussian mixture whose number of
components (1 to 8, full covariances) is chosen by the BIC. Needs scikit-learn.
"""

import argparse
import time

import numpy as np
from scipy import stats
from sklearn import datasets
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import KFold

from roughflow.interop.sklearn import StochasticFlowDensity

TABLES = ("iris", "wine", "breast_cancer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)
    print(
        f"{'table':14}{'rows':>6}{'columns':>8}{'Gaussian':>10}{'mixture':>10}{'roughflow':>11}"
        f"{'s a fold':>10}"
    )
    for name in parser.parse_args().only:
        rows = getattr(datasets, f"load_{name}")().data
        rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
        began = time.perf_counter()
        scores = np.array([fold(rows[a], rows[b], i) for i, (a, b) in enumerate(folds(rows))])
        seconds = (time.perf_counter() - began) / len(scores)
        means = "".join(
            f"{value:>{width}.3f}" for value, width in zip(scores.mean(axis=0), (10, 10, 11), strict=True)
        )
        print(f"{name:14}{rows.shape[0]:>6}{rows.shape[1]:>8}{means}{seconds:>10.0f}", flush=True)


def folds(rows: np.ndarray):
    return KFold(5, shuffle=True, random_state=0).split(rows)


def fold(train: np.ndarray, test: np.ndarray, seed: int) -> list[float]:
    """Test log-likelihoods of the Gaussian, the mixture and the flow."""
    normal = stats.multivariate_normal(train.mean(axis=0), np.cov(train.T, bias=True), allow_singular=True)
    mixtures = [GaussianMixture(k, random_state=seed, reg_covar=1e-4).fit(train) for k in range(1, 9)]
    mixture = min(mixtures, key=lambda m: m.bic(train))
    flow = StochasticFlowDensity(random_state=seed).fit(train)
    scores = [float(normal.logpdf(test).mean()), mixture.score(test), flow.score(test)]
    print("  fold", seed, *(f"{score:.3f}" for score in scores), flush=True)
    return scores


if __name__ == "__main__":
    main()
