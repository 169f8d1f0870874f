"""How a reduced model is trained: the options, the optimizer, the losses, one step."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from tntprune.backbones.base import Answer, find_backbone, tower_of
from tntprune.errors import UsageError, UserError
from tntprune.reduce import base_of, device_of, reduction_of

MAX_SEED = 2**32 - 1  # times the step's number it still fits torch's 64 bits


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse what is not a whole number in a range.

    Raises:
        UsageError: naming the option.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"{least} or larger" if most is None else f"{least} to {most}"
        raise UsageError(f"{name}={value}: expected a whole number, {limits}")


@dataclass(frozen=True)
class Training:
    """How to train. AdamW with linear warm-up and a cosine to a hundredth of the rate, all timm's.

    Args:
        epochs: Passes over the data.
        batch_size: Images a step.
        lr: Peak learning rate of what the method learns.
        backbone_lr: Peak learning rate of the model itself; 0 keeps it frozen.
        freeze_epochs: Epochs for which the model is kept frozen all the same.
        weight_decay: AdamW's, on weights and not on biases.
        label_smoothing: Of the cross-entropy, from 0 to below 1; the authors' is 0.1.
        warmup: Share of the steps in which the rate rises.
        seed: Of the order, the augmentation and the noise.
        amp: "bf16" runs the model in bfloat16 under autocast, and scores, losses and scorers stay in fp32; "none" runs
            all in fp32; "auto" is "bf16" where the device has instructions for it (AMX, or a CUDA device that says so).
    """

    epochs: int = 5
    batch_size: int = 16
    lr: float = 0.01
    backbone_lr: float = 0.0
    freeze_epochs: int = 0
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    warmup: float = 0.1
    seed: int = 0
    amp: Literal["auto", "none", "bf16"] = "auto"

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_whole("batch_size", self.batch_size, 1)
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_whole("freeze_epochs", self.freeze_epochs, 0)
        if self.freeze_epochs >= self.epochs:
            raise UsageError(f"freeze_epochs={self.freeze_epochs}: expected fewer than the {self.epochs} epochs")
        for name in ("lr", "backbone_lr", "weight_decay", "warmup"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"{name}={value}: expected a number")
        if self.lr <= 0:
            raise UsageError(f"lr={self.lr}: expected a rate above 0")
        for name in ("weight_decay", "backbone_lr"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: expected 0 or more")
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected a share from 0 to below 1")
        if self.amp not in ("auto", "none", "bf16"):
            raise UsageError(f"amp={self.amp!r}: expected 'auto', 'none' or 'bf16'")

    def on(self, device: torch.device) -> Training:
        """The same, with "auto" decided for a device."""
        return replace(self, amp="bf16" if bf16_is_native(device) else "none") if self.amp == "auto" else self


def bf16_is_native(device: torch.device) -> bool:
    """Whether a device multiplies matrices in bfloat16 faster than in fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # torch newer than 2.10
        return bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return False


