"""gradient="checkpoint": the direct gradient to rounding, in memory that hardly grows."""

import itertools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchdiffeq import odeint

import etdyn as ed
from etdyn.solve.backsolve import GradientError
from etdyn.solve.checkpointing import StepLog, checkpointed_iterate, replay
from etdyn.solve.engine import grid, solver_options
from etdyn.solve.euler import iterate

KINDS = tuple(itertools.product(("relu", "power", "softmax"), (False, True)))
ADAPTIVE = ("adaptive_heun", "bosh3", "dopri5", "dopri8", "fehlberg2")
ONE_STEP = ("euler", "midpoint", "heun2", "heun3", "rk4")


class Contracting(ed.System):
    """x' = -x W with W symmetric, eigenvalues from 0.1 to 8; the energy is along for the ride."""

    def __init__(self, dim=6, seed=0):
        super().__init__(ed.LayerNorm(dim), ed.Hopfield(dim, 3))
        random = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)).double()
        basis = torch.linalg.qr(random).Q
        rates = torch.linspace(0.1, 8.0, dim, dtype=torch.float64)
        self.double().requires_grad_(False)
        self.weight = nn.Parameter(basis * rates @ basis.T)

    def velocity(self, t, x):
        return -x @ self.weight


class RightHandSide(nn.Module):
    """A field as torchdiffeq wants it, without the statuses of `solve`."""

    def __init__(self, system):
        super().__init__()
        self.system = system

    def forward(self, t, x):
        return self.system.velocity(t, x)


def options_of(system, method, times):
    options = solver_options(system, method, times)
    if method.fixed_step:
        options["grid_constructor"] = lambda func, x, t: grid(method, t)
    return options


def direct(system, x0, times, method):
    return odeint(
        RightHandSide(system), x0, times, method=method.name, rtol=method.rtol, atol=method.atol,
        options=options_of(system, method, times),
    )  # fmt: skip


def checkpoint(system, x0, times, method):
    field, log = RightHandSide(system), StepLog(method)
    log.attach(field)
    options = options_of(system, method, times)
    with torch.no_grad():
        x = odeint(
            field, x0, times, method=method.name, rtol=method.rtol, atol=method.atol,
            options=options,
        )  # fmt: skip
    options = solver_options(system, method, times)
    return replay(system.velocity, x0, times, method, log, options=options, expected=x), x


def gradients(x, system, x0):
    """Of a loss that looks at every saved state, with respect to parameters and start."""
    wave = torch.cos(torch.arange(x.numel(), dtype=x.dtype, device=x.device)).reshape(x.shape)
    wanted = [p for p in system.parameters() if p.requires_grad]
    found = torch.autograd.grad((wave * x).sum(), [x0, *wanted], allow_unused=True)
    return [torch.zeros_like(w) if f is None else f
            for w, f in zip([x0, *wanted], found, strict=True)]  # fmt: skip


def assert_same(close, found, wanted, rel=1e-12):
    for a, b in zip(found, wanted, strict=True):
        close(a, b, rel)


@pytest.fixture
def case(make_case):
    def make(**sizes):
        made = make_case(**{"eps": 1e-2, "weights": 0.7, **sizes})
        made.system.requires_grad_(True)
        return made.system, made.system.prepare(made.x).detach().requires_grad_(True)

    return make


# --- the same gradient ---------------------------------------------------------------------------


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
@pytest.mark.parametrize(("hopfield", "self_attention"), KINDS)
def test_descent_has_the_direct_gradient(case, close, dynamics, hopfield, self_attention):
    system, x0 = case(dynamics=dynamics, hopfield=hopfield, self_attention=self_attention)
    wanted = torch.stack(list(iterate(system, x0, 0.05, 20)))
    found = torch.stack(checkpointed_iterate(system, x0, 0.05, 20))
    assert torch.equal(found, wanted)
    assert_same(close, gradients(found, system, x0), gradients(wanted, system, x0))


