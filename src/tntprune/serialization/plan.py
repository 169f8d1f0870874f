"""Plans: a schedule that was searched for, what its method has learned, and what is known of it, in one JSON file."""

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
from tntprune.system.storage import check_finite, make_folder, packed, write

ENDING = ".json"  # of a plan's name, by which it is told from other saved reductions
VERSION = 1  # raised when a field changes its meaning
FIELDS: dict[str, type] = {
    "config": dict, "backbone": dict, "model": dict, "learned": str, "weights": str, "made_by": str, "budget": dict,
    "predicted": dict, "front": list,
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A reduction that can be put on its model again, and why it is this one.

    Args:
        config: The reduction.
        learned: What its method has learned, by name, also for places where it does not act here; nothing where there
            is nothing to learn.
        backbone: `embed_dim` and `depth` of the model that it was made for.
        model: Whose it is; see `fingerprint.identity`.
        weights: The model's own weights, where they were trained with the reduction; written as a path from the plan's
            folder.
        made_by: How it was made, as JSON.
        budget: What was asked for.
        predicted: What it costs and what is left, by the search's own figures.
        front: Schedules that nothing else beats in both, the cheapest first.
    """

    config: Config
    learned: dict[str, torch.Tensor]
    backbone: dict[str, int]
    model: dict[str, Any]
    weights: Path | None = None
    made_by: str = ""
    budget: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    front: list[dict[str, Any]] = field(default_factory=list)

    def entries(self) -> dict[str, str]:
        """What `tntprune.save` writes beside the tensors, in the same words."""
        return {
            "made_by": self.made_by,
            "config": json.dumps(to_dict(self.config)),
            "backbone": json.dumps(self.backbone),
            "model": json.dumps(self.model),
            "weights": str(self.weights or ""),
        }


def is_plan(path: Path) -> bool:
    """Whether a file is a plan, by its name."""
    return path.suffix.lower() == ENDING


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan.

    Args:
        path: Of a file that ends in .json; its folder is made if it is not there.
        plan: What to write.

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
    return Plan(
        config=from_dict(data["config"]),
        learned=_tensors(path, data["learned"]),
        weights=path.parent / data["weights"] if data["weights"] else None,
        **{name: data[name] for name in ("backbone", "model", "made_by", "budget", "predicted", "front")},
    )


def _tensors(path: Path, text: str) -> dict[str, torch.Tensor]:
    """What was learned, from safetensors in base64."""
    if not text:
        return {}
    try:
        tensors: dict[str, torch.Tensor] = load(base64.b64decode(text, validate=True))
    except (ValueError, SafetensorError):
        raise UserError(f"{path}: a broken plan, what was learned cannot be read; search for it again") from None
    check_finite(path, tensors)
    return tensors
