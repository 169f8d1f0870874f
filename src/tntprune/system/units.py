"""How multiply-accumulates are told to a person."""

from __future__ import annotations


def unit_of(macs: float) -> tuple[float, str]:
    """Return what to divide multiply-accumulates by, and the unit: millions where the unpruned model has few."""
    return (1e9, "GMACs") if macs >= 1e8 else (1e6, "MMACs")
