"""Which energy is monotone under which dynamics (ET section 1.4 and its caveat)."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import etdyn as ed
from etdyn import LayerNorm, System, store
from etdyn.analysis.monotone import monotone_table
from etdyn.datasets import digits
from etdyn.problems import anisotropic_well, linear_flow
from etdyn.tasks import evaluation_masks

F64 = torch.float64


class VectorGamma(LayerNorm):
    """What torch.nn.LayerNorm does: dg/dx is not symmetric."""

    @property
    def gamma(self):
        return torch.linspace(0.1, 3, self.dim, dtype=F64)

    def clock_rate(self, x):
        return self.gamma.max() / self.sigma(x)


class NegativeGamma(LayerNorm):
    @property
    def gamma(self):
        return torch.tensor(-1.0, dtype=F64)

    def clock_rate(self, x):
        return 1 / self.sigma(x)


def table_of(make_case, lagrangian=None, **sizes):
    case = make_case(batch=500, **sizes)
    system = case.system
    if lagrangian is not None:
        system = System(lagrangian(system.dim).double(), system.interaction)
    return monotone_table(system, case.x)


@given(data=st.data())
def test_no_proof_is_contradicted_and_the_rates_are_slopes(make_case, close, data):
    """Exact rates against differences along the flow, for every energy and dynamics."""
    case = make_case(data)
    system = case.system
    if data.draw(st.booleans(), label="masked"):
        system = system.masked(case.token_mask())
    found = monotone_table(system, case.x)
    assert not found["contradicted"].any()
    for name in found["dynamics"].values:
        view = system.with_dynamics(name)
        x = view.prepare(case.x).requires_grad_()
        v = view.velocity(0.0, x).detach()
        g = view.activation(x)
        energies = {n: term.energy(g) for n, term in system.interaction.terms().items()}
        energies["interaction"] = sum(energies.values())
        neuron = 0.0 if name == "sphere" else system.keep(system.lagrangian.legendre(x)).sum(1)
        energies["total"] = energies["interaction"] + neuron
        moved = system.keep(view.clock_rate(x)).unsqueeze(-1) * (v.abs() + x.abs())
        scale = ((view.force(x).abs() + x.abs()).square().sum() * moved.square().sum()).sqrt()
        for energy, value in energies.items():
            (slope,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
            rate = found["rate"].sel(energy=energy, dynamics=name).values
            close(rate, (system.keep(slope) * v).sum((1, 2)), 1e-12, scale)


def test_each_dynamics_has_its_own_lyapunov_function(make_case):
    found = table_of(make_case, eps=1.0, weights=0.3)
    proved = {("interaction", "et"), ("total", "leaky"), ("interaction", "sphere"),
              ("total", "sphere")}  # fmt: skip
    stacked = found.stack(pair=("energy", "dynamics"))
    assert set(stacked["pair"].values[stacked["proved"].values]) == proved
    assert not found["contradicted"].any()
    for energy, dynamics in proved:
        assert float(found["rising"].sel(energy=energy, dynamics=dynamics)) == 0


def test_the_total_energy_is_not_monotone_on_the_published_flow(make_case):
    """The caveat of ET section 1.4: at eps = 1, most random states; at weak weights nearly all."""
    shares = [
        float(table_of(make_case, eps=1.0, weights=w)["rising"].sel(energy="total", dynamics="et"))
        for w in (0.3, 0.5, 1.0)
    ]
    assert shares[0] > 0.9 and 0.6 < shares[1] < 0.8 and shares[2] < 0.1


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_the_total_on_the_published_flow_is_the_interaction_on_the_leaky_one(make_case, eps):
    """Both have the slope -f.Mf + x.Mf; without eps, Mx = 0 and both are monotone."""
    found = table_of(make_case, eps=eps, weights=0.3)
    total = found["rate"].sel(energy="total", dynamics="et")
    alone = found["rate"].sel(energy="interaction", dynamics="leaky")
    assert (abs(total - alone) <= 1e-12 * abs(total).max()).all()
    rising = found["rising"].sel(energy="total", dynamics="et")
    assert (float(rising) > 0.5) == (eps == 1)
    assert bool(found["proved"].sel(energy="total", dynamics="et")) == (eps == 0)
    assert not found["contradicted"].any()


def test_a_term_alone_may_rise(make_case):
    found = table_of(make_case, dim=4, tokens=2)
    for term in ("attention", "hopfield"):
        assert (found["rising"].sel(energy=term) > 0.02).all()
    assert not found["proved"].sel(energy=["attention", "hopfield"]).any()


@pytest.mark.parametrize("lagrangian", [VectorGamma, NegativeGamma])
def test_f11_a_vector_or_negative_gamma_contradicts_the_proof(make_case, lagrangian):
    found = table_of(make_case, lagrangian, dim=4, tokens=2)
    share = float(found["rising"].sel(energy="interaction", dynamics="et"))
    assert share == 1 if lagrangian is NegativeGamma else 0.005 < share < 0.1
    assert bool(found["contradicted"].sel(energy="interaction", dynamics="et"))
    assert bool(found["contradicted"].sel(energy="total", dynamics="leaky"))


def test_the_trained_model_agrees_with_the_theory():
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").requires_grad_(False)
    images = digits().test[:16]
    x = model.tokens(images, evaluation_masks(16, model.patches))
    for dtype in (torch.float32, torch.float64):
        found = monotone_table(model.to(dtype).system, x.to(dtype))
        assert not found["contradicted"].any()
        assert (found["rising"].sel(energy=["interaction", "total"]) == 0).all()


def test_another_lagrangian_has_no_sphere():
    rates = torch.tensor([[0.5, 1.0, 3.0]], dtype=F64)
    well = anisotropic_well(rates, torch.tensor([[[1.0, -2.0, 0.5]], [[0.1, 0.2, 9.0]]], dtype=F64))
    found = monotone_table(well.system, well.start)
    assert found["dynamics"].values.tolist() == ["et", "leaky"]
    assert found["energy"].values.tolist() == ["interaction", "total"]
    np.testing.assert_allclose(
        found["rate"].sel(energy="interaction", dynamics="et"),
        -(rates * well.start).square().sum((1, 2)),
    )


def test_it_survives_the_disk_and_refuses_what_has_no_energy(tmp_path, make_case):
    found = table_of(make_case)
    store.save(found, tmp_path / "table")
    xr.testing.assert_identical(store.load(tmp_path / "table"), found)
    turning = linear_flow(torch.ones(3, 3, dtype=F64).triu(), torch.ones(1, 3, 2, dtype=F64))
    with pytest.raises(TypeError, match="energy"):
        monotone_table(turning.system, turning.start)
    case = make_case()
    case.x[1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="x: expected finite values, got NaN"):
        monotone_table(case.system, case.x)
