"""Photos as the image processor of a transformers model prepares them."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from tntprune.backbones.base import find_backbone
from tntprune.errors import UserError
from tntprune.system.messages import first_line


class Processor:
    """The image processor that lies beside a transformers model's weights, as a transform of one photo at a time.

    Raises:
        UserError: there is no processor beside the model, or it makes images of different sizes, or none that the model
            takes.
    """

    def __init__(self, model: Any) -> None:
        from transformers import AutoImageProcessor

        self.kind, self.source = type(model).__name__, str(getattr(model, "name_or_path", ""))
        if not self.source:
            raise UserError(
                f"{self.kind} was not made by from_pretrained, so no image processor says how photos are prepared for "
                "it; expected a model from a folder or the Hub, or images in a tensor or a DataLoader"
            )
        try:
            self.prepare: Any = AutoImageProcessor.from_pretrained(
                self.source, revision=getattr(model.config, "_commit_hash", None), trust_remote_code=False
            )
        except Exception as error:  # no such file, no network, an unknown kind: each has its own
            raise UserError(
                f"{self.source}: its image processor cannot be loaded ({first_line(error)}); expected "
                "preprocessor_config.json beside the model, or images in a tensor or a DataLoader"
            ) from None
        self.mode = "L" if find_backbone(model).input_size(model)[0] == 1 else "RGB"
        wide, high = (self(Image.new(self.mode, size)) for size in ((96, 64), (64, 96)))
        if wide.shape != high.shape:
            raise UserError(
                f"{self.source}: its image processor makes images of different sizes, {tuple(wide.shape)} and "
                f"{tuple(high.shape)}; expected one that crops or resizes to one size"
            )
        try:
            find_backbone(model).check_images(model, wide[None])
        except UserError as error:
            raise UserError(f"{self.source}: its image processor makes {error}") from None

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Turn a photo into pixels (C, H, W), normalised."""
        pixels: torch.Tensor = self.prepare(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels

    def pixels(self) -> dict[str, Any]:
        """Tell what it makes of photos, measured on a black and a white one, as timm's options of a transform."""
        black, white = (self(Image.new(self.mode, (64, 64), color)) for color in ("black", "white"))
        middle = (slice(None), black.shape[1] // 2, black.shape[2] // 2)
        low, high = black[middle].double(), white[middle].double()
        std = 1 / (high - low)
        resample = getattr(self.prepare, "resample", None)
        name = getattr(resample, "value", resample)  # torchvision's, or Pillow's number
        if not isinstance(name, str):
            name = Image.Resampling(3 if name is None else name).name.lower()
        mean = tuple((-low * std).tolist())
        return {"input_size": tuple(black.shape), "mean": mean, "std": tuple(std.tolist()), "interpolation": name}
