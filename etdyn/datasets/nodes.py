"""Node sets: one graph with features and a label for each node, for anomaly detection.

Readers of numpy archives, MATLAB files (CARE-GNN and DGAD layouts), CSV tables and DGL's binary
graphs, and a default that needs no file. Nothing is downloaded, no pickle is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from etdyn.checks import bad, check_count
from etdyn.datasets.graph_formats import (
    as_edges,
    as_features,
    as_labels,
    as_matrix,
    check_edges,
    check_features,
    read_mat,
    read_npz,
    read_table,
)

__all__ = ["NodeSet", "load_nodes", "rare_digit"]

RARE_SHARE = 0.05
ONLY = "edges"  # the name of the relation where the source has one and gives it no name
# Amazon (Dou et al. 2020) without labels for its first users, which the files give as 0, by
# (nodes, features): the whole graph, and DGAD's part with the U-P-U edges
AMAZON_UNLABELLED = {(11_944, 25): 3_305, (10_224, 25): 2_290}
# files that hold one of these relations hold all: a cut file has lost some
FAMILIES = (
    {"net_upu", "net_usu", "net_uvu"},  # Amazon
    {"net_rur", "net_rtr", "net_rsr"},  # YelpChi
)


@dataclass(frozen=True, eq=False, repr=False)
class NodeSet:
    """One graph whose nodes have features and labels, checked at construction.

    features: float32 `(node, feature)`, finite.
    labels: int64 `(node,)`: 1 anomaly, 0 normal, -1 unlabelled; both 0 and 1 occur.
    relations: the edges by the name of their kind, int64 `(2, edge)`: keys (sources), then queries
    (targets). An undirected edge stands in both directions; no self-loops, no repeats.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, length or value.
    """

    features: Tensor
    labels: Tensor
    relations: dict[str, Tensor]
    name: str

    def __post_init__(self) -> None:
        """Refuse anything the class docstring does not promise."""
        check_features("features", self.features)
        if not isinstance(self.labels, Tensor) or self.labels.dtype != torch.int64:
            got = getattr(self.labels, "dtype", type(self.labels).__name__)
            raise TypeError(f"labels: expected an int64 tensor, got {got}")
        if self.labels.ndim != 1:
            raise bad("labels", "shape (node,)", f"shape {tuple(self.labels.shape)}")
        as_labels("labels", self.labels.numpy(), len(self.features))
        if not self.relations:
            raise bad("relations", "at least one", "none")
        for name, edges in self.relations.items():
            check_edges(f"relations[{name!r}]", edges, len(self.features))

    def __repr__(self) -> str:
        """Sizes, not values."""
        nodes, features = self.features.shape
        anomalies, normal, without = (int((self.labels == value).sum()) for value in (1, 0, -1))
        edges = ", ".join(f"{name}: {ends.shape[1]}" for name, ends in self.relations.items())
        return (
            f"NodeSet({self.name!r}, nodes={nodes}, features={features}, edges={{{edges}}}, "
            f"anomalies={anomalies}, normal={normal}, unlabelled={without})"
        )


def rare_digit(seed: int = 0, digit: int = 8, neighbours: int = 8) -> NodeSet:
    """Scikit-learn's digits as a graph in which one digit is rare. Made by us: no benchmark.

    Nodes are 8x8 images, features their 64 pixel values in [0, 1]. Of one digit only so many
    images are kept, drawn at random, that they are 5 % of all: the anomalies. Edges join each
    image to its nearest ones in pixel space, in both directions. It exists so that code runs
    without a download; that a model does well on it says little, because digits are easy to tell
    apart. No published result refers to it.

    seed: of the draw. digit: the rare one, 0..9. neighbours: how many nearest images each image
    chooses; it may be chosen by more.

    Returns a NodeSet named "rare digit", about 1,700 nodes, relation "edges".
    Raises TypeError, ValueError for a bad argument.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415 (slow to import)
    from sklearn.neighbors import kneighbors_graph  # noqa: PLC0415

    check_count("seed", seed, least=0)
    check_count("digit", digit, least=0)
    check_count("neighbours", neighbours)
    if digit > 9:
        raise bad("digit", "0 to 9", digit)
    data = load_digits()
    rare = data.target == digit
    kept = round(RARE_SHARE / (1 - RARE_SHARE) * int((~rare).sum()))
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero(rare))[:kept]
    rows = np.sort(np.concatenate([np.flatnonzero(~rare), drawn]))
    if neighbours >= len(rows):
        raise bad("neighbours", f"fewer than the {len(rows)} nodes", neighbours)
    pixels = data.data[rows] / 16
    near = kneighbors_graph(pixels, neighbours).tocoo()
    edges = as_edges("edges", np.stack([near.row, near.col]), len(rows))
    labels = torch.from_numpy(rare[rows].astype(np.int64))
    return NodeSet(as_features("pixels", pixels), labels, {ONLY: edges}, "rare digit")


