"""Decay rates and the log-time conjugacy (ET-F27 to F29)."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import etdyn as ed
from etdyn.analysis.convergence import FitStatus, conjugate, decay_rate
from etdyn.analysis.spectrum import spectrum
from etdyn.datasets import digits
from etdyn.problems import anisotropic_well
from etdyn.tasks import evaluation_masks

DIGITS = Path(__file__).parents[2] / "data" / "digits"


def trajectory(time, energy, **more):
    """A result as `decay_rate` reads it; energy `(time,)` or `(time, sample)`."""
    energy = np.asarray(energy).reshape(len(time), -1)
    grid = ("time", "sample")
    data = {"energy": (grid, energy)} | {k: (grid, v) for k, v in more.items()}
    return xr.Dataset(data, {"time": np.asarray(time)})


def fit(time, energy, clock="time", limit=0.0, **more):
    found = decay_rate(trajectory(time, energy), torch.tensor([limit]), clock, **more)
    return found.isel(sample=0)


def test_an_exponential_has_its_rate_and_a_power_its_exponent():
    t = np.linspace(0, 20, 201)
    found = fit(t, -7 + 3 * np.exp(-0.9 * t), limit=-7.0)
    assert found.status == FitStatus.FITTED
    assert float(found.rate) == pytest.approx(0.9, abs=1e-6)
    assert float(found.window_decades) == pytest.approx(3, abs=0.9 * 0.1 / math.log(10))
    assert float(found.window_end) == 20
    t = np.geomspace(1, 1e8, 201)
    found = fit(np.concatenate([[0], t]), np.concatenate([[9], 5 * t**-0.7]), "log time")
    assert float(found.rate) == pytest.approx(0.7, abs=1e-12)
    assert found.sizes["time"] == len(t), "t = 0 has no logarithm"
    assert float(found.standard_error) < 1e-12


def test_the_intrinsic_clock_is_each_samples_own():
    t = np.linspace(0, 1, 101)
    clock = np.stack([20 * t, 30 * t], 1)
    run = trajectory(t, np.exp(-0.5 * clock), clock=clock)
    rates = decay_rate(run, torch.zeros(2), "intrinsic").rate
    np.testing.assert_allclose(rates, 0.5, rtol=1e-12)


@pytest.mark.parametrize(
    ("status", "t", "rates", "shares"),
    [
        ("SHORT", np.linspace(0, 6, 200), [1.0], [1.0]),  # 2.6 decades
        ("FEW_POINTS", np.linspace(0, 20, 15), [1.0], [1.0]),
        ("CURVED", np.linspace(0, 12, 200), [1.0, 1.6], [1.0, 30.0]),
        ("FITTED", np.linspace(0, 18, 200), [1.0, 1.6], [1.0, 30.0]),
    ],
)
def test_a_window_says_why_it_has_no_rate(status, t, rates, shares):
    found = fit(t, sum(a * np.exp(-r * t) for a, r in zip(shares, rates, strict=True)))
    assert found.status == FitStatus[status]
    assert math.isnan(found.rate) == (status != "FITTED")
    assert math.isnan(found.standard_error) == (status != "FITTED")
    if status == "FITTED":
        assert float(found.rate) == pytest.approx(1.0, rel=0.02)
        assert 1 < float(found.rate_late) < float(found.rate) < float(found.rate_early)


def test_the_window_ends_where_the_gap_meets_rounding():
    t = np.linspace(0, 60, 601)
    found = fit(t, -1e3 + np.exp(-t), limit=-1e3)
    floor = 100 * np.finfo(float).eps * 1e3
    assert float(found.window_end) == pytest.approx(-math.log(floor), abs=0.1)
    assert float(found.rate) == pytest.approx(1, abs=1e-3)
    energy = np.exp(-t)
    energy[200:] = np.nan  # the sample ended
    assert float(fit(t, energy).window_end) == t[199]


def test_an_anisotropic_well_falls_at_twice_its_least_rate():
    """The local rate is 2 sum r^3 x^2 / sum r x^2, exactly."""
    rates = torch.tensor([[0.4, 1.0], [1.3, 2.0]], dtype=torch.float64)
    start = torch.ones(1, 2, 2, dtype=torch.float64)
    problem = anisotropic_well(rates, start)
    times = np.linspace(0, 16, 801)
    solution = ed.solve(problem.system, start, times.tolist(), "rk4", step=0.02, gradient=None)
    found = decay_rate(solution, torch.zeros(1), slowest=torch.tensor([0.4])).isel(sample=0)
    rates = rates.flatten().numpy()
    weights = rates * np.exp(-2 * rates * times[:, None])
    exact = 2 * (weights * rates).sum(1) / weights.sum(1)
    np.testing.assert_allclose(found.local_rate[1:-1], exact[1:-1], rtol=2e-4)
    assert found.status == FitStatus.FITTED
    assert float(found.predicted) == pytest.approx(0.8)
    assert abs(float(found.deviation)) < 1e-3


def asymptotic(system, x0, end, points):
    """Leaky flow at eps = 0, its limit from the sphere's equilibrium, and kappa_min there."""
    leaky, sphere = system.with_dynamics("leaky"), system.with_dynamics("sphere")
    times = torch.linspace(0, end, points).tolist()
    flow = ed.solve(leaky, x0, times, "batched_dopri5", rtol=1e-8, atol=1e-10, gradient=None)
    rest = ed.find_equilibrium(sphere, flow.x[-1], tol=1e-10, throw=True)
    limit = torch.stack(list(sphere.energies(rest.x, relative=True).values())).sum(0)
    kappa = spectrum(leaky, leaky.force(rest.x), k=2, which="lowest").eigenvalue
    return flow, limit, torch.from_numpy(kappa.to_numpy())


