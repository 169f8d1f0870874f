"""A backbone that is trained from nothing."""

from __future__ import annotations

import torch
from torch import nn

from tntprune.backbones.base import find_backbone
from tntprune.errors import UserError
from tntprune.models import ImgSize, random_model
from tntprune.recipes import Recipe
from tntprune.reduce import reduce_


def untrained(name: str, recipe: Recipe, classes: int, device: str = "cpu", img_size: ImgSize = None) -> nn.Module:
    """A model with random weights, the same ones for the same seed, under the recipe's reduction that removes nothing.

    Args:
        name: See `models.load_model`.
        recipe: See `recipes.scratch`.
        classes: That it tells apart.
        device: Where to put it.
        img_size: Rows and columns of pixels, if not the model's own.

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
    return reduce_(model, recipe.config)
