"""How fast exported models are, and what they get right. Writes the tables of docs/results/export.md.

python benchmarks/export.py --data ../shared/data

Times are those of DeiT-S (distilled) with random weights, each setting in turns with all others; TNT is the default,
which merges. Accuracy is that of ViT-Tiny with its own weights and the scorers that come with the library; int8 is
calibrated on calibration-1000, imagenet-val-1300 is only reported. `--only accuracy` or `--only speed` leaves the other table as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import timm
import torch
import tyro
from torch import nn

from stamps import written
from tntprune import TNT, load_, macs, reduce_
from tntprune.backbones.models import load_model
from tntprune.data.folders import labelled_photos
from tntprune.exporters.export import export, reopen
from tntprune.exporters.formats import Runner, find_format
from tntprune.exporters.samples import choose_photos, read_photos
from tntprune.system.clock import in_turns
from tntprune.system.environment import stamp
from tntprune.system.storage import write

FAST, RIGHT = "deit_small_distilled_patch16_224", "vit_tiny_patch16_224"
CONFIG = TNT(at=3, keep=0.5)  # the default: what does not stay is merged into what stays
SETTINGS = {  # runtime and precision: format, dtype
    "onnxruntime fp32": ("onnx", "fp32"),
    "onnxruntime int8": ("onnx", "int8"),
    "OpenVINO fp32": ("openvino", "fp32"),
    "OpenVINO bf16": ("openvino", "bf16"),
    "OpenVINO int8": ("openvino", "int8"),
}
SPEED_HEAD = (
    "| batch | runtime | model | median | p10 | p90 | times as fast | fewer MACs | demand |",
    "|---:|---|---|---:|---:|---:|---:|---:|---|",
)
ACCURACY_HEAD = ("| model | runtime | top-1 | agreement | demand |", "|---|---|---:|---:|---|")
WANTED = 6.0  # times as fast as the eager unpruned model, in int8 with half of the tokens
LOSS = 0.7  # points of accuracy that int8 may lose against the same model in fp32
FEATURES = {  # torch's names: ours
    "avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8", "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX512-BF16",
}  # fmt: skip


def features() -> str:
    """Say which of the instructions that int8 and bf16 profit from the processor has."""
    told = torch.cpu.get_capabilities()
    return ", ".join(name for key, name in FEATURES.items() if told.get(key)) or "none of VNNI, AMX and AVX512-BF16"


def eager(model: nn.Module) -> Runner:
    @torch.inference_mode()
    def run(images: torch.Tensor) -> list[torch.Tensor]:
        return [model(images)]

    return run


def exported(model: nn.Module, folder: Path, name: str, batch: int, calibration: torch.Tensor, threads: int) -> Runner:
    to, dtype = SETTINGS[name]
    path = folder / f"{to}-{dtype}-{batch}{find_format(to).suffix}"
    export(model, path, to, dtype, batch_size=batch, calibration=calibration)  # type: ignore[arg-type]
    return reopen(path, threads)[0]


def speed(batch: int, rounds: int, threads: int) -> list[str]:
    """Rows of the table of times."""
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(8 * batch, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    models = {"unpruned": timm.create_model(FAST).eval(), "TNT, K = .5": timm.create_model(FAST).eval()}
    reduce_(models["TNT, K = .5"], CONFIG)
    with TemporaryDirectory() as folder:
        runners: dict[str, Runner] = {}
        for number, (kind, model) in enumerate(models.items()):
            runners[f"eager fp32 | {kind}"] = eager(model)
            for name in SETTINGS:
                place = Path(folder, str(number))
                runners[f"{name} | {kind}"] = exported(model, place, name, batch, noise, threads)
        calls = [partial(run, images) for run in runners.values()]
        times = dict(zip(runners, in_turns(calls, rounds, images.device), strict=True))
    first = times["eager fp32 | unpruned"].median
    whole = macs(models["unpruned"]).macs
    rows = []
    for name, found in times.items():
        factor = first / found.median
        share = whole / macs(models[name.split(" | ")[1]]).macs
        verdict = ""
        if "int8 | TNT" in name:
            verdict = f"at least {WANTED:g}: {'yes' if factor >= WANTED else '**no**'}"
        rows.append(
            f"| {batch} | {name} | {found.median:.1f} | {found.p10:.1f} | {found.p90:.1f} | {factor:.2f} | "
            f"{share:.2f} | {verdict} |"
        )
    return rows


def guesses(run: Runner, parts: Callable[[], list[torch.Tensor]], batch: int) -> torch.Tensor:
    """First guesses, (n,); a last batch that is not full is filled up and cut."""
    found = []
    for part in parts():
        full = torch.cat([part, part[:1].expand(batch - len(part), -1, -1, -1)])
        found.append(run(full)[0].argmax(1)[: len(part)])
    return torch.cat(found)


def accuracy(data: Path, reducer: str, photos: int, threads: int) -> list[str]:
    """Rows of the table of accuracy."""
    batch, rows = 4, []
    for kind in ("unpruned", "TNT, K = .5"):
        model = load_model(RIGHT, data / f"{RIGHT}.safetensors")
        if kind != "unpruned":
            load_(model, reducer, at=3, keep=0.5)
        calibration = read_photos(model, choose_photos(data / "calibration-1000", 128, 0)[0])
        found = labelled_photos(data / "imagenet-val-1300", model)
        found = found[:: max(1, len(found) // photos)] if photos else found
        images, labels = read_photos(model, found), torch.tensor([photo.label for photo in found])
        right = guesses(eager(model), lambda images=images: list(images.split(batch)), batch)  # type: ignore[misc]
        whole = 100 * (right == labels).float().mean().item()
        rows.append(f"| {kind} | eager fp32 | {whole:.2f} | | |")
        with TemporaryDirectory() as folder:
            for name in SETTINGS:
                run = exported(model, Path(folder), name, batch, calibration, threads)
                told = guesses(run, lambda images=images: list(images.split(batch)), batch)  # type: ignore[misc]
                top1, same = (100 * (told == given).float().mean().item() for given in (labels, right))
                verdict = ""
                if "int8" in name and kind != "unpruned":
                    verdict = f"at most {LOSS:g} less: {'yes' if round(whole - top1, 2) <= LOSS else '**no**'}"
                rows.append(f"| {kind} | {name} | {top1:.2f} | {same:.2f} | {verdict} |")
    return rows


def main(
    data: Path = Path("../shared/data"),
    reducer: str = "pretrained",
    batches: tuple[int, ...] = (1, 8),
    rounds: int = 30,
    threads: int = 2,
    photos: int = 0,
    only: Literal["all", "speed", "accuracy"] = "all",
    page: Path = Path("docs/results/export.md"),
) -> None:
    """Measure and write the tables into the page.

    Args:
        data: Folder with the weights of ViT-Tiny, calibration-1000 and imagenet-val-1300.
        reducer: TNT's scorers for it.
        batches: Images at a time, for the times.
        rounds: Passes of each setting.
        threads: Of every runtime.
        photos: About how many photos accuracy is measured on; 0 for all.
        only: Measure one of the tables.
        page: The page to write.
    """
    torch.set_num_threads(threads)
    told = f"Written by `python benchmarks/export.py` on {stamp()}. The processor has {features()}."
    if only != "accuracy":
        times = [row for batch in batches for row in speed(batch, rounds, threads)]
        fill(page, "speed", [told, "", *SPEED_HEAD, *times])
    if only != "speed":
        fill(page, "accuracy", [told, "", *ACCURACY_HEAD, *accuracy(data, reducer, photos, threads)])
    if only == "all":
        written(page)


def fill(page: Path, name: str, lines: list[str]) -> None:
    """Replace the lines of a page between its two marks of that name."""
    start, end = f"<!-- {name}, written by benchmarks/export.py -->", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(start)
    write(page, "\n".join([before + start, *lines, end + rest.split(end)[1]]).encode())


if __name__ == "__main__":
    tyro.cli(main)
