"""What a latency curve predicts, and what `tntprune bench` then measures. Writes docs/results/latency.md.

python benchmarks/latency.py

ViT-Tiny with random weights, which take as long as any. For each batch size and method a curve is measured first, and
then the benchmark is run, on other reduced models than those that the curve has seen.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import tyro
from tqdm import tqdm

from stamps import written
from tntprune import TNT, Random, ToMe
from tntprune.backbones.models import random_model
from tntprune.bench.benchmark import bench
from tntprune.bench.candidates import described
from tntprune.methods import Config
from tntprune.search.timing import measure_latency
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODEL = "vit_tiny_patch16_224"
WANTED = 10  # percent that a prediction may be off


def falling(r: int) -> tuple[int, ...]:
    """Count the 196 patch tokens that ToMe leaves after each of 12 blocks, where r go in each."""
    return tuple(196 - r * block for block in range(1, 13))


DROPS = TNT(recipe="relative")
METHODS: dict[Config, list[Config]] = {  # what a curve is measured with, to what is predicted with it
    TNT(at=2, keep=0.5): [
        TNT(at=3, keep=0.5), TNT(at=(3, 4, 5), keep=0.7), TNT(at=(3, 4, 5), tokens=(150, 101, 67)),
        TNT(at=3, keep=0.25),
    ],
    DROPS.changed(at=2, keep=0.5): [
        DROPS.changed(at=3, keep=0.5), DROPS.changed(at=3, keep=0.5, similar=25), DROPS.changed(at=(3, 4, 5), keep=0.7),
    ],
    Random(at=2, keep=0.5): [Random(at=3, keep=0.5), Random(at=(3, 4, 5), keep=0.7)],
    ToMe(r=10): [ToMe(tokens=falling(8)), ToMe(tokens=falling(13)), ToMe(at=(2, 4, 6, 8), tokens=(160, 120, 90, 70))],
}  # fmt: skip


def main(
    batch_sizes: tuple[int, ...] = (1, 8),
    dtype: str = "fp32",
    seconds: float = 60.0,
    rounds: int = 20,
    page: Path = Path("docs/results/latency.md"),
) -> None:
    """Measure the curves, predict, measure, and write the page.

    Args:
        batch_sizes: Images at a time.
        dtype: Of weights and images.
        seconds: That a curve may take, about.
        rounds: Passes of each reduced model in the benchmark.
        page: The page to write.
    """
    model = random_model(MODEL)
    lines, notes, took, slow = [], [], [], []
    times: list[bool] = []  # whether each is near enough
    ratios: list[bool] = []
    for batch in batch_sizes:
        for number, (measured, configs) in enumerate(METHODS.items()):
            begin = perf_counter()
            curve = measure_latency(model, measured, batch_size=batch, dtype=dtype, seconds=seconds)
            took.append(perf_counter() - begin)
            predicted = [curve.predict(config) for config in configs]
            found = bench(model, configs, batch_sizes=(batch,), dtypes=(dtype,), rounds=rounds)  # type: ignore[arg-type]
            notes += [note for note in found.notes if note not in notes]
            rows = {row.options: row for row in found.results if row.method == configs[0].method}
            base = next(row for row in found.results if row.method == "unpruned")
            if not number:
                slow.append(f"| {batch} | {_slower(curve.slower())} |")
            for name, seconds_, row in [("unpruned", curve.unpruned, base)] + [
                (described(config), told, rows[described(config)])
                for config, told in zip(configs, predicted, strict=True)
            ]:
                off = 100 * (1000 * seconds_ / row.median_ms - 1)
                speed = row.speedup or 1.0
                times.append(abs(off) <= WANTED)
                if row is not base:
                    ratios.append(abs(100 * (curve.unpruned / seconds_ / speed - 1)) <= WANTED)
                lines.append(
                    f"| {batch} | {name} | {1000 * seconds_:.1f} | {row.median_ms:.1f} | {off:+.1f} % | "
                    f"{curve.unpruned / seconds_:.2f} | {speed:.2f} |"
                )
                tqdm.write(lines[-1])
    text = PAGE.format(
        model=MODEL, rows="\n".join(lines), stamp=stamp(), dtype=dtype, rounds=rounds,
        seconds=seconds, longest=max(took),
        slower="\n".join(slow), notes="\n\n".join(notes), wanted=WANTED,
        near=f"{sum(times)} of {len(times)} times and {sum(ratios)} of {len(ratios)} speed-ups",
    )  # fmt: skip
    write(page, (text.rstrip() + "\n").encode())
    written(page)


def _slower(counts: dict[int, int]) -> str:
    """Numbers of tokens that are slower than larger ones, neighbours as a range."""
    spans: list[list[int]] = []  # first, last, the faster number
    for count, larger in sorted(counts.items()):
        if spans and spans[-1][1:] == [count - 1, larger]:
            spans[-1][1] = count
        else:
            spans.append([count, count, larger])
    told = [
        f"{first}-{last} than {larger}" if first < last else f"{first} than {larger}" for first, last, larger in spans
    ]
    return ", ".join(told) or "none"


PAGE = """# Latency: predicted and measured

`tntprune search --latency` predicts times from a table of times per block. `tntprune bench` measured them: `{model}` with random weights,
{dtype}, eager, {rounds} rounds. Measuring one table took at most {longest:.0f} s. Predictions within {wanted} %: {near}.

Written by `python benchmarks/latency.py --seconds {seconds:g}` on {stamp}.

| batch | reduction | predicted ms | measured ms | error | predicted speed-up | measured speed-up |
|---:|---|---:|---:|---:|---:|---:|
{rows}

An error of "unpruned" means that the machine changed its speed in between: compare the speed-ups then.

| batch | patch tokens that take at least 3 % longer than a larger number |
|---:|---|
{slower}

{notes}
"""


if __name__ == "__main__":
    tyro.cli(main)
