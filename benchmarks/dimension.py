"""Cost of a field evaluation as a function of the dimension: `python -m benchmarks.dimension`.

The drift and the diagonal noise are networks (width 64, batch 256, float32), evaluated forwards and
backwards. The exact divergence and correction are compared with estimates from a single Jacobian product,
whose cost should grow at most linearly.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf
from benchmarks.timing import format_table, interleave

DIMENSIONS = (8, 16, 32, 64, 128)
BATCH, STEPS = 256, 2
STAGES = 6  # stages of Dopri5


def main() -> None:
    sampled = (rf.HutchinsonDivergence(), rf.sde.SampledCorrection())
    exact = (rf.ExactDivergence(), rf.sde.ExactCorrection())
    steps = {("sampled", d): gradient_step(d, *sampled) for d in DIMENSIONS}
    steps |= {("exact", d): gradient_step(d, *exact) for d in DIMENSIONS if d <= 32}
    medians = {name: np.median(t) for name, t in interleave(steps, 10).items()}
    rows = []
    for d in DIMENSIONS:
        cells = [medians.get((kind, d)) for kind in ("sampled", "exact")]
        scaled = [f"{1e3 * c / (STEPS * STAGES):.2f}" if c else "" for c in cells]
        growth = medians["sampled", d] / medians["sampled", DIMENSIONS[0]]
        rows.append([str(d), *scaled, f"{growth:.2f}", f"{d / DIMENSIONS[0]:.0f}"])
    header = ["d", "one product, ms", "exact, ms", "growth of the first", "growth of d"]
    print(format_table(header, rows))


def gradient_step(dimension: int, divergence, correction):
    key = jax.random.key(0)
    drift = rf.MLP(dimension, dimension, 64, 2, key=key)
    sde = rf.ItoSDE(drift, rf.DiagonalDiffusion(dimension, 64, key=key))
    flow = rf.StochasticFlow(
        sde,
        rf.Normal(jnp.zeros(dimension)),
        divergence=divergence,
        correction=correction,
        integrator=rf.FixedGrid(steps=STEPS),
    )
    path = flow.sample_path(key=key, shape=(BATCH,))
    x = jax.random.normal(key, (BATCH, dimension))

    @eqx.filter_jit
    def gradient(flow):
        loss = lambda f: jnp.mean(f.log_prob_given_path(x, path, key=key))
        return eqx.filter(eqx.filter_grad(loss)(flow), eqx.is_array)

    return lambda: jax.block_until_ready(gradient(flow))


if __name__ == "__main__":
    main()
