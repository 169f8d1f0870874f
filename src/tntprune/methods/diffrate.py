"""DiffRate: how many tokens are pruned and how many merged in each block is learned for a budget.

Source: Chen et al., "DiffRate: Differentiable Compression Rate for Efficient Vision Transformers", ICCV 2023, section
3: tokens sorted by class attention, and the differentiable discrete proxy through which counts are learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tntprune.errors import UsageError
from tntprune.methods.base import Layout, Method
from tntprune.methods.checks import as_tuple, check, check_words, is_int, is_number, show
from tntprune.methods.config import Config, option
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Place, Plan, Step, Turn
from tntprune.methods.topk import received
from tntprune.ops.attention import Heads, log_size, masked
from tntprune.ops.merging import fold
from tntprune.ops.similarity import nearest
from tntprune.ops.tokens import Tokens, ranking, take

Kept = Sequence[tuple[float, float]]  # of each location: patch tokens that pruning leaves, and that merging leaves


@dataclass(frozen=True)
class DiffRate(Config):
    """DiffRate (Chen et al., ICCV 2023): of the tokens with least attention the last are pruned, the next ones merged.

    Patch tokens are sorted by the CLS token's attention. The last `prune` of them are dropped, and each of the `merge`
    before those goes into the most similar of the tokens that stay. With `budget` these numbers are learned for each
    block, on the frozen model; then they stand in `prune` and `merge`, and the same number goes from every image.

    Args:
        at: Blocks inside which tokens go; None is every block from the second on, as in the authors' code.
        keep: Share of the patch tokens that stays at each location. 0.9 unless another of the next four is given.
        tokens: Patch tokens that stay at each location.
        prune: Tokens dropped at each location, one value or one for each; 0 where only `merge` is given.
        merge: Tokens merged at each location, likewise.
        budget: Share of the multiply-accumulates of the model's blocks for which `prune` and `merge` are learned, and
            which they never exceed. Before training as many tokens go at each location. With `prune` or `merge` as
            well, training goes on from those.
        pruned_share: With `keep` or `tokens`, the share that is dropped of the tokens that go; the others are merged.
        budget_weight: In training, of the squared difference between the share that is used and `budget`.
        objective: "kl", divergence from the unpruned model, which needs no labels, or "ce", cross-entropy to the
            labels, as published.
    """

    method = "diffrate"
    title = "DiffRate"

    usual = 0.9
    everywhere = True
    earliest = 2
    listed = ("keep", "tokens", "prune", "merge")
    rivals = ("keep", "tokens", "prune", "merge", "budget")

    at: int | Sequence[int] | None = option(None, "block or blocks inside which tokens go (2 to the last)")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.9)")
    prune: int | Sequence[int] | None = option(None, "tokens dropped at each location")
    merge: int | Sequence[int] | None = option(None, "tokens merged at each location")
    budget: float | None = option(None, "share of the blocks' MACs for which prune and merge are learned")
    pruned_share: float = option(0.5, "with --keep or --tokens: share of the tokens that go which is dropped")
    budget_weight: float = option(100.0, "weight of the loss on the budget")
    objective: Literal["kl", "ce"] = option("kl", "train against labels (ce) or the unpruned model (kl)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, "objective")
        check(0 not in self.locations, "at=0: no block has been seen whose attention could rank; expected 1 or larger")
        shares = [name for name in ("keep", "tokens") if getattr(self, name) is not None]
        for name in ("prune", "merge"):
            if getattr(self, name) is None:
                continue
            check(not shares, f"{name} was given with {show(shares)}; expected one of them")
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
            for value in getattr(self, name):
                check(is_int(value) and value >= 0, f"{name}={value}: expected a whole number, 0 or larger")
            if self.at is not None:
                self.check_length(name, len(self.locations))
        check(self.budget is None or not shares, f"budget was given with {show(shares)}; expected one of them")
        share = self.budget is None or (is_number(self.budget) and 0 < self.budget <= 1)
        check(share, f"budget={self.budget}: expected a share above 0 and at most 1")
        part = is_number(self.pruned_share) and 0 <= self.pruned_share <= 1
        check(part, f"pruned_share={self.pruned_share}: expected a share from 0 to 1")
        weight = is_number(self.budget_weight) and self.budget_weight >= 0
        check(weight, f"budget_weight={self.budget_weight}: expected 0 or more")

    @property
    def counted(self) -> bool:
        """Whether the numbers that go are given, or were learned."""
        return self.prune is not None or self.merge is not None

    @property
    def must_train(self) -> bool:
        return self.budget is not None and not self.counted

    @property
    def alone(self) -> bool:
        return self.must_train  # what is learned for a budget is learned for a model without other reductions

    @property
    def reads(self) -> bool:
        return True

    @property
    def is_inside(self) -> bool:
        return True

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """`ranked` is what pruning leaves, `leaving` what merging leaves of that: at least one token."""
        check(
            not self.must_train, f"budget={self.budget}: what goes is only known on a model; expected prune and merge"
        )
        if self.counted:
            prune, merge = (as_tuple(0 if one is None else one) for one in (self.prune, self.merge))
            gone, merged = (one[turn.number] if len(one) > 1 else one[0] for one in (prune, merge))
            ranked = max(1, count - gone)
            leaving = max(1, ranked - merged)
        else:
            leaving = self.stay(turn, count)
            ranked = count - int((count - leaving) * self.pruned_share + 1e-9)
        return Step(turn.place, count, ranked, leaving) if leaving < count else None


class Soft(NamedTuple):
    """What travels with the tokens in training, where all of them stay.

    Args:
        mask: (B, n), 1 for tokens that are still there and 0 for others; gradients reach the rates.
        size: (B, n), how many patches each stands for, or stood for when it went.
    """

    mask: torch.Tensor
    size: torch.Tensor


class CompressionRates(Method):
    """What is learned for each block are the probabilities of all numbers that pruning, and merging, can leave."""

    looks = "heads"
    needs_cls = True
    needs_costs = True
    learns_alone = True  # numbers that meet a budget without other reductions
    proportional = True
    config: DiffRate

    def __init__(self, config: DiffRate, layout: Layout) -> None:
        super().__init__(config, layout)
        self.trains = config.budget is not None
        self.ce, self.kl = (1.0, 0.0) if config.objective == "ce" else (0.0, 1.0)
        self.locations = config.blocks(layout.depth)
        if self.trains:
            by_block, count, centers = {step.place.block: step for step in self._steps}, layout.patches, []
            for block in self.locations:
                step = by_block.get(block, Step(Place(block, True), count, count, count))
                centers.append((step.ranked, step.leaving))
                count = step.leaving
            center = torch.tensor(centers)[:, :, None]  # (locations, 2, 1)
            number = torch.arange(1, layout.patches + 1)
            width = max(1.0, layout.patches / 16)
            self.rates = nn.Parameter(-(((number - center) / width) ** 2) / 2)  # (locations, 2, N)

    def scheduled(self, patches: int) -> tuple[Step, ...]:
        config = self.config
        if config.must_train:
            config = self.with_counts(even(config.blocks(self.layout.depth), self.layout.patches), config)
        return schedule([config], patches, self.layout.depth)

    def with_counts(self, kept: Kept, config: DiffRate) -> DiffRate:
        """Return a config with whole numbers: those of `kept`, all shifted by as much as the budget allows or needs.

        Raises:
            UsageError: no numbers meet the budget.
        """
        assert config.budget is not None and len(self.layout.costs) == self.layout.depth
        blocks, patches = config.blocks(self.layout.depth), self.layout.patches
        most = config.budget * self.cost((), ())
        low, high = -float(patches), float(patches)
        least = self.cost(blocks, shifted(kept, low, patches))
        if least > most:
            raise UsageError(
                f"budget={config.budget}: at these blocks at least {least / self.cost((), ()):.3f} of the "
                "multiply-accumulates are left; expected more, or earlier blocks"
            )
        if self.cost(blocks, shifted(kept, high, patches)) <= most:
            low = high
        while high - low > 1e-3:
            middle = (low + high) / 2
            fits = self.cost(blocks, shifted(kept, middle, patches)) <= most
            low, high = (middle, high) if fits else (low, middle)
        found = shifted(kept, low, patches)
        left = [(patches, patches), *found]
        prune = tuple(before[1] - now[0] for before, now in zip(left, found, strict=False))
        return replace(config, prune=prune, merge=tuple(ranked - leaving for ranked, leaving in found))

    def cost(self, blocks: Sequence[int], left: Sequence[tuple[int, int]]) -> float:
        """Return the multiply-accumulates of all blocks, where so many tokens are left by pruning and by merging."""
        by_block, count, prefix = dict(zip(blocks, left, strict=True)), self.layout.patches, self.layout.prefix
        total = 0
        for block, (attention, pair, mlp) in enumerate(self.layout.costs, 1):
            total += (count + prefix) * attention + (count + prefix) ** 2 * pair
            if block in by_block and by_block[block][1] < count:
                total += self.macs(Step(Place(block, True), count, *by_block[block]))
                count = by_block[block][1]
            total += (count + prefix) * mlp
        return total

    def expected(self) -> torch.Tensor:
        """Return the expected number of tokens that pruning and merging leave at each location, (locations, 2)."""
        rates = self.rates.float()
        number = torch.arange(1, rates.shape[2] + 1, device=rates.device, dtype=rates.dtype)
        return rates.softmax(2) @ number

    def set_calibrated(self, value: bool = True) -> None:
        """Take note of what was learned: whole numbers that meet the budget, in the config."""
        if self.trains and (self.training or self.config.must_train or not value):
            config = replace(self.config, prune=None, merge=None)
            if value:
                config = self.with_counts(self.expected().tolist(), config)
            self.config = config
            self._steps = self.scheduled(self.layout.patches)
            self.settle()
        super().set_calibrated(value)

    def plan(self, patches: int) -> Plan:
        """Return in training a plan in which blocks see masks and sizes, from the numbers that are expected now."""
        if not (self.training and self.trains):
            return super().plan(patches)
        number = self.rates.shape[2]
        if patches != number:
            raise UsageError(
                f"images of {patches} patches; numbers for {number} are learned here, expected such images"
            )
        steps, count = [], patches
        for block, left in zip(self.locations, shifted(self.expected().tolist(), 0.0, patches), strict=True):
            ranked, leaving = (min(count, one) for one in left)
            if leaving < count and not (block == self.layout.depth and self.layout.pool == "token"):
                steps.append(Step(Place(block, True), count, ranked, leaving))
            count = leaving
        first = min((step.place.block for step in steps), default=self.layout.depth)
        return tuple(
            block._replace(sees="heads", biased=True) if number > first else block
            for number, block in enumerate(self.planned(steps))
        )

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        if isinstance(tokens.state, Soft):
            return log_size(tokens.state.size, tokens.prefix, 1)
        return super().bias(tokens, block)

    def attend(self, heads: Heads, tokens: Tokens) -> torch.Tensor:
        return masked(heads, tokens.state.mask) if isinstance(tokens.state, Soft) else heads.output()

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        """Prune and merge, or in training mask the tokens that go."""
        assert heads is not None
        if self.training and self.trains:
            return self.mask(tokens, step, heads)
        score = received(heads, 1, tokens.prefix)
        return merge_last(take(tokens, ranking(score, descending=True)[:, : step.ranked]), step.leaving)

    def mask(self, tokens: Tokens, step: Step, heads: Heads) -> Tokens:
        """Sort all tokens, merge some of them and mask those that go (section 3.2 of the paper)."""
        ones = torch.ones_like(tokens.index, dtype=torch.float32)
        mask, size = tokens.state if isinstance(tokens.state, Soft) else (ones, ones)
        there = F.pad(mask.detach(), (tokens.prefix, 0), value=1.0)[:, None]
        rows = F.normalize(heads.rows(1).detach()[:, :, 0] * there, p=1.0, dim=2)  # as if the masked ones were gone
        score = rows.mean(1)[:, tokens.prefix :] + mask.detach() - 1  # these come last
        order = ranking(score, descending=True)
        tokens, mask, size = take(tokens, order), mask.gather(1, order), size.gather(1, order)
        rates = self.rates[self.locations.index(step.place.block)].float()  # (2, N)
        if step.ranked < step.entering:
            mask = mask * stays(rates[0], step.ranked, step.entering)
        if step.leaving < step.ranked:
            mask = mask * stays(rates[1], step.leaving, step.ranked)
            end = tokens.prefix + step.ranked
            x, index, own = tokens.x[:, :end], tokens.index[:, : step.ranked], size[:, : step.ranked]
            part = merge_last(replace(tokens, x=x, index=index, size=own, carrier=None), step.leaving)
            assert part.size is not None
            tokens = replace(tokens, x=torch.cat([part.x, tokens.x[:, part.x.shape[1] :]], 1))
            size = torch.cat([part.size, size[:, step.leaving :]], 1)
        return replace(tokens, size=size * mask, state=Soft(mask, size))

    def penalty(self, tokens: Tokens, teacher: Tokens | None) -> torch.Tensor | None:
        """Return the squared distance of the blocks' share of multiply-accumulates from the budget, weighted."""
        if not self.trains:
            return None
        assert self.config.budget is not None
        expected = self.expected()
        whole = expected + (expected.ceil() - expected).detach()
        left = dict(zip(self.locations, whole.amin(1), strict=True))
        count, prefix = torch.full((), float(self.layout.patches), device=whole.device), self.layout.prefix
        total, base = torch.zeros_like(count), self.cost((), ())
        for block, (attention, pair, mlp) in enumerate(self.layout.costs, 1):
            total = total + (count + prefix) * (attention / base) + (count + prefix) ** 2 * (pair / base)
            count = torch.minimum(count, left.get(block, count))
            total = total + (count + prefix) * (mlp / base)
        return self.config.budget_weight * (total - self.config.budget) ** 2

    def macs(self, step: Step) -> int:
        """Count the CLS token's row of attention, the comparisons, and D for each token that is merged."""
        merged = step.ranked - step.leaving
        row = (step.entering + self.layout.prefix) * self.layout.attn_dim
        return row + merged * step.leaving * self.layout.embed_dim + merged * self.layout.embed_dim


