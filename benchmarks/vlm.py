"""Measure a tiny LLaVA's answers with fewer visual tokens.

python benchmarks/vlm.py --out runs/vlm            # with the committed weights
python benchmarks/vlm.py --out runs/vlm --anew     # train it first: see vlm_model.py
python benchmarks/vlm.py --out runs/vlm --anew --commit-weights

Writes docs/results/vlm.md. Nothing is chosen on the pictures that are counted; TNT is calibrated on other pictures, without
answers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import tyro

from stamps import written
from tntprune import TNT, Random, ToMe, TopK, calibrate_, load_, macs, reduce_, save
from tntprune.system.environment import stamp
from vlm_model import (
    DEPTH,
    LAYERS,
    PATCHES,
    QUESTIONS,
    VALIDATION,
    WEIGHTS,
    Questions,
    accuracy,
    ask,
    load,
    publish,
    train,
)

AT = 3  # the block of the tower at which tokens go
RATES = (50, 25)  # percent of the visual tokens
OUTPUTS = ("tokens", "grid")
FASTV = "FastV"
ROOT = Path(__file__).parents[1]


def configs(percent: int) -> dict[str, Any]:
    """Return each method's config that leaves so many percent of the visual tokens; all but ToMe act at one block."""
    keep = percent / 100
    gone = round(PATCHES * (1 - keep) / (DEPTH - 2))  # ToMe merges after all but the last two blocks
    return {
        "TNT": TNT(at=AT, keep=keep),
        "random": Random(at=AT, keep=keep),
        "ToMe": ToMe(at=tuple(range(1, DEPTH - 1)), r=gone),
        "Top-K": TopK(at=AT, keep=keep),
    }


class FastV:
    """The unpruned model, whose language model goes on behind its first block with the visual tokens that the last word
    attends to most there, averaged over heads.

    Tokens that went are hidden by a mask, which gives the same answers and saves nothing.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        model.set_attn_implementation("eager")
        self.model, self.tokens, self.mask = model, tokens, torch.empty(0)
        for layer in model.model.language_model.layers[1:]:
            layer.register_forward_pre_hook(self._hide, with_kwargs=True)

    def _hide(self, layer: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "attention_mask": given["attention_mask"] + self.mask}

    def __call__(self, input_ids: torch.Tensor, **given: Any) -> Any:
        visual = input_ids == self.model.config.image_token_id  # (n, length)
        self.mask = torch.zeros(1)
        first = self.model(input_ids=input_ids, output_attentions=True, **given).attentions[
            0
        ]  # (n, heads, length, length)
        received = first.mean(1)[:, -1].masked_fill(~visual, -1)
        kept = torch.zeros_like(visual).scatter(1, received.topk(self.tokens, 1).indices, True)
        self.mask = torch.zeros(visual.shape).masked_fill(visual & ~kept, torch.finfo().min / 2)[:, None, None]
        return self.model(input_ids=input_ids, **given)


def calibrated(source: Path, folder: Path, seed: int, own: Questions, epochs: int) -> dict[str, int]:
    """Calibrate TNT for a quarter of the tokens unless `folder` has it; return the steps and seconds that it took."""
    told = folder.with_suffix(".json")
    if not told.exists():
        begin = time.perf_counter()
        model = reduce_(load(source), TNT(at=AT, keep=0.25), output="tokens")
        calibrate_(model, own.batches, epochs=epochs, seed=seed, progress=False)
        save(model, folder)
        seconds = round(time.perf_counter() - begin)
        told.write_text(json.dumps({"seconds": seconds, "steps": epochs * len(own.batches)}))
    found: dict[str, int] = json.loads(told.read_text())
    return found


def measure(source: Path, out: Path, seeds: int, images: int, pictures: int, epochs: int) -> dict[str, Any]:
    """Accuracy of every method at every rate, on pictures of scans that no training has seen."""
    test, own = ask("test", 7, images, 250), ask("train", 11, pictures, 32)
    full = load(source)
    rows: dict[str, Any] = {"full": accuracy(full, test), "macs": {"100": counted(full)}}
    print("full", rows["full"], flush=True)
    rows["calibration"] = [calibrated(source, out / f"tnt{seed}", seed, own, epochs) for seed in range(seeds)]
    for output in OUTPUTS:
        for percent in RATES:
            row: dict[str, list[dict[str, float]]] = {name: [] for name in configs(percent)}
            for name, config in configs(percent).items():
                if name == "TNT":
                    files = (out / f"tnt{seed}" for seed in range(seeds))
                    reduced = (load_(load(source), one, keep=percent / 100, output=output) for one in files)
                else:
                    turns = [config.changed(order=seed) for seed in range(seeds)] if name == "random" else [config]
                    reduced = (reduce_(load(source), one, output=output) for one in turns)
                for model in reduced:
                    rows["macs"][f"{output}{percent}{name}"] = counted(model)
                    row[name].append(accuracy(model, test))
                print(output, percent, name, [round(one["all"], 1) for one in row[name]], flush=True)
            if output == "tokens":
                row[FASTV] = [accuracy(FastV(load(source), round(PATCHES * percent / 100)), test)]
                print(output, percent, FASTV, round(row[FASTV][0]["all"], 1), flush=True)
            rows[f"{output}{percent}"] = row
    (out / "rows.json").write_text(json.dumps(rows))
    return rows


def counted(model: Any) -> dict[str, int]:
    """Count the cost of a prompt with one question."""
    found: Any = macs(model, text=4)
    return {"tower": found.tower, "prefill": found.prefill, "visual": found.visual, "cache": found.cache}


def mean(found: list[dict[str, float]], kind: str = "all") -> float:
    return sum(one[kind] for one in found) / len(found)


def spread(found: list[dict[str, float]]) -> str:
    """Return the mean of all questions, and how far the seeds are apart."""
    low, high = (extreme(one["all"] for one in found) for extreme in (min, max))
    return f"{mean(found):.1f}" + (f" ({low:.1f} to {high:.1f})" if len(found) > 1 else "")


def page(rows: dict[str, Any], training: dict[str, Any], images: int, seeds: int, pictures: int) -> str:
    """Write the page of docs/."""
    least, names = RATES[-1], [*configs(RATES[-1]), FASTV]
    table = [f"| `output` | visual tokens | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    table.append(f"| | 100 % ({PATCHES}) |" + f" {rows['full']['all']:.1f} |" * len(names))
    for output in OUTPUTS:
        for percent in RATES:
            row = rows[f"{output}{percent}"]
            cells = " | ".join(spread(row[name]) if name in row else "" for name in names)
            table.append(f"| `{output}` | {percent} % ({round(PATCHES * percent / 100)}) | {cells} |")
    row = rows[f"tokens{least}"]
    kinds = [f"| `tokens`, {least} % | all tokens | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for kind in QUESTIONS:
        cells = " | ".join(f"{mean(row[name], kind):.1f}" for name in names)
        kinds.append(f"| {kind} | {rows['full'][kind]:.1f} | {cells} |")
    whole, part = rows["macs"]["100"], rows["macs"][f"tokens{least}TNT"]
    behind = whole["prefill"] / LAYERS + part["prefill"] * (1 - 1 / LAYERS)  # FastV's first block has all tokens
    lost = rows["full"]["all"] - mean(row["TNT"])
    ahead = {name: mean(row["TNT"]) - mean(row[name]) for name in names if name != "TNT"}
    met = "met" if all(value > 0 for value in ahead.values()) else "**not met**"
    told = ", ".join(f"{value:+.1f} against {name}" for name, value in ahead.items())
    verdict = (
        f"Goal for TNT with `tokens` at {least} %: lose at most 2 points ({'met' if lost <= 2 else '**not met**'}: {lost:.1f}) and "
        f"beat the others ({met}: {told})."
    )
    return f"""# A vision-language model with fewer visual tokens

