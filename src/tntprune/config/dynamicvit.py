"""The options of DynamicViT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tntprune.config.base import Config, method, option
from tntprune.config.checks import check, check_words, is_number
from tntprune.schedule import Step, Turn, truncated


@method("dynamicvit")
@dataclass(frozen=True)
class DynamicViT(Config):
    """DynamicViT (Rao et al., NeurIPS 2021): a predictor at each location decides what goes.

    `keep` counts from all patches of the image, not from those that arrive: one value rho is rho, rho^2, rho^3, ... of
    them, and several values are those shares themselves. A predictor runs at every location whose share is below 1,
    also where no more is dropped than before, as in the authors' code; in training at every location.

    Args:
        objective: "both", cross-entropy to the labels and divergence from the unpruned model, as published; "ce" or
            "kl" for one of them. "kl" needs no labels.
        ce_weight: Of the cross-entropy.
        kl_weight: Of the divergence from the unpruned model's logits.
        ratio_weight: Of the squared difference between the share kept in training and the one wanted.
        token_weight: Of the squared difference between kept tokens and the unpruned model's.
        temperature: Of the Gumbel-softmax.
    """

    usual = 0.7

    at: int | Sequence[int] | None = option((3, 6, 9), "block or blocks at which tokens are removed")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.7)")
    objective: Literal["both", "ce", "kl"] = option("both", "train against labels, the unpruned model, or both")
    ce_weight: float = option(1.0, "weight of the cross-entropy")
    kl_weight: float = option(0.5, "weight of the divergence from the unpruned model's logits")
    ratio_weight: float = option(2.0, "weight of the loss on the share that is kept")
    token_weight: float = option(0.5, "weight of the difference from the unpruned model's tokens")
    temperature: float = option(1.0, "of the Gumbel-softmax")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, "objective")
        for name in ("ce_weight", "kl_weight", "ratio_weight", "token_weight"):
            value = getattr(self, name)
            check(is_number(value) and value >= 0, f"{name}={value}: expected 0 or more")
        warm = is_number(self.temperature) and self.temperature > 0
        check(warm, f"temperature={self.temperature}: expected above 0")

    @property
    def must_train(self) -> bool:
        return True

    def share(self, number: int, patches: int) -> float:
        """The share of all patches that is wanted at one location, which training aims at."""
        if self.tokens is not None:
            return min(1.0, float(self.amount(number)) / patches)
        amount: float = self.amount(number)
        return amount if len(self.given) > 1 else math.pow(amount, number + 1)

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        if self.tokens is None:
            stay = min(count, truncated(patches, self.share(turn.number, patches)))
        else:
            stay = self.stay(turn, count)
        return Step(turn.place, count, stay, stay) if stay < patches else None
