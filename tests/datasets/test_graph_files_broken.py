"""Broken graph files: each is refused with the file and the field."""

import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from etdyn.datasets import load_graphs, load_nodes

X = np.array([[0.5, 1.0], [-2.0, 0.0], [0.0, 3.0], [7.0, 0.0]], np.float32)
Y = np.array([0, 1, -1, 0], np.int8)
EDGES = np.array([[0, 1, 2], [1, 2, 3]], np.int32)
NETS = ("net_rsr", "net_rtr", "net_rur")


def with_value(array: np.ndarray, value: Any) -> np.ndarray:
    changed = array.astype(np.result_type(array, np.array(value)))
    changed.flat[2] = value
    return changed


def adjacency(nodes: int = 4) -> sp.csc_matrix:
    once = sp.coo_matrix((np.ones(3), tuple(EDGES)), (nodes, nodes))
    return (once + once.T).tocsc()


# --- npz ---------------------------------------------------------------------------------------

ARRAYS: dict[str, Any] = {"x": X, "y": Y, "edge_index": EDGES}
CSR = sp.csr_matrix(X)
PARTS: dict[str, Any] = {
    "x_data": CSR.data, "x_indices": CSR.indices, "x_indptr": CSR.indptr,
    "x_shape": np.array(X.shape), "y": Y, "edge_index": EDGES,
}  # fmt: skip


def without(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arrays.items() if key != name}


NPZ_CASES = [
    ("x", X[0], "non-empty (node, feature)"),
    ("x", X[:, :0], "non-empty (node, feature)"),
    ("x", X[:, :, None], "non-empty (node, feature)"),
    ("x", with_value(X, np.nan), "finite values, got NaN or infinity at node 1"),
    ("x", with_value(X, -np.inf), "finite values, got NaN or infinity at node 1"),
    ("x", with_value(X, 1e39), "finite values"),  # float64, infinite in float32
    ("x", X.astype("U4"), "numbers, got an array of <U4"),
    ("x", X + 1j, "numbers, got an array of complex"),
    ("x", X.astype(object), "not a plain array"),  # written as a pickle
    ("y", Y[:3], "4 labels, one a node"),
    ("y", np.stack([Y, Y]), "4 labels, one a node"),
    ("y", Y.reshape(2, 2), "4 labels, one a node"),
    ("y", with_value(Y, 2), "0 (normal) and 1 (anomaly), and -1 for unlabelled, got the values"),
    ("y", with_value(Y, 0.5), "0 (normal) and 1 (anomaly)"),
    ("y", with_value(Y.astype(float), np.nan), "0 (normal) and 1 (anomaly)"),
    ("y", -np.ones(4), "0 (normal) and 1 (anomaly)"),
    ("y", np.zeros(4, int), "0 (normal) and 1 (anomaly)"),
    ("y", np.ones(4, int), "0 (normal) and 1 (anomaly)"),
    ("y", np.arange(4), "0 (normal) and 1 (anomaly)"),
    ("y", Y.astype("U2"), "integers, got an array of <U2"),
    ("y", Y.astype(object), "not a plain array"),
    ("edge_index", EDGES.T, "shape (2, edge)"),
    ("edge_index", EDGES[0], "shape (2, edge)"),
    ("edge_index", EDGES[None], "shape (2, edge)"),
    ("edge_index", EDGES.astype(float), "integers, got an array of float64"),
    ("edge_index", EDGES.astype(bool), "integers, got an array of bool"),
    ("edge_index", with_value(EDGES, 4), "nodes from 0 to 3, got 0 to 4"),
    ("edge_index", with_value(EDGES, -1), "nodes from 0 to 3, got -1 to 3"),
    ("edge_index", with_value(EDGES, 2**62), "nodes from 0 to 3"),
    ("edge_index", EDGES.astype(object), "not a plain array"),
]


def load_npz(folder: Path, arrays: dict[str, Any], match: str) -> None:
    np.savez(folder / "g.npz", **arrays)
    with pytest.raises(ValueError) as caught:
        load_nodes(folder / "g.npz")
    assert match in str(caught.value) and str(folder / "g.npz") in str(caught.value)