`python benchmarks/vlm.py --out runs/vlm` measures a tiny LLaVA: a CLIP-like tower that begins with the demo's weights, and a Llama-like
decoder; {training["parameters"]:,} parameters. Its weights are in `benchmarks/weights/vlm`, from a prototype of the training that `--anew` runs: {training["regions"]:,} steps in which
the tower names the digits at, left and right of each patch, then {training["steps"]} in which the whole model reads all digits and
answers questions ({training["batch"]} pictures a step, {training["seconds"]} s in all). It never saw pictures with tokens missing.

A picture (64 x 64 pixels, {PATCHES} visual tokens) shows one to three handwritten digits among fragments of others. Questions: which digit is
left of the 7, right of it, how many digits. Percent of {images:,} questions about scans that no training saw that are answered right, by
[`output`](../guides/vision-language.md):

{chr(10).join(table)}

{verdict}

By question:

{chr(10).join(kinds)}

Means over {seeds} seeds of TNT and of random drop (least to most). ToMe acts at blocks 1 to {DEPTH - 2} of the tower's {DEPTH}, FastV behind the
first block of the language model (so it saves nothing in the tower), the others at block {AT}. TNT was calibrated on {pictures:,} other pictures without
answers ({rows["calibration"][0]["steps"]} steps, {rows["calibration"][0]["seconds"]} s). Settings were chosen on {VALIDATION} further scans.

MMACs of a prompt with all tokens: {whole["tower"] / 1e6:.1f} in the tower, {whole["prefill"] / 1e6:.1f} in the language model. At {least} %: {part["tower"] / 1e6:.1f} and {part["prefill"] / 1e6:.1f} with TNT,
{whole["tower"] / 1e6:.1f} and {behind / 1e6:.1f} with FastV. Cache with TNT: {part["cache"] / 1024:.0f} of {whole["cache"] / 1024:.0f} KiB.

**Limits.** One small model. A picture of one digit is only asked how many there are, so that count weighs more than a third.

Measured on {stamp()}, beside other work.
"""


def main(out: Path, anew: bool = False, commit_weights: bool = False, regions: int = 1200, steps: int = 600, batch: int = 64,
         each: int = 6, lr: float = 2e-3, seeds: int = 3, images: int = 1500, pictures: int = 1920, epochs: int = 3, threads: int = 1,
         doc: Path = ROOT / "docs/results/vlm.md") -> None:  # fmt: skip
    """Measure the committed model, or one trained anew, and write docs/results/vlm.md.

    Args:
        out: For calibrated scorers, rows, and a model trained anew.
        anew: Train the model first, unless OUT has it.
        commit_weights: Make that model the committed one.
        regions: Steps of the tower alone.
        steps: Of the whole model.
        batch: Pictures in a step.
        each: Questions about a picture in training.
        lr: The highest rate.
        seeds: Calibrations of TNT, and random drops.
        images: Test pictures, a multiple of 250.
        pictures: Of the calibration.
        epochs: Of the calibration.
        threads: Of the processor.
        doc: The page.
    """
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    if anew and not (out / "model" / "training.json").exists():
        train(out, regions, steps, batch, each, lr)
    if anew and commit_weights:
        publish(out)
    source = out / "model" if anew else WEIGHTS
    training = json.loads((source / "training.json").read_text())
    doc.write_text(page(measure(source, out, seeds, images, pictures, epochs), training, images, seeds, pictures))
    written(doc)


if __name__ == "__main__":
    tyro.cli(main)
