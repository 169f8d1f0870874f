"""Pages and pictures made of measured rows: `page` and its parts; `build`, `figures`, `tables` and `summary`."""

from tntprune.report.page import page, picture, table

__all__ = ["page", "picture", "table"]
