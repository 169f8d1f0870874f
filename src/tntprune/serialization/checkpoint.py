"""Saving a reduction and putting it on a model again: one small file in a folder, on the Hub, or in the library."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

import tntprune
from tntprune.backbones.attach import attach, base_of, layout_for, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.backbones.classnames import packed_names
from tntprune.backbones.replacing import replace_weights, replaced_weights
from tntprune.errors import UsageError, UserError, UserNote
from tntprune.methods import Combination, Config, from_dict, implementation, options, to_dict
from tntprune.methods.base import Method
from tntprune.methods.learned import inherit, missing_in, with_dimension
from tntprune.serialization.fingerprint import difference, identity, warn_of_others
from tntprune.serialization.hub import download, is_id
from tntprune.serialization.plan import Plan, SavedReduction, is_plan, parsed, read_plan
from tntprune.serialization.pretrained import PRETRAINED, find_pretrained
from tntprune.system.storage import check_finite, check_fits, make_folder, packed, read_metadata, read_weights, write

if TYPE_CHECKING:
    from tntprune.analysis.accuracy_curve import AccuracyCurve

Model = TypeVar("Model", bound=nn.Module)
FILE = "reducer.safetensors"
WEIGHTS = "model.safetensors"  # beside it, where the model itself was trained too
CORRECTION = "correction/"  # before the names of the tower's weights that a correction replaced
EMPTY = "nothing"  # a safetensors file needs a tensor even where a method has none


def save(
    model: nn.Module, folder: str | Path, made_by: str = "", weights: bool = False, card: bool | AccuracyCurve = False
) -> Path:
    """Save a model's reduction: its configuration and what it learned, and not the model unless `weights` says so.

    Args:
        model: A reduced model.
        folder: Where to put `reducer.safetensors`; made if it is not there.
        made_by: A note to keep in the file, such as the options of the training.
        weights: Also save the model's own weights as `model.safetensors`, for one that was trained with its reduction.
        card: Also write a model card, `README.md`, with what was measured if an `AccuracyCurve` is given.

    Returns:
        The path of the file.

    Raises:
        UserError: the model is not reduced, its reduction has values that are not finite, or the folder cannot be
            written.

    Warns:
        UserNote: the reduction was never calibrated.
    """
    method, folder = reduction_of(model), Path(folder)
    _check_whole(method)
    corrected = {CORRECTION + name: value for name, value in replaced_weights(tower_of(model)).items()}
    both = {**method.state_dict(), **corrected}
    tensors = {name: value.detach().cpu().contiguous() for name, value in both.items()}
    check_finite(folder / FILE, tensors)  # load_ would refuse them
    make_folder(folder)
    about = {
        "tntprune": tntprune.__version__,
        "made_by": made_by,
        "config": json.dumps(to_dict(method.config)),
        "weights": WEIGHTS if weights else "",
        "model": json.dumps(identity(base_of(model))),
        "backbone": json.dumps({"embed_dim": method.layout.embed_dim, "depth": method.layout.depth}),
    }
    if method.corrected:
        about["corrected"] = str(method.corrected)
    if method.output:
        about["output"] = method.output
    if method.last_block != "all":
        about["last_block"] = method.last_block
    if not method.calibrated:
        about["calibrated"] = "no"
        method.warn_uncalibrated()
    if weights:
        save_weights(model, folder)
    write(folder / FILE, packed(tensors or {EMPTY: torch.zeros(1)}, metadata=about))
    method.unsaved = False
    if card:
        from tntprune.serialization.card import CARD, model_card

        curve = None if isinstance(card, bool) else card
        text = model_card(model, folder.resolve().name, made_by=made_by, curve=curve, weights=weights)
        write(folder / CARD, text.encode())
    return folder / FILE


def _check_whole(method: Method) -> None:
    """Refuse to save a reduction that `load_` could not put together again.

    Raises:
        UserError: something was put on its layers, or FSDP2 has sharded them.
    """
    wanted = implementation(type(method.config))(method.config, method.layout).state_dict()
    found = method.state_dict()
    sharded = next((name for name, value in found.items() if hasattr(value, "full_tensor")), None)
    if sharded is not None:
        raise UserError(f"reduction.{sharded} is sharded by fully_shard; expected the model before it is sharded")
    if odd := sorted(set(found) ^ set(wanted)):
        raise UserError(
            f"reduction.{odd[0]}: something was put on the reduction's layers; expected it to be taken off or merged "
            "first (torch.nn.utils.prune.remove, peft's merge_and_unload)"
        )


def save_weights(model: nn.Module, folder: str | Path, made_by: str = "") -> Path:
    """Save the weights of a model itself, under their own names, with those of its classes; nothing of its reduction.

    Args:
        model: Reduced or not.
        folder: Where to put `model.safetensors`; made if it is not there.
        made_by: A note to keep in the file.

    Returns:
        The path of the file.

    Raises:
        UserError: adapters are on the model, a weight is not finite, or the folder cannot be written.
    """
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") or hasattr(module, "parametrizations"):
            raise UserError(
                f"{name} has an adapter on it ({type(module).__name__}), and its weights alone are not the model's; "
                "expected merged weights (peft's merge_and_unload), or a reduction saved without weights"
            )
    path = Path(folder) / WEIGHTS
    own = {name: value.detach().cpu().contiguous() for name, value in base_of(model).state_dict().items()}
    check_finite(path, own)
    make_folder(path.parent)
    about = {"tntprune": tntprune.__version__, "made_by": made_by, **packed_names(model)}
    write(path, packed(own, metadata=about))
    return path


def load_(
    model: Model,
    source: str | Path | Plan,
    *more: Config,
    revision: str | None = None,
    output: str | None = None,
    last_block: str | None = None,
    **changes: Any,
) -> Model:
    """Put a saved reduction on a model, in place.

    Where the model was trained together with its reduction, its weights are replaced too.

    Args:
        model: The model it was made for, or one of the same width and depth.
        source: A folder, a file, a plan (a .json file written by `tntprune search`, or `find_plan(...).plan`), the id
            of a repository on the Hugging Face Hub (user/repo or user/repo@revision), or "pretrained" for what comes
            with the library; a folder of that name is "./pretrained".
        *more: Further reductions, at places of their own, that need no training: see `reduce_`.
        revision: Of the repository: a branch, a tag or a commit.
        output: As for `reduce_`; None is what it was saved with.
        last_block: The same.
        **changes: Options to change, such as `at=3, keep=0.5, similar=25`.

    Returns:
        The same model.

    Raises:
        UserError: nothing is there, it is broken, or it was made for a model of another width or depth.
        UsageError: an option does not exist or is out of range, its method is not installed, or a revision was given of
            what is no repository.

    Warns:
        UserNote: it was made for other weights of such a model.
    """
    if isinstance(source, Plan) and revision is not None:
        raise UsageError(f"revision={revision!r} of a plan in memory; expected a Hub id, or no revision")
    saved = source if isinstance(source, Plan) else read(source, model, revision)
    config, path = saved.config, saved.path
    for name, entry in options(type(config)).items():
        if entry.metadata["learned"] and changes.get(name, getattr(config, name)) != getattr(config, name):
            raise UsageError(
                f"{name}={changes[name]!r}: {path} was trained with {getattr(config, name)!r}, and only fits that; "
                "expected no change of it, or another training"
            )
    if changes:
        config.check_changes(changes, str(path))
        config = config.changed(**changes)
    if untrained := next((part.method for part in more if part.must_train), None):
        raise UsageError(f"{untrained} has to be trained first; expected further reductions that need no training")
    output = output or saved.output or None
    layout = layout_for(model, saved.output or output)  # as it was saved
    cell, own_cell = (find_backbone(model).cell(model, one or "") for one in (output, saved.output))
    if saved.learned and saved.output and cell != own_cell:
        raise UserError(
            f"{path}: trained with output={saved.output!r}, where a token has {own_cell} x {own_cell} patches; "
            "expected that output, or another training"
        )
    for name, value in saved.backbone.items():
        if getattr(layout, name, None) != value:
            raise UserError(f"{path}: made for a model of {name} {value}, given one of {getattr(layout, name, None)}")
    wanted = reduction_of(
        attach(base_of(model), config, output=output)
    ).state_dict()  # the model stays as it is if this does not fit
    if missing := missing_in(saved.learned, wanted):
        raise UserError(f"{path}: {missing}")
    check_fits(path, saved.learned, wanted)
    spare = bool(changes) or isinstance(saved, Plan)  # a plan has more, for other blocks too
    surplus = [] if spare else sorted(set(saved.learned) - set(wanted))
    if surplus or any(value.shape != saved.learned[name].shape for name, value in wanted.items()):
        odd = surplus or ["shapes"]
        raise UserError(f"{path}: does not fit its own configuration ({odd[0]}); expected what tntprune.save writes")
    correction = _correction(saved, model, config, bool(more))
    tuned = None if saved.weights is None else _tuned(saved, saved.weights, source, model)
    if tuned is None:
        warn_of_others(path, base_of(model), saved.model)
    asked = {"output": output, "last_block": last_block or saved.last_block}
    own: Any = reduction_of(attach(model, config, *more, **asked))
    inherit(own.parts[0] if more and not isinstance(config, Combination) else own, saved.learned)
    own.set_calibrated(saved.calibrated)
    if tuned is not None:
        model.load_state_dict(tuned, strict=False)
    if correction:
        replace_weights(tower_of(model), correction)
        own.corrected = saved.corrected
    return model


def _correction(saved: SavedReduction, model: nn.Module, config: Config, more: bool) -> dict[str, torch.Tensor]:
    """Return the weights of the tower that a saved correction replaces; none where it was made for other options.

    Raises:
        UserError: it does not fit the model.

    Warns:
        UserNote: it is left out.
    """
    if not saved.correction:
        return {}
    if more or config != saved.config:
        warnings.warn(
            f"{saved.path}: its correction was made for {saved.config}, and is left out; to correct the model for "
            'other options, call tntprune.calibrate_(model, photos, correct="only")',
            UserNote,
            stacklevel=3,
        )
        return {}
    base = base_of(model)
    own = {name: value.detach() for name, value in tower_of(base).named_parameters() if name in saved.correction}
    if len(own) < len(saved.correction):
        odd = min(set(saved.correction) - set(own))
        raise UserError(
            f"{saved.path}: corrects {odd}, which the model does not have; expected the model it was made for"
        )
    check_fits(saved.path, saved.correction, own)
    norms = saved.model.get("norms")
    if saved.weights is None and (told := difference(base, norms if isinstance(norms, dict) else {})):
        raise UserError(
            f"{saved.path}: corrects the weights of another model ({told}); expected the weights that it was made with"
        )
    return saved.correction


def _tuned(saved: SavedReduction, file: Path, source: str | Path | Plan, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's own weights that go with a reduction, from where the reduction is from."""
    if not isinstance(source, Plan) and not Path(source).exists():
        # the same commit, or the two would not fit: the cache has a folder for each
        file = download(str(source).partition("@")[0], WEIGHTS, saved.path.parent.name)
    elif not file.is_file():
        raise UserError(
            f"{saved.path}: goes with weights that were trained with it, and {file} is gone; put it back there"
        )
    tensors, own = read_weights(file), base_of(model).state_dict()
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in tensors.items()}:
        raise UserError(f"{file}: does not fit the model; expected the model it was trained on")
    check_fits(file, tensors, own)
    return tensors


