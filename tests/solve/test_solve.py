"""The two ways to move a system: agreement, statuses, costs, labels, refusals."""

import itertools
import json
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from torchdiffeq._impl.odeint import SOLVERS

import etdyn as ed
from etdyn.solve import Interpolant
from etdyn.solve.methods import STEPPERS


def smooth_system(seed: int = 0) -> ed.EnergyTransformer:
    torch.manual_seed(seed)
    return ed.EnergyTransformer(8, 2, 4, 12, hopfield="softmax").double()


@pytest.fixture
def system():
    return smooth_system()


@pytest.fixture
def x0():
    return torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Falling(ed.System):
    """x' = -1 until x crosses zero, then NaN; the layer norm is along for the ride."""

    def velocity(self, t, x):
        return torch.where(x > 0, -torch.ones_like(x), torch.full_like(x, torch.nan))


class BlowUp(ed.System):
    """x' = x^2, which reaches infinity at t = 1/x(0)."""

    def velocity(self, t, x):
        return x * x


def broken(kind):
    return kind(ed.LayerNorm(8), ed.Hopfield(8, 3)).double()


# --- agreement -----------------------------------------------------------------------------------


def test_offered_methods_are_the_installed_ones_and_ours():
    assert set(STEPPERS) == {"guarded_euler", "discrete_gradient", "matrix_free_midpoint"}
    ours = {"batched_bosh3", "batched_dopri5", "batched_tsit5"} | set(STEPPERS)
    assert set(ed.available_methods()) == set(SOLVERS) | ours
    fixed, adaptive = ed.available_methods(True), ed.available_methods(False)
    assert set(fixed) | set(adaptive) == set(SOLVERS) | ours
    assert not set(fixed) & set(adaptive)
    assert "rk4" in fixed
    assert "dopri5" in adaptive


@pytest.mark.parametrize("name", ed.available_methods())
def test_every_method_reaches_the_same_state(system, x0, name):
    times = [0.0, 0.5, 1.0]
    reference = ed.solve(system, x0, times, "dopri8", rtol=1e-12, atol=1e-12, gradient=None)
    step = 1e-2 if name in ed.available_methods(True) else None
    # what one can afford at low order
    tolerance = {"adaptive_heun": 1e-5, "fehlberg2": 1e-6, "bosh3": 1e-7}.get(name, 1e-8)
    found = ed.solve(
        system, x0, times, name, step=step, rtol=tolerance, atol=tolerance / 100, gradient=None
    )
    error = float((found.x - reference.x).abs().max())
    bounds = {
        "euler": 0.1, "guarded_euler": 0.1, "discrete_gradient": 2e-3,
        "matrix_free_midpoint": 2e-3, "midpoint": 2e-3,
        "heun2": 2e-3, "heun3": 2e-5, "explicit_adams": 5e-6,
        "fehlberg2": 3e-4, "adaptive_heun": 5e-5, "bosh3": 2e-5, "batched_bosh3": 2e-6,
    }  # fmt: skip
    assert error < bounds.get(name, 5e-7)
    assert found.status.tolist() == [ed.Status.FINISHED] * 3
    assert torch.equal(found.t, torch.tensor(times, dtype=torch.float64))


def test_euler_solve_is_the_discrete_model(system, x0):
    flow = ed.solve(system, x0, np.arange(13) * 0.1, "euler", step=0.1, gradient=None)
    with torch.no_grad():
        discrete = ed.descend(system, x0, step=0.1, steps=12)
    assert float((flow.x - discrete.x).abs().max()) < 1e-12
    assert flow.stats.evaluations == discrete.stats.evaluations == 12


def test_fixed_grids_meet_save_times_exactly(system, x0):
    # rk4 with a linear interpolation between off-grid steps would lose its order here
    times = [0.0, 0.37, 1.01]
    reference = ed.solve(system, x0, times, "dopri8", rtol=1e-12, atol=1e-12, gradient=None)
    errors = [
        float(
            (ed.solve(system, x0, times, "rk4", step=h, gradient=None).x - reference.x).abs().max()
        )
        for h in (0.1, 0.05)
    ]
    assert 12 < errors[0] / errors[1] < 22  # 2^4 = 16


