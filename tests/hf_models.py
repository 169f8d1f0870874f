"""Hugging Face models small enough to run every method on every kind of them in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tntprune[hf]'")

from transformers import (  # noqa: E402
    Aimv2Config,
    Aimv2Model,
    Aimv2VisionConfig,
    Aimv2VisionModel,
    BeitConfig,
    BeitForImageClassification,
    BeitModel,
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2Backbone,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    DINOv3ViTBackbone,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    IJepaConfig,
    IJepaForImageClassification,
    IJepaModel,
    MetaClip2Config,
    MetaClip2ForImageClassification,
    MetaClip2Model,
    MetaClip2VisionConfig,
    MetaClip2VisionModel,
    MetaClip2VisionModelWithProjection,
    Owlv2Config,
    Owlv2Model,
    Owlv2VisionConfig,
    Owlv2VisionModel,
    OwlViTConfig,
    OwlViTModel,
    OwlViTVisionConfig,
    OwlViTVisionModel,
    Siglip2Config,
    Siglip2ForImageClassification,
    Siglip2Model,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
    ViTMSNConfig,
    ViTMSNForImageClassification,
    ViTMSNModel,
    VitPoseBackbone,
    VitPoseBackboneConfig,
)
from transformers.models.beit.modeling_beit import BeitRelativePositionBias  # noqa: E402
from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches  # noqa: E402

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 4,
}  # fmt: skip
POSE = {  # the patches of a size of 4 would overlap the border
    **{k: v for k, v in SHAPE.items() if k != "intermediate_size"}, "mlp_ratio": 2, "image_size": (64, 64),
    "patch_size": (8, 8), "out_features": ["stage2", "stage4"],
}  # fmt: skip
GRIDS = {**{k: v for k, v in SHAPE.items() if k != "image_size"}, "num_patches": 64}
DINO = {**{k: v for k, v in SHAPE.items() if k != "intermediate_size"}, "mlp_ratio": 2}
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CLASSES = {"num_labels": 7}


def _clip(**more: Any) -> CLIPConfig:
    return CLIPConfig(vision_config=dict(SHAPE), text_config=dict(TEXT), projection_dim=16, **more)


def _siglip(**more: Any) -> SiglipConfig:
    return SiglipConfig(vision_config=dict(SHAPE), text_config={**TEXT, "projection_size": 32}, **more)


KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "vit": lambda: ViTModel(ViTConfig(**SHAPE)),
    "vit_classifier": lambda: ViTForImageClassification(ViTConfig(**{**SHAPE, "image_size": (24, 40)}, **CLASSES)),
    "deit": lambda: DeiTModel(DeiTConfig(**SHAPE)),
    "deit_classifier": lambda: DeiTForImageClassification(DeiTConfig(**SHAPE, **CLASSES)),
    "deit_teacher": lambda: DeiTForImageClassificationWithTeacher(DeiTConfig(**SHAPE, **CLASSES)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**DINO)),
    "dinov2_classifier": lambda: Dinov2ForImageClassification(Dinov2Config(**DINO, use_swiglu_ffn=True, **CLASSES)),
    "dinov2_backbone": lambda: Dinov2Backbone(Dinov2Config(**DINO, out_features=["stage1", "stage3", "stage4"])),
    "registers_classifier": lambda: Dinov2WithRegistersForImageClassification(
        Dinov2WithRegistersConfig(**DINO, num_register_tokens=3, **CLASSES)
    ),
    "registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**DINO, num_register_tokens=3)),
    "registers_backbone": lambda: Dinov2WithRegistersBackbone(
        Dinov2WithRegistersConfig(**DINO, num_register_tokens=3, out_features=["stage1", "stage4"])
    ),
    "clip_vision": lambda: CLIPVisionModel(CLIPVisionConfig(**SHAPE)),
    "clip_projection": lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**SHAPE, projection_dim=16)),
    "clip_classifier": lambda: CLIPForImageClassification(_clip(**CLASSES)),
    "clip": lambda: CLIPModel(_clip()),
    "siglip_vision": lambda: SiglipVisionModel(SiglipVisionConfig(**SHAPE)),
    "siglip_no_head": lambda: SiglipVisionModel(SiglipVisionConfig(**SHAPE, vision_use_head=False)),
    "siglip_classifier": lambda: SiglipForImageClassification(_siglip(**CLASSES)),
    "siglip": lambda: SiglipModel(_siglip()),
    "siglip2_vision": lambda: Siglip2VisionModel(Siglip2VisionConfig(**GRIDS)),
    "siglip2_no_head": lambda: Siglip2VisionModel(Siglip2VisionConfig(**GRIDS, vision_use_head=False)),
    "siglip2_classifier": lambda: Siglip2ForImageClassification(
        Siglip2Config(vision_config=dict(GRIDS), text_config={**TEXT, "projection_size": 32}, **CLASSES)
    ),
    "siglip2": lambda: Siglip2Model(
        Siglip2Config(vision_config=dict(GRIDS), text_config={**TEXT, "projection_size": 32})
    ),
    "msn": lambda: ViTMSNModel(ViTMSNConfig(**SHAPE)),
    "msn_classifier": lambda: ViTMSNForImageClassification(ViTMSNConfig(**SHAPE, **CLASSES)),
    "ijepa": lambda: IJepaModel(IJepaConfig(**SHAPE)),
    "ijepa_classifier": lambda: IJepaForImageClassification(IJepaConfig(**SHAPE, **CLASSES)),
    "metaclip2_vision": lambda: MetaClip2VisionModel(MetaClip2VisionConfig(**SHAPE)),
    "metaclip2_projection": lambda: MetaClip2VisionModelWithProjection(
        MetaClip2VisionConfig(**SHAPE, projection_dim=16)
    ),
    "metaclip2_classifier": lambda: MetaClip2ForImageClassification(
        MetaClip2Config(vision_config=dict(SHAPE), text_config=dict(TEXT), projection_dim=16, **CLASSES)
    ),
    "metaclip2": lambda: MetaClip2Model(
        MetaClip2Config(vision_config=dict(SHAPE), text_config=dict(TEXT), projection_dim=16)
    ),
    "beit": lambda: BeitModel(BeitConfig(**SHAPE, use_relative_position_bias=True, drop_path_rate=0.0)),
    "beit_shared": lambda: BeitModel(
        BeitConfig(**SHAPE, use_shared_relative_position_bias=True, use_mean_pooling=False, layer_scale_init_value=0.0)
    ),
    "beit_classifier": lambda: BeitForImageClassification(
        BeitConfig(**SHAPE, use_relative_position_bias=True, use_absolute_position_embeddings=True, **CLASSES)
    ),
    "mae": lambda: ViTMAEModel(ViTMAEConfig(**SHAPE, mask_ratio=0.0)),
    "owlvit_vision": lambda: OwlViTVisionModel(OwlViTVisionConfig(**SHAPE)),
    "owlvit": lambda: OwlViTModel(OwlViTConfig(vision_config=dict(SHAPE), text_config=dict(TEXT), projection_dim=16)),
    "owlv2_vision": lambda: Owlv2VisionModel(Owlv2VisionConfig(**SHAPE)),
    "owlv2": lambda: Owlv2Model(Owlv2Config(vision_config=dict(SHAPE), text_config=dict(TEXT), projection_dim=16)),
    "dinov3": lambda: DINOv3ViTModel(DINOv3ViTConfig(**SHAPE, num_register_tokens=3, use_gated_mlp=True)),
    "dinov3_backbone": lambda: DINOv3ViTBackbone(
        DINOv3ViTConfig(**SHAPE, num_register_tokens=3, out_features=["stage1", "stage3", "stage4"])
    ),
    "aimv2_vision": lambda: Aimv2VisionModel(Aimv2VisionConfig(**SHAPE)),
    "aimv2_no_head": lambda: Aimv2VisionModel(Aimv2VisionConfig(**SHAPE, use_head=False, is_native=True)),
    "aimv2": lambda: Aimv2Model(Aimv2Config(vision_config=dict(SHAPE), text_config=dict(TEXT), projection_dim=16)),
    "vitpose": lambda: VitPoseBackbone(VitPoseBackboneConfig(**POSE)),
}
FAMILIES = {  # as the page of supported models has them
    "ViT": ("vit", "vit_classifier"),
    "DeiT": ("deit", "deit_classifier", "deit_teacher"),
    "ViT-MSN": ("msn", "msn_classifier"),
    "ViT-MAE": ("mae",),
    "I-JEPA": ("ijepa", "ijepa_classifier"),
    "BEiT": ("beit", "beit_shared", "beit_classifier"),
    "DINOv2": ("dinov2", "dinov2_classifier", "dinov2_backbone"),
    "DINOv2 with registers": ("registers", "registers_classifier", "registers_backbone"),
    "DINOv3": ("dinov3", "dinov3_backbone"),
    "CLIP": ("clip_vision", "clip_projection", "clip_classifier", "clip"),
    "MetaCLIP 2": ("metaclip2_vision", "metaclip2_projection", "metaclip2_classifier", "metaclip2"),
    "OWL-ViT": ("owlvit_vision", "owlvit"),
    "OWLv2": ("owlv2_vision", "owlv2"),
    "SigLIP": ("siglip_vision", "siglip_no_head", "siglip_classifier", "siglip"),
    "SigLIP 2": ("siglip2_vision", "siglip2_no_head", "siglip2_classifier", "siglip2"),
    "AIMv2": ("aimv2_vision", "aimv2_no_head", "aimv2"),
    "ViTPose": ("vitpose",),
}
RARE = (
    "registers", "registers_backbone", "beit", "beit_shared", "owlvit_vision", "owlvit", "owlv2_vision",
    "siglip2_no_head", "siglip2",
)  # fmt: skip
EVERY = [pytest.param(kind, marks=pytest.mark.wide) if kind in RARE else kind for kind in KINDS]  # for a parameter
CLASSIFIERS = [kind for kind in KINDS if "classifier" in kind or "teacher" in kind]
WHOLE = ("clip", "siglip", "siglip2", "metaclip2", "aimv2", "owlvit", "owlv2")  # with text
WORDS = torch.tensor([[1, 7, 8, 2], [1, 9, 11, 2]])


def perturbed(build: Callable[[], Any], attention: str = "sdpa") -> Any:
    """A random model in eval mode, the same at every call, with nothing at its initial zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.set_attn_implementation(attention)
    return model.eval()


