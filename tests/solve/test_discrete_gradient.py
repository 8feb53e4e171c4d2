"""The discrete gradient (A-F8): its identity to rounding, and energy that falls at every step."""

import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import etdyn as ed
from etdyn import Attention, EnergyTransformer, LayerNorm, System
from etdyn.datasets import digits
from etdyn.problems import LinearEnergy
from etdyn.solve.descent import GuardedEuler
from etdyn.solve.discrete_gradient import DiscreteGradient, discrete_gradient
from etdyn.solve.implicit import MatrixFreeMidpoint
from etdyn.solve.inner import InnerMethod

DYNAMICS = ["et", "leaky", "sphere"]
STEPS = torch.logspace(-3, 3, 13, dtype=torch.float64)
EPS = torch.finfo(torch.float64).eps
SHIPPED = Path(__file__).resolve().parents[2] / "data/digits.safetensors"


def dot(a, b):
    return (a * b).sum((1, 2))


def repulsive():
    """ET-F24: tokens near consensus that repel each other."""
    dim, tokens = 12, 8
    attention = Attention(dim, 1, dim, beta=1e-3).double()
    with torch.no_grad():
        attention.query.copy_(torch.eye(dim))
        attention.key.copy_(-torch.eye(dim))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, 1, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(STEPS), tokens, dim, generator=generator, dtype=torch.float64)
    system = System(LayerNorm(dim).double(), attention)
    return system, 0.1 * system.lagrangian.normalise(direction + 1e-3 * noise)


def trained():
    """The shipped model, from half-masked digits."""
    model, generator = ed.load_model(SHIPPED).double(), torch.Generator().manual_seed(0)
    images = digits().test[: len(STEPS)].double()
    replaced = torch.rand(len(images), 16, generator=generator) < 0.5
    return model.system, model.tokens(images, replaced)


@pytest.fixture(scope="module")
@torch.no_grad()
def systems(make_case, golden):
    """name -> (system, a start for every step size)."""

    def official(name):
        arrays = golden(name)
        chosen = {key: arrays[key] for key in ("Wq", "Wk", "Xi", "gamma", "delta")}
        system = EnergyTransformer.from_official(
            chosen, beta=float(arrays["beta"]), eps=float(arrays["eps"])
        )
        x0, generator = torch.from_numpy(arrays["x0"]), torch.Generator().manual_seed(7)
        noise = torch.randn(len(STEPS), *x0.shape, generator=generator, dtype=torch.float64)
        return system, x0 + 0.5 * noise

    def random(**sizes):
        case = make_case(batch=len(STEPS), **sizes)
        return case.system, case.x

    def repelling(**sizes):
        system, x = random(**sizes)
        system.attention.key.copy_(-system.attention.query)
        return system, x

    return {
        "random": random(seed=1),
        "random, large weights": random(seed=2, weights=3.0),
        "random, softmax": random(seed=3, hopfield="softmax", weights=3.0),
        "repelling": repelling(seed=4),
        "repelling, large weights": repelling(seed=5, weights=3.0),
        "near consensus": repulsive(),
        "small": official("et_block_small"),
        "sharp": official("et_block_sharp"),
        "trained": trained(),
    }


@settings(max_examples=12)
@given(data=st.data())
@torch.no_grad()
def test_the_identity_holds_to_rounding_at_every_distance(make_case, data):
    """Dbar E . (g+ - g) = E(g+) - E(g), and the same from the other end."""
    case = make_case(data)
    interaction, g = case.system.interaction, case.system.activation(case.x)
    far = case.system.activation(case.randn(*g.shape))
    for distance in (1.0, 1e-2, 1e-5, 1e-8, 1e-11, 0.0):
        g_next = torch.lerp(g, far, distance)
        slope = discrete_gradient(interaction, g, g_next)
        before, after = (interaction.energy(p, relative=True) for p in (g, g_next))
        size = before.abs().maximum(after.abs())
        # what cancels in the sums, beside the energies themselves
        inner = (slope.abs() * (g_next - g).abs()).sum((1, 2))
        inner += dot(interaction.force(g).abs(), g.abs())
        error = (dot(slope, g_next - g) - (after - before)).abs()
        assert (error <= 64 * EPS * (size + inner)).all()
        back = discrete_gradient(interaction, g_next, g)
        assert (slope - back).abs().max() <= 1e-6 * slope.abs().max()