@pytest.mark.parametrize(("field", "value", "expected"), NPZ_CASES)
def test_npz_with_a_wrong_array(tmp_path: Path, field: str, value: Any, expected: str) -> None:
    load_npz(tmp_path, ARRAYS | {field: value}, f": {field}: ")
    load_npz(tmp_path, ARRAYS | {field: value}, expected)


@pytest.mark.parametrize(
    ("arrays", "name"), [(ARRAYS, name) for name in ARRAYS] + [(PARTS, name) for name in PARTS]
)
def test_npz_without_an_array(tmp_path: Path, arrays: dict[str, Any], name: str) -> None:
    wanted = "x" if name == "x_indptr" else name  # neither x nor the mark of its parts
    load_npz(tmp_path, without(arrays, name), f": {wanted}: expected a field {wanted}, got only")


@pytest.mark.parametrize(
    ("field", "value", "blamed"),
    [
        ("x_indices", CSR.indices + 1, "x_data"),
        ("x_indices", CSR.indices - 1, "x_data"),
        ("x_indices", CSR.indices[1:], "x_data"),
        ("x_indices", CSR.indices[None], "x_data"),
        ("x_indptr", CSR.indptr[::-1], "x_data"),
        ("x_indptr", CSR.indptr[:-1], "x_data"),
        ("x_indptr", CSR.indptr + 1, "x_data"),
        ("x_data", CSR.data[1:], "x_data"),
        ("x_data", CSR.data * np.nan, "x"),
        ("x_data", CSR.data.astype("U3"), "x"),
        ("x_shape", np.array([5, 2]), "x_data"),
        ("x_shape", np.array([4, 1]), "x_data"),
        ("x_shape", np.array([4, -2]), "x_data"),
        ("x_shape", np.array([4, 2**50]), "x"),
        ("x_shape", np.array([4, 2, 1]), "x_shape"),
        ("x_shape", np.array([4.0, 2.0]), "x_shape"),
    ],
)
def test_npz_with_wrong_csr_parts(tmp_path: Path, field: str, value: Any, blamed: str) -> None:
    load_npz(tmp_path, PARTS | {field: value}, f"g.npz: {blamed}: ")


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04", b"no zip at all", pickle.dumps({"x": X}), bytes(200)],
    ids=["empty", "magic only", "text", "pickle", "zeros"],
)
@pytest.mark.parametrize("name", ["g.npz", "g.NPZ", "g.mat", "g.zip", "nodes.csv", "A_A.txt"])
def test_foreign_bytes(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    load: Callable[[Path], Any] = load_graphs if name in ("g.zip", "A_A.txt") else load_nodes
    source = tmp_path if name in ("nodes.csv", "A_A.txt") else tmp_path / name
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(source)


def test_npy_called_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "g.npy", X)
    (tmp_path / "g.npy").rename(tmp_path / "g.npz")
    with pytest.raises(ValueError, match=r"g\.npz: damaged or truncated zip"):
        load_nodes(tmp_path / "g.npz")


# --- mat ---------------------------------------------------------------------------------------

VARIABLES: dict[str, Any] = {
    "features": X, "label": Y[None], **{name: adjacency() for name in NETS},
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("features", with_value(X, np.nan), "finite values"),
        ("features", np.zeros((0, 0)), "non-empty"),
        ("features", np.array([["a"]], object), "a field features or Attributes"),
        ("features", "text", "a field features or Attributes"),
        ("features", {"a": 1}, "a field features or Attributes"),
        ("features", X + 1j, "numbers, got an array of complex"),
        ("label", Y[None, :3], "4 labels"),
        ("label", with_value(Y, 3), "0 (normal) and 1 (anomaly)"),
        ("net_rur", adjacency(5), "a sparse matrix of shape (4, 4)"),
        ("net_rur", adjacency().toarray(), "a sparse matrix of shape (4, 4)"),
        ("net_rur", adjacency() * np.nan, "finite entries"),
        ("net_rur", sp.csc_matrix((4, 5)), "a sparse matrix of shape (4, 4)"),
    ],
)
def test_mat_with_a_wrong_variable(tmp_path: Path, field: str, value: Any, expected: str) -> None:
    scipy.io.savemat(tmp_path / "g.mat", VARIABLES | {field: value})
    with pytest.raises(ValueError) as caught:
        load_nodes(tmp_path / "g.mat")
    assert f"{tmp_path / 'g.mat'}: {field}: expected" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", VARIABLES)
