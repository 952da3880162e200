"""The paper's experiments (Hodgkinson et al. 2020), each a function that writes a figure and its numbers."""

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
    """Do one of `EXPERIMENTS`: write `NAME.png` and `NAME.json` to the folder `out`, return the numbers.

    `steps` replaces the number of training steps, and changes that of regressions in proportion; with
    `resume` models that are there already are read, and one that was interrupted goes on.

    ```python
    from pathlib import Path
    from roughflow import experiments

    experiments.run("fig1", Path("figures"))
    ```
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name}: choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name](Run(Path(out), name, steps, seed, progress, resume))
