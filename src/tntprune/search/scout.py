"""The search at one budget: many shapes on few photos, the best on more, then small changes to the very best."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tntprune.methods import Config
from tntprune.search.judge import NOTHING, Answers, Judge
from tntprune.search.shapes import Schedule, Shape, fit, moved, priced
from tntprune.search.space import Space

ROUNDS = (1 / 8, 3 / 8, 1.0)  # shares of the photos
SURVIVORS = 1 / 3  # of each round
SPARE = 1.5  # times the pace so far, for the schedule that is left to verify when the search ends
LATEST = 0.3  # weight of the latest batch of photos in the pace: on a busy machine it changes


@dataclass
class Tried:
    """A schedule, its answers to the photos to search on, and to those that were held out."""

    schedule: Schedule
    answers: Answers = NOTHING
    held_out: Answers = NOTHING

    def distance(self, photos: int | None = None) -> float:
        """Return the mean divergence on the first of the photos to search on, or on all that were asked."""
        return float(self.answers.distance[:photos].mean())


class Deadline:
    """Tells when a search has to end.

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
        """Return True if no more than `reserve` seconds are left, or the user interrupted; remember that it was so."""
        over = bool(self.stops) or time.monotonic() > self.end - reserve
        self.rang = self.rang or over
        return over


class Scout:
    """Searches one space.

    Args:
        space: What can be chosen.
        judge: The photos to search on.
        verifier: The photos that were held out.
        cost: Of a config.
        seed: Of the small changes.
        deadline: When to end.
        bar: That is told of each schedule.
        slower: Numbers of tokens that take longer than larger ones, to the larger ones.
    """

    def __init__(
        self, space: Space, judge: Judge, verifier: Judge, cost: Callable[[Config], float], seed: int,
        deadline: Deadline, bar: Any, slower: dict[int, int],
    ) -> None:  # fmt: skip
        self.space, self.judge, self.verifier, self.cost = space, judge, verifier, cost
        self.deadline, self.bar, self.slower = deadline, bar, slower
        self.rng = random.Random(seed)
        self.known: dict[Config, Tried] = {}  # so that no photo is asked twice
        self.pace = 0.0  # seconds per photo, lately

    def fitted(self, shapes: Sequence[Shape], limit: float) -> list[Tried]:
        """Scale shapes to a budget, each schedule once; those that cannot meet it are left out."""
        schedules = [schedule for shape in shapes if (schedule := self.fit(shape, limit)) is not None]
        tried = [self.known.setdefault(schedule.config, Tried(schedule)) for schedule in schedules]
        return list({one.schedule.config: one for one in tried}.values())

    def fit(self, shape: Shape, limit: float) -> Schedule | None:
        """Scale a shape to a budget, with more tokens where these take less time."""
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
        """Return True if there is only time to verify one schedule, or the user interrupted."""
        if self.deadline.stops:
            self.bar.set_description_str("interrupted: verifying the best so far (Ctrl-C again stops at once)")
        return self.deadline.over(SPARE * self.pace * len(self.verifier))

    def ask(self, tried: Tried, upto: int | None = None, rival: Answers | None = None) -> None:
        """Run a schedule on more of the photos to search on; see `Judge.ask`."""
        tried.answers = self._timed(self.judge, tried, tried.answers, upto=upto, rival=rival)

    def verify(self, tried: Tried, most: float | None = None) -> bool:
        """Run a schedule on all photos.

        Args:
            tried: The schedule.
            most: The photos that it may lose; it stops early when it loses more.

        Returns:
            Whether it answered all of them.
        """
        spare = None if most is None else most + self.verifier.repairs()
        tried.answers = self._timed(self.judge, tried, tried.answers, most=spare)
        if len(tried.answers) < len(self.judge):
            return False
        left = None if most is None else most - float(tried.answers.lost.sum())
        tried.held_out = self._timed(self.verifier, tried, tried.held_out, most=left)
        return len(tried.held_out) == len(self.verifier)

    def _timed(self, judge: Judge, tried: Tried, before: Answers, **limits: Any) -> Answers:
        begin = time.monotonic()
        answers = judge.ask(tried.schedule.config, before, **limits)
        if (new := len(answers) - len(before)) > 0:
            pace = (time.monotonic() - begin) / new
            self.pace = pace if not self.pace else LATEST * pace + (1 - LATEST) * self.pace
        return answers

    def rounds(self, tried: list[Tried]) -> list[Tried]:
        """Halve successively: return those that have answered all photos to search on, the best first; at least one."""
        for share in ROUNDS:
            upto = max(1, math.ceil(share * self.judge.batches))
            asked: list[Tried] = []
            for one in tried:
                if asked and self.hurry():
                    break
                self.ask(one, upto)
                asked.append(one)
                self.told(min(asked, key=lambda other: other.distance()))
            photos = min(len(one.answers) for one in asked)  # some may have answered more before
            tried = sorted(asked, key=lambda other: other.distance(photos))
            if share < 1:
                tried = tried[: max(3, math.ceil(len(tried) * SURVIVORS))]
        return tried

    def improve(self, best: Tried, limit: float, moves: int) -> Tried:
        """Try small changes to a schedule; keep each if its divergence on all photos is smaller."""
        seen = {best.schedule.config}
        for _ in range(moves):
            if self.hurry():
                break
            schedule = self.fit(moved(best.schedule, self.space, self.rng), limit)
            if schedule is not None and schedule.config not in seen:
                seen.add(schedule.config)
                other = self.known.setdefault(schedule.config, Tried(schedule))
                self.ask(other, rival=best.answers)
                if len(other.answers) == len(best.answers) and other.distance() < best.distance():
                    best = other
            self.told(best)
        return best

    def told(self, best: Tried) -> None:
        """Show one schedule more on the bar."""
        self.bar.set_postfix_str(f"best so far: {best.answers.said()}", refresh=False)
        self.bar.update()
