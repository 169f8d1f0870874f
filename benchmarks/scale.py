"""A thousand classes, the whole published recipe and two processes: what one gives, at a memory that does not grow.

python benchmarks/scale.py --out runs/scale

Writes docs/results/scale.md. The photos are made here: small JPEGs in a thousand class folders. Takes some minutes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import tyro
from PIL import Image
from safetensors.torch import save_file
from tqdm import tqdm

from stamps import written
from tntprune import UserError
from tntprune.system.environment import stamp
from tntprune.system.storage import read_weights, write

CLASSES, SIDE, MODEL = 1000, 48, "test_vit"
FEW, MANY = 2, 8  # photos a class
BATCH, PARTS, EPOCHS = 500, 2, 2
SIZE = ["--img-size", str(SIDE), str(SIDE)]
RECIPE = ["--at", "2", "--preset", "published", "--recipe", "paper", "--epochs", str(EPOCHS)]
RECIPE += ["--batch-size", str(BATCH), "--micro-batches", str(PARTS), "--save-every", "4"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
GROWTH = 10.0  # MiB, what four times as many photos may cost the largest process of a kind
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives the memory of freed batches back at once


class Done(NamedTuple):
    """A command that has ended: what it printed, its seconds, and the peak memory of its processes in MiB."""

    printed: dict[str, Any]
    seconds: float
    ranks: list[float]
    readers: list[float]


def make(folder: Path, first: int, last: int) -> Path:
    """Photos of these numbers in each class folder: noise around a colour of the class's own."""
    for number in range(CLASSES):
        place = folder / f"class {number:03}"
        place.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng((number, first))
        for photo in range(first, last):
            noise = generator.integers(-60, 61, (SIDE, SIDE, 3))
            colour = np.array([number % 10, number // 10 % 10, number // 100]) * 20 + 38
            Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8)).save(place / f"{photo}.jpg", quality=85)
    return folder


