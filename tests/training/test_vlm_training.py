"""Training in a vision-language model: noise on visual tokens, and the next token as the unpruned model tells it."""

from __future__ import annotations

import pytest
import torch

import tntprune
from tntprune import TNT, DynamicViT, Random
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.prompts import Prompts
from tntprune.data.batches import LoaderSource
from tntprune.reduce import reduce_
from tntprune.training.calibrate import fit
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer
from vlm_models import IMAGE, KINDS, SEVERAL, SHORTENED, make, prompts, usual


@pytest.mark.parametrize("kind", usual(KINDS))
def test_a_scorer_is_trained_and_the_model_is_not(kind):
    model = make(kind)
    output = "tokens" if kind in SHORTENED else "grid"
    reduce_(model, TNT(at=(1, 2), keep=0.5, recipe="relative"), output=output)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [prompts(kind, model, SEVERAL), prompts(kind, model, [[1, None, 5, 6]])]
    tntprune.calibrate_(model, batches, epochs=2, progress=False)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("reduction." in name for name in changed) and reduction_of(model).calibrated
    assert not any(parameter.grad is not None for parameter in model.parameters())
    with torch.inference_mode():
        assert model(**batches[0]).logits.isfinite().all()


@pytest.mark.parametrize("recipe", ["relative", "merge"])
def test_the_loss_is_the_divergence_at_every_token_of_text_behind_an_image(recipe):
    model = reduce_(make("llava"), TNT(at=2, keep=0.5, recipe=recipe), output="tokens")
    given = prompts("llava", model, SEVERAL)
    trainer = Trainer(model, Training(amp="none"), total=4)
    torch.manual_seed(3)
    reduction_of(model).train()
    loss = trainer.loss(Prompts(given), None)
    torch.manual_seed(3)
    noisy = model(**given).logits
    with torch.inference_mode():
        whole = base_of(model)(**given).logits
    ids = given["input_ids"]
    reads = (ids != IMAGE) & ((ids == IMAGE).cumsum(1) > 0) & given["attention_mask"].bool()
    assert int(reads.sum()) == 3 + 1
    target, own = whole[reads].log_softmax(1), noisy[reads].log_softmax(1)
    expected = (target.exp() * (target - own)).sum(1).mean()
    torch.testing.assert_close(loss, expected)
    assert loss > 0
    with torch.no_grad():
        assert trainer.answers(Prompts(given))[0].logits.shape == (4, 99)


def test_training_lowers_the_loss():
    model = make("llava")
    with torch.no_grad():  # so that the words depend on the picture
        model.model.multi_modal_projector.linear_2.weight.mul_(10)
        model.lm_head.weight.mul_(5)
    reduce_(model, TNT(at=2, keep=0.5, recipe="relative", capacity=0.5, noise_blocks=2))
    source = LoaderSource([prompts("llava", model, [[1, None, 7, 8], [1, None, 9]])], prompts=True)
    losses = []
    fit(model, source, Training(epochs=60, lr=0.05), after=lambda _, loss, __: losses.append(loss), progress=False)
    assert sum(losses[-15:]) < 0.85 * sum(losses[:15])


def test_what_cannot_be_trained_on_is_refused_in_one_line(tmp_path):
    model = reduce_(make("llava"), TNT(at=2, keep=0.5))
    given = prompts("llava", model, SEVERAL)
    for data in (torch.randn(2, 3, 32, 32), tmp_path):
        with pytest.raises(tntprune.UserError, match="for training expected batches from its processor, in a list"):
            tntprune.calibrate_(model, data, progress=False)
    for data, message in {
        "the loader gives a Tensor; expected tensors by name": [given["pixel_values"]],
        "the loader gives a dict; expected tensors by name": [{"input_ids": [[1, 2]]}],
        "a batch without pixel_values": [{"input_ids": given["input_ids"]}],
        "prompts without text behind their images": [prompts("llava", model, [[1, None]])],
    }.items():
        with pytest.raises(tntprune.UserError, match=data):
            tntprune.calibrate_(model, message, progress=False)
    with pytest.raises(tntprune.UserError, match="nothing to train on a frozen model"):
        tntprune.calibrate_(reduce_(make("llava"), Random(at=2)), [given], progress=False)
    with pytest.raises(tntprune.UserError, match=r"expected a method without one|needs labels"):
        tntprune.calibrate_(reduce_(make("llava"), DynamicViT(at=2)), [given], progress=False)
    inner = reduce_(make("llava").model, TNT(at=2, keep=0.5))
    with pytest.raises(tntprune.UserError, match="LlavaModel predicts no words"):
        tntprune.calibrate_(inner, [given], progress=False)
    bad = {**given, "pixel_values": given["pixel_values"] * torch.nan}
    with pytest.raises(tntprune.UserError, match="3 of 3 images hold NaN"):
        tntprune.calibrate_(reduce_(make("llava"), TNT(at=2, recipe="relative")), [bad], progress=False)
