"""SDEs: a drift, a diffusion, and the calculus, Itô or Stratonovich."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array

from .._checks import check_fields, check_instance
from .._functions import explicit, flat_operations
from .._show import count, listed, named, num_parameters, number
from ..faq import see
from ._networks import ConstantDiffusion, FadingDiffusion, NoDiffusion
from ._noise import Noise, noise_shape


def equation(drift: str, diffusion: Any, brownian: str = "dB", sigma: str | None = None) -> str:
    """The equation dZ = drift dt + σ dB as text; `sigma` replaces the default symbol for σ."""
    if isinstance(diffusion, NoDiffusion):
        return f"dZ = {drift} dt"
    return f"dZ = {drift} dt + {sigma or _sigma(diffusion)} {brownian}"


def _sigma(diffusion: Any, symbol: str = "σ") -> str:
    if isinstance(diffusion, FadingDiffusion):
        end, power = number(diffusion.t1), number(diffusion.power)
        left = "(1 − t)" if end == "1" else f"(1 − t/{end})"
        return f"{left if power == '1' else f'{left}^{power}'} {_sigma(diffusion.diffusion, 'Σ')}"
    return symbol if isinstance(diffusion, ConstantDiffusion) else f"{symbol}(t, Z)"


def noise_part(diffusion: Any) -> list[tuple[str, str]]:
    return [] if isinstance(diffusion, NoDiffusion) else [("σ", part(diffusion))]


def part(value: Any) -> str:
    """A description of a coefficient of an SDE: its type, and its number of trainable parameters."""
    fields = dataclasses.fields(value) if isinstance(value, eqx.Module) else ()
    parts = [getattr(value, field.name, None) for field in fields]
    inner = ", ".join(named(inside) for inside in parts if isinstance(inside, eqx.Module))
    trained = num_parameters(value)
    text = f"{named(value)} of {inner}" if inner else named(value)
    return f"{text}, {count(trained, 'parameter')}" if trained else text


Drift = Callable[[Array, Array], Array]
Diffusion = Callable[[Array, Array], Noise]

# Operations with indices that may be out of range.
INDEXING = frozenset(
    {"dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter_add", "scan", "while", "cond"}
)


class AbstractSDE(eqx.Module):
    """A drift μ(t, z) with values in Rᵈ and a diffusion σ(t, z) with values in R^{d×m}.

    Both are functions of one point, `z` of shape `(d,)`. The class determines the calculus: to define a new
    kind of SDE, subclass `rf.sde.AbstractItoSDE` or `rf.sde.AbstractStratonovichSDE`.
    """

    drift: eqx.AbstractVar[Drift]
    diffusion: eqx.AbstractVar[Diffusion]
    dimension: ClassVar[int | None] = None  # d, if it does not follow from the shapes

    def __check_init__(self):
        check_fields(self)

    def noise(self, t: Array, z: Array) -> Noise:
        """σ(t, z), in the form that the diffusion returns."""
        return self.diffusion(t, z)

    def equation(self) -> str:
        """The equation as text."""
        return equation("μ(t, Z)", self.diffusion)

    def parts(self) -> list[tuple[str, str]]:
        """Descriptions of the symbols in the equation."""
        return [("μ", part(self.drift)), *noise_part(self.diffusion)]

    def __repr__(self) -> str:
        return listed(f"{type(self).__name__}: {self.equation()}", self.parts())


class AbstractItoSDE(AbstractSDE):
    """An SDE in the Itô sense."""


class AbstractStratonovichSDE(AbstractSDE):
    """An SDE in the Stratonovich sense."""

    def equation(self) -> str:
        return equation("μ(t, Z)", self.diffusion, "∘ dB")


class ItoSDE(AbstractItoSDE):
    """The Itô SDE dZ = μ(t, Z) dt + σ(t, Z) dB.

    **Arguments:**

    - `drift`: a callable `(t, z) -> (d,)`, a plain function or an `eqx.Module` with parameters.
    - `diffusion`: a callable `(t, z) -> (d, m)`, or one that returns a lineax operator: a
      `lineax.DiagonalLinearOperator` costs O(d) instead of O(d²).

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    geometric = rf.ItoSDE(lambda t, z: 0.1 * z, lambda t, z: 0.3 * z[:, None])
    ```
    """

    drift: Drift
    diffusion: Diffusion


class StratonovichSDE(AbstractStratonovichSDE):
    """The Stratonovich SDE dZ = μ(t, Z) dt + σ(t, Z) ∘ dB. Arguments as for `ItoSDE`.

    ```python
    import roughflow as rf

    # the same distribution as dZ = 0.1 Z dt + 0.3 Z dB in the Itô sense
    geometric = rf.StratonovichSDE(lambda t, z: (0.1 - 0.045) * z, lambda t, z: 0.3 * z[:, None])
    ```
    """

    drift: Drift
    diffusion: Diffusion


def check_sde(sde: Any) -> None:
    check_instance("sde", sde, AbstractSDE, "an SDE such as rf.ItoSDE(drift, diffusion)")


def with_explicit_parameters(sde: AbstractSDE, z: Array) -> AbstractSDE:
    """The same SDE, in which the arrays in closures of drift and diffusion are explicit parameters, for
    points of the shape of `z`.

    A user may write `lambda t, z: network(weights, z)` inside a loss. Custom derivative rules of the solvers
    differentiate only with respect to explicit arguments, so closures are converted first.
    """
    t = jnp.zeros((), z.dtype)
    kind = StratonovichSDE if isinstance(sde, AbstractStratonovichSDE) else ItoSDE
    return kind(explicit(sde.drift, t, z), explicit(sde.noise, t, z))


def noise_dimension(sde: AbstractSDE, dimension: int, subject: str | None = None) -> int:
    """Check the shapes of drift and diffusion in this dimension, and return m, the number of Brownian
    motions.

    If the SDE has another dimension, or if its shapes match in exactly one other dimension, the error message
    begins with `subject`, by default a statement of the dimension of the base.
    """
    subject = subject or f"base has dimension {dimension}"
    if sde.dimension not in (None, dimension):
        raise ValueError(f"{subject}, but {type(sde).__name__} has dimension {sde.dimension}{see('shapes')}")
    check_sde(sde)
    try:
        return _fitted(sde, dimension)
    except ValueError as error:
        others = [d for d in _likely_dimensions(sde) if d != dimension and _fits(sde, d)]
        if len(others) != 1:
            raise
        message = f"{subject}, but drift and diffusion have {others[0]}: {error}"
        raise ValueError(message) from error


def _likely_dimensions(sde: AbstractSDE) -> list[int]:
    """Candidates for the dimension: small integers, and the lengths of the axes of arrays in the SDE."""
    arrays = [leaf for leaf in jax.tree.leaves(sde) if eqx.is_array(leaf)]
    return sorted({*range(1, 17), *(size for array in arrays for size in array.shape if size)})


def _fits(sde: AbstractSDE, dimension: int) -> bool:
    try:
        _fitted(sde, dimension)
    except ValueError:
        return False
    return True


def _fitted(sde: AbstractSDE, dimension: int) -> int:
    """Check the shapes of drift and diffusion, and return m, the number of Brownian motions."""
    drift = _shape_of("drift", sde.drift, getattr(sde, "drift", None), dimension)
    if drift != (dimension,):
        raise ValueError(
            f"drift must return shape {(dimension,)} for z of shape {(dimension,)}, got {drift}"
            + see("shapes")
        )
    diffusion = _shape_of("diffusion", sde.noise, getattr(sde, "diffusion", None), dimension)
    if len(diffusion) != 2 or diffusion[0] != dimension:
        raise ValueError(
            f"diffusion must return shape ({dimension}, m) for z of shape {(dimension,)}, got {diffusion}"
            + see("shapes")
        )
    return diffusion[1]


def _shape_of(name: str, function: Callable, given: Any, dimension: int) -> tuple[int, ...]:
    """The shape that a coefficient returns; exceptions of the coefficient are reported with its name.

    JAX clamps indices that are out of range. Therefore, if `given` is a plain function that uses indices, it
    is also called with NumPy arrays, which raise an `IndexError`. Networks are not checked in this way.
    """
    values: list[Any] = []

    def arrays(t: Array, z: Array) -> list[Array]:
        values.append(function(t, z))
        return jax.tree.leaves(eqx.filter(values[-1], eqx.is_array))

    try:
        operations, _ = flat_operations(arrays, (jnp.zeros(()), jnp.zeros(dimension)))
        if isinstance(given, types.FunctionType) and any(
            operation.equation.primitive.name in INDEXING for operation in operations
        ):
            _call_with_numpy(given, dimension)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        if isinstance(error, TypeError) and "positional argument" in reason:
            reason += f"; it is called as {name}(t, z)"
        raise ValueError(f"{name} fails for z of shape {(dimension,)}: {reason}{see('shapes')}") from error
    if not isinstance(values[-1], jax.Array | np.ndarray | lx.AbstractLinearOperator):
        raise ValueError(f"{name} must return one array, got {type(values[-1]).__name__}{see('shapes')}")
    return noise_shape(values[-1])


def _call_with_numpy(function: Callable, dimension: int) -> None:
    try:
        with np.errstate(all="ignore"):
            function(0.0, np.zeros(dimension))
    except IndexError:
        raise
    except Exception:
        return  # the function requires JAX arrays
