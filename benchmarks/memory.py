"""Peak memory of one gradient for two numbers of steps: `python -m benchmarks.memory`.

The memory that XLA allocates for the compiled gradient (without arguments and results), for the paper's 2-D
model with a batch of 1000 in float32.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import roughflow as rf
from benchmarks.timing import format_table

STEPS = (200, 2000)
MODES = {
    "constant memory (reversible)": rf.flow.ConstantMemory(),
    "backpropagation (checkpointed)": rf.flow.Backpropagation(),
}


def main() -> None:
    rows = []
    for name, gradient in MODES.items():
        sizes = [peak_bytes(steps, gradient) for steps in STEPS]
        rows.append([name, *(f"{size / 1e6:.1f}" for size in sizes), f"{sizes[1] / sizes[0]:.2f}"])
    print(format_table(["gradient", *(f"{n} steps, MB" for n in STEPS), "ratio"], rows))


def peak_bytes(steps: int, gradient) -> int:
    key = jax.random.key(0)
    sde = rf.ItoSDE(rf.MLP(2, 2, 64, 3, key=key), rf.FullDiffusion(2, 64, key=key))
    integrator = rf.FixedGrid(steps=steps, gradient=gradient)
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), integrator=integrator)
    path = flow.sample_path(key=key, shape=(1000,))
    dynamic, static = eqx.partition(flow, eqx.is_inexact_array)

    def loss(dynamic, x, path):
        return -jnp.mean(eqx.combine(dynamic, static).log_prob_given_path(x, path))

    compiled = jax.jit(jax.grad(loss)).lower(dynamic, jnp.ones((1000, 2)), path).compile()
    return compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
