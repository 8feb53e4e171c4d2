"""The image model against the official JAX implementation."""

import pytest
import torch

from etdyn import EnergyTransformer, ImageCompletion, load_official_checkpoint

LINEAR = {"encoder": ("Wenc", "Benc"), "decoder": ("Wdec", "Bdec")}
TOKENS = {"cls_token": "CLS_token", "mask_token": "MASK_token", "positions": "POS_embed"}


@pytest.fixture
def arrays(golden):
    return golden("et_image")


@pytest.fixture
def given(arrays):
    """Image and mask as a batch of one."""
    image = torch.from_numpy(arrays["image"]).unsqueeze(0)
    return image, torch.from_numpy(arrays["mask"].astype(bool)).unsqueeze(0)


def build(arrays, norm_twice=True):
    block = {name: arrays[name] for name in ("Wq", "Wk", "Xi")}
    block |= {"gamma": arrays["LNORM_gamma"], "delta": arrays["LNORM_bias"]}
    system = EnergyTransformer.from_official(block, self_attention=True)
    model = ImageCompletion(
        system, arrays["image"].shape, int(arrays["patch_size"]),
        steps=int(arrays["steps"]), step=float(arrays["alpha"]), norm_twice=norm_twice,
    )  # fmt: skip
    with torch.no_grad():
        for name, (weight, bias) in LINEAR.items():
            layer = getattr(model, name)
            layer.weight.copy_(torch.from_numpy(arrays[weight].T.copy()))
            layer.bias.copy_(torch.from_numpy(arrays[bias]))
        for name, official in TOKENS.items():
            getattr(model, name).copy_(torch.from_numpy(arrays[official]))
    return model


@torch.no_grad()
def test_tokens_equal_reference(arrays, given, close):
    close(build(arrays).tokens(*given)[0], arrays["tokens0"], 1e-13)


@torch.no_grad()
def test_reconstruction_equals_reference(arrays, given, close):
    close(build(arrays).complete(*given)[0], arrays["reconstruction"], 1e-10)


@torch.no_grad()
def test_reference_normalises_twice(arrays, given):
    once = build(arrays, norm_twice=False).complete(*given)[0]
    wanted = torch.from_numpy(arrays["reconstruction"])
    assert (once - wanted).abs().max() > 1e-3 * wanted.abs().max()


@torch.no_grad()
def test_released_checkpoint_format_reconstructs(arrays, given, golden_path, close):
    model = load_official_checkpoint(golden_path / "et_image_checkpoint.npz")
    assert (model.shape, model.patch) == (arrays["image"].shape, int(arrays["patch_size"]))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    image, mask = given
    close(model.complete(image.float(), mask)[0], arrays["reconstruction"], 1e-4)
