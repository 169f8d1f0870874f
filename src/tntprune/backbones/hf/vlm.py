"""Hugging Face's vision-language models: reduced in their towers and, if possible, before their language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.idefics3 import modeling_idefics3 as idefics3_model
from transformers.models.internvl import modeling_internvl as internvl_model
from transformers.models.llava import modeling_llava as llava
from transformers.models.llava_next import modeling_llava_next as llava_next
from transformers.models.llava_onevision import modeling_llava_onevision as onevision
from transformers.models.paligemma import modeling_paligemma as paligemma
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_moe
from transformers.models.smolvlm import modeling_smolvlm as smolvlm
from transformers.models.vipllava import modeling_vipllava as vipllava

from tntprune.backbones.base import Answer, Backbone, Costs, WordCosts, kind_of
from tntprune.backbones.hf import clip, idefics3, internvl, qwen, siglip, vit
from tntprune.backbones.hf.adapter import linears
from tntprune.backbones.hf.mrope import MropeGenerator, MropeModel
from tntprune.backbones.hf.shortening import ShorteningGenerator, ShorteningModel, VisiblePooling, VisibleProjector
from tntprune.backbones.hf.towers import ReducedModel, derived
from tntprune.backbones.prompts import Prompts
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens


@dataclass(frozen=True)
class Family:
    """One family of vision-language models.

    Args:
        module: Of transformers.
        name: How its classes' names begin.
        tower: The vision tower's name in the model without a head for the next token.
        projector: The name of the projector there.
        language: The name of the language model there.
        cells: What its projector does with patches together, so that none can be left out; "" for nothing.
        joins: From its config, the patches along one side of a cell that its projector joins: whole cells are left out.
        first: The position of the first token of a prompt.
        merges: Whether its tower merges cells of patches itself, and images have a size of their own; they are Qwen's.
    """

    module: Any
    name: str
    tower: str = "vision_tower"
    projector: str = "multi_modal_projector"
    language: str = "language_model"
    cells: str = ""
    joins: Callable[[Any], int] = lambda config: 1
    first: int = 0
    merges: bool = False

    @property
    def bases(self) -> tuple[type, type]:
        """Our base classes of its model, and of its model with a head for the next token."""
        if self.cells:
            return ReducedModel, ReducedModel
        return (MropeModel, MropeGenerator) if self.merges else (ShorteningModel, ShorteningGenerator)


def _pooled(config: Any) -> int:
    """Return the patches along one side of a cell that Gemma 3 averages."""
    return int(config.vision_config.image_size // config.vision_config.patch_size // isqrt(config.mm_tokens_per_image))


FAMILIES = (
    Family(llava, "Llava"),
    Family(llava_next, "LlavaNext"),
    Family(vipllava, "VipLlava"),
    Family(paligemma, "PaliGemma", first=1),
    Family(onevision, "LlavaOnevision", cells="it resamples the grid of an image's crops"),
    Family(gemma3, "Gemma3", joins=_pooled),
    Family(internvl_model, "InternVL", joins=lambda config: round(1 / config.downsample_ratio)),
    *(
        Family(module, name, "vision_model", "connector", "text_model", joins=lambda config: int(config.scale_factor))
        for module, name in ((idefics3_model, "Idefics3"), (smolvlm, "SmolVLM"))
    ),
    *(
        Family(module, name, "visual", "visual.merger", merges=True)
        for module, name in (
            (qwen2, "Qwen2VL"),
            (qwen2_5, "Qwen2_5_VL"),
            (qwen3, "Qwen3VL"),
            (qwen3_moe, "Qwen3VLMoe"),
        )
    ),
)
TOWERS: tuple[Backbone, ...] = (
    clip.ADAPTER, siglip.ADAPTER, vit.ADAPTER, idefics3.ADAPTER, internvl.ADAPTER, qwen.ADAPTER,
)  # fmt: skip


def _made(ending: str, number: int) -> dict[Any, Any]:
    """Return the class of each family whose name ends so, and the one that it takes on: the one of its `bases`."""
    made = {}
    for family in FAMILIES:
        kind, base = getattr(family.module, family.name + ending), family.bases[number]
        more = {"first": family.first, "tower_name": family.tower} if base is ShorteningModel else {}
        made[kind] = derived(kind, base, home=__name__, **more)
    return made


MODELS = _made("Model", 0)
GENERATORS = _made("ForConditionalGeneration", 1)
PROJECTORS = {  # and the parts of them that see single tokens
    kind: derived(kind, VisiblePooling if family.name == "Gemma3" else VisibleProjector, home=__name__)
    for family in FAMILIES
    if not (family.cells or family.merges)
    for kind in (
        getattr(family.module, f"{family.name}MultiModalProjector", None)
        or getattr(family.module, f"{family.name}SimpleMLP"),
    )
}
BY_CLASS = {
    getattr(family.module, family.name + ending): family
    for family in FAMILIES
    for ending in ("Model", "ForConditionalGeneration")
}


class VisionLanguage(Backbone):
    """The adapter. What concerns the tower alone is asked of the tower's own adapter."""

    prompts = True
    in_parts = False

    swaps: ClassVar = {**MODELS, **GENERATORS}
    opened: ClassVar = {
        **PROJECTORS,
        **{kind: new for tower in TOWERS for classes in (tower.opened, tower.swaps) for kind, new in classes.items()},
    }
    holders: ClassVar = {
        kind: ("model." if kind in GENERATORS else "") + family.tower for kind, family in BY_CLASS.items()
    }

    @property
    def names(self) -> list[str]:
        return [family.name for family in FAMILIES]

    def takes_images(self, model: nn.Module) -> bool:
        return False

    def family(self, model: nn.Module) -> Family:
        """Return a model's family."""
        return BY_CLASS[self.plain(model)]

    def inner(self, model: Any) -> Any:
        """Return the model without a head for the next token: the tower, the projector and the language model."""
        return model.model if self.plain(model) in GENERATORS else model

    def around(self, model: nn.Module) -> list[nn.Module]:
        inner = self.inner(model)
        projector = inner.get_submodule(self.family(model).projector)
        kinds = {*PROJECTORS, *PROJECTORS.values()}
        return [model, inner, projector, *(part for part in projector.modules() if kind_of(part) in kinds)]

    def projector(self, model: nn.Module) -> nn.Module | None:
        family = self.family(model)
        return None if family.merges else self.inner(model).get_submodule(family.projector)

    def of_tower(self, model: nn.Module) -> Backbone:
        """Return the adapter of a model's tower."""
        tower = self.tower(model)
        return next(adapter for adapter in TOWERS if adapter.knows(tower))

    def obstacle(self, model: nn.Module) -> str | None:
        tower = self.tower(model)
        if not any(adapter.knows(tower) for adapter in TOWERS):
            known = ", ".join(
                kind.__name__ for adapter in TOWERS for kind in adapter.swaps if kind not in adapter.holders
            )
            return f"the vision tower {kind_of(tower).__name__} of a {type(model).__name__} (supported: {known})"
        return self.of_tower(model).obstacle(tower)

    def outputs(self, model: nn.Module) -> dict[str, str]:
        return {"grid": "", "tokens": self.family(model).cells}

    def cell(self, model: Any, output: str) -> int:
        return self.family(model).joins(model.config) if output == "tokens" else 1

    def last_read(self, model: Any) -> int:
        depth = self.layout(model).depth
        layers = getattr(model.config, "vision_feature_layer", -1)
        return max(layer % (depth + 1) for layer in ([layers] if isinstance(layers, int) else layers))

    def classes(self, model: Any) -> int:
        """Return the size of the vocabulary: its classes are the next tokens."""
        return int(model.config.get_text_config().vocab_size)

    def input_size(self, model: nn.Module) -> tuple[int, int, int]:
        return self.of_tower(model).input_size(self.tower(model))

    def grid(self, model: nn.Module, images: torch.Tensor) -> tuple[int, int]:
        return self.of_tower(model).grid(self.tower(model), images)

    def layout(self, model: nn.Module) -> Layout:
        """Return the tower's; what follows reads the patches, and not the CLS token alone."""
        return self.of_tower(model).layout(self.tower(model))._replace(pool="avg")

    def costs(self, model: nn.Module) -> Costs:
        return self.of_tower(model).costs(self.tower(model))

    def word_costs(self, model: Any) -> WordCosts:
        """Return what follows the tower, for one image of its own size and a Llama-like language model.

        Raises:
            UserError: the language model's blocks are something else.
        """
        family, inner, shape = self.family(model), self.inner(model), self.layout(model)
        projector, language = (inner.get_submodule(name) for name in (family.projector, family.language))
        blocks: list[tuple[Any, Any]] = [(block, getattr(block, "self_attn", None)) for block in language.layers]
        if not all(
            hasattr(attention, name) for _, attention in blocks for name in ("q_proj", "k_proj", "v_proj")
        ) or any(hasattr(block.mlp, "experts") for block, _ in blocks):
            raise UserError(
                f"the language model {type(language).__name__} is not counted; expected blocks with one attention "
                "(q_proj, k_proj, v_proj) and one MLP, such as Llama's"
            )
        full = getattr(model.config, "vision_feature_select_strategy", None) == "full"
        visual = shape.patches + full * shape.prefix
        visual //= family.joins(model.config) ** 2
        own = linears(projector) + getattr(projector, "mm_input_projection_weight", torch.empty(0)).numel()
        own += sum(5 * part.weight.numel() for part in projector.modules() if isinstance(part, nn.LayerNorm))
        width = sum(attention.k_proj.out_features + attention.v_proj.out_features for _, attention in blocks)
        head = getattr(model, "lm_head", None)
        return WordCosts(
            visual=visual,
            projector=0 if family.merges else visual * own,  # a merger is in the tower, and counted there
            token=sum(linears(block) for block, _ in blocks),
            pair=sum(2 * attention.q_proj.out_features for _, attention in blocks),
            head=0 if head is None else head.weight.numel(),
            cache=width * language.layers[0].self_attn.k_proj.weight.element_size(),
        )

    def check_images(self, model: nn.Module, images: Any) -> None:
        """Refuse images without prompts.

        Raises:
            UserError: they are images alone, or something is missing.
        """
        if not isinstance(images, Prompts):
            raise _needs_words(model)
        wanted = {"input_ids", "pixel_values"}
        if self.family(model).merges:
            wanted |= {"image_grid_thw", "mm_token_type_ids"}
        if missing := wanted - set(images):
            raise UserError(
                f"a batch without {min(missing)}; expected what the model's processor makes of images and text"
            )

    def output(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        raise _needs_words(model)

    def answer(self, model: Any, images: Any, narrow: bool = False) -> Answer:
        """Return the logits of the next token behind every token of text that follows an image."""
        self.check_images(model, images)
        if self.plain(model) not in GENERATORS:
            raise UserError(
                f"{type(model).__name__} predicts no words; expected the model with a head for the next token"
            )
        visual = images["input_ids"] == model.config.image_token_id
        reads = ~visual & (visual.cumsum(1) > 0)
        if images.get("attention_mask") is not None:
            reads &= images["attention_mask"].bool()
        if not reads.any():
            raise UserError(
                "prompts without text behind their images; expected some, or nothing can be learned from them"
            )
        logits = model(**images, use_cache=False).logits[reads]
        return Answer(logits, logits, None)

    def judge(self, model: nn.Module, tokens: Tokens) -> Answer:
        raise _needs_words(model)


def _needs_words(model: nn.Module) -> UserError:
    return UserError(
        f"{type(model).__name__} answers images with words, and images alone were given; for training expected batches "
        "from its processor, in a list or a DataLoader, and for anything else a model of images, such as its tower"
    )


ADAPTER = VisionLanguage()
