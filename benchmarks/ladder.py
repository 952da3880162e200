"""Error and time of the default estimate, optionally of two versions: `python -m benchmarks.ladder`.

In two dimensions, 1,000 points each are drawn from three neural SDEs, the example of the README, and flows
fitted to the banana and star data with noise 0.5 added. In more dimensions, 200 points each are drawn from
two neural SDEs in three and six dimensions and from flows fitted to 6 and 30 columns. References are four
runs of 2^11 or 2^13 Sobol' paths with 24 functions and four times as many steps; for 30 columns, paths around
the modes with 12 functions.
`--beside FOLDER` also estimates the same points in a separate process with another version, whose package is
in FOLDER. Both versions compile at the same time and are then timed one after the other.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf

NEURAL = {"gain 1, noise 0.4": (2, 1.0, 0.4), "gain 1.8, noise 0.5": (2, 1.8, 0.5)}
NEURAL |= {"gain 1.7, noise 0.9": (2, 1.7, 0.9), "3-D, gain 1.5": (3, 1.5, 0.5), "6-D, gain 1": (6, 1.0, 0.4)}
FITTED = ("banana", "star", "6 columns", "30 columns")
UNEVEN = ("star", "6 columns", "30 columns")  # their weights are uneven, so references need more paths
WAIT = 300  # seconds to wait for the other version


def network(d: int, out: int, seed: int) -> Callable:
    rng = np.random.default_rng(seed)
    sizes = [d, 32, 32, out]
    layers = [(rng.normal(size=(a, b)) / a**0.5, 0.3 * rng.normal(size=b)) for a, b in pairwise(sizes)]
    layers = [(jnp.asarray(w, "float32"), jnp.asarray(b, "float32")) for w, b in layers]

    def call(z):
        for w, b in layers[:-1]:
            z = jnp.tanh(z @ w + b)
        return z @ layers[-1][0] + layers[-1][1]

    return call


def neural_sde(d: int, gain: float, noise: float) -> rf.StochasticFlow:
    drift, spread = network(d, d, 1), network(d, d * d, 2)
    full = lambda t, z: noise * (jnp.eye(d) + 0.3 * jnp.reshape(spread(z), (d, d)))
    return rf.StochasticFlow(rf.ItoSDE(lambda t, z: gain * drift(z), full), rf.Normal(jnp.zeros(d)))


def readme() -> rf.StochasticFlow:
    drift = lambda t, z: jnp.stack([z[1], jnp.sin(z[0]) - z[1]])
    diffusion = lambda t, z: 0.3 * jnp.array([[1.0, jnp.sin(z[1])], [0.0, 1.0]])
    return rf.StochasticFlow(rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(2)))


def fitted(name: str, folder: Path) -> rf.StochasticFlow:
    file = folder / f"{name}.rf"
    if not file.exists():
        from roughflow import datasets

        if name in ("banana", "star"):
            shape = {"banana": datasets.Banana, "star": datasets.Star}[name]()
            data = shape.sample(key=jax.random.key(0), shape=(20_000,))
        else:
            data = table(int(name.split()[0]))
        flow = rf.tables.FlowOptions(width=64, likelihood_steps=0)
        options = {"flow": flow, "steps": 2000, "progress": False}
        rf.save(file, rf.fit_density(np.asarray(data), key=jax.random.key(1), **options).model)
    return rf.with_noise(rf.load(file), 0.5).flow


def table(d: int) -> np.ndarray:
    """A table with nonlinear relations: products and sines of correlated normal columns."""
    rng = np.random.default_rng(d)
    z = rng.normal(size=(20_000, d)) @ (rng.normal(size=(d, d)) / d**0.5)
    return z + np.sin(2 * np.roll(z, 1, axis=1)) + 0.3 * rng.normal(size=z.shape)


def problem(name: str, folder: Path) -> rf.StochasticFlow:
    if name in NEURAL:
        return neural_sde(*NEURAL[name])
    return readme() if name == "README" else fitted(name, folder)


NAMES = (*NEURAL, "README", *FITTED)


def points(flow: rf.StochasticFlow, count: int | None = None) -> np.ndarray:
    count = count or (1000 if flow.dimension == 2 else 200)
    return np.asarray(flow.sample(key=jax.random.key(3), shape=(count,)))


def estimates(names: list[str], folder: Path, options: dict, rounds: int, other: str | None) -> None:
    """Write values, errors and seconds of the version in this process to a file for each problem.

    All first calls precede the first timed call. The new version is timed when the `other` has compiled, and
    the old version after that."""
    runs, firsts, label = {}, {}, folder_label()
    for name in names:
        flow, x = problem(name, folder), np.load(folder / f"{name} x.npy")
        run = lambda flow=flow, x=x: jax.block_until_ready(flow.estimate(x, key=jax.random.key(4), **options))
        began = time.perf_counter()
        run()
        runs[name], firsts[name] = run, time.perf_counter() - began
        print(f"{label} {name}: first {firsts[name]:.1f} s", file=sys.stderr, flush=True)
    (folder / f"{label} compiled").touch()
    if other:
        awaited = folder / ("old compiled" if label == "new" else "new timed")
        while not awaited.exists() and time.perf_counter() - began < WAIT:
            time.sleep(0.2)
    for name, run in runs.items():
        warm = []
        for _ in range(rounds):
            began = time.perf_counter()
            estimate = run()
            warm.append(time.perf_counter() - began)
        methods, counts = np.unique(getattr(estimate, "method", []), return_counts=True)
        np.savez(
            folder / f"{name} {label}.npz",
            value=estimate.log_prob,
            error=estimate.total_error,
            suspect=estimate.suspect,
            seconds=[firsts[name], float(np.median(warm))],
            methods=", ".join(f"{count} {method}" for method, count in zip(methods, counts, strict=True)),
        )
    (folder / f"{label} timed").touch()


def folder_label() -> str:
    return os.environ.get("VERSION_LABEL", "new")


def reference(flow: rf.StochasticFlow, x: np.ndarray, name: str) -> np.ndarray:
    """Values and their standard errors, `(2, k)`, from four independent estimates. They use paths from the
    prior with 24 functions or, in many dimensions, where few of these have weight, paths around the modes
    with 12 functions."""
    many = flow.dimension > 10
    fine = flow.with_driver(rf.KarhunenLoeve(12 if many else 24)).with_proposal(None)
    # With fewer steps, some references for flows fitted to tables were off by 0.05 to 0.09.
    fine = fine.with_finer_steps().with_finer_steps()
    proposal = rf.Laplace() if many else rf.Prior(rf.density.Sobol())
    estimator = rf.PullBack(2**13 if name in UNEVEN else 2**11, proposal)
    ask = lambda key: fine.estimate(x, key=jax.random.key(key), estimator=estimator).log_prob
    values = np.stack([np.asarray(ask(key), float) for key in range(9, 13)])
    mean = np.logaddexp.reduce(values) - np.log(len(values))
    return np.stack([mean, np.std(np.exp(values - mean), axis=0, ddof=1) / len(values) ** 0.5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--count", type=int, help="number of points; by default 1000 in two dimensions, else 200"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of timed calls")
    parser.add_argument("--prepare", action="store_true", help="only fit flows and compute references")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--inner", action="store_true", help="a process of this benchmark")
    a = parser.parse_args()
    folder = a.folder or Path(tempfile.gettempdir()) / "roughflow-ladder"
    folder.mkdir(exist_ok=True)
    options = {} if a.tolerance is None else {"tolerance": a.tolerance}
    if a.inner:
        estimates(a.names, folder, options, a.rounds, "new")
        return
    for file in folder.glob("* compiled"), folder.glob("* timed"):
        for one in file:
            one.unlink()
    began = time.perf_counter()
    for name in a.names:
        flow = problem(name, folder)
        print(f"{name} {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if not (folder / f"{name} x.npy").exists():
            np.save(folder / f"{name} x.npy", points(flow, a.count))
        if not a.no_reference and not (folder / f"{name} truth.npy").exists():
            np.save(folder / f"{name} truth.npy", reference(flow, np.load(folder / f"{name} x.npy"), name))
    if a.prepare:
        return
    labels, process = ["new"], None
    if a.beside:
        path = f"{a.beside}:{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "VERSION_LABEL": "old", "PYTHONPATH": path}
        command = [sys.executable, __file__, "--inner", "--folder", str(folder)]
        command += ["--rounds", str(a.rounds), "--names", *a.names]
        process = subprocess.Popen(command, env=env)
        labels.append("old")
    estimates(a.names, folder, options, a.rounds, "old" if process else None)
    if process is not None:
        process.wait()
    for name in a.names:
        file = folder / f"{name} truth.npy"
        truth, doubt = np.load(file) if file.exists() else (np.nan, np.nan)
        for label in labels:
            if not (folder / f"{name} {label}.npz").exists():
                continue
            got = np.load(folder / f"{name} {label}.npz")
            miss = got["value"] - truth
            fine = np.isfinite(miss)
            rmse, worst = np.sqrt(np.mean(miss[fine] ** 2)), np.max(np.abs(miss[fine]), initial=0)
            within = np.mean(np.abs(miss[fine]) <= 2 * got["error"][fine])
            first, warm = got["seconds"]
            bar, suspect = np.median(got["error"]), int(got["suspect"].sum())
            print(
                f"{name:22s} {label}  rmse {rmse:.4f}  worst {worst:.3f}  median bar {bar:.4f}  "
                f"in two {100 * within:.1f} %  reference {np.sqrt(np.mean(doubt**2)):.4f}  "
                f"suspect {suspect}  first {first:.1f} s  warm {warm:.2f} s  "
                f"{got['methods']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
