"""Bytes of image files into arrays: IDX, CIFAR-10 binary, tars and folders of pictures.

Every damaged or foreign file raises `ValueError` naming the file and the field.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from etdyn.checks import bad, check_count

__all__ = [
    "as_folder",
    "decode_all",
    "find_files",
    "is_image",
    "read_cifar",
    "read_idx",
    "tar_members",
]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
CIFAR_RECORD = 1 + 3 * 32 * 32  # one label byte, then the pixels, channel-major
# what gzip, bz2, lzma and tarfile raise for damaged bytes
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


def as_folder(name: str, path: str | Path) -> Path:
    """The folder at `path`; `name` is the argument to blame."""
    folder = Path(path)
    if not folder.is_dir():
        raise bad(name, "an existing folder", path)
    return folder


def find_files(folder: str | Path, pattern: str) -> list[Path]:
    """Files of a pattern, sorted; of a file and its compressed copies only the plainest."""
    found: dict[str, Path] = {}
    for suffix in (".xz", ".gz", ""):
        for path in as_folder("folder", folder).glob(pattern + suffix):
            found[path.name.removesuffix(suffix)] = path
    return [found[name] for name in sorted(found)]


def _read(path: Path) -> bytes:
    """All bytes of a file, decompressed by its suffix."""
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        if path.suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        return path.read_bytes()
    except DAMAGED as error:
        raise ValueError(f"{path}: damaged or truncated file: {error}") from error


def read_idx(path: Path, ndim: int) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes: 0, 0, type 8, ndim, then big-endian sizes, then data."""
    data = _read(path)
    start = 4 + 4 * ndim
    if data[:3] != b"\0\0\x08":
        raise bad(f"{path}: magic number", "00 00 08 first", data[:3].hex(" ") or "an empty file")
    if data[3:4] != bytes([ndim]):
        raise bad(f"{path}: dimension count", f"{ndim}", list(data[3:4]))
    if len(data) < start:
        raise bad(f"{path}: sizes", f"a header of {start} bytes", f"a file of {len(data)}")
    sizes = struct.unpack(f">{ndim}I", data[4:start])
    count = math.prod(sizes)
    if len(data) - start != count or count == 0:
        expected = f"{' x '.join(map(str, sizes))} = {count} bytes (and some) by the header"
        raise bad(f"{path}: data", expected, len(data) - start)
    return np.frombuffer(data, np.uint8, offset=start).reshape(sizes)


def read_cifar(path: Path) -> npt.NDArray[np.uint8]:
    """Records `(n, 3073)`."""
    data = np.frombuffer(_read(path), np.uint8)
    if len(data) == 0 or len(data) % CIFAR_RECORD:
        raise bad(f"{path}: size", f"a positive multiple of {CIFAR_RECORD} bytes", len(data))
    records = data.reshape(-1, CIFAR_RECORD)
    if (worst := int(records[:, 0].max())) > 9:
        raise bad(f"{path}: label", "0 to 9, as CIFAR-10 has", worst)
    return records


def is_image(name: str) -> bool:
    """Whether a file name is that of a visible image file."""
    # hidden files: macOS leaves a "._x.jpg" that is no image beside each x.jpg
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def tar_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of a tar's images, in the archive's order: one pass, also if compressed."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and is_image(PurePosixPath(member.name).name):
                    with archive.extractfile(member) as file:  # type: ignore[union-attr]
                        yield member.name, file.read()
            # tarfile takes a cut or damaged header for the end: look for the mark of zeros
            archive.fileobj.seek(archive.offset)
            tail = archive.fileobj.read(-1)
    except DAMAGED as error:
        raise ValueError(f"{path}: damaged or truncated tar: {error}") from error
    if len(tail) < tarfile.BLOCKSIZE or any(tail):
        raise ValueError(f"{path}: damaged or truncated tar: no end mark after the last member")


def _decode(name: str, data: bytes, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """One image file as bytes `(channels, size, size)`."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            if image.mode[0] in "IF":  # Pillow would clip these to 8 bits
                raise ValueError(f"expected 8 bits a channel, got mode {image.mode}")
            upright = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's readers raise a dozen kinds for broken bytes
        raise ValueError(f"{name}: unreadable image: {error}") from error
    short = min(upright.size)
    width, height = (round(side * size / short) for side in upright.size)
    resized = upright.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    square = resized.crop((left, top, left + size, top + size))
    return np.asarray(square, np.uint8).reshape(size, size, channels).transpose(2, 0, 1)


def decode_all(
    source: Path, files: Iterable[tuple[str, bytes]], size: int, channels: int
) -> npt.NDArray[np.uint8]:
    """Named image files as one array `(n, channels, size, size)`, sorted by name."""
    check_count("size", size)
    check_count("channels", channels)
    if channels not in (1, 3):
        raise bad("channels", "1 or 3", channels)
    images = {name: _decode(f"{source}: {name}", data, size, channels) for name, data in files}
    if not images:
        raise bad("path", f"image files ({', '.join(IMAGE_SUFFIXES)}) in it", source)
    return np.stack([images[name] for name in sorted(images)])
