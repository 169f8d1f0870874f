"""Ridge regression from sums over rows, whose strength is chosen by cross-validation over images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

FOLDS = 5
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, float("inf"))  # in mean eigenvalues; inf leaves the bias


@dataclass(frozen=True)
class Fit:
    """A linear map and what it explains.

    Args:
        weight: (d, D) in fp64.
        bias: (D,) in fp64.
        strength: Of the penalty, one of `STRENGTHS`.
        explained: Share of the squared residual that it takes away from images it was not fitted on.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    strength: float
    explained: float


class Ridge:
    """min_W,b sum_i w_i |r_i - W^T a_i - b|^2 + strength * mean eigenvalue * |W|^2, by its normal equations.

    The sums are kept for each fold of images, so that one pass gives the solution and its cross-validation.

    Args:
        width: d, of the features.
        out: D, of the residuals.
        device: Where the sums are kept.
    """

    def __init__(self, width: int, out: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.products = zeros(FOLDS, width + 1, width + 1)  # of features and 1
        self.targets = zeros(FOLDS, width + 1, out)
        self.squares = zeros(FOLDS)

    def add(self, features: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, first: int) -> None:
        """Add the rows of some images.

        Args:
            features: (B, n, d).
            residual: (B, n, D), what is to be predicted.
            weight: (B, n), at least 0.
            first: The number of the first image; image i belongs to fold i % FOLDS.
        """
        for fold in range(FOLDS):
            own = slice((fold - first) % FOLDS, None, FOLDS)
            a, r, w = (part[own].flatten(0, 1).double() for part in (features, residual, weight[:, :, None]))
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)  # (rows, d + 1)
            self.products[fold] += a.T @ (a * w)
            self.targets[fold] += a.T @ (r * w)
            self.squares[fold] += (r * r * w).sum()

    def solve(self) -> Fit | None:
        """Fit to all images with the strength that predicts left-out folds best; None if no change at all does so."""
        lost = dict.fromkeys(STRENGTHS, 0.0)
        products, targets, whole = self.products.sum(0), self.targets.sum(0), float(self.squares.sum())
        for fold in range(FOLDS):
            own, of, rest = self.products[fold], self.targets[fold], products - self.products[fold]
            parts = _eigen(rest, targets - of)
            for strength in STRENGTHS:
                both = torch.cat(_solution(parts, strength))  # (d + 1, D)
                gained = 2 * (both * of).sum() - (both * (own @ both)).sum()
                lost[strength] += float(self.squares[fold] - gained)
        best = min(STRENGTHS, key=lambda strength: lost[strength])
        if not lost[best] < whole:
            return None
        weight, bias = _solution(_eigen(products, targets), best)
        return Fit(weight, bias[0], best, 1 - lost[best] / whole)


def _eigen(products: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return eigenvalues (d,) and vectors (d, d) of the centred features' products, the centred targets in the basis of
    these (d, D), and the means of features (d,) and targets (D,).
    """
    total = products[-1, -1].clamp(min=1e-300)
    mean, target = products[-1, :-1] / total, targets[-1] / total
    values, vectors = torch.linalg.eigh(products[:-1, :-1] - total * torch.outer(mean, mean))
    return values.clamp(min=0), vectors, vectors.T @ (targets[:-1] - total * torch.outer(mean, target)), mean, target


def _solution(parts: tuple[torch.Tensor, ...], strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight (d, D) and the bias (1, D); the bias is not penalised."""
    values, vectors, rotated, mean, target = parts
    damped = values + max(strength, 1e-12) * values.mean().clamp(min=1e-300)
    weight = vectors @ (rotated / damped[:, None])
    return weight, (target - mean @ weight)[None]
