"""Training Noise Token pruning: scorers that learn where noise hurts; what scored least is dropped or merged.

Source: the paper's section 3; where its text and its authors' code differ, `recipe="paper"` follows the code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from tntprune.errors import UsageError, UserError
from tntprune.methods.base import Layout, ScoringMethod, top
from tntprune.methods.layers import Affine
from tntprune.methods.steps import Place, Plan, Step
from tntprune.methods.tnt.config import TNT
from tntprune.ops.attention import Heads
from tntprune.ops.merging import choose, comparisons, fold, standardised
from tntprune.ops.similarity import halves, remove_similar
from tntprune.ops.tokens import Tokens, order, size_bias, take
from tntprune.ops.windows import windows_of

RAREST = 1e-9  # attention below it counts as this much: its logarithm is a number
INITIAL = {"merge_weights": 0.4, "merge_gates": 1.5, "norm_corrections": 1.4, "powers": 0.6}
UNTRAINED = {**INITIAL, "merge_weights": 0.2}  # with score="attention", whose numbers are not learned


class Scorer(nn.Module):
    """One number for each token: a linear layer, or an MLP with one hidden layer and GELU. Always in fp32.

    Args:
        widths: (D, 1) or (D, hidden, 1).
        generator: For the initial weights.
    """

    def __init__(self, widths: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Affine(a, b, generator) for a, b in pairwise(widths)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, n, D) to (B, n)."""
        for depth, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if depth else x)
        return x.squeeze(-1)


def one_each(blocks: Sequence[int], value: float) -> nn.ParameterDict:
    """Return a number to learn for each block."""
    return nn.ParameterDict({str(block): torch.full((1,), value) for block in blocks})


