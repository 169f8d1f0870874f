"""The result of a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tntprune.search.budget import Budget, said
from tntprune.search.latency import LatencyCurve
from tntprune.search.points import Point, kept, lost_what, points_table
from tntprune.serialization.plan import Plan


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
        plan: The chosen schedule with what its method has learned. `reduce_(model, found.plan)` puts it on the model.
        chosen: Its cost and its figures.
        front: Verified schedules that no other one beats in both cost and divergence, the cheapest first.
        references: Simple schedules, which need no search, at the same cost.
        others: Everything else that was verified.
        budget: What was asked for.
        whole: The cost of the unpruned model, in MACs or seconds.
        proxy: See `points.proxy_error`.
        photos: The number of photos that the search used, and of those that were held out.
        seconds: How long it took, training and measuring included.
        ended: Why it ended early: "time", "interrupt", or "" if it came to its end.
        notes: Sentences for the user.
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
    ended: str
    notes: list[str] = field(default_factory=list)
    curve: LatencyCurve | None = None

    @property
    def complete(self) -> bool:
        """Whether the search came to its end before the time was up or it was interrupted."""
        return not self.ended

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "budget": self.budget.to_dict(), "chosen": self.chosen.to_dict(),
            "front": [point.to_dict() for point in self.front],
            "references": [point.to_dict() for point in self.references], "proxy": self.proxy,
            "photos": list(self.photos), "seconds": round(self.seconds, 1), "complete": self.complete,
            "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{self.plan.config.method}, {self.budget}",
            "",
            f"schedules that no other one beats, on all {sum(self.photos)} photos",
            points_table(self.front),
        ]
        if self.chosen not in self.front:
            lines += ["chosen, although another schedule has a smaller divergence", points_table([self.chosen])]
        if self.references:
            lines += ["", "schedules that need no search, at the same cost", points_table(self.references)]
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """Say in sentences what was chosen, what it costs, what it loses and how certain that is."""
        timed, chosen = self.budget.timed, self.chosen
        same = next((point.name for point in self.references if point.config == chosen.config), "")
        a, b = said(chosen.cost, timed), said(self.whole, timed)
        fits = f"{self.whole / chosen.cost:.2f} times as fast" if timed else f"{chosen.cost / self.whole:.0%}"
        lines = [
            f"Chosen: {kept(chosen.config)}." + f" This is {same}, which needs no search." * bool(same),
            f"Cost: {a} per {'batch' if timed else 'image'} instead of {b} ({fits}).",
            self._loss(),
            f"Time: {self.seconds:.0f} s. {ENDED[self.ended]}",
        ]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _loss(self) -> str:
        few, many = self.photos
        known, held_out = self.chosen.overall, self.chosen.held_out
        if "cosine" in known:
            low, high = 1 - known["lost_high"] / 100, 1 - known["lost_low"] / 100
            return (
                f"Loss: the mean cosine similarity to the unpruned model's embeddings is {known['cosine']:.4f} on "
                f"{few + many} photos (95 % interval {low:.4f} to {high:.4f}), and {held_out['cosine']:.4f} on the "
                f"{many} of them that the search did not use."
            )
        return (
            f"Loss: {known['lost']:.2f} points of {lost_what(known)} on {few + many} photos (95 % interval "
            f"{known['lost_low']:.2f} to {known['lost_high']:.2f}), and {held_out['lost']:.2f} on the {many} of them "
            "that the search did not use."
        )


ENDED = {
    "": "The search was complete.",
    "time": "The search was not complete when the time was up: more --minutes may find a better plan.",
    "interrupt": "The search was interrupted: without that it may find a better plan.",
}
