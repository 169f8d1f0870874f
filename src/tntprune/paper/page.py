"""The page: a template, filled in with tables, figures and facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from tntprune.paper import figures, tables
from tntprune.paper.compare import SURE, Measured, agreements, backbones_of, of_table, total
from tntprune.paper.dry_run import duration
from tntprune.paper.entries import BACKBONES, METHODS, PaperPlan
from tntprune.paper.settings import HOW
from tntprune.report.groups import SCHEMES
from tntprune.report.page import Table, part

TITLE = "The paper, beside what its authors reported"
REGIMES = {"high": "high-token regime", "low": "low-token regime"}
TEMPLATES = Environment(  # of Markdown, in which nothing is escaped
    loader=FunctionLoader(lambda name: (files("tntprune.paper") / "templates" / name).read_text(encoding="utf-8")),
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
NOTHING = "Not asked for."
CAPTION = "The paper's caption says DeiT-S-Distil.; the figures are those of DeiT-B-Distil."  # of the ablation table
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
    """How the figures came about: the command, the recipe, seconds of each training, and where the rows are."""

    command: str
    recipe: str
    trainings: dict[str, float]
    results: str = "results.jsonl"


def text(
    plan: PaperPlan, measured: Sequence[Measured], about: About, given: str | None = None, folder: str = ""
) -> str:
    """Return the page in Markdown.

    Args:
        plan: What was asked for.
        measured: What was measured of it.
        about: How.
        given: A Jinja template that names `slots`; None is our own.
        folder: Before the names of pictures.
    """
    template = TEMPLATES.get_template("page.md") if given is None else TEMPLATES.from_string(given)
    return template.render(slots(plan, measured, about, folder))


def slots(plan: PaperPlan, measured: Sequence[Measured], about: About, folder: str = "") -> dict[str, Any]:
    """Return everything that a template can ask for.

    Beside the parts of the page: `tau`, `same`, `unclear` and `clear` by "single deit_tiny_distilled high", and `top1`,
    `drop`, `their_drop`, `macs` and `speedup` by "single 0.5 TNT"; with several backbones each key begins with the
    backbone.
    """
    order = agreements(measured)
    rows = {one.row.setting.key: one.row for one in measured}.values()
    seconds = sum(about.trainings.values())  # of training and measuring, over all the times that the command was run
    for row in rows:
        seconds += float(row.about.get("seconds", 0)) + float(row.about.get("speed", {}).get("seconds", 0))
    facts = {
        name: list(dict.fromkeys(str(row.about.get(name, "not recorded")) for row in rows))
        for name in ("hardware", "versions", "date")
    }
    timed = list(dict.fromkeys(row.timed_on for row in rows if row.timed_on))
    busy = [row.busy for row in rows if row.busy is not None]
    odd = {
        (one.entry.authors.source, "; ".join(filter(None, [one.entry.authors.not_met, one.entry.note]))): None
        for one in measured
        if one.entry.authors and (one.entry.authors.not_met or one.entry.note)
    }
    how = [(METHODS[method], words) for method, words in HOW.items() if words]
    plots = [(f"{caption}.", folder + name) for name, caption in figures.described(measured)]
    ablated = ablations(measured)
    return {
        "lead": lead(plan, measured),
        "unpruned": _markdown(tables.unpruned(measured)),
        "drops": DROPS,
        "main": _part("headed", main_tables(measured)),
        "figures": _part("pictures", plots),
        "rankings": _markdown(tables.rankings(order)),
        "reversals": _markdown(tables.reversals(order)),
        "orders": _markdown(tables.orders(order)),
        "ablation": f"{CAPTION}\n\n{_part('headed', ablated)}" if ablated else NOTHING,
        "maps": _part("pictures", [(one.caption, folder + one.file) for one in plan.maps]) or NOTHING,
        "rows": _part("headed", row_tables(measured)),
        "notes": _part("notes", odd, how),
        "made": _part("made", about, duration(seconds), facts, timed, busy),
        "images": f"{max((row.images for row in rows), default=0):,}",
        "settings": len(rows),
        "command": about.command,
        "time": duration(seconds),
        "sure": SURE,
        **_facts(measured),
    }


def _part(name: str, *given: Any) -> str:
    filled: str = getattr(TEMPLATES.get_template("parts.md").module, name)(*given)
    return filled.strip("\n")


def _markdown(table: Table) -> str:
    return table.markdown().rstrip() if table.rows else "None."


def _facts(measured: Sequence[Measured]) -> dict[str, dict[str, str]]:
    """Return the figures that a text can ask for by name, so that none has to be typed."""
    several = len(backbones_of(measured)) > 1
    names = ("tau", "same", "unclear", "clear", "top1", "drop", "their_drop", "macs", "speedup")
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    groups: dict[str, list[Any]] = {}
    for one in agreements(measured):
        key = f"{f'{one.backbone} ' if several else ''}{one.scheme} {one.against}"
        for name in (key, f"{key} {one.regime}"):
            groups.setdefault(name, []).append(one)
    for key, own in groups.items():
        t = total(own)
        for name, value in (("tau", f"{t.tau:.2f}"), ("same", t.same), ("unclear", t.unclear), ("clear", t.clear)):
            found[name][key] = str(value)
    for setting in measured:
        entry = setting.entry
        key = " ".join(filter(None, [entry.backbone if several else "", entry.scheme, entry.parameter, entry.name]))
        found["top1"][key] = f"{setting.row.top1:.1f}"
        found["drop"][key] = f"{setting.drop:.1f}"
        found["macs"][key] = f"{100 * setting.share:.0f}"
        found["their_drop"][key] = "" if setting.their_drop is None else f"{setting.their_drop:.1f}"
        found["speedup"][key] = "" if setting.row.speedup is None else f"{setting.row.speedup:.2f}"
    return found


def lead(plan: PaperPlan, measured: Sequence[Measured]) -> str:
    """Say what was measured on what, in a few sentences."""
    rows = [one.row for one in measured]
    if not rows:
        return "Nothing was measured."
    images = max(row.images for row in rows)
    models = backbones_of(measured)
    told = f"{len({row.setting.key for row in rows})} settings of {', '.join(models)}, each on {images:,} photos."
    if strangers := [model for model in models if model not in BACKBONES]:
        told += (
            f" The paper has no {strangers[0]}: the whole plan is made for it, and each setting stands beside the "
            "paper's row of the nearest backbone, DeiT-T, or DeiT-S for what the paper did not run on DeiT-T; its "
            "ablation is of DeiT-B."
        )
    left = [f"{METHODS[method]} on {backbone}, because {reason}" for backbone, method, reason in plan.left_out]
    return told + (f" Left out: {'; '.join(left)}." if left else "")


def main_tables(measured: Sequence[Measured]) -> list[tuple[str, Table]]:
    """Return the tables of the paper's main part."""
    found = []
    for backbone in backbones_of(measured):
        if (single := tables.main_single(measured, backbone)) is not None:
            found.append((f"{backbone}, one location: drops in points", single))
        for regime, words in REGIMES.items():
            if own := [one for one in of_table(measured, backbone, "multi") if one.entry.row["regime"] == regime]:
                rank = (min if regime == "high" else max)(one.entry.rank for one in own)
                table = tables.side_by_side(one for one in own if one.entry.rank == rank)
                found.append((f"{backbone}, several locations, {words}", table))
    return found


