"""Convert chains to ArviZ."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

import roughflow as rf

from .._checks import check_instance

try:
    import arviz
except FileNotFoundError:
    # Once a day, ArviZ announces its successor and records this in the user's cache, through a temporary file
    # that all processes share. If two processes import ArviZ at once, one of them fails; its second attempt
    # succeeds, because the record then exists.
    import arviz

BEFORE_1 = int(arviz.__version__.partition(".")[0]) < 1


def to_arviz(
    chain: rf.mcmc.Chain,
    *,
    names: Sequence[str] | None = None,
    constrain: Callable[[Array], Mapping[str, Array]] | None = None,
) -> Any:
    """Convert one or more chains for ArviZ: an xarray `DataTree`, or an `InferenceData` before ArviZ 1.0.

    **Arguments:** `chain`, the result of `rf.sample_chain`; `names`, the names of the coordinates, or
    `constrain`, a function from samples `(..., d)` to values by name, such as that of `target_from_model`. If
    neither is set, there is one variable, `z`.

    ```python
    import arviz, jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow.interop.arviz import to_arviz

    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2)
    sampler, start = rf.AdjustedSampler(sde, 1.0), jnp.zeros((4, 2))
    chain = rf.sample_chain(sampler, start, key=jax.random.key(0), num_steps=500)
    arviz.rhat(to_arviz(chain, names=["x", "y"]))
    ```
    """
    check_instance("chain", chain, rf.mcmc.Chain, "the result of rf.sample_chain")
    samples = chain.samples if chain.samples.ndim == 3 else chain.samples[None]
    if names is not None and constrain is not None:
        raise TypeError("pass names or constrain, not both")
    if constrain is not None:
        values = dict(constrain(samples))
    elif names is not None:
        if len(set(names)) != samples.shape[-1] or len(names) != len(set(names)):
            given = f"{len(names)} names, {len(set(names))} of them different"
            raise ValueError(f"names must be one for each of {samples.shape[-1]} coordinates, got {given}")
        values = {name: samples[..., i] for i, name in enumerate(names)}
    else:
        values = {"z": samples}
    groups: dict[str, Any] = {"posterior": {name: np.asarray(value) for name, value in values.items()}}
    return arviz.from_dict(**groups) if BEFORE_1 else arviz.from_dict(groups)
