"""Complex spectra of flows without an energy, and the test that an energy's spectrum is real."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import etdyn as ed
from etdyn import LayerNorm, System
from etdyn.analysis.jacobian import jacobian_spectrum, real_spectrum
from etdyn.analysis.spectrum import spectrum
from etdyn.datasets import digits
from etdyn.energies import Attention
from etdyn.problems import linear, linear_flow
from etdyn.tasks import evaluation_masks

DATA = st.data()
LAWS = ["et", "leaky", "sphere"]


def flow(couplings, features=1):
    """dx/dt = (J - 1) x and a start."""
    couplings = torch.as_tensor(couplings, dtype=torch.float64)
    return linear_flow(couplings, torch.ones(1, len(couplings), features, dtype=torch.float64))


class VectorGamma(LayerNorm):
    """torch.nn.LayerNorm's own activation, a gamma per feature: M is not symmetric."""

    def __init__(self, dim, strength):
        super().__init__(dim)
        self.stretch = 1 + strength * torch.linspace(-1, 1, dim, dtype=torch.float64)

    def activation(self, x):
        return super().activation(x) * self.stretch

    def metric(self, x, v):
        return super().metric(x, v) * self.stretch


class ForgottenKeys(Attention):
    """Ordinary attention: the gradient without its key role."""

    def _force(self, keys, queries, weights):
        return self._merge(weights @ keys, self.query)

    def force_jvp(self, g, u):
        return torch.func.jvp(self.force, (g,), (u,))[1]


def test_linear_flow_has_the_eigenvalues_of_its_couplings():
    rng = np.random.default_rng(0)
    j = rng.normal(size=(12, 12))
    exact = np.linalg.eigvals(j) - 1
    exact = exact[np.lexsort((-exact.imag, -exact.real))]
    problem = flow(j)
    found = jacobian_spectrum(problem.system, problem.start).isel(sample=0)
    assert abs(exact.imag).max() > 1, "and they turn"
    np.testing.assert_allclose(found["real"], exact.real, atol=1e-12)
    np.testing.assert_allclose(found["imaginary"], exact.imag, atol=1e-12)
    assert float(found["residual"].max()) < 1e-13 * 12
    even = np.linalg.eigvalsh((j + j.T) / 2)[-1] - 1
    odd = np.linalg.norm(j - j.T) / 2 / np.linalg.norm(j - np.eye(12))
    np.testing.assert_allclose(found["numerical_abscissa"], even, rtol=1e-13)
    np.testing.assert_allclose(found["relative_curl"], odd, rtol=1e-13)


def test_rotation_and_shear_have_their_closed_forms():
    """A rotation has curl w / sqrt(1 + w^2) and no growth; a shear decays at last, but grows."""
    w = 3.0
    problem = flow([[0, w], [-w, 0]])
    turn = jacobian_spectrum(problem.system, problem.start).isel(sample=0)
    np.testing.assert_allclose(turn["real"], [-1, -1], atol=1e-15)
    np.testing.assert_allclose(turn["imaginary"], [w, -w], rtol=1e-15)
    np.testing.assert_allclose(turn["relative_curl"], w / np.hypot(1, w), rtol=1e-15)
    np.testing.assert_allclose(turn["numerical_abscissa"], -1, rtol=1e-15)
    problem = flow([[0, 8.0], [0, 0]])
    shear = jacobian_spectrum(problem.system, problem.start).isel(sample=0)
    np.testing.assert_allclose(shear["real"], [-1, -1], atol=1e-7)  # defective: sqrt of rounding
    np.testing.assert_allclose(shear["numerical_abscissa"], 3.0, rtol=1e-15)


def test_null_directions_do_not_enter_the_numerical_abscissa():
    """Without curvature the leaky flow has rate -1 along every direction of g."""
    problem = linear(torch.ones(3, 4).double(), torch.arange(12.0).double().reshape(1, 3, 4) ** 2)
    found = jacobian_spectrum(problem.system.with_dynamics("leaky"), problem.start)
    np.testing.assert_allclose(found["real"], -np.ones((1, 9)), rtol=1e-14)
    np.testing.assert_allclose(found["numerical_abscissa"], [-1.0], rtol=1e-14)


def test_rightmost_eigenvalues_agree_with_the_dense_ones():
    j = np.random.default_rng(1).normal(size=(160, 160)) / 4
    problem = flow(j)
    dense = jacobian_spectrum(problem.system, problem.start)
    few = jacobian_spectrum(problem.system, problem.start, k=5)
    np.testing.assert_allclose(few["real"], dense["real"][:, :5], atol=1e-10)
    pair = few["imaginary"].values.copy()
    np.testing.assert_allclose(abs(pair), abs(dense["imaginary"].values[:, :5]), atol=1e-10)
    assert float(few["residual"].max()) < 1e-10
    assert "numerical_abscissa" not in few


