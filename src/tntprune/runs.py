"""A training that lives in a folder: its log, its checkpoints, and how it goes on after an interruption."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from tntprune.batches import Source
from tntprune.checkpoint import FILE, WEIGHTS, save, save_weights
from tntprune.config import to_dict
from tntprune.errors import UsageError, UserError
from tntprune.interrupts import interrupts
from tntprune.reduce import reduction_of
from tntprune.runlog import LOG, open_log
from tntprune.runstate import STATE, load_state, save_state
from tntprune.storage import make_folder, read_metadata
from tntprune.train import fit
from tntprune.trainer import Trainer
from tntprune.training import Training, check_whole
from tntprune.world import ALONE, World

LOCK = ".lock"
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
    options: dict[str, Any] = json.loads(json.dumps(told))
    first, before = world.agree(lambda: _find_start(out, resume, options))
    if training.parts is None:
        training = replace(training, parts=before.get("training", {}).get("parts"))
    training = training.among(world.size)
    options["training"]["parts"] = training.parts
    with ExitStack() as stack:

        def prepare() -> None:
            if first is not None:
                make_folder(out)
                stack.enter_context(_alone(out))
                _remove(_unfinished(out))

        world.agree(prepare)
        if first is not None:
            run = _Run(model, source, training, out, options, world, validate, backbone)
            run.train(first, save_every, tensorboard, progress)
        if world.main:
            _remove([out / STATE, out / LOCK, *_unfinished(out)])
        world.wait()
    return out / (WEIGHTS if backbone else FILE)


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
        self.total = training.epochs * source.per_epoch
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
                log({"step": step, "epoch": epoch, "loss": loss, "lr": self.rate, "seconds": now()})
                ended = self.validate is not None and step % self.source.per_epoch == 0
                if ended:
                    log({"step": step, "epoch": epoch, **self.judge(epoch), "seconds": now()})
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
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self.trainer.optimizer.param_groups[0]["lr"])

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


@contextmanager
def _no_log() -> Iterator[tuple[Callable[[dict[str, Any]], None], float]]:
    """Of a process that does not write."""
    yield lambda line: None, 0.0


def _find_start(out: Path, resume: bool, options: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """The steps that are done, None if all are; and the options that it was begun with.

    Raises:
        UsageError: see `train_run`.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: a file; expected a folder")
    finished, state = ended(out), (out / STATE).exists()
    if not resume:
        if finished or state or (out / LOG).exists():
            raise UsageError(f"{out}: holds a training already; expected another --out, or --resume to continue it")
        return 0, {}
    if finished:
        before = json.loads(read_metadata(finished).get("made_by") or "{}")
        _check_same(out, before, options)
        return None, before
    if not state:
        if (out / LOG).exists():  # it was interrupted before its first checkpoint
            return 0, {}
        raise UsageError(f"{out}: no training to continue; start one without --resume")
    about = read_metadata(out / STATE)
    before = json.loads(about.get("options", "{}"))
    _check_same(out, before, options)
    return int(about["step"]), before


def ended(out: Path) -> Path | None:
    """What an ended training has left in its folder: the reduction, or the model where that alone was trained."""
    if (out / FILE).exists():
        return out / FILE
    alone = (out / WEIGHTS).exists() and read_metadata(out / WEIGHTS).get("made_by")
    return out / WEIGHTS if alone else None


def _check_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if now["training"]["parts"] is None:  # what was chosen at the start holds
        now = {**now, "training": {**now["training"], "parts": before.get("training", {}).get("parts")}}
    changed = _differences(before, now)
    if changed:
        raise UsageError(f"{out}: was started with {changed[0]}; expected the same options to continue it")


def _differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key in sorted(set(before) | set(now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{path}{key}.")
        elif old != new:
            found.append(f"{path}{key}={old}, not {new}")
    return found


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process trains in the folder at the same time.

    Raises:
        UserError: one does.
    """
    try:
        import fcntl
    except ImportError:  # not a system with such locks
        yield
        return
    try:
        file = open(out / LOCK, "w")  # noqa: SIM115 - the lock goes with it
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); expected a folder that can be written") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{out}: another process trains here; wait for it, or give another --out") from None
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


def _unfinished(out: Path) -> list[Path]:
    """What a training that was killed has left half written."""
    return [path for name in (FILE, WEIGHTS, STATE, LOG) for path in out.glob(f"**/.{name}.*.tmp")]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
