"""The paper's ViT/16, which nothing public defines; its published 9.17 GMACs pin it down."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer


def vit16(num_classes: int = 1000, img_size: int | tuple[int, int] = 224) -> VisionTransformer:
    """Depth 12, width 768, MLP width 768, patches of 16, no CLS token, mean pooling; random weights.

    The number of heads, 12, is a guess that no published figure depends on. The authors released no weights.
    """
    return VisionTransformer(
        img_size=img_size, patch_size=16, num_classes=num_classes, embed_dim=768, depth=12, num_heads=12,
        mlp_ratio=1, class_token=False, global_pool="avg",
    )  # fmt: skip
