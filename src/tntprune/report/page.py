"""One self-contained page: its style, and what it is put together from."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1d2330; background: #fff;
       max-width: 64rem; margin: 2.5rem auto; padding: 0 1.25rem; overflow-wrap: break-word; }
h1 { font-size: 1.75rem; line-height: 1.25; letter-spacing: -.01em; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 3rem 0 .8rem; padding-top: .9rem; border-top: 1px solid #e3e6ec; }
h3 { font-size: 1rem; line-height: 1.4; margin: 1.7rem 0 .4rem; }
p, li { max-width: 46rem; }
ul { padding-left: 1.2rem; margin: .4rem 0 1rem; }
li { margin: .3rem 0; }
p.lead { color: #4a5266; margin-top: 0; font-size: 1.05rem; }
p.note { color: #4a5266; font-size: .88rem; }
nav { font-size: .9rem; margin: 1.2rem 0 0; }
nav a { margin-right: 1.1rem; display: inline-block; }
a { color: #0b5c8e; text-decoration-thickness: 1px; text-underline-offset: 2px; }
figure { margin: 1.4rem 0; }
figcaption { color: #4a5266; font-size: .88rem; line-height: 1.5; margin-top: .6rem; max-width: 46rem; }
img { max-width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; margin: .8rem 0; max-width: 100%; background:
          linear-gradient(to left, #fff 40%, #fff0) right / 3rem 100% no-repeat local,
          linear-gradient(to left, #1d233038, #1d233000) right / .8rem 100% no-repeat scroll; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; font-size: .88rem;
        line-height: 1.4; }
th, td { padding: .32rem .55rem; text-align: right; border-bottom: 1px solid #e3e6ec; white-space: nowrap;
         vertical-align: top; }
th { font-weight: 600; color: #4a5266; border-bottom: 2px solid #c9ceda; vertical-align: bottom; white-space: normal;
     min-width: 4.4em; }
th.group { text-align: center; white-space: nowrap; border-bottom: 1px solid #c9ceda; }
th.group + th.group { border-left: 1px solid #e3e6ec; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; padding-left: 0;
                                 max-width: 13rem; white-space: normal; min-width: 8.5rem; }
th.words, td.words { text-align: left; white-space: normal; min-width: 7rem; overflow-wrap: anywhere; }
td.best { font-weight: 700; background: #eef4f9; }
td.best::before { content: "\\2605\\00a0"; font-size: .75em; vertical-align: .08em; }
tbody tr:hover td { background: #f6f8fa; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: #0b5c8e; }
code { font: .84em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: #f2f4f8;
       padding: .1rem .3rem; border-radius: 3px; }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid #e3e6ec; color: #5d6577; font-size: .85rem; }
@media (max-width: 40rem) {
  body { margin: 1.4rem auto; padding: 0 1rem; }
  h1 { font-size: 1.4rem; }
  table { font-size: .82rem; }
  th, td { padding: .3rem .5rem; }
  th { min-width: 5.2em; }
  th:first-child, td:first-child { max-width: 7.5rem; min-width: 6.5rem; padding-right: .5rem;
                                   border-right: 1px solid #e3e6ec; }
}
@media print {
  @page { margin: 14mm 12mm; }
  body { font-size: 10pt; color: #000; max-width: none; margin: 0; padding: 0; }
  nav { display: none; }
  p, li, figcaption, p.note, p.lead { max-width: none; color: #000; }
  figcaption, p.note { font-size: 8.5pt; }
  .scroll { overflow: visible; background: none; }
  table { font-size: 7.5pt; width: 100%; }
  th, td { padding: .15rem .3rem; }
  th { color: #000; min-width: 0; }
  th:first-child, td:first-child { position: static; min-width: 0; }
  th.words, td.words { min-width: 0; }
  td.best { background: none; }
  thead { display: table-header-group; }
  tr, figure { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  img { max-height: 235mm; width: auto; }
  code { background: none; padding: 0; }
}
"""
NARROW = "screen and (max-width: 40rem)"
MANY = 4  # with more sections than this a page begins with links to them


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    best: Sequence[int | Sequence[int]] = (),
    groups: Sequence[tuple[str, int]] = (),
    words: Sequence[int] = (),
) -> str:
    """An HTML table in a box of its own, which scrolls where the page is too narrow.

    Args:
        header: Column names; () for a table without.
        rows: Cells as text.
        best: For each row the column (or columns) to mark as the best, -1 (or none) for none; () for none at all.
        groups: Headings above the column names, each with the number of columns that it spans.
        words: Columns that hold words, not figures: set to the left, and broken into lines.
    """
    above = "".join(f'<th class="group" colspan="{span}">{escape(text)}</th>' for text, span in groups)
    names = "".join(f"<th{' class=words' if n in words else ''}>{escape(cell)}</th>" for n, cell in enumerate(header))
    lines = "".join(f"<tr>{line}</tr>" for line in (above, names) if line)
    head = f"<thead>{lines}</thead>" if lines else ""
    body = ""
    for number, row in enumerate(rows):
        marked = best[number] if best else ()
        marked = (marked,) if isinstance(marked, int) else marked
        cells = ""
        for column, cell in enumerate(row):
            kind = "best" if column in marked else "words" if column in words else ""
            cells += f"<td{f' class={kind}' if kind else ''}>{escape(cell)}</td>"
        body += f"<tr>{cells}</tr>\n"
    return f"<div class=scroll><table>{head}<tbody>\n{body}</tbody></table></div>"


def picture(data: bytes, alt: str, form: str = "png", narrow: bytes | None = None) -> str:
    """A picture inside the page.

    Args:
        data: The file's bytes.
        alt: What it shows, for those who cannot see it.
        form: "png", "svg" or another one that browsers know.
        narrow: The same for a narrow screen.
    """
    image = f'<img alt="{escape(alt)}" src="{_inline(data, form)}">'
    if narrow is None:
        return image
    return f'<picture><source media="{NARROW}" srcset="{_inline(narrow, form)}">{image}</picture>'


def _inline(data: bytes, form: str) -> str:
    kind = "svg+xml" if form == "svg" else form
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def figure(image: str, caption: str) -> str:
    """A picture (as HTML) with its caption (as text)."""
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def paragraphs(texts: Sequence[str]) -> str:
    """Text as HTML, one paragraph each."""
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def page(title: str, lead: str, sections: Sequence[tuple[str, str]], foot: str) -> str:
    """The whole page; `sections` are headings and the HTML below each."""
    many = len(sections) > MANY
    links = "".join(f'<a href="#part{n}">{escape(heading)}</a>' for n, (heading, _) in enumerate(sections))
    body = "\n".join(
        f'<h2 id="part{number}">{escape(heading)}</h2>\n{content}' for number, (heading, content) in enumerate(sections)
    )
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
{f"<nav>{links}</nav>" if many else ""}
{body}
<footer>{escape(foot)}</footer>
</body>
</html>
"""
