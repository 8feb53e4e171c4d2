"""gradient="implicit": differentiate an equilibrium, however it was found.

At z = F(z, theta) with F = force, and K = I + HM (H the Hessian of E in g, M = dg/dz),

    K dz = dF/dtheta dtheta,    dl/dtheta = lambda^T dF/dtheta,    K^T lambda = dl/dz

K is self-adjoint in the product a.Mb (ET-F12), its transpose is not. With lambda = w + M mu and
w = dl/dz the equation becomes K mu = -H w, which MINRES solves in that product, also at a saddle.
The null directions of M drop out: there K is the identity (ET-F31).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from etdyn.checks import bad, check_count, check_positive
from etdyn.solve.solution import GradientError
from etdyn.systems import System

__all__ = ["ImplicitReport", "implicit"]

ROUNDS = 4  # of MINRES, each on the true residual that the last one left

Operator = Callable[[Tensor], Tensor]


@dataclass
class ImplicitReport:
    """How far an implicit gradient can be trusted, per sample.

    Attributes:
        equilibrium: `(batch,)`, |x - force(x)| / |force(x)|.
        residual: `(batch,)`, |w - K^T lambda| / |w|, measured at the end and not as the solver's
            recurrence has it; of the last backward pass, empty before the first.
        products: int64 `(batch,)`, Hessian-vector products of that pass.
        backward: backward passes so far.
    """

    equilibrium: Tensor = field(default_factory=lambda: torch.empty(0))
    residual: Tensor = field(default_factory=lambda: torch.empty(0))
    products: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    backward: int = 0


def implicit(
    system: System,
    x: Tensor,
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_products: int = 1000,
    start: Tensor | None = None,
    report: ImplicitReport | None = None,
) -> Tensor:
    """An equilibrium x = force(x), with its gradient with respect to the system's parameters.

    One force with a graph, whatever number of iterations found x. Nothing flows to x: an isolated
    equilibrium does not depend on where the search began.

    Args:
        system: under the "leaky" or the "et" dynamics, which share these equilibria; an
            interaction that has an energy.
        x: `(batch, token, feature)`, as `find_equilibrium` returns it.
        tol: largest |x - force(x)| / |force(x)|; None is the root of the dtype's rounding.
        rtol: of the linear solve, |w - K^T lambda| <= rtol |w|; None is rounding^(2/3).
        max_products: Hessian-vector products of a backward pass.
        start: what the search began from; it gets a gradient of zero instead of none.
        report: takes the residuals.

    Returns:
        x, the same numbers. Differentiable once; backward may run again where autograd keeps
        the graph.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
        GradientError: x is not an equilibrium to tol; while autograd runs, the linear solve
            missed rtol (an equilibrium that is not isolated, say).

    Source: ET-F12, ET-F31; Bai et al. 2019 (implicit differentiation); Paige and Saunders 1975
    (MINRES).
    """
    eps = _check(system, x, tol, rtol, max_products)
    report = report if report is not None else ImplicitReport()
    here = x.detach()
    force = system.keep(system.force(here))
    target = system.keep(here)
    size = _norm(force.detach()).clamp(min=torch.finfo(x.dtype).tiny)
    report.equilibrium = _norm(force.detach() - target) / size
    limit = eps**0.5 if tol is None else tol
    if not bool((report.equilibrium <= limit).all()):
        far, sample = (v.item() for v in report.equilibrium.nan_to_num(nan=torch.inf).max(0))
        raise GradientError(
            f'gradient="implicit": sample {int(sample)} is not an equilibrium: |x - force(x)| is '
            f"{far:.3g} of |force(x)| (tol {limit:.3g}); find_equilibrium finds one"
        )
    solver = _Solver(system, eps ** (2 / 3) if rtol is None else rtol, max_products, report)
    result: Tensor = _AtEquilibrium.apply(solver, here, start, force)  # type: ignore[no-untyped-call]
    return result


def _check(
    system: System, x: Tensor, tol: float | None, rtol: float | None, max_products: int
) -> float:
    if system.dynamics not in ("leaky", "et"):
        raise bad("system", 'dynamics "leaky" or "et" with gradient="implicit"',
                  repr(system.dynamics))  # fmt: skip
    if not system.has_energy:
        raise bad("system", "an interaction that has an energy", type(system.interaction).__name__)
    system.check(x)
    for name, value in (("tol", tol), ("rtol", rtol)):
        if value is not None:
            check_positive(name, value)
    check_count("max_products", max_products)
    return torch.finfo(x.dtype).eps


class _AtEquilibrium(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, solver: _Solver, x: Tensor, start: Tensor | None, force: Tensor
    ) -> Tensor:
        ctx.solver = solver
        ctx.save_for_backward(x)
        ctx.shape = None if start is None else start.shape
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        start = None if ctx.shape is None else grad.new_zeros(ctx.shape)
        return None, None, start, ctx.solver.solve(x, grad)


class _Solver:
    """K^T lambda = w at one equilibrium."""

    def __init__(
        self, system: System, rtol: float, max_products: int, report: ImplicitReport
    ) -> None:
        self.system, self.rtol, self.max_products, self.report = system, rtol, max_products, report

    @torch.no_grad()
    def solve(self, x: Tensor, w: Tensor) -> Tensor:
        """Lambda, or `GradientError`."""
        system, w = self.system, self.system.keep(w)
        x = system._stand_in(x)
        g = system.activation(x)

        def metric(v: Tensor) -> Tensor:
            return system.keep(system.lagrangian.metric(x, v))

        def hessian(u: Tensor) -> Tensor:
            return system.potential.hvp(g, u)

        mu, pulled = torch.zeros_like(w), hessian(w)
        residual = -metric(pulled)  # of lambda = w
        size = _norm(w)
        goal = self.rtol * size
        products = torch.ones(len(w), dtype=torch.int64, device=w.device)
        unmet = ~(_norm(residual) <= goal)
        for _ in range(ROUNDS):
            left = self.max_products - int(products.max())
            if not bool(unmet.any()) or left < 2:
                break
            b = -pulled - mu - hessian(metric(mu))
            shrink = 0.3 * goal / _norm(residual).clamp(min=torch.finfo(w.dtype).tiny)
            step, used = _minres(metric, hessian, b, shrink, active=unmet, limit=left - 1)
            mu = mu + step
            lam = w + metric(mu)
            residual = w - lam - metric(hessian(lam))
            products = products + used + 2 * unmet
            unmet = ~(_norm(residual) <= goal)
        self._write(_norm(residual), size, products)
        return w + metric(mu)

    def _write(self, residual: Tensor, size: Tensor, products: Tensor) -> None:
        relative = residual / size.clamp(min=torch.finfo(size.dtype).tiny)
        self.report.residual, self.report.products = relative, products
        self.report.backward += 1
        worst, sample = (v.item() for v in relative.nan_to_num(nan=torch.inf).max(0))
        if worst > self.rtol:
            raise GradientError(
                f'gradient="implicit": the linear solve of sample {int(sample)} left a relative '
                f"residual of {worst:.3g} after {int(products[int(sample)])} products (rtol "
                f"{self.rtol:.3g}); the equilibrium may not be isolated, or loosen rtol"
            )


def _minres(
    metric: Operator, hessian: Operator, b: Tensor, shrink: Tensor, *, active: Tensor, limit: int
) -> tuple[Tensor, Tensor]:
    """K mu = b by MINRES in the product a.Mb, until each active sample's residual shrank.

    Returns mu and the products per sample. Lanczos: K v_k = beta_k v_{k-1} + alpha_k v_k +
    beta_{k+1} v_{k+1}; Givens rotations keep the tridiagonal triangular.
    """
    tiny = torch.finfo(b.dtype).tiny
    zero = torch.zeros_like(b[:, 0, 0])
    mu, v_old, d_old, d_older = (torch.zeros_like(b) for _ in range(4))
    v, mv = b, metric(b)
    beta = _dot(v, mv).clamp(min=0).sqrt()
    first = beta
    active = active & (beta > 0)
    v, mv = _over(v, beta), _over(mv, beta)
    left, c, s, c_old, s_old = beta, zero + 1, zero, zero + 1, zero
    beta = zero
    used = torch.zeros(len(b), dtype=torch.int64, device=b.device)
    for _ in range(limit):
        if not bool(active.any()):
            break
        kv = v + hessian(mv)
        alpha = _dot(mv, kv)
        fresh = kv - _times(alpha, v) - _times(beta, v_old)
        m_fresh = metric(fresh)
        beta_new = _dot(fresh, m_fresh).clamp(min=0).sqrt()
        epsilon, delta = s_old * beta, c_old * beta
        delta, gamma = c * delta + s * alpha, -s * delta + c * alpha
        rho = torch.hypot(gamma, beta_new).clamp(min=tiny)
        c_old, s_old, c, s = c, s, gamma / rho, beta_new / rho
        d = _over(v - _times(delta, d_old) - _times(epsilon, d_older), rho)
        mu = torch.where(active[:, None, None], mu + _times(c * left, d), mu)
        left = torch.where(active, -s * left, left)
        used = used + active
        # beta_new = 0: the Krylov space is exhausted and mu exact
        active = active & (left.abs() > shrink * first) & (beta_new > 0)
        d_older, d_old, v_old, beta = d_old, d, v, beta_new
        v, mv = _over(fresh, beta_new), _over(m_fresh, beta_new)
    return mu, used


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2))


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((1, 2)).sqrt()


def _times(scale: Tensor, v: Tensor) -> Tensor:
    return scale[:, None, None] * v


def _over(v: Tensor, size: Tensor) -> Tensor:
    """v / size, zero where size is."""
    return (
        v
        * torch.where(size > 0, 1 / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0)[
            :, None, None
        ]
    )
