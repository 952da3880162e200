"""SDEs with known answers, each in Itô and in Stratonovich form. The two are written out by hand, so that
neither is derived from the other by the code under test."""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg, stats

import roughflow as rf
from roughflow.density._paths import summary


@dataclass(frozen=True)
class Problem:
    name: str
    ito: rf.ItoSDE
    stratonovich: rf.StratonovichSDE
    base: rf.Normal
    t1: float
    x: np.ndarray  # points to look at, (k, d)


def _additive(name, drift, sigma, base, t1, x):
    """With noise that does not depend on the state the two forms coincide."""
    diffusion = lambda t, z: jnp.asarray(sigma)
    return Problem(name, rf.ItoSDE(drift, diffusion), rf.StratonovichSDE(drift, diffusion), base, t1, x)


def ou_1d():
    return _additive(
        "OU 1-D",
        lambda t, z: -2.0 * z,
        np.array([[1.3]]),
        rf.Normal(jnp.ones(1), 0.5),
        1.0,
        np.array([[0.1], [-1.0], [2.0]]),
    )


OU4_DRIFT = np.array([[-1.0, 0.5, 0, 0], [-0.5, -1, 0, 0.2], [0, 0.3, -0.7, 0], [0.1, 0, 0, -1.5]])
OU4_NOISE = np.array([[1.0, 0, 0.2], [0.5, 0.8, 0], [0, 0.3, 1], [0.2, -0.4, 0.6]])


def ou_4d():
    return _additive(
        "OU 4-D, 4x3 noise",
        lambda t, z: jnp.asarray(OU4_DRIFT) @ z,
        OU4_NOISE,
        rf.Normal(jnp.zeros(4), jnp.array([1.0, 0.5, 2.0, 1.0])),
        0.8,
        np.array([[0.1, 0.2, -0.3, 0.5], [1.0, -1, 1, 0]]),
    )


def brownian_with_drift():
    return _additive(
        "Brownian motion with drift",
        lambda t, z: jnp.array([0.7, -0.2]),
        np.array([[1.0, 0.4], [0.0, 0.6]]),
        rf.Normal(jnp.zeros(2)),
        1.5,
        np.array([[0.5, 0.5], [-1.0, 2.0]]),
    )


def gbm_1d(mu=0.3, sigma=0.6):
    diffusion = lambda t, z: sigma * z[:, None]
    return Problem(
        "GBM 1-D",
        rf.ItoSDE(lambda t, z: mu * z, diffusion),
        rf.StratonovichSDE(lambda t, z: (mu - 0.5 * sigma**2) * z, diffusion),
        rf.Normal(jnp.array([2.0]), 0.1),
        1.0,
        np.array([[1.5], [2.5], [4.0]]),
    )


GBM2_RATE = np.array([0.2, -0.1])
GBM2_NOISE = np.array([[0.5, 0.0], [0.3, 0.4]])


def gbm_2d():
    """dZᵢ = aᵢ Zᵢ dt + Zᵢ (L dB)ᵢ: the correction is ½ (L Lᵀ)ᵢᵢ Zᵢ."""
    diffusion = lambda t, z: z[:, None] * jnp.asarray(GBM2_NOISE)
    shift = 0.5 * np.sum(GBM2_NOISE**2, axis=1)
    return Problem(
        "GBM 2-D, correlated",
        rf.ItoSDE(lambda t, z: jnp.asarray(GBM2_RATE) * z, diffusion),
        rf.StratonovichSDE(lambda t, z: jnp.asarray(GBM2_RATE - shift) * z, diffusion),
        rf.Normal(jnp.array([1.0, 2.0]), 0.1),
        1.0,
        np.array([[1.2, 1.5], [0.8, 3.0]]),
    )


