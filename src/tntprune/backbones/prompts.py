"""A batch of prompts with images, which a vision-language model is trained on."""

from __future__ import annotations

from typing import Any

import torch


class Prompts(dict[str, Any]):
    """The arguments of a vision-language model, as its processor makes them: `input_ids`, `pixel_values` and more.

    It has what training asks of a batch of images.
    """

    def to(self, device: torch.device, non_blocking: bool = False) -> Prompts:
        """Return them on a device."""
        return Prompts({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})

    def is_inference(self) -> bool:
        """Return whether one of them was made under inference mode."""
        return any(value.is_inference() for value in self.values())

    def clone(self) -> Prompts:
        """Return a copy."""
        return Prompts({name: value.clone() for name, value in self.items()})
