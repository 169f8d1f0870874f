"""Does a file say what the model says? It is loaded anew in its runtime and compared with the eager model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import device_of, is_reduced
from tntprune.backbones.base import find_backbone
from tntprune.errors import UserError
from tntprune.exporters.base import KEPT, LOGITS, first_line
from tntprune.exporters.export import reopen
from tntprune.exporters.graph import Answering

TOLERANCE = 1e-3  # of the spread of an image's logits, in fp32
BORDER = 0.02  # share of images of a reduced model, at least one, in which a token may go the other way in fp32
LEVELS = {"fp16": (0.99, 0.95), "bf16": (0.98, 0.9), "int8": (0.9, 0.75)}  # least correlation; agreement, on photos
NEAR = 0.9  # least correlation of an image in which a token went the other way


@dataclass(frozen=True)
class Check:
    """What was found.

    Args:
        images: How many were compared.
        photos: Whether they were photos; else random numbers, on which the first guess says little.
        output: "logits", or "embedding" for a model without classes.
        rule: What was demanded, in words.
        exceptions: Images beyond the tolerance that the rule allows.
        largest: The largest difference of a logit.
        relative: The same, over the standard deviation of that image's logits.
        usual: The same, without the exceptions.
        correlation: Of the logits of an image, the mean over the images.
        agreement: Percent of images with the same first guess; None for an embedding.
        same_kept: Percent of images in which the same tokens are left at the end; None if the file does not tell.
        kept: Percent of an image's tokens that are left at the end in both, the mean over the images.
        problem: What is wrong, or None.
    """

    images: int
    photos: bool
    output: str
    rule: str
    exceptions: int
    largest: float
    relative: float
    usual: float
    correlation: float
    agreement: float | None
    same_kept: float | None
    kept: float | None
    problem: str | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        kind = "photos" if self.photos else "random images (photos say more: --data DIR)"
        subject = "logits differ" if self.output == LOGITS else "embeddings differ"
        lines = [
            f"checked on {self.images} {kind}: {subject} by at most {self.largest:.2g}, {self.relative:.2g} of "
            f"their spread, and correlate by {self.correlation:.4f}",
            f"rule: {self.rule}",
        ]
        if self.exceptions:
            lines.append(
                f"exceptions: {self.exceptions} of {self.images} images; the others differ by at most {self.usual:.2g} "
                "of their spread"
            )
        if self.agreement is not None:
            lines.append(f"the first guess is the same on {self.agreement:.1f} %")
        if self.same_kept is not None:
            lines.append(f"the same tokens are kept in {self.same_kept:.1f} %, and {self.kept:.1f} % of the tokens")
        return "\n".join(lines)


def check(model: nn.Module, path: str | Path, images: torch.Tensor | None = None, count: int = 16) -> Check:
    """Compare a file with the model that it was made from.

    In fp32 the logits (or the embedding) may differ by 1e-3 of their spread in every image. Of a reduced model one
    image in fifty, and at least one, is excepted if its logits correlate by 0.9: two of its scores may be nearly the
    same, so that another token goes. At most as many may keep other tokens. In less than fp32 the logits have to
    correlate, by 0.99 in fp16, 0.98 in bf16 and 0.9 in int8, and on photos the first guess is the same on 95, 90 and
    75 % of them.

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
        for part in batches_of(images, about["batch"]):
            try:
                found = dict(zip(told, run(part), strict=True))
            except Exception as error:  # whatever the runtimes raise
                raise UserError(f"{path}: {about['format']} cannot run it ({first_line(error)})") from None
            right, places = (out.cpu() for out in eager(part.to(device_of(model))))
            logits.append(found[told[0]])
            expected.append(right)
            if KEPT in found:
                shares = [_common(a, b) for a, b in zip(found[KEPT], places, strict=True)]
                kept += shares
                same += [share == 1 for share in shares]
    found_, right = torch.cat(logits)[: len(images)], torch.cat(expected)[: len(images)]
    excepted = ceil(BORDER * len(images)) if is_reduced(model) else 0
    return _judge(
        about["dtype"], photos, found_, right, same[: len(images)], kept[: len(images)], excepted, output=told[0]
    )


def _judge(
    dtype: str,
    photos: bool,
    found: torch.Tensor,
    right: torch.Tensor,
    same: list[bool],
    kept: list[float],
    excepted: int,
    output: str = LOGITS,
) -> Check:
    """Compare the outputs of a file, (n, classes), with those of the model; `excepted` images may differ in fp32."""
    n = len(found)
    difference = (found - right).abs().amax(1)  # (n,)
    relative = difference / right.std(1, correction=0).clamp(min=1e-12)
    correlation = torch.cosine_similarity(found - found.mean(1, keepdim=True), right - right.mean(1, keepdim=True))
    agreement = (found.argmax(1) == right.argmax(1)).float().mean().item()
    far = relative > TOLERANCE if dtype == "fp32" else torch.zeros(n, dtype=torch.bool)
    problem = None
    if dtype == "fp32":
        rule = f"fp32: within {TOLERANCE:g} of the spread"
        if excepted:
            rule += (
                f", except in {excepted} of {n} images, correlated by {NEAR:g}, because two of a reduced model's "
                "scores may be nearly the same"
            )
    else:
        least, agrees = LEVELS[dtype]
        rule = f"{dtype}: correlated by {least:g}"
        if photos and output == LOGITS:
            rule += f", and the same first guess on {100 * agrees:.0f} %"
    if not bool((found.isfinite() & right.isfinite()).all()):
        problem = f"some {output} values, of the file or of the model, are no numbers"
    elif dtype == "fp32":
        other = n - sum(same) if same else 0
        if int(far.sum()) > excepted:
            where = f"{int(far.sum())} of {n} images" + (f", {excepted} excepted" if excepted else "")
            problem = f"{output} differ by more than {TOLERANCE:g} of their spread in {where}"
        elif bool((correlation[far] < NEAR).any()):
            least_found = correlation[far].min().item()
            problem = f"{output} of an image correlate by {least_found:.3f}; expected at least {NEAR:g} of an exception"
        elif other > excepted:
            problem = f"other tokens are kept in {other} of {n} images"
    elif correlation.mean() < least:
        problem = f"{output} correlate by {correlation.mean():.3f}; expected at least {least} in {dtype}"
    elif photos and output == LOGITS and agreement < agrees:
        guesses = f"the first guess is the same on {100 * agreement:.0f} % of {n} photos"
        problem = f"{guesses}; expected {100 * agrees:.0f} % in {dtype}"
    usual = relative[~far]
    return Check(
        images=n, photos=photos, output=output, rule=rule, exceptions=int(far.sum()), largest=difference.max().item(),
        relative=relative.max().item(), usual=usual.max().item() if len(usual) else 0.0,
        correlation=correlation.mean().item(), agreement=100 * agreement if output == LOGITS else None,
        same_kept=100 * sum(same) / len(same) if same else None,
        kept=100 * sum(kept) / len(kept) if kept else None, problem=problem,
    )  # fmt: skip


def batches_of(images: torch.Tensor, batch: int | str) -> Any:
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
