"""A reduction as it was saved, and plans: schedules that were searched for, each in one JSON file."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

import tntprune
from tntprune.errors import UserError
from tntprune.methods import Config, from_dict, to_dict
from tntprune.methods.learned import renamed, with_dimension
from tntprune.system.storage import check_finite, make_folder, packed, write

ENDING = ".json"  # of a plan's name, by which it is told from other saved reductions
VERSION = 1  # raised when a field changes its meaning
FIELDS: dict[str, type] = {
    "config": dict, "backbone": dict, "model": dict, "learned": str, "weights": str, "made_by": str, "budget": dict,
    "predicted": dict, "front": list,
}  # fmt: skip


@dataclass(frozen=True)
class SavedReduction:
    """A reduction that can be put on its model again, whatever file it comes from."""

    config: Config
    learned: dict[str, torch.Tensor]  # by its method, by name
    backbone: dict[str, Any]  # `embed_dim` and `depth` of the model that it was made for
    model: dict[str, Any]  # whose it is; see `fingerprint.identity`
    weights: Path | None = None  # the model's own, where they were trained with the reduction
    made_by: str = ""  # how it was made; the library's own notes are JSON
    output: str = field(default="", kw_only=True)  # of a tower to what follows; see `Backbone.outputs`
    last_block: str = field(default="all", kw_only=True)  # what the last block computes; see `tntprune.reduce_`
    calibrated: bool = field(default=True, kw_only=True)
    correction: dict[str, torch.Tensor] = field(default_factory=dict, kw_only=True)  # weights of the tower, by name
    corrected: int = field(default=0, kw_only=True)  # photos that the correction was made from
    path: Path = field(default=Path("the plan"), kw_only=True)  # of the file that it was read from

    def __post_init__(self) -> None:
        object.__setattr__(self, "learned", renamed(self.config, self.learned))  # whatever version saved it


@dataclass(frozen=True)
class Plan(SavedReduction):
    """A schedule that was searched for, and why it is this one. It may have learned more than its places need."""

    budget: dict[str, Any] = field(default_factory=dict)  # what was asked for
    predicted: dict[str, Any] = field(default_factory=dict)  # what it costs and what is left, by the search's figures
    front: list[dict[str, Any]] = field(default_factory=list)  # schedules that nothing else beats, the cheapest first


def is_plan(path: Path) -> bool:
    """Return whether a file is a plan, by its name."""
    return path.suffix.lower() == ENDING


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan to a .json file, whose folder is made if it is not there.

    Raises:
        UserError: it cannot be written.
    """
    make_folder(path.parent)
    tensors = {name: value.detach().cpu().contiguous() for name, value in plan.learned.items()}
    data = {
        "plan": VERSION,
        "tntprune": tntprune.__version__,
        "made_by": plan.made_by,
        "budget": plan.budget,
        "predicted": plan.predicted,
        "config": to_dict(plan.config),
        "backbone": plan.backbone,
        "model": plan.model,
        "learned": base64.b64encode(packed(tensors)).decode() if tensors else "",
        "weights": "" if plan.weights is None else Path(os.path.relpath(plan.weights, path.parent)).as_posix(),
        "front": plan.front,
        **({} if plan.last_block == "all" else {"last_block": plan.last_block}),
    }
    write(path, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        UserError: it is missing, broken, no plan, or of a newer version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a plan") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: broken, or not JSON; expected a plan, written by tntprune search") from None
    if not isinstance(data, dict) or "plan" not in data:
        raise UserError(f"{path}: JSON, but not a plan; expected what tntprune search writes")
    if data["plan"] != VERSION:
        raise UserError(f"{path}: a plan of version {data['plan']}; this tntprune reads version {VERSION}: upgrade it")
    for name, kind in FIELDS.items():
        if not isinstance(data.get(name), kind):
            raise UserError(f"{path}: a broken plan, without a {name} that could be read; search for it again")
    try:
        tensors = load(base64.b64decode(data["learned"], validate=True)) if data["learned"] else {}
    except (ValueError, SafetensorError):
        raise UserError(f"{path}: a broken plan, what was learned cannot be read; search for it again") from None
    check_finite(path, tensors)
    converted = {
        "config": from_dict(data["config"], data["backbone"].get("depth")),
        "learned": {name: with_dimension(value) for name, value in tensors.items()},
        "weights": path.parent / data["weights"] if data["weights"] else None,
    }
    last_block = str(data.get("last_block", "all"))
    return Plan(**{name: data[name] for name in FIELDS} | converted, last_block=last_block, path=path)


def parsed(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text; None where it is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
