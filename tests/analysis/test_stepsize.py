"""Predicted and measured step-size limits at equilibria: ET-F20, F21, F22, F23."""

import functools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import etdyn as ed
from etdyn import store
from etdyn.analysis.operators import flow_jacobian
from etdyn.analysis.spectrum import spectrum
from etdyn.analysis.stepsize import hessian_bound, measured_limit, multiplier, predicted_limits
from etdyn.datasets import digits
from etdyn.problems import LinearEnergy, anisotropic_well, curie_weiss
from etdyn.solve import iterate
from etdyn.tasks import evaluation_masks

DYNAMICS = ["et", "leaky", "sphere"]
WELL_EPS = 1e-8  # F23 neglects eps / sigma^2


def settled(system, x0, **arguments):
    found = ed.find_equilibrium(system, x0, tol=1e-9, **arguments)
    assert found.converged.all()
    return found.x


@functools.cache
def crowd():
    """ET-F24 with memories: tokens that repel each other; kappa_max = 2.33."""
    torch.manual_seed(2)
    system = ed.EnergyTransformer(6, 1, 6, 12, "leaky", beta=0.05, eps=WELL_EPS).double()
    system.requires_grad_(False)
    system.attention.query.copy_(torch.eye(6).unsqueeze(0))
    system.attention.key.copy_(-torch.eye(6).unsqueeze(0))
    system.hopfield.memories.mul_(0.5)
    x0 = torch.randn(1, 8, 6, dtype=torch.float64)
    return system, settled(system, x0, method="map", damping=0.3)


def memories_alone(make_case):
    """Concave, so that no kappa exceeds 1 (ET-F29): the lengths of tokens limit the step."""
    case = make_case(hopfield="softmax", dynamics="leaky", weights=2.0, tokens=3)
    system = ed.System(case.system.lagrangian, case.system.hopfield, "leaky")
    return system, settled(system, case.x)


@functools.cache
def trained(law):
    """Two images that end in different equilibria."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    system = model.requires_grad_(False).system.with_dynamics(law)
    x0 = model.tokens(digits().test[[0, 2]].double(), evaluation_masks(2, model.patches))
    return system, settled(system, x0)


def case_at_rest(name, law, make_case):
    if name == "crowd":
        system, x = crowd()
        return system.with_dynamics(law), settled(system.with_dynamics(law), x, damping=0.3)
    if name == "memories":
        system, x = memories_alone(make_case)
        return system.with_dynamics(law), settled(system.with_dynamics(law), x)
    if name == "trained":
        return trained(law)
    case = make_case(hopfield="softmax", dynamics=law, weights=1.5, batch=3, seed=4)
    return case.system, settled(case.system, case.x)


def rates(system, x):
    """Minus the eigenvalues of the flow's Jacobian at x `(1, token, feature)`, by autograd."""
    jacobian = torch.autograd.functional.jacobian(
        lambda v: system.velocity(0.0, v.reshape(x.shape)).flatten(), x.flatten()
    )
    found = -torch.linalg.eigvals(jacobian)
    assert found.imag.abs().max() < 1e-6 * found.real.abs().max()  # ET-F12
    return found.real


@pytest.mark.parametrize("name", ["random", "crowd", "memories"])
@pytest.mark.parametrize("law", ["leaky", "sphere"])
def test_the_prediction_is_two_over_the_fastest_rate_of_the_whole_jacobian(make_case, law, name):
    """In x, means and lengths included: 2 / max(1, kappa_max) and 2 / lambda_max."""
    system, x = case_at_rest(name, law, make_case)
    predicted = predicted_limits(system, x).linear.values
    for k in range(len(x)):
        top = float(rates(system, x[k : k + 1]).max())
        if name == "memories" and law == "leaky":
            assert top == pytest.approx(1.0, abs=1e-5)  # 1 + O(eps / sigma^2)
        assert predicted[k] == pytest.approx(2 / top, rel=1e-5)


