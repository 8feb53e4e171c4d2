"""find_equilibrium: what it returns is an equilibrium, cheaply, and the one the map would find."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn import Coupling, EnergyTransformer, LayerNorm, System
from etdyn.problems import LinearEnergy
from etdyn.solve.equilibrium import EquilibriumError, find_equilibrium
from etdyn.solve.newton import lowest_curvature
from etdyn.solve.relaxation import evaluate
from etdyn.solve.solution import Status

DATA = st.data()
METHODS = ["map", "anderson", "newton-krylov", "flow"]
LAWS = ["et", "leaky", "sphere"]
TOL = 1e-10


def official(golden, name, dynamics="leaky"):
    arrays = golden(name)
    weights = {key: arrays[key] for key in ("Wq", "Wk", "Xi", "gamma", "delta")}
    system = EnergyTransformer.from_official(
        weights, dynamics=dynamics, beta=float(arrays["beta"]), eps=float(arrays["eps"])
    )
    return system.requires_grad_(False), torch.from_numpy(arrays["x0"]).unsqueeze(0)


def plain_map(system, x, limit=5000):
    """The map without any safeguard: states, evaluations and whether each sample converged."""
    x, evaluations = x.clone(), torch.full((len(x),), limit)
    rows = torch.arange(len(x))
    for k in range(limit):
        force = system.force(x[rows])
        far = system.lagrangian.tangent(x[rows], force).flatten(1).norm(dim=1) > TOL
        evaluations[rows[~far]] = k + 1
        rows = rows[far]
        x[rows] = force[far]
        if not len(rows):
            break
    done = torch.ones(len(x), dtype=torch.bool).index_fill(0, rows, value=False)
    return x, evaluations, done


def spectrum(system, x):
    """Eigenvalues of I + HM at one state, sorted."""
    n = x.numel()
    jacobian = torch.autograd.functional.jacobian(system.force, x).reshape(n, n)
    return torch.linalg.eigvals(torch.eye(n, dtype=x.dtype) - jacobian).real.sort()[0]


def mirrored(seed, kind):
    """A system that x -> x.roll(dim / 2) maps to itself, and a start almost on the mirror."""
    rng = torch.Generator().manual_seed(seed)
    dim, heads, width = 12, 2, 4

    def randn(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    system = EnergyTransformer(
        dim, heads, width, 16, "leaky", hopfield=kind, hopfield_beta=4.0
    ).double()
    system.requires_grad_(False)
    for weight in (system.attention.query, system.attention.key):
        weight.copy_(dim**-0.5 * randn(heads, width, dim // 2).repeat(1, 1, 2))
    memories = randn(8, dim)
    system.hopfield.memories.copy_(torch.cat([memories, memories.roll(dim // 2, -1)]))
    x = randn(1, 5, dim)
    return system, x + x.roll(dim // 2, -1) + 1e-9 * randn(1, 5, dim)


def repulsive(seed=5):
    """Tokens that repel each other strongly: kappa_max > 2 at some equilibria."""
    torch.manual_seed(seed)
    system = EnergyTransformer(24, 2, 12, 96, "leaky", hopfield="softmax").double()
    system.requires_grad_(False)
    system.attention.query.mul_(4)
    system.attention.key.copy_(-system.attention.query)
    return system, torch.randn(20, 6, 24, dtype=torch.float64)


def crowd():
    """ET-F24 with memories: tokens that repel each other softly, kappa_max 2.47 at equilibrium."""
    torch.manual_seed(2)
    system = EnergyTransformer(6, 1, 6, 12, "leaky", beta=0.05).double().requires_grad_(False)
    system.attention.query.copy_(torch.eye(6).unsqueeze(0))
    system.attention.key.copy_(-torch.eye(6).unsqueeze(0))
    system.hopfield.memories.mul_(0.5)
    return system, torch.randn(1, 8, 6, dtype=torch.float64)


class Counted:
    """Counts the samples that every force and every Hessian-vector product is asked for."""

    def __init__(self, interaction):
        self.calls = self.samples = 0
        for name in ("energy_and_force", "force", "hvp"):
            setattr(interaction, name, self.wrap(getattr(interaction, name)))

    def wrap(self, function):
        def counted(g, *arguments):
            self.calls += 1
            self.samples += len(g)
            return function(g, *arguments)

        return counted


class ForceOnly(Coupling):
    """The force of an energy, without the energy."""

    name = "pull"

    def __init__(self, energy):
        super().__init__()
        self.energy = energy

    def force(self, g):
        return self.energy.force(g)

    def force_jvp(self, g, u):
        return self.energy.force_jvp(g, u)


# --- the golden systems -------------------------------------------------------------------------


def test_golden_small_default_call(golden, close):
    system, x0 = official(golden, "et_block_small")
    found = find_equilibrium(system, x0)
    assert found.converged.all() and (system.residual(found.x) <= TOL).all()
    assert found.evaluations.item() <= 100
    assert found.energy.item() == pytest.approx(-1462.5890195, abs=1e-7)
    close(found.x, system.force(found.x), 1e-11)
    _, plain, done = plain_map(system, x0)
    assert done.all() and plain.item() >= 195, "the plain map needs about 200"
    kappa = spectrum(system, found.x)
    assert kappa[0].item() == pytest.approx(0.14262, abs=1e-5)
    assert kappa[-1].item() == pytest.approx(1.39029, abs=1e-5)
    assert kappa[0] - 1e-9 <= found.curvature.item() < 0.3


def test_golden_sharp_default_call(golden):
    system, x0 = official(golden, "et_block_sharp")
    found = find_equilibrium(system, x0)
    x, plain, _ = plain_map(system, x0)
    assert found.converged.all() and 2 * found.evaluations.item() <= plain.item()
    assert found.energy.item() == pytest.approx(system.interaction_energy(x).item(), rel=1e-12)
    kappa = spectrum(system, found.x)
    assert kappa[0].item() == pytest.approx(0.1224, abs=1e-4)
    assert kappa[-1].item() == pytest.approx(1.5414, abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", LAWS)
def test_golden_small_by_every_method_and_law(golden, close, method, law):
    system, x0 = official(golden, "et_block_small", law)
    found = find_equilibrium(system, x0, method)
    assert found.converged.all() and (system.residual(found.x) <= TOL).all()
    energy = -1462.589318 if law == "sphere" else -1462.5890195  # the latter keeps eps
    assert found.energy.item() == pytest.approx(energy, abs=1e-6)
    if law == "sphere":
        close(found.x, system.lagrangian.normalise(found.x), 1e-12)
        close(found.x, system.map(found.x), 1e-11)
    else:
        close(found.x, system.force(found.x), 1e-11)


# --- the same equilibrium as the map's ----------------------------------------------------------


def five_systems(golden):
    yield official(golden, "et_block_small")[0], 11
    yield official(golden, "et_block_sharp")[0], 9
    sizes = [(16, 2, 8, 32, 7, "relu", 1.0), (24, 3, 8, 64, 10, "softmax", 1.5),
             (12, 2, 6, 24, 8, "power", 0.7)]  # fmt: skip
    for seed, (dim, heads, width, memories, tokens, kind, weights) in enumerate(sizes, 100):
        torch.manual_seed(seed)
        system = EnergyTransformer(dim, heads, width, memories, "leaky", hopfield=kind).double()
        for parameter in (system.attention.query, system.attention.key, system.hopfield.memories):
            parameter.requires_grad_(False).mul_(weights)
        yield system.requires_grad_(False), tokens


def share_that_reaches_the_map(golden, starts, method, seed):
    good = total = 0
    for system, tokens in five_systems(golden):
        torch.manual_seed(seed)
        x0 = torch.randn(starts, tokens, system.dim, dtype=torch.float64)
        x, plain, done = plain_map(system, x0)
        energy = system.interaction_energy(x)
        found = find_equilibrium(system, x0, method)
        assert (system.residual(found.x)[found.converged] <= TOL).all()
        as_low = found.energy <= energy + 1e-8 * energy.abs()
        good += int((found.converged & (as_low | ~done)).sum())
        total += starts
        medians = [int(n.double().median()) for n in (found.evaluations, plain)]
        print(f"\n{method}: {good} of {total}, evaluations {medians[0]}, map {medians[1]}")
        if method == "anderson":
            assert found.evaluations.double().median() < 0.5 * plain.double().median()
    return good / total


@pytest.mark.parametrize(("method", "starts"), [("anderson", 8), ("newton-krylov", 4)])
def test_random_starts_end_where_the_map_ends(golden, method, starts):
    assert share_that_reaches_the_map(golden, starts, method, seed=0) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("method", ["anderson", "newton-krylov"])
def test_200_random_starts_end_where_the_map_ends(golden, method):
    assert share_that_reaches_the_map(golden, 200, method, seed=1) >= 0.95


@pytest.mark.parametrize(
    ("kind", "seed"), [("softmax", 2), ("softmax", 3), ("relu", 0), ("relu", 3)]
)
def test_saddles_are_left_again(close, kind, seed):
    """From a nearly symmetric start Newton's method is drawn to a symmetric saddle."""
    system, x0 = mirrored(seed, kind)
    goal = find_equilibrium(system, x0, "map")
    assert goal.converged.all() and spectrum(system, goal.x)[0] > 0
    captured = find_equilibrium(system, x0, "newton-krylov", probe=0)
    assert captured.converged.all() and captured.curvature.isnan().all()
    assert spectrum(system, captured.x)[0] < -0.1, "the test must meet a saddle"
    for method in ("anderson", "newton-krylov"):
        found = find_equilibrium(system, x0, method)
        assert found.converged.all() and (found.curvature > 0).all()
        close(found.energy, goal.energy, 1e-9)


