"""Entries with PyTorch: torchdiffeq as in FFJORD, plain Runge-Kutta, zuko, and torchsde for W2."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torchsde
from torch import Tensor
from torchdiffeq import odeint_adjoint
from zuko.transforms import FreeFormJacobianTransform

from benchmarks.timing import Entry
from benchmarks.torch_fields import Field, exact, fused, hutchinson, mlp, velocity
from benchmarks.workloads import LEARNING_RATE, STEPS, Workload, flatten, split_layers

TOLERANCE = 1e-5
COMPILE_LIMIT_S = 60.0
THREADS = 2

Objective = Callable[[Sequence[Tensor]], Tensor]  # weights -> per-sample values


def torch_entries(workload: Workload, compiled: bool) -> dict[str, Entry]:
    """All PyTorch entries of a workload; with `compiled`, also those with a compiled field."""
    torch.set_num_threads(THREADS)
    torch.compiler.reset()  # graphs of another workload would count towards the recompilation limit
    torch._functorch.config.donated_buffer = False  # torchsde's adjoint retains its graphs
    make = density_entries if workload.is_density else simulation_entries
    entries = make(workload, compiled=False)
    if compiled:
        entries |= {f"{name} [compiled]": e for name, e in make(workload, compiled=True).items()}
    return entries


def make_entry(workload: Workload, objective: Objective, compiled: bool, probe=False) -> Entry:
    sign = -1 if workload.is_density else 1
    weights = leaves(workload)
    optimizer = torch.optim.Adagrad(weights, lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        (sign * objective(weights).mean()).backward()
        optimizer.step()

    def evaluate() -> tuple[np.ndarray, np.ndarray]:
        initial = leaves(workload)
        values = objective(initial)
        gradient = torch.autograd.grad(sign * values.mean(), initial)
        return values.detach().cpu().numpy(), flatten([g.cpu() for g in gradient])

    return Entry(step, evaluate, probe, COMPILE_LIMIT_S if compiled else None)


def leaves(workload: Workload) -> list[Tensor]:
    return [torch.tensor(w, requires_grad=True) for w in workload.weights]


def log_normal(z: Tensor) -> Tensor:
    return -0.5 * (z * z).sum(-1) - float(np.log(2 * np.pi))


# --- W0 and W1: log-densities ---------------------------------------------------------------


def density_entries(workload: Workload, compiled: bool) -> dict[str, Entry]:
    def entry(solve, field: Field) -> Entry:
        probe = field is hutchinson
        if compiled and field is not fused:
            # torch.compile loses second derivatives of autograd.grad, but not those of torch.func.
            field = partial(field, vjp=torch.func.vjp)
        if compiled:
            field = torch.compile(field)
        return make_entry(workload, partial(solve, workload, field), compiled, probe)

    def zuko_entry(is_exact: bool) -> Entry:
        return make_entry(workload, partial(zuko_solve, workload, is_exact, compiled), compiled)

    return {
        "torchdiffeq dopri5 adjoint, exact (FFJORD)": entry(adjoint_solve, exact),
        "torchdiffeq dopri5 adjoint, Hutchinson (FFJORD)": entry(adjoint_solve, hutchinson),
        "torchdiffeq dopri5 adjoint, hand-fused": entry(adjoint_solve, fused),
        "torch RK4 x 20, autograd divergence": entry(rk4_solve, exact),
        "torch RK4 x 20, hand-fused": entry(rk4_solve, fused),
        "zuko, exact": zuko_entry(True),
        "zuko, Hutchinson (own probe)": zuko_entry(False),
    }


def constants(workload: Workload) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.as_tensor(a) for a in (workload.x, workload.noise, workload.probe))


def adjoint_solve(workload: Workload, field: Field, weights: Sequence[Tensor]) -> Tensor:
    x, coefficients, probe = constants(workload)

    def augmented(t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return field(weights, t, state[0], coefficients, probe)

    z, log_det = odeint_adjoint(
        augmented,
        (x, x.new_zeros(len(x))),
        x.new_tensor([1.0, 0.0]),
        rtol=TOLERANCE,
        atol=TOLERANCE,
        method="dopri5",
        adjoint_params=tuple(weights),
    )
    return log_normal(z[-1]) + log_det[-1]


def rk4_solve(workload: Workload, field: Field, weights: Sequence[Tensor]) -> Tensor:
    z, coefficients, probe = constants(workload)
    log_det, h = z.new_zeros(len(z)), -1.0 / STEPS
    for t in torch.linspace(1.0, 0.0, STEPS + 1, device=z.device)[:-1]:
        f1, d1 = field(weights, t, z, coefficients, probe)
        f2, d2 = field(weights, t + h / 2, z + h / 2 * f1, coefficients, probe)
        f3, d3 = field(weights, t + h / 2, z + h / 2 * f2, coefficients, probe)
        f4, d4 = field(weights, t + h, z + h * f3, coefficients, probe)
        z = z + h / 6 * (f1 + 2 * f2 + 2 * f3 + f4)
        log_det = log_det + h / 6 * (d1 + 2 * d2 + 2 * d3 + d4)
    return log_normal(z) + log_det


def zuko_solve(workload: Workload, is_exact: bool, compiled: bool, weights) -> Tensor:
    """zuko's tolerances are its defaults (1e-6, 1e-5); its gradient is a checkpointed adjoint."""
    x, coefficients, _ = constants(workload)
    field = torch.compile(velocity) if compiled else velocity
    transform = FreeFormJacobianTransform(
        lambda t, z: field(weights, t, z, coefficients), 1.0, 0.0, weights, exact=is_exact
    )
    z, log_det = transform.call_and_ladj(x)
    return log_normal(z) + log_det


