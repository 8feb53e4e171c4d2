"""A study's answer as files: result, configuration, figures and one self-contained page."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from etdyn import store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "format_table"]

_STYLE = """
body { font: 16px/1.5 Georgia, serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; }
h1, h2 { font-family: Helvetica, Arial, sans-serif; line-height: 1.2; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #bbb; }
figure { margin: 1.5rem 0; } img { width: 100%; }
figcaption, caption { font-size: .9rem; color: #444; text-align: left; caption-side: bottom; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .9rem; }
th, td { padding: .2rem .7rem; text-align: right; } th { border-bottom: 2px solid #333; }
td { border-bottom: 1px solid #ddd; } th:first-child, td:first-child { text-align: left; }
pre { font-size: .75rem; overflow-x: auto; background: #f4f4f4; padding: .7rem; }
"""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for the terminal: first column left, the others right."""
    widths = [max(len(line[k]) for line in (header, *rows)) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest])

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])


class Report:
    """Collects text, tables and figures in reading order, then writes them.

    Args:
        title: of the page.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._body: list[str] = []
        self._figures: dict[str, bytes] = {}

    def text(self, heading: str, *paragraphs: str) -> None:
        """A section; an empty heading continues the last one."""
        if heading:
            self._body.append(f"<h2>{html.escape(heading)}</h2>")
        self._body += [f"<p>{html.escape(p)}</p>" for p in paragraphs]

    def table(self, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of ready-made cells."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        self._body.append(
            f'<div class="wide"><table><caption>{html.escape(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """A figure, written as `name`.png and embedded in the page."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        self._figures[name] = buffer.getvalue()
        data = base64.b64encode(self._figures[name]).decode()
        self._body.append(
            f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def write(self, folder: Path, config: dict[str, Any], result: xr.DataTree) -> Path:
        """Write result.zarr, config.json, the figures and report.html; return the page's path."""
        store.save(result, folder / "result.zarr")
        settings = json.dumps(config, indent=1, default=str)
        store.write_atomically(folder / "config.json", settings + "\n")
        for name, data in self._figures.items():
            store.write_atomically(folder / f"{name}.png", data)
        provenance = {k: v for k, v in result.attrs.items() if k != "etdyn_config"}
        about = json.dumps(provenance, indent=1)
        page = (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head><body>"
            f"<h1>{html.escape(self.title)}</h1>{''.join(self._body)}"
            f"<h2>Configuration</h2><pre>{html.escape(settings)}</pre>"
            f"<h2>Provenance</h2><pre>{html.escape(about)}</pre></body></html>\n"
        )
        store.write_atomically(folder / "report.html", page)
        return folder / "report.html"
