"""What the library must know of a family of models, and which family a model belongs to."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens

FAMILIES = {  # the files of this folder, by the package of their models
    "timm": ("timm.vit", "timm.eva", "timm.beit"),
    "transformers": (
        "hf.vit", "hf.beit", "hf.dinov2", "hf.dinov3", "hf.clip", "hf.siglip", "hf.siglip2", "hf.aimv2",
        "hf.vitpose", "hf.idefics3", "hf.internvl", "hf.qwen", "hf.vlm",
    ),
}  # fmt: skip
REASONS = {  # why models of some classes cannot be reduced, and what would do
    "NaFlexVit": "it takes padded grids; expected a timm model of one grid, or transformers' Siglip2VisionModel",
    "ViTMAEForPreTraining": "its decoder needs masked patches; expected its encoder, a ViTMAEModel with mask_ratio=0.0",
    **dict.fromkeys(
        ("OwlViTForObjectDetection", "Owlv2ForObjectDetection"),
        "its detector reads the full grid; expected its encoder alone, an OwlViTModel or Owlv2Model",
    ),
}


class BlockCost(NamedTuple):
    """Multiply-accumulates of one block.

    Args:
        attention: For each token, without the attention map.
        pair: For each pair of tokens.
        mlp: For each token.
        key: The part of `attention` that a token costs as a key and a value alone: the norm before, two projections.
    """

    attention: int
    pair: int
    mlp: int
    key: int


class Costs(NamedTuple):
    """Multiply-accumulates of everything for one image of the model's own size.

    Args:
        embed: The patch embedding, with the norm that may follow it.
        blocks: Each block.
        norm: The final norm, for each token, prefix tokens included.
        pool: Attention pooling, for each patch token.
        head: The rest: heads, the norm after pooling, what pooling does whatever the number of tokens.
    """

    embed: int
    blocks: tuple[BlockCost, ...]
    norm: int
    pool: int
    head: int


class WordCosts(NamedTuple):
    """What follows the tower of a vision-language model costs, in multiply-accumulates if nothing else is said.

    Args:
        visual: Visual tokens of one image of the tower's own size, as the language model gets them.
        projector: For one image.
        token: Of all blocks of the language model, for each token.
        pair: Of their attention, for each pair of tokens.
        head: Of the head for the next token, once.
        cache: Bytes in the cache for each token.
    """

    visual: int
    projector: int
    token: int
    pair: int
    head: int
    cache: int


class Answer(NamedTuple):
    """What a model says of a batch.

    Args:
        logits: (B, classes), as the model gives them; of the next token of a prompt, (tokens, vocabulary).
        ce_logits: Those that cross-entropy is taken of in training: the CLS head's alone on distilled models.
        tokens: As they leave the last norm; None of a model that answers prompts.
    """

    logits: torch.Tensor
    ce_logits: torch.Tensor
    tokens: Tokens | None


class Backbone(ABC):
    """One family of models.

    Args:
        swaps: Each class whose tokens can be reduced, to the static subclass that it takes on; and each holder that
            has to do something differently too.
        opened: Each class of a block and of an attention, to the static subclass in which a reduction can act.
        holders: Classes of models that have such a one inside, to the dotted name under which it is there.
        prompts: Whether its models answer prompts with images, `Prompts`, and not images alone.
        in_parts: Whether a reduced model's blocks can be run from any one to any other; else its walk is one piece.
    """

    swaps: ClassVar[dict[type[nn.Module], type[nn.Module]]]
    opened: ClassVar[dict[type[nn.Module], type[nn.Module]]]
    holders: ClassVar[dict[type[nn.Module], str]] = {}
    prompts: ClassVar[bool] = False
    in_parts: ClassVar[bool] = True

    @property
    def names(self) -> list[str]:
        """What its models are called in messages."""
        return [kind.__name__ for kind in {**self.swaps, **self.holders}]

    def takes_images(self, model: nn.Module) -> bool:
        """Return whether a model can be called with images alone, and then answers."""
        return True

    def knows(self, model: nn.Module) -> bool:
        """Return whether this adapter is for such a model, reduced or not."""
        kind = kind_of(model)
        return any(kind in classes for classes in (self.swaps, self.swaps.values(), self.holders))

    def plain(self, module: nn.Module) -> type[nn.Module]:
        """Return the class that a module has, or had before a reduction swapped it."""
        kind = kind_of(module)
        back = {new: old for classes in (self.swaps, self.opened) for old, new in classes.items()}
        return back.get(kind, kind)

    def tower(self, model: nn.Module) -> nn.Module:
        """Return the module whose tokens are reduced: the model itself, or the part of it that sees the images."""
        inside = next((path for kind, path in self.holders.items() if isinstance(model, kind)), None)
        return model if inside is None else model.get_submodule(inside)

    def around(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules outside of the tower whose classes a reduction swaps."""
        return [model]

    def outputs(self, model: nn.Module) -> dict[str, str]:
        """Return what the tower can give to what follows in a larger model, the default first, and why not the rest.

        "grid" is a token for every patch, where the dropped ones are filled as in `tntprune.features`; "tokens" is no
        more than what was kept. Each is given with the reason why it is not supported, "" where it is. A model that has
        no choice has none.
        """
        return {}

    def cell(self, model: nn.Module, output: str) -> int:
        """Return the patches along one side of a cell that what follows joins, where it is given no more than `output`.

        1 where a patch can be left out by itself.
        """
        return 1

    def last_read(self, model: nn.Module) -> int:
        """Return the last block whose tokens are read by what follows."""
        return self.layout(model).depth

    def last_block_obstacle(self, model: nn.Module) -> str | None:
        """Return why the last block cannot run for the prefix tokens alone, in the model's forward; None if it can."""
        return "its output holds the patch tokens"

    def is_narrow(self, model: nn.Module) -> bool:
        """Return whether the last block of a model runs for the prefix tokens alone, in the model's forward."""
        reduction: Any = getattr(self.tower(model), "reduction", None)
        return getattr(reduction, "last_block", "all") == "prefix" and self.last_block_obstacle(model) is None

    def classes(self, model: nn.Module) -> int:
        """Return how many classes the model tells apart; 0 where it gives an embedding instead."""
        return int(getattr(model, "num_classes", 0))

    def input_size(self, model: nn.Module) -> tuple[int, int, int]:
        """Channels, rows and columns of the images that the model was made for."""
        tower: Any = self.tower(model)
        return (tower.patch_embed.proj.in_channels, *tower.patch_embed.img_size)

    @abstractmethod
    def obstacle(self, model: nn.Module) -> str | None:
        """Return the name of what is not supported about this model; None if nothing."""

    @abstractmethod
    def layout(self, model: nn.Module) -> Layout:
        """Return the shape of the model."""

    def projection(self, block: nn.Module) -> tuple[nn.Linear, torch.Tensor | None] | None:
        """Return the last linear layer of a block's attention, and the LayerScale (D,) behind it or None.

        None where its output is not added to the tokens as it is, or the adapter does not tell.
        """
        return None

    @abstractmethod
    def costs(self, model: nn.Module) -> Costs:
        """Return what its parts cost."""

    def projector(self, model: nn.Module) -> nn.Module | None:
        """Return what stands between the tower and the language model of a model that answers prompts, if anything."""
        return None

    def word_costs(self, model: nn.Module) -> WordCosts:
        """Return what follows the tower of a model that answers prompts."""
        raise NotImplementedError

    def output(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Run a model, reduced or not: images to logits (B, classes), or without classes to embeddings (B, D)."""
        return model(images)  # type: ignore[no-any-return]

    @abstractmethod
    def answer(self, model: nn.Module, images: torch.Tensor, narrow: bool = False) -> Answer:
        """Everything that training looks at, of a model that is reduced or not.

        Args:
            model: Of this family.
            images: (B, C, H, W).
            narrow: Whether nobody looks at patch tokens, so that the last block need not compute them.
        """

    @abstractmethod
    def judge(self, model: nn.Module, tokens: Tokens) -> Answer:
        """Return the answer to the tokens that leave the last block of a reduced model."""

    def check_images(self, model: nn.Module, images: torch.Tensor) -> None:
        """Refuse images that the forward pass of a model, reduced or not, does not take.

        Args:
            model: Of this family.
            images: A batch.

        Raises:
            UserError: they are no floating-point (B, C, H, W) with B > 0, or have another size or number of channels.
        """
        channels = self.input_size(model)[0]
        if images.ndim != 4 or images.shape[1] != channels or not len(images):
            raise UserError(
                f"images of shape {tuple(images.shape)}; expected (batch, {channels}, height, width), one image or more"
            )
        if not images.is_floating_point():
            raise UserError(
                f"images of {images.dtype}; expected floating-point pixels, normalised as the model wants them"
            )
        self.grid(model, images)

    def grid(self, model: nn.Module, images: torch.Tensor) -> tuple[int, int]:
        """Return rows and columns of patches that such images have in a model that is reduced or not.

        Raises:
            UserError: the model takes no images of that size.
        """
        tower: Any = self.tower(model)
        kind: Any = self.swaps.get(kind_of(tower), kind_of(tower))  # the reduced class knows it
        return kind.grid(tower, images)  # type: ignore[no-any-return]


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, or the one that it had before FSDP2 sharded it."""
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is not None and isinstance(module, sharded):
        kinds = type(module).__mro__  # FSDP2's own class comes before the one that it was made of
        return kinds[kinds.index(sharded) + 1]
    return type(module)


def find_backbone(model: nn.Module) -> Backbone:
    """Return the adapter of a model, reduced or not.

    Raises:
        UserError: no adapter knows the model's class, or something about the model is not supported.
    """
    adapter = _knowing(model)
    if adapter is not None:
        if reason := adapter.obstacle(model):
            raise UserError(f"{reason} is not supported")
        return adapter
    if reason := REASONS.get(type(model).__name__):
        raise UserError(f"{type(model).__name__} is not supported: {reason}")
    refuse_wrapper(model)
    packages = [package for package in FAMILIES if sys.modules.get(package)]
    known = "; ".join(
        f"{package} {', '.join(name for a in adapters_of(package) for name in a.names)}" for package in packages
    )
    raise UserError(f"{type(model).__module__}.{type(model).__name__} is not supported; expected {known}")


def takes_images(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    """Return what can be called with images alone: the model, or one's adapter for a model that asks for more."""
    backbone = _knowing(model)
    return model if backbone is None or backbone.takes_images(model) else partial(backbone.output, model)


def refuse_wrapper(model: Any) -> None:
    """Refuse a module that holds a supported model: one that is compiled, data-parallel, or has adapters around it.

    Raises:
        UserError: it is such a one; with what to give instead.
    """
    if _knowing(model) is not None:
        return
    inner = next((name for name, child in model.named_children() if _knowing(child) is not None), None)
    if hasattr(model, "get_base_model"):  # peft's models
        inner = "get_base_model()"
    if inner is not None:
        raise UserError(f"{type(model).__name__} wraps a model; expected the model inside it, which is its .{inner}")


def tower_of(model: nn.Module) -> nn.Module:
    """Return the module whose tokens are, or would be, reduced; the model itself where no adapter knows it."""
    adapter = _knowing(model)
    return model if adapter is None else adapter.tower(model)


def holder_names(tower: nn.Module) -> set[str]:
    """Return the names under which the models of its family hold a tower."""
    adapter = _knowing(tower)
    return set() if adapter is None else set(adapter.holders.values())


def _knowing(model: nn.Module) -> Backbone | None:
    """Asks only the adapters of the package that the model's class comes from, so that no other one is imported."""
    for package in {kind.__module__.split(".")[0] for kind in type(model).__mro__}:
        for adapter in adapters_of(package):
            if adapter.knows(model):
                return adapter
    return None


def supporting(kind: type) -> Backbone | None:
    """Return the adapter for models of a class; None if there is none."""
    found = adapters_of(kind.__module__.split(".")[0])
    return next((one for one in found if kind in (*one.swaps, *one.holders)), None)


def adapters_of(package: str) -> list[Backbone]:
    """Return the adapters of all families of a package."""
    names = [f"tntprune.backbones.{name}" for name in FAMILIES.get(package, ())]
    return [(sys.modules.get(name) or import_module(name)).ADAPTER for name in names]  # a compiler cannot import
