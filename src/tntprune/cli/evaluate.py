"""`tntprune eval`."""

from __future__ import annotations

import copy
from typing import Annotated

from tntprune.cli.console import tell
from tntprune.cli.flags import (
    GROUP,
    BatchSize,
    Classifier,
    HostFlags,
    Json,
    Limit,
    Model,
    OnBadImage,
    Reduction,
    Seed,
    Sources,
    Workers,
    flag,
)  # fmt: skip
from tntprune.system.messages import warn
from tntprune.system.units import unit_of


def evaluate(
    model: Model,
    data: Annotated[
        str,
        flag(
            "photos in class folders (WordNet ids for ImageNet), or without labels in DIR itself; or hfds/NAME, "
            "hfids/NAME, wds/DIR, torch/NAME",
            "DIR",
        ),
    ],
    reduction: Annotated[Reduction, GROUP] = Reduction(),
    host: Annotated[HostFlags, GROUP] = HostFlags(),
    sources: Annotated[Sources, GROUP] = Sources(),
    batch_size: BatchSize = 32,
    workers: Workers = None,
    limit: Limit = None,
    on_bad_image: OnBadImage = "error",
    compare: Annotated[bool, flag("also evaluate the unpruned model, in turns")] = False,
    classifier: Classifier = True,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Measure top-1, top-5, agreement with the unpruned model, MACs and images/s.

    Photos that lie in the folder itself have no labels, and give no top-1 and top-5. A model without classes gives the
    mean cosine of its embeddings to those of the unpruned model, and the recall of nearest neighbours instead.
    """
    import torch

    from tntprune.analysis.evaluate import Figures
    from tntprune.analysis.evaluate import evaluate as run
    from tntprune.analysis.retrieval import VOTERS
    from tntprune.backbones.attach import is_reduced
    from tntprune.system.distributed import join

    torch.manual_seed(seed)
    group = join(host.device)
    loaded = host.load(model, group.device(host.device), classifier)
    before = copy.deepcopy(loaded) if reduction.reducer is not None else None  # it changes where it was trained too
    built = reduction.apply(loaded)
    found = run(
        built, data, limit=limit, batch_size=batch_size, workers=workers, on_bad_image=on_bad_image, compare=compare,
        base=before, group=group, **vars(sources),
    )  # fmt: skip
    if not group.main:
        return 3 if found.skipped else 0
    for line in found.bad:
        warn(f"skipped {line}")
    rows: list[tuple[str, Figures]] = [("pruned" if is_reduced(built) else "unpruned", found)]
    if found.base is not None:
        rows.append(("unpruned", found.base))
    scale, unit = unit_of(max(figures.macs for _, figures in rows))
    right = found.top1 is not None
    lines = [
        f"{found.images} images, {found.skipped} skipped",
        f"{'':9} " + f"{'top-1':>6} {'top-5':>6} " * right + f"{unit:>6} {'images/s':>9}",
    ]
    for name, f in rows:
        told = f"{f.top1:6.2f} {f.top5:6.2f} " if right else ""
        lines.append(f"{name:9} {told}{f.macs / scale:6.2f} {f.images_per_s:9.1f}")
    if found.agreement is not None:
        lines.append(f"agrees with the unpruned model on {found.agreement:.2f} %")
    if found.cosine is not None:
        lines.append(f"mean cosine of the embeddings to the unpruned model's: {found.cosine:.4f}")
    recalls = [
        (k, value) for k, value in zip((1, 5, 10), (found.recall1, found.recall5, found.recall10)) if value is not None
    ]
    if recalls:
        told = ", ".join(f"{value:.2f} % at {k}" for k, value in recalls)
        lines.append(f"recall of the unpruned model's nearest neighbours: {told}")
    if found.knn is not None:
        lines.append(
            f"label by the vote of {VOTERS} nearest neighbours: {found.knn:.2f} % right; "
            f"by the unpruned model's: {found.knn_unpruned:.2f} %"
        )
    if found.speedup is not None:
        lines.append(f"{found.speedup:.2f} times as fast")
    mean = "" if all(isinstance(n, int) for n in found.tokens) else ", on average"
    lines.append(f"patch tokens entering each block{mean}: {' '.join(map(str, found.tokens))}")
    tell(json, found.to_dict(), "\n".join(lines))
    return 3 if found.skipped else 0
