"""What is public is of a piece: classes that can be subclassed with public types alone, arguments alike."""

import inspect
import types
import typing

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_docs import public

import roughflow as rf

ABSTRACT = {name: value for name, value in public().items() if name.startswith("Abstract")}


def classes(hint):
    """All classes that a type is made of."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is not None:
        origin = typing.get_origin(hint)
        parts = [part for argument in typing.get_args(hint) for part in classes(argument)]
        return [*parts, *([origin] if isinstance(origin, type) else [])]
    if isinstance(hint, list | tuple):
        return [part for argument in hint for part in classes(argument)]
    return [hint] if isinstance(hint, type) else []


def needed(cls):
    """The types in what a subclass has to write: abstract methods, and the fields it must have."""
    for base in cls.__mro__:
        for name, hint in vars(base).get("__annotations__", {}).items():
            yield name, inspect.get_annotations(base, eval_str=True)[name] if isinstance(hint, str) else hint
    for name in cls.__abstractmethods__:
        method = getattr(cls, name)
        method = method.fget if isinstance(method, property) else method
        yield from ((name, hint) for hint in typing.get_type_hints(method).values())


@pytest.mark.parametrize("name", ABSTRACT)
def test_a_subclass_needs_no_private_type(name):
    shown = set(public().values())
    ours = {
        (member, part)
        for member, hint in needed(ABSTRACT[name])
        for part in classes(hint)
        if part.__module__.startswith("roughflow")
    }
    assert {f"{member}: {part.__name__}" for member, part in ours if part not in shown} == set()


def functions():
    """Every public function, constructor and method."""
    for name, value in public().items():
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            methods = {"": vars(value).get("__init__"), **vars(value)}
            for method, function in methods.items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def test_no_function_takes_arguments_it_does_not_name():
    kinds = {name: [p.kind for p in inspect.signature(f).parameters.values()] for name, f in functions()}
    assert len(kinds) > 100
    assert [name for name, kind in kinds.items() if inspect.Parameter.VAR_KEYWORD in kind] == []


NETWORKS = [
    *("MLP", "FullDiffusion", "DiagonalDiffusion", "RestoringDrift", "LocalDiffusion", "SkewNetwork"),
    *("VelocityNetwork", "Amortised", "neural_flow", "velocity_flow"),
]
# Made of several networks, or not of one; the widths of kernels and cells are others.
OTHERS_WITH_WIDTH = {"FlowOptions", "tune_sampler", "fit_latent", "Encoder", "Posterior", "NormalDecoder"}
OTHERS_WITH_WIDTH |= {"DrivenSDE", "KernelDensity", "Encoding", "MixtureComponents"}


def test_networks_are_made_alike():
    """What it is for, then width, depth and activation; the rest by keyword."""
    taking = {n for n, v in public().items() if "width" in str(_signature(v))}
    assert taking - OTHERS_WITH_WIDTH == set(NETWORKS)
    for name in NETWORKS:
        parameters = _signature(public()[name]).parameters
        placed = [p for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in placed[-3:]] == ["width", "depth", "activation"], name
        assert all(p.default is inspect.Parameter.empty for p in placed[:-3]), name
        # The rest of these is a function of time as it is.
        by_itself = {"VelocityNetwork", "velocity_flow", "Amortised"}
        assert ("time_dependent" in parameters) == (name not in by_itself), name


def _signature(value):
    return (
        None if issubclass(type(value), type) and issubclass(value, Exception) else inspect.signature(value)
    )


class Midpoint(rf.flow.AbstractIntegrator):
    """An integrator as a user writes it: the explicit midpoint rule on 64 steps."""

    gradient: rf.flow.AbstractGradient = rf.flow.Backpropagation()
    escape_rate: float = eqx.field(static=True, default=1e5)

    def integrate(self, field: rf.flow.Field, z, fraction, *, reverse: bool) -> rf.flow.Outcome:
        whole = jnp.ones(()) if fraction is None else fraction
        h = (-1 if reverse else 1) * whole / 64

        def step(now, i):
            s = (whole if reverse else 0) + i * h
            half = now.z + 0.5 * h * field.guarded(s, now.z, now.z)[0]
            velocity, divergence, status = field.guarded(s + 0.5 * h, half, now.z)
            first = now.status == rf.flow.Status.FINE
            moved = now.z + h * velocity, now.log_change + h * divergence
            return rf.flow.Outcome(*moved, jnp.where(first, status, now.status), now.time), None

        zeros = jnp.zeros(len(z), z.dtype)
        start = rf.flow.Outcome(z, zeros, jnp.full(len(z), rf.flow.Status.FINE), zeros)
        return jax.lax.scan(step, start, jnp.arange(64))[0]

    def finer(self, driver, noise_dimension):
        return self


def test_an_integrator_of_ones_own(key):
    sde = rf.ItoSDE(lambda t, z: jnp.sin(z), lambda t, z: 0.3 * jnp.cos(z)[:, None])
    mine, theirs = (
        rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), integrator=integrator)
        for integrator in (Midpoint(), rf.FixedGrid(diffrax.Midpoint(), steps=64))
    )
    x, path = jnp.array([[0.5], [-1.0]]), mine.sample_path(key=key)
    values = [flow.log_prob_given_path(x, path) for flow in (mine, theirs)]
    np.testing.assert_allclose(*values, rtol=1e-10)


class RandomWalk(rf.mcmc.AbstractSampler):
    """A sampler as a user writes it: Metropolis' own, that needs no gradient."""

    sde: rf.AbstractSDE
    dt: float

    def check(self, z):
        pass

    def init(self, z) -> rf.mcmc.SamplerState:
        return rf.mcmc.SamplerState(z)

    def step(self, key, state: rf.mcmc.SamplerState) -> tuple[rf.mcmc.SamplerState, rf.mcmc.SamplerInfo]:
        key_move, key_accept = jax.random.split(key)
        z = state.z + jnp.sqrt(self.dt) * jax.random.normal(key_move, state.z.shape)
        acceptance = jnp.minimum(1, jnp.exp(self.sde.log_density(z) - self.sde.log_density(state.z)))
        accepted = jax.random.uniform(key_accept) < acceptance
        moved = rf.mcmc.SamplerState(jnp.where(accepted, z, state.z))
        return moved, rf.mcmc.SamplerInfo(accepted, acceptance)


def test_a_sampler_of_ones_own(key):
    """Of a standard normal distribution, by 64 chains of 500 steps: correlations last some ten steps."""
    sampler = RandomWalk(rf.overdamped_langevin(lambda z: -0.5 * z @ z, 1), 4.0)
    chain = rf.sample_chain(sampler, jnp.zeros((64, 1)), key=key, num_steps=500, burn_in=50)
    error = (10 / (64 * 500)) ** 0.5
    assert abs(np.mean(chain.samples)) < 4 * error
    assert abs(np.var(chain.samples) - 1) < 4 * error * 2**0.5
    assert 0.4 < np.mean(chain.acceptance) < 0.6
