"""Spectra: exact cases, dense against matrix-free, null directions, nothing wrong in silence."""

from pathlib import Path

import numpy as np
import pytest
import torch

import etdyn as ed
from etdyn import System, find_equilibrium
from etdyn.analysis import lanczos
from etdyn.analysis.operators import Linearisation, flow_jacobian, without_null
from etdyn.analysis.spectrum import spectrum
from etdyn.datasets import digits
from etdyn.energies import Hopfield
from etdyn.lagrangians import LayerNorm
from etdyn.problems import anisotropic_well, curie_weiss, linear, linear_flow, two_tokens
from etdyn.tasks import evaluation_masks

LAWS = ["et", "leaky", "sphere"]


@pytest.fixture(scope="module")
def trained():
    """The digits model's system, and the tokens of two half-masked held-out images."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    model.requires_grad_(False)
    images = digits().test[:2].double()
    return model.system, model.tokens(images, evaluation_masks(2, model.patches))


def values(dataset):
    return torch.from_numpy(dataset["eigenvalue"].values)


def well(rates):
    """Independent directions with these rates."""
    rates = torch.as_tensor(rates, dtype=torch.float64).reshape(1, -1)
    return anisotropic_well(rates, torch.ones(2, *rates.shape, dtype=torch.float64))


def test_anisotropic_well_has_its_rates(close):
    rates = [[3.0, -1.0], [0.5, 2.0]]
    problem = anisotropic_well(
        torch.tensor(rates, dtype=torch.float64), torch.ones(1, 2, 2, dtype=torch.float64)
    )
    found = spectrum(problem.system, problem.start, vectors=True)
    close(values(found), torch.tensor([[-1.0, 0.5, 2.0, 3.0]]), 1e-15)
    assert found.null.item() == found.absent.item() == 0
    lowest = found["direction"].isel(sample=0, mode=0).values
    np.testing.assert_allclose(np.abs(lowest), [[0, 1], [0, 0]], atol=1e-15)


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.8])
def test_curie_weiss_has_its_exponents(close, beta):
    known = curie_weiss(6, beta)
    close(values(spectrum(known.system, known.states)), known.exponents, 1e-13, scale=1)


@pytest.mark.parametrize("law", LAWS)
def test_two_tokens_have_their_exponents(close, law):
    """Every law; null are two means and two lengths (eps = 0); index k - 1."""
    known = two_tokens(torch.tensor([4.0, 2.5, 1.0], dtype=torch.float64), law, gamma=1.3)
    found = spectrum(known.system, known.states)
    # the published flow has these in log t, measured against the growth of x
    exact = known.exponents - (1.0 if law == "et" else 0.0)
    close(values(found), exact, 1e-13, scale=1)
    assert (found.null == 4).all()
    if law != "et":
        assert ((found["eigenvalue"] < 0).sum("mode").values == [0, 1, 2]).all()


def test_linear_energy_has_no_curvature(close):
    problem = linear(torch.ones(3, 4, dtype=torch.float64), torch.randn(2, 3, 4).double())
    found = spectrum(problem.system, problem.start, k=1)
    close(values(found), torch.zeros(2, 2), 1e-15, scale=1)
    close(values(spectrum(problem.system.with_dynamics("leaky"), problem.start)),
          torch.ones(2, 9), 1e-15)  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mask", [False, True])
def test_f12_spectrum_is_that_of_the_jacobian(make_case, close, law, mask):
    """At any state and to rounding: each lifted mode is an eigenvector off the null directions."""
    case = make_case(dynamics=law, hopfield="softmax", eps=1e-3)
    tokens = torch.tensor([[True, False, True, True, True], [True, True, True, False, False]])
    system = case.system.masked(tokens) if mask else case.system
    x = system.prepare(case.x)
    found = spectrum(system, x, vectors=True)
    per_token = 6 if law == "sphere" else 7
    count = per_token * (tokens.sum(1) if mask else torch.tensor([5, 5]))
    assert (np.isfinite(found["eigenvalue"]).sum("mode").values == count.numpy()).all()
    total = found.null + found.absent + np.isfinite(found["eigenvalue"]).sum("mode")
    assert (total == x[0].numel()).all()
    here = Linearisation(system, x)
    for j in range(int(count.min())):
        one = found.isel(mode=j)
        u, rate = (torch.from_numpy(one[n].values) for n in ("direction", "eigenvalue"))
        close(u.flatten(1).norm(dim=1), torch.ones(2), 1e-14)
        image = flow_jacobian(system, x, u) + rate[:, None, None] * u
        off = image if law == "sphere" else here.lagrangian.metric(here.x, image)
        off = without_null(system, x, off)
        close(off, torch.zeros_like(off), 1e-11, scale=10.0)
    assert float(found["residual"].max()) < 1e-13 * float(abs(found["eigenvalue"]).max()) * 10


@pytest.mark.parametrize("law", LAWS)
def test_dense_and_matrix_free_agree_on_the_trained_model(trained, law):
    """To 1e-8, away from equilibrium and at one, with every residual below its tolerance."""
    system, x = trained[0].with_dynamics(law), trained[1]
    x = x[:1] if law == "et" else find_equilibrium(system, x, tol=1e-9, throw=True).x[:1]
    dense, few = spectrum(system, x), spectrum(system, x, k=3, vectors=True)
    exact = dense["eigenvalue"].values[:, [0, 1, 2, -3, -2, -1]]
    size = np.abs(exact).max()
    np.testing.assert_allclose(few["eigenvalue"], exact, rtol=0, atol=1e-8 * size)
    assert float(few["residual"].max()) <= 4 * lanczos.tolerance(torch.float64) * size
    assert float(dense["residual"].max()) <= 1e-12 * size
    assert few.null.item() == (34 if law == "sphere" else 17)
    if law != "et":  # found as a minimum, and it is one
        assert (dense["eigenvalue"] > 0).all()
    np.testing.assert_allclose(np.linalg.norm(few["direction"], axis=(2, 3)), 1, rtol=1e-14)


@pytest.mark.parametrize("law", LAWS)
def test_f12_dense_and_matrix_free_agree_on_random_systems(make_case, close, law):
    case = make_case(dynamics=law, dim=14, tokens=14, batch=2, seed=5)
    present = torch.ones(2, 14, dtype=torch.bool)
    present[0, 3] = present[1, 8:11] = False
    system = case.system.masked(present)
    exact = values(spectrum(system, case.x))
    last = torch.isfinite(exact).sum(1)
    assert (last > 128).all(), "else spectrum takes the dense way"
    top = torch.stack([row[n - 2 : n] for row, n in zip(exact, last, strict=True)])
    both = torch.cat([exact[:, :2], top], 1)
    close(values(spectrum(system, case.x, k=2)), both, 1e-12)
    close(values(spectrum(system, case.x, k=1, which="lowest")), both[:, :1], 1e-12)
    close(values(spectrum(system, case.x, k=1, which="highest")), both[:, -1:], 1e-12)


def test_dense_serves_k_where_it_is_cheaper(make_case, close):
    case = make_case(dynamics="leaky")
    system = case.system.masked(torch.tensor([[True] * 5, [True, True, True, False, True]]))
    exact, few = values(spectrum(system, case.x)), values(spectrum(system, case.x, k=2))
    close(few[0], exact[0, [0, 1, -2, -1]], 0)
    close(few[1], exact[1, [0, 1, 26, 27]], 0)


def test_multiple_eigenvalues_are_all_found(close):
    """A single Krylov vector sees one copy; a block as wide as k sees them all."""
    rates = torch.linspace(0, 1, 200, dtype=torch.float64)
    rates[:3], rates[-3:] = -1.0, 2.0
    problem = well(rates)
    found = spectrum(problem.system, problem.start, k=3)
    close(values(found), torch.tensor([[-1.0, -1, -1, 2, 2, 2]] * 2), 1e-9)


def test_exhausted_krylov_spaces_go_on(close):
    """Few values, or none but zero: the space ends early and must be extended by what is new."""
    rates = torch.ones(200, dtype=torch.float64)
    rates[100:] = 3.0
    problem = well(rates)
    two = values(spectrum(problem.system, problem.start, k=2))
    close(two, torch.tensor([[1.0, 1, 3, 3]] * 2), 1e-14)
    problem = linear(torch.ones(10, 20, dtype=torch.float64), torch.randn(2, 10, 20).double())
    none = spectrum(problem.system, problem.start, k=2)
    close(values(none), torch.zeros(2, 4), 1e-15, scale=1)


def test_what_has_not_converged_is_nan_and_says_why(monkeypatch, make_case):
    case = make_case(dynamics="leaky", dim=24, tokens=10)
    monkeypatch.setattr(lanczos, "krylov_limit", lambda width: 12)
    found = spectrum(case.system, case.x, k=2)
    bad = np.isnan(found["eigenvalue"].values)
    assert bad.any()
    size = np.nanmax(np.abs(spectrum(case.system, case.x)["eigenvalue"].values))
    assert (found["residual"].values[bad] > lanczos.tolerance(torch.float64) * 0.5 * size).all()


@pytest.mark.parametrize("eps", [1e-4, 1e-6, 1e-8])
def test_f29_means_and_radii_are_2n_unit_eigenvalues(make_case, eps):
    """N means exactly, N lengths up to eps / sigma^2 with a constant that does not grow."""
    case = make_case(hopfield="softmax", weights=1.5, dynamics="leaky", eps=eps)
    x = find_equilibrium(case.system, case.x, tol=1e-12, throw=True).x
    found = spectrum(case.system, x)
    radial = found["radial"].values > 0.5
    assert (found.null == 5).all() and (radial.sum(1) == 5).all()
    share = eps / float(case.system.lagrangian.sigma(x).min()) ** 2
    off = np.abs(found["eigenvalue"].values[radial] - 1)
    assert off.max() <= 10 * share + 1e-14
    assert off.max() >= 1e-3 * share, "eps has no effect"
    rest = np.abs(found["eigenvalue"].values[~radial] - 1)
    assert (rest > 1e-3).all(), "and no other is one"


@pytest.mark.parametrize("kind", ["relu", "power", "softmax"])
def test_f29_memories_alone_have_kappa_max_one(kind):
    """The memories are concave: at any state kappa <= 1, and radii reach it."""
    torch.manual_seed(3)
    system = System(LayerNorm(6).double(), Hopfield(6, 20, kind).double(), "leaky")
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    for state in (x, find_equilibrium(system, x, tol=1e-10, throw=True).x):
        found = spectrum(system, state)["eigenvalue"].values
        assert (found <= 1 + 1e-14).all() and (found[:, -1] > 1 - 1e-4).all()
        assert (found[:, 0] < 0.99).all()


def test_sphere_and_leaky_spectra_have_the_same_signs(make_case):
    """At minima and saddles that both flows share (eps = 0)."""
    known = {law: two_tokens(torch.tensor([3.0, 2.0, 1.0]).double(), law) for law in LAWS}
    leaky, sphere = known["leaky"], known["sphere"]
    one = spectrum(leaky.system, leaky.states)["eigenvalue"].values
    other = spectrum(sphere.system, leaky.states)["eigenvalue"].values
    assert (np.sign(one) == np.sign(other)).all()
    assert not np.allclose(one, other)


def test_batch_and_repetition_change_nothing(make_case, close):
    case = make_case(dynamics="leaky", batch=3, dim=12, tokens=15)
    together = values(spectrum(case.system, case.x, k=2))
    assert torch.equal(together, values(spectrum(case.system, case.x, k=2)))
    for i in range(3):
        close(together[i : i + 1], values(spectrum(case.system, case.x[i : i + 1], k=2)), 1e-12)


def test_masked_tokens_are_as_if_not_there(make_case, close):
    case = make_case(dynamics="sphere", batch=1)
    present = torch.tensor([[True, False, True, True, False]])
    x = case.x.clone()
    x[:, ~present[0]] = 0.0  # padding without a direction
    masked = spectrum(case.system.masked(present), x, vectors=True)
    close(values(masked), values(spectrum(case.system, x[:, present[0]])), 1e-12)
    assert masked.absent.item() == 16 and masked.null.item() == 6
    assert (masked["direction"].values[0][:, ~present[0]] == 0).all()


def test_result_is_labelled_and_survives_the_store(make_case, tmp_path):
    case = make_case(dynamics="leaky")
    system = case.system.masked(torch.tensor([[True] * 5, [True, True, True, True, False]]))
    found = spectrum(system, case.x, vectors=True)
    assert found["eigenvalue"].dims == ("sample", "mode")
    assert found["direction"].dims == ("sample", "mode", "token", "feature")
    assert all({"units", "long_name"} <= v.attrs.keys() for v in found.data_vars.values())
    assert found.attrs["etdyn_schema"] == "etdyn.spectrum/1"
    assert found.attrs["dtype"] == "float64"
    ed.store.save(found, tmp_path / "spectrum")
    assert ed.load(tmp_path / "spectrum").identical(found)


def test_dtype_is_kept(make_case):
    case = make_case(dynamics="leaky", dim=9, tokens=20)
    system = case.system.float()
    for k in (None, 2):
        found = spectrum(system, case.x.float(), k)
        assert found["eigenvalue"].dtype == np.float32
        assert np.isfinite(found["eigenvalue"]).all()


def test_wrong_input_raises(make_case):
    case = make_case(dynamics="leaky")
    turning = linear_flow(torch.eye(3, dtype=torch.float64), torch.ones(1, 3, 2).double())
    with pytest.raises(TypeError, match="jacobian_spectrum"):
        spectrum(turning.system, turning.start)
    with pytest.raises(ValueError, match="k: "):
        spectrum(case.system, case.x, k=18)
    with pytest.raises(ValueError, match="k: "):
        spectrum(case.system, case.x, k=0)
    with pytest.raises(ValueError, match="which: "):
        spectrum(case.system, case.x, k=1, which="LM")
    with pytest.raises(ValueError, match="x: "):
        spectrum(case.system, case.x * torch.nan)
    with pytest.raises(ValueError, match="variance"):
        spectrum(case.system.with_dynamics("sphere"), torch.ones_like(case.x))
