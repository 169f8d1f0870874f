"""`tntprune search`."""

from __future__ import annotations

import copy
import json as json_format
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tntprune.bench import DType
from tntprune.cli.console import tell
from tntprune.cli.flags import GROUP, HostFlags, Json, Model, Reducer, Seed, Workers, flag
from tntprune.errors import UsageError
from tntprune.system.flags import MANY, MAX_BATCH, Whole, Within, Written

if TYPE_CHECKING:
    from torch import nn

    from tntprune.methods import Config


def search(
    model: Model,
    data: Annotated[str, flag("photos, in class folders to measure top-1; or hfds/NAME, torch/NAME", "DIR")],
    out: Annotated[Path, flag("plan to write, with a picture beside it", "JSON"), Written()],
    macs: Annotated[
        float | None,
        flag("budget: MACs per image (0.8e9), or share of the unpruned model's (0.6)"),
        Within(0, 1e18, above=True),
    ] = None,
    latency: Annotated[str | None, flag("budget: time per batch on this machine (12ms)", "TIME")] = None,
    speedup: Annotated[
        float | None, flag("budget: times as fast as unpruned on this machine"), Within(1, 1e6, above=True)
    ] = None,
    drop: Annotated[
        float | None,
        flag(
            "budget: points of top-1 that may be lost (without labels: of agreement); can be combined with one of the "
            "other budgets"
        ),
        Within(0, 100, above=True, below=True),
    ] = None,
    reduction: Annotated[Reducer, GROUP] = Reducer(),
    photos: Annotated[int, flag("number of photos: half to search on, half held out"), Whole(8, MANY)] = 512,
    minutes: Annotated[
        float,
        flag("time limit, includes training and measuring; these are never cut short"),
        Within(0, 1e6, above=True),
    ] = 10.0,
    moves: Annotated[int, flag("number of small changes of the best schedule to try"), Whole(0, 1_000_000)] = 60,
    curve: Annotated[
        Path | None, flag("file with measured times per number of tokens; reused if it exists", "FILE"), Written()
    ] = None,
    batch_size: Annotated[int, flag("images at a time, for --latency and --speedup"), Whole(1, MAX_BATCH)] = 1,
    dtype: Annotated[DType, flag("precision, for --latency and --speedup")] = "fp32",
    host: Annotated[HostFlags, GROUP] = HostFlags(),
    workers: Workers = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Find at which blocks to remove tokens, and how many, so that the model loses least within a budget.

    Writes a plan, to be used as --reducer. --at limits the blocks. Simple schedules are always measured too. A model
    without classes is judged by the cosine similarity of its embeddings. Without --reducer, a method that has to be
    trained is trained first; tnt is then trained with --inside True --metric mean, unless one of them is given.
    """
    import torch

    from tntprune.report.plot_style import blank
    from tntprune.report.search_plot import draw_front
    from tntprune.search.budget import budget
    from tntprune.search.claim import claimed
    from tntprune.search.find_plan import find_plan
    from tntprune.serialization.plan import is_plan, write_plan
    from tntprune.system.storage import check_output

    wanted = budget(macs, latency, speedup, drop)
    if not is_plan(out):
        raise UsageError(f"--out {out}: expected a file that ends in .json")
    if curve is not None and not wanted.timed:
        raise UsageError("--curve is of time; expected it with --latency or --speedup")
    about: dict[str, Any] = {
        "command": "search", "model": model, "weights": host.weights and str(host.weights.resolve()),
        "data": data, "reducer": reduction.reducer, **wanted.to_dict(), "photos": photos, "minutes": minutes,
        "moves": moves, "seed": seed,
    }  # fmt: skip
    if wanted.timed:
        about |= {"batch_size": batch_size, "dtype": dtype}
    picture = out.with_suffix(".png")
    for file in (out, picture):
        check_output(file)
    if curve is not None:
        check_output(curve, [out, picture])
    blank(1, 1)  # what is not installed is told now, and not in ten minutes
    with ExitStack() as claims:
        claims.enter_context(claimed(out))
        for file in (out, picture):
            if file.exists():
                raise UsageError(f"--out {out}: {file} exists already; expected a new name")
        if curve is not None and not curve.exists():
            claims.enter_context(claimed(curve))
        torch.manual_seed(seed)
        loaded, config, base, tuned = _opened(model, host, reduction)
        known = _known(curve, loaded, config, batch_size, dtype)
        found = find_plan(
            loaded, data, method=config, macs=macs, latency=latency, speedup=speedup, drop=drop,
            blocks=reduction.given.get("at"), photos=photos, minutes=minutes, moves=moves, seed=seed, workers=workers,
            curve=known, batch_size=batch_size, dtype=dtype, last_block=reduction.last_block,
            base=base, weights=tuned, made_by=json_format.dumps(about),
        )  # fmt: skip
        write_plan(out, found.plan)  # first: whatever fails behind it, the plan is there
        if curve is not None and known is None and found.curve is not None:
            found.curve.save(curve)
        draw_front(picture, found, model)
    told = {"plan": str(out), "picture": str(picture), "model": model, **found.to_dict()}
    tell(json, told, f"{found}\n{_next(model, host, out, picture)}")
    return 0


def _opened(
    model: str, host: HostFlags, flags: Reducer
) -> tuple[nn.Module, Config | None, nn.Module | None, Path | None]:
    """Load the model, with its reducer if there is one.

    Returns:
        The model; the method, where it is not that of the reducer; the unpruned model and the file of the model's own
        weights, where it was trained together with its reducer.
    """
    from tntprune.serialization.checkpoint import load_, read

    loaded = host.load(model)
    if flags.reducer is None:
        return loaded, _method(flags), None, None
    options = {name: value for name, value in flags.given.items() if name != "at"}
    found = read(flags.reducer, loaded)
    saved, tuned = found.config, found.weights
    if flags.method not in (None, saved.method):
        raise UsageError(f"--method {flags.method}, but {flags.reducer} holds {saved.method}; expected that, or none")
    _check_free(saved, options)
    base = copy.deepcopy(loaded) if tuned is not None else None
    return load_(loaded, flags.reducer, **options), None, base, tuned


def _next(model: str, host: HostFlags, out: Path, picture: Path) -> str:
    """Say where the plan is, and what to type next."""
    words = ["tntprune", "eval", model]
    words += [] if host.weights is None else ["--weights", str(host.weights)]
    words += [] if host.img_size is None else ["--img-size", *map(str, host.img_size)]
    command = shlex.join([*words, "--data", "OTHER_PHOTOS", "--reducer", str(out)])
    where = f"The plan is in {out}, a picture in {picture}."
    return f"{where} Next, evaluate it on photos that were not used here:\n  {command}"


def _method(flags: Reducer) -> Config:
    """Return the method that is searched for."""
    from tntprune.methods import TNT

    config = flags.config("tnt", without=("at",))
    if isinstance(config, TNT) and config.merges and not {"inside", "metric"} & set(flags.given):
        config = config.changed(inside=True, metric="mean")  # what a schedule over the whole model is best with
    _check_free(config, flags.given)
    return config


def _check_free(config: Config, options: dict[str, Any]) -> None:
    """Refuse options that are what is searched for."""
    drops = options.get("similar_how", getattr(config, "similar_how", None)) == "drop"  # then their number is, too
    for name in (*config.rivals, "tokens", "keep", *["similar"] * drops):
        if options.get(name) is not None:
            raise UsageError(f"--{name}: is what the search chooses; expected it to be left out")


def _known(path: Path | None, model: nn.Module, config: Config | None, batch_size: int, dtype: str) -> Any:
    """Read the curve of time against tokens that was measured before, if it is there."""
    from tntprune.backbones.attach import base_of, reduction_of
    from tntprune.search.latency import LatencyCurve

    if path is None or not path.exists():
        return None
    known = LatencyCurve.load(path)
    method = config if config is not None else reduction_of(model).config
    known.check(base_of(model), method, batch_size=batch_size, dtype=dtype)
    return known
