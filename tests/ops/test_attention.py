"""A block in halves is the block, and what a method may read of its attention is what attention is."""

from __future__ import annotations

import pytest
import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

import tntprune
from conftest import SMALL, make, photos_for
from reference import in_halves
from tntprune import Random, TopK, UserError, reduce_
from tntprune.backbones.base import find_backbone
from tntprune.ops.attention import Heads, log_size


def opened(model):
    """The blocks of a reduced model: what the halves of each give, and what it gives whole."""
    x, places = model.embed(photos_for(model))
    for number in range(1, len(model.blocks) + 1):
        whole = model.run(number, x, places)
        yield in_halves(model, number, x, places), whole
        x = whole


def test_the_halves_of_a_block_are_the_block_bit_for_bit(model):
    reduce_(model, Random(at=2))
    with torch.inference_mode():
        for halved, whole in opened(model):
            assert torch.equal(halved, whole)


def test_without_fused_attention_too(model):
    for block in model.blocks:
        block.attn.fused_attn = False
    reduce_(model, Random(at=2))
    with torch.inference_mode():
        for halved, whole in opened(model):
            torch.testing.assert_close(halved, whole, atol=1e-5, rtol=1e-5)


def test_a_bias_is_what_timm_calls_a_mask(model):
    reduce_(model, Random(at=2))
    with torch.inference_mode():
        x, places = model.embed(photos_for(model))
        size = torch.randint(0, 4, (len(x), x.shape[1] - model.num_prefix_tokens)).float()
        size[:, 0] = 1  # something is left to look at where there is no prefix token
        bias = log_size(size, model.num_prefix_tokens, power=1)
        for number, block in enumerate(model.blocks, 1):
            if isinstance(model, Eva):
                whole = block(x, rope=model.rope_of(number, places), attn_mask=bias)
            elif isinstance(model, Beit):
                whole = block(x, shared_rel_pos_bias=bias)
            else:
                whole = block(x, attn_mask=bias)
            halved = in_halves(model, number, x, places, bias)
            torch.testing.assert_close(halved, whole, atol=1e-5, rtol=1e-5)
            x = whole


