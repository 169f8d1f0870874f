"""SigLIP 2 for grids of any shape: patches with a mask and the shapes of their grids, instead of images."""

from __future__ import annotations

import pytest
import torch

from hf_models import inputs, make, photos_for, run, transformers
from tntprune import TNT, Random, UserError, evaluate, features, record
from tntprune.backbones.hf.siglip2 import patches_of
from tntprune.data.transforms import transform_for
from tntprune.reduce import reduce_


def padded(given: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """The same patches with padding behind them, as the processor makes them."""
    patches, mask = given["pixel_values"], given["pixel_attention_mask"]
    more = count - patches.shape[1]
    patches = torch.nn.functional.pad(patches, (0, 0, 0, more), value=9.0)
    return {**given, "pixel_values": patches, "pixel_attention_mask": torch.nn.functional.pad(mask, (0, more))}


def test_images_are_cut_as_the_processor_cuts_them():
    model, images = make("siglip2_vision"), photos_for("siglip2", size=(24, 44))
    patches, shapes = patches_of(model, images)
    given = inputs(model, images)
    assert torch.equal(patches, given["pixel_values"]) and torch.equal(shapes, given["spatial_shapes"])


@pytest.mark.parametrize("kind", ["siglip2_vision", "siglip2_no_head", "siglip2_classifier"])
def test_padding_is_no_token(kind):
    model, given = make(kind), inputs(make(kind), photos_for(kind, 2, (24, 40)))
    with torch.inference_mode():
        before = model(**padded(given, 64))
        full = reduce_(model, Random(at=2, keep=1.0))(**padded(given, 64))
        for name in ("logits", "pooler_output"):
            if before.get(name) is not None:
                torch.testing.assert_close(full[name], before[name], atol=1e-5, rtol=1e-4)
        reduce_(model, TNT(at=2, keep=0.5))
        with record(model) as trace:
            short = model(**padded(given, 64))
        assert trace.kept[2].shape == (2, 30) and int(trace.kept[2].max()) < 60  # half of the 60 real ones
        alone = model(**given)
    for name in ("logits", "pooler_output", "last_hidden_state"):
        if alone.get(name) is not None:
            assert torch.equal(short[name], alone[name])


def test_images_of_different_shapes_with_as_many_patches():
    """4 x 16 and 8 x 8 patches in one batch give what each gives alone."""
    model = reduce_(make("siglip2_vision"), TNT(at=2, keep=0.5))
    wide, square = (inputs(model, photos_for("siglip2", 1, size)) for size in ((16, 64), (32, 32)))
    both = {name: torch.cat([wide[name], square[name]]) for name in wide}
    with torch.inference_mode():
        expected = torch.cat([model(**wide).pooler_output, model(**square).pooler_output])
        torch.testing.assert_close(model(**both).pooler_output, expected, atol=1e-5, rtol=1e-4)


def test_a_batch_that_is_padded_unevenly_is_refused():
    model = reduce_(make("siglip2_classifier"), TNT(at=2, keep=0.5))
    small, large = (inputs(model, photos_for("siglip2", 1, size)) for size in ((24, 40), (32, 32)))
    small = padded(small, 64)
    both = {name: torch.cat([small[name], large[name]]) for name in small}
    with pytest.raises(UserError, match=r"images of 60 to 64 patches in one batch: .* expected images with the same"):
        model(**both)


def test_what_the_library_does_with_images():
    """Everything that takes images cuts them itself, of an unpruned model too."""
    model, images = make("siglip2_classifier"), photos_for("siglip2", 4, (24, 40))
    expected = run(model, images)
    assert evaluate(model, images, labels=expected.argmax(1), progress=False).top1 == 100
    reduce_(model, TNT(at=2, keep=1.0))
    assert evaluate(model, images, labels=expected.argmax(1), progress=False).top1 == 100
    assert features(model, images).shape == (4, 32, 6, 10)
    with pytest.raises(UserError, match="patches without spatial_shapes"):
        model(inputs(model, images)["pixel_values"])


def test_a_folder_needs_images_and_its_processor_makes_patches(tmp_path):
    make("siglip2_vision").save_pretrained(tmp_path)
    transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=64).save_pretrained(tmp_path)
    model = transformers.Siglip2VisionModel.from_pretrained(tmp_path).eval()
    with pytest.raises(UserError, match=r"its image processor makes images of shape \(1, 64, 48\); expected"):
        transform_for(model)
