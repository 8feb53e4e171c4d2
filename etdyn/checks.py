"""Refusing wrong input: every message names the argument, what was expected and what came."""

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "bad",
    "check_choice",
    "check_count",
    "check_finite",
    "check_positive",
    "check_rows",
    "check_state",
    "check_tensor",
]


def bad(name: str, expected: str, got: object) -> ValueError:
    """The one form of a `ValueError` in etdyn."""
    return ValueError(f"{name}: expected {expected}, got {got}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise bad(name, "one of " + ", ".join(repr(c) for c in choices), repr(value))


def check_positive(name: str, value: float, zero: bool = False) -> None:
    """Raise unless `value` is a finite real number above zero (or zero, where `zero`)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise bad(name, "a finite number " + (">= 0" if zero else "> 0"), value)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if value < least:
        raise bad(name, f"an integer >= {least}", value)


def check_rows(name: str, rows: Tensor | Sequence[int], count: int) -> Tensor:
    """Indices `(row,)` as they are, or of a sequence of integers as int64.

    Raise unless they are integers, no mask, from 0 to `count` - 1, and at least one.
    """
    found = torch.as_tensor(rows)
    if found.dtype not in (torch.int32, torch.int64) and found.numel():
        raise TypeError(f"{name}: expected integers, got {found.dtype}")
    if found.ndim != 1 or not found.numel():
        raise bad(name, "one or more in a row", f"shape {tuple(found.shape)}")
    if not 0 <= int(found.min()) <= int(found.max()) < count:
        raise bad(
            name, f"indices from 0 to {count - 1}", f"{int(found.min())} to {int(found.max())}"
        )
    return found


def check_tensor(name: str, x: object, shape: tuple[int | None, ...], like: Tensor) -> None:
    """Raise unless `x` has this shape (None: any) and the dtype and device of `like`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    fits = x.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise bad(name, f"shape ({wanted})", f"shape {tuple(x.shape)}")
    if x.dtype != like.dtype:
        raise TypeError(f"{name}: expected dtype {like.dtype}, got {x.dtype}")
    if x.device != like.device:
        raise bad(name, f"device {like.device}", f"device {x.device}")


def check_state(name: str, x: object, dim: int, like: Tensor) -> None:
    """Raise unless `x` is a state `(batch, token, dim)` with the dtype and device of `like`."""
    check_tensor(name, x, (None, None, dim), like)
    if isinstance(x, Tensor) and x.numel() == 0:
        raise bad(name, "at least one sample and one token", f"shape {tuple(x.shape)}")


def check_finite(name: str, x: Tensor) -> None:
    """Raise `ValueError` where `x` holds NaN or infinity, naming the first sample."""
    finite = torch.isfinite(x).flatten(1).all(1)
    if not bool(finite.all()):
        sample = int((~finite).nonzero()[0])
        raise bad(name, "finite values", f"NaN or infinity in sample {sample}")