def test_costs_are_counted(system, x0):
    calls = 0
    velocity = system.velocity

    def counting(t, x):
        nonlocal calls
        calls += 1
        return velocity(t, x)

    system.velocity = counting
    solution = ed.solve(system, x0, [0, 1, 3.0], "dopri5", gradient=None)
    stats = solution.stats
    assert stats.evaluations == calls
    # two evaluations to choose the first step, six a step after that
    assert calls == 2 + 6 * (stats.accepted + stats.rejected)
    assert stats.backward == 0
    assert stats.seconds > 0
    first, middle, last = stats.at_save_times
    assert first == 0 < middle < last == calls


def test_errors_are_those_of_the_worst_sample(system, x0):
    """A-F11: with a root mean square over the batch, a hard sample would drown among easy ones."""
    hard = x0[:1] * 0.05  # a small sigma makes g move fast
    easy = torch.randn(1, 4, 8, dtype=torch.float64).expand(200, -1, -1) * 50
    reference = ed.solve(system, hard, [0, 1.0], rtol=1e-11, atol=1e-11, gradient=None).x[-1]
    alone = ed.solve(system, hard, [0, 1.0], rtol=1e-4, atol=1e-6, gradient=None).x[-1]
    crowd = ed.solve(
        system, torch.cat([hard, easy]), [0, 1.0], rtol=1e-4, atol=1e-6, gradient=None
    ).x[-1, :1]
    assert float((crowd - reference).norm()) < 3 * float((alone - reference).norm())


def test_gradients_agree_with_each_other_and_with_finite_differences(system, x0):
    def loss(gradient):
        times = torch.linspace(0, 1, 11)
        solution = ed.solve(system, x0, times, rtol=1e-10, atol=1e-10, gradient=gradient)
        return solution.x[-1].square().sum(), solution

    system.zero_grad()
    value, _ = loss("direct")
    value.backward()
    direct = {n: p.grad.clone() for n, p in system.named_parameters()}
    for gradient in ("checkpoint", "backsolve"):
        system.zero_grad()
        value, solution = loss(gradient)
        before = solution.stats.backward
        value.backward()
        assert solution.stats.backward > before
        for name, parameter in system.named_parameters():
            scale = direct[name].abs().max()
            assert float((parameter.grad - direct[name]).abs().max() / scale) < 1e-6, name
    assert solution.stats.backsolve.drift < 1e-6
    assert solution.stats.backsolve.anchors > 1
    config = json.loads(solution.to_xarray(states=False).attrs["etdyn_config"])
    assert config["stats"]["backsolve"]["anchors"] == solution.stats.backsolve.anchors
    weight, h = system.hopfield.memories, 1e-5
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            weight[0, 0] += sign * h
            ends.append(float(loss(None)[0]))
            weight[0, 0] -= sign * h
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(
        float(direct["hopfield.memories"][0, 0]), rel=1e-5
    )


@pytest.mark.filterwarnings("error")
def test_an_implicit_corrector_that_gives_up_is_counted_and_not_a_warning(system, x0):
    stiff = system.with_dynamics("leaky")
    rough = ed.solve(stiff, x0 * 0.01, [0, 8.0], "implicit_adams", step=2.0, gradient=None)
    fine = ed.solve(stiff, x0, [0, 1.0], "implicit_adams", step=0.01, gradient=None)
    assert rough.stats.unconverged > 0
    assert fine.stats.unconverged == 0


class Talkative(ed.System):
    """A velocity with a warning of its own."""

    def velocity(self, t, x):
        warnings.warn("from the user", stacklevel=2)
        return -x


