"""Vision-language models small enough to run every test on each of them in seconds, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)

from hf_models import perturbed

IMAGE, PAD, WORDS = 98, 0, 99  # tokens, and how many there are
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 4,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": WORDS, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": PAD,
}  # fmt: skip
TOKENS = {"image_token_id": IMAGE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}


CELLS: dict[str, Any] = {"depth": 4, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
DEEPSTACK: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SEEN = {"image_token_id": IMAGE, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}


def _mrope(**more: Any) -> dict[str, Any]:
    return {"text_config": {**TEXT, **more, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}}


def _clip() -> dict[str, Any]:
    return {"vision_config": {"model_type": "clip_vision_model", **VISION}}


def _siglip(**more: Any) -> dict[str, Any]:
    return {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION, **more}}


def _llama() -> dict[str, Any]:
    return {"text_config": {"model_type": "llama", **TEXT}}


def _internvl() -> dict[str, Any]:
    own = {**VISION, "image_size": [32, 32], "patch_size": [4, 4], "use_qk_norm": True, "layer_scale_init_value": 0.5}
    return {"vision_config": {"model_type": "internvl_vision", **own}}


def _idefics(kind: str) -> dict[str, Any]:
    return {"vision_config": {"model_type": f"{kind}_vision", **VISION}, "scale_factor": 2}


KINDS: dict[str, Callable[[], Any]] = {
    "llava": lambda: LlavaForConditionalGeneration(LlavaConfig(**_clip(), **_llama(), **TOKENS)),
    "llava_siglip": lambda: LlavaForConditionalGeneration(
        LlavaConfig(
            **_siglip(), **_llama(), **TOKENS, vision_feature_select_strategy="full", vision_feature_layer=-1
        )
    ),
    "llava_vit": lambda: LlavaForConditionalGeneration(
        LlavaConfig(vision_config={"model_type": "vit", **VISION}, **_llama(), **TOKENS, vision_feature_layer=-1)
    ),
    "paligemma": lambda: PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            **_siglip(projection_dim=32), text_config={"model_type": "gemma", **TEXT}, projection_dim=32, **TOKENS
        )
    ),
    "llava_next": lambda: LlavaNextForConditionalGeneration(
        LlavaNextConfig(**_clip(), **_llama(), **TOKENS, image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]])
    ),
    "vipllava": lambda: VipLlavaForConditionalGeneration(
        VipLlavaConfig(**_clip(), **_llama(), **TOKENS, vision_feature_layers=[-2, 2])
    ),
    "onevision": lambda: LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            **_siglip(), text_config={"model_type": "qwen2", **TEXT}, **TOKENS,
            image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
        )
    ),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            **_siglip(), text_config={"model_type": "gemma3_text", **TEXT, "sliding_window": 64},
            mm_tokens_per_image=16, **TOKENS,
        )
    ),
    "internvl": lambda: InternVLForConditionalGeneration(InternVLConfig(**_internvl(), **_llama(), **TOKENS)),
    "idefics3": lambda: Idefics3ForConditionalGeneration(
        Idefics3Config(**_idefics("idefics3"), **_llama(), **TOKENS)
    ),
    "smolvlm": lambda: SmolVLMForConditionalGeneration(SmolVLMConfig(**_idefics("smolvlm"), **_llama(), **TOKENS)),
}  # fmt: skip
PACKED: dict[str, Callable[[], Any]] = {  # whose images have a size of their own: prompts come from `packed`
    "qwen2_vl": lambda: Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            vision_config={**CELLS, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}, **_mrope(), **SEEN
        )
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            vision_config={
                **CELLS, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "window_size": 16,
                "fullatt_block_indexes": [1, 3],
            },
            **_mrope(), **SEEN,
        )
    ),
    "qwen3_vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(vision_config={**CELLS, **DEEPSTACK}, **_mrope(), **SEEN)
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(vision_config={**CELLS, **DEEPSTACK}, **_mrope(**EXPERTS), **SEEN)
    ),
}  # fmt: skip
SHORTENED = (
    "llava",
    "llava_siglip",
    "llava_vit",
    "paligemma",
    "llava_next",
    "vipllava",
    "internvl",
    "idefics3",
    "smolvlm",
    "gemma3",
)  # those that take output="tokens"
CELLS_KEPT = ("internvl", "idefics3", "smolvlm", "gemma3")  # of which whole cells of 2 x 2 patches are kept
RARE = ("llava_siglip", "llava_vit", "llava_next", "onevision", "idefics3")  # for the wide tests: others are like them
SIZES = torch.tensor([[60, 50]])  # of an image before it is cut into crops, rows and columns


def usual(kinds: Iterable[str]) -> list[Any]:
    """Return kinds as parameters of a test, of which rare ones are for the wide tests."""
    return [pytest.param(kind, marks=pytest.mark.wide) if kind in RARE else kind for kind in kinds]


def make(kind: str, attention: str = "sdpa") -> Any:
    """A random model of a kind, see `perturbed`."""
    return perturbed({**KINDS, **PACKED}[kind], attention)


def placeholders(kind: str, model: Any) -> int:
    """Return how many image tokens one image has."""
    if kind in ("llava_next", "onevision"):
        images = pixels(kind, 1)
        with torch.inference_mode():
            return len(model.model.get_image_features(**images, return_dict=True).pooler_output[0])
    return {"gemma3": 16, "internvl": 16, "idefics3": 16, "smolvlm": 16}.get(kind, 64)


def pixels(kind: str, images: int) -> dict[str, torch.Tensor]:
    """Random images, as the processor of such a model gives them."""
    generator = torch.Generator().manual_seed(1)
    if kind in ("llava_next", "onevision"):
        crops = torch.randn(images, 5, 3, 32, 32, generator=generator)
        return {"pixel_values": crops, "image_sizes": SIZES.expand(images, -1)}
    values = torch.randn(images, 3, 32, 32, generator=generator)
    return {"pixel_values": values[:, None] if kind in ("idefics3", "smolvlm") else values}


def prompts(kind: str, model: Any, rows: list[list[int | None]], side: str = "left") -> dict[str, torch.Tensor]:
    """A batch of prompts, padded on one side.

    Args:
        kind: Of the model.
        model: Reduced or not.
        rows: Of each prompt the tokens; None stands for an image.
        side: "left" or "right".
    """
    count = placeholders(kind, model)
    whole = [[t for one in row for t in ([IMAGE] * count if one is None else [one])] for row in rows]
    length = max(map(len, whole))
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(whole):
        there = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[number, there], mask[number, there] = torch.tensor(row), 1
    found = {"input_ids": ids, "attention_mask": mask, **pixels(kind, sum(row.count(None) for row in rows))}
    if kind in ("idefics3", "smolvlm"):  # images a row, the missing ones zero
        values, most = found["pixel_values"][:, 0], max(row.count(None) for row in rows)
        found["pixel_values"] = torch.zeros(len(rows), most, *values.shape[1:])
        parts = values.split([row.count(None) for row in rows])
        for number, part in enumerate(parts):
            found["pixel_values"][number, : len(part)] = part
    if kind == "paligemma":
        found["token_type_ids"] = torch.zeros_like(ids)
    if kind == "gemma3":
        found["token_type_ids"] = (ids == IMAGE).long()
    return found


def packed(rows: list[list[int | tuple[int, int]]], side: str = "left", skip: int = 0) -> dict[str, torch.Tensor]:
    """A batch of prompts for one of the `PACKED` models, as the processor makes it.

    Args:
        rows: Of each prompt the tokens; a pair stands for an image of so many rows and columns of cells.
        side: "left" or "right", where it is padded.
        skip: Images of the same random ones that are left out before these.
    """
    whole = [
        [t for one in row for t in ([IMAGE] * (one[0] * one[1]) if isinstance(one, tuple) else [one])] for row in rows
    ]
    length = max(map(len, whole))
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(whole):
        there = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[number, there], mask[number, there] = torch.tensor(row), 1
    found = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
    grids = [one for row in rows for one in row if isinstance(one, tuple)]
    if grids:
        images = [
            torch.randn(4 * high * wide, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(skip + number))
            for number, (high, wide) in enumerate(grids)
        ]
        found["pixel_values"] = torch.cat(images)
        found["image_grid_thw"] = torch.tensor([[1, 2 * high, 2 * wide] for high, wide in grids])
    return found


ONE = [[1, None, 7, 8, 9]]
SEVERAL = [[1, None, 7, None, 8, 9], [1, None, 5], [1, 4, 6, 3]]  # images in several turns, one, and none
