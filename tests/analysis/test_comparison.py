"""`compare`: known paired differences, intervals that cover, and runs that do not match."""

import numpy as np
import pytest
import torch
import xarray as xr

import etdyn as ed
from etdyn import store
from etdyn.analysis.comparison import compare, comparison_table
from etdyn.analysis.distance import activation_distance

TIMES = [0.0, 0.1, 0.2, 0.3]


def result_of(values, times=None, x=None, **config):
    """A result as `Solution.to_xarray` makes it, of energies `(time, sample)`."""
    values = np.asarray(values, dtype=float)
    times = np.arange(len(values), dtype=float) if times is None else np.asarray(times, float)
    samples = values.shape[1]
    data = {
        "energy": (("time", "sample"), values),
        "clock": (("time", "sample"), np.repeat(times[:, None], samples, 1)),
        "status": ("sample", np.zeros(samples, dtype=np.int8)),
        "t_end": ("sample", np.full(samples, times[-1])),
    }
    if x is not None:
        data["x"] = (("time", "sample", "token", "feature"), x)
    config = {"stats": {"evaluations": 7}, "relative_energies": False} | config
    attrs = store.provenance("etdyn.solution/1", config, torch.zeros(0))
    return xr.Dataset(data, {"time": times, "sample": np.arange(samples)}, attrs)


@pytest.fixture
def case(make_case):
    return make_case(batch=4)


def test_solve_and_descend_stand_side_by_side(case, close):
    """The discrete model against its flow: energies, distance in g, cost and status of each."""
    system, x0 = case.system, case.x
    flow = ed.solve(system, x0, TIMES, rtol=1e-8, gradient=None)
    discrete = ed.descend(system, x0, 0.1, 3, gradient=None)
    per_sample = ed.solve(system, x0, TIMES, "batched_dopri5", gradient=None)
    runs = {"flow": flow, "discrete": discrete, "alone": per_sample.to_xarray()}
    result = compare(runs)
    assert dict(result.sizes) == {"run": 3, "time": 4, "sample": 4, "quantity": 3}
    for name, run in (("flow", flow), ("discrete", discrete)):
        energy = torch.stack([system.energy(x) for x in run.x])
        close(result.energy.sel(run=name).values, energy, 0)
    expected = torch.stack(
        [activation_distance(system, a, b).mean(1) for a, b in zip(discrete.x, flow.x, strict=True)]
    )
    close(result.distance.sel(run="discrete").values, expected, 1e-15)
    assert (result.distance.sel(run="flow") == 0).all()
    assert (result.evaluations.sel(run="discrete") == 3).all()
    assert (result.evaluations.sel(run="flow") == flow.stats.evaluations).all()
    close(result.evaluations.sel(run="alone").values, per_sample.stats.evaluations, 0)
    assert (result.status == ed.Status.FINISHED).all()
    paired = result.difference.sel(quantity="energy", run="discrete")
    exact = result.energy.sel(run="discrete") - result.energy.sel(run="flow")
    close(paired.values, exact.values, 0)
    close(
        result.mean_difference.sel(quantity="energy", run="discrete").values,
        exact.mean("sample").values,
    )


def test_known_differences_have_their_textbook_intervals():
    """Five differences 1..5: mean 3 +- t s/sqrt(5), s^2 = 2.5, t(0.975, 4) = 2.776445105."""
    base = np.random.default_rng(0).normal(size=(2, 5))
    result = compare({"a": result_of(base), "b": result_of(base + np.arange(1, 6))})
    line = result.sel(run="b", quantity="energy").isel(time=1)
    half = 2.7764451051977987 * np.sqrt(2.5 / 5)
    np.testing.assert_allclose(
        [line.mean_difference, line.mean_low, line.mean_high], [3, 3 - half, 3 + half]
    )
    assert float(line.median_difference) == pytest.approx(3) and int(line.samples) == 5
    assert np.isnan(line.median_low), "five signs all alike have a probability of 1/16"


def test_any_run_may_be_the_baseline():
    base = np.zeros((2, 3))
    runs = {"a": result_of(base + 1), "b": result_of(base + 3), "c": result_of(base + 4)}
    line = compare(runs, baseline="b").mean_difference.isel(time=1, quantity=0)
    assert line.values.tolist() == [-2, 0, 1]


