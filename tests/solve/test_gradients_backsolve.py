"""gradient="backsolve": right on contractive flows, and silent about nothing."""

import pytest
import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint

import etdyn as ed
from etdyn.solve.backsolve import AnchorLog, BacksolveReport, GradientError, backsolve
from etdyn.solve.engine import grid, solver_options


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


class Field(nn.Module):
    """A field as torchdiffeq wants it, that counts."""

    def __init__(self, system):
        super().__init__()
        self.system, self.evaluations = system, 0

    def forward(self, t, x):
        self.evaluations += 1
        return self.system.velocity(t, x)


def options_of(system, method, times):
    options = solver_options(system, method, times)
    if method.fixed_step:
        options["grid_constructor"] = lambda func, x, t: grid(method, t)
    return options


def integrate(field, x0, times, method):
    return odeint(
        field, x0, times, method=method.name, rtol=method.rtol, atol=method.atol,
        options=options_of(field.system, method, times),
    )  # fmt: skip


def through(system, x0, times, method, spacing=1.0, **kwargs):
    field, report = Field(system), BacksolveReport()
    anchors = AnchorLog(system.velocity, method, spacing, report)
    anchors.attach(field)
    with torch.no_grad():
        x = integrate(field, x0, times, method)
    x = backsolve(field, x0, times, x, method=method, anchors=anchors, report=report, **kwargs)
    return x, report, field


def loss(x):
    """Looks at every saved state."""
    wave = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)
    return (wave * x).sum()


def gradients(x, system, x0):
    wanted = [p for p in system.parameters() if p.requires_grad]
    return torch.autograd.grad(loss(x), [x0, *wanted])


def worst(found, wanted):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def contracting():
    x0 = torch.randn(3, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Contracting(), x0.requires_grad_(True), torch.tensor([0.0, 10.0], dtype=torch.float64)


@pytest.fixture
def case(make_case):
    def make(**sizes):
        made = make_case(**{"eps": 1e-2, "tokens": 3, "dim": 6, "memories": 8, **sizes})
        made.system.requires_grad_(True)
        return made.system, made.system.prepare(made.x).detach().requires_grad_(True)

    return make


# --- right where the plain adjoint is not --------------------------------------------------------


def test_contractive_flow(contracting):
    """Lambda T = 80 with two save times: A-F9."""
    system, x0, times = contracting
    exact = torch.stack([x0, x0 @ torch.linalg.matrix_exp(-10.0 * system.weight)])
    wanted = gradients(exact, system, x0)
    method = ed.Method("dopri5", rtol=1e-6, atol=1e-9)
    x, report, field = through(system, x0, times, method)
    forward = field.evaluations
    assert worst(gradients(x, system, x0), wanted) < 1e-6
    assert report.drift < 1e-5
    assert 20 < report.anchors < 150
    assert report.rate == pytest.approx(8.0, rel=1e-2)
    assert 0 < field.evaluations - forward < 4 * forward
    plain = odeint_adjoint(
        Field(system), x0, times, method="dopri5", rtol=1e-6, atol=1e-9,
        options=options_of(field.system, method, times), adjoint_options={"norm": "seminorm"},
    )  # fmt: skip
    assert worst(gradients(plain, system, x0), wanted) > 1e6


@pytest.mark.parametrize(
    ("name", "step", "bound"), [("rk4", 0.02, 1e-5), ("implicit_adams", 0.02, 1e-4)]
)
def test_contractive_flow_in_fixed_steps(contracting, name, step, bound):
    system, x0, _ = contracting
    times = torch.tensor([0.0, 3.0], dtype=torch.float64)
    exact = torch.stack([x0, x0 @ torch.linalg.matrix_exp(-3.0 * system.weight)])
    x, report, _ = through(system, x0, times, ed.Method(name, step))
    assert worst(gradients(x, system, x0), gradients(exact, system, x0)) < bound
    assert 10 < report.anchors < 50


def test_drift_is_refused(contracting):
    system, x0, times = contracting
    method = ed.Method("dopri5", rtol=1e-7, atol=1e-9)
    x, report, _ = through(system, x0, times, method, spacing=1e9)  # no anchor: as torchdiffeq
    assert report.anchors == 1
    with pytest.raises(GradientError, match=r"back to t = 0 the state of sample \d is off by"):
        gradients(x, system, x0)
    assert report.drift > 1e-3
    x, report, _ = through(system, x0, times, method, max_drift=1e-12)
    with pytest.raises(GradientError, match="max_drift 1e-12"):
        gradients(x, system, x0)


def test_a_backward_step_limit_is_refused(case):
    system, x0 = case(hopfield="softmax")
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    x, *_ = through(system, x0, times, ed.Method("dopri5", rtol=1e-9), spacing=1e9, max_steps=2)
    with pytest.raises(GradientError, match="could not be integrated"):
        gradients(x, system, x0)


# --- agreement -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
def test_smooth_memories_agree(case, dynamics):
    """With the direct gradient and with central differences, at rtol 1e-10."""
    system, x0 = case(
        hopfield="softmax", dynamics=dynamics, self_attention=dynamics == "leaky", batch=1
    )
    times = torch.tensor([0.0, 0.2, 0.5], dtype=torch.float64)
    # not dopri8: torchdiffeq interpolates its long steps to save times by a quartic, 1e-7 off
    method = ed.Method("dopri5", rtol=1e-10, atol=1e-12)
    x, report, _ = through(system, x0, times, method)
    wanted = gradients(integrate(Field(system), x0, times, method), system, x0)
    found = gradients(x, system, x0)
    assert worst(found, wanted) < 1e-6
    assert report.drift < 1e-7
    generator = torch.Generator().manual_seed(5)
    variables = [x0, *system.parameters()]
    towards = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in variables]
    difference = 0.0
    for steps, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):  # order 4
        with torch.no_grad():
            for variable, way in zip(variables, towards, strict=True):
                variable.add_(way / way.norm(), alpha=steps * 1e-3)
            value = float(loss(integrate(Field(system), x0, times, method)))
            for variable, way in zip(variables, towards, strict=True):
                variable.add_(way / way.norm(), alpha=-steps * 1e-3)
        difference += weight * value / 12e-3
    along = sum(float((g * way).sum() / way.norm()) for g, way in zip(found, towards, strict=True))
    size = max(float(g.norm()) for g in found)
    assert abs(along - difference) < 1e-6 * size


