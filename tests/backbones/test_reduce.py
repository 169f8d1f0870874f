from __future__ import annotations

import pickle
import subprocess
import sys
import warnings

import pytest
import timm
import torch
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from torch import nn

import tntprune
from conftest import make, photos_for
from tntprune import TNT, Random, UsageError, UserError, calibrate_, load_, reduce_, restore_, save
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.errors import UserNote


def test_a_second_reduction_replaces_the_first():
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    kind = type(model)
    reduce_(model, Random(at=1, keep=0.25))
    assert type(model) is kind and reduction_of(model).config == Random(at=1, keep=0.25)
    assert [name for name in model.state_dict() if name.startswith("reduction.")] == []


def test_the_models_mode_is_taken_over():
    assert reduction_of(reduce_(make("plain"), TNT(at=2))).training is False
    assert reduction_of(reduce_(make("plain").train(), TNT(at=2))).training is True


def test_base_of_shares_every_weight_and_is_unpruned():
    model = make("distilled")
    images = photos_for(model)
    with torch.inference_mode():
        expected = model(images)
        reduce_(model, Random(at=2, keep=0.25))
        base = base_of(model)
        assert torch.equal(base(images), expected)
        assert not torch.equal(model(images), expected)
    own = dict(model.named_parameters())
    assert all(own[name] is value for name, value in base.named_parameters())


def test_a_reduced_model_can_be_pickled_and_saved_by_its_state():
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    images = photos_for(model)
    with torch.inference_mode():
        assert torch.equal(pickle.loads(pickle.dumps(model))(images), model(images))
    twin = reduce_(
        VisionTransformer(img_size=32, patch_size=4, embed_dim=32, depth=6, num_heads=4, num_classes=7),
        TNT(at=2, keep=0.5),
    )
    twin.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert torch.equal(twin.eval()(images), model(images))


def test_pretrained_weights_still_load_into_a_reduced_model():
    plain, model = make("plain"), reduce_(make("plain"), TNT(at=2))
    left = model.load_state_dict(plain.state_dict(), strict=False)
    assert all(name.startswith("reduction.") for name in left.missing_keys) and left.unexpected_keys == []


@pytest.mark.parametrize("block", [DiffParallelScalingBlock, ParallelThingsBlock])
def test_blocks_that_are_not_supported_are_refused_by_name(block):
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, block_fn=block)
    with pytest.raises(UserError, match=f"block {block.__name__} .supported: Block, ResPostBlock"):
        reduce_(model, Random(at=1))
    assert type(model) is VisionTransformer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_layer": "diff"}, "attention DiffAttention"),
        ({"patch_drop_rate": 0.5}, "patch_drop_rate"),
        ({"class_token": False, "global_pool": "prr"}, "global_pool='prr'"),
    ],
)
def test_parts_that_are_not_supported_are_refused_by_name(options, words):
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, **options)
    with pytest.raises(UserError, match=words):
        reduce_(model, Random(at=1))


@pytest.mark.parametrize("name", ["resnet18", "vit_relpos_small_patch16_224", "swin_tiny_patch4_window7_224"])
def test_other_models_are_refused_by_name(name):
    model = timm.create_model(name)
    with pytest.raises(UserError, match=f"{type(model).__name__} is not supported; expected timm VisionTransformer"):
        reduce_(model, Random(at=1))


def test_a_subclass_of_the_users_is_refused_because_its_own_forward_would_be_lost():
    class Mine(VisionTransformer):
        pass

    with pytest.raises(UserError, match="Mine is not supported"):
        reduce_(Mine(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4), Random(at=1))


def test_a_compiled_or_wrapped_model_is_refused_with_a_hint():
    with pytest.raises(UserError, match=r"OptimizedModule wraps a model; expected .* its \._orig_mod"):
        reduce_(torch.compile(make("plain")), Random(at=1))
    with pytest.raises(UserError, match=r"DataParallel wraps a model; expected .* its \.module"):
        reduce_(nn.DataParallel(make("plain")), Random(at=1))


