"""The distribution of a likelihood ratio where it is not that of Wilks."""

import math

import numpy as np
import scipy

from ..transition import Transition

SIMULATIONS = 2000


def boundary_p_value(statistic: float, more: int, on_boundary: int) -> float:
    """P(LR > statistic) for `more` further parameters, some of which are on the boundary of their domain
    under the simpler model.

    Each of those is estimated there with probability ½, so that LR has a mixture of χ² distributions with
    binomial weights (Self & Liang 1987, case 9); exactly so if their estimates are not correlated.
    """
    tails = [_tail(statistic, more - on_boundary + k) for k in range(on_boundary + 1)]
    weights = [math.comb(on_boundary, k) / 2**on_boundary for k in range(on_boundary + 1)]
    return float(np.dot(weights, tails))


def _tail(statistic: float, degrees: int) -> float:
    """Of a χ² distribution; with no degrees of freedom it is zero."""
    return float(scipy.stats.chi2.sf(statistic, degrees)) if degrees else float(statistic <= 0)


def unit_root_p_value(statistic: float, steps: Transition, mu: float, sigma: float) -> float:
    """P(LR > statistic) for an Ornstein–Uhlenbeck process against Brownian motion with drift μ and noise σ,
    by simulation.

    Without mean reversion the regression of increments on values has the distribution of Dickey & Fuller
    (1979), not χ². The ratio is n log(S₀/S₁), with S the sums of squared residuals of the increments of
    simulated series, regressed on dt and on dt and x dt, each divided by √dt.
    """
    dt = np.asarray(steps.dt)
    starts = np.flatnonzero(np.append(True, np.asarray(steps.start[1:] != steps.end[:-1]).any(axis=1)))
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(SIMULATIONS, len(dt)))
    moves = mu * dt + sigma * np.sqrt(dt) * noise
    before = np.cumsum(moves, axis=1) - moves
    before -= np.repeat(before[:, starts], np.diff(np.append(starts, len(dt))), axis=1)  # each series from 0
    root = np.sqrt(dt)
    y = moves / root
    y = y - np.outer(y @ root, root) / (root @ root)
    x = before * root
    x = x - np.outer(x @ root, root) / (root @ root)
    explained = np.sum(x * y, axis=1) ** 2 / (np.sum(x**2, axis=1) * np.sum(y**2, axis=1))
    simulated = -len(dt) * np.log1p(-explained)
    return float((1 + np.sum(simulated >= statistic)) / (1 + SIMULATIONS))
