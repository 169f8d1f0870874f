"""`find_plan`: photos, training where the method learns, the search, the front and the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import base_of, is_reduced, reduction_of
from tntprune.data.batches import PhotoSource, TensorSource
from tntprune.data.loading import Photos, default_workers
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config
from tntprune.methods.checks import check_whole
from tntprune.search.budget import Budget, budget, said
from tntprune.search.budget_search import BudgetSearch
from tntprune.search.found import Found, doubts
from tntprune.search.latency import LatencyCurve
from tntprune.search.photo_shares import Part, Shares, shares
from tntprune.search.scout import Deadline
from tntprune.search.space import Space
from tntprune.search.timing import measure_latency, time_schedules
from tntprune.search.verified import front, proxy_error
from tntprune.serialization.fingerprint import identity
from tntprune.serialization.plan import Plan
from tntprune.system.clock import Watch, busy_line
from tntprune.system.interrupts import interrupts
from tntprune.training.calibrate import fit as train
from tntprune.training.config import Training
from tntprune.training.recipes import Recipe

TIMING = 20.0  # seconds in which verified schedules are timed, where there are minutes; of less time a tenth


def find_plan(
    model: nn.Module,
    data: str | Path | torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    method: Config | None = None,
    macs: float | None = None,
    latency: float | str | None = None,
    speedup: float | None = None,
    drop: float | None = None,
    blocks: Sequence[int] | None = None,
    photos: int = 512,
    minutes: float = 10.0,
    moves: int = 60,
    seed: int = 0,
    workers: int | None = None,
    curve: LatencyCurve | None = None,
    batch_size: int = 1,
    dtype: str = "fp32",
    last_block: str | None = None,
    base: nn.Module | None = None,
    weights: Path | None = None,
    made_by: str = "",
    progress: bool = True,
) -> Found:
    """Find where a method should remove tokens, and how many, so that the model keeps the most within a budget.

    Give one of `macs`, `latency` and `speedup`, or `drop`, or both. With both, the plan is the cheapest one that keeps
    the drop; if none does, the one that loses the least at that cost. Simple schedules (one block, the paper's three
    blocks, all blocks evenly) are verified first, so that none of them beats the plan on the photos. With a budget of
    time the search goes by a latency curve, and in the end times what it has verified, to choose.

    The same seed gives the same plan, unless the time ended the search or is its budget. While schedules are tried, the
    first Ctrl-C or SIGTERM ends it as the clock does.

    Args:
        model: In eval mode; it is not changed. What its reduction has learned is used.
        data: Photos: a folder, what timm's `create_dataset` opens, or images (n, C, H, W), normalised. The loss is of
            top-1 where there are labels, else of agreement with the unpruned model. Of a model without classes it is
            of the mean cosine similarity between the embeddings, in hundredths, and the photos need no labels.
        labels: (n,), with a tensor of images.
        method: What to search for, with all options but where and how many; None is the model's own reduction. One
            that learns and is not the model's own is trained first, on photos that are not held out.
        macs: A budget: multiply-accumulates of one image, or at most 1 for a share of the unpruned model's.
        latency: A budget: seconds for a batch, or text such as "12ms".
        speedup: A budget: times as fast as the unpruned model.
        drop: A budget: points that may be lost.
        blocks: Where tokens may go; None is everywhere.
        photos: To look at: half of them are searched on, and half are held out to verify what was found.
        minutes: After which the best so far is verified and returned. Training, measuring and verifying the simple
            schedules count, and are not cut short.
        moves: Small changes that are tried.
        seed: Of everything random.
        workers: Processes that read photos.
        curve: Time against tokens, measured before, for a budget of time, which measures it otherwise.
        batch_size: Of such a curve.
        dtype: Of such a curve, for weights and images.
        last_block: What the last block computes, see `reduce_`; None is as the model's own reduction has it, or "all".
        base: The unpruned model, where the model was trained together with its reduction.
        weights: The file of the model's own weights then, for the plan to go with.
        made_by: A note for the plan.
        progress: Show bars.

    Returns:
        The plan, `found.plan`, which `reduce_` takes; its cost and figures; and what else was verified.

    Raises:
        UserError: the photos cannot be used, the method cannot be searched, or no schedule meets the budget.
        UsageError: no budget or several limits of the cost were given, a value is out of range, or
            last_block="prefix" with a budget of time, which is told from whole blocks.
    """
    began = time.monotonic()
    wanted = budget(macs, latency, speedup, drop)
    check_whole("photos", photos, 8)
    check_whole("moves", moves, 0)
    if not minutes > 0:
        raise UsageError(f"minutes={minutes:g}: expected a number above 0")
    if model.training:
        raise UsageError("the model is in training mode; expected model.eval()")
    learned = None
    if method is None:
        if not is_reduced(model):
            raise UsageError("nothing to search for: expected a method, or a model with a reduction on it")
        method, learned = reduction_of(model).config, _learned_by(model)
    if last_block is None:
        last_block = reduction_of(model).last_block if is_reduced(model) else "all"
    if last_block == "prefix" and wanted.timed:
        raise UsageError("last_block='prefix' with a budget of time, which is told from whole blocks; expected 'all'")
    timing = min(TIMING, 6 * minutes) if wanted.timed else 0.0
    deadline = Deadline(60 * minutes - timing)
    space = Space(model, method, learned, blocks, last_block)
    cost: Callable[[Config], float] = space.macs
    whole = float(space.base_macs)
    if not wanted.timed:
        _check_reach(space, wanted, cost, whole)  # before anything is read or measured
    found = shares(model, data, labels, photos, seed, workers, progress)
    if learned is None and space.config([space.least] * len(space.blocks)).must_train:
        space = _trained(space, found, seed, workers, progress)
    watch, slower, timed = Watch(), {}, None
    if wanted.timed:
        if curve is None:
            with watch.on():
                curve = measure_latency(
                    base_of(model), space.template, batch_size=batch_size, dtype=dtype, progress=progress
                )
        cost, whole, slower = curve.predict, curve.unpruned, curve.slower()
        _check_reach(space, wanted, cost, whole, busy_line(watch.others()))
        timed = partial(_timed, space, curve, watch, timing, progress)
    search = BudgetSearch(
        space, wanted, cost, whole, found, deadline, moves, seed, base, progress, slower, timed
    )  # fmt: skip
    with search.bar, interrupts() as deadline.stops:
        picked = search.run()
    marks, chosen = search.marks, replace(picked, name="chosen")
    named = {one.config: one for one in [*marks, chosen]}
    verified = [named.get(one.config, one) for one in search.verified.values()]
    best, proxy = front(verified), proxy_error(verified)
    notes = [*filter(None, [found.note, busy_line(watch.others())]), *search.notes]
    notes += doubts(chosen, wanted, search.photos, proxy)
    if len(space.blocks) == 1:
        notes.append(
            f"Tokens may go at block {space.blocks[0]} alone, so that there is one schedule for a budget. For more "
            "blocks leave --at and --reducer out, or train scorers for them: tntprune train MODEL --at 1 2 3 4 5, and "
            "so on."
        )
    known = {one.name for one in marks}
    for what, names in {
        "cannot cost so little": [name for name, config in search.simple.items() if config is None],
        "were not verified": [name for name, config in search.simple.items() if config and name not in known],
        "were not tried at a smaller cost for lack of time": search.untried(),
    }.items():
        if names:
            notes.append(f"These simple schedules {what}: {', '.join(names)}.")
    if slower:
        pairs = ", ".join(f"{count} than {faster}" for count, faster in sorted(slower.items()))
        notes.append(f"On this machine fewer patch tokens take longer than more: {pairs}.")
    reduced = reduction_of(space.put(chosen.config))
    backbone = {"embed_dim": reduced.layout.embed_dim, "depth": reduced.layout.depth}
    halves = len(search.judge), len(search.verifier)
    predicted = {
        **{name: value for name, value in chosen.to_dict().items() if name not in ("name", "config")},
        "proxy": proxy, "photos": list(halves), "references": [one.to_dict() for one in marks],
    }  # fmt: skip
    own = dict(reduced.state_dict() if space.learned is None else space.learned)
    plan = Plan(
        chosen.config, own, backbone, identity(model if base is None else base), weights, made_by, wanted.to_dict(),
        predicted, [one.to_dict() for one in best], last_block=last_block,
    )  # fmt: skip
    others = [one for one in verified if one not in best and one not in marks and one is not chosen]
    ended = "interrupt" if deadline.stops else "time" if deadline.rang else ""
    return Found(
        plan, chosen, best, marks, others, wanted, whole, proxy, halves, time.monotonic() - began, ended, notes, curve,
    )  # fmt: skip


def _check_reach(
    space: Space, wanted: Budget, cost: Callable[[Config], float], whole: float, busy: str | None = None
) -> None:
    """Refuse a budget that the unpruned model meets, or that the method cannot meet whatever it removes."""
    limit = wanted.limit(whole)
    least = cost(space.config([space.least] * len(space.blocks)))
    first, last = space.blocks[0], space.blocks[-1]
    where = f"block {first}" if first == last else f"blocks {first} to {last}"
    if limit < least:
        raise UserError(
            f"{space.template.method} at {where} cannot meet {wanted}: with one token left it takes "
            f"{said(least, wanted.timed)}, {least / whole:.1%} of the unpruned model's; expected a larger budget"
            + (f" ({busy})" if busy else "")
        )


def _timed(
    space: Space, curve: LatencyCurve, watch: Watch, seconds: float, progress: bool, configs: list[Config]
) -> list[float]:
    """Measure the seconds of schedules, on the scale of the curve."""
    with watch.on():
        shares = time_schedules(
            space.base, configs, curve.about["batch_size"], curve.about["dtype"], seconds, progress
        )  # fmt: skip
    return [share * curve.unpruned for share in shares]


def _trained(space: Space, found: Shares, seed: int, workers: int | None, progress: bool) -> Space:
    """Train the method of a space on the photos that are not held out, as `tntprune train` does; return the space."""
    config = space.everywhere()
    model = space.put(config)
    recipe = Recipe(config, Training(seed=seed))
    training, labelled = recipe.training, found.searched.labels is not None
    source: Any
    if isinstance(found.training, Part):
        source = TensorSource(*found.training, training.batch_size, seed)
    else:
        reader = Photos(found.training, transform_for(model, recipe.augmentation), input_mode(model), seed)
        workers = default_workers() if workers is None else workers
        source = PhotoSource(reader, training.batch_size, seed, workers, labelled)
    train(model, source, training, progress=progress, keep=True)
    return Space(space.base, space.template, _learned_by(model), space.blocks, space.last_block)


def _learned_by(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in reduction_of(model).state_dict().items()}
