"""`tntprune push`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any

from tntprune.cli.console import tell
from tntprune.cli.flags import GROUP, HostFlags, Json, Model, Reduction, flag
from tntprune.cli.options import MethodOptions
from tntprune.errors import UsageError
from tntprune.system.flags import Written


def push(
    model: Model,
    reducer: Annotated[str, flag("a folder made by train, a Hub id, or pretrained", "RUN")],
    to: Annotated[str | None, flag("target, user/repo or user/repo@branch", "USER/REPO"), Written()] = None,
    data: Annotated[
        Path | None,
        flag("labelled photos to measure on, for the model card", "DIR"),
    ] = None,
    reduction: MethodOptions = MethodOptions(),
    host: Annotated[HostFlags, GROUP] = HostFlags(),
    private: Annotated[bool, flag("make a new repository private")] = False,
    message: Annotated[str | None, flag("commit message", "TEXT"), Written()] = None,
    license: Annotated[str | None, flag("licence, such as apache-2.0 (the model's)", "ID"), Written()] = None,
    card_only: Annotated[bool, flag("only write the card into RUN")] = False,
    json: Json = False,
) -> int:
    """Upload a reduction and a model card to the Hugging Face Hub. Log in with `hf auth login` before.

    Method options given here are saved in the shared reduction.
    """
    from tntprune.analysis.accuracy_curve import measure_curve
    from tntprune.serialization.card import CARD, curve_table, curve_values, model_card
    from tntprune.serialization.hub import split
    from tntprune.serialization.share import history
    from tntprune.serialization.share import push as share
    from tntprune.system.storage import check_output, write

    if to is None and not card_only:
        raise UsageError("nowhere to push to: expected --to user/repo, or --card-only")
    if card_only and not Path(reducer).is_dir():
        raise UsageError(f"--card-only writes into RUN, and {reducer} is no folder here; expected one made by train")
    if to is not None:
        split(to)
    if card_only:
        check_output(Path(reducer) / CARD, [host.weights, data])
    loaded = host.load(model)
    before = copy.deepcopy(loaded) if data is not None else None  # where the model was trained too, it changes
    built = Reduction(reducer=reducer, options=reduction).apply(loaded)
    note, tuned = history(built, reducer)
    curve = None if data is None else measure_curve(built, data, base=before)
    told: dict[str, Any] = {"curve": curve_values(curve)}
    if card_only:
        path = Path(reducer) / CARD
        source = to or Path(reducer).resolve().name
        text = model_card(built, source, made_by=note, curve=curve, license=license, weights=tuned)
        write(path, text.encode())
        told, line = {"card": str(path), **told}, f"the card: {path}"
    else:
        assert to is not None  # asked for above
        address = share(built, to, run=reducer, curve=curve, private=private or None, message=message, license=license)
        told, line = {"repository": to, "commit": address, **told}, f"pushed: {address}"
    tell(json, told, line if curve is None else f"{curve_table(curve)}\n\n{line}")
    return 0
