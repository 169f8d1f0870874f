"""Fewer visual tokens in a language model: the places of an image that nothing stands for are left out.

The prompt stays as the processor makes it, with as many placeholders as the unpruned model wants, and so do the shapes
of all that comes out. Only the language model sees a shorter sequence. What is left keeps its position: the distances
between patches, and to the text, are those that the language model was trained with, and generation goes on at the same
position as the unpruned model's. A place is left out where the tower's token, and so its projection, is NaN.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch

from tntprune.backbones.hf.towers import ReducedModel, as_asked
from tntprune.errors import UserError
from tntprune.ops.tokens import in_order, pick, ranking

STATE = "tntprune_seen"  # the attribute of a cache under which it says what it holds


class Seen(NamedTuple):
    """What a cache holds of a shortened prompt. It travels with the cache.

    Args:
        mask: (B, m), which of its entries may be attended to.
        length: How many tokens the prompt had before it was shortened.
    """

    mask: torch.Tensor
    length: int


class Places(NamedTuple):
    """Where the tokens of a shortened sequence stood.

    Args:
        place: (B, m), their places in the whole sequence, ascending.
        real: (B, m), False for those that only fill up a row with fewer tokens than another.
        state: (B, n), for each place of the whole sequence the token whose state it gets: its own, or where it was left
            out that of the one before it.
    """

    place: torch.Tensor
    real: torch.Tensor
    state: torch.Tensor


def places_of(keep: torch.Tensor, mask: torch.Tensor) -> Places:
    """Choose the places of a shortened sequence: in every row as many as the row with the most tokens needs.

    Args:
        keep: (B, n), False where a visual token was dropped.
        mask: (B, n), False where there is only padding.
    """
    real = keep & mask
    count = max(1, int(real.sum(1).max()))
    rank = torch.where(real, 0, torch.where(keep, 1, 2))  # padding fills up first, on the side where it is
    index = in_order(ranking(rank)[:, :count])  # (B, m)
    there = torch.zeros_like(rank).scatter(1, index, 1).cumsum(1) - 1  # (B, n)
    last = torch.where(real, torch.arange(real.shape[1], device=real.device), 0).cummax(1).values
    return Places(index, real.gather(1, index), there.gather(1, last).clamp(min=0))


class VisibleProjector:
    """A projector that lets NaN through token by token, and learns nothing from it."""

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        """Project tokens (..., n, D) to the width of the language model; a token with NaN in it becomes NaN."""
        missing = image_features.isnan().any(-1, keepdim=True)
        out: torch.Tensor = super().forward(image_features.masked_fill(missing, 0))  # type: ignore[misc]
        return out.masked_fill(missing, torch.nan)


class VisiblePooling:
    """A projector that averages cells of a square of patches, each of them NaN as a whole or not at all."""

    def forward(self: Any, vision_outputs: torch.Tensor) -> torch.Tensor:
        """Project tokens (B, N, D) to the width of the language model, (B, cells, width); a cell of NaN becomes NaN."""
        missing = vision_outputs.isnan().any(-1)  # (B, N)
        side = self.patches_per_image
        cells = self.avg_pool(missing.view(-1, 1, side, side).to(vision_outputs.dtype)).flatten(1) > 0
        out: torch.Tensor = super().forward(vision_outputs.masked_fill(missing[:, :, None], 0))  # type: ignore[misc]
        return out.masked_fill(cells[:, :, None], torch.nan)


class ShorteningModel(ReducedModel):
    """A tower, a projector and a language model that sees fewer visual tokens.

    Args:
        first: The position of the first token where the caller gives none.
        tower_name: The name of its tower.
        shortens: Whether its tower's reduction has `output="tokens"`.
    """

    first: ClassVar[int] = 0
    tower_name: ClassVar[str] = "vision_tower"
    config: Any

    @property
    def shortens(self: Any) -> bool:
        """Whether its tower gives no more than what was kept."""
        return getattr(self, self.tower_name).reduction.output == "tokens"  # type: ignore[no-any-return]

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model as the unpruned one is run; see the file's own text.

        Raises:
            UserError: the prompt has another number of placeholders than there are visual tokens, or something was
                asked for that a shortened sequence cannot do.
        """
        cache = kwargs.pop("past_key_values", cache)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
        seen: Seen | None = getattr(cache, STATE, None)
        images = (mm_encoder_outputs or {}).get("image")
        if seen is None and (not self.shortens or (images is None and pixel_values is None)):
            whole = {"pixel_values": pixel_values, "mm_encoder_outputs": mm_encoder_outputs}
            return super().forward(**given, **whole, **kwargs)  # type: ignore[misc]
        if images is None and pixel_values is not None:
            wanted = signature(self.get_image_features).parameters
            options = {name: value for name, value in kwargs.items() if name in wanted and name != "kwargs"}
            images = self.get_image_features(pixel_values, **{**options, "return_dict": True})
        keep, features = None, images
        held = 0 if cache is None else int(cache.get_seq_length())
        if images is not None and held and kwargs.get("token_type_ids") is not None:
            # The unpruned model attends in both directions here, because it sees `pixel_values`.
            raise UserError(
                f"{type(self).__name__}: an image behind a cache that is filled already; expected text and images in "
                "the first pass"
            )
        if images is not None:
            keep, features = self.kept(input_ids, images)
        mm_encoder_outputs = None if images is None else {"image": features}
        if seen is None and keep is None:
            return super().forward(**given, mm_encoder_outputs=mm_encoder_outputs, **kwargs)  # type: ignore[misc]
        given, places = self.shortened(given, seen, keep, kwargs)
        options = kwargs if places is None else {**kwargs, "return_dict": True}
        out = super().forward(**given, mm_encoder_outputs=mm_encoder_outputs, **options)  # type: ignore[misc]
        return out if places is None else self.restored(out, images, given, places, kwargs)

    def kept(self: Any, input_ids: torch.Tensor | None, images: Any) -> tuple[torch.Tensor | None, Any]:
        """Return which tokens of a prompt are not visual ones that were dropped, and what the tower and the projector
        give for the others.

        Args:
            input_ids: (B, n).
            images: What `get_image_features` gives, with NaN for each dropped token.

        Returns:
            (B, n), or None where nothing was dropped.
        """
        if input_ids is None:
            raise UserError(
                "inputs_embeds and images: a reduced model finds the images' places by their token; expected input_ids"
            )
        found = images.pooler_output
        rows = torch.cat([one.reshape(-1, one.shape[-1]) for one in found])  # (N, D)
        visual, there = input_ids == self.config.image_token_id, ~rows.isnan().any(1)
        count, left = int(visual.sum()), int(there.sum())
        if count != len(rows):
            raise UserError(
                f"the prompt has {count} image tokens; expected {len(rows)} for its images, as the "
                "unpruned model wants them: the processor stays as it is"
            )
        if left == count:
            return None, images
        if not left:
            raise UserError("every visual token was dropped, or the tower gives NaN; expected finite images")
        place = there.nonzero()[:, 0]
        keep = torch.ones_like(visual).masked_scatter(visual, there)
        rows = rows[place]
        own: dict[str, Any] = {"pooler_output": rows[None] if isinstance(found, torch.Tensor) else [rows]}
        if (deep := getattr(images, "deepstack_features", None)) is not None:  # what further layers are given
            own["deepstack_features"] = [[torch.cat(tuple(layer))[place]] for layer in deep]
        return keep, type(images)(**own)

    def shortened(
        self: Any, given: dict[str, Any], seen: Seen | None, keep: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], Places | None]:
        """Return what the language model is given instead of what the caller gave, and where its tokens stood.

        Args:
            given: `input_ids` (B, n), `attention_mask` (B, past + n), `position_ids` (B, n) and the cache.
            seen: What the cache holds, if it was filled with a shortened prompt.
            keep: (B, n), False for dropped visual tokens; None if there are none.
            kwargs: The rest; what goes with the tokens is replaced in it.
        """
        ids, mask, cache = (given[name] for name in ("input_ids", "attention_mask", "cache"))
        batch, count = (kwargs["inputs_embeds"] if ids is None else ids).shape[:2]
        device = (kwargs["inputs_embeds"] if ids is None else ids).device
        held = 0 if cache is None else int(cache.get_seq_length())
        if seen is not None and (held < seen.mask.shape[1] or seen.mask.shape[0] not in (1, batch)):
            raise UserError(
                f"a cache of {seen.mask.shape[0]} prompt(s) that was cut back or spread after it was filled; expected "
                "it as the model left it"
            )
        past = held if seen is None else held + seen.length - seen.mask.shape[1]  # tokens before it was shortened
        if mask is not None and getattr(mask, "shape", None) != (batch, past + count):
            raise UserError(
                f"attention_mask of {'x'.join(map(str, getattr(mask, 'shape', ['a dictionary'])))}; expected "
                f"{batch} x {past + count}, one number for each token of the prompt: with output='tokens' no static "
                "cache, and no mask that is made beforehand"
            )
        positions = self.placed(given, past, count, device, kwargs)
        ones = torch.ones(batch, past + count, dtype=torch.bool, device=device)
        whole = ones if mask is None else mask.to(device).bool()
        before, own = whole[:, :past], whole[:, past:]
        if seen is not None:
            before = torch.cat([seen.mask.expand(batch, -1), before[:, seen.length :]], 1)
        places = None
        if keep is not None:
            places = places_of(keep, own)
            index, own = places.place, places.real
            other = int(self.config.image_token_id == 0)  # any other token: it is not attended to
            ids = ids.masked_fill(~keep, other).gather(1, index)
            axes = positions.shape[:-2]  # (3,) or none
            positions = positions.expand(*axes, batch, -1).gather(-1, index.expand(*axes, -1, -1))
            for name in ("token_type_ids", "mm_token_type_ids"):
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][:, -count:].gather(1, index)
        mask = torch.cat([before, own], 1)
        self.check_windows(mask)
        mask = mask.long()
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "cache": cache}, places

    def check_windows(self: Any, mask: torch.Tensor) -> None:
        """Refuse rows (B, m) with fillers among their tokens where attention counts them in a sliding window.

        Raises:
            UserError: there are any, and more tokens than the window has.
        """
        window = getattr(self.config.get_text_config(), "sliding_window", None)
        if not window or mask.shape[1] <= window:
            return
        if bool((~mask & (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)).any()):
            raise UserError(
                f"prompts of a batch that lose different numbers of visual tokens, and {mask.shape[1]} are left, more "
                f"than the sliding window of {window}, which would count those that only fill up; expected one prompt "
                "at a time, or output='grid'"
            )

    def placed(
        self: Any, given: dict[str, Any], past: int, count: int, device: torch.device, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the positions of the whole prompt's tokens, (B or 1, n); behind any axes that a family has besides.

        Args:
            given: As for `shortened`.
            past: Tokens before them.
            count: How many they are.
            device: Where they are.
            kwargs: The rest of what the caller gave.
        """
        positions: torch.Tensor | None = given["position_ids"]
        if positions is None:
            return torch.arange(past + self.first, past + self.first + count, device=device)[None]
        packed = given["attention_mask"] is None and given["cache"] is None
        if packed and bool((positions.diff(dim=-1) != 1).any()):
            raise UserError(
                "position_ids of packed sequences; expected one prompt a row, with an attention_mask if they are padded"
            )
        if positions.ndim != 2:
            raise UserError(f"position_ids of {positions.ndim} dimensions; expected (batch, tokens)")
        return positions

    def restored(
        self: Any, out: Any, images: Any, given: dict[str, Any], places: Places, kwargs: dict[str, Any]
    ) -> Any:
        """Return an output with a state for each token of the whole prompt; its cache knows what it holds."""
        if out.attentions is not None:
            raise UserError(
                "output_attentions=True: a shortened sequence has no attention maps of the whole prompt; expected "
                "False, or output='grid'"
            )
        if getattr(out, "router_logits", None) is not None:
            raise UserError(
                "output_router_logits=True: the routers of a shortened sequence do not see the whole prompt; expected "
                "False, or output='grid'"
            )
        mask, count = given["attention_mask"].bool(), places.state.shape[1]
        if out.cache is not None:
            past = mask.shape[1] - places.place.shape[1]
            seen: Seen | None = getattr(out.cache, STATE, None)
            if seen is not None:
                past += seen.length - seen.mask.shape[1]
            setattr(out.cache, STATE, Seen(mask, past + count))
        out.last_hidden_state = pick(out.last_hidden_state, places.state)  # (B, n, D)
        if out.hidden_states is not None:
            out.hidden_states = tuple(pick(x, places.state) for x in out.hidden_states)
        out.image_outputs = images
        return as_asked(self, out, kwargs)


class ShorteningGenerator(ReducedModel):
    """The whole model, with a head for the next token, which generates with a shortened cache."""

    def prepare_inputs_for_generation(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Prepare a step of `generate`; a cache that goes on from an earlier turn stands for more than it holds."""
        seen: Seen | None = getattr(kwargs.get("cache"), STATE, None)
        length = kwargs.get("next_sequence_length")
        if seen is not None and length is not None and kwargs.get("is_first_iteration"):
            kwargs["next_sequence_length"] = length - (seen.length - seen.mask.shape[1])
        return super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse to generate with an assistant, which takes tokens out of the cache again.

        Raises:
            UserError: visual tokens are left out.
        """
        if self.base_model.shortens:
            raise UserError(
                "assisted generation cannot take tokens back out of a shortened cache; expected generate without an "
                "assistant_model and prompt_lookup_num_tokens, or output='grid'"
            )
        return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]
