"""The experiments of the paper (Hodgkinson et al. 2020): functions that write a figure and its numbers."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ._figures import Run, demo as demo, fig1, fig2, fig3, fig4, toys

EXPERIMENTS: Mapping[str, Callable[[Run], dict]] = {
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "toys": toys,
}


def run(
    name: str,
    out: Path,
    *,
    steps: int | None = None,
    seed: int = 0,
    progress: bool = True,
    resume: bool = False,
) -> dict:
    """Run one of `EXPERIMENTS`: write `NAME.png` and `NAME.json` to the folder `out`, and return the numbers.

    `steps` replaces the number of training steps, and scales that of regressions. With `resume`, finished
    models are loaded, and an interrupted one is continued.

    ```python
    from pathlib import Path
    from roughflow import experiments

    experiments.run("fig1", Path("figures"))
    ```
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name}: choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name](Run(Path(out), name, steps, seed, progress, resume))
