"""`tntprune demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tntprune.cli.console import tell
from tntprune.cli.flags import Json, Seed, flag
from tntprune.system.flags import Written


def demo(
    out: Annotated[Path, flag("folder for report.html", "DIR"), Written()] = Path("demo"),
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Train, prune and measure a small ViT on data that is made here, and write a report. Downloads nothing."""
    from dataclasses import asdict

    from tntprune.demo.demo import demo as run

    found = run(out, seed)
    tell(json, {**asdict(found), "report": str(found.report)}, f"{found}\n\nThe report is {found.report}")
    return 0
