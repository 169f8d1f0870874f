"""Hugging Face's vision-language models: reduced in their towers and, if possible, before their language models."""

from __future__ import annotations

from dataclasses import dataclass
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
from transformers.models.smolvlm import modeling_smolvlm as smolvlm
from transformers.models.vipllava import modeling_vipllava as vipllava

from tntprune.backbones.base import Answer, Backbone, Costs, WordCosts, kind_of
from tntprune.backbones.hf import clip, idefics3, internvl, siglip, vit
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.shortening import ShorteningGenerator, ShorteningModel, VisibleProjector
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
        cells: What its projector does with patches together, so that no single one can be left out; "" for nothing.
        first: The position of the first token of a prompt.
    """

    module: Any
    name: str
    tower: str = "vision_tower"
    projector: str = "multi_modal_projector"
    language: str = "language_model"
    cells: str = ""
    first: int = 0


FAMILIES = (
    Family(llava, "Llava"),
    Family(llava_next, "LlavaNext"),
    Family(vipllava, "VipLlava"),
    Family(paligemma, "PaliGemma", first=1),
    Family(onevision, "LlavaOnevision", cells="it resamples the grid of an image's crops"),
    Family(gemma3, "Gemma3", cells="its projector averages cells of patches"),
    Family(internvl_model, "InternVL", cells="its projector joins cells of patches"),
    Family(
        idefics3_model, "Idefics3", "vision_model", "connector", "text_model", "its projector joins cells of patches"
    ),
    Family(smolvlm, "SmolVLM", "vision_model", "connector", "text_model", "its projector joins cells of patches"),
)
TOWERS: tuple[HuggingFace, ...] = (clip.ADAPTER, siglip.ADAPTER, vit.ADAPTER, idefics3.ADAPTER, internvl.ADAPTER)
OWN_TOWERS = {  # models whose towers are something else, by the beginning of their classes' names
    "Qwen2VL": "attends within the images of one packed sequence",
    "Qwen2_5_VL": "attends within windows of one packed sequence",
    "Qwen3VL": "attends within the images of one packed sequence and hands several of its layers on",
    "Qwen3VLMoe": "attends within the images of one packed sequence and hands several of its layers on",
}


def _made(ending: str, cells: type, single: type) -> dict[Any, Any]:
    """Return the class of each family whose name ends so, and the one that it takes on."""
    made = {}
    for family in FAMILIES:
        kind = getattr(family.module, family.name + ending)
        more = {} if family.cells or ending != "Model" else {"first": family.first}
        made[kind] = derived(kind, cells if family.cells else single, home=__name__, **more)
    return made


MODELS = _made("Model", ReducedModel, ShorteningModel)
GENERATORS = _made("ForConditionalGeneration", ReducedModel, ShorteningGenerator)
PROJECTORS = {
    kind: derived(kind, VisibleProjector, home=__name__)
    for kind in (getattr(f.module, f"{f.name}MultiModalProjector") for f in FAMILIES if not f.cells)
}
BY_CLASS = {
    getattr(family.module, family.name + ending): family
    for family in FAMILIES
    for ending in ("Model", "ForConditionalGeneration")
}


class VisionLanguage(Backbone):
    """The adapter. What concerns the tower alone is asked of the tower's own adapter."""

    prompts = True

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

    def knows(self, model: nn.Module) -> bool:
        return super().knows(model) or self._own(model) is not None

    @staticmethod
    def _own(model: nn.Module) -> str | None:
        """Return what is special about the tower of a model that is known and not supported."""
        if not type(model).__module__.startswith("transformers.models.qwen"):
            return None
        name = type(model).__name__.removesuffix("Model").removesuffix("ForConditionalGeneration")
        return OWN_TOWERS.get(name)

    def family(self, model: nn.Module) -> Family:
        """Return a model's family."""
        return BY_CLASS[self.plain(model)]

    def inner(self, model: Any) -> Any:
        """Return the model without a head for the next token: the tower, the projector and the language model."""
        return model.model if self.plain(model) in GENERATORS else model

    def around(self, model: nn.Module) -> list[nn.Module]:
        inner = self.inner(model)
        return [model, inner, inner.get_submodule(self.family(model).projector)]

    def of_tower(self, model: nn.Module) -> HuggingFace:
        """Return the adapter of a model's tower."""
        tower = self.tower(model)
        return next(adapter for adapter in TOWERS if adapter.knows(tower))

    def obstacle(self, model: nn.Module) -> str | None:
        if special := self._own(model):
            return f"{type(model).__name__}, whose tower {special},"
        tower = self.tower(model)
        if not any(adapter.knows(tower) for adapter in TOWERS):
            known = ", ".join(
                kind.__name__ for adapter in TOWERS for kind in adapter.swaps if kind not in adapter.holders
            )
            return f"the vision tower {kind_of(tower).__name__} of a {type(model).__name__} (supported: {known})"
        return self.of_tower(model).obstacle(tower)

    def outputs(self, model: nn.Module) -> dict[str, str]:
        return {"grid": "", "tokens": self.family(model).cells}

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
        if family.name == "Gemma3":
            visual = model.config.mm_tokens_per_image
        elif family.name == "InternVL":
            visual = int(visual * model.config.downsample_ratio**2)
        elif family.cells and family.name != "LlavaOnevision":
            visual //= model.config.scale_factor**2
        own = linears(projector) + getattr(projector, "mm_input_projection_weight", torch.empty(0)).numel()
        own += sum(5 * part.weight.numel() for part in projector.modules() if isinstance(part, nn.LayerNorm))
        width = sum(attention.k_proj.out_features + attention.v_proj.out_features for _, attention in blocks)
        head = getattr(model, "lm_head", None)
        return WordCosts(
            visual=visual,
            projector=visual * own,
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
        if missing := {"input_ids", "pixel_values"} - set(images):
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
