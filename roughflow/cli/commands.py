"""Which function runs which command."""

import argparse
from collections.abc import Callable

from roughflow.train import check_backend

from .estimate import estimate
from .figures import demo, reproduce
from .fit import fit
from .join import devices_of_cpu
from .refused import Refused
from .sample import sample
from .score import score
from .tune import tune


def check_devices(arguments: argparse.Namespace) -> None:
    """Refuse to start where JAX has nothing to work on. One of several processes meets the others first."""
    devices_of_cpu(getattr(arguments, "devices", None))
    if getattr(arguments, "join", None) is not None:
        return
    try:
        check_backend()
    except RuntimeError as error:
        raise Refused(str(error)) from None


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "demo": demo,
    "fit": fit,
    "score": score,
    "sample": sample,
    "tune": tune,
    "estimate": estimate,
    "reproduce": reproduce,
}
