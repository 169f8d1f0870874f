"""What the commands share: their common flags, loading a model, and what they print."""

from __future__ import annotations

import io
import json as json_format
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tntprune.config import METHODS
from tntprune.errors import UserError
from tntprune.flags import MANY, MAX_SEED, Within

if TYPE_CHECKING:
    from torch import nn

MAX_BATCH = 65536
MAX_WORKERS = 256
LONGEST = 1000  # characters of a line

Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help="a timm model, vit16 or digits_vit")]
Weights = Annotated[
    Path | None,
    tyro.conf.arg(metavar="FILE", help="weights to load; without it timm asks the Hub", help_behavior_hint=""),
]
Device = Annotated[str, tyro.conf.arg(metavar="DEVICE", help="cpu, cuda or mps")]
Json = Annotated[bool, tyro.conf.arg(help="one JSON object on standard output, everything else on standard error")]
Reducer = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="RUN",
        help="a folder made by train, a plan made by search, a Hub id (user/repo@revision), or pretrained",
        help_behavior_hint="",
    ),
]
MethodName = Annotated[
    str | None, tyro.conf.arg(metavar="NAME", help=f"a method: {', '.join(METHODS)}", help_behavior_hint="")
]
Then = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="TEXT...",
        help='further reductions at places of their own, such as "tome at=6,7,8 r=10"',
        help_behavior_hint="",
    ),
]
ImgSize = Annotated[
    tuple[int, int] | None,
    tyro.conf.arg(metavar="H W", help="of the images, if not the model's own size", help_behavior_hint=""),
    Within(1, 8192),
]
OnBadImage = Annotated[Literal["error", "skip"], tyro.conf.arg(help="stop at one, or count it and exit with 3")]
Seed = Annotated[int, tyro.conf.arg(metavar="INT", help="of everything random"), Within(0, MAX_SEED)]
Limit = Annotated[
    int | None,
    tyro.conf.arg(metavar="INT", help="photos, chosen at random and always the same", help_behavior_hint=""),
    Within(1, MANY),
]
BatchSize = Annotated[int, tyro.conf.arg(metavar="INT", help="photos at a time"), Within(1, MAX_BATCH)]
Workers = Annotated[
    int | None,
    tyro.conf.arg(metavar="INT", help="processes that read photos (half the processors)", help_behavior_hint=""),
    Within(0, MAX_WORKERS),
]

PhotosOf = Annotated[
    str,
    tyro.conf.arg(
        metavar="DIR",
        help="photos in class folders (WordNet ids for ImageNet); or hfds/NAME, hfids/NAME, wds/DIR, torch/NAME",
    ),
]
Split = Annotated[
    str | None,
    tyro.conf.arg(metavar="NAME", help="of such a data set; or a folder in the folder", help_behavior_hint=""),
]
Root = Annotated[
    Path | None,
    tyro.conf.arg(metavar="DIR", help="where torch/ data lies and hfds/ data is kept", help_behavior_hint=""),
]
Samples = Annotated[
    int | None,
    tyro.conf.arg(metavar="INT", help="photos in a stream that does not tell", help_behavior_hint=""),
    Within(1, MANY),
]


def load(model: str, weights: Path | None, device: str, img_size: tuple[int, int] | None = None) -> nn.Module:
    """A model with its weights, on a device; a line tells if the Hub is asked."""
    from tntprune.models import check_name, load_model

    check_name(model)
    if weights is None and model not in ("vit16", "digits_vit"):
        print(f"asking the Hub for the pretrained weights of {model}", file=sys.stderr)
    return load_model(model, weights, device, img_size)


def printable(text: str) -> str:
    r"""Make text that may hold a file's name safe to print: control characters, escape codes and bytes that are no text
    become escapes such as \n and \x1b.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Make a message printable, without the middle of what is longer than a thousand characters."""
    safe = printable(text)
    return safe if len(safe) <= LONGEST else f"{safe[: LONGEST // 2]} ... {safe[-LONGEST // 2 :]}"


def warn(text: str) -> None:
    """Print one line on standard error."""
    print(one_line(text), file=sys.stderr)


def tell(json: bool, data: dict[str, Any], text: str) -> None:
    """Print one JSON object, or the text for a person.

    Raises:
        UserError: standard output cannot be written.
    """
    try:
        lines = text.split("\n")
        print(json_format.dumps(data, default=str) if json else "\n".join(map(printable, lines)), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        forget_output()
        raise UserError(f"standard output cannot be written ({error.strerror})") from None


def prepare_streams() -> None:
    r"""Make standard output and standard error take any text.

    A stream that was closed before we began (`>&-`) leads nowhere: Python has None in its place. A character that the
    locale cannot encode is written as an escape, such as \xe9.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def forget_output() -> None:
    """Let standard output lead nowhere, so that what could not be written does not fail once more at the end."""
    with suppress(OSError, ValueError):  # it may be closed, or no file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
