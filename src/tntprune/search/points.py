"""What was verified: schedules with their cost and their answers on photos that were not searched on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tntprune.config import Config, to_dict
from tntprune.search.budget import said


@dataclass(frozen=True)
class Point:
    """One schedule.

    Args:
        name: "chosen", that of a reference, or "" for another one.
        config: What it is.
        macs: Multiply-accumulates of one image.
        seconds: For one batch, by the latency curve; None without one.
        timed: Whether the budget is of time, and not of MACs.
        searched: `kl`, `agreement`, and with labels `top1` and `top1_drop`, on the photos that were searched on.
        held_out: The same on those that were not.
    """

    name: str
    config: Config
    macs: int
    seconds: float | None
    timed: bool
    searched: dict[str, float]
    held_out: dict[str, float]

    @property
    def cost(self) -> float:
        """In what the budget is of."""
        return self.seconds if self.timed and self.seconds is not None else float(self.macs)

    @property
    def kl(self) -> float:
        """Divergence from the unpruned model on the held-out photos."""
        return self.held_out["kl"]

    @property
    def lost(self) -> float:
        """Points of top-1 that are lost on the held-out photos; of agreement where there are no labels."""
        return self.held_out.get("top1_drop", 100 - self.held_out["agreement"])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name, "macs": self.macs, "seconds": self.seconds, "config": to_dict(self.config),
            "searched": self.searched, "held_out": self.held_out,
        }  # fmt: skip


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in cost and divergence, the cheapest first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.cost, one.kl)):
        if not found or point.kl < found[-1].kl:
            found.append(point)
    return found


def proxy_error(points: Sequence[Point]) -> dict[str, float]:
    """How far what was searched by is from what was verified.

    Returns:
        `schedules`, how many were compared; `kl_difference`, the mean absolute difference between their divergence on
        the searched and on the held-out photos, in percent of the latter; `kl_rank` and `lost_rank`, the rank
        correlation of the searched divergence with the held-out one and with the points lost.
    """
    seen = [point.searched["kl"] for point in points]
    truth = [point.kl for point in points]
    gaps = [abs(a - b) / b for a, b in zip(seen, truth, strict=True) if b > 0]
    return {
        "schedules": len(points),
        "kl_difference": 100 * sum(gaps) / max(1, len(gaps)),
        "kl_rank": rank_correlation(seen, truth),
        "lost_rank": rank_correlation(seen, [point.lost for point in points]),
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
    """The points for a person."""
    timed, labelled = any(point.seconds is not None for point in points), "top1_drop" in points[0].held_out
    head = f"{'':22} {'MACs':>13}" + f" {'time':>9}" * timed + f" {'KL':>8} {'agrees':>7}"
    head += f" {'top-1 lost':>10}" * labelled
    lines = [head + "  patch tokens left (block:tokens)"]
    for point in points:
        line = f"{point.name:22} {said(point.macs, False):>13}"
        if timed:
            line += f" {said(point.seconds, True) if point.seconds is not None else '':>9}"
        line += f" {point.kl:8.3g} {point.held_out['agreement']:5.1f} %"
        if labelled:
            line += f" {point.lost:10.2f}"
        lines.append(f"{line}  {told(point.config)}")
    return "\n".join(lines)


def told(config: Config) -> str:
    """Where a config removes tokens, and how many are left."""
    pairs = " ".join(f"{at}:{tokens}" for at, tokens in zip(config.locations, config.amounts, strict=True))
    similar = getattr(config, "similar", 0)
    return f"{pairs} similar={similar}" if similar else pairs
