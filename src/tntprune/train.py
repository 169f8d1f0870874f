"""Training the scorers on a frozen model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from tqdm import tqdm

from tntprune.backbones.base import find_backbone
from tntprune.batches import LoaderSource, PhotoSource, Source, TensorSource
from tntprune.data import Photos, all_photos, default_workers, input_mode, labelled_photos, transform_for
from tntprune.errors import UsageError, UserError
from tntprune.reduce import base_of, device_of, reduction_of

Model = TypeVar("Model", bound=nn.Module)
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
        lr: Peak learning rate.
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
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    warmup: float = 0.1
    seed: int = 0
    amp: Literal["auto", "none", "bf16"] = "auto"

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_whole("batch_size", self.batch_size, 1)
        check_whole("seed", self.seed, 0, MAX_SEED)
        for name in ("lr", "weight_decay", "warmup"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"{name}={value}: expected a number")
        if self.lr <= 0:
            raise UsageError(f"lr={self.lr}: expected a rate above 0")
        if self.weight_decay < 0:
            raise UsageError(f"weight_decay={self.weight_decay}: expected 0 or more")
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
    """One training of a reduced model's scorers: the optimizer, the schedule and one step.

    Args:
        model: A reduced model whose method learns.
        training: How.
        total: Steps in all.

    Raises:
        UserError: the model is not reduced, or its method has nothing to learn.
    """

    def __init__(self, model: nn.Module, training: Training, total: int) -> None:
        self.model, self.training, self.total = model, training, total
        self.method = reduction_of(model)
        if not self.method.trains:
            raise UserError(
                f"{self.method.config.method} has nothing to train; expected a method that learns, such as tnt"
            )
        if getattr(model, "num_classes", None) == 0 or getattr(model, "global_pool", None) == "":
            raise UserError("the model gives no class logits to train against; expected one with classes and pooling")
        self.base = base_of(model)
        self.backbone = find_backbone(model)
        self.device = device_of(model)
        self.bf16 = training.on(self.device).amp == "bf16"
        self.optimizer = create_optimizer_v2(
            self.method, opt="adamw", lr=training.lr, weight_decay=training.weight_decay
        )
        warm = round(training.warmup * total)
        self.schedule = CosineLRScheduler(
            self.optimizer, t_initial=total, lr_min=training.lr / 100, warmup_t=warm,
            warmup_lr_init=training.lr / 100, t_in_epochs=False,
        )  # fmt: skip

    def step(self, number: int, images: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """One optimizer step; the noise follows from the seed and the step's number.

        Returns:
            The loss, a scalar on the model's device.
        """
        self.seed(self.training.seed * 1_000_003 + number)
        self.schedule.step_update(number)
        images = images.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.loss(images, labels)
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
        """Divergence from the unpruned model, or cross-entropy to the labels."""
        if self.method.objective == "kl":
            with torch.no_grad():
                target = self.base(images).float().log_softmax(1)
            student = self.model(images).float().log_softmax(1)
            return F.kl_div(student, target, reduction="batchmean", log_target=True)
        if labels is None:
            raise UserError("objective='ce' needs labels, and the data has none; expected labels, or objective='kl'")
        logits = self.backbone.ce_logits(self.model, images).float()
        answers = labels.to(self.device, non_blocking=True)
        return F.cross_entropy(logits, answers, label_smoothing=self.training.label_smoothing)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Only the reduction learns, in training mode; the base is frozen and in eval mode. Undone at the end."""
    method = reduction_of(model)
    modes = {module: module.training for module in model.modules()}
    learns = {parameter: (parameter.requires_grad, parameter.grad) for parameter in model.parameters()}
    model.requires_grad_(False).eval()
    method.requires_grad_(True).train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, (learning, grad) in learns.items():
            parameter.requires_grad_(learning)
            parameter.grad = grad


