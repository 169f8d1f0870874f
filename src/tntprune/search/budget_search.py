"""One search: the simple schedules, the family and its small changes, and the choice among what was verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn
from tqdm import tqdm

from tntprune.errors import UserError
from tntprune.methods import Config
from tntprune.search.budget import Budget, points, said
from tntprune.search.judge import Judge, joined
from tntprune.search.photo_shares import Shares
from tntprune.search.scout import Deadline, Scout, Tried
from tntprune.search.shapes import Shape, family, simple
from tntprune.search.space import Space
from tntprune.search.verified import Verified

AROUND = (0.8, 0.9, 1.1, 1.25)  # other budgets, as shares of the one that was asked for
FINALISTS = 4  # schedules at the asked budget that are verified
POOL = 4  # shapes that are tried at another budget
FEW_MOVES = 1 / 6  # of those at the asked budget, for each other one
BEGIN = 0.5  # share of the unpruned model's cost where the search for the cheapest schedule begins
FLOOR = 0.2  # and where it ends
FINE = 0.01  # share of it by which costs are told apart
CHEAPER = 0.95  # of the cheapest simple schedule's cost: where searched schedules are tried first
TIMED = 1.15  # times the limit: what is predicted to take longer is not timed
SLACK = 1.02  # times the limit that a schedule may take when it is timed: two measurements differ by as much


class BudgetSearch:
    """One search, its photos and what was verified so far.

    Args:
        space: What can be chosen.
        wanted: The budget.
        cost: Of a config, in the unit of the budget.
        whole: Of the unpruned model.
        found: The photos.
        deadline: When to end.
        moves: Small changes to try at the asked budget.
        seed: Of these.
        base: See `find_plan`.
        progress: Show a bar.
        slower: Numbers of tokens that take longer than larger ones, to the larger ones.
        timed: Measures what schedules cost, where the budget is of time.
    """

    def __init__(
        self, space: Space, wanted: Budget, cost: Callable[[Config], float], whole: float, found: Shares,
        deadline: Deadline, moves: int, seed: int, base: nn.Module | None, progress: bool, slower: dict[int, int],
        timed: Callable[[list[Config]], list[float]] | None = None,
    ) -> None:  # fmt: skip
        self.space, self.wanted, self.cost, self.whole = space, wanted, cost, whole
        self.limit = wanted.limit(whole)
        self.deadline, self.moves, self.timed = deadline, moves, timed
        self.judge = Judge(space, *found.searched, base)
        self.verifier = Judge(space, *found.held_out, base)
        self.bar = tqdm(
            unit=" schedules", desc=f"searching, {deadline.left / 60:.1f} min at most", disable=not progress
        )
        self.scout = Scout(space, self.judge, self.verifier, cost, seed, deadline, self.bar, slower)
        self.verified: dict[Config, Verified] = {}  # on all photos
        self.simple: dict[str, Config | None] = {}  # simple schedules that were tried at the limit, by name
        self.failed: dict[str, float] = {}  # the largest limit at which each simple schedule lost too much
        self.notes: list[str] = []

    @property
    def photos(self) -> int:
        """The number of all photos."""
        return len(self.judge) + len(self.verifier)

    def run(self) -> Verified:
        """Search by the budget, and return the chosen schedule.

        Raises:
            UserError: no schedule is within it.
        """
        if self.wanted.most_lost is None:
            self.by_limit()
        else:
            first = BEGIN * self.whole if self.wanted.kind == "drop" else self.limit
            found = self.by_loss(first)
            if found is not None and not self.scout.hurry():  # how they would do at the cost of the chosen one
                self.verify_simple(found.cost)
            if found is None and self.wanted.kind != "drop":
                self.by_limit()
        if self.timed is not None and not self.deadline.stops:
            self.time_verified()
        return self.chosen()

    def by_limit(self) -> None:
        """Verify the simple schedules at the limit, then the best that a search finds at it and near it."""
        self.verify_simple(self.limit, late=True)
        ranked = self._ranked(self.limit)
        if not ranked:
            raise UserError(
                f"no schedule of {self.space.template.method} meets {self.wanted}; expected a larger budget"
            )
        for place, one in enumerate(ranked[:FINALISTS]):
            if place == 0 or not self.deadline.over():
                self.verify(one)
        shapes = [one.schedule.shape for one in ranked[:POOL]]
        for share in AROUND:
            if share * self.limit < self.whole and not self.scout.hurry():
                for one in self._improved(shapes, share * self.limit):
                    self.verify(one)

    def verify_simple(self, limit: float, late: bool = False) -> None:
        """Verify the simple schedules at a limit.

        Args:
            limit: The largest cost.
            late: Go on when the time is up, until the user interrupts; even then one is verified.
        """
        for shape in simple(self.space):
            tried = self.scout.fitted([shape], limit)
            self.simple[shape.name] = tried[0].schedule.config if tried else None
            stop = (self.scout.hurry() and not late) or bool(self.deadline.stops)
            if tried and not (stop and self.verified):
                self.verify(tried[0])

    @property
    def marks(self) -> list[Verified]:
        """The simple schedules at the limit that were verified, under their names."""
        known = [(name, self.verified.get(config)) for name, config in self.simple.items() if config is not None]
        return [replace(one, name=name) for name, one in known if one is not None]

    def by_loss(self, first: float) -> Verified | None:
        """Find the cheapest schedule that loses no more than the budget says: a simple one, then one that is searched.

        Args:
            first: The cost to begin with.

        Returns:
            The schedule; None if none was found.
        """
        self._descend(self._simple_holding(first), first)
        best = self.cheapest()
        if (best is None and first == self.limit) or self.scout.hurry():  # the limit is searched by itself then
            return best
        below = first if best is None else CHEAPER * best.cost
        ranked = self._ranked(below)
        while not ranked and best is None and self.limit - below > FINE * self.whole:  # the blocks allow no such cost
            below = (below + self.limit) / 2
            ranked = self._ranked(below)
        for place, one in enumerate(ranked[:FINALISTS]):
            if place == 0 or not self.scout.hurry():
                self._holding([one])
        pool = [one.schedule.shape for one in ranked[:POOL]]
        if pool and not self.scout.hurry():
            self._descend(lambda limit: self._holding(self._improved(pool, limit)), below)
        return self.cheapest()

    def _simple_holding(self, first: float) -> Callable[[float], Verified | None]:
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

        def find(limit: float) -> Verified | None:
            for place, shape in enumerate(list(order)):
                if limit <= self.failed.get(shape.name, 0.0) or (place and self.scout.hurry()):
                    continue
                found = self._holding(self.scout.fitted([shape], limit))
                if found is not None:
                    order.remove(shape)
                    order.insert(0, shape)
                    return found
                self.failed[shape.name] = limit
            return None

        return find

    def _descend(self, find: Callable[[float], Verified | None], first: float) -> None:
        """Bisect the cost for the cheapest schedule that holds, below the cheapest one so far.

        Args:
            find: Returns a schedule at a limit that holds, or None.
            first: The cost to begin with.
        """
        best = self.cheapest()
        high = self.limit if best is None else best.cost
        low = min(FLOOR * self.whole, first / 2)
        limit = first if first < high else (low + high) / 2
        while True:
            found = find(limit)
            low, high = (low, found.cost) if found is not None else (limit, high)
            if high - low <= FINE * self.whole or self.scout.hurry():
                break
            limit = (low + high) / 2

    def untried(self) -> list[str]:
        """Name the simple schedules that were not tried right below the cheapest one that holds."""
        best = self.cheapest()
        if best is None:
            return []
        below = best.cost - 2 * FINE * self.whole
        return [shape.name for shape in simple(self.space) if self.failed.get(shape.name, 0.0) < below]

    def _holding(self, tried: Sequence[Tried]) -> Verified | None:
        """Verify a schedule until it loses too much; return it if it does not."""
        for one in tried:
            assert self.wanted.most_lost is not None
            if self.scout.verify(one, self.wanted.most_lost / 100 * self.photos + 1e-6):
                found = self.verify(one)
                return found if self._holds(found) else None
            self.bar.update()
        return None

    def _holds(self, one: Verified) -> bool:
        return self.wanted.most_lost is not None and one.lost <= self.wanted.most_lost + 1e-9

    def within(self) -> list[Verified]:
        """Return the verified schedules within the limit of the cost."""
        limit = self.limit if self.timed is None else SLACK * self.limit
        return [one for one in self.verified.values() if one.cost <= limit]

    def cheapest(self) -> Verified | None:
        """Return the cheapest verified schedule that keeps the drop and the limit of the cost, if any."""
        good = [one for one in self.within() if self._holds(one)]
        return min(good, key=lambda one: (one.cost, one.distance), default=None)

    def chosen(self) -> Verified:
        """Return the best verified schedule within the budget, on all photos.

        It is the one with the smallest divergence of those that lose no more points than any simple schedule; where a
        drop was asked for, the cheapest that keeps it, or else the one within the limit that loses the fewest points.

        Raises:
            UserError: only a drop was asked for, and nothing keeps it.
        """
        within = self.within()
        if self.verified and not within:  # by measurement, which the prediction was below
            within = [min(self.verified.values(), key=lambda one: one.cost)]
            self.notes.append(
                f"By measurement no verified schedule meets {self.wanted}. The plan is the fastest one, with "
                f"{said(within[0].cost, True)}."
            )
        if self.wanted.most_lost is None:
            known = {one.config for one in self.marks}
            bar = min((one.lost for one in within if one.config in known), default=math.inf)
            return min([one for one in within if one.lost <= bar], key=lambda one: one.distance)
        best = self.cheapest()
        if best is not None:
            return best
        most = points(self.wanted.most_lost)
        if self.wanted.kind == "drop":
            least = min(within, key=lambda one: one.lost, default=None)
            told = "" if least is None else f"; the best lost {least.lost:.2f} at {said(least.cost, False)}"
            raise UserError(
                f"no schedule of {self.space.template.method} was found that loses at most {most} on {self.photos} "
                f"photos{told}: expected a larger --drop, or more {'time' if self.deadline.rang else '--photos'}"
            )
        self.notes.append(
            f"No schedule that was verified within the budget loses at most {most}. The plan is the one that loses the "
            "least."
        )
        return min(within, key=lambda one: (one.lost, one.distance))

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

    def verify(self, one: Tried) -> Verified:
        """Compute a schedule's figures on all photos."""
        config = one.schedule.config
        if config not in self.verified:
            self.scout.verify(one)
            self.verified[config] = Verified(
                "", config, self.space.macs(config), self.cost(config) if self.wanted.timed else None,
                one.answers.figures(), one.held_out.figures(), joined([one.answers, one.held_out]).figures(),
            )  # fmt: skip
            self.bar.update()
        return self.verified[config]

    def time_verified(self) -> None:
        """Put what was measured in the place of what was predicted, for what may be chosen."""
        assert self.timed is not None
        near = [one for one in self.verified.values() if one.cost <= TIMED * self.limit]
        for one, seconds in zip(near, self.timed([one.config for one in near]), strict=True):
            self.verified[one.config] = replace(one, seconds=seconds)
