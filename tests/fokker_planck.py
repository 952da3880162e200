"""Transition densities in one dimension by the Fokker–Planck equation, which owe nothing to paths."""

import numpy as np
from scipy import linalg
from scipy.interpolate import CubicSpline


def transition_density(drift, sigma, ends, start, dt, size=1500):
    """Cell centres and the density at them of dY = drift dt + σ dB after dt, reflected at both ends; for an
    array of starts, a row for each.

    A start that is a function is the density of a distribution. Rates between cells are in detailed balance
    with the stationary density; their symmetric generator is exponentiated by its eigenvectors.
    """
    edges = np.linspace(*ends, size + 1)
    centres, h = 0.5 * (edges[1:] + edges[:-1]), edges[1] - edges[0]
    slope = drift(centres[:-1]) + 4 * drift(edges[1:-1]) + drift(centres[1:])
    change = slope / 3 * h / sigma**2
    log_stationary = np.append(0, np.cumsum(change))
    rate = 0.5 * sigma**2 / h**2
    diagonal = np.zeros(size)
    diagonal[:-1] -= rate * np.exp(0.5 * change)
    diagonal[1:] -= rate * np.exp(-0.5 * change)
    values, vectors = linalg.eigh_tridiagonal(diagonal, np.full(size - 1, rate))
    root = np.exp(0.5 * (log_stationary - log_stationary.max()))
    if callable(start):
        return centres, vectors @ (np.exp(values * dt) * (vectors.T @ (start(centres) / root))) * root
    kernel = (vectors * np.exp(values * dt)) @ vectors.T * root / root[:, None]
    i = np.searchsorted(centres, start) - 1
    part = np.asarray((start - centres[i]) / h)[..., None]
    return centres, ((1 - part) * kernel[i] + part * kernel[i + 1]) / h


def kolmogorov_distance(sample, centres, density):
    """Between draws and a density on a grid."""
    h = centres[1] - centres[0]
    below = np.interp(np.sort(sample), centres, (np.cumsum(density) - 0.5 * density) * h)
    return np.abs(below - (np.arange(len(sample)) + 0.5) / len(sample)).max()


def evolved(drift, sigma, start, ends, t1, size=4000, steps=1000):
    """Cell centres and the density at them of dY = drift(Y) dt + sigma(Y) dB (Itô) from the density `start`.

    Finite volumes with central fluxes and the trapezoidal rule in time. What leaves at the ends is lost, so
    that drifts may explode.
    """
    edges = np.linspace(*ends, size + 1)
    y, h, dt = 0.5 * (edges[1:] + edges[:-1]), edges[1] - edges[0], t1 / steps
    velocity, spread = 0.5 * drift(edges), 0.5 * (sigma(y) * np.ones(size)) ** 2 / h
    # The flux through an edge is `left` times the density before it plus `right` times that after it.
    left, right = velocity + np.append(0, spread), velocity - np.append(spread, 0)
    bands = np.zeros((3, size))
    bands[0, 1:], bands[1], bands[2, :-1] = -right[1:-1] / h, (right[:-1] - left[1:]) / h, left[1:-1] / h
    apply = lambda p: bands[1] * p + np.append(bands[0, 1:] * p[1:], 0) + np.append(0, bands[2, :-1] * p[:-1])
    implicit = -0.5 * dt * bands
    implicit[1] += 1
    p = start(y)
    for _ in range(steps):
        p = linalg.solve_banded((1, 1), implicit, p + 0.5 * dt * apply(p))
    return y, p


def log_density_at(x, y, p):
    """Between cells, by a cubic spline of log p."""
    near = p > 1e-12 * p.max()
    return CubicSpline(y[near], np.log(p[near]))(x)