def test_a_users_warning_is_neither_swallowed_nor_counted(x0):
    for method in ("euler", "implicit_adams"):
        with pytest.warns(UserWarning, match="from the user"):
            found = ed.solve(broken(Talkative), x0, [0, 1.0], method, step=0.1, gradient=None)
        assert found.stats.unconverged == 0
    with pytest.warns(UserWarning, match="from the user"):
        ed.solve(broken(Talkative), x0, [0, 1.0], "scipy_solver", gradient=None)


def test_the_discrete_model_has_the_same_gradient_by_checkpoints(system, x0):
    grads = []
    for gradient in ("direct", "checkpoint"):
        generator = torch.Generator().manual_seed(0)
        found = ed.descend(system, x0, 0.1, 30, noise=0.02, generator=generator, gradient=gradient)
        (grad,) = torch.autograd.grad(found.x[-1].square().sum(), system.hopfield.memories)
        grads.append(grad)
    assert float((grads[0] - grads[1]).abs().max()) <= 1e-12 * float(grads[0].abs().max())
    assert not ed.descend(system, x0, gradient=None).x.requires_grad
    with pytest.raises(ValueError, match="gradient: expected one of 'direct', 'checkpoint'"):
        ed.descend(system, x0, gradient="backsolve")


def test_no_gradient_keeps_no_graph(system, x0):
    assert not ed.solve(system, x0, [0, 1.0], gradient=None).x.requires_grad
    assert ed.solve(system, x0, [0, 1.0]).x.requires_grad


def test_float32_states_stay_float32_with_exact_times(x0):
    system = smooth_system().float()
    solution = ed.solve(system, x0.float(), [0, 0.1, 0.3], rtol=1e-4, atol=1e-5, gradient=None)
    assert solution.x.dtype == torch.float32
    assert solution.t.dtype == torch.float64


def test_sphere_start_is_normalised(x0):
    system = smooth_system().with_dynamics("sphere")
    for solution in (ed.solve(system, x0, [0, 1.0], gradient=None), ed.descend(system, x0)):
        start = solution.x[0]
        assert float(start.mean(-1).abs().max()) < 1e-14
        assert float((start.square().mean(-1) - 1).abs().max()) < 1e-14
    ends = ed.descend(system, x0, 0.1, 20).x[-1]
    assert float((ends.square().mean(-1) - 1).abs().max()) < 1e-14


# --- noise ---------------------------------------------------------------------------------------


def test_noise_has_the_stated_size_and_the_generators_seed(x0):
    system = ed.System(ed.LayerNorm(8), ed.Hopfield(8, 1)).double()
    with torch.no_grad():
        system.hopfield.memories.zero_()  # no force: only the noise moves
    x0 = x0.repeat(400, 1, 1)

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return ed.descend(system, x0, 0.25, 4, noise=0.02, generator=generator).x

    moved = run(0)[-1] - x0
    assert float(moved.std()) == pytest.approx(0.02 * (0.25 * 4) ** 0.5, rel=0.02)
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


# --- statuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "step"), [("dopri5", None), ("rk4", 0.125), ("euler", 0.125), ("scipy_solver", None)]
)
def test_a_nan_velocity_is_a_status_with_everything_until_then(method, step):
    x0 = torch.full((3, 2, 8), 10.0, dtype=torch.float64)
    x0[1] = 1.0  # crosses zero at t = 1
    arguments = {"method": method, "step": step, "gradient": None}
    solution = ed.solve(broken(Falling), x0, [0, 0.5, 2.0, 3.0], throw=False, **arguments)
    status = [ed.Status(s) for s in solution.status.tolist()]
    assert status == [ed.Status.INTERRUPTED, ed.Status.NONFINITE, ed.Status.INTERRUPTED]
    assert solution.failure.samples == (1,)
    assert bool(torch.isfinite(solution.x).all())
    if method != "scipy_solver":  # which does not say what it accepted
        assert 0.5 < float(solution.t[-1]) <= 1.0
        expected = x0 - solution.t[:, None, None, None]
        assert float((solution.x - expected).abs().max()) < 1e-12
        t, size = solution.failure.steps[-1]
        assert t + size == pytest.approx(solution.failure.time, abs=1e-12)
    assert float(solution.t[-1]) == solution.failure.time
    with pytest.raises(ed.SolveError, match=r"NONFINITE.*samples \[1\]") as caught:
        ed.solve(broken(Falling), x0, [0, 0.5, 2.0, 3.0], **arguments)
    assert torch.equal(caught.value.solution.x, solution.x)


