"""The search at one budget: many shapes on few photos, the best on more, then small changes to the very best."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tntprune.config import Config
from tntprune.search.judge import NOTHING, Answers, Judge
from tntprune.search.shapes import Schedule, Shape, fit, moved, priced
from tntprune.search.space import Space

ROUNDS = (1 / 8, 3 / 8, 1.0)  # shares of the photos
SURVIVORS = 1 / 3  # of each round
SPARE = 2.0  # times the last schedule's pace, for what is left to verify: schedules that need no search take longer


@dataclass
class Tried:
    """A schedule and what is known of it."""

    schedule: Schedule
    answers: Answers = field(default_factory=lambda: NOTHING)

    @property
    def kl(self) -> float:
        """The mean divergence so far."""
        return float(self.answers.kl.mean())


class Clock:
    """When a search has to end.

    Args:
        seconds: From now on.
    """

    def __init__(self, seconds: float) -> None:
        self.end, self.rang = time.monotonic() + seconds, False
        self.stops: list[int] = []  # an entry at the first Ctrl-C or SIGTERM; see `interrupts`

    @property
    def left(self) -> float:
        """Seconds until then."""
        return max(0.0, self.end - time.monotonic())

    def over(self, reserve: float = 0.0) -> bool:
        """Whether the time is up, but for what is kept in reserve, in seconds, or was cut short; it is noted if so."""
        self.rang = self.rang or bool(self.stops) or time.monotonic() > self.end - reserve
        return self.rang


class Scout:
    """Searches one space.

    Args:
        space: What can be chosen.
        judge: On the photos to search on.
        cost: Of a config.
        seed: Of the small changes.
        clock: When to end.
        bar: That is told of each schedule.
        slower: Numbers of tokens that take longer than larger ones, to the larger ones.
    """

    def __init__(
        self,
        space: Space,
        judge: Judge,
        cost: Callable[[Config], float],
        seed: int,
        clock: Clock,
        bar: Any,
        slower: dict[int, int] | None = None,
    ) -> None:
        self.space, self.judge, self.cost, self.clock, self.bar = space, judge, cost, clock, bar
        self.rng = random.Random(seed)
        self.slower = slower or {}
        self.pace = 0.0  # seconds that a schedule takes on all photos
        self.after = 0.0  # passes over as many photos that are still to be made when all is searched

    def fitted(self, shapes: Sequence[Shape], limit: float) -> list[Tried]:
        """Shapes at a budget, each schedule once; those that cannot meet it are left out."""
        found: dict[Config, Tried] = {}
        for shape in shapes:
            schedule = self.fit(shape, limit)
            if schedule is not None:
                found.setdefault(schedule.config, Tried(schedule))
        return list(found.values())

    def fit(self, shape: Shape, limit: float) -> Schedule | None:
        """A shape at a budget, with more tokens where these take less time."""
        schedule = fit(shape, self.space, self.cost, limit)
        if schedule is None or not self.slower:
            return schedule
        raised, before = [], self.space.patches
        for count in schedule.left:
            before = min(before, self.slower.get(count, count))
            raised.append(before)
        other = priced(shape, tuple(raised), self.space, self.cost)
        return other if other is not None and other.cost <= limit else schedule

    def hurry(self) -> bool:
        """Whether there is no time for more, or somebody does not want to wait."""
        if self.clock.stops:
            self.bar.set_description_str("interrupted: verifying the best so far (Ctrl-C again stops at once)")
        return self.clock.over(SPARE * self.pace * self.after)

    def ask(self, tried: Tried, upto: int | None = None, rival: Answers | None = None) -> None:
        """Let a schedule answer more photos."""
        known, begin = len(tried.answers), time.monotonic()
        tried.answers = self.judge.ask(tried.schedule.config, tried.answers, upto, rival)
        new = len(tried.answers) - known
        if new:
            self.pace = (time.monotonic() - begin) / new * len(self.judge)

    def rounds(self, tried: list[Tried]) -> list[Tried]:
        """Successive halving: those that have answered all photos, the best first; at least one."""
        for share in ROUNDS:
            upto = max(1, math.ceil(share * self.judge.batches))
            asked: list[Tried] = []
            for one in tried:
                if asked and self.hurry():
                    break
                self.ask(one, upto)
                asked.append(one)
                self.told(min(asked, key=lambda other: other.kl))
            tried = sorted(asked, key=lambda other: other.kl)
            if share < 1:
                tried = tried[: max(3, math.ceil(len(tried) * SURVIVORS))]
        return tried

    def improve(self, best: Tried, limit: float, moves: int) -> Tried:
        """Small changes to a schedule, each kept if its divergence on all photos is smaller."""
        seen = {best.schedule.config}
        for _ in range(moves):
            if self.hurry():
                break
            schedule = self.fit(moved(best.schedule, self.space, self.rng), limit)
            if schedule is None or schedule.config in seen:
                self.told(best)
                continue
            seen.add(schedule.config)
            other = Tried(schedule)
            self.ask(other, rival=best.answers)
            if len(other.answers) == len(best.answers) and other.kl < best.kl:
                best = other
            self.told(best)
        return best

    def told(self, best: Tried) -> None:
        """One schedule more on the bar."""
        agreement = 100 * float(best.answers.agrees.double().mean())
        self.bar.set_postfix_str(f"best so far: KL {best.kl:.3g}, agrees on {agreement:.1f} %", refresh=False)
        self.bar.update()