def grows(system, x, direction, *, step, steps=60, in_x=False):
    """Whether the deviation from x is longer after 60 steps than at the start."""
    kicked = system.prepare(x + 1e-5 * direction)
    *_, end = iterate(system, kicked, step, steps)
    look = (lambda v: v) if in_x else system.activation
    return float((look(end) - look(x)).norm() / (look(kicked) - look(x)).norm())


@pytest.mark.parametrize("name", ["random", "crowd", "memories", "trained"])
@pytest.mark.parametrize("law", ["leaky", "sphere"])
@torch.no_grad()
def test_f23_a_kick_along_the_top_mode_decays_at_098_and_grows_at_102(make_case, law, name):
    """0.96^60 = 0.09 and 1.04^60 = 10.5."""
    system, x = case_at_rest(name, law, make_case)
    limits = predicted_limits(system, x).linear.values
    modes = spectrum(system, x, k=1, which="highest", vectors=True)
    lengths = name == "memories" and law == "leaky"
    for k in range(len(x)):
        here = x[k : k + 1]
        direction = torch.from_numpy(modes.direction.values[k, -1:])
        if lengths:
            y = system.lagrangian.centre(here)
            direction = y / y.norm()
        direction = direction * here.norm()
        found = [
            grows(system, here, direction, step=s * limits[k], in_x=lengths) for s in (0.98, 1.02)
        ]
        assert found[0] == pytest.approx(0.96**60, rel=0.05)
        assert found[1] == pytest.approx(1.04**60, rel=0.05)


@pytest.mark.parametrize("name", ["random", "crowd", "memories"])
@pytest.mark.parametrize("law", DYNAMICS)
def test_the_measured_limit_is_the_predicted_one(make_case, law, name):
    system, x = case_at_rest(name, law, make_case)
    found = measured_limit(system, x)
    if law == "et" and name != "crowd":  # kappa_max <= 2: no step is too large
        assert (found.predicted == math.inf).all() and (found.limit == math.inf).all()
    else:
        assert (abs(found.ratio - 1) < 1.1e-3).all()


@pytest.mark.parametrize("law", ["leaky", "sphere"])
def test_the_measured_limit_of_a_trained_model_is_the_predicted_one(law):
    system, x = trained(law)
    found = measured_limit(system, x)
    assert (abs(found.ratio - 1) < 0.02).all()
    assert (abs(found.ratio - 1) < 1.1e-3).all()  # as fine as the bisection


@torch.no_grad()
def test_beyond_two_the_lengths_of_tokens_grow_until_g_turns_over(make_case):
    """To first order g does not see them; then they change sign, and g with them."""
    system, x = memories_alone(make_case)
    g, y = system.activation(x), system.lagrangian.centre(x)
    for step, turned in ((1.95, False), (2.1, True)):
        states = [system.activation(s) for s in iterate(system, x + 1e-5 * y, step, 200)]
        gaps = [float((s - g).norm() / g.norm()) for s in states]
        assert max(gaps[:20]) < 1e-8
        assert (max(gaps) > 1) == turned
        assert turned or max(gaps) < 1e-8


@pytest.mark.parametrize("c", [1.0, 10.0])
def test_f23_the_multiplier_of_the_published_dynamics_to_four_digits(close, c):
    system, x = crowd()
    kappa = float(rates(system, x).max())
    assert kappa == pytest.approx(2.331876, abs=1e-5)
    published = system.with_dynamics("et")
    edge = 2 / (kappa - 2)
    limits = predicted_limits(published, c * x)
    assert limits.scale.item() == pytest.approx(c, rel=1e-6)
    assert limits.linear.item() == pytest.approx(c * edge, rel=1e-5)
    for share in (0.1, 0.5, 0.98 * edge, edge, 1.02 * edge, 3 * edge):
        found = multiplier(published, c * x, c * share)
        wanted = (1 - share * (kappa - 1)) / (1 + share)
        assert found.measured.item() == pytest.approx(wanted, abs=1e-6)
        assert found.predicted.item() == pytest.approx(wanted, abs=1e-6)
        assert found.turned.item() < 1e-5
        assert (abs(found.measured.item()) > 1) == (share > edge) or share == edge


