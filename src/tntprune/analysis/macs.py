"""Multiply-accumulates in closed form: no weights, no run. What the paper calls GFLOPs.

Counted as the paper does, with fvcore's rules: matrix products in full, 5 for each element of a normalisation, nothing
for softmax, activations, sorting and gathering. Fused attention is counted too, which counting tools miss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import is_reduced, reduction_of
from tntprune.backbones.base import Costs, find_backbone, tower_of
from tntprune.errors import UsageError, UserError
from tntprune.methods.steps import Counts, Step, before_last, counts
from tntprune.system.units import unit_of


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates per image."""

    macs: int  # in all
    base_macs: int  # of the unpruned model
    tokens: list[int]  # patch tokens that enter each block
    mlp_tokens: list[int]  # patch tokens that enter each block's MLP
    per_block: list[int]
    reduction: dict[int, int]  # of the steps that remove tokens, by block
    embed: int  # of the patch embedding
    head: int  # of everything after the last block
    last_block: str = "all"  # which tokens it computes: "all", or the "prefix" tokens, where mlp_tokens is 0
    most: bool = False  # whether tokens differ from image to image, so that each figure is the most that is possible

    def __str__(self) -> str:
        scale, unit = unit_of(self.base_macs)
        lines = [f"{self.macs / scale:.2f} {unit} instead of {self.base_macs / scale:.2f}"]
        if self.most:
            lines[0] = f"at most {lines[0]}: each image keeps another number of tokens, and `eval` tells the mean"
        lines += [
            f"  block {number:2}: {tokens:4} patch tokens, {cost / scale:.3f} {unit}"
            for number, (tokens, cost) in enumerate(zip(self.tokens, self.per_block, strict=True), 1)
        ]
        lines[-1] += ", as keys and values alone" * (self.last_block == "prefix")
        lines.append(f"  scoring and removing: {sum(self.reduction.values()) / scale:.3f} {unit}")
        lines.append(f"  embedding and head: {(self.embed + self.head) / scale:.3f} {unit}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PromptMacs(Macs):
    """Of a vision-language model: `macs` are those of a prompt with one image up to the first word of the answer.

    `tokens`, `per_block` and the like are its tower's. Attention is counted in full, as if it were not causal.
    """

    text: int = 0  # tokens of text in the prompt
    visual: int = 0  # visual tokens that the language model gets
    base_visual: int = 0  # of the unpruned model; the same of each that follows
    tower: int = 0
    base_tower: int = 0
    projector: int = 0  # 0 where the tower merges cells of patches itself
    prefill: int = 0  # the language model, and its head for one token
    base_prefill: int = 0
    decode: int = 0  # one more word of the answer
    base_decode: int = 0
    cache: int = 0  # bytes that the keys and values of the prompt take
    base_cache: int = 0

    def __str__(self) -> str:
        after = f"; projector: {human(self.projector)}" if self.projector else ""
        lines = [
            f"{human(self.macs)} instead of {human(self.base_macs)}, with {self.text} tokens of text",
            f"  visual tokens: {self.visual} instead of {self.base_visual}",
            f"  tower: {human(self.tower)} instead of {human(self.base_tower)}{after}",
            f"  prefill: {human(self.prefill)} instead of {human(self.base_prefill)}",
            f"  each further word: {human(self.decode)} instead of {human(self.base_decode)}",
            f"  cache: {self.cache / 2**20:.1f} MiB instead of {self.base_cache / 2**20:.1f} MiB",
        ]
        return "\n".join(lines)


def human(count: int) -> str:
    """Return a number of multiply-accumulates with a unit that suits it."""
    scale, unit = unit_of(count)
    return f"{count / scale:.2f} {unit}"


TEXT = 64  # tokens of text in a prompt, if nothing else is said


def macs(model: nn.Module, img_size: tuple[int, int] | None = None, text: int | None = None) -> Macs:
    """Count the multiply-accumulates of a model, reduced or not.

    Args:
        model: A supported model; it is not changed.
        img_size: Rows and columns of pixels, if not the model's own size. Only of timm's models.
        text: Of a vision-language model, the tokens of text in its prompt; None is `TEXT`.

    Returns:
        Of a vision-language model a `PromptMacs`, for one image of its tower's size: tower, projector, prefill, each
        further word, and the memory of the cache.

    Raises:
        UserError: the model is not supported, or cannot be given another image size.
        UsageError: `text` is given of a model that reads none, or below 0.
    """
    prompts = find_backbone(model).prompts
    if text is not None and not (prompts and text >= 0):
        raise UsageError(f"text={text} of {type(model).__name__}; expected 0 or more, of a vision-language model")
    if img_size is not None:
        return macs(_at_size(model, img_size))
    found = _image_macs(model)
    return _prompt_macs(model, found, TEXT if text is None else text) if prompts else found


def _prompt_macs(model: nn.Module, tower: Macs, text: int) -> PromptMacs:
    """Add to what a tower costs what follows it."""
    backbone, method = find_backbone(model), reduction_of(model) if is_reduced(model) else None
    words, shape = backbone.word_costs(model), backbone.layout(model)
    visual = words.visual
    if method is not None and method.output == "tokens":
        cells, last = shape.patches // method.cell**2, backbone.last_read(model)
        steps = [step for step in method.steps(cells) if step.place.block <= last]
        visual -= cells - counts(steps, cells, shape.depth).last

    def prefill(visual: int) -> int:
        length = text + visual
        return length * words.token + length**2 * words.pair + words.head

    def decode(visual: int) -> int:
        return words.token + (text + visual + 1) * words.pair + words.head

    own, base = prefill(visual), prefill(words.visual)
    total, base_total = (one + words.projector for one in (tower.macs + own, tower.base_macs + base))
    about = {**vars(tower), "macs": total, "base_macs": base_total}
    return PromptMacs(
        **about, text=text, visual=visual, base_visual=words.visual, tower=tower.macs, base_tower=tower.base_macs,
        projector=words.projector, prefill=own, base_prefill=base, decode=decode(visual),
        base_decode=decode(words.visual), cache=words.cache * (text + visual),
        base_cache=words.cache * (text + words.visual),
    )  # fmt: skip


def _in_patches(steps: Iterable[Step], cell: int) -> list[Step]:
    """Return steps with their numbers of patches, where tokens are whole cells of so many patches along a side."""
    unit = cell**2
    return [
        step._replace(entering=unit * step.entering, ranked=unit * step.ranked, leaving=unit * step.leaving)
        for step in steps
    ]


def _image_macs(model: nn.Module) -> Macs:
    """Count what an image costs; of a vision-language model, in its tower."""
    backbone = find_backbone(model)
    layout, costs = backbone.layout(model), backbone.costs(model)
    method = reduction_of(model) if is_reduced(model) else None
    steps, narrow = () if method is None else method.steps(layout.patches // method.cell**2), backbone.is_narrow(model)
    if narrow:
        steps = before_last(steps, layout.depth)
    left = counts(_in_patches(steps, 1 if method is None else method.cell), layout.patches, layout.depth)
    if narrow:
        left = left.narrowed()
    own: dict[int, int] = {}
    for step in steps:
        assert method is not None
        own[step.place.block] = own.get(step.place.block, 0) + method.macs(step)
    base = model_macs(costs, counts((), layout.patches, layout.depth), layout.prefix)
    total = model_macs(costs, left, layout.prefix) + sum(own.values())
    per_block, head = block_macs(costs, left, layout.prefix), head_macs(costs, left.last, layout.prefix)
    most, last = method is not None and method.config.variable, "prefix" if narrow else "all"
    return Macs(total, base, left.attention, left.mlp, per_block, own, costs.embed, head, last_block=last, most=most)


def macs_by_image(model: nn.Module, counts: list[torch.Tensor]) -> list[int]:
    """Count the multiply-accumulates of each image of a batch, where the number of tokens differs between them.

    Padding, which a batch of images needs, is not counted: this is what an image costs on its own.

    Args:
        model: A reduced model.
        counts: `Trace.counts` of the batch, and at its end the tokens that are left.

    Raises:
        UserError: the model is not supported.
    """
    backbone, method = find_backbone(model), reduction_of(model)
    layout, costs = backbone.layout(model), backbone.costs(model)
    unit, narrow = method.cell**2, backbone.is_narrow(model)
    steps = method.steps(layout.patches // unit)
    if narrow:
        steps = before_last(steps, layout.depth)
    found = []
    for image in torch.stack(counts, 1).tolist():  # patch tokens before each half of each block, then at the end
        left = Counts(image[:-1:2], image[1:-1:2], image[-1])
        total = model_macs(costs, left.narrowed() if narrow else left, layout.prefix)
        for step in steps:
            half = 2 * step.place.block - (2 if step.place.inside else 1)
            total += method.macs(step._replace(entering=image[max(0, half)] // unit))
        found.append(total)
    return found


def _at_size(model: nn.Module, img_size: tuple[int, int]) -> nn.Module:
    """Copy a model without its weights, so that it takes images of another size."""
    find_backbone(model)
    shapes: dict[int, Any] = {id(value): torch.empty_like(value, device="meta") for value in model.buffers()}
    for value in model.parameters():
        shapes[id(value)] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
    twin = copy.deepcopy(model, shapes)  # what it is told to have copied already, it does not copy
    tower: Any = tower_of(twin)
    if not hasattr(tower, "set_input_size"):
        raise UserError(f"{type(model).__name__} cannot be given another image size; expected one of timm's models")
    patch = tower.patch_embed.patch_size
    if any(size < step or size % step for size, step in zip(img_size, patch, strict=True)):
        raise UserError(f"img_size={img_size}: expected rows and columns in multiples of the patches' {patch}")
    tower.set_input_size(img_size)
    return twin


def model_macs(costs: Costs, left: Counts, prefix: int) -> int:
    """Return the multiply-accumulates of a model with so many patch tokens in its blocks, without removing any."""
    return sum(block_macs(costs, left, prefix)) + costs.embed + head_macs(costs, left.last, prefix)


def block_macs(costs: Costs, left: Counts, prefix: int) -> list[int]:
    """Return the multiply-accumulates of each block with so many patch tokens in it."""
    pairs = zip(left.attention, left.mlp, costs.blocks, strict=True)
    found = [(n + prefix) * b.attention + (n + prefix) ** 2 * b.pair + (m + prefix) * b.mlp for n, m, b in pairs]
    if left.narrow:
        tokens, last = left.attention[-1] + prefix, costs.blocks[-1]
        asking = last.attention - last.key + tokens * last.pair + last.mlp
        found[-1] = tokens * last.key + prefix * asking
    return found


def head_macs(costs: Costs, patches: int, prefix: int) -> int:
    """Return the multiply-accumulates of everything after the last block, which so many patch tokens leave."""
    return costs.norm * (patches + prefix) + costs.pool * patches + costs.head
