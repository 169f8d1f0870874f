"""The vision towers of Hugging Face's transformers once they are reduced: one walk, one output, one way of saving.

The reduced classes bear the names of the plain ones, because transformers looks classes up by name: in `architectures`
of a saved config, and in its pipelines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from tntprune.backbones.attach import base_of
from tntprune.backbones.base import tower_of
from tntprune.backbones.blocks import Inside, OpenBlock
from tntprune.backbones.hf.anatomy import Anatomy, Parts
from tntprune.backbones.reduced import Reduced, refuse_proxy
from tntprune.errors import UserError
from tntprune.ops.attention import Heads, added
from tntprune.ops.tokens import Tokens, lay, spread


class OpenLayer(OpenBlock):
    """A layer of transformers with a reduction inside it."""

    @staticmethod
    def parts(block: Any) -> Parts:
        """Return the layer's parts under the names that all families share."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leave `forward` as it is here: transformers wraps it to checkpoint the layer, which the walk does itself."""
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            del cls.forward

    def attention_half(self, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        parts = self.parts(self)
        return inside.asking(x) + parts.join(parts.attention(parts.norm(x), inside=inside, **context)[0])

    def mlp_half(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts(self)
        return x + parts.mlp_join(parts.mlp(parts.mlp_norm(x)))


class OpenAttention:
    """An attention of transformers that a reduction can look at."""

    names: ClassVar[tuple[str, str, str]] = ("o_proj", "scaling", "attention_dropout")  # of the last projection, ...

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *args: Any,
        inside: Inside | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Run the attention: as the plain class does, or shown to a reduction. The mask is added to the logits."""
        if inside is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc, no-any-return]
        project, scale, dropout = (getattr(self, name) for name in self.names)
        asking = inside.asking(hidden_states) if inside.apart else hidden_states
        query, key, value = (
            layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, n, head_dim)
            for layer, x in ((self.q_proj, asking), (self.k_proj, hidden_states), (self.v_proj, hidden_states))
        )
        query, key = self.placed(query, key, **kwargs)
        rate = dropout if self.training else 0.0
        heads = Heads(
            query, key, value, scale, added(attention_mask, inside.bias),
            fused=self.config._attn_implementation != "eager", dropout=rate,
            drop=partial(F.dropout, p=rate) if rate else None,
        )  # fmt: skip
        return project(inside.attend(heads).transpose(1, 2).flatten(2)), None

    def placed(self, query: torch.Tensor, key: torch.Tensor, **context: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys (B, heads, n, head_dim) with the positions of their tokens in them."""
        return query, key


def derived(plain: type, *mixins: type, home: str, **attributes: Any) -> type:
    """Return a static subclass of a class of transformers, for a reduced model. It bears the name of the plain one.

    Families whose modules have the same structure under other names need no code of their own: this function makes
    their classes.

    Args:
        plain: The class.
        *mixins: What comes before it.
        home: The module that keeps the new class, so that models can be pickled.
        **attributes: Of the new class.
    """
    about = {"__module__": home, "__doc__": f"A {plain.__name__} in which tokens are dropped or merged.", **attributes}
    kind = type(plain.__name__, (*mixins, plain), about)
    setattr(sys.modules[home], plain.__name__, kind)
    return kind


def derivations(
    families: Iterable[tuple[Any, str]], ending: str, *mixins: type, home: str, **attributes: Any
) -> dict[Any, Any]:
    """Return the class of each family whose name ends so, and the subclass `derived` from it.

    Args:
        families: Modules of transformers, and how the names of their classes begin.
        ending: How the name ends.
        *mixins: See `derived`.
        home: See `derived`.
        **attributes: See `derived`.
    """
    kinds = [getattr(module, name + ending) for module, name in families]
    return {kind: derived(kind, *mixins, home=home, **attributes) for kind in kinds}


class ReducedModel:
    """A model of transformers with a reduction somewhere in it."""

    def save_pretrained(
        self: Any,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the unpruned model as transformers does, and the reduction beside it, for `tntprune.load_`."""
        from tntprune.serialization.checkpoint import save  # transformers asks the model itself to save

        tower = tower_of(self)
        path = next(name for name, module in self.named_modules() if module is tower)
        own = f"{path}.reduction." if path else "reduction."
        if state_dict is not None:
            state_dict = {name: value for name, value in state_dict.items() if not name.startswith(own)}
        hub = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "create_pr") if name in kwargs}
        base_of(self).save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        if is_main_process:
            save(self, save_directory)
        if push_to_hub and is_main_process:  # which saves once more, so that the reduction goes there too
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), token=kwargs.get("token"), **hub)


class ReducedTower(ReducedModel, Reduced):
    """What the reduced towers have in common besides their families' own classes."""

    anatomy: ClassVar[Anatomy]
    output: ClassVar[Any] = BaseModelOutputWithPooling  # the class of what `forward` returns
    masked: ClassVar[bool] = True  # whether its blocks take an attention mask after the tokens
    config: Any
    embeddings: Any

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        """The blocks."""
        return self.anatomy.blocks(self)

    @property
    def num_prefix_tokens(self) -> int:  # type: ignore[override]
        """CLS, distillation and register tokens."""
        return self.anatomy.prefix(self)

    @property
    def grad_checkpointing(self) -> bool:  # type: ignore[override]
        """As `activation_checkpointing_enable` has set it, which checkpoints every block here."""
        return any(block.gradient_checkpointing for block in self.blocks)

    def grid(self, images: torch.Tensor) -> tuple[int, int]:
        return self.anatomy.grid(self, images)

    def embed(self, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        return self.embeddings(images, **(options or self.anatomy.options(self, images))), None

    def run(
        self, number: int, x: torch.Tensor, places: Any, inside: Inside | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        context: dict[str, Any] = {} if places is None else self.context(number, places, inside is not None)
        if inside is not None:
            return self.blocks[number - 1](x, inside=inside, **context)  # type: ignore[no-any-return]
        masks = (context.pop("attention_mask", None),) if self.masked else ()
        return self.blocks[number - 1](x, *masks, **context)  # type: ignore[no-any-return]

    def pooled(self, tokens: Tokens) -> torch.Tensor | None:
        """Tokens that leave `final` to the `pooler_output`, (B, D)."""
        raise NotImplementedError

    def outputs(
        self,
        pixel_values: torch.Tensor,
        masks: tuple[Any, ...] = (),
        flags: dict[str, Any] | None = None,
        pools: bool = True,
        narrow: bool = False,
        **options: Any,
    ) -> tuple[Tokens, Any]:
        """From images to the tokens that leave the last norm, and to what transformers makes of them.

        Args:
            pixel_values: (B, C, H, W).
            masks: Arguments that a reduced model does not take: each has to be None.
            flags: What else the caller gave: `output_hidden_states`, `output_attentions`, and what nobody looks at.
            pools: Whether anyone reads the `pooler_output`.
            narrow: Whether nobody reads patch tokens, unless hidden states are asked for.
            **options: For the embedding.

        Raises:
            UserError: something was asked for that a reduced model cannot do.
        """
        refuse_proxy(pixel_values)
        wanted = self.check(masks, flags or {})
        states: list[torch.Tensor | None] = []

        def note(number: int, tokens: Tokens) -> None:
            states.append(self.shown(tokens, pixel_values) if number in wanted else None)

        follow = bool(self.reduction.output)
        narrow = narrow and not wanted
        tokens = self.walk(pixel_values, note if wanted else None, follow=follow, narrow=narrow, **options)
        tokens = self.joined(self.final(tokens))
        last = self.shown(tokens, pixel_values)
        out = self.output(last_hidden_state=last, hidden_states=tuple(states) if wanted else None)
        if pools and "pooler_output" in self.output.__dataclass_fields__:
            out = self.output(**{**out, "pooler_output": self.pooled(tokens)})
        return tokens, out

    def shown(self, tokens: Tokens, images: torch.Tensor) -> torch.Tensor:
        """Return tokens as what follows the tower wants to have them.

        Returns:
            (B, prefix + n, D) as they are; or, inside a larger model, (B, prefix + N, D): one for each patch of the
            images, where those that were dropped are filled, or are NaN for `output="tokens"`.
        """
        output = self.reduction.output
        if not output:
            return tokens.x
        tokens, grid = self.reduction.unfold(tokens), self.grid(images)
        laid = (spread if output == "grid" else lay)(tokens, grid)
        return torch.cat([tokens.x[:, : tokens.prefix], laid], 1)

    def check(self, masks: tuple[Any, ...], flags: dict[str, Any]) -> range | set[int]:
        """Refuse what a reduced model cannot do; see `outputs`.

        Returns:
            The hidden states that are asked for: 0 for the embedding, then the number of the block that gives it.
        """
        asked = {
            name: flags.get(name, getattr(self.config, name, False))
            for name in ("output_attentions", "output_hidden_states")
        }
        if any(mask is not None for mask in masks):
            raise UserError(
                "a reduced model takes no attention_mask or bool_masked_pos: a mask for all tokens fits no longer; "
                "expected none, or call tntprune.restore_ first"
            )
        if asked["output_attentions"]:
            raise UserError(
                "a reduced model gives no attention maps (output_attentions=True): the places of their rows and "
                "columns would be lost; expected False, or call tntprune.restore_ first"
            )
        wanted, count = asked["output_hidden_states"], len(self.blocks) + 1
        if wanted is None or isinstance(wanted, bool):
            return range(count if wanted else 0)
        numbers = [wanted] if isinstance(wanted, int) else list(wanted)
        if not all(isinstance(number, int) and -count <= number < count for number in numbers):
            raise UserError(
                f"output_hidden_states={wanted!r}: the model has {count} hidden states; expected True, False, or their "
                f"numbers from {-count} to {count - 1}"
            )
        return {number % count for number in numbers}

    def answer(self, pixel_values: torch.Tensor, masks: tuple[Any, ...], flags: dict[str, Any], **options: Any) -> Any:
        """Return what `forward` returns; see `outputs`."""
        return as_asked(self, self.outputs(pixel_values, masks, flags, **options)[1], flags)


class ReducedPooling(ReducedModel):
    """A classifier whose head takes the mean of the patch tokens, which has to weigh merged ones by their size."""

    def classify(
        self: Any, labels: torch.Tensor | None, found: tuple[Tokens, Any], flags: dict[str, Any], **loss: Any
    ) -> Any:
        """Return what `forward` returns.

        Args:
            labels: (B,), for a loss.
            found: What the tower's `outputs` gives.
            flags: What else the caller gave.
            **loss: For the loss function.
        """
        logits = self.classifier(self.pool(found[0]))
        error = None if labels is None else self.loss_function(labels, logits, self.config, **loss)
        out = ImageClassifierOutput(loss=error, logits=logits, hidden_states=found[1].hidden_states)
        return as_asked(self, out, flags)


def as_asked(model: Any, out: Any, flags: dict[str, Any]) -> Any:
    """Return an output of transformers as it is, or as a tuple where `return_dict` is False."""
    given = flags.get("return_dict")
    return out if (model.config.return_dict if given is None else given) else out.to_tuple()


def mean_by_size(tokens: Tokens) -> torch.Tensor:
    """Return the mean of the patch tokens, (B, n, D) to (B, D), weighted by their sizes."""
    if tokens.size is None:
        return tokens.patches.mean(1)
    size = tokens.size[:, :, None]
    return ((tokens.patches * size).sum(1) / size.sum(1).clamp(min=1e-6)).to(tokens.x.dtype)
