"""The options of Training Noise Token pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tntprune.methods.checks import as_tuple, check, check_flags, check_whole, check_words, is_int, is_number, options
from tntprune.methods.config import WINDOW, Config, option
from tntprune.methods.steps import Place, Step, Turn

# The rows of the design's table: what each recipe fills in where an option is None.
MAX_HIDDEN = 65536  # as wide as no embedding is
MAX_BETA = 1e6  # times the unit of the noise
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {
        "noise_at": "all", "capacity": "one", "noise_scale": "one", "stream_norm": True, "beta": 0.02,
        "score_norm": False, "objective": "ce", "how": "drop", "prune_prob": 0.0,
    },
    "relative": {
        "noise_at": "one", "capacity": "drawn", "noise_scale": "rms", "stream_norm": False, "beta": 1.0,
        "score_norm": True, "objective": "kl", "how": "drop", "prune_prob": 0.0,
    },
    "merge": {
        "noise_at": "one", "capacity": "drawn", "noise_scale": "image", "stream_norm": False, "beta": 0.5,
        "score_norm": True, "objective": "kl", "how": "merge", "prune_prob": 0.4,
    },
}  # fmt: skip


OF_TRAINING = (
    "recipe", "scorer", "hidden", "noise_blocks", "noise_at", "capacity", "noise_scale", "stream_norm", "beta",
    "score_norm", "objective", "prune_prob",
)  # fmt: skip


@dataclass(frozen=True)
class TNT(Config):
    """Training Noise Token pruning (the paper's section 3; the design's section on TNT).

    In training the patch tokens x_i that leave a noisy block become
    ``x_i + beta * s_i * (1 - min(1, c * alpha_i)) * eps_i`` with alpha the softmax of the scores over patch tokens;
    at test time the tokens with the largest scores stay, or, where `how` says so, those that are relevant and unlike
    any more relevant one, with the others merged into them. An option left at None takes the recipe's value.

    Without a training, `score="attention"` ranks by the attention that patch tokens receive.

    Args:
        score: What ranks the tokens: the "learned" scorer; the "attention" of the CLS token to each, or of all tokens
            where there is no CLS token, in the block at which tokens go (its logarithm, averaged over heads; nothing is
            trained); or "both", the sum of the two, each standardised in its image (the scorer is trained as for
            "learned").
        how: "drop" what does not stay, or "merge" it into the most similar token that stays. None: the recipe's, but
            "drop" where `similar` is given.
        inside: Act between a block's attention and its MLP, in training too, instead of after the block.
        metric: What is compared where tokens are merged: the tokens, "x", or the "mean" over heads of the keys of the
            block's attention, which is cheaper.
        score_weight: Where tokens are merged, the most important stay. Importance is the distance from the most similar
            token of a higher score, 1 - cosine, times exp(score_weight * the score, standardised in its image), times
            the number of patches that it stands for to the power of `size_weight`. None: 0.5, or 0.25 with
            score="attention".
        size_weight: See `score_weight`.
        window: Where tokens are merged, compare each one only with those near it, in windows of as many tokens as a
            square of so many patches holds; 2 or larger. None compares all, which on large grids takes time. Where a
            step leaves fewer tokens than there would be windows, there are as many windows as tokens are left.
        proportional: Merged tokens count in attention by their size, to a power that is learned for each block.
        similar: Tokens dropped for being similar to a kept one; 0 turns the step off. Where fewer can go (at most
            as many as stay), fewer go: the number that stays is always what `keep` or `tokens` says.
        similar_at: "score" removes them after each ranking (top n + similar, then similar are removed), "start"
            once before block 1. None: "score" with one location, "start" with several, as in the paper.
        partition: How tokens are split in two groups: "random" (a seeded permutation, the same for every image) or
            "sequential" (by rank: the better half is compared with the worse one; in the grid's order at "start").
        similar_how: "drop" the similar tokens or "merge" each into its match.
        order: Seed of the random partition.
        recipe: "merge" (ours), "relative" (ours, with dropping as in the paper) or "paper" (the authors' code).
        scorer: "linear" or "mlp" (D, hidden, GELU, 1).
        hidden: Width of the MLP scorer; None is twice the embedding width, derived from the paper's DeiT-Tiny figures.
        noise_blocks: Blocks whose output gets noise in training, each with a scorer. None is the locations with
            recipe="merge", where every step counts for those that will be used; with the others it is 1 to 5, and on to
            the last location where that lies beyond, or fewer in a model with fewer blocks. 0 is the patch embedding.
        noise_at: In training, noise after "all" of these blocks at once, or after "one" of them, drawn for each batch,
            so that every scorer learns from the features that it will see.
        capacity: Number of tokens that can pass free of noise: "one", a share of the tokens in (0, 1], or "drawn",
            a share drawn uniformly from [0.1, 0.9] for each batch and block.
        noise_scale: Noise in units of "one" or of each token's root mean square, "rms"; or "image": the token gives way
            to the mean of its image's tokens, with noise in units of their standard deviation, in each dimension.
        stream_norm: In training a non-affine LayerNorm replaces the residual stream, prefix tokens included, before
            noise is added, as in the authors' code.
        beta: Standard deviation of the noise, above 0; with noise_scale="image" 0 is the mean alone.
        score_norm: Scores are computed from a non-affine LayerNorm of the tokens.
        objective: "ce", cross-entropy to the labels (of the CLS head alone on distilled models), or "kl", divergence
            from the unpruned model, which needs no labels.
        prune_prob: Share of the batches in training, drawn, in which there is no noise and tokens go as they do at test
            time, each time another share of them; at all locations at once, where noise may be at one of them.
    """

    method = "tnt"
    title = "TNT"
    renamed = {"rehearsal": "prune_prob", "relevance": "score_weight", "crowding": "size_weight"}  # noqa: RUF012
    renamed_parameters = {"weights": "merge_weights", "fades": "merge_gates", "lifts": "norm_corrections"}  # noqa: RUF012

    score: Literal["learned", "attention", "both"] = option(
        "learned", "rank by a trained scorer, by received attention (nothing is trained), or by both"
    )
    how: Literal["drop", "merge"] | None = option(None, "drop tokens, or merge them into kept ones")
    inside: bool = option(False, "act between attention and MLP instead of after the block", learned=True)
    metric: Literal["x", "mean"] = option(
        "x", "what is compared: tokens (x), the mean of the heads' keys (mean), or all keys side by side (concat)"
    )
    score_weight: float | None = option(
        None, "when merging: weight of the score against similarity (0.5; 0.25 with --score attention)"
    )
    size_weight: float = option(1.0, "when merging: weight of the number of patches in a token")
    window: int | None = option(None, WINDOW)
    proportional: bool = option(True, "weigh merged tokens in attention by their size")
    similar: int = option(0, "tokens removed for being similar to a kept one")
    similar_at: Literal["score", "start"] | None = option(
        None, "remove similar tokens after scoring, or once before block 1"
    )
    partition: Literal["random", "sequential"] = option(
        "random", "how the step for similar tokens splits them: at random, or by score"
    )
    similar_how: Literal["drop", "merge"] = option("drop", "drop similar tokens, or merge each into its match")
    order: int = option(0, "seed of the random partition (tnt), or of the order of removal (random)")
    recipe: Literal["merge", "relative", "paper"] = option(
        "merge", "how to train; sets the options that are not given", learned=True
    )
    scorer: Literal["linear", "mlp"] = option("linear", "kind of scorer", learned=True)
    hidden: int | None = option(None, "width of the mlp scorer (twice the embedding's)", learned=True)
    noise_blocks: int | Sequence[int] | None = option(
        None,
        "blocks with a scorer, noisy in training (the blocks of --at; other recipes: 1 to 5, or more)",
        learned=True,
    )
    noise_at: Literal["all", "one"] | None = option(
        None, "in each batch: noise after all noise blocks, or after one, drawn at random"
    )
    capacity: float | Literal["one", "drawn"] | None = option(
        None, "how many tokens can stay free of noise: one, a share, or drawn at random per batch"
    )
    noise_scale: Literal["one", "rms", "image"] | None = option(
        None, "unit of the noise: 1, the token's root mean square, or the image's deviation"
    )
    stream_norm: bool | None = option(None, "normalise the residual stream in training, as the authors' code does")
    beta: float | None = option(None, "standard deviation of the noise, in units of --noise-scale")
    score_norm: bool | None = option(None, "normalise tokens (LayerNorm) before scoring", learned=True)
    objective: Literal["ce", "kl"] | None = option(None, "train against labels (ce), the unpruned model (kl), or both")
    prune_prob: float | None = option(None, "share of training batches that are pruned instead of noised")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.similar and self.how is None:  # said once, so that it stays when `similar` is changed
            object.__setattr__(self, "how", "drop")
        if self.noise_blocks is not None:
            blocks = as_tuple(self.noise_blocks)
            for block in blocks:
                check(is_int(block) and block >= 0, f"noise_blocks: {block} given; expected numbers, 0 or larger")
            object.__setattr__(self, "noise_blocks", tuple(sorted(set(blocks))))
        check(is_int(self.similar) and self.similar >= 0, f"similar={self.similar}: expected 0 or more tokens")
        check(is_int(self.order) and self.order >= 0, f"order={self.order}: expected a whole number, 0 or larger")
        check_words(
            self, "score", "how", "metric", "similar_at", "partition", "similar_how", "recipe", "scorer", "noise_at",
            "noise_scale", "objective",
        )  # fmt: skip
        check(self.noise_blocks != (), "noise_blocks: none given; expected at least one block")
        width = self.hidden is None or (is_int(self.hidden) and 0 < self.hidden <= MAX_HIDDEN)
        check(width, f"hidden={self.hidden}: expected a width above 0 and at most {MAX_HIDDEN}")
        check(
            self.hidden is None or self.scorer == "mlp", f"hidden={self.hidden}: the linear scorer has no hidden layer"
        )
        check_flags(self, "stream_norm", "score_norm", "inside", "proportional")
        for name in ("score_weight", "size_weight"):
            value = getattr(self, name)
            known = (name == "score_weight" and value is None) or (is_number(value) and value >= 0)
            check(known, f"{name}={value}: expected a number, 0 or larger")
        if not self.must_train:
            given = [name for name in OF_TRAINING if getattr(self, name) != options(TNT)[name].default]
            check(not given, f"{' '.join(given)}: score='attention' trains nothing; expected score='learned' or 'both'")
        none = (self.noise_scale or RECIPES[self.recipe]["noise_scale"]) == "image"  # which the mean alone can be
        least = self.beta is None or (is_number(self.beta) and (self.beta > 0 or (none and self.beta == 0)))
        check(
            least and (self.beta or 0) <= MAX_BETA,
            f"beta={self.beta}: expected {'0 or more' if none else 'above 0'}, and at most {MAX_BETA:g}",
        )
        over = self.prune_prob is None or (is_number(self.prune_prob) and 0 <= self.prune_prob < 1)
        check(over, f"prune_prob={self.prune_prob}: expected a share from 0 to below 1")
        lost = bool(self.prune_prob) and not self.merges
        check(not lost, f"prune_prob={self.prune_prob}: nothing is learned from dropping; expected 0, or how='merge'")
        check(
            not (self.similar and self.how == "merge"),
            f"similar={self.similar}: with how='merge' what is similar is merged already; expected similar=0, or "
            "how='drop'",
        )
        if self.window is not None:
            check_whole("window", self.window, 2)
            check(self.merges, f"window={self.window}: nothing is merged; expected None, or how='merge'")
        if 0 in (self.noise_blocks or ()):  # type: ignore[operator]
            keys = self.merges and self.metric == "mean"
            check(not keys, "noise_blocks: 0 given; no block has been seen there; expected 1 and up, or metric='x'")
        if 0 in self.locations:
            learned = self.score == "learned"
            check(learned, "at=0: no block has been seen whose attention could rank; expected at=1 and up")
            check(self.metric == "x", "at=0: no block has been seen; expected at=1 and up, or metric='x'")
            check(not self.inside, "at=0: there is no block to act inside of; expected at=1 and up, or inside=False")
        share = is_number(self.capacity) and 0 < self.capacity <= 1  # type: ignore[operator]
        check(
            share or self.capacity in (None, "one", "drawn"),
            f"capacity={self.capacity!r}: expected 'one', 'drawn' or a share above 0 and at most 1",
        )

    @property
    def must_train(self) -> bool:
        return self.score != "attention"

    @property
    def weight_of_score(self) -> float:
        """`score_weight`, decided where it was left open."""
        return (0.5 if self.must_train else 0.25) if self.score_weight is None else self.score_weight

    @property
    def resolved(self) -> TNT:
        """The same config with every None that the recipe fills in filled in."""
        gaps = {name: value for name, value in RECIPES[self.recipe].items() if getattr(self, name) is None}
        if not self.must_train:
            gaps = {}
        elif not self.merges:
            gaps["prune_prob"] = 0.0  # nothing is learned from dropping
        return replace(self, **{**gaps, "how": self.what, "similar_at": self.similar_when})

    def noisy(self, depth: int) -> tuple[int, ...]:
        """Blocks with a scorer, in a model with so many: `noise_blocks`, decided where it was left open."""
        if self.noise_blocks is not None:
            return as_tuple(self.noise_blocks)
        if self.recipe == "merge":
            return self.locations
        last = min(max(5, *self.locations), depth - (not self.inside))
        return tuple(range(1, last + 1))

    @property
    def what(self) -> Literal["drop", "merge"]:
        """`how`, decided where it was left open."""
        return self.how or RECIPES[self.recipe]["how"]

    @property
    def merges(self) -> bool:
        """Whether what does not stay is merged into what does."""
        return self.what == "merge"

    def check_changes(self, changes: dict[str, Any], source: str) -> None:
        score = changes.get("score", self.score)
        check(
            self.must_train or score == "attention",
            f"score={score!r}: {source} ranks by attention and has no scorer; expected a training of TNT",
        )
        check(
            not self.must_train or score != "attention",
            f"score='attention': {source} was trained, which would be without effect; expected score='learned' or "
            "'both', or tntprune.reduce_ without what was trained",
        )
        check(
            not (self.merges and changes.get("similar") and changes.get("how") != "drop"),
            f"similar={changes.get('similar')}: {source} was trained to merge, which removes what is similar too; "
            "expected how='drop' as well, or no similar",
        )
        check(
            self.merges or changes.get("how") != "merge",
            f"how='merge': {source} was trained to drop, and only does that; expected another training",
        )

    @property
    def is_inside(self) -> bool:
        return self.inside

    @property
    def reads(self) -> bool:
        return self.score != "learned" or (self.merges and self.metric == "mean")

    @property
    def similar_when(self) -> Literal["score", "start"]:
        """`similar_at`, decided where it was left open."""
        return self.similar_at or ("score" if len(self.locations) == 1 else "start")

    @property
    def at_start(self) -> bool:
        """Whether similar tokens go before block 1."""
        return self.similar > 0 and self.similar_when == "start"

    def places(self, depth: int) -> tuple[Place, ...]:
        places = super().places(depth)
        check(
            not (self.at_start and places[0] == Place(0)),
            "at=0 with similar_at='start': both act before block 1; expected similar_at='score' or at=1",
        )
        return (Place(0), *places) if self.at_start else places

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        if self.at_start and turn.number == 0:
            stay = count - min(self.similar, count // 2)
            return Step(turn.place, count, count, stay) if stay < count else None
        stay = self.stay(turn._replace(number=turn.number - self.at_start), count)
        extra = 0 if self.at_start else min(self.similar, count - stay, stay)  # no more can be matched than stay
        return Step(turn.place, count, stay + extra, stay) if stay < count else None
