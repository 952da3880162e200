"""Coordinates in which an SDE is solved. They are unbounded, and the noise in them is nearly constant."""

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._checks import check_fields
from .._linear import log_abs_det
from ..sde import (
    AbstractSDE,
    AbstractStratonovichSDE,
    ExactCorrection,
    noise_matrix,
    stratonovich_coefficients,
)


class AbstractCoordinates(eqx.Module):
    """A change of variables x = g(y) between states x and coordinates y, `(d,)` each.

    For Stratonovich SDEs the change of variables follows the ordinary chain rule: increments of the
    coordinates are Dg(y)⁻¹ times those of the state. If the noise is constant in the coordinates (Lamperti
    1964), short transitions are nearly normal.
    """

    def __check_init__(self):
        check_fields(self)

    @property
    def ends(self) -> tuple[tuple[float, float], ...]:
        """The range of the coordinates: one pair per coordinate, or one pair for all; by default
        unbounded."""
        return ((-math.inf, math.inf),)

    @abc.abstractmethod
    def to_state(self, y: Array) -> Array:
        """g(y)."""

    @abc.abstractmethod
    def from_state(self, x: Array) -> Array:
        """g⁻¹(x)."""

    @abc.abstractmethod
    def contains(self, x: Array) -> Array:
        """Whether x is in the state space."""

    def is_inside(self, y: Array) -> Array:
        """Whether y is in the range of the coordinates."""
        x = self.to_state(y)
        back = self.from_state(jnp.where(self.contains(x), x, jnp.nan))
        return jnp.all(jnp.abs(back - y) < 1e-6 * (1 + jnp.abs(y)))

    def pull_back(self, x: Array, v: Array) -> Array:
        """The velocity of the coordinates if the state at x has velocity v."""
        # Constant noise and the state may have different precisions.
        return jax.jvp(self.from_state, (x,), (jnp.asarray(v, x.dtype),))[1]

    def log_volume(self, x: Array) -> Array:
        """log |det Dg⁻¹(x)|, which turns a density in y into one in x."""
        return log_abs_det(jax.jacfwd(self.from_state)(x)[None])[0]


class Unchanged(AbstractCoordinates):
    """y = x, for unbounded states.

    ```python
    import roughflow as rf

    rf.transition.Unchanged().to_state(1.0)
    ```
    """

    def to_state(self, y: Array) -> Array:
        return y

    def from_state(self, x: Array) -> Array:
        return x

    def contains(self, x: Array) -> Array:
        return jnp.all(jnp.isfinite(x), axis=-1)


class Logarithm(AbstractCoordinates):
    """y = log x, for positive states with noise proportional to x.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    rf.transition.Logarithm().from_state(jnp.ones(1))
    ```
    """

    def to_state(self, y: Array) -> Array:
        return jnp.exp(y)

    def from_state(self, x: Array) -> Array:
        return jnp.log(x)

    def contains(self, x: Array) -> Array:
        return jnp.all(jnp.isfinite(x) & (x > 0), axis=-1)


class Root(AbstractCoordinates):
    """y = 2√x, for positive states with noise proportional to √x.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    rf.transition.Root().from_state(jnp.ones(1))
    ```
    """

    @property
    def ends(self) -> tuple[tuple[float, float], ...]:
        return ((0.0, math.inf),)

    def to_state(self, y: Array) -> Array:
        return 0.25 * y**2

    def from_state(self, x: Array) -> Array:
        return 2 * jnp.sqrt(x)

    def contains(self, x: Array) -> Array:
        return jnp.all(jnp.isfinite(x) & (x > 0), axis=-1)


class Arc(AbstractCoordinates):
    """x = sin²(y/2), for states in (0, 1) with noise proportional to √(x(1 − x)).

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    rf.transition.Arc().from_state(jnp.full(1, 0.5))  # π/2
    ```
    """

    @property
    def ends(self) -> tuple[tuple[float, float], ...]:
        return ((0.0, math.pi),)

    def to_state(self, y: Array) -> Array:
        return jnp.sin(0.5 * y) ** 2

    def from_state(self, x: Array) -> Array:
        return 2 * jnp.arcsin(jnp.sqrt(x))

    def contains(self, x: Array) -> Array:
        return jnp.all((x > 0) & (x < 1), axis=-1)


class Columns(AbstractCoordinates):
    """Separate coordinates for each component of the state.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    rf.transition.Columns(rf.transition.Logarithm(), rf.transition.Root()).from_state(jnp.ones(2))
    ```
    """

    parts: tuple[AbstractCoordinates, ...]

    def __init__(self, *parts: AbstractCoordinates):
        self.parts = parts

    @property
    def ends(self) -> tuple[tuple[float, float], ...]:
        return tuple(end for part in self.parts for end in part.ends)

    def to_state(self, y: Array) -> Array:
        return jnp.stack([part.to_state(y[i]) for i, part in enumerate(self.parts)])

    def from_state(self, x: Array) -> Array:
        return jnp.stack([part.from_state(x[i]) for i, part in enumerate(self.parts)])

    def contains(self, x: Array) -> Array:
        inside = [part.contains(x[..., i : i + 1]) for i, part in enumerate(self.parts)]
        return jnp.all(jnp.stack(inside), axis=0)


class InCoordinates(AbstractStratonovichSDE):
    """The SDE for the coordinates y of a state, with time counted from `time`.

    It is a Stratonovich SDE even if `sde` is an Itô SDE: drift and noise are pulled back by the ordinary
    chain rule.
    """

    sde: AbstractSDE
    coordinates: AbstractCoordinates
    time: float | Array

    def __init__(
        self, sde: AbstractSDE, coordinates: AbstractCoordinates | None = None, time: float | Array = 0.0
    ):
        self.sde = sde
        self.coordinates = Unchanged() if coordinates is None else coordinates
        self.time = time

    def fields(self, t: Array, y: Array) -> tuple[Array, Array]:
        """The Stratonovich drift `(d,)` and the noise `(d, m)`."""
        x = self.coordinates.to_state(y)
        drift, sigma = stratonovich_coefficients(self.sde, ExactCorrection(), self.time + t, x, None)
        pull = lambda v: self.coordinates.pull_back(x, v)
        return pull(drift), jax.vmap(pull, in_axes=1, out_axes=1)(noise_matrix(sigma))

    def drift(self, t: Array, z: Array) -> Array:
        return self.fields(t, z)[0]

    def diffusion(self, t: Array, z: Array) -> Array:
        x = self.coordinates.to_state(z)
        pull = lambda v: self.coordinates.pull_back(x, v)
        return jax.vmap(pull, in_axes=1, out_axes=1)(noise_matrix(self.sde.noise(self.time + t, x)))