@pytest.mark.parametrize("name", ONE_STEP)
def test_fixed_steps_have_the_direct_gradient(case, close, name):
    for dynamics, (hopfield, self_attention) in zip(
        ("et", "leaky", "sphere"), KINDS[ONE_STEP.index(name) % 2 :: 2], strict=True
    ):
        system, x0 = case(
            dynamics=dynamics, hopfield=hopfield, self_attention=self_attention, batch=1, tokens=3
        )
        times = torch.tensor([0.0, 0.33, 0.7], dtype=torch.float64)
        method = ed.Method(name, 0.05)
        wanted, (found, x) = (
            direct(system, x0, times, method),
            checkpoint(system, x0, times, method),
        )
        assert torch.equal(found, wanted)
        assert torch.equal(found, x)
        assert_same(close, gradients(found, system, x0), gradients(wanted, system, x0))


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_steps_are_the_same_steps(case, close, name):
    # With first_step given: else torchdiffeq's gradient has a part that comes from its choice of
    # the first step, as large as the error of the solve.
    tolerance = 1e-3 if name in ("adaptive_heun", "fehlberg2", "bosh3") else 1e-6
    for dynamics in ("et", "leaky", "sphere"):
        system, x0 = case(dynamics=dynamics, hopfield="softmax", batch=1, tokens=3)
        times = torch.tensor([0.0, 0.01, 0.02, 0.7, 2.0], dtype=torch.float64)
        method = ed.Method(name, rtol=tolerance, atol=tolerance, options={"first_step": 0.02})
        wanted, (found, x) = (
            direct(system, x0, times, method),
            checkpoint(system, x0, times, method),
        )
        assert torch.equal(found, wanted)
        assert torch.equal(found, x)
        assert_same(close, gradients(found, system, x0), gradients(wanted, system, x0))


def test_free_first_step_costs_no_more_than_the_tolerance(case, close):
    system, x0 = case(hopfield="softmax")
    times = torch.tensor([0.0, 2.0], dtype=torch.float64)
    method = ed.Method("dopri5", rtol=1e-8, atol=1e-10)
    wanted, (found, _) = direct(system, x0, times, method), checkpoint(system, x0, times, method)
    assert torch.equal(found, wanted)
    assert_same(close, gradients(found, system, x0), gradients(wanted, system, x0), rel=1e-7)


