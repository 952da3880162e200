"""Density estimation for handwritten digits of 8 × 8 grey levels, and samples from the density.

The script fits scikit-learn's 1,797 digits, a table with 64 columns, and writes `digits.png`, which shows
some digits and as many samples. The columns contain whole numbers from 0 to 16, so their rounding step is set
to 1. The script takes a minute on two cores.
"""

import argparse
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import roughflow as rf
from roughflow import plots

ROWS, COLUMNS = 5, 12  # rows and columns of pictures
TEST = 180


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures/digits.png"))
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    levels = np.random.default_rng(0).permutation(np.asarray(load_digits(return_X_y=True)[0], float))
    train, test = levels[TEST:], levels[:TEST]
    keys = jax.random.split(jax.random.key(0), 3)
    rounding = dict.fromkeys(range(64), 1.0)
    fitted = rf.fit_density(train, key=keys[0], rounding=rounding, steps=arguments.steps)
    jittered = test + np.random.default_rng(1).uniform(-0.5, 0.5, test.shape)
    score = np.asarray(fitted.model.log_prob(jittered, key=keys[1]))
    # The 17 grey levels are scaled to [0, 1), each with a width of 1/17.
    score_text = f"{score.mean() + 64 * np.log(17):.1f} ± {score.std() / TEST**0.5:.1f}"
    print(f"log-likelihood of {TEST} test digits: {score_text} nats per digit, for grey levels in [0, 1)")
    drawn = np.asarray(fitted.model.sample(key=keys[2], shape=(ROWS * COLUMNS,)))
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 2.2), layout="constrained", gridspec_kw={"wspace": 0.08})
    for ax, images, title in zip(axes, (test, drawn), ("digits", "samples of the flow"), strict=True):
        ax.imshow(sheet(images), cmap="Greys", vmin=0, vmax=16, interpolation="nearest")
        ax.set_title(title, fontsize=11)
        ax.axis("off")
    plots.save(figure, arguments.out)


def sheet(images: np.ndarray) -> np.ndarray:
    """Arrange the pictures in one image, with white lines between them."""
    squares = np.reshape(images[: ROWS * COLUMNS], (ROWS, COLUMNS, 8, 8))
    padded = np.pad(squares, ((0, 0), (0, 0), (0, 1), (0, 1)))
    return np.reshape(padded.transpose(0, 2, 1, 3), (ROWS * 9, COLUMNS * 9))[:-1, :-1]


if __name__ == "__main__":
    main()
