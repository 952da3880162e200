"""Densities in one and two dimensions by the Fokker–Planck equation, on boxes that follow the density.

    ∂p/∂t = −∂ᵢ(μᵢ p) + ½ ∂ᵢ∂ⱼ((σσᵀ)ᵢⱼ p)

**Boxes.** Time is divided into segments. In each segment, x = c + S y maps y ∈ [−1, 1)ᵈ to a box that
contains the density from the beginning to the end of the segment, as predicted by a linearised SDE. At the
end of a segment, the density is interpolated to the next box. The accuracy does not depend on the units of x,
and a narrow initial density costs only a few more segments.

**Space.** Fourier collocation. The mesh is refined until the highest wavenumbers have negligible amplitudes.

**Time.** If the discretised operator L does not depend on time, a segment takes one exponential of L;
otherwise it takes several steps of the commutator-free Magnus method of order four (Blanes & Moan 2006).
In one dimension, exponentials of matrices are computed. In two dimensions, exponentials are expanded in Faber
polynomials of an ellipse around the numerical range (Moret & Novati 2001), which takes O(√(h‖L‖)) products
with L for stiff noise and solves no linear systems. All this is done in NumPy, without compilation; for
gradients, the same segments are repeated in JAX.

**Error.** Each solution is compared with one that has coarser meshes, smaller boxes, longer steps and, if the
initial state is a point, a later start. The error at x is the largest relative difference between the two
solutions around x.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, as_real, check_positive, check_vector, is_traced
from .._functions import fixed_functions
from .._programs import differentiated_in_double_precision, in_double_precision, jit
from ..flow import MultivariateNormal
from ..sde import AbstractSDE, noise_matrix, to_ito, with_explicit_parameters
from ._estimate import AbstractEstimator, Accuracy, Estimate

# Nodes per axis, and their maximum by dimension.
SIZES = (24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 240, 288, 384, 512, 768, 1024)
MAX_SIZE = {1: 1024, 2: 288}
# Times of a segment at which coefficients are checked.
CHECKED = np.append((0.5 + 0.618 * np.arange(14)) % 1, [0, 1])
PROBES = 256  # number of nodes at which the time dependence is checked
STEADY_SPANS = 8  # if coefficients depend on time, a segment is at most t1 divided by this
# Share of the wavenumbers that are kept, and share above which amplitudes must be small.
KEPT, RESOLVED = 0.75, 0.66
TERMS = 32  # the number of terms of an expansion is a multiple of this
BATCH = 1024  # number of points at which functions are evaluated at once
BASE_DRAWS = 4096  # number of draws from the base, for its moments
FIRST_NODES = 4096  # number of nodes at which the initial density is examined
FIRST_REACH = 8.0  # in standard deviations; half the width of the first box around the initial density
# In the first solution, the density from a point is taken to be normal at this fraction of t1.
FIRST = 2.0**-8
MAX_WORK = 5e8  # maximum work (`Work`) of all solutions together
FIRST_WORK = 0.4  # share of MAX_WORK for the first solution
SEGMENT_WORK = 5e5  # fixed work (`Work`) of a segment
MAX_SOLUTIONS = 5
# Densities above this share of the maximum must reach the tolerance, and in the first solution those above
# the second one. If the given points have higher densities, the second solution needs to resolve only these.
LOWEST, FIRST_SHARE = 1e-6, 3e-4
LEAST_EDGE = 2.5e-12  # minimum of the density accepted at the edge of a box, relative to the maximum
FLOOR = 1e-7  # in nats; errors due to rounding and truncated expansions
OVERSHOOT = 8.0  # how far the ellipse around a numerical range extends to the right of zero
OVERSIZE = 1.3  # factor by which the nodes that a density is expected to need may exceed the largest mesh
STRETCH = 1.4  # factor by which the nodes for a span may exceed those for its beginning
MARGIN = 1.05  # factor by which a box around the density is enlarged
ACCEPTED_EDGE, ACCEPTED_TAIL = 12.0, 3.0  # multiples of the planned edge and tail values that are accepted

Numbers = Any  # a JAX or NumPy array, or a number


class Unresolved(RuntimeError):
    """Raised for a density that no mesh within the limits resolves."""


class Work:
    """The remaining work of an estimate: a number of nodes times a number of products with the operator."""

    def __init__(self, left: float):
        self.left = left

    def spend(self, amount: float) -> None:
        self.left -= amount
        if self.left < 0:
            raise Unresolved("the Fokker–Planck equation needs too much work")


class Resolution(NamedTuple):
    """Requirements on a solution, relative to the highest density, and its mesh sizes and steps."""

    tail: float  # maximum amplitude of the highest wavenumbers
    edge: float  # maximum density at the edge of a box
    sizes: tuple[int, ...]
    steps: int  # number of steps per segment, if coefficients depend on time
    missed: float  # maximum error of a segment, in nats, due to coefficients that are not smooth in time

    @staticmethod
    def of(number: int, tolerance: float, share: float, dimension: int) -> "Resolution":
        """The requirements on solution number 0, 1, …, if densities above a `share` of the maximum must reach
        the tolerance."""
        tail = max(0.15 * tolerance * share, 1e-11)
        sizes = tuple(size for size in SIZES if size <= MAX_SIZE[dimension])
        return Resolution(tail, max(0.05 * tail, LEAST_EDGE), sizes, 2**number, 0.1 * tolerance / 2**number)


class Box(NamedTuple):
    """x = centre + scale y, |yᵢ| ≤ 1, with a lower triangular `scale`."""

    centre: np.ndarray
    scale: np.ndarray

    @staticmethod
    def around(x: np.ndarray, root: np.ndarray, margin: float) -> "Box":
        """The smallest box around points with sides along the columns of `root`, enlarged by a margin."""
        units = Box(0 * root[0], root).coordinates(x)
        low, high = units.min(axis=0), units.max(axis=0)
        return Box(root @ (0.5 * (low + high)), root * (0.5 * margin * (high - low)))

    def places(self, size: int) -> np.ndarray:
        return self.centre + nodes(size, len(self.centre)) @ self.scale.T

    def coordinates(self, x: np.ndarray) -> np.ndarray:
        """The coordinates y of points x."""
        return scipy.linalg.solve_triangular(self.scale, (x - self.centre).T, lower=True).T

    @property
    def log_volume(self) -> Any:
        """The logarithm of the volume element of x divided by that of y."""
        xp = jnp if is_traced(self.scale) else np
        return xp.sum(xp.log(xp.diag(self.scale)))

    def transform(self) -> np.ndarray:
        """The matrix that maps μ and σσᵀ for x to those for y, `(F, F)`."""
        inverse = np.linalg.inv(self.scale)
        return scipy.linalg.block_diag(inverse, np.kron(inverse, inverse))


@functools.lru_cache(maxsize=64)
def nodes(size: int, dimension: int) -> np.ndarray:
    """The nodes of a mesh, `(nᵈ, d)`."""
    axis = -1 + 2 * np.arange(size) / size
    return np.stack([a.ravel() for a in np.meshgrid(*[axis] * dimension, indexing="ij")], axis=1)


def in_batches(function: Callable, x: Any) -> Any:
    """Apply a function of `BATCH` rows to any number of rows, in padded blocks."""
    rows = jax.tree.leaves(x)[0].shape[0]
    place = np.minimum(np.arange(-(-rows // BATCH) * BATCH), rows - 1).reshape(-1, BATCH)
    parts = [function(jax.tree.map(lambda a, some=some: a[some], x)) for some in place]
    xp = jnp if any(is_traced(leaf) for leaf in jax.tree.leaves(parts[0])) else np
    return jax.tree.map(lambda *part: xp.concatenate(part)[:rows], *parts)


@functools.partial(jit, level=1)
def _evaluate(values: Numbers, relative: Numbers, box: Box, x: Numbers) -> tuple[Numbers, Numbers]:
    """log p and its error at x `(N, d)`, from the density of y on a mesh and a relative error at each node.
    Outside the box, or where p is below its error, they are NaN and infinity."""
    size, d = values.shape[0], values.ndim
    u = jax.scipy.linalg.solve_triangular(box.scale, (x - box.centre[None]).T, lower=True).T
    inside = jnp.all(jnp.abs(u) < 1, axis=1)
    y = jnp.where(inside[:, None], u, 0)
    k = jnp.asarray(np.pi * np.fft.fftfreq(size, 1 / size))
    waves = jnp.exp(1j * k[None, None] * (y[:, :, None] + 1))  # (N, d, n)
    spectrum = jnp.fft.fftn(values) / values.size
    total = waves[:, 0] * spectrum[None] if d == 1 else (waves[:, 0] @ spectrum) * waves[:, 1]
    p = jnp.real(jnp.sum(total, axis=1))
    place = jnp.clip(jnp.round(0.5 * (jax.lax.stop_gradient(y) + 1) * size), 0, size - 1).astype(int)
    share = relative[tuple(place.T)]
    known = inside & (p > 0) & (share < 0.5)
    value = jnp.where(known, jnp.log(jnp.where(known, p, 1)) - box.log_volume, jnp.nan)
    bar = jnp.where(known, -jnp.log1p(-jnp.where(known, share, 0)), jnp.inf)
    return value, jax.lax.stop_gradient(bar)


@functools.partial(jit, level=1)
def _coefficients(sde: AbstractSDE, t: Numbers, x: Numbers) -> Numbers:
    """μ and σσᵀ at many points: `(N, F)`, F = d + d²."""
    ito = to_ito(sde)

    def one(t: Numbers, x: Numbers) -> Numbers:
        sigma = noise_matrix(sde.noise(t, x))
        return jnp.concatenate([ito.drift(t, x), jnp.ravel(sigma @ sigma.T)])

    return jax.vmap(one)(t, x)


def coefficients(sde: AbstractSDE, times: np.ndarray, x: np.ndarray) -> Numbers:
    """μ and σσᵀ at points `(N, d)` and times: `(K, N, F)`."""
    pairs = np.repeat(times, len(x)), np.tile(x, (len(times), 1))
    raw = in_batches(lambda pair: _coefficients(sde, *pair), pairs)
    return raw.reshape(len(times), len(x), -1)


def missed_in_time(sde: AbstractSDE, time: float, span: float, box: Box) -> float | None:
    """The approximate error of a segment, in nats, due to coefficients that are not smooth in time. It is
    computed from their distance to polynomials of degree five in time; it is None if coefficients do not
    depend on time."""
    size, d = round(PROBES ** (1 / len(box.centre))), len(box.centre)
    raw = coefficients(sde, time + span * CHECKED, box.places(size))
    raw = np.where(np.isfinite(raw), raw, 0)
    if np.all(np.ptp(raw, axis=0) <= 1e-9 * np.abs(raw).max(axis=(0, 1))):
        return None
    powers = np.vander(CHECKED, 6)
    gap = raw - np.tensordot(powers @ np.linalg.pinv(powers), raw, 1)
    likely = np.sum(nodes(size, d) ** 2, axis=1) < 0.5
    fields = np.abs(gap[:, likely] @ box.transform().T).max(axis=(0, 1))
    # In units of the box, which extends over seven standard deviations, log p has slopes of up to 26.
    return span * float(26 * fields[:d].sum() + 340 * fields[d:].sum())


class Expansion(NamedTuple):
    """exp(A) ≈ (Σ aₖ Fₖ((A/r + m)/γ))ʳ, Fₖ₊₁(z) = z Fₖ(z) − δ Fₖ₋₁(z): Faber polynomials of an ellipse with
    centre −m. The sum of its semi-axes is 2γ, and δ is their difference divided by their sum."""

    repeats: int  # r
    centre: float
    scale: float
    terms: np.ndarray  # (K, 2): aₖ, and δ for each k

    @staticmethod
    def of(damping: float, frequency: float, rounding: float) -> "Expansion":
        """The expansion with the fewest terms for a numerical range within −damping ≤ Re ≤ 0, |Im| ≤
        frequency."""
        least = max(0, math.ceil(math.log2(1e-3 * (damping + frequency))))
        some = (Expansion.repeated(1 << least + k, damping, frequency, rounding) for k in range(6))
        return min(some, key=lambda expansion: expansion.products)

    @staticmethod
    def repeated(repeats: int, damping: float, frequency: float, rounding: float) -> "Expansion":
        centre = 0.5 * damping / repeats
        real = centre + OVERSHOOT
        imaginary = frequency / repeats / math.sqrt(1 - (centre / real) ** 2)
        scale, ratio = 0.5 * (real + imaginary), (real - imaginary) / (real + imaginary)
        count = 1 << math.ceil(math.log2(4 * scale + 200))
        u = np.exp(2j * np.pi * np.arange(count) / count)
        series = np.real(np.fft.fft(np.exp(scale * (u + ratio / u) - centre)))[: count // 2] / count
        used = 1 + int(np.max(np.nonzero(np.abs(series) > rounding)[0]))
        terms = np.zeros((-(-used // TERMS) * TERMS, 2))
        terms[:used, 0] = series[:used]
        terms[1:, 1] = ratio
        terms[1:2, 1] = 2 * ratio
        return Expansion(repeats, centre, scale, terms)

    @property
    def products(self) -> int:
        return self.repeats * len(self.terms)

    def __call__(self, now: Numbers, apply: Callable[[Numbers], Numbers]) -> Numbers:
        """exp(A) applied to `now`, by products with A/r."""

        def step(state: tuple, number: Any) -> tuple[tuple, None]:
            before, now, total = state
            after = (apply(now) + self.centre * now) / self.scale - number[1] * before
            return (now, after, total + number[0] * now), None

        for _ in range(self.repeats):
            state = (0 * now, now, 0 * now)
            if is_traced(now):
                state = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, self.terms)[0]
            else:
                for number in self.terms:
                    state = step(state, number)[0]
            now = state[2]
        return now


class Modes(NamedTuple):
    """Matrices between values at the nodes of an axis and amplitudes of its cosines and sines."""

    values: np.ndarray  # (n, m), maps amplitudes to values
    # (m, n), map values to the amplitudes of the function, minus its slope and half its second derivative
    derivatives: tuple[np.ndarray, np.ndarray, np.ndarray]

    @staticmethod
    @functools.cache
    def of(size: int) -> "Modes":
        count = math.floor(KEPT * size / 2)
        y, k = nodes(size, 1), np.arange(1, 1 + count)
        values = np.concatenate([np.ones((size, 1)), np.cos(np.pi * k * y), np.sin(np.pi * k * y)], axis=1)
        plain = np.append(1, np.full(2 * count, 2))[:, None] / size * values.T
        slope = scipy.linalg.block_diag(0, np.kron([[0, 1], [-1, 0]], np.pi * np.diag(k)))
        return Modes(values, (plain, -slope @ plain, 0.5 * slope @ slope @ plain))

    def operator(self, fields: Any) -> Any:
        """The discretised operator in one dimension, `(m, m)`."""
        _, first, second = self.derivatives
        return first @ (fields[0][:, None] * self.values) + second @ (fields[1][:, None] * self.values)

    def product(self, now: Any, fields: Any) -> Any:
        """The operator in two dimensions applied to a density. Both are given as amplitudes of cosines and
        sines."""
        plain, first, second = self.derivatives
        fields = fields * (self.values @ now @ self.values.T)[None]
        return (
            (first @ fields[0] + second @ fields[2]) @ plain.T
            + (plain @ fields[1] + first @ fields[3]) @ first.T
            + (plain @ fields[5]) @ second.T
        )


def along_axes(matrix: np.ndarray, q: Any) -> Any:
    return matrix @ q if q.ndim == 1 else matrix @ q @ matrix.T


def transferred(q: Numbers, old: Box, new: Box, size: int) -> Numbers:
    """A density, interpolated from the mesh of one box to the mesh of another; zero outside the old box."""
    xp: Any = jnp if is_traced(q) else np
    count, y = math.floor(KEPT * len(q) / 2), nodes(size, 1)[:, 0]
    waves = lambda y: xp.exp(1j * np.pi * xp.outer(y, np.arange(-count, 1 + count)))
    spectrum = waves(nodes(len(q), 1)[:, 0]).conj().T / len(q)
    # The matrix is lower triangular: the first coordinate does not depend on the second one.
    turn, shift = xp.linalg.solve(old.scale, new.scale), xp.linalg.solve(old.scale, new.centre - old.centre)
    p = xp.real(waves(shift[0] + turn[0, 0] * y) @ spectrum) @ q
    if q.ndim == 2:
        p = (p @ spectrum.T) * waves(shift[1] + turn[1, 0] * y)
        p = xp.real(p @ waves(turn[1, 1] * y).T)
    inside = xp.all(xp.abs(shift[None] + nodes(size, q.ndim) @ turn.T) < 1, axis=1)
    return xp.where(inside.reshape(p.shape), xp.exp(new.log_volume - old.log_volume) * p, 0)


class Segment(NamedTuple):
    """A span of time, its box and mesh, and the previous box."""

    times: np.ndarray  # (K,), times at which coefficients are evaluated
    weights: np.ndarray  # (E, K), weights of the operators at these times in the exponents
    before: Box
    box: Box
    size: int
    expansions: tuple[Expansion, ...] = ()  # expansions of the exponentials, in two dimensions

    @staticmethod
    def of(time: float, span: float, before: Box, box: Box, size: int, steps: int) -> "Segment":
        """A segment solved by `steps` steps of the Magnus method or, if `steps` is 0, by one exponential.

        A step of length h is exp(h(βA₁ + αA₂)) exp(h(αA₁ + βA₂)), α = ¼ + √3/6, β = ¼ − √3/6, with the
        operators at the nodes of the Gauss rule.
        """
        times, weights = np.array([time]), np.array([[span]])
        if steps:
            h, alpha, beta = span / steps, 0.25 + math.sqrt(3) / 6, 0.25 - math.sqrt(3) / 6
            gauss = 0.5 + np.array([-1, 1]) * math.sqrt(3) / 6
            times = time + h * np.add.outer(np.arange(steps), gauss).ravel()
            weights = h * np.kron(np.eye(steps), [[alpha, beta], [beta, alpha]])
        return Segment(times, weights, before, box, size)

    def coefficients(self, sde: AbstractSDE) -> Numbers:
        return coefficients(sde, self.times, self.box.places(self.size))

    def exponents(self, raw: Numbers) -> Numbers:
        """The drift and noise of y in each exponential: `(E, F, n, ...)`."""
        xp, (count, points, width) = jnp if is_traced(raw) else np, raw.shape
        raw = xp.where(xp.isfinite(raw), raw, 0).reshape(count, -1)
        mixed = (self.weights @ raw).reshape(-1, points, width)
        total = xp.moveaxis(mixed @ self.box.transform().T, 2, 1)
        return total.reshape(*total.shape[:2], *[self.size] * len(self.box.centre))

    def run(self, q: Numbers, exponents: Numbers) -> Numbers:
        """The density at the end of the segment, from the density on the previous mesh."""
        modes = Modes.of(self.size)
        now = along_axes(modes.derivatives[0], transferred(q, self.before, self.box, self.size))
        for number, fields in enumerate(exponents):
            if q.ndim == 1:
                xp = jax.scipy.linalg if is_traced(now) else scipy.linalg
                options = {"max_squarings": 64} if is_traced(now) else {}
                now = xp.expm(modes.operator(fields), **options) @ now
            else:
                expansion = self.expansions[number]
                now = expansion(now, functools.partial(modes.product, fields=fields / expansion.repeats))
        return along_axes(modes.values, now)


_run = jit(lambda segment, q, exponents: segment.run(q, exponents), level=1)


def spectral_bounds(fields: np.ndarray) -> tuple[float, float]:
    """Bounds of the numerical range of the discretised operator: how far it extends to the left, and how far
    up and down."""
    d, size = fields.ndim - 1, fields.shape[1]
    drift, noise, top = fields[:d], fields[d:].reshape(d, d, *fields.shape[1:]), KEPT * np.pi * size / 2
    # The jump of the periodic continuation of the drift adds to the bound.
    jump = max(float(np.abs(np.take(drift[i], 0, i) - np.take(drift[i], -1, i)).max()) for i in range(d))
    damping = 0.5 * top**2 * float(np.abs(noise).sum(axis=(0, 1)).max()) + 0.5 * top * jump
    slopes = [sum(np.gradient(noise[i, j], 2 / size, axis=j) for j in range(d)) for i in range(d)]
    return damping, top * float(np.abs(drift - 0.5 * np.stack(slopes)).sum(axis=0).max())


def tails(q: np.ndarray) -> np.ndarray:
    """For each wavenumber, the approximate contribution of it and all higher wavenumbers to a density,
    relative to the maximum of the density."""
    wavenumbers = np.abs(np.fft.fftfreq(len(q), 1 / len(q)))
    shell = functools.reduce(np.maximum.outer, [wavenumbers] * q.ndim).round().astype(int)
    energy = np.bincount(shell.ravel(), np.abs(np.fft.fftn(q) / q.size).ravel() ** 2)
    return 4 * np.sqrt(np.cumsum(energy[::-1])[::-1]) / np.max(np.abs(q))


def tail(q: np.ndarray) -> float:
    """The amplitudes of the highest wavenumbers."""
    return float(tails(q)[math.floor(RESOLVED * len(q) / 2) + 1])


def edge(q: np.ndarray) -> float:
    """The largest density on the faces of the box, relative to the maximum."""
    faces = [np.take(q, [0, -1], axis) for axis in range(q.ndim)]
    return float(max(np.abs(face).max() for face in faces) / np.max(np.abs(q)))


class State(NamedTuple):
    """A density at one time on the mesh of a box, the coefficients at its nodes, and the segment before."""

    time: float
    box: Box
    q: Numbers
    raw: np.ndarray  # (nᵈ, F)
    margin: float = MARGIN  # of the next box
    missed: float = 0.0  # error in nats due to coefficients that are not smooth in time
    segment: Any = None  # the `Segment` that ends at this time


def plan(
    state: State, longest: float, margin: float, finer: float, resolution: Resolution
) -> tuple[float, Box, int]:
    """The longest span, at most `longest`, whose box is not much larger than the density, the box, and the
    number of nodes per axis. The density is assumed to move as under the nearest linear SDE,
    du = (drift + slope u) dt + noise for its standardised coordinates u."""
    q, d = state.q, state.q.ndim
    x, weight = state.box.places(len(q)), np.maximum(q.ravel(), 0) / np.maximum(q, 0).sum()
    mean = weight @ x
    here = Box(mean, np.linalg.cholesky((weight * (x - mean).T) @ (x - mean)))
    u, fields = here.coordinates(x), np.where(np.isfinite(state.raw), state.raw, 0) @ here.transform().T
    slope, drift = (weight * fields[:, :d].T) @ u, weight @ fields[:, :d]
    # The rates of the moments E[(u, 1)(u, 1)ᵀ].
    single, one = np.pad(np.column_stack([slope, drift]), ((0, 1), (0, 0))), np.eye(d + 1)
    rates = np.kron(single, one) + np.kron(one, single)
    rates[:, -1] += np.pad((weight @ fields[:, d:]).reshape(d, d), (0, 1)).ravel()
    # The outermost points of the density; tails that the mesh does not resolve are taken to be normal.
    seen = min(max(10 * float(-q.min() / q.max()), 1.001 * edge(q), resolution.edge), 1e-2)
    outermost = math.sqrt(math.log(resolution.edge) / math.log(seen)) * u[q.ravel() > seen * q.max()]

    def sharpness(box: Box, covariance: np.ndarray) -> float:
        return math.sqrt(np.diag(box.scale.T @ np.linalg.solve(covariance, box.scale)).max())

    highest = max(1, int(np.argmax(np.append(tails(q), 0) < resolution.tail)))
    nodes = 2 / RESOLVED * finer * highest / sharpness(state.box, here.scale @ here.scale.T)
    most = STRETCH * nodes * sharpness(Box.around(outermost, np.eye(d), margin), np.eye(d))
    for span in longest * 0.7 ** np.arange(60):
        step, moments, covariances, points = scipy.linalg.expm(0.25 * span * rates), one.ravel(), [], []
        try:
            for _ in range(5):
                square = moments.reshape(d + 1, d + 1)
                covariances.append(square[:d, :d] - np.outer(square[:d, d], square[:d, d]))
                points.append(square[:d, d] + outermost @ np.linalg.cholesky(covariances[-1]).T)
                moments = step @ moments
        except np.linalg.LinAlgError:
            continue
        box = Box.around(np.concatenate(points), np.linalg.cholesky(np.mean(covariances, axis=0)), margin)
        needed = nodes * max(sharpness(box, each) for each in covariances)
        if needed <= min(most, OVERSIZE * resolution.sizes[-1]):
            size = next((size for size in resolution.sizes if size >= needed), resolution.sizes[-1])
            return float(span), Box(mean + here.scale @ box.centre, here.scale @ box.scale), size
    raise Unresolved("no mesh is fine enough for the density")


class Beginning(eqx.Module):
    """The distribution at the beginning of a solution."""

    base: Any
    time: float = 0.0

    @staticmethod
    def of(sde: AbstractSDE, base: Any, start: Any, t1: float, number: int) -> "Beginning":
        """The base or, for a fixed initial state, a normal distribution a short time later. This time is four
        times shorter in each further solution."""
        if start is None:
            return Beginning(base)
        time, d = FIRST * t1 / 4**number, start.size
        mean, covariance = _after_point(sde, start, time)
        root = jnp.linalg.cholesky(covariance)
        parts = lambda normal: (normal.loc, normal.lower, normal.log_diagonal)
        normal = MultivariateNormal(jnp.zeros(d), jnp.eye(d))
        return Beginning(eqx.tree_at(parts, normal, (mean, root, jnp.log(jnp.diag(root)))), time)

    def log_prob(self, x: Numbers) -> Numbers:
        return in_batches(lambda some: _log_prob(self.base, some), x)

    def box(self, level: float) -> Box:
        """The box around the points at which the density exceeds a share `level` of its maximum."""
        draws = np.asarray(_draws(self.base))
        d, root = draws.shape[1], np.linalg.cholesky(np.atleast_2d(np.cov(draws.T)))
        size, box = round(FIRST_NODES ** (1 / d)), Box(draws.mean(axis=0), FIRST_REACH * root)
        for _ in range(8):
            x, y = box.places(size), nodes(size, d)
            logs = np.asarray(self.log_prob(x))
            above = logs > np.max(logs[np.isfinite(logs)], initial=-np.inf) + math.log(level)
            if not np.any(above):
                raise Unresolved("no box around draws from the base contains its density")
            reach = np.abs(y[above] + 1 / size).max(axis=0)
            fits = np.all(reach < 1 - 3 / size) and np.all(np.ptp(y[above], axis=0) > 0.5)
            box = Box.around(x[above], root, 1.04 if fits else 1.5)
            if fits:
                break
        return box

    def density(self, box: Box, size: int) -> Numbers:
        logs, d = self.log_prob(box.places(size)), len(box.centre)
        xp = jnp if is_traced(logs) else np
        return xp.reshape(xp.exp(logs + box.log_volume), (size,) * d)

    @staticmethod
    def error(first: "State") -> float:
        """The difference between the integral over the first box and one, in nats."""
        mass = float(np.mean(first.q)) * 2**first.q.ndim
        return abs(math.log(mass)) if mass > 0 else math.inf


def solve(sde: AbstractSDE, begin: Beginning, t1: float, resolution: Resolution, work: Work) -> list[State]:
    """The density at the beginning, at the ends of all segments and at t1."""
    box, time = begin.box(resolution.edge), begin.time
    meshes = (begin.density(box, size) for size in resolution.sizes)
    q = next((q for q in meshes if tail(q) < resolution.tail), None)
    if q is None:
        raise Unresolved("no mesh resolves the density at the start")
    raw = coefficients(sde, np.array([time]), box.places(len(q)))[0]
    states = [State(time, box, q, raw)]
    while states[-1].time < t1:
        states.append(next_state(sde, states[-1], t1, resolution, work))
    return states


def next_state(sde: AbstractSDE, state: State, t1: float, resolution: Resolution, work: Work) -> State:
    """Solve one segment, with a box, a mesh and a span that resolve the density."""
    # The cost of the coefficients at a point, relative to that of a product with the operator.
    cost = 1 + sum(leaf.size for leaf in jax.tree.leaves(sde) if eqx.is_array(leaf)) / 150
    margin, finer, left = state.margin, 1.0, t1 - state.time
    longest = left
    while True:
        work.spend(SEGMENT_WORK)
        span, box, size = plan(state, longest, margin, finer, resolution)
        missed = missed_in_time(sde, state.time, span, box)
        if missed is not None and (span > t1 / STEADY_SPANS or missed > resolution.missed):
            longest = min(t1 / STEADY_SPANS, 0.4 * span)
            continue
        steps = 0 if missed is None else resolution.steps
        segment = Segment.of(state.time, span, state.box, box, size, steps)
        work.spend(len(segment.times) * size**state.q.ndim * cost)
        raw = segment.coefficients(sde)
        exponents = segment.exponents(raw)
        segment = planned(segment, exponents, resolution, work)
        new = segment.run(state.q, exponents)
        coarse = tail(new) > ACCEPTED_TAIL * resolution.tail
        if not np.all(np.isfinite(new)):
            longest = 0.3 * span
        elif edge(new) > max(ACCEPTED_EDGE * resolution.edge, tail(new) * coarse):
            longest, margin = 0.7 * span, 1.1 * margin
        elif coarse:
            # The amplitudes decay at least exponentially with the wavenumber.
            longest = 0.7 * span
            finer *= min(max(math.log(resolution.tail) / math.log(min(tail(new), 0.5)), 1.1), 1.6)
        elif not np.all(np.isfinite(raw[:, new.ravel() > 1e-6 * new.max()])):
            raise NonFiniteError(f"drift or diffusion is not finite near z = {box.centre}")
        else:
            time = t1 if span == left else state.time + span
            margin = max(MARGIN, 0.95 * margin)
            return State(time, box, new, raw[-1], margin, state.missed + (missed or 0), segment)


def planned(segment: Segment, exponents: np.ndarray, resolution: Resolution, work: Work) -> Segment:
    """The segment with expansions of its exponentials, if the remaining work suffices."""
    if exponents.ndim == 3:
        work.spend(len(exponents) * segment.size**3 / 30)
        return segment
    expansions = tuple(Expansion.of(*spectral_bounds(each), 0.1 * resolution.edge) for each in exponents)
    work.spend(2 * sum(each.products for each in expansions) * segment.size**2)
    return segment._replace(expansions=expansions)


def relative_difference(q: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The relative error of the density at each node: the smaller of the largest relative difference and the
    largest absolute difference divided by the density, both taken over the node and its neighbours."""
    gap, size = np.abs(q - other) + LEAST_EDGE * np.max(q), np.maximum(np.abs(q), 1e-300)
    largest = functools.partial(scipy.ndimage.maximum_filter, size=3, mode="wrap")
    return np.minimum(largest(gap / size), largest(gap) / size)


