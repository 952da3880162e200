"""Maps between the parameters of an SDE and an unconstrained vector."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import check_fields, check_instance
from .._functions import Opened

Entry = tuple[int, tuple[int, ...]]  # index of a leaf, and index within that leaf


class Domain(eqx.Module):
    """The open interval in which a parameter lies; `lower` and `upper` may be infinite.

    With `triangular`, the parameter is a lower triangular matrix whose diagonal entries lie in the range.

    ```python
    import roughflow as rf

    positive, share = rf.series.Domain(lower=0.0), rf.series.Domain(lower=0.0, upper=1.0)
    ```
    """

    lower: float = eqx.field(static=True, default=-np.inf)
    upper: float = eqx.field(static=True, default=np.inf)
    triangular: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_fields(self)
        if not self.lower < self.upper:
            raise ValueError(f"lower must be below upper, got {self.lower} and {self.upper}")

    def to_free(self, value: np.ndarray) -> np.ndarray:
        """Map a value inside the domain to an unconstrained value."""
        if np.isfinite(self.lower) and np.isfinite(self.upper):
            part = (value - self.lower) / (self.upper - self.lower)
            return np.log(part) - np.log1p(-part)
        if np.isfinite(self.lower):
            return np.log(value - self.lower)
        return -np.log(self.upper - value) if np.isfinite(self.upper) else value

    def from_free(self, free: Array) -> Array:
        if np.isfinite(self.lower) and np.isfinite(self.upper):
            return self.lower + (self.upper - self.lower) * jax.nn.sigmoid(free)
        if np.isfinite(self.lower):
            return self.lower + jnp.exp(free)
        return self.upper - jnp.exp(-free) if np.isfinite(self.upper) else free

    def log_slope(self, free: Array) -> Array:
        """The logarithm of the derivative of `from_free`."""
        if np.isfinite(self.lower) and np.isfinite(self.upper):
            return np.log(self.upper - self.lower) + jax.nn.log_sigmoid(free) + jax.nn.log_sigmoid(-free)
        if np.isfinite(self.lower):
            return free
        return -free if np.isfinite(self.upper) else jnp.zeros_like(free)

    def contains(self, value: np.ndarray) -> bool:
        return bool(np.all(np.isfinite(value) & (value > self.lower) & (value < self.upper)))


ANY = Domain()
POSITIVE = Domain(lower=0.0)
UNIT = Domain(lower=0.0, upper=1.0)
CORRELATION = Domain(lower=-1.0, upper=1.0)
TRIANGULAR = Domain(lower=0.0, triangular=True)


class Parameters(eqx.Module):
    """Names, domains and positions of all parameters of an SDE, with maps to and from a vector of free
    parameters.

    A free parameter is unconstrained and dimensionless: the logarithm or logit of a bounded parameter, or an
    unbounded parameter divided by `scale`.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    domains: tuple[Domain, ...] = eqx.field(static=True)
    entries: tuple[Entry, ...] = eqx.field(static=True)
    template: Any
    scale: np.ndarray  # (p,), 1 for bounded parameters

    @staticmethod
    def of(sde: eqx.Module, domains: Mapping[str, Domain]) -> "Parameters":
        """Collect all float leaves of `sde`. The keys of `domains` are full names of leaves, such as
        `exchange.room walls`, or their last parts."""
        for name, domain in domains.items():
            check_instance(f"domains[{name!r}]", domain, Domain, "an rf.series.Domain")
        leaves, _ = jax.tree_util.tree_flatten_with_path(sde)
        names, kinds, entries, known = [], [], [], set()
        for i, (path, leaf) in enumerate(leaves):
            if not (eqx.is_inexact_array(leaf) or isinstance(leaf, float)):
                continue
            field = _name(path)
            top = _name(path[-1:])
            known |= {field, top}
            domain = domains.get(field, domains.get(top, ANY))
            for place in np.ndindex(np.shape(leaf)):
                row, column = place if domain.triangular and place else (0, 0)
                if column > row:
                    continue
                names.append(field + (f"[{','.join(map(str, place))}]" if place else ""))
                kinds.append(Domain(domain.lower, domain.upper) if row == column else ANY)
                entries.append((i, place))
        if wrong := set(domains) - known:
            raise ValueError(
                f"no parameter is called {', '.join(sorted(wrong))}; the parameters are {', '.join(names)}"
            )
        return Parameters(tuple(names), tuple(kinds), tuple(entries), sde, np.ones(len(names)))

    def rescaled(self, factor: np.ndarray) -> "Parameters":
        """Multiply the scale of each unbounded parameter by `factor` `(p,)`."""
        unbounded = np.array([domain == ANY for domain in self.domains])
        return dataclasses.replace(self, scale=np.where(unbounded, factor, 1.0) * self.scale)

    def without(self, fixed: Sequence[str]) -> tuple["Parameters", np.ndarray]:
        """Remove the parameters inside the fields `fixed`, which keep their values in the template. Return
        the remaining parameters, and a mask `(p,)` that selects them."""
        fixed = (fixed,) if isinstance(fixed, str) else fixed
        for field in fixed:
            if not any(_within(name, field) for name in self.names):
                raise ValueError(
                    f"no parameter is called {field}; the parameters are {', '.join(self.names)}"
                )
        kept = np.array([not any(_within(name, field) for field in fixed) for name in self.names])
        if not kept.any():
            raise ValueError("all parameters are fixed, so there are none to fit")
        of = lambda items: tuple(item for item, keep in zip(items, kept, strict=True) if keep)
        return Parameters(
            of(self.names), of(self.domains), of(self.entries), self.template, self.scale[kept]
        ), kept

    def penalties(self, penalty: Mapping[str, float]) -> np.ndarray:
        """The vector λ `(p,)` of the penalty ½ Σ λᵢ θᵢ², given λ by field name. All parameters inside a
        field, such as a network, share one λ."""
        check_instance("penalty", penalty, Mapping, "a dictionary of positive numbers by name")
        found = np.zeros(len(self.names))
        for field, strength in penalty.items():
            if not (np.isfinite(strength) and strength > 0):
                raise ValueError(f"the penalty of {field} must be positive, got {strength}")
            inside = [i for i, name in enumerate(self.names) if _within(name, field)]
            if not inside:
                fields = dict.fromkeys(re.split(r"[.\[]", name)[0] for name in self.names)
                raise ValueError(f"no parameter is called {field}; the parameters are {', '.join(fields)}")
            if bounded := [self.names[i] for i in inside if self.domains[i] != ANY]:
                raise ValueError(f"{bounded[0]} is bounded: penalties require unbounded parameters")
            found[inside] = strength
        return found

    def values(self, sde: Any) -> np.ndarray:
        """The parameter values `(p,)` of an SDE that has the structure of the template."""
        leaves = jax.tree.leaves(sde)
        return np.array([np.asarray(leaves[i], float)[place] for i, place in self.entries])

    def to_free(self, values: np.ndarray) -> np.ndarray:
        for name, domain, value in zip(self.names, self.domains, values, strict=True):
            if not domain.contains(value):
                raise ValueError(
                    f"{name} must lie between {domain.lower:g} and {domain.upper:g}, got {value:g}"
                )
        return np.array([float(d.to_free(v)) for d, v in zip(self.domains, values, strict=True)]) / self.scale

    def from_free(self, free: Array) -> Array:
        """Map free parameters `(..., p)` to parameter values `(..., p)`."""
        scaled = free * jnp.broadcast_to(jnp.asarray(self.scale, free.dtype), free.shape)
        return jnp.stack([domain.from_free(scaled[..., i]) for i, domain in enumerate(self.domains)], axis=-1)

    def log_slope(self, free: Array) -> Array:
        """The log-determinant of the Jacobian of `from_free`."""
        scale = jnp.asarray(self.scale, free.dtype)
        slopes = [d.log_slope(free[i] * scale[i]) for i, d in enumerate(self.domains)]
        return sum(slopes, jnp.sum(jnp.log(scale)))

    def sde(self, values: Array) -> Any:
        """The SDE with the parameter values `(p,)`."""
        # In compiled programs, the constants inside users' functions are leaves, which must not be counted.
        leaves, structure = jax.tree.flatten(self.template, is_leaf=lambda one: isinstance(one, Opened))
        for i in dict.fromkeys(i for i, _ in self.entries):
            mine = np.array([k for k, (j, _) in enumerate(self.entries) if j == i])
            places = tuple(np.array([self.entries[k][1] for k in mine]).T)
            leaf = jnp.asarray(leaves[i], values.dtype)
            leaves[i] = leaf.at[places].set(values[mine]) if places else values[mine[0]]
        return jax.tree.unflatten(structure, leaves)


def _within(name: str, field: str) -> bool:
    return name == field or name.startswith((f"{field}.", f"{field}["))


def _name(path: tuple) -> str:
    return (
        "".join(jax.tree_util.keystr((part,)) for part in path)
        .lstrip(".")
        .replace("['", ".")
        .replace("']", "")
        .lstrip(".")
    )
