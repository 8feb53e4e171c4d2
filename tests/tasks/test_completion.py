"""The image task: patches, masks, the model, its baselines."""

import math

import pytest
import torch
from sklearn.linear_model import Ridge

import etdyn as ed
from etdyn.solve import iterate
from etdyn.tasks import (
    draw_masks,
    evaluation_masks,
    gaussian_completion,
    masked_error,
    mean_completion,
    patchify,
    psnr,
    unpatchify,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    system = ed.EnergyTransformer(16, 2, 8, 24).double()
    return ed.ImageCompletion(system, (3, 8, 12), 4, pixel_mean=0.4, pixel_std=0.3)


@pytest.fixture
def images():
    return torch.rand(5, 3, 8, 12, generator=torch.Generator().manual_seed(1)).double()


def test_patches_hold_the_pixels_in_reading_order(images):
    patches = patchify(images, 4)
    assert patches.shape == (5, 6, 48)
    # the second patch of the second row: rows 4..7, columns 4..7
    assert torch.equal(patches[0, 4], images[0, :, 4:8, 4:8].flatten())
    assert torch.equal(unpatchify(patches, 4, (3, 8, 12)), images)


def test_masks_have_the_published_counts():
    replaced, scored = draw_masks(2000, 196, 100 / 196, 0.1, torch.Generator().manual_seed(0))
    assert set(replaced.sum(1).tolist()) == {90}
    assert set(scored.sum(1).tolist()) == {100}
    assert not bool((replaced & ~scored).any())
    share = replaced.double().mean(0)  # no patch is favoured (defect 4: patch 0 always was)
    assert float((share - 90 / 196).abs().max()) < 5 * math.sqrt(0.25 / 2000)
    assert torch.equal(evaluation_masks(9, 16, 3), evaluation_masks(9, 16, 3))
    assert not torch.equal(evaluation_masks(9, 16, 3), evaluation_masks(9, 16, 4))
    assert set(evaluation_masks(9, 16).sum(1).tolist()) == {8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 16, 1.0), "scored: expected a share of 16 patches that hides some and leaves some"),
        ((4, 16, 0.01), "scored"),
        ((4, 16, 0.5, 1.0), "open_share"),
    ],
)
def test_masks_that_hide_everything_or_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_masks(*arguments)


def test_tokens_are_encoded_masked_and_placed(model, images):
    replaced = torch.zeros(5, 6, dtype=torch.bool)
    replaced[:, 2] = True
    x = model.tokens(images, replaced)
    assert x.shape == (5, 7, 16)
    assert torch.equal(x[3, 0], model.cls_token + model.positions[0])
    assert torch.equal(x[3, 3], model.mask_token + model.positions[3])
    patch = (images[3, :, 4:8, 0:4] - 0.4) / 0.3
    expected = model.encoder(patch.flatten()) + model.positions[4]
    assert torch.allclose(x[3, 4], expected, rtol=0, atol=1e-12)
    # what is hidden cannot matter
    other = images.clone()
    other[:, :, 0:4, 8:12] = 0.9
    assert torch.equal(model.tokens(other, replaced), x)


def test_forward_is_the_discrete_model_and_the_shared_norm(model, images):
    replaced = evaluation_masks(5, 6)
    x = ed.descend(model.system, model.tokens(images, replaced), 0.1, 12).x[-1]
    expected = model.decoder(model.system.activation(x)[:, 1:])
    assert torch.equal(model(images, replaced), expected)
    whole = model.complete(images, replaced)
    assert torch.allclose(model.normalised_patches(whole), expected, rtol=0, atol=1e-12)


def test_any_system_fits_inside(model, images):
    replaced = evaluation_masks(5, 6)
    sphere = model.with_system(model.system.with_dynamics("sphere"))
    assert sphere.encoder is model.encoder
    x = sphere.system.prepare(model.tokens(images, replaced))
    *_, x = iterate(sphere.system, x, 0.1, 12)
    assert torch.equal(sphere(images, replaced), sphere.decode(x))
    assert not torch.allclose(sphere(images, replaced), model(images, replaced))
    bare = ed.System(ed.LayerNorm(16), ed.Hopfield(16, 4)).double()
    assert model.with_system(bare)(images, replaced).shape == (5, 6, 48)
    with pytest.raises(ValueError, match="system: expected dim 16, got 8"):
        model.with_system(ed.EnergyTransformer(8, 1, 4, 4))


def test_error_and_psnr_by_hand():
    target, predicted = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    predicted[0, 0] = 3.0
    predicted[1, 2] = 7.0
    scored = torch.tensor([[True, True, False], [True, True, False]])
    error = masked_error(predicted, target, scored)
    assert error.tolist() == [5.0, 1.0]
    assert psnr(error, 0.1).tolist() == pytest.approx([-10 * math.log10(0.05), 20.0])


def test_gaussian_completion_is_the_best_linear_predictor():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(12, 12, generator=generator).double()
    train = (torch.randn(4000, 12, generator=generator).double() @ mix + 1.0).reshape(-1, 4, 3)
    test = (torch.randn(6, 12, generator=generator).double() @ mix + 1.0).reshape(-1, 4, 3)
    hidden = torch.tensor([[True, False, False, True]]).expand(6, 4)
    found = gaussian_completion(train, test, hidden, ridge=1e-10)
    inputs, outputs = train[:, 1:3].flatten(1), train[:, [0, 3]].flatten(1)
    expected = Ridge(1e-9).fit(inputs, outputs).predict(test[:, 1:3].flatten(1))
    assert torch.allclose(found[:, [0, 3]].flatten(1), torch.from_numpy(expected), atol=1e-6)
    assert torch.equal(found[:, 1:3], test[:, 1:3])
    assert torch.equal(mean_completion(train, test)[2], train.mean(0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda i, m: (i[:, :1], m), ValueError, r"images: expected shape \(any, 3, 8, 12\)"),
        (lambda i, m: (i.float(), m), TypeError, "images: expected dtype torch.float64"),
        (lambda i, m: (i * torch.nan, m), ValueError, "images: expected finite values"),
        (lambda i, m: (i, m.double()), TypeError, "replaced: expected a bool tensor"),
        (lambda i, m: (i, m[:, :5]), ValueError, r"replaced: expected shape \(5, 6\)"),
        (lambda i, m: (i, m | True), ValueError, "replaced: .*a mask that hides everything"),
    ],
)
def test_wrong_images_and_masks(model, images, change, error, message):
    with pytest.raises(error, match=message):
        model(*change(images, evaluation_masks(5, 6)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 5}, "patch: expected a divisor of 8 and 12, got 5"),
        ({"step": 0.0}, "step"),
        ({"steps": -1}, "steps"),
        ({"pixel_std": 0.0}, "pixel_std: expected numbers > 0"),
    ],
)
def test_wrong_models(changes, message):
    system = ed.EnergyTransformer(8, 1, 4, 4)
    with pytest.raises(ValueError, match=message):
        ed.ImageCompletion(system, (3, 8, 12), **({"patch": 4} | changes))
