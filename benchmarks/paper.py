"""The whole paper on a real model, beside what its authors reported. Writes docs/paper.md and what is in docs/paper.

python benchmarks/paper.py --data ../shared/data --out runs/paper

Does what the command on the page does, and what that has done already is not done again. The photos of the token maps
are scikit-image's, which are in the public domain.
"""

from __future__ import annotations

import io
import shlex
from dataclasses import replace
from pathlib import Path

import skimage.data
import tyro
from PIL import Image

from stamps import written
from tntprune.paper import page
from tntprune.paper.compare import Measured
from tntprune.paper.plan import make_plan
from tntprune.paper.reproduce import RESULTS, Options, run
from tntprune.paper.trainings import spent
from tntprune.system.precision import Precision
from tntprune.system.storage import make_folder, write

MODEL = "vit_tiny_patch16_224"
TEMPLATE = Path(__file__).with_suffix(".md")
PHOTOS = ("chelsea", "coffee", "rocket")
PICTURES = "paper/"  # below docs


def main(
    data: Path,
    out: Path,
    docs: Path = Path("docs"),
    speed: bool = True,
    workers: int = 2,
    precision: Precision = "bf16",
) -> None:
    """Run everything.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where trainings and rows go.
        docs: Where the page goes.
        speed: Measure speed as well; turn it off while the machine is busy.
        workers: Processes that read photos.
        precision: Of the forward passes; rows of another one are other rows.
    """
    photos = [out / "photos" / f"{name}.png" for name in PHOTOS]
    make_folder(out / "photos")
    for name, path in zip(PHOTOS, photos):
        Image.fromarray(getattr(skimage.data, name)()).save(path)
    options = Options(
        data=data / "imagenet-val-1300",
        train_data=data / "calibration-1000" / "images",
        out=out,
        recipe="short",
        weights={MODEL: data / f"{MODEL}.safetensors"},
        photos=tuple(photos),
        speed=speed,
        precision=precision,
        workers=workers,
    )
    options = replace(options, command=command(options))
    plan = make_plan([MODEL])
    measured = run(plan, options)
    about = page.About(options.command, "short", spent(plan, out / "trainings"), PICTURES + RESULTS)
    text = page.text(plan, measured, about, TEMPLATE.read_text(encoding="utf-8"), PICTURES)
    for one in plan.maps:
        text = text.replace(one.file, Path(one.file).with_suffix(".jpg").name)
    make_folder(docs / PICTURES)
    for path in out.glob("*.png"):
        if path.name.startswith("maps-"):
            write(docs / PICTURES / path.with_suffix(".jpg").name, as_jpeg(path))
        else:
            write(docs / PICTURES / path.name, path.read_bytes())
    write(docs / PICTURES / RESULTS, lines(measured).encode())
    write(docs / "paper.md", text.encode())
    written(docs / "paper.md")


def command(options: Options) -> str:
    """Return the command line that does the same."""
    weights = next(iter(options.weights.values()))
    words = [
        "tntprune", "paper", "--backbones", MODEL, "--weights", str(weights), "--data", str(options.data),
        "--train-data", str(options.train_data), "--recipe", options.recipe, "--precision", options.precision,
        "--workers", str(options.workers),
        "--out", str(options.out),
    ]  # fmt: skip
    return shlex.join(words if options.speed else [*words, "--no-speed"])


def as_jpeg(path: Path) -> bytes:
    """Return a picture at a tenth of its size."""
    data = io.BytesIO()
    with Image.open(path) as image:
        image.convert("RGB").save(data, "JPEG", quality=85)
    return data.getvalue()


def lines(measured: list[Measured]) -> str:
    """Return the rows in the plan's order, each once, without this machine's paths."""
    rows = {one.row.setting.key: one.row for one in measured}.values()
    here = Path.cwd()
    text = "".join(f"{row.to_json()}\n" for row in rows)
    return text.replace(f"{here}/", "").replace(f"{here.parent}/", "../")


if __name__ == "__main__":
    tyro.cli(main)
