"""Image sets: float32 tensors `(n, channel, height, width)` in [0, 1], with a held-out part.

Readers of IDX (MNIST), CIFAR-10 binary, image folders, image tars and plain arrays. Nothing is
downloaded, nothing is extracted to disk, no pickle is read.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etdyn.checks import bad, check_count
from etdyn.datasets.formats import (
    as_folder,
    decode_all,
    find_files,
    is_image,
    read_cifar,
    read_idx,
    tar_members,
)

Array = npt.NDArray[Any]

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ARRAY_DTYPES = ("uint8", "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Training and held-out images, checked at construction.

    train, test: float32 `(n, channel, height, width)`, values in [0, 1], same image shape.
    train_labels, test_labels: int64 `(n,)`, or None where the source has none.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, length or value.
    """

    train: Tensor
    test: Tensor
    name: str
    train_labels: Tensor | None = None
    test_labels: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse anything the class docstring does not promise."""
        for part, images, labels in (
            ("train", self.train, self.train_labels),
            ("test", self.test, self.test_labels),
        ):
            if not isinstance(images, Tensor) or images.dtype != torch.float32:
                raise TypeError(f"{part}: expected a float32 tensor, got {_kind(images)}")
            _check_images(part, images)
            if labels is not None:
                _check_labels(f"{part}_labels", labels, len(images))
        if self.train.shape[1:] != self.test.shape[1:]:
            train, test = tuple(self.train.shape[1:]), tuple(self.test.shape[1:])
            raise bad("test", f"images of train's shape {train}", test)

    def __repr__(self) -> str:
        """Sizes, not pixels."""
        counts = f"train={len(self.train)}, test={len(self.test)}"
        return f"ImageSet({self.name!r}, {counts}, shape={self.shape})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one image: (channel, height, width)."""
        channel, height, width = self.train.shape[1:]
        return channel, height, width


