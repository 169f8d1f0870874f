"""What the command prints at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from tntprune.paper.compare import Agreement, Measured, agreements, total
from tntprune.paper.entries import METHODS, PaperPlan
from tntprune.paper.tables import SHORT, tau
from tntprune.report.groups import SCHEMES


def summary(plan: PaperPlan, measured: Sequence[Measured], files: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Return what was found, and the files that were written, as JSON values and as text for a person."""
    found = agreements(measured)
    lines = [
        f"{one.entry.model}, unpruned: {one.row.top1:.2f} % of {one.row.images} photos"
        for one in measured
        if one.entry.config is None
    ]
    if any(one.their_drop is not None and one.entry.config is not None for one in measured):
        lines += ["", f"{'drop in points, mean over the rates':36} {'settings':>8} {'ours':>7} {'paper':>7}"]
    for scheme, words in SCHEMES.items():
        for method, name in METHODS.items():
            own = [one for one in measured if (one.entry.table, one.entry.method) == (scheme, method)]
            theirs = [one.their_drop for one in own if one.their_drop is not None]
            if own:
                printed = f"{fmean(theirs):7.2f}" if theirs else ""
                ours = fmean(one.drop for one in own)
                lines.append(f"{f'{name}, {words}':36} {len(own):8} {ours:7.2f} {printed}".rstrip())
    groups: dict[tuple[str, str], list[Agreement]] = {}
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
        "settings": [one.told() for one in measured],
        "agreements": [asdict(one) for one in found],
        "left_out": plan.told_left_out,
        "files": files,
    }
    return told, "\n".join(lines)
