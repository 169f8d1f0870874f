"""What a search gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tntprune.plan import Plan
from tntprune.search.budget import Budget, said
from tntprune.search.latency import LatencyCurve
from tntprune.search.points import Point, points_table, told


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        plan: To be written, and put on the model.
        chosen: The schedule in it.
        front: What nothing else that was verified beats, the cheapest first.
        references: Schedules that need no search, at the same cost.
        others: Everything else that was verified.
        budget: What was asked for.
        whole: What the unpruned model costs, in MACs or seconds.
        proxy: See `points.proxy_error`.
        photos: Searched on, and held out.
        seconds: That it took, training and measuring included.
        complete: Whether it came to its end before the clock or an interruption did.
        notes: Lines for a person.
        curve: Time against tokens, where the budget was of time.
    """

    plan: Plan
    chosen: Point
    front: list[Point]
    references: list[Point]
    others: list[Point]
    budget: Budget
    whole: float
    proxy: dict[str, float]
    photos: tuple[int, int]
    seconds: float
    complete: bool
    notes: list[str] = field(default_factory=list)
    curve: LatencyCurve | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "budget": self.budget.to_dict(), "chosen": self.chosen.to_dict(),
            "front": [point.to_dict() for point in self.front],
            "references": [point.to_dict() for point in self.references], "proxy": self.proxy,
            "photos": list(self.photos), "seconds": round(self.seconds, 1), "complete": self.complete,
            "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        timed, (few, many) = self.budget.timed, self.photos
        lost = "top-1" if "top1_drop" in self.chosen.held_out else "agreement"
        lines = [
            f"{self.plan.config.method}, {self.budget}: {said(self.chosen.cost, timed)} instead of "
            f"{said(self.whole, timed)}, {self.chosen.lost:.2f} points of {lost} lost",
            f"  {told(self.chosen.config)}",
            "",
            f"the front, on {many} photos that were not searched on",
            points_table(self.front),
        ]
        if self.chosen not in self.front:
            lines += ["chosen, though the front passes it on these photos", points_table([self.chosen])]
        if self.references:
            lines += ["", "without a search, at the same cost", points_table(self.references)]
        proxy = self.proxy
        lines += [
            "",
            f"searched by KL on {few} other photos, which is {proxy['kl_difference']:.1f} % from that on the "
            f"{many}, mean of {proxy['schedules']:.0f} schedules; rank correlation {proxy['kl_rank']:.2f}, with the "
            f"points lost {proxy['lost_rank']:.2f}",
            f"{self.seconds:.0f} s"
            + ("" if self.complete else "; the time was up, or it was interrupted: more --minutes may find more"),
            *self.notes,
        ]
        return "\n".join(lines)
