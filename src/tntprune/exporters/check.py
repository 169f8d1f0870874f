"""Does a file say what the model says, and is it faster in lower precision than in fp32? It is loaded anew and run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

from tntprune.backbones.attach import device_of, is_reduced
from tntprune.backbones.base import find_backbone
from tntprune.errors import UserError
from tntprune.exporters.export import export, reopen
from tntprune.exporters.formats import KEPT, LOGITS
from tntprune.exporters.graph import Answering
from tntprune.system.clock import in_turns
from tntprune.system.messages import first_line

TOLERANCE = 1e-3  # of the spread of an image's logits, in fp32
BORDER = 0.02  # share of images of a reduced model, at least one, in which a token may go the other way in fp32
LEVELS = {"fp16": (0.99, 0.95), "bf16": (0.98, 0.9), "int8": (0.9, 0.75)}  # least correlation; agreement, on photos
NEAR = 0.9  # least correlation of an image in which a token went the other way
ROUNDS = 20  # in which a file's pace is taken


@dataclass(frozen=True)
class Check:
    """What was found."""

    images: int  # that were compared
    photos: bool  # else random numbers, on which the first guess says little
    output: str  # "logits", or "embedding" for a model without classes
    rule: str  # what was demanded, in words
    exceptions: int  # images beyond the tolerance that the rule allows
    largest: float  # difference of a logit
    relative: float  # the same, over the standard deviation of that image's logits
    usual: float  # the same, without the exceptions
    correlation: float  # of the logits of an image, the mean over the images
    agreement: float | None  # percent of images with the same first guess; None for an embedding
    same_kept: float | None  # percent of images in which the same tokens are left; None if the file does not tell
    kept: float | None  # percent of an image's tokens that are left in both, the mean over the images
    problem: str | None  # what is wrong, or None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
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
    logits, expected, kept = [], [], []
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
                kept += [_common(a, b) for a, b in zip(found[KEPT].tolist(), places.tolist(), strict=True)]
    n = len(images)  # the last batch may be filled up
    excepted = ceil(BORDER * n) if is_reduced(model) else 0
    return judge(about["dtype"], photos, torch.cat(logits)[:n], torch.cat(expected)[:n], kept[:n], excepted, told[0])


def judge(
    dtype: str,
    photos: bool,
    found: torch.Tensor,
    right: torch.Tensor,
    kept: list[float],
    excepted: int,
    output: str = LOGITS,
) -> Check:
    """Compare the outputs of a file with those of the model.

    Args:
        dtype: That the file computes in.
        photos: Whether they are of photos.
        found: (n, classes), the file's.
        right: (n, classes), the model's.
        kept: Of each image the share of tokens that are left in both; empty if the file does not tell.
        excepted: Images that may differ in fp32.
        output: Their name.
    """
    n = len(found)
    difference = (found - right).abs().amax(1)  # (n,)
    relative = difference / right.std(1, correction=0).clamp(min=1e-12)
    correlation = torch.cosine_similarity(found - found.mean(1, keepdim=True), right - right.mean(1, keepdim=True))
    agreement = (found.argmax(1) == right.argmax(1)).float().mean().item()
    same, guesses, exact = kept.count(1), photos and output == LOGITS, dtype == "fp32"
    far = (relative > TOLERANCE) & exact
    beyond, (least, agrees) = int(far.sum()), LEVELS.get(dtype, (NEAR, 0.0))
    if exact:
        rule = f"fp32: within {TOLERANCE:g} of the spread"
        if excepted:
            rule += (
                f", except in {excepted} of {n} images, correlated by {NEAR:g}, because two of a reduced model's "
                "scores may be nearly the same"
            )
    else:
        rule = f"{dtype}: correlated by {least:g}"
        rule += f", and the same first guess on {100 * agrees:.0f} %" if guesses else ""
    problem = None
    if not bool((found.isfinite() & right.isfinite()).all()):
        problem = f"some {output} values, of the file or of the model, are no numbers"
    elif beyond > excepted:
        where = f"{beyond} of {n} images" + (f", {excepted} excepted" if excepted else "")
        problem = f"{output} differ by more than {TOLERANCE:g} of their spread in {where}"
    elif beyond and correlation[far].min() < NEAR:
        problem = f"{output} of an image correlate by {correlation[far].min():.3f}; expected at least {NEAR:g} of an "
        problem += "exception"
    elif exact and kept and n - same > excepted:
        problem = f"other tokens are kept in {n - same} of {n} images"
    elif not exact and correlation.mean() < least:
        problem = f"{output} correlate by {correlation.mean():.3f}; expected at least {least} in {dtype}"
    elif not exact and guesses and agreement < agrees:
        problem = f"the first guess is the same on {100 * agreement:.0f} % of {n} photos; "
        problem += f"expected {100 * agrees:.0f} % in {dtype}"
    usual = relative[~far]
    return Check(
        images=n, photos=photos, output=output, rule=rule, exceptions=beyond, largest=difference.max().item(),
        relative=relative.max().item(), usual=usual.max().item() if len(usual) else 0.0,
        correlation=correlation.mean().item(), agreement=100 * agreement if output == LOGITS else None,
        same_kept=100 * same / len(kept) if kept else None, kept=100 * sum(kept) / len(kept) if kept else None,
        problem=problem,
    )  # fmt: skip


def batches_of(images: torch.Tensor, batch: int | str) -> Iterator[torch.Tensor]:
    """Yield batches as the file takes them, the last one filled up; where it takes any, of 1, 2, 3, ... images."""
    begin = number = 0
    while begin < len(images):
        number += 1
        size = batch if isinstance(batch, int) else min(number, 8, len(images) - begin)
        part = images[begin : begin + size]
        yield torch.cat([part, images[:1].expand(size - len(part), -1, -1, -1)])
        begin += size


def _common(found: list[int], right: list[int]) -> float:
    """Return the share of the tokens that are in both lists of places; -1 may stand in them more than once."""
    both = (Counter(found) & Counter(right)).total()
    return both / max(1, len(right)) if len(found) == len(right) else 0.0


class Pace(NamedTuple):
    """Times of a file and of the same model in fp32."""

    dtype: str  # of the file
    ms: float  # per batch, the median
    fp32_ms: float  # the same of the file in fp32
    ratio: float  # times as fast as fp32, the median over the rounds

    @property
    def slower(self) -> bool:
        """Whether fp32 is the better choice on this processor."""
        return self.ratio < 1

    def __str__(self) -> str:
        told = (
            f"{self.dtype} takes {self.ms:.1f} ms per batch on this processor and fp32 {self.fp32_ms:.1f}, timed in "
            f"turns: {self.ratio:.2f} times as fast"
        )
        return f"{told}. {self.dtype} is slower than fp32 here: use --dtype fp32" if self.slower else told


def against_fp32(model: nn.Module, path: Path, about: dict[str, Any]) -> Pace:
    """Time a file in turns with the same model in the same format in fp32.

    Args:
        model: The model that was exported, in eval mode.
        path: The file that `export` wrote.
        about: What its JSON says.

    Raises:
        UserError: a file cannot be written, loaded or run.
    """
    batch = 1 if about["batch"] == "dynamic" else about["batch"]
    images = torch.randn(batch, *find_backbone(model).input_size(model), generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as folder:
        whole = Path(folder) / f"fp32{path.suffix}"
        export(model, whole, about["format"], "fp32", batch_size=batch, indices=len(about["outputs"]) > 1)
        calls = [partial(reopen(file)[0], images) for file in (path, whole)]
        own, fp32 = in_turns(calls, ROUNDS, images.device, progress=False)
    ratio = median(slow / fast for fast, slow in zip(own.all, fp32.all, strict=True))
    return Pace(about["dtype"], own.median, fp32.median, ratio)
