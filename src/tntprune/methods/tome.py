"""ToMe: in each block the tokens that are most alike become one.

Source: Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023, section 3; built from the paper alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tntprune.methods.base import Layout, Method
from tntprune.methods.checks import as_tuple, check, check_flags, check_whole, check_words, is_int
from tntprune.methods.config import WINDOW, Config, option
from tntprune.methods.steps import Step, Turn
from tntprune.ops.attention import Heads
from tntprune.ops.similarity import nearest
from tntprune.ops.tokens import Average, Tokens, in_order, merge, pick, ranking
from tntprune.ops.windows import Windows, closest_near, compared_near, number_of_windows, windows_of

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # who stays, takes in, goes, and where to
LARGEST = 10_000  # blocks, and tokens at once, that are believed of a file


@dataclass(frozen=True)
class ToMe(Config):
    """Token Merging (Bolya et al., ICLR 2023): the r most similar pairs of tokens become one in each block.

    Args:
        at: Blocks at which tokens are merged; None is every block.
        r: Tokens merged away at each location, at most half of those that arrive; one value or one for each location.
            8 unless `keep` or `tokens` is given. Those two reach their count at each location by merging as often as it
            takes.
        decreasing: `r` falls evenly from twice its value at the first location to 0 at the last. Each value is
            truncated, as in the authors' schedule (r, -1), so that fewer tokens go in all than without: 151 instead of
            156 with r=13 in 12 blocks.
        inside: Merge between the block's attention and its MLP, as published; else after the block.
        metric: What is compared: the keys' "mean" over heads, as published; the "concat"enated keys, as the TNT paper
            ran it on its ViT/16; or the tokens themselves, "x".
        average: What a merged token is: the "mean" of its tokens, weighted by the patches they stand for, as published;
            or "mlerp", that mean with the norm of the longest of its tokens (ToFu, Kim et al., WACV 2024, section 3).
        proportional: A merged token counts in attention like as many equal ones (log of its size is added to its
            logits). The authors leave it out for models from masked-image pretraining.
        window: Compare each token only with those near it, in windows of as many tokens as a square of so many patches
            holds; 2 or larger. None compares all, as published.
    """

    method = "tome"
    title = "ToMe"

    everywhere = True
    earliest = 1
    listed = ("r", "keep", "tokens")
    rivals = ("r", "keep", "tokens")

    at: int | Sequence[int] | None = option(None, "block or blocks at which tokens are merged (all)")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location")
    r: int | Sequence[int] | None = option(None, "tokens merged away at each location (8)")
    decreasing: bool = option(False, "let r fall from twice its value in the first block to 0 in the last")
    inside: bool = option(True, "act between attention and MLP instead of after the block")
    metric: Literal["mean", "concat", "x"] = option(
        "mean", "what is compared: tokens (x), the mean of the heads' keys (mean), or all keys side by side (concat)"
    )
    average: Literal["mean", "mlerp"] = option(
        "mean", "what a merged token is: the mean, or the mean with the norm of the longest (mlerp)"
    )
    proportional: bool = option(True, "weigh merged tokens in attention by their size")
    window: int | None = option(None, WINDOW)

    def __post_init__(self) -> None:
        super().__post_init__()
        counted = self.keep is not None or self.tokens is not None
        check(self.r is None or not counted, "r was given with keep or tokens; expected one of them")
        if self.r is not None:
            object.__setattr__(self, "r", as_tuple(self.r))
            if self.at is not None:
                self.check_length("r", len(self.locations))
            for value in self.rs:
                check(is_int(value) and value >= 0, f"r={value}: expected a whole number, 0 or larger")
        check_flags(self, "decreasing", "inside", "proportional")
        if self.window is not None:
            own = "window" not in self.without
            check(own, f"window={self.window}: {self.method} compares all tokens; expected None, or ToMe")
            check_whole("window", self.window, 2)
        check_words(self, "metric", "average")
        unseen = 0 in self.locations and self.metric != "x"
        check(not unseen, "at=0: no block has been seen whose keys could be compared; expected metric='x' or 1 and up")
        even = not self.decreasing or len(self.rs) == 1
        check(even, "decreasing=True: expected one value of r, from twice which it falls")

    @property
    def reads(self) -> bool:
        return self.metric != "x"

    @property
    def rs(self) -> tuple[int, ...]:
        """`r` as a tuple; empty where `keep` or `tokens` is given."""
        return (() if self.keep or self.tokens else (8,)) if self.r is None else self.r  # type: ignore[return-value]

    @property
    def is_inside(self) -> bool:
        return self.inside

    def merged(self, number: int, of: int) -> int:
        """Return the tokens merged away at one of so many locations, counted from 0, if enough arrive there."""
        r = self.rs[number] if len(self.rs) > 1 else self.rs[0]
        return int(2 * r - 2 * r / (of - 1) * number) if self.decreasing and of > 1 else r

    @classmethod
    def updated(cls, data: dict[str, Any], depth: int | None) -> dict[str, Any]:
        """Keep the counts of a falling `r` from before there was `average`: they were rounded to the nearest."""
        if data.get("decreasing") is not True or "average" in data:
            return data
        r, *more = as_tuple(data.get("r") or 8)
        of: Any = depth if data.get("at") is None else len(as_tuple(data["at"]))
        if more or not all(is_int(one) and 0 <= one <= LARGEST for one in (r, of)):
            return data  # to be described alone, or refused
        of -= data.get("at") is None and not data.get("inside", True)  # not after the last block
        return {**data, "r": rounded(r, of), "decreasing": False}

    def check_changes(self, changes: dict[str, Any], source: str) -> None:
        """Refuse one new `r` for a falling one from before there was `average`, unless `decreasing` is given too."""
        new, rs = changes.get("r"), list(self.rs)
        if new is None or "decreasing" in changes or len(as_tuple(new)) > 1 or len(rs) < 2:
            return
        falls = rs[0] > rs[-1] and rs == rounded(rs[0] // 2, len(rs))
        check(
            not falls,
            f"r={new!r}: {source} was saved with an r that falls from {rs[0]} to {rs[-1]}; expected decreasing=True "
            "beside it, to let the new r fall too, or decreasing=False, for the same r everywhere",
        )

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        if not self.rs:
            return super().step(turn, count, patches)
        gone = min(self.merged(turn.number, turn.of), count // 2)  # as published; set A never holds less
        return Step(turn.place, count, count - gone, count - gone) if gone else None

    def singles(self, depth: int) -> list[Any]:
        found = super().singles(depth)
        if not self.decreasing:
            return found
        last = len(found)
        return [single.changed(r=self.merged(number, last), decreasing=False) for number, single in enumerate(found)]


class TokenMerging(Method):
    """Bipartite soft matching: each token of set A points to its match in set B, and the likeliest pairs are merged.

    Prefix tokens count when the sequence is dealt out to A and B in turn, as published, but take no part: with one of
    them the first patch is in B, with none or two in A.
    """

    config: ToMe

    def __init__(self, config: ToMe, layout: Layout) -> None:
        super().__init__(config, layout)
        self.proportional = config.proportional
        self.needs_grid = config.window is not None

    def sees(self, step: Step) -> Literal["", "heads", "map"]:
        return "heads" if self.config.metric != "x" else ""

    @property
    def width(self) -> int:
        """Width of what `metric` names."""
        layout = self.layout
        widths = {"mean": layout.attn_dim // layout.heads, "concat": layout.attn_dim, "x": layout.embed_dim}
        return widths[self.config.metric]

    def compared(self, tokens: Tokens, heads: Heads | None) -> torch.Tensor:
        """Return what is compared of each patch token, (B, n, width)."""
        if self.config.metric == "x":
            return tokens.patches
        assert heads is not None
        key = heads.key[:, :, tokens.prefix :].float()  # (B, heads, n, head_dim)
        return key.mean(1) if self.config.metric == "mean" else key.transpose(1, 2).flatten(2)

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        features = replace(tokens, x=self.compared(tokens, heads), prefix=0, carrier=None)
        average = self.average(step.place.block)
        for count, gone in passes(step):
            pairs = self.pairs(features, gone, step.place.block)
            tokens = merge(tokens, *pairs, average=average)  # count - gone patch tokens
            if count - gone > step.leaving:  # what is compared of a merged token is the mean of its tokens'
                features = merge(features, *pairs, average="none" if average == "none" else "mean")
        return tokens

    def pairs(self, features: Tokens, gone: int, block: int) -> Pairs:
        """Return who is merged into whom, as `merge` takes it.

        Args:
            features: What is compared of each token, (B, n, width), in the place of the tokens.
            gone: How many tokens go, at most n // 2.
            block: The block's number.
        """
        windows = windows_of(features, self.config.window, self.layout.grid)
        return match(features.x, gone, self.layout.prefix % 2, windows)

    def average(self, block: int) -> Average:
        """Return what becomes of the tokens that take others in at a block, as `merge` takes it."""
        return self.config.average

    def comparisons(self, count: int, gone: int) -> int:
        """Return how many pairs of tokens are compared in one pass."""
        number = number_of_windows(count, self.config.window)
        return compared_near(count // 2, count - count // 2, number)

    def macs(self, step: Step) -> int:
        """Count the comparisons, as in ToMe's closed form, and D for each token that is averaged with others."""
        pairs = sum(self.comparisons(count, gone) for count, gone in passes(step))
        averaged = 0 if self.average(step.place.block) == "none" else step.entering - step.leaving
        return pairs * self.width + averaged * self.layout.embed_dim

    @classmethod
    def obstacle(cls, layout: Layout, config: ToMe | None = None) -> str | None:  # type: ignore[override]
        if layout.opens or config is None:  # without a config: there is one that would do
            return None
        wanted = {"inside": False, "metric": "x", **({} if layout.weighs else {"proportional": False})}
        others = [f"{name}={value!r}" for name, value in wanted.items() if getattr(config, name) != value]
        sizes = "" if layout.weighs else " or to let sizes count in attention"
        why = f"its blocks cannot be opened to merge inside them, to compare keys{sizes}"
        return f"{why}; {', '.join(others)} would do" if others else None


