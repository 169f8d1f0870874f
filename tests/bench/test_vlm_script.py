"""benchmarks/vlm.py: its model, its questions, its FastV, and a page from end to end."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def vlm(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return {**vars(importlib.import_module("vlm_model")), **vars(importlib.import_module("vlm"))}


def test_answers_follow_from_the_digits(vlm):
    maker, words = vlm["Maker"]("train", 0), vlm["WORDS"]
    scenes = maker(200)
    asked, answers, kinds = maker.questions(scenes, torch.arange(200) % 3)
    for seen, count, question, answer, kind in zip(
        scenes.seen.tolist(), scenes.count.tolist(), asked.tolist(), answers.tolist(), kinds.tolist(), strict=True
    ):
        first, about, _ = (words[one] for one in question)
        if first == "count":
            assert kind == 2 and about == "all" and words[answer] == ("one", "two", "three")[count - 1]
        else:
            other = seen.index(int(about)) + (-1 if first == "left" else 1)
            assert count > 1 and 0 <= other < count and words[answer] == str(seen[other])
    assert (kinds[scenes.count > 1] == (torch.arange(200) % 3)[scenes.count > 1]).all()


def test_patches_are_named_by_the_digits_around_them(vlm):
    scenes = vlm["Maker"]("train", 1)(50)
    for row, seen, count in zip(scenes.names.tolist(), scenes.seen.tolist(), scenes.count.tolist(), strict=True):
        line = [10, *seen[:count], 10]
        expected = {(line[i], line[i - 1], line[i + 1]) for i in range(1, count + 1)} | {(10, 10, 10)}
        assert {tuple(one) for one in row} == expected


def test_a_question_in_a_packed_prompt_sees_what_it_sees_alone(vlm):
    model, maker = vlm["load"](vlm["WEIGHTS"]), vlm["Maker"]("train", 2)
    scenes = maker(4)
    given = vlm["packed"](maker, scenes, 2)
    with torch.inference_mode():
        together = model(**given).logits
        for place in (1 + 64 + 5, 1 + 64 + 5 + 4):
            question = given["input_ids"][:, place : place + 3]
            alone = model(input_ids=vlm["prompt"](question), pixel_values=scenes.pictures).logits
            torch.testing.assert_close(together[:, place : place + 3], alone[:, -3:], rtol=1e-4, atol=1e-4)


def test_the_committed_model_answers(vlm):
    found = vlm["accuracy"](vlm["load"](vlm["WEIGHTS"]), vlm["ask"]("validation", 1, 200, 100))
    assert found["all"] > 90 and min(found.values()) > 80
    size = sum(file.stat().st_size for file in vlm["WEIGHTS"].iterdir())
    assert size < 4_000_000


def test_fastv_hides_the_tokens_that_the_first_block_attends_to_least(vlm):
    asked = vlm["ask"]("validation", 2, 8, 8)
    whole = vlm["load"](vlm["WEIGHTS"])
    with torch.inference_mode():
        expected = whole(**asked.batches[0]).logits[:, -1]
        torch.testing.assert_close(
            vlm["FastV"](vlm["load"](vlm["WEIGHTS"]), 64)(**asked.batches[0]).logits[:, -1],
            expected, rtol=1e-3, atol=1e-3,
        )  # fmt: skip
        fewer = vlm["FastV"](vlm["load"](vlm["WEIGHTS"]), 4)
        logits = fewer(**asked.batches[0]).logits[:, -1]
    assert (fewer.mask < 0).sum(-1).eq(60).all() and not torch.allclose(logits, expected, atol=1e-2)


@pytest.mark.wide
def test_the_command_trains_calibrates_and_writes_its_page(tmp_path):
    doc = tmp_path / "vlm.md"
    options = "--anew --regions 4 --steps 4 --batch 4 --seeds 1 --images 250 --pictures 32 --epochs 1"
    command = [sys.executable, BENCHMARKS / "vlm.py", "--out", tmp_path / "out", "--doc", doc, *options.split()]
    subprocess.run([str(part) for part in command], check=True, cwd=BENCHMARKS, timeout=600)
    text = doc.read_text()
    assert "| `tokens` | 25 % (16) |" in text and "Goal for TNT" in text
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert set(rows["tokens25"]) == {"TNT", "random", "ToMe", "Top-K", "FastV"} and "FastV" not in rows["grid25"]
