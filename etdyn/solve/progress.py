"""A progress bar in flow time."""

from __future__ import annotations

from typing import Self

from torch import Tensor
from tqdm import tqdm

__all__ = ["TimeBar"]


class TimeBar:
    """Shows how far a solve has come.

    Args:
        show: whether; a string is the bar's label.
        times: of the solve, `(time,)`.
    """

    def __init__(self, show: bool | str, times: Tensor) -> None:
        self.start, self.end = float(times[0]), float(times[-1])
        self.bar = tqdm(
            total=self.end - self.start,
            desc=show if isinstance(show, str) else "solve",
            disable=not show,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| t = {n:.3g} of {total:.3g} [{elapsed}]",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def reach(self, t: float) -> None:
        """Move to flow time t."""
        if not self.bar.disable:
            self.bar.update(max(0.0, min(t, self.end) - self.start - self.bar.n))
