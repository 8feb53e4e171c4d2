"""Convex potentials of the field: they turn the state x into the activations g = grad L(x)."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_count, check_positive

__all__ = ["Lagrangian", "LayerNorm"]


class Lagrangian(nn.Module, ABC):
    """A convex potential L of one token's state, summed over tokens.

    Shapes: states and activations are `(..., token, feature)`; scalars come per token,
    `(..., token)`. Source: Hoover et al. 2023, section 2; Krotov et al. 2025, section 3.5.1.
    """

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """L(x) of every token."""

    @abstractmethod
    def activation(self, x: Tensor) -> Tensor:
        """g = dL/dx."""

    @abstractmethod
    def metric(self, x: Tensor, v: Tensor) -> Tensor:
        """M v with M = d2L/dx2 = dg/dx, symmetric and positive semidefinite."""

    @abstractmethod
    def dual(self, g: Tensor) -> Tensor:
        """The convex conjugate L*(g) = sup_x (x.g - L(x)) of every token."""

    @abstractmethod
    def legendre(self, x: Tensor) -> Tensor:
        """The neuron energy x.g(x) - L(x) of every token, without cancellation."""

    @abstractmethod
    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """P v: the part of v that moves g, that is, v projected off the null space of M (eps 0)."""


class LayerNorm(Lagrangian):
    """Layer norm with a scalar, positive gamma: the Lagrangian of the Energy Transformer.

        y = x - mean(x),  sigma = sqrt(|y|^2 / D + eps)
        L(x) = D gamma sigma + delta . x,    g = gamma y / sigma + delta

    A gamma per feature would make dg/dx non-symmetric and break the descent; see ET section 1.1.
    gamma is stored as `raw_gamma` with gamma = log(1 + exp(raw_gamma)).

    Args:
        dim: features of a token, at least 2 (one feature has no direction).
        eps: inside the square root, >= 0.
        gamma: initial value, > 0.

    Raises:
        ValueError, TypeError: where an argument is out of range.
    """

    def __init__(self, dim: int, eps: float = 1e-5, gamma: float = 1.0) -> None:
        super().__init__()
        check_count("dim", dim, least=2)
        check_positive("eps", eps, zero=True)
        self.dim, self.eps = dim, float(eps)
        self.raw_gamma = nn.Parameter(torch.zeros(()))
        self.delta = nn.Parameter(torch.zeros(dim))
        self.set_gamma(gamma)

    @property
    def gamma(self) -> Tensor:
        """The scale, a positive scalar tensor."""
        return torch.logaddexp(self.raw_gamma, torch.zeros_like(self.raw_gamma))

    def set_gamma(self, gamma: float) -> None:
        """Set the scale.

        Raises:
            ValueError: gamma <= 0, for which the energy would rise (ET section 1.1).
        """
        check_positive("gamma", gamma)
        value = torch.tensor(gamma, dtype=torch.float64)
        with torch.no_grad():
            self.raw_gamma.copy_(value + torch.log(-torch.expm1(-value)))

    @staticmethod
    def centre(x: Tensor) -> Tensor:
        """y = x - mean(x), per token."""
        return x - x.mean(-1, keepdim=True)

    def sigma(self, x: Tensor) -> Tensor:
        """sqrt(var(x) + eps) with the biased variance, `(..., token)`."""
        return (self.centre(x).square().mean(-1) + self.eps).sqrt()

    def value(self, x: Tensor) -> Tensor:
        """L = D gamma sigma + delta.x, `(..., token)`."""
        return self.dim * self.gamma * self.sigma(x) + x @ self.delta

    def activation(self, x: Tensor) -> Tensor:
        """g = gamma (x - mean) / sigma + delta."""
        gamma = self.gamma.expand(self.dim)
        return nn.functional.layer_norm(x, (self.dim,), gamma, self.delta, self.eps)

    def metric(self, x: Tensor, v: Tensor) -> Tensor:
        """M v = (gamma/sigma) (v - mean(v) - y (y.v) / (D sigma^2)), in O(D)."""
        y = self.centre(x)
        sigma = (y.square().mean(-1, keepdim=True) + self.eps).sqrt()
        unit = y / sigma
        along = unit * ((unit * v).sum(-1, keepdim=True) / self.dim)
        return self.gamma / sigma * (self.centre(v) - along)

    def dual(self, g: Tensor) -> Tensor:
        """L*(g) = -sqrt(D eps) sqrt(R^2 - |g - delta|^2), R = gamma sqrt(D); `(..., token)`.

        Infinite off its domain: outside the ball of radius R, or off the hyperplane
        sum(g - delta) = 0 by more than the rounding of the dtype.
        """
        u = g - self.delta
        radius2 = self.gamma.square() * self.dim
        gap = radius2 - u.square().sum(-1)
        slack = 8 * self.dim * torch.finfo(g.dtype).eps
        flat = u.sum(-1).abs() <= slack * radius2.sqrt()
        inside = flat & (gap >= -slack * radius2)
        value = -((self.dim * self.eps) ** 0.5) * gap.clamp(min=0).sqrt()
        return torch.where(inside, value, torch.full_like(value, torch.inf))

    def legendre(self, x: Tensor) -> Tensor:
        """x.g - L = -D gamma eps / sigma, `(..., token)` (ET-F2)."""
        return -self.dim * self.gamma * self.eps / self.sigma(x)

    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """P v: v without its parts along the vector of ones and along y = x - mean(x)."""
        y = self.centre(x)
        tiny = torch.finfo(x.dtype).tiny  # a token without direction keeps v - mean(v)
        along = (y * v).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp(min=tiny)
        return self.centre(v) - along * y

    def flat(self, x: Tensor) -> Tensor:
        """Whether a token is constant and so has no direction, bool `(..., token, 1)`."""
        std = self.centre(x).square().mean(-1, keepdim=True).sqrt()
        # the mean of D equal numbers is off by a few roundings
        return std <= 4 * torch.finfo(x.dtype).eps * x.abs().amax(-1, keepdim=True)

    def normalise(self, x: Tensor) -> Tensor:
        """x brought to mean 0 and standard deviation 1 per token, without eps.

        Raises:
            ValueError: a token has zero variance and so no direction.
        """
        flat = self.flat(x)
        if bool(flat.any()):
            raise bad("x", "tokens of nonzero variance", f"{int(flat.sum())} constant token(s)")
        y = self.centre(x)
        return y / y.square().mean(-1, keepdim=True).sqrt()

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"dim={self.dim}, eps={self.eps}"
