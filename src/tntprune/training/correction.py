"""A correction in closed form of what a reduced model lacks: the weights that project each later block's attention.

After tokens have gone, attention sums over fewer and other keys than in the unpruned model. For tokens that were not
merged, and for prefix tokens, the unpruned model's own token says what is missing. Ridge regression on the output of
the heads predicts it, and the result is added to the weights and the bias of the projection: free at run time.
Blocks are corrected one after another, each with those before it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tntprune.analysis.batches import photo_batches, pixel_batches
from tntprune.backbones.attach import device_of, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.backbones.reduced import Reduced
from tntprune.backbones.replacing import replace_weights, undo
from tntprune.data.datasets import open_photos
from tntprune.data.streams import Stream
from tntprune.errors import UsageError, UserError
from tntprune.methods.steps import IDLE, begins
from tntprune.ops.tokens import Tokens, pick
from tntprune.training.config import Training
from tntprune.training.ridge import FOLDS, Ridge

PHOTOS = 1000  # that a correction looks at, at most: their tokens are kept in memory
BATCH = 50  # images at a time
PREFIX = 10.0  # weight of a prefix token's row; that of a patch token is 1
LEAST = 2 * FOLDS  # photos
Projection = tuple[nn.Linear, torch.Tensor | None]


def projections(model: nn.Module) -> list[Projection]:
    """Return the last linear layer of each block's attention, with the LayerScale behind it, of a model that can be
    corrected.

    Raises:
        UserError: it cannot be, and why.
    """
    backbone, tower = find_backbone(model), tower_of(model)
    kind = type(model).__name__
    if backbone.prompts:
        raise UserError(f"correct=True: {kind} answers prompts; expected its vision tower alone")
    if reduction_of(model).cell > 1:
        raise UserError(
            "correct=True: this reduction keeps or drops cells of several patches; expected one of single patches"
        )
    found: list[Projection] = []
    holders: dict[int, int] = {}
    for module in model.modules():
        for value in module.parameters(recurse=False):
            holders[id(value)] = holders.get(id(value), 0) + 1
    for number, block in enumerate(tower.blocks, 1):  # type: ignore[arg-type]
        parts = backbone.projection(block)
        if parts is None:
            raise UserError(
                f"correct=True: block {number} of {kind} does not add its attention's output to the tokens as it is; "
                "expected pre-norm blocks of timm, or of transformers without LayerScale"
            )
        layer = parts[0]
        values = list(layer.parameters(recurse=False))
        if type(layer) is not nn.Linear or any(type(value) is not nn.Parameter for value in values):
            raise UserError(
                f"correct=True: the attention of block {number} of {kind} ends in a {type(layer).__name__} of its own "
                "kind (quantized, or with an adapter); expected plain torch.nn.Linear: correct first, or merge the "
                "adapter"
            )
        if layer.bias is None:
            raise UserError(
                f"correct=True: the attention of block {number} of {kind} ends without a bias, which would take "
                "a part of the correction; expected torch.nn.Linear with bias=True"
            )
        if any(not value.is_floating_point() or value.is_meta for value in values):
            raise UserError(f"correct=True: block {number} of {kind} has no floating-point weights to change")
        if any(holders[id(value)] > 1 for value in values):
            raise UserError(
                f"correct=True: the attention of block {number} of {kind} shares its weights with another layer; "
                "expected weights of its own"
            )
        found.append(parts)
    return found


def check_correctable(model: nn.Module, training: Training) -> None:
    """Refuse a model that cannot be corrected, or a training that does not go with a correction.

    Raises:
        UsageError: the training changes the model's own weights, and the unpruned model with them.
        UserError: see `projections` and `correct_`.
    """
    if training.backbone_lr:
        what = f"unfreeze={training.unfreeze!r}" if training.unfreeze else f"backbone_lr={training.backbone_lr:g}"
        raise UsageError(f"correct=True with {what}: both change the model's weights; expected one of them")
    projections(model)
    method = reduction_of(model)
    if not method.steps(method.layout.patches):
        raise UserError(
            f"correct=True: {method.config.method} removes no token here, so nothing is to be corrected; expected a "
            "smaller keep"
        )


def images_of(model: nn.Module, data: Any, progress: bool, workers: int | None, **where: Any) -> Iterator[torch.Tensor]:
    """Yield images (B, C, H, W) of what `calibrate_` takes, as they are, in their order.

    Of more than `PHOTOS` in a tensor or a folder they are taken from all over it; `where` is as in `open_photos`.
    """
    if isinstance(data, str | Path):
        photos = open_photos(data, model, training=True, labelled=False, **where)
        if not isinstance(photos, Stream):
            photos = list(photos)[:: max(1, len(photos) // PHOTOS)][:PHOTOS]
        batches = photo_batches(model, photos, BATCH, workers, progress, doing="reading")
    else:
        if isinstance(data, torch.Tensor):
            data = data[:: max(1, len(data) // PHOTOS)][:PHOTOS]
        batches = pixel_batches(model, data, None, BATCH)
    for images, _ in batches:
        yield images


@torch.inference_mode()
def correct_(model: nn.Module, batches: Iterable[torch.Tensor], progress: bool = True) -> int:
    """Correct a reduced model, in place; one that was corrected before is corrected anew.

    Args:
        model: A reduced model.
        batches: Images (B, C, H, W), as the model wants them; the first `PHOTOS` are used.
        progress: Show a bar.

    Returns:
        How many photos were used.

    Raises:
        UserError: the model cannot be corrected, or there are too few photos.
    """
    layers, method, tower = projections(model), reduction_of(model), tower_of(model)
    assert isinstance(tower, Reduced)
    undo(tower)
    narrow = method.layout.cls and method.layout.pool == "token"  # nothing reads patches behind the last attention
    with _evaluating(model):
        both = _Both(tower, _limited(batches, device_of(model)))
        if both.images < LEAST:
            raise UserError(f"correct=True: {both.images} photos; expected at least {LEAST}")
        numbers = range(both.first + 1, len(tower.blocks) + (not narrow))
        for number in tqdm(numbers, unit="block", desc="correcting", disable=not progress):
            layer, scale = layers[number - 1]
            ridge = both.compare(number, layer, scale)
            if ridge is not None:
                _apply(tower, layer, scale, ridge)
            both.advance(number)
    method.corrected = both.images if method.replaced else 0
    method.unsaved = True
    return both.images


def _limited(batches: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the first `PHOTOS` images, at most `BATCH` at a time."""
    left = PHOTOS
    for batch in batches:
        for images in batch[:left].split(BATCH):
            yield images.to(device)
        left -= min(left, len(batch))
        if not left:
            return


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _apply(tower: nn.Module, layer: nn.Linear, scale: torch.Tensor | None, ridge: Ridge) -> None:
    """Add what was regressed to a projection; its residual is behind the LayerScale, which is divided out."""
    fit = ridge.solve()
    if fit is None:
        return
    gain = torch.ones_like(fit.bias)
    if scale is not None:
        gain = torch.where(scale.abs() > 1e-6, 1 / scale.double(), 0.0)
    name = next(name for name, module in tower.named_modules() if module is layer)
    weight = layer.weight.double() + (fit.weight * gain).T  # (D, d)
    bias = layer.bias.double() + fit.bias * gain
    replace_weights(tower, {f"{name}.weight": weight.to(layer.weight.dtype), f"{name}.bias": bias.to(layer.bias.dtype)})


