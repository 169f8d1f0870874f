"""Times of vision-language models by part."""

from __future__ import annotations

import pytest
import torch

import tntprune
from conftest import make as image_model
from tntprune import TNT, Random, ToMe, UsageError, UserError, bench_prompts, macs, reduce_
from tntprune.backbones.attach import is_reduced
from vlm_models import ONE, SEVERAL, make, packed, prompts

QUICK = {"rounds": 3, "new_tokens": 2, "progress": False}


@pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3", "smolvlm"])
def test_the_parts_are_timed_and_the_cache_is_that_of_the_kept_tokens(kind):
    model = make(kind)
    given = prompts(kind, model, SEVERAL)
    found = bench_prompts(model, given, [TNT(at=1, keep=0.25)], output="tokens", **QUICK)
    plain, own = found.results
    assert (plain.method, plain.output, own.output) == ("unpruned", "", "tokens") and "keep=0.25" in own.method
    assert plain.first_speedup == plain.decode_speedup == 1.0 and own.first_speedup > 0
    for row in found.results:
        assert min(row.tower, row.projector, row.prefill, row.decode) > 0
    assert plain.tokens == given["input_ids"].shape[1] > own.tokens and plain.cache > own.cache
    assert not is_reduced(model)


def test_the_cache_is_what_macs_tells():
    model = make("llava")
    given = prompts("llava", model, ONE)
    reduced = reduce_(make("llava"), Random(at=1, keep=0.25), output="tokens")
    plain, own = bench_prompts(model, given, [], reduced=[reduced], **QUICK).results
    told = macs(reduced, text=4)
    assert (plain.cache, own.cache) == (told.base_cache, told.cache)
    assert (plain.tokens, own.tokens) == (told.base_visual + 4, told.visual + 4)


def test_whole_grids_cost_the_language_model_what_they_did():
    model = make("llava")
    rows = bench_prompts(model, prompts("llava", model, ONE), [ToMe(r=5)], **QUICK).results
    assert rows[1].output == "grid" and rows[0].tokens == rows[1].tokens and rows[0].cache == rows[1].cache


def test_a_merger_counts_to_its_tower():
    given = packed([[1, (4, 6), 7, 8]])
    plain, own = bench_prompts(make("qwen2_5_vl"), given, [TNT(at=1, keep=0.5)], output="tokens", **QUICK).results
    assert plain.projector == own.projector == 0 and plain.tower > 0 and plain.tokens - own.tokens == 12


def test_the_table_has_a_line_for_each_model_and_fits_a_screen():
    model = make("llava")
    told = str(bench_prompts(model, prompts("llava", model, SEVERAL), [TNT(at=2, keep=0.5)], output="tokens", **QUICK))
    lines = told.splitlines()
    assert lines[0] == "3 prompt(s), milliseconds" and lines[2].startswith("unpruned") and "MiB" in lines[2]
    assert any(line.startswith("tnt at=2 keep=0.5") for line in lines) and "3 rounds in turns" in told
    assert max(map(len, lines[:4])) <= 125


def test_what_cannot_be_timed_is_refused():
    with pytest.raises(UserError, match="answers no prompts; expected a vision-language model"):
        bench_prompts(image_model("plain"), {"input_ids": torch.zeros(1, 1)}, [TNT(at=1)], **QUICK)
    model = make("llava")
    with pytest.raises(UsageError, match="nothing to time"):
        bench_prompts(model, prompts("llava", model, ONE), [], **QUICK)
    with pytest.raises(UsageError, match="rounds=2"):
        bench_prompts(model, prompts("llava", model, ONE), [TNT(at=1)], rounds=2)
    with pytest.raises(UserError, match="answers no prompts"):
        bench_prompts(model.model, prompts("llava", model, ONE), [TNT(at=1)], **QUICK)


def test_it_is_public():
    assert "bench_prompts" in tntprune.__all__
