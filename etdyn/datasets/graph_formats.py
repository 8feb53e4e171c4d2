"""Files of graphs into checked tensors: numpy archives, MATLAB files, tables, TU text.

Every damaged or foreign file raises `ValueError` naming the file and the field. Archives (`.npz`,
`.zip`) end in a list of their contents, so a cut one is refused. A `.mat` file has the length of
each variable, and text must end in a newline: what is cut between two variables or two lines is
refused only where something else tells that they are missing.
"""

from __future__ import annotations

import csv
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from etdyn.checks import bad

__all__ = [
    "as_edges",
    "as_features",
    "as_labels",
    "as_matrix",
    "check_edges",
    "check_features",
    "read_lines",
    "read_mat",
    "read_npz",
    "read_table",
    "zip_members",
]

Array = npt.NDArray[Any]
MAT_HEADER = 128  # bytes; the last four are the version and the byte order, little-endian
MAT_NUMBERS = (*range(1, 8), 9, 12, 13)  # kinds of elements
MAT_COMPRESSED = 15
MAT_KINDS = (*MAT_NUMBERS, 14, MAT_COMPRESSED, 16, 17, 18)  # matrix; text
MAT_PARTS = {5: 6} | dict.fromkeys(range(6, 16), 4)  # by class of array: sparse, numbers
MAT_COMPLEX = 0x800


def check_features(field: str, features: Tensor) -> None:
    """Raise unless this is a finite float32 `(node, feature)`, neither of them none."""
    if not isinstance(features, Tensor) or features.dtype != torch.float32:
        kind = features.dtype if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"{field}: expected a float32 tensor, got {kind}")
    if features.ndim != 2 or features.numel() == 0:
        raise bad(field, "a non-empty (node, feature)", f"shape {tuple(features.shape)}")
    if not bool(torch.isfinite(features.sum())):  # the sum may overflow where no value does
        wrong = ~torch.isfinite(features).all(1)
        if bool(wrong.any()):
            node = int(wrong.nonzero()[0])
            raise bad(field, "finite values", f"NaN or infinity at node {node}")


def check_edges(field: str, edges: Tensor, nodes: int) -> None:
    """Raise unless this is int64 `(2, edge)` in range, without self-loops and repeats."""
    if not isinstance(edges, Tensor) or edges.dtype != torch.int64:
        kind = edges.dtype if isinstance(edges, Tensor) else type(edges).__name__
        raise TypeError(f"{field}: expected an int64 tensor, got {kind}")
    if edges.ndim != 2 or len(edges) != 2:
        raise bad(field, "shape (2, edge)", f"shape {tuple(edges.shape)}")
    _check_range(field, edges, nodes)
    if bool((loops := edges[0] == edges[1]).any()):
        node = int(edges[0][loops][0])
        raise bad(field, "no self-loops", f"{int(loops.sum())} of them, the first at node {node}")
    distinct = _adjacency(edges[0].numpy(), edges[1].numpy(), nodes).nnz
    if distinct < edges.shape[1]:
        raise bad(field, "every edge once", f"{edges.shape[1] - distinct} repeated")


def _check_range(field: str, ends: Tensor | Array, nodes: int) -> None:
    if ends.shape[1] and not 0 <= int(ends.min()) <= int(ends.max()) < nodes:
        raise bad(field, f"nodes from 0 to {nodes - 1}", f"{int(ends.min())} to {int(ends.max())}")


def _adjacency(keys: Array, queries: Array, nodes: int) -> sp.csr_array:
    """The pattern of the edges, each once: a counting sort, in linear time."""
    ones = np.ones(len(keys), bool)
    return sp.coo_array((ones, (keys, queries)), (nodes, nodes)).tocsr()


