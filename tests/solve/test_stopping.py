"""Stopping: in g, with every method, at once at equilibrium, and honest where it does not come."""

import pytest
import torch

import etdyn as ed
from etdyn.solve.methods import STEPPERS


@pytest.fixture
def system():
    torch.manual_seed(0)
    system = ed.EnergyTransformer(8, 2, 4, 3, "leaky", hopfield="softmax").double()
    with torch.no_grad():  # memories that rule, so that all exponents are near 1
        system.attention.key.mul_(0.1)
        system.hopfield.memories.mul_(3)
    return system


@pytest.fixture
def x0():
    return torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def equilibrium(system, x):
    with torch.no_grad():
        for _ in range(3000):
            x = system.map(x)
    return x


@pytest.mark.parametrize("name", ed.available_methods())
@pytest.mark.parametrize("quantity", ["residual", "dissipation", "activation_change"])
def test_every_method_stops_where_the_quantity_has_fallen(system, x0, name, quantity):
    stop = ed.Stop(1e-2, quantity)
    step = 0.1 if name in ed.available_methods(True) else None
    times = torch.arange(0, 60.0, 2.0)
    found = ed.solve(system, x0, times, name, step=step, rtol=1e-4, stop=stop, gradient=None)
    assert set(found.status.tolist()) == {ed.Status.EQUILIBRIUM}
    assert found.failure is None
    assert 0 < float(found.t_end.min()) <= float(found.t_end.max()) < float(times[-1])
    assert bool(stop.arrived(system, found.x_end).all())
    if name.startswith("batched") or name in STEPPERS:  # samples end one by one
        assert torch.equal(found.t, times.double())
        gone = found.t[:, None] > found.t_end
        assert torch.equal(torch.isnan(found.x[..., 0, 0]), gone)
        assert len(set(found.t_end.tolist())) > 1
        return
    assert not bool(stop.arrived(system, found.x[-3]).all())
    kept = found.t[:-1]
    assert torch.equal(kept, times[: len(kept)].double())


def test_the_published_flow_stops_although_it_never_rests(system, x0):
    """A-F1: |dx/dt| tends to a constant, while g comes to rest."""
    published = system.with_dynamics("et")
    found = ed.solve(published, x0, [0, 1e6], stop=ed.Stop(1e-2), gradient=None)
    assert set(found.status.tolist()) == {ed.Status.EQUILIBRIUM}
    assert float(published.velocity(0.0, found.x[-1]).norm()) > 1.0


def test_starting_at_equilibrium_stops_at_once(system, x0):
    x = equilibrium(system, x0)
    for name, step in (("dopri5", None), ("euler", 0.1), ("scipy_solver", None)):
        found = ed.solve(system, x, [0, 5.0], name, step=step, stop=ed.Stop(1e-8), gradient=None)
        assert set(found.status.tolist()) == {ed.Status.EQUILIBRIUM}
        assert found.t.tolist() == [0.0]
        assert found.stats.evaluations == 1


def test_one_sample_or_all(system, x0):
    x = torch.cat([equilibrium(system, x0)[:1], x0[1:]])
    stop = ed.Stop(1e-6, every_sample=False)
    first = ed.solve(system, x, [0, 50.0], stop=stop, gradient=None)
    names = [ed.Status(s).name for s in first.status.tolist()]
    assert names == ["EQUILIBRIUM", "INTERRUPTED", "INTERRUPTED"]
    every = ed.solve(system, x, [0, 50.0], rtol=1e-9, stop=ed.Stop(1e-6), gradient=None)
    assert set(every.status.tolist()) == {ed.Status.EQUILIBRIUM}
    assert float(every.t[-1]) > 1.0


def test_what_does_not_arrive_in_time_says_so(system, x0):
    found = ed.solve(system, x0, [0, 0.5], stop=ed.Stop(1e-12), gradient=None)
    assert set(found.status.tolist()) == {ed.Status.MAX_TIME}
    assert found.t.tolist() == [0.0, 0.5]
    mixed = torch.cat([equilibrium(system, x0)[:1], x0[1:]])
    found = ed.solve(system, mixed, [0, 0.5], rtol=1e-9, stop=ed.Stop(1e-6), gradient=None)
    names = [ed.Status(s).name for s in found.status.tolist()]
    assert names == ["EQUILIBRIUM", "MAX_TIME", "MAX_TIME"]


def test_activation_change_is_the_speed_of_g(system, x0):
    for dynamics in ("et", "leaky", "sphere"):
        moving = system.with_dynamics(dynamics)
        x = moving.prepare(x0)
        h = 1e-6
        ahead, behind = (moving.activation(x + s * moving.velocity(0.0, x)) for s in (h, -h))
        slope = (ahead - behind) / (2 * h)
        assert torch.allclose(moving.activation_velocity(x), slope, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.0,), "residual: expected"), ((1e-8, "velocity"), "quantity: expected one of 'residual'")],
)
def test_stops_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        ed.Stop(*arguments)
