"""The result of a search, in words, and the reasons not to trust it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tntprune.search.budget import Budget, points, said
from tntprune.search.interval import least_photos
from tntprune.search.latency import LatencyCurve
from tntprune.search.verified import Verified, kept, lost_what, verified_table
from tntprune.serialization.plan import Plan

RUINED = 20.0  # points that nobody means to lose
FEW = 100  # photos, of which fewer tell nothing of a model that is right on all
TRUSTED = 0.5  # rank correlation from which the two halves of the photos agree well enough
ENDED = {
    "": "The search was complete.",
    "time": "The search was not complete when the time was up: more --minutes may find a better plan.",
    "interrupt": "The search was interrupted: without that it may find a better plan.",
}


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
        proxy: See `verified.proxy_error`.
        photos: The number of photos that the search used, and of those that were held out.
        seconds: How long it took, training and measuring included.
        ended: Why it ended early: "time", "interrupt", or "" if it came to its end.
        notes: Sentences for the user.
        curve: Time against tokens, where the budget was of time.
    """

    plan: Plan
    chosen: Verified
    front: list[Verified]
    references: list[Verified]
    others: list[Verified]
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
            "front": [one.to_dict() for one in self.front],
            "references": [one.to_dict() for one in self.references], "proxy": self.proxy,
            "photos": list(self.photos), "seconds": round(self.seconds, 1), "complete": self.complete,
            "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{self.plan.config.method}, {self.budget}",
            "",
            f"schedules that no other one beats, on all {sum(self.photos)} photos",
            verified_table(self.front),
        ]
        if self.chosen not in self.front:
            lines += ["chosen, although another schedule has a smaller divergence", verified_table([self.chosen])]
        if self.references:
            lines += ["", "schedules that need no search, at the same cost", verified_table(self.references)]
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """Say in sentences what was chosen, what it costs, what it loses and how certain that is."""
        timed, chosen = self.budget.timed, self.chosen
        same = next((one.name for one in self.references if one.config == chosen.config), "")
        fits = f"{self.whole / chosen.cost:.2f} times as fast" if timed else f"{chosen.cost / self.whole:.0%}"
        lines = [
            f"Chosen: {kept(chosen.config)}." + f" This is {same}, which needs no search." * bool(same),
            f"Cost: {said(chosen.cost, timed)} per {'batch' if timed else 'image'} instead of "
            f"{said(self.whole, timed)} ({fits}).",
            self._loss(),
            f"Time: {self.seconds:.0f} s. {ENDED[self.ended]}",
        ]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _loss(self) -> str:
        few, many = self.photos
        known, held_out = self.chosen.overall, self.chosen.held_out
        if "cosine" in known:
            name, digits, what = "cosine", ".4f", "the mean cosine similarity to the unpruned model's embeddings is "
            unit, low, high = "", 1 - known["lost_high"] / 100, 1 - known["lost_low"] / 100
        else:
            name, digits, what = "lost", ".2f", ""
            unit, low, high = f" points of {lost_what(known)}", known["lost_low"], known["lost_high"]
        return (
            f"Loss: {what}{known[name]:{digits}}{unit} on {few + many} photos (95 % interval {low:{digits}} to "
            f"{high:{digits}}), and {held_out[name]:{digits}} on the {many} of them that the search did not use."
        )


def doubts(chosen: Verified, wanted: Budget, photos: int, proxy: dict[str, float]) -> list[str]:
    """List in sentences why the photos cannot judge the plan; nothing where they can.

    Args:
        chosen: The chosen schedule.
        wanted: The budget.
        photos: The number of all photos.
        proxy: See `verified.proxy_error`.
    """
    found, known, most = [], chosen.overall, wanted.most_lost
    if "top1" in known and known["top1"] + known["top1_drop"] > 100 - 1e-6:
        found.append(
            f"The unpruned model is right on all {photos} photos; it was probably trained on them. It will lose more "
            "on new photos. Search on labelled photos that it has not seen."
            if photos >= FEW
            else f"The unpruned model is right on all {photos} photos. They are too few to measure its loss."
        )
    if most is None and chosen.lost > RUINED:
        batch = " or a larger --batch-size, where tokens take more of the time" if wanted.timed else ""
        found.append(
            f"The plan loses {chosen.lost:.0f} points: nothing usable costs so little. Use a larger budget{batch}."
        )
    if most is not None and known["lost_high"] > most >= chosen.lost - 1e-9:
        least = least_photos(most)
        more = f" (at least {least})" if photos < least else ""
        found.append(
            f"{photos} photos are too few to promise at most {points(most)}: the 95 % interval of the loss is "
            f"{known['lost_low']:.2f} to {known['lost_high']:.2f}. Use more --photos{more}, or a larger --drop."
        )
    if proxy["schedules"] > 1 and proxy["kl_rank"] < TRUSTED:
        found.append(
            f"The two halves of the photos rank the {proxy['schedules']:.0f} verified schedules differently (rank "
            f"correlation {proxy['kl_rank']:.2f}, expected {TRUSTED:g} or more). Do not trust the order of these "
            "schedules; use more --photos."
        )
    return found
