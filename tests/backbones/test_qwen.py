"""Qwen's vision-language models: whole cells of patches, images of different sizes, positions with three axes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tntprune
from tntprune import TNT, Random, ToMe
from tntprune.backbones.attach import base_of, is_reduced, reduction_of
from tntprune.backbones.base import tower_of
from tntprune.exporters.export import export
from tntprune.methods.tnt import method as tnt_method
from tntprune.reduce import reduce_, restore_
from vlm_models import IMAGE, PACKED, PAD, make, packed

ROWS = [[1, (3, 5), 7, (4, 2), 8, 9], [1, (3, 5), 5], [1, 4, 6, 3]]  # several images, one, and none
ONE = [[1, (3, 5), 7, 8, 9]]
CONFIGS = {
    "random": Random(at=2, keep=0.4),
    "merge": TNT(at=(1, 3), keep=0.5),
    "windows": TNT(at=(1, 3), keep=0.5, window=2),
    "drop": TNT(at=(0, 2), keep=0.7, recipe="relative", noise_blocks=(0, 2), similar=2, similar_at="score"),
    "tome": ToMe(at=(1, 2), keep=0.5, inside=False, metric="x"),
}
GENERATED = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE, 97]}


@pytest.fixture(params=PACKED)
def kind(request):
    return request.param


def reduced(kind, config=CONFIGS["random"], output="tokens", attention="sdpa"):
    model = reduce_(make(kind, attention), config, output=output)
    reduction_of(model).set_calibrated()
    return model


def run(model, given, **options):
    with torch.inference_mode():
        return model(**given, **options)


def features(model, given, **options):
    images = given["pixel_values"], given["image_grid_thw"]
    with torch.inference_mode():
        return model.model.get_image_features(*images, return_dict=True, **options)


def kept_places(found, given):
    """Which tokens of a prompt the language model sees, (B, n), and which of the visual ones those are."""
    there = ~torch.cat(tuple(found.pooler_output)).isnan().any(1)
    keep = torch.ones_like(given["input_ids"], dtype=torch.bool)
    keep[given["input_ids"] == IMAGE] = there
    return keep, there


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.wide)])
def test_keep_one_is_the_base_bit_for_bit_and_so_is_a_restored_one(kind, attention):
    model = make(kind, attention)
    given, plain = packed(ROWS), type(model)
    names, before = list(model.state_dict()), run(model, given).logits
    states = features(model, given, output_hidden_states=True)
    for output in ("grid", "tokens"):
        reduce_(model, TNT(at=2, keep=1.0), output=output)
        assert type(model) is not plain and type(model).__name__ == plain.__name__
        assert torch.equal(run(model, given).logits, before)
        own = features(model, given, output_hidden_states=True)
        assert torch.equal(own.last_hidden_state, states.last_hidden_state)
        assert len(own.hidden_states) == 5 and all(map(torch.equal, own.hidden_states, states.hidden_states))
        assert torch.equal(features(model, given, output_hidden_states=[2]).hidden_states[2], states.hidden_states[2])
    reduce_(model, CONFIGS["random"])
    assert not torch.equal(run(model, given).logits, before)
    assert torch.equal(run(base_of(model), given).logits, before) and is_reduced(model)
    restore_(model)
    assert type(model) is plain and list(model.state_dict()) == names and torch.equal(run(model, given).logits, before)


def dense(tower, x, cells, windows, grid, first):
    """Run the blocks behind `first` on some cells, (n, 4, D), with attention as matrices; each block's output."""
    rows, columns = cells // grid[1], cells % grid[1]
    inner = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    places = torch.stack([rows, columns], 1)[:, None] * 2 + inner  # (n, 4, 2)
    cosine, sine = tower.rotary_pos_emb(x, places.flatten(0, 1))
    x, found = x.flatten(0, 1), []
    mine = windows[cells].repeat_interleave(4)
    for number in range(first, len(tower.blocks)):
        block = tower.blocks[number]
        confined = hasattr(tower, "fullatt_block_indexes") and number not in tower.fullatt_block_indexes
        query, key, value = block.attn.qkv(block.norm1(x)).view(len(x), 3, 4, 8).unbind(1)

        def turned(y):
            half = torch.cat([-y[..., 4:], y[..., :4]], -1)
            return y * cosine[:, None] + half * sine[:, None]

        logits = torch.einsum("qhd,khd->hqk", turned(query), turned(key)) * 8**-0.5
        if confined:
            logits = logits.masked_fill(mine[:, None] != mine, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), value).flatten(1)
        x = x + block.attn.proj(out)
        x = x + block.mlp(block.norm2(x))
        found.append(x)
    return found


