"""Saving observables instead of states."""

import pytest
import torch

import etdyn as ed
from etdyn.solve import named_observables


@pytest.fixture
def system():
    torch.manual_seed(0)
    return ed.EnergyTransformer(8, 2, 4, 12, "leaky", hopfield="softmax").double()


@pytest.fixture
def x0():
    return torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mean_cosine(system, x):
    g = torch.nn.functional.normalize(system.activation(x), dim=-1)
    return (g @ g.mT).mean((1, 2))


@pytest.mark.parametrize(("method", "step"), [("dopri5", None), ("rk4", 0.05)])
def test_observables_are_those_of_the_states(system, x0, method, step):
    times = torch.linspace(0, 2, 5)
    full = ed.solve(system, x0, times, method, step=step, gradient=None)
    lean = ed.solve(
        system,
        x0,
        times,
        method,
        step=step,
        gradient=None,
        save=[*named_observables(), mean_cosine],
    )
    assert lean.x.shape == (1, 3, 4, 8)
    assert torch.equal(lean.x[0], full.x[-1])
    assert lean.stats.evaluations == full.stats.evaluations
    data, known = lean.to_xarray(), full.to_xarray()
    for name in known.data_vars:
        if name not in ("x", "clock", "status"):
            assert abs(data[name] - known[name]).max() < 1e-12, name
    assert data["activation"].dims == ("time", "sample", "token", "feature")
    assert data["force_hopfield"].dims == ("time", "sample", "token", "feature")
    assert torch.equal(lean.saved["mean_cosine"][2], mean_cosine(system, full.x[2]).detach())
    assert "x" not in data


def test_observables_carry_gradients(system, x0):
    lean = ed.solve(system, x0, [0, 0.5, 1.0], "rk4", step=0.1, save=["energies"])
    full = ed.solve(system, x0, [0, 0.5, 1.0], "rk4", step=0.1)
    (a,) = torch.autograd.grad(lean.saved["energy"].sum(), system.hopfield.memories)
    total = torch.stack([system.energy(x) for x in full.x]).sum()
    (b,) = torch.autograd.grad(total, system.hopfield.memories)
    assert torch.allclose(a, b, rtol=1e-12)


def test_an_early_end_keeps_what_was_observed(system, x0):
    stop = ed.Stop(1e-1)
    times = torch.arange(0, 200.0)
    lean = ed.solve(system, x0, times, stop=stop, save=["residual"], gradient=None)
    assert set(lean.status.tolist()) == {ed.Status.EQUILIBRIUM}
    assert len(lean.t) == len(lean.saved["residual"]) < 200
    assert float(lean.saved["residual"][-1].max()) <= 1e-1


def test_what_cannot_be_saved(system, x0):
    with pytest.raises(
        ValueError, match=r"save: expected functions or names of energies, .*'enrgy'"
    ):
        ed.solve(system, x0, [0, 1.0], save=["enrgy"])
    with pytest.raises(TypeError, match="save: expected names and functions, got int"):
        ed.solve(system, x0, [0, 1.0], save=[3])
    with pytest.raises(ValueError, match="save: expected none with gradient"):
        ed.solve(system, x0, [0, 1.0], save=["residual"], gradient="backsolve")
