"""The picture of contributions: what each part of a system did to images, early and late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from etdyn.checks import bad
from etdyn.plots import panels

__all__ = ["CHANGES", "contribution_rows"]

# From darker to brighter, as the pixel becomes: a grey printer keeps the sign.
CHANGES = LinearSegmentedColormap.from_list(
    "changes", ["#08306B", "#4F82BD", "#BDBDBD", "#FFC24D", "#FFF3A0"]
)

Row = list[list[Axes]]  # of every sample: the state and the parts
_GREY = colormaps["gray"].with_extremes(bad="#8DB6D9")
_GAP = 0.25  # between samples, in images


def contribution_rows(
    result: xr.Dataset, images: Mapping[str, npt.NDArray[Any]] | None = None
) -> Figure:
    """A row for every step, and in it for every sample its state and each part's contribution.

    States are grey, from 0 to 1 and clipped there. Contributions have a scale for every row,
    symmetric about zero; those of colour images are means over channels. The remainder is not
    shown.

    Args:
        result: of `contributions` with images for decoded states (dims channel, row, column).
        images: what to show above the states, such as the images given and true; name ->
            `(sample, channel, row, column)` in [0, 1]. NaN, not known, is blue.

    Raises:
        ValueError: a result without images, or more `images` than fit above one sample.
    """
    if not {"channel", "row", "column"} <= set(result["state"].dims):
        raise bad("result", "decoded states that are images", f"dims {result['state'].dims}")
    parts = [name for name in result["part"].to_numpy() if name != "remainder"]
    above = dict(images or {})
    if len(above) > 1 + len(parts):
        raise bad("images", f"at most {1 + len(parts)}", len(above))
    figure, rows = _grid(result.sizes["sample"], 1 + len(parts), bool(above) + result.sizes["step"])
    if above:
        _images(rows[0], above)
    for k, row in enumerate(rows[bool(above) :]):
        _step(row, result.isel(step=k), parts, first=k == 0)
    return figure


def _images(row: Row, images: Mapping[str, npt.NDArray[Any]]) -> None:
    for sample, line in enumerate(row):
        for ax, (name, shown) in zip(line, images.items(), strict=False):
            drawn = _grey(ax, shown[sample])
            ax.set_title(name, fontsize=7, pad=3)
    _bar(row, drawn, "pixel value")


def _step(row: Row, step: xr.Dataset, parts: list[str], first: bool) -> None:
    """One row: the states before the step, and what each part added in it."""
    done = step["contribution"].sel(part=parts).mean("channel")
    done = done.transpose("sample", "part", "row", "column")
    top = float(np.nanmax(np.abs(done)))
    for state, shares, line in zip(step["state"].to_numpy(), done.to_numpy(), row, strict=True):
        _grey(line[0], state)
        for ax, share in zip(line[1:], shares, strict=True):
            drawn = ax.imshow(share, cmap=CHANGES, vmin=-top, vmax=top)
    if first:
        for line in row:
            for ax, name in zip(line, ["state", *parts], strict=True):
                ax.set_title(name, fontsize=7, pad=3)
    label = f"step {int(step['step']) + 1}\nt = {float(step['time']):.3g}"
    row[0][0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    _bar(row, drawn, "pixel change")


def _grid(samples: int, width: int, rows: int) -> tuple[Figure, list[Row]]:
    """Square axes without ticks, in blocks of `width`, one block a sample."""
    columns = samples * (width + 1) - 1
    units = columns - (samples - 1) * (1 - _GAP)
    figure, axes = panels(columns, rows, height=8.0 / units)
    for gap in axes[:, width :: width + 1].flat:
        gap.set_visible(False)
    figure.set_layout_engine("constrained", w_pad=0.01, h_pad=0.03, wspace=0.0, hspace=0.0)
    widths = [_GAP if k % (width + 1) == width else 1.0 for k in range(columns)]
    axes[0, 0].get_gridspec().set_width_ratios(widths)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[], aspect="equal")
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
    starts = range(0, columns, width + 1)
    return figure, [[list(line[k : k + width]) for k in starts] for line in axes]


def _grey(ax: Axes, image: npt.NDArray[Any]) -> AxesImage:
    shown = np.clip(image, 0, 1).transpose(1, 2, 0)
    shown = shown if shown.shape[-1] == 3 else shown[..., 0]
    return ax.imshow(shown, cmap=_GREY, vmin=0, vmax=1)


def _bar(row: Row, drawn: AxesImage, label: str) -> None:
    figure = row[0][0].get_figure()
    assert figure is not None
    every = [ax for line in row for ax in line]
    bar = figure.colorbar(drawn, ax=every, fraction=0.03, pad=0.01, aspect=9)
    bar.set_label(label, fontsize=6)
    bar.ax.tick_params(labelsize=6)