def row_tables(measured: Sequence[Measured]) -> list[tuple[str, Table]]:
    """Return the tables of the paper's appendix."""
    return [
        (f"{backbone}, {words}, {own}", tables.side_by_side(rows))
        for backbone in backbones_of(measured)
        for scheme, words in SCHEMES.items()
        for regime, own in REGIMES.items()
        if (rows := [one for one in of_table(measured, backbone, scheme) if one.entry.row["regime"] == regime])
    ]


def ablations(measured: Sequence[Measured]) -> list[tuple[str, Table]]:
    """Return the ablation table, by backbone and scheme."""
    return [
        (f"{backbone}, {words}", tables.side_by_side(rows))
        for backbone in backbones_of(measured)
        for scheme, words in SCHEMES.items()
        if (rows := [one for one in of_table(measured, backbone, "ablation") if one.entry.scheme == scheme])
    ]


def sections(measured: Sequence[Measured]) -> list[tuple[str, str]]:
    """Return headings for the HTML report and what is below them."""
    found: list[tuple[str, str]] = []
    for heading, words, group in (
        ("Beside the paper", DROPS, main_tables(measured)), ("Ablation", CAPTION, ablations(measured))
    ):  # fmt: skip
        if group:
            found.append((heading, part("tables", words, [(name, "", table) for name, table in group])))
    if order := agreements(measured):
        opposite = tables.reversals(order)
        pairs = Markup("<p>Pairs in opposite orders for sure:{}</p>").format("" if opposite.rows else " None.")
        told = tables.rankings(order).html() + pairs + (opposite.html() if opposite.rows else "")
        found.append(("The order of methods, ours and the paper's", told))
    return found
