"""roughflow: densities for stochastic differential equations."""

import ast as _ast
import functools as _functools
import importlib as _importlib
import pkgutil as _pkgutil
import typing as _typing

if _typing.TYPE_CHECKING:
    from . import (
        density as density,
        driver as driver,
        files as files,
        flow as flow,
        latent as latent,
        mcmc as mcmc,
        plots as plots,
        rough as rough,
        sde as sde,
        series as series,
        tables as tables,
        train as train,
        transition as transition,
    )
    from ._public import *  # noqa: F403

__version__ = "0.2.0"

# The most common names; all others are in rf.sde, rf.driver, rf.flow, rf.density, rf.train and so on.
__all__ = [  # noqa: F405, RUF022  (in pipeline order)
    "AbstractSDE",
    "ItoSDE",
    "StratonovichSDE",
    "to_ito",
    "to_stratonovich",
    "MLP",
    "FullDiffusion",
    "DiagonalDiffusion",
    "ConstantDiffusion",
    "targeted_sde",
    "overdamped_langevin",
    "underdamped_langevin",
    "KarhunenLoeve",
    "Legendre",
    "PiecewiseLinear",
    "FractionalBrownian",
    "Normal",
    "MultivariateNormal",
    "ExactDivergence",
    "HutchinsonDivergence",
    "FixedGrid",
    "Adaptive",
    "simulate",
    "to_diffrax",
    "StochasticFlow",
    "Estimate",
    "PullBack",
    "Unbiased",
    "Prior",
    "Laplace",
    "Amortised",
    "fit",
    "MaximumLikelihood",
    "ReverseKL",
    "Interpolant",
    "neural_flow",
    "with_noise",
    "save",
    "load",
    "fit_density",
    "FittedDensity",
    "sample_chain",
    "warm_up",
    "tune_sampler",
    "AdjustedSampler",
    "UnadjustedSampler",
    "fit_sde",
    "FittedSDE",
    "fit_latent",
    "series_likelihood",
    "transition_log_prob",
    "transition_estimate",
    "ParametricSDE",
    "BrownianMotion",
    "OrnsteinUhlenbeck",
    "GeometricBrownianMotion",
    "CoxIngersollRoss",
    "CKLS",
    "ConstantElasticity",
    "Jacobi",
    "DoubleWell",
    "LotkaVolterra",
    "Heston",
    "FitzHughNagumo",
    "FractionalOrnsteinUhlenbeck",
    "NonFiniteError",
    "OutOfStepsError",
    "datasets",
    "plots",
]
# fmt: on


def __getattr__(name: str) -> _typing.Any:
    """Import a public name on first use, and only the modules that this name needs: JAX is slow to import,
    and `roughflow --help` does not need JAX. `rf.plots` is imported separately, because it needs
    matplotlib."""
    if name == "plots":
        return _importlib.import_module(".plots", __name__)
    place = _places().get(name)
    if place is None or (name not in __all__ and place != f".{name}"):
        elsewhere = "" if place is None else f": it is rf{place}.{name}"
        raise AttributeError(f"module 'roughflow' has no attribute {name!r}{elsewhere}")
    module = _importlib.import_module(place, __name__)
    globals()[name] = value = module if place == f".{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    stages = {name for name, place in _places().items() if place == f".{name}" and name[0] != "_"}
    return sorted({*globals(), *__all__, *stages})


@_functools.cache
def _places() -> dict[str, str]:
    """The module that defines each public name; the name of a stage maps to the stage itself. The file
    `_public` is parsed, not imported."""
    text = _pkgutil.get_data(__name__, "_public.py")
    assert text is not None
    imports = [node for node in _ast.parse(text).body if isinstance(node, _ast.ImportFrom)]
    stages = {node.module: f".{node.module}" for node in imports if node.module}
    return stages | {a.name: f".{node.module or a.name}" for node in imports for a in node.names}
