"""Readers of standard data formats and the data sets that need no download."""

from etdyn.datasets.graph_sets import (
    GraphSet,
    load_graphs,
    superpixel_digits,
    superpixel_graphs,
)
from etdyn.datasets.images import (
    ImageSet,
    cifar10,
    digits,
    from_array,
    image_folder,
    image_tar,
    load_images,
    mnist,
)
from etdyn.datasets.nodes import NodeSet, load_nodes, rare_digit

__all__ = [
    "GraphSet",
    "ImageSet",
    "NodeSet",
    "cifar10",
    "digits",
    "from_array",
    "image_folder",
    "image_tar",
    "load_graphs",
    "load_images",
    "load_nodes",
    "mnist",
    "rare_digit",
    "superpixel_digits",
    "superpixel_graphs",
]
