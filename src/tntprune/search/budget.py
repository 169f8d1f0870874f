"""The budget of a search: the largest cost, the largest loss, or both."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from tntprune.errors import UsageError
from tntprune.system.units import unit_of

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True)
class Budget:
    """The budget that was asked for.

    Args:
        kind: "macs" per image; "latency" per batch, in seconds; "speedup", times as fast as the unpruned model; or
            "drop", points that may be lost.
        value: How much. MACs of at most 1 are a share of the unpruned model's.
        drop: Points that may be lost beside a budget of another kind, or None.
    """

    kind: Literal["macs", "latency", "speedup", "drop"]
    value: float
    drop: float | None = None

    @property
    def most_lost(self) -> float | None:
        """The points that may be lost; None where the budget does not limit them."""
        return self.value if self.kind == "drop" else self.drop

    @property
    def timed(self) -> bool:
        """Whether it is about time, and not about MACs."""
        return self.kind in ("latency", "speedup")

    def limit(self, whole: float) -> float:
        """Return the most that a schedule may cost; of a budget of points alone, as much as the unpruned model.

        Args:
            whole: What the unpruned model costs, in MACs or seconds.

        Raises:
            UsageError: the unpruned model is within the budget.
        """
        if self.kind == "drop":
            return whole
        if self.kind == "speedup":
            return whole / self.value
        found = self.value * whole if self.kind == "macs" and self.value <= 1 else self.value
        if found >= whole:
            has, asked = said(whole, self.timed), said(found, self.timed)
            raise UsageError(f"--{self.kind} {asked}: the unpruned model takes {has}; expected less than that")
        return found

    def __str__(self) -> str:
        if self.kind == "macs" and self.value <= 1:
            text = f"{100 * self.value:g} % of the MACs"
        elif self.kind in ("macs", "latency"):
            text = f"at most {said(self.value, self.timed)}"
        else:
            text = f"{self.value:g} times as fast" if self.timed else f"at most {points(self.value)} lost"
        return text if self.drop is None else f"{text} and at most {points(self.drop)} lost"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {self.kind: self.value, **({} if self.drop is None else {"drop": self.drop})}


def points(value: float) -> str:
    """Format a number of points for a person."""
    return f"{value:g} point{'' if value == 1 else 's'}"


def said(cost: float, timed: bool) -> str:
    """Format a cost for a person."""
    if timed:
        return f"{cost * 1e3:.2f} ms"
    scale, unit = unit_of(cost)
    return f"{cost / scale:.3f} {unit}"


def budget(
    macs: float | None = None,
    latency: float | str | None = None,
    speedup: float | None = None,
    drop: float | None = None,
) -> Budget:
    """Check the budget that was given: one of the four, or a drop and one of the others.

    Args:
        macs: Multiply-accumulates per image, or at most 1 for a share of the unpruned model's.
        latency: Per batch, in seconds or as text with a unit, such as "12ms".
        speedup: Times as fast as the unpruned model, above 1.
        drop: Points of top-1 that may be lost; of agreement where there are no labels, of cosine similarity (in
            hundredths) where the model has no classes.

    Raises:
        UsageError: none was given, or several limits of the cost, or one is out of range.
    """
    if isinstance(latency, str):
        text = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|ms|us)\s*", latency)
        if text is None:
            raise UsageError(f"--latency {latency}: expected a time with its unit, such as 12ms")
        latency = float(text[1]) * UNITS[text[2]]
    given = {"macs": macs, "latency": latency, "speedup": speedup, "drop": drop}
    found: dict[Any, float] = {kind: value for kind, value in given.items() if value is not None}
    costs = [kind for kind in found if kind != "drop"]
    if not found or len(costs) > 1:
        what = " and ".join(costs) or "none"
        raise UsageError(
            f"budget: {what} given; expected one of macs, latency and speedup; or drop; or drop and one of them"
        )
    for kind, value in found.items():
        least = 1 if kind == "speedup" else 0
        if not (math.isfinite(value) and value > least):
            raise UsageError(f"--{kind} {value:g}: expected a number above {least}")
        if kind == "macs" and 1 < value < 1000:
            raise UsageError(f"--macs {value:g}: expected multiply-accumulates, such as 8e8, or a share of at most 1")
        if kind == "drop" and value >= 100:
            raise UsageError(f"--drop {value:g}: expected points below 100")
    kind = (costs or ["drop"])[0]
    return Budget(kind, found[kind], found.get("drop") if costs else None)