class _Both:
    """The tokens of all photos in the unpruned and in the reduced model, after the same block.

    Args:
        tower: The reduced model's tower.
        batches: Images.

    Attributes:
        images: How many there are.
        first: The last block that both models share.
    """

    def __init__(self, tower: Reduced, batches: Iterable[torch.Tensor]) -> None:
        self.tower = tower
        entered = [tower.enter(images) for images in batches]
        self.everywhere = [places for _, places in entered]
        self.images = sum(len(tokens.x) for tokens, _ in entered)
        self.plans = [tower.reduction.plan(tokens.count) for tokens, _ in entered]
        self.first = min(map(begins, self.plans), default=0)
        whole = [tower.onward(tokens, places, None, 0, self.first) for tokens, places in entered]
        self.whole, self.left, self.places = whole, list(whole), list(self.everywhere)
        for batch, (tokens, plan) in enumerate(zip(whole, self.plans, strict=True)):
            self.keep(batch, tower.leave(tokens, plan[self.first], None))

    def keep(self, batch: int, tokens: Tokens) -> None:
        """Keep what is left of a batch after a block, and what the next one needs to know of the tokens' places."""
        if tokens.index is not self.left[batch].index and self.everywhere[batch] is not None:
            self.places[batch] = self.tower.placed(self.everywhere[batch], tokens.index)
        self.left[batch] = tokens

    def compare(self, number: int, layer: nn.Linear, scale: torch.Tensor | None) -> Ridge | None:
        """Run a block of the unpruned model, and collect what the reduced one lacks behind its attention.

        Args:
            number: The block's.
            layer: The projection of its attention, the same in both models so far.
            scale: The LayerScale behind it, (D,), or None.

        Returns:
            The regression; None if no token has gone before the attention.
        """
        ridge, first = Ridge(layer.in_features, layer.out_features, layer.weight.device), 0
        begun = False
        for batch, (whole, left, plan) in enumerate(zip(self.whole, self.left, self.plans, strict=True)):
            gone = any(step.place.block < number for step in self.tower.reduction.steps(whole.count))
            with _watched(layer) as seen:
                self.whole[batch] = self.tower.run_block(whole, number, IDLE, self.everywhere[batch])[1]
                if gone:
                    self.tower.run_block(left, number, plan[number], self.places[batch])
            if gone:
                (_, unpruned), (features, reduced) = seen
                gain = 1 if scale is None else scale
                target = pick(whole.x + gain * unpruned, _positions(left)).float()  # (B, prefix + n, D)
                ridge.add(features, *_rows(left, target, (left.x + gain * reduced).float()), first)
                begun = True
            first += len(whole.x)
        return ridge if begun else None

    def advance(self, number: int) -> None:
        """Run a block of the reduced model, and remove the tokens that go there."""
        for batch, (before, plan) in enumerate(zip(self.left, self.plans, strict=True)):
            after = self.tower.run_block(before, number, plan[number], self.places[batch])[1]
            if number < len(self.tower.blocks):
                self.keep(batch, after)