def as_features(field: str, values: Any) -> Tensor:
    """float32 `(node, feature)` of any numbers, dense or sparse."""
    values = values if sp.issparse(values) else np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise bad(field, "numbers", f"an array of {values.dtype}")
    try:
        with np.errstate(over="ignore"):  # an infinity is refused below
            values = values.astype(np.float32)
        dense = np.array(values.toarray() if sp.issparse(values) else values, order="C")
    except MemoryError as error:
        raise bad(field, "a matrix that fits into memory", f"shape {values.shape}") from error
    features = torch.from_numpy(dense)
    check_features(field, features)
    return features


def as_labels(field: str, values: Array, nodes: int) -> Tensor:
    """int64 `(node,)`, of which both 0 and 1 occur and -1 may, of any numbers of these values."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise bad(field, "integers", f"an array of {values.dtype}")
    if values.size != nodes or values.size != max(values.shape, default=0):
        raise bad(field, f"{nodes} labels, one a node", f"shape {values.shape}")
    found = np.unique(values)
    if not np.isin(found, (-1, 0, 1)).all() or not np.isin((0, 1), found).all():
        some = ", ".join(f"{value:g}" for value in found[:6].astype(float))
        got = "the values " + some + (", ..." if len(found) > 6 else "")
        raise bad(field, "0 (normal) and 1 (anomaly), and -1 for unlabelled", got)
    return torch.from_numpy(values.reshape(-1).astype(np.int64))


def as_edges(field: str, ends: Array, nodes: int) -> Tensor:
    """int64 `(2, edge)` of undirected edges given in one direction or both, repeated or not.

    Each stands in both directions once, sorted; self-loops are dropped.
    """
    ends = np.asarray(ends)
    if ends.dtype.kind not in "iu":
        raise bad(field, "integers", f"an array of {ends.dtype}")
    if ends.ndim != 2 or len(ends) != 2:
        raise bad(field, "shape (2, edge)", f"shape {ends.shape}")
    _check_range(field, ends, nodes)
    keys, queries = ends[:, ends[0] != ends[1]].astype(np.int64, copy=False)
    once = _adjacency(keys, queries, nodes)
    both = (once + once.T).tocoo()
    return torch.from_numpy(np.stack([both.row, both.col]).astype(np.int64))


def as_matrix(field: str, parts: Sequence[Array], shape: Array) -> sp.csr_array:
    """A CSR matrix of its data, column indices and row starts, checked in full."""
    try:
        matrix = sp.csr_array(tuple(parts), shape=tuple(shape.tolist()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field}: not a sparse matrix in CSR form: {error}") from error
    _check_sparse(field, matrix)
    return matrix


def _check_sparse(field: str, matrix: Any) -> None:
    """Raise where an index is out of range: scipy would read elsewhere in memory."""
    try:
        matrix.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field}: damaged sparse matrix: {error}") from error


def zip_members(path: Path) -> dict[str, bytes]:
    """The bytes of each file of a zip by its name without folders, checksums compared."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            _check_count(path, len(infos), len(archive.comment))
            names = [i.filename for i in infos if not i.is_dir() and "__MACOSX" not in i.filename]
            files = {name.rsplit("/", 1)[-1]: archive.read(name) for name in names}
    except Exception as error:  # zipfile raises a dozen kinds for broken bytes
        raise ValueError(f"{path}: damaged or truncated zip: {error}") from error
    if len(files) < len(names):
        raise bad(f"{path}: files", "different names", f"{len(names) - len(files)} repeated")
    return files


def _check_count(path: Path, files: int, comment: int) -> None:
    """Compare with the count in a zip's last record: zipfile may lose files of a damaged list."""
    with path.open("rb") as file:
        file.seek(-comment - 22 + 10, io.SEEK_END)
        count = int.from_bytes(file.read(2), "little")
    if count not in (files, 0xFFFF):  # the latter where there are more
        raise ValueError(f"expected {count} files by the last record, got {files}")


