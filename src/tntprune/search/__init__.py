"""Rates that meet a budget: what a schedule costs, what it keeps, and the search for the best."""

from tntprune.search.latency import LatencyCurve, measure_latency

__all__ = ["LatencyCurve", "measure_latency"]
