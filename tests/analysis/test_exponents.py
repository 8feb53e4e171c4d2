"""Lyapunov exponents against exact flows and spectra, and growth backwards (ET-F29, F34)."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import etdyn as ed
from etdyn.analysis.exponents import backward_growth, lyapunov_exponents, map_exponents
from etdyn.analysis.spectrum import spectrum
from etdyn.datasets import digits
from etdyn.problems import anisotropic_well, linear_flow
from etdyn.tasks import evaluation_masks

DIGITS = Path(__file__).parents[2] / "data" / "digits"
RATES = torch.tensor([[0.3, 1.1], [-0.2, 2.0]], dtype=torch.float64)


@pytest.fixture(scope="module")
def rest(make_case):
    """A smooth random system without eps, a state near its equilibrium, and kappa there."""
    case = make_case(dim=4, tokens=3, batch=1, eps=0.0, hopfield="softmax", memories=6, seed=5)
    leaky = case.system.with_dynamics("leaky")
    x = ed.find_equilibrium(leaky, case.x, tol=1e-12, throw=True).x
    kappa = spectrum(leaky, x).eigenvalue.to_numpy()[0]
    return leaky, x + 1e-4 * case.randn(*x.shape), kappa[np.isfinite(kappa)]


def start(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def within(found, wanted, floor=1e-5):
    """Exponents agree to three of their own errors, which are small, and the solver's."""
    error = found.error.to_numpy()
    assert error.max() < 0.03, error
    off = np.abs(found.exponent.to_numpy() - np.asarray(wanted))
    assert (off <= 3 * error + floor).all(), (off, error)


def test_a_wells_exponents_are_minus_its_rates():
    problem = anisotropic_well(RATES, start(2, 2, 2))
    found = lyapunov_exponents(problem.system, problem.start, torch.linspace(0, 30, 16), 4)
    assert found.exponent.shape == (2, 4)
    np.testing.assert_allclose(found.exponent, [[0.2, -0.3, -1.1, -2.0]] * 2, atol=1e-5)
    assert float(found.error.max()) < 1e-4
    assert (found.status == ed.Status.FINISHED).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_linear_flows_exponents_are_the_real_parts_of_its_eigenvalues(symmetric):
    couplings = 0.6 * start(4, 4)
    if symmetric:
        couplings = (couplings + couplings.T) / 2
    problem = linear_flow(couplings, start(1, 4, 1))
    found = lyapunov_exponents(problem.system, problem.start, torch.linspace(0, 40, 21), 4)
    exact = torch.sort(torch.linalg.eigvals(couplings).real - 1, descending=True).values
    within(found, exact.unsqueeze(0).numpy())


def test_et_f29_the_leaky_flows_exponents_are_minus_kappa(rest):
    leaky, x, kappa = rest
    found = lyapunov_exponents(leaky, x, torch.linspace(0, 40, 9), 2)
    within(found, -kappa[None, :2], floor=1e-4)
    assert found.residual[-1, 0].item() < 1e-8, "the state has come to rest"


def test_et_f29_null_directions_of_the_leaky_flow_have_exponent_minus_one(rest):
    """All exponents: -kappa, and -1 twice a token, for its mean and its radius."""
    leaky, x, kappa = rest
    found = lyapunov_exponents(leaky, x, torch.linspace(0, 24, 5), 12)
    wanted = np.sort(np.concatenate([-kappa, -np.ones(6)]))[::-1]
    np.testing.assert_allclose(found.exponent[0], wanted, atol=0.06)
    np.testing.assert_allclose(found.exponent.sum(), wanted.sum(), rtol=1e-5)  # the trace


def test_et_f29_the_published_flows_exponents_vanish_as_growth_is_a_power(rest):
    """Perturbations grow as t^(1 - kappa): the slope in log t is 1 - kappa, and that in t is 0."""
    leaky, x, kappa = rest
    system = leaky.with_dynamics("et")
    in_log = lyapunov_exponents(system, x, np.geomspace(1, 1e12, 13), 2, clock="log time")
    within(in_log, 1 - kappa[None, :2], floor=1e-4)
    ends = (1e2, 1e3, 1e6)
    in_time = [
        lyapunov_exponents(system, x, np.linspace(1, end, 4), align=0.0).exponent.item()
        for end in ends
    ]
    for end, exponent in zip(ends, in_time, strict=True):
        assert 0 < exponent < 3 * math.log(end) / end, "log(t^(1 - kappa)) / t"
    assert in_time[2] < 1e-4


def test_et_f29_the_spheres_exponents_are_minus_lambda(rest):
    leaky, x, _ = rest
    sphere = leaky.with_dynamics("sphere")
    found = lyapunov_exponents(sphere, x, torch.linspace(0, 24, 13), 2)
    still = ed.find_equilibrium(sphere, x, tol=1e-12, throw=True).x
    exact = spectrum(sphere, still, k=2, which="lowest").eigenvalue.to_numpy()
    within(found, -exact[:, :2], floor=1e-4)


