"""The course of a search: the asked budget, those around it, and what one would do without a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from tqdm import tqdm

from tntprune.config import Config
from tntprune.errors import UserError
from tntprune.search.budget import Budget, said
from tntprune.search.judge import Judge
from tntprune.search.latency import LatencyCurve
from tntprune.search.photos import Shares
from tntprune.search.points import Point
from tntprune.search.scout import Clock, Scout, Tried
from tntprune.search.shapes import Shape, family, references
from tntprune.search.space import Space

AROUND = (0.8, 0.9, 1.1, 1.25)  # other budgets, as shares of the one that was asked for
FINALISTS = 3  # schedules at the asked budget that are verified
POOL = 4  # shapes that are tried at another budget
FEW_MOVES = 1 / 6  # of those at the asked budget, for each other one
STEPS = 6  # along the cost axis, where a loss was asked for
BEGIN = 0.65  # share of the cost where that walk begins
FLOOR = 0.2  # and where it ends


class Job:
    """One search, its photos and what was verified so far.

    Args:
        space: What can be chosen.
        wanted: The budget.
        cost: Of a config, in what the budget is of.
        whole: Of the unpruned model.
        curve: Time against tokens, if there is one.
        found: The photos.
        clock: When to end.
        moves: Small changes to try at the asked budget.
        seed: Of these.
        base: See `search`.
        progress: Show a bar.
    """

    def __init__(
        self, space: Space, wanted: Budget, cost: Callable[[Config], float], whole: float, curve: LatencyCurve | None,
        found: Shares, clock: Clock, moves: int, seed: int, base: nn.Module | None, progress: bool,
    ) -> None:  # fmt: skip
        self.space, self.wanted, self.cost, self.whole, self.curve = space, wanted, cost, whole, curve
        self.moves = moves
        self.judge = Judge(space, *found.searched, base)
        self.verifier = Judge(space, *found.held_out, base)
        self.bar = tqdm(unit=" schedules", desc=f"searching, {clock.left / 60:.1f} min at most", disable=not progress)
        slower = curve.slower() if curve is not None and wanted.timed else None
        self.scout = Scout(space, self.judge, cost, seed, clock, self.bar, slower)
        self.points: list[Point] = []

    def by_limit(self, limit: float) -> Point:
        """The best at a limit, and what a bit more or less would bring."""
        last = len(references(self.space))
        self.scout.after = FINALISTS + len(AROUND) + 2 * last
        ranked = self._ranked(limit)
        chosen = self.verify(ranked[0], "chosen")
        for other in ranked[1:FINALISTS]:
            self.verify(other)
        shapes = [one.schedule.shape for one in ranked[:POOL]]
        for share in AROUND:
            self.scout.after = 1 + 2 * last
            if share * limit < self.whole and not self.scout.hurry():
                self.around(shapes, share * limit)
        return chosen

    def settled(self, chosen: Point, marks: Sequence[Point], limit: float) -> Point:
        """Of all that was verified within a limit, what needs no search too, the best on all photos together."""
        within = [point for point in (chosen, *self.points, *marks) if point.cost <= limit]
        best = min(within, key=lambda one: one.searched["kl"] + one.held_out["kl"])
        if best is chosen:
            return chosen
        named, other = Point(**{**vars(best), "name": "chosen"}), Point(**{**vars(chosen), "name": ""})
        self.points[self.points.index(chosen)] = other
        self.points = [named if point is best else point for point in self.points]
        return named

    def by_loss(self) -> Point:
        """The cheapest that was verified to lose no more than what was asked for."""
        last = len(references(self.space))
        self.scout.after = STEPS + 2 * last
        ranked = self._ranked(BEGIN * self.whole)
        shapes = [one.schedule.shape for one in ranked[:POOL]]
        low, high = FLOOR * self.whole, self.whole
        limit = BEGIN * self.whole
        point: Point | None = self.verify(ranked[0])
        for step in range(STEPS):
            if point is not None and point.lost <= self.wanted.value:
                high = limit
            else:
                low = limit
            self.scout.after = STEPS - step + 2 * last
            if self.scout.hurry():
                break
            limit = (low + high) / 2
            point = self.around(shapes, limit)
        good = [point for point in self.points if point.lost <= self.wanted.value]
        if not good:
            best = min(self.points, key=lambda one: one.lost)
            raise UserError(
                f"no schedule of {self.space.template.method} was found that loses at most {self.wanted.value:g} "
                f"points; the best lost {best.lost:.2f} at {said(best.cost, False)}: expected a larger --drop, or more "
                f"{'time' if self.scout.clock.rang else '--photos'}"
            )
        chosen = min(good, key=lambda one: one.cost)
        named = Point(**{**vars(chosen), "name": "chosen"})
        self.points[self.points.index(chosen)] = named
        return named

    def _ranked(self, limit: float) -> list[Tried]:
        """The best at a limit, improved, before the best of the families."""
        tried = self.scout.fitted(family(self.space), limit)
        if not tried:
            raise UserError(
                f"no schedule of {self.space.template.method} meets {self.wanted}; expected a larger budget"
            )
        ranked = self.scout.rounds(tried)
        best = self.scout.improve(ranked[0], limit, self.moves)
        return [best, *(one for one in ranked if one is not best)]

    def around(self, shapes: Sequence[Shape], limit: float) -> Point | None:
        """The best of a few shapes at another limit, improved a little and verified."""
        tried = self.scout.fitted(shapes, limit)
        if not tried:
            return None
        best = self.scout.rounds(tried)[0]
        return self.verify(self.scout.improve(best, limit, round(self.moves * FEW_MOVES)))

    def references(self, limit: float) -> list[Point]:
        """What one would do without a search, at a limit."""
        found = []
        for shape in references(self.space):
            for one in self.scout.fitted([shape], limit):
                found.append(self.verify(one, shape.name, keep=False))
        return found

    def verify(self, one: Tried, name: str = "", keep: bool = True) -> Point:
        """A schedule's answers on the photos that were not searched on."""
        self.scout.ask(one)
        config = one.schedule.config
        held_out = self.verifier.ask(config).figures(self.verifier.right)
        seconds = None if self.curve is None else self.curve.predict(config)
        searched = one.answers.figures(self.judge.right)
        point = Point(name, config, self.space.macs(config), seconds, self.wanted.timed, searched, held_out)
        if keep:
            self.points.append(point)
        self.bar.update()
        return point
