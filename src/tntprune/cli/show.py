"""`tntprune show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from tntprune.cli.console import tell
from tntprune.cli.flags import GROUP, HostFlags, Json, Model, Reduction, Seed, flag
from tntprune.errors import UsageError, UserError
from tntprune.system.flags import Written


def show(
    model: Model,
    photos: Annotated[tyro.conf.Positional[tuple[Path, ...]], flag("photos, one row each", "PHOTO...")],
    out: Annotated[Path, flag("the picture to write", "PNG"), Written()],
    reduction: Annotated[Reduction, GROUP] = Reduction(),
    host: Annotated[HostFlags, GROUP] = HostFlags(),
    each: Annotated[bool, flag("remove tokens at one location at a time, as in the paper's figures")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Draw each photo after each block that removes tokens: kept tokens are clear, dropped ones are striped.

    Tokens that were merged into another one have faint stripes. Extra tokens of evit and evovit stand for many patches
    and are not drawn. Photos are cropped as the model sees them, and turned upright by EXIF.
    """
    import torch

    from tntprune.backbones.attach import is_reduced
    from tntprune.report.draw import photo_maps, row_titles, sheet, write_picture
    from tntprune.serialization.checkpoint import files_of
    from tntprune.system.storage import check_output

    torch.manual_seed(seed)
    if out.suffix and out.suffix.lower() != ".png":
        raise UsageError(f"--out {out}: expected a file that ends in .png")
    if not photos:
        raise UsageError("no photo given; expected one or more")
    if reduction.reducer is None and reduction.method is None:
        raise UsageError("nothing to show: expected --reducer RUN, or --method random")
    check_output(out, [*photos, host.weights, *files_of(reduction.reducer)])
    built = reduction.apply(host.load(model))
    if not is_reduced(built):
        raise UserError(f"{model} is not reduced")
    maps = photo_maps(built, photos, each)
    write_picture(out, sheet(maps, row_titles(photos)))
    told = {"picture": str(out), "photos": len(photos), "columns": list(maps[0])}
    tell(json, told, f"{len(photos)} {'photo' if len(photos) == 1 else 'photos'}: {out}")
    return 0
