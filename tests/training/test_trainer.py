"""Training the model together with its reduction, and what one step of each method changes."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from conftest import make, photos_for
from tntprune import (
    TNT,
    AViT,
    DynamicViT,
    EViT,
    Random,
    ToMe,
    TopK,
    UsageError,
    UserError,
    load_,
    reduce_,
    restore_,
    save,
)  # fmt: skip
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.data.batches import TensorSource
from tntprune.serialization.checkpoint import FILE, WEIGHTS
from tntprune.system.storage import read_weights
from tntprune.training.calibrate import calibrate_, fit
from tntprune.training.config import Training
from tntprune.training.drop_path import Depth
from tntprune.training.runs import Stopped, train_run
from tntprune.training.trainer import Trainer, learning

IMAGES, LABELS = photos_for(make("plain"), 12), torch.arange(12) % 7
ONE = {"epochs": 1, "batch_size": 12, "warmup": 0.0, "progress": False, "amp": "none"}

LEARNERS = {
    "tnt": TNT(at=2, noise_blocks=(2, 4), noise_at="all", recipe="relative"),
    "tnt-merging": TNT(at=(2, 4), noise_blocks=(2, 4), prune_prob=1 - 1e-9),
    "tnt-mlp": TNT(at=2, noise_blocks=2, scorer="mlp", recipe="paper"),
    "dynamicvit": DynamicViT(at=(2, 4)),
    "avit": AViT(gate_center=6.0),
}
TUNED = {**LEARNERS, "evit": EViT(at=(2, 4)), "topk": TopK(at=2), "tome": ToMe(r=4), "random": Random(at=2)}


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(before, model):
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.wide] * (number > 0 and (number + turn) % 4 > 0))
        for number, kind in enumerate(["plain", "distilled", "registers"])
        for turn, name in enumerate(LEARNERS)
    ],
)
def test_one_step_on_a_frozen_model_changes_what_is_learned_and_nothing_else(kind, name):
    model = reduce_(make(kind), LEARNERS[name])
    before = values(model)
    learned = {f"reduction.{n}" for n, _ in reduction_of(model).named_parameters()}
    calibrate_(model, IMAGES, LABELS, **ONE)
    now = changed(before, model)
    assert now and now <= learned
    # the bias of a linear layer under a softmax over tokens has no gradient, and a layer behind one that is still zero
    still = {n for n in learned - now if not n.endswith("bias")}
    assert not still, still


@pytest.mark.parametrize("name", TUNED)
def test_one_step_with_the_model_changes_the_model_too(name):
    model = reduce_(make("plain"), TUNED[name])
    before = values(model)
    calibrate_(model, IMAGES, LABELS, backbone_lr=1e-3, **ONE)
    now = changed(before, model)
    base = {n for n in before if not n.startswith("reduction.")}
    assert base - now <= {n for n in base if n.endswith("bias")}  # a key's bias has no gradient under the softmax
    assert (now - base != set()) == any(True for _ in reduction_of(model).parameters())


def test_the_model_stays_frozen_for_its_epochs():
    seen = []

    def after(step, loss, trainer):
        frozen = values(trainer.model)
        seen.append({n for n in frozen if not n.startswith("reduction.") and not torch.equal(frozen[n], first[n])})

    model = reduce_(make("plain"), DynamicViT(at=2))
    first = values(model)
    training = Training(epochs=3, batch_size=6, backbone_lr=1e-3, freeze_epochs=2, amp="none")
    fit(model, TensorSource(IMAGES, LABELS, 6, 0), training, after=after, progress=False)
    assert [bool(names) for names in seen] == [False] * 4 + [True] * 2
    with pytest.raises(UsageError, match="freeze_epochs=2: expected fewer than the 2 epochs"):
        Training(epochs=2, backbone_lr=1e-3, freeze_epochs=2)


def test_the_model_learns_at_its_own_rate():
    model = reduce_(make("plain"), DynamicViT(at=2))
    with learning(model, tunes=True):
        trainer = Trainer(model, Training(lr=0.01, backbone_lr=1e-4, weight_decay=0.1, warmup=0.0), 10)
        trainer.step(0, [(IMAGES, LABELS)])
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert sorted(rates) == pytest.approx([1e-4, 0.01])
    names = {id(p): n for n, p in model.named_parameters()}
    decayed = {names[id(p)] for g in trainer.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert "blocks.0.attn.qkv.weight" in decayed and "reduction.predictors.2.layers.0.weight" in decayed
    assert not {"cls_token", "pos_embed", "norm.weight", "blocks.0.attn.qkv.bias"} & decayed


def test_the_teacher_stays_as_it_was():
    model = reduce_(make("plain"), TNT(at=2))
    before = base_of(model)(IMAGES).detach()
    with learning(model, tunes=True):
        trainer = Trainer(model, Training(backbone_lr=0.1, warmup=0.0), 10)
        for number in range(3):
            trainer.step(number, [(IMAGES, None)])
        assert torch.equal(trainer.base(IMAGES), before)
        assert not torch.equal(base_of(model)(IMAGES), before)


def test_a_method_without_parameters_can_be_trained_only_with_its_model():
    model = reduce_(make("plain"), EViT(at=2))
    with pytest.raises(UserError, match=r"evit has nothing to train on a frozen model; .* above 0"):
        calibrate_(model, IMAGES, LABELS, **ONE)


def test_a_method_without_parameters_cannot_wait_for_its_model():
    model = reduce_(make("plain"), EViT(at=2))
    with pytest.raises(UsageError, match="freeze_epochs=1: evit has nothing to learn meanwhile; expected 0"):
        calibrate_(model, IMAGES, LABELS, backbone_lr=1e-3, freeze_epochs=1, **{**ONE, "epochs": 2})


@pytest.mark.parametrize(
    ("name", "value"), [("backbone_lr", -1), ("backbone_lr", "x"), ("freeze_epochs", -1), ("freeze_epochs", 0.5)]
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(UsageError, match=f"{name}={value}: expected"):
        Training(**{name: value})


def test_annealing_follows_the_training():
    model = reduce_(make("plain"), EViT(at=2, keep=0.5, anneal=(0, 1)))
    seen = []
    model.blocks[5].register_forward_hook(lambda module, args, out: seen.append(out.shape[1] - 1))
    calibrate_(model, IMAGES, LABELS, epochs=4, batch_size=6, backbone_lr=1e-4, progress=False, amp="none")
    assert seen == sorted(seen, reverse=True) and seen[0] == 64 and 33 < seen[-1] < 45
    assert reduction_of(model).trained == 1.0


@pytest.mark.parametrize("config", [DynamicViT(at=2), EViT(at=2)], ids=lambda config: config.method)
def test_a_training_of_both_is_saved_resumed_and_loaded(tmp_path, config):
    freeze = 1 if config.method == "dynamicvit" else 0
    training = Training(epochs=3, batch_size=4, lr=0.01, backbone_lr=1e-3, freeze_epochs=freeze, amp="none")

    def run(out, source, resume=False):
        model = reduce_(make("plain"), config)
        train_run(model, source, training, out, resume=resume, save_every=2, progress=False)
        return model

    class Stopping(TensorSource):
        def batches(self, first, last, *share):
            for step, batch in enumerate(super().batches(first, last), first):
                if step == 5:
                    import signal

                    signal.raise_signal(signal.SIGINT)
                yield batch

    source = TensorSource(IMAGES, LABELS, 4, 0)
    straight = run(tmp_path / "straight", source)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", Stopping(IMAGES, LABELS, 4, 0))
    resumed = run(tmp_path / "stopped", source, resume=True)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == ["log.jsonl", WEIGHTS, FILE]

    images, fresh = photos_for(make("plain"), 4), make("plain")
    with torch.inference_mode():
        plain = fresh(images)
        load_(fresh, tmp_path / "straight")
        assert torch.equal(fresh(images), straight.eval()(images))
        restore_(fresh)
        assert not torch.equal(fresh(images), plain)  # what was fine-tuned stays
    assert set(read_weights(tmp_path / "straight" / WEIGHTS)) == set(plain_names())


def plain_names():
    return make("plain").state_dict()


def test_weights_that_do_not_fit_are_refused_and_nothing_is_changed(tmp_path):
    model = reduce_(make("plain"), EViT(at=2))
    save(model, tmp_path, weights=True)
    other = reduce_(make("distilled"), EViT(at=2))
    save(other, tmp_path / "other", weights=True)
    (tmp_path / "other" / WEIGHTS).rename(tmp_path / WEIGHTS)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=r"model\.safetensors: does not fit the model"):
        load_(restore_(model), tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_(model, tmp_path)


# The rest of the authors' recipe


def stepped(training, config=None, steps=3, labels=LABELS, kind="plain", total=10):
    """A trainer after some steps on the same images, and the values of what it learns after each."""
    model = reduce_(make(kind), config or TNT(at=2, noise_blocks=(2, 4), noise_at="all", recipe="paper"))
    seen = []
    with learning(model, training.backbone_lr > 0):
        trainer = Trainer(model, training, total)
        for number in range(steps):
            trainer.step(number, [(IMAGES, labels)])
            seen.append({name: value.detach().clone() for name, value in trainer.learned.items()})
    return trainer, seen


def test_the_average_follows_what_is_learned():
    trainer, seen = stepped(Training(ema=0.75, amp="none", lr=0.1))
    name = next(iter(seen[0]))
    first = dict(reduce_(make("plain"), trainer.method.config).named_parameters())[name].detach()
    expected = first.clone()
    for values_ in seen:
        expected = 0.75 * expected + 0.25 * values_[name]
    torch.testing.assert_close(trainer.averages()[name].data, expected)
    with trainer.averaged():
        torch.testing.assert_close(trainer.learned[name].data, expected)
    assert torch.equal(trainer.learned[name].data, seen[-1][name])
    assert stepped(Training(amp="none"))[0].averages() == {}


def test_rates_rise_from_and_fall_to_what_is_said():
    training = Training(lr=0.1, warmup=0.4, warmup_lr=0.02, min_lr=0.005, amp="none")
    rates = []
    model = reduce_(make("plain"), TNT(at=2, noise_blocks=2))
    with learning(model):
        trainer = Trainer(model, training, 10)
        for number in range(10):
            trainer.step(number, [(IMAGES, None)])
            rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[0] == 0.02 and rates[:4] == pytest.approx([0.02, 0.04, 0.06, 0.08])
    cosine = [0.005 + 0.5 * 0.095 * (1 + math.cos(math.pi * step / 10)) for step in range(4, 10)]
    assert rates[4:] == pytest.approx(cosine)


def test_a_training_of_one_step_has_its_rate_and_no_warning(caplog):
    model = reduce_(make("plain"), TNT(at=2, noise_blocks=2))
    with learning(model):
        trainer = Trainer(model, Training(lr=0.1, amp="none"), 1)
        trainer.step(0, [(IMAGES, None)])
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 and caplog.records == []


def test_gradients_are_shortened_together():
    def norm(clip):
        model = reduce_(make("plain"), TNT(at=2, noise_blocks=(2, 4), noise_at="all", recipe="relative"))
        with learning(model):
            trainer = Trainer(model, Training(clip=clip, amp="none"), 10)
            trainer.step(0, [(IMAGES, LABELS)])
            return torch.stack([p.grad.norm() for p in trainer.learned.values()]).norm()

    free = norm(None)
    torch.testing.assert_close(norm(free.item() / 3), free / 3, rtol=0.02, atol=0)  # torch adds 1e-6 to the norm
    torch.testing.assert_close(norm(free.item() * 3), free)


def test_half_precision_scales_the_loss_and_learns_alike():
    full, half = (stepped(Training(amp=amp, lr=0.01)) for amp in ("none", "fp16"))
    assert half[0].scaler.get_scale() > 1 and full[0].scaler.get_scale() == 1
    for name, value in full[1][-1].items():
        assert half[1][-1][name].dtype == torch.float32
        torch.testing.assert_close(half[1][-1][name], value, rtol=0.1, atol=0.01)


def test_a_loss_scale_that_overflows_leaves_out_the_step_and_shrinks():
    model = reduce_(make("plain"), TNT(at=2, noise_blocks=2, recipe="paper"))
    with learning(model):
        trainer = Trainer(model, Training(amp="fp16"), 10)
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
        before = {name: value.detach().clone() for name, value in trainer.learned.items()}
        trainer.step(0, [(IMAGES, LABELS)])
    assert all(torch.equal(trainer.learned[name].data, value) for name, value in before.items())
    assert trainer.scaler.get_scale() < 1e38


def test_mixed_labels_are_shares_of_the_classes():
    model = reduce_(make("plain"), TNT(at=2, noise_blocks=2, recipe="paper"))
    shares = torch.full((12, 7), 0.1 / 7).scatter_add_(1, LABELS[:, None], torch.full((12, 1), 0.9))
    losses = []
    for labels, smoothing in ((LABELS, 0.1), (shares, 0.1), (shares, 0.0)):
        with learning(model):
            trainer = Trainer(model, Training(amp="none", label_smoothing=smoothing), 10)
            losses.append(trainer.step(0, [(IMAGES, labels)]).item())
            reduce_(model, trainer.method.config)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[1] == losses[2]


# Stochastic depth


def test_drop_path_rises_over_the_blocks_and_is_taken_away_again():
    model = make("plain")
    before = [type(block.drop_path1) for block in model.blocks]
    with Depth(model, 0.3).on():
        rates = [block.drop_path2.drop_prob for block in model.blocks]
        assert all(block.drop_path1.training for block in model.blocks)
    assert rates == pytest.approx([0, 0.06, 0.12, 0.18, 0.24, 0.3])
    assert [type(block.drop_path1) for block in model.blocks] == before


@pytest.mark.parametrize("config", [TNT(at=2, noise_blocks=2, recipe="paper"), TNT(at=2, noise_blocks=2), EViT(at=2)])
def test_drop_path_changes_the_student_and_not_the_teacher(config):
    """With it the loss is another one; a teacher that it had touched would differ from the unpruned model."""
    asked = {}
    for rate in (0.0, 0.5):
        model = reduce_(make("plain"), config)
        tunes = config.method == "evit"
        with learning(model, tunes):
            trainer = Trainer(model, Training(drop_path=rate, amp="none", backbone_lr=1e-3 * tunes), 10)
            with trainer.depth.on():
                trainer.seed(0)
                teacher, answer = trainer.answers(IMAGES)
        asked[rate] = (teacher, answer)
    assert not torch.allclose(asked[0.0][1].logits, asked[0.5][1].logits, atol=1e-3)
    if asked[0.0][0] is not None:
        torch.testing.assert_close(asked[0.5][0].logits, make("plain")(IMAGES), rtol=1e-4, atol=1e-4)
    assert (asked[0.0][0] is None) == (trainer.method.kl == 0)


def test_blocks_without_places_for_it_are_refused():
    from hf_models import make as make_hf

    model = reduce_(make_hf("vit"), TNT(at=2))
    with pytest.raises(UserError, match=r"drop_path=0\.1: the blocks of .* have no drop-path; expected one of timm's"):
        Trainer(model, Training(drop_path=0.1), 1)
