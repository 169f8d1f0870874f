"""The folder that a training lives in: its log, its state between two steps, and whether it may go on there."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tntprune.errors import UsageError, UserError
from tntprune.serialization.checkpoint import FILE, WEIGHTS
from tntprune.system.storage import LOCK, check_fits, find_target, packed, read_metadata, read_weights, write
from tntprune.training.trainer import Trainer

STATE, LOG, BOARD = "checkpoint.safetensors", "log.jsonl", "tensorboard"
AGAIN = "start the training again in another folder"
VALUE, EMA = "value", "ema"  # in a state, beside the names that the optimizer has for what it keeps of a parameter
DIGESTS = {  # what must have the same contents in a resumed training; older ones do not record it
    "model_digest": "weights of the model",
    "data_digest": "images to train on",
    "val_digest": "photos to validate on",
}


def find_start(out: Path, resume: bool, options: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the steps that are done, None if all are, and the options that the training was begun with.

    A UsageError tells what is wrong with the folder; see `runs.train_run`.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: a file; expected a folder")
    for name in (FILE, WEIGHTS, STATE, LOG, LOCK):
        find_target(out / name)  # a pipe would be waited for, and a link without an end be told after the work
    finished, state, log = ended(out), out / STATE, out / LOG
    if not resume:
        if finished or state.exists() or (log.exists() and log.stat().st_size):
            raise UsageError(f"{out}: holds a training already; expected another --out, or --resume to continue it")
        return 0, {}
    if not (finished or state.exists()):
        if log.exists():  # it was interrupted before its first checkpoint
            return 0, {}
        raise UsageError(f"{out}: no training to continue; start one without --resume")
    about = read_metadata(finished or state)
    before = read_object(finished or state, about, "made_by" if finished else "options")
    _check_same(out, before, options)
    if finished:
        return None, before
    step = about.get("step", "")
    if not re.fullmatch("[1-9][0-9]{0,17}", step):
        raise UserError(f"{state}: broken (step is {step[:20]!r}, expected a number above 0); {AGAIN}")
    return int(step), before


def ended(out: Path) -> Path | None:
    """Find what an ended training has left: the reduction, or the model where that alone was trained."""
    if (out / FILE).exists():
        return out / FILE
    alone = (out / WEIGHTS).exists() and read_metadata(out / WEIGHTS).get("made_by")
    return out / WEIGHTS if alone else None


def _check_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    given, held = now["training"], before.get("training", {})
    if not isinstance(held, dict):
        raise UserError(f"{out}: what is told of its training is broken (training is no object); {AGAIN}")
    if "parts" in held:  # as they were called in version 0.1
        held["micro_batches"] = held.pop("parts")
    open_ = {
        name: held.get(name) for name in ("micro_batches", "epochs") if given[name] is None
    }  # decided at the start
    old, new = _flat(before), _flat({**now, "training": {**given, **open_}})
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    for name in changed:
        if name not in DIGESTS:
            told = f"{name}={old.get(name)}, not {new.get(name)}"
            raise UsageError(f"{out}: was started with {told}; expected the same options to continue it")
    for name in changed:  # after the options, which say more
        if name in old and name in new:
            raise UsageError(f"{out}: was started with other {DIGESTS[name]}; expected the same ones to continue it")


def _flat(options: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def tidy(out: Path, *names: str) -> None:
    """Remove files of these names as far as that is possible, and what a killed training has left half written."""
    half = (path for name in (FILE, WEIGHTS, STATE, LOG) for path in out.glob(f"**/.{name}.*.tmp"))
    for path in [*(out / name for name in names), *half]:
        with suppress(OSError):
            path.unlink(missing_ok=True)


# The log


def read_log(out: Path) -> list[dict[str, Any]]:
    """Read the lines of a training's log but those that are no objects of numbers, such as half a line from a machine
    that lost power.
    """
    path, found = out / LOG, []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            line = json.loads(text)
            numbers = all(isinstance(value, int | float) for value in line.values())
            if numbers and {"epoch", "seconds"} <= line.keys() and int(line["step"]) > 0:
                found.append(line)
    return found


class Log:
    """The log of a training: one JSON object a line, and TensorBoard's files beside it if they are wanted.

    Steps after the last checkpoint, of which `first` are done, go from it.
    """

    def __init__(self, out: Path, first: int, tensorboard: bool = False) -> None:
        self.path, self.board = out / LOG, None
        if tensorboard:  # before there is a log, by which a training is known
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                told = "--tensorboard needs tensorboard; install it with: pip install 'tntprune[train]'"
                raise UserError(told) from None
            self.board = SummaryWriter(str(out / BOARD), purge_step=first + 1)
        kept: list[dict[str, Any]] = []
        try:
            if self.path.exists():
                kept = [line for line in read_log(out) if line["step"] <= first]
                write(self.path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
            self.path.touch()
        except OSError as error:
            told = f"cannot be written ({error.strerror}); expected a folder that can be written"
            raise UserError(f"{self.path}: {told}") from None
        self.seconds = float(kept[-1]["seconds"]) if kept else 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Write a line, whole; a full disk is told at once."""
        try:
            with open(self.path, "ab") as file:
                file.write(f"{json.dumps(line)}\n".encode())
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); continue with --resume") from None
        for name, value in line.items():
            if self.board is not None and name not in ("step", "epoch", "seconds"):
                self.board.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Have TensorBoard write what it holds back."""
        if self.board is not None:
            self.board.close()


# The state


def save_state(path: Path, trainer: Trainer, step: int, options: dict[str, Any], notes: dict[str, Any]) -> None:
    """Write what is learned, its averages, the optimizer's state and the loss scale.

    Args:
        path: Of the file.
        trainer: Whose state it is.
        step: Steps that are done.
        options: Of the training, to compare with those of a resumed one.
        notes: Whatever else a resumed training has to know, as JSON.
    """
    tensors = _values(trainer)
    for name, parameter in trainer.learned.items():
        kept = trainer.optimizer.state.get(parameter, {})  # nothing before the first step that changes it
        tensors |= {f"{kind}/{name}": value for kind, value in kept.items()}
    about = {"options": options, "scaler": trainer.scaler.state_dict(), "notes": notes}
    told = {"step": str(step), **{name: json.dumps(value) for name, value in about.items()}}
    write(path, packed({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, told))


def _values(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Name what is learned, and its averages, as in a state."""
    values: dict[str, torch.Tensor] = {f"{VALUE}/{name}": value for name, value in trainer.learned.items()}
    return values | {f"{EMA}/{name}": value for name, value in trainer.averages().items()}


