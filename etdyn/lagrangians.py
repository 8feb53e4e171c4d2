"""Convex potentials of the field: they turn the state x into the activations g = grad L(x)."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_count, check_positive

__all__ = ["IsingSpin", "Lagrangian", "LayerNorm", "Quadratic"]


class Lagrangian(nn.Module, ABC):
    """A convex potential L of one token's state, summed over tokens.

    Shapes: states and activations are `(..., token, feature)`; scalars come per token,
    `(..., token)`. Source: Hoover et al. 2023, section 2; Krotov et al. 2025, section 3.5.1.

    Attributes:
        dim: features of a token.
    """

    dim: int

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of the dtype and on the device of the states."""

    @property
    @abstractmethod
    def radius(self) -> Tensor:
        """What distances of a token's activations are measured in, a scalar."""

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
    def metric_root(self, x: Tensor, v: Tensor) -> Tensor:
        """M^1/2 v, with the symmetric root."""

    @abstractmethod
    def metric_root_inverse(self, x: Tensor, v: Tensor) -> Tensor:
        """M^-1/2 v; zero along the null directions of M."""

    @abstractmethod
    def dual(self, g: Tensor) -> Tensor:
        """The convex conjugate L*(g) = sup_x (x.g - L(x)) of every token."""

    @abstractmethod
    def legendre(self, x: Tensor) -> Tensor:
        """The neuron energy x.g(x) - L(x) of every token, without cancellation."""

    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """P v: the part of v that moves g, that is, v projected off the null space of M (eps 0)."""
        return v

    def imbalance(self, x: Tensor, force: Tensor) -> Tensor:
        """P (force - x), what moves g in the leaky flow; shape of x."""
        return self.tangent(x, force - x)

    def clock_rate(self, x: Tensor) -> Tensor:
        """dtau/dt of the intrinsic clock, `(..., token)`."""
        return torch.ones_like(x[..., 0])

    def elapsed_clock(self, x0: Tensor, x1: Tensor, dt: Tensor | float) -> Tensor:
        """tau of a straight step from x0 to x1 that takes dt, `(..., token)`."""
        return torch.ones_like(x0[..., 0]) * dt


class _Elementwise(Lagrangian):
    """Every feature has its own potential; M is diagonal."""

    _like: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_count("dim", dim)
        self.dim = dim
        self.register_buffer("_like", torch.zeros(()), persistent=False)

    @property
    def like(self) -> Tensor:
        """A scalar."""
        return self._like

    @abstractmethod
    def slope(self, x: Tensor) -> Tensor:
        """dg/dx of every feature, shape of x."""

    def metric(self, x: Tensor, v: Tensor) -> Tensor:
        """M v = g'(x) v."""
        return self.slope(x) * v

    def metric_root(self, x: Tensor, v: Tensor) -> Tensor:
        """M^1/2 v."""
        return self.slope(x).sqrt() * v

    def metric_root_inverse(self, x: Tensor, v: Tensor) -> Tensor:
        """M^-1/2 v."""
        return v / self.slope(x).sqrt()

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"dim={self.dim}"


