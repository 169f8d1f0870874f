"""The ablation table: TNT without removing similar tokens, and with other ways of doing it."""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Any

from tntprune.methods import TNT
from tntprune.paper.authors import Authors, authors_of
from tntprune.paper.entries import COLUMNS, Entry
from tntprune.paper.names import METHODS
from tntprune.paper.settings import MODELS, MULTI, published

CAPTION = "The paper's caption says DeiT-S-Distil.; the figures are those of DeiT-B-Distil."
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("without the similarity step", {"similar": 0}),
    "sequential": ("sequential partition", {"partition": "sequential"}),
    "merge": ("merging", {"similar_how": "merge"}),
    "random": ("random partition", {}),
}
SCHEMES = {
    "single": TNT(at=3, keep=0.6, similar=25, recipe="paper"),
    "multi": TNT(at=MULTI, keep=0.9, similar=40, recipe="paper"),
}


def ablation(backbone: str, stands_in: bool = False) -> tuple[Entry, ...]:
    """The rows of the table, as they are printed; nothing for a backbone that it is not of.

    Args:
        backbone: What is run.
        stands_in: It takes the place of the table's own.
    """
    text = files("tntprune.paper").joinpath("ablation.csv").read_text(encoding="utf-8")
    found = []
    for line in csv.DictReader(text.splitlines()):
        if not stands_in and MODELS[line["backbone"]] != backbone:
            continue
        words, changes = VARIANTS[line["variant"]]
        config = SCHEMES[line["scheme"]].changed(**changes)
        amount = {"keep": "0.6"} if line["scheme"] == "single" else {"rates": "0.9 0.9 0.9"}
        row = {**dict.fromkeys(COLUMNS, ""), "backbone": backbone if stands_in else line["backbone"],
               "scheme": line["scheme"], "method": "tnt", **amount}  # fmt: skip
        name = f"{METHODS['tnt']}, {words}"
        rank = 3 if line["scheme"] == "single" else 2
        found.append(
            Entry("ablation", backbone, backbone, name, row, config, rank, _authors(line), not stands_in, line["note"])
        )
    return tuple(found)


def _authors(line: dict[str, str]) -> Authors | None:
    if not line["top1"]:
        return None
    base = next(one for one in published() if one.row["method"] == "none" and one.row["backbone"] == line["backbone"])
    printed = authors_of(base)
    source = f"{line['backbone']} {line['scheme']} ablation {line['variant']}"
    speed = int(line["images_per_s"])
    return Authors(
        source, line["backbone"], float(line["top1"]), float(line["gflops"]), speed, printed.base,
        line["note"], line["not_met"],
    )  # fmt: skip
