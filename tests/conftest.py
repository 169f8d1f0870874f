"""Models small enough to run every method on every kind of backbone in seconds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, beside each other on few cores
os.environ["HF_HUB_OFFLINE"] = "1"  # before timm is imported: the Hub's client answers at once that it is not there

import numpy as np
import pytest
import timm
import torch
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

torch.set_num_threads(1)

DATA = Path(os.environ.get("TNTPRUNE_DATA", Path(__file__).parents[2] / "shared" / "data"))
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 6, "num_heads": 4, "num_classes": 7}

BACKBONES: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": lambda: VisionTransformer(**SMALL),
    "distilled": lambda: VisionTransformerDistilled(**SMALL),
    "registers": lambda: VisionTransformer(**SMALL, reg_tokens=4, no_embed_class=True, init_values=0.1),
    "no_cls": lambda: VisionTransformer(**SMALL, class_token=False, global_pool="avg"),
    "avg_with_cls": lambda: VisionTransformer(**SMALL, global_pool="avg"),
    "avgmax_include_prefix": lambda: VisionTransformer(**SMALL, global_pool="avgmax", pool_include_prefix=True),
    "map_pool": lambda: VisionTransformer(**SMALL, class_token=False, global_pool="map"),
    "layer_scale": lambda: VisionTransformer(**SMALL, init_values=0.1),
    "qk_norm": lambda: VisionTransformer(**SMALL, qk_norm=True, scale_attn_norm=True),
    "pre_norm": lambda: VisionTransformer(**SMALL, pre_norm=True),
    "post_norm": lambda: VisionTransformer(
        **SMALL, block_fn=timm.models.vision_transformer.ResPostBlock, init_values=0.1
    ),
    "swiglu": lambda: VisionTransformer(
        **SMALL, mlp_layer=timm.layers.SwiGLU, scale_mlp_norm=True, norm_layer="rmsnorm"
    ),
    "non_square": lambda: VisionTransformer(**{**SMALL, "img_size": (24, 40)}),
    "dynamic": lambda: VisionTransformer(**SMALL, dynamic_img_size=True),
    "patch_8x4": lambda: VisionTransformer(**{**SMALL, "patch_size": (8, 4)}),
    "eva02": lambda: Eva(
        **SMALL, use_rot_pos_emb=True, ref_feat_shape=4, swiglu_mlp=True, scale_mlp=True, qkv_fused=False
    ),
    "dinov3": lambda: Eva(
        **SMALL,
        use_rot_pos_emb=True,
        rope_type="dinov3",
        rope_rotate_half=True,
        use_abs_pos_emb=False,
        num_reg_tokens=4,
        global_pool="token",
        qkv_bias=False,
        init_values=0.1,
        dynamic_img_size=True,
    ),
    "rope_mixed": lambda: Eva(
        **SMALL,
        use_rot_pos_emb=True,
        rope_type="mixed",
        attn_type="rope",
        scale_attn_inner=True,
        class_token=False,
        global_pool="map",
    ),
    "beit": lambda: Beit(**SMALL, use_rel_pos_bias=True, init_values=0.1, use_abs_pos_emb=False),
    "test_vit": lambda: timm.create_model("test_vit", num_classes=7, img_size=64),
    "test_vit2": lambda: timm.create_model("test_vit2", num_classes=7, img_size=64),
    "test_vit3": lambda: timm.create_model("test_vit3", num_classes=7, img_size=64),
    "test_vit4": lambda: timm.create_model("test_vit4", num_classes=7, img_size=64),
}


def make(kind: str) -> torch.nn.Module:
    """A random model in eval mode, the same at every call, with nothing at its initial zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BACKBONES[kind]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def photos_for(model: Any, count: int = 3, seed: int = 1) -> torch.Tensor:
    """Random images of the model's own size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, *model.patch_embed.img_size, generator=generator)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start each test from the same random numbers, whichever tests ran before it in its process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=list(BACKBONES))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make(request.param)


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"skipped: no real data at {DATA}; set TNTPRUNE_DATA")
    return DATA
