"""The options of A-ViT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tntprune.config.base import Config, method, option
from tntprune.config.checks import check, is_number
from tntprune.schedule import Place, Step, Turn


@method("avit")
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

    everywhere = True

    at: int | Sequence[int] | None = option(
        None, "block or blocks after which tokens are removed (each halts by itself)"
    )
    gate_scale: float = option(10.0, "factor of the first channel in the gate", learned=True)
    gate_center: float = option(30.0, "what is taken off it; larger halts later", learned=True)
    epsilon: float = option(0.01, "a token halts above 1 - epsilon")
    ponder_weight: float = option(5e-4, "weight of the number of blocks that tokens take")
    target_weight: float = option(1e-3, "weight of the divergence from the wanted halting profile")
    target_depth: float = option(8.0, "block at which tokens should halt")

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