@pytest.mark.parametrize("method", ["map", "anderson", "newton-krylov"])
def test_damping_is_found_where_the_map_oscillates(method):
    system, x0 = repulsive()
    _, _, done = plain_map(system, x0, 500)
    assert not done.all(), "the plain map must fail somewhere"
    found = find_equilibrium(system, x0, method, max_evaluations=500)
    assert found.converged.all()


def test_step_limit_of_the_damped_map():
    """ET-F23: the map cannot stay where kappa_max > 2; with eta < 2 / kappa_max it does."""
    system, x0 = crowd()
    start = find_equilibrium(system, x0, "map", damping=0.3)
    assert start.converged.all()
    kappa = spectrum(system, start.x)
    assert kappa[0] > 0 and kappa[-1] > 2.1
    rng = torch.Generator().manual_seed(0)
    kicked = start.x + 1e-3 * torch.randn(x0.shape, generator=rng, dtype=x0.dtype)
    _, _, done = plain_map(system, kicked, 500)
    assert not done.any(), "the plain map must not settle here"
    for method in ("map", "anderson", "newton-krylov"):
        found = find_equilibrium(system, kicked, method, max_evaluations=500)
        assert found.converged.all()
        assert found.energy.item() <= start.energy.item() + 1e-9 * abs(start.energy.item())


