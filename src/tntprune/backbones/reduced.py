"""The walk of the tokens through a reduced model, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tntprune.backbones.base import holder_names
from tntprune.backbones.blocks import Acting, Inside, OpenBlock, is_hooked
from tntprune.backbones.trace import Trace
from tntprune.errors import UserError, UserNote
from tntprune.methods.base import Method
from tntprune.methods.steps import IDLE, BlockPlan, Plan
from tntprune.ops.attention import Heads, wants_mask
from tntprune.ops.cells import by_cells, join_cells, split_cells
from tntprune.ops.tokens import Tokens, sized, start

Visit = Callable[[int, Tokens], None]


INSTEAD = "torch.export, tntprune.export, torch.jit.trace or torch.compile"


class Together(torch.autograd.Function):
    """Hand tokens on, and give parameters that had no part in this pass a gradient of zero.

    DistributedDataParallel waits for a gradient of every parameter; some passes of a method use only some of them.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """Return x, (B, n, D), as it is."""
        ctx.like = [(p.shape, p.dtype, p.device) if p.requires_grad else None for p in parameters]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of x as it is, and zeros."""
        zeros = [like and torch.zeros(like[0], dtype=like[1], device=like[2]) for like in ctx.like]
        return (grad, *zeros)


def refuse_proxy(images: Any) -> None:
    """Refuse the stand-in for images with which torch.fx traces a model.

    Raises:
        UserError: it is one.
    """
    if isinstance(images, torch.fx.Proxy):
        raise UserError(
            "torch.fx cannot trace a reduced model, whose tokens it would have to count; expected forward hooks or "
            f"forward_intermediates to look at inner tokens, or {INSTEAD}"
        )


class Reduced:
    """What the reduced class of every family has besides its family's own class."""

    reduction: Method
    traces: dict[int, Trace] | None = None  # by thread: where `record` wants to know what is kept
    blocks: nn.Sequential
    num_prefix_tokens: int
    grad_checkpointing: bool
    takes_mask = False  # whether the plain blocks take a bias of the keys as `attn_mask`

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which asks for this.

        Raises:
            UserError: always.
        """
        raise UserError(f"torch.jit.script cannot hold a reduced model; expected {INSTEAD}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Warn where a larger model is saved: its own `save_pretrained`, or an adapter's, leaves the reduction out.

        Warns:
            UserNote: the state dict is that of a model that tntprune does not know.
        """
        inside = [name for name in prefix.split(".") if name not in ("", "module", "_orig_mod")]
        known = self.reduction.output or ".".join(inside) in holder_names(self)  # type: ignore[arg-type]
        if inside and not known:
            warnings.warn(
                f"a model is saved that holds a reduced one ({'.'.join(inside)}): the reduction's config is not in its "
                "state dict; save it too, with tntprune.save(the reduced model, folder)",
                UserNote,
                stacklevel=2,
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]

    def embed(self, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        """Turn images into (B, prefix + N, D), and to what every block needs to know of the places: None if nothing."""
        raise NotImplementedError

    def placed(self, places: Any, index: torch.Tensor) -> Any:
        """Of what `embed` gave for all places, that for the tokens at `index`, (B, n), NOWHERE among them."""
        raise NotImplementedError

    def context(self, number: int, places: Any, opened: bool) -> dict[str, Any]:
        """Return the arguments that one block takes besides the tokens; with `inside` it may take more."""
        return {}

    def run(
        self, number: int, x: torch.Tensor, places: Any, inside: Inside | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call one block, (B, n, D) to (B, m, D).

        Args:
            number: The block's, from 1.
            x: The tokens.
            places: What the block needs to know of their places; None if nothing.
            inside: What a reduction does in it, or sees of it.
            bias: Added to the logits of each key, where `takes_mask`, and without `inside`.
        """
        if inside is None and bias is not None and not wants_mask(bias):
            inside = Inside(bias)
        context: dict[str, Any] = {} if places is None else self.context(number, places, inside is not None)
        if inside is not None:
            context["inside"] = inside
        elif bias is not None:
            context["attn_mask"] = bias.to(x.dtype)
        return self.blocks[number - 1](x, **context)  # type: ignore[no-any-return]

    def opened(self, number: int) -> OpenBlock:
        """Return one block, to run its halves one by one."""
        block: Any = self.blocks[number - 1]
        return block  # type: ignore[no-any-return]

    @property
    def trace(self) -> Trace | None:
        """Where this thread records what is kept."""
        if self.traces is None:
            return None
        if torch.compiler.is_compiling():  # a graph knows no threads
            return list(self.traces.values())[-1]
        return self.traces.get(get_ident())

    def grid(self: Any, images: torch.Tensor) -> tuple[int, int]:
        """Return rows and columns of patches that such images have. Also asked of a model that is not reduced.

        Raises:
            UserError: the model takes no images of that size, or does not say.
        """
        embed: Any = getattr(self, "patch_embed", None)
        if not hasattr(embed, "dynamic_feat_size"):
            raise UserError(f"{type(self).__name__} does not tell its grid; expected a model with timm's patch_embed")
        given = tuple(images.shape[-2:])
        if embed.strict_img_size and given != tuple(embed.img_size or given):
            raise UserError(
                f"images of {given[0]} x {given[1]}: the model takes {embed.img_size[0]} x {embed.img_size[1]}; "
                "expected that size, or a model created with img_size= or dynamic_img_size=True"
            )
        height, width = embed.patch_size
        if not embed.dynamic_img_pad and (given[0] % height or given[1] % width) and not embed.strict_img_size:
            raise UserError(
                f"images of {given[0]} x {given[1]}: no whole number of patches of {height} x {width}; "
                "expected multiples of that, or a model created with dynamic_img_pad=True"
            )
        rows, columns = embed.dynamic_feat_size(given)
        return rows, columns

    def final(self: Any, tokens: Tokens) -> Tokens:
        """Return the tokens as they leave the model's last norm."""
        return replace(tokens, x=self.norm(tokens.x))

    def walk(
        self,
        images: torch.Tensor,
        visit: Visit | None = None,
        made: Visit | None = None,
        follow: bool = False,
        last: int | None = None,
        narrow: bool = False,
        **options: Any,
    ) -> Tokens:
        """From images to the tokens that leave the last block, before the final norm.

        Args:
            images: (B, C, H, W).
            visit: Called with the number of each block, 0 for the embedding, and the tokens that leave it, without
                those that are dropped after it.
            made: Called likewise, and before `visit`, with the tokens that it computed, before any is dropped after it.
            follow: Keep `Tokens.carrier`; done anyway for a visitor or a trace.
            last: The last block to run; None for all.
            narrow: Whether nothing but prefix tokens is asked for. Patch tokens may then not be there.
            **options: For `embed`.
        """
        trace = self.trace
        if trace is not None:
            trace.begin()
        if not torch.compiler.is_compiling():  # a graph has no warnings in it
            self.warn()
        follow = follow or not (trace is None and visit is None and made is None)
        tokens, everywhere = self.enter(images, follow, **options)
        side = self.reduction.cell
        plan = self.reduction.plan(tokens.count // side**2)
        if side > 1 and not all(block.idle for block in plan):
            tokens = by_cells(tokens, side)
        if narrow and not follow and self.shortens:
            return self.run_for_prefix(*self.advance(tokens, everywhere, plan, 0, len(self.blocks) - 1))
        tokens = self.onward(tokens, everywhere, plan, 0, last, visit, made)
        if trace is not None:
            trace.count(tokens)
            trace.ended = True
        return tokens

    @property
    def shortens(self) -> bool:
        """Whether the last block may run for the prefix tokens alone, as was asked; nobody may read its patch tokens.

        Not in training, and not while hooks or a replaced forward would see fewer tokens.
        """
        if self.reduction.last_block == "all" or self.training or self.reduction.training:  # type: ignore[attr-defined]
            return False
        seen = (*self.blocks[-1].modules(), *self.behind())
        return not any(is_hooked(module) or "forward" in vars(module) for module in seen)

    def behind(self: Any) -> tuple[nn.Module, ...]:
        """Return the modules behind the last block that give or take all its tokens."""
        return (self.norm,)

    def run_for_prefix(self, tokens: Tokens, places: Any, apart: bool = True) -> Tokens:
        """Run the last block for the prefix tokens alone, which see all others: (B, prefix + n, D) to (B, prefix, D).

        Args:
            tokens: That enter the block.
            places: What it needs to know of their places.
            apart: See `Inside`.
        """
        number = len(self.blocks)
        inside = Inside(self.reduction.bias(tokens, number), tokens.prefix, apart)
        return replace(
            tokens,
            x=self.run(number, tokens.x, places, inside),
            index=tokens.index[:, :0],
            size=None,
            carrier=None,
            block=number,
        )

    def final_tokens(self, images: torch.Tensor, visit: Visit | None = None, **options: Any) -> Tokens:
        """Walk as `forward` does: images to the tokens that leave the last norm.

        Raises:
            UserError: torch.fx traces the model.
        """
        refuse_proxy(images)
        return self.joined(self.final(self.walk(images, visit, **options)))

    def joined(self, tokens: Tokens) -> Tokens:
        """Let every parameter of the reduction have a part in the pass, where several processes train together."""
        if torch.is_grad_enabled() and torch.distributed.is_available() and torch.distributed.is_initialized():
            return replace(tokens, x=Together.apply(tokens.x, *self.reduction.parameters()))
        return tokens

    def warn(self) -> None:
        """Warn once if the reduction decides by parameters that were never trained."""
        reduction = self.reduction
        if reduction.calibrated or reduction.warned or reduction.training:
            return
        if reduction.steps(reduction.layout.patches):
            reduction.warned = True
            reduction.warn_uncalibrated()

    def enter(self, images: torch.Tensor, follow: bool = False, **options: Any) -> tuple[Tokens, Any]:
        """Turn images into tokens as they leave the embedding, and to what every block needs to know of the places."""
        x, everywhere = self.embed(images, **options)
        grid = None
        if self.reduction.needs_grid:  # patches instead of images have grids of any shape: a row
            grid = self.grid(images) if images.ndim == 4 else (1, x.shape[1] - self.num_prefix_tokens)
        return start(x, self.num_prefix_tokens, follow, grid), everywhere

    def onward(
        self,
        tokens: Tokens,
        everywhere: Any,
        plan: Plan | None,
        first: int = 0,
        last: int | None = None,
        visit: Visit | None = None,
        made: Visit | None = None,
    ) -> Tokens:
        """From the tokens that leave one block to those that leave another.

        Args:
            tokens: That leave block `first`, all of them still there.
            everywhere: What `enter` gave with them.
            plan: What the reduction does at each block, beginning after block `first`; None: nothing.
            first: 0 is the embedding.
            last: None is the last one.
            visit: See `walk`.
            made: See `walk`.
        """
        return self.advance(tokens, everywhere, plan, first, last, visit, made)[0]

    def advance(
        self, tokens: Tokens, everywhere: Any, plan: Plan | None, first: int, last: int | None,
        visit: Visit | None = None, made: Visit | None = None,
    ) -> tuple[Tokens, Any]:  # fmt: skip
        """Do `onward`, and also return what the next block needs to know of the tokens' places."""
        depth, trace, places = len(self.blocks), None if plan is None else self.trace, everywhere
        checkpoints = self.grad_checkpointing and torch.is_grad_enabled()
        for number in range(first, (depth if last is None else last) + 1):
            index, block = tokens.index, IDLE if plan is None else plan[number]
            if number == first:
                fresh, tokens = tokens, self.leave(tokens, block, None)
            elif checkpoints and plan is not None and tokens.x.requires_grad:
                fresh, tokens = checkpoint(self.run_block, tokens, number, block, places, trace, use_reentrant=False)
            else:
                fresh, tokens = self.run_block(tokens, number, block, places, trace)
            if tokens.index is not index:
                if trace is not None:
                    trace.add(number, tokens)
                if everywhere is not None and number < depth:
                    places = self.placed(everywhere, tokens.index)
            if made is not None:
                made(number, fresh)
            if visit is not None:
                visit(number, tokens)
        return tokens, places

    def run_block(
        self, tokens: Tokens, number: int, plan: BlockPlan, places: Any, trace: Trace | None = None
    ) -> tuple[Tokens, Tokens]:
        """Run one block and do what is to be done to the tokens in it and after it.

        Returns:
            The tokens that the block computed, and those that are left after it.
        """
        if trace is not None:
            trace.count(tokens)
        if plan.biased and self.reduction.proportional and tokens.size is not None:
            tokens = sized(tokens)  # for this block and for those behind it
        bias = self.reduction.bias(tokens, number) if plan.biased else None
        if plan.sees or plan.inside is not None or (bias is not None and not self.takes_mask):
            inside = Acting(tokens, self.reduction, number, plan, bias, trace)
            x, heads = self.run(number, tokens.x, places, inside), inside.heads
            out = replace(inside.tokens, x=x)
        else:
            x, heads = self.run(number, tokens.x, places, bias=bias), None
            out = replace(tokens, x=x, block=number)
            if trace is not None:
                trace.count(out)
        idle = plan.after is None and not plan.watchers
        return out, out if idle else self.leave(out, plan, heads)

    def leave(self, tokens: Tokens, plan: BlockPlan, heads: Heads | None) -> Tokens:
        """Do what is to be done to the tokens that leave a block."""
        side = self.reduction.cell
        if side == 1 or plan.idle:
            return self.act(tokens, plan, heads)
        cells = join_cells(tokens, side)
        left = self.act(cells, plan, heads)
        found = split_cells(left, side, tokens)
        return replace(found, index=tokens.index) if left.index is cells.index else found

    def act(self, tokens: Tokens, plan: BlockPlan, heads: Heads | None) -> Tokens:
        """Let the reduction look at tokens that leave a block, and change them."""
        for member in plan.watchers:
            tokens = self.reduction.member(member).watch(tokens, heads)
        return tokens if plan.after is None else self.reduction(tokens, plan.after, heads)
