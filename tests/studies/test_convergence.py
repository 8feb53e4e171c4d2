"""The study end to end, small: its files, its page from the file, and numbers that obey theory."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import etdyn as ed
from etdyn.analysis.convergence import FitStatus
from studies import convergence_figures as figures
from studies import convergence_numbers as numbers
from studies import convergence_page as page
from studies.convergence import Config, main

FIGURES = {"task", "pictures", "modules", "variables", "clocks", "decay", "equilibria", "clusters"}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    config = Config(
        runs=tmp_path_factory.mktemp("runs"), images=2, log_time=5.0, published=100.0,
        sphere=0.5, horizons=3, single=2, repeated=2, masks=2, random=1, head_start=1.0, near=1,
        tolerance=1e-5,
    )  # fmt: skip
    main(config)
    return config.folder


def group(study, name):
    return ed.load(study / "result.zarr")[name].to_dataset()


def test_files(study):
    names = {path.name for path in study.iterdir()}
    assert {"result.zarr", "config.json", "report.html"} | {f"{n}.png" for n in FIGURES} == names
    shown = (study / "report.html").read_text().split("<h2>Configuration")[0]
    assert shown.count("data:image/png;base64,") == len(FIGURES)
    assert "http" not in shown, "self-contained"
    assert json.loads((study / "config.json").read_text())["study"]["images"] == 2


def test_the_page_is_made_from_the_result_alone(study):
    result = ed.load(study / "result.zarr")
    assert result.attrs["etdyn_schema"] == "etdyn.study.convergence/1"
    words = " ".join([page.protocol(result), *page.findings(result)])
    rows = [cell for table in (page.states(result), page.fits(result)) for cell in table[1]]
    assert "nan" not in (words + str(rows)).lower()
    for name in FIGURES:
        assert getattr(figures, f"draw_{name}")(result).axes


def test_dims_are_labelled(study):
    tree = ed.load(study / "result.zarr")
    assert set(tree.children) == {
        "published", "euler", "leaky", "rates", "pictures", "sphere", "ends", "equilibria",
        "near_leaky", "near_sphere", "published_rates", "modules",
    }  # fmt: skip
    assert tree["leaky"]["lowest"].dims == ("look", "sample", "mode")
    assert tree["ends"]["interval"].dims == ("way", "equilibrium", "bound")
    assert tree["ends"]["kind"].values.tolist() == [
        *["single"] * 2, *["repeated"] * 4, "random"
    ]  # fmt: skip
    assert tree["ends"]["image"].values.tolist() == [0, 1, 0, 0, 1, 1, -1]
    assert tree["leaky"]["error"].attrs["units"] == "1"


def test_modules_and_remainder_add_up_to_the_decoded_change(study):
    data = group(study, "modules")
    assert data["part"].values.tolist() == ["attention", "hopfield", "remainder"]
    rest = np.abs(data["contribution"].sel(part="remainder").values).max()
    assert rest < 1e-10
    assert np.allclose(data["contribution"].sum("part"), data["change"], rtol=0, atol=1e-12)


def test_et_f27_the_leaky_energy_is_the_published_one_in_log_time(study):
    published, leaky = group(study, "published"), group(study, "leaky")
    assert np.allclose(np.expm1(leaky["time"][: published.sizes["time"]]), published["time"])
    gap = published["energy"].values - leaky["energy"].values[: published.sizes["time"]]
    assert np.abs(gap[0]).max() < 1.0, "the same start, up to eps"
    assert np.abs(gap).max() < 0.01 * np.abs(published["energy"].values[-1]).min()


def test_et_f11_energy_falls_and_tokens_run_away_at_constant_speed(study):
    data = group(study, "published")
    assert int(data["rises"].sum()) == 0
    late = data.isel(time=-1)
    ratio = late["length"] / late["time"] / late["speed"]
    assert np.allclose(ratio, 1, atol=0.1)
    assert (data["activation_speed"].isel(time=-1) < 0.01 * data["activation_speed"][0]).all()
    assert (data["residual"] <= data["force"]).all()


@pytest.mark.parametrize("flow", ["near_leaky", "near_sphere"])
def test_et_f29_near_equilibria_the_gap_decays_at_twice_the_slowest_rate(study, flow):
    fit = group(study, flow)
    good = numbers.supported(fit)
    assert good.any()
    assert np.abs(fit["deviation"].values[good]).max() < 0.05


def test_slow_modes_hold_a_share_of_the_gap(study):
    share = group(study, "near_leaky")["slow_share"].values
    assert ((share > 0) & (share < 1.05)).all()
    fit = group(study, "rates")
    assert (fit["status"] != FitStatus.FITTED).all(), "no window by log-time 5"
    assert not numbers.supported(fit).any()


def test_shares_are_those_of_the_labels(study):
    ends = group(study, "ends")
    for way in ("at once", "flow first"):
        part = ends.sel(way=way)
        counts = [(part["label"] == k).mean() for k in range(ends.sizes["equilibrium"])]
        assert np.allclose(part["fraction"], counts)
        inside = (part["interval"][:, 0] <= part["fraction"]) & (
            part["fraction"] <= part["interval"][:, 1]
        )
        assert inside.all()


def test_equilibria_are_equilibria(study):
    found = group(study, "equilibria")
    model = ed.load_model(Config().model).double().requires_grad_(False)
    x = torch.from_numpy(found["state"].values)
    model.system.layer_norm.eps = 0.0
    assert float(model.system.residual(x).max()) < 1e-9
    assert np.allclose(found["kappa"].isel(mode=0), found["lowest"][: len(found["kappa"])])


def test_pairs_count_each_pair_once():
    assert numbers.pairs(np.array([0, 0, 1])) == pytest.approx(1 / 3)
    assert numbers.pairs(np.array([2, 2, 2])) == 1
    assert numbers.pairs(np.array([0, -1, -1])) == 0, "what did not converge is no state"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": 0}, "images"),
        ({"images": 9, "single": 8}, "images"),
        ({"masks": 1}, "masks"),
        ({"log_time": 1e3}, "log_time"),
        ({"published": 1e9, "log_time": 10.0}, "published"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"head_start": 0.0}, "head_start"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(ValueError, match=f"{message}: expected"):
        Config(**changes)


def test_more_images_than_there_are():
    with pytest.raises(ValueError, match=r"single: expected .*held-out images"):
        main(Config(single=10_000))


def test_help_explains_every_field():
    done = subprocess.run(
        [sys.executable, "-m", "studies.convergence", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for field in Config.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in done.stdout, field
