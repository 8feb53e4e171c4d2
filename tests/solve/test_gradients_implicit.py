"""gradient="implicit": the gradient of an equilibrium, by one linear solve."""

from pathlib import Path

import pytest
import torch

import etdyn as ed
from etdyn.datasets import digits
from etdyn.solve.backsolve import GradientError
from etdyn.solve.implicit_gradient import ImplicitReport, implicit
from etdyn.tasks import evaluation_masks

UNROLLED = 3000  # steps of the leaky map


def at_equilibrium(system, x, damping=1.0):
    with torch.no_grad():
        for _ in range(UNROLLED):
            new = system.map(x, damping)
            if bool((new - x).abs().amax() <= 4e-16 * new.abs().amax()):
                return new
            x = new
    return x


def gradients(x, system, **kwargs):
    wave = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)
    return torch.autograd.grad((wave * x).sum(), list(system.parameters()), **kwargs)


def unrolled(system, x, damping=1.0, steps=UNROLLED):
    for _ in range(steps):
        x = system.map(x, damping)
    return x


@pytest.fixture
def case(make_case):
    def make(**sizes):
        made = make_case(**{"dynamics": "leaky", "batch": 2, "tokens": 3, "dim": 6, **sizes})
        made.system.requires_grad_(True)
        return made

    return make


# --- the right gradient --------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [400, pytest.param(UNROLLED, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("hopfield", "sizes"),
    [
        ("softmax", {"eps": 1e-2, "self_attention": True}),
        ("relu", {"eps": 1e-5, "seed": 1}),
        ("power", {"eps": 1.0, "seed": 2}),
    ],
)
def test_f31_equals_the_unrolled_gradient(case, close, hopfield, sizes, steps):
    made = case(hopfield=hopfield, **sizes)
    x = at_equilibrium(made.system, made.x, 0.7)
    report = ImplicitReport()
    found = gradients(implicit(made.system, x, report=report), made.system)
    wanted = gradients(unrolled(made.system, made.x, 0.7, steps), made.system)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-8)
    assert float(report.equilibrium.max()) < 1e-13
    assert float(report.residual.max()) < 1e-10
    assert report.backward == 1
    assert int(report.products.max()) < 3 * x[0].numel()


def test_f31_equals_the_unrolled_gradient_of_the_golden_block(golden, close):
    arrays = golden("et_block_small")
    system = ed.EnergyTransformer.from_official(
        arrays, self_attention=True, dynamics="leaky"
    ).double()
    x0 = torch.from_numpy(arrays["x0"]).double().unsqueeze(0)
    x = at_equilibrium(system, x0)
    close(system.interaction_energy(x), [-1462.5890195], 1e-9)
    found = gradients(implicit(system, x), system)
    for a, b in zip(found, gradients(unrolled(system, x0), system), strict=True):
        close(a, b, 1e-8)


