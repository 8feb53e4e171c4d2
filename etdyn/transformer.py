"""The Energy Transformer block, and its weights as the official implementation stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from etdyn.checks import bad, check_positive
from etdyn.energies import Attention, Hopfield
from etdyn.lagrangians import LayerNorm
from etdyn.systems import System

__all__ = ["EnergyTransformer"]


class EnergyTransformer(System):
    """The Energy Transformer block: layer norm, energy attention and a Hopfield network.

    Weights start at a standard deviation of 1/sqrt(dim), drawn from torch's global generator.

    Args:
        dim: features of a token.
        heads, head_dim: of the attention.
        memories: of the Hopfield network.
        dynamics: "et", "leaky" or "sphere".
        self_attention: whether a token attends to itself; the paper says no, the released
            weights were trained with yes.
        hopfield: "relu" (published), "power" or "softmax".
        power: exponent of hopfield="power".
        beta: of the attention; None is 1/sqrt(head_dim).
        hopfield_beta: of hopfield="softmax".
        eps: of the layer norm.

    Source: Hoover et al. 2023, arXiv 2302.07253; ET section 1.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        memories: int,
        dynamics: str = "et",
        *,
        self_attention: bool = False,
        hopfield: str = "relu",
        power: int = 3,
        beta: float | None = None,
        hopfield_beta: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        attention = Attention(dim, heads, head_dim, beta, self_attention)
        network = Hopfield(dim, memories, hopfield, power, hopfield_beta)
        super().__init__(LayerNorm(dim, eps), attention + network, dynamics)

    lagrangian: LayerNorm
    attention: Attention
    hopfield: Hopfield

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that rebuild this system, as JSON can hold them."""
        heads, head_dim, dim = self.attention.query.shape
        return {
            "dim": dim,
            "heads": heads,
            "head_dim": head_dim,
            "memories": self.hopfield.memories.shape[0],
            "dynamics": self.dynamics,
            "self_attention": self.attention.self_attention,
            "hopfield": self.hopfield.kind,
            "power": self.hopfield.power,
            "beta": self.attention.beta,
            "hopfield_beta": self.hopfield.beta,
            "eps": self.lagrangian.eps,
        }

    @classmethod
    def from_official(
        cls,
        arrays: Mapping[str, Any],
        *,
        self_attention: bool = True,
        dynamics: str = "et",
        beta: float | None = None,
        eps: float = 1e-5,
    ) -> Self:
        """Build from arrays in the layout of the official implementation, in their dtype.

        Args:
            arrays: `Wq`, `Wk` (heads, head_dim, dim), `Xi` (dim, memories), `gamma` scalar
                > 0, `delta` (dim,); numpy arrays or tensors of one floating dtype.
            self_attention: True for the released weights.
            dynamics, beta, eps: as in the class.

        Raises:
            ValueError, TypeError: a missing array, a wrong shape or mixed dtypes, NaN,
                gamma <= 0.
        """
        tensors = {name: _official(arrays, name) for name in ("Wq", "Wk", "Xi", "gamma", "delta")}
        dtypes = {t.dtype for t in tensors.values()}
        if len(dtypes) != 1:
            raise TypeError(f"arrays: expected one floating dtype, got {sorted(map(str, dtypes))}")
        if tensors["Wq"].ndim != 3:
            raise bad("Wq", "shape (heads, head_dim, dim)", f"shape {tuple(tensors['Wq'].shape)}")
        heads, head_dim, dim = tensors["Wq"].shape
        memories = tensors["Xi"].shape[-1] if tensors["Xi"].ndim else 0
        for name, shape in {
            "Wk": (heads, head_dim, dim), "Xi": (dim, memories), "gamma": (), "delta": (dim,),
        }.items():  # fmt: skip
            if tuple(tensors[name].shape) != shape:
                raise bad(name, f"shape {shape}", f"shape {tuple(tensors[name].shape)}")
        check_positive("beta", 1.0 if beta is None else beta)
        system = cls(
            dim, heads, head_dim, memories, dynamics,
            self_attention=self_attention, beta=beta, eps=eps,
        ).to(dtypes.pop())  # fmt: skip
        with torch.no_grad():
            system.attention.query.copy_(tensors["Wq"])
            system.attention.key.copy_(tensors["Wk"])
            system.hopfield.memories.copy_(tensors["Xi"].T)
            system.lagrangian.delta.copy_(tensors["delta"])
            system.lagrangian.set_gamma(float(tensors["gamma"]))
        return system


def _official(arrays: Mapping[str, Any], name: str) -> Tensor:
    if name not in arrays:
        raise bad("arrays", f"an array {name!r}", f"only {sorted(arrays)}")
    value = arrays[name]
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
    if not bool(torch.isfinite(tensor).all()):
        raise bad(name, "finite values", "NaN or infinity")
    return tensor
