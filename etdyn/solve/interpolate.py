"""A Solution between its saved times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etdyn.checks import bad
from etdyn.solve.solution import Solution

__all__ = ["Interpolant"]


class Interpolant:
    """Cubic Hermite interpolation of a trajectory, from its states and their velocities.

    Fourth order in the spacing of the saved times. Building it costs one evaluation a saved time.

    Args:
        solution: with at least two saved times.
    """

    @torch.no_grad()
    def __init__(self, solution: Solution) -> None:
        if len(solution.t) < 2:
            raise bad("solution", "at least two saved times", len(solution.t))
        self.t, self.x = solution.t.cpu().numpy(), solution.x.detach()
        self.v = torch.stack([solution.system.velocity(0.0, x) for x in self.x])

    def __call__(self, t: float | npt.ArrayLike) -> Tensor:
        """The states at time t, `(batch, token, feature)`.

        Args:
            t: one time for all samples, or `(batch,)`, one for each.

        Raises:
            ValueError: a time outside the solution's.
        """
        at = np.broadcast_to(np.asarray(t, dtype=np.float64), (self.x.shape[1],))
        if at.min() < self.t[0] or at.max() > self.t[-1]:
            raise bad("t", f"times in [{self.t[0]:g}, {self.t[-1]:g}]", f"{at.min()} to {at.max()}")
        left = np.clip(np.searchsorted(self.t, at, side="right") - 1, 0, len(self.t) - 2)
        width = self.t[left + 1] - self.t[left]

        def column(values: npt.NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(values).to(self.x)[:, None, None]

        s, h = column((at - self.t[left]) / width), column(width)
        i, sample = torch.from_numpy(left), torch.arange(len(at))
        blend = s * s * (3 - 2 * s)
        ends = (1 - blend) * self.x[i, sample] + blend * self.x[i + 1, sample]
        rise, fall = s * (1 - s) ** 2, s * s * (1 - s)
        return ends + h * (rise * self.v[i, sample] - fall * self.v[i + 1, sample])
