"""What a reconstruction must beat: predictors of hidden patches without a network."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gaussian_completion", "mean_completion"]


def mean_completion(train: Tensor, patches: Tensor) -> Tensor:
    """The training mean of every position.

    Args:
        train, patches: `(n, patches, pixels)` in normalised pixels.

    Returns:
        Predictions of the shape of `patches`.
    """
    return train.mean(0).expand_as(patches)


def gaussian_completion(
    train: Tensor, patches: Tensor, replaced: Tensor, ridge: float = 1e-2
) -> Tensor:
    """The conditional mean of hidden pixels given the visible ones, for Gaussian pixels.

        E[h | o] = mu_h + C_ho C_oo^-1 (o - mu_o),   C = cov(train) + ridge I

    The best linear predictor, and what a model of second moments can reach.

    Args:
        train: `(n, patches, pixels)` in normalised pixels, from which mu and C are taken.
        patches: `(m, patches, pixels)`, to complete.
        replaced: bool `(m, patches)`, True where hidden.
        ridge: added to the covariance's diagonal, in units of the pixel variance.

    Returns:
        Predictions `(m, patches, pixels)` in float64; visible patches are returned as given.
    """
    flat = train.flatten(1).double()
    mean, eye = flat.mean(0), torch.eye(flat.shape[1], dtype=torch.float64)
    covariance = torch.cov(flat.T) + ridge * eye
    result = patches.flatten(1).double().clone()
    hidden = replaced.unsqueeze(-1).expand_as(patches).flatten(1)
    for row, hide in zip(result, hidden, strict=True):
        seen = covariance[~hide][:, ~hide]
        row[hide] = mean[hide] + covariance[hide][:, ~hide] @ torch.linalg.solve(
            seen, row[~hide] - mean[~hide]
        )
    return result.reshape(patches.shape)
