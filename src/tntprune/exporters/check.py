"""Does a file say what the model says? It is loaded anew in its runtime and compared with the eager model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tntprune.backbones.base import find_backbone
from tntprune.errors import UserError
from tntprune.exporters.base import KEPT, first_line
from tntprune.exporters.export import reopen
from tntprune.exporters.graph import Answering
from tntprune.reduce import device_of

TOLERANCE = 1e-3  # of the logits' spread, in fp32
BORDER = 0.02  # share of images, at least one, in which a token may go the other way: two scores nearly the same
LEVELS = {"fp16": (0.99, 0.95), "bf16": (0.98, 0.9), "int8": (0.9, 0.75)}  # least correlation; agreement, on photos


@dataclass(frozen=True)
class Check:
    """What was found.

    Args:
        images: How many were compared.
        photos: Whether they were photos; else random numbers, on which the first guess says little.
        largest: The largest difference of a logit.
        relative: The same, over the standard deviation of that image's logits.
        correlation: Of the logits of an image, the mean over the images.
        agreement: Percent of images with the same first guess.
        same_kept: Percent of images in which the same tokens are left at the end; None if the file does not tell.
        kept: Percent of an image's tokens that are left at the end in both, the mean over the images.
        problem: What is wrong, or None.
    """

    images: int
    photos: bool
    largest: float
    relative: float
    correlation: float
    agreement: float
    same_kept: float | None
    kept: float | None
    problem: str | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        kind = "photos" if self.photos else "random images (photos say more: --data DIR)"
        lines = [
            f"checked on {self.images} {kind}: logits differ by at most {self.largest:.2g}, {self.relative:.2g} of "
            f"their spread, and correlate by {self.correlation:.4f}",
            f"the first guess is the same on {self.agreement:.1f} %",
        ]
        if self.same_kept is not None:
            lines.append(f"the same tokens are kept in {self.same_kept:.1f} %, and {self.kept:.1f} % of the tokens")
        return "\n".join(lines)


def check(model: nn.Module, path: str | Path, images: torch.Tensor | None = None, count: int = 16) -> Check:
    """Compare a file with the model that it was made from.

    In fp32 the logits may differ by 1e-3 of their spread, and the same tokens are kept, in all images but one in fifty
    (at least one), where two scores may be nearly the same. In less than fp32 the logits have to correlate, by 0.99 in
    fp16, 0.98 in bf16 and 0.9 in int8, and on photos the first guess is the same on 95, 90 and 75 % of them.

    Args:
        model: The model, in eval mode.
        path: What `export` wrote.
        images: Photos as the model takes them, (n, C, H, W); None for random numbers.
        count: How many random images.

    Returns:
        What was found; `problem` says whether the file is right.

    Raises:
        UserError: the file cannot be loaded or run.
    """
    run, about = reopen(path)
    photos = images is not None
    if images is None:
        images = torch.randn(count, *find_backbone(model).input_size(model), generator=torch.Generator().manual_seed(0))
    told = [entry["name"] for entry in about["outputs"]]
    eager = Answering(model, indices=True)
    logits, expected, same, kept = [], [], [], []
    with torch.inference_mode():
        for part in _batches(images, about["batch"]):
            try:
                found = dict(zip(told, run(part), strict=True))
            except Exception as error:  # whatever the runtimes raise
                raise UserError(f"{path}: {about['format']} cannot run it ({first_line(error)})") from None
            right, places = (out.cpu() for out in eager(part.to(device_of(model))))
            logits.append(found["logits"])
            expected.append(right)
            if KEPT in found:
                shares = [_common(a, b) for a, b in zip(found[KEPT], places, strict=True)]
                kept += shares
                same += [share == 1 for share in shares]
    found_, right = torch.cat(logits)[: len(images)], torch.cat(expected)[: len(images)]
    return _judge(about["dtype"], photos, found_, right, same[: len(images)], kept[: len(images)])


def _judge(
    dtype: str, photos: bool, found: torch.Tensor, right: torch.Tensor, same: list[bool], kept: list[float]
) -> Check:
    n = len(found)
    difference = (found - right).abs().amax(1)  # (n,)
    relative = difference / right.std(1, correction=0).clamp(min=1e-12)
    correlation = torch.cosine_similarity(found - found.mean(1, keepdim=True), right - right.mean(1, keepdim=True))
    agreement = (found.argmax(1) == right.argmax(1)).float().mean().item()
    problem = None
    if not bool((found.isfinite() & right.isfinite()).all()):
        problem = "some logits, of the file or of the model, are no numbers"
    elif dtype == "fp32":
        allowed = ceil(BORDER * n)
        far, other = int((relative > TOLERANCE).sum()), n - sum(same) if same else 0
        if far > allowed:
            problem = f"logits differ by more than {TOLERANCE:g} of their spread in {far} of {n} images"
        elif other > allowed:
            problem = f"other tokens are kept in {other} of {n} images"
    else:
        least, agrees = LEVELS[dtype]
        if correlation.mean() < least:
            problem = f"logits correlate by {correlation.mean():.3f}; expected at least {least} in {dtype}"
        elif photos and agreement < agrees:
            problem = f"the first guess is the same on {agreement:.0%} of {n} photos; expected {agrees:.0%} in {dtype}"
    return Check(
        images=n, photos=photos, largest=difference.max().item(), relative=relative.max().item(),
        correlation=correlation.mean().item(), agreement=100 * agreement,
        same_kept=100 * sum(same) / len(same) if same else None,
        kept=100 * sum(kept) / len(kept) if kept else None, problem=problem,
    )  # fmt: skip


def _batches(images: torch.Tensor, batch: int | str) -> Any:
    """Batches as the file takes them, the last one filled up; where it takes any, of one, two, three and so on."""
    begin, number = 0, 0
    while begin < len(images):
        number += 1
        size = batch if isinstance(batch, int) else min(number, 8, len(images) - begin)
        part = images[begin : begin + size]
        yield torch.cat([part, images[:1].expand(size - len(part), -1, -1, -1)])
        begin += size


def _common(found: torch.Tensor, right: torch.Tensor) -> float:
    """Share of the tokens that are in both lists of places; -1 may stand in them more than once."""
    if len(found) != len(right):
        return 0.0
    rest = right.tolist()
    common = 0
    for place in found.tolist():
        if place in rest:
            rest.remove(place)
            common += 1
    return common / max(1, len(right))