@pytest.mark.parametrize(("hopfield", "seed"), [("softmax", 0), ("softmax", 3), ("relu", 2)])
def test_et_f29_the_energy_gap_decays_with_twice_kappa_min(make_case, hopfield, seed):
    """Of random systems, in log-time: within 5 % where a window supports a fit."""
    case = make_case(dim=6, tokens=4, batch=3, eps=0.0, hopfield=hopfield, seed=seed)
    flow, limit, kappa = asymptotic(case.system, case.x, 60.0, 121)
    data = flow.to_xarray(states=False, relative=True)
    found = decay_rate(data, limit, slowest=kappa[:, 0])
    fitted = found.status.to_numpy() == FitStatus.FITTED
    assert fitted.any()
    assert np.abs(found.deviation.to_numpy()[fitted]).max() < 0.05
    # the same numbers are the exponents of the published flow: gap ~ t^-rate
    published = conjugate(flow, 1.0)
    assert published.system.dynamics == "et"
    log_time = decay_rate(
        trajectory(published.t.numpy() + 1, data.energy), limit, "log time", slowest=kappa[:, 0]
    )
    np.testing.assert_allclose(log_time.rate, found.rate, rtol=1e-10)


def test_et_f29_the_published_flow_itself_falls_as_a_power(make_case):
    """Without the conjugacy, from t = 1 to 1e18, the limit from the sphere."""
    case = make_case(dim=6, tokens=4, batch=2, eps=0.0, hopfield="softmax", seed=3)
    _, limit, kappa = asymptotic(case.system, case.x, 30.0, 2)
    times = [0.0, *np.geomspace(1, 1e18, 121)]
    flow = ed.solve(case.system, case.x, times, "batched_dopri5", rtol=1e-8, gradient=None)
    data = flow.to_xarray(states=False, relative=True)
    found = decay_rate(data, limit, "log time", slowest=kappa[:, 0])
    assert (found.status == FitStatus.FITTED).all()
    assert float(abs(found.deviation).max()) < 0.05
    early = data.isel(time=data.time <= 100)
    assert (decay_rate(early, limit, "log time").status != FitStatus.FITTED).all()


