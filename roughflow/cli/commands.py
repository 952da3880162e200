"""Which function runs which command."""

import argparse
from collections.abc import Callable

from .estimate import estimate
from .figures import demo, reproduce
from .fit import fit
from .sample import sample
from .score import score
from .tune import tune

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "demo": demo,
    "fit": fit,
    "score": score,
    "sample": sample,
    "tune": tune,
    "estimate": estimate,
    "reproduce": reproduce,
}
