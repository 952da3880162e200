"""A density of BSDS300 with default settings: `python -m benchmarks.patches FILE [--seconds S]`.

FILE is a .npz with grey levels `train`, `val` and `test` of 8 × 8 patches. As in the literature, uniform
noise of one level is added, and levels are divided by 256. The mean of the patch is subtracted and the last
pixel is dropped, which leaves 63 columns. The output is the training time and the mean log-likelihood of the
test patches under a Gaussian and under the flow (published: FFJORD 157.40, RQ-NSF 157.54). Options change the
default settings.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np

import roughflow as rf

BLOCK = 1000  # number of test rows at a time


def patches(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training, validation and test rows."""
    rng = np.random.default_rng(0)
    with np.load(file) as stored:
        parts = [stored[name].reshape(len(stored[name]), 64) for name in ("train", "val", "test")]
    parts = [(part + rng.uniform(size=part.shape)) / 256 for part in parts]
    train, validation, test = ((part - part.mean(axis=1, keepdims=True))[:, :63] for part in parts)
    return train, validation, test


def main(options: argparse.Namespace) -> None:
    train, validation, test = patches(options.file)
    print(f"{jax.devices()[0].device_kind}, {len(train):,} × {train.shape[1]}", flush=True)
    depth = {} if options.depth is None else {"depth": options.depth}
    settings = {"steps": options.steps, "seconds": options.seconds, "progress": False}
    fast = {"batch_size": options.batch, "learning_rate": options.rate}
    began = time.perf_counter()
    fitted = rf.fit_density(
        train,
        key=jax.random.key(options.seed),
        validation=validation,
        flow=rf.tables.FlowOptions(width=options.width, outliers=options.outliers, **depth),
        training=rf.train.TrainingOptions(**fast),
        **settings,
    )
    print(f"{time.perf_counter() - began:.0f} s of training, compilation included", flush=True)
    print(fitted, flush=True)
    began, values = time.perf_counter(), []
    for i in range(0, len(test), BLOCK):
        values.append(np.asarray(fitted.log_prob(test[i : i + BLOCK], key=jax.random.key(1)), float))
        print(f"{i + BLOCK:,} rows: {np.mean(values):.2f} nats", flush=True)
    values = np.concatenate(values)
    gaussian = fitted.held_out.gaussian.log_prob(test)  # pyright: ignore[reportOptionalMemberAccess]
    error = values.std() / len(values) ** 0.5
    print(f"Gaussian {gaussian.mean():.2f}, {fitted.family} {values.mean():.2f} ± {error:.2f} nats, ", end="")
    print(f"scored in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--outliers", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
