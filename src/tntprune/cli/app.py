"""`tntprune app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tntprune.cli.flags import Weights, flag
from tntprune.errors import UserError
from tntprune.system.flags import Whole

Reducer = Annotated[
    str | None, flag("a folder made by train, a plan, a Hub id, or pretrained (where there is one)", "RUN")
]


def app(
    model: Annotated[str, flag("a timm model, hf:FOLDER_OR_ID, vit16 or digits_vit", "MODEL")] = "digits_vit",
    weights: Weights = None,
    reducer: Reducer = None,
    host: Annotated[str, flag("address to listen at; 0.0.0.0 opens the page to your network", "ADDRESS")] = "127.0.0.1",
    port: Annotated[int | None, flag("port (the first free one from 7860 on)"), Whole(1, 65535)] = None,
) -> int:
    """Open the explorer: see in a browser which tokens of a photo are kept, by two methods side by side.

    It starts on a small embedded model, without a download. Ctrl-C ends it.
    """
    from tntprune.app.choices import ExploredModel
    from tntprune.app.serve import serve

    if weights is not None and not Path(weights).is_file():
        raise UserError(f"{weights}: no such file; expected weights of {model}")
    opened = ExploredModel(model, weights, reducer)
    serve(opened, host, port, lambda address: print(f"The explorer is at {address}\nCtrl-C ends it.", flush=True))
    return 0
