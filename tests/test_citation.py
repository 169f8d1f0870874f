"""Whoever cites us finds the paper and the software, with the same authors and versions everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tntprune

ROOT = Path(__file__).parents[1]


def test_citation_file_and_bibtex_name_the_paper_and_this_version():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = found["preferred-citation"]
    assert found["version"] == tntprune.__version__ and found["type"] == "software"
    assert (
        paper["title"] == "Training Noise Token Pruning"
        and paper["year"] == 2025
        and "ICCV" in paper["conference"]["name"]
    )
    authors = " and ".join(f"{one['family-names']}, {one['given-names']}" for one in paper["authors"])
    readme = (ROOT / "README.md").read_text()
    (entries,) = re.findall(r"```bibtex\n(.*?)```", readme, re.DOTALL)
    assert f"author    = {{{authors}}}" in entries and f"title     = {{{paper['title']}}}" in entries
    assert f"version = {{{tntprune.__version__}}}" in entries
    assert "repository-code" not in found  # the owner's to fill; a wrong address would be worse than none
