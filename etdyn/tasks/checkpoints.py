"""Models on disk: safetensors with the configuration in a JSON file beside them."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise
from torch import Tensor

from etdyn.checks import bad
from etdyn.store import write_atomically
from etdyn.tasks.images import ImageCompletion
from etdyn.transformer import EnergyTransformer

__all__ = ["load_model", "load_official_checkpoint", "read_record", "save_model"]


def save_model(
    model: ImageCompletion, path: str | os.PathLike[str], notes: dict[str, Any] | None = None
) -> None:
    """Write `path`.safetensors and `path`.json (configuration, notes, checksum).

    Raises:
        ValueError: the model's system cannot be described, as only an `EnergyTransformer` can.
    """
    tensors = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    data = serialise(tensors)
    record = {"model": model.config, "sha256": hashlib.sha256(data).hexdigest(), **(notes or {})}
    record_file, tensor_file = _files(path)
    write_atomically(tensor_file, data)
    write_atomically(record_file, json.dumps(record, indent=1) + "\n")


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was noted of a saved model: its JSON less the architecture and the checksum."""
    record = _read_json(_files(path)[0])
    return {k: v for k, v in record.items() if k not in ("model", "sha256")}


def load_model(path: str | os.PathLike[str]) -> ImageCompletion:
    """Read what `save_model` wrote, in the stored dtype, on the CPU, in evaluation mode.

    Args:
        path: with or without a suffix; both files must be there.

    Raises:
        ValueError: a file is missing, truncated, foreign, or does not match its checksum.
    """
    record_file, tensor_file = _files(path)
    record = _read_json(record_file)
    data = _read(tensor_file)
    if not isinstance(record, dict) or "model" not in record or "sha256" not in record:
        raise bad("path", "a configuration with fields model and sha256", record_file)
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise bad("path", f"a file with the checksum that {record_file.name} names", tensor_file)
    tensors = _parse(data, tensor_file)
    try:
        model = ImageCompletion.from_config(record["model"])
        model.to(tensors["pixel_mean"].dtype).load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise bad("path", "a model and its configuration", f"{record_file} ({error})") from error
    return model.eval()


def save_tensors(tensors: dict[str, Tensor], path: Path, record: dict[str, Any]) -> None:
    """Write tensors and a JSON record into one safetensors file, atomically."""
    plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    write_atomically(path, serialise(plain, {"record": json.dumps(record)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; the record is empty where there is none.

    Raises:
        ValueError: the file is missing, truncated or no safetensors file.
    """
    data = _read(path)
    tensors = _parse(data, path)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return tensors, json.loads(header.get("__metadata__", {}).get("record", "{}"))


_OFFICIAL = {
    "encoder.weight": "Wenc", "encoder.bias": "Benc", "decoder.weight": "Wdec",
    "decoder.bias": "Bdec", "cls_token": "CLS_token", "mask_token": "MASK_token",
    "positions": "POS_embed",
}  # fmt: skip


def load_official_checkpoint(
    path: str | os.PathLike[str], channels: int = 3, dynamics: str = "et"
) -> ImageCompletion:
    """Read the npz of the released ImageNet model (energy-transformer-jax).

    The patch follows from the encoder's shape, the (square) image from the number of positions.
    As in the official code: 12 steps of 0.1, eps 1e-5, self-attention on, beta 1/sqrt(head_dim),
    and the final layer norm applied twice. Pixels must come normalised as the model was trained
    (ImageNet mean and deviation), which `pixel_mean` and `pixel_std` of the result can do.

    Args:
        path: an npz file with Wk, Wq, Xi, LNORM_gamma, LNORM_bias, Wenc, Benc, Wdec, Bdec,
            CLS_token, MASK_token, POS_embed, of one floating dtype.
        channels: of the images.
        dynamics: of the system.

    Raises:
        ValueError, TypeError: a truncated or foreign file, a missing array, a wrong shape.
    """
    arrays = _read_npz(Path(path))
    needed = {"Wk", "Wq", "Xi", "LNORM_gamma", "LNORM_bias", *_OFFICIAL.values()}
    missing = sorted(needed - arrays.keys())
    if missing:
        raise bad("path", f"arrays {sorted(needed)}", f"{path} without {missing}")
    block = {k: arrays[k] for k in ("Wk", "Wq", "Xi")}
    block |= {"gamma": arrays["LNORM_gamma"], "delta": arrays["LNORM_bias"]}
    system = EnergyTransformer.from_official(block, self_attention=True, dynamics=dynamics)
    patch = math.isqrt(arrays["Wenc"].shape[0] // channels) if arrays["Wenc"].ndim else 0
    side = math.isqrt(max(len(arrays["POS_embed"]) - 1, 0)) if arrays["POS_embed"].ndim else 0
    if patch == 0 or side == 0 or channels * patch * patch != arrays["Wenc"].shape[0]:
        raise bad("Wenc", f"channels ({channels}) x patch x patch rows", arrays["Wenc"].shape)
    model = ImageCompletion(system, (channels, side * patch, side * patch), patch, norm_twice=True)
    with torch.no_grad():
        for name, official in _OFFICIAL.items():
            target = model.get_parameter(name)
            value = torch.from_numpy(arrays[official])
            value = value.T if name.endswith("weight") else value
            if value.shape != target.shape:
                raise bad(official, f"shape {tuple(target.shape)}", tuple(value.shape))
            if value.dtype != target.dtype or not bool(torch.isfinite(value).all()):
                raise bad(official, f"finite values of dtype {target.dtype}", value.dtype)
            target.copy_(value)
    return model.eval()


def _files(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The JSON and the safetensors file of a model named with or without a suffix."""
    base = os.fspath(path).removesuffix(".safetensors").removesuffix(".json")
    return Path(base + ".json"), Path(base + ".safetensors")


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise bad("path", "an existing file", path)
    return path.read_bytes()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise bad("path", "a JSON file", f"{path} ({error})") from error


def _parse(data: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return parse_tensors(data)
    except SafetensorError as error:
        raise bad("path", "a complete safetensors file", f"{path} ({error})") from error


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    _read(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # numpy, zipfile and zlib each have their own
        raise bad("path", "a complete npz file", f"{path} ({error})") from error
