"""The Kalman filter for linear SDEs: exact likelihood, filtered states and smoothed states."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._linear import cholesky, solve_lower
from ..._programs import in_double_precision, jit
from ...transition import Unchanged
from ..models import Normal
from ._particles import Chain
from ._state_space import StateSpace

CLOSE = 1e-9  # a transition with a smaller relative error counts as linear
TAYLOR_TERMS, MAX_DOUBLINGS = 15, 32
PROBES = 3  # number of random states at which linearity is checked
MAX_CHECKED = 4096  # number of steps at which it is checked
LOG_TWO_PI = float(np.log(2 * np.pi))


class LinearModel(eqx.Module):
    """x' = F x + c + w and y = x + v in coordinates, w ~ N(0, Q) and v ~ N(0, R), for each state.

    The first state of a series has mean `mean` and covariance `covariance`; its components `flat` have a flat
    prior.
    """

    grow: Array  # (n, d, d), F of the transition into each state
    shift: Array  # (n, d)
    spread: Array  # (n, d, d), Q
    value: Array  # (n, d)
    seen: Array  # (n, d)
    error: Array  # (n, d), variances of the errors, 0 for exact values
    mean: Array  # (n, d), used where a series begins
    covariance: Array  # (d, d)
    flat: Array  # (d,)
    first: Array  # (n,)


class Filtered(eqx.Module):
    """`mean` and `covariance` of the states given the values so far; the predicted mean `ahead` and
    covariance `spread` before each value; and the log-density of each value. The variance of a flat prior is
    infinite."""

    mean: Array  # (n, d)
    covariance: Array  # (n, d, d)
    ahead: Array  # (n, d)
    spread: Array  # (n, d, d)
    log_prob: Array  # (n,)


def exact_step(rate: Array, drift: Array, later: Array, noise: Array, dt: Array) -> tuple[Array, ...]:
    """F, c and Q for a step dt of the SDE dX = (A X + b + c t) dt + Q^½ dB with `rate` A, `drift` b, `later`
    c, `noise` Q.

    The method is a Taylor series over dt/2ⁿ and n doublings, as in `linear_moments`, with time as an
    additional component. Because of its loops, it compiles in a third of the time.
    """
    d = len(drift)
    wide = jnp.zeros((d + 1, d + 1)).at[:d, :d].set(rate).at[:d, d].set(later)
    spread, unit = jnp.zeros((d + 1, d + 1)).at[:d, :d].set(noise), jnp.eye(d + 1)
    size = jax.lax.stop_gradient(dt * jnp.max(jnp.sum(jnp.abs(wide), axis=1)))
    doublings = jnp.clip(jnp.ceil(jnp.log2(jnp.maximum(size, 1e-30))) + 2, 0, MAX_DOUBLINGS)
    h = dt * jnp.exp2(-doublings)

    def extend(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        power, bend, integral, covariance = state
        power, half = h / k * (wide @ power), h / k * (wide @ bend)
        bend = half + half.T
        return power, bend, integral + power, covariance + bend

    first = (h * unit, h * spread)
    _, _, integral, covariance = jax.lax.fori_loop(2, TAYLOR_TERMS, extend, (*first, *first))

    def double(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        change, integral, covariance = state
        grow = change + unit
        new = (
            2 * change + change @ change,
            integral + grow @ integral,
            covariance + grow @ covariance @ grow.T,
        )
        return jax.tree.map(lambda a, b: jnp.where(i < doublings, a, b), new, state)

    start = (wide @ integral, integral, covariance)
    change, integral, covariance = jax.lax.fori_loop(0, MAX_DOUBLINGS, double, start)
    shift = integral @ jnp.append(drift, 1.0)
    return jnp.eye(d) + change[:d, :d], shift[:d], covariance[:d, :d]


def affine(space: StateSpace, time: Array, dt: Array) -> tuple[Array, ...]:
    """F, c and Q of one step z′ = F z + c + N(0, Q) of a linear SDE, whose inhomogeneous term is taken to be
    linear in time during the step."""
    zero, middle = jnp.zeros(space.rows.fixed.shape[1]), time + 0.5 * dt
    rate = jax.jacfwd(lambda z: space.fields(middle, z)[0])(zero)
    # Inputs may jump at the ends of a step, so they are evaluated inside it.
    early, late = (space.fields(time + part * dt, zero)[0] for part in (0.25, 0.75))
    later = 2 * (late - early) / dt
    sigma = space.fields(middle, zero)[1]
    return exact_step(rate, early - 0.25 * dt * later, later, sigma @ sigma.T, dt)


@in_double_precision
def is_linear(space: StateSpace) -> bool:
    """Whether the model is linear and Gaussian, checked at random states: the drift is affine in the state,
    the noise does not depend on the state, values are components of the state, and the first state is
    normal."""
    straight = isinstance(space.coordinates, Unchanged)
    if space.observe is not None or not (straight or space.deviations() is None):
        return False
    if space.exact and not type(space.sde).__module__.startswith("roughflow."):
        return False  # the transitions may not follow from drift and diffusion
    try:
        return is_affine(space) and _starts_normal(_in_doubles(space))
    except (TypeError, NotImplementedError):
        return False


@in_double_precision
def is_affine(space: StateSpace) -> bool:
    """Whether the SDE is linear at random states, and whether a step equals two half steps and is therefore
    exact. Single precision cannot tell, so the check uses double precision."""
    return bool(_is_affine(_in_doubles(space)))


def _in_doubles(space: StateSpace) -> StateSpace:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float) if eqx.is_inexact_array(leaf) else leaf, space)


@functools.partial(jit, level=1)
def _is_affine(space: StateSpace) -> Array:
    rows, d = space.rows, space.rows.fixed.shape[1]
    places = np.unique(np.linspace(0, len(rows.dt) - 1, MAX_CHECKED).astype(int))
    time, dt = rows.times[rows.before[places]], rows.dt[places]
    # Whole steps and their first and second halves, in one program.
    spans = jnp.concatenate([time, time, time + dt / 2]), jnp.concatenate([dt, dt / 2, dt / 2])
    states = np.random.default_rng(0).normal(size=(PROBES, d))
    states = jnp.asarray(np.concatenate([np.zeros((1, d)), np.eye(d), states]))
    drift, sigma = jax.vmap(lambda t: jax.vmap(lambda z: space.fields(t, z))(states))(spans[0] + spans[1] / 2)
    slope = drift[:, 1 : d + 1] - drift[:, :1]
    straight = drift[:, :1] + jnp.einsum("pi,kij->kpj", states, slope)
    size = lambda a: jnp.max(jnp.abs(a), initial=0.0)
    close = lambda a, b: size(a - b) <= CLOSE * (size(a) + size(b))
    good = close(drift, straight) & close(sigma, jnp.broadcast_to(sigma[:, :1], sigma.shape))
    blocks = jax.vmap(lambda t, h: affine(space, t, h))(*spans)
    whole, half, rest = (tuple(part) for part in zip(*(jnp.split(b, 3) for b in blocks), strict=True))
    mean = jnp.einsum("kij,kj->ki", rest[0], half[1]) + rest[1]
    spread = jnp.einsum("kij,kjl,kml->kim", rest[0], half[2], rest[0]) + rest[2]
    return good & close(mean, whole[1]) & close(spread, whole[2]) & jnp.all(jnp.isfinite(drift))


def _starts_normal(space: StateSpace) -> bool:
    """Whether the unobserved components of the first state are known, normal, or have a flat prior."""
    start = space.start()
    if not hasattr(start, "log_prob") or isinstance(start, Normal):
        return True
    if not isinstance(space.coordinates, Unchanged):
        return False
    probes = np.random.default_rng(1).normal(size=(2, len(space.unknown)))
    bends = [jax.hessian(lambda x: jnp.sum(start.log_prob(x)))(jnp.asarray(x)) for x in probes]
    return np.allclose(*bends, rtol=CLOSE, atol=0) and bool(np.isfinite(bends[0]).all())


def _normal_start(space: StateSpace) -> Normal:
    """The distribution of the unobserved components of the first state, which must be normal. Components
    that are known or have a flat prior have zero variance."""
    start, zero = space.start(), jnp.zeros(len(space.unknown))
    if not hasattr(start, "log_prob"):
        return Normal(zero, jnp.zeros((len(zero), len(zero))))
    if isinstance(start, Normal):
        return start
    log_prob = lambda x: jnp.sum(start.log_prob(x))
    covariance = jnp.linalg.inv(-jax.hessian(log_prob)(zero))
    return Normal(covariance @ jax.grad(log_prob)(zero), covariance)


def linear_model(space: StateSpace) -> LinearModel:
    """The matrices of a linear model."""
    rows, (n, d) = space.rows, space.rows.fixed.shape
    blocks = jax.vmap(lambda time, dt: affine(space, time, dt))(rows.times[rows.before], rows.dt)
    grow, shift, spread = (
        jnp.zeros((n, *block.shape[1:])).at[rows.before + 1].set(block) for block in blocks
    )
    c = min(rows.values.shape[1], d)
    value = space.pinned(jnp.zeros((n, d)))
    seen = jnp.zeros((n, d), bool).at[:, :c].set(rows.seen[:, :c])
    deviations = space.deviations()
    error = jnp.zeros((n, d))
    if deviations is not None:
        error = error.at[:, :c].set(deviations[:, :c] ** 2)
        value = jnp.where(rows.fixed, value, value.at[:, :c].set(rows.values[:, :c]))
    start, unknown = _normal_start(space), np.array(space.unknown, int)
    known = jnp.where(rows.fixed, value, jnp.zeros((n, d)).at[:, unknown].set(start.mean[None]))
    covariance = jnp.zeros((d, d)).at[np.ix_(unknown, unknown)].set(start.covariance)
    flat = np.isin(np.arange(d), unknown) & (space.start() is None)
    return LinearModel(
        grow,
        shift,
        spread,
        value,
        seen,
        jnp.where(rows.fixed, 0, error),
        known,
        covariance,
        jnp.asarray(flat),
        rows.first,
    )


def kalman_filter(model: LinearModel, fixed: Array) -> Filtered:
    """The Kalman filter with exact treatment of flat priors (de Jong 1991).

    Innovations are linear in δ, the components of the first state with a flat prior. With innovations v − Vδ
    of covariance S, the integral over δ adds ½ bᵀA⁻¹b − ½ log |A/2π| with A = Σ VᵀS⁻¹V and b = Σ VᵀS⁻¹v.
    """
    d, unit = model.value.shape[1], jnp.eye(model.value.shape[1])
    flat = jnp.diag(model.flat.astype(unit.dtype))

    def step(carried: tuple, now: tuple) -> tuple[tuple, tuple]:
        state, covariance, products = carried
        grow, shift, spread, value, seen, error, mean, known, first = now
        ahead = (grow @ state).at[:, 0].add(shift)
        wide = grow @ covariance @ grow.T + spread
        begin = jnp.concatenate([mean[:, None], flat], axis=1)
        ahead, wide = jnp.where(first, begin, ahead), jnp.where(first, model.covariance, wide)
        products = jnp.where(first, 0, products)
        used = seen & ~(first & known)
        mask = used.astype(unit.dtype)
        inner = mask[:, None] * mask[None] * (wide + jnp.diag(error)) + jnp.diag(1 - mask)
        # The innovation, and its derivative with respect to δ.
        gap = mask[:, None] * (jnp.concatenate([value[:, None], jnp.zeros((d, d))], axis=1) - ahead)
        factor = cholesky(inner)
        white, gain = solve_lower(factor, gap), solve_lower(factor, mask[:, None] * wide)
        log_prob = -0.5 * jnp.sum(white[:, 0] ** 2) - jnp.sum(
            jnp.log(jnp.diag(factor)) + 0.5 * LOG_TWO_PI * mask
        )
        before = products
        products = products + white.T @ white
        state, covariance = ahead + gain.T @ white, wide - gain.T @ gain
        log_prob = (
            log_prob + _integral(products, model.flat) - jnp.where(first, 0, _integral(before, model.flat))
        )
        shown = (state, covariance, products), (ahead, wide, before)
        return (state, 0.5 * (covariance + covariance.T), products), (*shown, log_prob)

    zero = jnp.zeros((d, d + 1)), jnp.zeros((d, d)), jnp.zeros((d + 1, d + 1))
    parts = (model.grow, model.shift, model.spread, model.value, model.seen, model.error)
    _, (after, before, log_prob) = jax.lax.scan(step, zero, (*parts, model.mean, fixed, model.first))
    mean, covariance = jax.vmap(lambda x, p, g: _with_flat(x, p, g, model.flat))(*after)
    ahead, spread = jax.vmap(lambda x, p, g: _with_flat(x, p, g, model.flat))(*before)
    return Filtered(mean, covariance, ahead, spread, log_prob)


def _determined(products: Array, flat: Array) -> tuple[Array, Array, Array]:
    """A Cholesky factor of A (with ones for components that are not flat), b, and whether A is
    nonsingular."""
    keep = flat.astype(products.dtype)
    a = products[1:, 1:] * keep[:, None] * keep[None] + jnp.diag(1 - keep)
    b = -products[1:, 0] * keep
    pivots = jnp.diag(a)
    scale = jnp.sqrt(jnp.where(pivots > 0, pivots, 1.0))
    factor = cholesky(a / scale[:, None] / scale[None])
    good = jnp.all(jnp.isfinite(factor)) & jnp.all(pivots > 0) & jnp.all(jnp.diag(factor) > 1e-7)
    safe = jnp.where(good, factor, jnp.eye(len(a))) * scale[:, None]
    return safe, b, good


def _integral(products: Array, flat: Array) -> Array:
    """The logarithm of the integral over δ; 0 as long as the values do not determine δ."""
    factor, b, good = _determined(products, flat)
    keep = flat.astype(products.dtype)
    half = jnp.sum(solve_lower(factor, b) ** 2) / 2 - jnp.sum(jnp.log(jnp.diag(factor)))
    return jnp.where(good, half + 0.5 * LOG_TWO_PI * jnp.sum(keep), 0.0)


def _with_flat(state: Array, covariance: Array, products: Array, flat: Array) -> tuple[Array, Array]:
    """The mean and covariance of a state, with δ integrated out."""
    factor, b, good = _determined(products, flat)
    reach = solve_lower(factor, (state[:, 1:] * flat.astype(state.dtype)[None]).T)  # (d, d)
    mean = state[:, 0] + reach.T @ solve_lower(factor, b)
    wide = covariance + reach.T @ reach
    open_ = ~good & jnp.any(jnp.abs(state[:, 1:]) * flat.astype(state.dtype)[None] > 0, axis=1)
    unknown = open_[:, None] & jnp.eye(len(mean), dtype=bool)
    return jnp.where(open_, jnp.nan, mean), jnp.where(unknown, jnp.inf, wide)


def smoothed_states(model: LinearModel, fixed: Array) -> tuple[Array, Array]:
    """Means `(n, d)` and covariances `(n, d, d)` of the states given all values, from the block-tridiagonal
    precision of all states."""
    first, free = model.first, ~fixed
    unit = jnp.eye(model.value.shape[1])
    spread = jnp.where(first[:, None, None], unit[None], model.spread)
    inverse = jax.vmap(_inverse)(spread) * jnp.where(first, 0, 1)[:, None, None]
    # The normal prior of the first state of each series.
    normal = jnp.diag(model.covariance) > 0
    prior = model.covariance + jnp.diag(jnp.where(normal, 0.0, 1.0))
    keep = normal.astype(unit.dtype)
    prior = _inverse(prior) * keep[:, None] * keep[None]
    path = jnp.where(fixed, jnp.where(first[:, None], model.mean, model.value), 0.0)
    own = jnp.where(first[:, None, None], prior[None], inverse)
    noisy = model.seen & free
    own = own + jax.vmap(jnp.diag)(jnp.where(noisy, 1 / jnp.where(noisy, model.error, 1), 0))
    later = jnp.einsum("nij,njk,nkl->nil", jnp.swapaxes(model.grow, 1, 2), inverse, model.grow)
    diagonal = own.at[:-1].add(later[1:])
    below = jnp.zeros_like(own).at[:-1].set(-jnp.einsum("nij,njk->nik", inverse, model.grow)[1:])
    # The gradient at `path`, where hidden components are zero.
    gap = path - model.shift - jnp.einsum("nij,nj->ni", model.grow, jnp.roll(path, 1, axis=0))
    pull = jnp.einsum("nij,nj->ni", inverse, gap)
    slope = -pull + jnp.where(first[:, None], (model.mean - path) @ prior, 0.0)
    slope = slope.at[:-1].add(jnp.einsum("nji,nj->ni", model.grow, pull)[1:])
    slope = slope + jnp.where(noisy, (model.value - path) / jnp.where(noisy, model.error, 1), 0)
    chain = Chain.of_free(diagonal, below, free)
    move = chain.backward(chain.forward(jnp.where(free, slope, 0)[..., None]))[..., 0]
    mask = free.astype(unit.dtype)
    return path + move, chain.variances() * mask[:, :, None] * mask[:, None]


def _inverse(matrix: Array) -> Array:
    half = solve_lower(cholesky(matrix), jnp.eye(len(matrix)))
    return half.T @ half
