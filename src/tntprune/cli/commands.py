"""The commands by name, in the order in which the help lists them."""

from __future__ import annotations

from collections.abc import Callable

from tntprune.cli.app import app
from tntprune.cli.bench import bench
from tntprune.cli.counting import info, macs
from tntprune.cli.demo import demo
from tntprune.cli.embed import embed
from tntprune.cli.evaluate import evaluate
from tntprune.cli.export import export
from tntprune.cli.paper import paper
from tntprune.cli.push import push
from tntprune.cli.report import report
from tntprune.cli.search import search
from tntprune.cli.show import show
from tntprune.cli.sweep import sweep
from tntprune.cli.train import pretrain, train

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo, "info": info, "macs": macs, "pretrain": pretrain, "train": train, "eval": evaluate, "embed": embed,
    "sweep": sweep, "search": search, "show": show, "bench": bench, "paper": paper, "report": report, "export": export,
    "push": push, "app": app,
}  # fmt: skip