def nonlinear_3d():
    """3x2 noise with columns (sin y, 1, ½ cos x) and (0.3 z, cos x, 1), and time in the drift.

    Dσ₁ σ₁ = (cos y · 1, 0, −½ sin x · sin y),  Dσ₂ σ₂ = (0.3 · 1, −sin x · 0.3 z, 0).
    """

    def drift(t, v):
        x, y, z = v
        return jnp.stack([-x + jnp.sin(t) * y, jnp.tanh(x) - y, 0.5 * x * jnp.cos(z) - z])

    def diffusion(t, v):
        x, y, z = v
        one = jnp.ones_like(x)
        return jnp.stack(
            [
                jnp.stack([jnp.sin(y), 0.3 * z]),
                jnp.stack([one, jnp.cos(x)]),
                jnp.stack([0.5 * jnp.cos(x), one]),
            ]
        )

    def correction(v):
        x, y, z = v
        return 0.5 * jnp.stack([jnp.cos(y) + 0.3, -0.3 * z * jnp.sin(x), -0.5 * jnp.sin(x) * jnp.sin(y)])

    return Problem(
        "nonlinear 3-D, 3x2 noise",
        rf.ItoSDE(drift, diffusion),
        rf.StratonovichSDE(lambda t, v: drift(t, v) - correction(v), diffusion),
        rf.Normal(jnp.zeros(3)),
        1.0,
        np.array([[0.3, -0.2, 0.5], [1.0, 1.0, -1.0]]),
    )


PROBLEMS = [ou_1d(), ou_4d(), brownian_with_drift(), gbm_1d(), gbm_2d(), nonlinear_3d()]


# -------------------------------------------------------------------------- linear SDEs, in closed form


class LogNormal(eqx.Module):
    """exp N(loc, scale²), a base on half of space; or a gamma distribution there, by shape and scale."""

    loc: jax.Array
    scale: jax.Array
    gamma: tuple[float, float] | None = eqx.field(static=True, default=None)

    def from_normal(self, u):
        return jnp.exp(self.loc + self.scale * u)

    def sample(self, *, key, shape=()):
        flat = jax.vmap(self.from_normal)(jax.random.normal(key, (math.prod(shape), 1)))
        return jnp.reshape(flat, (*shape, 1))

    def log_prob(self, z):
        inside = jnp.where(z > 0, z, 1)
        if self.gamma is None:
            value = jax.scipy.stats.norm.logpdf(jnp.log(inside), self.loc, self.scale) - jnp.log(inside)
        else:
            value = jax.scipy.stats.gamma.logpdf(inside, self.gamma[0], scale=self.gamma[1])
        return jnp.sum(jnp.where(z > 0, value, -jnp.inf))


class Linear(eqx.Module):
    matrix: jax.Array

    def __call__(self, t, z):
        return self.matrix @ z


THREE = rf.KarhunenLoeve(3)


def linear(drift, noise, base, driver=THREE, t1=1.0):
    """dZ = A Z dt + S dB, solved to 1e-9. Its numbers are arrays: all of a shape share their compilations."""
    sde = rf.ItoSDE(Linear(jnp.asarray(drift)), rf.ConstantDiffusion(noise))
    return rf.StochasticFlow(sde, base, t1, driver, integrator=rf.FixedGrid(rf.flow.RK4(), steps=64))


def linear_distribution(drift, noise, mean, covariance, driver=None, t1=1.0):
    """The distribution of Z at t1, driven by a smooth `driver` or, without one, by Brownian motion.

    Z_T = e^{AT} Z₀ + ∫ e^{A(T−t)} S Ḃ dt is linear in the path's coefficients; integrals by Gauss's rule.
    """
    nodes, weights = np.polynomial.legendre.leggauss(40)
    s, weights = (nodes + 1) / 2, weights * t1 / 2
    push = np.stack([linalg.expm(t1 * (1 - u) * drift) @ noise for u in s])
    if driver is None:
        added = np.einsum("t,tij,tkj->ik", weights, push, push)
    else:
        basis = jax.vmap(lambda u: driver.slope(u, jnp.eye(driver.num_functions)))(jnp.asarray(s))
        moved = np.einsum("t,tn,tij->inj", weights, basis / t1**0.5, push)
        added = np.einsum("inj,knj->ik", moved, moved)
    grow = linalg.expm(t1 * np.asarray(drift))
    return stats.multivariate_normal(grow @ mean, grow @ covariance @ grow.T + added)


def ou(rate=1.0, noise=1.2, mean=1.0, scale=0.5, driver=THREE):
    """dZ = −rate Z dt + noise dB in one dimension, from N(mean, scale²)."""
    base = rf.Normal(jnp.reshape(jnp.asarray(mean), (1,)), scale)
    return linear(jnp.reshape(-rate, (1, 1)), jnp.reshape(noise, (1, 1)), base, driver)


def ou_distribution(rate=1.0, noise=1.2, mean=1.0, scale=0.5, driver=None):
    return linear_distribution(
        np.array([[-rate]]), np.array([[noise]]), np.array([mean]), np.eye(1) * scale**2, driver
    )


