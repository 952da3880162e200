"""Other density estimators for tables: from (train, validation, test, seed) to log-densities of the test
rows.

Settings are chosen by the likelihood of the validation rows. Fast methods are then fitted again to the
training and validation rows together, like the searches of scikit-learn.
"""

import functools
import warnings
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats
from scipy.spatial.distance import cdist
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

COMPONENTS, RIDGES = (1, 2, 3, 5, 8, 12, 20, 30, 40), (1e-6, 1e-4, 1e-2, 1e-1)
FRUITLESS = 2
BANDWIDTHS = np.geomspace(0.02, 1.5, 16)
BLOCK = 256  # number of rows whose distances to all kernels are in memory at a time


def gaussian(train: np.ndarray, validation: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """A Gaussian with the mean and covariance of all rows that are not tested."""
    rows = np.concatenate([train, validation])
    return stats.multivariate_normal(rows.mean(axis=0), np.cov(rows.T)).logpdf(test)


def mixture(train: np.ndarray, validation: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """A mixture of Gaussians with full covariances. Validation chooses their number and the regularisation of
    their variances.

    Each component has at least twice as many rows as its covariance needs. Both searches go upwards. One ends
    when more regularisation is worse, the other when `FRUITLESS` consecutive numbers of components are worse.
    """
    num_rows, dim = train.shape
    counts = [count for count in COMPONENTS if count == 1 or count * 2 * (dim + 1) <= num_rows]
    chosen, most = (1, RIDGES[0]), -np.inf
    for ridge in RIDGES:
        best, fruitless = (-np.inf, 1), 0
        for count in counts:
            score = normals(train, count, ridge, seed).score(validation)
            best, fruitless = ((score, count), 0) if score > best[0] else (best, fruitless + 1)
            if fruitless == FRUITLESS:
                break
        if best[0] < most:
            break
        chosen, most = (best[1], ridge), best[0]
    return normals(np.concatenate([train, validation]), *chosen, seed).score_samples(test)


def normals(rows: np.ndarray, count: int, ridge: float, seed: int) -> GaussianMixture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(count, reg_covar=ridge, random_state=seed).fit(rows)


def kernel(train: np.ndarray, validation: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Gaussian kernels with one bandwidth, isotropic or with the covariance of the rows; validation chooses
    both."""
    scores, factors = {}, (np.eye(train.shape[1]), np.linalg.cholesky(np.cov(train.T)))
    for shape, factor in enumerate(factors):
        means = kernel_log_prob(train, validation, factor, BANDWIDTHS).mean(axis=1)
        scores |= {(shape, i): score for i, score in enumerate(means)}
    shape, i = max(scores, key=scores.__getitem__)
    rows = np.concatenate([train, validation])
    return kernel_log_prob(rows, test, factors[shape], BANDWIDTHS[i : i + 1])[0]


def kernel_log_prob(
    centres: np.ndarray, x: np.ndarray, factor: np.ndarray, bandwidths: np.ndarray
) -> np.ndarray:
    """Log-densities `(bandwidths, rows of x)` for kernels with covariance bandwidth² factor factorᵀ."""
    whiten = np.linalg.inv(factor).T
    out = np.empty((len(bandwidths), len(x)))
    for start in range(0, len(x), BLOCK):
        block = slice(start, start + BLOCK)
        square = cdist(x[block] @ whiten, centres @ whiten, "sqeuclidean")
        least = square.min(axis=1, keepdims=True)
        for i, bandwidth in enumerate(bandwidths):
            near = np.exp((least - square) / (2 * bandwidth**2)).mean(axis=1)
            out[i, block] = np.log(near) - least[:, 0] / (2 * bandwidth**2)
    constant = x.shape[1] * (np.log(bandwidths) + 0.5 * np.log(2 * np.pi))
    return out - constant[:, None] - np.linalg.slogdet(factor)[1]


def flowjax(
    train: np.ndarray, validation: np.ndarray, test: np.ndarray, seed: int, context: int = 0
) -> np.ndarray:
    """The density estimation example of flowjax: a masked autoregressive flow of rational quadratic splines
    with 8 knots on [−4, 4] and learning rate 1e-3, with default settings otherwise. The last `context`
    columns are given.

    `fit_to_data` would split off its own validation rows, but gets the same ones as all other methods.
    """
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train import fit_to_data, loops

    key_flow, key_fit = jax.random.split(jax.random.key(seed))
    own = train.shape[1] - context
    flow = masked_autoregressive_flow(
        key_flow,
        base_dist=Normal(jnp.zeros(own)),
        transformer=RationalQuadraticSpline(knots=8, interval=4),
        cond_dim=context or None,
    )
    pieces = lambda rows: [jnp.asarray(part, jnp.float32) for part in np.split(rows, [own], axis=1)]
    parts = [pieces(rows)[: 2 if context else 1] for rows in (train, validation, test)]
    *parts, tested = parts
    with mock.patch.object(loops, "train_val_split", return_value=parts):
        flow, _ = fit_to_data(key_fit, flow, tuple(parts[0]), show_progress=False, **flowjax_settings())
    return np.asarray(eqx.filter_jit(flow.log_prob)(*tested), float)


@functools.cache
def flowjax_settings() -> dict:
    """The default optimiser (Adam) and loss of `fit_to_data`, created once, so that the next fold compiles
    less."""
    from flowjax.train.losses import MaximumLikelihoodLoss

    return {"optimizer": optax.adam(1e-3), "loss_fn": MaximumLikelihoodLoss()}
