"""What must hold for every method on every Hugging Face model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fvcore.nn import FlopCountAnalysis

import tntprune
import vlm_models
from configs import first, stirred
from hf_models import (
    CLASSIFIERS,
    EVERY,
    FAMILIES,
    KINDS,
    WHOLE,
    call,
    inputs,
    make,
    photos_for,
    run,
    transformers,
    used,
)
from reference import by_place, in_halves
from tntprune import ATC, ATS, MCTF, TNT, DynamicViT, EViT, Random, ToMe
from tntprune.backbones.attach import base_of, is_reduced, reduction_of
from tntprune.backbones.base import adapters_of, find_backbone, tower_of
from tntprune.backbones.hf.towers import mean_by_size
from tntprune.methods import implementation
from tntprune.ops import attention
from tntprune.ops.tokens import Tokens
from tntprune.reduce import reduce_, restore_

CONFIGS = {
    "random": Random(at=2, keep=0.5),
    "tnt-similar": TNT(at=3, keep=0.5, similar=5),
    "tnt-several": TNT(at=(1, 2, 3), keep=(0.9, 0.8, 0.5), similar=6),
    "tnt-merge": TNT(at=2, keep=0.5, similar=5, similar_how="merge"),
    "evit": EViT(at=(2, 3), keep=0.7),
    "tome": ToMe(r=5),
    "dynamicvit": DynamicViT(at=(1, 3), keep=0.6),
    "ats": ATS(at=(2, 3), keep=0.6),
    "mctf": MCTF(r=5),
    "atc": ATC(at=(2, 3), keep=0.8),
}
EACH_FAMILY = (
    "vit_classifier",
    "dinov2_classifier",
    "dinov3",
    "siglip",
    *(
        pytest.param(kind, marks=pytest.mark.wide)
        for kind in (
            "deit_teacher",
            "registers_classifier",
            "clip_classifier",
            "aimv2_vision",
            "beit_classifier",
            "mae",
            "siglip2",
        )
    ),
)


@pytest.fixture(params=EVERY)
def kind(request):
    return request.param


@pytest.fixture(
    params=[*EACH_FAMILY, *(pytest.param(kind, marks=pytest.mark.wide) for kind in ("siglip_classifier", "clip"))]
)
def each(request):
    return request.param


@pytest.fixture(params=first(CONFIGS, [name for name in CONFIGS if name not in ("mctf", "atc")]))
def config(request, each):
    config, model = CONFIGS[request.param], make(each)
    reason = implementation(type(config)).obstacle(find_backbone(model).layout(model), config)
    if reason:
        with pytest.raises(tntprune.UserError, match="cannot be applied here"):
            reduce_(model, config)
        pytest.skip(reason)
    return config


def test_restore_gives_back_the_base_bit_for_bit(each, config):
    model, images = make(each), photos_for(each)
    before, names, plain = run(model, images), list(model.state_dict()), type(model)
    tower = type(tower_of(model))
    stirred(model, config)
    assert isinstance(model, plain) and type(model) is not plain and type(model).__name__ == plain.__name__
    assert isinstance(tower_of(model), tower) and type(tower_of(model)).__name__ == tower.__name__
    assert [name for name in model.state_dict() if "reduction." not in name] == names
    assert not torch.equal(run(model, images), before)
    assert torch.equal(run(base_of(model), images), before) and is_reduced(model)
    restore_(model)
    assert type(model) is plain and type(tower_of(model)) is tower and list(model.state_dict()) == names
    assert torch.equal(run(model, images), before)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keep_one_is_the_base_bit_for_bit(kind, attention):
    model, images = make(kind, attention), photos_for(kind)
    before = call(model, images, output_hidden_states=True)
    reduce_(model, TNT(at=2, keep=1.0))
    after = call(model, images, output_hidden_states=True)
    assert type(after) is type(before) and after.keys() == before.keys()
    assert torch.equal(used(after), used(before))
    if kind in WHOLE:
        before, after = before.vision_model_output, after.vision_model_output
    assert len(after.hidden_states) == 5
    assert all(torch.equal(a, b) for a, b in zip(after.hidden_states, before.hidden_states, strict=True))


def test_kept_patches_are_unique_in_range_and_counted(each, config):
    model, images = make(each), photos_for(each)
    stirred(model, config)
    layout = reduction_of(model).layout
    plan = by_place(reduction_of(model).steps(layout.patches))
    with tntprune.record(model) as trace:
        run(model, images)
    if config.variable:
        assert all((count <= layout.patches).all() for count in trace.counts)
        return
    assert list(trace.kept) == [place.block for place in plan]
    for place, step in plan.items():
        kept = trace.kept[place.block]
        assert kept.shape == (len(images), step.leaving)
        for row in kept.tolist():
            own = [place for place in row if place != -1]
            assert len(set(own)) == len(own) and set(own) <= set(range(layout.patches))
    counted = torch.stack(trace.counts[:-1]).view(layout.depth, 2, len(images))
    assert counted[:, 0].tolist() == [[n] * len(images) for n in tntprune.macs(model).tokens]


def test_an_image_does_not_depend_on_its_batch(each, config):
    model, images = make(each), photos_for(each, 4)
    stirred(model, config)
    whole, turned = run(model, images), run(model, images.flip(0)).flip(0)
    alone = torch.cat([run(model, images[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(whole, turned, atol=1e-5, rtol=1e-4)


def test_a_copy_is_independent_and_equal(kind):
    model, images = make(kind), photos_for(kind)
    stirred(model, CONFIGS["tnt-merge"])
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, images), run(model, images))
    restore_(twin)
    assert is_reduced(model) and not is_reduced(twin)
    assert tntprune.macs(model).macs < tntprune.macs(twin).macs


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_in_halves_is_the_whole_block(kind, attention):
    model = reduce_(make(kind, attention), Random(at=2, keep=0.5))
    tower = tower_of(model)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        places = tower.enter(photos_for(kind, 2))[1]
        if places is not None:
            places = tower.placed(places, torch.arange(9 - tower.num_prefix_tokens).expand(2, -1))
        out = in_halves(tower, 3, x, places)
        torch.testing.assert_close(out, tower.run(3, x, places), atol=1e-5, rtol=1e-4)


def test_attention_implementations_agree(kind):
    images = photos_for(kind)
    fused, eager = (run(reduce_(make(kind, name), ToMe(r=5)), images) for name in ("sdpa", "eager"))
    torch.testing.assert_close(fused, eager, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["vit_classifier", "clip_vision", "siglip_no_head", "dinov3"])
def test_sizes_that_are_a_part_of_the_keys_count_as_a_mask_does(kind, monkeypatch):
    """What CUDA takes. tests/ops/test_sizes.py has timm's models."""
    model, images, masks = reduce_(make(kind), ToMe(r=5)), photos_for(kind), []
    by_mask, fused = run(model, images), F.scaled_dot_product_attention
    monkeypatch.setattr(attention, "wants_mask", lambda bias: False)
    note = lambda *args, **kwargs: masks.append(kwargs.get("attn_mask")) or fused(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    torch.testing.assert_close(run(model, images), by_mask, atol=2e-5, rtol=1e-4)
    assert masks.count(None) == len(masks) == 4


@pytest.mark.parametrize("name", ["tnt-several", "tome"])
def test_saved_as_transformers_saves_and_put_back_together(kind, name, tmp_path):
    model, images = make(kind), photos_for(kind)
    before = run(model, images)
    stirred(model, CONFIGS[name])
    model.save_pretrained(tmp_path)
    assert (tmp_path / "reducer.safetensors").is_file()
    plain = type(base_of(model))
    loaded, about = plain.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about.values()), about
    assert loaded.config.architectures == [plain.__name__]
    assert type(loaded) is plain and torch.equal(run(loaded.eval(), images), before)
    tntprune.load_(loaded, tmp_path)
    assert torch.equal(run(loaded, images), run(model, images))


