"""A training that lives in a folder, and how it goes on after an interruption."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import base_of, device_of, reduction_of
from tntprune.data.batches import Source
from tntprune.data.datasets import open_photos
from tntprune.data.loading import default_workers
from tntprune.data.photo import Packed, packed
from tntprune.errors import INTERRUPTED, UsageError, UserError
from tntprune.methods import to_dict
from tntprune.methods.checks import check_whole
from tntprune.serialization.checkpoint import FILE, WEIGHTS, load_, read, save, save_weights
from tntprune.serialization.fingerprint import digest_of
from tntprune.system.distributed import ALONE, ProcessGroup
from tntprune.system.interrupts import interrupts
from tntprune.system.storage import LOCK, alone, make_folder
from tntprune.training.calibrate import fit, photo_source
from tntprune.training.config import Training
from tntprune.training.correction import check_correctable, correct_, images_of
from tntprune.training.learning import weights_of
from tntprune.training.recipes import Recipe
from tntprune.training.run_folder import (
    AGAIN,
    EMA,
    STATE,
    Log,
    find_start,
    load_state,
    read_log,
    save_state,
    tidy,
)  # fmt: skip
from tntprune.training.trainer import Trainer
from tntprune.training.validation import Validation

BEST = "best"  # the folder of the best of the epochs that were validated; the moving average is in `EMA`


class Stopped(UserError):
    """A training was interrupted by Ctrl-C or SIGTERM, and its state saved."""

    exit_code = INTERRUPTED


class Trained(NamedTuple):
    """A training that has ended.

    Args:
        path: What it left, as it was after the last step.
        photos: That it learned from.
        batch_size: Photos a step.
        epochs: Passes over them.
        steps: In all.
        seconds: In all, over all the times that it was resumed.
        best: The epoch whose figures on the photos to validate on were the best, with those figures; None without such.
    """

    path: Path
    photos: int
    batch_size: int
    epochs: int
    steps: int
    seconds: float
    best: dict[str, float] | None

    def __str__(self) -> str:
        if not self.steps:
            return f"corrected with {self.photos} photos in {self.seconds:.0f} s: {self.path}"
        passes, steps = f"{self.epochs} epoch{'s'[: self.epochs > 1]}", f"{self.steps} step{'s'[: self.steps > 1]}"
        told = f"trained {passes} of {self.photos} photos, {steps} of {self.batch_size}, in {self.seconds:.0f} s: "
        if self.best is None:
            return told + str(self.path)
        epoch, figures = int(self.best["epoch"]), {n: v for n, v in self.best.items() if n.startswith("top")}
        return f"{told}{self.path}\nthe best epoch was {epoch}, {_said(figures)}: {self.path.parent / BEST}"


def train_folder(
    model: nn.Module,
    data: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    val: str | Path | None = None,
    split: str | None = None,
    val_split: str | None = None,
    root: Path | None = None,
    samples: int | None = None,
    workers: int | None = None,
    about: dict[str, Any] | None = None,
    correct: bool | Literal["only"] = False,
    group: ProcessGroup = ALONE,
    **options: Any,
) -> Trained:
    """Train a reduced model on a folder of photos, in a folder of its own.

    Args:
        model: Reduced with the recipe's config.
        data: The photos, with a subfolder a class where it is trained against labels; or what timm's `create_dataset`
            opens.
        out: The folder of the training.
        recipe: How.
        val: Labelled photos to validate on after each epoch; the best epoch is kept.
        split: Of the data, if it is not "train"; see `datasets.open_photos`, for the next three too.
        val_split: Of the photos to validate on, if it is not "validation".
        root: Where data sets lie.
        samples: How many photos a stream to train on has.
        workers: Processes that read photos.
        about: What else has to be the same in a resumed training, such as the model's name.
        correct: Correct the model for its reduction when all is trained, see `correction`; "only" trains nothing.
        group: The processes that train together.
        **options: Of `train_run`: resume, save_every, backbone, tensorboard, progress.

    Raises:
        UsageError: an option is out of range, or the folder's training is another one.
        UserError: something cannot be read or written.
    """
    workers = default_workers() if workers is None else workers
    check_whole("workers", workers, 0)
    training = recipe.training.on(device_of(model))
    if correct:
        if group.size > 1:
            raise UsageError(f"correct with {group.size} processes; expected one, which takes seconds to a minute")
        check_correctable(model, training)
    where: dict[str, Any] = {"split": split, "root": root, "samples": samples}
    if correct and (correct == "only" or not reduction_of(model).trains):
        return _only_correct(model, data, out, workers, where, about, options)
    with group.main_first():  # what has to be fetched is fetched once
        labelled = weights_of(model, training)[0] > 0
        source = photo_source(model, data, recipe, labelled, workers, split=split, root=root, samples=samples)
        photos = None if val is None else open_photos(val, model, split=val_split, root=root)
    photos = packed(photos) if isinstance(photos, Sequence) else photos
    told: dict[str, Any] = {
        "data": _place(data),
        "split": split,
        "photos": len(source.photos),
        "val": None if val is None else _place(val),  # or the best epoch would be chosen among different figures
        "val_split": val_split,
        "augmentation": asdict(recipe.augmentation),
    }
    looked = {"data_digest": (data, source.photos.photos), "val_digest": (val or "", photos)}
    told |= group.agree(
        lambda: {name: one.digest(Path(place)) for name, (place, one) in looked.items() if isinstance(one, Packed)}
    )
    path = train_run(
        model, source, training, out, about={**(about or {}), **told}, group=group,
        validate=None if photos is None else Validation(model, photos, workers=workers, group=group), **options,
    )  # fmt: skip
    if correct and not read(path).corrected:
        made_by = read(path).made_by
        load_(model, out)  # the training may have ended in an earlier call
        correct_(model, images_of(model, data, options.get("progress", True), workers, **where))
        save(model, out, made_by)
    lines = read_log(out)
    validated = [line for line in lines if "top1" in line]
    best = max(validated, key=lambda line: line["top1"], default=None)  # the first of equals
    last = lines[-1] if lines else dict.fromkeys(("epoch", "step", "seconds"), 0)
    return Trained(
        path, len(source.photos), min(training.batch_size, len(source.photos)),
        int(last["epoch"]), int(last["step"]), float(last["seconds"]),
        best and {name: value for name, value in best.items() if name not in ("step", "seconds")},
    )  # fmt: skip


def _only_correct(
    model: nn.Module,
    data: str | Path,
    out: Path,
    workers: int,
    where: dict[str, Any],
    about: Any,
    options: dict[str, Any],
) -> Trained:
    """Correct a model whose reduction has nothing to train, and save that."""
    if (out / FILE).exists():
        raise UsageError(f"{out}: holds a reduction already; expected another --out")
    begin, progress = time.perf_counter(), options.get("progress", True)
    photos = correct_(model, images_of(model, data, progress, workers, **where), progress)
    path = save(model, out, json.dumps({"data": _place(data), **(about or {})}))
    return Trained(path, photos, 1, 0, 0, time.perf_counter() - begin, None)


def _place(data: str | Path) -> str:
    return str(Path(data).resolve()) if Path(data).exists() else str(data)


def train_run(
    model: nn.Module,
    source: Source,
    training: Training,
    out: Path,
    *,
    resume: bool = False,
    save_every: int = 50,
    about: dict[str, Any] | None = None,
    validate: Callable[[], dict[str, float]] | None = None,
    backbone: bool = False,
    tensorboard: bool = False,
    group: ProcessGroup = ALONE,
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
            left then, and no reduction. See `pretraining.untrained`.
        tensorboard: Also log for TensorBoard, in the folder `tensorboard`.
        group: The processes that train together.
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
        method = reduction_of(model)
        told["reduction"] = to_dict(method.config)
        if method.last_block != "all":
            told["last_block"] = method.last_block
    told |= group.agree(lambda: _digests(model, source, training, backbone))
    options: dict[str, Any] = json.loads(json.dumps(told))
    first, before = group.agree(lambda: find_start(out, resume, options))
    held = before.get("training", {})  # what was decided at the start holds
    if training.micro_batches is None:
        training = replace(training, micro_batches=held.get("micro_batches"))
    if training.epochs is None:
        epochs = training.passes(source.per_epoch, reduction_of(model).learners)
        training = replace(training, epochs=held.get("epochs", epochs))
    training = training.among(group.size)
    options["training"] |= {"micro_batches": training.micro_batches, "epochs": training.epochs}
    run = None
    if first is not None:  # what is wrong is told before a folder is made
        total = training.passes(source.per_epoch) * source.per_epoch
        trainer = Trainer(model, training, total, group)
        if first >= total:
            raise UserError(f"{out / STATE}: broken (step is {first}, of {total} in all); {AGAIN}")
        source.check(trainer.share)
        run = _Run(model, source, training, out, options, group, validate, backbone, trainer, {})
    with ExitStack() as stack:

        def prepare() -> None:
            if run is not None:
                make_folder(out)
                stack.enter_context(alone(out))
                tidy(out)

        group.agree(prepare)
        if run is not None:
            run.train(first or 0, save_every, tensorboard, progress)
        if group.main:
            tidy(out, STATE, LOCK)
        group.wait()
    return out / (WEIGHTS if backbone else FILE)


def _digests(model: nn.Module, source: Source, training: Training, backbone: bool) -> dict[str, str]:
    """Tell the model's weights and the images from others, for `run_folder.DIGESTS`."""
    found = {}
    if not backbone:  # else the checkpoint has all of its weights
        found["model_digest"] = digest_of(model if training.unfreeze else base_of(model))
    digest = getattr(source, "digest", None)
    if digest is not None:
        found["data_digest"] = digest()
    return found


