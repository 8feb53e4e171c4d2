"""Recovered patterns and load curves, against exact cases."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import etdyn as ed
from etdyn import problems, store
from etdyn.analysis.equilibria import survey
from etdyn.analysis.memories import bit_error, capacity, recovered, retrieval
from etdyn.energies import Hopfield
from etdyn.lagrangians import IsingSpin, LayerNorm
from etdyn.systems import System


def orthogonal(count, dim):
    """Orthonormal vectors of zero sum (Helmert's)."""
    rows = torch.zeros(count, dim, dtype=torch.float64)
    for k in range(1, count + 1):
        rows[k - 1, :k], rows[k - 1, k] = 1.0, -float(k)
        rows[k - 1] /= math.sqrt(k * (k + 1))
    return rows


@torch.no_grad()
def modern(patterns, beta):
    """A softmax memory alone, on the sphere of radius sqrt(dim)."""
    network = Hopfield(patterns.shape[1], len(patterns), "softmax", beta=beta).double()
    network.memories.copy_(patterns)
    lagrangian = LayerNorm(patterns.shape[1], eps=0.0).double()
    lagrangian.set_gamma(1.0)  # to double precision
    return System(lagrangian, network, "sphere")


def test_f14_the_only_memory_is_recovered():
    problem = problems.single_memory()
    found = survey(problem.system, problem.start)
    patterns = problem.system.hopfield.memories.detach()
    hit = recovered(problem.system, torch.from_numpy(found["state"].values), patterns)
    assert hit["pattern_found"].values.tolist() == [[0]] and found["index"].values.tolist() == [0]
    assert 1 - float(hit["best"].max()) < 1e-15
    assert (hit["second"] == -np.inf).all()


@pytest.mark.parametrize("beta", [2.0, 4.0])
def test_modern_hopfield_with_orthogonal_memories_is_solved_exactly(close, beta):
    """g ~ xi_1 + r sum of others with r = exp(-beta R (1 - r) / sqrt(1 + (M - 1) r^2))."""
    patterns, count = orthogonal(4, 6), 4
    system = modern(patterns, beta)
    radius = 6**0.5

    def gap(r):
        return r - math.exp(-beta * radius * (1 - r) / math.sqrt(1 + (count - 1) * r * r))

    ratio = brentq(gap, 0.0, 0.5, xtol=1e-16)
    found = survey(system, patterns[:, None], tol=1e-14)
    states = torch.from_numpy(found["state"].values)
    hit = recovered(system, states, patterns)
    assert sorted(hit["pattern_found"].values[:, 0].tolist()) == [0, 1, 2, 3]
    assert (found["index"] == 0).all()
    close(hit["best"].values, np.full((4, 1), (1 + 3 * ratio**2) ** -0.5), 1e-12)
    close(hit["second"].values, np.full((4, 1), ratio * (1 + 3 * ratio**2) ** -0.5), 1e-14, 1)


def test_mixtures_of_memories_are_not_recovered():
    """At low beta the symmetric mixture is the only equilibrium; no pattern is found in it."""
    patterns = orthogonal(4, 6)
    system = modern(patterns, 0.2)
    found = survey(system, patterns[:, None])
    hit = recovered(system, torch.from_numpy(found["state"].values), patterns, threshold=0.4)
    assert hit["pattern_found"].values.tolist() == [[-1]], "four overlaps of 1/2 are none"
    assert abs(hit["overlap"].values - 0.5).max() < 1e-9


def test_overlap_ignores_delta_mean_and_length(make_case, close):
    case = make_case(tokens=3)
    system, memories = case.system, case.system.hopfield.memories
    x = torch.stack([5 * memories[:3] + 2, -memories[:3]])
    hit = recovered(system, x, memories, threshold=0.999)
    assert hit["pattern_found"].values[0].tolist() == [0, 1, 2]
    close(hit["best"].values[0], np.ones(3), 1e-4)  # eps of the layer norm turns nothing
    picked = hit["overlap"].values[1][range(3), range(3)]
    close(picked, -np.ones(3), 1e-12)


def test_absent_tokens_recover_nothing(make_case):
    case = make_case(tokens=3, batch=1)
    memories = case.system.hopfield.memories
    system = case.system.masked(torch.tensor([[True, False, True]]))
    hit = recovered(system, memories[None, :3].clone(), memories)
    assert hit["pattern_found"].values.tolist() == [[0, -1, 2]]
    assert np.isnan(hit["overlap"].values[0, 1]).all()


def test_dense_memory_recovers_patterns_through_the_flow():
    """Far below capacity every pattern is a minimum of the system that stores it."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(2, (5, 40), generator=generator).double() * 2 - 1
    network = Hopfield(40, 5, "power", 3).double()
    with torch.no_grad():
        network.memories.copy_(patterns / 40)
    system = System(IsingSpin(40, beta=400.0).double(), network, "leaky")
    found = survey(system, patterns[:, None])
    hit = recovered(system, torch.from_numpy(found["state"].values), patterns)
    assert sorted(hit["pattern_found"].values[:, 0].tolist()) == list(range(5))
    assert (found["index"] == 0).all()


# --- load --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim, memories, power", [(3, 2, 2), (3, 3, 3), (4, 2, 3), (2, 4, 4)])
def test_bit_error_counts_every_set_of_patterns(close, dim, memories, power):
    """All 2^(dim (M - 1)) sets beside a fixed first pattern, by the energy itself."""
    network = Hopfield(dim, memories, "power", power).double().requires_grad_(False)
    total, sets = 0.0, 0
    for bits in itertools.product((-1.0, 1.0), repeat=dim * (memories - 1)):
        others = torch.tensor(bits, dtype=torch.float64).reshape(-1, dim)
        network.memories.copy_(torch.cat([torch.ones(1, dim, dtype=torch.float64), others]))
        states = torch.ones(2, 1, dim, dtype=torch.float64)
        states[1, 0, 0] = -1
        stay, flip = network.energy(states).tolist()
        total += (flip < stay - 1e-12) + 0.5 * (abs(flip - stay) <= 1e-12)
        sets += 1
    assert abs(bit_error(dim, memories, power) - total / sets) < 1e-14


@pytest.mark.parametrize("power, dim, loads", [(2, 32, (8, 24)), (3, 12, (20, 60))])
def test_measured_load_curve_is_the_exact_one(power, dim, loads):
    found = retrieval(dim, loads, power=power, trials=200)
    z = (found["error"] - found["predicted"]) / found["error_std"]
    assert (abs(z) < 3.5).all(), z.values
    assert (found["predicted"] > 0.001).all() and (found["error_std"] < 0.01).all()
    assert (found["error"].diff("load") > 0).all()


@pytest.mark.parametrize("power, dims, within", [(2, (16, 128), 0.005), (3, (8, 20), 0.07)])
def test_capacity_is_the_limit_of_the_exact_bit_error(power, dims, within):
    """The capacity at the exact error of M patterns tends to M; 5 % errors are far from tails."""
    off = []
    for dim in dims:
        memories = round(capacity(dim, power, 0.05))
        off.append(abs(capacity(dim, power, bit_error(dim, memories, power)) / memories - 1))
    assert off[1] < 0.6 * off[0] and off[1] < within, off


def test_krotov_hopfield_constant():
    """Without rectification M = 0.15 dim at an error of 0.005; relu doubles it."""
    assert abs(capacity(1000, 2, 0.005) / 2 / 1000 - 1 / 2.5758293035**2) < 1e-10
    assert capacity(100, 3, 0.01) / capacity(100, 2, 0.01) == pytest.approx(100 / 3)


def test_steeper_energies_store_more():
    quadratic, cubic = (retrieval(16, [60], power=n, trials=20) for n in (2, 3))
    exponential = retrieval(16, [60], "softmax", trials=20)
    errors = [float(d["error"][0]) for d in (quadratic, cubic, exponential)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert np.isnan(exponential["predicted"].values).all()


def test_few_patterns_are_retrieved_from_damaged_starts(tmp_path):
    found = retrieval(64, [3], power=3, flipped=0.2, sweeps=3, trials=20)
    assert found["error"].values.tolist() == [0] and found["perfect"].values.tolist() == [1]
    again = retrieval(64, [3], power=3, flipped=0.2, sweeps=3, trials=20)
    assert found.drop_attrs().identical(again.drop_attrs())
    store.save(found, tmp_path / "r.zarr")
    assert ed.load(tmp_path / "r.zarr").identical(found)


def test_wrong_input_is_refused(make_case):
    case = make_case()
    with pytest.raises(ValueError, match="patterns"):
        recovered(case.system, case.x, torch.zeros(3, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match="threshold"):
        recovered(case.system, case.x, case.system.hopfield.memories, threshold=1.0)
    with pytest.raises(ValueError, match="flipped"):
        retrieval(8, [2], flipped=1.0)
    with pytest.raises(ValueError, match="memories"):
        bit_error(1000, 1000, 4)
    with pytest.raises(ValueError, match="error"):
        capacity(8, 2, 0.5)