class Well(eqx.Module):
    """Drift (rate (x − x³), x − y)."""

    rate: jax.Array

    def __call__(self, t, z):
        return jnp.stack([self.rate * (z[0] - z[0] ** 3), z[0] - z[1]])


def no_commuting(t, z):
    rows = [[jnp.ones_like(z[0]), 0.5 * jnp.tanh(z[1])], [0.5 * jnp.sin(z[0]), jnp.ones_like(z[0])]]
    return jnp.stack([jnp.stack(row) for row in rows])


def double_well(rate=1.0, **settings):
    """Noise that does not commute; most backward paths escape."""
    return rf.StochasticFlow(
        rf.ItoSDE(Well(jnp.asarray(rate)), no_commuting), rf.Normal(jnp.zeros(2)), **settings
    )


def shaken(proposal, key, size=0.1):
    """An amortised proposal with numbers for weights, as if something had trained it."""
    leaves, structure = jax.tree.flatten(proposal)
    keys = jax.random.split(key, len(leaves))
    leaves = [a + size * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, leaves)


AMORTISED = rf.Amortised(ou(), width=4, depth=1, key=jax.random.key(1))
SHAKEN = shaken(AMORTISED, jax.random.key(2))
# Each with the largest standard error it may have where `ou()` has most of its mass.
ESTIMATORS = {
    "PullBack-Prior": (rf.PullBack(1000), 0.3),
    "PullBack-Sobol": (rf.PullBack(1024, rf.Prior(rf.density.Sobol())), 0.1),
    "PullBack-Laplace": (rf.PullBack(64, rf.Laplace()), 1e-6),
    "PullBack-Amortised": (rf.PullBack(1000, AMORTISED), 0.3),
    "PullBack-Amortised-shaken": (rf.PullBack(1000, SHAKEN), 0.3),
}


def made(log_weights, parts=None):
    """The estimates that weights `(K, B)` of independent paths make, or these parts of them."""
    weights = np.asarray(log_weights).T
    if parts is None:
        parts = summary(rf.density.Independent(), weights, weights[:, :0], corrected=False)
    parts = {name: jnp.asarray(part) for name, part in parts.items()}
    return rf.Estimate.of(parts.pop("log_prob"), "paths", **parts)


def right_or_suspect(estimate, truth, trusted=0.5, largest=0.5):
    """Within three total errors wherever it is to be trusted, which is most of the time, and of some use."""
    gap, fine = np.abs(np.asarray(estimate.log_prob) - truth), ~np.asarray(estimate.suspect)
    assert np.all(gap[fine] < 3 * np.asarray(estimate.total_error)[fine]), (gap, estimate)
    assert np.mean(fine) >= trusted, estimate
    assert np.all(np.asarray(estimate.total_error)[fine] < largest), estimate


ROTATION = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]


def turned(drift, sigma, u, base=None):
    """Three SDEs du = drift(u) dt + sigma(u) dB that do not touch one another, in coordinates z = Ru, and the
    points z of u `(k, 3)`. The density is the product of three: a closed form in three dimensions."""
    r = jnp.asarray(ROTATION)
    sde = rf.ItoSDE(lambda t, z: r @ drift(r.T @ z), lambda t, z: r * sigma(r.T @ z)[None])
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(3)) if base is None else base), u @ ROTATION.T


CAUCHY = lambda z: -jnp.log1p(z[0] ** 2)  # a log density, up to a constant


def cauchy_cdf(x):
    return 0.5 + np.arctan(x) / np.pi


def kolmogorov(samples, cdf):
    """The largest gap between the distribution functions of the samples and the truth."""
    samples = np.sort(np.ravel(samples))
    return np.max(np.abs(cdf(samples) - (np.arange(len(samples)) + 0.5) / len(samples)))


class Curved(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return self.rate * jnp.tanh(z) - z


class Waves(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return (1 + 0.3 * jnp.sin(self.rate * z))[:, None]


def curved(rate):
    """A flow with a parameter in drift and noise."""
    sde = rf.ItoSDE(Curved(rate), Waves(rate))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=THREE)


INTEGRATORS = {"fixed": rf.FixedGrid(rf.flow.RK4(), steps=50), "adaptive": rf.Adaptive()}
every_integrator = pytest.mark.parametrize("integrator", INTEGRATORS.values(), ids=INTEGRATORS.keys())
