"""Verified schedules: their cost, and their figures on all photos and on each half of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tntprune.methods import Config, to_dict
from tntprune.search.budget import said


@dataclass(frozen=True)
class Verified:
    """One verified schedule.

    Args:
        name: "chosen", the name of a simple schedule, or "".
        config: The schedule.
        macs: Multiply-accumulates per image.
        seconds: Per batch, measured or by the latency curve; None where the budget is not of time.
        searched: Its figures on the photos that the search used; see `Answers.figures`.
        held_out: On the other half of the photos.
        overall: On all photos. The choice is made by these.
    """

    name: str
    config: Config
    macs: int
    seconds: float | None
    searched: dict[str, float]
    held_out: dict[str, float]
    overall: dict[str, float]

    @property
    def cost(self) -> float:
        """The cost, in the unit of the budget."""
        return float(self.macs) if self.seconds is None else self.seconds

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


def front(schedules: Sequence[Verified]) -> list[Verified]:
    """Return those that no other beats in cost and divergence, the cheapest first."""
    found: list[Verified] = []
    for one in sorted(schedules, key=lambda one: (one.cost, one.distance)):
        if not found or one.distance < found[-1].distance:
            found.append(one)
    return found


def proxy_error(schedules: Sequence[Verified]) -> dict[str, float]:
    """Compare the two halves of the photos.

    Returns:
        `schedules`, how many were compared; `kl_difference`, the mean absolute difference between their divergence on
        the searched and on the held-out photos, in percent of the latter; `kl_rank` and `lost_rank`, the rank
        correlation of the searched divergence with the held-out one and with the held-out loss.
    """
    seen = [distance(one.searched) for one in schedules]
    truth = [distance(one.held_out) for one in schedules]
    gaps = [abs(a - b) / b for a, b in zip(seen, truth, strict=True) if b > 0]
    return {
        "schedules": len(schedules),
        "kl_difference": 100 * sum(gaps) / max(1, len(gaps)),
        "kl_rank": rank_correlation(seen, truth),
        "lost_rank": rank_correlation(seen, [one.held_out["lost"] for one in schedules]),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, from -1 to 1; 0 where one of them has no order."""
    given = torch.tensor([a, b], dtype=torch.float64)[:, :, None]  # (2, n, 1)
    above, equal = given > given.mT, given == given.mT
    ranks = above.sum(2) + (equal.sum(2) - 1) / 2.0  # equal ones are in the middle of theirs
    if len(a) < 2 or bool((ranks.std(1) == 0).any()):
        return 0.0
    return float(ranks.corrcoef()[0, 1])


def verified_table(schedules: Sequence[Verified]) -> str:
    """Format schedules as a table, by their figures on all photos."""
    timed, some = any(one.seconds is not None for one in schedules), schedules[0].overall
    head = f"{'':22} {'MACs':>13}" + f" {'time':>9}" * timed
    head += f" {'KL':>8} {'agrees':>7}" if "kl" in some else f" {'cosine':>8}"
    head += f" {'top-1 lost':>10}" * ("top1" in some)
    lines = [head + "  patch tokens left (block:tokens)"]
    for one in schedules:
        line, known = f"{one.name:22} {said(one.macs, False):>13}", one.overall
        line += f" {said(one.seconds, True):>9}" if one.seconds is not None else ""
        line += f" {known['kl']:8.3g} {known['agreement']:5.1f} %" if "kl" in known else f" {known['cosine']:8.4f}"
        line += f" {one.lost:10.2f}" if "top1" in known else ""
        pairs = [f"{at}:{tokens}" for at, tokens in zip(one.config.locations, one.config.amounts, strict=True)]
        similar = getattr(one.config, "similar", 0)
        lines.append(f"{line}  {' '.join(pairs)}" + (f" similar={similar}" if similar else ""))
    return "\n".join(lines)


def kept(config: Config) -> str:
    """Say how many patch tokens a config keeps, and where."""
    where = "inside" if config.is_inside else "after"
    (at, tokens), *rest = zip(config.locations, config.amounts, strict=True)
    steps = [f"{tokens} patch tokens {where} block {at}", *(f"{tokens} {where} block {at}" for at, tokens in rest)]
    similar = getattr(config, "similar", 0)
    start = f"{similar} similar tokens are removed at the start; " if similar else ""
    return f"{start}{config.method} keeps {', '.join(steps)}"
