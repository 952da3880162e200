"""Entries with diffrax: in the style of its examples (one solve per sample), and batched."""

from collections.abc import Callable
from functools import partial

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.reference import diffusion, drift, field, log_normal
from benchmarks.timing import Entry
from benchmarks.workloads import LEARNING_RATE, STEPS, Workload, flatten

TOLERANCE = 1e-5

Objective = Callable[[list[jax.Array]], jax.Array]  # weights -> per-sample values


def jax_entries(workload: Workload) -> dict[str, Entry]:
    objectives = density_objectives if workload.is_density else simulation_objectives
    return {name: make_entry(workload, o) for name, o in objectives(workload).items()}


def make_entry(workload: Workload, objective: Objective) -> Entry:
    sign = -1 if workload.is_density else 1
    optimizer = optax.adagrad(LEARNING_RATE)

    def loss(weights):
        values = objective(weights)
        return sign * values.mean(), values

    @jax.jit
    def update(weights, state):
        gradient, values = jax.grad(loss, has_aux=True)(weights)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state, values, gradient

    initial = [jnp.asarray(w) for w in workload.weights]
    current = [initial, optimizer.init(initial)]

    def step() -> None:
        current[:] = jax.block_until_ready(update(*current))[:2]

    def evaluate() -> tuple[np.ndarray, np.ndarray]:
        *_, values, gradient = update(initial, optimizer.init(initial))
        return np.asarray(values), flatten(gradient)

    return Entry(step, evaluate)


# --- W0 and W1: log-densities ---------------------------------------------------------------


def density_objectives(workload: Workload) -> dict[str, Objective]:
    adaptive = dfx.PIDController(rtol=TOLERANCE, atol=TOLERANCE)
    constant = dfx.ConstantStepSize()
    return {
        "diffrax vmap, Tsit5 x 20 (its CNF example)": partial(
            log_prob_per_sample, workload, dfx.Tsit5(), constant
        ),
        "diffrax vmap, Dopri5 adaptive": partial(log_prob_per_sample, workload, dfx.Dopri5(), adaptive),
        "diffrax batched, Dopri5 adaptive": partial(log_prob_batched, workload, dfx.Dopri5(), adaptive),
    }


def field_and_trace(weights, t, z, coefficients):
    """Exact divergence as in the example of diffrax: all rows of the Jacobian by reverse mode."""
    f, pull_back = jax.vjp(lambda y: field(weights, t, y, coefficients), z)
    (jacobian,) = jax.vmap(pull_back)(jnp.eye(len(z), dtype=z.dtype))
    return f, jnp.trace(jacobian)


def backwards(term, solver, controller, start, weights):
    solution = dfx.diffeqsolve(
        term, solver, 1.0, 0.0, -1.0 / STEPS, start, weights, stepsize_controller=controller
    )
    return jax.tree.map(lambda y: y[-1], solution.ys)


def log_prob_per_sample(workload, solver, controller, weights):
    def log_prob(x, coefficients):
        term = dfx.ODETerm(lambda t, y, w: field_and_trace(w, t, y[0], coefficients))
        z, log_det = backwards(term, solver, controller, (x, jnp.zeros(())), weights)
        return log_normal(z) + log_det

    return jax.vmap(log_prob)(workload.x, workload.noise)


def log_prob_batched(workload, solver, controller, weights):
    """One solve with the whole batch as its state, so that all samples share the steps."""
    batched = jax.vmap(field_and_trace, in_axes=(None, None, 0, 0))
    term = dfx.ODETerm(lambda t, y, w: batched(w, t, y[0], jnp.asarray(workload.noise)))
    start = (jnp.asarray(workload.x), jnp.zeros(len(workload.x)))
    z, log_det = backwards(term, solver, controller, start, weights)
    return log_normal(z) + log_det


# --- W2: simulation -------------------------------------------------------------------------


class GivenIncrements(dfx.AbstractPath):
    """Brownian motion known only on the grid of the solver, by its increments (steps, ...)."""

    increments: jax.Array
    t0: float = eqx.field(default=0.0, static=True)
    t1: float = eqx.field(default=1.0, static=True)

    def evaluate(self, t0, t1=None, left=True):
        return self.increments[jnp.round(t0 * STEPS).astype(int)]


def simulation_objectives(workload: Workload) -> dict[str, Objective]:
    return {
        "diffrax vmap, midpoint x 20": partial(simulate_per_sample, workload),
        "diffrax batched, midpoint x 20": partial(simulate_batched, workload),
    }


def midpoint(terms, z, weights):
    solution = dfx.diffeqsolve(
        terms,
        dfx.Midpoint(),
        0.0,
        1.0,
        None,
        z,
        weights,
        stepsize_controller=dfx.StepTo(np.linspace(0.0, 1.0, STEPS + 1, dtype=np.float32)),
        adjoint=dfx.RecursiveCheckpointAdjoint(checkpoints=STEPS),
    )
    return jnp.sum(solution.ys[-1] ** 2, axis=-1)


def simulate_per_sample(workload, weights):
    def simulate(z, increments):
        noise = dfx.ControlTerm(lambda t, y, w: diffusion(w, y), GivenIncrements(increments))
        terms = dfx.MultiTerm(dfx.ODETerm(lambda t, y, w: drift(w, y)), noise)
        return midpoint(terms, z, weights)

    return jax.vmap(simulate, in_axes=(0, 1))(workload.x, workload.noise)


def simulate_batched(workload, weights):
    """The same scheme as an ODE whose driver has a piecewise constant derivative."""
    increments = jnp.asarray(workload.noise)

    def velocity(t, z, w):
        # The midpoint rule evaluates at t_k and t_k + 1/40; the quarter step guards against rounding.
        k = jnp.floor(t * STEPS + 0.25).astype(int)
        sigma = jax.vmap(diffusion, in_axes=(None, 0))(w, z)
        return drift(w, z) + jnp.einsum("bij,bj->bi", sigma, STEPS * increments[k])

    return midpoint(dfx.ODETerm(velocity), jnp.asarray(workload.x), weights)