def load_nodes(source: str | Path) -> NodeSet:
    """Read a graph with labelled nodes from whatever `source` names; one of

    - "rare-digit": `rare_digit()`
    - a `.npz` file: `edge_index` integers (2, edge), `y` (node,), `x` (node, feature) or its CSR
      parts `x_indptr`, `x_indices`, `x_data`, `x_shape`; one relation, "edges"
    - a `.mat` file of CARE-GNN (`features`, `label`, sparse `net_...` for each relation, or `homo`
      alone) or of DGAD (`Attributes`, `Label`, `Network`); MATLAB 5 to 7.2
    - a folder with `nodes.csv` (header `node,label,` and names of features; a node is any name, an
      empty label means none) and `edges.csv` (header `source,target` or `source,target,relation`)
    - a `.bin` file of DGL, or one without suffix as T-Finance and T-Social have, where dgl is
      installed: its first graph, `feature` or `feat` and `label` of the nodes, integers or one-hot

    Labels are 1 anomaly, 0 normal, -1 unlabelled. Edges are taken as undirected, whether listed
    once or in both directions; self-loops are dropped and repeats joined. Only the relations of a
    file are kept, not their union `homo`.

    The Amazon fraud graph has no labels for its first users, but its files give them as 0. It is
    recognised by its 11,944 nodes (10,224 in the U-P-U part) of 25 features, and the first 3,305
    (2,290) become -1, where none of them is an anomaly.

    Returns a NodeSet named after the file. Raises ValueError naming the file and the field for
    anything else: damaged or truncated, missing or of wrong shape, ends out of range, NaN. Text
    that is cut between two lines cannot be told from a smaller data set.
    Sources: Dou et al., CARE-GNN (CIKM 2020); Tang et al., BWGNN (ICML 2022).
    """
    if source == "rare-digit":
        return rare_digit()
    path = Path(source)
    if path.is_dir() and (path / "nodes.csv").exists():
        return _from_tables(path)
    reader = READERS.get(path.suffix.lower())
    if path.is_file() and reader is not None:
        return reader(path)
    raise bad(
        "source",
        '"rare-digit", a .npz, .mat or DGL .bin file, or a folder with nodes.csv and edges.csv',
        f"{str(source)!r}, which " + ("is none of these" if path.exists() else "does not exist"),
    )


def _finished(
    path: Path, features: Tensor, labels: Tensor, relations: dict[str, Tensor]
) -> NodeSet:
    """The set, with labels taken off the users of Amazon that have none."""
    first = AMAZON_UNLABELLED.get((len(features), features.shape[1]), 0)
    if not bool((labels[:first] == 1).any()):
        labels[:first] = -1
    return NodeSet(features, labels, relations, path.stem)


def _required(path: Path, found: dict[str, Any], *names: str) -> tuple[str, Any]:
    """The first of these fields that a file has, for messages and as it is."""
    for name in names:
        if name in found:
            return f"{path}: {name}", found[name]
    expected = "a field " + " or ".join(names)
    raise bad(f"{path}: {names[0]}", expected, f"only {sorted(found) or 'others'}")


def _from_npz(path: Path) -> NodeSet:
    parts = ("x_data", "x_indices", "x_indptr")
    found = read_npz(path, ("edge_index", "y", "x", "x_shape", *parts))
    field, ends = _required(path, found, "edge_index")
    if "x" in found or "x_indptr" not in found:
        values = _required(path, found, "x")[1]
    else:
        csr = [_required(path, found, part)[1] for part in parts]
        shape = _required(path, found, "x_shape")[1]
        if shape.shape != (2,) or shape.dtype.kind not in "iu":
            raise bad(f"{path}: x_shape", "two integers", f"{shape.dtype} {shape.shape}")
        values = as_matrix(f"{path}: x_data", csr, shape)
    features = as_features(f"{path}: x", values)
    labels = as_labels(*_required(path, found, "y"), nodes=len(features))
    edges = as_edges(field, ends, len(features))
    return _finished(path, features, labels, {ONLY: edges})


def _from_mat(path: Path) -> NodeSet:
    found = read_mat(path)
    features = as_features(*_required(path, found, "features", "Attributes"))
    labels = as_labels(*_required(path, found, "label", "Label"), nodes=len(features))
    names = sorted(name for name in found if name.startswith("net_"))
    for family in FAMILIES:
        if family & set(names) and not family <= set(names):
            missing = ", ".join(sorted(family - set(names)))
            raise bad(f"{path}: {missing}", "all of " + ", ".join(sorted(family)), names)
    if names:
        relations = {name: _mat_edges(path, found, name, nodes=len(features)) for name in names}
    else:
        relations = {ONLY: _mat_edges(path, found, "homo", "Network", nodes=len(features))}
    return _finished(path, features, labels, relations)


