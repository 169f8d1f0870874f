"""What is measured of a method's own steps: real ones, at places and counts spread over all that there can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from tntprune.backbones.blocks import Inside
from tntprune.backbones.reduced import Reduced
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config, implementation, options
from tntprune.methods.base import Layout, Method
from tntprune.methods.steps import Step
from tntprune.ops.tokens import Tokens
from tntprune.search.costs import Part, StepCost, features, step_name, timed_options

ENTERING = (1.0, 0.8, 0.6, 0.4, 0.2)  # shares of all patch tokens
LEAVING = (0.95, 0.8, 0.5, 0.25)  # shares of those that enter
SIMILAR = (0.2, 0.6, 1.0)  # shares of those that can go for being similar


@dataclass(frozen=True)
class Sample:
    """One step to time.

    Args:
        name: Of its kind.
        step: What it does.
        call: Does it.
        sized: Whether it leaves tokens that stand for several.
    """

    name: str
    step: Step
    call: Callable[[], Any]
    sized: bool


def part_of(config: Config, layout: Layout) -> Part:
    """What is known of a method before anything is timed.

    Blocks are in one group where the same step costs as many multiply-accumulates.

    Raises:
        UserError: its time cannot be told from numbers of tokens.
    """
    if config.variable or config.method == "evovit":
        why = "differs from image to image" if config.variable else "is not what its counts say: it brings tokens back"
        raise UserError(f"the number of tokens of {config.method} {why}; expected a method that drops or merges")
    groups: dict[int, int] = {}
    first: dict[int, int] = {}
    sees, proportional = "", False
    for block in range(layout.depth + 1):
        for method in _tried(config, layout, block, max(1, layout.patches // 2), 0):
            step = method.steps(layout.patches)[0]
            groups[block] = first.setdefault(method.macs(step), block)
            sees = sees or (method.plan(layout.patches)[block].sees if block else "")
            proportional = method.proportional
    if not groups:
        raise UsageError(f"{config.method} acts at no block of this model; expected one at which it can")
    return Part(config.method, timed_options(config), sees, proportional, groups)


def samples(config: Config, part: Part, layout: Layout, tower: Reduced, tokens: Tokens, places: Any) -> list[Sample]:
    """The steps to time of one method.

    Args:
        config: Of the method.
        part: See `part_of`.
        layout: Of the model.
        tower: The reduced model, whose blocks show what the method looks at.
        tokens: All of them, as they leave the embedding.
        places: What the blocks need to know of their places.
    """
    found: dict[tuple[str, Step], Sample] = {}
    for entering in dict.fromkeys(max(2, round(share * layout.patches)) for share in ENTERING):
        grid = layout._replace(grid=(1, entering))
        for method in _methods(config, part, grid, entering):
            for step in method.steps(entering):
                key = step_name(part, step), step
                if key not in found:
                    found[key] = _sample(key[0], step, method, tower, tokens, places)
    return list(found.values())


def fit(steps: Sequence[Step], seconds: Sequence[float], sized: bool) -> StepCost:
    """The polynomial that is nearest to what was measured, each step's error as a share of its time."""
    table = torch.tensor([features(step) for step in steps], dtype=torch.float64)  # (steps, features)
    time = torch.tensor(seconds, dtype=torch.float64).clamp(min=1e-9)
    ridge = 0.02 * torch.eye(table.shape[1], dtype=torch.float64)  # few steps tell too little of what multiplies what
    ridge[0, 0] = 0.0
    goal = torch.cat([torch.ones_like(time), torch.zeros(len(ridge), dtype=torch.float64)])
    scale = time.median()
    rows = torch.cat([table * (scale / time)[:, None], ridge])
    weights = torch.linalg.lstsq(rows, goal[:, None], driver="gelsd").solution[:, 0] * scale
    return StepCost(tuple(weights.tolist()), float(time.min()) / 2, sized)