def test_the_tower_is_attention_among_the_kept_cells_alone(kind):
    """Against matrices of attention, image by image: what is kept, windows, rotary positions, mergers."""
    model = reduced(kind, Random(at=2, keep=0.4))
    plain, given = base_of(model).model.visual, packed(ROWS)
    with tntprune.record(model) as trace:
        found = features(model, given)
    values = given["pixel_values"].split([60, 32, 60])
    for number, (grid, patches) in enumerate(zip(((3, 5), (4, 2), (3, 5)), values)):
        kept = trace.kept[2][number]
        kept = kept[kept >= 0]
        assert len(kept) == int(0.4 * grid[0] * grid[1])
        pooled = found.pooler_output[number]
        assert (~pooled.isnan().any(1)).nonzero()[:, 0].tolist() == kept.tolist()
        with torch.inference_mode():
            whole = plain(patches, torch.tensor([[1, 2 * grid[0], 2 * grid[1]]]), output_hidden_states=True)
            cells, windows = grid[0] * grid[1], torch.zeros(grid[0] * grid[1], dtype=torch.long)
            if kind == "qwen2_5_vl":
                rows, columns = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
                windows = (rows // 2 * 100 + columns // 2).flatten()
            x = torch.empty(cells, 4, 32)
            x[windows.argsort(stable=True)] = whole.hidden_states[2].view(cells, 4, 32)
            states = dense(plain, x[kept], kept, windows, grid, 2)
            torch.testing.assert_close(pooled[kept], plain.merger(states[-1]), atol=1e-4, rtol=1e-3)
            if kind.startswith("qwen3"):  # the third block's is handed on too, and the first's
                deep = [layer[number][kept] for layer in found.deepstack_features]
                expected = plain.deepstack_merger_list[1](states[0])
                torch.testing.assert_close(deep[1], expected, atol=1e-4, rtol=1e-3)
                first = features(base_of(model), given).deepstack_features[0][number][kept]
                torch.testing.assert_close(deep[0], first, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_language_model_is_the_unpruned_one_on_what_is_left(kind, name):
    """Embeddings put together by hand, at the positions that the tokens have in the whole prompt."""
    model = reduced(kind, CONFIGS[name])
    given = packed(ROWS[:1])
    found, base = features(model, given), base_of(model)
    keep, there = kept_places(found, given)
    positions, _ = base.model.get_rope_index(**{k: v for k, v in given.items() if k != "pixel_values"})
    visual = given["input_ids"][keep] == IMAGE
    embeds = base.get_input_embeddings()(given["input_ids"][keep]).clone()
    embeds[visual] = torch.cat(tuple(found.pooler_output))[there]
    more = {}
    if kind.startswith("qwen3"):
        deep = [torch.cat(tuple(layer))[there] for layer in found.deepstack_features]
        more = {"visual_pos_masks": visual[None], "deepstack_visual_embeds": deep}
    seen = []
    hook = model.model.language_model.register_forward_hook(lambda _, __, kw, ___: seen.append(kw), with_kwargs=True)
    out = run(model, given)
    hook.remove()
    assert torch.equal(seen[0]["position_ids"], positions[:, keep][:, None])  # time, rows and columns
    assert seen[0]["inputs_embeds"].shape[1] == int(keep.sum()) < keep.shape[1]
    with torch.inference_mode():
        state = base.model.language_model(
            inputs_embeds=embeds[None], position_ids=positions[:, keep][:, None], **more
        ).last_hidden_state
        expected = base.lm_head(state)[0]
    assert out.logits.shape == (*keep.shape, 99)
    torch.testing.assert_close(out.logits[keep], expected, atol=1e-5, rtol=1e-4)


def test_windows_follow_the_grid_of_each_image(kind, monkeypatch):
    grids, plain = [], tnt_method.windows_of

    def spy(tokens, *args, **options):
        grids.append((tokens.grid, tokens.grid_size))
        return plain(tokens, *args, **options)

    monkeypatch.setattr(tnt_method, "windows_of", spy)
    run(reduced(kind, CONFIGS["windows"]), packed(ROWS[:1]))
    assert set(grids) == {((3, 5), 15), ((4, 2), 8)}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("output", ["grid", "tokens"])
def test_a_prompt_does_not_depend_on_its_batch_nor_on_its_padding(kind, side, output):
    model = reduced(kind, CONFIGS["merge"], output)
    given = packed(ROWS, side)
    out, first = run(model, given, output_hidden_states=True), 0
    assert out.logits.shape[:2] == given["input_ids"].shape == out.hidden_states[0].shape[:2]
    for number, row in enumerate(ROWS):
        alone = packed([row], skip=first)
        first += sum(isinstance(one, tuple) for one in row)
        there = given["attention_mask"][number].bool()
        torch.testing.assert_close(out.logits[number, there], run(model, alone).logits[0], atol=1e-4, rtol=1e-3)


def test_every_cell_is_given_with_grid_and_is_a_kept_ones(kind):
    model = reduced(kind, Random(at=2, keep=0.4), "grid")
    given = packed(ROWS)
    grid = features(model, given)
    reduce_(model, Random(at=2, keep=0.4), output="tokens")
    laid = features(model, given)
    layers = [(grid.pooler_output, laid.pooler_output)]
    if kind.startswith("qwen3"):
        layers += list(zip(grid.deepstack_features, laid.deepstack_features))
    for filled, kept in layers:
        for whole, part in zip(filled, kept):
            there = ~part.isnan().any(1)
            assert torch.equal(whole[there], part[there]) and whole.isfinite().all()
            assert (whole[:, None] - part[there]).abs().amax(2).amin(1).max() == 0


@pytest.mark.parametrize("rows", [ONE, ROWS], ids=["one", "several"])
def test_generation_with_a_cache_is_generation_without(kind, rows):
    model = reduced(kind)
    given = packed(rows)
    lengths, count = [], given["input_ids"].shape[1]
    layer = model.model.language_model.layers[0]
    hook = layer.register_forward_hook(lambda _, given, out: lengths.append(given[0].shape[1]))
    cached = model.generate(**given, **GENERATED)
    hook.remove()
    assert lengths == [lengths[0], 1, 1, 1] and lengths[0] < count
    assert torch.equal(cached, model.generate(**given, **GENERATED, use_cache=False))
    assert torch.equal(cached[:, :count], given["input_ids"]) and cached.shape[1] == count + 4
    out = run(model, given)
    for more in range(4):  # a loop of one's own, which leaves the positions to the model
        logits = out.logits[:, -1:].clone()
        logits[..., [2, IMAGE, 97]] = -torch.inf
        token = logits.argmax(-1)
        assert token[:, 0].tolist() == cached[:, count + more].tolist()
        mask = torch.cat([given["attention_mask"], torch.ones(len(rows), more + 1, dtype=torch.long)], 1)
        out = run(model, {"input_ids": token, "attention_mask": mask}, cache=out.cache)


def test_beams_and_several_answers_and_prefill_in_chunks(kind):
    model = reduced(kind)
    given = packed(ROWS)
    options = {**GENERATED, "num_beams": 3}
    found = model.generate(**given, **options)
    assert torch.equal(found, model.generate(**given, **options, use_cache=False))
    answers = model.generate(**given, **{**GENERATED, "num_return_sequences": 2, "do_sample": True})
    assert answers.shape == (6, given["input_ids"].shape[1] + 4)
    given = packed(ONE)
    whole = model.generate(**given, **GENERATED)
    assert torch.equal(model.generate(**given, **GENERATED, prefill_chunk_size=6), whole)


def test_a_second_turn_of_text_goes_on_from_the_cache_of_the_first(kind):
    model = reduced(kind)
    given = packed([[1, (3, 5), 7, 8], [1, (2, 3), 9]])
    first = model.generate(**given, **GENERATED, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, torch.tensor([[5, 6]] * 2)], 1)
    more = ids.shape[1] - given["input_ids"].shape[1]
    turn = {
        "input_ids": ids,
        "attention_mask": torch.cat([given["attention_mask"], torch.ones(2, more).long()], 1),
        "mm_token_type_ids": torch.cat([given["mm_token_type_ids"], torch.zeros(2, more).long()], 1),
    }
    whole = {**turn, **{name: given[name] for name in ("pixel_values", "image_grid_thw")}}
    expected = model.generate(**whole, **GENERATED)
    model.generate(**given, **GENERATED)  # transformers keeps the last prompt's offset of positions on the model
    second = model.generate(**turn, **GENERATED, cache=first.cache)
    assert torch.equal(second, expected)


def test_several_turns_with_images_in_one_prompt_are_those_turns(kind):
    """What comes first does not depend on a later turn's image."""
    model = reduced(kind, CONFIGS["merge"])
    one, two = packed([[1, (3, 5), 7, 8]]), packed([[1, (3, 5), 7, 8, (2, 4), 5, (3, 5), 6]])
    count = one["input_ids"].shape[1]
    torch.testing.assert_close(run(model, two).logits[:, :count], run(model, one).logits, atol=1e-4, rtol=1e-3)


def test_videos_are_frames_with_grid_and_refused_with_tokens(kind):
    model = make(kind)
    ids = torch.tensor([[1, *[97] * 8, 7, *[97] * 8, 8]] if kind.startswith("qwen3") else [[1, *[97] * 16, 7, 8]])
    given = {
        "input_ids": ids, "mm_token_type_ids": 2 * (ids == 97).long(), "video_grid_thw": torch.tensor([[2, 4, 8]]),
        "pixel_values_videos": torch.randn(64, 96, generator=torch.Generator().manual_seed(0)),
    }  # fmt: skip
    before = run(model, given).logits
    reduce_(model, TNT(at=2, keep=1.0))
    assert torch.equal(run(model, given).logits, before)
    reduce_(model, Random(at=2, keep=0.5))
    with tntprune.record(model) as trace:
        after = run(model, given).logits
    assert trace.kept[2].shape == (2, 4) and after.isfinite().all() and not torch.equal(after, before)
    reduce_(model, Random(at=2, keep=0.5), output="tokens")
    with pytest.raises(tntprune.UserError, match=r"a video with output='tokens'; expected images, or output='grid'"):
        run(model, given)


def test_merged_cells_count_by_their_size_in_their_windows(kind):
    """Against a matrix of attention with the logarithms of sizes in it."""
    model = reduced(kind, CONFIGS["merge"])
    attention = model.model.visual.blocks[0].attn
    x, ends = torch.randn(20, 32), torch.tensor([0, 8, 20], dtype=torch.int32)
    angles = torch.rand(20, 8)
    turns, bias = (angles.cos(), angles.sin()), torch.rand(20)
    with torch.inference_mode():
        plain = attention(x, ends, turns)
        torch.testing.assert_close(attention(x, ends, turns, bias=torch.zeros(20)), plain, atol=1e-5, rtol=1e-4)
        query, key, value = attention.qkv(x).view(20, 3, 4, 8).unbind(1)
        query, key = attention.rotate(query, key, *turns)
        logits = torch.einsum("qhd,khd->hqk", query, key) * 8**-0.5 + bias
        logits = logits.masked_fill((torch.arange(20)[:, None] < 8) != (torch.arange(20) < 8), -torch.inf)
        expected = attention.proj(torch.einsum("hqk,khd->qhd", logits.softmax(-1), value).flatten(1))
    torch.testing.assert_close(attention(x, ends, turns, bias=bias), expected, atol=1e-5, rtol=1e-4)
    given, biases = packed(ROWS), []
    for block in model.model.visual.blocks:
        block.register_forward_hook(lambda _, __, kw, ___: biases.append(kw.get("bias")), with_kwargs=True)
    run(model, given)
    assert biases[0] is None and all(bias is not None for bias in biases[1:])
    assert biases[1].shape == (4 * (7 + 4 + 7),) and (biases[1] > 0).any()


def test_every_block_is_called_once_with_what_it_works_on(kind):
    model = reduced(kind, Random(at=2, keep=0.5))
    widths = []
    for block in tower_of(model).blocks:
        block.register_forward_hook(lambda _, given, out: widths.append(given[0].shape[0]))
    with tntprune.record(model) as trace:
        features(model, packed(ROWS))
    assert widths == [4 * 38, 4 * 38, 4 * 18, 4 * 18]  # of 15, 8 and 15 cells 7, 4 and 7
    assert [one.tolist() for one in trace.counts[::4]] == [[15, 8, 15], [7, 4, 7], [7, 4, 7]]
    assert trace.kept[2].shape == (3, 7) and trace.kept[2][1, :3].tolist() == [-1] * 3
    assert trace.carrier[2].shape == (3, 15) and (trace.carrier[2][1, 8:] == -1).all()


@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(f"qwen2{n}_vl", marks=pytest.mark.wide) for n in ("", "_5"))]
)
@pytest.mark.parametrize("output", ["grid", "tokens"])
def test_predicted_macs_are_the_counted_ones(kind, output):
    model = make(kind, "eager")
    side = 4 if kind.startswith("qwen3") else 24
    given = packed([[1, (side, side), 7, 8, 9, 5, 4, 3]])
    base = tntprune.macs(model, text=7)
    reduce_(model, Random(at=(1, 2), keep=0.5), output=output)
    found = tntprune.macs(model, text=7)
    for one, what in ((base, base_of(model)), (found, model)):
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            what(**given, logits_to_keep=1)
        total = counter.get_total_flops() / 2
        assert abs(one.macs - total) < 0.05 * total  # norms are not counted there
    assert found.base_macs == base.macs and found.base_visual == side**2
    assert found.visual == (side**2 // 4 if output == "tokens" else side**2)
    assert found.macs == found.tower + found.prefill and "projector" not in str(found)


def test_a_mixture_of_experts_is_not_counted_and_shows_its_routers_only_to_whole_prompts():
    model, given = make("qwen3_vl_moe"), packed(ROWS)
    with pytest.raises(tntprune.UserError, match="language model Qwen3VLMoeTextModel is not counted; expected blocks"):
        tntprune.macs(model)
    reduce_(model, Random(at=2, keep=0.5), output="grid")
    assert len(run(model, given, output_router_logits=True).router_logits) == 2
    reduce_(model, Random(at=2, keep=0.5), output="tokens")
    with pytest.raises(tntprune.UserError, match="output_router_logits=True: the routers of a shortened sequence"):
        run(model, given, output_router_logits=True)


def test_a_scorer_is_trained_and_the_model_is_not(kind):
    model = reduce_(make(kind), TNT(at=(1, 2), keep=0.5), output="tokens")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [packed(ROWS), packed([[1, (2, 3), 5, 6]])]
    tntprune.calibrate_(model, batches, epochs=2, progress=False)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("reduction." in name for name in changed) and reduction_of(model).calibrated
    assert run(model, batches[0]).logits.isfinite().all()
    with pytest.raises(tntprune.UserError, match="a batch without image_grid_thw"):
        tntprune.calibrate_(model, [{k: v for k, v in batches[0].items() if k != "image_grid_thw"}], progress=False)


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_gradients_are_finite_and_of_the_tokens_that_are_seen(kind, checkpointing):
    model = reduced(kind, CONFIGS["merge"])
    given = packed(ROWS)
    labels = given["input_ids"].masked_fill((given["input_ids"] == IMAGE) | (given["input_ids"] == PAD), -100)
    expected = None
    for on in {False, checkpointing}:
        model.zero_grad()
        model.train()
        reduction_of(model).eval()
        if on:
            model.activation_checkpointing_enable()
        model(**given, labels=labels, use_cache=False).loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert all(grad.isfinite().all() for grad in grads.values())
        assert any("visual.blocks.0" in name and grad.abs().sum() > 0 for name, grad in grads.items())
        if expected is not None:
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-4)
        expected = grads


