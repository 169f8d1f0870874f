"""Trains the scorers that the library ships, measures them, and writes docs/results/pretrained.md.

python benchmarks/pretrained.py --data ../shared/data --out runs/pretrained

They are trained by `tntprune train` on the 1,000 calibration photos, with the defaults that docs/results/tnt.md chose on
splits of these, but for a scorer for each of the first five blocks and five times as many epochs. `imagenet-val-1300`
is looked at once, at the end, to report. The training is kept in its folder, so that it resumes where it stopped.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import tyro

from stamps import written
from tntprune import load_, reduce_, save
from tntprune.analysis.accuracy_curve import measure_curve
from tntprune.backbones.models import load_model
from tntprune.serialization.card import curve_table
from tntprune.serialization.checkpoint import FILE, read
from tntprune.serialization.fingerprint import TOLERANCE, full_name, identity
from tntprune.system.environment import stamp
from tntprune.system.storage import write
from tntprune.training.run_folder import ended

MODEL = "vit_tiny_patch16_224"
SHIPPED = Path("src/tntprune/assets/pretrained")
KEEP = 0.5  # of what is shipped
OPTIONS = ["--method", "tnt", "--at", "3", "--noise-blocks", "1", "2", "3", "4", "5", "--epochs", "10"]


def train(data: Path, run: Path) -> str:
    """Train what is shipped, if that has not ended; returns the command without this machine's paths."""
    options = ["--weights", str(data / f"{MODEL}.safetensors"), "--data", str(data / "calibration-1000" / "images")]
    command = ["train", MODEL, *options, *OPTIONS, "--out"]
    if not ended(run):
        resume = ["--resume"] if run.exists() else []
        subprocess.run([sys.executable, "-m", "tntprune", *command, str(run), *resume], check=True)
    return "tntprune " + shlex.join(command).replace(str(data), "DATA") + " RUN"


def ship(data: Path, run: Path, command: str) -> Path:
    """Put what was trained where the package has it, with how it came about."""
    model = load_(load_model(MODEL, data / f"{MODEL}.safetensors"), run, keep=KEEP)
    note = json.loads(read(run / FILE).made_by)
    about = {
        "command": command, "script": "benchmarks/pretrained.py", "model": MODEL, "photos": note["photos"],
        "data": "NIPS 2017 development set (CC BY 2.0)", "training": note["training"],
    }  # fmt: skip
    return save(model, SHIPPED / full_name(identity(model)), json.dumps(about))


def main(data: Path, out: Path, page: Path = Path("docs/results/pretrained.md")) -> None:
    """Run everything.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where the training goes.
        page: The page to write.
    """
    run = out / "shipped"
    out.mkdir(parents=True, exist_ok=True)
    command = train(data, run)
    seconds = float(json.loads((run / "log.jsonl").read_text().splitlines()[-1])["seconds"])
    file = ship(data, run, command)
    model = load_model(MODEL, data / f"{MODEL}.safetensors")
    reduce_(model, "pretrained")  # as a user does, so that what is measured is what is shipped
    curve = measure_curve(model, data / "imagenet-val-1300")
    text = PAGE.format(
        name=full_name(identity(model)), size=file.stat().st_size, command=command, minutes=seconds / 60,
        table=curve_table(curve), images=curve.images, tolerance=f"{TOLERANCE:.0%}", stamp=stamp(),
    )  # fmt: skip
    write(page, text.encode())
    written(page)


PAGE = """# Pretrained scorers

The library contains trained TNT scorers for `{name}` ({size:,} bytes, merging):

```python
import timm, tntprune

model = timm.create_model("{name}", pretrained=True).eval()
tntprune.reduce_(model, "pretrained")  # keeps half of the patch tokens after block 3
tntprune.reduce_(model, "pretrained", keep=0.7)
tntprune.reduce_(model, "pretrained", at=(2, 4), keep=0.6)  # any of the blocks 1 to 5
```

On the command line: `--reducer pretrained`. The model is recognised by its timm name and the norms of four weight matrices (within {tolerance}): half
precision and another head are fine, random weights are refused.

## Measured

Top-1 on {images:,} photos of the ImageNet-1k validation set, fp32: compare rows with each other, not with published accuracies.

{table}

Written by `python benchmarks/pretrained.py --data ../shared/data --out runs/pretrained` on {stamp}.

## Training

{minutes:.0f} minutes on 1,000 unlabelled photos (NIPS 2017 development set, CC BY 2.0), with default options. The weights came without a name; their norms
match timm's `{name}`.

```
{command}
```
"""


if __name__ == "__main__":
    tyro.cli(main)