class TrainingNoise(ScoringMethod):
    """TNT on one backbone: noise while the module is in training mode, and fewer tokens otherwise."""

    config: TNT

    def __init__(self, config: TNT, layout: Layout) -> None:
        super().__init__(config, layout)
        self.options = config.resolved
        self.merges = config.merges
        self.proportional = config.merges and config.proportional
        self.needs_grid = config.window is not None
        blocks = config.noisy(layout.depth)
        for block in blocks:
            if not (0 < block <= layout.depth if config.inside else block < layout.depth):
                expected = f"1 to {layout.depth}" if config.inside else "less"
                raise UsageError(
                    f"noise_blocks: {block} given; the model has {layout.depth} blocks, expected {expected}"
                )
        for at in config.locations:
            if at not in blocks:
                raise UsageError(
                    f"at={at}: no scorer there, because noise is learned at blocks {' '.join(map(str, blocks))}; "
                    f"expected one of these, or noise_blocks with {at} among them"
                )
        for step in self._steps:
            if step.leaving < step.ranked:
                self.register_buffer(f"order{step.ranked}", order(step.ranked, config.order), persistent=False)
        self.trains = config.must_train
        if not self.trains:
            return
        self.ce, self.kl = (1.0, 0.0) if self.options.objective == "ce" else (0.0, 1.0)
        self.learners = len(blocks)
        width = layout.embed_dim
        hidden = (config.hidden or 2 * width,) if config.scorer == "mlp" else ()
        generator = torch.Generator().manual_seed(0)
        self.scorers = nn.ModuleDict({str(block): Scorer((width, *hidden, 1), generator) for block in blocks})
        if config.merges:
            self.merge_weights = one_each(blocks, INITIAL["merge_weights"])  # of a score in means
            # How fast tokens count less the less they are like the token that they go into.
            self.merge_gates = one_each(blocks, INITIAL["merge_gates"])
            # How far means are made as long as the tokens that they are of.
            self.norm_corrections = one_each(blocks, INITIAL["norm_corrections"])
            self.powers = nn.Parameter(torch.full((layout.depth,), INITIAL["powers"]))  # of a size in attention

    def plan(self, patches: int) -> Plan:
        """Return in training where there is noise in this pass, or where tokens really go.

        Draws are made on the CPU, which no device has to wait for.
        """
        return self.planned(self.training_steps(patches)) if self.training and self.trains else super().plan(patches)

    @property
    def untouched(self) -> int:
        return min(map(int, self.scorers)) - (self.config.inside or self.config.reads) if self.trains else 0

    def training_steps(self, patches: int) -> Sequence[Step]:
        """Draw the steps of a training pass. A step from which nothing goes is one with noise."""
        noisy = [Place(int(block), self.config.inside) for block in self.scorers]
        if self.layout.pool == "token":  # nothing reads patches behind the last block's attention
            noisy = [place for place in noisy if place.block < self.layout.depth]
        if not noisy:
            raise UsageError(
                f"at={self.layout.depth}: nothing reads patch tokens behind the last block's attention, so nothing is "
                "learned there; expected an earlier block among the locations, or among noise_blocks"
            )
        pruned = self.options.prune_prob
        assert pruned is not None  # the recipe has filled it in
        if self.options.noise_at == "all" and not pruned:
            return [Step(place, patches, patches, patches) for place in noisy]
        drawn = noisy[int(torch.randint(len(noisy), (), device="cpu"))]
        if pruned and float(torch.rand((), device="cpu")) < pruned:
            several = self.config.places(self.layout.depth)
            if steps := self.pruning_steps(several if len(several) > 1 else (drawn,), patches):
                return steps
        if self.options.noise_at == "one":
            noisy = [drawn]
        return [Step(place, patches, patches, patches) for place in noisy]

    def pruning_steps(self, places: Sequence[Place], patches: int) -> list[Step]:
        """Draw the share of tokens that are left in the end, of which each place keeps an equal share."""
        final = math.exp(float(torch.empty((), device="cpu").uniform_(math.log(0.08), math.log(0.7))))
        steps, count = [], patches
        for number, place in enumerate(places, 1):
            stay = min(count, max(1, round(patches * final ** (number / len(places)))))
            if stay < count:
                steps.append(Step(place, count, stay, stay))
            count = stay
        return steps

    def sees(self, step: Step) -> Literal["", "heads", "map"]:
        if not self.config.reads or step.leaving == step.entering:
            return ""
        return "heads" if self.config.score == "learned" or self.layout.cls else "map"

    def number(self, name: str, block: int) -> torch.Tensor | float:
        """Return one of the numbers that are learned for each block; the untrained one where nothing is learned."""
        if not self.trains:
            return UNTRAINED[name]
        learned = self.powers[block - 1] if name == "powers" else getattr(self, name)[str(block)]
        if learned.is_meta and hasattr(self, "_hf_hook"):
            raise UserError(
                "accelerate offloaded what TNT learned, a few numbers that it cannot bring back; expected the model "
                "offloaded first, and reduced or loaded (tntprune.load_) behind that"
            )
        number: torch.Tensor = learned.float()
        return number.clamp(min=0) if name in ("merge_gates", "norm_corrections") else number

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        if tokens.size is None or not self.proportional:
            return None
        return size_bias(tokens, self.number("powers", block))

    def score(self, tokens: Tokens, heads: Heads | None = None) -> torch.Tensor:
        """Return scores (B, n) in fp32 whatever the precision around them; relevance alpha is their softmax (Eq. 4)."""
        if self.config.score == "learned" or (self.training and self.trains):
            return self.learned_score(tokens)
        assert heads is not None
        attention = log_attention(heads, tokens.prefix, self.layout.cls)
        if self.config.score == "attention":
            return attention
        return standardised(self.learned_score(tokens)) + standardised(attention)

    def learned_score(self, tokens: Tokens) -> torch.Tensor:
        """Return the scorer's score, (B, n) in fp32."""
        with torch.autocast(tokens.x.device.type, enabled=False):
            x = tokens.patches.float()
            if self.options.score_norm:
                x = F.layer_norm(x, x.shape[-1:], eps=1e-6)
            score: torch.Tensor = self.scorers[str(tokens.block)](x)
        return score

    def add_noise(self, tokens: Tokens) -> Tokens:
        """x_i + beta * s_i * (1 - min(1, c * alpha_i)) * eps_i on patch tokens (Eq. 5, generalised)."""
        options = self.options
        alpha = self.learned_score(tokens).softmax(1)  # (B, n)
        noise = 1 - (self.capacity(tokens) * alpha).clamp(max=1)
        x = F.layer_norm(tokens.x, tokens.x.shape[-1:], eps=1e-6) if options.stream_norm else tokens.x
        prefix, patches = x[:, : tokens.prefix], x[:, tokens.prefix :]
        assert options.beta is not None  # the recipe has filled it in
        scale = options.beta * noise[:, :, None]  # (B, n, 1), a standard deviation
        if options.noise_scale == "rms":
            scale = scale * patches.detach().float().square().mean(2, keepdim=True).sqrt()
        if options.noise_scale == "image":
            mean = patches.mean(1, keepdim=True)  # (B, 1, D)
            spread = patches.detach().float().std(1, correction=0, keepdim=True)
            patches = torch.lerp(patches, mean, noise[:, :, None].to(x.dtype))
            scale = scale * spread
        drawn = torch.randn(patches.shape, dtype=x.dtype, device=x.device)  # the same ones whatever the strides
        noisy = patches + scale.to(x.dtype) * drawn
        return replace(tokens, x=torch.cat([prefix, noisy], 1))

    def capacity(self, tokens: Tokens) -> float | torch.Tensor:
        """Return how many tokens can pass free of noise."""
        share = self.options.capacity
        if share == "one":
            return 1.0
        if share == "drawn":
            return tokens.count * torch.empty((), device=tokens.x.device).uniform_(0.1, 0.9)
        return tokens.count * share  # type: ignore[operator]

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        if step.leaving == step.entering:
            return self.add_noise(tokens)
        if self.merges:
            return self.merge(tokens, step, heads)
        if (self.training and self.trains) or step.place.block in self.config.locations:
            tokens = take(tokens, top(self.score(tokens, heads), step.ranked))  # the best first
        if step.leaving < step.ranked:
            groups = self.groups(step.ranked, tokens.x.device)
            tokens = remove_similar(tokens, step.ranked - step.leaving, groups, self.config.similar_how == "merge")
        return tokens

    def merge(self, tokens: Tokens, step: Step, heads: Heads | None) -> Tokens:
        """Return fewer tokens, each with what went folded in; in training, gradients reach all that is learned."""
        score = standardised(self.score(tokens, heads))
        compared = tokens.patches
        if self.config.metric == "mean":
            assert heads is not None
            compared = heads.key[:, :, tokens.prefix :].float().mean(1)  # (B, n, head_dim)
        config, block = self.config, step.place.block
        windows = windows_of(tokens, config.window, self.layout.grid, most=step.leaving)
        stay, go, target, likeness = choose(
            score, compared, tokens.size, step.leaving, config.weight_of_score, config.size_weight, windows
        )
        share = (self.number("merge_gates", block) * (likeness - 1)).exp()
        weight = (self.number("merge_weights", block) * score).exp()
        return fold(tokens, stay, go, target, weight, share, self.number("norm_corrections", block))

    def groups(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the order (count,) whose first half is the group that loses tokens."""
        if self.config.partition == "sequential":  # the worse half
            return torch.arange(count, device=device).flip(0)
        ready: torch.Tensor | None = getattr(self, f"order{count}", None)
        return order(count, self.config.order, device) if ready is None else ready

    def macs(self, step: Step) -> int:
        cost, scored = 0, step.place.block in self.config.locations
        if scored and self.config.score != "learned" and self.layout.cls:  # else the map, which is there
            cost += (step.entering + self.layout.prefix) * self.layout.attn_dim
        if scored and self.trains:
            layers = self.scorers[str(step.place.block)].layers
            per_token = sum(layer.weight.numel() for layer in layers)  # type: ignore[union-attr]
            cost += step.entering * (per_token + 5 * self.layout.embed_dim * bool(self.options.score_norm))
        if self.config.merges:
            layout = self.layout
            width = layout.embed_dim if self.config.metric == "x" else layout.attn_dim // layout.heads
            cost += comparisons(step.entering, step.leaving, self.config.window) * width
            return cost + (step.entering - step.leaving) * layout.embed_dim
        if step.leaving < step.ranked:
            first, second = halves(torch.arange(step.ranked))
            cost += len(first) * len(second) * self.layout.embed_dim
        return cost

    @classmethod
    def obstacle(cls, layout: Layout, config: TNT | None = None) -> str | None:  # type: ignore[override]
        if layout.opens or config is None or not (config.merges or config.inside or config.reads):
            return None
        wanted = {
            "score": "learned",
            "inside": False,
            **({"metric": "x"} if config.merges else {}),
            **({"proportional": False} if config.merges and not layout.weighs else {}),
        }
        others = [f"{name}={value!r}" for name, value in wanted.items() if getattr(config, name) != value]
        sizes = "" if layout.weighs else " or to let sizes count in attention"
        why = f"its blocks cannot be opened to act inside them, to read attention, to compare keys{sizes}"
        return f"{why}; {', '.join(others)} would do" if others else None


def log_attention(heads: Heads, prefix: int, cls: bool) -> torch.Tensor:
    """Return the logarithm of the attention that patch tokens receive, (B, n) in fp32, of the mean over heads.

    Args:
        heads: Of the block, with its attention map where there is no CLS token.
        prefix: Prefix tokens, whose columns are left out.
        cls: Whether the first token is a CLS token, whose attention counts alone; else all tokens' mean.
    """
    rows = heads.rows(1) if cls else heads.map().float()
    return rows.mean((1, 2))[:, prefix:].clamp(min=RAREST).log()
