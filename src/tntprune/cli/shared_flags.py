"""Flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tntprune.methods import all_methods
from tntprune.system.flags import MANY, MAX_SEED, Within

if TYPE_CHECKING:
    from torch import nn

MAX_BATCH = 65536
MAX_WORKERS = 256

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
    str | None, tyro.conf.arg(metavar="NAME", help=f"a method: {', '.join(all_methods())}", help_behavior_hint="")
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
    """Load a model with its weights onto a device; see `load_model`, which takes long to import."""
    from tntprune.backbones.models import load_model

    return load_model(model, weights, device, img_size)