def read(source: str | Path, model: nn.Module | None = None, revision: str | None = None) -> SavedReduction:
    """Read a saved reduction, from wherever `load_` takes it.

    Args:
        source: See `load_`.
        model: The model it is for; only "pretrained" needs it.
        revision: See `load_`.

    Raises:
        UserError: nothing is there, or it is broken or not a reduction.
        UsageError: its method is not installed; it says which package has it.
    """
    path = _locate(source, model, revision)
    if is_plan(path):
        return read_plan(path)
    about = read_metadata(path)
    config, backbone = (parsed(about.get(name, "")) for name in ("config", "backbone"))
    if config is None or backbone is None:
        raise UserError(f"{path}: not a saved reduction; expected what tntprune.save or tntprune train writes")
    tensors = {name: value for name, value in read_weights(path).items() if name != EMPTY}
    corrected = {name: value for name, value in tensors.items() if name.startswith(CORRECTION)}
    learned = {name: with_dimension(value) for name, value in tensors.items() if name not in corrected}
    photos = about.get("corrected", "0")
    if not re.fullmatch("[0-9]{1,9}", photos) or bool(corrected) != bool(int(photos)):
        raise UserError(
            f"{path}: broken (its correction is of {photos[:20]!r} photos); expected what tntprune.save writes"
        )
    return SavedReduction(
        from_dict(config, backbone.get("depth")), learned, backbone, parsed(about.get("model", "")) or {},
        path.parent / WEIGHTS if about.get("weights") else None, about.get("made_by", ""),
        output=about.get("output", ""), last_block=about.get("last_block", "all"),
        calibrated=about.get("calibrated") != "no", path=path,
        correction={name.removeprefix(CORRECTION): value for name, value in corrected.items()}, corrected=int(photos),
    )  # fmt: skip


