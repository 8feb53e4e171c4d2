"""Graph files cut or damaged anywhere are refused, or read whole; never in part."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch

from etdyn.datasets import GraphSet, NodeSet, load_graphs, load_nodes

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ETDYN_DATA", ROOT / "../shared/data")) / "graphs"
real = pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} absent; set ETDYN_DATA")
steps = pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])

X = np.array([[0.5, 1.0], [-2.0, 0.0], [0.0, 3.0], [7.0, 0.0]], np.float32)
Y = np.array([0, 1, -1, 0], np.int8)
EDGES = np.array([[0, 1, 2], [1, 2, 3]], np.int32)
CSR = sp.csr_matrix(X)
NET = sp.coo_matrix((np.ones(3), tuple(EDGES)), (4, 4)).tocsc()
ARRAYS = {"x": X, "y": Y, "edge_index": EDGES}
PARTS = {
    "x_data": CSR.data, "x_indices": CSR.indices, "x_indptr": CSR.indptr,
    "x_shape": np.array(X.shape), "y": Y, "edge_index": EDGES,
}  # fmt: skip
NODES = "node,label,age,size\nann,0,0.5,1\nbob,1,-2,0\ncy,,0,3\ndi,0,7,0\n"
TIES = "source,target,relation\nann,bob,a\nbob,cy,a\ncy,di,b\n"
SMALL = {
    "A": "1, 2\n2, 1\n2, 3\n3, 2\n4, 5\n5, 4\n",
    "graph_indicator": "1\n1\n1\n2\n2\n",
    "graph_labels": "1\n-1\n",
    "node_labels": "5\n4\n5\n5\n4\n",
    "node_attributes": "0.5, 1\n2, 3\n4, 5\n6, 7\n8, 9\n",
    "edge_labels": "1\n1\n2\n2\n1\n1\n",
}


def npz_bytes(arrays: dict[str, Any], save: Callable[..., None] = np.savez) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def mat_bytes(compressed: bool) -> bytes:
    buffer = io.BytesIO()
    nets = dict.fromkeys(("net_rsr", "net_rtr", "net_rur"), NET)
    scipy.io.savemat(buffer, {"features": X, "label": Y[None], **nets}, do_compression=compressed)
    return buffer.getvalue()


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for field, text in SMALL.items():
            archive.writestr(f"S/S_{field}.txt", text)
    return buffer.getvalue()


def same(a: NodeSet | GraphSet, b: NodeSet | GraphSet) -> bool:
    """Whether nothing differs between two sets."""

    def parts(data: Any) -> list[torch.Tensor]:
        if isinstance(data, NodeSet):
            return [data.features, data.labels, *data.relations.values()]
        return [*data.features, *data.edges, *(data.edge_features or []), data.labels]

    pairs = zip(parts(a), parts(b), strict=True)
    return repr(a) == repr(b) and all(torch.equal(p, q) for p, q in pairs)


def read_or_refused(path: Path, data: bytes) -> NodeSet | GraphSet | None:
    """What is read; None where the file is refused by its name; other exceptions pass."""
    path.write_bytes(data)
    try:
        return load_graphs(path) if path.suffix == ".zip" else load_nodes(path)
    except ValueError as error:
        assert str(path) in str(error)
        return None


ARCHIVES: dict[str, bytes] = {
    "dense.npz": npz_bytes(ARRAYS),
    "compressed.npz": npz_bytes(PARTS, np.savez_compressed),
    "plain.mat": mat_bytes(False),
    "compressed.mat": mat_bytes(True),
    "small.zip": zip_bytes(),
}


@steps
@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_cut_anywhere_is_refused(tmp_path: Path, name: str, step: int) -> None:
    data, path = ARCHIVES[name], tmp_path / name
    assert read_or_refused(path, data) is not None
    ends = [*range(0, len(data), step), *range(len(data) - 40, len(data))]
    assert [end for end in ends if read_or_refused(path, data[:end])] == []


@steps
def test_a_damaged_mat_file_does_not_end_the_process(tmp_path: Path, step: int) -> None:
    """Without compression it has no checksum, and scipy takes kinds and sizes as they stand."""
    data, path = ARCHIVES["plain.mat"], tmp_path / "g.mat"
    found = [read_or_refused(path, damaged(data, at)) for at in range(128, len(data), step)]
    assert sum(data is None for data in found) > len(found) / 2


@pytest.mark.parametrize(
    ("old", "turn"),
    [
        (7 + (32 << 32), 8),  # kind of the numbers of "features"
        (7 + (32 << 32), 0x80 << 32),  # their size
        (7, 0x800),  # its flags: complex
    ],
)
def test_a_mat_file_with_a_wrong_kind_size_or_flag(tmp_path: Path, old: int, turn: int) -> None:
    """Scipy's own reader crashes on each of them."""
    data = ARCHIVES["plain.mat"]
    assert data.count(old.to_bytes(8, "little")) == 1
    wrong = data.replace(old.to_bytes(8, "little"), (old ^ turn).to_bytes(8, "little"))
    (tmp_path / "g.mat").write_bytes(wrong)
    with pytest.raises(ValueError, match=r"g\.mat: damaged or truncated MATLAB file: (fea|an ele)"):
        load_nodes(tmp_path / "g.mat")


