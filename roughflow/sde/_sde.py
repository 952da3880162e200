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
    """dZ = drift dt + σ dB as text, with a symbol for σ."""
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
    """The same SDE, in which the variables in closures of its functions are parameters, for points of the
    shape of `z`.

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
    begins with `subject`, by default the dimension of a base.
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
    """Candidate dimensions: small numbers, and the sizes of the arrays in the SDE."""
    arrays = [leaf for leaf in jax.tree.leaves(sde) if eqx.is_array(leaf)]
    return sorted({*range(1, 17), *(size for array in arrays for size in array.shape if size)})


def _fits(sde: AbstractSDE, dimension: int) -> bool:
    try:
        _fitted(sde, dimension)
    except ValueError:
        return False
    return True


def _fitted(sde: AbstractSDE, dimension: int) -> int:
    """m, the number of Brownian motions, after a check of the shapes of drift and diffusion."""
    for name in ("drift", "diffusion"):
        _check_places(name, getattr(sde, name, None), dimension)
    drift = _shape_of("drift", sde.drift, dimension)
    if drift != (dimension,):
        raise ValueError(
            f"drift must return shape {(dimension,)} for z of shape {(dimension,)}, got {drift}"
            + see("shapes")
        )
    diffusion = _shape_of("diffusion", sde.noise, dimension)
    if len(diffusion) != 2 or diffusion[0] != dimension:
        raise ValueError(
            f"diffusion must return shape ({dimension}, m) for z of shape {(dimension,)}, got {diffusion}"
            + see("shapes")
        )
    return diffusion[1]


def _shape_of(name: str, function: Callable, dimension: int) -> tuple[int, ...]:
    """The shape that a coefficient returns; exceptions of the coefficient are reported with its name."""
    try:
        # eqx is used instead of jax, because an operator is a module with static parts.
        value = eqx.filter_eval_shape(function, jnp.zeros(()), jnp.zeros(dimension))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        if isinstance(error, TypeError) and "positional argument" in reason:
            reason += f"; it is called as {name}(t, z)"
        raise ValueError(f"{name} fails for z of shape {(dimension,)}: {reason}{see('shapes')}") from error
    if not isinstance(value, jax.ShapeDtypeStruct | lx.AbstractLinearOperator):
        raise ValueError(f"{name} must return one array, got {type(value).__name__}{see('shapes')}")
    return noise_shape(value)


def _may_be_out_of_range(function: Callable, dimension: int) -> bool:
    """Whether an index may be out of range. For indices that are known to be in range, JAX uses slices."""
    try:
        leaves = lambda t, z: jax.tree.leaves(eqx.filter(function(t, z), eqx.is_array))
        operations, _ = flat_operations(leaves, (jnp.zeros(()), jnp.zeros(dimension)))
    except Exception:
        return True
    return not INDEXING.isdisjoint(operation.equation.primitive.name for operation in operations)


def _check_places(name: str, function: Any, dimension: int) -> None:
    """Refuse out-of-range indices, which JAX clamps, by calling the function with NumPy arrays. Networks are
    not checked."""
    if not isinstance(function, types.FunctionType) or not _may_be_out_of_range(function, dimension):
        return
    try:
        with np.errstate(all="ignore"):
            function(0.0, np.zeros(dimension))
    except IndexError as error:
        raise ValueError(f"{name} fails for z of shape {(dimension,)}: {error}{see('shapes')}") from error
    except Exception:
        return  # the function requires JAX arrays