def test_f23_an_instability_of_the_published_dynamics_is_transient():
    """c grows by the step, so a kick that grows in one step has decayed in the end."""
    system, x = crowd()
    published = system.with_dynamics("et")
    step = 3 * predicted_limits(published, x).linear.item()
    direction = torch.from_numpy(
        spectrum(published, x, k=1, which="highest", vectors=True).direction.values[:, -1]
    )
    with torch.no_grad():
        found = [grows(published, x, x.norm() * direction, step=step, steps=n) for n in (1, 60)]
    assert found[0] > 1 > found[1]


@pytest.mark.parametrize("law", ["leaky", "sphere"])
def test_the_multiplier_of_a_mode_is_one_minus_step_times_eigenvalue(make_case, law):
    system, x = case_at_rest("random", law, make_case)
    limits = predicted_limits(system, x)
    step = torch.from_numpy(0.7 * limits.linear.values)
    found = multiplier(system, x, step)
    assert abs(found.measured - (1 - step.numpy() * limits.eigenvalue)).max() < 1e-6
    assert abs(found.measured - found.predicted).max() < 1e-6


def test_an_anisotropic_well_is_limited_by_its_steepest_direction():
    rates = torch.tensor([[0.1, 3.0], [7.0, 0.5]], dtype=torch.float64)
    problem = anisotropic_well(rates, torch.ones(1, 2, 2, dtype=torch.float64))
    rest = 1e-9 * problem.start
    assert predicted_limits(problem.system, rest).linear.item() == pytest.approx(2 / 7, rel=1e-12)
    assert measured_limit(problem.system, rest, size=1.0).ratio.item() == pytest.approx(1, abs=1e-3)
    found = multiplier(problem.system, rest, 0.2)
    assert found.measured.item() == pytest.approx(1 - 0.2 * 7, abs=1e-6)
    assert predicted_limits(problem.system, rest).lipschitz.item() == 0  # nothing is known


def test_curie_weiss_spins_are_limited_by_their_exponents():
    known = curie_weiss(5, 1.5)
    limits = predicted_limits(known.system, known.states)
    wanted = 2 / known.exponents.amax(1)
    assert torch.allclose(torch.from_numpy(limits.linear.values), wanted, rtol=1e-9)
    stable = (known.exponents > 0).all(1)
    found = measured_limit(known.system, known.states[stable])
    assert (abs(found.ratio - 1) < 1.1e-3).all()


# --- theorems -----------------------------------------------------------------------------------


@pytest.mark.parametrize("law", DYNAMICS)
@settings(max_examples=12)
@given(data=st.data())
@torch.no_grad()
def test_f20_a_step_within_the_descent_limit_never_raises_the_energy(make_case, law, data):
    case = make_case(data, dynamics=law, tokens=data.draw(st.integers(2, 5)))
    if data.draw(st.booleans(), label="repulsive"):
        case.system.attention.key.copy_(-case.system.attention.query)
    system, x = case.system, case.system.prepare(case.x)
    bound = torch.from_numpy(predicted_limits(system, x).descent.values)
    for share in (0.1, 1.0):
        h = (share * bound).clamp(max=1e3)
        before, after = system.energy(x), system.energy(next(iterate(system, x, h, 1)))
        assert (after - before <= 1e-12 * before.abs().maximum(after.abs())).all()


@pytest.mark.parametrize("law", ["leaky", "sphere"])
def test_f20_the_descent_limit_is_within_the_linear_one_and_f22_within_both(law):
    """Sufficient against necessary: what cannot raise the energy cannot be unstable."""
    system, x = trained(law)
    found = predicted_limits(system, x)
    assert (found.lipschitz > 0).all()
    assert (found.descent <= found.linear).all() and (found.lipschitz <= found.linear).all()