# --- W2: simulation -------------------------------------------------------------------------


class GivenIncrements(torchsde.BaseBrownian):
    """Brownian motion known only on the grid of the solver."""

    def __init__(self, increments: Tensor) -> None:
        self.increments = increments
        self.grid = len(increments)

    def __call__(self, ta, tb=None, return_U=False, return_A=False) -> Tensor:
        first, last = round(float(ta) * self.grid), round(float(tb) * self.grid)
        if last - first == 1:
            return self.increments[first]
        return self.increments[first:last].sum(0)

    def __repr__(self) -> str:
        return f"GivenIncrements({self.grid})"

    dtype = property(lambda self: self.increments.dtype)
    device = property(lambda self: self.increments.device)
    shape = property(lambda self: self.increments.shape[1:])
    levy_area_approximation = "none"


class SDE:
    noise_type, sde_type = "general", "stratonovich"

    def __init__(self, weights: Sequence[Tensor], network: Callable) -> None:
        self.drift, self.sigma = split_layers(weights)
        self.network = network

    def f(self, t: Tensor, z: Tensor) -> Tensor:
        return self.network(self.drift, z)

    def g(self, t: Tensor, z: Tensor) -> Tensor:
        s1, s2 = self.network(self.sigma, z).unbind(-1)
        one = torch.ones_like(s1)
        return torch.stack([one, s1, s2, one], dim=-1).view(-1, 2, 2)


def simulation_entries(workload: Workload, compiled: bool) -> dict[str, Entry]:
    network = torch.compile(mlp) if compiled else mlp

    def entry(integrate: Callable[..., Tensor], **options) -> Entry:
        objective = partial(simulate, workload, network, integrate, options)
        return make_entry(workload, objective, compiled)

    adjoint = torchsde.sdeint_adjoint
    heun = {"method": "reversible_heun", "adjoint_method": "adjoint_reversible_heun"}
    return {
        "torchsde midpoint, backprop": entry(torchsde.sdeint, method="midpoint"),
        "torchsde midpoint, adjoint": entry(adjoint, method="midpoint", adjoint_method="midpoint"),
        "torchsde reversible Heun, its adjoint (other scheme)": entry(adjoint, **heun),
    }


def simulate(workload: Workload, network, integrate, options: dict, weights) -> Tensor:
    z, increments, _ = constants(workload)
    if integrate is torchsde.sdeint_adjoint:
        options = options | {"adjoint_params": tuple(weights)}
    # Slightly more than 1/20: the last step is cut at t = 1, and rounding cannot add a 21st step.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = integrate(
            SDE(weights, network),
            z,
            torch.tensor([0.0, 1.0]),
            bm=GivenIncrements(increments),
            dt=(1 + 1e-5) / STEPS,
            **options,
        )
    return (path[-1] ** 2).sum(-1)