@pytest.mark.parametrize("step", [0.5, 1.0])
def test_et_f29_a_maps_exponents_are_the_logarithms_of_its_multipliers(rest, step):
    """Euler on the leaky flow is the damped map: log|1 - eta kappa| a step, and the means go."""
    leaky, x, kappa = rest
    multipliers = np.concatenate([1 - step * kappa, [1 - step] * 6])
    wanted = np.sort(np.log(np.abs(multipliers[multipliers != 0])))[::-1][:2]
    maps = (lambda x: x + step * leaky.velocity(0.0, x), lambda x: leaky.map(x, step))
    for advance in maps:
        found = map_exponents(advance, x, 60, 2, every=4)
        within(found, wanted[None], floor=1e-4)
        assert found.running.dims == ("step", "sample", "mode")


def test_et_f29_on_the_sphere_a_step_sends_means_and_radii_to_zero(rest):
    leaky, x, _ = rest
    sphere = leaky.with_dynamics("sphere")
    still = ed.find_equilibrium(sphere, x, tol=1e-12, throw=True).x
    rates = spectrum(sphere, still).eigenvalue.to_numpy()[0]
    step = 1 / rates.max()

    def euler(x):
        return sphere.prepare(x + step * sphere.velocity(0.0, x))

    found = map_exponents(euler, still, 40, 7, every=4)
    slow = np.log(1 - step * rates[0])
    assert abs(found.exponent[0, 0].item() - slow) < 3 * found.error[0, 0].item() + 1e-4
    assert found.exponent[0, 6].item() < -5


def test_et_f29_the_trained_models_slowest_exponent():
    model = ed.load_model(DIGITS).double().requires_grad_(False)
    x0 = model.tokens(digits().test[:1].double(), evaluation_masks(1, model.patches))
    leaky = model.system.with_dynamics("leaky")
    x = ed.find_equilibrium(leaky, x0, "newton-krylov", tol=1e-10, throw=True).x
    kappa = spectrum(leaky, x, k=2, which="lowest").eigenvalue.to_numpy()[0, 0]
    found = lyapunov_exponents(leaky, x, torch.linspace(0, 60, 9), 1)
    within(found, [[-kappa]], floor=1e-4)
    growing = lyapunov_exponents(model.system, x, np.geomspace(1, 1e14, 15), 1, clock="log time")
    within(growing, [[1 - kappa]], floor=1e-3)


def test_absent_tokens_have_no_directions(make_case):
    """A sample with a token taken out has the exponents of the sample without it."""
    case = make_case(dim=3, tokens=3, batch=2, hopfield="softmax", dynamics="leaky")
    masked = case.system.masked(tokens=torch.tensor([[True, True, True], [True, True, False]]))
    times = torch.linspace(0, 6, 7)
    found = lyapunov_exponents(masked, case.x, times, 6, align=0.0).isel(sample=1)
    alone = lyapunov_exponents(case.system, case.x[1:, :2], times, 6, align=0.0).isel(sample=0)
    assert found.exponent.sum().item() == pytest.approx(alone.exponent.sum().item(), rel=1e-5)
    np.testing.assert_allclose(found.residual, alone.residual, rtol=1e-4)


def test_a_sample_that_fails_is_nan_and_the_others_are_not():
    rates = torch.tensor([[0.5]], dtype=torch.float64)
    problem = anisotropic_well(rates, torch.tensor([[[1.0]], [[1.0]]], dtype=torch.float64))
    velocity = type(problem.system).velocity

    class Broken(type(problem.system)):
        def velocity(self, t, x):
            return torch.where(x > 1.5, torch.nan, velocity(self, t, x))

        def select(self, rows):
            return self

    problem.system.__class__ = Broken
    starts = torch.tensor([[[1.0]], [[2.0]]], dtype=torch.float64)
    found = lyapunov_exponents(problem.system, starts, [0.0, 1.0, 2.0, 3.0])
    assert found.status.to_numpy().tolist() == [ed.Status.FINISHED, ed.Status.NONFINITE]
    assert found.exponent[0, 0].item() == pytest.approx(-0.5, abs=1e-6)
    assert np.isnan(found.exponent[1]).all() and np.isnan(found.error[1]).all()


# --- backwards ---------------------------------------------------------------------------------


def settled(system, x, ticks):
    return ed.solve(system, x, ticks.tolist(), "batched_dopri5", rtol=1e-9, gradient=None)