def test_blow_up_ends_with_a_status_before_its_time():
    x0 = torch.full((2, 1, 8), 0.1, dtype=torch.float64)
    x0[0] = 2.0  # infinite at t = 0.5
    solution = ed.solve(broken(BlowUp), x0, [0, 0.25, 1.0], gradient=None, throw=False)
    assert solution.failure is not None
    assert solution.failure.time < 0.5 + 1e-6
    assert float(solution.x[1, 0].mean()) == pytest.approx(2 / (1 - 0.5), rel=1e-5)
    assert float(solution.x[1, 1].mean()) == pytest.approx(0.1 / (1 - 0.025), rel=1e-5)


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_the_step_limit_counts_the_whole_solve(system, x0, method):
    step = 0.05 if method == "rk4" else None
    times = torch.linspace(0, 20, 41)
    solution = ed.solve(
        system, x0, times, method, step=step, rtol=1e-9, max_steps=30, gradient=None, throw=False
    )
    assert set(solution.status.tolist()) == {ed.Status.MAX_STEPS}
    assert solution.stats.accepted + solution.stats.rejected == 30
    full = ed.solve(system, x0, times, method, step=step, rtol=1e-9, gradient=None)
    kept = len(solution.t) - 1
    assert kept > 1
    assert len(solution.stats.at_save_times) == len(solution.t)
    assert solution.stats.at_save_times[-1] == solution.stats.evaluations
    assert torch.equal(solution.x[:kept], full.x[:kept])
    with pytest.raises(ed.SolveError, match="MAX_STEPS"):
        ed.solve(system, x0, times, method, step=step, rtol=1e-9, max_steps=30, gradient=None)


def test_descend_ends_at_the_last_finite_state():
    x0 = torch.full((2, 2, 8), 9.0, dtype=torch.float64)
    x0[0] = 2.5
    solution = ed.descend(broken(Falling), x0, step=1.0, steps=8, throw=False)
    assert [ed.Status(s).name for s in solution.status.tolist()] == ["NONFINITE", "INTERRUPTED"]
    assert solution.t.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert bool(torch.isfinite(solution.x).all())
    assert torch.equal(solution.x_end, solution.x[-1])
    assert solution.t_end.tolist() == [3.0, 3.0]
    assert float(solution.to_xarray()["t_end"][0]) == 3.0


# --- labels and files ----------------------------------------------------------------------------


def test_to_xarray_names_and_measures(system, x0):
    leaky = system.with_dynamics("leaky")
    solution = ed.solve(leaky, x0, torch.linspace(0, 2, 201), rtol=1e-9, gradient=None)
    data = solution.to_xarray()
    assert data["x"].dims == ("time", "sample", "token", "feature")
    assert np.array_equal(data["x"], solution.x)
    terms = [data[f"energy_{n}"] for n in ("attention", "hopfield", "lagrangian")]
    assert np.allclose(sum(terms), data["energy"], rtol=1e-14)
    slope = np.gradient(data["energy"], data["time"], axis=0, edge_order=2)
    inside = slice(5, -5)
    assert np.allclose(slope[inside], -data["dissipation"][inside], rtol=2e-3)
    assert np.allclose(data["residual"][-1], leaky.residual(solution.x[-1]).detach())
    assert data.attrs["etdyn_schema"] == "etdyn.solution/1"
    config = json.loads(data.attrs["etdyn_config"])
    assert config["method"]["name"] == "dopri5"
    assert config["system"]["config"]["hopfield"] == "softmax"
    assert "x" not in solution.to_xarray(states=False)
    lean = solution.to_xarray(relative=True)
    constant = -3 * 0 + 2 * 4 / leaky.attention.beta * np.log(3) + 4 * np.log(12)
    assert np.allclose(lean["energy"] - data["energy"], constant, rtol=1e-12)


