"""Node sets: the real files against their recorded statistics, and what was written read back."""

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etdyn.datasets import NodeSet, load_nodes, rare_digit
from etdyn.datasets.graph_formats import as_edges

ROOT = Path(__file__).resolve().parents[2]
GAD = Path(os.environ.get("ETDYN_DATA", ROOT / "../shared/data")) / "graphs" / "gad"
META = json.loads((GAD / "meta.json").read_text()) if GAD.exists() else {}
FEATURES = {name: 10_000 for name in META if name.startswith("yelp_reviewers")}  # SOURCES.md
real = pytest.mark.skipif(not GAD.exists(), reason=f"{GAD} absent; set ETDYN_DATA")

# four nodes: a normal one, an anomaly, one without label, a normal one without edges
X = np.array([[0.5, 1.0], [-2.0, 0.0], [0.0, 3.0], [7.0, 0.0]], np.float32)
Y = np.array([0, 1, -1, 0], np.int8)
ONCE = np.array([[0, 1], [1, 2]], np.int32)  # 0-1, 1-2
BOTH = [[0, 1, 1, 2], [1, 0, 2, 1]]


def edges_of(data: NodeSet) -> dict[str, list[list[int]]]:
    return {name: ends.tolist() for name, ends in data.relations.items()}


def matrix(ends: np.ndarray, nodes: int = 4) -> sp.csc_matrix:
    """A symmetric adjacency, as MATLAB stores it."""
    once = sp.coo_matrix((np.ones(ends.shape[1]), tuple(ends)), (nodes, nodes))
    return (once + once.T).tocsc()


def assert_equal(a: NodeSet, b: NodeSet) -> None:
    assert torch.equal(a.features, b.features) and torch.equal(a.labels, b.labels)
    assert edges_of(a) == edges_of(b)


def assert_small(data: NodeSet, relations: dict[str, list[list[int]]]) -> None:
    """The four nodes above."""
    assert torch.equal(data.features, torch.from_numpy(X)) and data.labels.tolist() == Y.tolist()
    assert edges_of(data) == relations


# --- the real files --------------------------------------------------------------------------


@real
@pytest.mark.parametrize("name", [name for name in META if name != "yelpchi_quarter_a"])
def test_real_graphs_have_their_recorded_sizes(name: str) -> None:
    data, meta = load_nodes(GAD / f"{name}.npz"), META[name]
    assert data.name == name and list(data.relations) == ["edges"]
    assert data.features.shape == (meta["nodes"], meta["features"] or FEATURES[name])
    assert int((data.labels == 1).sum()) == meta["labels"]["1"]
    assert int((data.labels != 1).sum()) == meta["labels"]["0"]
    keys, queries = data.relations["edges"]
    assert len(keys) == 2 * meta["undirected_edges"]
    degrees = keys.bincount(minlength=meta["nodes"])
    assert int(degrees.max()) == meta["max_degree"]
    assert int((degrees == 0).sum()) == meta["isolated"]
    agree = (data.labels[keys].clamp(min=0) == data.labels[queries].clamp(min=0)).double().mean()
    assert round(float(agree), 4) == meta["edge_homophily"]
    assert torch.equal(queries.bincount(minlength=meta["nodes"]), degrees)


@real
def test_amazon_is_the_same_from_both_files_and_its_first_users_have_no_label() -> None:
    mat, npz = load_nodes(GAD / "Amazon.mat"), load_nodes(GAD / "amazon_upu.npz")
    assert_equal(mat, npz)
    assert (npz.labels[:2290] == -1).all() and (npz.labels[2290:] >= 0).all()
    assert float(npz.features.min()) == -1 and float(npz.features.max()) == 5525


@real
def test_sparse_and_dense_features_are_the_raw_numbers() -> None:
    with np.load(GAD / "tolokers.npz") as raw:
        assert np.array_equal(load_nodes(GAD / "tolokers.npz").features.numpy(), raw["x"])
    with np.load(GAD / "yelp_reviewers_a0.npz") as raw:
        parts = (raw["x_data"], raw["x_indices"], raw["x_indptr"])
        dense = sp.csr_matrix(parts, shape=tuple(raw["x_shape"])).toarray()
    assert np.array_equal(load_nodes(GAD / "yelp_reviewers_a0.npz").features.numpy(), dense)


@real
def test_a_graph_without_features_is_refused() -> None:
    with pytest.raises(ValueError, match=r"yelpchi_quarter_a\.npz: x: expected"):
        load_nodes(GAD / "yelpchi_quarter_a.npz")


