"""Orders, errors in g, and work against precision (ET-F13, ET-F14)."""

import math

import numpy as np
import pytest
import torch
import xarray as xr

import etdyn as ed
from etdyn.analysis.precision import (
    DisagreementError,
    error_in_g,
    method_order,
    reference_solution,
    work_precision,
)
from etdyn.problems import anisotropic_well, single_memory

PROBLEM = {"dim": 6, "overlap": 0.5, "offset": 1.0}
TIMES = [0.0, 0.5, 2.0]


@pytest.fixture(scope="module")
def problem():
    return single_memory(**PROBLEM)


def exact_solution(problem, times=TIMES):
    """The exact motion, as a Solution."""
    run = ed.solve(problem.system, problem.start, times, "euler", step=0.5, gradient=None)
    run.x = torch.stack([problem.exact(t) for t in times])
    return run


def test_et_f13_euler_has_order_one(problem):
    """1.02, 1.01, 1.006 as the step is halved, with errors against the implicit solution."""
    found = method_order(problem, ["euler"], [2 / n for n in (64, 128, 256, 512)], 2.0)
    local = found.local_order.to_numpy()[0]
    excess = local[:3] - 1
    np.testing.assert_allclose(excess[:-1] / excess[1:], 2, rtol=0.05)
    assert 0.001 < excess[-1] < 0.01 and math.isnan(local[3])
    assert float(found.order[0]) == pytest.approx(1, abs=0.02)
    assert float(found.standard_error[0]) < 0.01