def test_mat_without_a_variable(tmp_path: Path, name: str) -> None:
    """Also without one of the relations that the published file has."""
    scipy.io.savemat(tmp_path / "g.mat", without(VARIABLES, name))
    with pytest.raises(ValueError, match=rf"g\.mat: {name}: expected"):
        load_nodes(tmp_path / "g.mat")


def test_mat_without_relations(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "g.mat", {"features": X, "label": Y})
    with pytest.raises(ValueError, match=r"g\.mat: homo: expected a field homo or Network"):
        load_nodes(tmp_path / "g.mat")


def test_mat_with_sparse_indices_out_of_range(tmp_path: Path) -> None:
    """Scipy trusts them, and would read elsewhere in memory."""
    scipy.io.savemat(tmp_path / "g.mat", VARIABLES)
    data = (tmp_path / "g.mat").read_bytes()
    rows = adjacency().indices.astype("<i4").tobytes()
    assert data.count(rows) == 3
    (tmp_path / "g.mat").write_bytes(data.replace(rows, rows[:-4] + b"\xff\xff\xff\x7f"))
    with pytest.raises(ValueError, match=r"g\.mat: net_\w+: damaged sparse matrix"):
        load_nodes(tmp_path / "g.mat")


@pytest.mark.parametrize(
    ("version", "match"), [(b"\x00\x02IM", "got version 7.3"), (b"\x00\x01XX", "got another file")]
)
def test_mat_of_another_version(tmp_path: Path, version: bytes, match: str) -> None:
    (tmp_path / "g.mat").write_bytes(bytes(124) + version + bytes(64))
    with pytest.raises(ValueError, match=rf"g\.mat: header: expected a MATLAB 5 file.*{match}"):
        load_nodes(tmp_path / "g.mat")


# --- tables ------------------------------------------------------------------------------------

NODES = "node,label,age,size\nann,0,0.5,1\nbob,1,-2,0\ncy,,0,3\ndi,0,7,0\n"
TIES = "source,target,relation\nann,bob,a\nbob,cy,a\ncy,di,b\n"


@pytest.mark.parametrize(
    ("table", "old", "new", "match"),
    [
        ("nodes", "node,label", "id,label", r"header: expected node,label and"),
        ("nodes", NODES, "node,label\nann,0\nbob,1\n", r"header: expected node,label and"),
        ("nodes", "0.5,1", "0.5", r"line 2: expected 4 columns, as the header has, got 3"),
        ("nodes", "0.5,1", "0.5,1,2", r"line 2: expected 4 columns"),
        ("nodes", "bob,1,", "\nbob,1,", r"line 3: expected 4 columns"),
        ("nodes", "-2,0", "-2,zero", r"features: could not convert .*'zero' in line 3"),
        ("nodes", "-2,0", "-2,", r"features: could not convert .*'' in line 3"),
        ("nodes", "-2,0", "-2,nan", r"features: expected finite values, got .* at node 1"),
        ("nodes", "-2,0", "-2,1e99", r"features: expected finite values, got .* at node 1"),
        ("nodes", "bob,1", "bob,2", r"label: expected 0, 1 or nothing, got '2' in line 3"),
        ("nodes", "bob,1", "bob,1.0", r"label: expected 0, 1 or nothing, got '1\.0' in line 3"),
        ("nodes", "bob,1", "bob,-1", r"label: expected 0, 1 or nothing"),
        ("nodes", "bob,1", "bob,0", r"label: expected 0 \(normal\) and 1"),
        ("nodes", "bob,1", "bob,", r"label: expected 0 \(normal\) and 1"),
        ("nodes", "di,0", "ann,0", r"node: expected every node once, got 1 repeated"),
        ("nodes", "bob,1", '"bob,1', r"not a CSV table"),
        ("nodes", NODES, "node,label,age,size\n", r"features: expected a non-empty"),
        ("edges", "source,target", "from,to", r"header: expected source,target or"),
        ("edges", ",relation", ",weight", r"header: expected source,target or"),
        (
            "edges",
            "bob,cy",
            "bob,eve",
            r"target: expected a node of nodes.csv, got 'eve' in line 3",
        ),
        ("edges", "bob,cy", "-1,cy", r"source: expected a node of nodes.csv, got '-1' in line 3"),
        ("edges", "bob,cy,a", "bob,cy", r"line 3: expected 3 columns"),
        ("edges", "bob,cy,a", "bob,cy,", r"relation: expected a name for every edge"),
        ("edges", TIES, "source,target,relation\n", r"relation: expected a name for every edge"),
    ],
)
def test_tables(tmp_path: Path, table: str, old: str, new: str, match: str) -> None:
    texts = {"nodes": NODES, "edges": TIES}
    assert old in texts[table]
    texts[table] = texts[table].replace(old, new, 1)
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"{table}\.csv: {match}"):
        load_nodes(tmp_path)