def test_the_median_has_its_exact_order_statistics():
    """Of 20 differences, the 6th and the 15th cover with 0.9586 (binomial), the 7th would not."""
    base = np.zeros((2, 20))
    result = compare({"a": result_of(base), "b": result_of(base + np.arange(1.0, 21))})
    line = result.sel(run="b", quantity="energy").isel(time=1)
    assert [float(line[v]) for v in ("median_difference", "median_low", "median_high")] == [
        10.5,
        6,
        15,
    ]


@pytest.mark.parametrize("law", ["normal", "lognormal"])
def test_intervals_cover_as_they_say(law):
    """2000 experiments of 12 samples, one a time; a skewed law is the median's to cover."""
    rng, n, trials = np.random.default_rng(1), 12, 2000
    noise = rng.normal(size=(trials, n))
    truth = 0.3 if law == "normal" else 1.0  # the median, and the mean of the normal one
    differences = truth + noise if law == "normal" else np.exp(noise)
    base = 100 * rng.normal(size=(trials, n))
    runs = {"a": result_of(base), "b": result_of(base + differences)}
    for confidence in (0.8, 0.95):
        line = compare(runs, confidence=confidence).sel(run="b", quantity="energy")
        error = 3 * np.sqrt(confidence * (1 - confidence) / trials)
        mean = float(((line.mean_low <= truth) & (truth <= line.mean_high)).mean())
        median = float(((line.median_low <= truth) & (truth <= line.median_high)).mean())
        assert median >= confidence - error
        if law == "normal":
            assert abs(mean - confidence) <= error


def test_pairing_removes_what_the_samples_have_in_common():
    """Samples that differ by 100 do not widen the interval of a difference of 0.01."""
    rng = np.random.default_rng(0)
    base = 100 * rng.normal(size=(2, 30))
    runs = {"a": result_of(base), "b": result_of(base + 0.01 + 0.001 * rng.normal(size=(2, 30)))}
    line = compare(runs).sel(run="b", quantity="energy").isel(time=1)
    assert 0.009 < float(line.mean_low) < float(line.mean_high) < 0.011


def test_failed_samples_are_nan_and_counted():
    base = np.zeros((3, 4))
    broken = base + np.array([1.0, 2.0, 3.0, np.nan])
    broken[2, 2] = -np.inf
    result = compare({"a": result_of(base), "b": result_of(broken)})
    line = result.sel(run="b", quantity="energy")
    assert line.samples.values.tolist() == [3, 3, 2]
    np.testing.assert_allclose(line.mean_difference, [2, 2, 1.5])
    np.testing.assert_allclose(line.median_difference, [2, 2, 1.5])
    nothing = compare({"a": result_of(base), "b": result_of(base * np.nan)})
    assert (nothing.samples.sel(run="b") == 0).all()
    assert np.isnan(
        nothing[["mean_difference", "mean_low", "median_difference"]].sel(run="b").to_array()
    ).all()


def test_a_run_that_ended_early_is_nan_after_its_end():
    """Its own last time is nobody else's and is left out."""
    times = [0.0, 1.0, 2.0, 3.0]
    runs = {
        "a": result_of(np.zeros((4, 3)), times),
        "b": result_of(np.ones((3, 3)), [0.0, 1.0, 1.7]),
        "c": result_of(np.ones((4, 3)), times),
    }
    result = compare(runs)
    assert result.time.values.tolist() == times
    assert result.samples.sel(quantity="energy", run="b").values.tolist() == [3, 3, 0, 0]
    assert result.samples.sel(quantity="energy", run="c").values.tolist() == [3, 3, 3, 3]


def test_only_common_times_are_compared_roundings_apart():
    fine = np.arange(13) * 0.1  # 0.1 * 3 is not 0.3
    runs = {
        "a": result_of(np.zeros((13, 2)), fine),
        "b": result_of(np.ones((5, 2)), [0.0, 0.3, 0.6, 0.9, 1.2]),
    }
    np.testing.assert_allclose(compare(runs).time, [0, 0.3, 0.6, 0.9, 1.2])


def test_along_the_clock_each_sample_has_its_own_time():
    """E = -tau whatever the time that tau takes: equal at equal clocks, not at equal times."""
    times, rates = np.linspace(0, 2, 21), np.array([1.0, 2.0])
    slow, fast = (result_of(-times[:, None] * r, times) for r in (rates, 3 * rates))
    slow["clock"], fast["clock"] = -slow.energy, -fast.energy
    result = compare({"slow": slow, "fast": fast}, along="clock")
    assert float(result.time[-1]) == 2.0  # the slowest sample's last
    np.testing.assert_allclose(
        result.energy, -result.time.broadcast_like(result.energy), atol=1e-14
    )
    apart = compare({"slow": slow, "fast": fast})
    assert float(abs(apart.difference.sel(run="fast")).max()) == 8


