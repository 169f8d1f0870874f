"""The model card of a reduction: what it is, how to use it, how it was trained, and what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torch import nn

import tntprune
from tntprune.analysis.accuracy_curve import Curve, Point
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.methods import to_dict
from tntprune.serialization.fingerprint import full_name, identity
from tntprune.system.units import unit_of

CARD = "README.md"


def model_card(
    model: nn.Module,
    source: str,
    *,
    made_by: str = "",
    curve: Curve | None = None,
    license: str | None = None,
    weights: bool = False,
) -> str:
    """A model card in the Hub's format, metadata first.

    Args:
        model: Reduced.
        source: What `load_` is to be given: a Hub id, or the name of a folder.
        made_by: The note in the saved file on how it was trained.
        curve: What was measured; without it the card says that nothing was.
        license: As the Hub writes it, such as apache-2.0; None is that of the base model, if timm knows it.
        weights: Whether the model's own weights lie beside it.

    Returns:
        Markdown with a block of YAML on top.

    Raises:
        UserError: the model is not reduced.
    """
    method = reduction_of(model)
    config, about = method.config, identity(model)
    base = about["hub"] or _transformers_id(model)
    name = full_name(about) or base or type(base_of(model)).__name__
    sections = [
        f"# {config.method} for {name}",
        f"A token reduction (`{config.method}`) for `{name}`, made with tntprune {tntprune.__version__}: fewer tokens "
        "enter the later blocks, so that the model needs less computation.",
        "The model's own weights are part of it: they were trained together with the reduction."
        if weights
        else "Only what the method learned and its options are here; the model itself comes from where it always does.",
        f"## Use\n\n{_usage(model, name, source)}",
        f"## Options\n\n{_options(to_dict(config))}",
        f"## How it was made\n\n{_history(shareable(made_by))}",
        f"## Measured\n\n{_measured(curve)}",
    ]
    text = f"---\n{_metadata(model, config.method, base, license)}\n---\n\n" + "\n\n".join(sections) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()  # a file name need not be UTF-8


def shareable(made_by: str) -> str:
    """The note of a saved file without paths of the machine that it was made on: of each, the last part stays."""
    note = parsed(made_by)
    return made_by if note is None else json.dumps(_without_paths(note))


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, str):
        paths = (kind(value) for kind in (PurePosixPath, PureWindowsPath))
        return next((path.name for path in paths if path.is_absolute()), value)
    return value


def parsed(made_by: str) -> dict[str, Any] | None:
    """The note of a saved file as JSON values; None where it is mere text."""
    try:
        note = json.loads(made_by)
    except ValueError:
        return None
    return note if isinstance(note, dict) else None


def _metadata(model: nn.Module, method: str, base: str, license: str | None) -> str:
    from huggingface_hub import ModelCardData

    known = (getattr(model, "pretrained_cfg", None) or {}).get("license")
    classifies = bool(getattr(model, "num_classes", 0) or "ForImageClassification" in type(model).__name__)
    data = ModelCardData(
        library_name="tntprune", tags=["tntprune", method, "token-pruning", "vision-transformer"],
        license=license or known, base_model=base or None,
        pipeline_tag="image-classification" if classifies else None,
    )  # fmt: skip
    return str(data.to_yaml()).strip()


def _transformers_id(model: Any) -> str:
    """The id on the Hub that a model of transformers was loaded from; empty where it was a folder or none."""
    name = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    return name if name.count("/") == 1 and name[0] not in "/.~" and not Path(name).exists() else ""


def _usage(model: nn.Module, name: str, source: str) -> str:
    if full_name(identity(model)):
        options = f"pretrained=True{_size(model)}"
        imports, make = "import timm, tntprune", f'timm.create_model("{name}", {options}).eval()'
    elif base := _transformers_id(model):
        kind = next((k.__name__ for k in type(model).__mro__ if k.__module__.startswith("transformers.")), "AutoModel")
        imports, make = f"import tntprune\nfrom transformers import {kind}", f'{kind}.from_pretrained("{base}")'
    else:
        imports, make = "import tntprune", f"...  # your {name}, in eval mode"
    return f'```python\n{imports}\nmodel = {make}\ntntprune.load_(model, "{source}")\n```'


def _size(model: Any) -> str:
    """The option of timm for images of another size than those that its weights come with; empty for those."""
    size = find_backbone(model).input_size(model)
    usual = model.pretrained_cfg.get("input_size")
    return f", img_size={size[1:]}" if usual and tuple(usual)[1:] != size[1:] else ""


def _options(config: dict[str, Any]) -> str:
    """The options as JSON, without those that are left to the method."""
    return f"```json\n{json.dumps(_told(config), indent=2)}\n```"


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _told(inner) for key, inner in value.items() if inner is not None}
    return [_told(inner) for inner in value] if isinstance(value, list | tuple) else value


def _history(made_by: str) -> str:
    note = parsed(made_by)
    if note is None:
        return made_by.strip() or "No training is recorded."
    training = note.pop("training", None)
    note.pop("reduction", None)  # its options are told above, as they are now
    lines = [f"- {key.replace('_', ' ')}: {value}" for key, value in note.items() if value not in (None, "")]
    if isinstance(training, dict):
        lines.append("- options of the training: " + ", ".join(f"{key} {value}" for key, value in training.items()))
    return "\n".join(lines) or "No training is recorded."


def _measured(curve: Curve | None) -> str:
    if curve is None:
        return "Nothing was measured. `tntprune eval --data PHOTOS` measures it."
    lines = [
        f"On {curve.images} labelled photos (`{curve.data}`), all settings on the same ones. Agreement: the share of "
        "photos on which the first guess is that of the unpruned model.",
        "",
        curve_table(curve),
        "",
        f"Measured on {curve.stamp}.",
    ]
    return "\n".join(lines)


def curve_table(curve: Curve) -> str:
    """A curve as a table in Markdown."""
    scale, unit = unit_of(curve.base.macs)
    head = f"| setting | top-1 % | top-5 % | agreement % | {unit} | of the unpruned |\n|---|---:|---:|---:|---:|---:|"
    return "\n".join([head, *(_row(point, curve.base, scale) for point in (curve.base, *curve.points))])


def _row(point: Point, base: Point, scale: float) -> str:
    name = f"{point.setting} (as saved)" if point.own and point.setting != "as saved" else point.setting
    return (
        f"| {name} | {point.top1:.1f} | {point.top5:.1f} | {point.agreement:.1f} | {point.macs / scale:.3f} | "
        f"{point.macs / base.macs:.2f} |"
    )


def curve_values(curve: Curve | None) -> dict[str, Any] | None:
    """A curve as JSON values."""
    return None if curve is None else asdict(curve)
