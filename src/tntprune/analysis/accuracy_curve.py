"""A reduction measured at several rates: what accuracy is left for how many multiply-accumulates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from tntprune.analysis.evaluate import Figures, Tally
from tntprune.backbones.attach import attach, base_of, device_of, reduction_of
from tntprune.data.folders import Photos, collate, default_workers, input_mode, labelled_photos, transform_for
from tntprune.errors import UserError
from tntprune.methods import Combination, Config
from tntprune.methods.learned import inherit
from tntprune.system.environment import stamp

KEEPS = (0.8, 0.7, 0.6, 0.5, 0.35, 0.25)


@dataclass(frozen=True)
class Point:
    """One setting.

    Args:
        setting: What it is called: "keep 0.5".
        top1: Percent of images whose label is the first guess.
        top5: Percent of images whose label is among the first five.
        agreement: Percent of images on which the first guess is that of the unpruned model.
        macs: For one image; the mean where it differs from one to the next.
        own: Whether it is the setting that the reduction has by itself.
    """

    setting: str
    top1: float
    top5: float
    agreement: float
    macs: int
    own: bool = False


@dataclass(frozen=True)
class Curve:
    """What `measure_curve` found.

    Args:
        images: Images that were counted, the same ones for every setting.
        data: The name of the folder they are in.
        base: The unpruned model.
        points: The settings, in the order in which they were asked for.
        stamp: Hardware, versions and date.
    """

    images: int
    data: str
    base: Point
    points: list[Point]
    stamp: str


def measure_curve(
    model: nn.Module,
    data: str | Path,
    keeps: Sequence[float] = KEEPS,
    *,
    base: nn.Module | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    progress: bool = True,
) -> Curve:
    """Evaluate a reduced model as it is, and with other shares of the tokens kept, all on the same photos.

    Args:
        model: Reduced, in eval mode; it stays as it is.
        data: A folder of photos with a subfolder for each class.
        keeps: Shares of the tokens that stay. A combination of reductions, or A-ViT without `at`, has no such share
            and is measured as it is.
        base: The unpruned model, if it is not the same one without its reduction: before it was fine-tuned.
        batch_size: Images at a time.
        workers: Processes that read.
        progress: Show a bar.

    Raises:
        UserError: a photo cannot be read, the folder is not one of labelled photos, or the model is in training mode.
        UsageError: a share is out of range.
    """
    settings = _settings(reduction_of(model).config, keeps)
    if model.training:
        raise UserError("the model is in training mode; expected model.eval() before it is measured")
    unpruned = Tally(base if base is not None else base_of(model))
    tallies = {name: Tally(_variant(model, config)) for name, (config, _) in settings.items()}
    photos = labelled_photos(Path(data), model)
    loader = DataLoader(
        Photos(photos, transform_for(model), input_mode(model)), batch_size=batch_size, collate_fn=collate,
        num_workers=default_workers() if workers is None else workers,
    )  # fmt: skip
    same = _run(unpruned, tallies, tqdm(loader, unit="batch", desc="measuring", disable=not progress), model)
    points = [
        _point(name, tally.figures(), 100 * same[name] / unpruned.images, settings[name][1])
        for name, tally in tallies.items()
    ]
    whole = _point("unpruned", unpruned.figures(), 100.0, False)
    return Curve(unpruned.images, Path(data).resolve().name, whole, points, stamp(device_of(model)))


@torch.inference_mode()
def _run(unpruned: Tally, tallies: dict[str, Tally], batches: Iterable[Any], model: nn.Module) -> dict[str, int]:
    """Every setting on every batch; returns on how many images each agrees with the unpruned model."""
    same = dict.fromkeys(tallies, 0)
    for batch in batches:
        if batch.bad:
            raise UserError(batch.bad[0])
        images, labels = batch.images.to(device_of(model)), batch.labels.to(device_of(model))
        guesses = unpruned.run(images, labels)
        for name, tally in tallies.items():
            same[name] += int((tally.run(images, labels) == guesses).sum())
    return same


def _settings(config: Config, keeps: Sequence[float]) -> dict[str, tuple[Config, bool]]:
    """What is measured: a config by its name, and whether it is the reduction's own; its own first if it is no rate."""
    if isinstance(config, Combination) or (config.variable and config.at is None):  # no rate to change
        return {"as saved": (config, True)}
    rates = {f"keep {keep:g}": config.changed(keep=keep) for keep in keeps}
    own = next((name for name, other in rates.items() if _same(config, other)), None)
    found: dict[str, tuple[Config, bool]] = {} if own else {"as saved": (config, True)}
    return {**found, **{name: (other, name == own) for name, other in rates.items()}}


def _same(config: Config, other: Config) -> bool:
    """Whether two configs differ in nothing: a rate that is not given is the usual one."""
    return config == other or (
        bool(config.locations)
        and all(getattr(config, name, None) is None for name in config.rivals)
        and config.changed(keep=config.usual) == other
    )


def _variant(model: nn.Module, config: Config) -> nn.Module:
    """A second object that shares every weight and what was learned, with another config."""
    variant = attach(base_of(model), config)
    inherit(reduction_of(variant), reduction_of(model).state_dict())
    return variant


def _point(setting: str, figures: Figures, agreement: float, own: bool) -> Point:
    assert figures.top1 is not None and figures.top5 is not None  # the photos have labels
    return Point(setting, figures.top1, figures.top5, agreement, figures.macs, own)