def test_saved_copied_and_put_back_together(kind, tmp_path):
    model = make(kind)
    given = packed(ROWS)
    before = run(model, given).logits
    reduce_(model, CONFIGS["merge"], output="tokens")
    reduction_of(model).set_calibrated()
    after = run(model, given).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, given).logits, after)
        restore_(twin)
    model.save_pretrained(tmp_path)
    loaded, about = type(base_of(model)).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about.values()) and torch.equal(run(loaded.eval(), given).logits, before)
    tntprune.load_(loaded, tmp_path)
    assert reduction_of(loaded).output == "tokens" and torch.equal(run(loaded, given).logits, after)


def test_the_tower_alone_takes_images_too(kind):
    model = make(kind)
    images = torch.randn(2, 3, 24, 40)
    tower = model.model.visual
    whole = tntprune.features(tower, images)
    assert whole.shape == (2, 32, 3, 5)
    pooled = tntprune.embed(tower, images, progress=False)
    torch.testing.assert_close(pooled, whole.mean((2, 3)))
    reduce_(model, TNT(at=2, keep=1.0))
    assert torch.equal(tntprune.features(model, images), whole)
    restore_(model)
    reduce_(tower, Random(at=2, keep=0.4))
    given = packed(ROWS)
    with torch.inference_mode():
        out = tower(given["pixel_values"], given["image_grid_thw"])
        assert torch.equal(tower(given["pixel_values"], given["image_grid_thw"], return_dict=False)[0], out[0])
    assert out.last_hidden_state.shape == (4 * 15, 32) and out.pooler_output.shape == (15, 32)  # 6 + 3 + 6 cells
    assert tntprune.features(tower, images).shape == (2, 32, 3, 5)
    assert tntprune.embed(tower, images, progress=False).shape == (2, 32)


