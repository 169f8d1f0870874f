"""Measuring how long a model takes on this machine with fewer tokens.

Times are taken as `tntprune bench` takes them, eagerly and in turns, each against the unpruned model in the same round.
Blocks are timed as a chain of all of them, so that their weights come from where they come from in a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import base_of, device_of, reduction_of, twin_of
from tntprune.backbones.base import find_backbone, takes_images, tower_of
from tntprune.backbones.blocks import Acting
from tntprune.backbones.reduced import Reduced
from tntprune.bench.backends import DTYPES, check_settings
from tntprune.bench.benchmark import cast, inputs
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config, Random, options
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import BlockPlan
from tntprune.ops.tokens import Tokens
from tntprune.reduce import reduce_
from tntprune.search.latency import LatencyCurve, Line, about, attention, timed_options, work
from tntprune.system.clock import in_turns
from tntprune.system.environment import surroundings

STRIDES = (1, 2, 4, 8, 16, 32)  # from one number of tokens to the next, the first that there is time for
TILE = 16  # matrix kernels work on so many rows at a time: both sides of each multiple are always measured
TOGETHER = 16  # calls that take turns with the unpruned model
ROUNDS = (7, 40)  # the fewest and the most of each call
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
    """Time the blocks of a model at many numbers of tokens, and whole models with a method on them.

    Args:
        model: In eval mode, on the device to measure. A reduction that is on it is left out.
        config: The method; where it acts and how many stay does not matter.
        batch_size: Images at a time.
        dtype: Of weights and images.
        seconds: About how long it may take; with more, more numbers of tokens are timed, and more often.
        progress: Show bars.

    Raises:
        UsageError: there is no such precision, or a number is out of range.
        UserError: the method cannot be applied, or its time cannot be told from numbers of tokens.
    """
    if not seconds > 0:
        raise UsageError(f"seconds={seconds}: expected a number above 0")
    if config.variable or config.untimed:
        why = config.untimed or "differs from image to image"
        raise UserError(f"the number of tokens of {config.method} {why}; expected one method that drops or merges")
    turns = _Turns(model, batch_size, dtype, progress)
    layout = find_backbone(turns.base).layout(turns.base)
    configs = _spread(config, layout.patches, layout.depth)
    if not configs:
        raise UsageError(f"{config.method} acts at no block of this model; expected one at which it can")
    models = [turns.reduced(one) for one in configs]
    method = reduction_of(models[0])
    tower: Any = tower_of(models[0])
    looks = next((block.sees for block in method.plan(layout.patches) if block.sees), "")
    sizes = [False, True] if method.proportional else [False]
    kinds = ["whole", *["whole biased"] * (method.proportional and tower.takes_mask)]
    if looks or config.is_inside:
        kinds += ["mlp", *(attention(looks, biased) for biased in sizes)]
    if method.proportional and not tower.takes_mask:  # blocks that show nothing are run in halves then, too
        kinds += ["mlp", attention("", True)]
    kinds = list(dict.fromkeys(kinds))
    numbers = _grid(layout.patches, layout.prefix, seconds / 2 / turns.once / len(kinds))
    tokens, places = tower.enter(turns.images)
    lines = {}
    for kind in kinds:
        calls = [_chain(tower, kind, _first(tokens, count, kind), places) for count in numbers]
        doing = f"timing {kind} at {len(numbers)} numbers of tokens"
        lines[kind] = turns.shares(doing, calls, seconds / 2 / len(kinds))
    nothing = turns.reduced(Random(at=0, tokens=layout.patches))
    calls = [turns.call(one) for one in [nothing, *models]]
    shares = turns.shares("timing whole reduced models", calls, seconds / 2)
    unpruned = turns.unpruned()
    curve = LatencyCurve(
        about(model, batch_size, dtype), timed_options(config), surroundings(turns.device)["date"], layout.patches,
        layout.depth, unpruned,
        {kind: Line(tuple(numbers), tuple(one * unpruned / layout.depth for one in line))
         for kind, line in lines.items()},
        looks, method.proportional, (),
    )  # fmt: skip
    plans = [(), *(schedule([one], layout.patches, layout.depth) for one in configs)]
    rest = [share * unpruned - curve.without_steps(steps) for share, steps in zip(shares, plans, strict=True)]
    units = [work(steps, layout.patches) for steps in plans]
    return replace(curve, steps=explained(units, rest, [share * unpruned for share in shares]))


@torch.inference_mode()
def time_schedules(
    model: nn.Module, configs: Sequence[Config], batch_size: int, dtype: str, seconds: float, progress: bool = True
) -> list[float]:
    """Time whole models with schedules on them, for about so many seconds.

    Returns:
        The time of each as a share of the unpruned model's.
    """
    turns = _Turns(model, batch_size, dtype, progress)
    models = [turns.reduced(config) for config in configs]
    return turns.shares(
        f"timing {len(models)} schedules", [partial(takes_images(one), turns.images) for one in models], seconds
    )


class _Turns:
    """Times calls in turns with the unpruned model."""

    def __init__(self, model: nn.Module, batch_size: int, dtype: str, progress: bool) -> None:
        self.device, self.progress = device_of(model), progress
        check_settings((batch_size,), (dtype,), ("eager",), 3, self.device)
        self.base = base_of(cast(model, dtype))
        self.images = inputs(self.base, None, batch_size).to(self.device, DTYPES[dtype])
        self.once = in_turns([self.call(self.base)], 3, self.device, progress=False)[0].median / 1000
        self.all: list[float] = []

    def call(self, model: nn.Module) -> Call:
        """Return the call of a model on the images."""
        return partial(takes_images(model), self.images)

    def reduced(self, config: Config) -> nn.Module:
        """Return a model with a config on it."""
        model = reduce_(twin_of(self.base), config)
        reduction_of(model).warned = True  # its time does not depend on what it has learned
        return model

    def shares(self, doing: str, calls: Sequence[Call], seconds: float) -> list[float]:
        """Return each call's time as a share of the unpruned model's, the median over the rounds."""
        found: list[float] = []
        passes = 0.6 * len(calls) + math.ceil(len(calls) / TOGETHER)  # a call takes about so much of a whole pass
        rounds = min(ROUNDS[1], max(ROUNDS[0], int(seconds / self.once / passes)))
        with tqdm(total=len(calls), desc=doing, disable=not self.progress) as bar:
            for begin in range(0, len(calls), TOGETHER):
                some: list[Call] = [self.call(self.base), *calls[begin : begin + TOGETHER]]
                whole, *times = in_turns(some, rounds, self.device, warmup=1, progress=False)
                found += [median(a / b for a, b in zip(one.all, whole.all, strict=True)) for one in times]
                self.all += whole.all
                bar.update(len(times))
        return found

    def unpruned(self) -> float:
        """Return the seconds of the unpruned model, the median over everything."""
        return median(self.all) / 1000


def _spread(config: Config, patches: int, depth: int) -> list[Config]:
    """Return schedules of a method with many steps and with few, early and late, that take much and little."""
    early, known, found = max(1, depth // 4), options(type(config)), []
    similars = (0, patches // 8) if "similar" in known and not getattr(config, "merges", False) else (0,)
    wanted = [
        (range(1, depth), 0.3), (range(1, depth), 0.7), (range(1, depth, 2), 0.5), (range(early, depth), 0.3),
        (range(early, early + 3), 0.4), ([early], 0.2), ([early], 0.6), ([max(1, depth // 2)], 0.4),
    ]  # fmt: skip
    for blocks, last in wanted:
        at = tuple(block for block in blocks if block <= depth)
        for similar in similars:
            first = 0.95 * (patches - similar)
            tokens = tuple(max(1, round(first - (first - last * patches) * (n + 1) / len(at))) for n in range(len(at)))
            own: dict[str, Any] = {"similar": similar, "decreasing": False}
            own |= {"noise_blocks": at} if config.must_train else {}
            with suppress(UsageError):  # it cannot act there, or drops nothing for being similar
                one = config.changed(at=at, tokens=tokens, **{name: own[name] for name in own if name in known})
                schedule([one], patches, depth)
                found.append(one)
    return found


def _grid(patches: int, prefix: int, passes: float) -> list[int]:
    """Return the numbers of tokens to measure, as many as there is time for in so many unpruned passes."""
    edges = {n for tile in range(0, patches + prefix, TILE) for n in (tile - prefix, tile - prefix + 1)}
    for stride in STRIDES:
        found = sorted({n for n in {*range(patches, 0, -stride), *edges, 1} if 1 <= n <= patches})
        if 0.6 * len(found) * ROUNDS[0] <= passes:
            break
    return found


def _first(tokens: Tokens, count: int, kind: str) -> Tokens:
    """Return the first of the patch tokens; they have a size where it matters."""
    index = tokens.index[:, :count].contiguous()
    size = torch.full_like(index, 2, dtype=torch.float32) if "biased" in kind else None
    return replace(tokens, x=tokens.x[:, : tokens.prefix + count].contiguous(), index=index, size=size)


def _chain(tower: Reduced, kind: str, tokens: Tokens, everywhere: Any) -> Call:
    """Return a call of all blocks, or of one half of each, one after the other on so many tokens."""
    places = None if everywhere is None else tower.placed(everywhere, tokens.index)

    def half(number: int, x: torch.Tensor) -> torch.Tensor:
        bias = tower.reduction.bias(tokens, number)
        if kind.startswith("whole"):
            return tower.run(number, x, places, bias=bias)
        if kind == "mlp":
            return tower.opened(number).mlp_half(x)
        inside = Acting(tokens, tower.reduction, number, BlockPlan("map" if "map" in kind else "heads"), bias)
        return tower.opened(number).attention_half(x, inside, **tower.context(number, places, True))

    def call() -> None:
        x = tokens.x
        for number in range(1, len(tower.blocks) + 1):
            x = half(number, x)

    return call


def explained(work: Sequence[Sequence[float]], rest: Sequence[float], whole: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of each unit of work, none below 0, that explain best what models take.

    The nearest solution that is nowhere negative is the least-squares solution of some of the columns alone, so that
    all choices of them are tried.

    Args:
        work: Of each model.
        rest: The seconds of each model that its blocks do not explain.
        whole: All its seconds: an error counts as a share of them.
    """
    time = torch.tensor(whole, dtype=torch.float64)[:, None]  # (models, 1)
    table = torch.tensor(work, dtype=torch.float64) / time  # (models, units)
    goal = torch.tensor(rest, dtype=torch.float64)[:, None] / time
    columns = [column for column in range(table.shape[1]) if bool(table[:, column].any())]
    best, found = float(goal.square().sum()), torch.zeros(table.shape[1], dtype=torch.float64)
    for size in range(1, len(columns) + 1):
        for chosen in map(list, combinations(columns, size)):
            solution = torch.linalg.lstsq(table[:, chosen], goal, driver="gelsd").solution
            error = float((table[:, chosen] @ solution - goal).square().sum())
            if error < best * (1 - 1e-9) and bool((solution >= 0).all()):
                best, found = error, torch.zeros_like(found).index_put((torch.tensor(chosen),), solution[:, 0])
    return tuple(found.tolist())
