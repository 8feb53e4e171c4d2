"""Equilibria are found, told apart and judged as exact cases demand."""

import numpy as np
import pytest
import torch

import etdyn as ed
from etdyn import problems, store
from etdyn.analysis.equilibria import MARGIN, basin_changes, survey
from etdyn.couplings import LinearCoupling
from etdyn.lagrangians import LayerNorm, Quadratic
from etdyn.systems import System


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def many(make_case):
    """A random system with a handful of equilibria, and starts."""
    case = make_case(batch=24, tokens=4, hopfield="softmax", weights=2.0, hopfield_beta=1.0)
    return case.system, case.x


# --- exact cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("beta, m", [(1.2, 0.6585696604), (1.5, 0.8585596366), (2.0, 0.9575040241)])
def test_curie_weiss_has_two_minima_and_a_saddle(close, beta, m):
    known = problems.curie_weiss(6, beta)
    starts = draw(13, 1, 1).repeat(1, 6, 1)
    starts[-1] = 0.0
    found = survey(known.system, starts, tol=1e-13)
    assert found["index"].values.tolist() == [0, 0, 1]
    assert int(found["label"][-1]) == 2, "the saddle, from a start on it"
    size = found["state"].isel(token=0, feature=0)
    assert abs(np.sort(np.abs(size.values)) - [0, m, m]).max() < 1e-9
    close(found["energy"].values, known.energies, 1e-12)
    close(found["lowest"].values, known.exponents[:, 0], 1e-8)
    ends = np.sign(size.values[found["label"].values])
    assert (ends == starts[:, 0, 0].sign().numpy()).all(), "spins of one sign keep it"


def test_curie_weiss_is_disordered_above_its_critical_temperature():
    found = survey(problems.curie_weiss(6, 0.8).system, draw(8, 6, 1))
    assert found["index"].values.tolist() == [0]
    assert abs(found["lowest"].values - 0.2).max() < 1e-8
    assert found["basin_fraction"].values.tolist() == [1]


@pytest.mark.parametrize("law", ["sphere", "leaky", "et"])
def test_f7_two_tokens_have_singular_pairs_with_their_index(close, law):
    """k-th strongest pair: index k - 1; from random starts the strongest alone is reached."""
    strengths = torch.tensor([0.5, 3.0, 1.2, 2.0], dtype=torch.float64)
    known = problems.two_tokens(strengths, law)
    random = draw(20, 2, 5)
    starts = torch.cat([known.states, -known.states, random])
    found = survey(known.system, starts)
    assert found["index"].values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    close(found["energy"].values, known.energies.repeat_interleave(2), 1e-13)
    for name, column in (("lowest", 0), ("highest", -1)):
        close(found[name].values, known.exponents[:, column].repeat_interleave(2), 1e-9)
    assert set(found["label"].values[-20:].tolist()) == {0, 1}
    assert bool(found["isolated"].all())
    assert found["count"].values[2:].tolist() == [1] * 6


def test_f7_swapping_tokens_folds_a_repulsive_pair():
    """With B -> -B the pair is (u, -u): its mirror image is the swapped state."""
    known = problems.two_tokens(torch.tensor([0.5, 3.0, 1.2], dtype=torch.float64))
    with torch.no_grad():
        known.system.attention.key.neg_()
    starts = draw(20, 2, 4)
    assert survey(known.system, starts).sizes["equilibrium"] == 2
    folded = survey(known.system, starts, symmetry="permutation")
    assert folded["count"].values.tolist() == [20]


def test_f8_consensus_is_a_continuum_and_says_so(close):
    """Attention with Q^T K = 1: N equal tokens anywhere; D - 2 zero modes, all others 2 a token."""
    attention = ed.Attention(5, 1, 5, 1.0, self_attention=True).double().requires_grad_(False)
    attention.query[0] = attention.key[0] = torch.eye(5, dtype=torch.float64)
    lagrangian = LayerNorm(5, eps=0.0).double()
    lagrangian.set_gamma(5**-0.5)
    found = survey(System(lagrangian, attention, "sphere"), draw(6, 4, 5), tol=1e-9)
    assert found["flat"].values.tolist() == [3] * found.sizes["equilibrium"]
    assert not bool(found["isolated"].any())
    assert (found["index"] == 0).all() and (found["label"] >= 0).all()
    close(found["highest"].values, np.full(found.sizes["equilibrium"], 2.0), 1e-8)