@settings(max_examples=12)
@given(data=st.data())
@torch.no_grad()
def test_it_tends_to_the_gradient(make_case, data):
    case = make_case(data, hopfield="softmax")
    interaction, g = case.system.interaction, case.system.activation(case.x)
    u, force = case.randn(*g.shape), interaction.force(g)
    for distance in (1e-4, 1e-6, 0.0):
        slope = discrete_gradient(interaction, g, g + distance * u)
        curved = interaction.hvp(g, u).abs().max() + 1
        assert (slope + force).abs().max() <= 10 * distance * curved + 1e-12 * curved


@pytest.mark.parametrize("hopfield", ["relu", "softmax"])
@torch.no_grad()
def test_the_energy_balance_of_a_published_step_is_exact(make_case, hopfield):
    """E(g+) - E(g) = -(x+ - x).(g+ - g) / h, nothing lost and nothing added."""
    case = make_case(batch=len(STEPS), hopfield=hopfield, seed=6)
    system, x = case.system, case.x
    for _ in range(3):
        report = DiscreteGradient().step(system, x, STEPS)
        dx, dg = report.x - x, system.activation(report.x) - system.activation(x)
        before, after = system.energy(x), system.energy(report.x)
        assert not report.shrunk.any()
        assert (after - before + dot(dx, dg) / STEPS).abs().max() < 1e-12 * before.abs().min()
        x = report.x


@torch.no_grad()
def walk(stepper, system, x, steps):
    """Rises above 1e-12 |E|, shrunk and failed steps, and steps, at all step sizes."""
    x = system.prepare(x)
    counts = torch.zeros(4, dtype=torch.int64)
    for _ in range(steps):
        report = stepper.step(system, x, STEPS)
        before, after = system.energy(x), system.energy(report.x)
        rises = after - before > 1e-12 * before.abs()
        counts += torch.stack([
            rises.sum(), report.shrunk.sum(), report.failed.sum(), torch.tensor(len(x))
        ])  # fmt: skip
        x = report.x
    return counts


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_the_energy_never_rises_from_tiny_to_huge_steps(systems, dynamics):
    total = torch.zeros(4, dtype=torch.int64)
    for name in ("random", "random, softmax", "repelling, large weights", "sharp"):
        system, x = systems[name]
        total += walk(DiscreteGradient(), system.with_dynamics(dynamics), x, 3)
    rises, shrunk, failed, steps = total.tolist()
    assert rises == failed == 0
    assert shrunk <= 0.01 * steps


def test_the_implicit_midpoint_raises_it_so_these_tests_can_fail(systems):
    system, x = systems["random, softmax"]
    rises, *_ = walk(MatrixFreeMidpoint(), system.with_dynamics("leaky"), x, 3).tolist()
    assert rises > 0


@pytest.mark.slow
@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("stepper", [DiscreteGradient, GuardedEuler])
def test_the_energy_never_rises_in_two_thousand_steps(systems, stepper, dynamics):
    total = torch.zeros(4, dtype=torch.int64)
    for system, x in systems.values():
        total += walk(stepper(), system.with_dynamics(dynamics), x, 20)
    rises, shrunk, failed, steps = total.tolist()
    print(f"\n{stepper.name}, {dynamics}: {steps} steps, {rises} rises, {shrunk} shrunk")
    assert steps >= 2000
    assert rises == failed == 0
    if stepper is DiscreteGradient:
        assert shrunk <= 0.01 * steps


@pytest.mark.parametrize("dynamics", DYNAMICS)
@torch.no_grad()
def test_a_huge_step_is_the_self_consistent_one(make_case, close, dynamics):
    """As h grows, g+ becomes the activation of the mean force: x is forgotten."""
    case = make_case(dynamics=dynamics, eps=1e-2, seed=8)
    system, x = case.system, case.system.prepare(case.x)
    report = DiscreteGradient().step(system, x, torch.full((2,), 1e9, dtype=x.dtype))
    assert not report.shrunk.any()
    g, g_next = system.activation(x), system.activation(report.x)
    mean_force = -discrete_gradient(system.interaction, g, g_next)
    scale = 1e9 if dynamics == "et" else 1.0  # x+ is h times the mean force there
    close(g_next, system.activation(scale * mean_force), 1e-7)


