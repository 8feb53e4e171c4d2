"""Image completion: patches become tokens, masked ones are filled in by a System's descent.

Source: Hoover et al. 2023, section 3 and appendix; ET section 1.6.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_count, check_finite, check_positive, check_tensor
from etdyn.solve.euler import iterate
from etdyn.systems import System
from etdyn.transformer import EnergyTransformer

__all__ = ["ImageCompletion", "draw_masks", "masked_error", "patchify", "psnr", "unpatchify"]


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut `(n, channel, height, width)` into `(n, patches, channel * patch * patch)`.

    Patches run along rows; inside one the order is channel, row, column.
    """
    n, channels, height, width = images.shape
    blocks = images.reshape(n, channels, height // patch, patch, width // patch, patch)
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: int, shape: tuple[int, int, int]) -> Tensor:
    """The inverse of `patchify` for images of this `(channel, height, width)`."""
    channels, height, width = shape
    blocks = patches.reshape(-1, height // patch, width // patch, channels, patch, patch)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, height, width)


def draw_masks(
    n: int,
    patches: int,
    scored: float = 0.5,
    open_share: float = 0.1,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Random masks as published: a share of patches is scored, most of them hidden.

    Args:
        n: images.
        patches: patches of an image.
        scored: share of patches in the loss, in (0, 1); 100 of 196 in the paper.
        open_share: share of the scored patches that stay visible, in [0, 1); 10 of 100 in the
            paper, where it is said to give the memories their meaning.
        generator: of the random numbers.

    Returns:
        replaced, scored: bool `(n, patches)`, True where the mask token stands in for the
        patch, and where the patch counts.

    Raises:
        ValueError: shares out of range, no patch left to score or none left to see.
    """
    count = round(scored * patches)
    hidden = count - round(open_share * count)
    if not 0 <= open_share < 1:
        raise bad("open_share", "a share in [0, 1)", open_share)
    if not 0 < count < patches or hidden < 1:
        raise bad(
            "scored",
            f"a share of {patches} patches that hides some and leaves some visible",
            f"{scored} ({count} scored, {hidden} hidden)",
        )
    rank = torch.rand(n, patches, generator=generator).argsort(1).argsort(1)
    return rank < hidden, rank < count


class ImageCompletion(nn.Module):
    """A masked-image model around any System.

        patches -> linear encoder -> mask token where hidden -> CLS in front -> + positions
        -> `steps` Euler steps of size `step` -> layer norm of the system -> linear decoder

    All tokens evolve, open ones too. Pixels are normalised inside, (p - mean) / std.

    Args:
        system: any System; its `dim` is the token's size.
        shape: `(channel, height, width)` of the images.
        patch: side of a patch in pixels; divides height and width.
        steps, step: of the descent that `forward` runs.
        pixel_mean, pixel_std: of the training pixels, one number or one a channel.
        norm_twice: apply the final layer norm twice, as the official code does.
    """

    def __init__(
        self,
        system: System,
        shape: tuple[int, int, int],
        patch: int,
        *,
        steps: int = 12,
        step: float = 0.1,
        pixel_mean: float | Tensor = 0.0,
        pixel_std: float | Tensor = 1.0,
        norm_twice: bool = False,
    ) -> None:
        super().__init__()
        check_count("patch", patch)
        check_count("steps", steps, least=0)
        check_positive("step", step)
        channels, height, width = shape
        if height % patch or width % patch:
            raise bad("patch", f"a divisor of {height} and {width}", patch)
        self.system, self.shape, self.patch = system, (channels, height, width), patch
        self.steps, self.step, self.norm_twice = steps, float(step), norm_twice
        self.patches = (height // patch) * (width // patch)
        width_in, dim = channels * patch * patch, system.dim
        like = system.lagrangian.like
        self.encoder = nn.Linear(width_in, dim, dtype=like.dtype)
        self.decoder = nn.Linear(dim, width_in, dtype=like.dtype)
        self.mask_token = nn.Parameter(torch.randn(dim, dtype=like.dtype) * dim**-0.5)
        self.cls_token = nn.Parameter(torch.randn(dim, dtype=like.dtype) * dim**-0.5)
        self.positions = nn.Parameter(
            torch.randn(self.patches + 1, dim, dtype=like.dtype) * dim**-0.5
        )
        for name, value in (("pixel_mean", pixel_mean), ("pixel_std", pixel_std)):
            per_channel = torch.as_tensor(value, dtype=like.dtype).reshape(-1, 1, 1)
            self.register_buffer(name, per_channel.expand(channels, 1, 1).clone())
        if bool((self.pixel_std <= 0).any()):
            raise bad("pixel_std", "numbers > 0", pixel_std)

    pixel_mean: Tensor
    pixel_std: Tensor

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that rebuild this model, as JSON can hold them.

        Raises:
            ValueError: the system is not one that describes itself.
        """
        if not isinstance(self.system, EnergyTransformer):
            raise bad("system", "an EnergyTransformer, to be described", type(self.system).__name__)
        return {
            "system": self.system.config,
            "shape": list(self.shape),
            "patch": self.patch,
            "steps": self.steps,
            "step": self.step,
            "norm_twice": self.norm_twice,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ImageCompletion:
        """A model with the shapes of `config` and fresh parameters."""
        rest = {k: v for k, v in config.items() if k not in ("system", "shape")}
        return cls(EnergyTransformer(**config["system"]), tuple(config["shape"]), **rest)

    def with_system(self, system: System) -> Self:
        """This model around another system of the same width, sharing all other parameters."""
        if system.dim != self.system.dim:
            raise bad("system", f"dim {self.system.dim}", system.dim)
        view = copy.copy(self)
        view._modules = {**self._modules, "system": system}
        return view

    def normalised_patches(self, images: Tensor) -> Tensor:
        """The patches of images in normalised pixels, `(n, patches, channel * patch^2)`.

        Raises:
            ValueError, TypeError: wrong shape, dtype or device; NaN or infinite pixels.
        """
        check_tensor("images", images, (None, *self.shape), self.pixel_mean)
        check_finite("images", images)
        return patchify((images - self.pixel_mean) / self.pixel_std, self.patch)

    def pixels(self, patches: Tensor) -> Tensor:
        """Images `(n, channel, height, width)` of patches in normalised pixels."""
        images = unpatchify(patches, self.patch, self.shape)
        return images * self.pixel_std + self.pixel_mean

    def tokens(self, images: Tensor, replaced: Tensor) -> Tensor:
        """The start of the descent, `(n, 1 + patches, dim)`; token 0 is CLS.

        Args:
            images: `(n, channel, height, width)`.
            replaced: bool `(n, patches)`, True where the mask token stands in.

        Raises:
            ValueError, TypeError: as `normalised_patches`; a mask of the wrong shape or type,
                or one that hides every patch of an image.
        """
        encoded = self.encoder(self.normalised_patches(images))
        if not isinstance(replaced, Tensor) or replaced.dtype != torch.bool:
            got = replaced.dtype if isinstance(replaced, Tensor) else type(replaced).__name__
            raise TypeError(f"replaced: expected a bool tensor, got {got}")
        if replaced.shape != encoded.shape[:2]:
            raise bad("replaced", f"shape {tuple(encoded.shape[:2])}", tuple(replaced.shape))
        if bool(replaced.all(1).any()):
            raise bad("replaced", "a visible patch in every image", "a mask that hides everything")
        visible = torch.where(replaced.unsqueeze(-1), self.mask_token, encoded)
        cls = self.cls_token.expand(len(images), 1, -1)
        return torch.cat([cls, visible], 1) + self.positions

    def decode(self, x: Tensor) -> Tensor:
        """Patches in normalised pixels that the state x stands for: decoder(LN(x)), without CLS."""
        g = self.system.activation(x)
        if self.norm_twice:
            g = self.system.activation(g)
        patches: Tensor = self.decoder(g[:, 1:])
        return patches

    def forward(self, images: Tensor, replaced: Tensor) -> Tensor:
        """Reconstructed patches in normalised pixels, `(n, patches, channel * patch^2)`."""
        x = self.system.prepare(self.tokens(images, replaced))
        for state in iterate(self.system, x, self.step, self.steps):
            x = state
        return self.decode(x)

    def complete(self, images: Tensor, replaced: Tensor) -> Tensor:
        """Images `(n, channel, height, width)` as the model reconstructs them, whole."""
        return self.pixels(self.forward(images, replaced))


def masked_error(predicted: Tensor, target: Tensor, scored: Tensor) -> Tensor:
    """Mean squared error over the scored patches of each image, `(n,)`.

    In normalised pixels this is the error over the variance of the training pixels: 1 is the
    error of the mean grey.
    """
    per_patch = (predicted - target).square().mean(-1)
    return (per_patch * scored).sum(1) / scored.sum(1)


def psnr(error: Tensor, pixel_std: Tensor | float) -> Tensor:
    """Peak signal-to-noise ratio in dB of a mean squared error in normalised pixels, peak 1."""
    return -10 * torch.log10(error * torch.as_tensor(pixel_std, dtype=error.dtype).square().mean())
