"""Panels in which each series has its own parameters, drawn from an estimated population."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array

from .._checks import check_instance, check_positive
from .._programs import jit
from ..transition import AbstractCoordinates, Effort, Transition
from ._likelihood import AbstractLikelihood, Likelihood, term_scores
from ._parameters import ANY, POSITIVE, Parameters
from ._search import LOSS

SPREAD = "_spread"  # suffix of the name of a population's standard deviation
NODES = (15, 9, 5)  # Gauss–Hermite nodes per parameter, for one, two and three varying parameters
ROUNDS, MOVED = 8, 1e-3  # rounds of adaptive quadrature; it stops when mean and deviation change by less
VANISHED = 1e-3  # information on the logarithm of a spread below which the spread has vanished
GRID = np.logspace(-0.5, 3, 8)  # spreads, relative to the standard error of the parameter given one series
FACTOR = 0.5  # nodes are placed again when the logarithm of a spread has changed by more


class LogNormal(eqx.Module):
    """A parameter that varies between the series of a panel. Its logarithm is normal with standard deviation
    `spread`, which is estimated from the given starting value. For a parameter without bounds, the parameter
    itself is normal.

    ```python
    import roughflow as rf

    varying = {"kappa": rf.series.LogNormal(spread=0.3)}
    ```
    """

    spread: float = 0.3

    def __check_init__(self):
        check_positive("spread", self.spread)


class VaryingLikelihood(AbstractLikelihood):
    """Σᵢ log ∫ pᵢ(y | θ, m + su) N(u; 0, 1) du over the series i of a panel.

    The varying parameters are m + su on the unconstrained scale. The integral is computed by Gauss–Hermite
    quadrature with `nodes` around the mean of u given the series (Naylor & Smith 1982).
    """

    parameters: Parameters  # free parameters of the series, with m in place of varying parameters; then s
    penalty: np.ndarray
    steps: Transition
    singles: tuple[Likelihood, ...]
    nodes: np.ndarray  # (S, K, q)
    log_weights: np.ndarray  # (S, K)
    log_spread: np.ndarray  # (q,), the values for which the nodes were placed
    places: tuple[int, ...] = eqx.field(static=True)  # positions of the varying parameters
    count: int = eqx.field(static=True)  # number of nodes per parameter

    @property
    def effort(self) -> Effort | None:
        return self.singles[0].effort

    @property
    def coordinates(self) -> AbstractCoordinates | None:
        return self.singles[0].coordinates

    def _split(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Split free parameters into those of the series, without their scale, and log s."""
        base, log_spread = np.split(np.asarray(free, float) * self.parameters.scale, [-len(self.places)])
        return base, log_spread

    def _terms(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logarithm of the integrand times its weight, `(S, K)`, and the derivatives of the
        log-likelihood with respect to the parameters of the series, `(S, K, p)`."""
        base, log_spread = self._split(free)
        at = np.tile(base, (*self.nodes.shape[:2], 1))
        at[:, :, list(self.places)] += np.exp(log_spread) * self.nodes
        found = [_totals(one, jnp.asarray(row)) for one, row in zip(self.singles, at, strict=True)]
        logs, slopes = (np.stack([np.asarray(part) for part in parts]) for parts in zip(*found, strict=True))
        good = np.isfinite(logs) & np.isfinite(slopes).all(axis=2)
        prior = scipy.stats.norm.logpdf(self.nodes).sum(axis=2)
        logs = np.where(good, logs, -np.inf) + prior + self.log_weights
        return logs, np.where(good[..., None], slopes, 0.0)

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-likelihood of each series `(S,)`, its gradient `(S, p)`, and zeros in place of errors."""
        log_spread = self._split(free)[1]
        if np.abs(log_spread - self.log_spread).max() > FACTOR:
            return self.moved_to(free).scores(free)
        logs, slopes = self._terms(free)
        value = scipy.special.logsumexp(logs, axis=1)
        share = np.exp(logs - np.where(np.isfinite(value), value, 0.0)[:, None])
        wide = slopes[:, :, list(self.places)] * np.exp(log_spread) * self.nodes
        slope = np.einsum("sk,skp->sp", share, np.concatenate([slopes, wide], axis=2))
        return value, slope * self.parameters.scale, np.zeros(len(value))

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        """Two errors: the change when the number of nodes is increased, and the combined likelihood error of
        all series."""
        base = self._split(free)[0]
        inner = [np.hypot(*single.total_errors(base)) for single in self.singles]
        more = self.with_nodes().moved_to(free)
        return abs(more.log_likelihood(free) - self.log_likelihood(free)), float(np.linalg.norm(inner))

    def with_effort(self, effort: Effort) -> "VaryingLikelihood":
        return dataclasses.replace(self, singles=tuple(one.with_effort(effort) for one in self.singles))

    def with_nodes(self) -> "VaryingLikelihood":
        """The likelihood with more nodes; `moved_to` then determines their positions."""
        mean, deviation = np.zeros(self.nodes.shape[::2]), np.ones(self.nodes.shape[::2])
        return dataclasses.replace(self, count=self.count + 4)._around(mean, deviation)

    def _around(self, mean: np.ndarray, deviation: np.ndarray) -> "VaryingLikelihood":
        """The likelihood with nodes placed for a normal u with these means and deviations `(S, q)`."""
        x, w = np.polynomial.hermite_e.hermegauss(self.count)
        grid = np.stack(np.meshgrid(*[x] * len(self.places), indexing="ij"), -1).reshape(-1, len(self.places))
        weights = np.log(w) + 0.5 * x**2
        each = np.sum(np.meshgrid(*[weights] * len(self.places), indexing="ij"), axis=0).reshape(-1)
        nodes = mean[:, None] + deviation[:, None] * grid
        return dataclasses.replace(
            self, nodes=nodes, log_weights=each + np.log(deviation).sum(axis=1, keepdims=True)
        )

    def posterior(self, free: np.ndarray, values: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations `(S, q)` of u, or of values at the nodes, given each series."""
        logs, values = self._terms(free)[0], self.nodes if values is None else values
        share = np.exp(logs - scipy.special.logsumexp(logs, axis=1, keepdims=True))[..., None]
        mean = np.sum(share * values, axis=1)
        return mean, np.sqrt(np.sum(share * (values - mean[:, None]) ** 2, axis=1))

    def moved_to(self, free: np.ndarray) -> "VaryingLikelihood":
        """The likelihood with nodes placed for these parameters."""
        found = dataclasses.replace(self, log_spread=self._split(free)[1])
        last = np.inf
        for _ in range(ROUNDS):
            mean, deviation = found.posterior(free)
            if not (np.isfinite(mean).all() and (deviation > 0).all()):
                break
            found, here = found._around(mean, deviation), np.concatenate([mean, deviation])
            if np.abs(here - last).max() < MOVED:
                break
            last = here
        return found

    def widened(self, free: np.ndarray) -> np.ndarray:
        """Free parameters in which spreads that have vanished are replaced by the best ones on a coarse grid,
        if these have a higher likelihood. A search that began far from the maximum may lose them, because the
        gradient vanishes with the spread."""
        information = np.diag(self.quick_information(free))
        best, found = self.value(free), free
        for spread, place in enumerate(self.places, len(free) - len(self.places)):
            if information[spread] > VANISHED:
                continue
            unit = np.sqrt(len(self.singles) / information[place]) * self.parameters.scale[place]
            for factor in GRID:
                trial = found.copy()
                trial[spread] = np.log(factor * unit)
                if (value := self.value(trial)) > best + LOSS:
                    best, found = value, trial
        return found

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))[0]

    def own(self, free: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The parameters of each series by name: means and standard deviations `(S,)` given the series."""
        base, log_spread = self._split(free)
        at = base[list(self.places)] + np.exp(log_spread) * self.nodes
        given = self.parameters
        values = [
            given.domains[place].from_free(jnp.asarray(at[..., j])) for j, place in enumerate(self.places)
        ]
        mean, deviation = self.posterior(free, np.stack(values, axis=-1))
        return {given.names[place]: (mean[:, j], deviation[:, j]) for j, place in enumerate(self.places)}

    def drawn(self, free: np.ndarray, normal: np.ndarray, series: int) -> np.ndarray:
        """Free parameters `(count, p)` in which the varying parameters are draws for one series, computed
        from standard normal draws `(count, q)`."""
        mean, deviation = self.posterior(np.atleast_2d(free)[0])
        found = np.array(np.broadcast_to(free, (len(normal), len(self.parameters.names))))
        scale, places = self.parameters.scale, list(self.places)
        spread = np.exp(found[:, -len(places) :] * scale[-len(places) :])
        found[:, places] += spread * (mean[series] + deviation[series] * normal) / scale[places]
        return found

    def described(self) -> str:
        names = " and ".join(self.parameters.names[place] for place in self.places)
        how = self.singles[0].described()
        return f"{how}; {names} by quadrature with {self.nodes.shape[1]} nodes per series"


@functools.partial(jit, level=1)
def _totals(likelihood: Likelihood, free: Array) -> tuple[Array, Array]:
    """The log-likelihood of one series and its gradient, at each of K vectors of free parameters `(K, p)`."""
    value, slopes, _ = jax.vmap(lambda one: term_scores(likelihood, one))(free)
    return value.sum(axis=1), slopes.sum(axis=1)


def varying_likelihood(
    whole: AbstractLikelihood, singles: Sequence[AbstractLikelihood], varying: Mapping[str, LogNormal]
) -> VaryingLikelihood:
    """The likelihood of a panel, built from the likelihood with common parameters and the likelihoods of
    individual series."""
    given, spreads = whole.parameters, {}
    for name, one in varying.items():
        check_instance(f"varying[{name!r}]", one, LogNormal, "an rf.series.LogNormal")
        if name not in given.names:
            raise ValueError(f"no parameter is called {name}; the parameters are {', '.join(given.names)}")
        if given.domains[given.names.index(name)] not in (ANY, POSITIVE):
            raise ValueError(f"{name} cannot vary: only positive or unbounded parameters can")
        spreads[name] = jnp.asarray(one.spread, float)
    if len(singles) < 2 or not 0 < len(varying) <= len(NODES):
        raise ValueError(f"varying requires one to {len(NODES)} parameters and a panel of two or more series")
    alone = tuple(one for one in singles if isinstance(one, Likelihood))
    if len(alone) < len(singles):
        raise ValueError(
            "varying requires an SDE without memory, observed in all components without measurement errors"
        )
    order = sorted(spreads)  # the order of the leaves of a dictionary
    leaf = len(jax.tree.leaves(given.template))
    parameters = Parameters(
        given.names + tuple(name + SPREAD for name in order),
        given.domains + len(order) * (POSITIVE,),
        given.entries + tuple((leaf + j, ()) for j in range(len(order))),
        (given.template, {name: spreads[name] for name in order}),
        np.append(given.scale, np.ones(len(order))),
    )
    places, q = tuple(given.names.index(name) for name in order), len(order)
    empty = np.zeros((len(singles), 1, q))
    found = VaryingLikelihood(  # pyright: ignore[reportCallIssue]
        parameters=parameters, penalty=np.append(whole.penalty, np.zeros(q)), steps=whole.steps,
        singles=alone, nodes=empty, log_weights=empty[..., 0], places=places, count=NODES[q - 1],
        log_spread=np.log([float(spreads[name]) for name in order]),
    )  # fmt: skip
    return found._around(np.zeros((len(singles), q)), np.ones((len(singles), q)))
