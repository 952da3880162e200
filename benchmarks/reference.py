"""Reference values: float64, many Runge-Kutta steps and exact divergence, written for one sample."""

import hashlib
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import STEPS, Workload, flatten, split_layers

RK4_STEPS = 100


def mlp(layers, z):
    *hidden, (w_out, b_out) = layers
    for w, b in hidden:
        z = jnp.tanh(z @ w + b)
    return z @ w_out + b_out


def drift(weights, z):
    return mlp(split_layers(weights)[0], z)


def diffusion(weights, z):
    s1, s2 = mlp(split_layers(weights)[1], z)
    return jnp.array([[1.0, s1], [s2, 1.0]])


def brownian_derivative(t, coefficients):
    """Time derivative of the Karhunen-Loeve expansion on [0, 1] with coefficients (n, 2)."""
    k = jnp.arange(1, len(coefficients))
    basis = jnp.concatenate([jnp.ones(1), jnp.sqrt(2.0) * jnp.cos(jnp.pi * k * t)])
    return basis.astype(coefficients.dtype) @ coefficients


def field(weights, t, z, coefficients):
    """Right-hand side of the random ODE: Ito drift, Stratonovich correction and noise term."""
    f = drift(weights, z)
    if not split_layers(weights)[1]:
        return f
    sigma = diffusion(weights, z)
    for j in range(2):
        column = lambda y, j=j: diffusion(weights, y)[:, j]
        f = f - 0.5 * jax.jvp(column, (z,), (sigma[:, j],))[1]
    return f + sigma @ brownian_derivative(t, coefficients)


def log_normal(z):
    return -0.5 * jnp.sum(z**2, axis=-1) - jnp.log(2 * jnp.pi)


def log_prob(weights, x, coefficients, probe, hutchinson: bool):
    """log p(x | path) of one sample, by RK4 backwards from t = 1."""
    h = -1.0 / RK4_STEPS

    def augmented(t, state):
        velocity = lambda y: field(weights, t, y, coefficients)
        if hutchinson:
            f, tangent = jax.jvp(velocity, (state[:2],), (probe,))
            return jnp.append(f, probe @ tangent)
        return jnp.append(velocity(state[:2]), jnp.trace(jax.jacfwd(velocity)(state[:2])))

    @jax.checkpoint
    def rk4(state, i):
        t = 1.0 + i * h
        k1 = augmented(t, state)
        k2 = augmented(t + h / 2, state + h / 2 * k1)
        k3 = augmented(t + h / 2, state + h / 2 * k2)
        k4 = augmented(t + h, state + h * k3)
        return state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    end, _ = jax.lax.scan(rk4, jnp.append(x, 0.0), jnp.arange(RK4_STEPS))
    return log_normal(end[:2]) + end[2]


def squared_end(weights, z, increments):
    """|Z_T|^2 of one sample, by the explicit midpoint rule on the given increments (20, 2)."""

    def velocity_step(z, dB):
        return drift(weights, z) / STEPS + diffusion(weights, z) @ dB

    def midpoint(z, dB):
        return z + velocity_step(z + 0.5 * velocity_step(z, dB), dB), None

    end, _ = jax.lax.scan(midpoint, z, increments)
    return end @ end


def per_sample_values(workload: Workload, weights, hutchinson: bool):
    x, noise, probe = (jnp.asarray(a, float) for a in (workload.x, workload.noise, workload.probe))
    if workload.is_density:
        each = lambda *args: log_prob(weights, *args, hutchinson)
        return jax.vmap(each)(x, noise, probe)
    return jax.vmap(squared_end, in_axes=(None, 0, 1))(weights, x, noise)


def reference(workload: Workload, hutchinson: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Per-sample values and flat gradient of the loss, stored in the temporary directory."""
    file = cache_file(workload, hutchinson)
    if file.exists():
        stored = np.load(file)
        return stored["values"], stored["gradient"]

    def loss(weights):
        values = per_sample_values(workload, weights, hutchinson)
        return (-1 if workload.is_density else 1) * values.mean(), values

    with jax.enable_x64(True):
        weights = [jnp.asarray(w, jnp.float64) for w in workload.weights]
        (_, values), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
        result = np.asarray(values), flatten(gradient)
    file.parent.mkdir(exist_ok=True)
    np.savez(file, values=result[0], gradient=result[1])
    return result


def cache_file(workload: Workload, hutchinson: bool) -> Path:
    """The file of a reference; its name depends on the arrays, this module and the kind of divergence."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for array in [*workload.weights, workload.x, workload.noise, workload.probe]:
        digest.update(array.tobytes())
    digest.update(f"{workload.name} {hutchinson}".encode())
    folder = Path(tempfile.gettempdir()) / "roughflow-benchmarks"
    return folder / f"{digest.hexdigest()[:16]}.npz"
