"""The audit of a trajectory: energies, slopes, their split, and why an energy rose."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import etdyn as ed
from etdyn import Attention, Hopfield, LayerNorm, System, store
from etdyn.analysis import descent
from etdyn.analysis.descent import Cause, audit, increases, local_energies
from etdyn.datasets import digits
from etdyn.problems import anisotropic_well, linear_flow
from etdyn.tasks import evaluation_masks

DYNAMICS = ["et", "leaky", "sphere"]
F64 = torch.float64


def flow(system, x, times, rtol=1e-11, atol=1e-13):
    return ed.solve(system, x, times, rtol=rtol, atol=atol, gradient=None)


def grid(end, intervals):
    return torch.linspace(0, end, intervals + 1, dtype=F64)


def euler(system, x, step, steps=12, **noise):
    return ed.descend(system, x, step, steps, gradient=None, **noise)


def causes(audited):
    """The names of the causes of all rises above rounding, in order of time."""
    names = [Cause(c).name for c in increases(audited)["cause"].values]
    return [name for name in names if name != "ROUNDING"]


def mismatch(audited):
    """Largest relative distance of measured and exact slopes."""
    gap = audited["slope_measured"] - audited["slope_exact"]
    return float(abs(gap / audited["slope_exact"]).max())


@pytest.fixture(scope="module")
def trained():
    """The digits model in float64 and two half-masked held-out images."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    model.requires_grad_(False)
    images = digits().test[:2].double()
    return model.system, model.tokens(images, evaluation_masks(2, model.patches))


class VectorGamma(LayerNorm):
    """What torch.nn.LayerNorm does: dg/dx is not symmetric."""

    @property
    def gamma(self):
        return torch.linspace(0.1, 3, self.dim, dtype=F64)


class NegativeGamma(LayerNorm):
    @property
    def gamma(self):
        return torch.tensor(-1.0, dtype=F64)


class Regularised(LayerNorm):
    """g + 0.1 x, as an option of the official code has it (ET-F32)."""

    def value(self, x):
        return super().value(x) + 0.05 * x.square().sum(-1)

    def activation(self, x):
        return super().activation(x) + 0.1 * x

    def metric(self, x, v):
        return super().metric(x, v) + 0.1 * v


# energies by term, token and head


@pytest.mark.parametrize("dynamics", DYNAMICS)
@given(data=st.data())
@torch.no_grad()
def test_energies_by_token_and_head_sum_to_the_terms(make_case, close, dynamics, data):
    case = make_case(data, dynamics=dynamics)
    system, x = case.system, case.x
    if data.draw(st.booleans(), label="masked"):
        tokens = x.shape[1]
        system = system.masked(case.token_mask(), case.mask(1, tokens, tokens))
    x = system.prepare(x)
    terms, local = system.energies(x, relative=True), local_energies(system, x)
    assert local.keys() == terms.keys()
    for name, parts in local.items():
        close(parts.flatten(1).sum(1), terms[name], 1e-13, parts.abs().sum())


@torch.no_grad()
def test_the_energy_of_a_query_in_a_head_is_its_own_log_mean_exp(make_case, close):
    case = make_case(heads=2, tokens=4, batch=1)
    attention, g = case.system.attention, case.system.activation(case.x)[0]
    found = local_energies(case.system, case.x)["attention"]
    for head in range(2):
        keys, queries = g @ attention.key[head].T, g @ attention.query[head].T
        for c in range(4):
            scores = torch.stack([queries[c] @ keys[b] for b in range(4) if b != c])
            mean = (attention.beta * scores).exp().mean()
            close(found[0, head, c], -mean.log() / attention.beta, 1e-13)


@torch.no_grad()
def test_a_term_of_another_kind_does_not_say_where_its_energy_sits():
    problem = anisotropic_well(torch.ones(2, 3, dtype=F64), torch.ones(1, 2, 3, dtype=F64))
    assert local_energies(problem.system, problem.start) == {}
    assert list(local_energies(problem.system.with_dynamics("leaky"), problem.start)) == [
        "lagrangian"
    ]


