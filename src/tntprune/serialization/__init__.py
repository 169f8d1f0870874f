"""Saved reductions and plans, the Hub, and what identifies a model."""