def test_the_sphere_and_the_published_flow_are_compared_from_the_same_starts(case):
    """The sphere normalises its start, which is the same configuration."""
    sphere = case.system.with_dynamics("sphere")
    runs = {
        "et": ed.solve(case.system, case.x, TIMES, gradient=None),
        "sphere": ed.solve(sphere, case.x, TIMES, gradient=None),
    }
    result = compare(runs, along="clock")
    gap = result.mean_difference.sel(quantity="interaction_energy", run="sphere")
    size = abs(result.interaction_energy).mean()
    assert float(abs(gap).max() / size) < 0.05  # curves, and the clock is a mean over tokens
    runs["sphere"] = ed.solve(sphere, case.x.roll(1, 0), TIMES, gradient=None)
    with pytest.raises(ValueError, match=r"runs\['sphere'\]: expected the starts of 'et'"):
        compare(runs)


def test_float32_runs_stand_beside_float64_ones(case):
    half = ed.EnergyTransformer(**case.system.config).float()
    half.load_state_dict(case.system.state_dict())
    runs = {
        "double": ed.descend(case.system, case.x, gradient=None),
        "single": ed.descend(half, case.x.float(), gradient=None),
    }
    result = compare(runs)
    assert result.energy.dtype == np.float64
    assert 0 < float(result.distance.sel(run="single").max()) < 1e-4


def test_results_survive_the_disk_and_print(case, tmp_path):
    runs = {
        "flow": ed.solve(case.system, case.x, TIMES, gradient=None),
        "discrete": ed.descend(case.system, case.x, 0.1, 3, gradient=None),
    }
    result = compare(runs, baseline="discrete")
    ed.save(result, tmp_path / "comparison")
    loaded = ed.load(tmp_path / "comparison")
    assert loaded.identical(result)
    assert all({"units", "long_name"} <= v.attrs.keys() for n, v in result.items() if n != "status")
    text = comparison_table(loaded, time=0.21)
    assert "at 0.2" in text and "energy: flow - discrete" in text
    assert len(text.splitlines()) == 2 + 3


def test_mismatches_name_the_argument(case):
    one, two = np.zeros((3, 2)), np.zeros((3, 3))
    a = result_of(one)
    for runs, arguments, message in (
        ({"a": a}, {}, "runs: expected at least two runs by name, got 1"),
        ([a, a], {}, "runs: expected at least two runs by name, got list"),
        ({"a": a, "b": result_of(two)}, {}, r"runs\['b'\]: expected the samples \[0, 1\] of 'a'"),
        ({"a": a, "b": result_of(one, relative_energies=True)}, {}, r"runs\['b'\]: .*=False"),
        ({"a": a, "b": result_of(one, [0, 0.5, 1.5])}, {}, "runs: expected save times in common"),
        ({"a": a, "b": a}, {"baseline": "c"}, "baseline: expected one of 'a', 'b', got 'c'"),
        ({"a": a, "b": a}, {"quantities": ["heat"]}, "quantities: .* got 'heat'"),
        ({"a": a, "b": a}, {"along": "steps"}, "along: expected one of"),
        ({"a": a, "b": a}, {"confidence": 95}, "confidence: expected a number between 0 and 1"),
        ({"a": a, "b": a.drop_vars("clock")}, {"along": "clock"}, "along: expected 'time'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            compare(runs, **arguments)
    with pytest.raises(TypeError, match=r"runs\['b'\]: expected a Solution"):
        compare({"a": a, "b": case.x})
    with pytest.raises(TypeError, match=r"runs\['b'\]: .*a Dataset of another kind"):
        compare({"a": a, "b": xr.Dataset()})
    with pytest.raises(TypeError, match="quantities: expected a sequence"):
        compare({"a": a, "b": a}, quantities="energy")
    start = np.zeros((3, 2, 1, 2)) + np.array([1.0, -1.0])
    with pytest.raises(ValueError, match=r"runs\['b'\]: expected the starts of 'a'"):
        compare({"a": result_of(one, x=start), "b": result_of(one, x=start * (1 + 1e-9))})