# --- telling apart -----------------------------------------------------------------------------


def test_f4_permuted_starts_reach_permuted_equilibria(many):
    system, x = many
    order = torch.tensor([2, 0, 3, 1])
    both = torch.cat([x, x[:, order]])
    plain, folded = survey(system, both), survey(system, both, symmetry="permutation")
    label = folded["label"].values
    assert (label >= 0).all() and (label[:24] == label[24:]).all()
    assert plain.sizes["equilibrium"] > folded.sizes["equilibrium"] > 1
    # what is the same without permutations is the same with them
    pairs = set(zip(plain["label"].values.tolist(), label.tolist(), strict=True))
    assert len(pairs) == plain.sizes["equilibrium"]


def test_distinct_equilibria_are_far_apart_and_equal_ones_close(many):
    system, x = many
    found = survey(system, x)
    assert found.sizes["equilibrium"] > 1 and bool(found["isolated"].all())
    g = system.activation(torch.from_numpy(found["state"].values)).flatten(1)
    gaps = torch.cdist(g, g) + 1e9 * torch.eye(len(g))
    assert float(gaps.min()) > 1e3 * float(found["distance"].max())
    assert float(found["distance"].max()) <= 2 * MARGIN * 1e-10 / float(found["slowest"].min())


@pytest.mark.parametrize("law", ["leaky", "sphere"])
def test_error_in_g_is_speed_over_slowest_rate(many, law):
    """At loose tolerances the estimate bounds the true error, which it exceeds by little."""
    system, x = many[0].with_dynamics(law), many[1]
    exact, ratios = survey(system, x, tol=1e-12), []
    true = system.activation(torch.from_numpy(exact["state"].values))
    for method in ("map", "anderson"):
        loose = survey(system, x, method, tol=1e-5)
        assert loose.sizes["equilibrium"] == exact.sizes["equilibrium"]
        assert (loose["label"].values == exact["label"].values).all()
        gap = system.activation(torch.from_numpy(loose["state"].values)) - true
        ratios += (gap.flatten(1).norm(dim=1) / torch.from_numpy(loose["error"].values)).tolist()
    assert max(ratios) < 2, "no more than the ratio of metrics and second order"
    assert max(ratios) > 0.1, "not a bound that is always slack"


def test_unconverged_starts_have_no_label(many):
    system, x = many
    full = survey(system, x)
    cut = survey(system, x, max_evaluations=int(full["evaluations"].median()))
    label = cut["label"].values
    assert 0 < (label < 0).sum() < len(x)
    assert int(cut["count"].sum()) == (label >= 0).sum()
    assert float(cut["basin_fraction"].sum()) == pytest.approx((label >= 0).mean(), abs=1e-14)
    none = survey(system, x[:3], max_evaluations=1)
    assert none["label"].values.tolist() == [-1, -1, -1] and none.sizes["equilibrium"] == 0


def test_a_slow_passage_of_a_saddle_is_no_equilibrium(close):
    """1e-6 off the saddle the residual is 1e-6 of the force, and the descent goes on."""
    known = problems.two_tokens(torch.tensor([0.5, 3.0, 1.2], dtype=torch.float64))
    start = known.states[1:2] + 1e-6 * draw(1, 2, 4)
    assert bool((known.system.residual(start) < 1e-4).all())
    for method in ("flow", "map", "anderson"):
        found = survey(known.system, start, method)
        assert found["index"].values.tolist() == [0]
        close(found["energy"].values, known.energies[:1], 1e-12)


def test_masked_tokens_do_not_count(make_case):
    case = make_case(batch=8, tokens=3, hopfield="softmax", weights=2.0)
    padded = torch.cat([case.x, case.randn(8, 2, 8)], 1)
    mask = torch.tensor([[True] * 3 + [False] * 2])
    alone = survey(case.system, case.x, symmetry="permutation")
    found = survey(case.system.masked(mask), padded, symmetry="permutation")
    assert (found["label"].values == alone["label"].values).all()
    assert abs(found["energy"].values - alone["energy"].values).max() < 1e-11
    assert (found["index"].values == alone["index"].values).all()


# --- basins ------------------------------------------------------------------------------------


