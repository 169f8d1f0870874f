"""Which code each measured page of docs/ was measured with, so that a test can tell when figures may be stale.

python benchmarks/stamps.py                                   # which pages are stale
python benchmarks/stamps.py --accept results/dense.md --why "only renamed"   # a change that leaves the figures as they are

docs/results/stamps.json has a digest for each page. A benchmark that writes its page renews it. The digest is one of what the
code does: docstrings, comments, imports, annotations, messages and help are left out, and so is the file in which a
definition lies. Moving code therefore changes nothing here but `CODE`.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).parents[1]
STAMPS = ROOT / "docs" / "results" / "stamps.json"
LONG = 80  # characters; a longer text is prose of a page and no figure depends on it

CODE = {  # what figures depend on: files and folders of src/tntprune
    "reducing": ("backbones", "methods", "ops", "reduce.py"),
    "counting": ("analysis/macs.py",),
    "reading": ("data/folders.py", "data/images.py", "data/loading.py", "data/transforms.py"),
    "judging": ("analysis/batches.py", "analysis/evaluate.py", "system/precision.py"),
    "embedding": ("analysis/embed.py", "analysis/retrieval.py"),
    "training": (
        "data/augment.py", "data/batches.py", "data/mixing.py", "training/calibrate.py", "training/config.py",
        "training/frozen_pass.py", "training/learning.py", "training/recipes.py", "training/trainer.py",
    ),
    "timing": ("analysis/speed_bound.py", "system/clock.py"),
    "bench": ("bench",),
    "filling": ("analysis/features.py",),
    "exporting": ("exporters",),
    "shipping": ("assets/pretrained",),
    "latency": ("search/latency.py",),
    "explorer": ("app",),
    "paper": ("paper",),
    "correcting": ("training/correction.py", "training/ridge.py"),
    "pretraining": ("training/pretraining.py",),
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A measured page.

    Args:
        scripts: Files of benchmarks/ that measure it.
        code: Names in `CODE`.
        options: What the first script is run with.
    """

    scripts: tuple[str, ...]
    code: tuple[str, ...]
    options: str = ""

    @property
    def command(self) -> str:
        """Return the command that measures the page again."""
        return f"python benchmarks/{self.scripts[0]} {self.options}".strip()


DATA = "--data ../shared/data"
WEIGHTS = "--weights ../shared/data/vit_tiny_patch16_224.safetensors"
METHOD = ("method.py", "method_lab.py", "method_page.py", "method_plans.py")
REAL = ("reducing", "counting", "reading", "judging")
PAGES = {
    "guides/explorer.md": Page(("explorer.py",), ("reducing", "timing", "explorer"), WEIGHTS),
    "results/correction.md": Page(
        ("correction.py", *METHOD, "results.py", "untrained.py"),
        (*REAL, "training", "correcting", "shipping"),
        f"{DATA} --out runs/correction",
    ),
    "results/dense.md": Page(
        ("dense.py",), ("reducing", "reading", "filling", "shipping"), f"{WEIGHTS} {DATA}/imagenet-val-1300"
    ),
    "results/embeddings.md": Page(
        ("embeddings.py",), (*REAL, "training", "embedding"), f"{DATA} --out runs/embeddings"
    ),
    "results/export.md": Page(
        ("export.py",), ("reducing", "counting", "reading", "timing", "exporting", "shipping"), DATA
    ),
    "results/finetune.md": Page(("finetune.py",), (*REAL, "training"), f"{DATA} --out runs/finetune"),
    "results/large-grids.md": Page(
        ("large_grid.py",),
        ("reducing", "counting", "timing", "reading", "shipping"),
        f"{WEIGHTS} {DATA}/calibration-1000/images",
    ),
    "results/latency.md": Page(("latency.py",), ("reducing", "bench", "latency")),
    "results/loading.md": Page(("loading.py",), ("reducing", "reading", "training"), f"{DATA}/calibration-1000/images"),
    "results/tnt.md": Page(METHOD, (*REAL, "training"), f"{DATA} --out runs/method --part page"),
    "results/overhead.md": Page(("overhead.py",), ("reducing", "timing")),
    "paper.md": Page(("paper.py",), (*REAL, "training", "timing", "paper"), f"{DATA} --out runs/paper"),
    "results/performance.md": Page(("performance.py",), ("reducing", "bench", "training"), "--out runs/performance"),
    "results/pretrain.md": Page(("pretrain.py",), (*REAL, "training", "pretraining"), "--out runs/pretrain"),
    "results/pretrained.md": Page(("pretrained.py",), (*REAL, "training", "shipping"), f"{DATA} --out runs/pretrained"),
    "results/comparison.md": Page(("results.py",), (*REAL, "training", "timing"), f"{DATA} --out runs/results"),
    "results/research-notes.md": Page(METHOD, (*REAL, "training"), f"{DATA} --out runs/method --part page"),
    "results/untrained.md": Page(("untrained.py", "results.py"), (*REAL, "shipping"), f"{DATA} --out runs/untrained"),
    "results/learned.md": Page(
        ("learned.py", "untrained.py", "results.py"), (*REAL, "training"), f"{DATA} --out runs/learned"
    ),
    "results/vlm.md": Page(("vlm.py", "vlm_model.py"), (*REAL, "training"), "--out runs/vlm"),
    "results/scale.md": Page(("scale.py",), ("training",), "--out runs/scale"),
}