def test_what_needs_the_whole_grid_is_refused():
    model = reduce_(make("plain"), Random(at=1, keep=0.5))
    with pytest.raises(UserError, match=r"before tntprune\.reduce_"):
        model.prune_intermediate_layers(2)
    with pytest.raises(UserError, match="attn_mask"):
        model(photos_for(model), attn_mask=torch.ones(65, 65))
    restore_(model)
    assert len(model.forward_intermediates(photos_for(model))[1]) == 6


def test_an_unreduced_model_is_refused_where_a_reduced_one_is_needed():
    for action in (reduction_of, lambda m: tntprune.save(m, "nowhere"), lambda m: tntprune.record(m).__enter__()):
        with pytest.raises(UserError, match=r"is not reduced; call tntprune.reduce_ first"):
            action(make("plain"))


def test_a_trace_is_filled_anew_by_each_pass_and_ends_with_its_context():
    model = reduce_(make("plain"), Random(at=(1, 2), keep=0.5))
    with tntprune.record(model) as trace:
        for count in (2, 5):
            model(photos_for(model, count))
            assert {block: len(kept) for block, kept in trace.kept.items()} == {1: count, 2: count}
    assert model.trace is None
    model(photos_for(model, 1))
    assert len(trace.kept[1]) == 5
    with pytest.raises(RuntimeError, match="mine"), tntprune.record(model):
        raise RuntimeError("mine")
    assert model.trace is None


def test_a_pass_that_drops_nothing_leaves_an_empty_trace():
    model = reduce_(make("dynamic"), TNT(at=(1, 3), tokens=(9, 4)))
    with tntprune.record(model) as trace:
        model(torch.randn(1, 3, 32, 32))
        assert sorted(trace.kept) == [1, 3]
        model(torch.randn(1, 3, 12, 12))  # 9 patches: nothing to drop after block 1
        assert sorted(trace.kept) == [3]
        model(torch.randn(1, 3, 16, 16))
        assert sorted(trace.kept) == [1, 3]


def test_traces_nest():
    model = reduce_(make("plain"), Random(at=1, keep=0.5))
    with tntprune.record(model) as outer:
        with tntprune.record(model) as inner:
            model(photos_for(model, 1))
        assert not outer.kept and inner.kept
        model(photos_for(model, 2))
        assert len(outer.kept[1]) == 2
    assert model.trace is None


def test_a_compiled_model_is_not_restored_without_a_word():
    model = torch.compile(reduce_(make("plain"), Random(at=1, keep=0.5)))
    with pytest.raises(UserError, match="OptimizedModule wraps a model"):
        restore_(model)
    with pytest.raises(UserError, match="OptimizedModule wraps a model"):
        reduction_of(model)


def test_the_public_names_are_there_and_nothing_is_hidden_by_a_module():
    assert all(callable(getattr(tntprune, name)) for name in tntprune.__all__)
    with pytest.raises(AttributeError, match="no attribute 'prune'"):
        _ = tntprune.prune


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Random, "the class Random given; expected a config"),
        ({"method": "tnt"}, "dict given; expected a config"),
        (None, "NoneType given"),
        ("tome", r"'tome': a method's name; expected its config, tntprune\.ToMe\(\)"),
    ],
)
def test_what_is_no_config_is_refused(given, told):
    with pytest.raises(UsageError, match=told):
        reduce_(make("plain"), given)


def test_a_reduction_that_has_learned_is_not_lost_without_a_word(tmp_path):
    model = reduce_(make("plain"), TNT(at=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_(model, TNT(at=3))  # nothing was learned
    images = torch.randn(4, 3, 32, 32)
    calibrate_(model, images, epochs=1, batch_size=2, progress=False)
    with pytest.warns(UserNote, match="the scorers that tnt learned are lost"):
        reduce_(model, TNT(at=3, keep=0.25))
    save(calibrate_(model, images, epochs=1, batch_size=2, progress=False), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_(model, TNT(at=3, keep=0.5))  # nothing is lost
        reduce_(load_(model, tmp_path), TNT(at=3))


def test_public_names_are_listed_before_they_are_used():
    code = "import tntprune; print({*tntprune.__all__} <= {*dir(tntprune)})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