def _mat_edges(path: Path, found: dict[str, Any], *names: str, nodes: int) -> Tensor:
    field, matrix = _required(path, found, *names)
    if not sp.issparse(matrix) or matrix.shape != (nodes, nodes):
        got = f"{type(matrix).__name__} of shape {getattr(matrix, 'shape', None)}"
        raise bad(field, f"a sparse matrix of shape ({nodes}, {nodes})", got)
    matrix = matrix.tocoo()
    if matrix.dtype.kind not in "biuf" or not np.isfinite(matrix.data).all():
        raise bad(field, "finite entries", f"NaN or infinity, or {matrix.dtype}")
    present = matrix.data != 0
    return as_edges(field, np.stack([matrix.row[present], matrix.col[present]]), nodes)


def _from_tables(folder: Path) -> NodeSet:
    path = folder / "nodes.csv"
    header, rows = read_table(path)
    if header[:2] != ["node", "label"] or len(header) < 3:
        raise bad(f"{path}: header", "node,label and the names of features", ",".join(header))
    index = {row[0]: place for place, row in enumerate(rows)}
    if len(index) < len(rows):
        raise bad(f"{path}: node", "every node once", f"{len(rows) - len(index)} repeated")
    features = as_features(f"{path}: features", _numbers(path, rows))
    for line, row in enumerate(rows, start=2):
        if row[1] not in ("", "0", "1"):
            raise bad(f"{path}: label", "0, 1 or nothing", f"{row[1]!r} in line {line}")
    values = np.array([int(row[1] or -1) for row in rows])
    labels = as_labels(f"{path}: label", values, len(rows))
    return _finished(folder, features, labels, _table_edges(folder / "edges.csv", index))


def _numbers(path: Path, rows: list[list[str]]) -> np.ndarray:
    table = []
    for line, row in enumerate(rows, start=2):
        try:
            table.append([float(cell) for cell in row[2:]])
        except ValueError as error:
            raise ValueError(f"{path}: features: {error} in line {line}") from error
    return np.array(table)


def _table_edges(path: Path, index: dict[str, int]) -> dict[str, Tensor]:
    header, rows = read_table(path)
    if header not in (["source", "target"], ["source", "target", "relation"]):
        raise bad(f"{path}: header", "source,target or source,target,relation", ",".join(header))
    ends: dict[str, list[tuple[int, int]]] = {} if len(header) == 3 else {ONLY: []}
    for line, row in enumerate(rows, start=2):
        for name, node in zip(header, row[:2], strict=False):
            if node not in index:
                raise bad(f"{path}: {name}", "a node of nodes.csv", f"{node!r} in line {line}")
        ends.setdefault(row[2] if len(row) == 3 else ONLY, []).append(
            (index[row[0]], index[row[1]])
        )
    if not ends or "" in ends:
        raise bad(f"{path}: relation", "a name for every edge", "none" if not ends else "''")
    return {
        name: as_edges(f"{path}: {name}", np.array(pairs, int).reshape(-1, 2).T, len(index))
        for name, pairs in ends.items()
    }


def _from_dgl(path: Path) -> NodeSet:
    try:
        dgl = importlib.import_module("dgl")  # no dependency: many machines have no build of it
    except ImportError as error:
        raise ValueError(
            f"{path}: expected dgl to read a DGL graph; install it (pip install dgl, see "
            "www.dgl.ai), or save the graph as .npz with edge_index, y and x"
        ) from error
    try:
        graph = dgl.load_graphs(str(path))[0][0]
    except Exception as error:  # dgl has its own kinds
        raise ValueError(f"{path}: not a DGL graph: {error}") from error
    if len(graph.ntypes) != 1:
        raise bad(f"{path}: ntypes", "one kind of node", graph.ntypes)
    found = {name: value.numpy() for name, value in graph.ndata.items()}
    features = as_features(*_required(path, found, "feature", "feat"))
    field, values = _required(path, found, "label")
    if values.ndim == 2 and values.shape[1] == 2:  # one-hot, as T-Finance has
        if not ((values == 0) | (values == 1)).all() or not (values.sum(1) == 1).all():
            raise bad(field, "one-hot rows", "others")
        values = values[:, 1]
    labels = as_labels(field, values, nodes=len(features))
    relations = {}
    for kind in graph.canonical_etypes:
        ends = np.stack([end.numpy() for end in graph.edges(etype=kind)])
        name = ONLY if len(graph.canonical_etypes) == 1 else kind[1]
        relations[name] = as_edges(f"{path}: {kind[1]}", ends, len(features))
    return _finished(path, features, labels, relations)


READERS: dict[str, Callable[[Path], NodeSet]] = {
    ".npz": _from_npz, ".mat": _from_mat, ".bin": _from_dgl, "": _from_dgl,
}  # fmt: skip