def test_save_and_load_round_trip(system, x0, tmp_path):
    solution = ed.descend(system, x0)
    path = tmp_path / "run.zarr"
    solution.save(path)
    back = ed.load(path)
    xr.testing.assert_identical(back, solution.to_xarray().assign_attrs(created=back.created))
    solution.save(path, states=False)  # replaces what is there
    assert "x" not in ed.load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]  # nothing half-written is left


def test_a_damaged_store_is_refused(system, x0, tmp_path):
    path = tmp_path / "run.zarr"
    ed.descend(system, x0, steps=3).save(path)
    chunk = next(p for p in (path / "x" / "c").rglob("*") if p.is_file())
    data = chunk.read_bytes()
    chunk.unlink()  # zarr alone would read NaN
    with pytest.raises(ValueError, match=r"path: expected a complete zarr store.*chunks of x"):
        ed.load(path)
    chunk.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="path: expected a complete zarr store"):
        ed.load(path)
    chunk.write_bytes(data)
    ed.load(path)
    (path / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match="path: expected a complete zarr store"):
        ed.load(path)


def test_a_solve_error_travels_between_processes():
    x0 = torch.full((2, 2, 8), 1.0, dtype=torch.float64)
    with pytest.raises(ed.SolveError) as caught:
        ed.descend(broken(Falling), x0, step=0.7, steps=8)
    back = pickle.loads(pickle.dumps(caught.value))
    assert str(back) == str(caught.value)
    assert torch.equal(back.solution.x, caught.value.solution.x)


@pytest.mark.filterwarnings("error")
def test_default_solves_do_not_warn(system, x0):
    for method, step in (("dopri5", None), ("rk4", 0.1), ("batched_dopri5", None)):
        ed.solve(system, x0, [0.0, 0.5], method, step=step)