@torch.no_grad()
def test_the_leaky_step_damps_what_is_linear_like_pade(close):
    """The mean of a token obeys dm/dt = f - m: m+ - f = (m - f) / (1 + h + h^2/2)."""
    v = torch.full((1, 5), 2.0, dtype=torch.float64)
    system = System(LayerNorm(5).double(), LinearEnergy(v), "leaky")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1, 5, generator=generator, dtype=torch.float64)
    h = torch.tensor([1e-2, 1.0, 30.0, 1e5], dtype=torch.float64)
    moved = DiscreteGradient().step(system, x, h).x
    factor = (1 + h + h * h / 2)[:, None]
    close(moved.mean(-1) - 2, (x.mean(-1) - 2) / factor, 1e-11, scale=1e-3)


@torch.no_grad()
def test_a_step_that_cannot_be_solved_fails_visibly():
    """A tolerance below rounding cannot be met."""
    system, x = repulsive()
    one, h = x[-1:], torch.full((1,), 1e3, dtype=torch.float64)
    failed = DiscreteGradient(tol=1e-19, halvings=0).step(system, one, h)
    assert failed.failed.all() and not failed.shrunk.any()
    assert torch.equal(failed.x, one) and (failed.taken == 0).all()
    assert (failed.inner_method == InnerMethod.NEWTON_KRYLOV).all()


@torch.no_grad()
def test_an_inner_solve_that_fails_is_retried_with_half_the_step(make_case, monkeypatch):
    """Where no step above 0.3 is solved, 1.0 becomes 0.25, and its cost is counted."""
    case = make_case()
    implicit = importlib.import_module("etdyn.solve.implicit")
    solved, tried = implicit.fixed_point, []

    def stubborn(equation, guess, tol):
        tried.append(float(equation.h[0]))
        found = solved(equation, guess, tol)
        found.converged.logical_and_(equation.h <= 0.3)
        return found

    monkeypatch.setattr(implicit, "fixed_point", stubborn)
    h = torch.tensor([1.0, 0.1], dtype=torch.float64)
    report = DiscreteGradient().step(case.system, case.x, h)
    assert report.taken.tolist() == [0.25, 0.1]
    assert report.shrunk.tolist() == [True, False] and not report.failed.any()
    assert tried == [1.0, 0.5, 0.25, 0.5]
    monkeypatch.undo()
    same = DiscreteGradient().step(case.system, case.x, report.taken)
    assert (report.x - same.x).abs().max() < 1e-11
    assert report.evaluations[0] > 2 * same.evaluations[0]


@torch.no_grad()
def test_the_spherical_midpoint_is_a_mirror(make_case, close):
    """x+ + x lies along the middle: the same step backwards leads back (symmetry)."""
    case = make_case(dynamics="sphere", hopfield="softmax")
    system, x = case.system, case.system.prepare(case.x)
    h = torch.full((2,), 0.05, dtype=torch.float64)
    moved = MatrixFreeMidpoint().step(system, x, h).x
    middle = system.prepare(x + moved)
    close(moved - x, h[:, None, None] * system.velocity(0, middle), 1e-10)


@pytest.mark.parametrize("dynamics", ["et", "leaky"])
@torch.no_grad()
def test_the_implicit_midpoint_is_what_it_says(make_case, close, dynamics):
    case = make_case(dynamics=dynamics, batch=3)
    h = torch.tensor([0.01, 1.0, 50.0], dtype=torch.float64)
    report = MatrixFreeMidpoint().step(case.system, case.x, h)
    assert not report.shrunk.any()
    middle = 0.5 * (case.x + report.x)
    step = h[:, None, None] * case.system.velocity(0, middle)
    close(report.x - case.x, step, 1e-11, scale=case.x)