def even(blocks: Sequence[int], patches: int) -> list[tuple[float, float]]:
    """Return numbers of tokens that fall evenly, as many pruned as merged; the slope is the same for every budget."""
    each = patches / (len(blocks) + 1)
    return [(patches - each * (n + 0.5), patches - each * (n + 1)) for n in range(len(blocks))]


def shifted(kept: Kept, shift: float, patches: int) -> list[tuple[int, int]]:
    """Return whole numbers of tokens that pruning and merging leave, none larger than the one before it, at least 1."""
    found, count = [], patches
    for pair in kept:
        ranked, leaving = (max(1, math.ceil(one + shift - 1e-6)) for one in pair)
        ranked = min(count, ranked)
        count = min(ranked, leaving)
        found.append((ranked, count))
    return found


def stays(rates: torch.Tensor, left: int, count: int) -> torch.Tensor:
    """Return 0 for the sorted tokens from `left` to `count`, else 1, with the gradient of the chance that each stays.

    A token stays if the number that is left is larger than its place (the paper's equation 6; a straight-through
    estimator makes the chance 0 or 1).

    Args:
        rates: (N,), of the numbers from 1 to N.
        left: Tokens that stay.
        count: Tokens that there were.

    Returns:
        (N,)
    """
    chance = rates.softmax(0).flip(0).cumsum(0).flip(0)  # (N,), that at least so many are left
    place = torch.arange(len(rates), device=rates.device)
    return ((place < left) | (place >= count)).float() + chance - chance.detach()


def merge_last(tokens: Tokens, count: int) -> Tokens:
    """Merge the patch tokens behind the first `count` into the most similar of these, by the sizes' weighted mean."""
    if count == tokens.count:
        return tokens
    _, target = nearest(tokens.patches[:, count:], tokens.patches[:, :count])
    place = torch.arange(tokens.count, device=target.device).expand(target.shape[0], -1)
    ones = torch.ones_like(place, dtype=torch.float32)
    return fold(tokens, place[:, :count], place[:, count:], target, ones)