def digest(name: str) -> str:
    """SHA-256 of the code that a page's figures depend on.

    Raises:
        FileNotFoundError: a file in `CODE` is not there any more; say there where its code lies now.
    """
    page = PAGES[name]
    parts = [ROOT / "benchmarks" / script for script in page.scripts]
    parts += [ROOT / "src" / "tntprune" / part for group in page.code for part in CODE[group]]
    found = hashlib.sha256("\n".join(sorted(definitions(_sources(parts)))).encode())
    for file in sorted({file for part in parts if part.is_dir() for file in part.rglob("*.safetensors")}):
        found.update(file.read_bytes())
    return found.hexdigest()


def _sources(parts: Iterable[Path]) -> list[str]:
    files: set[Path] = set()
    for part in parts:
        if not part.exists():
            raise FileNotFoundError(f"{part.relative_to(ROOT)}: gone; say in benchmarks/stamps.py where it lies now")
        files |= set(part.rglob("*.py")) if part.is_dir() else {part}
    return [file.read_text() for file in files]


def definitions(sources: Iterable[str]) -> set[str]:
    """Return each top-level statement of some files in one canonical line.

    Args:
        sources: The text of each file. Into which of them a definition is put makes no difference.
    """
    return {text for source in sources for text in _defined(source)}


@cache
def _defined(source: str) -> frozenset[str]:
    texts = (json.dumps(_plain(statement)) for statement in ast.parse(source).body)
    return frozenset(text for text in texts if text != "null")


def _plain(node: Any) -> Any:
    """Return a node of a syntax tree as JSON values, without the parts that no figure depends on; the same in every Python version."""
    if isinstance(node, list):
        return [plain for plain in map(_plain, node) if plain is not None] or None
    if isinstance(node, ast.Import | ast.ImportFrom | ast.expr_context) or _is_prose(node):
        return None
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return None
    if isinstance(node, ast.Raise):
        kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return ["Raise", _plain(kind)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("check", "option"):
        return [node.func.id, _plain(node.args[:1]), _plain(node.keywords)]  # without the message, or the help
    if not isinstance(node, ast.AST):
        return node if isinstance(node, str | int | bool | None) else repr(node)
    skipped = ("annotation", "returns", "type_comment", "kind", "simple", "type_params", "module")
    fields = {name: _plain(value) for name, value in ast.iter_fields(node) if name not in skipped}
    return [type(node).__name__, {name: value for name, value in fields.items() if value is not None}]


def _is_prose(node: Any) -> bool:
    """Tell whether a node is a docstring, or a text that is too long to be a name or a setting."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > LONG


def stale() -> dict[str, str]:
    """Return a line for each page whose code is not the one it was measured with."""
    known = json.loads(STAMPS.read_text())
    return {
        name: f"docs/{name}: its code changed since it was measured; run `{page.command}`, or if its figures are "
        f'unaffected `python benchmarks/stamps.py --accept {name} --why "REASON"`'
        for name, page in PAGES.items()
        if known.get(name, {}).get("digest") != digest(name)
    }


def written(page: Path) -> None:
    """Note that a benchmark has written a page of docs/. One that lies elsewhere is only to be looked at."""
    docs = STAMPS.parent.parent.resolve()
    if page.resolve().is_relative_to(docs):
        mark(page.resolve().relative_to(docs).as_posix(), "measured")


def mark(name: str, why: str) -> None:
    """Note that a page's figures are those of the code as it is now.

    Args:
        name: Of the page.
        why: "measured", or why a change of the code leaves the figures as they are.
    """
    known = json.loads(STAMPS.read_text()) if STAMPS.exists() else {}
    known[name] = {"digest": digest(name), "date": date.today().isoformat(), "why": why}
    STAMPS.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")


def main(accept: tuple[str, ...] = (), why: str = "") -> None:
    """Tell which pages are stale, or accept that a change leaves the figures of some as they are.

    Args:
        accept: Pages, such as results/dense.md; `all` for every stale one.
        why: The reason, which is kept.
    """
    if accept and not why.strip():
        raise SystemExit("--accept needs --why: what changed, and why no figure of the page depends on it")
    names = list(stale()) if accept == ("all",) else list(accept)
    if unknown := sorted(set(names) - set(PAGES)):
        raise SystemExit(f"{', '.join(unknown)}: no such page; expected some of {', '.join(PAGES)}")
    for name in names:
        mark(name, why)
    print("\n".join(stale().values()) or "every page was measured with the code as it is, or a reason is kept")


if __name__ == "__main__":
    tyro.cli(main)
