"""Transition densities in one dimension by the Fokker–Planck equation, which owe nothing to paths."""

import numpy as np
from scipy import linalg


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
