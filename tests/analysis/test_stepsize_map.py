"""The step-size map, attractor switches and the first step: ET-F19, F20, F24, F26."""

import math

import pytest
import torch

import etdyn as ed
from etdyn import store
from etdyn.analysis.stepsize import predicted_limits
from etdyn.analysis.stepsize_map import attractor_switches, first_step_overshoot, step_size_map
from etdyn.problems import anisotropic_well, linear_flow
from etdyn.solve import iterate

DYNAMICS = ["et", "leaky", "sphere"]


def sizes(*powers):
    return torch.logspace(*powers, dtype=torch.float64)


def repulsive():
    """ET-F24: repelling tokens in eight directions that sum to zero, pushed to a common one.

    On the common mode E curves by 2 and kappa = 1 + 7 = 8, at c = 3.5 sigma; so small a beta, that
    nothing else moves.
    """
    dim = 12
    attention = ed.Attention(dim, 1, dim, beta=1e-6).double().requires_grad_(False)
    attention.query.copy_(torch.eye(dim))
    attention.key.copy_(-torch.eye(dim))
    lagrangian = ed.LayerNorm(dim, eps=1e-12).double().requires_grad_(False)
    rng = torch.Generator().manual_seed(0)
    half = torch.randn(1, 4, dim, generator=rng, dtype=torch.float64)
    balanced = 0.1 * lagrangian.normalise(torch.cat([half, -half], 1))
    push = torch.randn(1, 1, dim, generator=rng, dtype=torch.float64)
    return ed.System(lagrangian, attention), balanced + 1e-4 * push


# --- one batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("law", DYNAMICS)
def test_one_batch_is_one_run_per_step_size_to_rounding(make_case, law):
    case = make_case(dynamics=law, batch=2, tokens=4)
    tokens = torch.ones(2, 4, dtype=torch.bool)
    tokens[1, 2:] = False
    system = case.system.masked(tokens=tokens)
    target = case.randn(2, 4, 8)

    def error(x, sample):
        return (system.activation(x) - target[sample]).square().mean((1, 2))

    def unmasked(x, sample):
        return system.select(sample).keep(x - target[sample]).square().mean((1, 2))

    chosen = unmasked if law != "sphere" else lambda x, sample: x[:, 0, 0] - target[sample, 0, 0]
    steps = sizes(-3, 0, 4)
    together = step_size_map(system, case.x, steps, 20, chosen)
    for k in range(4):
        alone = step_size_map(system, case.x, steps[k : k + 1], 20, chosen)
        for name in set(together.data_vars) - {"distance"}:  # which needs the other step sizes
            a, b = together[name].isel(step_size=k).values, alone[name].isel(step_size=0).values
            assert a.dtype == b.dtype
            assert abs(a.astype(float) - b).max() <= 1e-11 * max(1, abs(b.astype(float)).max()), (
                name
            )


@pytest.mark.parametrize("law", DYNAMICS)
def test_the_map_is_the_discrete_model_at_every_step_size(make_case, close, law):
    case = make_case(dynamics=law)
    steps = sizes(-2, 0, 3)
    found = step_size_map(case.system, case.x, steps, 12)
    assert found.sizes == {"sample": 2, "step_size": 3, "step": 13, "token": 5, "feature": 8}
    for k in range(3):
        run = ed.descend(case.system, case.x, float(steps[k]), 12)
        seen = run.to_xarray(relative=True)
        here = found.isel(step_size=k)
        close(here.x.values, run.x[-1], 1e-11)
        close(here.energy.values.T, seen.energy.values, 1e-11)
        close(here.residual.values.T, seen.residual.values, 1e-10)
        close(here.time.values, run.t, 1e-14)


def test_cutting_a_large_batch_changes_nothing(make_case, monkeypatch):
    case = make_case()
    whole = step_size_map(case.system, case.x, sizes(-2, 1, 9), 10)
    monkeypatch.setattr("etdyn.analysis.stepsize_map.CACHE", 5 * case.x[0].numel() * 8)
    cut = step_size_map(case.system, case.x, sizes(-2, 1, 9), 10)
    for name in whole.data_vars:
        a, b = whole[name].values.astype(float), cut[name].values.astype(float)
        assert abs(a - b).max() <= 1e-12 * max(1, abs(a).max()), name


def test_systems_without_an_energy_are_mapped_without_one():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    problem = linear_flow(turn, torch.ones(1, 2, 1, dtype=torch.float64))
    found = step_size_map(problem.system, problem.start, sizes(-2, -1, 2), 5)
    assert "energy" not in found and "rises" not in found
    factor = abs(1 + 0.1 * (1j - 1)) ** 5
    length = float((found.x.isel(step_size=1) ** 2).sum()) ** 0.5
    assert length == pytest.approx(math.sqrt(2) * factor, rel=1e-12)


