"""From a table of numbers to a density."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key
from ..flow import ExactDivergence, neural_flow
from ._fit import Fitted, fit
from ._maximum_likelihood import MaximumLikelihood
from ._standardised import Standardised, standardising

NOISE, FEW = 0.5, 4  # the noise where none is named, and the dimensions up to which there is any


def fit_density(
    data: Array | np.ndarray,
    *,
    key: PRNGKeyArray,
    noise: float | None = None,
    width: int = 64,
    depth: int = 3,
    num_paths: int = 4,
    columns: Sequence[str] = (),
    validation: float | Array | np.ndarray = 0.1,
    patience: int | None = 5,
    **settings: Any,
) -> Fitted:
    """Standardise the data, fit an `rf.neural_flow` to them, and return it in the data's own units.

    Before the first step the model is the normal law with the mean and covariance of the data, and the
    model returned is the best on the part of the data set aside: little data leave it near that law.

    **Arguments:** `data`, one row a sample; `noise`, `width` and `depth` of `rf.neural_flow`; `num_paths` of
    `rf.MaximumLikelihood`, where the divergence is exact; `columns`, names to keep with the model;
    `validation`, `patience` and other `settings` of `rf.fit`. The `model` of the result is an
    `rf.Standardised`.

    `noise` is 0.5 in up to four dimensions unless told otherwise and 0 beyond: in many dimensions the
    paths that lead to a row are hard to find, for training and for every density after it.

    ```python
    import jax
    import roughflow as rf

    data = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(500,))
    fitted = rf.fit_density(data, key=jax.random.key(1), width=8, depth=1, steps=10, progress=False)
    fitted.model.log_prob(data[:5], key=jax.random.key(2))
    ```
    """
    key_model, key_fit = jax.random.split(check_key(key))
    loc, matrix = standardising(data)
    rows = np.asarray(data, float)
    if isinstance(validation, float | int) and round(validation * len(rows)) == 0:
        patience = None  # too few rows to set any aside
    noise = (NOISE if rows.shape[1] <= FEW else 0.0) if noise is None else noise
    flow = neural_flow(rows.shape[1], noise=noise, width=width, depth=depth, key=key_model)
    model = Standardised(flow, loc, matrix, tuple(columns))
    fitted = fit(
        flow,
        model.standardise(rows),
        key=key_fit,
        objective=MaximumLikelihood(num_paths if isinstance(flow.divergence, ExactDivergence) else 1),
        validation=validation if isinstance(validation, float | int) else model.standardise(validation),
        patience=patience,
        **settings,
    )
    # Probes are for training: a density is worth its exact divergence.
    flow = eqx.tree_at(lambda f: f.divergence, fitted.model, ExactDivergence())
    return dataclasses.replace(fitted, model=eqx.tree_at(lambda m: m.flow, model, flow))
