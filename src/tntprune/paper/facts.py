"""The figures that a text can ask for by name, so that none has to be typed."""

from __future__ import annotations

from collections.abc import Sequence

from tntprune.paper.compare import Agreement, Measured, agreements, backbones_of, total


def facts(measured: Sequence[Measured]) -> dict[str, dict[str, str]]:
    """See `tntprune.paper.page.slots`."""
    several = len(backbones_of(measured)) > 1
    found: dict[str, dict[str, str]] = {
        name: {} for name in ("tau", "same", "unclear", "clear", "top1", "drop", "their_drop", "macs", "speedup")
    }
    groups: dict[str, list[Agreement]] = {}
    for found_order in agreements(measured):
        start = f"{found_order.backbone} " if several else ""
        key = f"{start}{found_order.scheme} {found_order.against}"
        for name in (key, f"{key} {found_order.regime}"):
            groups.setdefault(name, []).append(found_order)
    for key, own in groups.items():
        t = total(own)
        figures = {"tau": f"{t.tau:.2f}", "same": str(t.same), "unclear": str(t.unclear), "clear": str(t.clear)}
        for name, value in figures.items():
            found[name][key] = value
    for one in measured:
        entry = one.entry
        key = " ".join(filter(None, [entry.backbone if several else "", entry.scheme, entry.parameter, entry.name]))
        values = {
            "top1": f"{one.row.top1:.1f}", "drop": f"{one.drop:.1f}", "macs": f"{100 * one.share:.0f}",
            "their_drop": "" if entry.authors is None else f"{entry.authors.drop:.1f}",
            "speedup": "" if one.row.speedup is None else f"{one.row.speedup:.2f}",
        }  # fmt: skip
        for name, value in values.items():
            found[name][key] = value
    return found
