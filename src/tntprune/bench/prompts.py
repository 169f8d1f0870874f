"""Times of a vision-language model by part: tower, projector, prefill, further tokens; and its cache's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import base_of, device_of, is_reduced, reduction_of, twin_of
from tntprune.backbones.base import find_backbone
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config
from tntprune.methods.checks import check_whole
from tntprune.methods.text import described
from tntprune.reduce import reduce_
from tntprune.system.clock import Watch, busy_line, keep_memory, wait
from tntprune.system.environment import stamp

PARTS = ("tower", "projector", "prefill", "decode")


@dataclass(frozen=True)
class PromptTimes:
    """Milliseconds of a batch of prompts, the medians over all rounds.

    Args:
        method: "unpruned" or the method and its options, as one line.
        output: What the language model gets, see `tntprune.reduce_`; "" of the unpruned model.
        tower: Of the vision tower; a merger of patches inside it counts here.
        projector: Of what stands between tower and language model.
        prefill: Of the language model, up to the first token of the answers.
        decode: Of each further token.
        tokens: Of the longest prompt, in the language model.
        cache: Bytes that keys and values of the prompts take.
        first_speedup: How many times as fast as the unpruned model the first token comes, by the median round.
        decode_speedup: The same of each further token.
    """

    method: str
    output: str
    tower: float
    projector: float
    prefill: float
    decode: float
    tokens: int
    cache: int
    first_speedup: float
    decode_speedup: float


@dataclass(frozen=True)
class PromptBenchmark:
    """Times of all models; `print` shows a table."""

    stamp: str
    rounds: int
    batch: int
    results: list[PromptTimes]
    notes: list[str]

    def __str__(self) -> str:
        head = (
            f"{'':40} {'output':7} {'tower':>9} {'projector':>9} {'prefill':>9} {'per token':>9} {'tokens':>7} "
            f"{'cache':>10} {'first':>7} {'further':>7}"
        )
        lines = [f"{self.batch} prompt(s), milliseconds", head]
        for row in self.results:
            lines += [row.method] if len(row.method) > 40 else []
            times = " ".join(f"{getattr(row, part):9.2f}" for part in PARTS)
            lines.append(
                f"{'' if len(row.method) > 40 else row.method:40} {row.output:7} {times} {row.tokens:7} "
                f"{row.cache / 2**20:6.1f} MiB {row.first_speedup:6.2f}x {row.decode_speedup:6.2f}x"
            )
        return "\n".join([*lines, "", *self.notes, f"{self.rounds} rounds in turns; {self.stamp}"])


@dataclass
class _Round:
    """Milliseconds of one answer, by part, and what the cache held behind the prompt."""

    tower: float = 0.0
    projector: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    tokens: int = 0
    cache: int = 0

    @property
    def first(self) -> float:
        """Up to the first token of the answers."""
        return self.tower + self.projector + self.prefill


def bench_prompts(
    model: Any,
    prompts: Mapping[str, torch.Tensor],
    configs: Sequence[Config],
    *,
    output: str | None = None,
    reduced: Sequence[nn.Module] = (),
    new_tokens: int = 16,
    rounds: int = 10,
    progress: bool = True,
) -> PromptBenchmark:
    """Time how a vision-language model answers prompts, reduced and not, in turns.

    Args:
        model: With a head for the next token, in eval mode, on the device to measure. A reduction that is on it is
            left out.
        prompts: A batch with images, as its processor makes it.
        configs: What to time. What a method has learned does not change its time.
        output: Of the configs, see `tntprune.reduce_`.
        reduced: Models of the same shape that are reduced already.
        new_tokens: Tokens behind the first one of the answers, at least 1. An answer that ends early goes on.
        rounds: How often each is timed, at least 3.
        progress: Show a bar.

    Raises:
        UsageError: a number is out of range, or nothing is to be timed.
        UserError: the model is no vision-language model with a head, or cannot be given the prompts.
    """
    check_whole("rounds", rounds, 3)
    check_whole("new_tokens", new_tokens, 1)
    if not configs and not reduced:
        raise UsageError("nothing to time beside the unpruned model; expected configs, or reduced models")
    backbone = find_backbone(model)
    if not backbone.prompts or not hasattr(model, "generate"):
        raise UserError(
            f"{type(model).__name__} answers no prompts; expected a vision-language model with a head for the next "
            "token"
        )
    base = base_of(model)
    models = [base, *reduced, *(reduce_(twin_of(base), config, output=output) for config in configs)]
    for one in models[1:]:
        reduction_of(one).warned = True  # its time does not depend on what it has learned
    device, watch = device_of(model), Watch()
    keep_memory(device)
    found: list[list[_Round]] = [[] for _ in models]
    with torch.inference_mode(), watch.on():
        for number in tqdm(range(-1, rounds), desc="timing", unit="round", disable=not progress):
            for turn in range(len(models)):  # each round begins with another model
                which = (turn + number) % len(models)
                one = _answered(models[which], prompts, new_tokens, device)
                if number >= 0:
                    found[which].append(one)
    notes = [line for line in (busy_line(watch.others()),) if line is not None]
    rows = [_row(one, own, found[0]) for one, own in zip(models, found, strict=True)]
    return PromptBenchmark(stamp(device), rounds, len(prompts["input_ids"]), rows, notes)


def _answered(model: Any, prompts: Mapping[str, torch.Tensor], new_tokens: int, device: torch.device) -> _Round:
    """Generate answers once, and time the parts."""
    backbone, own = find_backbone(model), _Round()
    tower, projector = backbone.tower(model), backbone.projector(model)
    steps, before = list[float](), list[float]()  # of each pass: its time, and that of the images so far

    def passed(spent: float, out: Any) -> None:
        steps.append(spent)
        if len(steps) == 1:
            held = [
                value for layer in out.cache.layers for value in (layer.keys, layer.values)
                if isinstance(value, torch.Tensor)
            ]  # fmt: skip
            own.tokens = max(value.shape[-2] for value in held)
            own.cache = sum(value.numel() * value.element_size() for value in held)

    def seen(spent: float, _: Any) -> None:
        own.tower += spent

    def projected(spent: float, _: Any) -> None:
        own.projector += spent

    inside = model.register_forward_pre_hook(lambda *_: before.append(own.tower + own.projector))
    with _timed(model, passed, device), _timed(tower, seen, device), _timed(projector, projected, device):
        model.generate(
            **prompts, min_new_tokens=new_tokens + 1, max_new_tokens=new_tokens + 1, do_sample=False, use_cache=True
        )
    inside.remove()
    if len(steps) != new_tokens + 1:
        raise UserError(f"{len(steps)} passes for {new_tokens + 1} tokens; expected plain generation, token by token")
    own.prefill = steps[0] - (own.tower + own.projector - before[0])  # generate may have run the tower before
    own.decode = sum(steps[1:]) / new_tokens
    return own


@contextmanager
def _timed(module: nn.Module | None, told: Callable[[float, Any], None], device: torch.device) -> Iterator[None]:
    """Pass the milliseconds and the result of each call of a module to a function."""
    if module is None:
        yield
        return
    begun: list[float] = []

    def before(*_: Any) -> None:
        wait(device)
        begun.append(time.perf_counter())

    def after(_: nn.Module, given: Any, out: Any) -> None:
        wait(device)
        told(1000 * (time.perf_counter() - begun.pop()), out)

    hooks = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _row(model: Any, own: list[_Round], base: list[_Round]) -> PromptTimes:
    method = reduction_of(model) if is_reduced(model) else None
    pairs = list(zip(base, own, strict=True))
    return PromptTimes(
        method="unpruned" if method is None else described(method.config),
        output="" if method is None else method.output,
        tower=median(one.tower for one in own),
        projector=median(one.projector for one in own),
        prefill=median(one.prefill for one in own),
        decode=median(one.decode for one in own),
        tokens=own[0].tokens,
        cache=own[0].cache,
        first_speedup=median(theirs.first / ours.first for theirs, ours in pairs),
        decode_speedup=median(theirs.decode / ours.decode for theirs, ours in pairs),
    )