# --- laws of every result -----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@given(data=DATA)
def test_nothing_converged_above_tol_and_nothing_above_the_start(make_case, method, data):
    law = data.draw(st.sampled_from(LAWS))
    case = make_case(data, dynamics=law)
    system = case.system
    tol = data.draw(st.sampled_from([1e-10, 1e-6, 1e-3]))
    limit = data.draw(st.sampled_from([1, 2, 30, 300]))
    found = find_equilibrium(system, case.x, method, tol=tol, max_evaluations=limit)
    residual = system.residual(found.x)
    assert (residual[found.converged] <= tol).all()
    assert (found.residual - residual).abs().max() <= 1e-12 * (1 + system.force(found.x).norm())
    torch.testing.assert_close(found.energy, system.interaction_energy(found.x))
    assert (found.evaluations >= 1).all() and (found.evaluations <= limit).all()
    assert ((found.status == Status.CONVERGED) == found.converged).all()
    assert ((found.status == Status.MAX_STEPS) == ~found.converged).all()
    last = [row[~row.isnan()][-1] for row in found.history.T]
    assert torch.equal(torch.stack(last), found.residual)
    if method != "flow":
        merit = system if law == "sphere" else system.with_dynamics("leaky")
        start, end = merit.energy(merit.prepare(case.x)), merit.energy(found.x)
        assert (end <= start + 1e-12 * start.abs()).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("hopfield", ["relu", "softmax"])
