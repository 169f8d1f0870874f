"""Models of twelve blocks, which the paper's settings want, small enough to run all of them."""

from __future__ import annotations

import timm
from timm.models.vision_transformer import VisionTransformer

TINY = {"patch_size": 4, "embed_dim": 32, "depth": 12, "num_heads": 4, "num_classes": 7}


@timm.models.register_model
def paper_tiny(pretrained=False, img_size=32, **ignored):
    """64 patches and a CLS token."""
    return VisionTransformer(img_size, **TINY)


@timm.models.register_model
def paper_no_cls(pretrained=False, img_size=32, **ignored):
    """Mean pooling, and no CLS token."""
    return VisionTransformer(img_size, **TINY, class_token=False, global_pool="avg")
