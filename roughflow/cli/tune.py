"""`roughflow tune`: from a log density to a sampler, and to draws."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf

from .fit import check_checkpoint, stopped
from .output import check_writable, write_csv, write_npy
from .refused import Refused


def tune(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out.suffix.lower() not in (".csv", ".npy"):
        raise Refused(f"{out}: the name of the draws ends in .csv or .npy")
    for path in (out, *([arguments.noise] if arguments.noise else [])):
        check_writable(path, force=arguments.force)
    checkpoint = out.with_name(out.name + ".checkpoint")
    check_checkpoint(checkpoint, arguments)
    target = _target(arguments.target)
    start = _start(target, arguments)
    if checkpoint.exists() and not arguments.resume:
        checkpoint.unlink()  # as --force asked
    tuned = rf.tune_sampler(
        target,
        start,
        key=jax.random.key(arguments.seed),
        num_gradients=arguments.gradients,
        checkpoint=checkpoint,
        resume=arguments.resume,
        progress=not arguments.quiet,
    )
    if tuned.interrupted:
        return stopped(arguments, checkpoint, f"stopped at step {tuned.history.loss.size}")
    key = jax.random.key(arguments.seed + 1)
    steps = arguments.draws * arguments.thin
    chain = rf.sample_chain(tuned.sampler, tuned.z, key=key, num_steps=steps, thin=arguments.thin)
    if arguments.noise:
        rf.save(arguments.noise, _noise(tuned))
    _write(out, np.asarray(chain.samples))
    checkpoint.unlink(missing_ok=True)
    _report(arguments, tuned, chain)
    return 0


def _target(name: str) -> Callable[[jax.Array], jax.Array]:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise Refused(f"{name!r} does not name a target: write MODULE:FUNCTION, as in model:log_density")
    sys.path.insert(0, os.getcwd())
    try:
        target = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise Refused(f"{name}: there is no module {error.name} here, nor one installed") from None
    except AttributeError:
        raise Refused(f"{name}: the module {module} has no {function}") from None
    except Exception as error:
        raise Refused(f"{name}: importing {module} failed: {type(error).__name__}: {error}") from None
    if not callable(target):
        raise Refused(f"{name} is a {type(target).__name__}, not a function")
    return cast(Any, target)


def _start(target: Any, arguments: argparse.Namespace) -> jax.Array:
    """Where the chains begin: at random around zero, or around the target's own `start`."""
    dimension = arguments.dimension or getattr(target, "dimension", None)
    if dimension is None:
        raise Refused(f"{arguments.target} does not say its dimension: give --dimension")
    centre = getattr(target, "start", None)
    centre = jnp.zeros(dimension) if centre is None else jnp.asarray(centre, float)
    key = jax.random.key(arguments.seed)
    start = centre[None] + jax.random.normal(key, (arguments.chains, dimension))
    try:
        value = jnp.asarray(target(start[0]))
    except Exception as error:
        told = (str(error).strip().splitlines() or [""])[0]
        raise Refused(
            f"{arguments.target} fails for z of shape ({dimension},): {type(error).__name__}: {told}"
        ) from None
    if value.shape != ():
        raise Refused(f"{arguments.target} must return one number for z, got shape {value.shape}")
    return start


def _noise(tuned: rf.Tuned) -> Any:
    """σ with the step in it, so that dt = 1 goes with it."""
    diffusion: Any = tuned.sampler.sde.diffusion
    root = jnp.sqrt(tuned.sampler.dt)
    return eqx.tree_at(lambda n: (n.scale,), diffusion, (root * diffusion.scale,))


def _write(out, samples: np.ndarray) -> None:
    if out.suffix.lower() == ".npy":
        return write_npy(out, samples)
    chains, draws, dimension = samples.shape
    columns = [np.repeat(np.arange(chains), draws), np.tile(np.arange(draws), chains)]
    columns += list(samples.reshape(-1, dimension).T)
    return write_csv(out, ["chain", "draw", *(f"z{i}" for i in range(dimension))], columns)


def _report(arguments: argparse.Namespace, tuned: rf.Tuned, chain: rf.Chain) -> None:
    print(f"learning    {tuned.gradients} gradients, {tuned.history.loss.size} steps")
    spent, accepted = chain.gradients * arguments.chains, float(chain.acceptance.mean())
    print(f"sampling    {spent} gradients, acceptance {accepted:.2f}")
    try:
        import arviz

        from roughflow.interop.arviz import to_arviz
    except ModuleNotFoundError:
        print("for effective sample sizes and R-hat: pip install 'roughflow[interop]'")
    else:
        data = to_arviz(chain)
        values: Any = arviz.rhat(data), arviz.ess(data), arviz.ess(data, method="tail")
        rhat, bulk, tail = values[0]["z"].max(), values[1]["z"].min(), values[2]["z"].min()
        count = chain.samples[..., 0].size
        print(f"effective   {float(bulk):.0f} draws of {count}, {float(tail):.0f} in the tails")
        print(f"R-hat       {float(rhat):.3f}")
    if arguments.noise:
        print(f"noise       {arguments.noise}: rf.AdjustedFlow(rf.targeted_sde(f, rf.load(...)), 1.0)")
    print(f"draws       {arguments.out}")