def test_neighbours_do_not_matter(make_case, close, method, law, hopfield):
    case = make_case(dynamics=law, hopfield=hopfield, batch=4, tokens=4, weights=1.5, seed=5)
    together = find_equilibrium(case.system, case.x, method)
    assert len(set(together.evaluations.tolist())) > 1, "samples must end at different times"
    for i in range(len(case.x)):
        alone = find_equilibrium(case.system, case.x[i : i + 1], method)
        assert alone.evaluations.item() == together.evaluations[i].item()
        close(alone.x[0], together.x[i], 1e-12)
        close(alone.energy[0], together.energy[i], 1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", LAWS)
def test_absent_tokens_stay_and_do_not_matter(make_case, close, method, law):
    case = make_case(dynamics=law, batch=3, tokens=5, weights=1.5, seed=1)
    tokens = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
    case.x[~tokens] = 0.0  # padding has no direction
    masked = case.system.masked(tokens=tokens)
    found = find_equilibrium(masked, case.x, method)
    assert found.converged.all()
    assert torch.equal(found.x[~tokens], case.x[~tokens])
    for i, there in enumerate(tokens):
        alone = find_equilibrium(case.system, case.x[i : i + 1, there], method)
        close(found.x[i, there], alone.x[0], 1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", LAWS)
def test_evaluations_are_counted_exactly(make_case, method, law):
    case = make_case(dynamics=law, batch=3, tokens=4, weights=1.5)
    count = Counted(case.system.interaction)
    found = find_equilibrium(case.system, case.x, method)
    assert found.converged.all()
    assert count.samples == int(found.evaluations.sum())
    if method in ("map", "anderson"):
        assert count.calls < int(found.evaluations.sum()), "a batch must share its calls"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", LAWS)
def test_start_at_equilibrium_costs_one_evaluation(make_case, method, law):
    case = make_case(dynamics=law, weights=1.5)
    there = find_equilibrium(case.system, case.x, tol=1e-12)
    again = find_equilibrium(case.system, there.x, method, tol=1e-11)
    assert again.evaluations.tolist() == [1, 1] and again.converged.all()
    assert len(again.history) == 1
    torch.testing.assert_close(again.x, there.x, rtol=1e-14, atol=1e-14)


def test_published_start_that_drifted_is_brought_to_x_equal_force(make_case, close):
    """ET 1.5.2: g stands still while x grows; the residual alone would accept any length."""
    case = make_case(weights=1.5, eps=1e-12)
    there = find_equilibrium(case.system, case.x, tol=1e-11)
    found = find_equilibrium(case.system, 7.0 * there.x + 3.0, tol=1e-9)
    assert found.converged.all() and (found.evaluations <= 3).all()
    close(found.x, case.system.force(found.x), 1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_constant_force_is_reached_in_one_step_of_the_map(method):
    """ET-F15: F does not depend on x, so that one step lands on the fixed point."""
    v = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    system = System(LayerNorm(6).double(), LinearEnergy(v), "leaky").requires_grad_(False)
    found = find_equilibrium(system, v.roll(1, 0).unsqueeze(0), method)
    assert found.converged.all()
    torch.testing.assert_close(found.x[0], v, rtol=1e-9, atol=1e-9)
    assert method == "flow" or found.evaluations.item() == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 40])
def test_small_budgets(make_case, method, limit):
    case = make_case(dynamics="leaky")
    found = find_equilibrium(case.system, case.x, method, max_evaluations=limit)
    assert not found.converged.any()
    assert (found.evaluations <= limit).all()
    if method in ("map", "anderson"):
        assert (found.evaluations == limit).all()
    torch.testing.assert_close(found.residual, case.system.residual(found.x))


@pytest.mark.parametrize("seed", range(3))
def test_newton_converges_quadratically_where_the_force_is_smooth(make_case, seed):
    case = make_case(
        dynamics="leaky", hopfield="softmax", batch=1, dim=9, tokens=5, weights=1.5, seed=seed
    )
    found = find_equilibrium(case.system, case.x, "newton-krylov", tol=1e-12)
    assert found.converged.all() and spectrum(case.system, found.x)[0] > 0
    relative = found.history[:, 0] / case.system.force(found.x).norm()
    digits = [d for d in (-relative.log10()).tolist() if d < 14]  # before rounding
    # r' = C r^2: the gain in digits doubles with every step, whatever C
    first, second = (b - a for a, b in pairwise(digits[-3:]))
    assert second / first == pytest.approx(2, abs=0.3), digits


def test_lanczos_sees_the_lowest_curvature(make_case):
    case = make_case(dynamics="leaky", batch=2, dim=6, tokens=3, weights=1.5, hopfield="softmax")
    for law in ("leaky", "sphere"):
        system = case.system.with_dynamics(law)
        found = find_equilibrium(system, case.x)
        whole, _ = lowest_curvature(evaluate(system, found.x), 18)
        few, direction = lowest_curvature(evaluate(system, found.x), 4)
        leaky = find_equilibrium(case.system, case.x).x
        exact = torch.stack([spectrum(case.system, x[None])[0] for x in leaky])
        torch.testing.assert_close(whole, exact, rtol=1e-4, atol=1e-4)
        assert (few >= whole - 1e-10).all()
        point = evaluate(system, found.x)
        image = direction - point.derivative(direction)
        rayleigh = (image * point.metric(direction)).sum((1, 2))
        torch.testing.assert_close(rayleigh, few, rtol=1e-9, atol=1e-9)


def test_no_graph_is_kept(make_case):
    case = make_case(dynamics="leaky")
    case.system.requires_grad_(True)
    found = find_equilibrium(case.system, case.x.requires_grad_(True))
    assert not found.x.requires_grad and not found.energy.requires_grad


# --- systems without an energy, broken systems, wrong input -------------------------------------


@pytest.mark.parametrize("law", ["leaky", "sphere"])
def test_without_an_energy_the_residual_guards(make_case, close, law):
    case = make_case(dynamics=law, weights=1.5)
    blind = System(case.system.lagrangian, ForceOnly(case.system.interaction), law)
    for method in ("map", "anderson", "newton-krylov"):
        known = find_equilibrium(case.system, case.x, method)
        found = find_equilibrium(blind, case.x, method)
        assert known.safeguard == "energy" and found.safeguard == "residual"
        assert found.converged.all() and found.energy is None
        close(case.system.interaction_energy(found.x), known.energy, 1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_broken_sample_is_a_status_and_spares_the_others(make_case, method):
    case = make_case(dynamics="leaky", batch=2, hopfield="power", power=5, weights=1.5)
    good = find_equilibrium(case.system, case.x[:1], method)
    x = case.x.clone()
    x[1] = 1e200  # the variance overflows
    found = find_equilibrium(case.system, x, method)
    assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    assert found.converged.tolist() == [True, False]
    torch.testing.assert_close(found.x[0], good.x[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(EquilibriumError, match=r"samples \[1\]") as error:
        find_equilibrium(case.system, x, method, throw=True)
    assert torch.equal(error.value.equilibrium.converged, found.converged)


def test_throw_without_cause_returns(make_case):
    case = make_case(dynamics="leaky", weights=1.5)
    assert find_equilibrium(case.system, case.x, throw=True).converged.all()
    with pytest.raises(EquilibriumError, match="after up to 3 evaluations"):
        find_equilibrium(case.system, case.x, max_evaluations=3, throw=True)


@pytest.mark.parametrize("method", ["map", "anderson", "newton-krylov"])
def test_float32(make_case, method):
    case = make_case(dynamics="leaky", weights=1.5)
    system, x0 = case.system.float(), case.x.float()
    found = find_equilibrium(system, x0, method, tol=1e-3)
    assert found.converged.all() and found.x.dtype == torch.float32
    with pytest.raises(ValueError, match=r"tol: .*float32"):
        find_equilibrium(system, x0, method)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("method", "broyden", ValueError),
        ("tol", 0.0, ValueError),
        ("tol", "small", TypeError),
        ("tol", math.nan, ValueError),
        ("damping", 0.0, ValueError),
        ("damping", 1.5, ValueError),
        ("max_evaluations", 0, ValueError),
        ("max_evaluations", 10.0, TypeError),
        ("memory", 0, ValueError),
        ("probe", -1, ValueError),
    ],
)
def test_wrong_arguments_are_named(make_case, name, value, error):
    case = make_case()
    with pytest.raises(error, match=f"^{name}: "):
        find_equilibrium(case.system, case.x, **{name: value})


def test_wrong_states_are_named(make_case):
    case = make_case()
    for x0, error in [
        (case.x[0], ValueError),
        (case.x[..., :-1], ValueError),
        (case.x.float(), TypeError),
        (case.x.numpy(), TypeError),
        (case.x * torch.tensor(math.nan), ValueError),
    ]:
        with pytest.raises(error, match=r"^x0: "):
            find_equilibrium(case.system, x0)
