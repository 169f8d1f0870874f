"""How a reduced model is trained: the optimizer, the losses, one step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import base_of, device_of, reduction_of
from tntprune.backbones.base import Answer, find_backbone, tower_of
from tntprune.backbones.prompts import Prompts
from tntprune.backbones.swapping import refuse_sharded
from tntprune.data.batches import Pair, Share
from tntprune.errors import UsageError, UserError
from tntprune.system.distributed import ALONE, ProcessGroup
from tntprune.system.precision import DTYPES, unfused
from tntprune.training.config import RANK, RATE, Training
from tntprune.training.drop_path import Depth
from tntprune.training.frozen_features import Features
from tntprune.training.frozen_pass import finish, run_both, run_from
from tntprune.training.learning import LowRank, learned_parameters, weights_of
from tntprune.training.learning import learning as learning

TOGETHER = 32  # images whose features are worked out at a time
MOST = 2**31  # bytes of features that are kept in memory


class Diverged(UserError):
    """A loss or a gradient was not finite; nothing was learned from it."""


class Trainer:
    """One training of a reduced model: the optimizer, the schedule and one step of `total`.

    Raises:
        UserError: the model is not reduced, or there is nothing to learn, or not what is to be unfrozen.
        UsageError: there is nothing to learn while the model is frozen, or the rank is too large.
    """

    def __init__(self, model: nn.Module, training: Training, total: int, group: ProcessGroup = ALONE) -> None:
        self.model, self.total, self.group = model, total, group
        self.method = reduction_of(model)
        tunes = training.backbone_lr > 0
        if training.unfreeze and not self.method.steps(self.method.layout.patches):
            raise UserError(
                f"unfreeze={training.unfreeze}: {self.method.config.method} removes no token here, so there is nothing "
                "to make up for; expected a reduction that removes some"
            )
        if not self.method.trains and not tunes:
            raise UserError(
                f"{self.method.config.method} has nothing to train on a frozen model; expected a method that learns, "
                "such as tnt, or backbone_lr (--backbone-lr) above 0 to train the model itself"
            )
        if not self.method.trains and training.freeze_epochs:
            raise UsageError(
                f"freeze_epochs={training.freeze_epochs}: {self.method.config.method} has nothing to learn meanwhile; "
                "expected 0"
            )
        if getattr(model, "global_pool", None) == "":
            raise UserError(
                "the model pools nothing (global_pool=''), so it has no logits and no embedding to train against; "
                "expected one that pools, such as timm.create_model(..., global_pool='token')"
            )
        refuse_sharded(model, "trained by tntprune")
        self.device = device_of(model)
        self.training = training.on(self.device).among(group.size)
        self.backbone = find_backbone(model)
        self.ce, self.kl = weights_of(model, training)
        self.embeds = not self.backbone.classes(model)
        if self.ce and not self.backbone.classes(model):
            other = "distill=1" if training.unfreeze else "a method that is trained without labels, such as tnt"
            raise UserError(
                f"{type(model).__name__} tells no classes apart, so there is no cross-entropy to train against; "
                f"expected a classifier, or {other}"
            )
        self.depth = Depth(model, training.drop_path)
        self.asks = self.method.needs_teacher and not training.unfreeze  # for the unpruned model's tokens
        self.judges = bool(self.kl) or self.asks  # whether the unpruned model is asked
        self.base: nn.Module | None = None
        if tunes and self.judges:  # it stays as it was; of a frozen model the first blocks are run once for both
            self.base = copy.deepcopy(base_of(model)).requires_grad_(False).eval()
        elif self.judges and (training.drop_path or not self.backbone.in_parts):
            self.base = base_of(model)  # shares the blocks, from which nothing is dropped when it is asked
        self.twice = not tunes and self.base is None and self.backbone.in_parts
        layout = self.backbone.layout(model)  # as it is now: the pooling may be another one than when it was reduced
        self.narrow = (  # whether all that matters of the last block are its prefix tokens
            layout.cls and layout.pool == "token" and layout.opens and not self.method.penalises
        )
        self.half = DTYPES.get(self.training.amp)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.half == torch.float16)
        fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
        self.slow = fused if self.half == torch.bfloat16 and self.device.type == "cpu" else []
        self.own = set(self.method.parameters())
        self.learned = learned_parameters(model, tunes, training.unfreeze)
        self.low: LowRank | None = None
        if training.unfreeze == "lowrank":
            self.low = LowRank(model, RANK if training.rank is None else training.rank, training.seed)
            self.learned = self.low.learned
        self.whole = nn.ParameterList(self.learned.values())
        self.average = ModelEmaV3(self.whole, decay=training.ema, exclude_buffers=True) if training.ema else None
        self.rate = training.backbone_lr if training.unfreeze else training.lr or RATE
        self.optimizer = create_optimizer_v2(
            self.groups(), opt="adamw", lr=self.rate, weight_decay=training.weight_decay
        )
        least, first = (self.rate / 100 if rate is None else rate for rate in (training.min_lr, training.warmup_lr))
        self.schedule = CosineLRScheduler(  # a single step has the first rate of two; timm warns of a schedule of one
            self.optimizer, t_initial=max(2, total), lr_min=least, warmup_t=round(training.warmup * total),
            warmup_lr_init=first, t_in_epochs=False,
        )  # fmt: skip

    @property
    def share(self) -> Share:
        """The parts of each batch that this process works through."""
        count = self.training.micro_batches
        assert count is not None
        return Share(count, tuple(range(self.group.rank, count, self.group.size)))

    def groups(self) -> list[dict[str, Any]]:
        """Group the method's and the model's parameters for the optimizer, each with and without weight decay."""
        unweighed: set[str] = getattr(self.model, "no_weight_decay", set)()
        found: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, parameter in self.learned.items():
            own = parameter in self.own
            decays = parameter.ndim > 1 and not name.endswith(".bias") and name not in unweighed
            scale = 1.0 if own else self.training.backbone_lr / self.rate
            decay = self.training.weight_decay if decays else 0.0
            group = found.setdefault((own, decays), {"params": [], "weight_decay": decay, "lr_scale": scale})
            group["params"].append(parameter)
        return list(found.values())

    def step(self, number: int, parts: Sequence[Pair]) -> torch.Tensor:
        """Make one optimizer step; what is drawn follows from the seed, the step's number and the part's.

        Args:
            number: Of the step, from 0.
            parts: The images and labels of those parts of the batch that are this process's.

        Returns:
            The loss over all processes, a scalar on the model's device.

        Raises:
            UserError: nothing that is learned has anything to do with the loss.
            Diverged: the loss or a gradient is not finite.
        """
        self.schedule.step_update(number)
        self.method.trained = number / self.total
        epochs, frozen = self.training.epochs, self.training.freeze_epochs
        thawed = number * (epochs or 1) >= frozen * self.total
        for parameter in self.learned.values():
            parameter.requires_grad_(thawed or parameter in self.own)
        self.optimizer.zero_grad()
        sum_ = torch.zeros((), device=self.device)
        for images, _ in parts:
            if not isinstance(images, Features):
                self.backbone.check_images(self.model, images)
        for part, (images, labels) in zip(self.share.mine, parts, strict=True):
            self.seed(self.training.seed_of(number, part))
            sum_ += self.backward(images, labels)
        if self.low is not None:
            self.low.pull()
        loss = self.add_up(sum_)
        self.scaler.unscale_(self.optimizer)
        if self.training.clip is None:
            norm = nn.utils.get_total_norm([p.grad for p in self.learned.values() if p.grad is not None])
        else:
            norm = nn.utils.clip_grad_norm_(self.learned.values(), self.training.clip)
        if not (loss if self.scaler.is_enabled() else loss + norm).isfinite():  # a scaler skips such gradients itself
            raise Diverged(self.blame(number, parts))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.merge()
        if self.average is not None:
            self.average.update(self.whole)
        if not self.training.unfreeze:
            self.method.set_calibrated()
            self.method.unsaved = True
        return loss

    def add_up(self, loss: torch.Tensor) -> torch.Tensor:
        """Add up the gradients of all processes, in place, and the loss, a scalar: one message a step.

        A parameter that nobody's part of the batch had to do with stays without a gradient, as it does in one process.
        """
        if self.group.size == 1:
            return loss
        parameters = list(self.learned.values())
        had = torch.tensor([float(p.grad is not None) for p in parameters], device=loss.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self.group.sum(torch.cat([*(grad.float().flatten() for grad in grads), had, loss.float().reshape(1)]))
        split: Sequence[torch.Tensor] = flat.split([*(p.numel() for p in parameters), len(parameters), 1])
        *sums, had, total = split
        for parameter, value, owners in zip(parameters, sums, had.tolist(), strict=True):
            parameter.grad = value.view_as(parameter).to(parameter.dtype) if owners else None
        return total.reshape(())

    @torch.no_grad()
    def blame(self, number: int, parts: Sequence[Pair]) -> str:
        """Say why the loss of a step, or a gradient, is not finite, and what to do; see `step`."""
        step = f"step {number + 1}: the loss or a gradient is not finite"
        for images, _ in parts:
            own = images.to(self.device)
            pixels = own["pixel_values"] if isinstance(own, Prompts) else own.x if isinstance(own, Features) else own
            bad = int((~pixels.flatten(1).isfinite().all(1)).sum())
            if bad:
                return f"{step}: {bad} of {len(pixels)} images hold NaN or infinity; expected finite pixels"
            teacher = base_of(self.model) if self.base is None else self.base
            answers = own.logits if isinstance(own, Features) else self.backbone.answer(teacher, own).logits
            if answers is not None and not answers.isfinite().all():
                return f"{step}, nor are the unpruned model's own answers; expected finite weights, normalised images"
        half = "" if self.half is None else ", or amp='none' (--amp none)"
        if number == 0:  # no rate has been used yet
            beta = getattr(getattr(self.method, "options", None), "beta", None)
            noise = "other options of the method" if beta is None else f"a smaller beta (--beta) than {beta:g}"
            return f"{step} before anything was learned; expected {noise}{half}"
        return f"{step}; try a smaller lr (--lr) than {self.rate:g}{half}"

    def backward(self, images: Any, labels: torch.Tensor | None) -> torch.Tensor:
        """Add the gradients of one part of a batch to those that are there; the loss is its share of the batch's."""
        images = images.to(self.device, non_blocking=True)
        if (
            not isinstance(images, Features) and images.is_inference()
        ):  # autograd takes none that were made under inference_mode
            images = images.clone()
        with unfused(self.slow), self.depth.on():  # the backward pass too, which runs checkpointed blocks again
            with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
                loss = self.loss(images, labels) / self.share.parts
            if not loss.requires_grad:
                raise UserError("nothing learns: at these locations every token stays; expected a smaller keep")
            self.scaler.scale(loss).backward()
        return loss.detach()

    def merge(self) -> None:
        """Let the model have what is learned beside it."""
        if self.low is not None:
            self.low.merge()

    def seed(self, seed: int) -> None:
        """Seed the generators that this training draws from, and no other device's."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def loss(self, images: Any, labels: torch.Tensor | None) -> torch.Tensor:
        """Add up divergence from the unpruned model, cross-entropy to the labels, and what the method adds."""
        method = self.method
        teacher, answer = self.answers(images)
        losses = []
        if self.kl:
            assert teacher is not None
            losses.append(self.kl * self.distance(teacher.logits.float(), answer.logits.float()))
        if self.ce:
            if labels is None:
                other = "distill=1" if self.training.unfreeze else "objective='kl'"
                raise UserError(f"cross-entropy needs labels, and the data has none; expected labels, or {other}")
            answers = labels.to(self.device, non_blocking=True)
            logits = answer.ce_logits.float()
            smoothing = self.training.label_smoothing if answers.ndim == 1 else 0.0  # mixed labels are smooth already
            losses.append(self.ce * F.cross_entropy(logits, answers, label_smoothing=smoothing))
        if method.penalises and not self.training.unfreeze:
            if answer.tokens is None:
                raise UserError(
                    f"{method.config.method} adds a loss of its own to a classifier's; for a vision-language model "
                    "expected a method without one, such as tnt"
                )
            extra = method.penalty(answer.tokens, None if teacher is None else teacher.tokens)
            losses += [] if extra is None else [extra]
        return torch.stack(losses).sum()

    def distance(self, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        """Return the divergence of class probabilities (B, classes) from the unpruned model's, a scalar; of a model
        without classes 1 - the cosine of the embeddings (B, D).
        """
        if self.embeds:
            return 1 - F.cosine_similarity(student, teacher, dim=1).mean()
        target, own = teacher.log_softmax(1), student.log_softmax(1)
        return F.kl_div(own, target, reduction="batchmean", log_target=True)

    def answers(self, images: Any) -> tuple[Answer | None, Answer]:
        """Return what the unpruned model says, if anyone wants to know, and what the reduced one says."""
        tower: Any = tower_of(self.model)
        if isinstance(images, Features):
            known = None if images.logits is None else Answer(images.logits, images.logits, None)
            return known, self.backbone.judge(self.model, run_from(tower, images.tokens, self.narrow))
        if self.twice:
            whole, left = run_both(tower, images, self.judges, self.narrow)
            with torch.no_grad():
                teacher = None if whole is None else self.backbone.judge(self.model, whole)
            return teacher, self.backbone.judge(self.model, left)
        teacher = None
        if self.base is not None:
            with torch.no_grad(), self.depth.on(False):
                teacher = self.backbone.answer(self.base, images)
        return teacher, self.backbone.answer(self.model, images)

    @torch.no_grad()
    def features(self, images: torch.Tensor, progress: bool = True) -> Features | None:
        """Work out what is the same in every epoch, or return None where it is not, or where it would not fit.

        It is the same of a model that is frozen, and it is enough where nobody reads the unpruned model's tokens.

        Args:
            images: (n, C, H, W), all that are trained on.
            progress: Show a bar.
        """
        tower: Any = tower_of(self.model)
        same = self.twice and not self.asks and not self.training.drop_path and tower.trace is None
        if not same or self.group.size > 1:
            return None
        block, answers = self.method.untouched, []
        kept: torch.Tensor | None = None
        with unfused(self.slow), torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            for first in tqdm(
                range(0, len(images), TOGETHER), desc="unpruned model", unit="batch", disable=not progress
            ):
                part = images[first : first + TOGETHER]
                self.backbone.check_images(self.model, part)
                tokens, everywhere = tower.enter(part.to(self.device))
                if everywhere is not None or tokens.x[0].nbytes * len(images) > MOST:  # places are those of a batch
                    return None
                tokens = tower.onward(tokens, None, None, 0, block)
                if kept is None:
                    kept = tokens.x.new_empty(len(images), *tokens.x.shape[1:], device=images.device)
                kept[first : first + TOGETHER] = tokens.x
                if self.judges:
                    whole = finish(tower, tokens, None, None, block, self.narrow)
                    answers.append(self.backbone.judge(self.model, whole).logits.float().to(images.device))
        assert kept is not None
        return Features(kept, block, tokens.prefix, torch.cat(answers) if answers else None)

    def averages(self) -> dict[str, torch.Tensor]:
        """Return the moving averages of what is learned, by its names; none if none are kept."""
        return {} if self.average is None else dict(zip(self.learned, self.average.module.parameters(), strict=True))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages in the place of what was learned, for as long as the context lasts."""
        kept = {name: parameter.detach().clone() for name, parameter in self.learned.items()}
        try:
            for name, value in self.averages().items():
                self.learned[name].data.copy_(value)
            self.merge()
            yield
        finally:
            for name, parameter in self.learned.items():
                parameter.data.copy_(kept[name])
            self.merge()
