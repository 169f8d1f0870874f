"""The short way through a training step: first blocks that serve both models, a last one for prefix tokens alone."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from timm.models.beit import Beit

import tntprune
from conftest import BACKBONES, SMALL, make, photos_for
from tntprune import TNT, AViT, DynamicViT, Random, ToMe, TopK, UserError, reduce_
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

ALWAYS = 1 - 1e-9  # of the batches are rehearsed
METHODS: dict[str, tuple[Any, ...]] = {
    "tnt": (TNT(at=3, beta=100.0, recipe="relative"),),
    "tnt, faded": (TNT(at=3, prune_prob=0.0),),
    "tnt, merging": (TNT(at=(3, 5), prune_prob=ALWAYS),),
    "tnt, paper": (TNT(at=2, recipe="paper", noise_blocks=(2, 3), noise_at="all", scorer="mlp"),),
    "dynamicvit": (DynamicViT(at=(1, 3)),),
    "avit": (AViT(gate_center=6.0),),
    "tnt then tome": (TNT(at=2, beta=100.0, recipe="relative"), ToMe(at=3, r=4)),
    "avit at, then tnt": (AViT(at=1), TNT(at=2, prune_prob=ALWAYS)),
    "topk then dynamicvit": (TopK(at=1), DynamicViT(at=2)),
}
HF = ("vit", "vit_classifier", "deit_teacher", "dinov2_classifier", "dinov2_backbone", "clip", "siglip_vision")
ALIKE = ("non_square", "dynamic", "patch_8x4", "avg_with_cls", "test_vit", "test_vit2", "test_vit3", "test_vit4")
KINDS = [kind for kind in BACKBONES if kind not in ALIKE]  # those have the blocks and heads of another kind
ONE: dict[str, Any] = {"amp": "none", "warmup": 0.0}


@cache
def built(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model and images for it; made once, and copied by who changes it."""
    if kind.startswith("hf "):
        hf = pytest.importorskip("hf_models")
        return hf.make(kind[3:]), hf.photos_for(kind[3:])
    model = make(kind)
    return model, photos_for(model)


