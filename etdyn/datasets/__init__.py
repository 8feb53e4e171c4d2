"""Readers of standard data formats and the data sets that need no download."""

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

__all__ = [
    "ImageSet",
    "cifar10",
    "digits",
    "from_array",
    "image_folder",
    "image_tar",
    "load_images",
    "mnist",
]
