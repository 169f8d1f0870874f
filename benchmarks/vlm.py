"""Train a tiny LLaVA, and measure its answers with fewer visual tokens.

python benchmarks/vlm.py --out runs/vlm

Trains a ViT tower and a Llama-like decoder, in transformers' classes, to answer questions about cluttered digits: about ten
minutes of one processor. Then it writes docs/results/vlm.md: how well it still counts with a half and a quarter of the
visual tokens. Nothing is chosen on the pictures that are counted; TNT is calibrated on other pictures, without answers.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from stamps import written
from tntprune import TNT, Random, ToMe, TopK, calibrate_, load_, macs, reduce_, save
from tntprune.backbones.digits_vit import digits_vit
from tntprune.demo.digits import CANVAS, FRAGMENT, FRAGMENTS, normalise, paste, scans
from tntprune.system.environment import stamp

COLUMNS, DIGIT = 3, 20  # at most one digit in each column; pixels
SIDE, PATCH, WIDTH, DEPTH, AT = CANVAS, 8, 64, 6, 3
PATCHES = (SIDE // PATCH) ** 2
WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<image>",
    *"0123456789",
    "one",
    "two",
    "three",
    "left",
    "right",
    "count",
    "of",
    "all",
    "?",
]
TOKEN = {word: number for number, word in enumerate(WORDS)}
COUNTS = ("one", "two", "three")
QUESTIONS = ("left", "right", "count")
RATES = (50, 25)  # percent of the visual tokens
OUTPUTS = ("tokens", "grid")
ROOT = Path(__file__).parents[1]
TOKENS = {"image_token_id": TOKEN["<image>"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def build() -> LlavaForConditionalGeneration:
    """Make the model: its tower has the weights of the demo's ViT, which knows a single digit; the rest is random."""
    vision = {
        "model_type": "vit", "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
        "intermediate_size": 2 * WIDTH, "image_size": SIDE, "patch_size": PATCH, "num_channels": 1,
        "layer_norm_eps": 1e-6,
    }  # fmt: skip
    text = {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 3 * WIDTH, "vocab_size": len(WORDS), "max_position_embeddings": 256,
    }  # fmt: skip
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config={**text, **TOKENS}, vision_feature_layer=-1, **TOKENS)
    )
    tower, own = model.model.vision_tower, digits_vit().state_dict()
    names = {"embeddings.cls_token": "cls_token", "embeddings.position_embeddings": "pos_embed"}
    parts = {"embeddings.patch_embeddings.projection": "patch_embed.proj", "layernorm": "norm"}
    for number in range(DEPTH):
        parts |= {f"layers.{number}.{new}": f"blocks.{number}.{old}" for new, old in {
            "layernorm_before": "norm1", "layernorm_after": "norm2", "attention.o_proj": "attn.proj",
            "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
        }.items()}  # fmt: skip
        for kind in ("weight", "bias"):
            for letter, third in zip("qkv", own[f"blocks.{number}.attn.qkv.{kind}"].chunk(3), strict=True):
                own[f"blocks.{number}.attn.{letter}.{kind}"] = third
            parts |= {f"layers.{number}.attention.{one}_proj": f"blocks.{number}.attn.{one}" for one in "qkv"}
    names |= {f"{new}.{kind}": f"{old}.{kind}" for new, old in parts.items() for kind in ("weight", "bias")}
    left = tower.load_state_dict({new: own[old] for new, old in names.items()}, strict=False)
    assert not left.unexpected_keys and all(name.startswith("pooler") for name in left.missing_keys)
    return model


@dataclass
class Scenes:
    """Pictures with the digits on them.

    Args:
        pictures: (n, 1, 64, 64), normalised.
        digits: (n, 3), the digit in each column, or -1.
        patches: (n, 64), the digit on each patch, or 10.
    """

    pictures: torch.Tensor
    digits: torch.Tensor
    patches: torch.Tensor