@pytest.mark.parametrize("law", LAWS)
def test_f12_an_energy_has_no_curl_and_the_spectrum_of_s(make_case, close, law):
    """Null directions left out, dense and matrix-free, masked and not."""
    case = make_case(dynamics=law, hopfield="softmax")
    tokens = torch.tensor([[True, False, True, True, True], [True] * 5])
    system = case.system.masked(tokens)
    exact = spectrum(system, case.x)
    found = jacobian_spectrum(system, case.x)
    for i in range(2):
        n = int(np.isfinite(exact["eigenvalue"][i]).sum())
        np.testing.assert_allclose(
            found["real"].values[i, :n], -exact["eigenvalue"].values[i, :n], atol=1e-12
        )
    assert float(abs(found["imaginary"]).max()) < 1e-12
    assert float(found["relative_curl"].max()) < 1e-15 * 8
    np.testing.assert_allclose(found["numerical_abscissa"], found["real"][:, 0], atol=1e-12)
    for name in ("null", "absent"):
        assert (found[name] == exact[name]).all()
    few = jacobian_spectrum(system, case.x, k=3)
    np.testing.assert_allclose(few["real"], found["real"][:, :3], atol=1e-10)


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=6)
@given(data=DATA)
def test_f12_spectrum_is_real_everywhere(make_case, law, data):
    """Random systems at states that are no equilibria, masked or not."""
    case = make_case(data, dynamics=law, batch=2, spread=1.0)
    for system in (case.system, case.system.masked(case.token_mask())):
        found = real_spectrum(system, case.x)
        assert found["real"].all(), found
        null = jacobian_spectrum(system, case.x)["null"].values
        assert (found["zeros"].values >= null).all()


@pytest.mark.parametrize("law", LAWS)
def test_f12_counts_n_zeros_and_n_near_zeros(make_case, law):
    """N token means are exact; N lengths are of order eps / sigma^2, or exact on the sphere."""
    case = make_case(dynamics=law, hopfield="softmax", eps=1e-6, tokens=4)
    present = torch.tensor([[True, True, True, False], [True] * 4])
    found = real_spectrum(case.system.masked(present), case.x)
    assert found["real"].all()
    n = np.array([3, 4])
    assert (found["zeros"] == (2 * n if law == "sphere" else n)).all()
    assert (found["near_zeros"] == (0 * n if law == "sphere" else n)).all()


@pytest.mark.parametrize("law", LAWS)
def test_f12_trained_model_has_a_real_spectrum_away_from_equilibrium(law):
    """At the tokens of a held-out image; six of them keep the matrix small."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    model.requires_grad_(False)
    x = model.tokens(digits().test[:1].double(), evaluation_masks(1, model.patches))[:, :6]
    found = real_spectrum(model.system.with_dynamics(law), x)
    assert found["real"].all()
    assert float(found["imaginary"].max()) < 1e-12
    assert float(found["asymmetry"].max()) < 1e-13


@pytest.mark.parametrize("law", ["et", "leaky"])
def test_f12_vector_gamma_is_found_out(make_case, law):
    """Even 1 %: by the asymmetry, where the eigenvalues may still be real."""
    case = make_case(hopfield="softmax")
    for strength, floor in ((0.01, 1e-5), (0.9, 1e-3)):
        lagrangian = VectorGamma(8, strength).double().requires_grad_(False)
        found = real_spectrum(System(lagrangian, case.system.interaction, law), case.x)
        assert not found["real"].any()
        assert (found["asymmetry"] > floor).all()
        assert (found["closed_form"] < 1e-12).all(), "its derivative is right, its M is not"


def test_f12_missing_key_gradient_and_asymmetric_coupling_are_found_out(make_case):
    case = make_case(dim=6)
    attention = ForgottenKeys(6, 2, 4).double().requires_grad_(False)
    with torch.no_grad():
        attention.query.normal_(generator=case.rng)
        attention.key.normal_(generator=case.rng)
    found = real_spectrum(System(LayerNorm(6).double(), attention, "leaky"), case.x)
    assert not found["real"].any() and (found["imaginary"] > 1e-3).all()
    problem = flow([[0.0, 1.0], [-1.0, 0.0]], features=3)
    found = real_spectrum(problem.system, problem.start)
    assert not found["real"].any()
    # J has eigenvalues +-i three times and norm sqrt(6)
    np.testing.assert_allclose(found["imaginary"], 1 / np.sqrt(6), rtol=1e-14)


def test_f12_wrong_hessian_is_found_out(make_case):
    case = make_case(dynamics="leaky")
    interaction = copy.copy(case.system.interaction)
    interaction.__dict__["force_jvp"] = lambda g, u: -1.001 * case.system.interaction.hvp(g, u)
    found = real_spectrum(System(case.system.lagrangian, interaction, "leaky"), case.x)
    assert (found["closed_form"] > 1e-4).all() and not found["real"].any()
    assert (found["asymmetry"] < 1e-12).all()


def test_results_are_labelled_and_survive_the_store(make_case, tmp_path):
    case = make_case()
    for name, make in (("jacobian", jacobian_spectrum), ("real_spectrum", real_spectrum)):
        found = make(case.system, case.x)
        assert found.attrs["etdyn_schema"] == f"etdyn.{name}/1"
        assert all({"units", "long_name"} <= v.attrs.keys() for v in found.data_vars.values())
        ed.store.save(found, tmp_path / name)
        assert ed.load(tmp_path / name).identical(found)


def test_wrong_input_raises(make_case):
    case = make_case()
    with pytest.raises(ValueError, match="k: "):
        jacobian_spectrum(case.system, case.x, k=34)
    for make in (jacobian_spectrum, real_spectrum):
        with pytest.raises(ValueError, match="x: "):
            make(case.system, case.x * torch.inf)
