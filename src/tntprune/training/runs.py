"""A training that lives in a folder: its log, its checkpoints, and how it goes on after an interruption."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import base_of, reduction_of
from tntprune.data.batches import Source
from tntprune.errors import UserError
from tntprune.methods import to_dict
from tntprune.methods.checks import check_whole
from tntprune.serialization.checkpoint import FILE, WEIGHTS, save, save_weights
from tntprune.serialization.fingerprint import digest_of
from tntprune.system.distributed import ALONE, World
from tntprune.system.interrupts import interrupts
from tntprune.system.storage import make_folder
from tntprune.training.calibrate import fit
from tntprune.training.config import Training
from tntprune.training.run_folder import LOCK, alone, find_start, remove, unfinished
from tntprune.training.run_log import open_log
from tntprune.training.run_state import AGAIN, STATE, load_state, save_state
from tntprune.training.trainer import Trainer

BEST, EMA = "best", "ema"  # folders: the best of the epochs that were validated, and the moving average
Validate = Callable[[], dict[str, float]]


class Stopped(UserError):
    """A training was interrupted, and its state saved."""


def train_run(
    model: nn.Module,
    source: Source,
    training: Training,
    out: Path,
    *,
    resume: bool = False,
    save_every: int = 50,
    about: dict[str, Any] | None = None,
    validate: Validate | None = None,
    backbone: bool = False,
    tensorboard: bool = False,
    world: World = ALONE,
    progress: bool = True,
) -> Path:
    """Train a reduced model's scorers, and leave `reducer.safetensors` and `log.jsonl` in a folder.

    Every `save_every` steps, after each validation, and when it is interrupted, the state goes to
    `checkpoint.safetensors`; a resumed training continues bit for bit on CPU. Several processes may train, and another
    number of them may continue, as long as they can share the parts of a batch evenly; the folder has to be one that
    all of them see.

    Args:
        model: A reduced model.
        source: Of batches.
        training: How.
        out: The folder.
        resume: Continue what is there.
        save_every: Steps between checkpoints.
        about: What else has to be the same in a resumed training: the model's name, the data.
        validate: Asked after each epoch for percentages by name, "top1" among them; the reduction of the best epoch is
            kept in the folder `best`.
        backbone: The model alone is what is trained, under a reduction that removes nothing; `model.safetensors` is
            left then, and no reduction.
        tensorboard: Also log for TensorBoard, in the folder `tensorboard`.
        world: The processes that train together.
        progress: Show a bar.

    Returns:
        The path of what is left, as it is after the last step. With `Training.ema` the average is in `ema`.

    Raises:
        UsageError: the folder holds a training and `resume` was not asked for, or the other way round, or its options
            were others.
        Stopped: it was interrupted by Ctrl-C or SIGTERM.
        UserError: something cannot be read or written.
    """
    check_whole("save_every", save_every, 1)
    told = {"training": asdict(training), **(about or {})}
    if not backbone:
        told["reduction"] = to_dict(reduction_of(model).config)
    told |= world.agree(lambda: _digests(model, source, training, backbone))
    options: dict[str, Any] = json.loads(json.dumps(told))
    first, before = world.agree(lambda: find_start(out, resume, options))
    held = before.get("training", {})  # what was decided at the start holds
    if training.micro_batches is None:
        training = replace(training, micro_batches=held.get("micro_batches"))
    if training.epochs is None:
        epochs = training.passes(source.per_epoch, reduction_of(model).learners)
        training = replace(training, epochs=held.get("epochs", epochs))
    training = training.among(world.size)
    options["training"] |= {"micro_batches": training.micro_batches, "epochs": training.epochs}
    run = None
    if first is not None:  # what is wrong is told before a folder is made
        run = _Run(model, source, training, out, options, world, validate, backbone)
        if first >= run.total:
            raise UserError(f"{out / STATE}: broken (step is {first}, of {run.total} in all); {AGAIN}")
        source.check(run.trainer.share)
    with ExitStack() as stack:

        def prepare() -> None:
            if run is not None:
                make_folder(out)
                stack.enter_context(alone(out))
                remove(unfinished(out))

        world.agree(prepare)
        if run is not None:
            run.train(first or 0, save_every, tensorboard, progress)
        if world.main:
            remove([out / STATE, out / LOCK, *unfinished(out)])
        world.wait()
    return out / (WEIGHTS if backbone else FILE)


def _digests(model: nn.Module, source: Source, training: Training, backbone: bool) -> dict[str, str]:
    """What tells the model's weights and the images from others, for `runfolder.DIGESTS`."""
    found = {}
    if not backbone:  # else the checkpoint has all of its weights
        found["model_digest"] = digest_of(model if training.unfreeze else base_of(model))
    digest = getattr(source, "digest", None)
    if digest is not None:
        found["data_digest"] = digest()
    return found


