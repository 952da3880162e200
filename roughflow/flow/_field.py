"""The random ODE of a batch, as a vector field over unit time.

With s = t/T in [0, 1], the equation of every sample with horizon T is

    dz/ds = T μ̃(sT, z) + σ(sT, z) dB/ds,        d log p/ds = −div_z of the right-hand side.
"""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count
from .._linear import UNROLL
from .._programs import exact_products
from ..driver import Path
from ..faq import see
from ..sde import (
    AbstractCorrection,
    AbstractSDE,
    AbstractStratonovichSDE,
    apply_noise,
    stratonovich_coefficients,
)
from ._outcome import Status

VectorField = Callable[[Array], Array]


class AbstractDivergence(eqx.Module):
    """A method to compute div f(z) = tr Df(z)."""

    @abc.abstractmethod
    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> Array | None:
        """The random probes for one solve, or None if the method needs none."""

    @abc.abstractmethod
    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        """f(z) and div f(z)."""


class ExactDivergence(AbstractDivergence):
    """The exact trace tr Df in forward mode: d Jacobian-vector products that share one linearisation.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), divergence=rf.ExactDivergence())
    ```
    """

    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> None:
        del key, shape, dimension

    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        del probes
        # The field is linearised once, instead of one jvp per direction, so that the backward pass evaluates
        # it once, not d times.
        value, tangent = jax.linearize(field, z)
        basis = np.eye(z.size, dtype=z.dtype)
        if z.size <= UNROLL:
            return value, sum((tangent(e)[i] for i, e in enumerate(basis)), jnp.zeros((), z.dtype))
        return value, jnp.trace(jax.vmap(tangent)(jnp.asarray(basis)))


class HutchinsonDivergence(AbstractDivergence):
    """Hutchinson's estimator tr Df ≈ mean over probes ε of ε·(Df ε): unbiased, at a cost that does not grow
    with d.

    **Arguments:**

    - `num_probes`: number of probes to average over.
    - `distribution`: `jax.random.rademacher` (default, smallest variance) or `jax.random.normal`.

    Probes are drawn for each sample of each solve and stay constant during the solve, so that the field is a
    smooth function of time. Methods that use this divergence need a `key`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: jnp.tanh(z), lambda t, z: jnp.eye(20))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(20)), divergence=rf.HutchinsonDivergence(num_probes=4))
    path = flow.sample_path(key=jax.random.key(0))
    flow.log_prob_given_path(jnp.zeros(20), path, key=jax.random.key(1))
    ```
    """

    num_probes: int = eqx.field(static=True)
    distribution: Callable = eqx.field(static=True)

    def __init__(self, num_probes: int = 1, distribution: Callable = jax.random.rademacher):
        check_count("num_probes", num_probes)
        check_callable("distribution", distribution, "(key, shape, dtype), such as jax.random.normal")
        self.num_probes = num_probes
        self.distribution = distribution

    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> Array:
        if key is None:
            raise TypeError(f"HutchinsonDivergence needs a key: pass key=jax.random.key(seed){see('keys')}")
        return self.distribution(key, (*shape, self.num_probes, dimension), float)

    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        assert probes is not None
        value, tangent = jax.linearize(field, z)
        probes = probes.astype(z.dtype)
        if self.num_probes <= UNROLL:
            terms = [jnp.dot(probe, tangent(probe)) for probe in probes]
            return value, sum(terms[1:], terms[0]) / self.num_probes
        return value, jnp.mean(jax.vmap(lambda probe: jnp.dot(probe, tangent(probe)))(probes))


class NoDivergence(AbstractDivergence):
    """Returns zero instead of the divergence, for samples without densities."""

    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> None:
        del key, shape, dimension

    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        del probes
        return field(z), jnp.zeros((), z.dtype)


# Names of the values that backpropagation keeps from an evaluation: the state and whether it is valid.
# Everything else is recomputed.
KEPT = ("roughflow_point", "roughflow_status")


