"""Reduced models inside other projects' code, as their public bug reports ask for it."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import hf_models
import tntprune
from configs import CONFIGS, run, stirred
from conftest import SMALL, make, photos_for
from tntprune import ATS, Random, ToMe, TopK, macs, record, reduce_
from tntprune.backbones.attach import is_reduced
from tntprune.errors import UserError

transformers = hf_models.transformers
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    "num_key_value_heads": 4,
}  # fmt: skip


def llava(vision):
    text = transformers.LlamaConfig(**TINY, pad_token_id=0)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=98, image_seq_length=64, vision_feature_layer=-2
    )
    if vision.model_type == "siglip_vision_model":
        config.vision_feature_select_strategy = "full"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("vision", ["clip", "siglip"])
def test_a_tower_inside_llava(vision):
    kinds = {"clip": transformers.CLIPVisionConfig, "siglip": transformers.SiglipVisionConfig}
    model = llava(kinds[vision](**hf_models.SHAPE))
    tower, images = model.model.vision_tower, hf_models.photos_for("clip_vision", 1)

    def logits(patches):
        words = torch.tensor([[1, *[98] * patches, 5, 2]])
        with torch.inference_mode():
            return model(input_ids=words, pixel_values=images).logits

    before = logits(64)
    reduce_(tower, Random(at=2, keep=1.0))
    assert torch.equal(logits(64), before)
    reduce_(tower, ToMe(r=5))  # LLaVA reads the tokens behind the last block but one: 64 - 3 * 5 patches
    with record(tower) as trace:
        assert logits(49).shape == (1, 52, 99)
    assert trace.kept[3].shape == (1, 49)
    with pytest.raises(ValueError, match=r"(?i)image features and image tokens do not match"):
        logits(64)


def test_a_tower_inside_paligemma():
    text = {**TINY, "model_type": "gemma", "head_dim": 8, "pad_token_id": 0}
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**hf_models.SHAPE, vision_use_head=False), text_config=text,
        image_token_index=98, projection_dim=32,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    reduce_(model.model.vision_tower, ToMe(r=5))
    words = torch.tensor([[*[98] * 44, 1, 5, 2]])  # 64 - 4 * 5 patches
    with torch.inference_mode():
        out = model(input_ids=words, pixel_values=hf_models.photos_for("siglip_vision", 1))
    assert out.logits.shape == (1, 47, 99)


def head_on_a_grid(kind, backbone):
    """A tiny model for depth whose head reads four stages of a backbone."""
    sizes = {"reassemble_hidden_size": 32, "fusion_hidden_size": 16, "head_hidden_size": 8}
    if kind == "depth_anything":
        config = transformers.DepthAnythingConfig(
            backbone_config=backbone, patch_size=4, **sizes, neck_hidden_sizes=[8, 16, 16, 16]
        )
        return transformers.DepthAnythingForDepthEstimation(config)
    config = transformers.DPTConfig(
        backbone_config=backbone, hidden_size=32, fusion_hidden_size=16, neck_hidden_sizes=[8, 16, 16, 16],
        readout_type="ignore", patch_size=4, image_size=32, reassemble_factors=[4, 2, 1, 0.5],
    )  # fmt: skip
    return transformers.DPTForDepthEstimation(config)


BACKBONE = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False}


@pytest.mark.parametrize("kind", ["depth_anything", "dpt"])
def test_the_backbone_inside_a_model_for_depth(kind):
    torch.manual_seed(0)
    model = head_on_a_grid(kind, transformers.Dinov2Config(**hf_models.DINO, **BACKBONE)).eval()
    images = hf_models.photos_for("dinov2", 2)
    with torch.inference_mode():
        before = model(images).predicted_depth
        with pytest.raises(UserError, match=r"wraps a model; expected the model inside it, which is its \.backbone"):
            reduce_(model, ToMe(r=8))
        reduce_(model.backbone, Random(at=2, keep=1.0))
        assert torch.equal(model(images).predicted_depth, before)
        reduce_(model.backbone, ToMe(r=8))
        after = model(images).predicted_depth
    assert after.shape == before.shape and not torch.equal(after, before) and after.isfinite().all()


def test_the_backbone_inside_vitpose():
    config = transformers.VitPoseConfig(
        backbone_config=transformers.VitPoseBackboneConfig(**{**hf_models.POSE, "out_features": ["stage4"]}),
        num_labels=5,
    )
    torch.manual_seed(0)
    model, images = transformers.VitPoseForPoseEstimation(config).eval(), hf_models.photos_for("vitpose", 2)
    with torch.inference_mode():
        before = model(images).heatmaps
        with pytest.raises(UserError, match=r"wraps a model; expected the model inside it, which is its \.backbone"):
            reduce_(model, ToMe(r=8))
        reduce_(model.backbone, Random(at=2, keep=1.0))
        assert torch.equal(model(images).heatmaps, before)
        reduce_(model.backbone, ToMe(r=8))
        after = model(images).heatmaps
    assert after.shape == before.shape and not torch.equal(after, before) and after.isfinite().all()


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (
            lambda: transformers.VitPoseBackbone(
                transformers.VitPoseBackboneConfig(**hf_models.POSE, num_experts=2, part_features=8)
            ),
            r"num_experts=2 \(ViTPose\+",
        ),
        (lambda: timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=32, num_heads=2), "padded grids"),
        (
            lambda: transformers.ViTMAEForPreTraining(
                transformers.ViTMAEConfig(**hf_models.SHAPE, decoder_num_hidden_layers=1)
            ),
            "expected its encoder, a ViTMAEModel with mask_ratio=0",
        ),
        (
            lambda: transformers.Owlv2ForObjectDetection(
                transformers.Owlv2Config(vision_config=hf_models.SHAPE, text_config=hf_models.TEXT)
            ),
            "its detector reads the full grid; expected its encoder alone",
        ),
    ],
)
def test_what_reads_more_than_a_reduced_model_gives_is_refused_with_the_reason(build, told):
    with pytest.raises(UserError, match=told) as caught:
        reduce_(build(), Random(at=1))
    assert "\n" not in str(caught.value)


def test_transformers_trainer(tmp_path):
    model = reduce_(hf_models.make("vit_classifier"), TopK(at=2, keep=0.5))
    data = [
        {"pixel_values": image, "labels": n % 7} for n, image in enumerate(hf_models.photos_for("vit_classifier", 8))
    ]
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = transformers.Trainer(model, arguments, train_dataset=data).train()
    assert result.global_step == 2 and is_reduced(model)
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_data_parallel_on_whatever_there_is():
    model = stirred(make("plain"), CONFIGS["tnt-merging"])
    images = photos_for(model)
    assert torch.equal(run(torch.nn.DataParallel(model), images), run(model, images))


def test_an_image_of_1920_x_1080_that_is_padded_to_whole_patches():
    model = VisionTransformer(**{**SMALL, "patch_size": 32, "depth": 3}, dynamic_img_size=True, dynamic_img_pad=True)
    reduce_(model.eval(), TopK(at=2, keep=0.5))
    with record(model) as trace:
        assert run(model, torch.randn(1, 3, 1080, 1920)).shape == (1, 7)
    assert trace.kept[2].shape == (1, 34 * 60 // 2) and int(trace.kept[2].max()) < 34 * 60


def test_any_number_of_classes_and_another_head_later():
    model = timm.create_model("test_vit", num_classes=100, img_size=64).eval()
    reduce_(model, TopK(at=2, keep=0.5))
    images = torch.randn(2, 3, 64, 64)
    assert run(model, images).shape == (2, 100)
    model.reset_classifier(3)
    assert run(model, images).shape == (2, 3) and macs(model).macs < macs(tntprune.restore_(model)).macs


def test_another_image_size_after_the_reduction():
    model = reduce_(make("plain"), TopK(at=2, keep=0.5))
    model.set_input_size((48, 48))
    with record(model) as trace:
        run(model, torch.randn(1, 3, 48, 48))
    assert trace.kept[2].shape == (1, 72) and macs(model).tokens[2] == 72


def test_gradients_go_through_what_ats_samples():
    model = reduce_(make("plain"), ATS(at=2, keep=0.5))
    images = photos_for(model).requires_grad_()
    model(images).square().sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mean_pooling_weighs_merged_tokens_by_size():
    """As MAE's fine-tuned models pool: with all tokens alike, merging changes nothing."""
    model = make("avg_with_cls")
    with torch.no_grad():
        model.pos_embed[:, 1:] = model.pos_embed[:, 1:2]
    images = torch.ones(1, 3, 32, 32)
    expected = run(model, images)
    torch.testing.assert_close(run(reduce_(model, ToMe(r=5)), images), expected, atol=1e-5, rtol=1e-4)


def test_timms_features_only():
    model = timm.create_model("test_vit", features_only=True, img_size=64).eval()
    images = torch.randn(1, 3, 64, 64)
    shapes = [tuple(out.shape) for out in run(model, images)]
    reduce_(model.model, ToMe(r=2))
    assert [tuple(out.shape) for out in run(model, images)] == shapes
