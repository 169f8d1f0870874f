"""A tiny LLaVA, and pictures of cluttered digits with questions about them; `vlm.py` measures with it.

The tower is CLIP's in shape, and begins with the weights of the demo's ViT, which knows one digit in a picture. It learns first,
without the language model, which digit is on each patch, and which digits are left and right of that one: a caption of
every region. Then the whole model learns to read the digits from left to right, and to answer questions.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from tntprune.backbones.digits_vit import digits_vit
from tntprune.demo.digits import CANVAS, FRAGMENT, FRAGMENTS, normalise, paste, scans

COLUMNS, DIGIT, NOTHING = 3, 20, 10  # columns with at most one digit; pixels of a digit; class of other patches
SIDE, PATCH, WIDTH, DEPTH = CANVAS, 8, 64, 6
LAYERS = 3  # of the language model
PATCHES = (SIDE // PATCH) ** 2
VALIDATION = 200  # training scans on which settings were chosen; only the demo's ViT was trained on them
# fmt: off
WORDS = ["<pad>", "<s>", "</s>", "<image>", *"0123456789", "one", "two", "three", "left", "right", "count", "of", "all",
         "?", "read"]
# fmt: on
TOKEN = {word: number for number, word in enumerate(WORDS)}
QUESTIONS = ("left", "right", "count")
SPECIAL = {"image_token_id": TOKEN["<image>"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WEIGHTS = Path(__file__).parent / "weights" / "vlm"

Split = Literal["train", "validation", "test"]


def build() -> LlavaForConditionalGeneration:
    """Make the model: its tower has the weights of the demo's ViT; the rest is random."""
    vision = {
        "model_type": "clip_vision_model", "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
        "intermediate_size": 2 * WIDTH, "image_size": SIDE, "patch_size": PATCH, "num_channels": 1,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu", "projection_dim": WIDTH,
    }  # fmt: skip
    text = {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "intermediate_size": 3 * WIDTH, "vocab_size": len(WORDS), "max_position_embeddings": 256,
    }  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config={**text, **SPECIAL}, vision_feature_layer=-1, **SPECIAL)
    model = LlavaForConditionalGeneration(config)
    own, new = digits_vit().state_dict(), {}
    places = own["pos_embed"][0].clone()
    places[1:] += own["patch_embed.proj.bias"]  # CLIP's patches have no bias
    new["embeddings.position_embedding.weight"] = places
    new["embeddings.class_embedding"] = own["cls_token"][0, 0]
    new["embeddings.patch_embedding.weight"] = own["patch_embed.proj.weight"]
    parts = {"layer_norm1": "norm1", "layer_norm2": "norm2", "self_attn.out_proj": "attn.proj",
             "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}  # fmt: skip
    for kind in ("weight", "bias"):
        new[f"post_layernorm.{kind}"] = own[f"norm.{kind}"]
        for number in range(DEPTH):
            ours, theirs = f"blocks.{number}", f"encoder.layers.{number}"
            new |= {f"{theirs}.{one}.{kind}": own[f"{ours}.{other}.{kind}"] for one, other in parts.items()}
            for letter, third in zip("qkv", own[f"{ours}.attn.qkv.{kind}"].chunk(3), strict=True):
                new[f"{theirs}.self_attn.{letter}_proj.{kind}"] = third
    left = model.model.vision_tower.load_state_dict(new, strict=False)
    assert not left.unexpected_keys and all(name.startswith("pre_layrnorm") for name in left.missing_keys)
    return model


@dataclass
class Scenes:
    """Pictures with the digits on them.

    Args:
        pictures: (n, 1, 64, 64), normalised.
        seen: (n, 3), the digits from left to right, then `NOTHING`.
        count: (n,), how many digits there are, from 1.
        names: (n, 64, 3), for each patch the digit on it and those left and right of that digit, or `NOTHING`.
    """

    pictures: torch.Tensor
    seen: torch.Tensor
    count: torch.Tensor
    names: torch.Tensor


class Maker:
    """Makes scenes and questions of the scans of one split, by a seed."""

    def __init__(self, split: Split, seed: int) -> None:
        images, labels = scans("test" if split == "test" else "train")
        if split != "test":
            part = slice(VALIDATION) if split == "validation" else slice(VALIDATION, None)
            images, labels = images[part], labels[part]
        self.images = images[labels.argsort()]
        self.counts = labels.bincount(minlength=10)
        self.starts = self.counts.cumsum(0) - self.counts
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator)

    def below(self, high: torch.Tensor) -> torch.Tensor:
        return (self.uniform(*high.shape) * high).long()

    def __call__(self, n: int) -> Scenes:
        there = self.uniform(n, COLUMNS).argsort(1) < self.number(1, COLUMNS + 1, n, 1)  # (n, 3), one to three columns
        digits = self.uniform(n, 10).argsort(1)[:, :COLUMNS]  # all different
        canvas = torch.zeros(n, 1, SIDE, SIDE)
        columns = torch.full((n, PATCHES), -1)
        middle = (torch.arange(SIDE // PATCH) + 0.5) * PATCH
        for column in range(COLUMNS):
            digit = digits[:, column]
            chosen = self.images[self.starts[digit] + self.below(self.counts[digit])]
            x = column * (SIDE // COLUMNS) + self.number(0, 3, n)
            y = self.number(0, SIDE - DIGIT + 1, n)
            angle = (self.uniform(n) - 0.5) * 0.2
            drawn = paste(chosen, torch.stack([x, y], 1).float(), torch.full((n,), float(DIGIT)), angle)
            canvas = torch.maximum(canvas, drawn * there[:, column, None, None, None])
            down = (middle > y[:, None]) & (middle < y[:, None] + DIGIT)
            across = (middle > x[:, None]) & (middle < x[:, None] + DIGIT)
            inside = (down[:, :, None] & across[:, None] & there[:, column, None, None]).flatten(1)
            columns = torch.where(inside, column, columns)
        for _ in range(FRAGMENTS):
            other = self.images[self.number(0, len(self.images), n)]
            big = F.interpolate(other, size=(DIGIT, DIGIT), mode="bilinear", align_corners=False)
            cut = int(self.number(0, DIGIT - FRAGMENT + 1, 1))
            where = self.number(0, SIDE - FRAGMENT + 1, n, 2).float()
            size = torch.full((n,), float(FRAGMENT))
            piece = big[:, :, cut : cut + FRAGMENT, cut : cut + FRAGMENT]
            canvas = torch.maximum(canvas, paste(piece, where, size, size * 0))
        count = there.sum(1)
        order = (~there).long().argsort(dim=1, stable=True)
        seen = torch.where(torch.arange(COLUMNS) < count[:, None], digits.gather(1, order), NOTHING)
        outside = torch.full((n, 1), NOTHING)
        line = torch.cat([outside, seen, outside], 1)  # (n, 5)
        place = (there.cumsum(1) - 1).clamp(min=0).gather(1, columns.clamp(min=0))  # (n, 64), in seen
        names = torch.stack([line.gather(1, place + 1 + step) for step in (0, -1, 1)], 2)
        return Scenes(normalise(canvas), seen, count, torch.where(columns[..., None] >= 0, names, NOTHING))

    def questions(self, scenes: Scenes, kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ask about each scene.

        Args:
            scenes: n of them.
            kind: (n,), numbers in `QUESTIONS`; a scene of one digit is only asked how many there are.

        Returns:
            Tokens of the questions (n, 3) and of the answers (n,), and the kinds that were asked (n,).
        """
        seen, count = scenes.seen, scenes.count
        counting = (count == 1) | (kind == QUESTIONS.index("count"))
        kind = torch.where(counting, QUESTIONS.index("count"), kind)
        left = kind == QUESTIONS.index("left")
        place = torch.where(counting, 0, self.below(count - 1) + left)
        beside = (place + torch.where(left, -1, 1)).clamp(0, COLUMNS - 1)
        asked, told = (TOKEN["0"] + seen.gather(1, one[:, None])[:, 0] for one in (place, beside))
        first, last = TOKEN["left"] + kind, torch.full_like(count, TOKEN["?"])
        words = torch.stack([first, torch.where(counting, TOKEN["all"], asked), last], 1)
        return words, torch.where(counting, TOKEN["one"] + count - 1, told), kind


def prompt(questions: torch.Tensor) -> torch.Tensor:
    """Put questions (n, 3) behind a picture: prompts (n, 68)."""
    start = torch.tensor([1] + [TOKEN["<image>"]] * PATCHES)
    return torch.cat([start.expand(len(questions), -1), questions], 1)


def packed(maker: Maker, scenes: Scenes, each: int) -> dict[str, torch.Tensor]:
    """Make prompts to learn from: behind a picture all digits from left to right, and questions; none sees another."""
    n, first = len(scenes.count), 1 + PATCHES
    column = torch.arange(COLUMNS + 1)
    line = torch.cat([scenes.seen, torch.full((n, 1), NOTHING)], 1) + TOKEN["0"]
    line = torch.where(column < scenes.count[:, None], line, torch.where(column == scenes.count[:, None], 2, 0))
    read = torch.cat([torch.full((n, 1), TOKEN["read"]), line], 1)
    asked, learned = [read], [torch.cat([torch.full((n, 1), -100), line.masked_fill(line == 0, -100)], 1)]
    for _ in range(each):
        words, answer, kind = maker.questions(scenes, maker.number(0, len(QUESTIONS), n))
        asked.append(torch.cat([words, answer[:, None]], 1))
        about = torch.where(kind == QUESTIONS.index("count"), -100, words[:, 1])  # which digits can be asked about
        nobody = torch.full_like(about, -100)  # knows which kind comes, and "?" says nothing
        learned.append(torch.stack([nobody, about, nobody, answer], 1))
    start = prompt(torch.empty(n, 0, dtype=torch.long))
    parts = [start, *asked]
    part = torch.cat([torch.full((one.shape[1],), number) for number, one in enumerate(parts)])
    places = [torch.arange(one.shape[1]) + (first if number else 0) for number, one in enumerate(parts)]
    sees = ((part[:, None] == part) | (part == 0)) & torch.ones(len(part), len(part)).tril().bool()
    return {
        "input_ids": torch.cat(parts, 1), "labels": torch.cat([torch.full_like(start, -100), *learned], 1),
        "attention_mask": sees.expand(n, 1, -1, -1), "position_ids": torch.cat(places).expand(n, -1),
        "pixel_values": scenes.pictures,
    }  # fmt: skip


def fit(
    groups: list[tuple[Iterable[nn.Parameter], float]], steps: int, loss: Callable[[], tuple[torch.Tensor, float]],
    name: str,
) -> list[tuple[int, float]]:  # fmt: skip
    """Take steps with AdamW and return the losses on the way, every 50 steps; each group has its peak rate."""
    parameters = [(list(own), lr) for own, lr in groups]
    optimizer = torch.optim.AdamW([{"params": own} for own, _ in parameters], weight_decay=0.05, betas=(0.9, 0.98))
    rates = [lr for _, lr in parameters]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, steps, pct_start=0.1)
    every, shown, begin = [one for own, _ in parameters for one in own], [], time.perf_counter()
    for step in range(1, steps + 1):
        value, told = loss()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(every, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            shown.append((step, round(told, 3)))
            print(f"{name}, step {step}: {told:.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    return shown


def train(out: Path, regions: int, steps: int, batch: int, each: int, lr: float) -> dict[str, Any]:
    """Train the model: the tower alone to name the digits at each patch, then everything.

    Args:
        out: Where the folder `model` is written.
        regions: Steps of the tower alone.
        steps: Of the whole model.
        batch: Pictures in a step.
        each: Questions about a picture.
        lr: Of the whole model, at most; the tower has an eighth of it then.
    """
    torch.manual_seed(0)
    begin, model, maker = time.perf_counter(), build(), Maker("train", 0)
    heads = nn.ModuleList(nn.Linear(WIDTH, NOTHING + 1) for _ in range(3))
    tower = model.model.vision_tower

    def naming(patches: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        parts = (F.cross_entropy(head(patches).flatten(0, 1), names[..., i].flatten()) for i, head in enumerate(heads))
        return sum(parts, torch.zeros(()))

    def of_regions() -> tuple[torch.Tensor, float]:
        scenes = maker(batch)
        loss = naming(tower(pixel_values=scenes.pictures).last_hidden_state[:, 1:], scenes.names)
        return loss, loss.item()

    def of_answers() -> tuple[torch.Tensor, float]:
        scenes = maker(batch)
        told = model(**packed(maker, scenes, each), use_cache=False)
        return told.loss + naming(told.image_outputs.hidden_states[-1][:, 1:], scenes.names), told.loss.item()

    model.train()
    losses = {"tower": fit([([*tower.parameters(), *heads.parameters()], lr)], regions, of_regions, "tower")}
    own = {id(one) for one in tower.parameters()}
    rest = [one for one in (*model.parameters(), *heads.parameters()) if id(one) not in own]
    losses["answers"] = fit([(tower.parameters(), lr / 8), (rest, lr)], steps, of_answers, "answers")
    model.eval().save_pretrained(out / "model")
    told = {
        "parameters": sum(one.numel() for one in model.parameters()), "regions": regions, "steps": steps,
        "batch": batch, "seconds": round(time.perf_counter() - begin), "losses": losses,
    }  # fmt: skip
    (out / "model" / "training.json").write_text(json.dumps(told, indent=1) + "\n")
    return told


def publish(out: Path) -> None:
    """Make a model that was trained in OUT the committed one."""
    shutil.copytree(out / "model", WEIGHTS, dirs_exist_ok=True)


def load(folder: Path) -> Any:
    """Load a trained model, not reduced."""
    return LlavaForConditionalGeneration.from_pretrained(folder).eval()


@dataclass
class Questions:
    """Prompts of one question each, in batches.

    Args:
        batches: What the model is called with.
        answers: (n,), tokens.
        kinds: (n,), numbers in `QUESTIONS`.
    """

    batches: list[dict[str, torch.Tensor]]
    answers: torch.Tensor
    kinds: torch.Tensor


def ask(split: Split, seed: int, count: int, batch: int) -> Questions:
    """Make pictures of one split with a question each, of each kind in turn; with one digit only how many there are."""
    maker, batches, answers, kinds = Maker(split, seed), [], [], []
    for _ in range(count // batch):
        scenes = maker(batch)
        words, answer, kind = maker.questions(scenes, torch.arange(batch) % len(QUESTIONS))
        batches.append({"input_ids": prompt(words), "pixel_values": scenes.pictures})
        answers.append(answer)
        kinds.append(kind)
    return Questions(batches, torch.cat(answers), torch.cat(kinds))


@torch.inference_mode()
def accuracy(model: Any, asked: Questions) -> dict[str, float]:
    """Return the percent of the questions that are answered right, of all and of each kind."""
    said = torch.cat([model(**batch, logits_to_keep=1).logits[:, -1].argmax(1) for batch in asked.batches])
    right = (said == asked.answers).double() * 100
    kinds = {name: right[asked.kinds == number].mean().item() for number, name in enumerate(QUESTIONS)}
    return {"all": right.mean().item(), **kinds}
