"""A training that lives in a folder: its log, its checkpoints, and how it goes on after an interruption."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import nn

from tntprune.batches import Source
from tntprune.checkpoint import FILE, WEIGHTS, save
from tntprune.config import to_dict
from tntprune.errors import UsageError, UserError
from tntprune.reduce import reduction_of
from tntprune.storage import make_folder, read_metadata, read_weights, write
from tntprune.train import fit
from tntprune.trainer import Trainer, Training, check_whole

STATE, LOG, LOCK = "checkpoint.safetensors", "log.jsonl", ".lock"
VALUE = "value."  # before the name of a parameter in a state


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
    progress: bool = True,
) -> Path:
    """Train a reduced model's scorers, and leave `reducer.safetensors` and `log.jsonl` in a folder.

    Every `save_every` steps, and when it is interrupted, the state goes to `checkpoint.safetensors`; a resumed training
    continues bit for bit on CPU.

    Args:
        model: A reduced model.
        source: Of batches.
        training: How.
        out: The folder.
        resume: Continue what is there.
        save_every: Steps between checkpoints.
        about: What else has to be the same in a resumed training: the model's name, the data.
        progress: Show a bar.

    Returns:
        The path of the saved reduction.

    Raises:
        UsageError: the folder holds a training and `resume` was not asked for, or the other way round, or its options
            were others.
        Stopped: it was interrupted by Ctrl-C or SIGTERM.
        UserError: something cannot be read or written.
    """
    check_whole("save_every", save_every, 1)
    options = {"reduction": to_dict(reduction_of(model).config), "training": asdict(training), **(about or {})}
    options = json.loads(json.dumps(options))
    first = _find_start(out, resume, options)
    if first is None:
        _tidy(out)
        return out / FILE
    make_folder(out)
    with _alone(out):
        return _train(model, source, training, out, first, save_every, options, progress)


def _train(
    model: nn.Module,
    source: Source,
    training: Training,
    out: Path,
    first: int,
    save_every: int,
    options: dict[str, Any],
    progress: bool,
) -> Path:
    total = training.epochs * source.per_epoch
    trainer = Trainer(model, training, total)
    if first:
        _load_state(out / STATE, trainer)
    with _open_log(out / LOG, first) as (log, before), _interrupts() as interrupted:
        begin = time.perf_counter() - before
        done = first

        def after(step: int, loss: float, trainer: Trainer) -> None:
            nonlocal done
            done = step
            rate = trainer.optimizer.param_groups[0]["lr"]
            seconds = round(time.perf_counter() - begin, 3)
            line = {
                "step": step,
                "epoch": (step - 1) // source.per_epoch + 1,
                "loss": loss,
                "lr": rate,
                "seconds": seconds,
            }
            log(line)
            if step < total and (interrupted or step % save_every == 0):
                _save_state(out / STATE, trainer, step, options)
            if interrupted and step < total:
                raise Stopped(f"stopped after step {step} of {total}; nothing is lost, continue with --resume")

        try:
            fit(model, source, training, first, trainer, after, progress)
        except (RuntimeError, OSError, EOFError):  # the processes that read photos got the signal too, and ended of it
            if not interrupted:
                raise
            raise Stopped(f"stopped after step {done} of {total}; continue with --resume") from None
    path = save(model, out, json.dumps(options), weights=training.backbone_lr > 0)
    _tidy(out)
    return path


def _find_start(out: Path, resume: bool, options: dict[str, Any]) -> int | None:
    """The steps that are done; None if all are.

    Raises:
        UsageError: see `train_run`.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: a file; expected a folder")
    finished, state = (out / FILE).exists(), (out / STATE).exists()
    if not resume:
        if finished or state or (out / LOG).exists():
            raise UsageError(f"{out}: holds a training already; expected another --out, or --resume to continue it")
        return 0
    if finished:
        _check_same(out, json.loads(read_metadata(out / FILE).get("made_by") or "{}"), options)
        return None
    if not state:
        if (out / LOG).exists():  # it was interrupted before its first checkpoint
            return 0
        raise UsageError(f"{out}: no training to continue; start one without --resume")
    about = read_metadata(out / STATE)
    _check_same(out, json.loads(about.get("options", "{}")), options)
    return int(about["step"])


def _check_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
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


def _save_state(path: Path, trainer: Trainer, step: int, options: dict[str, Any]) -> None:
    names = {id(parameter): name for name, parameter in trainer.learned.items()}
    tensors: dict[str, torch.Tensor] = {f"{VALUE}{name}": value for name, value in trainer.learned.items()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in trainer.optimizer.state[parameter].items():
                tensors[f"{key}.{names[id(parameter)]}"] = value
    about = {"step": str(step), "options": json.dumps(options)}
    write(path, to_bytes({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, metadata=about))


def _load_state(path: Path, trainer: Trainer) -> None:
    tensors = read_weights(path)
    values = {name.removeprefix(VALUE): value for name, value in tensors.items() if name.startswith(VALUE)}
    shapes = {name: parameter.shape for name, parameter in trainer.learned.items()}
    if shapes != {name: value.shape for name, value in values.items()}:
        odd = min(set(shapes) ^ set(values), default="a shape")
        raise UserError(f"{path}: does not fit the model ({odd}); expected the state of the same training")
    for name, parameter in trainer.learned.items():
        parameter.data.copy_(values[name])
        keys = [key for key in tensors if key.endswith(f".{name}") and not key.startswith(VALUE)]
        keys = [key for key in keys if "." not in key.removesuffix(f".{name}")]
        device = {key: "cpu" if key.startswith("step.") else parameter.device for key in keys}
        state = {key.removesuffix(f".{name}"): tensors[key].to(device[key]) for key in keys}
        if state:  # none before the first step that changes it
            trainer.optimizer.state[parameter] = state


@contextmanager
def _open_log(path: Path, first: int) -> Iterator[tuple[Callable[[dict[str, Any]], None], float]]:
    """What writes a line to the log, and the seconds that are in it; steps after the last checkpoint go from it.

    Nothing is buffered: a full disk is told by the write, and closing has nothing left to write.
    """
    kept: list[str] = []
    try:
        if path.exists():
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step(line) in range(1, first + 1)]
            write(path, "".join(kept).encode())
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); expected a folder that can be written"
        ) from None

    def add(line: dict[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); continue with --resume") from None

    with file:
        yield add, float(json.loads(kept[-1]).get("seconds", 0)) if kept else 0.0


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


def _tidy(out: Path) -> None:
    """Remove what an ended training no longer needs, and what one that was killed left half written."""
    for path in [
        out / STATE,
        out / LOCK,
        *(path for name in (FILE, WEIGHTS, STATE, LOG) for path in out.glob(f".{name}.*.tmp")),
    ]:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # half a line, from a machine that lost power
        return 0


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that gets an entry at the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be caught
        yield seen
        return
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
