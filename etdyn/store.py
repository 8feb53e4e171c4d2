"""Results on disk: xarray objects as zarr, written atomically, with their provenance."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
import zarr
from torch import Tensor

from etdyn.checks import bad

__all__ = ["checksum", "load", "provenance", "save", "write_atomically"]

_PACKAGES = ("etdyn", "torch", "torchdiffeq", "numpy", "scipy", "xarray", "zarr")


def provenance(schema: str, config: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """The attributes that every result carries.

    Args:
        schema: name and version of the layout, such as "etdyn.solution/1".
        config: what was run, as JSON can hold it; stored as one JSON string.
        like: a tensor with the dtype and device of the computation.

    Returns:
        Attributes of plain strings and booleans, which zarr and netCDF both keep.
    """
    return {
        "etdyn_schema": schema,
        "etdyn_config": json.dumps(config, sort_keys=True),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": json.dumps(_versions()),
        "python": platform.python_version(),
        "git_revision": _revision(),
        "dtype": str(like.dtype).removeprefix("torch."),
        "device": str(like.device),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
    }


def save(data: xr.Dataset | xr.DataTree, path: str | os.PathLike[str]) -> None:
    """Write a result to a zarr store at `path`, replacing one that is there.

    The store appears under its name only when it is complete.

    Raises:
        ValueError: something that is not a result of etdyn stands at `path`, or `data` is none.
        TypeError: `data` is not an xarray object.
    """
    path = Path(path)
    if path.exists() and not _is_ours(path):
        raise bad("path", "a new name or a result of etdyn to replace", path)
    if not isinstance(data, xr.Dataset | xr.DataTree):
        got = type(data).__name__
        raise TypeError(f"data: expected a Dataset or a DataTree (to_xarray makes one), got {got}")
    if "etdyn_schema" not in data.attrs:
        raise bad("data", "a result with the attribute etdyn_schema (see provenance)", "none")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as parent:
        fresh, old = Path(parent) / "new", Path(parent) / "old"
        with zarr.config.set({"array.write_empty_chunks": True}):  # so that none may be missing
            tree = data if isinstance(data, xr.DataTree) else xr.DataTree(data)
            tree.map_over_datasets(_encoded).to_zarr(fresh, mode="w", consolidated=False)
        if path.exists():
            path.rename(old)
        fresh.rename(path)


def load(path: str | os.PathLike[str]) -> xr.Dataset | xr.DataTree:
    """Read a result that `save` wrote, into memory: a Dataset, or a DataTree if it has groups.

    Raises:
        ValueError: `path` is not a zarr store, not one of etdyn's, damaged or incomplete.
    """
    path = Path(path)
    if not (path / "zarr.json").exists():
        raise bad("path", "a zarr store", f"{path} (no zarr.json there)")
    try:
        _check_chunks(zarr.open_group(path, mode="r"))
        tree = xr.open_datatree(path, engine="zarr", consolidated=False).load()
    except Exception as error:  # zarr, its codecs and json each have their own
        raise bad("path", "a complete zarr store", f"{path} ({error})") from error
    tree.close()
    if "etdyn_schema" not in tree.attrs:
        raise bad("path", "a result of etdyn (attribute etdyn_schema)", path)
    tree = tree.map_over_datasets(_decoded)
    return tree if tree.children else tree.to_dataset()


def _encoded(part: xr.Dataset) -> xr.Dataset:
    """Text of variable length, since zarr specifies no other."""
    part = part.copy()
    for variable in part.variables.values():
        if variable.dtype.kind == "U":
            variable.encoding = {"dtype": object}
    return part


def _decoded(part: xr.Dataset) -> xr.Dataset:
    """Text as numpy usually has it."""
    texts = {}
    for name, variable in part.variables.items():
        if variable.dtype.kind == "T":
            values = np.array(variable.values.tolist(), dtype=str).reshape(variable.shape)
            texts[name] = (variable.dims, values, variable.attrs)
    coords = {name: v for name, v in texts.items() if name in part.coords}
    return part.assign_coords(coords).assign({n: v for n, v in texts.items() if n not in coords})


def checksum(parts: Iterable[Tensor]) -> str:
    """Sixteen hex digits of the bytes of some tensors: what tells one set of data from another."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.contiguous().numpy(force=True).tobytes())
    return found.hexdigest()[:16]


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file so that its name never holds half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as f:
        try:
            f.write(data)
            f.close()
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def _is_ours(path: Path) -> bool:
    try:
        attributes = json.loads((path / "zarr.json").read_text()).get("attributes", {})
    except (OSError, ValueError):
        return False
    return "etdyn_schema" in attributes


def _check_chunks(group: zarr.Group) -> None:
    """A missing chunk would be read as NaN."""
    for name, array in group.arrays():
        missing = array.nchunks - array.nchunks_initialized
        if missing:
            raise ValueError(f"{missing} chunks of {name} missing")
    for _, inner in group.groups():
        _check_chunks(inner)


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@functools.cache
def _revision() -> str:
    """The git revision of this checkout, with "+" when the tree has changes; else "unknown"."""
    here = Path(__file__).parent
    git = shutil.which("git")
    if git is None or not (here.parent / ".git").exists():
        return "unknown"

    def ask(*words: str) -> str:
        done = subprocess.run([git, *words], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = ask("rev-parse", "HEAD")
    return (head + ("+" if ask("status", "--porcelain") else "")) if head else "unknown"
