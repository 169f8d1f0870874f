"""The demo's model: a small ViT of ours, trained on cluttered digits."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from timm.models.vision_transformer import VisionTransformer

WEIGHTS = Path(str(files("tntprune"))) / "assets" / "digits_vit.safetensors"


def build(img_size: int | tuple[int, int] = 64, num_classes: int = 10) -> VisionTransformer:
    """Build the model without weights: 64 x 64 grey images, patches of 8, 6 blocks of width 64, a CLS token."""
    model = VisionTransformer(
        img_size=img_size, patch_size=8, in_chans=1, num_classes=num_classes,
        embed_dim=64, depth=6, num_heads=4, mlp_ratio=2,
    )  # fmt: skip
    model.pretrained_cfg = {"mean": (0.5,), "std": (0.5,), "crop_pct": 1.0, "interpolation": "bicubic"}
    return model


def digits_vit() -> VisionTransformer:
    """Return the trained model, in eval mode. Input (B, 1, 64, 64), normalised; output (B, 10)."""
    from safetensors.torch import load_file

    model = build()
    model.load_state_dict({name: value.float() for name, value in load_file(WEIGHTS).items()})
    model.pretrained_cfg = {**model.pretrained_cfg, "architecture": "digits_vit"}
    return model.eval()