def digits(seed: int = 0) -> ImageSet:
    """Handwritten digits that ship with scikit-learn: 1,437 training and 360 test images, 1x8x8.

    The split is stratified by label and fixed by `seed`. Values are the counts 0..16 over 16.

    Returns an ImageSet with labels 0..9. Raises TypeError, ValueError for a bad seed.
    Source: UCI optical recognition of handwritten digits (Alpaydin & Kaynak 1998), test part.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415 (slow to import)
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    check_count("seed", seed, least=0)
    data = load_digits()
    images = torch.from_numpy((data.images[:, None] / 16).astype(np.float32))
    labels = torch.from_numpy(data.target.astype(np.int64))
    train, test = train_test_split(
        np.arange(len(labels)), test_size=360, random_state=seed, stratify=data.target
    )
    return ImageSet(images[train], images[test], "digits", labels[train], labels[test])


def from_array(
    array: Array | Tensor,
    held_out: float = 0.2,
    seed: int = 0,
    labels: Array | Tensor | Sequence[int] | None = None,
    name: str = "array",
) -> ImageSet:
    """Split an array of images at random into training and held-out images.

    array: `(n, channel, height, width)`; uint8 is divided by 255, floats must lie in [0, 1].
    held_out: the share (0 < float < 1) or the number (int) of images held out; both parts must
    be non-empty. seed: fixes the split; both parts keep the array's order. labels: n integers.

    Returns an ImageSet of copies, on the CPU. Raises TypeError for a wrong type or dtype,
    ValueError for a wrong shape, range, length or share.
    """
    images = _as_images(array)
    train, test = _split(len(images), held_out, seed)
    if labels is None:
        return ImageSet(images[train], images[test], name)
    classes = torch.from_numpy(_as_labels(labels))
    _check_labels("labels", classes, len(images))
    return ImageSet(images[train], images[test], name, classes[train], classes[test])


def mnist(folder: str | Path) -> ImageSet:
    """Read the IDX files of MNIST and its look-alikes (Fashion-MNIST, KMNIST) in a folder.

    Files: `train-images-idx3-ubyte`, `t10k-images-idx3-ubyte` and, where present, the two
    `...-labels-idx1-ubyte`; plain, `.gz` or `.xz`.

    Returns an ImageSet named "mnist", one channel, split as the files are. Raises ValueError
    naming the file and the field: magic number, dimension count, sizes, data, number of labels.
    Source: the IDX format, LeCun, Cortes & Burges, "The MNIST database".
    """
    parts: list[tuple[Tensor, Tensor | None]] = []
    for prefix in ("train", "t10k"):
        found = find_files(folder, f"{prefix}-images-idx3-ubyte")
        if not found:
            raise bad("folder", f"a file {prefix}-images-idx3-ubyte[.gz] in it", folder)
        images = read_idx(found[0], 3)[:, None]
        labels = None
        if labels_found := find_files(folder, f"{prefix}-labels-idx1-ubyte"):
            labels = torch.from_numpy(read_idx(labels_found[0], 1).astype(np.int64))
            if len(labels) != len(images):
                raise bad(f"{labels_found[0]}: number of labels", f"{len(images)}", len(labels))
        parts.append((_as_images(images), labels))
    (train, train_labels), (test, test_labels) = parts
    return ImageSet(train, test, "mnist", train_labels, test_labels)


def cifar10(folder: str | Path) -> ImageSet:
    """Read CIFAR-10's binary version: `data_batch*.bin` and `test_batch*.bin` in a folder.

    Each file plain, `.gz` or `.xz`; a record is one label byte and 3,072 pixel bytes. Training
    batches are joined in the order of their names.

    Returns an ImageSet named "cifar10", shape (3, 32, 32), labels 0..9.
    Raises ValueError naming the file: none found, size not whole records, label above 9.
    Source: Krizhevsky, "Learning multiple layers of features from tiny images" (2009).
    """
    parts: list[tuple[Tensor, Tensor]] = []
    for pattern in ("data_batch*.bin", "test_batch*.bin"):
        found = find_files(folder, pattern)
        if not found:
            raise bad("folder", f"files {pattern}[.gz|.xz] in it", folder)
        records = np.concatenate([read_cifar(path) for path in found])
        images = _as_images(records[:, 1:].reshape(-1, 3, 32, 32))
        parts.append((images, torch.from_numpy(records[:, 0].astype(np.int64))))
    (train, train_labels), (test, test_labels) = parts
    return ImageSet(train, test, "cifar10", train_labels, test_labels)


def image_folder(
    path: str | Path, size: int, channels: int = 3, held_out: float = 0.2, seed: int = 0
) -> ImageSet:
    """Read every image file below a folder, in the order of the relative paths.

    Each image is turned as its EXIF tag says, made grey (channels=1) or RGB (3; transparency is
    dropped), its short side resized to `size` pixels (bilinear, antialiased), and the central
    size x size cut out. Files without an image suffix and hidden files are passed over.

    Returns an ImageSet without labels, named after the folder; split as in `from_array`.
    Raises ValueError for no images, for an unreadable or more-than-8-bit image (naming it), and
    for a bad size, channels, held_out or seed (or TypeError).
    """
    root = as_folder("path", path)
    files = (
        (file.relative_to(root).as_posix(), file.read_bytes())
        for file in root.rglob("*")
        if is_image(file.name) and file.is_file()
    )
    stack = decode_all(root, files, size, channels)
    return from_array(stack, held_out, seed, name=root.resolve().name)


def image_tar(
    path: str | Path, size: int, channels: int = 3, held_out: float = 0.2, seed: int = 0
) -> ImageSet:
    """Read every image file of a tar (plain, gzip, bzip2 or xz), in the order of the names.

    Treats images as `image_folder` does, without extracting to disk. Returns an ImageSet without
    labels, named after the file. Raises as `image_folder`, and ValueError naming the file for a
    damaged or truncated tar, also one cut between two members.
    """
    file = Path(path)
    if not file.is_file():
        raise bad("path", "a tar file", path)
    stack = decode_all(file, tar_members(file), size, channels)
    return from_array(stack, held_out, seed, name=file.name)


def load_images(source: str | Path, size: int = 32, channels: int = 3, seed: int = 0) -> ImageSet:
    """Read images from whatever `source` names; one of

    - "digits": `digits(seed)`
    - a folder with IDX files: `mnist`; with `*.bin`, `*.bin.gz`, `*.bin.xz`: `cifar10`
    - any other folder: `image_folder`; a tar: `image_tar`; both hold out a fifth
    - a `.npy` or `.npz` file with axes (n, channel, height, width): `from_array`; of an `.npz`
      the array named "images", else the first

    size, channels: used by image folders and tars only. seed: of the split, where the source has
    none of its own. Returns an ImageSet. Raises ValueError for anything else, and as the readers.
    """
    if source == "digits":
        return digits(seed)
    path = Path(source)
    name = path.name.lower()
    if path.is_dir():
        if find_files(path, "*-images-idx3-ubyte"):
            return mnist(path)
        if find_files(path, "*.bin"):
            return cifar10(path)
        return image_folder(path, size, channels, seed=seed)
    if path.is_file() and name.endswith(TAR_SUFFIXES):
        return image_tar(path, size, channels, seed=seed)
    if path.is_file() and name.endswith((".npy", ".npz")):
        return _load_numpy(path, seed)
    raise bad(
        "source",
        '"digits", a folder of IDX files, of CIFAR-10 *.bin files or of images, a tar of images '
        f"({', '.join(TAR_SUFFIXES)}), or a .npy or .npz file (n, channel, height, width)",
        f"{str(source)!r}, which " + ("is none of these" if path.exists() else "does not exist"),
    )


def _kind(value: object) -> str:
    """What a value is, for an error message."""
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ + ("" if dtype is None else f" of {dtype}")


def _check_images(name: str, images: Tensor) -> None:
    """Four axes, none empty, finite, in [0, 1]."""
    if images.ndim != 4 or images.numel() == 0:
        shape = f"shape {tuple(images.shape)}"
        raise bad(name, "a non-empty (n, channel, height, width)", shape)
    low, high = (float(end) for end in images.aminmax())  # NaN if any value is
    if not math.isfinite(low) or not math.isfinite(high):
        count = images.numel() - int(images.isfinite().sum())
        raise bad(name, "finite values", f"{count} NaN or infinite ones")
    if low < 0 or high > 1:
        raise bad(name, "values in [0, 1]", f"{low} to {high}")


def _check_labels(name: str, labels: Tensor, count: int) -> None:
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        raise TypeError(f"{name}: expected an int64 tensor, got {_kind(labels)}")
    if labels.shape != (count,):
        raise bad(name, f"shape ({count},), one label an image", tuple(labels.shape))


def _as_images(array: Array | Tensor) -> Tensor:
    """Checked float32 images in [0, 1] from bytes or floats; always a copy of a numpy array."""
    if isinstance(array, np.ndarray) and array.dtype.name in ARRAY_DTYPES:
        # torch takes neither foreign byte order nor negative strides
        images = torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
    elif isinstance(array, Tensor) and str(array.dtype).removeprefix("torch.") in ARRAY_DTYPES:
        images = array.detach().cpu()
    else:
        raise TypeError(f"array: expected a uint8 or float array or tensor, got {_kind(array)}")
    if images.dtype == torch.uint8:
        images = images.to(torch.float32).div_(255)
    _check_images("array", images)  # before rounding to float32, which could hide an excess
    return images.to(torch.float32)


def _as_labels(labels: Array | Tensor | Sequence[int]) -> npt.NDArray[np.int64]:
    array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if array.dtype.kind not in "iu":
        raise TypeError(f"labels: expected integers, got dtype {array.dtype}")
    return array.astype(np.int64)


def _split(total: int, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Sorted indices of the training and of the held-out images."""
    check_count("seed", seed, least=0)
    if isinstance(held_out, bool) or not isinstance(held_out, int | float):
        raise TypeError(f"held_out: expected a float or an int, got {_kind(held_out)}")
    if isinstance(held_out, int):
        count = held_out
    else:
        count = round(held_out * total) if 0 < held_out < 1 else 0
    if not 0 < count < total:
        expected = "a share in (0, 1) or a count that leaves both parts non-empty"
        raise bad("held_out", expected, f"{held_out!r} of {total} images")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[count:].sort().values, order[:count].sort().values


def _load_numpy(path: Path, seed: int) -> ImageSet:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded:
                key = "images" if "images" in loaded.files else next(iter(loaded.files), "images")
                loaded = loaded[key]
        return from_array(loaded, seed=seed, name=path.name)
    except (ValueError, TypeError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not an array of images: {error}") from error
