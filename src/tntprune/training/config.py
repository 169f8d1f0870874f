"""The options of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from tntprune.errors import UsageError
from tntprune.methods.checks import check_whole, is_number
from tntprune.system.flags import MAX_PARTS, MAX_SEED

RATES = {"all": 3e-5, "head": 1e-3, "norms": 1e-3, "lowrank": 1e-3}  # of what is unfrozen, if no other is given
RATE = 0.01  # of what the method learns
RANK = 8
STEPS = 120  # that a training makes at least, in whole epochs, if no number of these is given
TOGETHER = 5  # blocks that can learn in so many steps; with more of them it takes as many more
LEAST_RATE, MAX_RATE = 1e-12, 1000.0  # of learning rates and weight decay that are not 0; fp32 holds what follows


@dataclass(frozen=True)
class Training:
    """How to train. AdamW with linear warm-up and a cosine, step by step, all timm's.

    Args:
        epochs: Passes over the data. None: as many as make at least `STEPS` steps, whatever the batch size, and more
            where more than `TOGETHER` blocks learn; a resumed training goes on with as many as it began with.
        batch_size: Images a step, over all processes.
        parts: Equal parts that a step's batch is worked through in, one after another or by several processes at the
            same time, with the same result. None: as many as there are processes. More parts need less memory; what is
            drawn or averaged for each part, such as the share in mixup, makes them another training.
        lr: Peak learning rate of what the method learns; None is `RATE`.
        backbone_lr: Peak learning rate of the model itself; 0 keeps it frozen, or with `unfreeze` is that of `RATES`.
        unfreeze: Fine-tune this of the model under its reduction, which learns nothing itself and takes tokens out as
            at test time: "all", "head", "norms", or "lowrank" changes of the linear layers. None: what the method
            learns is trained, in its own way, and with a `backbone_lr` all of the model too.
        rank: Of the changes with unfreeze="lowrank"; None is `RANK`.
        distill: With `unfreeze`, the weight of the divergence from the unpruned model as it was, from 0 to 1; the rest
            is that of the cross-entropy to the labels. None is 1, which needs no labels.
        freeze_epochs: Epochs for which the model is kept frozen all the same.
        weight_decay: AdamW's, on weights and not on biases.
        label_smoothing: Of the cross-entropy, from 0 to below 1; the authors' is 0.1.
        warmup: Share of the steps in which the rate rises.
        warmup_lr: Where it rises from; None is a hundredth of `lr`.
        min_lr: Where it ends; None is a hundredth of `lr`.
        clip: The largest norm of all gradients together, above 0; longer ones are shortened to it. None: no limit.
        ema: Decay of the moving average of what is learned, kept beside it; 0 keeps none. The authors' is 0.99996.
        drop_path: Rate at which the last block is left out for an image, in training only; it rises from 0 at the first
            block (stochastic depth). Also on a frozen model, as the authors have it, with 0.1.
        seed: Of the order, the augmentation and the noise.
        amp: "bf16" and "fp16" run the model in half precision under autocast, and scores, losses and scorers stay in
            fp32; with "fp16" the loss is scaled, as gradients would be lost otherwise. "none" runs all in fp32; "auto"
            is "bf16" where the device has instructions for it (AMX, or a CUDA device that says so).
    """

    epochs: int | None = None
    batch_size: int = 16
    parts: int | None = None
    lr: float | None = None
    backbone_lr: float = 0.0
    unfreeze: Literal["all", "head", "norms", "lowrank"] | None = None
    rank: int | None = None
    distill: float | None = None
    freeze_epochs: int = 0
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    warmup: float = 0.1
    warmup_lr: float | None = None
    min_lr: float | None = None
    clip: float | None = None
    ema: float = 0.0
    drop_path: float = 0.0
    seed: int = 0
    amp: Literal["auto", "none", "bf16", "fp16"] = "auto"

    def __post_init__(self) -> None:
        if self.epochs is not None:
            check_whole("epochs", self.epochs, 1)
        check_whole("batch_size", self.batch_size, 1)
        if self.parts is not None:
            check_whole("parts", self.parts, 1, MAX_PARTS)
            if self.batch_size % self.parts:
                raise UsageError(f"parts={self.parts}: batch_size={self.batch_size} is no multiple of it")
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_whole("freeze_epochs", self.freeze_epochs, 0)
        if self.epochs is not None and self.freeze_epochs >= self.epochs:
            raise UsageError(f"freeze_epochs={self.freeze_epochs}: expected fewer than the {self.epochs} epochs")
        optional = ("lr", "warmup_lr", "min_lr", "clip")
        for name in ("backbone_lr", "weight_decay", "warmup", "label_smoothing", "ema", "drop_path", *optional):
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            if not is_number(value):
                raise UsageError(f"{name}={value}: expected a number")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name}={value}: expected {'a rate' if name == 'lr' else 'a norm'} above 0")
        for name in ("weight_decay", "backbone_lr", "warmup_lr", "min_lr"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: expected 0 or more")
        for name in ("lr", "weight_decay", "backbone_lr", "warmup_lr", "min_lr"):
            value = getattr(self, name)
            if value and not LEAST_RATE <= value <= MAX_RATE:
                raise UsageError(f"{name}={value}: expected a rate from {LEAST_RATE:g} to {MAX_RATE:g}")
        for name in ("warmup", "label_smoothing", "ema", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected a share from 0 to below 1")
        if self.freeze_epochs and not self.backbone_lr and self.unfreeze is None:
            raise UsageError(
                f"freeze_epochs={self.freeze_epochs}: without backbone_lr the model is frozen throughout; expected "
                "backbone_lr above 0"
            )
        self._check_tuning()
        if self.amp not in ("auto", "none", "bf16", "fp16"):
            raise UsageError(f"amp={self.amp!r}: expected 'auto', 'none', 'bf16' or 'fp16'")

    def _check_tuning(self) -> None:
        """Fill in the rate of what is unfrozen, and refuse what does not go together."""
        kind, kinds = self.unfreeze, ", ".join(map(repr, RATES))
        if kind is None:
            for name in ("rank", "distill"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{name}={getattr(self, name)} without unfreeze; expected unfreeze, one of {kinds}"
                    )
            return
        if kind not in RATES:
            raise UsageError(f"unfreeze={kind!r}: expected one of {kinds}")
        if self.rank is not None:
            check_whole("rank", self.rank, 1)
            if kind != "lowrank":
                raise UsageError(f"rank={self.rank} with unfreeze={kind!r}; expected unfreeze='lowrank'")
        share = self.share_of_kl
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise UsageError(f"distill={share}: expected a share from 0 to 1")
        if self.lr is not None:
            raise UsageError(f"lr={self.lr} with unfreeze: the method learns nothing then; expected backbone_lr")
        if self.freeze_epochs:
            raise UsageError(f"freeze_epochs={self.freeze_epochs} with unfreeze: nothing learns meanwhile; expected 0")
        if not self.backbone_lr:
            object.__setattr__(self, "backbone_lr", RATES[kind])

    @property
    def share_of_kl(self) -> float:
        """The weight of the divergence in fine-tuning."""
        return 1.0 if self.distill is None else self.distill

    def on(self, device: torch.device) -> Training:
        """The same, with "auto" decided for a device."""
        return replace(self, amp="bf16" if bf16_is_native(device) else "none") if self.amp == "auto" else self

    def among(self, processes: int) -> Training:
        """The same, with the parts decided for a number of processes.

        Raises:
            UsageError: they cannot be shared evenly among so many.
        """
        parts = processes if self.parts is None else self.parts
        if parts % processes:
            raise UsageError(f"parts={parts}: expected a multiple of the {processes} processes that train together")
        return replace(self, parts=parts)

    def passes(self, steps: int, learners: int = 1) -> int:
        """How many epochs.

        Args:
            steps: In one of them.
            learners: Blocks at which something is learned, each from a part of the steps.
        """
        if self.epochs is not None:
            return self.epochs
        wanted = STEPS if self.unfreeze else max(STEPS, STEPS * learners // TOGETHER)
        return -(-wanted // steps)

    def seed_of(self, step: int, part: int) -> int:
        """What one part of one step draws from, whoever works it through."""
        return self.seed * 1_000_003 + step + (part << 53)


def bf16_is_native(device: torch.device) -> bool:
    """Whether a device multiplies matrices in bfloat16 faster than in fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # torch newer than 2.10
        return bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return False
