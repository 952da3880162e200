"""The log-likelihood of a series observed with errors, as a function of parameters without bounds."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._programs import jit
from ..faq import see
from ..transition import AbstractCoordinates, Effort, Transition, choose_effort
from ._chain import Chain
from ._hidden_states import Joint, Search, Values, log_likelihood, num_draws
from ._likelihood import AbstractLikelihood, Likelihood
from ._observed import Observed
from ._parameters import POSITIVE, Parameters
from ._transition import coordinates_of

STEP = 1e-4  # of differences of free parameters, for the gradient
PART = 0.03  # of a standard error, for the information
NAME = "measurement_noise"


class MeasuredLikelihood(AbstractLikelihood):
    """log p(y₁, … | y₀) for values with normal errors, of an SDE and errors with free parameters: as
    `Likelihood`, but in parts that belong to whole series."""

    parameters: Parameters
    steps: Transition
    values: Values
    start: Array  # (n, d), states to start the search for the likeliest from
    key: PRNGKeyArray
    effort: Effort
    exact: bool = eqx.field(static=True)
    coordinates: AbstractCoordinates | None
    penalty: np.ndarray

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log p `(S,)` of each series, its derivatives `(S, p)` in the free parameters, and its error."""
        moves = STEP * np.eye(len(free))
        values, errors = self._around(free, np.concatenate([moves, -moves]))
        ahead, behind = np.split(values[1:], 2)
        return values[0], (ahead - behind).T / (2 * np.diag(moves)), errors[0]

    def log_likelihood(self, free: np.ndarray) -> float:
        return float(self._around(free, np.zeros((0, len(free))))[0].sum())

    def information(self, free: np.ndarray) -> np.ndarray:
        """By differences of values over a part of a standard error."""
        unit = np.eye(len(free))
        first = np.full(len(free), STEP)
        curve = np.diag(self._curves(free, np.diag(first), unit[:0])) / first**2
        size = np.clip(PART / np.sqrt(np.where(curve > 0, curve, 1.0)), 1e-2 * first, 1e2 * first)
        matrix = self._curves(free, np.diag(size), np.triu(np.ones_like(unit), 1))
        return matrix / np.outer(size, size) + np.diag(self.penalty)

    def quick_information(self, free: np.ndarray) -> np.ndarray:
        return self.information(free)

    def _curves(self, free: np.ndarray, moves: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """−vᵢᵀ ∂² log-likelihood vⱼ for the rows v of `moves`: all i = j, and the pairs that are not zero."""
        p = len(free)
        places = [(i, i) for i in range(p)] + list(zip(*np.nonzero(pairs), strict=True))
        ends = [
            (moves[i], -moves[i]) if i == j else (moves[i] + moves[j], -moves[i] - moves[j])
            for i, j in places
        ]
        second = np.empty(len(places))
        # As many at a time as for a gradient, so that one program does for both.
        for k in range(0, len(places), p):
            some = [*ends[k : k + p], *ends[: max(0, k + p - len(ends))]]
            values = self._around(free, np.array([pair[0] for pair in some] + [pair[1] for pair in some]))[
                0
            ].sum(axis=1)
            curve = 2 * values[0] - values[1 : p + 1] - values[p + 1 :]
            second[k : k + p] = curve[: len(second[k : k + p])]
        matrix = np.diag(second[:p])
        for (i, j), both in zip(places[p:], second[p:], strict=True):
            matrix[i, j] = matrix[j, i] = 0.5 * (both - second[i] - second[j])
        return matrix

    def _around(self, free: np.ndarray, moves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-likelihoods and their errors, `(1 + len(moves), S)`, of these parameters and others nearby."""
        points = jnp.asarray(np.concatenate([free[None], free + moves]), float)
        values, errors = _values(self, points)
        return np.asarray(values), np.asarray(errors)

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        values, _, errors = self.scores(free)
        drawn, moved = float(np.linalg.norm(errors)), 0.0
        if not self.exact:
            finer = self.with_effort(self.effort.finer())
            moved = abs(finer.log_likelihood(free) - float(values.sum()))
        return drawn, moved if np.isfinite([drawn, moved]).all() else np.inf

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))[0]

    def noise(self, free: Array) -> Array:
        """Standard deviations of the errors, `(d,)`."""
        noise = self.parameters.sde(self.parameters.from_free(free))[1]
        return jnp.broadcast_to(noise, self.start.shape[1:])

    def joint(self, free: Array) -> Joint:
        sde = self.sde(free)
        coordinates = coordinates_of(sde, self.coordinates)
        return Joint(sde, self.noise(free), self.values, coordinates, self.effort, self.exact)

    def with_effort(self, effort: Effort) -> "MeasuredLikelihood":
        return eqx.tree_at(lambda one: one.effort, self, effort)

    def described(self) -> str:
        """The work that goes into it, in words."""
        how = "exact" if self.exact else self.effort.described()
        return f"{how}; {num_draws(self.effort)} draws of the states"


@functools.partial(jit, level=1)
def _values(likelihood: MeasuredLikelihood, points: Array) -> tuple[Array, Array]:
    """For parameters `(k, p)`, all but the first of which are near it, so that the modes are."""

    def one(start: tuple[Array, Array], free: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        path, is_first = start
        joint = likelihood.joint(free)
        mode = Search.mode(joint, path).best
        done = log_likelihood(joint, mode, likelihood.key)
        return (jnp.where(is_first, mode.path, path), jnp.zeros((), bool)), done

    coordinates = likelihood.joint(points[0]).coordinates
    path = jax.vmap(coordinates.from_state)(likelihood.start)
    return jax.lax.scan(one, (path, jnp.ones((), bool)), points)[1]


def check_noise(noise: ArrayLike, dimension: int) -> np.ndarray:
    """The standard deviations that a fit starts from, a number or one of each column."""
    given = np.asarray(noise, float)
    if given.shape not in ((), (dimension,)):
        raise ValueError(
            f"{NAME} must be a number, or one for each of {dimension} columns; got shape {given.shape}"
        )
    if not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(f"{NAME} must be positive, the standard deviation to start from; got {noise}")
    return given


def measured(
    plain: Likelihood,
    series: Sequence[Observed],
    states: Sequence[Observed],
    noise: np.ndarray,
    effort: Effort | None,
) -> MeasuredLikelihood:
    """The likelihood of series with errors, from that of states near them."""
    sde, exact = plain.parameters.template, plain.effort is None
    effort = effort or plain.effort or choose_effort(sde, coordinates_of(sde, plain.coordinates), plain.steps)
    start = jnp.asarray(np.concatenate([one.values for one in states]), float)
    parameters, values = _with_noise(plain.parameters, noise), stacked(series)
    return MeasuredLikelihood(
        parameters=parameters,
        steps=plain.steps,
        values=values,
        start=start,
        key=plain.of_sde.key,
        effort=effort,
        exact=exact,
        coordinates=plain.coordinates,
        penalty=np.append(plain.penalty, np.zeros(noise.size)),
    )


def _with_noise(parameters: Parameters, noise: np.ndarray) -> Parameters:
    """The parameters of an SDE, and those of the errors after them."""
    leaf = len(jax.tree.leaves(parameters.template))
    names = tuple(NAME + (f"[{place[0]}]" if place else "") for place in np.ndindex(noise.shape))
    return Parameters(
        parameters.names + names,
        parameters.domains + len(names) * (POSITIVE,),
        parameters.entries + tuple((leaf, place) for place in np.ndindex(noise.shape)),
        (parameters.template, noise),
        np.append(parameters.scale, np.ones(noise.size)),
    )


def stacked(series: Sequence[Observed]) -> Values:
    """All series, one after the other."""
    sizes = [len(one.times) for one in series]
    first = np.concatenate([np.arange(size) == 0 for size in sizes])
    last = np.concatenate([np.arange(size) == size - 1 for size in sizes])
    times = np.concatenate([one.times for one in series])
    before = np.flatnonzero(~last)
    return Values(
        jnp.asarray(np.concatenate([one.values for one in series]), float),
        jnp.asarray(first),
        jnp.asarray(np.repeat(np.arange(len(sizes)), sizes)),
        jnp.asarray(before),
        jnp.asarray(times[before], float),
        jnp.asarray(times[before + 1] - times[before], float),
        len(sizes),
    )


def inner_states(
    series: Sequence[Observed], noise: np.ndarray, coordinates: AbstractCoordinates
) -> list[Observed]:
    """The series with values outside the state space, or so near its end that they may be, replaced by the
    nearest that are not: states to start from."""
    values = np.concatenate([one.values for one in series])
    inside = np.ones(len(values), bool)
    for side in (-1, 0, 1):
        inside &= np.asarray(coordinates.contains(jnp.asarray(values + side * noise)))
    if not inside.any():
        raise ValueError(
            f"no value lies inside the state space of the SDE by as much as {NAME}, {noise}{see('series')}"
        )
    scale, kept = np.std(values, axis=0), values[inside]
    for row in np.flatnonzero(~inside):
        values[row] = kept[np.argmin(np.sum(((kept - values[row]) / scale) ** 2, axis=1))]
    parts = np.split(values, np.cumsum([len(one.times) for one in series])[:-1])
    return [Observed(one.times, part) for one, part in zip(series, parts, strict=True)]


@functools.partial(jit, level=1)
def smoothed(likelihood: MeasuredLikelihood, free: Array) -> tuple[Array, Array]:
    """The likeliest states `(n, d)` and, from the second derivatives there, their standard deviations."""
    joint = likelihood.joint(free)
    path = jax.vmap(joint.coordinates.from_state)(likelihood.start)
    mode = Search.mode(joint, path).best
    slopes = jax.vmap(jax.jacfwd(joint.coordinates.to_state))(mode.path)
    variances = Chain.of(mode.diagonal, mode.below).variances()
    deviations = jnp.sqrt(jnp.einsum("nij,njk,nik->ni", slopes, variances, slopes))
    return jax.vmap(joint.coordinates.to_state)(mode.path), deviations
