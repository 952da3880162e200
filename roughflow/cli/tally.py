"""What is to be said in the end of estimates that went by, of which none is kept."""

import dataclasses
from typing import Any

import numpy as np

import roughflow as rf
from roughflow.density import Warnings


@dataclasses.dataclass
class Tally:
    """How many rows there were, the mean of their log densities and the squares about it, and what may be
    wrong with some."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    warnings: Warnings = dataclasses.field(default_factory=Warnings)

    @staticmethod
    def of(notes: dict[str, Any]) -> "Tally":
        """As it was when these notes were taken."""
        warnings = Warnings()
        warnings.size = notes["count"]
        warnings.found = {name: (count, text) for name, (count, text) in notes["found"].items()}
        return Tally(notes["count"], notes["mean"], notes["squares"], warnings)

    @property
    def notes(self) -> dict[str, Any]:
        """For a file of JSON."""
        return {
            "count": self.count,
            "mean": self.mean,
            "squares": self.squares,
            "found": self.warnings.found,
        }

    def add(self, estimate: rf.Estimate) -> None:
        """Mean and squares about it, of what there was and of these (Chan et al. 1979)."""
        self.warnings.add(estimate)
        values = np.asarray(estimate.log_prob, float)
        with np.errstate(invalid="ignore"):
            both, apart = self.count + len(values), float(values.mean()) - self.mean
            spread = apart**2 * self.count * len(values) / both
            self.squares += float(np.sum((values - values.mean()) ** 2)) + spread
            self.mean += apart * len(values) / both
        self.count = both

    @property
    def error(self) -> float:
        """Of the mean."""
        return self.squares**0.5 / self.count if np.isfinite(self.squares) else np.inf
