"""Rates that meet a budget: what a schedule costs, what it keeps, and the search for the best."""

from tntprune.search.find_plan import find_plan
from tntprune.search.found import Found
from tntprune.search.latency import LatencyCurve, measure_latency

__all__ = ["Found", "LatencyCurve", "find_plan", "measure_latency"]
