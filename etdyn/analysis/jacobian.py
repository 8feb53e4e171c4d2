"""The flow's Jacobian where nothing promises that its spectrum is real, and a test of that promise.

A force without an energy may turn and amplify before it decays. Both show in the Jacobian in
orthonormal tangent coordinates, C = -S of `etdyn.analysis.operators`: similar to the flow's
Jacobian off the null directions, and symmetric exactly where the force is a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import labelled
from etdyn.analysis.operators import (
    Linearisation,
    dense_matrix,
    flow_jacobian,
    linear_operator,
    stability_product,
    without_null,
)
from etdyn.analysis.spectrum import check_modes, left_out
from etdyn.checks import check_finite
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["jacobian_spectrum", "real_spectrum"]

PAIRS = 8  # random directions of the conformance test
ZERO, SMALL = 1e-10, 1e-4  # of the Jacobian's norm


@torch.no_grad()
def jacobian_spectrum(system: System, x: Tensor, k: int | None = None) -> xr.Dataset:
    """Complex eigenvalues of the flow's Jacobian: the rates of small perturbations.

    Args:
        system: any, with or without an energy; `spectrum` serves those with one better.
        x: `(batch, token, feature)`.
        k: None for all eigenvalues, or how many of largest real part, matrix-free (scipy's
            eigs, which may miss copies of a multiple eigenvalue).

    Returns:
        Dataset (schema "etdyn.jacobian/1"), dims sample and mode, values per unit of flow time:
        `real` descending and `imaginary`; NaN where eigs did not converge, and beyond a sample's
        last mode. Null directions are left out; on the sphere the flow is seen from the sphere.
        `residual` |C v - lambda v| of the unit vector v.
        `null`, `absent` (sample,), as in `spectrum`.
        Where k is None also (sample,), of C = -S:
        `numerical_abscissa` the largest eigenvalue of (C + C^T) / 2: no perturbation grows faster
        in the norm of M, not even for a moment; above max(real): transient growth.
        `relative_curl` |C - C^T| / (2 |C|) in Frobenius norms: zero where the force is a
        gradient, one where it only turns.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: ET-F12; Trefethen and Embree 2005, chapter 17 (numerical abscissa).
    """
    x = system.prepare(x)
    check_finite("x", x)
    here = Linearisation(system, x)
    room = here.tokens() * x.shape[2] - here.null()
    check_modes(k, int(room.min()) - 2)  # as ARPACK needs it
    modes = int(room.max()) if k is None else k
    found = np.full((3, len(x), modes), np.nan)
    more = np.full((2, len(x)), np.nan)
    for i, count in enumerate(room.tolist()):
        if k is None:
            found[:, i, :count], more[:, i] = _dense(system, x, i, count)
        else:
            found[:, i] = _rightmost(system, x, i, k)
    modes_of, rate = ("sample", "mode"), ", per unit of flow time"
    data = {
        "real": labelled(modes_of, found[0], "real part of the eigenvalue" + rate),
        "imaginary": labelled(modes_of, found[1], "imaginary part of the eigenvalue" + rate),
        "residual": labelled(modes_of, found[2], "|C v - eigenvalue v|" + rate),
        **left_out(here),
    }
    if k is None:
        data["numerical_abscissa"] = labelled("sample", more[0], "numerical abscissa" + rate)
        data["relative_curl"] = labelled("sample", more[1], "relative curl")
    coords = {"sample": np.arange(len(x)), "mode": np.arange(modes)}
    config = {"k": k, "system": describe_system(system)}
    return xr.Dataset(data, coords, store.provenance("etdyn.jacobian/1", config, x))


def _dense(
    system: System, x: Tensor, sample: int, count: int
) -> tuple[np.ndarray[Any, Any], tuple[float, float]]:
    """Real parts, imaginary parts, residuals; numerical abscissa and relative curl."""
    c = -dense_matrix(system, x, sample=sample)
    null = torch.eye(len(c)).to(c) - dense_matrix(system, x, without_null, sample)
    size = c.norm()
    moved = c - (2 * size + 1) * null  # null directions to where no eigenvalue is
    values, vectors = torch.linalg.eig(moved)
    order = _sorted(values)[:count]
    values, vectors = values[order], vectors[:, order]
    off = (c.to(vectors) @ vectors - vectors * values).abs().square().sum(0).sqrt()
    even, odd = (moved + moved.T) / 2, (c - c.T) / 2
    curl = odd.norm() / size.clamp(min=torch.finfo(size.dtype).tiny)
    found = np.stack([v.cpu().numpy() for v in (values.real, values.imag, off)])
    return found, (float(torch.linalg.eigvalsh(even)[-1]), float(curl))


def _sorted(values: Tensor) -> Tensor:
    """Largest real part first, of a pair the one that turns forward."""
    by_imaginary = values.imag.argsort(descending=True, stable=True)
    return by_imaginary[values.real[by_imaginary].argsort(descending=True, stable=True)]


def _rightmost(system: System, x: Tensor, sample: int, k: int) -> np.ndarray[Any, Any]:
    """Real parts, imaginary parts and residuals; NaN beyond those that converged."""
    s = linear_operator(system, x, stability_product, sample)
    tangent = linear_operator(system, x, without_null, sample)
    seed = torch.randn(s.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = tangent.matvec(seed.to(x.dtype).numpy())
    values, _ = _eigs(s, 1, "LM", start, 1e-3)
    if not len(values):
        return np.full((3, k), np.nan)
    beyond = 2 * np.abs(values).max() + 1  # null directions to where no eigenvalue is

    def product(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        v = v.reshape(-1)
        image: np.ndarray[Any, Any] = -s.matvec(v) - beyond * (v - tangent.matvec(v))
        return image

    values, vectors = _eigs(LinearOperator(s.shape, product, dtype=s.dtype), k, "LR", start, 0.0)
    order = _sorted(torch.from_numpy(values)).numpy()
    found = np.full((3, k), np.nan)
    for j, i in enumerate(order[:k]):
        v = vectors[:, i]
        image = -(s.matvec(v.real.copy()) + 1j * s.matvec(v.imag.copy()))
        found[:, j] = values[i].real, values[i].imag, np.linalg.norm(image - values[i] * v)
    return found


def _eigs(
    operator: LinearOperator, k: int, which: str, start: np.ndarray[Any, Any], tol: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Those that converged."""
    try:
        values, vectors = eigs(operator, k, which=which, v0=start, tol=tol)
    except ArpackNoConvergence as failure:
        values, vectors = failure.eigenvalues, failure.eigenvectors
    return values, vectors


