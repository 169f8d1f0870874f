"""`tntprune search`."""

from __future__ import annotations

import copy
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tntprune.bench.names import DType
from tntprune.console import (
    MAX_BATCH,
    Device,
    ImgSize,
    Json,
    MethodName,
    Model,
    Reducer,
    Seed,
    Weights,
    Workers,
    load,
    tell,
)
from tntprune.errors import UsageError
from tntprune.flags import MANY, Within, Written
from tntprune.options import MethodOptions, config_from, given

if TYPE_CHECKING:
    from torch import nn

    from tntprune.config import Config


def search(
    model: Model,
    data: Annotated[
        str,
        tyro.conf.arg(
            metavar="DIR", help="calibration photos, in class folders if top-1 is to be told; or hfds/NAME, torch/NAME"
        ),
    ],
    out: Annotated[
        Path, tyro.conf.arg(metavar="JSON", help="the plan to write; its front is drawn beside it"), Written()
    ],
    macs: Annotated[
        float | None,
        tyro.conf.arg(metavar="FLOAT", help="budget: of one image, 0.8e9; or a share, 0.6", help_behavior_hint=""),
        Within(0, 1e18, above=True),
    ] = None,
    latency: Annotated[
        str | None,
        tyro.conf.arg(metavar="TIME", help="budget: of a batch on this machine, 12ms", help_behavior_hint=""),
    ] = None,
    speedup: Annotated[
        float | None,
        tyro.conf.arg(metavar="FLOAT", help="budget: times as fast as unpruned on this machine", help_behavior_hint=""),
        Within(1, 1e6, above=True),
    ] = None,
    drop: Annotated[
        float | None,
        tyro.conf.arg(
            metavar="FLOAT",
            help="budget: points of top-1 that may be lost (of agreement, without labels)",
            help_behavior_hint="",
        ),
        Within(0, 100, above=True, below=True),
    ] = None,
    method: MethodName = None,
    reducer: Reducer = None,
    reduction: MethodOptions = MethodOptions(),
    photos: Annotated[
        int,
        tyro.conf.arg(metavar="INT", help="to look at: half to search on, half to verify on"),
        Within(8, MANY),
    ] = 512,
    minutes: Annotated[
        float,
        tyro.conf.arg(metavar="FLOAT", help="when to end; training counts, and is not cut short"),
        Within(0, 1e6, above=True),
    ] = 10.0,
    moves: Annotated[
        int, tyro.conf.arg(metavar="INT", help="small changes that are tried at the end"), Within(0, 1_000_000)
    ] = 60,
    curve: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FILE",
            help="of time against tokens: read if it is there, else measured and written",
            help_behavior_hint="",
        ),
        Written(),
    ] = None,
    batch_size: Annotated[
        int, tyro.conf.arg(metavar="INT", help="images at a time, for budgets of time"), Within(1, MAX_BATCH)
    ] = 1,
    dtype: Annotated[DType, tyro.conf.arg(help="of weights and images, for budgets of time")] = "fp32",
    weights: Weights = None,
    img_size: ImgSize = None,
    device: Device = "cpu",
    workers: Workers = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Find where tokens go and how many stay, so that the model keeps the most within a budget.

    Writes a plan, which --reducer takes wherever it takes a trained run. --at says where tokens may go (everywhere).
    A method that has to be trained is trained first if there is no --reducer; tnt then acts inside blocks, and compares
    keys, unless --inside or --metric says otherwise.
    """
    import torch

    from tntprune.canvas import blank
    from tntprune.checkpoint import load_, read, weights_of
    from tntprune.plan import is_plan, write_plan
    from tntprune.search.budget import budget
    from tntprune.search.picture import draw_front
    from tntprune.search.run import search as run
    from tntprune.storage import check_output, make_folder

    wanted = budget(macs, latency, speedup, drop)
    if not is_plan(out):
        raise UsageError(f"--out {out}: expected a file that ends in .json")
    if out.exists():
        raise UsageError(f"--out {out}: exists already; expected a new name, as a plan takes minutes to find")
    picture = out.with_suffix(".png")
    if picture.exists():
        raise UsageError(f"--out {out}: its picture {picture} exists already; expected a new name")
    for file in (out, picture, *([] if curve is None else [curve])):
        check_output(file)
    if curve is not None and not wanted.timed:
        raise UsageError("--curve is of time; expected it with --latency or --speedup")
    torch.manual_seed(seed)
    loaded = load(model, weights, device, img_size)
    config, blocks, base, tuned = _method(method, reduction, reducer is None), None, None, None
    options = {name: value for name, value in given(reduction).items() if name != "at"}
    blocks = given(reduction).get("at")
    if reducer is not None:
        saved, _, path = read(reducer, loaded)
        if method not in (None, saved.method):
            raise UsageError(f"--method {method}, but {reducer} holds {saved.method}; expected that, or none")
        _check_free(saved, options)
        tuned = weights_of(path)
        base = copy.deepcopy(loaded) if tuned is not None else None
        load_(loaded, reducer, **options)
    blank(1, 1)  # what is not installed is told now, and not in ten minutes
    for file in (out, *([] if curve is None else [curve])):
        make_folder(file.parent)
    about: dict[str, Any] = {
        "command": "search", "model": model, "weights": weights and str(weights.resolve()), "data": data,
        "reducer": reducer, **wanted.to_dict(), "photos": photos, "minutes": minutes, "moves": moves, "seed": seed,
    }  # fmt: skip
    if wanted.timed:
        about |= {"batch_size": batch_size, "dtype": dtype}
    known = _known(curve, loaded, config, batch_size, dtype)
    found = run(
        loaded, data, method=config, macs=macs, latency=latency, speedup=speedup, drop=drop, blocks=blocks,
        photos=photos, minutes=minutes, moves=moves, seed=seed, workers=workers, curve=known, batch_size=batch_size,
        dtype=dtype, base=base, weights=tuned, made_by=json_format.dumps(about),
    )  # fmt: skip
    write_plan(out, found.plan)  # first: whatever fails behind it, the plan is there
    if curve is not None and known is None and found.curve is not None:
        found.curve.save(curve)
    draw_front(picture, found, model)
    told = {"plan": str(out), "picture": str(picture), "model": model, **found.to_dict()}
    tell(json, told, f"{found}\n\nthe plan: {out}, its front: {picture}")
    return 0


def _method(name: str | None, flags: MethodOptions, alone: bool) -> Config | None:
    """The method that is searched for, where it is not a saved one."""
    from tntprune.config import TNT

    if not alone:
        return None
    if name is None:
        name = "tnt"
    chosen = {key: value for key, value in vars(flags).items() if key != "at"}
    config = config_from(name, type(flags)(**chosen))
    if isinstance(config, TNT) and config.merges and not {"inside", "metric"} & set(given(flags)):
        config = config.changed(inside=True, metric="mean")  # what a schedule over the whole model is best with
    _check_free(config, given(flags))
    return config


def _check_free(config: Config, options: dict[str, Any]) -> None:
    """Refuse options that are what is searched for."""
    drops = options.get("similar_how", getattr(config, "similar_how", None)) == "drop"  # then their number is, too
    for name in (*config.rivals, "tokens", "keep", *["similar"] * drops):
        if options.get(name) is not None:
            raise UsageError(f"--{name}: is what the search chooses; expected it to be left out")


def _known(path: Path | None, model: nn.Module, config: Config | None, batch_size: int, dtype: str) -> Any:
    """The curve of time against tokens that was measured before, if it is there."""
    from tntprune.reduce import base_of, reduction_of
    from tntprune.search.latency import LatencyCurve

    if path is None or not path.exists():
        return None
    known = LatencyCurve.load(path)
    method = config if config is not None else reduction_of(model).config
    known.check(base_of(model), method, batch_size=batch_size, dtype=dtype)
    return known