def prepared(kind: str, name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    model, images = built(kind)
    try:
        return reduce_(copy.deepcopy(model), *METHODS[name]), images
    except UserError as refused:  # tested elsewhere
        pytest.skip(f"refused: {refused}")


def short(model: Any, images: torch.Tensor, **options: Any) -> tuple[float, dict[str, torch.Tensor], Trainer]:
    """One step of the trainer's: the loss, and the gradients of what is learned."""
    with learning(model):
        trainer = Trainer(model, Training(**{**ONE, **options}), 4)
        loss = trainer.step(1, [(images, torch.arange(len(images)))])
        return float(loss), gradients(model), trainer


def plain(model: Any, images: torch.Tensor, number: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by the book: the unpruned model, then the reduced one, each through all of its blocks."""
    method, backbone, labels = reduction_of(model), find_backbone(model), torch.arange(len(images))
    with learning(model):
        method.trained = number / 4
        torch.manual_seed(number)
        with torch.no_grad():
            teacher = backbone.answer(base_of(model), images)
        student = backbone.answer(model, images)
        loss = method.penalty(student.tokens, teacher.tokens)
        loss = torch.zeros(()) if loss is None else loss
        if method.kl:
            target, found = teacher.logits, student.logits
            if backbone.classes(model):
                target, found = target.log_softmax(1), found.log_softmax(1)
                loss = loss + method.kl * (target.exp() * (target - found)).sum(1).mean()
            else:
                alike = (target * found).sum(1) / (target.norm(dim=1) * found.norm(dim=1))
                loss = loss + method.kl * (1 - alike).mean()
        if method.ce:
            loss = loss - method.ce * student.ce_logits.log_softmax(1)[range(len(images)), labels].mean()
        loss.backward()
        return float(loss.detach()), gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    named = reduction_of(model).named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def same(one: tuple[Any, ...], other: tuple[Any, ...], rtol: float = 2e-5) -> None:
    assert one[0] == pytest.approx(other[0], rel=rtol, abs=5e-7)  # a small divergence is a difference of logits near 1
    assert one[1].keys() == other[1].keys() and one[1]
    whole = [torch.cat([grad.flatten() for grad in side[1].values()]) for side in (one, other)]
    assert whole[1].norm() > 0
    assert (whole[0] - whole[1]).norm() <= rtol * whole[1].norm() + 1e-10


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", [*KINDS, *(f"hf {kind}" for kind in HF)])
def test_a_step_is_what_a_plain_loop_gives(kind, name):
    model, images = prepared(kind, name)
    other = copy.deepcopy(model)
    if reduction_of(model).ce and not find_backbone(model).classes(model):
        pytest.skip("no classes to learn from")
    small = name in ("tnt, merging", "tnt, faded")  # gradients
    same(short(model, images), plain(other, images), 1e-4 if small else 1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_beit_with_a_bias_that_all_blocks_share(own):
    torch.manual_seed(0)
    options = {"use_rel_pos_bias": own, "use_shared_rel_pos_bias": True, "use_abs_pos_emb": False}
    model = reduce_(Beit(**SMALL, **options, global_pool="token").eval(), TNT(at=2))
    with torch.no_grad():
        model.rel_pos_bias.relative_position_bias_table.normal_()
    images, other = photos_for(model), copy.deepcopy(model)
    found = short(model, images)
    assert found[2].narrow
    same(found, plain(other, images))


def test_a_pooling_that_was_changed_after_the_reduction_is_the_one_that_counts():
    model = reduce_(make("plain"), TNT(at=2))
    model.reset_classifier(7, global_pool="avg")
    model.fc_norm, model.norm = model.norm, torch.nn.Identity()
    images, other = photos_for(model), copy.deepcopy(model)
    found = short(model, images)
    assert not found[2].narrow
    same(found, plain(other, images))


@pytest.mark.parametrize(
    "config",
    [
        TNT(at=2, noise_blocks=2, prune_prob=0.0), TNT(at=(2, 3), inside=True, metric="mean", prune_prob=ALWAYS),
        DynamicViT(at=2),
    ],
    ids=lambda config: config.method,
)  # fmt: skip
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_checkpointed_blocks_give_the_same(config, amp):
    model = reduce_(make("plain"), config)
    images, other = photos_for(model), copy.deepcopy(model)
    model.set_grad_checkpointing(True)
    same(short(model, images, amp=amp), short(other, images, amp=amp))


@pytest.mark.parametrize(
    ("config", "shared", "teacher"),
    [
        (TNT(at=3, noise_blocks=3), 3, True),
        (TNT(at=3, noise_blocks=(3, 4), noise_at="all", prune_prob=0.0), 3, True),
        (TNT(at=(3, 4), prune_prob=ALWAYS), 3, True),
        (TNT(at=3, noise_blocks=3, inside=True, metric="mean", prune_prob=ALWAYS), 2, True),
        (TNT(at=3, noise_blocks=3, recipe="paper"), 3, False),  # cross-entropy asks no teacher
        (DynamicViT(at=(2, 4)), 2, True),
        (AViT(), 0, False),
    ],
    ids=lambda value: getattr(value, "method", None),
)
def test_blocks_before_anything_is_done_run_once(config, shared, teacher):
    model = reduce_(make("plain"), config)
    seen: Counter[int] = Counter()
    for number, block in enumerate(model.blocks, 1):  # of every block, opened or not, the MLP runs
        block.mlp.register_forward_hook(lambda *_, number=number: seen.update([number]))
    short(model, photos_for(model))
    assert [seen[number] for number in range(1, 7)] == [1] * shared + [1 + teacher] * (6 - shared)


def test_the_last_block_runs_for_prefix_tokens_alone():
    model = reduce_(make("registers"), TNT(at=3))
    rows = []
    model.blocks[-1].mlp.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[1]))
    short(model, photos_for(model))
    assert rows == [5, 5]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_for_prefix_tokens_alone_gives_what_the_whole_one_gives(kind, apart):
    model = reduce_(make(kind), Random(at=0, keep=0.5))
    prefix = model.num_prefix_tokens
    with torch.inference_mode():
        tokens, places = model.enter(photos_for(model))
        whole = model.run(len(model.blocks), tokens.x, places)[:, :prefix]
        torch.testing.assert_close(model.run_for_prefix(tokens, places, apart).x, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [TNT(at=2), DynamicViT(at=2)], ids=lambda config: config.method)
def test_a_recorded_step_is_recorded_whole(config):
    model = reduce_(make("plain"), config)
    images, other = photos_for(model), copy.deepcopy(model)
    with tntprune.record(model) as trace:
        found = short(model, images)
        with tntprune.record(other) as wanted:
            same(found, plain(other, images))
    assert trace.ended and len(trace.counts) == len(wanted.counts) == 13
    assert all(map(torch.equal, trace.counts, wanted.counts)) and trace.kept.keys() == wanted.kept.keys()
    assert tower_of(model).trace is None


def test_attention_is_unfused_for_the_step_alone():
    model = reduce_(make("plain"), TNT(at=2))
    seen = []
    model.blocks[3].attn.register_forward_hook(lambda module, *_: seen.append(module.fused_attn))
    short(model, photos_for(model), amp="bf16")
    assert seen and not any(seen)
    assert all(block.attn.fused_attn for block in model.blocks)
    model.blocks[2].attn.fused_attn = False  # as somebody wants it
    short(model, photos_for(model), amp="bf16")
    assert [block.attn.fused_attn for block in model.blocks] == [True, True, False, True, True, True]
