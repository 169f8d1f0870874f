"""Pages and pictures made of measured rows: `page` and its parts; `build`, `figures`, `tables` and `summary`."""

from tntprune.report.page import Table, page, picture

__all__ = ["Table", "page", "picture"]