def log_time_gap(case, eps, rtol):
    """Relative distance of z(s) = exp(-s) x(exp(s) - 1) from the leaky flow, 0 <= s <= 2."""
    case.system.lagrangian.eps = eps
    s = np.linspace(0, 2, 5)
    options = {"rtol": rtol, "atol": rtol / 100, "gradient": None}
    flow, leaky = (
        ed.solve(case.system.with_dynamics(name), case.x, t.tolist(), "batched_dopri5", **options)
        for name, t in (("et", np.expm1(s)), ("leaky", s))
    )
    moved = conjugate(flow)
    assert float((moved.t - leaky.t).abs().max()) < 1e-14
    assert moved.system.dynamics == "leaky"
    return float((moved.x - leaky.x).abs().max() / leaky.x.abs().max())


@pytest.mark.parametrize(("hopfield", "limit"), [("softmax", 1e-8), ("relu", 1e-6)])
def test_et_f27_the_leaky_flow_is_the_published_one_in_log_time(make_case, hopfield, limit):
    """To the solver's error, which the kinks of relu raise."""
    assert log_time_gap(make_case(hopfield=hopfield), 0.0, 1e-9) < limit


def test_et_f27_with_eps_the_conjugacy_holds_to_order_eps(make_case):
    case = make_case(hopfield="softmax")
    rough, fine = (log_time_gap(case, eps, 1e-8) for eps in (1e-3, 1e-4))
    assert rough / fine == pytest.approx(10, rel=0.1)
    assert rough < 1e-2


def test_et_f27_conjugate_of_conjugate_is_where_it_began(make_case, close):
    case = make_case()
    for method in ("dopri5", "batched_dopri5"):
        flow = ed.solve(case.system, case.x, [0.0, 0.5, 3.0], method, gradient=None)
        back = conjugate(conjugate(flow, 0.7), 0.7)
        close(back.t, flow.t, 1e-15)
        close(back.x, flow.x, 1e-15)
        close(back.x_end, flow.x_end, 1e-15)
        assert back.system.dynamics == "et" and torch.equal(back.status, flow.status)


def test_et_f27_an_offset_is_a_choice_of_scale(make_case, close):
    """The flow has no clock of its own: at eps = 0, z from any offset obeys the leaky flow."""
    case = make_case(eps=0.0, hopfield="softmax")
    flow = ed.solve(
        case.system,
        case.x,
        np.linspace(0, 1, 5).tolist(),
        "batched_dopri5",
        rtol=1e-9,
        gradient=None,
    )
    for offset in (0.3, 5.0):
        moved = conjugate(flow, offset)
        again = ed.solve(
            moved.system, case.x / offset, moved.t, "batched_dopri5", rtol=1e-9, gradient=None
        )
        close(moved.x, again.x, 1e-7)


def test_et_f28_the_conjugate_of_euler_is_a_harmonically_damped_map(make_case, close):
    """z_{k+1} = (1 - eta_k) z_k + eta_k F(z_k), eta_k = alpha / c_{k+1}, c_k = c_0 + k alpha."""
    for case in (make_case(eps=0.0), make_case(eps=0.0, hopfield="softmax", seed=1)):
        step, offset = 0.1, 2.0
        run = conjugate(ed.descend(case.system, case.x, step, 12), offset)
        assert run.system.dynamics == "leaky"
        for k, (before, after) in enumerate(pairwise(run.x), 1):
            close(after, run.system.map(before, step / (offset + k * step)), 5e-15)
        assert float(run.t[-1] - run.t[0]) == pytest.approx(math.log1p(12 * step / offset))


@pytest.fixture(scope="module")
def trained():
    """The digits model without eps, in float64, and starts for it."""
    model = ed.load_model(DIGITS).double().requires_grad_(False)
    model.system.lagrangian.eps = 0.0
    return model.system, model.tokens(
        digits().test[:4].double(), evaluation_masks(4, model.patches)
    )


