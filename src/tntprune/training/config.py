"""The options of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from tntprune.errors import UsageError
from tntprune.methods.config import option
from tntprune.system.flags import MAX_BATCH, MAX_MICRO_BATCHES, MAX_SEED, Whole, Within, check_flags

RATES = {"all": 3e-5, "head": 1e-3, "norms": 1e-3, "lowrank": 1e-3}  # of what is unfrozen, if no other is given
RATE = 0.01  # of what the method learns
RANK = 8
STEPS = 120  # that a training makes at least, in whole epochs, if no number of these is given
TOGETHER = 5  # blocks that can learn in so many steps; with more of them it takes as many more
LEAST_RATE, MAX_RATE = 1e-12, 1000.0  # of learning rates and weight decay that are not 0; fp32 holds what follows
BELOW_ONE = Within(0, 1, below=True)


@dataclass(frozen=True)
class Training:
    """How to train. AdamW with linear warm-up and a cosine, step by step, all timm's.

    Args:
        epochs: None: as many as make at least `STEPS` steps, whatever the batch size, and more where more than
            `TOGETHER` blocks learn; a resumed training goes on with as many as it began with.
        batch_size: Images a step, over all processes.
        micro_batches: Equal parts that a step's batch is worked through in, with the same result. More of them need
            less memory; what is drawn or averaged for each, such as the share in mixup, makes them another training.
        lr: Of what the method learns; None is `RATE`.
        backbone_lr: With `unfreeze`, 0 is that of `RATES`.
        unfreeze: Fine-tune this of the model under its reduction, which learns nothing itself and takes tokens out as
            at test time. None: what the method learns is trained, in its own way, and with a `backbone_lr` all of the
            model too.
        rank: None is `RANK`.
        distill: None is 1, which needs no labels.
        weight_decay: On weights and not on biases.
        ema: Kept beside what is learned; 0 keeps none. The authors' is 0.99996.
        drop_path: Rate at which the last block is left out for an image, in training only; it rises from 0 at the first
            block. Also on a frozen model, as the authors have it, with 0.1.
        seed: Of the order, the augmentation and the noise.
        amp: Scores, losses and scorers stay in fp32. "fp16": the loss is scaled, as gradients would be lost otherwise.
            "auto" is "bf16" where the device has instructions for it (AMX, or a CUDA device that says so), else "none".

    Raises:
        UsageError: a value is out of range, or does not go with another.
    """

    epochs: Annotated[int | None, Whole(1, 1_000_000)] = option(
        None, "passes over the photos (enough for 120 steps, or 24 per trained block if that is more)"
    )
    batch_size: Annotated[int, Whole(1, MAX_BATCH)] = option(16, "photos per step, over all processes together")
    micro_batches: Annotated[int | None, Whole(1, MAX_MICRO_BATCHES)] = option(
        None, "split each batch into this many parts, to save memory (one per process)"
    )
    lr: Annotated[float | None, Within(0, MAX_RATE, above=True)] = option(None, "peak learning rate (0.01)")
    backbone_lr: Annotated[float, Within(0, MAX_RATE)] = option(
        0.0, "learning rate of the model's weights (0: frozen; with --unfreeze: chosen automatically)"
    )
    unfreeze: Literal["all", "head", "norms", "lowrank"] | None = option(
        None, "part of the model to fine-tune; needs --reducer RUN or a --method without training (none)"
    )
    rank: Annotated[int | None, Whole(1, 65536)] = option(None, "rank of the change with --unfreeze lowrank (8)")
    distill: Annotated[float | None, Within(0, 1)] = option(
        None, "with --unfreeze: share of the loss that compares with the unpruned model; the rest uses labels (1)"
    )
    freeze_epochs: Annotated[int, Whole(0, 1_000_000)] = option(0, "epochs at the start in which --backbone-lr is 0")
    weight_decay: Annotated[float, Within(0, MAX_RATE)] = option(0.0, "weight decay of AdamW")
    label_smoothing: Annotated[float, BELOW_ONE] = option(
        0.0, "label smoothing, if the loss uses labels; the authors' is 0.1"
    )
    warmup: Annotated[float, BELOW_ONE] = option(0.1, "share of the steps in which the learning rate rises")
    warmup_lr: Annotated[float | None, Within(0, MAX_RATE)] = option(
        None, "learning rate at the start of the warm-up (lr / 100)"
    )
    min_lr: Annotated[float | None, Within(0, MAX_RATE)] = option(None, "learning rate at the end (lr / 100)")
    clip: Annotated[float | None, Within(0, 1e6, above=True)] = option(None, "largest norm of the gradients (no limit)")
    ema: Annotated[float, BELOW_ONE] = option(0.0, "decay of the moving average in RUN/ema; 0: none")
    drop_path: Annotated[float, BELOW_ONE] = option(0.0, "rate of stochastic depth; also on a frozen model")
    seed: Annotated[int, Whole(0, MAX_SEED)] = option(0, "seed of all random choices")
    amp: Literal["auto", "none", "bf16", "fp16"] = option(
        "auto", "autocast precision; auto: bf16 where the device supports bf16 matrix products"
    )

    def __post_init__(self) -> None:
        check_flags(Training, vars(self))
        for name in ("lr", "weight_decay", "backbone_lr", "warmup_lr", "min_lr"):
            value = getattr(self, name)
            if value and value < LEAST_RATE:
                raise UsageError(f"{name}={value}: expected a rate from {LEAST_RATE:g} to {MAX_RATE:g}")
        if self.micro_batches is not None and self.batch_size % self.micro_batches:
            raise UsageError(f"micro_batches={self.micro_batches}: batch_size={self.batch_size} is no multiple of it")
        if self.epochs is not None and self.freeze_epochs >= self.epochs:
            raise UsageError(f"freeze_epochs={self.freeze_epochs}: expected fewer than the {self.epochs} epochs")
        if self.freeze_epochs and not self.backbone_lr and self.unfreeze is None:
            raise UsageError(
                f"freeze_epochs={self.freeze_epochs}: without backbone_lr the model is frozen throughout; expected "
                "backbone_lr above 0"
            )
        self._check_tuning()

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
        if self.rank is not None and kind != "lowrank":
            raise UsageError(f"rank={self.rank} with unfreeze={kind!r}; expected unfreeze='lowrank'")
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
        """Decide what "auto" is on a device."""
        return replace(self, amp="bf16" if bf16_is_native(device) else "none") if self.amp == "auto" else self

    def among(self, processes: int) -> Training:
        """Decide the number of micro-batches for a number of processes.

        Raises:
            UsageError: they cannot be shared evenly among so many.
        """
        count = processes if self.micro_batches is None else self.micro_batches
        if count % processes:
            raise UsageError(
                f"micro_batches={count}: expected a multiple of the {processes} processes that train together"
            )
        return replace(self, micro_batches=count)

    def passes(self, steps: int, learners: int = 1) -> int:
        """Return how many epochs to train.

        Args:
            steps: In one of them.
            learners: Blocks at which something is learned, each from a part of the steps.
        """
        if self.epochs is not None:
            return self.epochs
        wanted = STEPS if self.unfreeze else max(STEPS, STEPS * learners // TOGETHER)
        return -(-wanted // steps)

    def seed_of(self, step: int, part: int) -> int:
        """Return the seed that one micro-batch of one step draws from, whoever works it through."""
        return self.seed * 1_000_003 + step + (part << 53)


def bf16_is_native(device: torch.device) -> bool:
    """Tell whether a device multiplies matrices in bfloat16 faster than in fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # torch newer than 2.10
        return bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return False