@functools.partial(jit, level=1)
def _after_point(sde: AbstractSDE, point: Numbers, time: Numbers) -> tuple[Numbers, Numbers]:
    """Mean and covariance a short time after a point, by Taylor series for the SDE linearised there."""
    ito, middle = to_ito(sde), 0.5 * time
    sigma, slope = noise_matrix(sde.noise(middle, point)), jax.jacfwd(ito.drift, 1)(middle, point)
    move, added = time * ito.drift(middle, point), time * sigma @ sigma.T
    mean, covariance = point + move, added
    for order in range(2, 8):
        move, half = time / order * slope @ move, time / order * slope @ added
        added = half + half.T
        mean, covariance = mean + move, covariance + added
    return mean, covariance


@functools.partial(jit, level=1)
def _log_prob(base: Any, x: Numbers) -> Numbers:
    return jax.vmap(base.log_prob)(x)


@functools.partial(jit, level=1)
def _draws(base: Any) -> Numbers:
    return base.sample(key=jax.random.key(0), shape=(BASE_DRAWS,))


def values_of(tree: Any) -> Any:
    """The concrete values of arrays that are being differentiated."""
    tree = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, tree)
    if any(is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise TypeError(
            "rf.density.Grid chooses its mesh from concrete values: call it outside of jit and vmap"
        )
    return tree


def replay(sde: AbstractSDE, begin: Beginning, states: list[State]) -> Numbers:
    """The density of a solution for differentiation, with the same boxes, meshes and steps."""
    q = begin.density(states[0].box, len(states[0].q))
    for segment in (state.segment for state in states[1:]):
        q = _run(segment, q, segment.exponents(segment.coefficients(sde)))
    return q


def log_prob_and_error(
    sde: AbstractSDE, base: Any, start: Any, t1: float, x: Numbers, tolerance: float, max_work: float
) -> tuple[Numbers, Numbers]:
    """log p at x `(N, d)` and its error. Solutions are refined until two of them agree to the tolerance."""

    def evaluate(values: Numbers, x: Numbers) -> tuple[Numbers, Numbers]:
        return in_batches(lambda some: _evaluate(values, gap, box, some), x)

    still, first, point = values_of((sde, base, start))
    points = np.asarray(values_of(x))
    value, error, extra = np.full(len(x), np.nan), np.full(len(x), np.inf), 0.0
    solutions, left, share = [], max_work, FIRST_SHARE
    for number in range(MAX_SOLUTIONS):
        limit = left if number else FIRST_WORK * left
        work, resolution = Work(limit), Resolution.of(number, tolerance, share, points.shape[1])
        try:
            begin = Beginning.of(still, first, point, t1, number)
            solutions.append(solve(still, begin, t1, resolution, work))
        except (Unresolved, np.linalg.LinAlgError):
            break
        left -= limit - work.left
        box, q = solutions[-1][-1][1:3]
        gap = 0 * q
        if number:
            old, before = solutions[-2][-1][1:3]
            gap = relative_difference(q, transferred(before, old, box, len(q)))
        logs, bars = (np.asarray(a) for a in evaluate(q, points))
        shares = np.nan_to_num(np.exp(logs + box.log_volume) / np.max(q))
        if number:
            extra = FLOOR + solutions[-1][-1].missed + begin.error(solutions[-1][0])
            value, error = logs, bars + extra
            unmet = np.any(~(error <= tolerance) & (shares > 0.5 * LOWEST))
            if not unmet or 2 * (limit - work.left) > left:
                break
        inside = np.all(np.abs(box.coordinates(points)) < 1, axis=1)
        share = min(0.1 * share, max(LOWEST, np.min(shares[inside], initial=1)))
    traced = any(is_traced(leaf) for leaf in jax.tree.leaves((sde, base, start, x)))
    if len(solutions) < 2 or not traced:
        return value, error
    begin = Beginning.of(sde, base, start, t1, len(solutions) - 1)
    value, error = evaluate(replay(sde, begin, solutions[-1]), x)
    return value, error + extra


def applies(flow: Any) -> str | None:
    """The reason why a grid cannot estimate the density of a flow; None if it can."""
    if flow.dimension not in MAX_SIZE:
        return f"a grid needs one or two dimensions, got {flow.dimension}"
    if not flow.noise_dimension:
        return "a grid needs noise, and this SDE has none: use rf.PullBack(1), which is exact"
    if not flow.driver.brownian:
        return f"a grid needs Brownian motion, got {type(flow.driver).__name__}"
    ends = getattr(getattr(flow.sde, "coordinates", None), "ends", ())
    if np.any(np.isfinite(np.array(ends, float))):
        return f"a grid needs a state space without boundaries, and {type(flow.sde).__name__} has some"
    return None


class Grid(AbstractEstimator):
    """log p(x) in one or two dimensions by the Fokker–Planck equation, without paths.

    `total_error` equals `solver_error`, the error due to the mesh and the time steps. This error is infinite,
    and `log_prob` is NaN, if x is outside the box around the density, if the density is below its error
    (about 1e-8 of the maximum), or if no mesh resolves the density. The coefficients and the density of the
    base should be smooth. The result can be differentiated in reverse mode with respect to x and the
    parameters of the SDE and the base. Choosing the mesh requires concrete values, so the estimator cannot
    be used inside `jit`.

    **Arguments:** `tolerance`, the total error to reach if `estimate` is called without one; `start`, a fixed
    initial state `(d,)` in place of the base.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: jnp.sin(z), lambda t, z: jnp.ones((1, 1)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    x = jnp.linspace(-3, 3, 5)[:, None]
    flow.estimate(x, key=jax.random.key(0), estimator=rf.density.Grid())
    ```
    """

    tolerance: float = 0.02
    start: Array | None = None

    def __check_init__(self):
        check_positive("tolerance", self.tolerance)

    def estimate(self, flow: Any, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        """log p at `x` of shape `(..., d)`; the key is not used."""
        del key
        if (reason := applies(flow)) is not None:
            raise ValueError(reason)
        x = jnp.asarray(as_real("x", x))
        check_vector("x", x, flow.dimension)
        tolerance = self.tolerance if accuracy.tolerance is None else accuracy.tolerance
        with fixed_functions():
            value, error = estimate(flow, x, tolerance, self.start)
        unmet = ~(error <= tolerance) & (accuracy.tolerance is not None)
        return Estimate.of(value, "grid", solver_error=error, unmet=unmet)


@in_double_precision
def estimate(
    flow: Any,
    x: Numbers,
    tolerance: float,
    start: Any = None,
    max_work: float = MAX_WORK,
) -> tuple[Numbers, Numbers]:
    """log p at `x` `(..., d)` and its error; NaN and infinity if `max_work` does not suffice."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(()).dtype
    model = (
        explicit(flow.sde, flow.dimension),
        flow.base,
        None if start is None else jnp.asarray(start, float),
        x,
    )
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def values(parameters: Any) -> tuple[Numbers, Numbers]:
        double = jax.tree.map(lambda a: a.astype(float), parameters)
        sde, base, start, points = eqx.combine(double, rest)
        points = jnp.reshape(points, (-1, flow.dimension)).astype(float)
        value, error = log_prob_and_error(sde, base, start, flow.t1, points, tolerance, max_work)
        # The error includes rounding to the precision of x.
        error = error + jnp.finfo(dtype).eps * jnp.nan_to_num(jnp.abs(value))
        value, error = (jnp.reshape(part, x.shape[:-1]).astype(dtype) for part in (value, error))
        return value, error

    traced = any(is_traced(leaf) for leaf in jax.tree.leaves(parameters))
    return differentiated_in_double_precision(values)(parameters) if traced else values(parameters)


def explicit(sde: AbstractSDE, dimension: int) -> AbstractSDE:
    """The SDE with explicit parameters, if arrays in closures of its functions are being differentiated."""
    t, z = jnp.zeros(()), jnp.zeros(dimension)
    hidden = is_traced(values_of(sde).drift(t, z)) or is_traced(noise_matrix(values_of(sde).noise(t, z)))
    return with_explicit_parameters(sde, z) if hidden else sde