def test_basin_fractions_have_wilson_intervals(many):
    found = survey(*many)
    n, z = 24, 1.959963984540054
    p = found["basin_fraction"].values
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    want = np.stack([centre - half, centre + half], 1).clip(0, 1)
    assert abs(found["basin_interval"].values - want).max() < 1e-12
    assert float(found["unseen"]) == (found["count"] == 1).sum() / n


def test_a_survey_repeats_exactly_and_is_kept(many, tmp_path):
    first, second = (survey(*many, symmetry="permutation") for _ in range(2))
    assert first.drop_attrs().identical(second.drop_attrs())
    assert (np.diff(first["energy"].values) > -1e-9).all()
    store.save(first, tmp_path / "survey.zarr")
    assert store.load(tmp_path / "survey.zarr").identical(first)


def test_f27_published_and_leaky_flow_share_equilibria_and_basins(many):
    system, x = many
    et, leaky = (survey(system.with_dynamics(law), x) for law in ("et", "leaky"))
    assert et.drop_attrs().identical(leaky.drop_attrs())


def test_one_dimensional_basins_do_not_depend_on_the_method():
    """From common starts the map m -> tanh(beta m) is monotone, as the flow is."""
    system = problems.curie_weiss(4, 1.5).system
    starts = draw(16, 1, 1).expand(-1, 4, 1).clone()
    found = basin_changes(system, starts)
    assert (found["changed"] == 0).all() and (found["label"] >= 0).all()
    assert found["label"].values.tolist()[0] == (starts[:, 0, 0] < 0).long().tolist() or (
        found["label"].values.tolist()[0] == (starts[:, 0, 0] > 0).long().tolist()
    )


def test_basins_of_the_map_are_not_those_of_the_flow(tmp_path):
    """What "flow" reaches is what a tight integration reaches; the map jumps over ridges."""
    torch.manual_seed(1)
    system = ed.EnergyTransformer(8, 2, 4, 12, "leaky", hopfield="softmax").double()
    for weight in system.requires_grad_(False).parameters():
        if weight.ndim > 1:
            weight.mul_(2)
    x = torch.randn(12, 4, 8, dtype=torch.float64)[:4]
    found = basin_changes(system, x, ("flow", "map"))
    tight = ed.solve(system, x, [0.0, 100.0], rtol=1e-8, atol=1e-8, gradient=None)
    end = survey(system, tight.x[-1])
    energy = np.append(found["energy"].values, np.nan)
    reached = energy[found["label"].sel(solver="flow").values]
    assert abs(reached - end["energy"].values[end["label"].values]).max() < 1e-8
    share = found["changed"].sel(solver="flow", other="map")
    assert 0.05 < float(share) < 1
    low, high = found["changed_interval"].sel(solver="flow", other="map").values
    assert low < float(share) < high
    assert float(found["changed"].sel(solver="map", other="map")) == 0
    store.save(found, tmp_path / "changes.zarr")
    assert store.load(tmp_path / "changes.zarr").identical(found)


# --- wrong input -------------------------------------------------------------------------------


def test_wrong_input_is_refused(make_case):
    case = make_case()
    with pytest.raises(ValueError, match="symmetry"):
        survey(case.system, case.x, symmetry="rotation")
    keys = torch.ones(1, 5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="symmetry"):
        survey(case.system.masked(keys=keys), case.x, symmetry="permutation")
    tokens = torch.tensor([[True] * 5, [True] * 4 + [False]])
    with pytest.raises(ValueError, match="starts"):
        survey(case.system.masked(tokens), case.x)
    with pytest.raises(ValueError, match="methods"):
        basin_changes(case.system, case.x, ("map",))
    no_energy = System(Quadratic(2).double(), LinearCoupling(draw(3, 3)), "leaky")
    with pytest.raises(TypeError, match="energy"):
        survey(no_energy, draw(2, 3, 2))


# --- a trained model ---------------------------------------------------------------------------


@pytest.mark.slow
def test_trained_model_has_repeatable_equilibria_with_spectra():
    """200 starts: all converge to isolated states; two runs agree bit by bit, spectra to 1e-8."""
    from tests.benchmarks.survey_digits import measure  # noqa: PLC0415

    (found, took), (again, _) = measure(), measure()
    assert found.drop_attrs().identical(again.drop_attrs())
    assert took["gap"] < 1e-8
    assert (found["label"] >= 0).all() and bool(found["isolated"].all())
    assert took["survey"] + took["spectra"] < 180