def _positions(left: Tokens) -> torch.Tensor:
    """Return where the unpruned model has the tokens that are left, (B, prefix + n); anywhere if they have no place."""
    prefix = torch.arange(left.prefix, device=left.index.device).expand(len(left.index), -1)
    return torch.cat([prefix, left.index.clamp(min=0) + left.prefix], 1)


def _rows(left: Tokens, target: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is lacking (B, prefix + n, D), and the weight of each row (B, prefix + n).

    A token that stands for several patches, or has no place, is to stay as it is: it lacks nothing. Padding has no
    weight. Rows are weighted by the unpruned token's variance, as the norm that follows divides by it.
    """
    alone = left.index >= 0
    weight = 1 / target.var(2, correction=0).clamp(min=1e-12)
    if left.size is not None:
        alone = alone & (left.size == 1)
        weight = torch.cat([weight[:, : left.prefix], weight[:, left.prefix :] * (left.size > 0)], 1)
    residual = target - own
    residual = torch.cat([residual[:, : left.prefix], residual[:, left.prefix :] * alone[:, :, None]], 1)
    weight = torch.cat([weight[:, : left.prefix] * PREFIX, weight[:, left.prefix :]], 1)
    return residual, weight


@contextmanager
def _watched(layer: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Collect what goes into a layer and what it gives, call by call."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = layer.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    try:
        yield seen
    finally:
        handle.remove()