def test_kinks_of_relu_memories(case):
    """Where a memory switches, the Hessian jumps, and the direct gradient depends on where in its
    step that happens: its error falls like a root of the tolerance. That of backsolve, which
    locates the kinks by small steps, falls with the tolerance.
    """
    system, x0 = case(hopfield="relu", dynamics="leaky", batch=1, seed=1)
    variables = [x0, *system.parameters()]
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    direct, back = {}, {}
    for rtol in (1e-4, 1e-6):
        method = ed.Method("dopri5", rtol=rtol, atol=rtol * 1e-2)
        x, *_ = through(system, x0, times, method)
        back[rtol] = gradients(x, system, x0)
        direct[rtol] = gradients(integrate(Field(system), x0, times, method), system, x0)
    size = sum(g.square().sum() for g in back[1e-6]).sqrt()
    exact = ed.Method("dopri8", rtol=1e-11, atol=1e-13)
    values = []
    with torch.no_grad():
        for h in (1e-5, -1e-5):
            for variable, g in zip(variables, back[1e-6], strict=True):
                variable.add_(g / size, alpha=h)
            values.append(loss(integrate(Field(system), x0, times, exact)))
            for variable, g in zip(variables, back[1e-6], strict=True):
                variable.add_(g / size, alpha=-h)
    assert float((values[0] - values[1]) / 2e-5 / size) == pytest.approx(1.0, abs=1e-4)
    apart = {rtol: worst(direct[rtol], back[rtol]) for rtol in direct}
    print("\nrelu, direct from backsolve:", apart)
    assert 1e-5 < apart[1e-6] < apart[1e-4] < 0.1


def test_small_losses_and_idle_samples(case):
    """The adjoint's tolerance does not depend on the size of the loss."""
    system, x0 = case(hopfield="softmax")
    times = torch.tensor([0.0, 0.5], dtype=torch.float64)
    method = ed.Method("dopri5", rtol=1e-8, atol=1e-8)
    key = system.attention.key
    found = []
    for size in (1.0, 1e-12):
        x, *_ = through(system, x0, times, method)
        (gradient,) = torch.autograd.grad(size * x[-1, 0].square().sum(), [key])
        found.append(gradient / size)
    assert worst(found[:1], found[1:]) < 1e-10


# --- bookkeeping ---------------------------------------------------------------------------------


def test_backward_twice_and_second_derivative(case):
    system, x0 = case(hopfield="softmax")
    times = torch.tensor([0.0, 0.5], dtype=torch.float64)
    x, *_ = through(system, x0, times, ed.Method("rk4", 0.1))
    (first,) = torch.autograd.grad(x[-1].square().sum(), [x0], retain_graph=True)
    (second,) = torch.autograd.grad(x[-1].square().sum(), [x0], retain_graph=True)
    assert torch.equal(first, second)
    (first,) = torch.autograd.grad(x[-1].square().sum(), [x0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_parameters_changed_in_between(case):
    system, x0 = case(hopfield="softmax")
    times = torch.tensor([0.0, 0.5], dtype=torch.float64)
    x, *_ = through(system, x0, times, ed.Method("rk4", 0.1))
    with torch.no_grad():
        system.attention.key.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x[-1].sum().backward()


def test_wrong_input(case):
    system, _ = case()
    with pytest.raises(ValueError, match="method: expected one that reports its steps"):
        AnchorLog(system.velocity, ed.Method("scipy_solver"))
    with pytest.raises(ValueError, match="spacing: expected"):
        AnchorLog(system.velocity, ed.Method("dopri5"), spacing=0.0)
