"""Couplings: forces that need not come from an energy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from etdyn.checks import bad
from etdyn.interactions import Interaction

__all__ = ["Coupling", "LinearCoupling"]


class Coupling(Interaction):
    """A force without an energy. Systems made of one have no energy, dissipation or slope."""

    name = "coupling"


class LinearCoupling(Coupling):
    """Tokens that pull on each other in proportion: force_i = sum_j J_ij g_j.

    J_ij is the influence of j on i (S section 0). A symmetric J has the energy
    -1/2 sum J_ij g_i.g_j, which `etdyn.problems.QuadraticEnergy` offers; here nothing is assumed
    about J, so flows may turn, oscillate and be chaotic (S-B24).

    Args:
        couplings: J, floating `(token, token)`, finite; the parameter `couplings`.

    Raises:
        ValueError: not a finite square matrix.
    """

    name = "linear_coupling"

    def __init__(self, couplings: Tensor) -> None:
        super().__init__()
        if couplings.ndim != 2 or couplings.shape[0] != couplings.shape[1]:
            raise bad("couplings", "shape (token, token)", f"shape {tuple(couplings.shape)}")
        if not bool(torch.isfinite(couplings).all()):
            raise bad("couplings", "finite values", "NaN or infinity")
        self.couplings = nn.Parameter(couplings.detach().clone())

    def force(self, g: Tensor) -> Tensor:
        """J g."""
        if g.shape[1] != len(self.couplings):
            raise bad("g", f"{len(self.couplings)} tokens", f"shape {tuple(g.shape)}")
        j = self.couplings if self._keys is None else self.couplings * self._keys
        return self.keep(j @ self.keep(g))

    def force_jvp(self, g: Tensor, u: Tensor) -> Tensor:
        """J u."""
        return self.force(u)
