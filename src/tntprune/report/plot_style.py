"""The plot style of all our pictures: looks that everybody tells apart, and drawing to memory."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tntprune.errors import UserError

Form = Literal["png", "svg", "pdf"]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's, sans yellow
SHAPES = "os^DvPX"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.6, 1.2, 1.6)))


@dataclass(frozen=True)
class Look:
    """How one line is drawn.

    Args:
        colour: "#rrggbb".
        shape: matplotlib's letter of the marker.
        filled: Whether the marker is filled, or white inside.
        dash: matplotlib's line style.
    """

    colour: str
    shape: str
    filled: bool
    dash: Any

    def options(self) -> dict[str, Any]:
        """Return the look as options of matplotlib's `plot`."""
        return {
            "color": self.colour, "marker": self.shape, "linestyle": self.dash, "markersize": 5, "linewidth": 1.4,
            "markerfacecolor": self.colour if self.filled else "white", "markeredgecolor": self.colour,
            "markeredgewidth": 1.1,
        }  # fmt: skip


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Give each name a look by its place: the first 14 have a marker of their own, the first 28 a colour and dash."""
    found = {}
    for place, name in enumerate(dict.fromkeys(names)):
        turn, colour = divmod(place, len(COLOURS))
        shape = SHAPES[(colour + 3 * (turn // 2) + turn) % len(SHAPES)]
        found[name] = Look(COLOURS[colour], shape, turn % 2 == 0, DASHES[place % len(DASHES)])
    return found


def blank(width: float, height: float) -> Any:
    """Return an empty figure of so many inches.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib; install it with: pip install 'tntprune[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def drawable(text: str) -> str:
    """Escape text for matplotlib: "$" starts no formula, and what is not UTF-8 or printable is spelt out."""
    readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in readable)
    return escaped.replace("$", r"\$")


def finished(figure: Any, form: Form) -> bytes:
    """Return the bytes of a figure's file; the same figure gives the same bytes."""
    import matplotlib

    out = io.BytesIO()
    about = dict.fromkeys(("Date", "Creator", "Format", "Type")) if form == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "tntprune"}):
        figure.savefig(out, format=form, dpi=150, metadata=about)
    return out.getvalue()
