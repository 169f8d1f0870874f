"""One self-contained page: curves, a table and token maps."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1d2330; background: #fff; max-width: 60rem; margin: 2rem auto;
       padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin-bottom: .25rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.lead { color: #4a5266; margin-top: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #e3e6ec; white-space: nowrap; }
th { font-weight: 600; color: #4a5266; border-bottom: 2px solid #c9ceda; vertical-align: bottom; }
td.best { font-weight: 650; }
img { max-width: 100%; height: auto; display: block; }
footer { margin-top: 2.5rem; padding-top: .8rem; border-top: 1px solid #e3e6ec; color: #6a7285; font-size: .85rem; }
code { background: #f2f4f8; padding: .1rem .3rem; border-radius: 3px; }
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], best: Sequence[int] = ()) -> str:
    """An HTML table.

    Args:
        header: Column names.
        rows: Cells as text.
        best: For each row the column to set in bold, -1 for none; () for none at all.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = ""
    for number, row in enumerate(rows):
        bold = best[number] if best else -1
        cells = (f"<td{' class=best' if column == bold else ''}>{escape(cell)}</td>" for column, cell in enumerate(row))
        body += f"<tr>{''.join(cells)}</tr>\n"
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"


def picture(data: bytes, alt: str, form: str = "png") -> str:
    """A picture inside the page.

    Args:
        data: The file's bytes.
        alt: What it shows, for those who cannot see it.
        form: "png" or "svg".
    """
    kind = "svg+xml" if form == "svg" else form
    return f'<img alt="{escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'


def page(title: str, lead: str, sections: Sequence[tuple[str, str]], foot: str) -> str:
    """The whole page; `sections` are headings and the HTML below each."""
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}
<footer>{escape(foot)}</footer>
</body>
</html>
"""