def test_et_f13_orders_of_the_fixed_step_methods(problem):
    orders = {"midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}
    found = method_order(problem, list(orders), [2 / n for n in (16, 32, 64)], 2.0)
    np.testing.assert_allclose(found.order, list(orders.values()), atol=0.12)
    assert (found.standard_error < 0.1).all()


def test_errors_at_rounding_are_left_out(problem):
    found = method_order(problem, ["rk4"], [0.1 / n for n in (1, 2, 4, 256, 512)], 0.1)
    assert float(found.error[0, -1]) < 1e-14
    assert np.isnan(found.local_order[0, 2:]).all()
    assert float(found.order[0]) == pytest.approx(4, abs=0.1)
    tiny = method_order(problem, ["rk4"], [0.1 / n for n in (128, 256, 512)], 0.1)
    assert np.isnan(tiny.order).all() and np.isnan(tiny.standard_error).all()


def test_an_error_in_g_is_the_distance_of_the_activations(problem, close):
    run = exact_solution(problem)
    rough = ed.solve(problem.system, problem.start, TIMES, "rk4", step=0.5, gradient=None)
    found = error_in_g(rough, run)
    g = problem.system.activation(rough.x[:, 0]) - problem.system.activation(run.x[:, 0])
    apart = g.norm(dim=-1) / math.sqrt(6)
    close(found.error_max.to_numpy(), apart.detach(), 1e-15)
    close(found.error_mean.to_numpy(), found.error_max.to_numpy(), 0)  # of one token
    shifted = exact_solution(problem)
    shifted.x = shifted.x + 3.0
    assert float(error_in_g(shifted, run).error_max.max()) < 1e-15, "means of tokens do not count"


def test_an_error_in_g_is_nan_where_there_is_no_state(make_case):
    case = make_case()
    whole = ed.solve(case.system, case.x, TIMES, gradient=None)
    part = ed.solve(
        case.system, case.x, TIMES, "rk4", step=0.1, gradient=None, max_steps=12, throw=False
    )
    assert len(part.t) == 3 and 0.5 < float(part.t[-1]) < 2 and part.failure is not None
    found = error_in_g(part, whole)
    known = np.isin(whole.t, part.t)
    assert np.array_equal(np.isfinite(found.error_max).all("sample"), known)
    assert np.array_equal(found.time, whole.t)
    assert (found.error_mean[known][1:] < found.error_max[known][1:]).all()
    present = case.token_mask()
    masked = case.system.masked(tokens=present)
    moved, other = (
        ed.solve(masked, x, TIMES, "rk4", step=0.1, gradient=None)
        for x in (case.x, case.x + case.randn(*case.x.shape) * ~present[..., None])
    )
    assert float(error_in_g(moved, other).error_max.max()) < 1e-12, "absent tokens do not count"


def test_a_reference_is_as_good_as_it_says(problem):
    for agreement in (1e-6, 1e-9):
        run = reference_solution(problem.system, problem.start, TIMES, agreement)
        error = error_in_g(run, exact_solution(problem)).error_max
        assert run.config["agreement"] <= agreement
        assert float(error.max()) < agreement


def test_a_reference_that_cannot_be_trusted_raises():
    """Errors grow as exp(4 t): no two methods agree on such an unstable end."""
    rates = torch.tensor([[-4.0]], dtype=torch.float64)
    problem = anisotropic_well(rates, torch.ones(1, 1, 1, dtype=torch.float64))
    assert reference_solution(problem.system, problem.start, [0.0, 0.5], 1e-6)
    with pytest.raises(DisagreementError, match="dopri5 and tsit5"):
        reference_solution(problem.system, problem.start, [0.0, 4.0], 1e-6)


METHODS = {
    "rk4": [ed.Method("rk4", step=h) for h in (0.25, 0.125, 0.0625)],
    "euler": [ed.Method("euler", step=h) for h in (0.25, 0.125, 0.0625)],
    "dopri5": [ed.Method("dopri5", rtol=10.0**-k, atol=10.0**-k) for k in (4, 6, 8)],
    "batched_bosh3": [ed.Method("batched_bosh3", rtol=10.0**-k, atol=10.0**-k) for k in (4, 6, 8)],
}


def test_work_and_precision_of_known_methods(problem):
    found = work_precision(
        problem.system, problem.start, METHODS, exact_solution(problem), repeats=1
    ).isel(sample=0)
    error, cost = found.error.to_pandas(), found.evaluations.to_pandas()
    assert (found.failures == 0).all() and (found.status == ed.Status.FINISHED).all()
    assert cost.loc["rk4"].tolist() == [32, 64, 128]
    assert cost.loc["euler"].tolist() == [8, 16, 32]
    assert (found.seconds > 0).all() and found.seconds.attrs["units"] == "s"
    for name, order in (("rk4", 4), ("euler", 1)):
        rates = np.log2(error.loc[name].to_numpy()[:-1] / error.loc[name].to_numpy()[1:])
        np.testing.assert_allclose(rates, order, atol=0.25)
    for name in ("dopri5", "batched_bosh3"):
        assert (np.diff(np.log10(error.loc[name])) < -1).all(), "the error follows the tolerance"
        assert (np.diff(cost.loc[name]) > 0).all()
    assert found.step_or_rtol.sel(solver="rk4").to_numpy().tolist() == [0.25, 0.125, 0.0625]
    assert found.step_or_rtol.sel(solver="dopri5").to_numpy().tolist() == [1e-4, 1e-6, 1e-8]


def test_a_failure_is_an_empty_cell_with_its_status(make_case, tmp_path):
    case = make_case()
    case.x[1] *= 1e-2  # steep: needs more steps than its neighbour
    reference = reference_solution(case.system, case.x, TIMES, 1e-4)
    methods = {name: METHODS[name][::2] for name in ("dopri5", "batched_bosh3")}
    found = work_precision(case.system, case.x, methods, reference, repeats=1, max_steps=60)
    failed = np.isnan(found.error)
    assert np.array_equal(failed.sum("sample"), found.failures)
    assert np.array_equal(failed, found.status != ed.Status.FINISHED)
    assert np.array_equal(np.isnan(found.error_max), found.failures > 0)
    assert np.array_equal(np.isnan(found.error_median), found.failures > 0)
    assert found.status.sel(solver="batched_bosh3")[1].to_numpy().tolist() == [1, 1]
    assert found.failures.sel(solver="dopri5")[0] == 0
    assert (found.evaluations > 0).all() and (found.seconds > 0).all()
    ed.save(found, tmp_path / "work")
    xr.testing.assert_identical(ed.load(tmp_path / "work"), found)


def test_float32_is_held_against_float64(make_case):
    case = make_case(hopfield="softmax")
    reference = reference_solution(case.system, case.x, TIMES, 1e-8)
    single = make_case(hopfield="softmax").system.float()
    methods = {"rk4": [ed.Method("rk4", step=0.02)]}
    found = work_precision(single, case.x.float(), methods, reference, repeats=1)
    assert found.attrs["dtype"] == "float32" and found.error.dtype == np.float64
    assert 1e-8 < found.error_max.item() < 1e-5


def test_wrong_input_is_named(problem, make_case):
    exact = exact_solution(problem)
    system, x0 = problem.system, problem.start
    other = ed.solve(system, x0, [0.0, 7.0], gradient=None)
    other.t = other.t + 1.0
    euler = {"euler": METHODS["euler"]}
    for name, call in {
        "methods": lambda: method_order(problem, ["dopri5"], [1.0, 0.5, 0.25], 2.0),
        "steps": lambda: method_order(problem, ["rk4"], [1.0, 0.5], 2.0),
        "steps:": lambda: method_order(problem, ["rk4"], [1.0, 0.7, 0.5], 2.0),
        "end": lambda: method_order(problem, ["rk4"], [1.0, 0.5, 0.25], -2.0),
        "agreement": lambda: reference_solution(system, x0, TIMES, 1e-14),
        "solution": lambda: error_in_g(other, exact),
        "repeats": lambda: work_precision(system, x0, euler, exact, repeats=0),
        "methods:": lambda: work_precision(system, x0, {**euler, "rk4": []}, exact),
        "x0": lambda: work_precision(system, x0 + x0.roll(1, 2), euler, exact),
        "reference": lambda: work_precision(system.with_dynamics("leaky"), x0, euler, exact),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
    with pytest.raises(TypeError, match="float64"):
        reference_solution(make_case().system.float(), make_case().x.float(), TIMES)
    few = ed.solve(system, x0, TIMES, gradient=None, save=["residual"])
    with pytest.raises(ValueError, match="saved its states"):
        error_in_g(few, exact)
    batch = ed.solve(system, x0.repeat(2, 1, 1), TIMES, gradient=None)
    with pytest.raises(ValueError, match="solution"):
        error_in_g(batch, exact)


def test_a_failing_solve_has_no_order():
    rates = torch.tensor([[-1e200]], dtype=torch.float64)
    broken = anisotropic_well(rates, torch.ones(1, 1, 1, dtype=torch.float64))
    found = method_order(broken, ["euler"], [0.5, 0.25, 0.125], 1.0)
    assert np.isnan(found.error).all() and np.isnan(found.order).all()
