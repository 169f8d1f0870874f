"""Formulas of the pages as MathML, so that browsers show them without scripts or a network."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn $...$ and $$...$$ outside of code into MathML."""
    parts = CODE.split(markdown)
    parts[::2] = [FORMULA.sub(_mathml, part) for part in parts[::2]]
    return "".join(parts)


def _mathml(found: re.Match[str]) -> str:
    block = found[1] is not None
    formula: str = convert((found[1] or found[2]).strip(), display="block" if block else "inline")
    return formula