@pytest.mark.parametrize("dynamics", DYNAMICS)
@given(data=st.data())
@torch.no_grad()
def test_the_dissipation_is_split_between_the_terms(make_case, close, dynamics, data):
    """Each share is minus the slope of its own energy, here by automatic differentiation."""
    case = make_case(data, dynamics=dynamics)
    system = case.system
    if data.draw(st.booleans(), label="masked"):
        system = system.masked(case.token_mask())
        case.x = system.keep(case.x)  # padding of zeros
    found = audit(euler(system, case.x, 1e-3, 1)).isel(time=0)
    x = system.prepare(case.x)
    v, slopes = system.velocity(0.0, x), {}
    with torch.enable_grad():
        free = x.clone().requires_grad_()
        for name, energy in system.energies(free).items():
            (gradient,) = torch.autograd.grad(energy.sum(), free, retain_graph=True)
            slopes[name] = (system.keep(gradient) * v).sum((1, 2))
    shares = {name: found[f"dissipation_{name}"].values for name in slopes}
    force = sum(f.abs() for f in system.forces(x).values()) + x.abs()
    moved = system.keep(system.clock_rate(x)).unsqueeze(-1) * system.keep(force + v.abs())
    scale = system.keep(force).norm() * moved.norm()
    for name, slope in slopes.items():
        close(shares[name], -slope, 1e-12, scale)
    close(sum(shares.values()), found["dissipation"].values, 1e-12, scale)


# the slope


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_f11_f30_the_slope_of_a_flow_is_the_dissipation(make_case, dynamics):
    """To 1e-6 and better; ET-F30 is the leaky one, to 1e-8. The grid's error is of order 4."""
    case = make_case(dynamics=dynamics, hopfield="softmax")
    errors = []
    for intervals in (10, 20, 40):
        audited = audit(flow(case.system, case.x, grid(0.2, intervals), 1e-12, 1e-14))
        errors.append(mismatch(audited))
        gap = abs(audited["slope_measured"] - audited["slope_exact"])
        assert (gap < 0.01 * audited["slope_uncertainty"]).all()
        assert not causes(audited)
    assert errors[-1] < 1e-8
    assert 13 < errors[0] / errors[1] < 19


def test_f30_energy_plus_neuron_energy_is_what_falls_in_the_leaky_flow(make_case):
    """At eps = 1, where the neuron energy counts, and to equilibrium."""
    case = make_case(dynamics="leaky", hopfield="softmax", eps=1.0, weights=0.5)
    audited = audit(flow(case.system, case.x, grid(1, 100)))
    assert mismatch(audited) < 1e-8
    assert not causes(audit(flow(case.system, case.x, grid(30, 30), 1e-9)))
    assert float(abs(audited["energy_lagrangian"] / audited["energy"]).max()) > 0.1


def test_an_exact_well_has_the_energy_and_the_slope_of_its_formula(close):
    rates = torch.tensor([[0.5, 1.0, 3.0]], dtype=F64)
    problem = anisotropic_well(rates, torch.tensor([[[1.0, -2.0, 0.5]]], dtype=F64))
    times = grid(2, 40)
    audited = audit(flow(problem.system, problem.start, times))
    exact = torch.stack([problem.exact(float(t)) for t in times]).square() * rates
    close(audited["energy"].values, exact.sum((2, 3)) / 2, 1e-10)
    close(audited["dissipation"].values, (exact * rates).sum((2, 3)), 1e-10)
    assert mismatch(audited) < 1e-6
    assert not causes(audited)


def test_a_discrete_step_has_the_slope_of_its_start_up_to_its_size(make_case):
    case = make_case(hopfield="softmax")
    found = [audit(euler(case.system, case.x, h, 1)) for h in (0.004, 0.002, 0.001)]
    errors = [mismatch(a) for a in found]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.05)
    for audited in found:
        np.testing.assert_array_equal(audited["slope_exact"], -audited["dissipation"][:1])


@pytest.mark.parametrize("lagrangian", [VectorGamma, NegativeGamma])
def test_f11_fails_for_a_vector_or_negative_gamma_and_the_audit_says_why(make_case, lagrangian):
    """The identity still holds, the sign does not: the flow itself rises."""
    case = make_case(dim=4, batch=400, tokens=2)
    system = System(lagrangian(4).double(), case.system.interaction)
    rising = (system.dissipation(case.x) < 0).nonzero().flatten()
    assert len(rising) == 400 if lagrangian is NegativeGamma else 2 <= len(rising) < 40
    audited = audit(flow(system, case.x[rising[:2]], grid(0.01, 5)))
    assert mismatch(audited) < 1e-6
    assert causes(audited) == ["NO_LYAPUNOV_FUNCTION"] * 10
    discrete = audit(euler(system, case.x[rising[:2]], 0.001, 5))
    assert causes(discrete) == ["NO_LYAPUNOV_FUNCTION"] * 10
    rows = increases(audited)
    np.testing.assert_allclose(rows["flow_change"], rows["size"], rtol=0.3)
    assert (rows["flow_error"] <= rows["size"] / 4).all()


