"""What a reduction does to one photo: pictures, scores, answers, costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tntprune.analysis.macs import Macs, macs
from tntprune.analysis.record import record
from tntprune.analysis.scores import record_scores
from tntprune.app.choices import ExploredModel, ReducedChoice
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.data.images import read_image
from tntprune.data.transforms import input_mode, normalization_of, transform_for
from tntprune.report.draw import to_pixels, veiled
from tntprune.system.clock import in_turns

Pixels = Any  # (H, W, 3) uint8 array
SIDE = 448  # pixels of the shorter side of a picture, at least
ROUNDS = 3  # of timing
HEAT = np.array([[20, 30, 90], [60, 120, 200], [250, 240, 140], [220, 60, 30]], dtype=float)  # from low to high


@dataclass(frozen=True)
class View:
    """A photo as a model sees it.

    Args:
        images: (1, C, H, W), normalised.
        pixels: (H, W, 3), 0 to 255.
    """

    images: torch.Tensor
    pixels: Pixels


@dataclass(frozen=True)
class Outcome:
    """What a reduction does to one photo.

    Args:
        pictures: Of the kept tokens, before the first block and after each.
        scores: The same for the scores as a heat map; None where nothing was scored up to there.
        counts: Patch tokens there.
        before: The unpruned model's first guesses, a class and its percentage; empty without classes.
        after: The reduced model's.
        cosine: Similarity of both outputs.
        cost: Multiply-accumulates.
        milliseconds: Of the unpruned and of the reduced model, in turns.
        note: Something that the user has to know, or "".
    """

    pictures: list[Pixels]
    scores: list[Pixels | None]
    counts: list[int]
    before: list[tuple[str, float]]
    after: list[tuple[str, float]]
    cosine: float
    cost: Macs
    milliseconds: tuple[float, float]
    note: str


def view(photo: Path, model: nn.Module) -> View:
    """Read a photo, upright, as a model sees it.

    Raises:
        BadImage: it cannot be read.
    """
    images = transform_for(model)(read_image(photo, input_mode(model), upright=True, name=photo.name))[None]
    pixels = to_pixels(images[0], *normalization_of(model))
    zoom = -(-SIDE // min(pixels.shape[:2]))
    return View(images, pixels.repeat(zoom, 0).repeat(zoom, 1))


@torch.inference_mode()
def outcome(explored: ExploredModel, reduced: ReducedChoice, seen: View) -> Outcome:
    """Run a photo through a model and its reduced form.

    Args:
        explored: The unpruned model.
        reduced: The same with a reduction.
        seen: The photo.
    """
    model = explored.model
    backbone, method = find_backbone(model), reduction_of(reduced.model)
    output, grid = backbone.output, backbone.grid(model, seen.images)
    method.warned = True  # the note is on the page
    with record(reduced.model) as trace, record_scores(reduced.model) as scores:
        after = output(reduced.model, seen.images).float()
    before = output(model, seen.images).float()
    whole = np.arange(grid[0] * grid[1])
    pictures, heat, counts = [], [], []
    carrier, drawn, latest = whole, seen.pixels, None
    for block in range(method.layout.depth + 1):
        if block in trace.carrier:
            carrier = trace.carrier[block][0].cpu().numpy()
            drawn = veiled(seen.pixels, carrier, grid)
        latest = heat_map(scores[block][0].cpu().numpy(), grid, seen.pixels) if block in scores else latest
        pictures.append(drawn)
        heat.append(latest)
        counts.append(int((carrier == whole).sum()))
    calls = [partial(output, one, seen.images) for one in (model, reduced.model)]
    times = in_turns(calls, ROUNDS, seen.images.device, warmup=0, progress=False)  # warm from the passes above
    return Outcome(
        pictures, heat, counts, guesses(before, explored.names), guesses(after, explored.names),
        float(torch.cosine_similarity(before, after).item()), macs(reduced.model),
        (times[0].median, times[1].median), _note(reduced, method.calibrated),
    )  # fmt: skip


def _note(reduced: ReducedChoice, calibrated: bool) -> str:
    notes = []
    if not calibrated:
        notes.append(
            f"{reduced.config.method} was not trained for this model, so its choice is random. "
            "Train it with `tntprune train`, and give `--reducer RUN`."
        )
    if reduced.over:
        notes.append("This budget cannot be met with the method's blocks; the smallest rate is shown.")
    return " ".join(notes)


def heat_map(scores: np.ndarray[Any, Any], grid: tuple[int, int], pixels: Pixels) -> Pixels:
    """Draw scores (N,) over a photo by their rank, blue for low and red for high; places without a token stay grey."""
    known = ~np.isnan(scores)
    rank = np.full(len(scores), np.nan)
    rank[known] = scores[known].argsort().argsort() / max(1, known.sum() - 1)
    stops = np.linspace(0, 1, len(HEAT))
    colour = np.stack([np.interp(np.nan_to_num(rank), stops, HEAT[:, channel]) for channel in range(3)], 1)  # (N, 3)
    colour[~known] = 128
    height, width = pixels.shape[:2]
    tall, wide = -(-height // grid[0]), -(-width // grid[1])
    spread = colour.reshape(*grid, 3).repeat(tall, 0).repeat(wide, 1)[:height, :width]
    grey = pixels.mean(2, keepdims=True)
    return (0.35 * grey + 0.65 * spread).round().astype(np.uint8)


def guesses(logits: torch.Tensor, names: Sequence[str], most: int = 5) -> list[tuple[str, float]]:
    """Return the first guesses of (1, classes) with their percentages; none for a model without classes."""
    if not names:
        return []
    shares, indices = logits[0].softmax(0).topk(min(most, len(names)))
    return [(names[index], 100 * share) for index, share in zip(indices.tolist(), shares.tolist(), strict=True)]
