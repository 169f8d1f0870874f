"""Verified schedules: their cost, and their figures on all photos and on each half of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tntprune.methods import Config, to_dict
from tntprune.search.budget import said


@dataclass(frozen=True)
class Point:
    """One verified schedule.

    Args:
        name: "chosen", the name of a simple schedule, or "".
        config: The schedule.
        macs: Multiply-accumulates per image.
        seconds: Per batch, by the latency curve; None without one.
        timed: Whether the budget is of time, and not of MACs.
        searched: Its figures on the photos that the search used; see `Answers.figures`.
        held_out: On the other half of the photos.
        overall: On all photos. The choice is made by these.
    """

    name: str
    config: Config
    macs: int
    seconds: float | None
    timed: bool
    searched: dict[str, float]
    held_out: dict[str, float]
    overall: dict[str, float]

    @property
    def cost(self) -> float:
        """The cost, in the unit of the budget."""
        return self.seconds if self.timed and self.seconds is not None else float(self.macs)

    @property
    def distance(self) -> float:
        """The divergence from the unpruned model on all photos."""
        return distance(self.overall)

    @property
    def lost(self) -> float:
        """The loss on all photos in points: of top-1, of agreement without labels, of cosine without classes."""
        return self.overall["lost"]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "name": self.name, "macs": self.macs, "seconds": self.seconds, "config": to_dict(self.config),
            "searched": self.searched, "held_out": self.held_out, "all": self.overall,
        }  # fmt: skip


def distance(figures: dict[str, float]) -> float:
    """Return the divergence among figures: KL, or 1 - cosine."""
    return figures["kl"] if "kl" in figures else 1 - figures["cosine"]


def lost_what(figures: dict[str, float]) -> str:
    """Name what a loss in points is of."""
    return "top-1" if "top1" in figures else "agreement" if "agreement" in figures else "cosine similarity"


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in cost and divergence, the cheapest first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.cost, one.distance)):
        if not found or point.distance < found[-1].distance:
            found.append(point)
    return found


def proxy_error(points: Sequence[Point]) -> dict[str, float]:
    """Compare the two halves of the photos.

    Returns:
        `schedules`, how many were compared; `kl_difference`, the mean absolute difference between their divergence on
        the searched and on the held-out photos, in percent of the latter; `kl_rank` and `lost_rank`, the rank
        correlation of the searched divergence with the held-out one and with the held-out loss.
    """
    seen = [distance(point.searched) for point in points]
    truth = [distance(point.held_out) for point in points]
    gaps = [abs(a - b) / b for a, b in zip(seen, truth, strict=True) if b > 0]
    return {
        "schedules": len(points),
        "kl_difference": 100 * sum(gaps) / max(1, len(gaps)),
        "kl_rank": rank_correlation(seen, truth),
        "lost_rank": rank_correlation(seen, [point.held_out["lost"] for point in points]),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, from -1 to 1; 0 where one of them has no order."""
    ranks = torch.stack([_ranks(a), _ranks(b)])
    if len(a) < 2 or bool((ranks.std(1) == 0).any()):
        return 0.0
    return float(ranks.corrcoef()[0, 1])


def _ranks(values: Sequence[float]) -> torch.Tensor:
    """The rank (n,) of each, equal ones in the middle of theirs."""
    given = torch.tensor(values, dtype=torch.float64)
    return (given[:, None] > given).sum(1) + ((given[:, None] == given).sum(1) - 1) / 2.0


def points_table(points: Sequence[Point]) -> str:
    """Format points as a table, by their figures on all photos."""
    timed, some = any(point.seconds is not None for point in points), points[0].overall
    head = f"{'':22} {'MACs':>13}" + f" {'time':>9}" * timed
    head += f" {'KL':>8} {'agrees':>7}" if "kl" in some else f" {'cosine':>8}"
    head += f" {'top-1 lost':>10}" * ("top1" in some)
    lines = [head + "  patch tokens left (block:tokens)"]
    for point in points:
        line = f"{point.name:22} {said(point.macs, False):>13}"
        if timed:
            line += f" {said(point.seconds, True) if point.seconds is not None else '':>9}"
        known = point.overall
        line += f" {known['kl']:8.3g} {known['agreement']:5.1f} %" if "kl" in known else f" {known['cosine']:8.4f}"
        if "top1" in known:
            line += f" {point.lost:10.2f}"
        lines.append(f"{line}  {told(point.config)}")
    return "\n".join(lines)


def kept(config: Config) -> str:
    """Say how many patch tokens a config keeps, and where."""
    where = "inside" if config.is_inside else "after"
    (at, tokens), *rest = zip(config.locations, config.amounts, strict=True)
    steps = [f"{tokens} patch tokens {where} block {at}", *(f"{tokens} {where} block {at}" for at, tokens in rest)]
    similar = getattr(config, "similar", 0)
    start = f"{similar} similar tokens are removed at the start; " if similar else ""
    return f"{start}{config.method} keeps {', '.join(steps)}"


def told(config: Config) -> str:
    """Format where a config removes tokens and how many are left, as block:tokens."""
    pairs = " ".join(f"{at}:{tokens}" for at, tokens in zip(config.locations, config.amounts, strict=True))
    similar = getattr(config, "similar", 0)
    return f"{pairs} similar={similar}" if similar else pairs
