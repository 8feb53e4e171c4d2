"""What every variable of a result carries: its dims, values, units and name."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["flags", "labelled"]


def labelled(dims: str | tuple[str, ...], values: npt.ArrayLike, long_name: str) -> Any:
    """A dimensionless variable, as `xarray.Dataset` takes it."""
    return dims, np.asarray(values), {"units": "1", "long_name": long_name}


def flags(dims: str | tuple[str, ...], values: npt.ArrayLike, kinds: type[IntEnum]) -> Any:
    """A variable of statuses, int8, with the meaning of every value."""
    return (
        dims,
        np.asarray(values, np.int8),
        {
            "units": "1",
            "long_name": "how it ended",
            "flag_values": [int(k) for k in kinds],
            "flag_meanings": " ".join(k.name for k in kinds),
        },
    )
