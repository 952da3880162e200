"""The summary that `roughflow fit` prints: what was fitted, why it ended, and how good it is."""

from pathlib import Path

import roughflow as rf
from roughflow.faq import see

from .fit_rows import FitRows


def summary(out: Path, rows: FitRows, fitted: rf.FittedDensity) -> None:
    aside = 0 if fitted.held_out is None else len(fitted.held_out.rows)
    parts = f": {rows.total - aside} to train on, {aside} to validate on" if aside else ""
    print(f"rows        {rows.total}{parts}")
    own = len(rows.columns) - rows.context
    given = f" given {', '.join(rows.columns[own:])}" if rows.context else ""
    print(f"columns     {', '.join(rows.columns[:own])}{given}")
    for stage, history in fitted.stages.items():
        skipped = f", {history.skipped} skipped" if history.skipped else ""
        early = see("ended-early") if history.loss.size else ""
        ended = f"; ended {history.ended}{early}" if history.ended else ""
        print(f"{stage:<11} {history.loss.size} steps{skipped}{ended}")
    print(f"family      {fitted.family}")
    score = fitted.score
    if score is not None:
        error = f"± {score.standard_error:.2g} nats per row ({score.method}, {score.num_rows} rows)"
        print(f"score       {score.mean:.4f} {error}")
        print(
            f"Gaussian    {score.gaussian:.4f}, the gain over it is {score.gain:.4f} ± {score.gain_error:.2g}"
        )
        if fitted.family == "flow" and score.gain < 0:
            told = "no better than that Gaussian: more rows, fewer columns or more steps may help"
            print(f"            {told}{see('no-better-than-a-gaussian')}")
    print(f"model       {out}")
