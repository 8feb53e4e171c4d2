"""Which stored patterns come back: overlaps, retrieval against load, and the known capacities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from scipy.signal import fftconvolve
from scipy.special import factorial2
from scipy.stats import binom, norm
from torch import Tensor

from etdyn import store
from etdyn.analysis.directions import directions
from etdyn.analysis.labels import labelled
from etdyn.checks import bad, check_count, check_tensor
from etdyn.energies import Hopfield
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["bit_error", "capacity", "recovered", "retrieval"]


@torch.no_grad()
def recovered(system: System, x: Tensor, patterns: Tensor, threshold: float = 0.95) -> xr.Dataset:
    """Which stored pattern every token is, if any.

        overlap = cos(u(x), u(pattern)),    u = (g(x) - g(-x)) / 2

    A pattern passes through the same activation as a token. Under LayerNorm u is g - delta, so
    neither mean nor length nor delta count; for spins u is g. A pattern is recovered where its
    overlap, and that of no other, is above the threshold.

    Args:
        system: whose activation is meant.
        x: `(sample, token, feature)`, such as the `state` of a survey.
        patterns: `(pattern, feature)`, such as `system.hopfield.memories`.
        threshold: between -1 and 1.

    Returns:
        Dataset (schema "etdyn.recovered/1"): `overlap` (sample, token, pattern); by (sample,
        token) the `pattern_found`, -1 where none or more than one is above the threshold, the
        `best` overlap and the `second`. NaN where a token is absent.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
    """
    system.check(x)
    check_tensor("patterns", patterns, (None, system.dim), x)
    if not -1 < threshold < 1:
        raise bad("threshold", "a number between -1 and 1", threshold)
    overlap = directions(system.lagrangian, x) @ directions(system.lagrangian, patterns).mT
    absent = system.keep(torch.ones_like(x[..., 0])) == 0
    overlap = overlap.masked_fill(absent.unsqueeze(-1), torch.nan)
    top, which = overlap.topk(min(2, len(patterns)), dim=-1)
    best, second = top[..., 0], top[..., -1] if len(patterns) > 1 else top[..., 0] - torch.inf
    found = torch.where((best > threshold) & ~(second > threshold), which[..., 0], -1)
    token = ("sample", "token")
    return xr.Dataset(
        {
            "overlap": labelled((*token, "pattern"), overlap.numpy(), "cosine in g"),
            "pattern_found": labelled(token, found.numpy(), "recovered pattern, -1 if none"),
            "best": labelled(token, best.numpy(), "largest overlap"),
            "second": labelled(token, second.numpy(), "second largest overlap"),
        },
        attrs=store.provenance(
            "etdyn.recovered/1",
            {"threshold": threshold, "patterns": len(patterns), "system": describe_system(system)},
            x,
        ),
    )


@torch.no_grad()
def retrieval(
    dim: int,
    loads: Sequence[int],
    kind: str = "power",
    *,
    power: int = 2,
    beta: float = 1.0,
    sweeps: int = 1,
    flipped: float = 0.0,
    trials: int = 20,
    seed: int = 0,
) -> xr.Dataset:
    """Wrong bits against load: spins +-1 under the energy of a Hopfield network, at random load.

    Every trial draws new patterns, starts at the first of them with some bits flipped, and lets
    every spin take the value with the lower energy while the others stay, all at once. What a
    spin does to itself cancels in that difference; under x -> force(x) it would hold any state
    in place, and one step from a pattern would prove nothing.

    Args:
        dim: spins of a pattern, at least 2.
        loads: numbers of patterns.
        kind, power, beta: of `etdyn.energies.Hopfield`: "power" is the dense associative memory
            -1/n sum relu(h)^n ("relu" is n = 2), "softmax" the modern Hopfield network, which
            agrees with the energy -sum exp(beta h) on all signs.
        sweeps: updates of all spins.
        flipped: share of wrong bits at the start, in [0, 1).
        trials: of every load.
        seed: of patterns and flips.

    Returns:
        Dataset (schema "etdyn.retrieval/1") by `load`: `error`, the share of wrong bits (an
        undecided spin is half wrong), its standard error `error_std` over trials, `perfect`, the
        share of trials without a wrong bit, and `predicted`: `bit_error`, NaN unless the kind is
        "relu" or "power", the start is exact and there is one sweep.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: Krotov and Hopfield 2016, arXiv 1606.01164, equation 3; Demircigil et al. 2017.
    """
    check_count("dim", dim, least=2)
    for name, value in (("sweeps", sweeps), ("trials", trials), *(("loads", m) for m in loads)):
        check_count(name, value)
    if not 0 <= flipped < 1:
        raise bad("flipped", "a share in [0, 1)", flipped)
    draw, wrong = torch.Generator().manual_seed(seed), []
    for load in loads:
        network = Hopfield(dim, load, kind, power, beta).double()
        wrong.append([_wrong_bits(network, sweeps, flipped, draw) for _ in range(trials)])
    errors = np.array(wrong)
    spread = errors.std(1, ddof=1) if trials > 1 else np.full(len(loads), np.nan)
    known = kind != "softmax" and sweeps == 1 and flipped == 0
    n = power if kind == "power" else 2
    predicted = [bit_error(dim, load, n) if known else math.nan for load in loads]
    config: dict[str, Any] = {"dim": dim, "kind": kind, "power": n, "beta": beta, "seed": seed}
    config |= {"sweeps": sweeps, "flipped": flipped, "trials": trials}
    return xr.Dataset(
        {
            "error": labelled("load", errors.mean(1), "share of wrong bits"),
            "error_std": labelled("load", spread / math.sqrt(trials), "its standard error"),
            "predicted": labelled("load", predicted, "exact expectation"),
            "perfect": labelled("load", (errors == 0).mean(1), "share of perfect retrievals"),
        },
        {"load": ("load", list(loads), {"units": "1", "long_name": "patterns stored"})},
        store.provenance("etdyn.retrieval/1", config, network.memories),
    )


def _wrong_bits(network: Hopfield, sweeps: int, flipped: float, draw: torch.Generator) -> float:
    memories, dim = network.memories, network.memories.shape[1]
    memories.copy_(torch.randint(2, memories.shape, generator=draw) * 2 - 1)
    flip = torch.rand(dim, generator=draw) < flipped
    spins = torch.where(flip, -memories[0], memories[0])
    own = torch.eye(dim, dtype=torch.bool)
    for _ in range(sweeps):
        up, down = (torch.where(own, v, spins).unsqueeze(1) for v in (1.0, -1.0))
        spins = (network.energy(down) - network.energy(up)).sign()
    return float((1 - memories[0] * spins).mean()) / 2


def bit_error(dim: int, memories: int, power: int) -> float:
    """Exact probability that a bit of a stored pattern raises the energy, and so flips.

    To flip it costs n E = dim^n - (dim - 2)^n + sum of f(r z) over the other patterns, with
    f(r z) = relu(r + z)^n - relu(r - z)^n, z = +-1 and r the sum of dim - 1 more signs. All is
    integer: the distribution of one term is folded with itself by Fourier transforms. An energy
    that stays counts half. Rounding leaves an absolute error near 1e-15.

    Args:
        dim: spins, at least 2.
        memories: patterns of independent bits +-1, at least 1.
        power: n >= 2 of the energy -1/n sum relu(h)^n.

    Raises:
        ValueError: dim^(n-1) memories is too large (above 10^7) for the lattice of energies.
        TypeError: an argument that is no integer.

    Source: Krotov and Hopfield 2016, section 3 (there in the Gaussian approximation).
    """
    check_count("dim", dim, least=2)
    check_count("memories", memories)
    check_count("power", power, least=2)
    if dim ** (power - 1) * memories > 10**7:
        raise bad("memories", "dim^(power - 1) memories of at most 1e7", memories)
    ups = np.arange(dim)
    rest, chance = 2 * ups - (dim - 1), binom.pmf(ups, dim - 1, 0.5)
    cost = np.maximum(rest + 1, 0) ** power - np.maximum(rest - 1, 0) ** power
    signal = dim**power - (dim - 2) ** power  # the largest cost, and that of the pattern itself
    term = np.zeros(2 * signal + 1)  # from -signal to signal
    for z in (-1, 1):
        np.add.at(term, signal + z * cost, chance / 2)
    total, noise, left = np.ones(1), term, memories - 1
    while left:  # by squaring
        if left % 2:
            total = fftconvolve(total, noise)
        left //= 2
        if left:
            noise = fftconvolve(noise, noise)
    even = (memories - 1) * signal - signal  # where signal and noise cancel
    if even < 0:
        return 0.0
    return float(max(total[:even].sum() + total[even] / 2, 0.0))


def capacity(dim: int, power: int, error: float = 0.005) -> float:
    """Patterns at which a stored bit is unstable with this probability, for large dim.

        M = alpha_n dim^(n-1),    alpha_n = 2 / ((2n - 3)!! z^2),    error = Q(z)

    Twice the value of Krotov and Hopfield for polynomials without rectification (n = 2 there:
    0.15 dim at error 0.005): relu silences half of the patterns. Small errors may still grow
    from sweep to sweep: this bounds what can be retrieved, it does not promise it.

    Args:
        dim: spins.
        power: n >= 2.
        error: between 0 and 1/2.

    Raises:
        ValueError, TypeError: an argument out of range.

    Source: Krotov and Hopfield 2016, equations 5 and 6, at half the noise.
    """
    check_count("dim", dim, least=2)
    check_count("power", power, least=2)
    if not 0 < error < 0.5:
        raise bad("error", "a probability between 0 and 1/2", error)
    z = float(norm.isf(error))
    return 2 * float(dim) ** (power - 1) / (float(factorial2(2 * power - 3)) * z**2)