@pytest.mark.parametrize(
    ("nodes", "features", "count"), [(11_944, 25, 3_305), (10_224, 25, 2_290), (11_944, 24, 0)]
)
@pytest.mark.parametrize("first", [0, 1])
def test_amazon_is_recognised_by_its_size_only(
    tmp_path: Path, nodes: int, features: int, count: int, first: int
) -> None:
    y = np.zeros(nodes, np.int8)
    y[0], y[-1] = first, 1
    x = np.ones((nodes, features), np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=y, edge_index=ONCE)
    unlabelled = load_nodes(tmp_path / "mine.npz").labels == -1
    assert int(unlabelled.sum()) == (0 if first else count)
    assert unlabelled[:count].all() or first


# --- the default -----------------------------------------------------------------------------


def test_rare_digit_is_what_it_says() -> None:
    data = rare_digit()
    nodes = len(data.labels)
    assert repr(data) == (
        "NodeSet('rare digit', nodes=1708, features=64, edges={edges: 18868}, anomalies=85, "
        "normal=1623, unlabelled=0)"
    )
    assert 0.0495 < 85 / nodes < 0.0505
    keys, queries = data.relations["edges"]
    # 8 nearest of each, by all distances at once, are among the edges; and each edge is one of them
    distance = torch.cdist(data.features.double(), data.features.double()).fill_diagonal_(torch.inf)
    eighth = distance.topk(8, largest=False).values[:, -1]
    near = distance <= eighth[:, None] + 1e-9
    assert (near | near.T)[keys, queries].all()
    assert int(keys.bincount().min()) >= 8
    dense = torch.zeros(nodes, nodes, dtype=torch.bool)
    dense[keys, queries] = True
    assert torch.equal(dense, dense.T)
    assert ((distance < eighth[:, None] - 1e-9) & ~dense).sum() == 0


def test_rare_digit_draw_is_the_seeds() -> None:
    assert_equal(rare_digit(3), rare_digit(3))
    assert_equal(rare_digit(), load_nodes("rare-digit"))
    a, b = rare_digit(0), rare_digit(1)
    assert a.features.shape == b.features.shape and not torch.equal(a.features, b.features)
    rows = [data.features[data.labels == 0] for data in (a, b)]
    assert torch.equal(*rows)  # only the rare digit is drawn
    state = torch.random.get_rng_state()
    rare_digit(5)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"digit": 10}, ValueError, "digit: expected 0 to 9, got 10"),
        ({"digit": -1}, ValueError, "digit"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 0.5}, TypeError, "seed"),
        ({"neighbours": 0}, ValueError, "neighbours"),
        ({"neighbours": 1708}, ValueError, "neighbours: expected fewer than the 1708 nodes"),
    ],
)
def test_rare_digit_refuses(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rare_digit(**arguments)


# --- what is written is read back --------------------------------------------------------------


@pytest.mark.parametrize(
    "ends", [ONCE, ONCE[::-1], np.array(BOTH), np.array([[0, 1, 2, 0, 3], [1, 2, 1, 1, 3]])]
)
@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int64])
def test_npz_edges_once_or_twice_with_loops_and_repeats(
    tmp_path: Path, ends: np.ndarray, dtype: Any
) -> None:
    np.savez(tmp_path / "g.npz", x=X, y=Y, edge_index=ends.astype(dtype), more=np.ones(3))
    assert_small(load_nodes(tmp_path / "g.npz"), {"edges": BOTH})


def test_npz_of_csr_parts_compressed(tmp_path: Path) -> None:
    csr = sp.csr_matrix(X)
    np.savez_compressed(
        tmp_path / "g.npz", y=Y[:, None], edge_index=ONCE, x_data=csr.data,
        x_indices=csr.indices.astype(np.int16), x_indptr=csr.indptr, x_shape=np.array(X.shape),
    )  # fmt: skip
    assert_small(load_nodes(str(tmp_path / "g.npz")), {"edges": BOTH})


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_mat_of_care_gnn_has_its_relations_and_not_their_union(
    tmp_path: Path, compressed: bool, sparse: bool
) -> None:
    variables = {
        "features": sp.csc_matrix(X.astype(float)) if sparse else X,
        "label": Y[None].astype(float),
        "net_upu": matrix(ONCE),
        "net_usu": matrix(ONCE[:, :1]),
        "net_uvu": matrix(np.zeros((2, 0), int)),
        "homo": matrix(np.array([[0], [3]])),
    }
    scipy.io.savemat(tmp_path / "g.mat", variables, do_compression=compressed)
    relations = {"net_upu": BOTH, "net_usu": [[0, 1], [1, 0]], "net_uvu": [[], []]}
    assert_small(load_nodes(tmp_path / "g.mat"), relations)


