"""BEiT of transformers: the bias by relative position is that of the tokens that are left."""

from __future__ import annotations

import pytest
import torch

from hf_models import make, photos_for, run
from tntprune import TNT, Random, ToMe
from tntprune.backbones.base import tower_of
from tntprune.backbones.hf.beit import among
from tntprune.ops.tokens import NOWHERE
from tntprune.reduce import reduce_


def test_a_bias_of_some_tokens_is_gathered_pair_by_pair():
    whole = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([[0, 3, 5], [0, 1, 2]])  # 5: without a place
    found = among(whole, rows)
    for image in range(2):
        for i, one in enumerate(rows[image]):
            for j, other in enumerate(rows[image]):
                expected = torch.zeros(2) if 5 in (one, other) else whole[0, :, one, other]
                assert torch.equal(found[image, :, i, j], expected)


@pytest.mark.parametrize("kind", ["beit", "beit_shared"])
def test_each_blocks_bias_goes_with_the_tokens(kind):
    """Those that are left answer as if the others had been masked out of attention."""
    model, images = reduce_(make(kind, "eager"), Random(at=0, keep=0.5)), photos_for(kind, 2)
    tower = tower_of(model)
    with torch.inference_mode():
        tokens, everywhere = tower.enter(images)
        index = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(s))[:20] for s in (1, 2)])
        x = torch.cat([tokens.x[:, :1], tokens.x.gather(1, 1 + index[:, :, None].expand(-1, -1, 32))], 1)
        found = tower.run(2, x, tower.placed(everywhere, index))
        kept = torch.zeros(2, 65).bool().scatter(1, torch.cat([torch.zeros(2, 1).long(), 1 + index], 1), True)
        mask = torch.where(kept, 0.0, -torch.inf)[:, None, None]
        shared = everywhere.shared
        expected = tower.blocks[1](tokens.x, mask if shared is None else shared + mask, resolution=(32, 32))
        expected = torch.cat([expected[:, :1], expected.gather(1, 1 + index[:, :, None].expand(-1, -1, 32))], 1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        nowhere = torch.cat([index[:, :19], torch.full((2, 1), NOWHERE)], 1)
        assert tower.run(2, x, tower.placed(everywhere, nowhere)).isfinite().all()


def test_the_mean_weighs_merged_tokens_by_size():
    """With all patches alike, merging changes nothing."""
    model = make("beit_classifier")
    with torch.no_grad():
        model.beit.embeddings.position_embeddings[:, 1:] = model.beit.embeddings.position_embeddings[:, 1:2]
        for layer in model.beit.layers:
            layer.relative_position_bias.relative_position_bias_table.zero_()
    images = torch.ones(1, 3, 32, 32)
    before = run(model, images)
    torch.testing.assert_close(run(reduce_(model, ToMe(r=5)), images), before, atol=1e-5, rtol=1e-4)


def test_another_window_than_the_models_own():
    model = reduce_(make("beit"), TNT(at=2, keep=0.5))
    assert run(model, photos_for("beit", size=(24, 44))).isfinite().all()


def test_it_can_be_trained_after_a_pass_in_inference_mode():
    """transformers keeps a tensor that it makes in the first pass, whatever mode that was in."""
    model, images = make("beit"), photos_for("beit", size=(20, 28))
    run(model, images)
    reduce_(model, Random(at=2, keep=0.5))
    model(images).pooler_output.sum().backward()
    assert model.layers[3].relative_position_bias.relative_position_bias_table.grad.abs().sum() > 0
