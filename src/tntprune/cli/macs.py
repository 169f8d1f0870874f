"""`tntprune macs`."""

from __future__ import annotations

import warnings

from tntprune.cli.console import tell
from tntprune.cli.options import MethodOptions
from tntprune.cli.shared_flags import ImgSize, Json, MethodName, Model, Reducer, Then


def macs(
    model: Model,
    method: MethodName = None,
    reducer: Reducer = None,
    reduction: MethodOptions = MethodOptions(),
    then: Then = (),
    img_size: ImgSize = None,
    json: Json = False,
) -> int:
    """Multiply-accumulates of a model, block by block, in closed form. Runs nothing, and needs no weights."""
    from dataclasses import asdict

    from tntprune.analysis.macs import macs as count
    from tntprune.backbones.models import shape_of
    from tntprune.cli.options import apply, configs_from
    from tntprune.reduce import reduce_

    built = shape_of(model, img_size)
    if reducer is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nothing can be put into a model without weights
            apply(built, method, reducer, reduction, then)
    elif configs := configs_from(method, reduction, then):
        reduce_(built, *configs)
    found = count(built)
    tell(json, asdict(found), str(found))
    return 0
