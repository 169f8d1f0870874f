"""The folder that a training lives in: where it was left, whether it may go on, and that it is alone there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tntprune.errors import UsageError, UserError
from tntprune.serialization.checkpoint import FILE, WEIGHTS
from tntprune.system.storage import find_target, read_metadata
from tntprune.training.run_log import LOG
from tntprune.training.run_state import AGAIN, STATE, read_object

LOCK = ".lock"
DIGESTS = {  # what must have the same contents in a resumed training; older ones do not record it
    "model_digest": "weights of the model",
    "data_digest": "images to train on",
    "val_digest": "photos to validate on",
}


def find_start(out: Path, resume: bool, options: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """The steps that are done, None if all are; and the options that it was begun with.

    Raises:
        UsageError: see `runs.train_run`.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: a file; expected a folder")
    for name in (FILE, WEIGHTS, STATE, LOG, LOCK):
        find_target(out / name)  # a pipe would be waited for, and a link without an end be told after the work
    finished, state = ended(out), (out / STATE).exists()
    if not resume:
        if finished or state or _begun(out):
            raise UsageError(f"{out}: holds a training already; expected another --out, or --resume to continue it")
        return 0, {}
    if finished:
        before = read_object(finished, read_metadata(finished), "made_by")
        _check_same(out, before, options)
        return None, before
    if not state:
        if (out / LOG).exists():  # it was interrupted before its first checkpoint
            return 0, {}
        raise UsageError(f"{out}: no training to continue; start one without --resume")
    about = read_metadata(out / STATE)
    before = read_object(out / STATE, about, "options")
    _check_same(out, before, options)
    step = about.get("step", "")
    if not re.fullmatch("[1-9][0-9]{0,17}", step):
        raise UserError(f"{out / STATE}: broken (step is {step[:20]!r}, expected a number above 0); {AGAIN}")
    return int(step), before


def _begun(out: Path) -> bool:
    """Whether a training has done a step there."""
    return (out / LOG).exists() and (out / LOG).stat().st_size > 0


def ended(out: Path) -> Path | None:
    """What an ended training has left in its folder: the reduction, or the model where that alone was trained."""
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
    digests = [name for name in DIGESTS if name in before and name in now and before[name] != now[name]]
    before, now = ({k: v for k, v in one.items() if k not in DIGESTS} for one in (before, now))
    open_ = [name for name in ("micro_batches", "epochs") if given[name] is None]  # what was decided at the start holds
    now = {**now, "training": {**given, **{name: held.get(name) for name in open_}}}
    changed = _differences(before, now)
    if changed:
        raise UsageError(f"{out}: was started with {changed[0]}; expected the same options to continue it")
    if digests:  # after the options, which say more
        raise UsageError(f"{out}: was started with other {DIGESTS[digests[0]]}; expected the same ones to continue it")


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
def alone(out: Path) -> Iterator[None]:
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
        file = open(out / LOCK, "ab")  # noqa: SIM115 - the lock goes with it
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


def unfinished(out: Path) -> list[Path]:
    """What a training that was killed has left half written."""
    return [path for name in (FILE, WEIGHTS, STATE, LOG) for path in out.glob(f"**/.{name}.*.tmp")]


def remove(paths: list[Path]) -> None:
    """Remove files as far as that is possible."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
