"""`roughflow tune`: tune a sampler for a log density, and draw from it."""

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf
from roughflow.faq import see

from .files import check_table, check_writable
from .resume import alone, begin, check_checkpoint, checkpoint_of, remove, stopped
from .startup import Refused
from .tables import STANDARD, is_array, write_npy, write_table


def tune(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out == STANDARD:
        raise Refused("tune needs an output file for the draws, not -")
    checkpoint = checkpoint_of(out)
    check_table(out, "the draws", arrays=True, force=arguments.force, inputs=[])
    if arguments.noise_out:
        if arguments.noise_out.resolve() in (out.resolve(), checkpoint.resolve()):
            raise Refused(f"--noise-out {arguments.noise_out} is also another output: choose another file")
        check_writable(arguments.noise_out, force=arguments.force)
    with alone(arguments):
        return _run(arguments, checkpoint)


def _run(arguments: argparse.Namespace, checkpoint: Path) -> int:
    out = arguments.out
    check_checkpoint(checkpoint, arguments)
    target = _target(arguments.target)
    key_start, key_tune, key_draw = jax.random.split(jax.random.key(arguments.seed), 3)
    start = _start(target, arguments, key_start)
    begin(checkpoint, arguments)
    try:
        tuned = _tune(target, start, arguments, checkpoint, key_tune)
        if tuned.interrupted:
            return stopped(arguments, checkpoint, f"stopped at step {tuned.history.loss.size}")
        steps = arguments.draws * arguments.thin
        chain = rf.sample_chain(tuned.sampler, tuned.z, key=key_draw, num_steps=steps, thin=arguments.thin)
    except KeyboardInterrupt:  # the second Ctrl-C, or one during sampling
        return stopped(arguments, checkpoint, "interrupted")
    if arguments.noise_out:
        rf.save(arguments.noise_out, _noise(tuned))
    _write(out, np.asarray(chain.samples))
    remove(checkpoint)
    _report(arguments, tuned, chain)
    return 0


def _tune(target, start: jax.Array, arguments: argparse.Namespace, checkpoint: Path, key) -> rf.mcmc.Tuned:
    try:
        with warnings.catch_warnings():
            # The starting points are random here, so the warning is irrelevant.
            warnings.filterwarnings("ignore", message=".*starting points z0")
            return rf.tune_sampler(
                target,
                start,
                key=key,
                num_gradients=arguments.gradients,
                progress=not arguments.quiet,
                run=rf.train.RunOptions(checkpoint=checkpoint, resume=arguments.resume),
            )
    except rf.NonFiniteError:
        remove(checkpoint)  # there is nothing to resume in this state
        raise
    except ValueError as error:
        raise Refused(str(error).replace("num_gradients", "--gradients")) from None


def _target(name: str) -> Any:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise Refused(f"{name!r} is not of the form MODULE:FUNCTION, as in model:log_density")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Refused(f"{name}: no module {error.name} is installed or in the current folder") from None
    except (Exception, SystemExit) as error:
        raise Refused(f"{name}: importing {module} failed: {type(error).__name__}: {_first(error)}") from None
    target: Any = getattr(found, function, None)
    if target is None:
        raise Refused(f"{name}: the module {module} has no {function}")
    if not callable(target):
        raise Refused(f"{name} is a {type(target).__name__}, not a function")
    return target


def _start(target: Any, arguments: argparse.Namespace, key) -> jax.Array:
    """Draw the starting points of the chains around zero, or around the attribute `start` of the target."""
    name = arguments.target
    dimension = arguments.dimension or getattr(target, "dimension", None)
    if dimension is None:
        raise Refused(f"{name} has no dimension: set --dimension")
    if not isinstance(dimension, int | np.integer) or dimension < 1:
        raise Refused(f"{name}: its dimension must be a whole number of at least 1, got {dimension!r}")
    centre = jnp.asarray(getattr(target, "start", np.zeros(dimension)), float)
    if centre.shape != (dimension,):
        raise Refused(f"{name}: its start has shape {centre.shape}, but its dimension is {dimension}")
    start = centre[None] + jax.random.normal(key, (arguments.chains, int(dimension)))
    try:
        value = jax.eval_shape(target, start[0])
        if value.shape == ():
            jax.eval_shape(jax.grad(target), start[0])
    except Exception as error:
        message = f"{type(error).__name__}: {_first(error)}"
        raise Refused(
            f"{name} fails for z of shape ({dimension},); it must be written with jax.numpy: {message}"
        ) from None
    if value.shape != ():
        raise Refused(f"{name} must return one number for z, got shape {value.shape}")
    inside = np.flatnonzero(np.isfinite(jax.vmap(target)(start)))
    if not inside.size:
        raise Refused(
            f"{name} is not finite where the chains start, around {np.asarray(centre).tolist()}: give it an "
            "attribute `start`, a point where log p is finite" + see("refused-start")
        )
    return start[np.resize(inside, len(start))] if inside.size < len(start) else start


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _noise(tuned: rf.mcmc.Tuned) -> Any:
    """σ multiplied by √dt, for use with dt = 1."""
    diffusion: Any = tuned.sampler.sde.diffusion
    root = jnp.sqrt(tuned.sampler.dt)
    return eqx.tree_at(lambda n: (n.scale,), diffusion, (root * diffusion.scale,))


def _write(out, samples: np.ndarray) -> None:
    if is_array(out):
        return write_npy(out, samples.shape, [samples])
    chains, draws, dimension = samples.shape
    columns = [np.repeat(np.arange(chains), draws), np.tile(np.arange(draws), chains)]
    columns += list(samples.reshape(-1, dimension).T)
    return write_table(out, ["chain", "draw", *(f"z{i}" for i in range(dimension))], [columns])


def _report(arguments: argparse.Namespace, tuned: rf.mcmc.Tuned, chain: rf.mcmc.Chain) -> None:
    print(f"learning    {tuned.num_gradients} gradients, {tuned.history.loss.size} steps")
    spent, accepted = chain.num_gradients * arguments.chains, float(chain.acceptance.mean())
    print(f"sampling    {spent} gradients, acceptance {accepted:.2f}")
    _quality(chain)
    if arguments.noise_out:
        print(
            f"noise       {arguments.noise_out}: rf.mcmc.FlowSampler(rf.targeted_sde(f, rf.load(...)), 1.0)"
        )
    print(f"draws       {arguments.out}")


def _quality(chain: rf.mcmc.Chain) -> None:
    """Print the effective sample size and R-hat, if ArviZ is installed and there are enough draws."""
    if chain.samples.shape[1] < 4:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ warns of a future version
        try:
            from roughflow.interop.arviz import arviz, to_arviz
        except ModuleNotFoundError:
            print("for effective draws and R-hat: pip install 'roughflow[interop]'")
            return
        data = to_arviz(chain)
        values: Any = arviz.ess(data), arviz.ess(data, method="tail")
        several = chain.samples.shape[0] > 1
        spread: Any = arviz.rhat(data) if several else None
    bulk, tail = (float(value["z"].min()) for value in values)
    print(f"effective   {bulk:.0f} of {chain.samples[..., 0].size} draws, {tail:.0f} in the tails")
    if spread is None:
        print("R-hat       needs two or more chains")
        return
    rhat = float(spread["z"].max())
    advice = f": not converged, use more gradients{see('r-hat')}" if rhat > 1.01 else ""
    print(f"R-hat       {rhat:.3f}{advice}")
