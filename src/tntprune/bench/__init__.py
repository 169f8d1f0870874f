"""Benchmarks that can be believed: everything in one run, in turns, checked, and beside what it has to beat."""
