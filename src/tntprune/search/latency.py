"""Measuring how long a reduced model takes on this machine, from the numbers of its tokens.

Times are taken as `tntprune bench` takes them, eagerly and in turns, each against the unpruned model in the same round.
Blocks are timed as a chain of all of them, so that their weights come from where they come from in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import base_of, device_of, reduction_of, twin_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.backbones.reduced import Acting, Reduced
from tntprune.bench.backends import DTYPES, check_settings
from tntprune.bench.measure import cast, inputs
from tntprune.errors import UsageError
from tntprune.methods import Config, Random
from tntprune.methods.steps import BlockPlan
from tntprune.ops.tokens import Tokens
from tntprune.reduce import reduce_
from tntprune.search.costs import Line, Part
from tntprune.search.steps import Sample, fit, part_of, samples, settle, single
from tntprune.search.time_curve import LatencyCurve, about, attention
from tntprune.system.clock import in_turns
from tntprune.system.environment import surroundings

__all__ = ["LatencyCurve", "about", "measure_latency"]

STRIDES = (1, 2, 4, 8, 16, 32)  # from one number of tokens to the next, the first that there is time for
TILE = 16  # matrix kernels work on so many rows at a time: both sides of each multiple are always measured
TOGETHER = 16  # calls that take turns with the unpruned model
BLOCKS, WHOLE = 0.5, 0.3  # of the time are for the blocks on their own, and for whole models
ENOUGH = 100  # rounds of whole models, where they are fast
REPEATS = 4  # of a step, which is short, in one call
Call = Callable[[], Any]


@torch.inference_mode()
def measure_latency(
    model: nn.Module,
    config: Config,
    *,
    batch_size: int = 1,
    dtype: str = "fp32",
    seconds: float = 60.0,
    progress: bool = True,
) -> LatencyCurve:
    """Time the blocks of a model at many numbers of tokens, and the steps of a method between them.

    Args:
        model: In eval mode, on the device to measure. A reduction that is on it is left out.
        config: The method whose steps are to be known; where it acts and how many stay does not matter.
        batch_size: Images at a time.
        dtype: Of weights and images.
        seconds: About how long it may take; with more, more numbers of tokens are timed, and more often.
        progress: Show bars.

    Raises:
        UsageError: there is no such precision, or a number is out of range.
        UserError: the method cannot be applied, or its time cannot be told from numbers of tokens.
    """
    device = device_of(model)
    check_settings((batch_size,), (dtype,), ("eager",), 3, device)
    if not seconds > 0:
        raise UsageError(f"seconds={seconds}: expected a number above 0")
    base = base_of(cast(model, dtype))
    layout = find_backbone(base).layout(base)
    configs: Sequence[Config] = getattr(config, "parts", [config])
    parts = tuple(part_of(one, layout) for one in configs)
    reduced = reduce_(twin_of(base), config)
    tower: Any = tower_of(reduced)
    images = inputs(base, None, batch_size).to(device, DTYPES[dtype])
    tokens, places = tower.enter(images)
    found = [
        s for one, part in zip(configs, parts, strict=True) for s in samples(one, part, layout, tower, tokens, places)
    ]
    kinds = _kinds(parts, found)

    def unpruned() -> None:
        base(images)

    timer = _Timer(unpruned, device, seconds, progress)
    counts, timer.rounds = _grid(layout.patches, layout.prefix, timer, len(kinds))
    few = sorted({1, max(1, layout.patches // 2), layout.patches})
    around = timer.shares("timing what is around the blocks", [_around(reduced, tower, images, tokens, n) for n in few])
    blocks = {}
    for kind in kinds:
        calls = [_chain(tower, kind, _first(tokens, count, kind), places) for count in counts]
        shares = timer.shares(f"timing {kind} at {len(counts)} numbers of tokens", calls)
        blocks[kind] = [share / layout.depth for share in shares]
    shares = timer.shares(f"timing {len(found)} steps of {configs[0].method}", [_repeated(one) for one in found])
    whole = timer.whole()
    costs = {}
    for name in dict.fromkeys(one.name for one in found):
        timed = [(one, share * whole / REPEATS) for one, share in zip(found, shares, strict=True) if one.name == name]
        sized = any(one.sized for one, _ in timed)
        costs[name] = fit([one.step for one, _ in timed], [spent for _, spent in timed], sized)
    curve = LatencyCurve(
        about(model, batch_size, dtype), surroundings(device)["date"], layout.patches, layout.depth, whole,
        Line(tuple(few), tuple(share * whole for share in around)),
        {kind: Line(tuple(counts), tuple(share * whole for share in line)) for kind, line in blocks.items()},
        parts, costs,
    )  # fmt: skip
    return _in_a_model(curve, base, config, images, timer)


def _kinds(parts: Sequence[Part], found: Sequence[Sample]) -> list[str]:
    """What has to be timed of a block."""
    biased = any(one.sized for one in found) and any(part.proportional for part in parts)
    if not (biased or any(part.sees for part in parts) or any(one.step.place.inside for one in found)):
        return ["whole"]
    maps = {False, *(part.sees == "map" for part in parts)}
    return ["whole", "mlp", *(attention(map, bias) for map in sorted(maps) for bias in sorted({False, biased}))]


class _Timer:
    """Times calls in turns with the unpruned model, whose share of time is what is kept of each."""

    def __init__(self, unpruned: Call, device: torch.device, seconds: float, progress: bool) -> None:
        self.unpruned, self.device, self.seconds, self.progress = unpruned, device, seconds, progress
        self.rounds = 5
        self.once = in_turns([unpruned], 3, device, progress=False)[0].median / 1000
        self.all: list[float] = []

    def shares(self, doing: str, calls: Sequence[Call]) -> list[float]:
        """Each call's time as a share of the unpruned model's, the median over rounds."""
        found: list[float] = []
        with tqdm(total=len(calls), desc=doing, disable=not self.progress) as bar:
            for begin in range(0, len(calls), TOGETHER):
                some = calls[begin : begin + TOGETHER]
                times = in_turns([self.unpruned, *some], self.rounds, self.device, warmup=1, progress=False)
                whole = times[0].all
                found += [median(a / b for a, b in zip(one.all, whole, strict=True)) for one in times[1:]]
                self.all += whole
                bar.update(len(some))
        return found

    def whole(self) -> float:
        """Seconds of the unpruned model, the median over everything."""
        return median(self.all) / 1000


def _grid(patches: int, prefix: int, timer: _Timer, kinds: int) -> tuple[list[int], int]:
    """The numbers of tokens to measure and the rounds, as many as there is time for."""
    edges = {n for tile in range(0, patches + prefix, TILE) for n in (tile - prefix, tile - prefix + 1)}
    cost = 1 / TOGETHER + (0.5 + 0.3 * (kinds - 1)) / kinds  # of one call, in unpruned passes
    for stride in STRIDES:
        counts = sorted({n for n in {*range(patches, 0, -stride), *edges, 1} if 1 <= n <= patches})
        rounds = int(BLOCKS * timer.seconds / (timer.once * cost * len(counts) * kinds)) - 1
        if rounds >= 7:
            break
    return counts, min(25, max(3, rounds))


def _first(tokens: Tokens, count: int, kind: str) -> Tokens:
    """The first of the patch tokens; they have a size where it matters."""
    last = tokens.prefix + count
    index = tokens.index[:, :count].contiguous()
    size = torch.full_like(index, 2, dtype=torch.float32) if "biased" in kind else None
    return replace(tokens, x=tokens.x[:, :last].contiguous(), index=index, size=size)


def _chain(tower: Reduced, kind: str, tokens: Tokens, everywhere: Any) -> Call:
    """All blocks, or one half of each, one after the other on so many tokens."""
    places = None if everywhere is None else tower.placed(everywhere, tokens.index)
    numbers = range(1, len(tower.blocks) + 1)

    def whole() -> None:
        x = tokens.x
        for number in numbers:
            x = tower.run(number, x, places)

    def mlp() -> None:
        x = tokens.x
        for number in numbers:
            x = tower.opened(number).mlp_half(x)

    def first() -> None:
        x = tokens.x
        for number in numbers:
            inside = Acting(
                tokens,
                tower.reduction,
                number,
                BlockPlan(sees="map" if "map" in kind else "heads"),
                tower.reduction.bias(tokens, number),
            )
            x = tower.opened(number).attention_half(x, inside, **tower.context(number, places, True))

    return {"whole": whole, "mlp": mlp}.get(kind, first)


def _around(model: nn.Module, tower: Reduced, images: torch.Tensor, tokens: Tokens, count: int) -> Call:
    """The embedding and, with so many tokens left, the head."""
    backbone, left = find_backbone(model), _first(tokens, count, "")

    def call() -> None:
        tower.enter(images)
        backbone.judge(model, left)

    return call


def _repeated(sample: Sample) -> Call:
    def call() -> None:
        for _ in range(REPEATS):
            sample.call()

    return call


def _in_a_model(
    curve: LatencyCurve, base: nn.Module, config: Config, images: torch.Tensor, timer: _Timer
) -> LatencyCurve:
    """The curve with what shows in whole models alone: what the way from block to block costs, and how much longer
    steps take there than on their own.
    """
    tried, depth, patches = [config], curve.depth, curve.patches
    if not hasattr(config, "parts"):
        for blocks in (range(1, depth), range(1, depth, 2), range(depth // 4, depth)):
            falling = [max(1, round(patches * (1 - 0.7 * (n + 1) / len(blocks)))) for n in range(len(blocks))]
            with suppress(UsageError):
                tried.append(single(config, tuple(blocks), falling, 0))
    models = [reduce_(twin_of(base), one) for one in (Random(at=0, tokens=patches), *tried)]  # the first drops nothing
    for model in models:
        reduction_of(model).warned = True  # its time does not depend on what it has learned
    timer.rounds = max(timer.rounds, min(ENOUGH, int(WHOLE * timer.seconds / (timer.once * len(models)))))
    shares = timer.shares("timing whole reduced models", [partial(model, images) for model in models])
    parts = [curve.split(one) for one in tried]
    whole = curve.unpruned / curve.scale
    rest, steps = [1.0, *(part[0] / whole for part in parts)], [0.0, *(part[1] / whole for part in parts)]
    factor, walk = settle(rest, steps, shares)
    return replace(curve, walk=walk * curve.unpruned, step_factor=factor)
