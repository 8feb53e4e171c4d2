"""Graph sets: many graphs with a label each, for graph classification.

Readers of TU text files, superpixel graphs made from images, and a default that needs no file.
Nothing is downloaded, nothing is extracted to disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from etdyn.checks import bad, check_rows
from etdyn.datasets.graph_formats import check_edges, check_features, read_lines, zip_members
from etdyn.datasets.superpixels import superpixel_edges, superpixels_of

__all__ = ["GraphSet", "load_graphs", "superpixel_digits", "superpixel_graphs"]


@dataclass(frozen=True, eq=False, repr=False)
class GraphSet:
    """Many graphs with a label each, checked at construction.

    features: of each graph, float32 `(node, feature)`, finite; constant one where the source has
    none.
    edges: of each graph, int64 `(2, edge)`: keys (sources), then queries (targets). An undirected
    edge stands in both directions; no self-loops, no repeats.
    edge_features: of each graph, float32 `(edge, k)` in the order of `edges`, or None.
    labels: int64 `(graph,)`, 0..classes - 1.
    classes: how many; from the labels where it is not given.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, length or value.
    """

    features: list[Tensor]
    edges: list[Tensor]
    edge_features: list[Tensor] | None
    labels: Tensor
    name: str
    classes: int = 0

    def __post_init__(self) -> None:
        """Refuse anything the class docstring does not promise."""
        _check_labels(self.labels, self.classes)
        if not self.classes:
            object.__setattr__(self, "classes", int(self.labels.max()) + 1)
        lists = {"features": self.features, "edges": self.edges}
        if self.edge_features is not None:
            lists["edge_features"] = self.edge_features
        for name, tensors in lists.items():
            if len(tensors) != len(self.labels):
                raise bad(name, f"{len(self.labels)} tensors, one a label", len(tensors))
        _check_stack("features", self.features)
        _check_all_edges(self.edges, [len(part) for part in self.features])
        if self.edge_features is not None:
            _check_stack("edge_features", self.edge_features)
            for graph, (ends, part) in enumerate(zip(self.edges, self.edge_features, strict=True)):
                if len(part) != ends.shape[1]:
                    raise bad(f"edge_features[{graph}]", f"{ends.shape[1]} rows", len(part))

    def __len__(self) -> int:
        """How many graphs."""
        return len(self.labels)

    def subset(self, rows: Tensor | Sequence[int]) -> Self:
        """Some of the graphs, in this order; `classes` stays.

        rows: integers, at least one. Raises TypeError for others, ValueError out of range.
        """
        rows = check_rows("rows", rows, len(self))
        picked: dict[str, Any] = {
            name: None if parts is None else [parts[row] for row in rows.tolist()]
            for name, parts in (
                ("features", self.features),
                ("edges", self.edges),
                ("edge_features", self.edge_features),
            )
        }
        return type(self)(**picked, labels=self.labels[rows], name=self.name, classes=self.classes)

    def __repr__(self) -> str:
        """Sizes, not values."""
        sizes = [len(part) for part in self.features]
        edges = sum(ends.shape[1] for ends in self.edges)
        weights = 0 if self.edge_features is None else self.edge_features[0].shape[1]
        return (
            f"GraphSet({self.name!r}, graphs={len(self)}, classes={self.classes}, "
            f"nodes={min(sizes)}..{max(sizes)}, edges={edges}, "
            f"features={self.features[0].shape[1]}, edge_features={weights})"
        )


def _check_labels(labels: Tensor, classes: int) -> None:
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        got = getattr(labels, "dtype", type(labels).__name__)
        raise TypeError(f"labels: expected an int64 tensor, got {got}")
    if labels.ndim != 1 or len(labels) == 0:
        raise bad("labels", "a non-empty (graph,)", f"shape {tuple(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (classes and high >= classes):
        raise bad("labels", f"0 to {classes - 1 if classes else 'classes - 1'}", f"{low} to {high}")


def _check_stack(name: str, parts: list[Tensor]) -> None:
    """Float32 matrices of one width, checked together: a check for each is slow."""
    for graph, part in enumerate(parts):
        if not isinstance(part, Tensor) or part.ndim != 2 or part.shape[1] != parts[0].shape[1]:
            got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise bad(f"{name}[{graph}]", "a matrix as wide as the first", got)
        if len(part) == 0 and name == "features":
            raise bad(f"{name}[{graph}]", "at least one node", "none")
    stack = torch.cat(parts)
    if len(stack):
        check_features(name, stack)


def _check_all_edges(edges: list[Tensor], sizes: list[int]) -> None:
    for graph, (ends, size) in enumerate(zip(edges, sizes, strict=True)):
        if not isinstance(ends, Tensor) or ends.ndim != 2 or len(ends) != 2:
            got = f"shape {tuple(ends.shape)}" if isinstance(ends, Tensor) else type(ends).__name__
            raise bad(f"edges[{graph}]", "shape (2, edge)", got)
        if ends.numel() and not 0 <= int(ends.min()) <= int(ends.max()) < size:
            got = f"{int(ends.min())} to {int(ends.max())}"
            raise bad(f"edges[{graph}]", f"nodes from 0 to {size - 1}", got)
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    shifted = [ends + start for ends, start in zip(edges, starts, strict=False)]
    check_edges("edges", torch.cat(shifted, 1), starts[-1])


def superpixel_digits(superpixels: int = 16, neighbours: int = 8) -> GraphSet:
    """Scikit-learn's 1,797 handwritten digits (8x8) as superpixel graphs, labels 0..9.

    Arguments, features and edges as in `superpixel_graphs`. Made by us: no benchmark.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415 (slow to import)

    data = load_digits()
    images = torch.from_numpy(data.images[:, None] / 16).float()
    labels = torch.from_numpy(data.target).long()
    return superpixel_graphs(images, labels, superpixels, neighbours, name="superpixel digits")