def files_of(source: str | Path | None) -> list[Path]:
    """Return the files of this machine that `load_` reads for a source, so that none of them is written over."""
    if source is None or not Path(source).exists():
        return []
    path = Path(source)
    if path.is_dir():
        return [path / FILE, path / WEIGHTS]
    own = read_plan(path).weights if is_plan(path) else path.parent / WEIGHTS
    return [path, *filter(None, [own])]


def _locate(source: str | Path, model: nn.Module | None, revision: str | None) -> Path:
    path = Path(source)
    if revision is not None and (source == PRETRAINED or path.exists()):
        raise UsageError(f"revision={revision!r}, but {source} is on this machine; expected a Hub id, or no revision")
    if source == PRETRAINED and model is not None:
        return find_pretrained(model)
    if path.is_file():
        return path
    if is_plan(path) and not path.exists():
        raise UserError(f"{path}: no such file; expected a plan, written by tntprune search")
    if path.is_dir():
        if (path / FILE).is_file():
            return path / FILE
        unfinished = any(path.glob("checkpoint.safetensors"))
        hint = "the training there has not ended: continue it with --resume" if unfinished else f"expected {FILE} in it"
        raise UserError(f"{path}: no reduction in it; {hint}")
    if not is_id(str(source).partition("@")[0]):
        raise UserError(
            f"{source}: no such folder or file, and not a Hub id; expected a folder written by tntprune.save"
        )
    return download(str(source), FILE, revision)
