"""How near a schedule's answers are to the unpruned model's, on photos that are decoded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tntprune.backbones.attach import base_of, device_of, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.errors import UserError
from tntprune.methods import Config
from tntprune.methods.steps import begins
from tntprune.ops.tokens import Tokens
from tntprune.search.interval import of_difference, of_mean
from tntprune.search.space import Space

BATCH = 32
MEMORY = 400_000_000  # bytes for tokens that are kept; those that leave the embedding are kept in any case
MOST_KEPT = 3  # blocks after which they are kept: few schedules leave more alone
DOUBT = 2.0  # standard errors by which a schedule must be worse to be given up early


@dataclass(frozen=True)
class Answers:
    """The answers of one schedule to the first n photos, one value per photo.

    Args:
        distance: (n,), KL divergence from the unpruned model's probabilities, in nats; for a model without classes
            1 - the cosine similarity of the two embeddings.
        lost: (n,), the loss, at most 1: whether the unpruned model is right minus whether the schedule is; without
            labels, whether their first guesses differ; for a model without classes, the distance.
        agrees: (n,), whether both have the same first guess; empty for a model without classes.
        right: (n,), whether the first guess is the label; empty without labels.
    """

    distance: torch.Tensor
    lost: torch.Tensor
    agrees: torch.Tensor
    right: torch.Tensor

    def __len__(self) -> int:
        return len(self.distance)

    def figures(self) -> dict[str, float]:
        """Compute the mean figures.

        Returns:
            `lost` in points with its 95 % interval `lost_low` and `lost_high`; `kl` in nats and `agreement` in percent,
            or `cosine` for a model without classes; with labels `top1` and `top1_drop` in points.
        """
        lost = 100 * float(self.lost.double().mean())
        if not len(self.agrees):
            low, high = of_mean(self.lost)
            figures = {"cosine": 1 - float(self.distance.double().mean())}
        else:
            after = self.right if len(self.right) else self.agrees
            low, high = of_difference(after.double() + self.lost, after)
            figures = {"kl": float(self.distance.mean()), "agreement": 100 * float(self.agrees.double().mean())}
        if len(self.right):
            figures |= {"top1": 100 * float(self.right.double().mean()), "top1_drop": lost}
        return {**figures, "lost": lost, "lost_low": 100 * low, "lost_high": 100 * high}

    def said(self) -> str:
        """Describe the answers in a few words, for a progress bar."""
        mean = float(self.distance.mean())
        if not len(self.agrees):
            return f"cosine {1 - mean:.4f}"
        return f"KL {mean:.3g}, agrees on {100 * float(self.agrees.double().mean()):.1f} %"


NONE = torch.empty(0, dtype=torch.bool)
NOTHING = Answers(torch.empty(0), torch.empty(0), NONE, NONE)


class Judge:
    """Photos with the unpruned model's answers.

    Args:
        space: The schedules that will be judged.
        images: (n, C, H, W), normalised as the model wants them.
        labels: (n,), or None.
        base: The model whose answers count, if it is not the space's own without a reduction.

    Raises:
        UserError: the model gives neither class logits nor one embedding per image, or has no classes for the labels.
    """

    @torch.inference_mode()
    def __init__(
        self, space: Space, images: torch.Tensor, labels: torch.Tensor | None, base: nn.Module | None = None
    ) -> None:
        self.space, self.backbone = space, find_backbone(space.base)
        self.embeds = not self.backbone.classes(space.base)
        if self.embeds and labels is not None:
            raise UserError("labels were given for a model without classes; expected images alone")
        self.labels = None if labels is None else labels.cpu()
        some = space.put(space.config([space.least] * len(space.blocks)))
        tower: Any = tower_of(some)
        device = device_of(space.base)
        batches = [batch.to(device) for batch in images.split(BATCH)]
        self.kept: list[list[tuple[Tokens, Any]]] = [[tower.enter(batch) for batch in batches]]
        size = sum(tokens.x.numel() * tokens.x.element_size() for tokens, _ in self.kept[0])
        for number in range(min(MOST_KEPT, space.depth - 1, MEMORY // max(1, size) - 1)):
            before = self.kept[-1]
            self.kept.append([(tower.onward(x, places, None, number, number + 1), places) for x, places in before])
        if base is None:  # the unpruned model goes on from there
            run = len(self.kept) - 1
            ends = [tower.onward(x, places, None, run) for x, places in self.kept[-1]]
            answers = [self.backbone.judge(some, end).logits for end in ends]
        else:
            answers = [self.backbone.answer(base_of(base), batch).logits for batch in batches]
        if answers[0].ndim != 2:
            raise UserError(
                "the model gives neither class logits nor one embedding per image; expected a model with a classifier "
                "or with pooling (global_pool)"
            )
        # embeddings, or log-probabilities
        self.target = [one.float() if self.embeds else one.float().log_softmax(1) for one in answers]
        self.right = NONE  # whether the unpruned model is right, (n,)
        if self.labels is not None:
            self.right = torch.cat([target.argmax(1) for target in self.target]).cpu() == self.labels

    def __len__(self) -> int:
        return sum(map(len, self.target))

    @property
    def batches(self) -> int:
        """How many there are."""
        return len(self.target)

    def repairs(self, start: int = 0) -> int:
        """Count the photos from `start` on that a schedule could win back: the unpruned model is wrong on them."""
        return int((~self.right[start:]).sum())

    @torch.inference_mode()
    def ask(
        self,
        config: Config,
        before: Answers = NOTHING,
        upto: int | None = None,
        rival: Answers | None = None,
        most: float | None = None,
    ) -> Answers:
        """Run a schedule on the photos.

        Args:
            config: The schedule.
            before: Its answers to the first photos, which are not computed again.
            upto: Batches to go to; None is all of them.
            rival: Another schedule's answers to as many photos. This one stops early when it is clearly worse.
            most: The largest sum of `lost` that is of use. The schedule stops early when it will be larger, whatever
                its answers to the remaining photos.
        """
        model = self.space.put(config)
        tower: Any = tower_of(model)
        plan = reduction_of(model).plan(self.space.patches)
        first = min(begins(plan), len(self.kept) - 1)
        found = before
        for number in range(math.ceil(len(before) / BATCH), self.batches if upto is None else min(upto, self.batches)):
            if most is not None and float(found.lost.sum()) - self.repairs(number * BATCH) > most:
                break
            tokens, places = self.kept[first][number]
            logits = self.backbone.judge(model, tower.onward(tokens, places, plan, first)).logits.float()
            found = joined([found, self._compare(logits, number)])
            if rival is not None and number > 0:
                worse = found.distance - rival.distance[: len(found)]
                if float(worse.mean()) > DOUBT * float(worse.std()) / len(worse) ** 0.5:
                    break
        return found

    def _compare(self, logits: torch.Tensor, number: int) -> Answers:
        """Compare one batch's logits or embeddings (B, D) with the unpruned model's."""
        target = self.target[number]
        if self.embeds:
            distance = (1 - F.cosine_similarity(logits, target)).clamp(min=0).cpu()
            return Answers(distance, distance, NONE, NONE)
        distance = F.kl_div(logits.log_softmax(1), target, reduction="none", log_target=True).sum(1).cpu()
        guesses = logits.argmax(1)
        agrees = (guesses == target.argmax(1)).cpu()
        if self.labels is None:
            return Answers(distance, 1 - agrees.float(), agrees, NONE)
        own = slice(number * BATCH, number * BATCH + len(guesses))
        right = guesses.cpu() == self.labels[own]
        return Answers(distance, self.right[own].float() - right.float(), agrees, right)


def joined(parts: Sequence[Answers]) -> Answers:
    """Join answers to consecutive photos."""
    names = [entry.name for entry in fields(Answers)]
    return Answers(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