def match(x: torch.Tensor, gone: int, odd: int, windows: Windows | None = None) -> Pairs:
    """Pair each token of A with the most similar one of B, and choose the most similar pairs.

    Args:
        x: (B, n, width), what is compared.
        gone: How many pairs, at most n // 2.
        odd: Whether the number of prefix tokens is odd, so that A starts with the second patch, else with the first.
        windows: In which alone tokens look for their match, dealt out to A and B in the order of these.

    Returns:
        Positions as `merge` takes them: the tokens of A that stay, in their order (B, |A| - gone); B (|B|,), or
        (B, |B|) with windows; the tokens of A that go (B, gone); and where in B each of these goes (B, gone).
    """
    if windows is not None:
        x = F.normalize(pick(x.detach().float(), windows.order), dim=-1)
        closest, best = closest_near(x[:, odd::2], x[:, 1 - odd :: 2], windows.number)
    else:
        closest, best = nearest(x[:, odd::2], x[:, 1 - odd :: 2])  # (B, |A|) each
    ranked = ranking(closest, descending=True)
    go, stay = ranked[:, :gone], in_order(ranked[:, gone:])
    target = best.gather(1, go)
    if windows is not None:
        order = windows.order
        return order.gather(1, 2 * stay + odd), order[:, 1 - odd :: 2], order.gather(1, 2 * go + odd), target
    into = torch.arange(1 - odd, x.shape[1], 2, device=x.device)
    return 2 * stay + odd, into, 2 * go + odd, target


def rounded(r: int, of: int) -> list[int]:
    """Return the tokens merged away at each of so many locations where `r` falls as version 0.1 had it."""
    return [round(2 * r * (of - 1 - number) / (of - 1)) for number in range(of)] if of > 1 else [r]


def passes(step: Step) -> list[tuple[int, int]]:
    """Return the tokens that arrive and go, pass by pass: at most half, as published, which A always holds."""
    passes, count = [], step.entering
    while count > step.leaving:
        gone = min(count - step.leaving, count // 2)
        passes.append((count, gone))
        count -= gone
    return passes