def test_et_f29_the_trained_model_decays_with_twice_kappa_min(trained):
    """From near its equilibria; from the images themselves see the slow test below."""
    system, x0 = trained
    rest = ed.find_equilibrium(system, x0[[0, 2]], "newton-krylov", tol=1e-10, throw=True).x
    noise = torch.randn(rest.shape, generator=torch.Generator().manual_seed(0), dtype=rest.dtype)
    start = rest + 0.05 * system.lagrangian.sigma(rest).unsqueeze(-1) * noise
    flow, limit, kappa = asymptotic(system, start, 100.0, 201)
    data = flow.to_xarray(states=False, relative=True)
    found = decay_rate(data, limit, slowest=kappa[:, 0])
    assert (found.status == FitStatus.FITTED).all()
    assert float(abs(found.deviation).max()) < 0.05
    assert 0.05 < float(kappa.min()) < 0.2, "one decade of the gap, at most, by t = 1e4"
    by_1e4 = data.isel(time=data.time <= math.log(1e4))
    assert decay_rate(by_1e4, limit).status[0] != FitStatus.FITTED


@pytest.mark.slow
def test_et_f29_the_trained_model_from_its_images(trained):
    """One image reaches the law after log-time 100; another crosses saddles beyond 200."""
    system, x0 = trained
    flow, limit, kappa = asymptotic(system, x0[:2], 200.0, 401)
    data = flow.to_xarray(states=False, relative=True)
    found = decay_rate(data, limit, slowest=kappa[:, 0])
    assert found.status.to_numpy().tolist() == [FitStatus.SHORT, FitStatus.FITTED]
    assert abs(float(found.deviation[1])) < 0.05
    assert float(found.window_start[1]) > 100


def test_et_f28_holds_on_the_trained_model(close, trained):
    system, x0 = trained
    run = conjugate(ed.descend(system, x0[:2], 0.1, 12))
    for k, (before, after) in enumerate(pairwise(run.x), 1):
        close(after, run.system.map(before, 0.1 / (1 + k * 0.1)), 5e-15)


def test_results_survive_the_disk(tmp_path):
    t = np.linspace(0, 20, 201)
    found = decay_rate(trajectory(t, np.exp(-t)), torch.zeros(1), slowest=torch.tensor([0.5]))
    ed.save(found, tmp_path / "rate")
    xr.testing.assert_identical(ed.load(tmp_path / "rate"), found)
    for name, variable in found.variables.items():
        if name != "sample":
            assert variable.attrs["units"] == "1" and variable.attrs["long_name"], name


def test_wrong_input_is_named(make_case):
    t = np.linspace(0, 20, 201)
    run = trajectory(t, np.exp(-t))
    zero = torch.zeros(1)
    for name, call in {
        "limit": lambda: decay_rate(run, torch.zeros(2)),
        "slowest": lambda: decay_rate(run, zero, slowest=torch.zeros(2)),
        "clock": lambda: decay_rate(run, zero, "log"),
        "decades": lambda: decay_rate(run, zero, decades=0.0),
        "straight": lambda: decay_rate(run, zero, straight=-1.0),
        "run": lambda: decay_rate(run.drop_vars("energy"), zero),
        "saved times": lambda: decay_rate(run.isel(time=[0, 1]), zero),
        "intrinsic|clock": lambda: decay_rate(run, zero, "intrinsic"),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
    case = make_case()
    flow = ed.solve(case.system, case.x, [-3.0, -2.0], gradient=None)
    with pytest.raises(ValueError, match="solution: expected times after"):
        conjugate(flow)
    with pytest.raises(ValueError, match="offset"):
        conjugate(flow, 0.0)
    sphere = ed.solve(case.system.with_dynamics("sphere"), case.x, [0.0, 0.1], gradient=None)
    with pytest.raises(ValueError, match=r"solution\.system\.dynamics"):
        conjugate(sphere)
    saved = ed.solve(case.system, case.x, [0.0, 0.1], gradient=None, save=["residual"])
    with pytest.raises(ValueError, match="saved its states"):
        conjugate(saved)
