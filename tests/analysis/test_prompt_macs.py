"""What a prompt with an image costs, part by part."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tntprune
from tntprune import TNT, Random
from tntprune.reduce import reduce_
from vlm_models import KINDS, SHORTENED, make, placeholders, prompts, usual


def counted(call):
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("kind", usual(kind for kind in KINDS if kind not in ("llava_next", "onevision")))
@pytest.mark.parametrize("output", ["", "grid", "tokens"])
def test_predicted_macs_are_the_counted_ones(kind, output):
    if output == "tokens" and kind not in SHORTENED:
        pytest.skip("it always gets the grid")
    model = make(kind, "eager")
    given = prompts(kind, model, [[1, None, 7, 8, 9, 5, 4, 3]])
    if output:
        reduce_(model, TNT(at=(1, 2), keep=0.5, recipe="paper"), output=output)
    found = tntprune.macs(model, text=7)
    total = counted(lambda: model(**given, logits_to_keep=1))
    assert abs(found.macs - total) < 0.04 * total  # norms are not counted there
    assert found.visual == found.base_visual // (4 if output == "tokens" else 1)
    assert found.base_visual == placeholders(kind, model)
    out = model(**given)
    step = {"input_ids": torch.tensor([[5]]), "cache": out.cache}
    decode = counted(lambda: model(**step))
    assert abs(found.decode - decode) < 0.02 * decode
    entries = [(layer.keys, layer.values) for layer in model(**given).cache.layers]
    held = sum(x.numel() * x.element_size() for pair in entries for x in pair)
    assert kind == "gemma3" or found.cache == held
    assert found.base_macs == tntprune.macs(make(kind), text=7).macs


def test_it_says_where_the_cost_is():
    model = reduce_(make("llava"), Random(at=2, keep=0.25), output="tokens")
    found, fewer = tntprune.macs(model), tntprune.macs(model, text=0)
    assert found.text == 64 and found.macs == found.tower + found.projector + found.prefill
    assert "visual tokens: 16 instead of 64" in str(found) and "cache: 0.0 MiB instead of" in str(found)
    assert found.prefill < found.base_prefill and fewer.prefill < found.prefill and fewer.decode < found.decode
    grid = tntprune.macs(reduce_(model, Random(at=2, keep=0.25)))
    assert grid.tower == found.tower and grid.prefill == found.base_prefill
    assert tntprune.macs(model.model.vision_tower).macs == grid.tower


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(tntprune.UsageError, match=r"text=5 of CLIPVisionModel; expected 0 or more, of a vision-lang"):
        tntprune.macs(make("llava").model.vision_tower, text=5)
    with pytest.raises(tntprune.UsageError, match="text=-1"):
        tntprune.macs(make("llava"), text=-1)
    model = make("llava")
    del model.model.language_model.layers[0].self_attn.q_proj
    with pytest.raises(tntprune.UserError, match="the language model LlamaModel is not counted; expected blocks with"):
        tntprune.macs(model)
