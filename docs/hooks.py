"""Formulas as MathML, so that browsers show them without scripts or a network; and pages of files in the root."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
INCLUDED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take in a file of the root, and turn $...$ and $$...$$ outside of code into MathML."""
    if page.file.src_uri in INCLUDED:
        markdown = (ROOT / INCLUDED[page.file.src_uri]).read_text().replace("](docs/", "](")
        for inside, outside in INCLUDED.items():
            markdown = markdown.replace(f"]({outside})", f"]({inside})")
    parts = CODE.split(markdown)
    parts[::2] = [FORMULA.sub(_mathml, part) for part in parts[::2]]
    return "".join(parts)


def _mathml(found: re.Match[str]) -> str:
    block = found[1] is not None
    formula: str = convert((found[1] or found[2]).strip(), display="block" if block else "inline")
    return f'<div style="overflow-x: auto">{formula}</div>' if block else formula
