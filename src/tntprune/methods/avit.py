"""A-ViT: a token halts by itself, once what its first channel says in block after block adds up to 1.

Source: Yin et al., "A-ViT: Adaptive Tokens for Efficient Vision Transformer", CVPR 2022, section 3 and its algorithm 1.
Halted tokens are really taken out here, not only kept out of attention. With `at` a fixed number goes, which is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tntprune.methods.base import Layout, Method
from tntprune.methods.checks import check, is_number
from tntprune.methods.config import Config, option
from tntprune.methods.steps import Place, Plan, Step, Turn
from tntprune.ops.attention import Heads, log_size
from tntprune.ops.tokens import NOWHERE, Tokens, ranking, take, written_as_onnx


@dataclass(frozen=True)
class AViT(Config):
    """A-ViT (Yin et al., CVPR 2022): a token halts when what its first channel says in block after block adds up to 1.

    Without `at`, as published: after each block the tokens that have halted are removed, so that their number differs
    from image to image, and what counts at the end is the halting-weighted mean over blocks. With `at`, only the
    tokens that are nearest to halting go there, as many as `keep` or `tokens` says, and the last block's output counts.

    Args:
        at: Block or blocks after which a fixed number is removed; None lets each token halt by itself.
        gate_scale: Factor of the first channel in the gate. Training goes on from here.
        gate_center: What is taken off it; 30 is the authors' for DeiT-T, 75 for DeiT-S. Larger halts later. Training
            goes on from here.
        epsilon: A token halts above 1 - epsilon.
        ponder_weight: Of the number of blocks that tokens take, in training.
        target_weight: Of the divergence of the halting profile from a Gaussian over depth, in training.
        target_depth: Its centre, in blocks.
    """

    method = "avit"
    title = "A-ViT"

    everywhere = True

    at: int | Sequence[int] | None = option(
        None, "block or blocks after which tokens are removed (each stops by itself)"
    )
    gate_scale: float = option(
        10.0, "a token stops when sigmoid(gate_scale * its first channel - gate_center) adds up to 1", learned=True
    )
    gate_center: float = option(30.0, "offset in this formula; with larger values tokens stop later", learned=True)
    epsilon: float = option(0.01, "a token stops already above 1 - epsilon")
    ponder_weight: float = option(5e-4, "weight of the loss on the number of blocks per token")
    target_weight: float = option(1e-3, "weight of the loss on how many tokens stop after each block")
    target_depth: float = option(8.0, "block around which tokens should stop")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gate_scale", "gate_center", "target_depth"):
            check(is_number(getattr(self, name)), f"{name}={getattr(self, name)}: expected a number")
        for name in ("ponder_weight", "target_weight"):
            value = getattr(self, name)
            check(is_number(value) and value >= 0, f"{name}={value}: expected 0 or more")
        check(is_number(self.epsilon) and 0 < self.epsilon < 1, f"epsilon={self.epsilon}: expected between 0 and 1")
        check(self.at is not None or not (self.keep or self.tokens), "keep or tokens without at: expected at as well")
        no_score = "at=0: no block has been seen that tokens could halt after; expected 1 or larger"
        check(0 not in self.locations, no_score)

    @property
    def must_train(self) -> bool:
        return self.at is None  # each token halts by what the gate has learned

    @property
    def alone(self) -> bool:
        return True  # what tokens have added up so far has to follow them through every block

    @property
    def variable(self) -> bool:
        return self.at is None

    def places(self, depth: int) -> tuple[Place, ...]:
        return tuple(Place(block) for block in range(1, depth + 1)) if self.at is None else super().places(depth)

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        if self.at is None:  # as many as all can stay
            return Step(turn.place, count, count, count)
        return super().step(turn, count, patches)

    def singles(self, depth: int) -> list[Any]:
        return [self] if self.at is None else super().singles(depth)


class Halting(NamedTuple):
    """What travels with the tokens where each halts by itself. All in fp32.

    Args:
        total: (B, prefix + n), the sum of each token's halting scores; one above 1 - epsilon has halted.
        output: (B, prefix + N, D), the weighted sum of each token's block outputs, or (B, prefix, D) if the head reads
            the CLS token.
        ponder: (B, prefix + N), blocks that each token has taken, and its remainder; only in training.
        scores: The mean halting score of each block, one scalar a block; only in training.
        masked: Whether there are tokens in the sequence that attention has to leave out.
    """

    total: torch.Tensor
    output: torch.Tensor
    ponder: torch.Tensor | None = None
    scores: tuple[torch.Tensor, ...] = ()
    masked: bool = True


class AdaptiveTokens(Method):
    """What is learned is the gate, two numbers. In training nothing is taken out, only kept out of attention.

    Prefix tokens halt like all others, but stay where they are; from then on nobody attends to them.
    """

    config: AViT

    def __init__(self, config: AViT, layout: Layout) -> None:
        super().__init__(config, layout)
        self.trains = config.at is None  # the choice of a fixed number has no gradient
        self.scale = nn.Parameter(torch.full((1,), float(config.gate_scale)))
        self.center = nn.Parameter(torch.full((1,), float(config.gate_center)))

    @property
    def spares_prefix(self) -> bool:
        return self.config.at is not None  # else what leaves is the sum of what all blocks gave

    def halting(self, x: torch.Tensor) -> torch.Tensor:
        """Return halting scores, (B, n, D) to (B, n) in fp32."""
        logits = self.scale.float() * x[:, :, 0].float() - self.center.float()
        if written_as_onnx():  # onnxruntime's own sigmoid takes all below -18 for -18, and tokens are ranked there
            return 1 / (1 + (-logits).exp())
        return logits.sigmoid()

    def goes_on(self, total: torch.Tensor) -> torch.Tensor:
        """Return whether a token with such a sum of halting scores has not halted."""
        return total <= 1 - self.config.epsilon

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        state = tokens.state
        if not isinstance(state, Halting) or not state.masked:
            return None
        return log_size(self.goes_on(state.total).float(), 0, power=0)

    def planned(self, steps: Sequence[Step]) -> Plan:
        """Return a plan in which, where a fixed number goes, all blocks up to the last step are watched."""
        plan = super().planned(steps)
        if self.config.at is None:
            return plan
        last = max((step.place.block for step in steps), default=0)
        return tuple(b._replace(watchers=(0,)) if 0 < n <= last else b for n, b in enumerate(plan))

    def watch(self, tokens: Tokens, heads: Heads | None) -> Tokens:
        total = self.halting(tokens.patches)  # (B, n)
        return replace(tokens, state=total if tokens.state is None else total + tokens.state)

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        if self.config.at is None:
            return self.halt(tokens, step)
        stay = ranking(tokens.state)[:, : step.leaving]
        return replace(take(tokens, stay), state=tokens.state.gather(1, stay))

    def halt(self, tokens: Tokens, step: Step) -> Tokens:
        """Take out the tokens whose halting scores add up to 1."""
        last = step.place.block == self.layout.depth
        state = self.begin(tokens) if tokens.state is None else tokens.state
        score = self.halting(tokens.x)  # (B, prefix + n)
        score = torch.ones_like(score) if last else score
        goes_on, remainder = self.goes_on(state.total), 1 - state.total
        total = torch.where(goes_on, state.total + score, state.total)
        halts = goes_on & ~self.goes_on(total)
        weight = torch.where(goes_on, torch.where(halts, remainder, score), 0.0)  # adds up to 1 for each token
        state = state._replace(total=total, output=self.add(state.output, tokens, weight), masked=True)
        if state.ponder is not None:
            ponder = state.ponder + goes_on.float() + torch.where(halts, remainder, 0.0)
            state = state._replace(ponder=ponder, scores=(*state.scores, torch.where(goes_on, score, 0.0).mean()))
        if last:
            return self.finish(tokens, state)
        return replace(tokens, state=state) if self.training else self.shrink(tokens, state)

    def begin(self, tokens: Tokens) -> Halting:
        """Return the state before the first block."""
        total = torch.zeros_like(tokens.x[:, :, 0], dtype=torch.float32)
        read = tokens.x[:, : tokens.prefix] if self.layout.pool == "token" else tokens.x
        return Halting(total, torch.zeros_like(read, dtype=torch.float32), total if self.training else None)

    def add(self, output: torch.Tensor, tokens: Tokens, weight: torch.Tensor) -> torch.Tensor:
        """`output` with what this block gives, weighted."""
        if tokens.x.shape[1] >= output.shape[1]:  # only prefix tokens, or nothing has been taken out so far
            read = output.shape[1]
            return output + tokens.x[:, :read].float() * weight[:, :read, None]
        prefix = torch.arange(tokens.prefix, device=weight.device).expand(weight.shape[0], -1)
        column = torch.cat([prefix, tokens.index.clamp(min=0) + tokens.prefix], 1)  # padding adds 0 to some place
        row = torch.arange(weight.shape[0], device=weight.device)[:, None]
        return output.index_put((row, column), tokens.x.float() * weight[:, :, None], accumulate=True)

    def shrink(self, tokens: Tokens, state: Halting) -> Tokens:
        """Take out the patch tokens that have halted; images of which less are left than of others get padding."""
        goes_on = self.goes_on(state.total)  # (B, prefix + n)
        stays, source = goes_on[:, tokens.prefix :], tokens.carrier
        if source is not None:
            source = torch.where(stays.gather(1, source.clamp(min=0)), source, -1)
        index = torch.where(stays, tokens.index, NOWHERE)
        tokens = replace(tokens, index=index, size=stays.float(), carrier=source, state=state)
        if torch.compiler.is_compiling() or not len(stays):
            return tokens  # a graph has one length for all images
        most, least = torch.stack([stays.sum(1).max(), goes_on.sum(1).min()]).tolist()  # the one wait for the device
        most = max(1, most)
        state = state._replace(masked=least < tokens.prefix + most)
        if most < tokens.count:
            stay = ranking(stays.int(), descending=True)[:, :most]  # in the order they had
            total = [state.total[:, : tokens.prefix], state.total[:, tokens.prefix :].gather(1, stay)]
            tokens, state = take(tokens, stay), state._replace(total=torch.cat(total, 1))  # (B, prefix + most)
        return replace(tokens, state=state)

    def finish(self, tokens: Tokens, state: Halting) -> Tokens:
        """Return each token's weighted sum of its block outputs in place of the last block's output."""
        output = state.output.to(tokens.x.dtype)
        if self.layout.pool == "token":
            return replace(tokens, x=torch.cat([output, tokens.patches], 1), state=state)
        index = torch.arange(output.shape[1] - tokens.prefix, device=output.device).expand(output.shape[0], -1)
        source = None if tokens.carrier is None else index
        return replace(tokens, x=output, index=index, size=None, carrier=source, state=state)  # (B, prefix + N, D)

    def penalty(self, tokens: Tokens, teacher: Tokens | None) -> torch.Tensor | None:
        """Return the ponder loss, and the divergence of the mean halting scores from a Gaussian over depth."""
        state = tokens.state
        if not isinstance(state, Halting) or state.ponder is None:
            return None
        profile = torch.stack(state.scores).clamp(0.01, 0.99)  # (L,)
        profile = profile / profile.sum()
        depth = torch.arange(1, len(profile) + 1, device=profile.device)
        wanted = (-((depth - self.config.target_depth) ** 2) / 2).log_softmax(0)
        divergence = (profile * (profile.log() - wanted)).sum()
        return self.config.ponder_weight * state.ponder.mean() + self.config.target_weight * divergence

    @classmethod
    def obstacle(cls, layout: Layout, config: Config | None = None) -> str | None:
        if not layout.opens and (config is None or config.at is None):
            return (
                "it keeps halted tokens out of the attention, and the model's blocks give no access to it; "
                "avit with at would do"
            )
        return super().obstacle(layout, config)
