"""The model card of a reduction: what it is, how to use it, how it was trained, and what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torch import nn

import tntprune
from tntprune.analysis.accuracy_curve import AccuracyCurve
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.methods import to_dict
from tntprune.serialization.fingerprint import full_name, identity
from tntprune.serialization.plan import parsed
from tntprune.system.units import unit_of

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")


def model_card(
    model: nn.Module,
    source: str,
    *,
    made_by: str = "",
    curve: AccuracyCurve | None = None,
    license: str | None = None,
    weights: bool = False,
) -> str:
    """Return a model card in the Hub's format: Markdown with a block of YAML on top.

    Args:
        model: Reduced.
        source: What `load_` is to be given: a Hub id, or the name of a folder.
        made_by: The note in the saved file on how it was trained.
        curve: What was measured; without it the card says that nothing was.
        license: As the Hub writes it, such as apache-2.0; None is that of the base model, if timm knows it.
        weights: Whether the model's own weights lie beside it.

    Raises:
        UserError: the model is not reduced.
    """
    from huggingface_hub import ModelCard, ModelCardData

    config, about = reduction_of(model).config, identity(model)
    timm_name, other = full_name(about), _transformers_id(model)
    base = about["hub"] or other
    name = timm_name or base or type(base_of(model)).__name__
    if timm_name:
        imports, make = "import timm, tntprune", f'timm.create_model("{name}", pretrained=True{_size(model)}).eval()'
    elif other:
        kind = next((k.__name__ for k in type(model).__mro__ if k.__module__.startswith("transformers.")), "AutoModel")
        imports, make = f"import tntprune\nfrom transformers import {kind}", f'{kind}.from_pretrained("{other}")'
    else:
        imports, make = "import tntprune", f"...  # your {name}, in eval mode"
    classifies = bool(getattr(model, "num_classes", 0) or "ForImageClassification" in type(model).__name__)
    data = ModelCardData(
        library_name="tntprune", tags=["tntprune", config.method, "token-pruning", "vision-transformer"],
        license=license or (getattr(model, "pretrained_cfg", None) or {}).get("license"), base_model=base or None,
        pipeline_tag="image-classification" if classifies else None,
    )  # fmt: skip
    told = to_dict(config)
    packages = dict.fromkeys(part["package"] for part in told.get("parts", [told]) if "package" in part)
    card = ModelCard.from_template(
        data, template_path=str(TEMPLATE), config=config, name=name, version=tntprune.__version__, weights=weights,
        packages=" ".join(packages), imports=imports, make=make, source=source,
        options=json.dumps(_without_none(told), indent=2), history=_history(shareable(made_by)), curve=curve,
        table=None if curve is None else curve_table(curve),
    )  # fmt: skip
    return f"{card}\n".encode("utf-8", "backslashreplace").decode()  # a file name need not be UTF-8


def shareable(made_by: str) -> str:
    """Return the note of a saved file without paths of the machine it was made on: of each, the last part stays."""
    note = parsed(made_by)
    return made_by if note is None else json.dumps(_without_paths(note))


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, str):
        paths = (kind(value) for kind in (PurePosixPath, PureWindowsPath))
        return next((path.name for path in paths if path.is_absolute()), value)
    return value


def _without_none(value: Any) -> Any:
    """Leave out the options that are left to the method."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def _transformers_id(model: Any) -> str:
    """Return the id on the Hub that a model of transformers is from; empty where it was a folder or none."""
    name = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    return name if name.count("/") == 1 and name[0] not in "/.~" and not Path(name).exists() else ""


def _size(model: Any) -> str:
    """Return timm's option for images of another size than those that its weights come with; empty for those."""
    size = find_backbone(model).input_size(model)
    usual = model.pretrained_cfg.get("input_size")
    return f", img_size={size[1:]}" if usual and tuple(usual)[1:] != size[1:] else ""


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


def curve_table(curve: AccuracyCurve) -> str:
    """Return a curve as a table in Markdown."""
    scale, unit = unit_of(curve.base.macs)
    lines = [
        f"| setting | top-1 % | top-5 % | agreement % | {unit} | of the unpruned |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for point in (curve.base, *curve.points):
        name = f"{point.setting} (as saved)" if point.own and point.setting != "as saved" else point.setting
        lines.append(
            f"| {name} | {point.top1:.1f} | {point.top5:.1f} | {point.agreement:.1f} | {point.macs / scale:.3f} | "
            f"{point.macs / curve.base.macs:.2f} |"
        )
    return "\n".join(lines)


def curve_values(curve: AccuracyCurve | None) -> dict[str, Any] | None:
    """Return a curve as JSON values."""
    return None if curve is None else asdict(curve)
