"""Superpixels of images, many images at once, and the edges between their centres."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from etdyn.checks import bad, check_count

__all__ = ["superpixel_edges", "superpixels_of"]

COMPACTNESS = 0.25  # weight of position against colour, as Knyazev et al. (2019) chose it
ROUNDS = 10  # of k-means; SLIC's usual number
EXACT = "donot_use_mm_for_euclid_dist"
CHUNK = 2**24  # numbers in the largest array: of images, pixels and centres


def superpixels_of(images: Tensor, superpixels: int) -> list[Tensor]:
    """Mean colour and centre of each superpixel of each image.

    images: float32 `(n, channel, height, width)` in [0, 1]. superpixels: at most so many each.

    Returns n tensors float32 `(superpixel, channel + 2)`; the centre is (row, column) in [0, 1].
    Raises TypeError, ValueError for a bad argument.
    """
    if not isinstance(images, Tensor) or images.dtype != torch.float32:
        got = getattr(images, "dtype", type(images).__name__)
        raise TypeError(f"images: expected a float32 tensor, got {got}")
    if images.ndim != 4 or images.numel() == 0:
        got = f"shape {tuple(images.shape)}"
        raise bad("images", "a non-empty (n, channel, height, width)", got)
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise bad("images", "values in [0, 1]", "others")
    height, width = images.shape[2:]
    check_count("superpixels", superpixels)
    if superpixels > height * width:
        raise bad("superpixels", f"at most the {height * width} pixels", superpixels)
    size = max(1, CHUNK // (height * width * superpixels))
    return [part for chunk in torch.split(images, size) for part in _clustered(chunk, superpixels)]


def _clustered(images: Tensor, superpixels: int) -> list[Tensor]:
    """Lloyd's iterations of all images together, from a regular grid of centres."""
    n, channels, height, width = images.shape
    rows = min(height, superpixels, max(1, int(math.sqrt(superpixels * height / width))))
    columns = min(width, superpixels // rows)
    spacing = math.sqrt(height * width / (rows * columns))
    places = torch.cartesian_prod(torch.arange(height) + 0.5, torch.arange(width) + 0.5)
    scale = COMPACTNESS / spacing
    colours = images.flatten(2).transpose(1, 2)
    pixels = torch.cat([colours, (scale * places).expand(n, -1, -1)], 2)
    near = torch.cartesian_prod(
        ((torch.arange(rows) + 0.5) * height / rows).long(),
        ((torch.arange(columns) + 0.5) * width / columns).long(),
    )
    centres = pixels[:, near[:, 0] * width + near[:, 1]]
    ones = torch.ones_like(pixels[..., :1])
    for _ in range(ROUNDS):
        # neither distances by matrix products nor sums in another order: ties would be broken
        # by rounding, and an image's superpixels would depend on the images beside it
        nearest = torch.cdist(pixels, centres, compute_mode=EXACT).argmin(2, keepdim=True)
        counts = torch.zeros_like(centres[..., :1]).scatter_add_(1, nearest, ones)
        sums = torch.zeros_like(centres).scatter_add_(1, nearest.expand_as(pixels), pixels)
        centres = torch.where(counts > 0, sums / counts, centres)
    size = torch.tensor([1.0] * channels + [scale * height, scale * width])
    return [centre[some[:, 0] > 0] for centre, some in zip(centres / size, counts, strict=True)]


def superpixel_edges(centres: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    """Edges to the nearest centres, in both directions, and their Gaussian weights.

    centres: `(node, 2)`. neighbours: how many each node chooses; all others where fewer exist.
    Returns int64 `(2, edge)` and float32 `(edge, 1)`: exp(-d^2 / s^2) with the mean distance s
    from a node to those it chose.
    """
    check_count("neighbours", neighbours)
    distance = torch.cdist(centres, centres, compute_mode=EXACT).fill_diagonal_(math.inf)
    chosen = distance.topk(min(neighbours, len(centres) - 1), largest=False)
    near = torch.zeros_like(distance, dtype=torch.bool).scatter_(1, chosen.indices, True)
    edges = (near | near.T).nonzero().T.contiguous()
    weights = torch.exp(-(distance[edges[0], edges[1]] / chosen.values.mean()).square())
    return edges, weights[:, None]