def test_saving_what_a_training_script_hands_over(tmp_path):
    """transformers' Trainer gives the state dict, and only one of several processes writes."""
    model = stirred(make("vit_classifier"), CONFIGS["tnt-similar"])
    model.save_pretrained(tmp_path / "a", state_dict=model.state_dict())
    _, about = type(base_of(model)).from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(about.values())
    model.save_pretrained(tmp_path / "b", is_main_process=False)
    assert not (tmp_path / "b" / "reducer.safetensors").exists()


def test_pushing_takes_the_reduction_along(tmp_path, monkeypatch):
    model = stirred(make("vit_classifier"), CONFIGS["tnt-similar"])
    pushed = {}

    def upload(self, folder, repo_id, files_timestamps, **kwargs):
        pushed[repo_id] = sorted(path.name for path in tmp_path.__class__(folder).iterdir())

    class Repository:
        repo_id = "someone/small"

    class Api:
        def create_repo(self, *args, **kwargs):
            return Repository

    monkeypatch.setattr(transformers.utils.hub, "hf_api", lambda: Api())
    monkeypatch.setattr(transformers.utils.hub, "create_and_tag_model_card", lambda *a, **k: Card())
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    model.save_pretrained(tmp_path / "small", push_to_hub=True, repo_id="someone/small")
    assert pushed == {"someone/small": ["README.md", "config.json", "model.safetensors", "reducer.safetensors"]}