def superpixel_graphs(
    images: Tensor,
    labels: Tensor,
    superpixels: int = 75,
    neighbours: int = 8,
    name: str = "superpixels",
) -> GraphSet:
    """Turn images into graphs of their superpixels.

    Superpixels are those of SLIC: k-means of the pixels on colour and position, from a regular
    grid of centres; nothing is random. Nodes are the superpixels; features are mean colour and
    centre (row, column) in [0, 1]. Edges join each to its nearest centres, in both directions;
    `edge_features` is `(edge, 1)`: exp(-d^2 / s^2), with d the distance of the centres and s its
    mean over the neighbours that the graph's nodes chose.

    images: float32 `(n, channel, height, width)` in [0, 1]. labels: int64 `(n,)`, 0.. superpixels:
    at most so many an image. neighbours: how many each node chooses, all others where fewer exist.

    Returns a GraphSet with a graph an image. Raises TypeError, ValueError for a bad argument.
    Sources: Achanta et al., SLIC (PAMI 2012); Knyazev et al. (2019); Dwivedi et al.,
    "Benchmarking graph neural networks" (2020), appendix A.2.
    """
    features = superpixels_of(images, superpixels)
    made = [superpixel_edges(part[:, -2:], neighbours) for part in features]
    edges, weights = [ends for ends, _ in made], [weight for _, weight in made]
    return GraphSet(features, edges, weights, labels, name)


def load_graphs(source: str | Path) -> GraphSet:
    """Read many graphs from whatever `source` names; one of

    - "digits": `superpixel_digits()`
    - a zip or a folder of TU text files: `..._A.txt`, `..._graph_indicator.txt` and
      `..._graph_labels.txt`, and where present `node_labels`, `node_attributes`, `edge_labels` and
      `edge_attributes`

    Node features are the attributes, then each label one-hot over the values that occur; so are
    edge features. Classes are the labels' values in ascending order. Self-loops are dropped; an
    edge listed more than once, as IMDB-BINARY lists every one, is kept once with the mean of its
    features. Every edge must be listed in both directions, as the format says.

    Returns a GraphSet named as the files are. Raises ValueError naming the file and the field for
    anything else: damaged or truncated, missing, not as long as the others, out of range, NaN, not
    numbers; and where torch-geometric, which reads the text, is not installed. A folder's text
    that is cut between two lines can be told from a smaller data set only by the other files.
    Source: Morris et al., TUDataset (2020).
    """
    if source == "digits":
        return superpixel_digits()
    path = Path(source)
    if path.is_dir():
        files = {file.name: file.read_bytes() for file in path.glob("*.txt") if file.is_file()}
    elif path.is_file() and path.suffix.lower() == ".zip":
        files = zip_members(path)
    else:
        wanted = '"digits", or a zip or a folder of TU text files'
        end = "which is none of these" if path.exists() else "which does not exist"
        raise bad("source", wanted, f"{str(source)!r}, {end}")
    prefixes = [
        name.removesuffix("_A.txt")
        for name in files
        if name.endswith("_A.txt") and not name.startswith(".")
    ]
    if len(prefixes) != 1:
        raise bad(f"{path}: A", "one file ..._A.txt", prefixes or "none")
    return _from_tu(TuFiles(path, prefixes[0], files))