def test_et_f34_backwards_a_well_grows_with_its_fastest_rate():
    problem = anisotropic_well(RATES, start(2, 2, 2))
    found = backward_growth(settled(problem.system, problem.start, np.linspace(0, 20, 401)))
    assert found.sizes == {"time": 201, "sample": 2}
    assert (found.growth[-1] == 0).all()
    np.testing.assert_allclose(found.rate[:20], 2.0, rtol=1e-4)


def test_et_f34_backwards_errors_grow_exponentially_in_leaky_time_and_as_a_power_in_t(rest):
    """With kappa_max: exp(kappa_max s) along the leaky flow, t^kappa_max along the published."""
    leaky, x, kappa = rest
    fastest = max(kappa[-1], 1.0)
    s = np.linspace(0, 24, 161)
    one = backward_growth(settled(leaky, x, s))
    np.testing.assert_allclose(one.rate[2:10, 0], fastest, rtol=0.02)
    two = backward_growth(settled(leaky.with_dynamics("et"), x, np.exp(s)), "log time")
    np.testing.assert_allclose(two.rate[2:10, 0], fastest, rtol=0.02)
    assert float(one.growth[0, 0]) > 15, "a million times"
    straight = np.polyfit(np.log(two.time), two.growth[:, 0], 1)[0]
    assert straight == pytest.approx(-fastest, rel=0.1)


@pytest.mark.parametrize("dynamics", ["et", "leaky"])
def test_et_f34_the_adjoint_obeys_its_equation(make_case, close, dynamics):
    """d lambda/dt = M H lambda (leaky: + lambda), for lambda the gradient of a loss at T."""
    case = make_case(dynamics=dynamics, hopfield="softmax")
    system, weights, h = case.system, case.randn(2, 5, 8), 1e-3

    def adjoint(x, left):
        x = x.clone().requires_grad_()
        end = ed.solve(system, x, [0.0, left], "rk4", step=0.02).x[-1]
        return torch.autograd.grad((weights * system.activation(end)).sum(), x)[0]

    x = ed.solve(system, case.x, [0.0, h, 2 * h], "rk4", step=h, gradient=None).x
    early, now, late = (adjoint(x[k], 0.2 - k * h) for k in range(3))
    g = system.activation(x[1])
    wanted = system.lagrangian.metric(x[1], system.interaction.hvp(g, now))
    wanted = wanted + now if dynamics == "leaky" else wanted
    close((late - early) / (2 * h), wanted, 1e-5)


# --- interface ---------------------------------------------------------------------------------


def test_results_survive_the_disk_and_repeat(tmp_path):
    problem = anisotropic_well(RATES, start(1, 2, 2))
    times = [0.0, 1.0, 2.0, 3.0]
    flow = lyapunov_exponents(problem.system, problem.start, times, 2)
    again = lyapunov_exponents(problem.system, problem.start, times, 2)
    xr.testing.assert_equal(flow, again)
    other = lyapunov_exponents(problem.system, problem.start, times, 2, seed=1)
    assert not flow.running.equals(other.running)
    step = map_exponents(lambda x: problem.system.map(x, 0.1), problem.start, 6, every=2)
    back = backward_growth(settled(problem.system, problem.start, np.linspace(0, 1, 9)))
    for name, found in {"flow": flow, "step": step, "back": back}.items():
        ed.save(found, tmp_path / name)
        xr.testing.assert_identical(ed.load(tmp_path / name), found)
        for label, variable in found.variables.items():
            if label != "sample":
                assert variable.attrs["units"] == "1" and variable.attrs["long_name"], label


def test_wrong_input_is_named(make_case):
    case = make_case()
    system, x, times = case.system, case.x, [0.0, 1.0, 2.0]
    uneven = ed.solve(system, x, [0.0, 0.1, 0.2, 0.3, 0.5], gradient=None)
    even = ed.solve(system, x, [0.0, 0.1, 0.2, 0.3], gradient=None)
    saved = ed.solve(system, x, [0.0, 0.1, 0.2], gradient=None, save=["residual"])
    for name, call in {
        "clock": lambda: lyapunov_exponents(system, x, times, clock="log"),
        "times": lambda: lyapunov_exponents(system, x, [0.0, 1.0]),
        "times: expected positive": lambda: lyapunov_exponents(system, x, times, clock="log time"),
        "k": lambda: lyapunov_exponents(system, x, times, 41),
        "align": lambda: lyapunov_exponents(system, x, times, align=1.0),
        "rtol": lambda: lyapunov_exponents(system, x, times, rtol=0.0),
        "x0": lambda: lyapunov_exponents(system, x * math.nan, times),
        "steps": lambda: map_exponents(system.map, x, 7, every=2),
        "every": lambda: map_exponents(system.map, x, 6, every=0),
        "solution": lambda: backward_growth(uneven),
        "solution: expected 5": lambda: backward_growth(even),
        "solution: expected one that saved": lambda: backward_growth(saved),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