def test_load_and_save_refuse_what_is_not_theirs(tmp_path):
    with pytest.raises(ValueError, match="path: expected a zarr store"):
        ed.load(tmp_path)
    xr.Dataset({"a": ("x", [1.0])}).to_zarr(tmp_path / "foreign.zarr", consolidated=False)
    with pytest.raises(ValueError, match="etdyn_schema"):
        ed.load(tmp_path / "foreign.zarr")
    (tmp_path / "note.txt").write_text("mine")
    ours = xr.Dataset({"a": ("x", [1.0])}, attrs={"etdyn_schema": "test/1"})
    with pytest.raises(ValueError, match="path: expected a new name or a result of etdyn"):
        ed.save(ours, tmp_path / "foreign.zarr")
    with pytest.raises(ValueError, match="data: expected a result with the attribute"):
        ed.save(xr.Dataset(), tmp_path / "new.zarr")
    with pytest.raises(TypeError, match="data: expected a Dataset or a DataTree"):
        ed.save({"a": 1.0}, tmp_path / "new.zarr")
    ed.save(ours, tmp_path / "new.zarr")
    xr.testing.assert_identical(ed.load(tmp_path / "new.zarr"), ours)
    with pytest.raises(ValueError, match="path"):
        ed.save(ours, tmp_path / "note.txt")
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_interpolant_is_fourth_order_and_meets_the_saved_states(system, x0):
    inside = [0.3 + 0.4 * k / 40 for k in range(41)]
    tight = {"rtol": 1e-12, "atol": 1e-12, "gradient": None}
    exact = ed.solve(system, x0, [0.0, *inside], **tight).x[1:]
    errors = []
    for count in (11, 21, 41):
        between = Interpolant(ed.solve(system, x0, torch.linspace(0, 1, count), **tight))
        assert torch.equal(between(0.0), x0)
        found = torch.stack([between(t) for t in inside])
        errors.append(float((found - exact).abs().max()))
        each = between([inside[3], inside[20], inside[31]])  # a time for every sample
        assert torch.equal(each[1], between(inside[20])[1])
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert orders[-1] == pytest.approx(4, abs=0.2)
    with pytest.raises(ValueError, match="t: expected times in"):
        between(1.5)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"method": "rk5"}, ValueError, r"method: expected one of .*dopri5.*got 'rk5'"),
        ({"method": "rk4"}, ValueError, "step: expected a step size for the fixed-step method"),
        ({"step": 0.1}, ValueError, "step: expected none"),
        ({"method": "rk4", "step": -1.0}, ValueError, "step: expected a finite number > 0"),
        ({"rtol": 0.0}, ValueError, "rtol"),
        ({"rtol": 1e-15}, ValueError, "rtol: expected at least 1.8e-15, which torch.float64"),
        ({"atol": -1.0}, ValueError, "atol"),
        ({"times": [0.0]}, ValueError, "times: expected at least two"),
        ({"times": [0.0, 2.0, 1.0]}, ValueError, "times: expected strictly increasing"),
        ({"times": [0.0, float("nan")]}, ValueError, "times: expected finite"),
        ({"gradient": "adjoint"}, ValueError, "gradient: expected one of 'direct', 'checkpoint'"),
        ({"method": "scipy_solver"}, ValueError, "gradient: expected None"),
        ({"max_steps": 0}, ValueError, "max_steps"),
        ({"x0": torch.zeros(3, 4, 7).double()}, ValueError, r"x0: expected shape \(any, any, 8\)"),
        ({"x0": torch.zeros(4, 8).double()}, ValueError, "x0: expected shape"),
        ({"x0": torch.zeros(3, 4, 8)}, TypeError, "x0: expected dtype torch.float64"),
        ({"x0": np.zeros((3, 4, 8))}, TypeError, "x0: expected a torch.Tensor, got ndarray"),
        ({"x0": torch.zeros(3, 4, 8, device="meta").double()}, ValueError, "x0: expected device"),
        ({"x0": torch.full((3, 4, 8), torch.nan).double()}, ValueError, "x0: .*NaN.* in sample 0"),
    ],
)
def test_solve_names_what_is_wrong(system, x0, changes, error, message):
    arguments = {"x0": x0, "times": [0.0, 1.0]} | changes
    with pytest.raises(error, match=message):
        ed.solve(system, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("dopri5", None, 1e-6, 1e-8, {"frst_step": 1}), ValueError, "options: .*first_step"),
        (("rk4", 0.1, 1e-6, 1e-8, {"first_step": 1}), ValueError, "options: .*none"),
        (("explicit_adams", 0.1, 1e-6, 1e-8, {"max_order": 2}), ValueError, "max_order"),
    ],
)
def test_a_method_knows_its_options(arguments, error, message):
    with pytest.raises(error, match=message):
        ed.Method(*arguments)


def test_multistep_methods_need_equal_steps(system, x0):
    with pytest.raises(ValueError, match="times: expected intervals that are multiples of step"):
        ed.solve(system, x0, [0, 0.25, 1.0], "explicit_adams", step=0.1, gradient=None)
    with pytest.raises(ValueError, match="step: expected none beside a Method"):
        ed.solve(system, x0, [0, 1.0], ed.Method("rk4", 0.1), step=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 0.0}, "step"),
        ({"steps": -1}, "steps"),
        ({"noise": -0.1}, "noise"),
        ({"x0": torch.zeros(1, 2, 3).double()}, "x0"),
    ],
)
def test_descend_names_what_is_wrong(system, x0, changes, message):
    with pytest.raises(ValueError, match=f"{message}: expected"):
        ed.descend(system, **({"x0": x0} | changes))


def test_a_constant_token_has_no_place_on_the_sphere(system, x0):
    x0[1, 2] = 0.1
    for move in (ed.descend, lambda s, x: ed.solve(s, x, [0, 1.0])):
        with pytest.raises(ValueError, match="tokens of nonzero variance, got 1 constant"):
            move(system.with_dynamics("sphere"), x0)