class Quadratic(_Elementwise):
    """L = |x|^2 / 2, so that g = x and M = 1: a gradient flow of E in x itself.

    Args:
        dim: features of a token.
    """

    @property
    def radius(self) -> Tensor:
        """One: distances in g are distances in x."""
        return torch.ones_like(self.like)

    def slope(self, x: Tensor) -> Tensor:
        """One."""
        return torch.ones_like(x)

    def value(self, x: Tensor) -> Tensor:
        """|x|^2 / 2."""
        return x.square().sum(-1) / 2

    def activation(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def dual(self, g: Tensor) -> Tensor:
        """|g|^2 / 2."""
        return g.square().sum(-1) / 2

    def legendre(self, x: Tensor) -> Tensor:
        """|x|^2 / 2."""
        return x.square().sum(-1) / 2


class IsingSpin(_Elementwise):
    """Every feature is the mean of a spin +-1 in the field x: g = tanh(beta x).

        L = sum log cosh(beta x) / beta,    M = beta (1 - g^2)
        L* = sum ((1 + g) log(1 + g) + (1 - g) log(1 - g)) / (2 beta)    minus entropy / beta

    Args:
        dim: spins of a token.
        beta: inverse temperature > 0.

    Source: S section 1, D = 1 (B1).
    """

    def __init__(self, dim: int, beta: float = 1.0) -> None:
        super().__init__(dim)
        check_positive("beta", beta)
        self.beta = float(beta)

    @property
    def radius(self) -> Tensor:
        """sqrt(dim), the length of a token of saturated spins."""
        return torch.full_like(self.like, self.dim**0.5)

    def slope(self, x: Tensor) -> Tensor:
        """beta (1 - tanh^2) = beta / cosh^2, without cancellation."""
        decay = torch.exp(-2 * self.beta * x.abs())
        return 4 * self.beta * decay / (1 + decay).square()

    def value(self, x: Tensor) -> Tensor:
        """Sum of log cosh(beta x) / beta."""
        return self._log_cosh(self.beta * x.abs()).sum(-1) / self.beta

    @staticmethod
    def _log_cosh(size: Tensor) -> Tensor:
        near = torch.log1p(2 * torch.sinh(size.clamp(max=1) / 2).square())
        far = size + torch.log1p(torch.exp(-2 * size)) - math.log(2)
        return torch.where(size < 1, near, far)

    def activation(self, x: Tensor) -> Tensor:
        """tanh(beta x)."""
        return torch.tanh(self.beta * x)

    def dual(self, g: Tensor) -> Tensor:
        """Minus the entropy over beta, without its constant log 2; infinite beyond |g| = 1."""
        small = g.clamp(-0.5, 0.5)
        near = small * torch.atanh(small) + torch.log1p(-small.square()) / 2
        entropy = torch.special.entr((1 + g) / 2) + torch.special.entr((1 - g) / 2)
        per_spin = torch.where(g.abs() < 0.5, near, math.log(2) - entropy)
        return torch.div(per_spin.sum(-1), self.beta)

    def legendre(self, x: Tensor) -> Tensor:
        """L*(tanh(beta x)) of every token."""
        size = self.beta * x.abs()
        near = size * torch.tanh(size) - self._log_cosh(size)
        decay = torch.exp(-2 * size)
        far = math.log(2) - torch.log1p(decay) - 2 * size * decay / (1 + decay)
        return torch.div(torch.where(size < 1, near, far).sum(-1), self.beta)


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
    def like(self) -> Tensor:
        """delta."""
        return self.delta

    @property
    def radius(self) -> Tensor:
        """R = gamma sqrt(D), of the sphere that g - delta lives on."""
        return torch.mul(self.gamma, self.dim**0.5)

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

    def metric_root(self, x: Tensor, v: Tensor) -> Tensor:
        """M^1/2 v = sqrt(gamma/sigma) (P v + (sqrt(eps)/sigma) (y.v) y/|y|^2)."""
        tangent, sigma = self.tangent(x, v), self.sigma(x).unsqueeze(-1)
        along = self.centre(v) - tangent
        root: Tensor = (self.gamma / sigma).sqrt()
        return torch.mul(root, tangent + self.eps**0.5 / sigma * along)

    def metric_root_inverse(self, x: Tensor, v: Tensor) -> Tensor:
        """M^-1/2 v = sqrt(sigma/gamma) (P v + (sigma/sqrt(eps)) (y.v) y/|y|^2)."""
        tangent, sigma = self.tangent(x, v), self.sigma(x).unsqueeze(-1)
        along = self.centre(v) - tangent
        stretched = sigma / self.eps**0.5 * along if self.eps else 0.0
        root: Tensor = (sigma / self.gamma).sqrt()
        return torch.mul(root, tangent + stretched)

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

    def imbalance(self, x: Tensor, force: Tensor) -> Tensor:
        """P force: x itself has no part along which g can move."""
        return self.tangent(x, force)

    def clock_rate(self, x: Tensor) -> Tensor:
        """gamma/sigma: tau is the clock of the sphere dynamics."""
        return self.gamma / self.sigma(x)

    def elapsed_clock(self, x0: Tensor, x1: Tensor, dt: Tensor | float) -> Tensor:
        """tau of a straight step from x0 to x1 that takes dt, exactly, `(..., token)`.

        Along it sigma^2 = A s^2 + 2 B s + sigma_0^2 in the share s of the step, so that
        tau = gamma dt log(1 + (sqrt(A) (sigma_1 - sigma_0) + A) / (sqrt(A) sigma_0 + B)) / sqrt(A).
        """
        y0, dy = self.centre(x0), self.centre(x1 - x0)
        sigma0, sigma1 = self.sigma(x0), self.sigma(x1)
        root = dy.square().mean(-1).sqrt()
        tiny = 1e-6 * sigma0  # so small a step leaves sigma as it is
        a = root.maximum(tiny)
        b = (y0 * dy).mean(-1)
        moving = torch.log1p((a * (sigma1 - sigma0) + a * a) / (a * sigma0 + b)) / a
        share = torch.where(root > tiny, moving, 2 / (sigma0 + sigma1))
        return self.gamma * dt * share

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
