"""Error and time of the default estimate: `python -m benchmarks.ladder`, beside another version if asked.

1,000 points each of three neural SDEs on the plane, of the README's example, and of flows fitted to a banana
and a star with noise 0.5 added; 200 points each of two neural SDEs in three and six dimensions. References
are 2^13 Sobol' paths with 24 functions. `--beside FOLDER`, which holds another version's package, estimates
the same points with that in a process of its own.
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
FITTED = ("banana", "star")
ROUNDS = 3


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

        data = {"banana": datasets.Banana, "star": datasets.Star}[name]().sample(
            key=jax.random.key(0), shape=(20_000,)
        )
        flow = rf.tables.FlowOptions(width=64, likelihood_steps=0)
        options = {"flow": flow, "steps": 4000, "progress": False}
        rf.save(file, rf.fit_density(np.asarray(data), key=jax.random.key(1), **options).model)
    return rf.with_noise(rf.load(file), 0.5).flow


def problem(name: str, folder: Path) -> rf.StochasticFlow:
    if name in NEURAL:
        return neural_sde(*NEURAL[name])
    return readme() if name == "README" else fitted(name, folder)


NAMES = (*NEURAL, "README", *FITTED)


def points(flow: rf.StochasticFlow) -> np.ndarray:
    count = 1000 if flow.dimension == 2 else 200
    return np.asarray(flow.sample(key=jax.random.key(3), shape=(count,)))


def estimates(names: list[str], folder: Path, options: dict) -> None:
    """Values, errors and seconds of this process's version, to a file for each problem."""
    for name in names:
        flow = problem(name, folder)
        x = np.load(folder / f"{name} x.npy")
        began = time.perf_counter()
        run = lambda flow=flow, x=x: jax.block_until_ready(flow.estimate(x, key=jax.random.key(4), **options))
        estimate = run()
        first, warm = time.perf_counter() - began, []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            estimate = run()
            warm.append(time.perf_counter() - began)
        names, counts = np.unique(getattr(estimate, "method", []), return_counts=True)
        np.savez(
            folder / f"{name} {folder_label()}.npz",
            value=estimate.log_prob,
            error=estimate.total_error,
            suspect=estimate.suspect,
            seconds=[first, float(np.median(warm))],
            methods=", ".join(f"{count} {method}" for method, count in zip(names, counts, strict=True)),
        )


def folder_label() -> str:
    return os.environ.get("VERSION_LABEL", "new")


def reference(flow: rf.StochasticFlow, x: np.ndarray) -> np.ndarray:
    fine = flow.with_driver(rf.KarhunenLoeve(24)).with_proposal(None)
    estimator = rf.PullBack(2**13, rf.Prior(rf.density.Sobol()))
    return np.asarray(fine.estimate(x, key=jax.random.key(9), estimator=estimator).log_prob)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--inner", action="store_true", help="a process of this benchmark")
    a = parser.parse_args()
    folder = a.folder or Path(tempfile.gettempdir()) / "roughflow-ladder"
    folder.mkdir(exist_ok=True)
    options = {} if a.tolerance is None else {"tolerance": a.tolerance}
    if a.inner:
        estimates(a.names, folder, options)
        return
    began = time.perf_counter()
    for name in a.names:
        flow = problem(name, folder)
        print(f"{name} {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if not (folder / f"{name} x.npy").exists():
            np.save(folder / f"{name} x.npy", points(flow))
        if not (folder / f"{name} truth.npy").exists():
            np.save(folder / f"{name} truth.npy", reference(flow, np.load(folder / f"{name} x.npy")))
    estimates(a.names, folder, options)
    labels = ["new"]
    if a.beside:
        path = f"{a.beside}:{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "VERSION_LABEL": "old", "PYTHONPATH": path}
        command = [sys.executable, __file__, "--inner", "--folder", str(folder), "--names", *a.names]
        subprocess.run(command, env=env, check=True)
        labels.append("old")
    for name in a.names:
        truth = np.load(folder / f"{name} truth.npy")
        for label in labels:
            got = np.load(folder / f"{name} {label}.npz")
            miss = got["value"] - truth
            fine = np.isfinite(miss)
            within = np.mean(np.abs(miss[fine]) <= 2 * got["error"][fine])
            first, warm = got["seconds"]
            print(
                f"{name:22s} {label}  rmse {np.sqrt(np.mean(miss[fine] ** 2)):.4f}  worst "
                f"{np.max(np.abs(miss[fine])):.3f}  median bar {np.median(got['error']):.4f}  within two "
                f"{100 * within:.1f} %  suspect {int(got['suspect'].sum())}  first {first:.1f} s  warm "
                f"{warm:.2f} s  {got['methods']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