def test_a_scorer_of_the_tower_alone_is_trained_on_images(kind):
    tower = reduce_(make(kind).model.visual, TNT(at=2, keep=0.5))
    before = {name: value.clone() for name, value in tower.state_dict().items()}
    tntprune.calibrate_(tower, torch.randn(4, 3, 16, 24), epochs=2, batch_size=2, progress=False)
    changed = {name for name, value in tower.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("reduction.") for name in changed)
    with pytest.raises(tntprune.UserError, match="cannot be searched"):
        tntprune.find_plan(tower, torch.randn(16, 3, 16, 24), macs=0.7, photos=16, progress=False)


def test_half_precision_and_eager_attention(kind):
    given = packed(ROWS)
    there = given["attention_mask"].bool()
    eager = run(reduced(kind, CONFIGS["merge"], attention="eager"), given).logits[there]
    torch.testing.assert_close(run(reduced(kind, CONFIGS["merge"]), given).logits[there], eager, atol=1e-4, rtol=1e-3)
    half = reduced(kind, CONFIGS["merge"]).to(torch.bfloat16)
    assert run(half, given).logits.isfinite().all()


def test_what_cannot_be_done_is_refused_in_one_line(kind, tmp_path):
    model = reduced(kind)
    given = packed(ONE)
    short = {**given, **{n: given[n][:, 4:] for n in ("input_ids", "attention_mask", "mm_token_type_ids")}}
    with pytest.raises(tntprune.UserError, match=r"the prompt has 12 image tokens; expected 15 for its images"):
        run(model, short)
    with pytest.raises(tntprune.UserError, match=r"60 patches for grid_thw \[\[1, 4, 10\]\]; expected 40 of them"):
        run(model, {**given, "image_grid_thw": torch.tensor([[1, 4, 10]])})
    with pytest.raises(tntprune.UserError, match=r"grid_thw \[\[1, 5, 12\]\]: expected rows and columns of patches in"):
        run(model, {**given, "image_grid_thw": torch.tensor([[1, 5, 12]])})
    with pytest.raises(tntprune.UserError, match="pixel_values without image_grid_thw; expected both"):
        run(model, {name: value for name, value in given.items() if name != "image_grid_thw"})
    with pytest.raises(
        tntprune.UserError, match="an image behind a cache that is filled already, without position_ids"
    ):
        cache = run(model, given).cache
        grown = {**packed(ONE), "attention_mask": torch.ones(1, 2 * given["input_ids"].shape[1])}
        run(model, grown, cache=cache)
    with pytest.raises(tntprune.UserError, match=r"output_attentions=True"):
        run(model, given, output_attentions=True)
    with pytest.raises(tntprune.UserError, match="no whole number of cells of 8 x 8"):
        tntprune.features(model, torch.randn(1, 3, 20, 24))
    for config, message in {
        TNT(at=2, score="attention"): "cannot be opened to act inside them, to read attention, to compare keys; score=",
        TNT(at=2, inside=True): "inside=False would do",
        ToMe(r=2): "inside=False, metric='x' would do",
        tntprune.EViT(at=2): "the model has none",
    }.items():
        with pytest.raises(tntprune.UserError, match=message):
            reduce_(model, config)
    for exported in (model, tower_of(model)):
        with pytest.raises(tntprune.UserError, match="takes prompts, or packed images of every size"):
            export(exported, tmp_path / "m.onnx")
    with pytest.raises(tntprune.UserError, match="assisted generation cannot take tokens back"):
        model.generate(**given, max_new_tokens=2, prompt_lookup_num_tokens=2)
    cache = run(model, given).cache
    cache.crop(-5)
    with pytest.raises(tntprune.UserError, match=r"a cache of 1 prompt\(s\) that was cut back"):
        run(model, {"input_ids": torch.tensor([[5]])}, cache=cache)