class Trainer:
    """One training of a reduced model: the optimizer, the schedule and one step.

    Args:
        model: A reduced model whose method learns, or that is itself trained.
        training: How.
        total: Steps in all.

    Raises:
        UserError: the model is not reduced, or there is nothing to learn.
        UsageError: there is nothing to learn while the model is frozen.
    """

    def __init__(self, model: nn.Module, training: Training, total: int) -> None:
        self.model, self.training, self.total = model, training, total
        self.method = reduction_of(model)
        tunes = training.backbone_lr > 0
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
        if getattr(model, "num_classes", None) == 0 or getattr(model, "global_pool", None) == "":
            raise UserError("the model gives no class logits to train against; expected one with classes and pooling")
        self.base: nn.Module | None = None
        if tunes:  # the teacher stays as it was; of a frozen model the first blocks are run once for both
            self.base = copy.deepcopy(base_of(model)).requires_grad_(False).eval()
        self.backbone = find_backbone(model)
        if self.method.ce and not self.backbone.classes(model):
            raise UserError(
                f"{type(model).__name__} tells no classes apart, so there is no cross-entropy to train against; "
                "expected a classifier, or a method that is trained without labels, such as tnt"
            )
        layout = self.backbone.layout(model)  # as it is now: the pooling may be another one than when it was reduced
        self.narrow = (  # whether all that matters of the last block are its prefix tokens
            layout.cls and layout.pool == "token" and layout.opens and not self.method.penalises
        )
        self.device = device_of(model)
        self.bf16 = training.on(self.device).amp == "bf16"
        fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
        self.slow = fused if self.bf16 and self.device.type == "cpu" else []
        self.learned = dict(learned_parameters(model, tunes))
        self.own = set(self.method.parameters())
        self.optimizer = create_optimizer_v2(
            self.groups(), opt="adamw", lr=training.lr, weight_decay=training.weight_decay
        )
        self.schedule = CosineLRScheduler(
            self.optimizer, t_initial=total, lr_min=training.lr / 100, warmup_t=round(training.warmup * total),
            warmup_lr_init=training.lr / 100, t_in_epochs=False,
        )  # fmt: skip

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: the method's and the model's parameters, each with and without weight decay."""
        unweighed: set[str] = getattr(self.model, "no_weight_decay", set)()
        found: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, parameter in self.learned.items():
            own = parameter in self.own
            decays = parameter.ndim > 1 and not name.endswith(".bias") and name not in unweighed
            scale = 1.0 if own else self.training.backbone_lr / self.training.lr
            decay = self.training.weight_decay if decays else 0.0
            group = found.setdefault((own, decays), {"params": [], "weight_decay": decay, "lr_scale": scale})
            group["params"].append(parameter)
        return list(found.values())

    def step(self, number: int, images: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """One optimizer step; the noise follows from the seed and the step's number.

        Returns:
            The loss, a scalar on the model's device.
        """
        self.seed(self.training.seed * 1_000_003 + number)
        self.schedule.step_update(number)
        self.method.trained = number / self.total
        thawed = number * self.training.epochs >= self.training.freeze_epochs * self.total
        for parameter in self.learned.values():
            parameter.requires_grad_(thawed or parameter in self.own)
        images = images.to(self.device, non_blocking=True)
        with unfused(self.slow):  # the backward pass too, which runs checkpointed blocks again
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.loss(images, labels)
            if not loss.requires_grad:
                raise UserError("nothing learns: at these locations every token stays; expected a smaller keep")
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def seed(self, seed: int) -> None:
        """Seed the generators that this training draws from, and no other device's."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def loss(self, images: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """Divergence from the unpruned model, cross-entropy to the labels, and what the method adds."""
        method = self.method
        teacher, answer = self.answers(images)
        losses = []
        if method.kl:
            assert teacher is not None
            target, student = teacher.logits.float().log_softmax(1), answer.logits.float().log_softmax(1)
            losses.append(method.kl * F.kl_div(student, target, reduction="batchmean", log_target=True))
        if method.ce:
            if labels is None:
                raise UserError("cross-entropy needs labels, and the data has none; expected labels, or objective='kl'")
            answers = labels.to(self.device, non_blocking=True)
            logits = answer.ce_logits.float()
            losses.append(method.ce * F.cross_entropy(logits, answers, label_smoothing=self.training.label_smoothing))
        extra = method.penalty(answer.tokens, None if teacher is None else teacher.tokens)
        if extra is not None:
            losses.append(extra)
        return torch.stack(losses).sum()

    def answers(self, images: torch.Tensor) -> tuple[Answer | None, Answer]:
        """What the unpruned model says, if anyone wants to know, and what the reduced one says."""
        wanted, judge = bool(self.method.kl) or self.method.needs_teacher, self.backbone.judge
        if self.base is not None:
            with torch.no_grad():
                teacher = self.backbone.answer(self.base, images) if wanted else None
            return teacher, self.backbone.answer(self.model, images)
        tower: Any = tower_of(self.model)
        whole, left = tower.twice(images, wanted, self.narrow)
        with torch.no_grad():
            teacher = None if whole is None else judge(self.model, whole)
        return teacher, judge(self.model, left)


@contextmanager
def unfused(modules: list[Any]) -> Iterator[None]:
    """Attention without the fused kernel, whose backward pass in bfloat16 on a CPU is more than twice as slow."""
    for module in modules:
        module.fused_attn = False
    try:
        yield
    finally:
        for module in modules:
            module.fused_attn = True


def learned_parameters(model: nn.Module, tunes: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """What a training changes: the reduction's parameters, and the model's own if it is trained too."""
    own = set(reduction_of(model).parameters())
    for name, parameter in model.named_parameters():
        if tunes or parameter in own:
            yield name, parameter


@contextmanager
def learning(model: nn.Module, tunes: bool = False) -> Iterator[None]:
    """The reduction learns, in training mode; the base is in eval mode, and frozen unless it `tunes`. Undone after."""
    method = reduction_of(model)
    modes = {module: module.training for module in model.modules()}
    learns = {parameter: (parameter.requires_grad, parameter.grad) for parameter in model.parameters()}
    model.requires_grad_(False).eval()
    method.train()
    for _, parameter in learned_parameters(model, tunes):
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, (learning, grad) in learns.items():
            parameter.requires_grad_(learning)
            parameter.grad = grad
        method.trained = 1.0
