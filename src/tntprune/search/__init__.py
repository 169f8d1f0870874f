"""Rates that meet a budget: what a schedule costs, what it keeps, and the search for the best."""