def test_f31_is_how_the_equilibrium_of_a_trained_model_moves(close):
    """Against the equilibria of two models a little to either side."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    system = model.system.with_dynamics("leaky").requires_grad_(True)
    images = digits().test[:1].double()
    with torch.no_grad():
        x0 = model.tokens(images, evaluation_masks(1, model.patches))
    found = ed.find_equilibrium(system, x0, tol=1e-9, gradient="implicit")
    wave = torch.cos(torch.arange(x0.numel(), dtype=x0.dtype)).reshape(x0.shape)
    slopes = torch.autograd.grad((wave * found.x).sum(), list(system.parameters()))
    generator = torch.Generator().manual_seed(0)
    ways = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in system.parameters()]
    ends, h = [], 1e-6
    with torch.no_grad():
        for step in (h, -2 * h):
            for p, way in zip(system.parameters(), ways, strict=True):
                p.add_(step * way)
            near = ed.find_equilibrium(system, found.x.detach(), "newton-krylov", tol=1e-9)
            ends.append((wave * near.x).sum())
    wanted = (ends[0] - ends[1]) / (2 * h)
    close(sum((a * b).sum() for a, b in zip(slopes, ways, strict=True)), wanted, 1e-4)


@pytest.mark.parametrize("hopfield", ["softmax", "relu", "power"])
def test_f31_equals_the_dense_solve(case, close, hopfield):
    made = case(hopfield=hopfield, eps=1e-2, seed=3)
    system, x = made.system, at_equilibrium(made.system, made.x, 0.7)
    w = made.randn(*x.shape)
    (found,) = torch.autograd.grad(implicit(system, x), [system.lagrangian.delta], w)

    def force(z):
        return system.force(z.reshape(1, *x[0].shape)).flatten()

    wanted = torch.zeros_like(found)
    for one, w_one in zip(x, w, strict=True):
        jacobian = torch.autograd.functional.jacobian(force, one.flatten())
        eye = torch.eye(len(jacobian), dtype=x.dtype)
        multiplier = torch.linalg.solve((eye - jacobian).T, w_one.flatten())
        out = system.force(one.unsqueeze(0))
        wanted += torch.autograd.grad(
            out, [system.lagrangian.delta], multiplier.reshape(out.shape)
        )[0]
    close(found, wanted, 1e-9)


@pytest.mark.parametrize("method", ["map", "anderson", "newton-krylov", "flow"])
def test_find_equilibrium_differentiates_what_it_found(case, close, method):
    made = case(hopfield="softmax", eps=1e-2, weights=1.5)
    x0 = made.x.clone().requires_grad_()
    found = ed.find_equilibrium(made.system, x0, method, tol=1e-11, gradient="implicit")
    assert found.converged.all() and not found.residual.requires_grad
    wanted = gradients(implicit(made.system, found.x.detach()), made.system)
    for a, b in zip(gradients(found.x, made.system, retain_graph=True), wanted, strict=True):
        close(a, b, 1e-12)
    (nothing,) = torch.autograd.grad(found.x.sum(), x0)
    assert (nothing == 0).all(), "an isolated equilibrium forgets its start"
    assert found.gradient.backward == 2 and found.gradient.residual.max() < 1e-10
    plain = ed.find_equilibrium(made.system, x0, method, tol=1e-11)
    assert torch.equal(plain.x, found.x) and not plain.x.requires_grad and plain.gradient is None


def test_find_equilibrium_gives_no_gradient_of_what_it_has_not_found(case):
    made = case()
    with pytest.raises(ed.GradientError, match="not an equilibrium"):
        ed.find_equilibrium(made.system, made.x, "map", max_evaluations=5, gradient="implicit")
    with pytest.raises(ValueError, match="gradient"):
        ed.find_equilibrium(made.system, made.x, gradient="direct")
    with pytest.raises(ValueError, match="gradient"):
        sphere = made.system.with_dynamics("sphere")
        ed.find_equilibrium(sphere, made.x, gradient="implicit")


def test_a_saddle(close):
    """Indefinite K, where conjugate gradients would break down."""
    torch.manual_seed(0)
    system = ed.System(ed.LayerNorm(5, eps=1e-2), ed.Hopfield(5, 2, "softmax", beta=30.0)).double()
    with torch.no_grad():
        memories = torch.tensor([[2.0, -1, -1, 0, 0], [-1, 2.0, -1, 0, 0]], dtype=torch.float64)
        system.hopfield.memories.copy_(memories)
        x = memories.mean(0).reshape(1, 1, 5)  # between the two
        for _ in range(30):  # the memories' exchange symmetry keeps it there
            x = system.force(x)
            x = (x + x[..., [1, 0, 2, 3, 4]]) / 2
    found = implicit(system, x)
    jacobian = torch.autograd.functional.jacobian(lambda z: system.force(z).flatten(), x)
    k = torch.eye(5, dtype=torch.float64) - jacobian.reshape(5, 5)
    assert float(torch.linalg.eigvals(k).real.min()) < -1
    w = torch.tensor([1.0, 0.3, -0.2, 0.5, -0.9], dtype=torch.float64)
    (grad,) = torch.autograd.grad(found, [system.hopfield.memories], w.reshape(1, 1, 5))
    multiplier = torch.linalg.solve(k.T, w).reshape(1, 1, 5)
    (wanted,) = torch.autograd.grad(system.force(x), [system.hopfield.memories], multiplier)
    close(grad, wanted, 1e-9)


def test_published_dynamics_share_the_equilibria(case, close):
    made = case(hopfield="softmax", eps=1e-2)
    x = at_equilibrium(made.system, made.x, 0.7)
    published = made.system.with_dynamics("et")
    for a, b in zip(
        gradients(implicit(published, x), published),
        gradients(implicit(made.system, x), made.system), strict=True,
    ):  # fmt: skip
        close(a, b, 0.0)


def test_each_sample_by_itself(case, close):
    made = case(hopfield="relu", batch=3, seed=1)
    x = at_equilibrium(made.system, made.x, 0.7)
    w = made.randn(*x.shape)
    w[1] = 0  # nothing to solve there
    key = made.system.attention.key
    report = ImplicitReport()
    (together,) = torch.autograd.grad(implicit(made.system, x, report=report), [key], w)
    alone = [
        torch.autograd.grad(implicit(made.system, x[k : k + 1]), [key], w[k : k + 1])[0]
        for k in range(3)
    ]
    close(together, sum(alone), 1e-11)
    assert float(alone[1].abs().max()) == 0
    assert int(report.products[1]) == 1


def test_absent_tokens(case, close):
    made = case(hopfield="softmax", eps=1e-2)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    masked = made.system.masked(tokens=mask)
    start = made.x.clone()
    start[0, 2] = 0.0
    x = at_equilibrium(masked, start, 0.7)
    w = made.randn(*x.shape)
    query = made.system.attention.query
    (found,) = torch.autograd.grad(implicit(masked, x), [query], w)
    parts = [
        torch.autograd.grad(implicit(made.system, x[k : k + 1, :n]), [query], w[k : k + 1, :n])[0]
        for k, n in ((0, 2), (1, 3))
    ]
    close(found, sum(parts), 1e-9)


def test_single_precision(case, close):
    made = case(hopfield="softmax", eps=1e-2)
    x = at_equilibrium(made.system, made.x, 0.7)
    wanted = gradients(implicit(made.system, x), made.system)
    system = made.system.float()
    found = gradients(implicit(system, at_equilibrium(system, x.float(), 0.7)), system)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-3)


# --- what it promises ----------------------------------------------------------------------------


def test_autograd_holds_one_evaluation(case):
    made = case(hopfield="relu")

    def held(steps):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.no_grad():
                x = made.x
                for _ in range(steps):
                    x = made.system.map(x, 0.7)
            implicit(made.system, x, tol=10.0)
        return sum(sizes)

    assert held(12) == held(400) > 0


def test_backward_again(case, close):
    made = case(hopfield="softmax", eps=1e-2)
    x = implicit(made.system, at_equilibrium(made.system, made.x, 0.7))
    first = gradients(x, made.system, retain_graph=True)
    for a, b in zip(first, gradients(x, made.system), strict=True):
        close(a, b, 0.0)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(x, made.system)


def test_no_second_derivative(case):
    made = case(hopfield="softmax", eps=1e-2)
    x = implicit(made.system, at_equilibrium(made.system, made.x, 0.7))
    # the loss is quadratic, or autograd would see a gradient that depends on nothing
    first, *_ = torch.autograd.grad(x.square().sum(), [made.system.attention.key],
                                    create_graph=True)  # fmt: skip
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def test_start_gets_zero(case):
    made = case(hopfield="softmax", eps=1e-2)
    start = made.x.clone().requires_grad_(True)
    x = at_equilibrium(made.system, start, 0.7)
    implicit(made.system, x, start=start).square().sum().backward()
    assert torch.equal(start.grad, torch.zeros_like(start))
    start.grad = None
    implicit(made.system, x).square().sum().backward()
    assert start.grad is None


# --- refusals ------------------------------------------------------------------------------------


def test_not_an_equilibrium(case):
    made = case(hopfield="softmax", eps=1e-2)
    x = at_equilibrium(made.system, made.x, 0.7)
    x[1] *= 1 + 1e-6
    with pytest.raises(GradientError, match="sample 1 is not an equilibrium"):
        implicit(made.system, x)
    implicit(made.system, x, tol=1e-5)
    x[1] = torch.nan
    with pytest.raises(GradientError, match="sample 1 is not an equilibrium"):
        implicit(made.system, x, tol=1.0)


def test_linear_solve_that_fails(case):
    made = case(hopfield="softmax", eps=1e-2)
    report = ImplicitReport()
    x = implicit(
        made.system, at_equilibrium(made.system, made.x, 0.7), max_products=3, report=report
    )
    with pytest.raises(GradientError, match="relative residual"):
        x.square().sum().backward()
    assert float(report.residual.max()) > 1e-10
    assert all(p.grad is None for p in made.system.parameters())


def test_wrong_input(case):
    made = case()
    with pytest.raises(ValueError, match=r"system: expected dynamics .* got 'sphere'"):
        implicit(made.system.with_dynamics("sphere"), made.x)
    with pytest.raises(ValueError, match="rtol: expected"):
        implicit(made.system, made.x, rtol=0.0)
    with pytest.raises(ValueError, match="max_products: expected"):
        implicit(made.system, made.x, max_products=0)
    with pytest.raises(ValueError, match="x: expected shape"):
        implicit(made.system, made.x[0])