# --- the energy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu", "power", "softmax"])
def test_f19_memories_alone_never_raise_the_energy_at_any_step(make_case, kind):
    case = make_case(hopfield=kind, batch=4, seed=3)
    system = ed.System(case.system.lagrangian, case.system.hopfield)
    found = step_size_map(system, case.x, sizes(-3, 6, 19), 50)
    assert int(found.rises.max()) == 0


@pytest.mark.parametrize("law", DYNAMICS)
def test_f20_no_first_step_within_the_descent_limit_raises_the_energy(make_case, law):
    case = make_case(dynamics=law, batch=4, weights=2.0, spread=0.3)
    case.system.attention.key.copy_(-case.system.attention.query)
    limit = float(predicted_limits(case.system, case.system.prepare(case.x)).descent.min())
    found = step_size_map(case.system, case.x, limit * torch.tensor([0.1, 0.5, 1.0]).double(), 2)
    assert int(found.rises.isel(step=1).max()) == 0
    if law != "et":  # which rarely rises at any step (ET-F24)
        beyond = step_size_map(case.system, case.x, limit * sizes(1, 3, 5), 2)
        assert int(beyond.rises.max()) > 0


def test_f24_repelling_tokens_rise_three_times_at_a_step_of_one_and_recover():
    """As often as ET-F23 says: while h / c_k > 2 / (kappa - 2), with c_k = 0.35 + k h and kappa 8.

    The step 0.1 is within the first limit, 2 c_0 / 6 = 0.117.
    """
    system, x0 = repulsive()
    found = step_size_map(system, x0, torch.tensor([0.1, 1.0], dtype=torch.float64), 100)
    small, large = found.rises.isel(sample=0).values
    assert small[-1] == 0
    assert large.tolist() == [0, 1, 2, *[3] * 98]
    energy = found.energy.isel(sample=0, step_size=1)
    assert float(energy[-1]) < float(energy[0]) < float(energy[3])


# --- the ends -----------------------------------------------------------------------------------


def test_a_step_beyond_the_limit_ends_in_a_two_cycle(make_case):
    """Period doubling: just beyond 2 / lambda_max the equilibrium becomes a swing of two states."""
    case = make_case(hopfield="softmax", dynamics="sphere", weights=1.5, batch=1, seed=4)
    rest = ed.find_equilibrium(case.system, case.x, tol=1e-10).x
    limit = predicted_limits(case.system, rest).linear.item()
    steps = limit * torch.tensor([0.5, 0.9, 1.05], dtype=torch.float64)
    start = rest + 1e-3 * case.randn(*rest.shape)
    found = step_size_map(case.system, start, steps, 400)
    assert found.period2.values.tolist() == [[False, False, True]]
    *_, a, b, c = iterate(case.system, case.system.prepare(start), float(steps[2]), 400)
    assert (c - a).norm() < 1e-6 * (c - b).norm()
    per_token = (c - b).norm(dim=-1) / math.sqrt(8)  # on the sphere, x in units of its radius
    assert found.swing.values[0, 2] == pytest.approx(float(per_token.mean()), rel=1e-9)
    assert 1e-3 < found.swing.values[0, 2] < 1


def test_a_decaying_oscillation_is_no_two_cycle():
    """x -> (1 - h lambda) x with multiplier -0.9, and -1 exactly."""
    problem = anisotropic_well(torch.ones(1, 2).double(), torch.ones(1, 1, 2).double())
    steps = torch.tensor([1.0, 1.9, 2.0], dtype=torch.float64)
    found = step_size_map(problem.system, problem.start, steps, 20)
    assert found.period2.values.tolist() == [[False, False, True]]
    assert found.swing.values[0, 2] == pytest.approx(2 * math.sqrt(2), rel=1e-12)


@pytest.mark.parametrize("law", ["et", "sphere"])
def test_attractor_switches_name_the_equilibria_that_the_flow_reaches(make_case, law):
    case = make_case(hopfield="relu", dynamics=law, weights=1.5, batch=3, tokens=3, seed=1)
    result = step_size_map(case.system, case.x, sizes(-2, 0.2, 3), 40)
    found = attractor_switches(case.system, result, case.x)
    assert found.attractor.values.min() >= 0
    assert (found.attractor.values == 0).any() and (found.attractor.values > 0).any()
    assert ((found.distance < 1e-3) == (found.attractor == 0)).all()
    ends = torch.from_numpy(result.x.isel(step_size=2).values)
    rest = ed.find_equilibrium(case.system, ends, "flow", tol=1e-6)
    still = case.system if law == "sphere" else case.system.with_dynamics("leaky")
    energy = still.interaction_energy(rest.x, relative=True).numpy()
    assert found.equilibrium_energy.values[:, 2] == pytest.approx(energy, rel=1e-6)
    again = attractor_switches(case.system, result)
    assert (again.attractor.isel(step_size=0) == 0).all()


def test_a_run_that_overflowed_has_no_attractor(make_case):
    case = make_case(dynamics="leaky", batch=1, tokens=3)
    result = step_size_map(case.system, case.x, torch.tensor([0.1, 1e5]).double(), 80)
    assert result.energy.isel(step=-1).isnull().values.tolist() == [[False, True]]
    assert attractor_switches(case.system, result).attractor.values.tolist() == [[0, -1]]