@pytest.mark.parametrize(("name", "step"), [("rk4", 0.05), ("euler", 0.05), ("dopri5", None)])
def test_contractive_flow(close, name, step):
    """Lambda T = 80, where the state cannot be integrated backwards (A-F9)."""
    system = Contracting()
    x0 = torch.randn(3, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x0.requires_grad_(True)
    times = torch.tensor([0.0, 10.0], dtype=torch.float64)
    options = {} if step else {"first_step": 0.01}
    method = ed.Method(name, step, options=options)
    wanted, (found, _) = direct(system, x0, times, method), checkpoint(system, x0, times, method)
    assert torch.equal(found, wanted)
    assert_same(close, gradients(found, system, x0), gradients(wanted, system, x0))
    # x(T) = x0 expm(-W T)
    exact = torch.linalg.matrix_exp(-10.0 * system.weight)
    close(found[-1], x0 @ exact, 1e-5 if name != "euler" else 0.1)


def test_noise_is_drawn_once(case, close):
    system, x0 = case(hopfield="softmax")
    generator = torch.Generator().manual_seed(3)
    wanted = torch.stack(list(iterate(system, x0, 0.05, 20, noise=0.1, generator=generator)))
    after = generator.get_state()
    generator.manual_seed(3)
    found = torch.stack(checkpointed_iterate(system, x0, 0.05, 20, noise=0.1, generator=generator))
    assert torch.equal(found, wanted)
    assert_same(close, gradients(found, system, x0), gradients(wanted, system, x0))
    assert torch.equal(generator.get_state(), after)
    torch.manual_seed(4)
    wanted = torch.stack(list(iterate(system, x0, 0.05, 20, noise=0.1)))
    torch.manual_seed(4)
    found = torch.stack(checkpointed_iterate(system, x0, 0.05, 20, noise=0.1))
    assert_same(close, gradients(found, system, x0), gradients(wanted, system, x0))


@pytest.mark.parametrize("steps", [0, 1, 8, 9, 64, 65])
def test_any_number_of_steps(case, close, steps):
    system, x0 = case(batch=1, tokens=2)
    wanted = [x0, *iterate(system, x0, 0.05, steps)]
    found = [x0, *checkpointed_iterate(system, x0, 0.05, steps)]
    assert_same(close, found, wanted, rel=0.0)
    assert_same(close, gradients(torch.stack(found), system, x0),
                gradients(torch.stack(wanted), system, x0))  # fmt: skip


def test_second_backward(case, close):
    system, x0 = case(batch=1, tokens=2)
    x = checkpointed_iterate(system, x0, 0.05, 20)[-1]
    first, *_ = torch.autograd.grad(x.square().sum(), [x0], retain_graph=True)
    second, *_ = torch.autograd.grad(x.square().sum(), [x0])
    close(second, first, 0.0)


# --- memory --------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of all tensors alive that operations made under this mode; `peak` of them."""

    def __init__(self):
        super().__init__()
        self.held = {}
        self.total = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                old = self.held.get(storage._cdata)
                if old is None or old[0].expired():
                    self.total += storage.nbytes() - (0 if old is None else old[1])
                    self.held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self.total > self.peak:  # counts the dead too, so look again
            self.peak = max(self.peak, self.now())
        return out

    def now(self):
        self.held = {k: v for k, v in self.held.items() if not v[0].expired()}
        self.total = sum(size for _, size in self.held.values())
        return self.total


def bytes_held(run, system, x0):
    """Bytes that autograd saved in the forward pass, and that plus the peak of the backward one."""
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(system, x0).square().sum()
    parameters = {p.untyped_storage()._cdata for p in system.parameters()}
    held = sum(size for storage, size in saved.items() if storage not in parameters)
    with Live() as live:
        loss.backward()
    return held, held + live.peak


def check_memory(make_system):
    def run(steps):
        system, x0 = make_system()
        times = torch.tensor([0.0, 0.01 * steps], dtype=torch.float64)
        method = ed.Method("euler", 0.01)
        return bytes_held(lambda s, x: checkpoint(s, x, times, method)[0][-1], system, x0)

    few_held, few_peak = run(12)
    many_held, many_peak = run(1200)
    print(f"\n12 steps {few_held} {few_peak}, 1200 steps {many_held} {many_peak}")
    assert many_held < 2 * few_held
    assert many_peak < 2 * few_peak


def test_memory_from_12_to_1200_steps():
    """Batch 2, 8 tokens, 16 features, 32 relu memories; Euler, float64, one save time."""

    def make():
        torch.manual_seed(0)
        system = ed.System(ed.LayerNorm(16), ed.Hopfield(16, 32), "leaky").double()
        x0 = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
        return system, x0

    check_memory(make)


@pytest.mark.slow
def test_memory_with_attention(case):
    """Batch 2, 8 tokens, 16 features, 2 heads of 8, 32 relu memories: a minute."""
    check_memory(lambda: case(dim=16, heads=2, head_dim=8, memories=32, batch=2, tokens=8))


def test_direct_memory_grows(case):
    """What the measurement above would show without checkpoints."""

    def run(steps):
        system, x0 = case(batch=1, tokens=2)
        return bytes_held(lambda s, x: list(iterate(s, x, 0.01, steps))[-1], system, x0)

    assert run(48)[0] > 3 * run(12)[0]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["explicit_adams", "implicit_adams", "fixed_adams"])
def test_multistep_methods_are_refused(name):
    with pytest.raises(ValueError, match="method: expected a Runge-Kutta method"):
        StepLog(ed.Method(name, 0.1))


def test_scipy_is_refused():
    with pytest.raises(ValueError, match="does not report its steps"):
        StepLog(ed.Method("scipy_solver"))


def test_a_random_velocity_is_noticed(case):
    system, x0 = case()
    velocity = system.velocity
    system.velocity = lambda t, x: velocity(t, x) + 1e-3 * torch.randn_like(x)
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    with pytest.raises(GradientError, match="is the velocity random"):
        checkpoint(system, x0, times, ed.Method("rk4", 0.1))