def read_npz(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Those of the named arrays that an archive has; no pickles."""
    files = zip_members(path)  # np.load would read its arrays without comparing checksums
    found = {}
    for name in names:
        if f"{name}.npy" in files:
            try:
                buffer = io.BytesIO(files[f"{name}.npy"])
                found[name] = np.lib.format.read_array(buffer, allow_pickle=False)
            except Exception as error:  # numpy raises many kinds for a broken header
                raise ValueError(f"{path}: {name}: not a plain array: {error}") from error
    return found


def read_mat(path: Path) -> dict[str, Any]:
    """The numeric and sparse arrays of a MATLAB 5 file (versions 5 to 7.2)."""
    from scipy.io import loadmat  # noqa: PLC0415 (seldom used)

    data = memoryview(path.read_bytes())
    version = bytes(data[124:MAT_HEADER])
    if version != b"\x00\x01IM":
        got = "version 7.3" if version == b"\x00\x02IM" else "another file"
        raise bad(f"{path}: header", "a MATLAB 5 file (save with -v7)", got)
    try:
        names = _mat_arrays(data[MAT_HEADER:])
        found: dict[str, Any] = loadmat(io.BytesIO(data), variable_names=names)
    except Exception as error:  # zlib and scipy raise a dozen kinds for broken bytes
        raise ValueError(f"{path}: damaged or truncated MATLAB file: {error}") from error
    for name in names:
        if sp.issparse(found[name]):
            _check_sparse(f"{path}: {name}", found[name])
    return {name: found[name] for name in names}


def _mat_arrays(data: memoryview) -> list[str]:
    """Names of the numeric and sparse arrays, the form of which is checked in full.

    Scipy trusts kinds and sizes: those of a damaged file can end the process. Compressed arrays
    have a checksum.
    """
    names = []
    for kind, body in _elements(data, align=1):
        matrix = body
        if kind == MAT_COMPRESSED:
            ((_, matrix),) = _elements(memoryview(zlib.decompress(body)), align=1)
        kinds, parts = zip(*_elements(matrix, align=8), strict=True)
        (flags,) = struct.unpack_from("<I", parts[0])
        count = MAT_PARTS.get(flags & 0xFF)
        if count is None:
            continue
        names.append(bytes(parts[2]).decode("ascii"))  # after the flags and the shape
        if len(parts) != count + bool(flags & MAT_COMPLEX) or not set(kinds) <= set(MAT_NUMBERS):
            raise ValueError(f"{names[-1]}: parts of the kinds {kinds}")
    if len(set(names)) < len(names):
        raise ValueError(f"a name twice among {names}")
    return names


def _elements(data: memoryview, align: int) -> Iterator[tuple[int, memoryview]]:
    """Kind and bytes of the elements which fill a part of a MATLAB 5 file."""
    here = 0
    while here < len(data):
        tag, size = struct.unpack_from("<II", data, here)
        kind, small = tag & 0xFFFF, tag >> 16  # up to four bytes stand in the tag itself
        start, size = (here + 4, small) if small else (here + 8, size)
        if kind not in MAT_KINDS or small > 4 or start + size > len(data):
            raise ValueError(f"an element of kind {kind} and {size} bytes, {len(data) - here} left")
        yield kind, data[start : start + size]
        here = -(-max(start + size, here + 8) // align) * align


def read_lines(field: str, data: bytes) -> list[str]:
    """The lines of a text, which must end in a newline."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: not UTF-8 text: {error}") from error
    if not text.endswith("\n"):
        end = repr(text[-20:]) if text else "an empty file"
        raise bad(field, "a newline at the end (is the file cut?)", end)
    return text[:-1].split("\n")  # a carriage return is white space to all that read them


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a CSV file, as stripped text; all rows as long as the header."""
    if not path.is_file():
        raise bad(f"{path}", "this file in the folder", "none")
    lines = read_lines(f"{path}", path.read_bytes())
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, strict=True)]
    except csv.Error as error:
        raise ValueError(f"{path}: not a CSV table: {error}") from error
    header = rows[0]
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            expected = f"{len(header)} columns, as the header has"
            raise bad(f"{path}: line {line}", expected, f"{len(row)}")
    return header, rows[1:]