@pytest.mark.parametrize("name", ["homo", "Network"])
def test_mat_of_one_relation(tmp_path: Path, name: str) -> None:
    scipy.io.savemat(tmp_path / "g.mat", {"Attributes": X, "Label": Y[:, None], name: matrix(ONCE)})
    assert_small(load_nodes(tmp_path / "g.mat"), {"edges": BOTH})


def write_tables(folder: Path, nodes: str, edges: str) -> Path:
    (folder / "nodes.csv").write_bytes(nodes.encode())
    (folder / "edges.csv").write_bytes(edges.encode())
    return folder


NODES = "node,label,age,size\nann,0,0.5,1\nbob,1,-2,0\ncy,,0,3e0\ndi,0,7,0\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_tables_with_and_without_relations(tmp_path: Path, newline: str, start: str) -> None:
    nodes = start + NODES.replace("\n", newline)
    edges = start + 'source,target\nann,"bob"\nbob, cy\n'.replace("\n", newline)
    assert_small(load_nodes(write_tables(tmp_path, nodes, edges)), {"edges": BOTH})
    edges = "source,target,relation\nbob,cy,talks\nann,bob,pays\nbob,ann,talks\n"
    data = load_nodes(write_tables(tmp_path, nodes, edges))
    assert_small(data, {"talks": BOTH, "pays": [[0, 1], [1, 0]]})
    assert list(data.relations) == ["talks", "pays"]


def fake_dgl(
    monkeypatch: pytest.MonkeyPatch, kinds: dict[tuple[str, str, str], Any], **data: Tensor
) -> None:
    """What load_graphs of dgl gives, as its documentation says: dgl is not installed here."""

    def edges(etype: tuple[str, str, str]) -> tuple[Tensor, Tensor]:
        source, target = torch.as_tensor(kinds[etype])
        return source, target

    graph = types.SimpleNamespace(
        ndata=data, edges=edges, canonical_etypes=list(kinds), ntypes=sorted({k[0] for k in kinds})
    )

    def load_graphs(path: str) -> tuple[list[Any], dict[str, Any]]:
        if Path(path).read_bytes() != b"graph":
            raise RuntimeError("Invalid DGL file")
        return [graph], {}

    module = types.ModuleType("dgl")
    module.load_graphs = load_graphs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dgl", module)


PLAIN = {("_N", "_E", "_N"): BOTH}
x, y = torch.from_numpy(X), torch.from_numpy(Y).long()


@pytest.mark.parametrize("name", ["tfinance", "graph.bin"])
@pytest.mark.parametrize("feature", ["feature", "feat"])
def test_dgl_through_a_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, feature: str
) -> None:
    (tmp_path / name).write_bytes(b"graph")
    fake_dgl(monkeypatch, PLAIN, label=y, train_mask=y > 0, **{feature: x.double()})
    assert_small(load_nodes(tmp_path / name), {"edges": BOTH})
    kinds = {("user", "net_upu", "user"): BOTH, ("user", "net_usu", "user"): [[0], [1]]}
    fake_dgl(monkeypatch, kinds, label=y, **{feature: x.double()})
    assert_small(load_nodes(tmp_path / name), {"net_upu": BOTH, "net_usu": [[0, 1], [1, 0]]})


def test_dgl_labels_may_be_one_hot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g.bin").write_bytes(b"graph")
    one_hot = torch.tensor([[1, 0], [0, 1], [0, 1], [1, 0]])
    fake_dgl(monkeypatch, PLAIN, label=one_hot, feature=x)
    assert load_nodes(tmp_path / "g.bin").labels.tolist() == [0, 1, 1, 0]
    fake_dgl(monkeypatch, PLAIN, label=one_hot + one_hot.flip(1), feature=x)
    with pytest.raises(ValueError, match=r"g\.bin: label: expected one-hot rows"):
        load_nodes(tmp_path / "g.bin")


