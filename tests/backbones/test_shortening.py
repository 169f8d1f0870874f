"""`output="tokens"`: the language model sees the kept visual tokens alone, at the positions that they have."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import tntprune
from tntprune import ATS, TNT, Random, ToMe
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.base import tower_of
from tntprune.backbones.hf.shortening import places_of
from tntprune.backbones.hf.vlm import BY_CLASS
from tntprune.methods.registry import implement
from tntprune.reduce import reduce_
from vlm_models import CELLS_KEPT, IMAGE, ONE, PAD, SEVERAL, SHORTENED, make, pixels, placeholders, prompts, usual

CONFIGS = {
    "random": Random(at=2, keep=0.25),
    "tome": ToMe(at=(1, 2), keep=0.5),
    "several": TNT(at=(1, 2), keep=0.6, similar=5),
}


@pytest.fixture(params=usual(SHORTENED))
def kind(request):
    return request.param


def shortened(kind, config=CONFIGS["random"]):
    if kind in CELLS_KEPT and isinstance(config, ToMe):
        config = replace(config, inside=False, metric="x")
    model = reduce_(make(kind), config, output="tokens")
    reduction_of(model).set_calibrated()
    return model


def run(model, given, **options):
    with torch.inference_mode():
        return model(**given, **options)


def seen_by_language_model(model):
    """A list that gets the length of each sequence that the language model is given."""
    lengths = []
    layer = model.model.get_submodule(BY_CLASS[type(base_of(model))].language).layers[0]
    layer.register_forward_hook(lambda _, given, out: lengths.append(given[0].shape[1]))
    return lengths


GENERATED = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE]}


def next_of(out):
    """The likeliest next token (B, 1), as `GENERATED` says."""
    logits = out.logits[:, -1:].clone()
    logits[..., [2, IMAGE]] = -torch.inf
    return logits.argmax(-1)


def features(model, given):
    images = {name: given[name] for name in ("pixel_values", "image_sizes") if name in given}
    with torch.inference_mode():
        return model.model.get_image_features(**images, return_dict=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_unpruned_model_on_what_is_left(kind, name):
    """The same prompt without the places of the dropped tokens, at the positions that the others have in the whole."""
    model = shortened(kind, CONFIGS[name])
    given = prompts(kind, model, [[1, None, 7, None, 8, 9]])
    found = features(model, given)
    rows = torch.cat([one.reshape(-1, 32) for one in found.pooler_output])
    there = ~rows.isnan().any(1)
    keep = torch.ones_like(given["input_ids"], dtype=torch.bool)
    keep[given["input_ids"] == IMAGE] = there
    kept = rows[there]
    short = {
        "input_ids": given["input_ids"][keep][None],
        "attention_mask": torch.ones(1, int(keep.sum()), dtype=torch.long),
        "position_ids": keep.nonzero()[:, 1][None] + (kind == "paligemma"),
        "mm_encoder_outputs": {
            "image": type(found)(pooler_output=kept[None] if isinstance(found.pooler_output, torch.Tensor) else [kept])
        },
    }
    if "token_type_ids" in given:
        short["token_type_ids"] = given["token_type_ids"][keep][None]
    lengths = seen_by_language_model(model)
    out, expected = run(model, given), run(base_of(model), short)
    assert lengths[0] == short["input_ids"].shape[1] < given["input_ids"].shape[1]
    assert out.logits.shape == (1, *given["input_ids"].shape[1:], 99)
    torch.testing.assert_close(out.logits[keep], expected.logits[0], atol=1e-5, rtol=1e-4)
    assert out.image_outputs.pooler_output[0].isnan().any()


def test_what_is_kept_is_what_was_recorded():
    model = shortened("llava")
    given = prompts("llava", model, SEVERAL)
    with tntprune.record(model) as trace:
        found = features(model, given)
    assert trace.kept[2].shape == (3, 16)
    for image, kept in zip(found.pooler_output, trace.kept[2]):
        assert (~image.isnan().any(1)).nonzero()[:, 0].tolist() == kept.tolist()


@pytest.mark.parametrize("kind", usual(CELLS_KEPT))
def test_whole_cells_are_kept_and_the_tower_runs_on_them_alone(kind):
    """Against the plain blocks on the kept patches, and the plain projector on a grid with nothing at other places."""
    model = shortened(kind)
    given = prompts(kind, model, [[1, None, 7, None, 8, 9]])
    with tntprune.record(model) as trace:
        found = features(model, given).pooler_output
    base = base_of(model).model
    tower, prefix, names = tower_of(base), kind == "internvl", dict(base.named_children())
    images = given["pixel_values"].flatten(0, -4)
    with torch.inference_mode():
        more = {"patch_attention_mask": torch.ones(2, 8, 8, dtype=torch.bool)} if "connector" in names else {}
        states = tower(images, output_hidden_states=True, **more).hidden_states[2]
        for number, (state, kept) in enumerate(zip(states, trace.kept[2])):
            cells = (kept // 16 * 4 + kept % 8 // 2).unique(return_counts=True)
            assert cells[1].tolist() == [4] * 4  # of 16 cells a quarter
            x = torch.cat([state[:prefix], state[kept + prefix]])[None]
            for block in (tower.encoder.layer if prefix else tower.encoder.layers)[2:]:
                x = block(x) if prefix else block(x, None)
            x = tower.layernorm(x) if prefix else tower.post_layernorm(x)
            grid = torch.zeros(1, 64, 32).index_copy(1, kept, x[:, prefix:])
            if prefix:
                shuffled = base.pixel_shuffle(grid.view(1, 8, 8, 32), 0.5).flatten(1, 2)
                expected = base.multi_modal_projector(shuffled)[0]
            else:
                expected = (base.connector if "connector" in names else base.multi_modal_projector)(grid)[0]
            own = found[0].unflatten(0, (2, 16))[number] if "connector" in names else found[number]
            there = ~own.isnan().any(1)
            assert there.nonzero()[:, 0].tolist() == cells[0].tolist()
            torch.testing.assert_close(own[there], expected[there], atol=1e-5, rtol=1e-4)


def test_methods_that_look_into_blocks_are_refused_where_cells_are_kept():
    for config in (tntprune.EViT(at=2), TNT(at=2, score="attention"), ToMe(r=2)):
        with pytest.raises(tntprune.UserError, match="output='tokens' keeps whole cells of 2 x 2 patches, unlike"):
            reduce_(make("internvl"), config, output="tokens")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_does_not_depend_on_its_batch_nor_on_its_padding(kind, side):
    model = shortened(kind)
    given = prompts(kind, model, SEVERAL, side)
    out, first = run(model, given, output_hidden_states=True), 0
    assert out.logits.shape[:2] == given["input_ids"].shape == out.hidden_states[0].shape[:2]
    for number, row in enumerate(SEVERAL):
        images = row.count(None)
        alone = prompts(kind, model, [row])
        for name in ("pixel_values", "image_sizes"):
            if name in given:
                alone[name] = given[name][first : first + images]
        if not images:
            alone = {name: value for name, value in alone.items() if name not in ("pixel_values", "image_sizes")}
        if kind in ("idefics3", "smolvlm") and images:  # whose images are in rows
            alone["pixel_values"] = given["pixel_values"][number : number + 1, :images]
        first += images
        there = given["attention_mask"][number].bool()
        expected = run(model, alone).logits[0]
        torch.testing.assert_close(out.logits[number, there], expected, atol=1e-4, rtol=1e-3)


def test_rows_of_one_length_with_unlike_numbers_of_images():
    """Nothing is padded, but one row loses more: it is filled up with tokens that nobody attends to."""
    model = shortened("llava")
    rows = [[1, None, 5, None], [1, None, *range(3, 68)]]
    given = prompts("llava", model, rows)
    assert given["attention_mask"].all()
    del given["attention_mask"]
    lengths = seen_by_language_model(model)
    out = run(model, given)
    assert lengths == [82]  # 1 + 16 + 65, where the other needs 34
    for number, images in enumerate((slice(0, 2), slice(2, 3))):
        alone = {"input_ids": given["input_ids"][number : number + 1], "pixel_values": given["pixel_values"][images]}
        torch.testing.assert_close(out.logits[number], run(model, alone).logits[0], atol=1e-4, rtol=1e-3)
    generated = model.generate(**given, **GENERATED)
    assert torch.equal(generated, model.generate(**given, **GENERATED, use_cache=False))


def test_places_fill_up_with_padding_first():
    keep = torch.tensor([[1, 0, 0, 1, 0, 1], [1, 1, 1, 0, 1, 1]]).bool()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()
    index, real, state = places_of(keep, mask)
    assert index.tolist() == [[0, 3, 5], [2, 4, 5]] and real.all()
    assert state.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 2]]
    mask[1, 4] = False
    index, real, _ = places_of(keep, mask)
    assert index.tolist() == [[0, 3, 5], [0, 2, 5]] and real.tolist() == [[True] * 3, [False, True, True]]


@pytest.mark.parametrize("rows", [ONE, SEVERAL], ids=["one", "several"])
def test_generation_with_a_cache_is_generation_without(kind, rows):
    model = shortened(kind)
    given = prompts(kind, model, rows)
    lengths, count = seen_by_language_model(model), given["input_ids"].shape[1]
    cached = model.generate(**given, **GENERATED)
    assert lengths == [lengths[0], 1, 1, 1] and lengths[0] < count
    assert torch.equal(cached, model.generate(**given, **GENERATED, use_cache=False))
    assert torch.equal(cached[:, :count], given["input_ids"]) and cached.shape[1] == count + 4
    places = given["attention_mask"].cumsum(1).clamp(min=1) - 1 + (kind == "paligemma")
    out = run(model, given, position_ids=places)
    for more in range(4):  # a loop of one's own
        token = next_of(out)
        assert token[:, 0].tolist() == cached[:, count + more].tolist()
        mask = torch.cat([given["attention_mask"], torch.ones(len(rows), more + 1, dtype=torch.long)], 1)
        step = {"input_ids": token, "attention_mask": mask, "position_ids": mask.cumsum(1)[:, -1:] - 1}
        if kind == "paligemma":
            step |= {"position_ids": step["position_ids"] + 1, "token_type_ids": torch.ones_like(token)}
        out = run(model, step, cache=out.cache)


def test_a_loop_without_masks_and_positions():
    model = shortened("llava")
    given = prompts("llava", model, ONE)
    out = run(model, {name: given[name] for name in ("input_ids", "pixel_values")})
    assert out.cache.get_seq_length() == 16 + 4
    ids = torch.cat([given["input_ids"], out.logits[:, -1:].argmax(-1)], 1)
    step = run(model, {"input_ids": ids[:, -1:]}, cache=out.cache)
    whole = run(model, {"input_ids": ids, "pixel_values": given["pixel_values"]})
    torch.testing.assert_close(step.logits[:, -1], whole.logits[:, -1], atol=1e-5, rtol=1e-4)


def test_beams_and_several_answers(kind):
    model = shortened(kind)
    given = prompts(kind, model, SEVERAL)
    options = {**GENERATED, "num_beams": 3}
    found = model.generate(**given, **options)
    assert torch.equal(found, model.generate(**given, **options, use_cache=False))
    torch.manual_seed(0)
    answers = model.generate(**given, **{**GENERATED, "num_return_sequences": 2, "do_sample": True})
    assert answers.shape == (6, given["input_ids"].shape[1] + 4)


@pytest.mark.parametrize("kind", ["llava", "llava_siglip"])
def test_a_second_turn_goes_on_from_the_cache_of_the_first(kind):
    model = shortened(kind)
    given = prompts(kind, model, [[1, None, 7, 8], [1, None, 9]])
    options = GENERATED
    first = model.generate(**given, **options, return_dict_in_generate=True)
    said, images = first.sequences, pixels(kind, 4)["pixel_values"]
    more = torch.tensor([[5] + [IMAGE] * placeholders(kind, model) + [6]] * 2)
    ids = torch.cat([said, more], 1)
    mask = torch.cat([given["attention_mask"], torch.ones(2, ids.shape[1] - given["input_ids"].shape[1]).long()], 1)
    lengths, cache = seen_by_language_model(model), copy.deepcopy(first.cache)
    fresh = {"pixel_values": images[2:]}
    second = model.generate(input_ids=ids, attention_mask=mask, **fresh, **options, cache=first.cache)
    assert lengths[0] == 1 + 1 + 16 + 1  # the last answer's token, which no cache holds yet, and the new turn
    whole = {"pixel_values": torch.stack([given["pixel_values"][0], images[2], given["pixel_values"][1], images[3]])}
    assert torch.equal(second, model.generate(input_ids=ids, attention_mask=mask, **whole, **options))
    again = model.generate(input_ids=ids, attention_mask=mask, **fresh, **options, cache=cache)
    assert torch.equal(again, second)


def test_a_shortened_cache_is_understood_whatever_the_tower_gives_afterwards():
    model = shortened("llava")
    out = run(model, prompts("llava", model, ONE))
    step, twin = {"input_ids": torch.tensor([[5]])}, copy.deepcopy(out.cache)
    expected = run(model, step, cache=out.cache).logits
    reduce_(model, CONFIGS["random"])
    assert torch.equal(run(model, step, cache=twin).logits, expected)


def test_a_cache_that_was_filled_with_text_first():
    model = shortened("llava")
    given = prompts("llava", model, ONE)
    cache = DynamicCache(config=model.config)
    run(model, {"input_ids": given["input_ids"][:, :1]}, cache=cache)
    rest = {"input_ids": given["input_ids"][:, 1:], "pixel_values": given["pixel_values"]}
    torch.testing.assert_close(
        run(model, rest, cache=cache).logits[:, -1], run(model, given).logits[:, -1], atol=1e-5, rtol=1e-4
    )


def test_prefill_in_chunks_is_prefill_at_once(kind):
    model = shortened(kind)
    given = prompts(kind, model, ONE)
    if kind == "paligemma":
        pytest.skip("its prefix is attended to in both directions, and needs all of it at once")
    whole = model.generate(**given, **GENERATED)
    assert torch.equal(model.generate(**given, **GENERATED, prefill_chunk_size=20), whole)


def test_methods_that_leave_another_number_of_tokens_in_each_image():
    model = shortened("llava", ATS(at=2, keep=0.5))
    given = prompts("llava", model, SEVERAL)
    left = [int((~image.isnan().any(1)).sum()) for image in features(model, given).pooler_output]
    lengths = seen_by_language_model(model)
    assert run(model, given).logits.isfinite().all() and max(left) <= 32
    assert lengths == [max(left[0] + left[1] + 4, left[2] + 2, 4)]


def test_losses_and_gradients_are_finite_and_of_the_tokens_that_are_seen(kind):
    model = shortened(kind)
    given = prompts(kind, model, SEVERAL)
    labels = given["input_ids"].masked_fill((given["input_ids"] == IMAGE) | (given["input_ids"] == PAD), -100)
    out = model(**given, labels=labels)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(grad.isfinite().all() for grad in grads.values())
    assert any(("projector" in name or "connector" in name) and grad.abs().sum() > 0 for name, grad in grads.items())
    assert any(
        ("vision_tower" in name or "vision_model" in name) and grad.abs().sum() > 0 for name, grad in grads.items()
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations_agree(kind, attention):
    model = reduce_(make(kind, attention), CONFIGS["random"], output="tokens")
    expected = shortened(kind)
    given = prompts(kind, model, SEVERAL)
    there = given["attention_mask"].bool()
    torch.testing.assert_close(
        run(model, given).logits[there], run(expected, given).logits[there], atol=1e-4, rtol=1e-3
    )


def test_half_precision(kind):
    model = shortened(kind).to(torch.bfloat16)
    given = prompts(kind, model, SEVERAL)
    given["pixel_values"] = given["pixel_values"].bfloat16()
    assert run(model, given).logits.isfinite().all()


def test_what_a_shortened_sequence_cannot_do_is_refused_in_one_line():
    model = shortened("llava")
    given = prompts("llava", model, ONE)
    fewer = {**given, "input_ids": given["input_ids"][:, 4:], "attention_mask": given["attention_mask"][:, 4:]}
    with pytest.raises(tntprune.UserError, match=r"the prompt has 61 image tokens; expected 64 for its images"):
        run(model, fewer)
    with pytest.raises(tntprune.UserError, match="inputs_embeds and images"):
        run(model, {"inputs_embeds": torch.zeros(1, 68, 32), "pixel_values": given["pixel_values"]})
    with pytest.raises(tntprune.UserError, match="output_attentions=True"):
        run(shortened("llava_siglip"), prompts("llava_siglip", model, ONE), output_attentions=True)
    with pytest.raises(tntprune.UserError, match="expected 1 x 68, one number for each token"):
        run(model, {**given, "attention_mask": torch.ones(1, 50)})
    with pytest.raises(tntprune.UserError, match="no static cache"):
        model.generate(**given, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(tntprune.UserError, match="position_ids of packed sequences"):
        packed = {name: given[name] for name in ("input_ids", "pixel_values")}
        packed["position_ids"] = torch.arange(68)[None] % 40
        run(model, packed, use_cache=False)
    with pytest.raises(tntprune.UserError, match="assisted generation cannot take tokens back"):
        model.generate(**given, max_new_tokens=2, prompt_lookup_num_tokens=2)
    cache = run(model, given).cache
    cache.crop(-5)
    with pytest.raises(tntprune.UserError, match=r"a cache of 1 prompt\(s\) that was cut back"):
        run(model, {"input_ids": torch.tensor([[5]])}, cache=cache)
    with pytest.raises(tntprune.UserError, match="every visual token was dropped, or the tower gives NaN"):
        run(model, {**given, "pixel_values": given["pixel_values"] * torch.nan})


def test_fillers_are_refused_where_a_sliding_window_would_count_them():
    model = shortened("gemma3")
    rows = [[1, None, 5, None], [1, None, *range(3, 20)]]  # of one length
    given = prompts("gemma3", model, rows)
    assert given["attention_mask"].all() and run(model, given).logits.isfinite().all()
    model.config.text_config.sliding_window = 16
    assert run(model, prompts("gemma3", model, ONE)).logits.isfinite().all()
    with pytest.raises(tntprune.UserError, match=r"and 2\d are left, more than the sliding window of 16"):
        run(model, given)


def test_return_dict_and_the_model_without_a_head(kind):
    model = shortened(kind)
    given = prompts(kind, model, ONE)
    out, inner = run(model, given), run(model.model, given)
    assert torch.equal(run(model, given, return_dict=False)[0], out.logits)
    with torch.inference_mode():
        assert torch.equal(model.lm_head(inner.last_hidden_state), out.logits)
    assert torch.equal(run(model.model, given, return_dict=False)[0], inner.last_hidden_state)


class Inside(Random):
    """Acts between attention and MLP."""

    method = "inside"
    is_inside = True


class InsideMethod(tntprune.ScoringMethod):
    def score(self, tokens, heads):
        return tokens.patches.norm(dim=2)


def test_a_method_of_ones_own_that_acts_inside_blocks_is_refused_where_cells_are_kept():
    implement(Inside, InsideMethod)
    model = reduce_(make("internvl"), Inside(at=2, keep=0.5))
    assert run(model, prompts("internvl", model, ONE)).logits.isfinite().all()
    with pytest.raises(
        tntprune.UserError, match="inside acts inside blocks or reads their attention, and a token is a"
    ):
        reduce_(make("internvl"), Inside(at=2, keep=0.5), output="tokens")