@torch.no_grad()
def real_spectrum(system: System, x: Tensor) -> xr.Dataset:
    """Whether the Jacobian has the real spectrum that an energy promises, at every x (ET-F12).

    An energy gives J = -H M with H symmetric and M symmetric and positive semidefinite. Then
    M J = J^T M, all eigenvalues are real, and the null directions of M have rate zero. A gamma
    per feature, a missing key-role gradient or an asymmetric coupling breaks this. Taken from the
    derivative of the velocity, by forward differentiation; the closed form is compared with it.

    Args:
        system: one that claims an energy, or any; the leaky -x is left aside, and on the sphere
            the flow is seen from the sphere.
        x: `(batch, token, feature)`, any state.

    Returns:
        Dataset (schema "etdyn.real_spectrum/1"), dim sample:
        `imaginary` largest imaginary part of an eigenvalue, over the Frobenius norm of J;
        `asymmetry` largest |u.M J v - v.M J u| / (|u| |M J v| + |v| |M J u|) of random u, v;
        `closed_form` largest distance of `flow_jacobian` from the derivative of the velocity,
        relative; `zeros`, `near_zeros` eigenvalues below 1e-10, and from there to 1e-4, of the
        norm: the means of N tokens are N zeros, their lengths N near zeros of order
        eps / sigma^2; directions of absent tokens are not counted; `real` the verdict.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
    """
    x = system.prepare(x)
    check_finite("x", x)
    still = system.with_dynamics("et") if system.dynamics == "leaky" else system
    rows = [_conformance(still, x, i) for i in range(len(x))]
    eps = torch.finfo(x.dtype).eps
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    # a nilpotent block at zero turns rounding into its square root
    table["real"] = (
        (table["imaginary"] <= 16 * eps**0.5)
        & (table["asymmetry"] <= 1e4 * eps)
        & (table["closed_form"] <= 1e4 * eps)
    )
    names = {
        "imaginary": "largest imaginary part of an eigenvalue, relative",
        "asymmetry": "failure of M J = J^T M, relative",
        "closed_form": "flow_jacobian against the derivative of the velocity, relative",
        "zeros": "zero eigenvalues", "near_zeros": "near-zero eigenvalues",
        "real": "the spectrum is real",
    }  # fmt: skip
    data = {n: labelled("sample", v, names[n]) for n, v in table.items()}
    config = {"system": describe_system(system)}
    coords = {"sample": np.arange(len(x))}
    return xr.Dataset(data, coords, store.provenance("etdyn.real_spectrum/1", config, x))


