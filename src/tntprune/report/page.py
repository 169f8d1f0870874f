"""One self-contained page of HTML: templates, the tables and pictures in it, and tables in Markdown too."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Environment(
    loader=FunctionLoader(lambda name: (files("tntprune.report") / "templates" / name).read_text(encoding="utf-8")),
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A table, whatever it is written as.

    Args:
        header: Column names; () for a table without.
        rows: Cells as text.
        best: For each row the columns to mark as the best; () for no marks at all.
        groups: Headings above the column names, each with the number of columns that it spans.
        words: Columns that hold words, not figures: set to the left, and broken into lines.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[Sequence[int]] = ()
    groups: Sequence[tuple[str, int]] = ()
    words: Sequence[int] = ()

    def html(self) -> Markup:
        """Return the table in a box of its own, which scrolls where the page is too narrow."""
        return part("table", self)

    __html__ = html  # so that a template can name a table

    def markdown(self) -> str:
        """Return the table in Markdown, the best in bold; headings above the column names are left out."""
        rules = ["---" if n in {0, *self.words} else "---:" for n in range(len(self.header))]
        lines = [self.header, rules]
        for row, marked in zip(self.rows, self.best or [()] * len(self.rows), strict=True):
            lines.append([f"**{cell}**" if n in marked else cell for n, cell in enumerate(row)])
        escaped = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def part(name: str, *given: Any) -> Markup:
    """Fill in one of the macros of `parts.html`."""
    return Markup(getattr(TEMPLATES.get_template("parts.html").module, name)(*given))


def picture(data: bytes, alt: str, form: str = "png", narrow: bytes | None = None) -> Markup:
    """Return a picture that lies in the page itself.

    Args:
        data: The file's bytes.
        alt: What it shows, for those who cannot see it.
        form: "png", "svg" or another one that browsers know.
        narrow: The same for a narrow screen.
    """
    kind = "svg+xml" if form == "svg" else form
    wide, slim = (one and f"data:image/{kind};base64,{base64.b64encode(one).decode()}" for one in (data, narrow))
    return part("picture", wide, alt, slim)


def page(title: str, lead: str, sections: Sequence[tuple[str, str]], foot: str) -> str:
    """Return the whole page; `sections` are headings and the HTML below each."""
    bodies = [(heading, Markup(body)) for heading, body in sections]
    return TEMPLATES.get_template("page.html").render(title=title, lead=lead, sections=bodies, foot=foot)
