"""SDEs with known answers, each in Itô and in Stratonovich form. The two are written out by hand, so that
neither is derived from the other by the code under test."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import roughflow as rf


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
