"""The entries of roughflow: its own networks, and the same model written by a user in plain JAX."""

import time
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import roughflow as rf
from benchmarks.peers_jax import Objective, make_entry
from benchmarks.timing import Entry
from benchmarks.workloads import DRIFT_SIZES, LEARNING_RATE, SIGMA_SIZES, STEPS, Workload, split_layers


def roughflow_entries(workload: Workload) -> dict[str, Entry]:
    """Entries for W0, W1 and W2, by name; the first one is the baseline."""
    objectives = density_objectives if workload.is_density else simulation_objectives
    return {name: make_entry(workload, o) for name, o in objectives(workload).items()}


def density_objectives(workload: Workload) -> dict[str, Objective]:
    """The grid that suits the model has 2 steps on W0 and 7 on W1; the default grid has 4 and 8."""
    default, rk4 = rf.FixedGrid(), rf.FixedGrid(rf.flow.RK4(), steps=STEPS)
    suited = rf.FixedGrid(steps=suited_steps(workload))
    objectives = {
        "roughflow, its networks, suited grid": density(workload, library_model, suited),
        "roughflow, a user's functions, suited grid": density(workload, user_model, suited),
        "roughflow, its networks, default grid": density(workload, library_model, default),
        "roughflow, its networks, RK4 x 20": density(workload, library_model, rk4),
        "roughflow, a user's functions, RK4 x 20": density(workload, user_model, rk4),
        "roughflow, its networks, adaptive 1e-5": density(workload, library_model, rf.Adaptive()),
    }
    if workload.noise.size:  # JAX 0.11 cannot move empty arrays between devices
        split = density(workload, library_model, suited, devices=jax.device_count())
        objectives[f"roughflow, its networks, suited grid, {jax.device_count()} devices"] = split
    return objectives


def suited_steps(workload: Workload) -> int | None:
    flow = library_flow(workload)
    integrator = rf.flow.tune_steps(flow, jnp.asarray(workload.x), key=jax.random.key(0)).integrator
    assert isinstance(integrator, rf.FixedGrid)
    return integrator.steps


def library_flow(workload: Workload) -> rf.StochasticFlow:
    sde = rf.ItoSDE(*library_model([jnp.asarray(weight) for weight in workload.weights]))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)))


def seconds_per_step(workload: Workload, steps: int = 300) -> float:
    """Seconds per step of `rf.fit` with default settings, which choose the grid. The second half of a fit is
    timed, after compilation.

    The learning rate is small, so that the model and its grid hardly change.
    """
    objective = rf.MaximumLikelihood(1, rf.Prior())
    training = rf.train.TrainingOptions(batch_size=len(workload.x), learning_rate=LEARNING_RATE)
    settings = {"training": training, "progress": False}

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        rf.fit(
            library_flow(workload),
            workload.x,
            key=jax.random.key(0),
            objective=objective,
            steps=steps,
            **settings,
        )
        return time.perf_counter() - start

    seconds(steps)
    return (seconds(2 * steps) - seconds(steps)) / steps


def density(
    workload: Workload, model, integrator: rf.flow.AbstractIntegrator, devices: int | None = None
) -> Objective:
    """With `devices`, each device has a part of the rows."""
    base = rf.Normal(jnp.zeros(2))

    def log_prob(weights: list[jax.Array], x: jax.Array, noise: jax.Array) -> jax.Array:
        flow = rf.StochasticFlow(rf.ItoSDE(*model(weights)), base, integrator=integrator)
        shape = (len(x), flow.driver.num_functions, flow.noise_dimension)
        return flow.log_prob_given_path(x, flow.driver.path(jnp.reshape(noise, shape)))

    if devices is not None:
        rows = PartitionSpec("rows")
        mesh, ins = Mesh(jax.devices()[:devices], ("rows",)), (PartitionSpec(), rows, rows)
        log_prob = jax.shard_map(log_prob, mesh=mesh, in_specs=ins, out_specs=rows, check_vma=False)
    return lambda weights: log_prob(weights, jnp.asarray(workload.x), jnp.asarray(workload.noise))


def simulation_objectives(workload: Workload) -> dict[str, Objective]:
    def end(model, weights: list[jax.Array]) -> jax.Array:
        sde = rf.StratonovichSDE(*model(weights))
        noise = jnp.swapaxes(jnp.asarray(workload.noise), 0, 1)
        scheme = rf.flow.StratonovichMidpoint()
        return jnp.sum(rf.simulate(sde, workload.x, increments=noise, scheme=scheme) ** 2, axis=-1)

    return {
        "roughflow, its networks, midpoint x 20": lambda weights: end(library_model, weights),
        "roughflow, a user's functions, midpoint x 20": lambda weights: end(user_model, weights),
    }


def library_model(weights: Sequence[jax.Array]):
    """The model with `rf.MLP` and `rf.FullDiffusion`, filled with the workload's weights."""
    drift_layers, sigma_layers = split_layers(weights)
    key = jax.random.key(0)
    fill = lambda mlp, layers: eqx.tree_at(
        lambda m: (m.weights, m.biases), mlp, tuple(zip(*layers, strict=True))
    )
    drift = fill(rf.MLP(2, 2, DRIFT_SIZES[1], len(DRIFT_SIZES) - 2, key=key), drift_layers)
    if not sigma_layers:
        return drift, rf.sde.NoDiffusion()
    sigma = rf.FullDiffusion(2, SIGMA_SIZES[1], len(SIGMA_SIZES) - 2, key=key)
    return drift, eqx.tree_at(lambda s: s.network, sigma, fill(sigma.network, sigma_layers))


def user_model(weights: Sequence[jax.Array]):
    """The same model as a user would write it, without functions of the library."""
    drift_layers, sigma_layers = split_layers(weights)

    def network(layers, z):
        for weight, bias in layers[:-1]:
            z = jnp.tanh(z @ weight + bias)
        return z @ layers[-1][0] + layers[-1][1]

    def sigma(t, z):
        upper, lower = network(sigma_layers, z)
        return jnp.array([[1.0, upper], [lower, 1.0]])

    drift = lambda t, z: network(drift_layers, z)
    return drift, (sigma if sigma_layers else rf.sde.NoDiffusion())
