"""Fine-tuning a model under a reduction that learns nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from conftest import make, photos_for
from tntprune import (
    ATS,
    TNT,
    DynamicViT,
    EViT,
    Random,
    ToMe,
    TopK,
    UsageError,
    UserError,
    ZeroTPrune,
    calibrate_,
    load_,
    reduce_,
)  # fmt: skip
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.digits_vit import digits_vit
from tntprune.cli.main import main
from tntprune.data.batches import TensorSource
from tntprune.demo.digits import cluttered_digits
from tntprune.serialization.checkpoint import FILE, WEIGHTS
from tntprune.system.storage import read_weights
from tntprune.training.config import RATES, Training
from tntprune.training.learning import LowRank, learned_parameters, learning
from tntprune.training.runs import EMA, Stopped, train_run
from tntprune.training.trainer import Trainer

CONFIG = TNT(at=2, keep=0.4, noise_blocks=2)
IMAGES, LABELS = photos_for(make("plain"), 8), torch.arange(8) % 7
ONE = {"epochs": 1, "batch_size": 8, "warmup": 0.0, "progress": False, "amp": "none"}
WIDE = torch.randn(8, 3, 24, 40, generator=torch.Generator().manual_seed(1))  # for the one of transformers
LINEARS = ("attn.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj", "mlp.fc1", "mlp.fc1_g", "mlp.fc1_x",
           "mlp.fc2", "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")  # fmt: skip


def model_of(kind, config=CONFIG):
    if kind == "hf":
        from hf_models import make as make_hf

        return reduce_(make_hf("vit_classifier"), config)
    return reduce_(make(kind), config)


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(before, model):
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def named(kind, name):
    """Whether a parameter is of such a kind, by its name alone."""
    module, _, last = name.rpartition(".")
    if kind == "head":
        return module in ("head", "head_dist", "classifier")
    if kind == "norms":
        return "norm" in module.rsplit(".", 1)[-1] and "reduction." not in name
    if kind == "lowrank":
        return last == "weight" and module.endswith(LINEARS) and ("blocks." in module or "layers." in module)
    return not name.startswith(("reduction.", "vit.reduction."))


# What changes


@pytest.mark.parametrize(
    ("kind", "unfreeze"),
    [
        pytest.param(kind, unfreeze, marks=[pytest.mark.wide] * (number > 0 and (number + turn) % 4 > 0))
        for number, kind in enumerate(["plain", "distilled", "qk_norm", "eva02", "beit", "hf"])
        for turn, unfreeze in enumerate(RATES)
    ],
)
def test_what_is_named_changes_and_nothing_else(kind, unfreeze):
    model = model_of(kind)
    before = values(model)
    images = WIDE if kind == "hf" else IMAGES
    calibrate_(model, images, unfreeze=unfreeze, rank=2 if unfreeze == "lowrank" else None, **ONE)
    now, wanted = changed(before, model), {name for name in before if named(unfreeze, name)}
    assert now and now <= wanted
    still = {"mask_token", "relative_position_index"}  # and the bias of a key has no gradient under the softmax
    assert {n for n in wanted - now if n.rsplit(".", 1)[-1] not in ("bias", *still)} == set()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "config",
    [ToMe(r=6), Random(at=2), TopK(at=2), EViT(at=2), ATS(at=2), ZeroTPrune(at=(2, 4)), CONFIG, DynamicViT(at=2)],
    ids=lambda config: config.method,
)  # fmt: skip
def test_tokens_really_go_whatever_the_method(config):
    model = reduce_(make("plain"), config)
    before, answer, counts = values(model), model(IMAGES), []
    with learning(model, tunes=True, unfreeze="norms"):
        trainer = Trainer(model, Training(unfreeze="norms", amp="none"), 1)
        model.blocks[-1].mlp.register_forward_hook(lambda module, args, out: counts.append(args[0].shape[1]))
        torch.testing.assert_close(trainer.answers(IMAGES)[1].logits, answer)  # it begins at the calibrated model
        trainer.step(0, [(IMAGES, None)])
    assert counts and max(counts) < 65
    assert {name for name in changed(before, model) if name.startswith("reduction.")} == set()


def test_gradients_go_through_the_merging_as_by_hand():
    """The in-place merge against the weighted sum written out, in double precision."""
    from tntprune.ops.tokens import merge, start

    x = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    stay, into = torch.tensor([[0], [2]]), torch.tensor([1, 3])
    source, target = torch.tensor([[4, 5], [5, 0]]), torch.tensor([[0, 0], [1, 0]])

    def merged(x):
        return merge(start(x, 1), stay, into, source, target).x

    assert torch.autograd.gradcheck(merged, (x,), atol=1e-6)


def test_blocks_before_what_learns_run_without_a_graph():
    graphs = []
    model = model_of("plain")
    model.blocks[-1].register_forward_hook(lambda module, args, out: graphs.append(out.requires_grad))
    calibrate_(model, IMAGES, unfreeze="head", **ONE)
    assert set(graphs) == {False}  # the teacher's too, which is a copy


# Low rank


@pytest.mark.parametrize("kind", ["plain", "eva02", "hf"])
def test_low_rank_is_what_its_factors_say_and_keeps_the_models_shape(kind):
    model = model_of(kind)
    shapes = {name: value.shape for name, value in base_of(model).state_dict().items()}
    with learning(model, tunes=True, unfreeze="lowrank"):
        trainer = Trainer(model, Training(unfreeze="lowrank", rank=3, backbone_lr=0.01, amp="none", warmup=0.0), 4)
        low = trainer.low
        for number in range(3):
            trainer.step(number, [(WIDE if kind == "hf" else IMAGES, None)])
        for name, weight in low.weights.items():
            up, down = low.learned[f"{name}.up"], low.learned[f"{name}.down"]
            assert up.shape == (weight.shape[0], 3) and down.shape == (3, weight.shape[1])
            assert torch.linalg.matrix_rank(weight - low.start[name], rtol=1e-4) == 3
            x = torch.randn(5, weight.shape[1])
            apart = F.linear(x, low.start[name]) + F.linear(F.linear(x, down), up)
            torch.testing.assert_close(F.linear(x, weight), apart, rtol=1e-5, atol=1e-5)
    assert {name: value.shape for name, value in base_of(model).state_dict().items()} == shapes


def test_low_rank_gradients_are_those_of_autograd():
    model = model_of("plain")
    with learning(model, tunes=True, unfreeze="lowrank"):
        low = LowRank(model, 2, seed=0)
        for value in low.learned.values():
            value.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        low.merge()
        model(IMAGES).square().sum().backward()
        low.pull()
        assert all(weight.grad is None for weight in low.weights.values())
        full = {name: low.start[name] + low.learned[f"{name}.up"] @ low.learned[f"{name}.down"] for name in low.weights}
        loss = torch.func.functional_call(model, full, (IMAGES,)).square().sum()
        wanted = torch.autograd.grad(loss, list(low.learned.values()))
    for (name, value), grad in zip(low.learned.items(), wanted, strict=True):
        torch.testing.assert_close(value.grad, grad, rtol=1e-3, atol=1e-4, msg=name)


# The objective


def test_it_learns_to_say_what_the_unpruned_model_says():
    images, others = cluttered_digits("train")[0][:192].split((128, 64))
    whole = digits_vit()(others).log_softmax(1)
    config = TNT(at=2, tokens=6, recipe="relative")
    calibrated = calibrate_(reduce_(digits_vit(), config), images, epochs=1, batch_size=16, amp="none", progress=False)

    def divergence(model):
        with torch.no_grad():
            return F.kl_div(model(others).log_softmax(1), whole, reduction="batchmean", log_target=True).item()

    before = divergence(calibrated)
    for unfreeze, rate in {"all": 3e-4, "norms": 1e-2, "lowrank": 1e-3}.items():
        model = reduce_(digits_vit(), config)
        reduction_of(model).load_state_dict(reduction_of(calibrated).state_dict())
        calibrate_(
            model, images, epochs=1, batch_size=16, unfreeze=unfreeze, backbone_lr=rate, amp="none", progress=False
        )
        assert divergence(model) < 0.95 * before, unfreeze


def test_the_teacher_is_the_model_as_it_was_and_labels_have_the_rest_of_the_say():
    model, losses = model_of("plain"), {}
    teacher, student = make("plain")(IMAGES).log_softmax(1), model(IMAGES).log_softmax(1)
    with learning(model, tunes=True, unfreeze="all"):
        for distill in (1.0, 0.0, 0.25):
            trainer = Trainer(model, Training(unfreeze="all", distill=distill, amp="none"), 1)
            losses[distill] = trainer.loss(IMAGES, None if distill == 1 else LABELS)
        assert trainer.base is not None
    kl = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    ce = F.nll_loss(student, LABELS)
    for distill, loss in losses.items():
        torch.testing.assert_close(loss, distill * kl + (1 - distill) * ce)
    with pytest.raises(UserError, match=r"cross-entropy needs labels.*; expected labels, or distill=1"):
        calibrate_(model, IMAGES, unfreeze="all", distill=0.5, **ONE)


# A run


@pytest.mark.parametrize("unfreeze", ["norms", "lowrank"])
def test_it_is_resumed_bit_for_bit_and_loads_everywhere(tmp_path, unfreeze):
    training = Training(epochs=2, batch_size=4, unfreeze=unfreeze, backbone_lr=0.01, ema=0.5, amp="none")

    class Stopping(TensorSource):
        def batches(self, first, last, *share):
            for step, batch in enumerate(super().batches(first, last), first):
                if step == 2:
                    import signal

                    signal.raise_signal(signal.SIGINT)
                yield batch

    def run(out, source, resume=False):
        model = model_of("plain")
        train_run(model, source(IMAGES, None, 4, 0), training, out, resume=resume, save_every=2, progress=False)
        return model

    straight = run(tmp_path / "straight", TensorSource)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", Stopping)
    resumed = run(tmp_path / "stopped", TensorSource, resume=True)
    assert not changed(values(straight), resumed)
    for place in ("", EMA):
        first, second = (read_weights(tmp_path / run / place / WEIGHTS) for run in ("straight", "stopped"))
        assert all(torch.equal(first[name], second[name]) for name in first)
        plain = make("plain").state_dict()
        assert {n: v.shape for n, v in first.items()} == {n: v.shape for n, v in plain.items()}
        assert {name for name in plain if not torch.equal(first[name], plain[name])} <= set(
            learned_parameters(straight, True, unfreeze)
        )  # also of the average
    assert torch.equal(load_(make("plain"), tmp_path / "straight")(IMAGES), straight(IMAGES))
    averaged = load_(make("plain"), tmp_path / "straight" / EMA)
    assert not torch.equal(averaged(IMAGES), straight(IMAGES))


def test_the_command_begins_with_a_run_and_leaves_one(tmp_path, capsys):
    from PIL import Image

    for number in range(4):
        noise = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        Image.fromarray(noise.numpy()).save(tmp_path / f"{number}.png")
    shared = ["digits_vit", "--data", str(tmp_path), "--epochs", "1", "--batch-size", "4", "--workers", "0", "--json"]
    assert main(["train", *shared, "--at", "2", "--keep", "0.4", "--out", str(tmp_path / "a")]) == 0
    tuning = ["train", *shared, "--reducer", str(tmp_path / "a"), "--unfreeze", "lowrank", "--rank", "2"]
    assert main([*tuning, "--out", str(tmp_path / "b")]) == 0
    assert (
        main(["train", *shared, "--method", "tome", "--r", "2", "--unfreeze", "head", "--out", str(tmp_path / "c")])
        == 0
    )
    capsys.readouterr()
    first, second = (read_weights(tmp_path / run / FILE) for run in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "b" / WEIGHTS).exists() and (tmp_path / "c" / WEIGHTS).exists()
    for arguments, told in [
        (["--reducer", str(tmp_path / "a")], "--reducer .* without --unfreeze"),
        (["--then", "tome at=3 r=1"], "--then without --unfreeze"),
        (["--unfreeze", "norms"], "nothing that removes tokens; expected --reducer RUN or --method tome"),
        (["--unfreeze", "norms", "--method", "tnt"], "tnt has to be trained first"),
        (["--unfreeze", "norms", "--method", "tome", "--preset", "short"], "--preset short"),
        (["--unfreeze", "biases", "--method", "tome"], "biases"),
    ]:
        assert main(["train", *shared, *arguments, "--out", str(tmp_path / "d")]) in (1, 2)
        error = json.loads(capsys.readouterr().err.strip().splitlines()[-1])["error"]
        assert re.search(told, error), error
    assert not (tmp_path / "d").exists()


# Refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"unfreeze": "biases"}, "unfreeze='biases': expected one of 'all', 'head', 'norms', 'lowrank'"),
        ({"unfreeze": "lowrank", "rank": 0}, "rank=0: expected a whole number from 1 to 65536"),
        ({"unfreeze": "norms", "rank": 2}, "rank=2 with unfreeze='norms'; expected unfreeze='lowrank'"),
        ({"rank": 2}, "rank=2 without unfreeze"),
        ({"distill": 1.0}, "distill=1.0 without unfreeze"),
        ({"unfreeze": "all", "distill": 1.5}, "distill=1.5: expected a number from 0 to 1"),
        ({"unfreeze": "all", "lr": 0.1}, "lr=0.1 with unfreeze: .*; expected backbone_lr"),
        ({"unfreeze": "all", "freeze_epochs": 1}, "freeze_epochs=1 with unfreeze"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, told):
    with pytest.raises(UsageError, match=told):
        Training(**options)


def test_each_kind_has_a_rate_of_its_own():
    assert {kind: Training(unfreeze=kind).backbone_lr for kind in RATES} == RATES
    assert Training(unfreeze="all", backbone_lr=0.5).backbone_lr == 0.5
    assert replace(Training(unfreeze="head"), epochs=2).backbone_lr == RATES["head"]
    with learning(model := model_of("plain"), tunes=True, unfreeze="norms"):
        trainer = Trainer(model, Training(unfreeze="norms", warmup=0.0, min_lr=1e-4), 2)
        assert trainer.optimizer.param_groups[0]["lr"] == RATES["norms"]


def test_what_cannot_be_tuned_is_refused():
    from hf_models import make as make_hf

    with pytest.raises(UserError, match=r"unfreeze='head': \w+ has no head; expected one of all, norms, lowrank"):
        calibrate_(reduce_(make_hf("vit"), CONFIG), IMAGES, unfreeze="head", **ONE)
    with pytest.raises(UserError, match=r"tells no classes apart.* or distill=1"):
        calibrate_(reduce_(make_hf("vit"), CONFIG), IMAGES, LABELS, unfreeze="all", distill=0.5, **ONE)
    with pytest.raises(UserError, match=r"unfreeze=all: random removes no token here"):
        calibrate_(model_of("plain", Random(at=2, keep=1.0)), IMAGES, unfreeze="all", **ONE)
    with pytest.raises(UsageError, match=r"rank=33: blocks\.0\.attn\.qkv\.weight is 96 x 32; expected 1 to 32"):
        calibrate_(model_of("plain"), IMAGES, unfreeze="lowrank", rank=33, **ONE)
