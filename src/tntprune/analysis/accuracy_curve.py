"""A reduction measured at several rates: what accuracy is left for how many multiply-accumulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tntprune.analysis.batches import photo_batches
from tntprune.analysis.evaluate import Tally
from tntprune.backbones.attach import attach, base_of, device_of, reduction_of
from tntprune.data.folders import labelled_photos
from tntprune.errors import UserError
from tntprune.methods import Combination, Config
from tntprune.methods.learned import inherit
from tntprune.system.environment import stamp

KEEPS = (0.8, 0.7, 0.6, 0.5, 0.35, 0.25)


@dataclass(frozen=True)
class AccuracyPoint:
    """One setting, in percent of the images."""

    setting: str  # "keep 0.5"
    top1: float  # whose label is the first guess
    top5: float  # whose label is among the first five
    agreement: float  # on which the first guess is that of the unpruned model
    macs: int  # per image; the mean where it differs from one to the next
    own: bool = False  # whether it is the setting that the reduction has by itself


@dataclass(frozen=True)
class AccuracyCurve:
    """What `measure_curve` found."""

    images: int  # that were counted, the same ones for every setting
    data: str  # the name of the folder they are in
    base: AccuracyPoint  # the unpruned model
    points: list[AccuracyPoint]  # in the order in which they were asked for
    stamp: str  # hardware, versions and date


@torch.inference_mode()
def measure_curve(
    model: nn.Module,
    data: str | Path,
    keeps: Sequence[float] = KEEPS,
    *,
    base: nn.Module | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    progress: bool = True,
) -> AccuracyCurve:
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
    same = dict.fromkeys(settings, 0)  # images on which each agrees with the unpruned model
    device = device_of(model)
    for images, labels in photo_batches(model, labelled_photos(Path(data), model), batch_size, workers, progress):
        images, labels = images.to(device), labels.to(device)
        guesses = unpruned.run(images, labels)
        for name, tally in tallies.items():
            same[name] += int((tally.run(images, labels) == guesses).sum())

    def point(name: str, tally: Tally, agreeing: int, own: bool) -> AccuracyPoint:
        top1, top5 = tally.accuracy()
        return AccuracyPoint(name, top1, top5, 100 * agreeing / tally.images, tally.figures().macs, own)

    points = [point(name, tally, same[name], settings[name][1]) for name, tally in tallies.items()]
    whole = point("unpruned", unpruned, unpruned.images, False)
    return AccuracyCurve(unpruned.images, Path(data).resolve().name, whole, points, stamp(device))


def _settings(config: Config, keeps: Sequence[float]) -> dict[str, tuple[Config, bool]]:
    """Return what is measured: a config by its name, and whether it is the own one, which is first if it is no rate."""
    if isinstance(config, Combination) or (config.variable and config.at is None):  # no rate to change
        return {"as saved": (config, True)}
    rates = {f"keep {keep:g}": config.changed(keep=keep) for keep in keeps}
    given = any(getattr(config, name, None) is not None for name in config.rivals)
    usual = config if given or not config.locations else config.changed(keep=config.usual)  # what no rate given means
    own = next((name for name, other in rates.items() if other in (config, usual)), None)
    found = {} if own else {"as saved": (config, True)}
    return found | {name: (other, name == own) for name, other in rates.items()}


def _variant(model: nn.Module, config: Config) -> nn.Module:
    """Return a second object that shares every weight and what was learned, with another config."""
    variant = attach(base_of(model), config, last_block=reduction_of(model).last_block)
    inherit(reduction_of(variant), reduction_of(model).state_dict())
    return variant
