"""The state of a training between two steps, in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes

from tntprune.errors import UserError
from tntprune.system.storage import check_fits, read_metadata, read_weights, write
from tntprune.training.trainer import Trainer

STATE = "checkpoint.safetensors"
AGAIN = "start the training again in another folder"
VALUE, EMA = "value", "ema"  # beside the names that the optimizer has for what it keeps of a parameter


def save_state(path: Path, trainer: Trainer, step: int, options: dict[str, Any], notes: dict[str, Any]) -> None:
    """Write what is learned, its averages, the optimizer's state and the loss scale.

    Args:
        path: Of the file.
        trainer: Whose state it is.
        step: Steps that are done.
        options: Of the training, to compare with those of a resumed one.
        notes: Whatever else a resumed training has to know, as JSON.

    Raises:
        UserError: it cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {f"{VALUE}/{name}": value for name, value in trainer.learned.items()}
    tensors |= {f"{EMA}/{name}": value for name, value in trainer.averages().items()}
    for name, parameter in trainer.learned.items():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value
    about = {
        "step": str(step),
        "options": json.dumps(options),
        "scaler": json.dumps(trainer.scaler.state_dict()),
        "notes": json.dumps(notes),
    }
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write(path, to_bytes(plain, metadata=about))


def read_object(path: Path, about: dict[str, str], key: str) -> dict[str, Any]:
    """The JSON object in one entry of a file's metadata; an empty one where there is no such entry.

    Raises:
        UserError: the entry is no JSON object.
    """
    try:
        found = json.loads(about.get(key) or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: broken ({key} is no JSON object); {AGAIN}")
    return found


def load_state(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a state into a trainer of the same training, in every process.

    Returns:
        The notes.

    Raises:
        UserError: it is broken or of another model.
    """
    tensors, about = read_weights(path), read_metadata(path)
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        kinds.setdefault(kind, {})[name] = value
    values, averages = kinds.pop(VALUE, {}), kinds.pop(EMA, {})
    shapes = {name: parameter.shape for name, parameter in trainer.learned.items()}
    if shapes != {name: value.shape for name, value in values.items()} or set(averages) != set(trainer.averages()):
        odd = min(set(shapes) ^ set(values), default="a shape")
        raise UserError(f"{path}: does not fit the model ({odd}); expected the state of the same training")
    check_fits(path, values, dict(trainer.learned))
    check_fits(path, averages, trainer.averages())
    for kind, named in kinds.items():
        for name, value in named.items():
            if name not in shapes or value.shape not in (shapes[name], ()):
                raise UserError(
                    f"{path}: does not fit the model ({kind}/{name}); expected the state of the same training"
                )
    for name, parameter in trainer.learned.items():
        parameter.data.copy_(values[name])
        state = {kind: named[name] for kind, named in kinds.items() if name in named}
        if state:  # none before the first step that changes it
            trainer.optimizer.state[parameter] = {
                kind: value.to("cpu" if kind == "step" else parameter.device) for kind, value in state.items()
            }
    trainer.merge()
    for name, value in trainer.averages().items():
        value.data.copy_(averages[name])
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
