"""The page: a template, filled in with tables, figures and facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from tntprune.paper import tables
from tntprune.paper.ablation import CAPTION
from tntprune.paper.compare import SURE, Measured, agreements, backbones_of
from tntprune.paper.cost import duration
from tntprune.paper.entries import Agenda
from tntprune.paper.facts import facts
from tntprune.paper.figures import map_caption, map_file, picture, pictures
from tntprune.paper.names import BACKBONES, METHODS
from tntprune.paper.settings import HOW
from tntprune.report.page import paragraphs
from tntprune.report.tables import Table, markdown

TITLE = "The paper, beside what its authors reported"
REGIMES = {"high": "high-token regime", "low": "low-token regime"}
TEMPLATE = "page.md"
NOTHING = "Not asked for."
DROPS = (
    "Drops are in points of top-1 below the unpruned model: ours below ours, the authors' below the one that they "
    "print, which is lower than what DeiT's own authors report. A negative difference means that we lost less than "
    'they did. "MACs, %" is the share of the unpruned model\'s multiply-accumulates, which the paper calls GFLOPs, '
    '"speed-up" the ratio of images/s. EViT and DynamicViT ran on plain DeiT in the paper, and their drops there are '
    "still taken from the distilled model's accuracy, the only one that is printed. A star behind a method marks what "
    "is odd about the paper's row."
)


@dataclass(frozen=True)
class About:
    """How the figures came about.

    Args:
        command: That made them.
        recipe: "published" or "short".
        trainings: Seconds of each, by name.
        results: Where the rows are.
    """

    command: str
    recipe: str
    trainings: dict[str, float]
    results: str = "results.jsonl"


def template() -> str:
    """The page that is filled in where no other one is given."""
    return files("tntprune.paper").joinpath(TEMPLATE).read_text(encoding="utf-8")


def text(plan: Agenda, measured: Sequence[Measured], about: About, given: str | None = None, folder: str = "") -> str:
    """The page in Markdown.

    Args:
        plan: What was asked for.
        measured: What was measured of it.
        about: How.
        given: A template with slots in braces, see `slots`; None is our own.
        folder: Before the names of pictures.
    """
    return (template() if given is None else given).format(**slots(plan, measured, about, folder))


def slots(plan: Agenda, measured: Sequence[Measured], about: About, folder: str = "") -> dict[str, Any]:
    """Everything that a template can ask for.

    Beside the parts of the page: `tau`, `same`, `unclear` and `clear` by "single deit_tiny_distilled high", and `top1`,
    `drop`, `their_drop`, `macs` and `speedup` by "single 0.5 TNT"; with several backbones each key begins with the
    backbone.
    """
    order = agreements(measured)
    return {
        "lead": lead(plan, measured),
        "unpruned": _markdown(tables.unpruned(measured)),
        "drops": DROPS,
        "main": _headed(main_tables(measured)),
        "figures": pictures(measured, folder),
        "rankings": _markdown(tables.rankings(order)),
        "reversals": _markdown(tables.reversals(order)),
        "orders": _markdown(tables.orders(order)),
        "ablation": _ablation(measured),
        "maps": "\n\n".join(picture(map_caption(one), folder + map_file(one)) for one in plan.maps) or NOTHING,
        "rows": _headed(row_tables(measured)),
        "notes": _notes(measured),
        "made": _made(measured, about),
        "images": f"{max((one.row.images for one in measured), default=0):,}",
        "settings": len({one.row.setting.key for one in measured}),
        "command": about.command,
        "time": duration(_seconds(measured, about)),
        "sure": SURE,
        **facts(measured),
    }


def lead(plan: Agenda, measured: Sequence[Measured]) -> str:
    """What was measured on what, in a few sentences."""
    rows = [one.row for one in measured]
    if not rows:
        return "Nothing was measured."
    images = max(row.images for row in rows)
    models = ", ".join(dict.fromkeys(one.entry.backbone for one in measured))
    told = f"{len({row.setting.key for row in rows})} settings of {models}, each on {images:,} photos."
    strangers = [one.entry.backbone for one in measured if one.entry.backbone not in BACKBONES]
    if strangers:
        told += (
            f" The paper has no {strangers[0]}: the whole plan is made for it, and each setting stands beside the "
            "paper's row of the nearest backbone, DeiT-T, or DeiT-S for what the paper did not run on DeiT-T; its "
            "ablation is of DeiT-B."
        )
    left = [f"{METHODS[method]} on {backbone}, because {reason}" for backbone, method, reason in plan.left_out]
    return told + (f" Left out: {'; '.join(left)}." if left else "")


def main_tables(measured: Sequence[Measured]) -> list[tuple[str, Table]]:
    """The tables of the paper's main part."""
    found = []
    for backbone in backbones_of(measured):
        if (single := tables.main_single(measured, backbone)) is not None:
            found.append((f"{backbone}, one location: drops in points", single))
        rows = [one for one in measured if one.entry.backbone == backbone and one.entry.table == "multi"]
        ends = {regime: [one for one in rows if one.entry.row["regime"] == regime] for regime in REGIMES}
        for regime, own in ends.items():
            if own:
                rank = (min if regime == "high" else max)(one.entry.rank for one in own)
                heading = f"{backbone}, several locations, {REGIMES[regime]}"
                found.append((heading, tables.side_by_side(one for one in own if one.entry.rank == rank)))
    return found