def test_rows_and_the_map_are_softmax_row_by_row():
    query, key, value = torch.randn(3, 2, 4, 6, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    bias = torch.tensor([0.0, 0, 1.5, -1e4, 0, 0.3])[None, None, None].expand(2, 1, 1, 6)
    heads = Heads(query, key, value, 0.4, bias)
    by_hand = torch.empty(2, 4, 6, 6)
    for b in range(2):
        for h in range(4):
            for i in range(6):
                logits = [0.4 * float(query[b, h, i] @ key[b, h, j]) + float(bias[b, 0, 0, j]) for j in range(6)]
                weights = torch.tensor(logits).exp()
                by_hand[b, h, i] = weights / weights.sum()
    torch.testing.assert_close(heads.map(), by_hand)
    torch.testing.assert_close(heads.rows(2), by_hand[:, :, :2])
    torch.testing.assert_close(heads.output(), by_hand @ value)
    whole = Heads(query, key, value, 0.4, bias, attention=heads.map())
    torch.testing.assert_close(whole.rows(2), by_hand[:, :, :2])
    torch.testing.assert_close(whole.output(), by_hand @ value)


def test_sizes_count_in_attention_like_as_many_equal_tokens():
    """A token of size 3 draws as much attention as three copies of it; one of size 0 draws none."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 4, 5, generator=generator).unbind(0)  # a prefix token and three patches
    merged = Heads(query, key, value, 0.4, log_size(torch.tensor([[3.0, 1.0, 0.0]]), 1, power=1))
    copies = [0, 1, 1, 1, 2]
    spelled = Heads(query[:, :, copies], key[:, :, copies], value[:, :, copies], 0.4)
    torch.testing.assert_close(merged.output()[:, :, :3], spelled.output()[:, :, [0, 1, 4]])
    masked = Heads(query, key, value, 0.4, log_size(torch.tensor([[3.0, 1.0, 0.0]]), 1, power=0))
    torch.testing.assert_close(
        masked.output()[:, :, :3], Heads(query[:, :, :3], key[:, :, :3], value[:, :, :3], 0.4).output()
    )


def test_where_nothing_is_left_there_is_no_nan():
    query, key, value = torch.randn(3, 1, 2, 4, 5).unbind(0)
    bias = log_size(torch.zeros(1, 4), 0, power=1)
    assert Heads(query, key, value, 0.4, bias).output().isfinite().all()
    size = torch.tensor([[1.0, 0.0, 2.0]], requires_grad=True)
    log_size(size, 0, power=1).sum().backward()
    assert size.grad.tolist() == [[1.0, 0.0, 0.5]]


def test_only_blocks_that_somebody_looks_into_are_opened(monkeypatch):
    model = reduce_(make("plain"), TopK(at=(2, 4), keep=0.7))
    whole = []
    for number, block in enumerate(model.blocks, 1):

        def see(module, args, kwargs, number=number):
            if "inside" not in kwargs:
                whole.append(number)

        block.register_forward_pre_hook(see, with_kwargs=True)
    with torch.inference_mode():
        model(photos_for(model))
    assert whole == [1, 3, 5, 6]


@pytest.mark.parametrize(
    ("config", "kept"),
    [(tntprune.ToMe(r=3), 0), (tntprune.TNT(at=2, how="merge", metric="mean", proportional=False), 1)],
    ids=["inside", "after"],
)
def test_queries_keys_and_values_are_let_go_before_the_mlp_unless_somebody_looks_at_them_later(config, kept):
    """They would be the largest tensors beside the MLP's own."""
    model, alive = reduce_(make("plain"), config), []
    shown = []
    for block in model.blocks:
        block.attn.register_forward_hook(
            lambda module, args, kwargs, out: shown.append(kwargs["inside"]) if "inside" in kwargs else None,
            with_kwargs=True,
        )
        block.mlp.register_forward_pre_hook(lambda module, args: alive.append([one.heads for one in shown]))
    with torch.inference_mode():
        model(photos_for(model))
    assert shown and sum(heads is not None for heads in alive[-1]) == kept


@pytest.mark.parametrize("config", [TopK(at=(2, 4), keep=0.5), tntprune.EViT(at=(2, 4), keep=0.5)], ids=str)
def test_no_attention_map_is_built(config, monkeypatch):
    """The rows that rank are one query each; the output comes from fused attention."""
    model = reduce_(make("distilled"), config)
    seen = []
    logits = Heads.logits
    monkeypatch.setattr(Heads, "logits", lambda self, query: seen.append(query.shape[2]) or logits(self, query))
    monkeypatch.setattr(Heads, "map", None)
    with torch.inference_mode():
        model(photos_for(model))
    assert seen == [1, 1]


def closed():
    return VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()


def test_blocks_that_cannot_be_opened_still_run_whole():
    model = closed()
    images = photos_for(model)
    with torch.inference_mode():
        before = model(images)
        assert torch.equal(reduce_(model, Random(at=2, keep=1.0))(images), before)
        assert not torch.equal(reduce_(model, Random(at=2, keep=0.5))(images), before)
    assert not find_backbone(model).layout(model).opens


@pytest.mark.parametrize("config", [TopK(at=2), tntprune.EViT(at=2), tntprune.ZeroTPrune(at=2)], ids=str)
def test_methods_that_look_inside_refuse_them_and_say_what_would_do(config):
    with pytest.raises(UserError, match="attention of blocks that do not show it; tnt, random"):
        reduce_(closed(), config)


@pytest.mark.parametrize("name", ["topk", "evit", "ats", "evovit"])
def test_methods_that_rank_by_the_cls_token_refuse_models_without_one(name):
    config = tntprune.methods.find_method(name)(at=2)
    with pytest.raises(UserError, match=f"{name} cannot be applied here: .* the model has none; tnt, random"):
        reduce_(make("no_cls"), config)
