"""Problems for `benchmarks.density` whose density is known exactly or from a method outside roughflow.

Each problem has the driver that a careful user would choose. `rf.Legendre` is spectrally accurate for a
linear SDE with additive noise, so six functions suffice. The logarithm of geometric Brownian motion depends
only on B(T), which `rf.KarhunenLoeve` represents exactly. For other problems no driver converges faster than
1/n, and the truncation error that the library reports determines the number of functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from scipy import linalg, optimize, special, stats

import roughflow as rf
from benchmarks.fokker_planck import fokker_planck, without_fine_noise

SIDES = {"centre": 0.0, "-3 sd": -3.0, "+3 sd": 3.0}
TAIL = stats.norm.cdf(list(SIDES.values()))  # the same three points as quantiles


@dataclass(frozen=True)
class Problem:
    """A flow, some points, and the true log-densities there. `goal` names the requirement on the default
    estimator."""

    flow: rf.StochasticFlow
    labels: tuple[str, ...]
    x: np.ndarray  # (k, d)
    truth: np.ndarray  # log p, (k,)
    goal: str  # "bias" or "bars"
    setting: str
    left_out: np.ndarray | float = 0.0  # truncation error of the driver in log p, where it is not small


class LogNormalBase(eqx.Module):
    """The distribution of the exponentials of independent normal variables; `from_normal` keeps searches on
    the positive side."""

    loc: Array
    scale: Array

    def from_normal(self, u: Array) -> Array:
        return jnp.exp(self.loc + self.scale * u)

    def sample(self, *, key, shape: tuple[int, ...] = ()) -> Array:
        return self.from_normal(jax.random.normal(key, (*shape, self.loc.size)))

    def log_prob(self, z: Array) -> Array:
        y = jnp.log(z)
        return jnp.sum(jax.scipy.stats.norm.logpdf(y, self.loc, self.scale) - y, axis=-1)


class GammaBase(eqx.Module):
    """One gamma variable. Its cube root is nearly normal (Wilson & Hilferty 1931), and a softplus keeps the
    cube root positive."""

    shape: float
    rate: float

    def from_normal(self, u: Array) -> Array:
        root = 1 - 1 / (9 * self.shape) + u / (3 * self.shape**0.5)
        return self.shape / self.rate * (0.05 * jax.nn.softplus(root / 0.05)) ** 3

    def sample(self, *, key, shape: tuple[int, ...] = ()) -> Array:
        return jax.random.gamma(key, self.shape, (*shape, 1)) / self.rate

    def log_prob(self, z: Array) -> Array:
        return jnp.sum(jax.scipy.stats.gamma.logpdf(z, self.shape, scale=1 / self.rate), axis=-1)


class SechBase(eqx.Module):
    """The density sech(y)/π, with the inverse distribution function log tan(πp/2)."""

    def from_normal(self, u: Array) -> Array:
        # Computed by symmetry from the lower tail, where p loses no digits.
        side = jnp.where(u > 0, -1.0, 1.0)
        return side * jnp.log(jnp.tan(0.5 * jnp.pi * jax.scipy.special.ndtr(side * u)))

    def sample(self, *, key, shape: tuple[int, ...] = ()) -> Array:
        return self.from_normal(jax.random.normal(key, (*shape, 1)))

    def log_prob(self, z: Array) -> Array:
        return jnp.sum(jnp.log(2 / jnp.pi) - jnp.logaddexp(z, -z), axis=-1)


def ou_1d() -> Problem:
    sde = rf.ItoSDE(lambda t, z: -2.0 * z, lambda t, z: jnp.array([[1.3]]))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1), 0.5), driver=rf.Legendre(6))
    variance = 0.25 * np.exp(-4.0) + 1.3**2 / 4 * (1 - np.exp(-4.0))
    known = stats.norm(np.exp(-2.0), variance**0.5)
    x = known.ppf(TAIL)
    return Problem(flow, tuple(SIDES), x[:, None], known.logpdf(x), "bias", "Legendre(6)")


def ou_2d() -> Problem:
    return _ou(2)


def ou_10d() -> Problem:
    return _ou(10)


def _ou(d: int) -> Problem:
    """A random stable drift matrix and a full noise matrix. The density is normal; matrix exponentials give
    its covariance."""
    rng = np.random.default_rng(d + 1)
    drift = 0.6 * rng.standard_normal((d, d)) / d**0.5 - 1.5 * np.eye(d)
    noise = 0.5 * rng.standard_normal((d, d)) / d**0.5 + 0.5 * np.eye(d)
    assert np.linalg.eigvals(drift).real.max() < 0
    loc, scale = rng.standard_normal(d), np.linspace(0.5, 1.0, d)
    sde = rf.ItoSDE(lambda t, z: jnp.asarray(drift) @ z, lambda t, z: jnp.asarray(noise))
    flow = rf.StochasticFlow(sde, rf.Normal(loc, scale), driver=rf.Legendre(6))
    grow, square = linalg.expm(drift), noise @ noise.T
    added = linalg.solve_continuous_lyapunov(drift, grow @ square @ grow.T - square)
    mean, covariance = grow @ loc, grow @ np.diag(scale**2) @ grow.T + added
    labels, x = _around(mean, covariance)
    truth = stats.multivariate_normal.logpdf(x, mean, covariance)
    return Problem(flow, labels, x, truth, "bias", "Legendre(6)")


def _around(mean: np.ndarray, covariance: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """The centre, and three standard deviations along the first coordinate and the longest axis."""
    sizes, axes = np.linalg.eigh(covariance)
    main = 3 * sizes[-1] ** 0.5 * axes[:, -1]
    first = 3 * covariance[0, 0] ** 0.5 * np.eye(len(mean))[0]
    x = mean + np.stack([0 * mean, first, -first, main, -main])
    return ("centre", "+3 sd, z1", "-3 sd, z1", "+3 sd, main", "-3 sd, main"), x


def gbm_1d(rate: float = 0.3, sigma: float = 0.6) -> Problem:
    """From a lognormal start the distribution is lognormal."""
    sde = rf.ItoSDE(lambda t, z: rate * z, lambda t, z: sigma * z[:, None])
    flow = rf.StochasticFlow(sde, LogNormalBase(jnp.log(jnp.array([2.0])), jnp.array([0.3])))
    known = stats.norm(np.log(2.0) + rate - 0.5 * sigma**2, np.hypot(0.3, sigma))
    y = known.ppf(TAIL)
    return Problem(flow, tuple(SIDES), np.exp(y)[:, None], known.logpdf(y) - y, "bias", "KarhunenLoeve(6)")


def gbm_2d() -> Problem:
    rate, noise = np.array([0.2, -0.1]), np.array([[0.5, 0.0], [0.3, 0.4]])
    loc, scale = np.log([1.0, 2.0]), np.array([0.2, 0.3])
    diffusion = lambda t, z: z[:, None] * jnp.asarray(noise)
    sde = rf.ItoSDE(lambda t, z: jnp.asarray(rate) * z, diffusion)
    flow = rf.StochasticFlow(sde, LogNormalBase(jnp.asarray(loc), jnp.asarray(scale)))
    mean = loc + rate - 0.5 * np.sum(noise**2, axis=1)
    covariance = np.diag(scale**2) + noise @ noise.T
    labels, y = _around(mean, covariance)
    truth = stats.multivariate_normal.logpdf(y, mean, covariance) - y.sum(axis=1)
    return Problem(flow, labels, np.exp(y), truth, "bias", "KarhunenLoeve(6)")


KAPPA, THETA, SIGMA = 1.0, 1.0, 3**-0.5  # of the CIR process; 2κθ/σ² = 6


def cir() -> Problem:
    """The CIR process in equilibrium, with a gamma distribution at the start and at the end."""
    shape, rate = 2 * KAPPA * THETA / SIGMA**2, 2 * KAPPA / SIGMA**2
    known = stats.gamma(shape, scale=1 / rate)
    x = known.ppf(TAIL)
    return _cir(GammaBase(shape, rate), x, known.logpdf(x))


def cir_relaxing() -> Problem:
    """The CIR process from a gamma distribution out of equilibrium. Quadrature integrates the noncentral χ²
    transition over the start."""
    start = GammaBase(10.0, 5.0)
    nodes, weights = special.roots_genlaguerre(60, start.shape - 1)
    weights = weights / weights.sum()
    decay = np.exp(-KAPPA)
    c = 2 * KAPPA / (SIGMA**2 * (1 - decay))
    transition = stats.ncx2(4 * KAPPA * THETA / SIGMA**2, 2 * c * decay * nodes / start.rate)
    below = lambda x: weights @ transition.cdf(2 * c * x)
    x = np.array([optimize.brentq(lambda x, p=p: below(x) - p, 1e-3, 20.0, xtol=1e-10) for p in TAIL])
    truth = np.log([2 * c * weights @ transition.pdf(2 * c * point) for point in x])
    return _cir(start, x, truth)


def _cir(base: GammaBase, x: np.ndarray, truth: np.ndarray) -> Problem:
    diffusion = lambda t, z: SIGMA * jnp.sqrt(jnp.maximum(z, 1e-12))[:, None]
    sde = rf.ItoSDE(lambda t, z: KAPPA * (THETA - z), diffusion)
    flow = rf.StochasticFlow(sde, base, driver=rf.KarhunenLoeve(12))
    return Problem(flow, tuple(SIDES), x[:, None], truth, "bars", "KarhunenLoeve(12)")


def sech(c: float = 1.0) -> Problem:
    """dY = −½c² tanh(Y) dt + c dB, in its equilibrium sech(y)/π with standard deviation π/2."""
    sde = rf.ItoSDE(lambda t, z: -0.5 * c**2 * jnp.tanh(z), lambda t, z: jnp.array([[c]]))
    flow = rf.StochasticFlow(sde, SechBase(), driver=rf.KarhunenLoeve(16))
    x = 0.5 * np.pi * np.array(list(SIDES.values()))
    return Problem(flow, tuple(SIDES), x[:, None], -np.log(np.pi * np.cosh(x)), "bars", "KarhunenLoeve(16)")


def banana() -> Problem:
    """A small continuous normalizing flow fitted to banana data, with its own density from an accurate
    solve."""
    drift = _fit(rf.MLP(2, 2, width=16, depth=2, key=jax.random.key(0)))
    flow = _noiseless(drift, rf.FixedGrid(steps=16))
    exact = _noiseless(drift, rf.Adaptive(rtol=1e-10, atol=1e-10))
    places = {"centre": (0, 0), "-3 sd, arm": (-3, 4.5), "+3 sd, arm": (3, 4.5), "+3 sd, across": (0, 0.9)}
    x = np.array(list(places.values()), float)
    truth = exact.log_prob_given_path(x, exact.sample_path(key=jax.random.key(0)))
    return Problem(flow, tuple(places), x, np.asarray(truth), "bars", "no noise, 16 steps")


def _noiseless(drift: rf.MLP, integrator) -> rf.StochasticFlow:
    sde = rf.ItoSDE(drift, rf.sde.NoDiffusion())
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), integrator=integrator)


def _fit(drift: rf.MLP, steps: int = 300, batch: int = 256) -> rf.MLP:
    """Maximum likelihood on x₁ ~ N(0, 1), x₂ = ½x₁² + 0.3 N(0, 1)."""
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def loss(drift, x):
        flow = _noiseless(drift, rf.FixedGrid())
        return -jnp.mean(flow.log_prob_given_path(x, flow.sample_path(key=jax.random.key(0))))

    def step(carry, key):
        drift, state = carry
        noise = jax.random.normal(key, (batch, 2))
        x = noise.at[:, 1].set(0.5 * noise[:, 0] ** 2 + 0.3 * noise[:, 1])
        updates, state = optimiser.update(eqx.filter_grad(loss)(drift, x), state)
        return (eqx.apply_updates(drift, updates), state), None

    start = (drift, optimiser.init(eqx.filter(drift, eqx.is_array)))
    return jax.jit(lambda keys: jax.lax.scan(step, start, keys)[0][0])(
        jax.random.split(jax.random.key(1), steps)
    )


def double_well() -> Problem:
    """Drift (x − x³, x − y) with noise that does not commute. Most backward paths escape.

    The true density comes from the Fokker–Planck equation, independently of this library. The truncation
    error with n functions is c/n, up to 0.05 in the tails with twenty functions, so sixty-four are used. The
    remaining truncation error is computed from the same equation.
    """
    drift = lambda t, z: jnp.stack([z[0] - z[0] ** 3, z[0] - z[1]])
    diffusion = lambda t, z: _rows([[1, 0.5 * jnp.tanh(z[1])], [0.5 * jnp.sin(z[0]), 1]])
    sde = rf.ItoSDE(drift, diffusion)
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), driver=rf.KarhunenLoeve(64))
    x = np.array([[0.0, 0], [1, 1], [-1, 1], [2, -1], [2.2, 3]])
    labels = tuple(f"({a:g}, {b:g})" for a, b in x)
    truth, driven = (np.log(fokker_planck(s, x)) for s in (sde, without_fine_noise(sde, 64)))
    return Problem(flow, labels, x, truth, "bars", "KarhunenLoeve(64)", driven - truth)


def _rows(entries: list) -> Array:
    return jnp.stack([jnp.stack([jnp.asarray(e, float) for e in row]) for row in entries])


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "ou-1": ou_1d,
    "ou-2": ou_2d,
    "ou-10": ou_10d,
    "gbm-1": gbm_1d,
    "gbm-2": gbm_2d,
    "cir": cir,
    "cir-relaxing": cir_relaxing,
    "sech": sech,
    "banana": banana,
    "double-well": double_well,
}
