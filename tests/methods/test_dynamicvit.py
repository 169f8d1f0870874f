"""DynamicViT against loops: predictors, masked attention, losses, real dropping."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from conftest import SMALL, make, photos_for
from reference import layer_norm
from tntprune import DynamicViT, UsageError, UserError, load_, macs, record, reduce_, save
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.methods.dynamicvit import Decisions
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Place
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import start
from tntprune.training.calibrate import calibrate_
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

LABELS = torch.arange(6) % 7


def stirred(kind, config):
    model = reduce_(make(kind), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reduction_of(model).parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def log_probabilities(predictor, tokens, mask):
    """For one image, (n, D) and 1 or 0 for each token, token by token: log of (keep, drop)."""

    def linear(layer, x):
        return torch.stack([(row * x).sum() + bias for row, bias in zip(layer.weight, layer.bias)])

    first = []
    for token in tokens:
        x = layer_norm(token, predictor.norm.eps) * predictor.norm.weight + predictor.norm.bias
        first.append(F.gelu(linear(predictor.layers[0], x)))
    half = len(first[0]) // 2
    kept = [x[half:] for x, m in zip(first, mask) if m]
    whole = sum(kept) / len(kept) if kept else torch.zeros(half)
    out = []
    for x in first:
        x = torch.cat([x[:half], whole])
        for layer in predictor.layers[1:-1]:
            x = F.gelu(linear(layer, x))
        out.append(linear(predictor.layers[-1], x).log_softmax(0))
    return torch.stack(out)


@pytest.mark.parametrize("kept", [(1, 1, 1, 1, 1, 1, 1), (1, 0, 0, 1, 1, 0, 1), (0, 0, 0, 0, 0, 0, 1)])
def test_the_predictor_is_what_loops_give(kept):
    predictor = reduction_of(stirred("plain", DynamicViT(at=2))).predictors["2"]
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([kept, (1,) * 7]).float()
    with torch.no_grad():
        found = predictor(x, mask).log_softmax(2)
        for b in range(2):
            torch.testing.assert_close(found[b], log_probabilities(predictor, x[b], mask[b]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(predictor(x, torch.ones(2, 7)), predictor(x, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "distilled", "no_cls", "registers", "map_pool"])
def test_at_test_time_the_best_by_loops_stay_and_the_rest_really_goes(kind):
    model = stirred(kind, DynamicViT(at=(2, 4), keep=0.6))
    method = reduction_of(model)
    images = photos_for(model, 2)
    prefix = method.layout.prefix
    with torch.inference_mode():
        x = model.embed(images)[0]
        index = [list(range(64)), list(range(64))]
        for number, block in enumerate(model.blocks, 1):
            x = block(x)
            if number in (2, 4):
                count, rows = int(64 * 0.6 ** (number // 2)), []
                for b in range(2):
                    ones = [1] * (x.shape[1] - prefix)
                    logs = log_probabilities(method.predictors[str(number)], x[b, prefix:], ones)
                    best = sorted(range(len(ones)), key=lambda i: float(logs[i, 0]), reverse=True)[:count]
                    rows.append(torch.cat([x[b, :prefix], x[b, [prefix + i for i in best]]]))
                    index[b] = [index[b][i] for i in best]
                x = torch.stack(rows)
        expected = model.classify(start(model.norm(x), prefix))
        with record(model) as trace:
            logits = model(images)
    assert trace.kept[4].tolist() == [sorted(row) for row in index]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert macs(model).tokens == [64, 64, 38, 38, 23, 23]


def test_masked_attention_is_what_loops_give():
    """Kept tokens and the token itself are seen; the small terms keep a row of nothing at the mean."""
    model = reduce_(make("plain"), DynamicViT(at=2)).train()
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 6, 5, generator=generator).unbind(0)
    heads = Heads(query, key, value, 0.4)
    size = torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    tokens = start(torch.zeros(2, 6, 32), 1)
    out = reduction_of(model).attend(heads, tokens.__class__(tokens.x, tokens.index, 1, size=size))
    for b in range(2):
        mask = [1, *size[b].tolist()]
        for h in range(4):
            for i in range(6):
                logits = [float(query[b, h, i] @ key[b, h, j]) * 0.4 for j in range(6)]
                weights = [math.exp(v - max(logits)) * (1 if j == i else mask[j]) for j, v in enumerate(logits)]
                total = sum(weights) + 1e-6
                by_hand = sum((w + 1e-6 / 6) / total * value[b, h, j] for j, w in enumerate(weights))
                torch.testing.assert_close(out[b, h, i], by_hand, atol=1e-5, rtol=1e-4)


def test_in_training_nothing_goes_and_what_was_dropped_stays_dropped():
    model = stirred("plain", DynamicViT(at=(2, 4), keep=0.5)).train()
    torch.manual_seed(0)
    tokens = model.tokens(photos_for(model), None, False)
    first, second = tokens.state.masks
    assert tokens.count == 64 and first.shape == (3, 64)
    assert set(first.unique().tolist()) == set(second.unique().tolist()) == {0.0, 1.0}
    assert (second <= first).all() and (second < first).any()


def test_a_dropped_token_changes_no_other_in_training():
    """Masked attention is dropping, for the tokens that stay: the kept ones come out as if the others were gone."""
    model = stirred("plain", DynamicViT(at=2, keep=0.5)).train()
    images = photos_for(model, 1)
    torch.manual_seed(0)
    with torch.no_grad():
        tokens = model.tokens(images, None, False)
        kept = tokens.state.masks[0][0].nonzero()[:, 0]
        x = model.embed(images)[0]
        for number, block in enumerate(model.blocks, 1):
            x = block(x)
            if number == 2:
                x = torch.cat([x[:, :1], x[:, 1 + kept]], 1)
        x = model.norm(x)
    torch.testing.assert_close(tokens.x[:, 0], x[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tokens.x[:, 1 + kept], x[:, 1:], atol=1e-4, rtol=1e-4)


def test_the_losses_are_what_loops_give():
    config = DynamicViT(at=(2, 4), keep=0.7, ratio_weight=3.0, token_weight=0.4)
    model = reduce_(make("plain"), config).train()
    generator = torch.Generator().manual_seed(0)
    masks = tuple((torch.rand(2, 64, generator=generator) < share).float() for share in (0.8, 0.3))
    x, y = torch.randn(2, 2, 65, 32, generator=generator).unbind(0)
    state = Decisions(masks)
    tokens = start(x, 1)
    tokens = tokens.__class__(tokens.x, tokens.index, 1, size=masks[-1], state=state)
    loss = reduction_of(model).penalty(tokens, start(y, 1))
    ratio = 0.0
    for mask, wanted in zip(masks, (0.7, 0.49)):
        for b in range(2):
            ratio += (float(mask[b].sum()) / 64 - wanted) ** 2 / 2 / 2
    off = [float((x[b, 1 + i] - y[b, 1 + i]).square().mean()) for b in range(2) for i in range(64) if masks[1][b, i]]
    assert float(loss) == pytest.approx(3.0 * ratio + 0.4 * sum(off) / len(off), rel=1e-5)


def test_the_whole_loss_has_labels_the_teacher_the_ratio_and_the_tokens():
    model, images = stirred("distilled", DynamicViT(at=(2, 4))), photos_for(make("distilled"), 6)
    base = base_of(model)
    with learning(model):
        trainer = Trainer(model, Training(), 1)
        torch.manual_seed(3)
        loss = trainer.loss(images, LABELS)
        torch.manual_seed(3)
        answer = trainer.backbone.answer(model, images)
        with torch.no_grad():
            teacher = trainer.backbone.answer(base, images)
        p, q = teacher.logits.softmax(1), answer.logits.softmax(1)
        by_hand = F.cross_entropy(answer.ce_logits, LABELS) + 0.5 * (p * (p / q).log()).sum() / 6
        by_hand = by_hand + reduction_of(model).penalty(answer.tokens, teacher.tokens)
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-6)


def test_when_every_token_is_dropped_nothing_is_a_nan():
    model = reduce_(make("plain"), DynamicViT(at=(2, 4)))
    with torch.no_grad():
        for predictor in reduction_of(model).predictors.values():
            predictor.layers[-1].bias.copy_(torch.tensor([-1e3, 1e3]))
    images = photos_for(model, 6)
    with learning(model):
        loss = Trainer(model, Training(), 1).loss(images, LABELS)
        loss.backward()
    tokens = model.train().tokens(images, None, False)
    assert tokens.state.masks[0].sum() == 0 and loss.isfinite()
    model.eval()
    calibrate_(model, images, LABELS, epochs=1, batch_size=3, progress=False)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_predictor_whose_share_is_all_learns_too():
    model = reduce_(make("plain"), DynamicViT(at=(2, 4), keep=(1.0, 0.5)))
    before = {name: value.clone() for name, value in reduction_of(model).state_dict().items()}
    calibrate_(model, photos_for(model, 6), LABELS, epochs=2, batch_size=3, progress=False)
    now = reduction_of(model).state_dict()
    assert all(not torch.equal(now[n], before[n]) for n in now if n.endswith("weight"))


def test_blocks_that_cannot_be_masked_are_refused():
    model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock)
    with pytest.raises(UserError, match="dynamicvit cannot be applied here: it learns by masking the attention"):
        reduce_(model, DynamicViT(at=2))


def test_objectives_and_what_they_need():
    for objective, weights in (("both", (1.0, 0.5)), ("ce", (1.0, 0.0)), ("kl", (0.0, 0.5))):
        method = reduction_of(reduce_(make("plain"), DynamicViT(at=2, objective=objective)))
        assert (method.ce, method.kl) == weights
    model = reduce_(make("plain"), DynamicViT(at=2, objective="kl"))
    calibrate_(model, photos_for(model, 4), epochs=1, batch_size=2, progress=False)
    with pytest.raises(UserError, match="cross-entropy needs labels"):
        calibrate_(reduce_(model, DynamicViT(at=2)), photos_for(model, 4), epochs=1, progress=False)


@given(patches=st.integers(1, 400), keep=st.floats(0.01, 0.99))
def test_one_rate_is_its_powers_of_all_patches(patches, keep):
    counts = [step.leaving for step in schedule([DynamicViT(keep=keep)], patches, 12)]
    wanted = [min(patches, max(1, math.floor(patches * keep ** (i + 1) + 1e-9))) for i in range(3)]
    assert counts == [count for count in wanted if count < patches]


def test_the_authors_counts_and_a_rate_for_each_location():
    assert [step.leaving for step in schedule([DynamicViT(keep=0.7)], 196, 12)] == [137, 96, 67]
    steps = schedule([DynamicViT(keep=(0.5, 0.5, 0.5))], 196, 12)
    assert [step.leaving for step in steps] == [98, 98, 98]  # three predictors run, one of them drops
    assert schedule([DynamicViT(keep=1.0)], 196, 12) == ()


def test_a_trained_one_serves_some_of_its_locations(tmp_path):
    model = stirred("plain", DynamicViT(at=(2, 4), keep=0.6))
    save(model, tmp_path)
    images = photos_for(model)
    with torch.inference_mode():
        load_(model, tmp_path, at=2, keep=0.5)
        assert list(reduction_of(model).predictors) == ["2"]
        assert [step.place for step in reduction_of(model).steps(64)] == [Place(2)]
        assert model(images).isfinite().all()
    with pytest.raises(UserError, match=r"nothing for block 3; expected those that it was trained for: \d"):
        load_(model, tmp_path, at=(2, 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio_weight": -1}, "ratio_weight=-1: expected 0 or more"),
        ({"temperature": 0}, "temperature=0: expected above 0"),
        ({"objective": "all"}, "objective='all': expected 'both' or 'ce' or 'kl'"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        DynamicViT(**options)