def row_tables(measured: Sequence[Measured]) -> list[tuple[str, Table]]:
    """The tables of the paper's appendix."""
    found = []
    for backbone in backbones_of(measured):
        for scheme, words in tables.SCHEMES.items():
            for regime, own in REGIMES.items():
                rows = [
                    one
                    for one in measured
                    if (one.entry.backbone, one.entry.table, one.entry.row["regime"]) == (backbone, scheme, regime)
                ]
                if rows:
                    found.append((f"{backbone}, {words}, {own}", tables.side_by_side(rows)))
    return found


def ablations(measured: Sequence[Measured]) -> list[tuple[str, Table]]:
    """The ablation table, by backbone and scheme."""
    found = []
    for backbone in backbones_of(measured):
        for scheme, words in tables.SCHEMES.items():
            rows = [
                one
                for one in measured
                if (one.entry.backbone, one.entry.table, one.entry.scheme) == (backbone, "ablation", scheme)
            ]
            if rows:
                found.append((f"{backbone}, {words}", tables.side_by_side(rows)))
    return found


def sections(plan: Agenda, measured: Sequence[Measured]) -> list[tuple[str, str]]:
    """For the HTML report: headings and what is below them."""
    order = agreements(measured)
    found = []
    main = main_tables(measured)
    for heading, group in (("Beside the paper", main), ("Ablation", ablations(measured))):
        if group:
            start = paragraphs([DROPS if group is main else CAPTION])
            found.append((heading, start + "".join(f"<h3>{name}</h3>\n{table.html()}" for name, table in group)))
    if order:
        opposite = tables.reversals(order)
        pairs = f"<p>Pairs in opposite orders for sure:{'' if opposite.rows else ' None.'}</p>"
        pairs += opposite.html() if opposite.rows else ""
        found.append(("The order of methods, ours and the paper's", tables.rankings(order).html() + pairs))
    return found


def _ablation(measured: Sequence[Measured]) -> str:
    found = ablations(measured)
    if not found:
        return NOTHING
    return f"{CAPTION}\n\n{_headed(found)}"


def _headed(found: Sequence[tuple[str, Table]]) -> str:
    return "\n\n".join(f"### {heading}\n\n{_markdown(table)}" for heading, table in found) or NOTHING


def _markdown(table: Table) -> str:
    return markdown(table).rstrip() if table.rows else "None."


def _notes(measured: Sequence[Measured]) -> str:
    lines = []
    for one in measured:
        authors = one.entry.authors
        told = [authors.not_met if authors else "", one.entry.note]
        if authors is not None and any(told):
            lines.append(f"* {authors.source}: {'; '.join(filter(None, told))}.")
    how = [f"* {METHODS[method]}: {words}" for method, words in HOW.items() if words]
    heading = "How the authors ran each method, as far as their GFLOPs show it:"
    return "\n".join([*dict.fromkeys(lines), "", heading, "", *how])


def _made(measured: Sequence[Measured], about: About) -> str:
    time = duration(_seconds(measured, about))
    lines = [f"    {about.command}", "", f"{time} of training and measuring; rows are in `{about.results}`."]
    if about.trainings:
        spent = "; ".join(f"{name} {seconds:.0f} s" for name, seconds in about.trainings.items())
        lines.append(f"Trainings, {about.recipe} recipe: {spent}.")
    if about.recipe == "short":
        lines.append(
            "The short recipe was chosen on a split of the training photos; DynamicViT is trained without its loss on "
            "tokens there, which made it worse. The papers train for 30 to 40 epochs of ImageNet."
        )
    for name in ("hardware", "versions", "date"):
        told = dict.fromkeys(str(one.row.about.get(name, "not recorded")) for one in measured)
        if told:
            lines.append(f"{name.capitalize()}: {'; '.join(told)}.")
    timed = dict.fromkeys(one.row.timed_on for one in measured if one.row.timed_on)
    if timed:
        lines.append(f"Speed was measured on {'; '.join(map(str, timed))}.")
    busy = [one.row.busy for one in measured if one.row.busy is not None]
    if busy:
        lines.append(f"While speed was measured, other programs used at most {max(busy):.1f} processors.")
    return "\n".join(lines)


def _seconds(measured: Sequence[Measured], about: About) -> float:
    """Of training and measuring, over all the times that the command was run."""
    rows = {one.row.setting.key: one.row.about for one in measured}.values()
    spent = sum(float(row.get("seconds", 0)) + float(row.get("speed", {}).get("seconds", 0)) for row in rows)
    return spent + sum(about.trainings.values())
