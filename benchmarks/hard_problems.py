"""Hard problems, for `benchmarks.hard`: bundles of paths, folds, explosions, contraction.

Each comes with a reference that is not made as the default estimator makes its answer: a closed form, a
quadrature, or a long run (`benchmarks.long_run`), which needs no mode to be found. It is that of the
flow on the same truncated driver, solved with smaller steps where those of the flow tell; of a fitted
flow, which was trained with its steps, as it is solved. References are kept (`benchmarks.kept`).
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import special, stats

import roughflow as rf
from benchmarks.kept import kept_arrays, kept_file
from benchmarks.long_run import EndpointChart, LongRun, MonotoneChart, PullBackChart, long_run
from benchmarks.trained import RECIPES, trained_flow
from roughflow.datasets import DISTRIBUTIONS

POINTS = 200  # of a trained flow


@dataclass(frozen=True)
class Reference:
    """log p and its standard error, (k,) each."""

    value: np.ndarray
    error: np.ndarray


@dataclass(frozen=True)
class HardProblem:
    """A flow, some points, and how the reference is made. `single`: in float32, many points, no labels."""

    flow: rf.StochasticFlow
    x: np.ndarray  # (k, d)
    setting: str
    refer: Callable[[], Reference | LongRun]
    single: bool = False

    @property
    def labels(self) -> list[str]:
        return ["(" + ", ".join(f"{a:.3g}" for a in point) + ")" for point in self.x]


def cubic() -> HardProblem:
    """dZ = 2Z³ dt + ½ dB: forward paths explode, backward ones contract. Two coefficients: a quadrature."""
    sde = rf.ItoSDE(lambda t, z: 2 * z**3, lambda t, z: jnp.array([[0.5]]))
    flow = _flow(sde, jnp.zeros(1), 1.0, rf.KarhunenLoeve(2), 32)
    x = np.array([[0.5], [1.5], [3.0]])
    return HardProblem(flow, x, "KarhunenLoeve(2); reference: quadrature", lambda: grid_2d(flow, x))


def fold() -> HardProblem:
    """Drift 3|z|²Jz, which turns the faster the further out: x is reached with any number of turns.

    On white noise the distribution would be N(0, 1.25 I). Fast turns average slow noise out, so on three
    functions its tails are far lighter; simulated radii agree. The flow's steps cost 0.09 at the last point.
    """
    drift = lambda t, z: 3 * jnp.sum(z**2) * jnp.stack([-z[1], z[0]])
    flow = _flow(rf.ItoSDE(drift, lambda t, z: jnp.eye(2)), jnp.zeros(2), 0.5, rf.KarhunenLoeve(3), 32)
    x = np.array([[0.5, 0], [1.5, 0], [2.5, 0]])
    run = partial(long_run, PullBackChart(_solved(flow, 96)), x, draws=2**17, key=jax.random.key(1))
    return HardProblem(flow, x, "KarhunenLoeve(3); reference: 2^17 paths", run)


def two_bundles() -> HardProblem:
    """dZ₁ = dB₁, dZ₂ = 3Z₁² dt + 0.3 dB₂: to be high, Z₁ must have gone far to either side and come back."""
    drift = lambda t, z: jnp.stack([jnp.zeros_like(z[0]), 3 * z[0] ** 2])
    sde = rf.ItoSDE(drift, lambda t, z: jnp.diag(jnp.array([1.0, 0.3])))
    flow = _flow(sde, jnp.zeros(2), 0.1, rf.KarhunenLoeve(6), 16)
    x = np.array([[0.0, 3], [0, 5], [0.5, 4], [0, 1]])
    truth = lambda: exact(two_bundles_density(x, functions=6))
    return HardProblem(flow, x, "KarhunenLoeve(6); reference: closed form", truth)


def wiggly() -> HardProblem:
    """Drift 3 sin 3z, noise 1 + 0.7 sin 4z: wells, into which paths contract, and noise that comes and goes.

    Backwards a solve spreads by e⁹, and p(x | path) is all spikes: 2^18 paths leave standard errors from 0.05
    to 1. The reference solves for the endpoint, forwards, with twice the steps; simulated paths agree.
    """
    sde = rf.ItoSDE(lambda t, z: 3 * jnp.sin(3 * z), lambda t, z: 1 + 0.7 * jnp.sin(4 * z)[:, None])
    flow = _flow(sde, jnp.zeros(1), 1.0, rf.KarhunenLoeve(4), 16)
    x = np.linspace(-3, 3, 16)[:, None]
    run = partial(long_run, MonotoneChart(_solved(flow, 32)), x, draws=2**13, key=jax.random.key(2))
    return HardProblem(flow, x, "KarhunenLoeve(4); reference: 2^13 endpoints solved for", run)


def rotation() -> HardProblem:
    """dZ = 3JZ ∘ dB turns the start N((1.5, 0), 0.3² I) by the angle 3B(1), and B(1) is exact on this driver.

    Turns more or less lead to the same x, so the path's first coefficient has several modes.
    """
    sde = rf.StratonovichSDE(lambda t, z: jnp.zeros(2), lambda t, z: 3 * jnp.stack([-z[1], z[0]])[:, None])
    flow = _flow(sde, jnp.array([1.5, 0.0]), 0.3, rf.KarhunenLoeve(3), 64)
    x = np.array([[1.5, 0], [0, 1.5], [-1.5, 0], [0, -1.2], [1.0, 1.5]])
    truth = lambda: exact(rotation_density(x, loc=np.array([1.5, 0.0]), scale=0.3, turn=3.0))
    return HardProblem(flow, x, "KarhunenLoeve(3); reference: closed form", truth)


def double_well() -> HardProblem:
    """The double well of `benchmarks.problems`, drift (x − x³, x − y), with twenty functions.

    The Fokker–Planck equation has the density of infinitely many: −2.14, −1.76, −3.70, −8.33, −8.08 at these
    points, 0.02 to 0.06 from that of twenty. The reference solves for the endpoint, forwards: nothing escapes
    there.
    """
    drift = lambda t, z: jnp.stack([z[0] - z[0] ** 3, z[0] - z[1]])
    rows = lambda z: ([1.0, 0.5 * jnp.tanh(z[1])], [0.5 * jnp.sin(z[0]), 1.0])
    sde = rf.ItoSDE(drift, lambda t, z: jnp.stack([jnp.stack(jnp.broadcast_arrays(*row)) for row in rows(z)]))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), driver=rf.KarhunenLoeve(20))
    x = np.array([[0.0, 0], [1, 1], [-1, 1], [2, -1], [2.2, 3]])
    run = partial(long_run, EndpointChart(flow), x, draws=2**14, key=jax.random.key(3))
    return HardProblem(flow, x, "KarhunenLoeve(20); reference: 2^14 endpoints solved for", run)


def trained(name: str, fresh: bool = False) -> HardProblem:
    """A flow fitted to data, at points of the data's own distribution, in float32."""
    recipe = RECIPES[name]
    flow = trained_flow(recipe, fresh=fresh)
    x = np.asarray(DISTRIBUTIONS[recipe.distribution].sample(key=jax.random.key(4), shape=(POINTS,)))
    run = partial(long_run, PullBackChart(flow), x, draws=2**13, key=jax.random.key(5))
    setting = (
        f"{recipe.distribution}, noise {recipe.noise:g}, {recipe.steps} steps; "
        "reference: 2^13 paths per point"
    )
    return HardProblem(flow, x, setting, run, single=True)