class Field(eqx.Module):
    """The right-hand side and everything that it depends on (parameters and random numbers), in one pytree.

    Solvers take a field as an argument, never as a closure, so that every method of differentiation has
    access to all parameters.
    """

    sde: AbstractSDE
    correction: AbstractCorrection
    divergence: AbstractDivergence
    path: Path
    signs: Array | None
    probes: Array | None
    safe: Array  # (d,): a starting point of samples, where the model is finite
    centre: Array  # (d,): centre of the samples
    scale: Array  # (d,): spread of the samples
    escape_rate: float = eqx.field(static=True)

    def __call__(self, s: Array, z: Array, *, slope_at: Array | None = None) -> tuple[Array, Array]:
        """dz/ds `(B, d)` and its divergence `(B,)` at `z` `(B, d)`; `s` is a scalar or `(B,)`.

        `slope_at` is the time at which the slope of the path is evaluated, by default `s`. If the slope jumps
        at `s`, `slope_at` is a time inside the step.
        """
        path = self.path
        slope = path.unit_slope(s if slope_at is None else slope_at)
        arguments = (jnp.asarray(s * path.t1, z.dtype), z, slope, path.t1, self.signs, self.probes)
        # vmap the field, not the solve, so that products of weights with the batch are matrix products.
        axes = [
            None if a is None or a.ndim == base else 0
            for a, base in zip(arguments, (0, 1, 1, 0, 1, 2), strict=True)
        ]
        with exact_products():
            return jax.vmap(self._point, in_axes=axes)(*arguments)

    def guarded(
        self, s: Array, z: Array, start: Array, *, slope_at: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """The field, checked for errors: dz/ds, its divergence, and the `rf.flow.Status` `(B,)` of each
        sample.

        Distances are in units of the spread of the process in each coordinate. A sample has **escaped** if it
        would travel its distance from the centre plus one unit in less than 1/escape_rate of the horizon, or
        if it overflowed after a jump from `start`, the state at the beginning of the step. Any other value
        that is not finite counts as an error of the model. One sample must not invalidate the whole batch, so
        a field that is not finite is set to zero. A field that is too large is multiplied by a smooth factor,
        so that the steps of an adaptive solver do not become extremely small. Below a hundredth of the escape
        rate this factor is exactly one.
        """
        return _guarded(self, s, z, start, slope_at)

    def split(self, size: int = 1) -> tuple["Field", "Field"]:
        """This field split into batches of `size`, and the axes to map over."""
        batched = [
            (lambda f: f.path.coefficients, self.path.coefficients.ndim == 3),
            (lambda f: f.path.t1, self.path.t1.ndim == 1),
            (lambda f: f.path.t0, self.path.t1.ndim == 1),
            (lambda f: f.signs, self.signs is not None),
            (lambda f: f.probes, self.probes is not None),
        ]
        field, axes = self, jax.tree.map(lambda _: None, self)
        for leaf, present in batched:
            if present:
                field = eqx.tree_at(leaf, field, replace_fn=lambda a: batches(a, size))
                axes = eqx.tree_at(leaf, axes, 0, is_leaf=lambda a: a is None)
        return field, axes

    def _point(
        self,
        t: Array,
        z: Array,
        slope: Array,
        horizon: Array,
        signs: Array | None,
        probes: Array | None,
    ) -> tuple[Array, Array]:
        def vector_field(y: Array) -> Array:
            drift, sigma = stratonovich_coefficients(self.sde, self.correction, t, y, signs)
            return horizon * drift + apply_noise(sigma, slope)

        return self.divergence(vector_field, z, probes)


def batches(a: Array, size: int) -> Array:
    """Split `(B, ...)` into batches of `size`; the last batch is padded with the first entries."""
    count = -(-len(a) // size)
    full = jnp.concatenate([a, a[: count * size - len(a)]]) if len(a) % size else a
    return jnp.reshape(full, (count, size, *a.shape[1:]))


@eqx.filter_custom_jvp
def _guarded(
    field: Field, s: Array, z: Array, start: Array, slope_at: Array | None
) -> tuple[Array, Array, Array]:
    velocity, divergence = field(s, z, slope_at=slope_at)
    # XLA recomputes the field for each use, so only its norm is tested for being finite.
    size = lambda change: jnp.max(jnp.abs(change) / field.scale[None], axis=-1)
    centre = field.centre[None]
    speed = size(velocity)
    finite = jnp.isfinite(speed) & jnp.isfinite(divergence)
    haste = speed / (field.escape_rate * (1 + size(z - centre)))
    leapt = ~(size(z - start) <= 1 + size(start - centre))
    trouble = jnp.where(leapt | (haste >= 1), Status.ESCAPED, Status.NON_FINITE)
    status = jnp.where(finite & (haste < 1), Status.FINE, trouble)
    brake = jnp.where(finite, 1 / (1 + haste**8), 0)
    velocity = jnp.where(finite[:, None], velocity * brake[:, None], 0)
    return velocity, jnp.where(finite, divergence * brake, 0), status


@_guarded.def_jvp
def _guarded_jvp(primals, tangents):
    """The derivative of `_guarded`, with zero tangents for samples with errors.

    A plain `where` would multiply zero by infinity, so the field is differentiated at a safe point for these
    samples, and the tangents are set to zero.
    """
    field, s, z, start, slope_at = primals
    d_field, d_s, d_z, _, d_slope_at = tangents
    velocity, divergence, status = _guarded(field, s, z, start, slope_at)
    # This value is named, so that a checkpoint keeps it; otherwise the backward pass evaluates the field
    # again.
    status = checkpoint_name(status, KEPT[1])
    fine = status == Status.FINE

    def evaluate(field, s, z, slope_at):
        return field(s, z, slope_at=slope_at)

    safe = jnp.where(fine[:, None], z, jax.lax.stop_gradient(field.safe)[None])
    _, (d_velocity, d_divergence) = eqx.filter_jvp(
        evaluate, (field, s, safe, slope_at), (d_field, d_s, d_z, d_slope_at)
    )
    # None represents a tangent that is zero for all samples.
    d_velocity = 0 * velocity if d_velocity is None else jnp.where(fine[:, None], d_velocity, 0)
    d_divergence = 0 * divergence if d_divergence is None else jnp.where(fine, d_divergence, 0)
    return (velocity, divergence, status), (d_velocity, d_divergence, None)


def signs(sde: AbstractSDE, correction: AbstractCorrection, key, batch, noise_dimension) -> Array | None:
    """Random signs for the correction; None for a Stratonovich SDE."""
    if isinstance(sde, AbstractStratonovichSDE):
        return None
    return draw(correction, key, batch, noise_dimension)


def split(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Two keys from one, or two arrays of keys from an array."""
    keys = jax.vmap(jax.random.split)(key) if key.ndim else jax.random.split(key)
    return keys[..., 0], keys[..., 1]


def draw(source: AbstractDivergence | AbstractCorrection, key, batch, size: int) -> Array | None:
    """Random signs or probes for a batch, drawn with one key or with one key per sample."""
    if key is None or not key.ndim:
        return source.draw(batch, size, key=key)
    return jax.vmap(lambda one: source.draw((), size, key=one))(key)