def load_state(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a state into a trainer of the same training, in every process; return the notes.

    Raises:
        UserError: it is broken or of another model.
    """
    tensors, about, wanted = read_weights(path), read_metadata(path), _values(trainer)
    odd = sorted(wanted.keys() - tensors.keys())
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        into = wanted.get(key) if kind in (VALUE, EMA) else trainer.learned.get(name)
        if into is None or (value.shape != into.shape and (key in wanted or value.ndim)):  # steps are single numbers
            odd.append(key)
    if odd:
        raise UserError(f"{path}: does not fit the model ({odd[0]}); expected the state of the same training")
    check_fits(path, tensors, wanted)
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if key in wanted:
            wanted[key].data.copy_(value)
        else:
            parameter = trainer.learned[name]
            trainer.optimizer.state[parameter][kind] = value.to("cpu" if kind == "step" else parameter.device)
    trainer.merge()
    scaler, notes = (read_object(path, about, key) for key in ("scaler", "notes"))
    if scaler:
        try:
            trainer.scaler.load_state_dict(scaler)
        except (KeyError, TypeError, RuntimeError):
            raise UserError(f"{path}: broken (scaler is not of this training); {AGAIN}") from None
    best = notes.get("best", {"top1": 0})
    if not isinstance(best, dict) or not isinstance(best.get("top1"), int | float):
        raise UserError(f"{path}: broken (notes have no top1 of the best epoch); {AGAIN}")
    return notes


def read_object(path: Path, about: dict[str, str], key: str) -> dict[str, Any]:
    """Parse the JSON object in an entry of a file's metadata, {} where it is missing; refuse anything else by name."""
    try:
        found = json.loads(about.get(key) or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: broken ({key} is no JSON object); {AGAIN}")
    return found