class _Run:
    """One training in its folder: what happens after each step."""

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        training: Training,
        out: Path,
        options: dict[str, Any],
        world: World,
        validate: Validate | None,
        backbone: bool,
    ) -> None:
        self.model, self.source, self.training, self.out, self.world = model, source, training, out, world
        self.options, self.validate, self.backbone = options, validate, backbone
        self.total = training.passes(source.per_epoch) * source.per_epoch
        self.trainer = Trainer(model, training, self.total, world)
        self.notes: dict[str, Any] = {}

    def train(self, first: int, save_every: int, tensorboard: bool, progress: bool) -> None:
        """From step `first` to the end, and save what came of it."""
        if first:
            self.notes = load_state(self.out / STATE, self.trainer)
        done, total, world = first, self.total, self.world
        logs = open_log(self.out, first, tensorboard) if world.main else _no_log()
        with logs as (log, before), interrupts() as interrupted:
            begin = time.perf_counter() - before

            def now() -> float:
                return round(time.perf_counter() - begin, 3)

            def after(step: int, loss: float, trainer: Trainer) -> None:
                nonlocal done
                done = step
                epoch = (step - 1) // self.source.per_epoch + 1
                log({"step": step, "epoch": epoch, "loss": loss, **self.rates, "seconds": now()})
                ended = self.validate is not None and step % self.source.per_epoch == 0
                if ended:
                    found = self.judge(epoch)
                    log({"step": step, "epoch": epoch, **found, "seconds": now()})
                    if progress and world.main:
                        tqdm.write(f"epoch {epoch}: {said(found)}", file=sys.stderr)
                stop = world.any(bool(interrupted)) and step < total
                if world.main and step < total and (stop or ended or step % save_every == 0):
                    save_state(self.out / STATE, trainer, step, self.options, self.notes)
                if stop:
                    world.wait()  # torchrun ends the others as soon as one has ended
                    raise Stopped(f"stopped after step {step} of {total}; nothing is lost, continue with --resume")

            try:
                fit(self.model, self.source, self.training, first, self.trainer, after, progress, world)
            except (RuntimeError, OSError, EOFError):  # the processes that read photos got the signal too, and ended
                if not interrupted:
                    raise
                raise Stopped(f"stopped after step {done} of {total}; continue with --resume") from None
        if world.main:
            if self.trainer.average is not None:
                with self.trainer.averaged():
                    self.save(self.out / EMA)
            self.save(self.out)

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate, and the model's own where it is trained together with its reduction."""
        found: dict[str, float] = {}
        for group in self.trainer.optimizer.param_groups:
            found.setdefault("lr" if group["params"][0] in self.trainer.own else "backbone_lr", float(group["lr"]))
        return found if "lr" in found else {"lr": found["backbone_lr"]}

    def judge(self, epoch: int) -> dict[str, float]:
        """Validate what is learned so far, and its average; keep it if it is the best."""
        assert self.validate is not None
        found = self.validate()
        if self.trainer.average is not None:
            with self.trainer.averaged():
                found |= {f"{EMA}_{name}": value for name, value in self.validate().items()}
        if found["top1"] > self.notes.get("best", {}).get("top1", -1.0):
            self.notes["best"] = {"epoch": epoch, **found}
            if self.world.main:
                self.save(self.out / BEST)
        return found

    def save(self, folder: Path) -> None:
        """Save the reduction, or the model alone, as it is now."""
        made_by = json.dumps(self.options if folder == self.out else {**self.options, "notes": self.notes})
        if self.backbone:
            save_weights(self.model, folder, made_by)
        else:
            save(self.model, folder, made_by, weights=self.training.backbone_lr > 0)


def said(figures: dict[str, float]) -> str:
    """What a validation found, for a person."""
    names = {"top1": "top-1", "top5": "top-5", "ema_top1": "top-1 of the average", "ema_top5": "its top-5"}
    return ", ".join(f"{names.get(name, name)} {value:.2f}" for name, value in figures.items())


@contextmanager
def _no_log() -> Iterator[tuple[Callable[[dict[str, Any]], None], float]]:
    """Of a process that does not write."""
    yield lambda line: None, 0.0
