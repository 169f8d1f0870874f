"""How each method is trained: as its own authors do on ImageNet, and in minutes on a thousand photos."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tntprune.data.augment import AUTHORS, LIGHT, Augmentation
from tntprune.errors import UsageError
from tntprune.methods import DTEM, TNT, AViT, Config, DiffRate, DynamicViT, EViT, Random
from tntprune.training.config import Training


@dataclass(frozen=True)
class Recipe:
    """A training: what learns, how, and on which images.

    Args:
        config: The reduction, with the options that its training needs.
        training: How.
        augmentation: Of the images.
        scales: Whether its rates go with the batch size, as those of DeiT's code do.
    """

    config: Config
    training: Training
    augmentation: Augmentation = LIGHT
    scales: bool = False


def published(config: Config) -> Recipe:
    """Return how a method's own authors train it on ImageNet, with the batch of all their GPUs together.

    TNT's is the command that its code was released with, on 8 GPUs of 256 images each, with recipe="paper". EViT's
    batch when it is fine-tuned is said nowhere; its rate goes with the batch, so that another one would do. Rates are
    set anew each step, where the authors' code does so each epoch.
    """
    if isinstance(config, TNT):
        training = Training(
            epochs=40, batch_size=2048, lr=2e-3, weight_decay=0.05, label_smoothing=0.1, warmup=5 / 40,
            warmup_lr=1e-6, min_lr=1e-5, ema=0.99996, drop_path=0.1, amp="fp16",
        )  # fmt: skip
        return Recipe(config.changed(recipe="paper"), training, AUTHORS, scales=True)
    once = replace(AUTHORS, repeats=1)
    if isinstance(config, DynamicViT):
        training = Training(
            epochs=30, batch_size=1024, lr=1e-3, backbone_lr=1e-5, freeze_epochs=5, weight_decay=0.05,
            label_smoothing=0.1, warmup=5 / 30, warmup_lr=1e-6, min_lr=1e-6, ema=0.9999, amp="none",
        )  # fmt: skip
        return Recipe(config, training, once)
    if isinstance(config, EViT):
        training = Training(
            epochs=30, batch_size=1024, lr=4e-5, backbone_lr=4e-5, weight_decay=1e-6, label_smoothing=0.1, warmup=0.0,
            min_lr=4e-6, amp="fp16",
        )  # fmt: skip
        return Recipe(config, training, AUTHORS, scales=True)
    if isinstance(config, AViT):
        training = Training(
            epochs=100, batch_size=512, lr=5e-4, backbone_lr=5e-4, weight_decay=0.05, label_smoothing=0.1,
            warmup=5 / 100, warmup_lr=1e-6, min_lr=1e-5, amp="fp16",
        )  # fmt: skip
        return Recipe(config, training, once)
    raise _nothing(config, "published")


def short(config: Config) -> Recipe:
    """Return what was chosen on a split of 1,000 calibration photos: minutes for a small model on two cores.

    DynamicViT is trained without its loss on tokens, which on those photos made it worse than dropping at random, and
    A-ViT with a gate that halts earlier.
    """
    if isinstance(config, TNT):
        return Recipe(config, Training(epochs=None if config.merges else 5))
    if isinstance(config, DynamicViT):
        training = Training(epochs=2, backbone_lr=1e-5, freeze_epochs=1)
        return Recipe(config.changed(token_weight=0.0), training)
    if isinstance(config, EViT):
        return Recipe(config, Training(epochs=3, backbone_lr=2e-5))
    if isinstance(config, AViT):
        return Recipe(config.changed(gate_center=10.0), Training(epochs=3, backbone_lr=2e-5))
    if isinstance(config, DTEM) or (isinstance(config, DiffRate) and config.budget is not None):
        return Recipe(config, Training())
    raise _nothing(config, "short")


def scratch() -> Recipe:
    """Return how a backbone is trained from nothing: as DeiT on ImageNet, with the batch of all its GPUs together.

    The paper does not say how its ViT/16 was trained; this is our choice for it, and for any other backbone.
    """
    training = Training(
        epochs=300, batch_size=1024, lr=1e-3, backbone_lr=1e-3, weight_decay=0.05, label_smoothing=0.1,
        warmup=5 / 300, warmup_lr=1e-6, min_lr=1e-5, ema=0.99996, drop_path=0.1,
    )  # fmt: skip
    return Recipe(Random(at=1, keep=1.0), training, AUTHORS, scales=True)


def changed(recipe: Recipe, options: dict[str, Any]) -> Recipe:
    """Change options of the training or of the augmentation; None leaves an option as it is, and "none" as
    `auto_augment` is no such augmentation. Where the rates go with the batch size, those not given follow it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("auto_augment") == "none":
        given["auto_augment"] = None
    training = recipe.training
    if recipe.scales and "batch_size" in given:
        ratio = given["batch_size"] / training.batch_size
        rates = {name: getattr(training, name) * ratio for name in ("lr", "backbone_lr")}
        ends = {name: getattr(training, name) for name in ("warmup_lr", "min_lr")}
        peak = given.get("lr", rates["lr"])
        given = {**rates, **{name: min(end, peak) for name, end in ends.items() if end is not None}, **given}
    own = set(Training.__dataclass_fields__)
    training = replace(training, **{name: value for name, value in given.items() if name in own})
    images = replace(recipe.augmentation, **{name: value for name, value in given.items() if name not in own})
    return replace(recipe, training=training, augmentation=images)


def _nothing(config: Config, kind: str) -> UsageError:
    if isinstance(config, DTEM | DiffRate):
        budget = ", and a budget" if isinstance(config, DiffRate) and config.budget is None else ""
        return UsageError(f"{config.method} has no {kind} recipe: expected --preset short, or none{budget}")
    return UsageError(
        f"{config.method} has no {kind} recipe: nothing of it is trained on a pretrained model; expected tnt, "
        "dynamicvit, evit or avit, or options of the training without a recipe"
    )
