"""CLIP and SigLIP: zero-shot classification through the whole model, and pooling that weighs merged tokens."""

from __future__ import annotations

import pytest
import torch

from hf_models import WORDS, call, make, photos_for, run, transformers
from tntprune import TNT, EViT, Random, ToMe, UserError
from tntprune.backbones.attach import is_reduced, reduction_of
from tntprune.backbones.hf import siglip
from tntprune.ops.tokens import Tokens
from tntprune.reduce import reduce_


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_text_is_left_as_it_is(kind):
    model, images = make(kind), photos_for(kind, 2)
    before = call(model, images)
    reduce_(model, TNT(at=2, keep=0.5))
    after = call(model, images, return_loss=True)
    assert torch.equal(after.text_embeds, before.text_embeds) and after.loss.isfinite()
    assert not torch.equal(after.image_embeds, before.image_embeds)
    image = model.get_image_features(pixel_values=images).pooler_output
    torch.testing.assert_close(image / image.norm(dim=-1, keepdim=True), after.image_embeds)
    assert not any(is_reduced(part) for part in model.text_model.modules())
    with torch.inference_mode():
        texts = model.get_text_features(input_ids=WORDS).pooler_output
    torch.testing.assert_close(texts / texts.norm(dim=-1, keepdim=True), before.text_embeds, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_pipeline_for_zero_shot_classification(kind, caplog):
    from PIL import Image

    words = ["a", "photo", "cat", "dog", "this", "is", "of", "."]
    vocabulary = {"<|startoftext|>": 1, "<|endoftext|>": 2, **{f"{word}</w>": 3 + i for i, word in enumerate(words)}}
    letters = sorted({letter for word in words for letter in word})
    more = [*letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary |= {piece: 20 + i for i, piece in enumerate(piece for piece in more if piece not in vocabulary)}
    size = {"height": 32, "width": 32}
    model = reduce_(make(kind), TNT(at=2, keep=0.5))
    pipe = transformers.pipeline(
        "zero-shot-image-classification",
        model=model,
        tokenizer=transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=64),
        image_processor=transformers.SiglipImageProcessor(size=size),
    )
    assert "not supported" not in caplog.text
    labels = ["cat", "dog", "a"]
    found = pipe(Image.new("RGB", (50, 40), "red"), candidate_labels=labels)
    assert sorted(one["label"] for one in found) == sorted(labels) and all(0 <= one["score"] <= 1 for one in found)
    assert pipe.model is model and is_reduced(model)


def test_a_merged_token_counts_like_equal_ones_in_attention_pooling():
    head = make("siglip_vision").head
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    merged = Tokens(x, torch.arange(3).expand(2, -1), 0, size=torch.tensor([[2.0, 1, 3], [1, 5, 0]]))
    with torch.inference_mode():
        found = siglip.SiglipMultiheadAttentionPoolingHead.forward(head, merged.x, merged.size)
        for row, sizes in enumerate(([2, 1, 3], [1, 5, 0])):
            equal = torch.cat([x[row, i : i + 1].expand(n, -1) for i, n in enumerate(sizes)])
            torch.testing.assert_close(found[row : row + 1], head(equal[None]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["clip_classifier", "siglip_classifier"])
def test_a_classifier_takes_the_mean_by_size(kind):
    model, images = reduce_(make(kind), ToMe(r=9)), photos_for(kind)
    with torch.inference_mode():
        tokens, _ = model.vision_model.outputs(images)
        assert tokens.size.sum(1).tolist() == [64.0] * 3 and float(tokens.size.max()) > 1
        rows = [
            model.classifier(sum(token * s for token, s in zip(x[tokens.prefix :], size)) / 64)
            for x, size in zip(tokens.x, tokens.size)
        ]
        torch.testing.assert_close(model(images).logits, torch.stack(rows), atol=1e-5, rtol=1e-4)


def test_methods_that_need_a_cls_token_refuse_siglip():
    with pytest.raises(UserError, match="the model has none"):
        reduce_(make("siglip"), EViT(at=2, keep=0.5))


def test_the_tower_alone_inside_a_whole_model():
    """Reducing the tower itself is the same as reducing the model around it."""
    model, images = make("clip"), photos_for("clip")
    reduce_(model.vision_model, Random(at=2, keep=0.5))
    alone = run(model, images)
    assert is_reduced(model) and torch.equal(run(reduce_(make("clip"), Random(at=2, keep=0.5)), images), alone)
    assert reduction_of(model).layout.family == "transformers CLIP"
