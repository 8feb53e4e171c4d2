"""Figures of results: every function takes labelled arrays and draws them, never a system.

Colours are Okabe and Ito's, which differ in brightness; lines differ in dash as well, so that a
figure survives a grey printer. Lines are means and bands quartiles over
samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

__all__ = [
    "COLOURS",
    "DASHES",
    "band",
    "image_rows",
    "legend",
    "mark",
    "panels",
    "slope_guide",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))

_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


def panels(columns: int, rows: int = 1, height: float = 2.9) -> tuple[Figure, npt.NDArray[Any]]:
    """A figure of `rows` x `columns` axes in the project's style, outside pyplot's state."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.0, height * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes


def band(
    ax: Axes, values: xr.DataArray, x: str, *, label: str, style: int, width: float = 1.6
) -> None:
    """The mean over samples as a line along the coordinate `x`, the quartiles as a band.

    style: index into colours and dashes; width: of the line, in points.
    """
    low, high = (values.quantile(q, "sample") for q in (0.25, 0.75))
    colour, dash = COLOURS[style % len(COLOURS)], DASHES[style % len(DASHES)]
    mean = values.mean("sample")
    ax.plot(values[x], mean, color=colour, linestyle=dash, label=label, linewidth=width)
    ax.fill_between(values[x], low, high, color=colour, alpha=0.15, linewidth=0)


def slope_guide(ax: Axes, x: npt.ArrayLike, y0: float, order: int) -> None:
    """A thin line y ~ x^order through (x[0], y0), for log-log axes."""
    points = np.asarray(x, dtype=np.float64)
    line = y0 * (points / points[0]) ** order
    ax.plot(points, line, color="#888888", linewidth=0.8, label=f"order {order}")


def mark(ax: Axes, x: float, label: str) -> None:
    """A thin vertical line, named in the legend."""
    ax.axvline(x, color="#888888", linewidth=0.9, linestyle=(0, (4, 2)), label=label)


def plain_log(ax: Axes) -> None:
    """Log-log axes with plain numbers at 1, 2 and 5 times the powers of ten."""
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def legend(ax: Axes) -> None:
    """A small legend without a frame."""
    ax.legend(fontsize=7, frameon=False)


def image_rows(rows: Mapping[str, npt.NDArray[Any]], low: float = 0.0, high: float = 1.0) -> Figure:
    """Rows of small images under each other, one row a name.

    rows: name -> `(n, channel, height, width)` with values in [low, high]; others are clipped,
        and NaN, a pixel that is not known, is blue.
    """
    count = min(len(images) for images in rows.values())
    figure, axes = panels(count, len(rows), height=0.78)
    figure.set_layout_engine("constrained", w_pad=0.01, h_pad=0.02, wspace=0.0, hspace=0.0)
    grey = mpl.colormaps["gray"].with_extremes(bad="#8DB6D9")
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for ax, image in zip(line, images[:count], strict=True):
            shown = np.clip((image - low) / (high - low), 0, 1).transpose(1, 2, 0)
            ax.imshow(shown if shown.shape[-1] == 3 else shown[..., 0], cmap=grey, vmin=0, vmax=1)
            ax.grid(visible=False)
            ax.set(xticks=[], yticks=[])
            for spine in ax.spines.values():
                spine.set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return figure