def make(kind: str, attention: str = "sdpa") -> Any:
    """A random model of a kind, see `perturbed`."""
    model = perturbed(KINDS[kind], attention)
    for module in model.modules():  # transformers keeps it, and cannot train with what inference mode has made
        if isinstance(module, BeitRelativePositionBias):
            module.generate_relative_position_index(module.window_size)
    return model


def photos_for(kind: str, count: int = 3, size: tuple[int, int] | None = None) -> torch.Tensor:
    """Random images, of the model's own size."""
    size = size or {"vit_classifier": (24, 40), "vitpose": (64, 64)}.get(kind, (32, 32))
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def call(model: Any, images: torch.Tensor, **options: Any) -> Any:
    """The model's own output, of images, and of words where it reads them."""
    words = {"input_ids": WORDS} if hasattr(model, "text_model") else {}
    return model(**inputs(model, images), **words, **options)


def inputs(model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images (B, C, H, W) as the model wants them; its patches are 4 x 4."""
    count = images[0, 0].numel() // 16
    if isinstance(model, ViTMAEModel):  # it shuffles its patches, but for this
        return {"pixel_values": images, "noise": torch.arange(count).float().expand(len(images), -1)}
    if not type(model).__name__.startswith("Siglip2"):
        return {"pixel_values": images}
    shape = torch.tensor([images.shape[-2] // 4, images.shape[-1] // 4])
    return {
        "pixel_values": torch.stack([convert_image_to_patches(image, 4) for image in images]),
        "pixel_attention_mask": torch.ones(len(images), count), "spatial_shapes": shape.expand(len(images), -1),
    }  # fmt: skip


def run(model: Any, images: torch.Tensor, **options: Any) -> torch.Tensor:
    """What one would use of the output."""
    with torch.inference_mode():
        return used(call(model, images, **options))


def used(out: Any) -> torch.Tensor:
    """Logits if there are any, else the embedding, else the last map, else the first token."""
    for name in ("logits", "logits_per_image", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    if hasattr(out, "feature_maps"):
        return out.feature_maps[-1]
    return out.last_hidden_state[:, 0]


def from_timm(model: Any) -> Any:
    """The weights of a timm VisionTransformer, with a CLS token, as a `ViTForImageClassification`."""
    width, depth = model.embed_dim, len(model.blocks)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=model.blocks[0].attn.num_heads,
        intermediate_size=model.blocks[0].mlp.fc1.out_features, image_size=model.patch_embed.img_size[0],
        patch_size=model.patch_embed.patch_size[0], num_labels=model.num_classes, layer_norm_eps=model.norm.eps,
    )  # fmt: skip
    renamed = {"cls_token": "vit.embeddings.cls_token", "pos_embed": "vit.embeddings.position_embeddings"}
    parts = {"patch_embed.proj": "vit.embeddings.patch_embeddings.projection", "norm": "vit.layernorm"}
    parts["head"] = "classifier"
    for number in range(depth):
        old, new = f"blocks.{number}", f"vit.layers.{number}"
        parts |= {f"{old}.norm1": f"{new}.layernorm_before", f"{old}.norm2": f"{new}.layernorm_after"}
        parts |= {f"{old}.attn.proj": f"{new}.attention.o_proj"}
        parts |= {f"{old}.mlp.{fc}": f"{new}.mlp.{fc}" for fc in ("fc1", "fc2")}
    weights: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        part, _, leaf = name.rpartition(".")
        if part.endswith(".attn.qkv"):
            layer = part.replace("blocks", "vit.layers").replace("attn.qkv", "attention")
            thirds = zip("qkv", value.chunk(3), strict=True)
            weights |= {f"{layer}.{letter}_proj.{leaf}": third for letter, third in thirds}
        else:
            weights[renamed[name] if name in renamed else f"{parts[part]}.{leaf}"] = value
    same = ViTForImageClassification(config)
    same.load_state_dict(weights)
    return same.eval()
