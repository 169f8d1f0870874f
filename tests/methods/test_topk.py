"""Top-K against loops, and where it drops."""

from __future__ import annotations

import pytest
import torch

from conftest import make, photos_for
from reference import first_half
from tntprune import TopK, record, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.methods.steps import Place
from tntprune.methods.topk import received


def attended(block, x, readers, prefix):
    """For one image and one block, what each patch gets from the first tokens: loops over heads, readers, patches."""
    attention = block.attn
    qkv = attention.qkv(block.norm1(x[None]))[0].view(len(x), 3, attention.num_heads, attention.head_dim)
    score = [0.0] * (len(x) - prefix)
    for head in range(attention.num_heads):
        for reader in range(readers):
            query = qkv[reader, 0, head]
            weights = [float(torch.exp((query * qkv[j, 1, head]).sum() * attention.scale)) for j in range(len(x))]
            for j in range(prefix, len(x)):
                score[j - prefix] += weights[j] / sum(weights) / attention.num_heads / readers
    return score


def reference(model, image, at, count, inside, readers):
    """Top-K for one image, block by block, with loops where it decides; returns the logits and the kept patches."""
    prefix = model.num_prefix_tokens
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    places = list(range(len(x) - prefix))
    for number, block in enumerate(model.blocks, 1):
        score = attended(block, x, readers, prefix) if number == at else []
        x = x + block.ls1(block.attn(block.norm1(x[None])))[0]
        if number == at and inside:
            x, places = kept(x, places, score, count, prefix)
        x = x + block.ls2(block.mlp(block.norm2(x)))
        if number == at and not inside:
            x, places = kept(x, places, score, count, prefix)
    return model.forward_head(model.norm(x[None]))[0], sorted(places)


def kept(x, places, score, count, prefix):
    best = sorted(range(len(places)), key=lambda j: score[j], reverse=True)[:count]
    return torch.cat([x[:prefix], x[[prefix + j for j in best]]]), [places[j] for j in best]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("rows", ["cls", "mean"])
@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "avg_with_cls", "layer_scale", "non_square"])
def test_it_is_what_loops_give(kind, rows, inside):
    model = make(kind)
    images = photos_for(model, 2)
    readers = 2 if rows == "mean" and kind == "distilled" else 1
    count = model.patch_embed.num_patches * 2 // 5
    with torch.inference_mode():
        expected = [reference(model, image, 3, count, inside, readers) for image in images]
        reduce_(model, TopK(at=3, tokens=count, inside=inside, rows=rows))
        with record(model) as trace:
            logits = model(images)
    assert trace.kept[3].tolist() == [places for _, places in expected]
    torch.testing.assert_close(logits, torch.stack([logits for logits, _ in expected]), atol=1e-5, rtol=1e-5)


def test_scores_are_shares_of_attention():
    model = reduce_(make("distilled"), TopK(at=1))
    with torch.inference_mode():
        heads = first_half(model, 1, model.embed(photos_for(model))[0])[1]
        score = received(heads, 2, 2)
    assert score.dtype == torch.float32 and (score > 0).all() and (score.sum(1) < 1).all()


def test_inside_drops_before_the_mlp_and_after_drops_behind_it():
    model = make("plain")
    inside = reduce_(model, TopK(at=3, keep=0.5)).reduction.steps(64)
    after = reduce_(model, TopK(at=3, keep=0.5, inside=False)).reduction.steps(64)
    assert [step.place for step in (*inside, *after)] == [Place(3, inside=True), Place(3)]


def test_in_training_gradients_flow_through_what_is_kept():
    model = reduce_(make("plain"), TopK(at=2, keep=0.5)).train()
    model(photos_for(model)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not list(reduction_of(model).parameters())
