"""The explorer's page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.data_classes import ImageData

from tntprune.app.choices import ExploredModel
from tntprune.app.outcome import Outcome, View, outcome, view
from tntprune.backbones.base import find_backbone
from tntprune.errors import UserError
from tntprune.system.memory import lack_of_memory
from tntprune.system.messages import one_line
from tntprune.system.units import unit_of

TITLE = "tntprune explorer"
LEAD = """# tntprune explorer
Which tokens does a vision transformer need? Choose a photo, two methods and their budgets. Bright patches are kept,
faintly striped ones are merged into kept ones, strongly striped ones are dropped."""
SUGGESTED = ("vit_tiny_patch16_224", "deit_small_distilled_patch16_224", "vit_small_patch14_dinov2")
CSS = """
#message:not(:empty) p { background: #b3261e; color: white; padding: .6em .9em; border-radius: .5em; margin: 0; }
.facts table { width: 100%; display: table; table-layout: auto; }
.facts td, .facts th { padding: .25em .5em; overflow-wrap: normal; word-break: normal; }
.facts td:not(:first-child) { text-align: right; white-space: nowrap; }
.facts table ~ table td:nth-child(3) { text-align: left; white-space: normal; }
@media (max-width: 480px) {
  .facts td, .facts th { padding: .2em; font-size: .85em; }
  .facts td:not(:first-child) { white-space: normal; }
}
footer { display: none !important; }
"""
SMALL = 0.15  # the least budget


def as_uploaded(payload: ImageData | None) -> str | None:
    """Return where an uploaded file is. We read it, and not Gradio, so that every fault is told in our words."""
    return None if payload is None else payload.path


class Models:
    """The models that were opened, by name."""

    def __init__(self, first: ExploredModel) -> None:
        self.opened = {first.name: first}

    def open(self, name: str) -> ExploredModel:
        """Return a model; its weights come from the Hub the first time.

        Raises:
            UserError: it cannot be had.
        """
        if name not in self.opened:
            self.opened[name] = ExploredModel(name)
        return self.opened[name]

    def depth(self, name: str) -> int:
        """Count the blocks of a model."""
        model = self.open(name).model
        return find_backbone(model).layout(model).depth


@dataclass
class Side:
    """One of the two methods: what is chosen, and where its outcome is shown."""

    method: Any
    budget: Any
    kept: Any
    scores: Any
    facts: Any
    python: Any
    command: Any
    outcome: Any

    @property
    def shown(self) -> list[Any]:
        """What an outcome fills in."""
        return [self.kept, self.scores, self.facts, self.python, self.command, self.outcome]


def build(models: Models, examples: Sequence[Path]) -> Any:
    """Build the page.

    Args:
        models: With the one that the page begins with.
        examples: Photos; the page begins with the first.
    """
    first = next(iter(models.opened))
    depth = models.depth(first)
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown(LEAD)
        message = gr.Markdown("", elem_id="message")
        with gr.Row():
            with gr.Column(min_width=280):
                photo = gr.Image(
                    str(examples[0]), type="filepath", sources=["upload", "clipboard"], label="Photo", height=280,
                    elem_id="photo", buttons=[],
                )  # fmt: skip
                photo.preprocess = as_uploaded
                gr.Examples([str(path) for path in examples], photo, label="Examples", elem_id="examples")
                model = gr.Dropdown(
                    [first, *(name for name in SUGGESTED if name != first)], value=first, label="Model",
                    info="or type the name of another timm model", allow_custom_value=True, elem_id="model",
                )  # fmt: skip
                block = gr.Slider(0, depth, depth, step=1, label="After block", elem_id="block")
            sides = [_side(models.open(first), number) for number in range(2)]
        _connect(page, models, message, photo, model, block, sides)
    return page


def _side(model: ExploredModel, number: int) -> Side:
    methods = model.methods()
    names = list(methods)
    chosen = names[0] if number == 0 else next(name for name in ("tome", *names) if name in methods)
    letter = "AB"[number]
    with gr.Column(min_width=280):
        method = gr.Dropdown(_choices(methods), value=chosen, label=f"Method {letter}", elem_id=f"method-{number}")
        budget = gr.Slider(
            SMALL, 1, 0.6, step=0.01, label=f"Budget {letter}", info="share of the unpruned model's MACs",
            elem_id=f"budget-{number}",
        )  # fmt: skip
        with gr.Tab("Kept tokens"):
            kept = gr.Image(show_label=False, height=300, elem_id=f"kept-{number}", buttons=["fullscreen"])
        with gr.Tab("Scores"):
            scores = gr.Image(
                show_label=False, height=300, elem_id=f"scores-{number}", buttons=["fullscreen"],
                placeholder="This method gives no scores up to this block.",
            )  # fmt: skip
        facts = gr.Markdown(elem_id=f"facts-{number}", elem_classes="facts")
        with gr.Accordion("Python and command", open=False):
            python = gr.Code(language="python", label="Python", elem_id=f"python-{number}")
            command = gr.Code(language="shell", label="Command", elem_id=f"command-{number}")
    return Side(method, budget, kept, scores, facts, python, command, gr.State())


def _choices(methods: dict[str, str]) -> list[tuple[str, str]]:
    return [(title, name) for name, title in methods.items()]


def _connect(page: Any, models: Models, message: Any, photo: Any, model: Any, block: Any, sides: list[Side]) -> None:
    """Let changes fill in what they concern. One thing is worked out at a time; of many moves the last counts."""
    work = {"concurrency_id": "work", "concurrency_limit": 1, "show_progress": "minimal", "trigger_mode": "always_last"}
    everything = [message, *(shown for side in sides for shown in side.shown)]

    def run(path: str | None, name: str, at: float, *chosen: Any) -> list[Any]:
        pairs = list(zip(chosen[::2], chosen[1::2], strict=True))  # a method and a budget for each side
        skipped = [gr.skip()] * (len(sides[0].shown) * len(pairs))
        if path is None:
            return ["", *skipped]
        try:
            explored = models.open(name)
            seen = view(Path(path), explored.model)
            filled = [cell for pair in pairs for cell in _filled(explored, seen, *pair, int(at))]
        except (UserError, MemoryError, RuntimeError) as error:
            return [_sentence(error), *skipped]
        return ["", *filled]

    def changed_model(name: str) -> Iterator[list[Any]]:
        methods = [side.method for side in sides]
        try:
            explored = models.open(name)
        except UserError as error:
            yield [_sentence(error), gr.skip(), *[gr.skip()] * len(methods)]
            return
        known, depth = explored.methods(), models.depth(name)
        names = list(known)
        updates = [
            gr.Dropdown(_choices(known), value=names[0] if number == 0 or "tome" not in known else "tome")
            for number in range(len(methods))
        ]
        yield ["", gr.Slider(0, depth, depth, step=1), *updates]

    def moved(at: float, *outcomes: Outcome | None) -> list[Any]:
        found = []
        for one in outcomes:
            known = one is not None and int(at) < len(one.pictures)
            found += [one.pictures[int(at)], one.scores[int(at)]] if one is not None and known else [gr.skip()] * 2
        return found

    chosen = [control for side in sides for control in (side.method, side.budget)]
    gr.on([page.load, photo.change], run, [photo, model, block, *chosen], everything, **work)
    model.change(
        changed_model, model, [message, block, *(side.method for side in sides)], **work
    ).then(run, [photo, model, block, *chosen], everything, **work)  # fmt: skip
    for side in sides:
        own = [photo, model, block, side.method, side.budget]
        gr.on([side.method.input, side.budget.change], run, own, [message, *side.shown], **work)
    pictures = [picture for side in sides for picture in (side.kept, side.scores)]
    block.change(
        moved, [block, *(side.outcome for side in sides)], pictures, show_progress="hidden", trigger_mode="always_last"
    )


def _filled(explored: ExploredModel, seen: View, method: str, budget: float, at: int) -> list[Any]:
    reduced = explored.reduced(method, budget)
    found = outcome(explored, reduced, seen)
    at = min(at, len(found.pictures) - 1)
    return [
        found.pictures[at], found.scores[at], facts(found), explored.python(reduced), explored.command(reduced), found,
    ]  # fmt: skip


def facts(found: Outcome) -> str:
    """Return the figures of an outcome as Markdown."""
    (base_ms, own_ms), (base, own) = found.milliseconds, (found.cost.base_macs, found.cost.macs)
    scale, unit = unit_of(base)
    lines = [f"> {found.note}\n"] if found.note else []
    lines += [
        "| | unpruned | reduced | |", "|---|---:|---:|---:|",
        f"| {unit} | {base / scale:.2f} | {own / scale:.2f} | {base / own:.2f} x less |",
        f"| ms per image, here | {base_ms:.1f} | {own_ms:.1f} | {base_ms / own_ms:.2f} x speed |",
        f"| tokens at the end | {found.counts[0]} | {found.counts[-1]} | |",
        f"| cosine of the outputs | | {found.cosine:.3f} | |",
    ]  # fmt: skip
    if found.before:
        lines += ["", "| unpruned | % | reduced | % |", "|---|---:|---|---:|"]
        for (name, share), (other, other_share) in zip(found.before, found.after, strict=True):
            lines.append(f"| {_plain(name)} | {share:.1f} | {_plain(other)} | {other_share:.1f} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return html.escape(text).replace("|", "&#124;")


def _sentence(error: BaseException) -> str:
    """Return an error as one sentence of the page."""
    told = str(error)
    if not isinstance(error, UserError):
        told = lack_of_memory(error, []) or f"This cannot be worked out ({type(error).__name__}: {error})"
    line = html.escape(one_line(" ".join(told.split())))
    return "".join(f"\\{letter}" if letter in "*_`[]#$\\" else letter for letter in line)
