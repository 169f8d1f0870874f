"""The table of docs/results.md: trains the scorers, evaluates every row, and writes the page. Resumes where it stopped.

python benchmarks/results.py --data ../shared/data --out runs/results
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tyro
from tqdm import tqdm

from tntprune.environment import stamp
from tntprune.storage import write

MODEL = "vit_tiny_patch16_224"
TRAININGS = {
    "TNT": ["--recipe", "relative"],
    "TNT, paper's recipe": ["--recipe", "paper"],
}
KEEP = ("0.7", "0.5", "0.25")
SEVERAL = {"0.8": ["124", "99", "79"]}  # at blocks 3, 4 and 5 each, of the 156 that are left before block 1


def rows() -> list[tuple[str, str, list[str]]]:
    """Name, setting and arguments of `tntprune eval` of each row; a name of TRAININGS takes its reducer."""
    found: list[tuple[str, str, list[str]]] = [("unpruned", "", [])]
    for keep in KEEP:
        single = ["--at", "3", "--keep", keep]
        where = f"{keep} after block 3"
        found += [(name, where, [*single, "--similar", "25"]) for name in TRAININGS]
        found.append(("random drop", where, ["--method", "random", *single]))
    for keep in SEVERAL:
        several = ["--at", "3", "4", "5", "--keep", keep]
        where = f"{keep} after blocks 3, 4, 5"
        found += [(name, where, [*several, "--similar", "40"]) for name in TRAININGS]
        counts = ["--at", "0", "3", "4", "5", "--tokens", "156", *SEVERAL[keep]]  # as many as TNT keeps
        found.append(("random drop", where, ["--method", "random", *counts]))
    return found


def slug(name: str) -> str:
    """A name as a file name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def command(*arguments: str) -> dict[str, object]:
    """Run one tntprune command with --json and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tntprune.cli", *arguments, "--json"], check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout))


def trained(log: Path) -> float:
    """Seconds that a training took, over all the times it was resumed."""
    return float(json.loads(log.read_text().splitlines()[-1])["seconds"])


def remembered(path: Path, *arguments: str) -> dict[str, object]:
    """The same, unless its result is already there."""
    if not path.exists():
        write(path, json.dumps(command(*arguments)).encode())
    return dict(json.loads(path.read_text()))


def main(data: Path, out: Path, page: Path = Path("docs/results.md")) -> None:
    """Everything.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where trainings and results go.
        page: The page to write.
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = ["--weights", str(data / f"{MODEL}.safetensors")]
    seconds = {}
    for name, options in TRAININGS.items():
        run = out / slug(name)
        resume = ["--resume"] if run.exists() else []
        photos = str(data / "calibration-1000" / "images")
        command("train", MODEL, *weights, "--data", photos, "--method", "tnt", *options, "--out", str(run), *resume)
        seconds[name] = trained(run / "log.jsonl")
    lines = []
    for name, where, arguments in tqdm(rows(), unit="row"):
        reducer = ["--reducer", str(out / slug(name))] if name in TRAININGS else []
        path = out / f"eval-{slug(name)}-{slug(where)}.json"
        validation = str(data / "imagenet-val-1300")
        found = remembered(path, "eval", MODEL, *weights, "--data", validation, *reducer, *arguments, "--compare")
        lines.append((name, where, found))
    times = "; ".join(f"{name}: {value:.0f} s" for name, value in seconds.items())
    write(page, PAGE.format(rows="\n".join(map(row, lines)), trained=times, stamp=stamp()).encode())


def row(line: tuple[str, str, dict[str, object]]) -> str:
    """One line of the table."""
    name, where, f = line
    speed = f"{f['speedup']:.2f}" if "speedup" in f else "1.00"
    return (
        f"| {name} | {where} | {f['top1']:.1f} | {f['agreement']:.1f} | {float(str(f['macs'])) / 1e9:.3f} | "
        f"{speed} | {f['images_per_s']:.0f} |"
    )


PAGE = """# Measured results

`{{model}}` with real weights on 1,300 labelled photos of the ImageNet-1k validation set. That is a subset: compare
rows of this table with each other, not with published accuracies. Scorers were trained on 1,000 other photos with the
backbone frozen ({trained}). TNT rows remove 25 similar tokens at one location, and 40 before block 1 with three, as the
paper does. Speed is the median ratio to the unpruned model on the same batches of 32, taken in turns; images/s is the
model alone.

Written by `python benchmarks/results.py --data ../shared/data --out runs/results` on {stamp}.

| method | kept | top-1 | agrees with the unpruned | GMACs | speed-up | images/s |
|---|---|---:|---:|---:|---:|---:|
{rows}

TNT is recipe="relative", the default; "paper's recipe" is recipe="paper", which follows the authors' released code.
Their training took 40 epochs of ImageNet on eight GPUs: what it gives after minutes on 1,000 photos says nothing about
that. What the authors reported is in their paper, not here.
""".replace("{{model}}", MODEL)


if __name__ == "__main__":
    tyro.cli(main)