class Maker:
    """Makes scenes of the scans of one split, by a seed."""

    def __init__(self, split: Literal["train", "test"], seed: int) -> None:
        images, labels = scans(split)
        self.images = [images[labels == digit] for digit in range(10)]
        self.everything = images
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator)

    def __call__(self, n: int) -> Scenes:
        there = self.uniform(n, COLUMNS).argsort(1) < self.number(1, COLUMNS + 1, n, 1)  # (n, 3), one to three columns
        digits = self.uniform(n, 10).argsort(1)[:, :COLUMNS]  # all different
        canvas = torch.zeros(n, 1, SIDE, SIDE)
        patches = torch.full((n, PATCHES), 10)
        middle = (torch.arange(SIDE // PATCH) + 0.5) * PATCH
        for column in range(COLUMNS):
            chosen = torch.stack([
                self.images[d][int(self.number(0, len(self.images[d]), 1))] for d in digits[:, column].tolist()
            ])  # fmt: skip
            x = column * (SIDE // COLUMNS) + self.number(0, 3, n)
            y = self.number(0, SIDE - DIGIT + 1, n)
            angle = (self.uniform(n) - 0.5) * 0.2
            drawn = paste(chosen, torch.stack([x, y], 1).float(), torch.full((n,), float(DIGIT)), angle)
            canvas = torch.maximum(canvas, drawn * there[:, column, None, None, None])
            rows = (middle > y[:, None]) & (middle < y[:, None] + DIGIT)
            columns = (middle > x[:, None]) & (middle < x[:, None] + DIGIT)
            inside = (rows[:, :, None] & columns[:, None] & there[:, column, None, None]).flatten(1)
            patches = torch.where(inside, digits[:, column, None], patches)
        for _ in range(FRAGMENTS):
            other = self.everything[self.number(0, len(self.everything), n)]
            big = F.interpolate(other, size=(DIGIT, DIGIT), mode="bilinear", align_corners=False)
            cut = int(self.number(0, DIGIT - FRAGMENT + 1, 1))
            where = self.number(0, SIDE - FRAGMENT + 1, n, 2).float()
            size = torch.full((n,), float(FRAGMENT))
            canvas = torch.maximum(
                canvas, paste(big[:, :, cut : cut + FRAGMENT, cut : cut + FRAGMENT], where, size, size * 0)
            )
        return Scenes(normalise(canvas), torch.where(there, digits, -1), patches)

    def question(self, digits: list[int], kind: str) -> tuple[list[int], int]:
        """Return the tokens of a question about one scene, and of its answer."""
        seen = [digit for digit in digits if digit >= 0]
        if kind == "count" or len(seen) == 1:
            return [TOKEN["count"], TOKEN["all"], TOKEN["?"]], TOKEN[COUNTS[len(seen) - 1]]
        place = int(self.number(1, len(seen), 1)) if kind == "left" else int(self.number(0, len(seen) - 1, 1))
        answer = seen[place - 1] if kind == "left" else seen[place + 1]
        return [TOKEN[kind], TOKEN[str(seen[place])], TOKEN["?"]], TOKEN[str(answer)]


def prompt(questions: list[list[int]]) -> torch.Tensor:
    """Prompts with one question behind a picture."""
    start = [1] + [TOKEN["<image>"]] * PATCHES
    return torch.tensor([start + question for question in questions])


def packed(maker: Maker, scenes: Scenes, each: int) -> dict[str, torch.Tensor]:
    """Prompts with several questions behind a picture, none of which sees another, and the answers as labels."""
    length, first = 4, 1 + PATCHES
    asked = [[q for _ in range(each) for q in (maker.question(row, QUESTIONS[int(maker.number(0, 3, 1))]),)]
             for row in scenes.digits.tolist()]  # fmt: skip
    text = torch.tensor([[token for words, answer in row for token in (*words, answer)] for row in asked])
    ids = torch.cat([torch.tensor([1] + [TOKEN["<image>"]] * PATCHES).expand(len(text), -1), text], 1)
    part = torch.cat([torch.zeros(first), 1 + torch.arange(each).repeat_interleave(length)])
    sees = ((part[:, None] == part) | (part == 0)) & torch.ones(len(part), len(part)).tril().bool()
    positions = torch.cat([torch.arange(first), first + torch.arange(length).repeat(each)])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < first, -100)
    labels[:, first::length] = -100  # nobody can know which question comes
    return {
        "input_ids": ids, "attention_mask": sees.expand(len(ids), 1, -1, -1), "labels": labels,
        "position_ids": positions.expand(len(ids), -1), "pixel_values": scenes.pictures,
    }  # fmt: skip


def train(out: Path, steps: int, batch: int, each: int, lr: float) -> dict[str, Any]:
    """Train the model from random weights; the tower also learns to name the digit on each patch."""
    torch.manual_seed(0)
    model, maker, names = build(), Maker("train", 0), nn.Linear(WIDTH, 11)
    tower = list(model.model.vision_tower.parameters())
    rest = [p for p in (*model.parameters(), *names.parameters()) if all(p is not one for one in tower)]
    parameters = [*tower, *rest]
    optimizer = torch.optim.AdamW([{"params": tower}, {"params": rest}], weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [lr / 4, lr], steps, pct_start=0.1)
    begin, shown = time.perf_counter(), []
    for step in range(steps):
        scenes = maker(batch)
        out_ = model(**packed(maker, scenes, each), use_cache=False)
        named = names(out_.image_outputs.hidden_states[-1][:, 1:])
        loss = out_.loss + F.cross_entropy(named.flatten(0, 1), scenes.patches.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            shown.append((step + 1, round(out_.loss.item(), 3)))
            print(
                f"step {step + 1}: {shown[-1][1]} + {loss.item() - out_.loss.item():.3f}, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
    model.eval().save_pretrained(out / "model")
    told = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "batch": batch,
        "seconds": round(time.perf_counter() - begin),
        "losses": shown,
    }
    (out / "training.json").write_text(json.dumps(told))
    return told


@dataclass
class Questions:
    """Prompts of one question each, with their answers."""

    batches: list[dict[str, torch.Tensor]]
    answers: list[torch.Tensor]
    kinds: list[str]


def ask(split: Literal["train", "test"], seed: int, count: int, batch: int, *kinds: str) -> Questions:
    """Pictures of one split with a question each, of these kinds in turn; with one digit only how many there are."""
    maker, batches, answers, asked_kinds = Maker(split, seed), [], [], []
    for _ in range(count // batch):
        scenes = maker(batch)
        rows = scenes.digits.tolist()
        wanted = [
            kinds[number % len(kinds)] if sum(d >= 0 for d in row) > 1 else "count" for number, row in enumerate(rows)
        ]
        asked = [maker.question(row, kind) for row, kind in zip(rows, wanted, strict=True)]
        batches.append({"input_ids": prompt([words for words, _ in asked]), "pixel_values": scenes.pictures})
        answers.append(torch.tensor([answer for _, answer in asked]))
        asked_kinds += wanted
    return Questions(batches, answers, asked_kinds)


@torch.inference_mode()
def accuracy(model: Any, asked: Questions) -> dict[str, float]:
    """Percent of the questions that are answered right, of all and of each kind, and that are answered "three"."""
    said = torch.cat([model(**batch, logits_to_keep=1).logits[:, -1].argmax(1) for batch in asked.batches])
    right = said == torch.cat(asked.answers)
    found = {"all": right.float().mean().item() * 100, "three": (said == TOKEN["three"]).float().mean().item() * 100}
    for kind in dict.fromkeys(asked.kinds):
        found[kind] = right[torch.tensor([one == kind for one in asked.kinds])].float().mean().item() * 100
    return found


def fresh(out: Path) -> Any:
    """Load the trained model, not reduced."""
    return LlavaForConditionalGeneration.from_pretrained(out / "model").eval()


def configs(percent: int) -> dict[str, Any]:
    """Return each method's config that leaves so many percent of the visual tokens; TNT's and random drop's act at one block."""
    keep = percent / 100
    gone = round(PATCHES * (1 - keep) / (DEPTH - 2))  # ToMe merges after all but the last two blocks
    return {
        "TNT": TNT(at=AT, keep=keep),
        "random": Random(at=AT, keep=keep),
        "ToMe": ToMe(at=tuple(range(1, DEPTH - 1)), r=gone),
        "Top-K": TopK(at=AT, keep=keep),
    }


def measure(out: Path, seeds: int, images: int, epochs: int) -> dict[str, Any]:
    """Accuracy of every method at every rate, on pictures of scans that no training has seen."""
    test, own = ask("test", 7, images, 250, "count"), ask("train", 11, 640, 32, "count")
    full = fresh(out)
    rows: dict[str, Any] = {"full": accuracy(full, test), "macs": {"100": counted(full)}}
    rows["mixed"] = accuracy(full, ask("test", 8, 1000, 250, "left", "right"))
    print("full", rows["full"], flush=True)
    for seed in range(seeds):
        begin = time.perf_counter()
        model = reduce_(fresh(out), TNT(at=AT, keep=0.25), output="tokens")
        calibrate_(model, own.batches, epochs=epochs, seed=seed, progress=False)
        save(model, out / f"tnt{seed}")
        rows["calibration"] = {"seconds": round(time.perf_counter() - begin), "steps": epochs * len(own.batches)}
    for output in OUTPUTS:
        for percent in RATES:
            row: dict[str, list[dict[str, float]]] = {}
            for name, config in configs(percent).items():
                if name == "TNT":
                    sources = (out / f"tnt{seed}" for seed in range(seeds))
                    reduced = (load_(fresh(out), one, keep=percent / 100, output=output) for one in sources)
                else:
                    turns = [config.changed(order=seed) for seed in range(3)] if name == "random" else [config]
                    reduced = (reduce_(fresh(out), one, output=output) for one in turns)
                row[name] = []
                for model in reduced:
                    rows["macs"][f"{output}{percent}{name}"] = counted(model)
                    row[name].append(accuracy(model, test))
            rows[f"{output}{percent}"] = row
            print(output, percent, {name: [round(one["all"], 1) for one in found] for name, found in row.items()})
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


def page(rows: dict[str, Any], training: dict[str, Any], images: int, seeds: int) -> str:
    """Write the page of docs/."""
    least, names = RATES[-1], list(configs(RATES[-1]))
    table = [f"| `output` | visual tokens | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    table.append(f"| | 100 % ({PATCHES}) |" + f" {rows['full']['all']:.1f} |" * len(names))
    for output in OUTPUTS:
        for percent in RATES:
            cells = " | ".join(spread(rows[f"{output}{percent}"][name]) for name in names)
            table.append(f"| `{output}` | {percent} % ({round(PATCHES * percent / 100)}) | {cells} |")
    whole, part = rows["macs"]["100"], rows["macs"][f"tokens{least}TNT"]
    row = rows[f"tokens{least}"]
    lost = rows["full"]["all"] - mean(row["TNT"])
    best = max(mean(row[name]) for name in names if name != "TNT")
    met = "met" if lost <= 2 and mean(row["TNT"]) > best else "**not met**"
    verdict = f"Goal for TNT with `tokens` at {least} %: lose at most 2 points and beat the others. It loses {lost:.1f} points: {met}."
    return f"""# A vision-language model with fewer visual tokens

`python benchmarks/vlm.py --out runs/vlm` trains a tiny LLaVA (ViT tower from the demo's weights, Llama-like decoder): {training["parameters"]:,} parameters,
{training["steps"]} steps of {training["batch"]} pictures, {training["seconds"]} s. A picture (64 x 64 pixels, {PATCHES} visual tokens) shows one to three handwritten digits
among fragments of others. Percent of {images:,} pictures of other scans whose digits it counts right, by
[`output`](../guides/vision-language.md):

{chr(10).join(table)}

{verdict}

The unpruned model answers "three" for {rows["full"]["three"]:.0f} % of the pictures; with {least} % of the tokens it is {mean(row["TNT"], "three"):.0f} % with TNT, {mean(row["Top-K"], "three"):.0f} % with Top-K,
{mean(row["ToMe"], "three"):.0f} % with ToMe and {mean(row["random"], "three"):.0f} % with random drop. The model seems to count by the share of visual tokens that show digits;
methods that drop the clutter raise that share.

Means over {seeds} seeds of TNT and 3 of random drop (least to most). ToMe acts at blocks 1 to {DEPTH - 2}, the others at block {AT} of {DEPTH}. TNT was
calibrated on 640 other pictures without answers ({rows["calibration"]["steps"]} steps, {rows["calibration"]["seconds"]} s).

A prompt at {least} %, with all tokens in brackets: {part["tower"] / 1e6:.1f} ({whole["tower"] / 1e6:.1f}) MMACs in the tower, {part["prefill"] / 1e6:.1f} ({whole["prefill"] / 1e6:.1f}) in the
language model, {part["cache"] / 1024:.0f} ({whole["cache"] / 1024:.0f}) KiB of cache.

**Limits.** The model has not learned to tell which digit is left or right of another one:
{rows["mixed"]["left"]:.0f} and {rows["mixed"]["right"]:.0f} % right, unpruned. One model and one question do not compare methods.

Measured on {stamp()}, beside other work.
"""


def main(out: Path, steps: int = 600, batch: int = 64, each: int = 6, lr: float = 3e-3, seeds: int = 2,
         images: int = 1500, epochs: int = 6, threads: int = 1, doc: Path = ROOT / "docs/results/vlm.md") -> None:  # fmt: skip
    """Train the model unless OUT has it, measure, and write docs/results/vlm.md."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    told = out / "training.json"
    training = json.loads(told.read_text()) if told.exists() else train(out, steps, batch, each, lr)
    doc.write_text(page(measure(out, seeds, images, epochs), training, images, seeds))
    written(doc)


if __name__ == "__main__":
    tyro.cli(main)
