"""The random ODE's field and its divergence in PyTorch, batched: three ways to write it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import grad

from benchmarks.workloads import split_layers

# (weights, t, z, coefficients, probe) -> velocity (batch, 2), divergence (batch,)
Field = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def mlp(layers: Sequence[tuple[Tensor, Tensor]], z: Tensor) -> Tensor:
    *hidden, (w_out, b_out) = layers
    for w, b in hidden:
        z = torch.tanh(torch.addmm(b, z, w))
    return torch.addmm(b_out, z, w_out)


def brownian_derivative(t: Tensor, coefficients: Tensor) -> Tensor:
    """Time derivative of the Karhunen-Loeve expansion on [0, 1]: (batch, n, 2) -> (batch, 2)."""
    k = torch.arange(coefficients.shape[1], device=coefficients.device)
    basis = torch.where(k == 0, 1.0, 2**0.5 * torch.cos(torch.pi * k * t))
    return torch.einsum("k,bkj->bj", basis, coefficients)


def assemble(f: Tensor, s: Tensor, ds: Tensor, b: Tensor) -> Tensor:
    """dz/dt from the Ito drift f, the entries s (batch, 2) of sigma, ds[:, i, c] = d s_c / d z_i, and
    dB/dt."""
    s1, s2 = s.unbind(-1)
    correction = torch.stack([s1 * ds[:, 0, 0] + ds[:, 1, 0], ds[:, 0, 1] + s2 * ds[:, 1, 1]], dim=-1)
    return f - 0.5 * correction + b + s * b.flip(-1)


def autograd_vjp(function: Callable[[Tensor], Tensor], z: Tensor):
    """The same as `torch.func.vjp`, by `torch.autograd.grad` as in FFJORD, which is faster without
    compilation."""
    with torch.enable_grad():
        z = z if z.requires_grad else z.detach().requires_grad_()
        value = function(z)
    return value, lambda cotangent: grad(value, z, cotangent, create_graph=True)


def unit(z: Tensor, i: int) -> Tensor:
    """The i-th basis vector for every sample."""
    return torch.eye(2, device=z.device)[i].repeat(len(z), 1)


def velocity(weights, t, z, coefficients, vjp=autograd_vjp) -> Tensor:
    """The field with derivatives of sigma from reverse mode, as one would write it in PyTorch."""
    drift, sigma = split_layers(weights)
    f = mlp(drift, z)
    if not sigma:
        return f
    s, pull_back = vjp(lambda y: mlp(sigma, y), z)
    ds = torch.stack([pull_back(unit(z, c))[0] for c in range(2)], dim=-1)
    return assemble(f, s, ds, brownian_derivative(t, coefficients))


def exact(weights, t, z, coefficients, probe, vjp=autograd_vjp):
    """FFJORD's brute-force divergence: one reverse pass per dimension."""
    f, pull_back = vjp(lambda y: velocity(weights, t, y, coefficients, vjp), z)
    return f, pull_back(unit(z, 0))[0][:, 0] + pull_back(unit(z, 1))[0][:, 1]


def hutchinson(weights, t, z, coefficients, probe, vjp=autograd_vjp):
    """FFJORD's stochastic divergence: one reverse pass."""
    f, pull_back = vjp(lambda y: velocity(weights, t, y, coefficients, vjp), z)
    return f, (pull_back(probe)[0] * probe).sum(-1)


def fused(weights, t, z, coefficients, probe):
    """The field and its divergence with hand-written derivatives: two tangents through the drift, partials of
    sigma."""
    drift, sigma = split_layers(weights)
    f, divergence = drift_and_trace(drift, z)
    if not sigma:
        return f, divergence
    s, ds, d2s = sigma_partials(sigma, z)
    b = brownian_derivative(t, coefficients)
    d1s1, d2s2 = ds[:, 0, 0], ds[:, 1, 1]
    s11_1, s12_1, s12_2, s22_2 = d2s.unbind(-1)
    correction = d1s1**2 + s[:, 0] * s11_1 + s12_1 + s12_2 + d2s2**2 + s[:, 1] * s22_2
    divergence = divergence - 0.5 * correction + d1s1 * b[:, 1] + d2s2 * b[:, 0]
    return assemble(f, s, ds, b), divergence


def drift_and_trace(layers, z):
    *hidden, (w_out, b_out) = layers
    tangents = None
    for w, b in hidden:
        z = torch.tanh(torch.addmm(b, z, w))
        slope = 1 - z * z
        tangents = w.unbind(0) if tangents is None else [d @ w for d in tangents]
        tangents = [slope * d for d in tangents]
    trace = sum(d @ w_out[:, i] for i, d in enumerate(tangents))
    return torch.addmm(b_out, z, w_out), trace


def sigma_partials(layers, z):
    """s, first partials [:, i, c], and the second partials that the divergence needs.

    With one hidden layer all partials are products of h' or h'' with fixed small matrices.
    """
    (w, b), (v, c) = layers
    h = torch.tanh(torch.addmm(b, z, w))
    slope = 1 - h * h
    first = (slope @ torch.cat([w[0, :, None] * v, w[1, :, None] * v], dim=1)).view(-1, 2, 2)
    mixed = w[0] * w[1]
    columns = [w[0] ** 2 * v[:, 0], mixed * v[:, 0], mixed * v[:, 1], w[1] ** 2 * v[:, 1]]
    second = (-2 * h * slope) @ torch.stack(columns, dim=1)
    return torch.addmm(c, h, v), first, second