# rises and their causes


@pytest.mark.parametrize("kind", ["relu", "power", "softmax"])
def test_f19_memories_alone_never_rise_at_any_step(make_case, kind):
    for seed in range(4):
        case = make_case(hopfield=kind, batch=8, seed=seed)
        system = System(case.system.lagrangian, case.system.hopfield)
        for exponent in range(-3, 7):
            assert not causes(audit(euler(system, case.x, 10.0**exponent)))


def test_f19_trained_memories_alone_never_rise_at_any_step(trained):
    system, x = trained
    memories = System(system.lagrangian, system.hopfield)
    for exponent in range(-3, 7):
        assert not causes(audit(euler(memories, x, 10.0**exponent)))


def repulsive():
    """ET-F24: tokens that repel, balanced at sigma = 0.1, and 1e-3 of a common direction."""
    dim, tokens = 12, 8
    attention = Attention(dim, 1, dim, beta=1e-3).double().requires_grad_(False)
    attention.query.copy_(torch.eye(dim))
    attention.key.copy_(-torch.eye(dim))
    system = System(LayerNorm(dim).double().requires_grad_(False), attention)
    generator = torch.Generator().manual_seed(0)
    half, common = torch.randn(2, 1, tokens // 2, dim, generator=generator, dtype=F64)
    balanced = system.lagrangian.normalise(torch.cat([half, -half], 1))
    return system, 0.1 * balanced + 1e-3 * system.lagrangian.normalise(common[:, :1])


def test_f24_too_large_a_step_raises_the_energy_three_times_and_the_audit_says_so():
    system, x = repulsive()
    assert not causes(audit(euler(system, x, 0.1, 100)))
    audited = audit(euler(system, x, 1.0, 100))
    rows = increases(audited)
    assert causes(audited) == ["STEP_TOO_LARGE"] * 3 == [Cause(c).name for c in rows["cause"]]
    assert rows["start"].values.tolist() == [0, 1, 2]
    assert rows["end"].values.tolist() == [1, 2, 3]
    energy = audited["energy"].isel(sample=0).values
    np.testing.assert_array_equal(rows["size"], np.diff(energy)[:3])
    np.testing.assert_array_equal(rows["relative_size"], rows["size"] / abs(energy[:3]))
    assert (rows["flow_change"] < -rows["flow_error"]).all()  # the flow falls over each step
    assert energy[-1] < energy[0]  # it recovers


def test_f25_attention_and_memories_in_turn_differ_from_both_at_once_by_the_step_squared(
    make_case, trained
):
    case = make_case(hopfield="softmax")
    for system, x, steps in ((case.system, case.x, (0.01, 0.005, 0.0025)),
                             (*trained, (4e-4, 2e-4, 1e-4))):  # fmt: skip
        turns = [System(system.lagrangian, t) for t in (system.attention, system.hopfield)]
        gaps, rises = [], []
        for h in steps:
            middle = euler(turns[0], x, h, 1).x_end
            split, joint = euler(turns[1], middle, h, 1).x_end, euler(system, x, h, 1).x_end
            gaps.append(float((split - joint).norm()))
            rises.append(float(audit(euler(system, x, h, 1))["change"].max()))
        assert gaps[0] / gaps[1] == pytest.approx(4, abs=0.25)
        assert gaps[1] / gaps[2] == pytest.approx(4, abs=0.15)
        assert max(rises) < 0


def test_a_loose_tolerance_is_a_solver_error(trained):
    system, x = trained
    loose = ed.solve(
        system.with_dynamics("sphere"), x, grid(2, 40), "adaptive_heun", rtol=0.5, atol=0.5,
        gradient=None,
    )  # fmt: skip
    found = causes(audit(loose))
    assert found and set(found) == {"SOLVER_ERROR"}


def test_a_fixed_step_solver_beyond_its_limit_is_a_step_too_large(trained):
    """Each sample under its own mask, each interval over its own length."""
    tokens = torch.ones(trained[1].shape[:2], dtype=torch.bool)
    tokens[0, 5:], tokens[1, 1:3] = False, False
    sphere = trained[0].with_dynamics("sphere").masked(tokens)
    times = [0, 0.5, 0.9, 1.4, 1.8, 2.3, 2.8, 3.2, 3.7, 4.2]
    coarse = ed.solve(sphere, trained[1], times, "euler", step=0.5, gradient=None)
    audited = audit(coarse)
    assert set(causes(audited)) == {"STEP_TOO_LARGE"}
    rows = increases(audited)
    assert set(rows["sample"].values) == {0, 1}
    lengths = (rows["end"] - rows["start"]).values.round(9)
    assert lengths[[0, 2]].tolist() == [0.5, 0.4]
    for row in (0, 2):  # one of each length
        one = rows.isel(increase=row)
        k = int(np.argmin(abs(coarse.t.numpy() - float(one["start"]))))
        again = flow(sphere, coarse.x[k], [0, lengths[row]], 1e-7, 1e-9)
        fall = audit(again)["change"].isel(interval=0, sample=int(one["sample"]))
        assert float(one["flow_change"]) == pytest.approx(float(fall), rel=1e-4)


def test_noise_is_named_where_the_same_step_without_it_falls(make_case):
    case = make_case(dynamics="leaky", weights=0.5)
    rest = ed.find_equilibrium(case.system, case.x).x
    noisy = euler(case.system, rest, 0.1, 10, noise=0.1, generator=case.rng)
    found = causes(audit(noisy))
    assert len(found) > 4 and set(found) == {"NOISE"}
    system, x = repulsive()
    both = euler(system, x, 1.0, 3, noise=1e-6, generator=case.rng)
    assert causes(audit(both)) == ["STEP_TOO_LARGE"] * 3


def test_at_equilibrium_only_rounding_is_left(make_case):
    case = make_case(dynamics="leaky", weights=0.5)
    rest = ed.find_equilibrium(case.system, case.x, tol=1e-13).x
    audited = audit(euler(case.system, rest, 0.5, 200))
    rows = increases(audited)
    assert rows.sizes["increase"] > 0
    assert set(rows["cause"].values) == {Cause.ROUNDING}
    assert float((audited["rounding"] / abs(audited["energy"]).max()).max()) < 1e-12


def test_what_cannot_be_integrated_is_undecided(monkeypatch):
    monkeypatch.setattr(descent, "MAX_STEPS", 1)
    system, x = repulsive()
    assert causes(audit(euler(system, x, 1.0, 4))) == ["UNDECIDED"] * 3


# growth


def test_f32_a_regularised_layer_norm_has_an_energy_without_a_floor():
    """x from 1e3 to 5e9 in 25 units at the rate 0.1 |xi|^2; the energy falls, and for ever."""
    dim, rate = 8, math.log(5e6) / 25
    memory = Hopfield(dim, 1).double().requires_grad_(False)
    xi = torch.tensor([1.0, -1.0] + [0.0] * (dim - 2), dtype=F64) / math.sqrt(2)
    memory.memories.copy_(math.sqrt(10 * rate) * xi)
    start, times = (1e3 * xi).reshape(1, 1, dim), grid(25, 100)
    free = flow(System(Regularised(dim).double(), memory), start, times, 1e-10, 1e-10)
    audited = audit(free)
    size = free.x.norm(dim=-1).flatten()
    assert 4e9 < float(size[-1]) < 6e9
    assert not causes(audited)
    late = np.log(audited["activation_norm"].values[-5:, 0])
    np.testing.assert_allclose(np.diff(late) / 0.25, rate, rtol=1e-5)
    fall = np.log(-audited["energy"].values[-5:, 0])
    np.testing.assert_allclose(np.diff(fall) / 0.25, 2 * rate, rtol=1e-5)
    bounded = audit(flow(System(LayerNorm(dim).double(), memory), start, times))
    assert float(bounded["activation_norm"].max()) <= math.sqrt(dim) * (1 + 1e-12)


@torch.no_grad()
def test_f16_memories_make_tokens_grow_by_their_own_energy(make_case, trained, close):
    """d|y|^2/2 dt = (sigma/gamma) sum relu(h)^2 = -2 (sigma/gamma) energy_hopfield_by_token."""
    case = make_case()
    for (system, x), end in (((case.system, case.x), 1.0), (trained, 0.1)):
        centred = LayerNorm(system.dim).double()
        centred.set_gamma(float(system.lagrangian.gamma))
        memories = System(centred, system.hopfield)
        moved = flow(memories, x, grid(end, 8), 1e-6, 1e-8)
        held = torch.as_tensor(audit(moved)["energy_hopfield_by_token"].values)
        assert (held <= 0).all() and (held < 0).any()
        for state, energy in zip(moved.x, held, strict=True):
            y, v = centred.centre(state), memories.velocity(0.0, state)
            growth = -2 * centred.sigma(state) / centred.gamma * energy
            close((y * v).sum(-1), growth, 1e-13, (y.norm(dim=-1) * v.norm(dim=-1)).max())


# a trained model


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dynamics", DYNAMICS)
@torch.no_grad()
def test_f11_f30_a_trained_model_falls_as_its_dissipation_says(trained, dynamics, masked):
    system, x = trained[0].with_dynamics(dynamics), trained[1]
    if masked:  # padding of zeros
        tokens = torch.ones(x.shape[:2], dtype=torch.bool)
        tokens[0, 5:], tokens[1, 1:3] = False, False
        system = system.masked(tokens)
        x = system.keep(x)
    moved = flow(system, x, grid(0.01, 20), 1e-8, 1e-10)
    audited = audit(moved)
    assert not causes(audited)
    assert mismatch(audited) < 5e-5  # relu memories have kinks
    for found in (audited, audit(euler(system, x, 0.1))):
        assert not causes(found)
        assert np.isfinite(found.to_array()).sum() > 0
        total = sum(found[f"energy_{n}"] for n in system.energies(moved.x[0]))
        xr.testing.assert_allclose(total, found["energy"], rtol=1e-13)
        shares = [found[name] for name in found if name.startswith("dissipation_")]
        xr.testing.assert_allclose(sum(shares), found["dissipation"], rtol=1e-11)
        heads = found["energy_attention_by_head"].sum("head")
        tokens_of = found["energy_attention_by_token"].sum("token")
        xr.testing.assert_allclose(heads, found["energy_attention"], rtol=1e-12)
        xr.testing.assert_allclose(tokens_of, found["energy_attention"], rtol=1e-12)
    if masked:
        assert (audited["energy_hopfield_by_token"].values[:, 0, 5:] == 0).all()
        assert (audited["energy_attention_by_token"].values[:, 0, 5:] == 0).all()


def test_in_float32_a_trained_model_rises_by_rounding_only(trained):
    """ET-F6: without the zero-weight constant, float32 resolves the descent to its end."""
    system, x = trained
    single = ed.load_model(Path(__file__).parents[2] / "data" / "digits").requires_grad_(False)
    audited = audit(euler(single.system, x.float(), 0.1, 200))
    assert audited["energy"].dtype == np.float32
    assert not causes(audited)
    exact = audit(euler(system, x, 0.1, 12))["energy"]
    assert float(abs(audited["energy"][:13] / exact - 1).max()) < 1e-4


# as a result


def test_samples_that_end_apart_stay_nan_after_their_end(make_case):
    case = make_case(dynamics="sphere", hopfield="softmax", batch=4)
    found = ed.solve(
        case.system, case.x, grid(20, 20), "batched_dopri5", stop=ed.Stop(1e-2), gradient=None
    )
    audited = audit(found)
    gone = torch.isnan(found.x).flatten(2).any(2).numpy()
    assert gone.any()
    np.testing.assert_array_equal(np.isnan(audited["energy"]), gone)
    assert (audited["cause"].values[gone[1:]] == Cause.NONE).all()


def test_results_explain_themselves_and_survive_the_disk(tmp_path, make_case):
    case = make_case(dynamics="leaky")
    audited = audit(euler(case.system, case.x, 0.1))
    for name, data in (("audit", audited), ("rows", increases(audited))):
        store.save(data, tmp_path / name)
        back = store.load(tmp_path / name)
        xr.testing.assert_identical(back, data)
        for variable in data.variables.values():
            assert variable.attrs["units"] == "1" and variable.attrs["long_name"]
    xr.testing.assert_identical(increases(store.load(tmp_path / "audit")), increases(audited))
    assert increases(audited).sizes["increase"] == 0


def test_an_audit_needs_states_and_an_energy(make_case):
    case = make_case()
    with pytest.raises(ValueError, match="solution: expected states at two times"):
        audit(euler(case.system, case.x, 0.1, 0))
    saved = ed.solve(case.system, case.x, [0, 1], save=["dissipation"], gradient=None)
    with pytest.raises(ValueError, match="solution: expected states at two times"):
        audit(saved)
    turning = linear_flow(torch.ones(3, 3, dtype=F64).triu(), torch.ones(1, 3, 2, dtype=F64))
    with pytest.raises(TypeError, match="energy"):
        audit(flow(turning.system, turning.start, [0, 1]))
