"""The commands by name, in the order in which the help lists them."""

from __future__ import annotations

from collections.abc import Callable

from tntprune.cli import (
    bench,
    demo,
    evaluate,
    export,
    info,
    macs,
    paper,
    pretrain,
    push,
    report,
    search,
    show,
    sweep,
    train,
)

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo.demo,
    "info": info.info,
    "macs": macs.macs,
    "pretrain": pretrain.pretrain,
    "train": train.train,
    "eval": evaluate.evaluate,
    "sweep": sweep.sweep,
    "search": search.search,
    "show": show.show,
    "bench": bench.bench,
    "paper": paper.paper,
    "report": report.report,
    "export": export.export,
    "push": push.push,
}
