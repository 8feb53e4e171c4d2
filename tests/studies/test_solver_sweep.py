"""The study end to end, small: its files, that its numbers obey the theory, and its failures."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import etdyn as ed
from etdyn.analysis import precision
from studies import solver_sweep, solver_sweep_page
from studies.solver_sweep import Config, main, sweep
from studies.solver_sweep_tasks import TASKS

SMALL = {
    "tasks": ("softmax",), "samples": 2, "repeats": 1, "dear": 150,
    "methods": ("euler", "rk4", "explicit_adams", "fehlberg2", "dopri5", "batched_dopri5"),
    "steps_per_horizon": (6, 12, 24, 48), "tolerances": (1e-3, 1e-4, 1e-6, 1e-7),
}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    config = Config(runs=tmp_path_factory.mktemp("runs"), **SMALL)
    main(config)
    return config.folder


@pytest.fixture(scope="module")
def result(study):
    return ed.load(study / "result.zarr")


def test_files(study):
    names = {path.name for path in study.iterdir()}
    assert {"result.zarr", "config.json", "report.html"} < names
    assert "rows" not in names, "what an interrupted run would need is gone"
    assert sum(name.endswith(".png") for name in names) == 3
    page = (study / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.split("<h2>Configuration")[0]
    assert "nan" not in page.split("<h2>Configuration")[0].split("base64,")[0].lower()


def test_the_result_is_labelled_and_complete(result):
    assert result.attrs["etdyn_schema"] == "etdyn.study.solver_sweep/1"
    assert dict(result.sizes) == {"task": 1, "dtype": 2, "solver": 6, "setting": 4, "sample": 2}
    failed = result["status"] != ed.Status.FINISHED
    assert np.array_equal(result["error"].isnull(), failed)
    assert np.array_equal(result["relative_time"].isnull(), result["reason"] != "")
    assert float(result["agreement"].max()) < 1e-9
    assert all("units" in v.attrs for n, v in result.items() if n not in ("reason", "family"))


def test_orders_and_costs_are_those_of_theory(result):
    cells = result.sel(task="softmax", dtype="float64").isel(sample=0)
    slope = cells["slope"].to_pandas()
    assert slope["euler"] == pytest.approx(1, abs=0.15)
    assert slope["rk4"] == pytest.approx(4, abs=0.3)
    assert slope["explicit_adams"] > 3
    counts = cells["evaluations"].to_pandas()
    assert counts.loc["euler"].tolist() == [6, 12, 24, 48]
    assert counts.loc["rk4"].tolist() == [24, 48, 96, 192]
    published = cells["relative_time"].sel(solver="euler")[1]
    assert 0.3 < float(published) < 3, "the baseline is itself"


def test_failures_keep_their_place_and_reason(result):
    single = result.sel(task="softmax", dtype="float32").isel(sample=0)
    status = single["status"].to_pandas()
    refused, not_run = solver_sweep.Outcome["REFUSED"], solver_sweep.Outcome["NOT_RUN"]
    assert status.loc["dopri5"].tolist() == [0, 0, 0, refused]
    assert "float32 can carry" in single["reason"].sel(solver="dopri5")[3].item()
    double = result.sel(task="softmax", dtype="float64", solver="fehlberg2").isel(sample=0)
    spent = double["evaluations"].to_numpy()
    dear = np.flatnonzero(spent > 150)[0]
    assert (double["status"][dear + 1 :] == not_run).all() and (spent[dear + 1 :] == 0).all()
    header, rows = solver_sweep_page.outcomes(result)
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert table["dopri5"]["softmax float32"] == "3 1R"
    assert table["euler"]["softmax float64"] == "4"
    assert "-" in table["fehlberg2"]["softmax float64"]


def test_one_hard_sample_costs_a_shared_step_and_not_its_own(result):
    ratio = solver_sweep_page.beside_hard(result).sel(task="softmax").to_pandas()
    assert ratio["euler"] == ratio["batched_dopri5"] == 1
    assert ratio["dopri5"] > 1.3


def test_recommendations_are_the_least_price_that_reaches_the_target(result):
    cell, price = solver_sweep_page.cheapest(result, "softmax", 1e-4, "evaluations")
    worst = float(cell["error"].max())
    assert worst <= 1e-4 and float(cell["dtype"] == "float64")
    for solver in result["solver"].to_numpy():
        cells = result.sel(task="softmax", dtype="float64", solver=solver)
        reach = cells["error"].max("sample", skipna=False) <= 1e-4
        assert (cells["evaluations"].mean("sample").where(reach).fillna(np.inf) >= price).all()
    assert solver_sweep_page.cheapest(result, "softmax", 1e-15, "time") is None


def test_the_page_is_made_from_the_saved_result(result, study):
    page = solver_sweep_page.report(result)
    old = (study / "report.html").read_text()
    for text in solver_sweep_page.findings(result):
        assert text.split("(")[0].split("'")[0].strip() in old
    assert set(page._figures) == {"work_precision_softmax", "orders", "precision"}


def test_an_interrupted_sweep_goes_on(tmp_path, monkeypatch):
    config = Config(
        runs=tmp_path, **SMALL | {"methods": ("euler", "rk4", "heun2"), "dtypes": ("float64",)}
    )
    measured = []

    def dies(*args, **options):
        measured.append(next(iter(args[2])))
        if measured[-1] == "heun2":
            raise KeyboardInterrupt
        return precision.work_precision(*args, **options)

    monkeypatch.setattr(solver_sweep, "work_precision", dies)
    tasks = {"softmax": TASKS["softmax"](config.model, config.samples, config.seed)}
    with pytest.raises(KeyboardInterrupt):
        sweep(config, tasks)
    assert len(list((config.folder / "rows").iterdir())) == 2
    measured.clear()
    monkeypatch.setattr(solver_sweep, "work_precision", lambda *a, **o: (
        measured.append(next(iter(a[2]))), precision.work_precision(*a, **o))[1])  # fmt: skip
    again = sweep(config, tasks)
    assert set(measured) == {"heun2"}, "rows that stood were not measured again"
    assert again["solver"].to_numpy().tolist() == ["euler", "rk4", "heun2"]
    assert np.isfinite(again["error"]).all()


def test_a_method_that_raises_does_not_end_the_sweep(tmp_path, monkeypatch):
    def breaks(*args, **options):
        if "rk4" in args[2]:
            raise ArithmeticError("no")
        return precision.work_precision(*args, **options)

    monkeypatch.setattr(solver_sweep, "work_precision", breaks)
    config = Config(runs=tmp_path, **SMALL | {"methods": ("rk4", "heun2"), "dtypes": ("float64",)})
    tasks = {"softmax": TASKS["softmax"](config.model, config.samples, config.seed)}
    result = sweep(config, tasks)
    assert (result["reason"].sel(solver="rk4") == "ArithmeticError: no").all()
    assert np.isfinite(result["error"].sel(solver="heun2")).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples"),
        ({"tasks": ()}, "tasks"),
        ({"tasks": ("chess",)}, "tasks"),
        ({"methods": ("rk5",)}, "methods"),
        ({"dtypes": ("float32",)}, "dtypes"),
        ({"steps_per_horizon": (12, 6, 24, 48)}, "steps_per_horizon"),
        ({"tolerances": (1e-3, 1e-4)}, "tolerances"),
        ({"tolerances": (1e-3, 1e-4, 1e-5, -1.0)}, "tolerances"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(ValueError, match=f"{message}: expected"):
        replace(Config(**SMALL), **changes)


def test_the_published_step_must_be_among_the_steps():
    with pytest.raises(ValueError, match=r"steps_per_horizon: .*12, the published steps"):
        main(Config(**SMALL | {"steps_per_horizon": (3, 5, 10, 20)}))


def test_help_explains_every_field():
    done = subprocess.run(
        [sys.executable, "-m", "studies.solver_sweep", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for field in Config.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in done.stdout, field
