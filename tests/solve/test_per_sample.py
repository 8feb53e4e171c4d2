"""The batched methods through `solve`: every sample on its own."""

import pytest
import torch

import etdyn as ed


@pytest.fixture
def system():
    torch.manual_seed(0)
    return ed.EnergyTransformer(8, 2, 4, 12, "leaky", hopfield="softmax").double()


@pytest.fixture
def x0():
    return torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["batched_bosh3", "batched_dopri5", "batched_tsit5"])
def test_a_sample_does_not_notice_a_stiff_neighbour(system, x0, name):
    hard = x0.clone()
    hard[2] *= 1e-3  # a small sigma makes g move a thousand times as fast
    times = [0.0, 0.5, 1.0]
    together = ed.solve(system, hard, times, name, gradient=None)
    for k in range(4):
        alone = ed.solve(system, hard[k : k + 1], times, name, gradient=None)
        assert float((together.x[:, k] - alone.x[:, 0]).abs().max()) < 1e-12
        assert int(together.stats.evaluations[k]) == int(alone.stats.evaluations[0])
    costs = together.stats.evaluations
    assert int(costs[2]) > 1.5 * int(costs[[0, 1, 3]].max())
    shared = ed.solve(system, hard, times, "dopri5", gradient=None)
    assert float((together.x - shared.x).abs().max()) < 1e-4


def test_masks_follow_their_samples(system, x0):
    tokens = torch.ones(4, 5, dtype=torch.bool)
    tokens[1, 3:] = False
    tokens[3, 1:] = False
    masked = system.masked(tokens=tokens)
    times, arguments = [0.0, 1.0], {"rtol": 1e-9, "atol": 1e-11, "gradient": None}
    ours = ed.solve(masked, x0, times, "batched_dopri5", **arguments)
    theirs = ed.solve(masked, x0, times, "dopri5", **arguments)
    assert float((ours.x - theirs.x).abs().max()) < 1e-6
    assert torch.equal(ours.x[1, 1, 3:], x0[1, 3:])


def test_what_it_cost_is_labelled_by_sample(system, x0):
    found = ed.solve(system, x0, [0, 20.0], "batched_dopri5", stop=ed.Stop(1.0), gradient=None)
    data = found.to_xarray()
    assert data["evaluations"].dims == ("sample",)
    assert (data["accepted"] > 0).all()
    assert (data["t_end"] == found.t_end.numpy()).all()
    assert (data["evaluations"] == 2 + 6 * (data["accepted"] + data["rejected"])).all()


class BlowUp(ed.System):
    """x' = x^2, which reaches infinity at t = 1/x(0)."""

    def velocity(self, t, x):
        return x * x


def test_a_sample_that_fails_leaves_the_others_alone():
    system = BlowUp(ed.LayerNorm(8), ed.Hopfield(8, 3)).double()
    x0 = torch.full((3, 1, 8), 0.1, dtype=torch.float64)
    x0[1] = 2.0
    found = ed.solve(system, x0, [0, 0.25, 1.0], "batched_dopri5", gradient=None, throw=False)
    names = [ed.Status(s).name for s in found.status.tolist()]
    assert names[0] == names[2] == "FINISHED"
    assert names[1] in ("NONFINITE", "DT_MIN")
    assert found.failure.samples == (1,)
    assert 0.49 < found.failure.time < 0.5 + 1e-6
    assert float(found.t_end[1]) == found.failure.time
    assert torch.isfinite(found.x_end).all()
    assert float(found.x[2, 0].mean()) == pytest.approx(0.1 / 0.9, rel=1e-6)
    with pytest.raises(ed.SolveError, match=r"samples \[1\]"):
        ed.solve(system, x0, [0, 0.25, 1.0], "batched_dopri5", gradient=None)


def test_gradients_are_those_of_the_shared_step(system, x0):
    grads = []
    for name in ("batched_dopri5", "dopri5"):
        found = ed.solve(system, x0, [0, 1.0], name, rtol=1e-10, atol=1e-12)
        (grad,) = torch.autograd.grad(found.x[-1].square().sum(), system.hopfield.memories)
        grads.append(grad)
    assert float((grads[0] - grads[1]).abs().max() / grads[1].abs().max()) < 1e-6
    with pytest.raises(ValueError, match="gradient: expected 'direct' or None"):
        ed.solve(system, x0, [0, 1.0], "batched_dopri5", gradient="backsolve")


def test_its_options_are_known(system, x0):
    method = ed.Method("batched_tsit5", options={"first_step": 1e-3})
    assert int(ed.solve(system, x0, [0, 1.0], method, gradient=None).stats.accepted.min()) > 0
    with pytest.raises(ValueError, match=r"options: .*first_step, min_step"):
        ed.Method("batched_tsit5", options={"safety": 0.5})
    with pytest.raises(ValueError, match=r"rtol: expected at least 1\.1e-14"):
        ed.solve(system, x0, [0, 1.0], "batched_tsit5", rtol=5e-15, gradient=None)
