"""Fewer visual tokens in Qwen's language models, whose positions have three axes: time, rows and columns (M-RoPE)."""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch

from tntprune.backbones.hf.shortening import STATE, Seen, ShorteningGenerator, ShorteningModel
from tntprune.errors import UserError

POSITIONED = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids")


class MropeModel(ShorteningModel):
    """A Qwen-VL model whose language model sees fewer visual tokens, each at the position that it has in the whole."""

    tower_name: ClassVar[str] = "visual"

    def forward(  # type: ignore[override]  # in the order of these models' own arguments
        self: Any, input_ids: torch.Tensor | None = None, attention_mask: Any = None,
        position_ids: torch.Tensor | None = None, cache: Any = None, inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run the model as the unpruned one is run.

        Raises:
            UserError: the prompt does not fit its images, or something was asked for that a shortened sequence cannot
                do.
        """
        if kwargs.get("pixel_values") is not None and kwargs.get("image_grid_thw") is None:
            raise UserError("pixel_values without image_grid_thw; expected both, as the processor makes them")
        encoded = (kwargs.get("mm_encoder_outputs") or {}).get("video")
        if self.shortens and (kwargs.get("pixel_values_videos") is not None or encoded is not None):
            raise UserError("a video with output='tokens'; expected images, or output='grid', which takes videos")
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache, **kwargs
        )

    def placed(
        self: Any, given: dict[str, Any], past: int, count: int, device: torch.device, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the positions of the whole prompt's tokens, (3, B, n).

        Raises:
            UserError: they cannot be known.
        """
        positions: torch.Tensor | None = given["position_ids"]
        ids, mask = given["input_ids"], given["attention_mask"]
        if positions is not None:
            if positions.ndim == 3 and positions.shape[0] == 4:
                return positions[1:]  # the first are those of the text, which only packed sequences need
            return positions.expand(3, *positions.shape[-2:])
        if not past and ids is not None:
            wanted = signature(self.compute_3d_position_ids).parameters
            known = {name: kwargs.get(name) for name in POSITIONED if name in wanted}
            found: torch.Tensor | None = self.compute_3d_position_ids(
                input_ids=ids, inputs_embeds=None, attention_mask=mask, cache=None, **known
            )
            return torch.arange(count, device=device).expand(3, len(ids), -1) if found is None else found
        if ids is not None and bool((ids == self.config.image_token_id).any()):
            raise UserError(
                "an image behind a cache that is filled already, without position_ids; expected them, because its "
                "position depends on the images before it"
            )
        places = torch.arange(past, past + count, device=device)[None]
        if mask is not None:
            places = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        if self.rope_deltas is not None:
            delta = self.rope_deltas.to(device)
            places = places.expand(max(len(places), len(delta)), -1)
            places = places + delta.repeat_interleave(len(places) // len(delta), 0)
        return places.expand(3, -1, -1)


class Whole(NamedTuple):
    """Stands for a shortened cache where transformers asks for the length of the whole prompt."""

    length: int

    def get_seq_length(self) -> int:
        """Return the tokens of the prompt before it was shortened."""
        return self.length


class MropeGenerator(ShorteningGenerator):
    """The whole model, with a head for the next token, which generates with a shortened cache."""

    def _prepare_position_ids_for_generation(self: Any, inputs_tensor: torch.Tensor, model_kwargs: Any) -> Any:
        """Prepare positions for `generate`; a cache from an earlier turn stands for more tokens than it holds."""
        cache = model_kwargs.get("cache")
        seen: Seen | None = getattr(cache, STATE, None)
        if seen is not None:
            length = cache.get_seq_length() + seen.length - seen.mask.shape[1]
            model_kwargs = {**model_kwargs, "cache": Whole(length)}
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[misc]