# --- the first step -----------------------------------------------------------------------------


def test_the_decrease_along_a_parabola_is_one_minus_half_the_step_times_the_curvature():
    start = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    problem = anisotropic_well(torch.tensor([[4.0, 1.0]]).double(), start)
    steps = torch.tensor([1e-3, 0.25, 0.5, 1.0], dtype=torch.float64)
    found = first_step_overshoot(problem.system, start, steps)
    assert found.decrease_ratio.values[0] == pytest.approx((1 - 2 * steps).numpy(), abs=1e-12)
    assert "displacement" not in found


@pytest.mark.parametrize("law", DYNAMICS)
def test_a_small_step_keeps_the_promise_of_the_slope(make_case, law):
    """F11: the change is -h dissipation + O(h^2)."""
    case = make_case(dynamics=law, hopfield="softmax", eps=1e-2)
    found = first_step_overshoot(case.system, case.x, sizes(-6, -5, 2))
    off = abs(found.decrease_ratio.values - 1)
    assert off.max() < 1e-2 and (off[:, 0] < 0.15 * off[:, 1]).all()
    mapped = step_size_map(case.system, case.x, sizes(-6, -5, 2), 2).energy
    change = mapped.isel(step=1) - mapped.isel(step=0)
    assert abs(found.energy_change.values - change.values).max() < 1e-11


def test_f26_the_first_step_of_the_official_start_discards_where_masked_tokens_pointed():
    """The ImageNet size at initialisation: sigma_0 = 4.2e-3, the step 12 times as long."""
    rng = torch.Generator().manual_seed(0)

    def normal(std, *shape):
        return std * torch.randn(*shape, generator=rng)

    arrays = {
        "Wq": normal(0.002, 12, 64, 768), "Wk": normal(0.002, 12, 64, 768),
        "Xi": normal(0.02, 768, 3072), "gamma": torch.tensor(1.0), "delta": torch.zeros(768),
    }  # fmt: skip
    system = ed.EnergyTransformer.from_official(arrays).requires_grad_(False)
    x0 = normal(0.002, 1, 197, 768)  # positions
    x0[:, 1:101] += normal(0.002, 768)  # the mask token; the other 96 patches stand for open ones
    x0[:, 101:] += normal(0.5, 1, 96, 768)
    found = first_step_overshoot(system, x0, torch.tensor([0.1]))
    masked = slice(1, 101)
    sigma = system.lagrangian.sigma(x0)[0, masked]
    assert float(sigma.mean()) == pytest.approx(4.2e-3, rel=0.02)
    # of 3072 memories half are felt: their mean is along g, the rest random
    std2, size2 = 0.02**2, 768 * (8e-6 / 1.8e-5)
    force2 = size2 * ((3072 * std2 / 2) ** 2 + 3072 / 2 * std2**2 * 768)
    wanted = 0.1 * math.sqrt(force2 / 768) / 4.2e-3  # 11.9
    assert found.displacement.values[0, 0, masked].mean() == pytest.approx(wanted, rel=0.04)
    assert found.turn.values[0, 0, masked].min() > 0.5


# --- results and refusals -----------------------------------------------------------------------


def test_results_explain_themselves_and_survive_storage(make_case, tmp_path):
    case = make_case(batch=1, tokens=2, hopfield="softmax")
    mapped = step_size_map(case.system, case.x, sizes(-1, 0, 2), 5)
    switches = attractor_switches(case.system, mapped)
    overshoot = first_step_overshoot(case.system, case.x, sizes(-1, 0, 2))
    for result in (mapped, switches, overshoot):
        named = [*result.data_vars.values(), result.step_size]
        assert all({"units", "long_name"} <= set(v.attrs) for v in named)
        store.save(result, tmp_path / "result")
        assert store.load(tmp_path / "result").identical(result)


def test_wrong_input_is_refused(make_case):
    case = make_case()
    good = sizes(-1, 0, 2)
    for function in (step_size_map, first_step_overshoot):
        with pytest.raises(ValueError, match="step_sizes: expected finite numbers > 0"):
            function(case.system, case.x, -good)
        with pytest.raises(TypeError, match="step_sizes: expected dtype"):
            function(case.system, case.x, good.float())
        with pytest.raises(ValueError, match="x0: expected finite"):
            function(case.system, case.x * math.nan, good)
    with pytest.raises(ValueError, match="steps: expected an integer >= 2"):
        step_size_map(case.system, case.x, good, 1)
    with pytest.raises(ValueError, match=r"error\(x, sample\): expected shape \(4\)"):
        step_size_map(case.system, case.x, good, 2, lambda x, sample: x)
    mapped = step_size_map(case.system, case.x, good, 2)
    with pytest.raises(ValueError, match="reference: expected shape"):
        attractor_switches(case.system, mapped, case.x[:1])
