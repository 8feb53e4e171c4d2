"""Training: exact resume, budgets, files, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch

import etdyn as ed
from etdyn.datasets import digits, from_array
from etdyn.tasks import (
    ModelConfig,
    TrainConfig,
    build_model,
    completion_error,
    parse_duration,
    train,
    training,
)
from etdyn.tasks.checkpoints import load_tensors

SMALL = ModelConfig(dim=16, heads=2, head_dim=8, memories=32, steps=4, step=0.3)
RECIPE = TrainConfig(iterations=12, batch=8, evaluate_every=4, validation=20)


@pytest.fixture(scope="module")
def images():
    return digits()


def files(folder):
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"
    }


def run(folder, images, recipe=RECIPE, **changes):
    return train(build_model(SMALL, images, 0), images, recipe, folder, progress=False, **changes)


def test_resume_ends_bit_identical(images, tmp_path, monkeypatch):
    run(tmp_path / "whole", images)
    steps = 0
    advance = training._Run.advance

    def interrupted(self, data):
        nonlocal steps
        steps += 1
        if steps == 11:  # two steps after the second checkpoint: they must be done again
            raise KeyboardInterrupt
        return advance(self, data)

    monkeypatch.setattr(training._Run, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "halves", images)
    monkeypatch.undo()
    assert load_tensors(tmp_path / "halves" / "resume.safetensors")[1]["iteration"] == 8
    run(tmp_path / "halves", images, resume=True)
    whole, halves = files(tmp_path / "whole"), files(tmp_path / "halves")
    assert whole.keys() == {"best.safetensors", "last.safetensors", "resume.safetensors"}
    assert whole == halves


def test_training_improves_and_repeats(images, tmp_path):
    recipe = TrainConfig(iterations=60, batch=32, evaluate_every=30, validation=50, average=0.9)
    before = completion_error(build_model(SMALL, images, 0), images.test[:100], draws=1)
    state = torch.get_rng_state()
    best = run(tmp_path / "a", images, recipe)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers are used
    after = completion_error(best, images.test[:100], draws=1)
    assert after < 0.7 * before
    run(tmp_path / "b", images, recipe)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_budget_chooses_the_iterations_and_says_so(images, tmp_path):
    recipe = TrainConfig(iterations=100_000, batch=8, evaluate_every=1000, validation=20)
    run(tmp_path, images, recipe, budget=1.0)
    record = json.loads((tmp_path / "last.json").read_text())
    assert 1 <= record["iteration"] == record["train"]["iterations"] < 10_000


def test_a_run_is_never_overwritten_or_mixed(images, tmp_path):
    run(tmp_path, images)
    with pytest.raises(ValueError, match="folder: expected none, or resume"):
        run(tmp_path, images)
    other = TrainConfig(iterations=12, batch=8, evaluate_every=4, validation=20, lr=1e-4)
    with pytest.raises(ValueError, match="resume: recipe: expected that of the run"):
        run(tmp_path, images, other, resume=True)
    wider = build_model(ModelConfig(dim=8, heads=2, head_dim=8, memories=32, steps=4), images, 0)
    with pytest.raises(ValueError, match="resume: model: expected that of the run"):
        train(wider, images, RECIPE, tmp_path, resume=True, progress=False)
    with pytest.raises(ValueError, match="folder: expected a run to resume in it"):
        run(tmp_path / "nothing", images, resume=True)
    few = from_array(torch.rand(20, 1, 8, 8), held_out=5)
    with pytest.raises(ValueError, match="validation: expected fewer than 15"):
        run(tmp_path / "few", few)


@pytest.mark.parametrize(
    ("field", "value"),
    [("iterations", 0), ("lr", -1.0), ("warmup", 1.0), ("average", 1.5), ("clip", 0.0)],
)
def test_recipes_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        TrainConfig(**{field: value})


def test_durations():
    assert [parse_duration(t) for t in ("90s", "3min", "1.5h")] == [90.0, 180.0, 5400.0]
    for text in ("", "3", "min", "-1s", "0s", "soon"):
        with pytest.raises(ValueError, match="budget: expected a duration"):
            parse_duration(text)


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(images, tmp_path):
    model = build_model(SMALL, images, 0)
    ed.save_model(model, tmp_path / "model", {"seed": 0})
    return model, tmp_path / "model"


def test_models_come_back_exactly(saved, images):
    model, path = saved
    back = ed.load_model(path)
    mask = torch.arange(16).remainder(2).bool().expand(4, 16)
    assert torch.equal(back(images.test[:4], mask), model(images.test[:4], mask))
    assert back.config == model.config
    double = model.double()
    ed.save_model(double, path)
    assert ed.load_model(path.with_suffix(".safetensors")).pixel_mean.dtype == torch.float64


def test_names_with_dots_are_names(saved, tmp_path):
    model, _ = saved
    for name in ("m.v2", "m.v3"):
        ed.save_model(model, tmp_path / name)
    assert {"m.v2.json", "m.v3.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    assert ed.load_model(tmp_path / "m.v2").config == model.config


def damage(path, change):
    data = path.read_bytes()
    path.write_bytes(change(data))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: p.with_suffix(".safetensors").unlink(), "path: expected an existing file"),
        (lambda p: p.with_suffix(".json").unlink(), "path: expected an existing file"),
        (lambda p: damage(p.with_suffix(".safetensors"), lambda d: d[:-10]), "checksum"),
        (lambda p: damage(p.with_suffix(".json"), lambda d: d[:-10]), "path: expected a JSON file"),
        (lambda p: damage(p.with_suffix(".json"), lambda d: b"{}"), "fields model and sha256"),
        (
            lambda p: damage(
                p.with_suffix(".json"), lambda d: d.replace(b'"dim": 16', b'"dim": 8')
            ),
            "path: expected a model and its configuration",
        ),
    ],
)
def test_broken_models_are_named(saved, break_it, message):
    break_it(saved[1])
    with pytest.raises(ValueError, match=message):
        ed.load_model(saved[1])


def test_truncated_safetensors_are_named(images, tmp_path):
    run(tmp_path, images)
    damage(tmp_path / "resume.safetensors", lambda d: d[: len(d) // 2])
    with pytest.raises(ValueError, match="path: expected a complete safetensors file"):
        run(tmp_path, images, resume=True)


def test_only_systems_that_describe_themselves_are_saved(images, tmp_path):
    bare = ed.System(ed.LayerNorm(16), ed.Hopfield(16, 4))
    with pytest.raises(ValueError, match="system: expected an EnergyTransformer"):
        ed.save_model(ed.ImageCompletion(bare, (1, 8, 8), 2), tmp_path / "model")


def checkpoint(golden_path, tmp_path, **changes):
    with np.load(golden_path / "et_image_checkpoint.npz") as file:
        arrays = {k: file[k] for k in file.files} | changes
    path = tmp_path / "official.npz"
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"POS_embed": None}, r"without \['POS_embed'\]"),
        ({"Wenc": np.zeros((40, 48), np.float32)}, "Wenc: expected channels"),
        ({"POS_embed": np.zeros((16, 48), np.float32)}, "POS_embed: expected shape"),
        ({"Benc": np.zeros(47, np.float32)}, "Benc: expected shape"),
        ({"CLS_token": np.full(48, np.nan, np.float32)}, "CLS_token: expected finite"),
    ],
)
def test_foreign_official_checkpoints(golden_path, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ed.load_official_checkpoint(checkpoint(golden_path, tmp_path, **changes))


def test_truncated_official_checkpoints(golden_path, tmp_path):
    path = tmp_path / "official.npz"
    shutil.copy(golden_path / "et_image_checkpoint.npz", path)
    path.chmod(0o644)
    damage(path, lambda d: d[: len(d) // 2])
    with pytest.raises(ValueError, match="path: expected a complete npz file"):
        ed.load_official_checkpoint(path)
    path.write_text("not a checkpoint")
    with pytest.raises(ValueError, match="path: expected a complete npz file"):
        ed.load_official_checkpoint(path)
    with pytest.raises(ValueError, match="path: expected an existing file"):
        ed.load_official_checkpoint(tmp_path / "none.npz")