def test_tables_without_edges_file_and_other_bytes(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(NODES)
    with pytest.raises(ValueError, match=r"edges\.csv: expected this file"):
        load_nodes(tmp_path)
    for data in (b"source,target\n\xff\xfe,a\n", b"source,target\nann,\x00\n"):
        (tmp_path / "edges.csv").write_bytes(data)
        with pytest.raises(ValueError, match=r"edges\.csv"):
            load_nodes(tmp_path)


# --- TU text -----------------------------------------------------------------------------------

SMALL = {
    "A": "1, 2\n2, 1\n2, 3\n3, 2\n4, 5\n5, 4\n",
    "graph_indicator": "1\n1\n1\n2\n2\n",
    "graph_labels": "1\n-1\n",
    "node_labels": "5\n4\n5\n5\n4\n",
    "node_attributes": "0.5, 1\n2, 3\n4, 5\n6, 7\n8, 9\n",
    "edge_labels": "1\n1\n2\n2\n1\n1\n",
}


def write_tu(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for field, text in files.items():
            archive.writestr(f"S/S_{field}.txt", text)
    return path


@pytest.mark.parametrize(
    ("field", "old", "new", "match"),
    [
        ("A", "3, 2", "3, 6", "expected nodes from 1 to 5, got 1 to 6"),
        ("A", "3, 2", "3, 0", "expected nodes from 1 to 5, got 0 to 5"),
        ("A", "3, 2", "3, -1", "expected nodes from 1 to 5, got -1 to 5"),
        ("A", "3, 2", "3, 4", "expected both ends in one graph, got an edge between two in line 4"),
        ("A", "3, 2", "3, 1", "expected every edge in both directions"),
        ("A", "3, 2", "3, 2.0", "expected lines of integers"),
        ("A", "3, 2", "3, x", "expected lines of integers"),
        ("A", "3, 2", "3, 99999999999999999999", "expected lines of integers"),
        ("A", "3, 2", "3", "expected lines of integers"),
        ("A", "3, 2", "\n3, 2", "expected lines of integers"),
        ("A", SMALL["A"], "1\n2\n1\n2\n4\n5\n", "expected two numbers a line, got 1"),
        ("A", SMALL["A"], "", "expected a newline at the end"),
        ("A", "5, 4\n", "5, 4", "expected a newline at the end"),
        ("edge_labels", "2\n2", "2", "expected 6 lines, as the other files say, got 5"),
        ("edge_labels", "2\n2", "2\nx", "expected lines of integers"),
        ("graph_indicator", "1\n2", "1\n3", "expected graphs 1, 2, ... in order"),
        ("graph_indicator", "1\n1\n1", "2\n1\n1", "expected graphs 1, 2, ... in order"),
        ("graph_indicator", "1\n1\n1", "0\n0\n0", "expected graphs 1, 2, ... in order"),
        ("graph_indicator", "1\n2\n2", "1\n2\n1", "expected graphs 1, 2, ... in order"),
        ("graph_indicator", "1\n2\n2", "1,1\n2,2\n2,2", "expected lines of integers"),
        ("graph_labels", "1\n", "1\n1\n", "expected 2 lines, as the other files say, got 3"),
        ("graph_labels", "-1", "nan", "expected lines of integers"),
        ("graph_labels", "-1", "0.5", "expected lines of integers"),
        ("graph_labels", SMALL["graph_labels"], "1,2\n3,4\n", "expected one number a line, got 2"),
        ("node_labels", "4\n5", "4", "expected 5 lines, as the other files say, got 4"),
        ("node_labels", "4\n5", "4\n", "expected lines of integers"),
        ("node_attributes", "4, 5", "4, nan", "expected finite values, got NaN or infinity"),
        ("node_attributes", "4, 5", "4, 1e99", "expected finite values"),
        ("node_attributes", "4, 5", "4", "expected lines of numbers"),
        ("node_attributes", "4, 5", "4, five", "expected lines of numbers"),
    ],
)  # fmt: skip
def test_tu_text(tmp_path: Path, field: str, old: str, new: str, match: str) -> None:
    assert old in SMALL[field]
    path = write_tu(tmp_path / "S.zip", SMALL | {field: SMALL[field].replace(old, new, 1)})
    with pytest.raises(ValueError) as caught:
        load_graphs(path)
    assert f"{path}: S_{field}.txt: {match}" in str(caught.value)


@pytest.mark.parametrize("field", ["graph_indicator", "graph_labels"])
def test_tu_without_a_file(tmp_path: Path, field: str) -> None:
    path = write_tu(tmp_path / "S.zip", {k: v for k, v in SMALL.items() if k != field})
    with pytest.raises(ValueError, match=rf"S\.zip: S_{field}\.txt: expected this file"):
        load_graphs(path)


def test_tu_without_edges_or_with_two_sets_or_twice_the_same(tmp_path: Path) -> None:
    path = write_tu(tmp_path / "S.zip", {k: v for k, v in SMALL.items() if k != "A"})
    with pytest.raises(ValueError, match=r"S\.zip: A: expected one file .*_A\.txt, got none"):
        load_graphs(path)
    write_tu(path, SMALL)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("T/T_A.txt", SMALL["A"])
    with pytest.raises(ValueError, match=r"S\.zip: A: expected one file .*\['S', 'T'\]"):
        load_graphs(path)
    write_tu(path, SMALL)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("T/S_A.txt", SMALL["A"])
    with pytest.raises(ValueError, match=r"S\.zip: files: expected different names"):
        load_graphs(path)


def test_tu_text_of_other_bytes(tmp_path: Path) -> None:
    for field, text in SMALL.items():
        (tmp_path / f"S_{field}.txt").write_text(text)
    (tmp_path / "S_node_labels.txt").write_bytes(b"5\n4\n\xff\n5\n4\n")
    with pytest.raises(ValueError, match=r"S_node_labels\.txt: not UTF-8"):
        load_graphs(tmp_path)


def test_torch_geometric_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.io", None)
    with pytest.raises(ValueError, match=r"S\.zip: expected torch-geometric.*\[graphs\]"):
        load_graphs(write_tu(tmp_path / "S.zip", SMALL))


@pytest.mark.parametrize("load", [load_nodes, load_graphs])
@pytest.mark.parametrize("name", ["absent.npz", "absent.zip", "g.txt", "g.pkl", "g.pt", "folder"])
def test_sources_that_are_none(tmp_path: Path, load: Callable[[Path], Any], name: str) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    elif not name.startswith("absent"):
        (tmp_path / name).write_bytes(b"1\n")
    with pytest.raises(ValueError, match=name):
        load(tmp_path / name)