class Card:
    def save(self, path):
        with open(path, "w") as file:
            file.write("a card")


def test_outputs_are_of_the_same_kind_and_ragged_inside(kind):
    model, images = make(kind), photos_for(kind)
    base, short = call(model, images), len(call(model, images, return_dict=False))
    reduce_(model, TNT(at=2, keep=0.5))
    out = call(model, images, output_hidden_states=True)
    assert type(out) is type(base)
    assert len(call(model, images, return_dict=False)) == short
    assert torch.equal(used(call(model, images)), used(out))
    inside = out.vision_model_output if kind in WHOLE else out
    layout = reduction_of(model).layout
    left = [n + layout.prefix for n in (layout.patches, layout.patches, *[layout.patches // 2] * 3)]
    assert [x.shape for x in inside.hidden_states] == [(3, n, 32) for n in left]
    if "classifier" in kind:
        labels = torch.tensor([0, 1, 2])
        expected = torch.nn.functional.cross_entropy(out.logits, labels)
        torch.testing.assert_close(call(model, images, labels=labels).loss, expected)


def test_what_cannot_be_done_is_refused_in_one_line(kind):
    model, images = reduce_(make(kind), TNT(at=2, keep=0.5)), photos_for(kind)
    with pytest.raises(tntprune.UserError, match="no attention maps"):
        call(model, images, output_attentions=True)
    with pytest.raises(tntprune.UserError, match="the model has 5 hidden states; expected True, False, or their"):
        call(model, images, output_hidden_states=[1, 9])
    if kind not in WHOLE:  # there it is the text's
        with pytest.raises(tntprune.UserError, match="no attention_mask or bool_masked_pos"):
            call(model, images, attention_mask=torch.ones(3, 64))
    if kind in ("vit", "deit", "dinov2"):
        with pytest.raises(tntprune.UserError, match="no attention_mask or bool_masked_pos"):
            call(model, images, bool_masked_pos=torch.ones(3, 64).bool())


@pytest.mark.parametrize("size", [(32, 32), (24, 44), (48, 32)])
@pytest.mark.parametrize("name", ["tnt-similar", "tome", "dynamicvit"])
def test_other_image_sizes(kind, name, size):
    if kind == "vit_classifier" and size != (32, 32):
        pytest.skip("transformers itself reads other sizes only from models that are square")
    model = stirred(make(kind), CONFIGS[name])
    if kind == "vitpose":
        pytest.skip("it takes one size only")
    if kind in ("aimv2", "aimv2_vision") and size != (32, 32):
        pytest.skip("its positions cannot be resampled")
    alone = any(word in kind for word in ("dinov", "registers", "aimv2", "beit", "siglip2"))  # they do it by themselves
    options = {} if alone else {"interpolate_pos_encoding": True}
    if kind == "vit_classifier":
        size, options = (24, 40), {}
    images = photos_for(kind, size=size)
    with tntprune.record(model) as trace:
        assert run(model, images, **options).isfinite().all()
    patches = size[0] * size[1] // 16
    plan = by_place(reduction_of(model).steps(patches))
    assert {b: kept.shape[1] for b, kept in trace.kept.items()} == {p.block: s.leaving for p, s in plan.items()}
    assert all(int(kept.max()) < patches for kept in trace.kept.values())
    restored = run(restore_(model), images, **options)
    assert torch.equal(restored, run(reduce_(model, CONFIGS[name].changed(keep=1.0, **(
        {"similar": 0} if name == "tnt-similar" else {}))), images, **options))  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("each", EACH_FAMILY)
def test_half_precision(each, name):
    if each in ("siglip", "siglip2", "aimv2_vision") and name in ("evit", "ats"):
        pytest.skip("it has no CLS token")
    model, images = stirred(make(each), CONFIGS[name]), photos_for(each)
    exact = run(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        near = (run(model, images).float() - exact).abs().mean() < 0.1 * exact.abs().mean() + 0.05
    assert near or name == "ats"  # which samples: a bit more or less, and it keeps other tokens
    assert run(model.to(torch.bfloat16), images.bfloat16()).isfinite().all()


@pytest.mark.parametrize("name", ["tnt-several", "tome"])
def test_gradient_checkpointing_changes_nothing(kind, name):
    model = stirred(make(kind), CONFIGS[name])
    images = photos_for(kind).requires_grad_()
    (plain,) = torch.autograd.grad(used(call(model, images)).square().sum(), images)
    model.activation_checkpointing_enable()
    assert tower_of(model).grad_checkpointing
    (again,) = torch.autograd.grad(used(call(model, images)).square().sum(), images)
    torch.testing.assert_close(plain, again)


class Bare(torch.nn.Module):
    """From images to one tensor, as counting and export want it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return used(call(self.model, images))


@pytest.mark.parametrize(("each", "name"), [
    ("registers_classifier", "random"), ("siglip", "tnt-merge"),
    *(pytest.param(*one, marks=pytest.mark.wide) for one in (
        ("vit_classifier", "tnt-several"), ("deit_teacher", "evit"), ("dinov2_classifier", "tnt-merge"),
        ("clip_classifier", "tome"), ("beit_classifier", "tnt-merge"), ("mae", "random"),
    )),
])  # fmt: skip
def test_export_gives_what_eager_gives(each, name):
    exported(each, name)


@pytest.mark.wide
@pytest.mark.parametrize("each", [kinds[0] for kinds in FAMILIES.values()])
def test_a_model_of_each_family_is_exported(each):
    exported(each, "random")


def exported(each, name):
    model, images = Bare(stirred(make(each), CONFIGS[name])), photos_for(each)
    program = torch.export.export(model, (images,)).module()
    with torch.inference_mode():
        torch.testing.assert_close(program(images), model(images), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("name", ["tnt-several", "tome"])
@pytest.mark.parametrize("each", EACH_FAMILY)
def test_compiled_in_one_graph_gives_what_eager_gives(each, name):
    torch._dynamo.reset()
    model, images = stirred(make(each), CONFIGS[name]), photos_for(each)
    expected = run(model, images)
    compiled = torch.compile(Bare(model), fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [None, TNT(at=2, keep=0.5, similar=4, recipe="paper")], ids=str)
def test_predicted_macs_equal_counted_ones(kind, config):
    model, images = make(kind, "eager"), photos_for(kind, 1)
    if config is not None:
        reduce_(model, config)
    for module in model.modules():
        if getattr(module, "padding", None) == "valid":
            module.padding = (0, 0)  # the same, but fvcore counts it
    counter = FlopCountAnalysis(Image(model), images).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    counted, predicted = counter.total(), tntprune.macs(model).macs
    assert abs(counted - predicted) <= 0.002 * counted, (counted, predicted)


class Image(torch.nn.Module):
    """What an image costs; the text is not counted."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        if hasattr(self.model, "text_model"):
            return used(self.model.get_image_features(**inputs(self.model, images)))
        return used(self.model(**inputs(self.model, images)))


def test_a_merged_token_counts_like_equal_ones_in_the_mean():
    x = torch.randn(2, 1 + 3, 8, generator=torch.Generator().manual_seed(0))
    merged = Tokens(x, torch.arange(3).expand(2, -1), 1, size=torch.tensor([[2.0, 1, 3], [1, 5, 0]]))
    for row, sizes in enumerate(([2, 1, 3], [1, 5, 0])):
        equal = torch.cat([x[row, 1 + i : 2 + i].expand(n, -1) for i, n in enumerate(sizes)])
        torch.testing.assert_close(mean_by_size(merged)[row], equal.mean(0))


@pytest.mark.parametrize("data", ["tensor", "loader"])
def test_a_scorer_is_trained_and_the_model_is_not(kind, data):
    model, images = make(kind), photos_for(kind, 12)
    reduce_(model, TNT(at=2, keep=0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = images if data == "tensor" else torch.utils.data.DataLoader(images, batch_size=4)
    tntprune.calibrate_(model, given, epochs=1, batch_size=4, progress=False)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("reduction." in name for name in changed)


def test_a_loader_that_names_what_it_gives_and_a_folder_that_cannot_be_read_for_it(tmp_path):
    model, images = reduce_(make("vit_classifier"), DynamicViT(at=2, keep=0.5)), photos_for("vit_classifier", 4)
    items = [{"pixel_values": image, "labels": number} for number, image in enumerate(images)]
    before = {name: value.clone() for name, value in reduction_of(model).state_dict().items()}
    tntprune.calibrate_(model, torch.utils.data.DataLoader(items, batch_size=2), epochs=1, progress=False)
    assert any(not torch.equal(value, before[name]) for name, value in reduction_of(model).state_dict().items())
    with pytest.raises(tntprune.UserError, match="the loader gives a dict; expected images"):
        tntprune.calibrate_(model, torch.utils.data.DataLoader([{"image": images[0]}]), progress=False)
    with pytest.raises(tntprune.UserError, match="no image processor says how photos are prepared"):
        tntprune.data.transforms.transform_for(model)


def test_training_against_labels_needs_classes(kind):
    model, images = reduce_(make(kind), DynamicViT(at=2, keep=0.5)), photos_for(kind, 8)
    labels = torch.arange(8) % 7
    if kind in CLASSIFIERS:
        tntprune.calibrate_(model, images, labels, epochs=1, batch_size=4, progress=False)
        return
    with pytest.raises(tntprune.UserError, match="tells no classes apart"):
        tntprune.calibrate_(model, images, labels, epochs=1, batch_size=4, progress=False)


def test_other_models_are_refused_by_name():
    model = transformers.SwinModel(transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[1], image_size=32))
    with pytest.raises(
        tntprune.UserError, match=r"SwinModel is not supported; expected .*transformers ViT, BEiT, DINOv2"
    ):
        reduce_(model, Random(at=1, keep=0.5))


def test_a_model_that_masks_patches_at_random_is_refused():
    model = make("mae")
    model.config.mask_ratio = 0.75
    with pytest.raises(tntprune.UserError, match=r"mask_ratio=0\.75, which drops patches .* is not supported"):
        reduce_(model, Random(at=1, keep=0.5))


def test_an_older_transformers_is_refused_by_number(monkeypatch):
    monkeypatch.setattr("tntprune.backbones.hf.adapter.transformers.__version__", "5.3.0")
    with pytest.raises(tntprune.UserError, match=r"transformers 5\.3\.0 \(expected 5\.24 or newer"):
        reduce_(make("vit"), Random(at=1, keep=0.5))


def test_labels_that_are_no_class_are_told():
    model = reduce_(make("vit_classifier"), DynamicViT(at=2))
    with pytest.raises(tntprune.UserError, match="labels from 99 to 99; the model has classes 0 to 6"):
        tntprune.calibrate_(model, photos_for("vit_classifier"), torch.full((3,), 99), progress=False)


def test_there_is_a_model_of_each_class_and_a_line_of_each_family_in_the_docs():
    """The marks in the table are the tests above of every kind."""
    assert sorted(kind for kinds in FAMILIES.values() for kind in kinds) == sorted(KINDS)
    towers = {type(part) for kind in KINDS for part in (make(kind), tower_of(make(kind)))}
    towers |= {
        type(part) for kind in {**vlm_models.KINDS, **vlm_models.PACKED} for part in vlm_models.make(kind).modules()
    }
    for adapter in adapters_of("transformers"):
        assert {*adapter.swaps, *adapter.holders} <= towers
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in page.split("| family |")[1].split("\n\n")[0].splitlines()[2:]]
    assert [row[0] for row in rows] == list(FAMILIES)
    assert all(marks == ["yes"] * 5 for _, *marks in rows)