@dataclass(frozen=True)
class TuFiles:
    """The text files of one TU data set, by their names.

    torch-geometric's `read_tu_data` is not used as a whole, only its parts: it drops a last line
    without newline, takes the node 0 (ids begin at 1) for the last, loses count where the last
    graphs have no edges, and adds up the one-hot labels of an edge that is listed twice.
    """

    path: Path
    prefix: str
    files: dict[str, bytes]

    def has(self, field: str) -> bool:
        """Whether there is such a file."""
        return f"{self.prefix}_{field}.txt" in self.files

    def read(self, field: str, dtype: torch.dtype, rows: int | None = None) -> Tensor:
        """The numbers of a file, `(line, column)`."""
        name = f"{self.prefix}_{field}.txt"
        blame = self.blame(field)
        if name not in self.files:
            raise bad(blame, "this file", "none")
        lines = read_lines(blame, self.files[name])
        if rows is not None and len(lines) != rows:
            raise bad(blame, f"{rows} lines, as the other files say", len(lines))
        try:
            from torch_geometric.io import parse_txt_array  # noqa: PLC0415 (optional)
        except ImportError as error:
            hint = 'expected torch-geometric to read TU files; pip install -e ".[graphs]"'
            raise ValueError(f"{self.path}: {hint}") from error
        try:
            table: Tensor = parse_txt_array(lines, sep=",", dtype=dtype)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            kind = "integers" if dtype is torch.int64 else "numbers"
            raise ValueError(f"{blame}: expected lines of {kind}: {error}") from error
        return table.reshape(len(lines), -1)  # it squeezes

    def blame(self, field: str) -> str:
        """What an error message calls a file."""
        return f"{self.path}: {self.prefix}_{field}.txt"

    def described(self, kind: str, rows: int) -> Tensor:
        """Attributes and one-hot labels of nodes or edges, float32 `(rows, columns)`."""
        found = [torch.empty(rows, 0)]
        if self.has(f"{kind}_attributes"):
            found.append(self.read(f"{kind}_attributes", torch.float32, rows))
            if not bool(found[-1].isfinite().all()):
                line = int((~found[-1].isfinite().all(1)).nonzero()[0]) + 1
                blame = self.blame(f"{kind}_attributes")
                raise bad(blame, "finite values", f"NaN or infinity in line {line}")
        if self.has(f"{kind}_labels"):
            for column in self.read(f"{kind}_labels", torch.int64, rows).unbind(1):
                values, place = torch.unique(column, return_inverse=True)
                found.append(torch.nn.functional.one_hot(place, len(values)).float())
        return torch.cat(found, 1)


def _from_tu(tu: TuFiles) -> GraphSet:
    owner = _owners(tu)
    sizes = owner.bincount()
    features = tu.described("node", len(owner))
    if features.shape[1] == 0:
        features = torch.ones(len(owner), 1)
    labels = tu.read("graph_labels", torch.int64, len(sizes))
    if labels.shape[1] != 1:
        raise bad(tu.blame("graph_labels"), "one number a line", labels.shape[1])
    edges, weights = _tu_edges(tu, owner)
    begins = sizes.cumsum(0) - sizes
    counts = owner[edges[0]].bincount(minlength=len(sizes)).tolist()
    edges = edges - begins[owner[edges[0]]]
    return GraphSet(
        list(torch.split(features, sizes.tolist())),
        [part.contiguous() for part in torch.split(edges, counts, 1)],
        None if weights is None else list(torch.split(weights, counts)),
        torch.unique(labels, return_inverse=True)[1][:, 0],
        tu.prefix,
    )


def _owners(tu: TuFiles) -> Tensor:
    """The graph of each node, from 0."""
    owner = tu.read("graph_indicator", torch.int64)
    if owner.shape[1] != 1:
        raise bad(tu.blame("graph_indicator"), "one number a line", owner.shape[1])
    owner = owner[:, 0] - 1
    steps = owner.diff()
    if int(owner[0]) != 0 or bool(((steps != 0) & (steps != 1)).any()):
        raise bad(tu.blame("graph_indicator"), "graphs 1, 2, ... in order, none left out", "others")
    return owner


def _tu_edges(tu: TuFiles, owner: Tensor) -> tuple[Tensor, Tensor | None]:
    """Edges over the nodes of all graphs, sorted, each once; and their features."""
    blame = tu.blame("A")
    edges = tu.read("A", torch.int64).T - 1
    from torch_geometric.utils import coalesce, remove_self_loops  # noqa: PLC0415 (optional)

    nodes = len(owner)
    if len(edges) != 2:
        raise bad(blame, "two numbers a line", len(edges))
    if not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
        got = f"{int(edges.min()) + 1} to {int(edges.max()) + 1}"
        raise bad(blame, f"nodes from 1 to {nodes}", got)
    if bool((across := owner[edges[0]] != owner[edges[1]]).any()):
        line = int(across.nonzero()[0]) + 1
        raise bad(blame, "both ends in one graph", f"an edge between two in line {line}")
    weights = tu.described("edge", edges.shape[1])
    edges, weights = remove_self_loops(edges, weights)
    edges, weights = coalesce(edges, weights, num_nodes=nodes, reduce="mean")
    if not torch.equal(coalesce(edges.flip(0), num_nodes=nodes), edges):
        raise bad(blame, "every edge in both directions", "one direction of some (is it cut?)")
    return edges, weights if weights.shape[1] else None