def _velocity_derivative(system: System, x: Tensor, u: Tensor) -> Tensor:
    """By forward differentiation, whatever the closed forms say."""
    derivative: Tensor = torch.func.jvp(lambda z: system.velocity(0.0, z), (x,), (u,))[1]
    return derivative


def _seen_from_sphere(system: System, x: Tensor, u: Tensor) -> Tensor:
    """The derivative of the velocity, in and projected on the tangent space."""
    image = _velocity_derivative(system, x, without_null(system, x, u))
    return without_null(system, x, image)


def _conformance(system: System, x: Tensor, sample: int) -> dict[str, float]:
    product = _seen_from_sphere if system.dynamics == "sphere" else _velocity_derivative
    matrix = dense_matrix(system, x, product, sample)
    size = float(matrix.norm().clamp(min=torch.finfo(x.dtype).tiny))
    values = torch.linalg.eigvals(matrix)
    rows = torch.full((PAIRS,), sample, device=x.device)
    local, here = system.select(rows), x[rows]
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, *here.shape, generator=generator, dtype=torch.float64).to(x)
    ju, jv = product(local, here, u), product(local, here, v)
    raw, closed = _velocity_derivative(local, here, u), flow_jacobian(local, here, u)
    absent = (x.shape[1] - int(Linearisation(local, here).tokens()[0])) * x.shape[2]
    zeros = int((values.abs() <= ZERO * size).sum())
    return {
        "imaginary": float(values.imag.abs().max()) / size,
        "asymmetry": _asymmetry(u, _metric(local, here, jv), v, _metric(local, here, ju)),
        "closed_form": float(
            (raw - closed).norm() / raw.norm().clamp(min=torch.finfo(x.dtype).tiny)
        ),
        "zeros": zeros - absent,
        "near_zeros": int((values.abs() <= SMALL * size).sum()) - zeros,
    }


def _metric(system: System, x: Tensor, u: Tensor) -> Tensor:
    """M u, up to a factor on the sphere."""
    if system.dynamics == "sphere":
        return without_null(system, x, u)
    return system.keep(system.lagrangian.metric(system._stand_in(x), u))


def _asymmetry(u: Tensor, image_v: Tensor, v: Tensor, image_u: Tensor) -> float:
    """Largest |u.A v - v.A u| / (|u| |A v| + |v| |A u|)."""

    def size(a: Tensor) -> Tensor:
        return a.square().sum((1, 2)).sqrt()

    gap = ((u * image_v).sum((1, 2)) - (v * image_u).sum((1, 2))).abs()
    scale = size(u) * size(image_v) + size(v) * size(image_u)
    return float((gap / scale.clamp(min=torch.finfo(u.dtype).tiny)).max())
