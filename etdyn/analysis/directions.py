"""Where tokens point: their activations without what all of them share, at unit length."""

from torch import Tensor
from torch.nn.functional import normalize

from etdyn.lagrangians import Lagrangian

__all__ = ["directions"]


def directions(lagrangian: Lagrangian, x: Tensor) -> Tensor:
    """Unit vectors of the odd part (g(x) - g(-x)) / 2 of the activation, shape of x.

    LayerNorm: of g - delta, which is x without its mean; spins: of g itself. Zero, or NaN for
    LayerNorm with eps = 0, where a token has no direction.
    """
    return normalize(lagrangian.activation(x) - lagrangian.activation(-x), dim=-1)