def fit(
    model: nn.Module,
    source: Source,
    training: Training,
    first: int = 0,
    trainer: Trainer | None = None,
    after: Callable[[int, float, Trainer], None] | None = None,
    progress: bool = True,
) -> None:
    """Train from step `first` to the end.

    Args:
        model: A reduced model.
        source: Of batches.
        training: How.
        first: Steps that are done already.
        trainer: With the state of those steps; made here if not given.
        after: Called after each step with its number from 1, its loss and the trainer.
        progress: Show a bar with the loss and the time left.

    Raises:
        UserError: the loss is not finite.
    """
    total = training.epochs * source.per_epoch
    devices = [device_of(model)] if device_of(model).type == "cuda" else []
    with (
        frozen(model),
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.default_generator.manual_seed(
            training.seed
        )  # a shuffling loader of the user's draws its order before the first step
        trainer = trainer or Trainer(model, training, total)
        bar = tqdm(total=total, initial=first, unit="step", disable=not progress, desc="training")
        average = math.nan
        with bar:
            for number, (images, labels) in enumerate(source.batches(first, total), first):
                loss = trainer.step(number, images, labels).item()
                if not math.isfinite(loss):
                    raise UserError(f"loss {loss} in step {number + 1}; expected a finite one: try a smaller --lr")
                average = loss if math.isnan(average) else 0.95 * average + 0.05 * loss
                bar.set_postfix(loss=f"{average:.4f}", refresh=False)
                bar.update()
                if after is not None:
                    after(number + 1, loss, trainer)


def photo_source(
    model: nn.Module, folder: Path, training: Training, labelled: bool, workers: int | None
) -> PhotoSource:
    """A folder of photos, augmented, for training.

    Raises:
        UsageError: the number of workers is below 0.
        UserError: there are no such photos.
    """
    workers = default_workers() if workers is None else workers
    check_whole("workers", workers, 0)
    found = labelled_photos(folder, model) if labelled else all_photos(folder)
    photos = Photos(found, transform_for(model, augment=True), input_mode(model), training.seed)
    return PhotoSource(photos, training.batch_size, training.seed, workers, labelled)


def calibrate_(
    model: Model,
    data: torch.Tensor | str | Path | Iterable[Any],
    labels: torch.Tensor | None = None,
    *,
    progress: bool = True,
    workers: int | None = None,
    **training: Any,
) -> Model:
    """Train the scorers of a reduced model, in place; the model itself is not changed.

    Args:
        model: A reduced model.
        data: Images (n, C, H, W), normalised as the model wants them; or a DataLoader of images or of (images,
            labels); or a folder of photos, with a subfolder a class if the objective is "ce".
        labels: (n,), with a tensor of images. Only the objective "ce" needs them.
        progress: Show a bar.
        workers: Processes that read photos from a folder.
        **training: Options of `Training`: epochs, batch_size, lr, weight_decay, warmup, seed, amp.

    Returns:
        The same model.

    Raises:
        UserError: the data cannot be used, or the method has nothing to learn.
        UsageError: an option is out of range.
    """
    unknown = set(training) - set(Training.__dataclass_fields__)
    if unknown:
        raise UsageError(f"no training option {min(unknown)!r}; there are {', '.join(Training.__dataclass_fields__)}")
    options = Training(**training)
    labelled = reduction_of(model).objective == "ce"
    source: Source
    if labels is not None and not isinstance(data, torch.Tensor):
        raise UsageError("labels go with a tensor of images; a loader gives its own, and a folder's are its subfolders")
    classes = getattr(model, "num_classes", None)
    if labels is not None and isinstance(classes, int) and not bool(((labels >= 0) & (labels < classes)).all()):
        raise UserError(f"labels from {labels.min()} to {labels.max()}; the model has classes 0 to {classes - 1}")
    if isinstance(data, torch.Tensor):
        source = TensorSource(data, labels, options.batch_size, options.seed)
    elif isinstance(data, str | Path):
        source = photo_source(model, Path(data), options, labelled, workers)
    else:
        source = LoaderSource(data)
    fit(model, source, options, progress=progress)
    return model