PROBLEMS: Mapping[str, Callable[..., HardProblem]] = {
    "cubic": cubic,
    "fold": fold,
    "two-bundles": two_bundles,
    "wiggly": wiggly,
    "rotation": rotation,
    "double-well": double_well,
    **{name: partial(trained, name) for name in RECIPES},
}
SINGLE = tuple(RECIPES)


def reference(name: str, problem: HardProblem, *, fresh: bool = False) -> Reference:
    """The reference of a problem, from the file that keeps it if there is one."""
    model = eqx.filter((problem.flow.sde, problem.flow.base), eqx.is_array)
    file = kept_file("reference", name, _code(PROBLEMS[name]), problem.setting, problem.x, model)

    def make() -> list[np.ndarray]:
        found = problem.refer()
        if isinstance(found, LongRun):
            return [found.log_prob, found.standard_error]
        return [found.value, found.error]

    return Reference(*kept_arrays(file, make, fresh=fresh))


def _code(builder: Callable[..., HardProblem]) -> str:
    """What a problem's function does, without its text: a reference is for that."""
    function = builder.func if isinstance(builder, partial) else builder
    (definition,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(definition, ast.FunctionDef)
    return "\n".join(ast.unparse(line) for line in definition.body[1:])


def exact(log_density: np.ndarray) -> Reference:
    return Reference(log_density, np.zeros(len(log_density)))


def grid_2d(flow: rf.StochasticFlow, x: np.ndarray, half: float = 9.0, size: int = 721) -> Reference:
    """E p(x | ω) over two coefficients by the trapezoidal rule, which is spectrally accurate here.

    The error is the change from half as many nodes a side.
    """
    side = np.linspace(-half, half, size)
    nodes = jnp.asarray(np.stack(np.meshgrid(side, side, indexing="ij"), -1)[..., None])  # (size, size, 2, 1)
    solve = eqx.filter_jit(lambda point: flow.log_prob_given_path(point, flow.driver.path(nodes, flow.t1)))
    log_normal = np.sum(stats.norm.logpdf(np.asarray(nodes)), axis=(-1, -2))
    terms = np.stack([np.asarray(solve(point)) + log_normal for point in jnp.asarray(x)])
    log_cell = 2 * np.log(side[1] - side[0])
    fine = special.logsumexp(terms, axis=(1, 2)) + log_cell
    coarse = special.logsumexp(terms[:, ::2, ::2], axis=(1, 2)) + log_cell + 2 * np.log(2)
    return Reference(fine, np.abs(fine - coarse))


def rotation_density(x: np.ndarray, *, loc: np.ndarray, scale: float, turn: float) -> np.ndarray:
    """log ∫ N(θ; 0, turn²) N(R(−θ)x; loc, scale² I) dθ, by the trapezoidal rule."""
    angle = np.linspace(-12 * turn, 12 * turn, 20_001)
    cos, sin = np.cos(angle), np.sin(angle)
    back = np.stack([x[:, :1] * cos + x[:, 1:] * sin, x[:, 1:] * cos - x[:, :1] * sin], axis=-1)
    log_start = np.sum(stats.norm.logpdf(back, loc, scale), axis=-1)
    terms = log_start + stats.norm.logpdf(angle, 0, turn)
    return special.logsumexp(terms, axis=1) + np.log(angle[1] - angle[0])


def two_bundles_density(x: np.ndarray, *, functions: int, scale: float = 0.1) -> np.ndarray:
    """log p of the two bundles on n functions, exactly.

    Z₁(1) = z + ω₀ is normal, and given that it is x₁, Z₁(t) = z + (x₁ − z)t + Σ ωₖ √2 sin(kπt)/(kπ) with z
    normal. Then Y = Z₂(1) is a quadratic form of normal numbers u plus an independent normal number:
    Y = a + bᵀu + uᵀAu + √v N, v = scale² + 0.09, whose characteristic function is
    exp(ias − ½vs² − ½s² Σ βⱼ²/(1 − 2isλⱼ)) Π (1 − 2isλⱼ)^(−½), λ the eigenvalues of A and β = b in their
    basis. Its density is the Fourier integral.
    """
    nodes, weights = special.roots_legendre(200)
    t, weights = 0.5 * (nodes + 1), 0.5 * weights
    waves = np.pi * np.arange(1, functions)
    variance = 1 + scale**2
    v = scale**2 + 0.09
    s = np.linspace(-14 / v**0.5, 14 / v**0.5, 40_001)
    result = []
    for x1, x2 in x:
        # z given z + ω₀ = x₁
        mean, spread = x1 * scale**2 / variance, (scale**2 / variance) ** 0.5
        centre = mean + (x1 - mean) * t
        shapes = np.vstack([spread * (1 - t), 2**0.5 * np.sin(waves[:, None] * t) / waves[:, None]])
        a = 3 * weights @ centre**2
        b = 6 * shapes @ (weights * centre)
        sizes, axes = np.linalg.eigh(3 * (shapes * weights) @ shapes.T)
        below = 1 - 2j * np.outer(s, sizes)
        exponent = 1j * s * (a - x2) - 0.5 * v * s**2 - 0.5 * s**2 * np.sum((b @ axes) ** 2 / below, axis=1)
        # One root a factor: each stays in the right half-plane.
        terms = np.exp(exponent) / np.prod(np.sqrt(below), axis=1)
        density = np.sum(terms.real) * (s[1] - s[0]) / (2 * np.pi)
        result.append(np.log(density) + stats.norm.logpdf(x1, 0, variance**0.5))
    return np.array(result)


def _flow(
    sde: rf.AbstractSDE, loc: Array, scale: float, driver: rf.AbstractDriver, steps: int
) -> rf.StochasticFlow:
    return rf.StochasticFlow(sde, rf.Normal(loc, scale), driver=driver, integrator=rf.FixedGrid(steps=steps))


def _solved(flow: rf.StochasticFlow, steps: int) -> rf.StochasticFlow:
    return eqx.tree_at(lambda f: f.integrator, flow, rf.FixedGrid(steps=steps))
