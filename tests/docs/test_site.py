"""The site builds without a warning, its formulas are MathML, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_it_builds_strict_and_has_every_page(site):
    assert (site / "index.html").is_file()
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page


def test_formulas_need_no_script(site):
    page = (site / "concepts" / "tnt.html").read_text()
    assert page.count("<math") > 10 and "$$" not in page


def test_the_api_has_docstrings_and_parameters(site):
    page = (site / "api" / "functions.html").read_text()
    for name in ("reduce_", "calibrate_", "evaluate", "find_plan"):
        assert f'id="tntprune.{name}"' in page, name
    assert "Parameters" in page and "Raises" in page


def test_links_of_files_outside_the_site_lead_to_files_and_headings():
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / name).read_text()):
            path, _, part = unquote(target).partition("#")
            assert (ROOT / path).exists(), f"{name}: {target}"
            if part:
                headings = re.findall(r"^#+ (.*)", (ROOT / path).read_text(), re.MULTILINE)
                slugs = [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]
                assert part in slugs, f"{name}: {target}"
