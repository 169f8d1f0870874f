"""A tiny LLaVA of our own, and what it still answers with fewer visual tokens.

python benchmarks/vlm.py --out runs/vlm

Trains a CLIP-like tower and a Llama-like decoder, in transformers' classes, to answer questions about cluttered digits:
about 20 minutes of two processors. Then it writes docs/results/vlm.md: accuracy with a half and a quarter of the visual
tokens. Nothing is chosen on the pictures that are counted; TNT is calibrated on other pictures, without answers.
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
from tntprune.demo.digits import CANVAS, FRAGMENT, FRAGMENTS, normalise, paste, scans
from tntprune.system.environment import stamp

COLUMNS, DIGIT = 3, 20  # at most one digit in each column; pixels
SIDE, PATCH, DEPTH, AT = CANVAS, 8, 5, 3
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
TOKENS = {"image_token_id": TOKEN["<image>"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def build() -> LlavaForConditionalGeneration:
    """The model with random weights."""
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 96, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
        "intermediate_size": 288, "image_size": SIDE, "patch_size": PATCH, "num_channels": 1, "hidden_act": "gelu",
    }  # fmt: skip
    text = {
        "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 256, "vocab_size": len(WORDS), "max_position_embeddings": 256,
    }  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config={**text, **TOKENS}, vision_feature_layer=-1, **TOKENS)
    )


@dataclass
class Scenes:
    """Pictures with what is on them.

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
        """The tokens of a question about one scene, and of its answer."""
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
    model, maker, names = build(), Maker("train", 0), nn.Linear(96, 11)
    parameters = [*model.parameters(), *names.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
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
    told = {"steps": steps, "batch": batch, "seconds": round(time.perf_counter() - begin), "losses": shown}
    (out / "training.json").write_text(json.dumps(told))
    return told


@dataclass
class Questions:
    """Prompts of one question each, with their answers."""

    batches: list[dict[str, torch.Tensor]]
    answers: list[torch.Tensor]
    kinds: list[str]


def ask(split: Literal["train", "test"], seed: int, count: int, batch: int) -> Questions:
    """Pictures of one split with a question each, of every kind in turn."""
    maker, batches, answers, kinds = Maker(split, seed), [], [], []
    for _ in range(count // batch):
        scenes = maker(batch)
        several = [(row, sum(d >= 0 for d in row) > 1) for row in scenes.digits.tolist()]
        wanted = [QUESTIONS[number % 3] if more else "count" for number, (_, more) in enumerate(several)]
        asked = [maker.question(row, kind) for (row, _), kind in zip(several, wanted, strict=True)]
        batches.append({"input_ids": prompt([words for words, _ in asked]), "pixel_values": scenes.pictures})
        answers.append(torch.tensor([answer for _, answer in asked]))
        kinds += wanted
    return Questions(batches, answers, kinds)


@torch.inference_mode()
def accuracy(model: Any, asked: Questions) -> dict[str, float]:
    """Percent of the questions that are answered right: of all, and of each kind."""
    right = torch.cat([
        model(**batch, logits_to_keep=1).logits[:, -1].argmax(1) == answer
        for batch, answer in zip(asked.batches, asked.answers, strict=True)
    ])  # fmt: skip
    found = {"all": right.float().mean().item() * 100}
    for kind in QUESTIONS:
        found[kind] = right[torch.tensor([one == kind for one in asked.kinds])].float().mean().item() * 100
    return found


def fresh(out: Path) -> Any:
    """The trained model, not reduced."""
    return LlavaForConditionalGeneration.from_pretrained(out / "model").eval()


def measure(out: Path, seeds: int, images: int, epochs: int) -> dict[str, Any]:
    """Accuracy of every method at every rate, on pictures of scans that no training has seen."""
    test, own = ask("test", 7, images, 250), ask("train", 11, 960, 32)
    rows: dict[str, Any] = {"100": {"full": [accuracy(fresh(out), test)]}}
    for seed in range(seeds):
        model = reduce_(fresh(out), TNT(at=AT, keep=0.5), output="tokens")
        calibrate_(model, own.batches, epochs=epochs, seed=seed)
        save(model, out / f"tnt{seed}")
    for percent in (50, 25):
        keep, row = percent / 100, {}
        gone = round(PATCHES * (1 - keep) / (DEPTH - 1))
        row["TNT"] = [accuracy(load_(fresh(out), out / f"tnt{seed}", keep=keep), test) for seed in range(seeds)]
        row["random"] = [
            accuracy(reduce_(fresh(out), Random(at=AT, keep=keep, order=seed), output="tokens"), test)
            for seed in range(seeds)
        ]
        for name, config in {
            "ToMe": ToMe(at=tuple(range(1, DEPTH)), r=gone), "Top-K": TopK(at=AT, keep=keep),
        }.items():  # fmt: skip
            row[name] = [accuracy(reduce_(fresh(out), config, output="tokens"), test)]
        rows[str(percent)] = row
        print(percent, {name: [round(one["all"], 1) for one in found] for name, found in row.items()}, flush=True)
    (out / "rows.json").write_text(json.dumps(rows))
    return rows


def main(out: Path, steps: int = 1600, batch: int = 64, each: int = 6, lr: float = 2e-3, seeds: int = 3,
         images: int = 3000, epochs: int = 6, threads: int = 1) -> None:  # fmt: skip
    """Train the model unless OUT has it, measure, and write docs/results/vlm.md."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    told = out / "training.json"
    training = json.loads(told.read_text()) if told.exists() else train(out, steps, batch, each, lr)
    measure(out, seeds, images, epochs)


if __name__ == "__main__":
    tyro.cli(main)
