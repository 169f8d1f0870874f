"""One search: the simple schedules, the family and its small changes, and the choice among what was verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn
from tqdm import tqdm

from tntprune.errors import UserError
from tntprune.methods import Config
from tntprune.search.budget import Budget, points, said
from tntprune.search.judge import Judge, joined
from tntprune.search.latency import LatencyCurve
from tntprune.search.points import Point
from tntprune.search.scout import Clock, Scout, Tried
from tntprune.search.search_photos import Shares
from tntprune.search.shapes import Shape, family, simple
from tntprune.search.space import Space

AROUND = (0.8, 0.9, 1.1, 1.25)  # other budgets, as shares of the one that was asked for
FINALISTS = 4  # schedules at the asked budget that are verified
POOL = 4  # shapes that are tried at another budget
FEW_MOVES = 1 / 6  # of those at the asked budget, for each other one
BEGIN = 0.5  # share of the unpruned model's cost where the search for the cheapest schedule begins
FLOOR = 0.2  # and where it ends
FINE = 0.01  # share of it by which costs are told apart
CHEAPER = 0.95  # of the cheapest simple schedule's cost: where searched schedules are tried first


class Job:
    """One search, its photos and what was verified so far.

    Args:
        space: What can be chosen.
        wanted: The budget.
        cost: Of a config, in the unit of the budget.
        whole: Of the unpruned model.
        curve: Time against tokens, if there is one.
        found: The photos.
        clock: When to end.
        moves: Small changes to try at the asked budget.
        seed: Of these.
        base: See `find_plan`.
        progress: Show a bar.
    """

    def __init__(
        self, space: Space, wanted: Budget, cost: Callable[[Config], float], whole: float, curve: LatencyCurve | None,
        found: Shares, clock: Clock, moves: int, seed: int, base: nn.Module | None, progress: bool,
    ) -> None:  # fmt: skip
        self.space, self.wanted, self.cost, self.whole, self.curve = space, wanted, cost, whole, curve
        self.clock, self.moves = clock, moves
        self.judge = Judge(space, *found.searched, base)
        self.verifier = Judge(space, *found.held_out, base)
        self.bar = tqdm(unit=" schedules", desc=f"searching, {clock.left / 60:.1f} min at most", disable=not progress)
        slower = curve.slower() if curve is not None and wanted.timed else None
        self.scout = Scout(space, self.judge, self.verifier, cost, seed, clock, self.bar, slower)
        self.points: dict[Config, Point] = {}  # what was verified on all photos
        self.simple: dict[str, Config | None] = {}  # simple schedules that were tried at the limit, by name
        self.failed: dict[str, float] = {}  # the largest limit at which each simple schedule lost too much
        self.notes: list[str] = []

    @property
    def photos(self) -> int:
        """The number of all photos."""
        return len(self.judge) + len(self.verifier)

    def run(self) -> Point:
        """Search by the budget, and return the chosen schedule.

        Raises:
            UserError: no schedule is within it.
        """
        if self.wanted.kind == "drop":
            chosen = self.by_loss(self.whole, BEGIN * self.whole)
            if chosen is None:
                raise self._none()
            return self.compared(chosen)
        limit = self.wanted.limit(self.whole)
        if self.wanted.drop is None:
            self.by_limit(limit)
            return self.settled(limit)
        chosen = self.by_loss(limit, limit)
        if chosen is None:
            self.by_limit(limit)
            chosen = self.cheapest()
        if chosen is None:
            self.notes.append(
                f"No schedule that was verified within the budget loses at most {points(self.wanted.drop)}. The plan "
                "is the one that loses the least."
            )
            return self.least_lost(limit)
        return self.compared(chosen)

    def compared(self, chosen: Point) -> Point:
        """Verify the simple schedules at the cost of the chosen one, while there is time; return the latter."""
        if not self.scout.hurry():
            self.verify_simple(chosen.cost)
        return chosen

    def by_limit(self, limit: float) -> None:
        """Verify the simple schedules at a limit, then the best that a search finds at it and near it."""
        self.verify_simple(limit, late=True)
        ranked = self._ranked(limit)
        if not ranked:
            raise UserError(
                f"no schedule of {self.space.template.method} meets {self.wanted}; expected a larger budget"
            )
        for place, one in enumerate(ranked[:FINALISTS]):
            if place == 0 or not self.clock.over():
                self.verify(one)
        shapes = [one.schedule.shape for one in ranked[:POOL]]
        for share in AROUND:
            if share * limit < self.whole and not self.scout.hurry():
                self.around(shapes, share * limit)

    def verify_simple(self, limit: float, late: bool = False) -> None:
        """Verify the simple schedules at a limit.

        Args:
            limit: The largest cost.
            late: Go on when the time is up, until the user interrupts; even then one is verified.
        """
        for shape in simple(self.space):
            tried = self.scout.fitted([shape], limit)
            self.simple[shape.name] = tried[0].schedule.config if tried else None
            stop = (self.scout.hurry() and not late) or bool(self.clock.stops)
            if tried and not (stop and self.points):
                self.verify(tried[0])

    @property
    def marks(self) -> list[Point]:
        """The simple schedules at the limit that were verified, under their names."""
        known = {name: self.points.get(config) for name, config in self.simple.items() if config is not None}
        return [Point(**{**vars(point), "name": name}) for name, point in known.items() if point is not None]

    def by_loss(self, top: float, first: float) -> Point | None:
        """Find the cheapest schedule that loses no more than the budget says: a simple one, then one that is searched.

        Args:
            top: The largest cost.
            first: The cost to begin with.

        Returns:
            The schedule; None if none was found.
        """
        self._descend(self._simple_holding(first), top, first)
        best = self.cheapest()
        if (best is None and first == top) or self.scout.hurry():  # in the first case the limit is searched by itself
            return best
        below = first if best is None else CHEAPER * best.cost
        ranked = self._ranked(below)
        while not ranked and best is None and top - below > FINE * self.whole:  # the blocks allow no such cost
            below = (below + top) / 2
            ranked = self._ranked(below)
        for place, one in enumerate(ranked[:FINALISTS]):
            if place == 0 or not self.scout.hurry():
                self._holding([one])
        pool = [one.schedule.shape for one in ranked[:POOL]]
        if pool and not self.scout.hurry():
            self._descend(lambda limit: self._holding(self._improved(pool, limit)), top, below)
        return self.cheapest()

    def _simple_holding(self, first: float) -> Callable[[float], Point | None]:
        """Return a function from a limit to a simple schedule at it that holds, if there is one.

        At one limit the nearest to the unpruned model on a few photos goes first. One that fails is not tried again at
        less; when the time is up, the others are not tried at all.

        Args:
            first: The limit at which they answer these photos.
        """
        starts = {shape: one for shape in simple(self.space) for one in self.scout.fitted([shape], first)}
        for one in starts.values():
            if not self.scout.hurry():
                self.scout.ask(one, upto=1)
        near = {shape: one.distance() for shape, one in starts.items() if len(one.answers)}
        order = sorted(simple(self.space), key=lambda shape: near.get(shape, math.inf))

        def find(limit: float) -> Point | None:
            for place, shape in enumerate(list(order)):
                if limit <= self.failed.get(shape.name, 0.0) or (place and self.scout.hurry()):
                    continue
                point = self._holding(self.scout.fitted([shape], limit))
                if point is not None:
                    order.remove(shape)
                    order.insert(0, shape)
                    return point
                self.failed[shape.name] = limit
            return None

        return find

    def _descend(self, find: Callable[[float], Point | None], top: float, first: float) -> None:
        """Bisect the cost for the cheapest schedule that holds, below the cheapest one so far.

        Args:
            find: Returns a schedule at a limit that holds, or None.
            top: The largest cost.
            first: The cost to begin with.
        """
        best = self.cheapest()
        high = top if best is None else best.cost
        low = min(FLOOR * self.whole, first / 2)
        limit = first if first < high else (low + high) / 2
        while True:
            point = find(limit)
            low, high = (low, point.cost) if point is not None else (limit, high)
            if high - low <= FINE * self.whole or self.scout.hurry():
                break
            limit = (low + high) / 2

    def untried(self) -> list[str]:
        """Name the simple schedules that were not tried right below the cheapest one that holds."""
        best = self.cheapest()
        if best is None or self.wanted.most_lost is None:
            return []
        below = best.cost - 2 * FINE * self.whole
        return [shape.name for shape in simple(self.space) if self.failed.get(shape.name, 0.0) < below]

    def _holding(self, tried: Sequence[Tried]) -> Point | None:
        """Verify a schedule until it loses too much; return it if it does not."""
        most = self.wanted.most_lost
        assert most is not None
        for one in tried:
            if self.scout.verify(one, most / 100 * self.photos + 1e-6):
                point = self.verify(one)
                return point if self._holds(point) else None
            self.bar.update()
        return None

    def _holds(self, point: Point) -> bool:
        most = self.wanted.most_lost
        return most is not None and point.lost <= most + 1e-9

    def cheapest(self) -> Point | None:
        """Return the cheapest verified schedule that keeps the drop and the limit of the cost, if any."""
        top = self.whole if self.wanted.kind == "drop" else self.wanted.limit(self.whole)
        good = [point for point in self.points.values() if self._holds(point) and point.cost <= top]
        return min(good, key=lambda one: (one.cost, one.distance), default=None)

    def settled(self, limit: float) -> Point:
        """Return the best verified schedule within a limit, on all photos.

        It is the one with the smallest divergence of those that lose no more points than any simple schedule.
        """
        within = [point for point in self.points.values() if point.cost <= limit]
        bar = min((point.lost for point in self.marks), default=float("inf"))
        return min([point for point in within if point.lost <= bar], key=lambda one: one.distance)

    def least_lost(self, limit: float) -> Point:
        """Return the verified schedule within a limit that loses the fewest points on all photos."""
        within = [point for point in self.points.values() if point.cost <= limit]
        return min(within, key=lambda one: (one.lost, one.distance))

    def _none(self) -> UserError:
        most, method = self.wanted.value, self.space.template.method
        best = min(self.points.values(), key=lambda one: one.lost, default=None)
        least = "" if best is None else f"; the best lost {best.lost:.2f} at {said(best.cost, self.wanted.timed)}"
        return UserError(
            f"no schedule of {method} was found that loses at most {points(most)} on {self.photos} photos{least}: "
            f"expected a larger --drop, or more {'time' if self.clock.rang else '--photos'}"
        )

    def _ranked(self, limit: float) -> list[Tried]:
        """Return the best schedule at a limit, improved, before the best of the family; none if none can meet it."""
        tried = self.scout.fitted(family(self.space), limit)
        if not tried:
            return []
        ranked = self.scout.rounds(tried)
        best = self.scout.improve(ranked[0], limit, self.moves)
        return [best, *(one for one in ranked if one is not best)]

    def _improved(self, shapes: Sequence[Shape], limit: float) -> list[Tried]:
        """Return the best of a few shapes at another limit, improved a little; none if none can meet it."""
        tried = self.scout.fitted(shapes, limit)
        if not tried:
            return []
        best = self.scout.rounds(tried)[0]
        return [self.scout.improve(best, limit, round(self.moves * FEW_MOVES))]

    def around(self, shapes: Sequence[Shape], limit: float) -> None:
        """Verify the best of a few shapes at another limit."""
        for one in self._improved(shapes, limit):
            self.verify(one)

    def verify(self, one: Tried) -> Point:
        """Compute a schedule's figures on all photos."""
        config = one.schedule.config
        if config not in self.points:
            self.scout.verify(one)
            seconds = None if self.curve is None else self.curve.predict(config)
            self.points[config] = Point(
                "", config, self.space.macs(config), seconds, self.wanted.timed, one.answers.figures(),
                one.held_out.figures(), joined([one.answers, one.held_out]).figures(),
            )  # fmt: skip
            self.bar.update()
        return self.points[config]
