"""Putting a reduction on a model, and taking it off again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tntprune.backbones.attach import Model, attach, detach, is_reduced, reduction_of
from tntprune.errors import UsageError, UserNote
from tntprune.methods import Config, all_methods
from tntprune.serialization.checkpoint import load_
from tntprune.serialization.plan import Plan


def reduce_(
    model: Model,
    config: Config | Plan | str | Path,
    *more: Config,
    output: str | None = None,
    last_block: str | None = None,
    **changes: Any,
) -> Model:
    """Make a model drop or merge tokens, in place. A reduction that is already there is replaced.

    The model's class is swapped for a static subclass and a submodule `reduction` is added; its own parameters and
    their names stay as they are, so that compile, export, deepcopy and saving go on working.

    Args:
        model: A supported model, see `tntprune info`.
        config: What to do: `TNT(at=3, keep=0.5)`, for example; or "pretrained", a folder, a Hub id or a plan, as for
            `load_`.
        *more: Further reductions at places of their own: `ToMe(at=(6, 7, 8), r=10)`, for example.
        output: Of a vision-language model, what its tower gives to the language model: "grid", a token for every patch,
            so that the tower alone is cheaper; or "tokens", those that are kept, so that the language model is, too.
            None is "grid", or for what is loaded what it was saved with.
        last_block: What the last block computes where the head reads prefix tokens alone, such as the CLS token:
            "prefix", those alone, with the patch tokens as keys and values; or "all". The logits are the same within
            rounding. Whoever asks for tokens still gets all of them (`forward_features`, `features`, `record`), and
            so do hooks in that block. None is "all", or for what is loaded what it was saved with.
        **changes: Options to change in what is loaded: `reduce_(model, "pretrained", keep=0.7)`.

    Returns:
        The same model.

    Raises:
        UserError: the model is not supported, or the method cannot be applied to it, and why.
        UsageError: the config does not fit the model.

    Warns:
        UserNote: the model's reduction was trained and not saved; what it learned is lost.
    """
    if isinstance(config, str | Path | Plan):
        if isinstance(config, str) and config in all_methods() and not Path(config).exists():
            raise UsageError(
                f"{config!r}: a method's name; expected its config, tntprune.{all_methods()[config].__name__}()"
            )
        return load_(model, config, *more, output=output, last_block=last_block, **changes)
    if changes and isinstance(config, Config):
        raise UsageError(
            f"{min(changes)}: options go into the config, as in {type(config).__name__}({min(changes)}=...)"
        )
    before = reduction_of(model) if is_reduced(model) else None
    attach(model, config, *more, output=output, last_block=last_block)
    if before is not None and before.unsaved:
        what = "scorers" if before.trains else "corrections"
        warnings.warn(
            f"the {what} that {before.config.method} learned are lost, because its reduction was replaced; to keep "
            "them, call tntprune.save first, and tntprune.load_(model, folder, keep=...) for other options",
            UserNote,
            stacklevel=2,
        )
    return model


def restore_(model: Model) -> Model:
    """Take the reduction off, in place: the base model again, bit for bit. A model without one stays as it is.

    Raises:
        UserError: the model is inside another module, compiled or sharded, and what to give instead.
    """
    return detach(model)
