"""The measured parts of docs/results/tnt.md, from the figures that benchmarks/method.py has kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from method_plans import SINGLE, efforts, variants
from stamps import written
from tntprune.system.storage import make_folder, write
from tntprune.training.config import Training

Figures = dict[str, dict[str, Any]]
BUDGETS = ("0.924", "0.731", "0.622", "0.510")
NOTHING = "Not measured yet."
GOALS = {"0.5": (80.0, 81.2), "0.35": (75.5, 79.0), "0.25": (70.0, 76.0)}
FLOORS = {"0.924": (0.0, 82.4), "0.731": (0.0, 81.9), "0.622": (0.0, 81.2), "0.510": (5.0, 78.5)}  # above ToMe


def load(folder: Path, kept: Path) -> Figures:
    """Return every figure by its name: those beside the page, and newer ones.

    Args:
        folder: With a file for each of the newer ones.
        kept: One file of all; it is written again.
    """
    figures: Figures = json.loads(kept.read_text()) if kept.exists() else {}
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            config = found.pop("config", None) or {}
            if config.get("tokens"):
                found["schedule"] = " ".join(f"{b}:{n}" for b, n in zip(config["at"], config["tokens"], strict=True))
        figures[path.stem] = found
    lines = (f"{json.dumps(name)}: {json.dumps(figures[name])}" for name in sorted(figures))
    make_folder(kept.parent)
    write(kept, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return figures


def named(figures: Figures, start: str) -> list[dict[str, Any]]:
    """Return the figures of one setting, seed by seed."""
    start = start.replace(" ", "-")
    return [figures[name] for name in sorted(figures) if re.fullmatch(re.escape(start) + r"-\d+", name)]


def spread(values: Iterable[float], digits: int = 1) -> str:
    """Mean and standard deviation."""
    found = list(values)
    return f"{mean(found):.{digits}f} ± {stdev(found):.{digits}f}" if len(found) > 1 else f"{found[0]:.{digits}f}"


def seeds(rows: list[dict[str, Any]]) -> str:
    """Return top-1 over training seeds, and the number of seeds."""
    return f"{spread(row['top1'] for row in rows)} ({len(rows)})"


def more(figures: Figures, label: str) -> str:
    """Return top-1 with the norms fine-tuned."""
    found = figures.get(f"tuned-{label}")
    return f"{found['top1']:.1f}" if found else ""


def results(figures: Figures) -> str:
    """On photos that nothing was chosen on."""
    base = figures["table-unpruned"]
    lines = [
        "| setting | GMACs | TNT (seeds) | and norms tuned | ToMe | floor | goal |",
        "|---|---:|---:|---:|---:|---:|---:|",
        f"| unpruned | {base['gmacs']:.3f} | {base['top1']:.1f} | | {base['top1']:.1f} | | |",
    ]
    for keep, (floor, goal) in GOALS.items():
        rows = named(figures, f"table single K={keep}")
        told = f"{rows[0]['gmacs']:.3f} | {seeds(rows)} | {more(figures, f'K={keep}')}"
        lines.append(f"| after block 3, K = {keep} | {told} | | {floor} | {goal} |")
    for budget in BUDGETS:
        tome, rows = figures[f"table-tome-{budget}"], named(figures, f"table whole {budget}")
        if not rows:
            continue
        floor = tome["top1"] + FLOORS[budget][0]
        lines.append(
            f"| whole model, at most {budget} | {rows[0]['gmacs']:.3f} | {seeds(rows)} | {more(figures, budget)} | "
            f"{tome['top1']:.1f} at {tome['gmacs']:.3f} | above {floor:.1f} | {FLOORS[budget][1]} |"
        )
    plans = {budget: named(figures, f"table whole {budget}") for budget in BUDGETS}
    told = [f"| {budget} | {rows[0]['schedule']} |" for budget, rows in plans.items() if rows]
    return "\n".join([*lines, "", "| plan | block:tokens left |", "|---:|---|", *told] if told else lines)


def search(figures: Figures) -> str:
    """Compare the plans with schedules that need no search, with the scorers of the first seed."""
    names = {
        "the-papers-[3-4-5]": "the paper's [3, 4, 5]",
        "uniform-rates": "uniform rates",
        "uniform-counts": "uniform counts",
    }
    if not any(name.startswith("reference") for name in figures):
        return NOTHING
    lines = [
        "| | GMACs at most | the plan | " + " | ".join(names.values()) + " |",
        "|---|---:|---:|" + "---:|" * len(names),
    ]
    for method, title in {"tnt": "TNT", "tome": "ToMe"}.items():
        for budget in BUDGETS:
            plan = f"table-whole-{budget}-0" if method == "tnt" else f"reference-{method}-plan-{budget}"
            rows = [figures.get(key) for key in (plan, *(f"reference-{method}-{name}-{budget}" for name in names))]
            if rows[0] is not None:
                told = [f"{row['top1']:.1f} ({row['kl']:.3f})" if row else "" for row in rows]
                lines.append(f"| {title} | {budget} | {' | '.join(told)} |")
    return "\n".join(lines)


def ablation(figures: Figures) -> str:
    """One option changed at a time, on the half of the calibration photos that nothing was learned from."""
    if "ablation-unpruned" not in figures:
        return NOTHING
    base = figures["ablation-unpruned"]
    lines = [f"Unpruned: {base['top1']:.1f} of {base['photos']} photos.", ""]
    for title, labels in (("after block 3", ("K=0.5", "K=0.25")), ("in all blocks", ("everywhere",))):
        known = [
            (label, named(figures, f"ablation {variant.name} {label}")) for variant in variants() for label in labels
        ]
        macs = {label: f"{rows[0]['gmacs']:.3f} GMACs" for label, rows in reversed(known) if rows}
        cells = " | ".join(f"{label}, {macs.get(label, '')}: top-1 | divergence" for label in labels)
        lines += [f"| {title} | {cells} |", "|---|" + "---:|" * (2 * len(labels))]
        for variant in variants():
            rows = [named(figures, f"ablation {variant.name} {label}") for label in labels]
            if all(rows):
                told = " | ".join(
                    f"{spread(r['top1'] for r in row)} | {spread((r['kl'] for r in row), 3)}" for row in rows
                )
                lines.append(f"| {variant.name} | {told} |")
        lines += [] if len(lines) > 2 and not lines[-1].startswith("|---") else ["| not measured yet |"]
        lines.append("")
    return "\n".join(lines)


def effort(figures: Figures) -> str:
    """Accuracy against photos and steps, one training each."""
    if not any(name.startswith("effort") for name in figures):
        return NOTHING
    lines = [
        "| photos | epochs | steps | seconds | K = 0.5 | K = 0.35 | K = 0.25 |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found = [(photos, variant, f"effort {variant.name} {photos} K={{}}") for variant, photos in efforts()]
    found.append((1000, SINGLE, "table single K={} 0"))
    told = []
    for photos, variant, name in found:
        rows = [figures.get(name.format(keep).replace(" ", "-")) for keep in GOALS]
        seconds: Any = figures.get(f"seconds-{variant.name}-{photos}".replace(" ", "-"))
        if all(rows) and seconds is not None:
            each = photos // Training().batch_size
            epochs = Training(**variant.training).passes(each)
            top = " | ".join(f"{row['top1']:.1f} ({row['kl']:.3f})" for row in rows if row is not None)
            told.append((photos, epochs, f"| {photos} | {epochs} | {epochs * each} | {seconds:.0f} | {top} |"))
    lines += [line for _, _, line in sorted(told)]
    return "\n".join(lines)


PARTS = {  # of the page, by the names of their marks: what writes them, and from which figures
    "results": (results, ("table", "tuned")), "search": (search, ("reference", "table-whole")),
    "ablation": (ablation, ("ablation",)), "effort": (effort, ("effort", "table-single")),
}  # fmt: skip


def write_page(folder: Path, doc: Path) -> None:
    """Put the measured parts between the marks of docs/results/tnt.md and research-notes.md.

    Args:
        folder: With the figures.
        doc: The first page; the other lies beside it, and the figures are kept in a folder of the first one's name.
    """
    figures = load(folder, doc.with_suffix("") / "figures.json")
    for page in (doc, doc.with_name("research-notes.md")):
        text = page.read_text()
        for name, (table, starts) in PARTS.items():
            before, found, rest = text.partition(f"<!-- {name} -->")
            if not found:
                continue  # it is on the other page
            after = rest.split(f"<!-- /{name} -->")[1]
            stamps = {one["stamp"] for key, one in figures.items() if key.startswith(starts) and "stamp" in one}
            part = table(figures)
            where = f"\n\n{'; '.join(sorted(stamps))}." if stamps and part != NOTHING else ""
            text = f"{before}<!-- {name} -->\n{part}{where}\n<!-- /{name} -->{after}"
        write(page, text.encode())
        written(page)
