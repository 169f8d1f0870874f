"""A backbone that is trained from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tntprune.backbones.base import find_backbone
from tntprune.backbones.classnames import name_classes
from tntprune.backbones.models import ImgSize, random_model
from tntprune.data.datasets import NEEDS
from tntprune.data.folders import class_folders
from tntprune.errors import UsageError, UserError
from tntprune.methods.checks import check_whole
from tntprune.reduce import reduce_
from tntprune.training.recipes import Recipe


def classes_in(data: str, split: str | None = None, given: int | None = None) -> tuple[int, list[str]]:
    """Count the classes of a model that learns from a folder or a data set, and name them: by the class folders.

    There are no names where another number was given.

    Raises:
        UsageError: the number is out of range, or none is given for a data set.
        UserError: the folder is missing or empty.
    """
    if given is not None:
        check_whole("num_classes", given, 1)
    if data.partition("/")[0] in NEEDS:
        if given is not None:
            return given, []
        raise UsageError(f"{data}: not a folder whose classes could be counted; expected their number, --num-classes")
    names = class_folders(Path(data, split or ""))
    return (len(names), names) if given in (None, len(names)) else (given, [])


def untrained(
    name: str,
    recipe: Recipe,
    classes: int,
    device: str = "cpu",
    img_size: ImgSize = None,
    names: Sequence[str] = (),
) -> nn.Module:
    """Make a model with random weights, the same for the same seed, under the recipe's reduction that removes nothing.

    Args:
        name: See `models.load_model`.
        recipe: See `recipes.scratch`.
        classes: That it tells apart.
        device: Where to put it.
        img_size: Rows and columns of pixels, if not the model's own.
        names: Of the classes, to be kept with the weights.

    Raises:
        UsageError: no model has that name, it takes no images of that size, or there is no such device.
        UserError: the model is not supported, or a part of it would not be trained.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.training.seed)
        model = random_model(name, device, img_size, classes)
    if find_backbone(model).layout(model).distilled:
        raise UserError(
            f"{name}: its distillation head learns from a teacher, and there is none; expected a model without one, "
            f"such as {name.replace('_distilled', '')}"
        )
    if names:
        name_classes(model, names)
    return reduce_(model, recipe.config)
