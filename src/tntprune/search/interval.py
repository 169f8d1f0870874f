"""95 % confidence intervals of what a schedule loses."""

from __future__ import annotations

import math

import torch

Z = 1.96  # standard deviations on either side that hold 95 % of a normal distribution


def wilson(hits: float, count: int) -> tuple[float, float]:
    """Compute Wilson's interval of a proportion, `hits` of `count`: two shares from 0 to 1."""
    middle = (hits + Z * Z / 2) / (count + Z * Z)
    half = Z / (count + Z * Z) * math.sqrt(hits * (count - hits) / count + Z * Z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def of_difference(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """Compute Newcombe's interval of the difference of two proportions that were measured on the same photos.

    It combines Wilson's intervals of both (Newcombe 1998, method 10), so that it holds for few photos and for a model
    that is right on all of them, where it is Wilson's.

    Args:
        before: (n,), 1 where the unpruned model is right, else 0.
        after: (n,), the same for the reduced model.

    Returns:
        The interval of mean(before) - mean(after), from -1 to 1.
    """
    a, b, count = before.double(), after.double(), len(before)
    p, q = float(a.mean()), float(b.mean())
    (p_low, p_high), (q_low, q_high) = wilson(p * count, count), wilson(q * count, count)
    together, spread = float((a * b).mean()) - p * q, math.sqrt(p * (1 - p) * q * (1 - q))
    if together > 0:
        together = max(0.0, together - 0.5 / count)  # Newcombe's correction for continuity
    phi = together / spread if spread > 0 else 0.0

    def reach(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    low, high = p - q - reach(p - p_low, q_high - q), p - q + reach(p_high - p, q - q_low)
    return max(low, p - 1), min(high, p)  # no more can be won back than the unpruned model gets wrong, nor lost


def of_mean(values: torch.Tensor) -> tuple[float, float]:
    """Compute the normal interval of the mean of values (n,) that are at least 0."""
    mean = float(values.double().mean())
    half = Z * float(values.double().std()) / len(values) ** 0.5 if len(values) > 1 else math.inf
    return max(0.0, mean - half), mean + half


def least_photos(points: float) -> int:
    """Count the photos with which a loss of `points` can be told from none: Wilson's interval of no loss ends there."""
    return math.ceil(Z * Z * (100 / points - 1))
