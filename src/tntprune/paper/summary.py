"""What the command prints at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tntprune.paper.compare import Measured, agreements, total
from tntprune.paper.entries import Agenda
from tntprune.paper.names import METHODS
from tntprune.paper.tables import SCHEMES, SHORT, tau


def summary(plan: Agenda, measured: Sequence[Measured], files: dict[str, str]) -> tuple[dict[str, Any], str]:
    """As JSON values, and as text for a person.

    Args:
        plan: What was asked for.
        measured: What was measured.
        files: What was written where.
    """
    found = agreements(measured)
    lines = []
    for one in measured:
        if one.entry.config is None:
            lines.append(f"{one.entry.model}, unpruned: {one.row.top1:.2f} % of {one.row.images} photos")
    if any(one.entry.authors is not None and one.entry.config is not None for one in measured):
        lines += ["", f"{'drop in points, mean over the rates':36} {'settings':>8} {'ours':>7} {'paper':>7}"]
    for scheme, words in SCHEMES.items():
        for method, name in METHODS.items():
            own = [one for one in measured if (one.entry.table, one.entry.method) == (scheme, method)]
            theirs = [one.entry.authors.drop for one in own if one.entry.authors is not None]
            if own:
                ours = sum(one.drop for one in own) / len(own)
                printed = f"{sum(theirs) / len(theirs):7.2f}" if theirs else ""
                lines.append(f"{f'{name}, {words}':36} {len(own):8} {ours:7.2f} {printed}".rstrip())
    groups: dict[tuple[str, str], list[Any]] = {}
    for agreement in found:
        groups.setdefault((agreement.against, agreement.scheme), []).append(agreement)
    for (against, scheme), group in groups.items():
        t = total(group)
        lines.append(
            f"order of methods against {SHORT[against]}, {SCHEMES[scheme]}: tau {tau(t.tau)}, {t.same} pairs alike, "
            f"{t.unclear} opposite by chance perhaps, {t.clear} for sure"
        )
    lines += ["", *(f"{name}: {path}" for name, path in files.items())]
    told = {
        "settings": [_told(one) for one in measured],
        "agreements": [asdict(one) for one in found],
        "left_out": [{"backbone": b, "method": m, "reason": reason} for b, m, reason in plan.left_out],
        "files": files,
    }
    return told, "\n".join(lines)


def _told(one: Measured) -> dict[str, Any]:
    row, authors = one.row, one.entry.authors
    ours = {"top1": row.top1, "drop": one.drop, "macs": row.macs, "share": one.share, "images_per_s": row.images_per_s,
            "speedup": row.speedup, "images": row.images, "key": row.setting.key}  # fmt: skip
    theirs = None if authors is None else {**asdict(authors), "drop": authors.drop, "share": authors.share}
    return {**one.entry.row, "table": one.entry.table, "model": one.entry.model, "name": one.entry.name,
            "ours": ours, "authors": theirs, "difference": one.difference}  # fmt: skip
