"""Tokens and the pure functions on them: selection, merging, similarity, attention."""