@dataclass
class _Run:
    """One training in its folder: what happens after each step."""

    model: nn.Module
    source: Source
    training: Training
    out: Path
    options: dict[str, Any]
    group: ProcessGroup
    validate: Callable[[], dict[str, float]] | None
    backbone: bool
    trainer: Trainer
    notes: dict[str, Any]

    def train(self, first: int, save_every: int, tensorboard: bool, progress: bool) -> None:
        """Train from step `first` to the end, and save what came of it."""
        if first:
            self.notes = load_state(self.out / STATE, self.trainer)
        done, total, group = first, self.trainer.total, self.group
        log = Log(self.out, first, tensorboard) if group.main else None
        begin = time.perf_counter() - (log.seconds if log else 0.0)

        def note(step: int, **figures: float) -> None:
            epoch, seconds = (step - 1) // self.source.per_epoch + 1, round(time.perf_counter() - begin, 3)
            if log:
                log.add({"step": step, "epoch": epoch, **figures, "seconds": seconds})

        with interrupts() as interrupted:

            def after(step: int, loss: float, trainer: Trainer) -> None:
                nonlocal done
                done = step
                note(step, loss=loss, **self.rates)
                ended = self.validate is not None and step % self.source.per_epoch == 0
                if ended:
                    epoch = step // self.source.per_epoch
                    found = self.judge(epoch)
                    note(step, **found)
                    if progress and group.main:
                        tqdm.write(f"epoch {epoch}: {_said(found)}", file=sys.stderr)
                stop = group.any(bool(interrupted)) and step < total
                if group.main and step < total and (stop or ended or step % save_every == 0):
                    save_state(self.out / STATE, trainer, step, self.options, self.notes)
                if stop:
                    group.wait()  # torchrun ends the others as soon as one has ended
                    raise Stopped(f"stopped after step {step} of {total}; nothing is lost, continue with --resume")

            try:
                fit(self.model, self.source, self.training, first, self.trainer, after, progress, group)
            except (RuntimeError, OSError, EOFError):  # the processes that read photos got the signal too, and ended
                if not interrupted:
                    raise
                raise Stopped(f"stopped after step {done} of {total}; continue with --resume") from None
            finally:
                if log:
                    log.close()
        if group.main:
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
            if self.group.main:
                self.save(self.out / BEST)
        return found

    def save(self, folder: Path) -> None:
        """Save the reduction, or the model alone, as it is now."""
        made_by = json.dumps(self.options if folder == self.out else {**self.options, "notes": self.notes})
        if self.backbone:
            save_weights(self.model, folder, made_by)
        else:
            save(self.model, folder, made_by, weights=self.training.backbone_lr > 0)


def _said(figures: dict[str, float]) -> str:
    """Tell a person what a validation found."""
    names = {"top1": "top-1", "top5": "top-5", "ema_top1": "top-1 of the average", "ema_top5": "its top-5"}
    return ", ".join(f"{names.get(name, name)} {value:.2f}" for name, value in figures.items())
