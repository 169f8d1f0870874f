"""How near a schedule's answers come to the unpruned model's, on photos that are decoded and judged once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tntprune.backbones.base import find_backbone, tower_of
from tntprune.config import Config
from tntprune.errors import UserError
from tntprune.reduce import base_of, device_of, reduction_of
from tntprune.search.space import Space
from tntprune.tokens import Tokens

BATCH = 32
MEMORY = 400_000_000  # bytes for tokens that are kept; those that leave the embedding are kept in any case
MOST_KEPT = 3  # blocks after which they are kept: few schedules leave more alone
DOUBT = 2.0  # standard errors by which a schedule must be worse to be given up early


@dataclass
class Answers:
    """What a schedule says of the first photos, one value each.

    Args:
        kl: Divergence of its probabilities from the unpruned model's.
        agrees: Whether its first guess is the unpruned model's.
        right: Whether it is the label; empty where there are none.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    right: torch.Tensor

    def __len__(self) -> int:
        return len(self.kl)

    def figures(self, base_right: torch.Tensor) -> dict[str, float]:
        """Means: `kl` in nats, `agreement` in percent, and `top1` and `top1_drop` in points where there are labels."""
        found = {"kl": float(self.kl.mean()), "agreement": 100 * float(self.agrees.double().mean())}
        if len(self.right):
            found["top1"] = 100 * float(self.right.double().mean())
            found["top1_drop"] = 100 * float(base_right[: len(self)].double().mean()) - found["top1"]
        return found


NOTHING = Answers(torch.empty(0), torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.bool))


class Judge:
    """Photos with the unpruned model's answers.

    Args:
        space: The schedules that will be judged.
        images: (n, C, H, W), normalised as the model wants them.
        labels: (n,), or None.
        base: The model whose answers count, if it is not the space's own without a reduction.

    Raises:
        UserError: the model tells no classes apart.
    """

    @torch.inference_mode()
    def __init__(
        self, space: Space, images: torch.Tensor, labels: torch.Tensor | None, base: nn.Module | None = None
    ) -> None:
        self.space, self.backbone = space, find_backbone(space.base)
        if not self.backbone.classes(space.base):
            raise UserError("the model tells no classes apart, so that there are no answers to compare")
        self.labels = None if labels is None else labels.cpu()
        teacher = space.base if base is None else base_of(base)
        some: Any = tower_of(space.put(space.config([space.least] * len(space.blocks))))
        self.kept: list[list[tuple[Tokens, Any]]] = []  # by the number of blocks that were run, batch by batch
        self.target: list[torch.Tensor] = []
        device = device_of(space.base)
        entered = []
        for batch in images.split(BATCH):
            batch = batch.to(device)
            self.target.append(self.backbone.answer(teacher, batch).logits.float().log_softmax(1))
            entered.append(some.enter(batch))
        self.kept.append(entered)
        size = sum(tokens.x.numel() * tokens.x.element_size() for tokens, _ in entered)
        for number in range(min(MOST_KEPT, space.depth - 1, MEMORY // max(1, size) - 1)):
            before = self.kept[-1]
            self.kept.append([(some.onward(x, places, None, number, number + 1), places) for x, places in before])
        guesses = torch.cat([target.argmax(1) for target in self.target]).cpu()
        self.right = NOTHING.right if self.labels is None else guesses == self.labels

    def __len__(self) -> int:
        return sum(map(len, self.target))

    @property
    def batches(self) -> int:
        """How many there are."""
        return len(self.target)

    @torch.inference_mode()
    def ask(
        self, config: Config, before: Answers = NOTHING, upto: int | None = None, rival: Answers | None = None
    ) -> Answers:
        """A schedule's answers.

        Args:
            config: The schedule.
            before: Its answers to the first photos, that need not be asked again.
            upto: Batches to go to; None is all of them.
            rival: A schedule's answers to as many photos: when this one is clearly worse, it is asked no further.
        """
        model = self.space.put(config)
        tower: Any = tower_of(model)
        plan = reduction_of(model).plan(self.space.patches)
        first = min(reduction_of(model).begins(plan), len(self.kept) - 1)
        parts = [before]
        for number in range(len(before) // BATCH, self.batches if upto is None else min(upto, self.batches)):
            tokens, places = self.kept[first][number]
            logits = self.backbone.judge(model, tower.onward(tokens, places, plan, first)).logits.float()
            parts.append(self._compare(logits, number))
            if rival is not None and number > 0:
                worse = torch.cat([part.kl for part in parts])
                worse = worse - rival.kl[: len(worse)]
                if float(worse.mean()) > DOUBT * float(worse.std()) / len(worse) ** 0.5:
                    break
        return joined(parts)

    def _compare(self, logits: torch.Tensor, number: int) -> Answers:
        """One batch's logits (B, classes) with what they should be."""
        target, guesses = self.target[number], logits.argmax(1)
        kl = F.kl_div(logits.log_softmax(1), target, reduction="none", log_target=True).sum(1)
        right = NOTHING.right
        if self.labels is not None:
            right = guesses.cpu() == self.labels[number * BATCH : number * BATCH + len(guesses)]
        return Answers(kl.cpu(), (guesses == target.argmax(1)).cpu(), right)


def joined(parts: Sequence[Answers]) -> Answers:
    """Answers to photos one after another."""
    return Answers(*(torch.cat([getattr(part, name) for part in parts]) for name in ("kl", "agrees", "right")))