def break_ends(call: dict[str, Any]) -> None:
    call["kinds"] = {("_N", "_E", "_N"): [[0], [4]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_ends, r"_E: expected nodes from 0 to 3, got 0 to 4"),
        (lambda call: call.pop("feature"), r"feature: expected a field feature or feat"),
        (lambda call: call.pop("label"), r"label: expected"),
        (lambda call: call.update(feature=x / 0), r"feature: expected finite values"),
        (
            lambda call: call.update(kinds={("a", "r", "a"): BOTH, ("b", "r", "b"): BOTH}),
            r"ntypes: expected one kind of node",
        ),
    ],
)
def test_dgl_refusals_name_file_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict], Any], message: str
) -> None:
    call: dict[str, Any] = {"kinds": PLAIN, "feature": x, "label": y}
    change(call)
    fake_dgl(monkeypatch, **call)
    (tmp_path / "g.bin").write_bytes(b"graph")
    with pytest.raises(ValueError, match=r"g\.bin: " + message):
        load_nodes(tmp_path / "g.bin")
    (tmp_path / "g.bin").write_bytes(b"grap")
    with pytest.raises(ValueError, match=r"g\.bin: not a DGL graph: Invalid DGL file"):
        load_nodes(tmp_path / "g.bin")


def test_dgl_absent_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dgl", None)  # an import of it fails
    (tmp_path / "g.bin").write_bytes(b"graph")
    with pytest.raises(ValueError, match=r"g\.bin: expected dgl .*pip install dgl.*\.npz"):
        load_nodes(tmp_path / "g.bin")


# --- laws --------------------------------------------------------------------------------------


@given(st.data())
def test_undirected_edges_are_both_directions_of_what_was_listed(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 8))
    node = st.integers(0, nodes - 1)
    listed = data.draw(st.lists(st.tuples(node, node), max_size=300))
    found = as_edges("edges", np.array(listed, int).reshape(-1, 2).T, nodes)
    expected = {pair for a, b in listed if a != b for pair in ((a, b), (b, a))}
    assert found.T.tolist() == [list(pair) for pair in sorted(expected)]


def test_an_edge_listed_256_times_is_kept(tmp_path: Path) -> None:
    """Sums of 256 ones vanish in bytes."""
    ends = np.repeat(ONCE[:, :1], 256, axis=1)
    assert as_edges("edges", ends, 2).tolist() == [[0, 1], [1, 0]]


GOOD: dict[str, Any] = {"features": x, "labels": y, "relations": {"a": torch.tensor(BOTH)}}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": x.double()}, TypeError, "features: expected a float32"),
        ({"features": X}, TypeError, "features: expected a float32"),
        ({"features": x[0]}, ValueError, r"features: expected a non-empty \(node, feature\)"),
        ({"features": x[:, :0]}, ValueError, "features: expected a non-empty"),
        ({"features": x / x}, ValueError, "features: expected finite values, got .* node 1"),
        ({"labels": y.int()}, TypeError, "labels: expected an int64"),
        ({"labels": Y}, TypeError, "labels: expected an int64"),
        ({"labels": y[:3]}, ValueError, "labels: expected 4 labels"),
        ({"labels": y[:, None]}, ValueError, "labels: expected shape"),
        ({"labels": y + 1}, ValueError, "labels: expected 0 .* got the values 0, 1, 2"),
        ({"labels": -y.abs()}, ValueError, "labels: expected 0 .* got the values -1, 0"),
        ({"relations": {}}, ValueError, "relations: expected at least one"),
        ({"relations": {"a": np.array(BOTH)}}, TypeError, r"relations\['a'\]: expected an int64"),
        ({"relations": {"a": torch.tensor(BOTH).T}}, ValueError, r"shape \(2, edge\)"),
        ({"relations": {"a": torch.tensor([[0], [4]])}}, ValueError, "0 to 3, got 0 to 4"),
        ({"relations": {"a": torch.tensor([[-1], [0]])}}, ValueError, "0 to 3, got -1 to 0"),
        ({"relations": {"a": torch.tensor([[1, 2], [1, 3]])}}, ValueError, "no self-loops.*node 1"),
        ({"relations": {"a": torch.tensor([[0, 0], [1, 1]])}}, ValueError, "once, got 1 repeated"),
    ],
)
def test_node_set_refuses(change: dict, error: type[Exception], message: str) -> None:
    NodeSet(**GOOD, name="good")
    with pytest.raises(error, match=message):
        NodeSet(**GOOD | change, name="bad")


def test_node_set_takes_directed_edges_and_huge_finite_features() -> None:
    """The sum of the features overflows, no feature does."""
    data = NodeSet(x.sign() * 3e38, y, {"a": torch.tensor([[0], [1]])}, "one way")
    assert data.relations["a"].tolist() == [[0], [1]]