def run(arguments: list[Any], processes: int) -> Done:
    """Run a command, as a user would, and look at the memory of its processes while it works."""
    several = TORCHRUN if processes > 1 else []
    command = [sys.executable, *several, "-m", "tntprune", *map(str, arguments), "--json"]
    begin, peaks = time.perf_counter(), {}
    environment = {**os.environ, **GIVEN_BACK, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        ended = threading.Event()
        watcher = threading.Thread(target=watch, args=(process.pid, processes, peaks, ended))
        watcher.start()
        printed = process.communicate()[0]
        ended.set()
        watcher.join()
    if process.returncode:
        raise UserError(f"{' '.join(command)}: ended with {process.returncode}")
    ranks = sorted(peak for level, peak in peaks.values() if level == 0)
    readers = sorted(peak for level, peak in peaks.values() if level == 1)[-processes:]  # others come and go
    return Done(json.loads(printed), time.perf_counter() - begin, ranks, readers)


def watch(pid: int, processes: int, peaks: dict[int, tuple[int, float]], ended: threading.Event) -> None:
    """Note the peak of each process: of those that work together at level 0, of those that read for them at level 1."""
    while not ended.wait(0.1):
        ranks = [pid] if processes == 1 else children(pid)
        for level, family in enumerate([ranks, [child for rank in ranks for child in children(rank)]]):
            for one in family:
                peaks[one] = level, max(memory(one), peaks.get(one, (level, 0.0))[1])


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def memory(pid: int) -> float:
    """Return the memory of a process now, in MiB, without the pages of libraries, which vary at random."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1024


def log(out: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same(first: Path, second: Path) -> bool:
    """Tell whether two trainings left the same weights, averages and log."""
    pairs = [[read_weights(out / place / "reducer.safetensors") for out in (first, second)] for place in ("", "ema")]
    weights = all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)
    return weights and log(first) == log(second)


def main(out: Path, doc: Path = Path("docs/results/scale.md")) -> None:
    """Train and evaluate with one process and with two, and with four times as many photos, and write the page.

    Args:
        out: A folder for the photos and the trainings; there must be no trainings in it.
        doc: The page.
    """
    few = make(out / "few", 0, FEW)
    many = make(out / "many", 0, MANY)
    torch.manual_seed(0)
    weights = out / "weights.safetensors"
    save_file(timm.create_model(MODEL, img_size=SIDE).state_dict(), weights)
    model = [MODEL, *SIZE, "--weights", weights, "--workers", 1]

    def train(name: str, data: Path, processes: int) -> Done:
        return run(["train", *model, "--data", data, "--out", out / name, *RECIPE], processes)

    bar = tqdm(total=5, unit="command")
    found: dict[str, Done] = {}
    for name, data, processes in (("one", few, 1), ("two", few, 2), ("four times", many, 2)):
        found[name] = train(name, data, processes)
        bar.update()
    evaluate = ["eval", *model, "--data", few, "--reducer", out / "two", "--batch-size", 125]
    judged = []
    for processes in (1, 2):
        judged.append(run(evaluate, processes))
        bar.update()
    bar.close()
    losses = [line["loss"] for name in found for line in log(out / name)]
    figures = [{key: value for key, value in done.printed.items() if key != "images_per_s"} for done in judged]
    few_of = found["one"], found["two"]
    ranks = max(found["four times"].ranks) - max(peak for done in few_of for peak in done.ranks)
    readers = max(found["four times"].readers) - max(peak for done in few_of for peak in done.readers)
    checks = {
        "every loss is finite": all(map(math.isfinite, losses)),
        "two processes leave the log, the weights and the averages of one, bit for bit": same(out / "one", out / "two"),
        "two processes evaluate to the figures of one": figures[0] == figures[1],
        f"four times as many photos cost no process more than {GROWTH:.0f} MiB": max(ranks, readers) < GROWTH,
    }
    write(doc, page(found, judged, checks, len(log(out / "two")), len(log(out / "four times"))).encode())
    written(doc)
    print(doc)
    if not all(checks.values()):
        raise UserError(f"not so: {', '.join(name for name, holds in checks.items() if not holds)}")


def page(found: dict[str, Done], judged: list[Done], checks: dict[str, bool], steps: int, more: int) -> str:
    """Write docs/results/scale.md."""
    shown = {"one": (1, FEW, steps), "two": (2, FEW, steps), "four times": (2, MANY, more)}
    rows = "\n".join(
        f"| {processes} | {photos * CLASSES:,} | {count} | {found[name].seconds:.0f} | {mib(found[name].ranks)} "
        f"| {mib(found[name].readers)} |"
        for name, (processes, photos, count) in shown.items()
    )
    told = "\n".join(f"* {'Yes' if holds else '**No**'}: {name}." for name, holds in checks.items())
    held = (MANY - FEW) * CLASSES * 3 * SIDE**2 * 4 / 2**20
    given = " ".join(f"{name}={value}" for name, value in GIVEN_BACK.items())
    return f"""# A thousand classes in two processes

`python benchmarks/scale.py --out runs/scale` trains TNT on small JPEGs of {CLASSES:,} classes: `{MODEL}` ({SIDE} x {SIDE} pixels)
with the authors' full recipe, {EPOCHS} epochs, {BATCH} photos per step, {PARTS} micro-batches.

```
torchrun --nproc-per-node 2 -m tntprune train {MODEL} --data DIR --out RUN \\
    {" ".join(RECIPE)}
torchrun --nproc-per-node 2 -m tntprune eval {MODEL} --data DIR --reducer RUN
```

{told}

| processes | photos | steps | seconds | MiB per process | MiB per reader process |
|---:|---:|---:|---:|---:|---:|
{rows}

Evaluating {judged[0].printed["images"]:,} photos took {judged[0].seconds:.0f} s with one process and
{judged[1].seconds:.0f} s with two. Memory: peak without mapped library files, with {given}
(glibc keeps freed memory otherwise). {(MANY - FEW) * CLASSES:,} more photos in memory would take {held:.0f} MiB.

Measured on {stamp()}.
"""


def mib(peaks: list[float]) -> str:
    return ", ".join(f"{peak:.0f}" for peak in peaks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
