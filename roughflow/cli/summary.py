"""What `roughflow fit` says when it is done: how long, why it ended, and whether it was worth it."""

import math
from pathlib import Path

import jax
import numpy as np

import roughflow as rf
from roughflow.faq import see
from roughflow.learn import LIKELIHOOD_ROWS

from .fit_rows import FitRows


def summary(out: Path, rows: FitRows, fitted: rf.Fitted) -> None:
    held_out = rows.held_out
    print(f"rows        {rows.total}: {rows.num_train} to train on, {len(held_out)} to validate on")
    own = len(rows.columns) - rows.context
    given = f" given {', '.join(rows.columns[own:])}" if rows.context else ""
    print(f"columns     {', '.join(rows.columns[:own])}{given}")
    for stage, history in fitted.stages.items():
        skipped = f", {history.skipped} skipped" if history.skipped else ""
        ended = f"; ended {history.ended}{see('ended-early')}" if history.ended else ""
        print(f"{stage:<11} {history.loss.size} steps{skipped}{ended}")
    if len(held_out):
        judged = held_out[:LIKELIHOOD_ROWS]
        reached = _reached(fitted, judged, own)
        normal = _gaussian(*rf.standardisation(rows.train[:, :own]), judged[:, :own])
        told = "the Gaussian with their mean and covariance"
        print(f"validation  {reached:.4f} nats per row; {told} {normal:.4f}")
        if reached < normal:
            told = "no better than that Gaussian: more rows, fewer columns or more steps may help"
            print(f"            {told}{see('no-better-than-a-gaussian')}")
    print(f"model       {out}")


def _reached(fitted: rf.Fitted, rows: np.ndarray, own: int) -> float:
    """The mean log density of rows set aside: as the likelihood stage saw it, or, without one, anew."""
    model = fitted.model
    if "likelihood" not in fitted.stages:
        given = {"given": rows[:, own:]} if model.context else {}
        return float(np.mean(model.log_prob(rows[:, :own], key=jax.random.key(0), **given)))
    loc, matrix = (np.asarray(part, float) for part in (model.loc, model.matrix))
    log_volume = float(np.sum(np.log(np.abs(np.diagonal(matrix)))))
    if model.marginals is not None:
        log_volume -= float(np.mean(np.sum(model.marginals.forward(rows[:, :own])[1], axis=1)))
    # What is given counts as N(0, 1) in the loss: out again with it.
    unconditional = -float(np.min(fitted.history.validation_loss)) - log_volume
    return unconditional - _gaussian(loc[own:], matrix[own:, own:], rows[:, own:])


def _gaussian(loc: np.ndarray, matrix: np.ndarray, rows: np.ndarray) -> float:
    """The mean log density of rows under a normal distribution."""
    unit = np.linalg.solve(matrix, (rows - loc).T)
    square = np.mean(np.sum(unit**2, axis=0))
    log_volume = np.sum(np.log(np.abs(np.diagonal(matrix))))
    return float(-0.5 * square - 0.5 * len(loc) * math.log(2 * math.pi) - log_volume)
