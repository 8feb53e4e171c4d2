"""Graph sets: the real TU files, torch-geometric's reader as oracle, and superpixel graphs."""

import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etdyn import Graph
from etdyn.datasets import GraphSet, load_graphs, superpixel_digits, superpixel_graphs

ROOT = Path(__file__).resolve().parents[2]
TU = Path(os.environ.get("ETDYN_DATA", ROOT / "../shared/data")) / "graphs" / "tu"
real = pytest.mark.skipif(not TU.exists(), reason=f"{TU} absent; set ETDYN_DATA")

# graphs (SOURCES.md), nodes, edges in both directions, classes, features, edge features
SIZES = {
    "MUTAG": (188, 3_371, 7_442, 2, 7, 4),
    "PTC_MR": (344, 4_915, 10_108, 2, 18, 4),
    "PROTEINS": (1_113, 43_471, 162_088, 2, 1 + 3, 0),
    "ENZYMES": (600, 19_580, 74_564, 6, 18 + 3, 0),
    "NCI1": (4_110, 122_747, 265_506, 2, 37, 0),
    "NCI109": (4_127, 122_494, 265_208, 2, 38, 0),
    "Mutagenicity": (4_337, 131_488, 266_894, 2, 14, 3),
    "DD": (1_178, 334_925, 1_686_092, 2, 82, 0),
    "AIDS": (2_000, 31_385, 64_780, 2, 4 + 38, 3),
    "IMDB-BINARY": (1_000, 19_773, 386_124 // 2, 2, 1, 0),  # lists every edge twice
    "MSRC_9": (221, 8_968, 43_288, 8, 10, 0),
    "MSRC_21": (563, 43_644, 223_312, 20, 22, 0),
}
FAST = ("MUTAG", "PTC_MR", "ENZYMES", "MSRC_9")  # the others take seconds each


def flat(data: GraphSet) -> tuple[Tensor, Tensor]:
    """Features and edges of all graphs, numbered through."""
    starts = torch.tensor([0, *(len(part) for part in data.features)]).cumsum(0)
    shifted = [ends + start for ends, start in zip(data.edges, starts, strict=False)]
    return torch.cat(data.features), torch.cat(shifted, 1)


def unzipped(name: str, folder: Path) -> Path:
    """The text files of one set, in a folder."""
    with zipfile.ZipFile(TU / f"{name}.zip") as archive:
        for member in archive.namelist():
            if member.endswith(".txt"):
                (folder / member.rsplit("/", 1)[-1]).write_bytes(archive.read(member))
    return folder


def mirrored(ends: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The edges turned round, sorted again, and their features."""
    order = np.lexsort((ends[0].numpy(), ends[1].numpy()))
    return ends.flip(0)[:, order], weights[order]


# --- the real files --------------------------------------------------------------------------


@real
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in SIZES],
)
def test_real_sets_agree_with_torch_geometrics_reader(name: str, tmp_path: Path) -> None:
    from torch_geometric.io import read_tu_data  # noqa: PLC0415

    data = load_graphs(TU / f"{name}.zip")
    features, edges = flat(data)
    edge_features = 0 if data.edge_features is None else data.edge_features[0].shape[1]
    sizes = (len(data), *features.shape[:1], edges.shape[1], data.classes, features.shape[1])
    assert (*sizes, edge_features) == SIZES[name] and data.name == name
    oracle, slices, _ = read_tu_data(str(unzipped(name, tmp_path)), name)
    assert torch.equal(data.labels, oracle.y)
    if oracle.x is None:
        assert torch.equal(features, torch.ones(SIZES[name][1], 1))
    else:  # it has columns for values between that do not occur
        assert torch.equal(features, oracle.x[:, (oracle.x != 0).any(0)])
    if edge_features:
        stack = torch.cat(data.edge_features or [])
        assert torch.equal(stack, oracle.edge_attr[:, (oracle.edge_attr != 0).any(0)])
    starts = slices["edge_index"].tolist()
    for graph, ends in enumerate(data.edges):
        assert torch.equal(ends, oracle.edge_index[:, starts[graph] : starts[graph + 1]])
        assert torch.equal(mirrored(ends, torch.zeros(ends.shape[1], 1))[0], ends)


@real
def test_a_folder_is_read_as_its_zip(tmp_path: Path) -> None:
    a, b = load_graphs(unzipped("MUTAG", tmp_path)), load_graphs(TU / "MUTAG.zip")
    assert (
        repr(a)
        == repr(b)
        == (
            "GraphSet('MUTAG', graphs=188, classes=2, nodes=10..28, edges=7442, features=7, "
            "edge_features=4)"
        )
    )
    assert all(torch.equal(p, q) for p, q in zip(flat(a), flat(b), strict=True))
    assert torch.equal(a.labels, b.labels)


@real
def test_a_graph_takes_the_edges_and_their_features_follow() -> None:
    data = load_graphs(TU / "MUTAG.zip")
    assert data.edge_features is not None
    graph = Graph.from_edges(data.edges[3], len(data.features[3]), self_loops=False)
    assert graph.order is not None
    place = {tuple(pair): row for row, pair in enumerate(data.edges[3].T.tolist())}
    rows = [place[tuple(pair)] for pair in graph.edges.T.tolist()]
    assert torch.equal(data.edge_features[3][graph.order.long()], data.edge_features[3][rows])


# --- what is written is read back --------------------------------------------------------------

# graph 1: a path of three with a self-loop and an edge listed twice; graph 2: one node alone
# (its class is -1), graph 3: a pair; graph 4: two nodes without edges, at the end
SMALL = {
    "A": "1, 2\n2, 1\n2,3\n3,2\n2, 2\n5, 6\n6, 5\n2, 1\n",
    "graph_indicator": "1\n1\n1\n2\n3\n3\n4\n4\n",
    "graph_labels": "7\n-1\n7\n3\n",
    "node_labels": "5, 0\n5, 1\n-2, 0\n5, 0\n5, 0\n9, 1\n5, 1\n5, 0\n",
    "node_attributes": "0.5\n1e1\n-2\n0\n3\n4\n5\n6\n",
    "edge_labels": "1\n1\n2\n2\n1\n2\n2\n2\n",
    "edge_attributes": "1\n1\n3\n3\n9\n5\n5\n2\n",
}


def write_tu(folder: Path, files: dict[str, str], prefix: str = "SMALL") -> Path:
    for field, text in files.items():
        (folder / f"{prefix}_{field}.txt").write_bytes(text.encode())
    return folder


def test_small_set_in_full(tmp_path: Path) -> None:
    data = load_graphs(write_tu(tmp_path, SMALL))
    assert data.labels.tolist() == [2, 0, 2, 1] and data.classes == 3
    # attribute, then -2, 5, 9, then 0, 1
    assert data.features[0].tolist() == [
        [0.5, 0, 1, 0, 1, 0], [10, 0, 1, 0, 0, 1], [-2, 1, 0, 0, 1, 0]
    ]  # fmt: skip
    assert data.features[2].tolist() == [[3, 0, 1, 0, 1, 0], [4, 0, 0, 1, 0, 1]]
    none: list[list[int]] = [[], []]
    path = [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert [ends.tolist() for ends in data.edges] == [path, none, [[0, 1], [1, 0]], none]
    assert data.edge_features is not None
    # attribute, then 1, 2; of the edge listed twice the mean
    assert data.edge_features[0].tolist() == [[1, 1, 0], [1.5, 0.5, 0.5], [3, 0, 1], [3, 0, 1]]
    assert [part.shape for part in data.edge_features] == [(4, 3), (0, 3), (2, 3), (0, 3)]


def test_small_set_without_anything_optional(tmp_path: Path) -> None:
    needed = {name: SMALL[name] for name in ("A", "graph_indicator", "graph_labels")}
    data = load_graphs(write_tu(tmp_path, needed))
    assert data.edge_features is None
    assert [part.tolist() for part in data.features] == [[[1.0]] * n for n in (3, 1, 2, 2)]


@pytest.mark.parametrize("folders", ["", "SMALL/", "SMALL//", "a/b/"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_zip_with_and_without_folders(tmp_path: Path, folders: str, newline: str) -> None:
    with zipfile.ZipFile(tmp_path / "any.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for field, text in SMALL.items():
            archive.writestr(f"{folders}SMALL_{field}.txt", text.replace("\n", newline))
        archive.writestr(f"{folders}README.txt~", b"\xff\xfe no text")
        archive.writestr(f"__MACOSX/{folders}._SMALL_A.txt", b"\x00")
    (tmp_path / "folder").mkdir()
    a = load_graphs(write_tu(tmp_path / "folder", SMALL))
    b = load_graphs(tmp_path / "any.zip")
    assert repr(a) == repr(b) and a.name == "SMALL"
    assert all(torch.equal(p, q) for p, q in zip(flat(a), flat(b), strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any.zip", "folder"]


# --- superpixels -------------------------------------------------------------------------------


def test_digits_default() -> None:
    data = load_graphs("digits")
    sizes = {len(part) for part in data.features}
    assert (len(data), data.classes, data.name) == (1797, 10, "superpixel digits")
    assert data.features[0].shape[1] == 3 and sizes <= {13, 14, 15, 16}
    assert data.labels.bincount().min() > 150
    features, edges = flat(data)
    assert features.min() >= 0 and features.max() <= 1
    again = superpixel_digits()
    assert all(torch.equal(p, q) for p, q in zip(flat(data), flat(again), strict=True))
    assert int(edges[0].bincount(minlength=len(features)).min()) >= 8


def test_superpixels_of_a_chessboard_are_its_squares() -> None:
    """Blocks of one colour, on the regular grid, do not move."""
    colours = torch.arange(12).reshape(1, 1, 3, 4) / 12
    image = colours.repeat_interleave(4, 2).repeat_interleave(4, 3)
    data = superpixel_graphs(image, torch.tensor([0]), superpixels=12, neighbours=1)
    found = data.features[0]
    centres = torch.cartesian_prod((torch.arange(3) + 0.5) / 3, (torch.arange(4) + 0.5) / 4)
    assert (found - torch.cat([colours.reshape(12, 1), centres], 1)).abs().max() < 1e-6


def test_superpixels_are_means_of_a_partition() -> None:
    """As many superpixels as pixels: each is a pixel, and the colours' mean is the image's."""
    image = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    found = superpixel_graphs(image, torch.tensor([0]), superpixels=16).features[0]
    assert torch.allclose(found[:, :3], image[0].flatten(1).T, atol=1e-6)


def test_edges_are_the_nearest_and_weights_gaussian() -> None:
    images = torch.rand(5, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    data = superpixel_graphs(images, torch.zeros(5, dtype=torch.int64), 20, neighbours=3)
    assert data.edge_features is not None
    for part, ends, weight in zip(data.features, data.edges, data.edge_features, strict=True):
        distance = torch.cdist(part[:, 1:].double(), part[:, 1:].double()).fill_diagonal_(math.inf)
        third = distance.topk(3, largest=False).values
        near = distance <= third[:, -1:] + 1e-6
        assert (near | near.T)[ends[0], ends[1]].all()
        assert ends[0].bincount().min() >= 3
        expected = torch.exp(-((distance[ends[0], ends[1]] / third.mean()) ** 2))
        assert (weight[:, 0] - expected).abs().max() < 1e-5
        turned, same = mirrored(ends, weight)
        assert torch.equal(turned, ends) and torch.equal(same, weight)


@pytest.mark.parametrize("binary", [False, True])
def test_the_images_beside_it_change_nothing(binary: bool) -> None:
    """Black and white images tie everywhere: only exact sums break ties alike."""
    images = torch.rand(7, 3, 9, 11, generator=torch.Generator().manual_seed(2))
    images = images.round() if binary else images
    labels = torch.arange(7)
    together = superpixel_graphs(images, labels, 17)
    for i in range(7):
        alone = superpixel_graphs(images[i : i + 1], labels[:1], 17)
        assert torch.equal(alone.features[0], together.features[i])
        assert torch.equal(alone.edges[0], together.edges[i])


@pytest.mark.parametrize(("height", "width", "superpixels"), [(1, 9, 4), (9, 1, 4), (5, 7, 1)])
def test_thin_images_and_few_superpixels(height: int, width: int, superpixels: int) -> None:
    data = superpixel_graphs(torch.ones(1, 1, height, width), torch.tensor([0]), superpixels)
    count = len(data.features[0])
    assert count == superpixels and data.edges[0].shape[1] == count * (count - 1)


IMAGES = torch.zeros(2, 1, 4, 4)
LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((IMAGES.double(), LABELS), TypeError, "images: expected a float32"),
        ((IMAGES.numpy(), LABELS), TypeError, "images: expected a float32"),
        ((IMAGES[0], LABELS), ValueError, r"images: expected a non-empty \(n, channel"),
        ((IMAGES[:0], LABELS[:0]), ValueError, "images: expected a non-empty"),
        ((IMAGES + 1.5, LABELS), ValueError, r"images: expected values in \[0, 1\]"),
        ((IMAGES * torch.nan, LABELS), ValueError, r"images: expected values in \[0, 1\]"),
        ((IMAGES, LABELS[:1], 4), ValueError, "features: expected 1 tensors, one a label, got 2"),
        ((IMAGES, LABELS.float(), 4), TypeError, "labels: expected an int64"),
        ((IMAGES, LABELS, 0), ValueError, "superpixels"),
        ((IMAGES, LABELS, 17), ValueError, "superpixels: expected at most the 16 pixels"),
        ((IMAGES, LABELS, 4, 0), ValueError, "neighbours"),
        ((IMAGES, LABELS, 4, 1.5), TypeError, "neighbours"),
    ],
)
def test_superpixel_graphs_refuses(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        superpixel_graphs(*arguments)


# --- the type ----------------------------------------------------------------------------------

PAIR = torch.tensor([[0, 1], [1, 0]])
GOOD: dict[str, Any] = {
    "features": [torch.ones(2, 3), torch.zeros(1, 3)],
    "edges": [PAIR, PAIR[:, :0]],
    "edge_features": [torch.ones(2, 1), torch.ones(0, 1)],
    "labels": torch.tensor([1, 0]),
}


def second(name: str, value: Any) -> dict[str, Any]:
    return {name: [GOOD[name][0], value]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (second("features", torch.ones(1, 2)), ValueError, r"features\[1\]: .* wide as the first"),
        (second("features", torch.ones(3)), ValueError, r"features\[1\]: expected a matrix"),
        (second("features", np.ones((1, 3))), ValueError, r"features\[1\]: expected a matrix"),
        (second("features", torch.ones(0, 3)), ValueError, r"features\[1\]: .* one node"),
        ({"features": [p.double() for p in GOOD["features"]]}, TypeError, "features: .* float32"),
        (second("features", torch.full((1, 3), math.nan)), ValueError, "features: expected finite"),
        ({"features": GOOD["features"][:1]}, ValueError, "features: expected 2 tensors"),
        (second("edges", PAIR), ValueError, r"edges\[1\]: expected nodes from 0 to 0, got 0 to 1"),
        (second("edges", PAIR - 1), ValueError, r"edges\[1\]: expected nodes from 0 to 0, got -1"),
        (second("edges", PAIR[0]), ValueError, r"edges\[1\]: expected shape \(2, edge\)"),
        ({"edges": [PAIR.int(), PAIR.int()[:, :0]]}, TypeError, "edges: expected an int64"),
        ({"edges": [PAIR[:, [0, 0]], PAIR[:, :0]]}, ValueError, "edges: expected every edge once"),
        ({"edges": [PAIR * 0, PAIR[:, :0]]}, ValueError, "edges: expected no self-loops"),
        (second("edge_features", torch.ones(1, 1)), ValueError, r"edge_features\[1\]: .* 0 rows"),
        ({"edge_features": []}, ValueError, "edge_features: expected 2 tensors"),
        ({"labels": torch.tensor([1, -1])}, ValueError, "labels: expected 0 to classes - 1"),
        ({"labels": torch.tensor([1.0, 0])}, TypeError, "labels: expected an int64"),
        ({"labels": torch.tensor([[1, 0]])}, ValueError, "labels: expected a non-empty"),
        ({"classes": 1}, ValueError, "labels: expected 0 to 0, got 0 to 1"),
    ],
)
def test_graph_set_refuses(change: dict, error: type[Exception], message: str) -> None:
    GraphSet(**GOOD, name="good")
    with pytest.raises(error, match=message):
        GraphSet(**GOOD | change, name="bad")


def test_subset_keeps_order_and_classes() -> None:
    data = superpixel_digits()
    assert data.edge_features is not None
    rows = [30, 5, 1796, 5]
    part = data.subset(torch.tensor(rows))
    assert len(part) == 4 and part.classes == 10 and part.name == data.name
    assert part.labels.tolist() == [int(data.labels[row]) for row in rows]
    assert part.edge_features is not None
    for place, row in enumerate(rows):
        assert part.features[place] is data.features[row] and part.edges[place] is data.edges[row]
        assert part.edge_features[place] is data.edge_features[row]
    assert GraphSet(**GOOD | {"edge_features": None}, name="g").subset([1]).edge_features is None
    with pytest.raises(TypeError, match=r"rows: expected integers, got torch\.bool"):
        data.subset(data.labels == 3)
    for row in (1797, -1):
        with pytest.raises(
            ValueError, match=f"rows: expected indices from 0 to 1796, got {row} to {row}"
        ):
            data.subset([row])