@given(data=st.data())
@torch.no_grad()
def test_f21_the_hessian_is_within_its_bound(make_case, data):
    case = make_case(data)
    _, tokens, dim = case.x.shape
    g = case.system.activation(case.x)[:1]
    basis = torch.eye(tokens * dim, dtype=g.dtype).reshape(-1, tokens, dim)
    hessian = case.system.interaction.hvp(g.expand(tokens * dim, -1, -1), basis).flatten(1)
    bound = hessian_bound(case.system, tokens)
    assert torch.linalg.matrix_norm(hessian, 2) <= bound * (1 + 1e-12)


@pytest.mark.parametrize("law", DYNAMICS)
@settings(max_examples=12)
@given(data=st.data())
@torch.no_grad()
def test_f22_the_flow_is_as_lipschitz_as_stated(make_case, law, data):
    """|d velocity/dx| <= 2 / lipschitz; on the sphere of the flow seen from the sphere."""
    case = make_case(data, dynamics=law, batch=1, tokens=data.draw(st.integers(2, 5)))
    system, x = case.system, case.system.prepare(case.x)
    bound = 2 / predicted_limits(system, x).lipschitz.item()
    if law == "sphere":
        found = float(abs(spectrum(system, x).eigenvalue).max())
    else:
        n = x.numel()
        basis = torch.eye(n, dtype=x.dtype).reshape(n, *x.shape[1:])
        many = x.expand(n, -1, -1)
        found = float(torch.linalg.matrix_norm(flow_jacobian(system, many, basis).flatten(1), 2))
    assert found <= bound * (1 + 1e-12)


# --- results and refusals -----------------------------------------------------------------------


def test_away_from_equilibrium_there_is_no_linear_limit(make_case):
    case = make_case()
    for law in DYNAMICS:
        system = case.system.with_dynamics(law)
        found = predicted_limits(system, case.x)
        assert found.linear.isnull().all() and not found.descent.isnull().any()
    assert measured_limit(case.system, case.x).limit.isnull().all()


def test_absent_tokens_change_nothing(make_case):
    """A padded sample has the limits of the sample alone."""
    case = make_case(hopfield="softmax", dynamics="leaky", batch=1, tokens=4, seed=4)
    x = settled(case.system, case.x)
    padded = torch.cat([x, case.randn(1, 2, 8)], 1)
    masked = case.system.masked(tokens=torch.tensor([[True] * 4 + [False] * 2]))
    for name in ("descent", "linear", "lipschitz"):
        alone, among = (
            predicted_limits(s, v)[name].item() for s, v in ((case.system, x), (masked, padded))
        )
        if name == "linear":
            assert measured_limit(masked, padded, steps=20).ratio.item() == pytest.approx(
                1, abs=1e-3
            )
        assert among == pytest.approx(alone, rel=1e-9)


def test_results_explain_themselves_and_survive_storage(make_case, tmp_path):
    system, x = case_at_rest("random", "leaky", make_case)
    for result in (
        predicted_limits(system, x),
        measured_limit(system, x, steps=2),
        multiplier(system, x, 1.0),
    ):
        assert all({"units", "long_name"} <= set(v.attrs) for v in result.data_vars.values())
        store.save(result, tmp_path / "result")
        assert store.load(tmp_path / "result").identical(result)


def test_wrong_input_is_refused(make_case):
    case = make_case()
    with pytest.raises(TypeError, match="x: expected float64"):
        predicted_limits(case.system.float(), case.x.float())
    case = make_case()
    with pytest.raises(ValueError, match="step: expected a finite number > 0"):
        multiplier(case.system, case.x, -1.0)
    with pytest.raises(ValueError, match=r"step: expected shape \(2\)"):
        multiplier(case.system, case.x, torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="width"):
        measured_limit(case.system, case.x, width=0.0)
    with pytest.raises(ValueError, match="x: expected finite"):
        measured_limit(case.system, case.x * math.nan)
    unknown = ed.System(case.system.lagrangian, LinearEnergy(torch.ones(5, 8).double()))
    assert predicted_limits(unknown, case.x).lipschitz.values.tolist() == [0, 0]
