"""Time the answers of the explorer in a browser: a line of docs/guides/explorer.md.

python benchmarks/explorer.py --weights ../shared/data/vit_tiny_patch16_224.safetensors

It needs `pip install '.[dev]'` and Chromium.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from playwright.sync_api import sync_playwright
from tqdm import tqdm

from stamps import written
from tntprune.app.choices import ExploredModel
from tntprune.app.serve import served
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODEL = "vit_tiny_patch16_224"
START, END = "<!-- written by benchmarks/explorer.py -->", "<!-- end -->"
RATIO = "((document.querySelector('#facts-0')?.innerText ?? '').match(/([0-9.]+) x less/) ?? [])[1]"
PICTURE = "document.querySelector('#kept-1 img')?.src"


def moves(page: Any, slider: str, shown: str, values: Iterable[float]) -> list[float]:
    """Set a slider to one value after the other, and return the seconds until the page shows something else.

    Args:
        page: Of playwright.
        slider: Its id.
        shown: A JavaScript expression that changes with the answer.
        values: To which it is set.
    """
    page.wait_for_selector(f"#{slider}")
    box, spent = page.locator(f"#{slider} input[type=number]"), []
    for value in tqdm(list(values), desc=slider, unit="move"):
        before = page.evaluate(shown)
        begin = time.perf_counter()
        box.fill(str(value))
        box.press("Enter")
        page.wait_for_function(f"before => {shown} && {shown} != before", arg=before, polling=10)
        spent.append(time.perf_counter() - begin)
        page.wait_for_timeout(300)  # both sides are at rest before the next move
    return spent


def told(spent: list[float]) -> str:
    return f"{median(spent):.2f} s (at most {max(spent):.2f} s)"


def main(weights: Path | None = None, page: Path = Path("docs/guides/explorer.md")) -> None:
    """Measure and write the line.

    Args:
        weights: Of vit_tiny_patch16_224; by default they come from the Hub.
        page: The page to write.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("no Chromium on this machine; expected one: apt-get install chromium")
    torch.set_num_threads(os.cpu_count() or 1)
    with served(ExploredModel(MODEL, weights)) as address, sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-dev-shm-usage"])
        opened = window.new_page(viewport={"width": 1280, "height": 900})
        opened.goto(address)
        opened.wait_for_function(RATIO)
        opened.wait_for_timeout(3000)
        budget = moves(opened, "budget-0", RATIO, [0.5 + 0.02 * step for step in range(1, 21)])
        block = moves(opened, "block", PICTURE, [3, 12, 4, 11, 5, 10, 3, 9, 4, 12])
        window.close()
    text = (
        f"ViT-Tiny answers a move of the budget after {told(budget)}, a move through the blocks after "
        f"{told(block)}: median of {len(budget)} and {len(block)} moves, headless Chromium on "
        f"the same machine, {stamp()}."
    )
    before, rest = page.read_text().split(START)
    write(page, f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}".encode())
    written(page)
    print(text)


if __name__ == "__main__":
    tyro.cli(main)
