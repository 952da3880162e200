"""SDEs as they are written, for people to read."""

import dataclasses
from typing import Any

import equinox as eqx

from .._show import count, named, num_parameters, number
from ._fading import FadingDiffusion
from ._networks import ConstantDiffusion, NoDiffusion
from ._noise import ProportionalDiffusion


def equation(drift: str, diffusion: Any, brownian: str = "dB", sigma: str | None = None) -> str:
    """dZ = drift dt + σ dB, with σ by its symbol."""
    if isinstance(diffusion, NoDiffusion):
        return f"dZ = {drift} dt"
    return f"dZ = {drift} dt + {sigma or _sigma(diffusion)} {brownian}"


def _sigma(diffusion: Any, symbol: str = "σ") -> str:
    if isinstance(diffusion, FadingDiffusion):
        end, power = number(diffusion.t1), number(diffusion.power)
        left = "(1 − t)" if end == "1" else f"(1 − t/{end})"
        return f"{left if power == '1' else f'{left}^{power}'} {_sigma(diffusion.diffusion, 'Σ')}"
    if isinstance(diffusion, ProportionalDiffusion):
        return f"{number(diffusion.scale)} diag(μ(t, Z))"
    return symbol if isinstance(diffusion, ConstantDiffusion) else f"{symbol}(t, Z)"


def noise_part(diffusion: Any) -> list[tuple[str, str]]:
    return [] if isinstance(diffusion, NoDiffusion) else [("σ", part(diffusion))]


def part(value: Any) -> str:
    """One of the functions in an SDE: what it is, what of, and how much of it can be trained."""
    fields = dataclasses.fields(value) if isinstance(value, eqx.Module) else ()
    parts = [getattr(value, field.name, None) for field in fields]
    inner = ", ".join(named(inside) for inside in parts if isinstance(inside, eqx.Module))
    trained = num_parameters(value)
    told = f"{named(value)} of {inner}" if inner else named(value)
    return f"{told}, {count(trained, 'parameter')}" if trained else told