def test_a_mat_file_with_a_variable_twice(tmp_path: Path) -> None:
    data = ARCHIVES["plain.mat"]
    (tmp_path / "g.mat").write_bytes(data + data[128:])
    with pytest.raises(ValueError, match=r"g\.mat: .*a name twice"):
        load_nodes(tmp_path / "g.mat")


def test_a_mat_file_may_hold_other_things(tmp_path: Path) -> None:
    """Text, cells and structures are passed over."""
    more = {"about": "text", "cells": np.array(["ab", 1], object), "tree": {"a": {"b": [1, 2]}}}
    nets = dict.fromkeys(("net_rsr", "net_rtr", "net_rur"), NET)
    for compressed in (False, True):
        variables = {**more, "features": X, "label": Y[None], **nets}
        scipy.io.savemat(tmp_path / "g.mat", variables, do_compression=compressed)
        assert len(load_nodes(tmp_path / "g.mat").relations) == 3


def test_a_mat_file_cut_between_two_variables_is_refused(tmp_path: Path) -> None:
    """Where the format itself sees no harm: a later relation, or the labels, are gone."""
    data = ARCHIVES["plain.mat"]
    ends, here = [], 128
    while here < len(data):
        ends.append(here)
        here += 8 + int.from_bytes(data[here + 4 : here + 8], "little")
    assert len(ends) == 5 and here == len(data)
    assert [end for end in ends if read_or_refused(tmp_path / "g.mat", data[:end])] == []


def damaged(data: bytes, place: int) -> bytes:
    """A bit turned in one byte."""
    changed = bytearray(data)
    changed[place] ^= 1 << place % 8
    return bytes(changed)


@steps
@pytest.mark.parametrize("name", [name for name in ARCHIVES if name != "plain.mat"])
def test_a_damaged_archive_is_refused_or_read_right(tmp_path: Path, name: str, step: int) -> None:
    """A bit turned here and there: checksums find all that matter."""
    data, path = ARCHIVES[name], tmp_path / name
    whole = read_or_refused(path, data)
    assert whole is not None
    refused = 0
    for place in range(0, len(data), step):
        found = read_or_refused(path, damaged(data, place))
        refused += found is None
        assert found is None or same(found, whole)
    assert refused > len(data) / step / 4  # what is left are dates and the like


def test_a_zip_whose_list_lost_files_is_refused(tmp_path: Path) -> None:
    """The length of a comment in the list covers the entries after it: one turned bit."""
    data = ARCHIVES["small.zip"]
    entry = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1) + 1)
    changed = bytearray(data)
    changed[entry + 33] ^= 1
    (tmp_path / "S.zip").write_bytes(changed)
    with zipfile.ZipFile(tmp_path / "S.zip") as archive:
        assert len(archive.namelist()) == 3  # of 6, without a word
    with pytest.raises(ValueError, match=r"S\.zip: .*expected 6 files by the last record, got 3"):
        load_graphs(tmp_path / "S.zip")


@real
@pytest.mark.parametrize("name", ["gad/books.npz", "gad/Amazon.mat", "tu/MUTAG.zip"])
def test_a_real_file_cut_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    data = (DATA / name).read_bytes()
    path = tmp_path / Path(name).name
    ends = np.linspace(0, len(data) - 1, 60).astype(int).tolist()
    ends += range(len(data) - 30, len(data))
    assert [end for end in ends if read_or_refused(path, data[:end])] == []


def test_a_table_cut_anywhere_but_between_lines_is_refused(tmp_path: Path) -> None:
    """And between lines too, where an edge misses its node or the labels one kind."""
    for name, text in (("nodes", NODES), ("edges", TIES)):
        (tmp_path / "nodes.csv").write_text(NODES)
        (tmp_path / "edges.csv").write_text(TIES)
        read = []
        for end in range(len(text)):
            (tmp_path / f"{name}.csv").write_text(text[:end])
            try:
                load_nodes(tmp_path)
                read.append(end)
            except ValueError as error:
                assert str(tmp_path) in str(error)
        # shorter edge tables are edge tables
        lines = [TIES.index("bob,cy"), TIES.index("cy,di")]
        assert read == ([] if name == "nodes" else lines)


@pytest.mark.parametrize("field", SMALL)
def test_a_tu_folder_cut_anywhere_is_refused(tmp_path: Path, field: str) -> None:
    for name, text in SMALL.items():
        (tmp_path / f"S_{name}.txt").write_text(text)
    assert len(load_graphs(tmp_path)) == 2
    for end in range(len(SMALL[field])):
        (tmp_path / f"S_{field}.txt").write_text(SMALL[field][:end])
        with pytest.raises(ValueError, match=str(tmp_path)):
            load_graphs(tmp_path)


def test_the_one_cut_of_a_tu_folder_that_nothing_tells(tmp_path: Path) -> None:
    """Between two lines of A where both directions of all edges before stand, without labels."""
    for name in ("A", "graph_indicator", "graph_labels"):
        (tmp_path / f"S_{name}.txt").write_text(SMALL[name])
    read = []
    for end in range(len(SMALL["A"])):
        (tmp_path / "S_A.txt").write_text(SMALL["A"][:end])
        try:
            load_graphs(tmp_path)
            read.append(end)
        except ValueError as error:
            assert str(tmp_path) in str(error)
    pair = len("1, 2\n2, 1\n")
    assert read == [pair, 2 * pair] and len(SMALL["A"]) == 3 * pair