def settle(rest: Sequence[float], steps: Sequence[float], whole: Sequence[float]) -> tuple[float, float]:
    """What explains whole models best: the factor on their steps' times, from 0.5 to 10, and a constant, at least 0.

    Args:
        rest: Of each model the time without its steps, as a share of the unpruned model's time.
        steps: That of its steps, on their own.
        whole: The time of the whole model.

    Each model's error counts as a share of its time. Without evidence the factor is 1 and the constant 0: a factor of 2
    and a constant of 0.02 are held to be as likely as errors of 0.02.
    """
    parts = torch.tensor([steps, [1.0] * len(steps)], dtype=torch.float64).T  # (models, 2)
    time, known = torch.tensor(whole, dtype=torch.float64), torch.tensor(rest, dtype=torch.float64)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    left = (time - known - parts @ start) / time
    rows = torch.cat([parts / time[:, None], torch.diag(torch.tensor([0.02, 1.0], dtype=torch.float64))])
    goal = torch.cat([left, torch.zeros(2, dtype=torch.float64)])
    factor, walk = (start + torch.linalg.lstsq(rows, goal[:, None]).solution[:, 0]).tolist()
    return min(10.0, max(0.5, factor)), max(0.0, walk)


def single(config: Config, block: int | Sequence[int], tokens: int | Sequence[int], similar: int) -> Config:
    """A config of the same method with other places and counts.

    Raises:
        UsageError: the method cannot act there.
    """
    changes: dict[str, Any] = {"at": block, "tokens": tokens}
    known = options(type(config))
    if "similar" in known:
        changes["similar"] = similar
    if "noise_blocks" in known:
        changes["noise_blocks"] = block
    if getattr(config, "decreasing", False):
        changes["decreasing"] = False
    changed: Config = config.changed(**changes)
    return changed


def _tried(config: Config, layout: Layout, block: Any, tokens: Any, similar: int) -> Iterator[Method]:
    """The method at a place, or nothing where it cannot act."""
    with suppress(UsageError):
        changed = single(config, block, tokens, similar)
        method = implementation(type(changed))(changed, layout).eval()
        if method.steps(layout.patches):
            yield method


def _methods(config: Config, part: Part, layout: Layout, entering: int) -> Iterator[Method]:
    for block in dict.fromkeys(part.groups.values()):
        for share in LEAVING:
            leaving = min(entering - 1, max(1, round(share * entering)))
            extra = min(leaving, entering - leaving)  # as many as can go for being similar
            drops = "similar" in options(type(config)) and not getattr(config, "merges", False)
            removed = [0, *(max(1, round(part * extra)) for part in SIMILAR)] if drops else [0]
            for similar in dict.fromkeys(removed):
                yield from _tried(config, layout, block, leaving, similar)
                if similar:  # with several places, what is similar may go elsewhere
                    several = (block, block + 1), (leaving, max(1, leaving - 1))
                    yield from _tried(config, layout, *several, similar)


def _sample(name: str, step: Step, method: Method, tower: Reduced, tokens: Tokens, places: Any) -> Sample:
    """One step with what it is given in a model."""
    method = method.to(tokens.x.device)
    count = step.entering
    few = replace(
        tokens, block=step.place.block,
        x=tokens.x[:, : tokens.prefix + count].contiguous(), index=tokens.index[:, :count].contiguous(),
        grid_size=method.layout.patches,
    )  # fmt: skip
    heads = None
    sees = method.sees(step)
    if sees and step.place.block:
        near = None if places is None else tower.placed(places, few.index)
        inside = Inside()
        tower.opened(1).attention_half(few.x, inside, **tower.context(1, near, True))
        heads = inside.heads
        assert heads is not None
        if sees == "map":
            heads = replace(heads, attention=heads.map())
    sized = method(few, step, heads).size is not None
    if sized:  # then most of the steps get tokens that have one
        few = replace(few, size=torch.ones_like(few.index, dtype=torch.float32))

    def call() -> None:
        out = method(few, step, heads)
        if places is not None:
            tower.placed(places, out.index)

    return Sample(name, step, call, sized)
