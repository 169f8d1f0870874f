"""A reduced model's parts are modules like any others: hooks, wrappers, shards, adapters and quantizers work."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import hf_models
import tntprune
from configs import CONFIGS, run, stirred
from conftest import make, photos_for
from tntprune import TNT, ToMe, TopK, UserError, macs, record, reduce_, restore_
from tntprune.backbones.attach import base_of, reduction_of, twin_of
from tntprune.backbones.base import tower_of

METHODS = ("random", "tnt-similar", "tnt-merging-inside", "topk", "evit", "dynamicvit", "tome", "zerotprune", "ats",
           "avit", "avit-fixed", "evovit", "mctf", "atc", "dtem", "diffrate")  # fmt: skip
FAMILIES = ("layer_scale", "post_norm", "eva02", "rope_mixed", "beit")
TOWERS = ("vit_classifier", "deit_teacher", "dinov2_classifier", "registers_classifier", "clip_projection", "siglip")


def calls_of(model, images, part=""):
    """Names of the modules with a block's, or its attention's, shape of name that are called in one pass."""
    tower, seen, handles = tower_of(model), [], []
    for number, block in enumerate(tower.blocks):
        module = block
        if part:
            module = next(m for name, m in block.named_children() if name in ("attn", "attention", "self_attn"))
        for kind, register in (("in", module.register_forward_pre_hook), ("out", module.register_forward_hook)):
            handles.append(
                register(
                    lambda m, args, *out, kind=kind, number=number: seen.append(
                        (number, kind, args[0].shape[1] if args else None)
                    )
                )
            )
    with torch.inference_mode():
        model(pixel_values=images) if hasattr(model, "config") else model(images)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("part", ["", "attention"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_hooks_on_every_block_and_attention_fire_once_a_pass(kind, name, part):
    model = make(kind)
    images = photos_for(model)
    try:
        stirred(model, CONFIGS[name])
    except UserError:
        pytest.skip("not for this model")
    with record(model) as trace, torch.inference_mode():
        model(images)
    entering = [int(count.max()) + model.num_prefix_tokens for count in trace.counts[:-1:2]]
    seen = calls_of(model, images, part)
    assert [(number, what) for number, what, _ in seen] == [(n, k) for n in range(6) for k in ("in", "out")]
    assert all(n == entering[number] for number, what, n in seen if what == "in")


@pytest.mark.parametrize("name", ["random", "tnt-merging", "topk", "tome"])
@pytest.mark.parametrize("kind", TOWERS)
def test_hooks_fire_in_towers_of_transformers_too(kind, name):
    model = (
        reduce_(hf_models.make(kind), CONFIGS[name].changed(at=(1, 2)) if name != "tome" else ToMe(r=5))
        if kind != "siglip" or name != "topk"
        else None
    )
    if model is None:
        pytest.skip("no CLS token")
    seen = []
    for number, block in enumerate(tower_of(model).blocks):
        block.register_forward_hook(lambda *_, number=number: seen.append(number))
        attention = getattr(block, "attention", None) or block.self_attn
        attention.register_forward_hook(lambda *_, number=number: seen.append(number))
    hf_models.run(model, hf_models.photos_for(kind))
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_a_hook_returns_replaces_the_output():
    model = reduce_(make("plain"), ToMe(r=5))
    images = photos_for(model)
    before = run(model, images)
    handle = model.blocks[3].attn.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    assert not torch.equal(run(model, images), before)
    handle.remove()
    assert torch.equal(run(model, images), before)


@pytest.mark.parametrize("name", ["tome", "tnt-merging", "topk"])
def test_timms_attention_extractor(name):
    from timm.utils.attention_extract import AttentionExtract

    model = make("plain")
    for block in model.blocks:
        block.attn.fused_attn = False
    reduce_(model, CONFIGS[name])
    with record(model) as trace, torch.inference_mode():
        model(photos_for(model))
        maps = AttentionExtract(model, method="hook")(photos_for(model))
    assert list(maps) == [f"blocks.{n}.attn.attn_drop" for n in range(6)]
    for attention, count in zip(maps.values(), trace.counts[::2]):
        assert attention.shape == (3, 4, int(count[0]) + 1, int(count[0]) + 1)
        torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention[..., 0]))


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torch.jit.script], ids=["fx", "script"])
@pytest.mark.parametrize("kind", ["plain", "eva02"])
def test_tracers_that_cannot_be_served_are_told_what_can(kind, trace):
    model = reduce_(make(kind), TNT(at=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            UserError, match=r"torch\.(fx cannot trace|jit\.script cannot hold) a reduced model.*expected"
        ):
            trace(model)


def test_a_traced_model_gives_what_the_eager_one_gives():
    model = stirred(make("plain"), CONFIGS["tome"])
    images = photos_for(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, images)
    torch.testing.assert_close(traced(images), model(images))


@pytest.mark.parametrize("name", ["tnt-mlp", "tnt-merging", "dynamicvit", "avit", "tome", "evit"])
def test_dynamic_quantization_leaves_scorers_alone(name):
    model = stirred(make("plain"), CONFIGS[name])
    images = photos_for(model)
    learned = {name: value.clone() for name, value in reduction_of(model).state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        out = run(small, images)
    assert type(small.blocks[0].mlp.fc1) is not nn.Linear
    assert all(torch.equal(value, learned[name]) for name, value in small.reduction.state_dict().items())
    assert nn.functional.cosine_similarity(out, run(model, images)).min() > 0.9


@pytest.mark.parametrize("name", ["tnt-mlp", "tnt-merging", "dynamicvit", "avit"])
def test_functional_calls_take_any_weights(name):
    model, images = stirred(make("plain"), CONFIGS[name]), None
    images = photos_for(model)
    other = {name: value + 0.3 * torch.randn_like(value) for name, value in model.state_dict().items()}
    with torch.no_grad():
        found = torch.func.functional_call(model, other, (images,))
        twin = copy.deepcopy(model)
        twin.load_state_dict(other)
        assert torch.equal(found, twin(images)) and not torch.equal(found, model(images))


def test_pruned_weights_of_a_scorer_are_used():
    model = stirred(make("plain"), TNT(at=2, keep=0.5, recipe="relative", scorer="mlp"))
    images = photos_for(model)
    before = run(model, images)
    layer = model.reduction.scorers["2"].layers[0]
    prune.l1_unstructured(layer, "weight", amount=0.9)
    after = run(model, images)
    assert not torch.equal(after, before)
    prune.remove(layer, "weight")
    assert torch.equal(run(model, images), after)


def test_every_parameter_of_a_method_has_a_dimension(model):
    for config in CONFIGS.values():
        try:
            reduce_(model, config)
        except UserError:
            continue
        assert all(parameter.ndim for parameter in reduction_of(model).parameters())
        assert not any(isinstance(module, nn.Linear) for module in reduction_of(model).modules())


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name", ["tnt", "tnt-similar", "tnt-merging", "tnt-merging-inside", "dynamicvit", "avit", "tome"]
)
def test_every_parameter_has_a_gradient_under_ddp(name, training, group):
    model = stirred(make("plain"), CONFIGS[name]).train(training)
    images = photos_for(model)
    wrapped = DistributedDataParallel(model)
    for _ in range(3):  # it is the next pass that complains of the one before
        wrapped(images).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["tnt", "tnt-merging-inside", "dynamicvit", "avit", "tome", "topk", "evovit"])
def test_blocks_sharded_by_fsdp2_run_and_train(name, group):
    from torch.distributed.fsdp import fully_shard

    model = stirred(make("layer_scale"), CONFIGS[name])
    images, expected = photos_for(model), None
    with torch.no_grad():
        expected = model(images)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert not torch.equal(model.eval()(images), expected)
    with pytest.raises(UserError, match="sharded by fully_shard cannot be restored"):
        restore_(model)
    if reduction_of(model).trains:
        with pytest.raises(UserError, match="sharded by fully_shard cannot be trained by tntprune"):
            tntprune.calibrate_(model, images)


def test_a_model_that_is_sharded_already_is_refused(group):
    from torch.distributed.fsdp import fully_shard

    model = make("plain")
    fully_shard(model.blocks[0])
    with pytest.raises(UserError, match=r"blocks\.0 .*sharded by fully_shard; expected tntprune.reduce_ first"):
        reduce_(model, ToMe(r=5))
    assert type(model) is type(make("plain"))


def offloaded(kind):
    from accelerate import cpu_offload

    model = hf_models.make(kind)
    return cpu_offload(model, execution_device="cpu")


@pytest.mark.parametrize("name", ["tnt-merging", "topk", "tome", "dynamicvit"])
@pytest.mark.parametrize("kind", ["vit", "clip_vision", "dinov2_classifier", "siglip_no_head", "clip"])
def test_a_model_that_accelerate_offloads_is_really_reduced(kind, name):
    pytest.importorskip("accelerate")
    images = hf_models.photos_for(kind)
    config = ToMe(r=5) if name == "tome" else CONFIGS[name].changed(at=(1, 2))
    if name == "topk" and kind == "siglip_no_head":
        pytest.skip("no CLS token")
    expected = hf_models.run(reduce_(hf_models.make(kind), config), images)
    model = offloaded(kind)
    base = hf_models.run(model, images)
    reduce_(model, config)
    with record(model) as trace:
        found = hf_models.run(model, images)
    assert trace.kept and not torch.equal(found, base)
    torch.testing.assert_close(found, expected)
    restore_(model)
    assert torch.equal(hf_models.run(model, images), base)


def test_a_model_reduced_first_and_offloaded_then():
    accelerate = pytest.importorskip("accelerate")
    images = hf_models.photos_for("vit_classifier")
    model = reduce_(hf_models.make("vit_classifier"), ToMe(r=5))
    expected = hf_models.run(model, images)
    accelerate.cpu_offload(model, execution_device="cpu")
    torch.testing.assert_close(hf_models.run(model, images), expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    plain = hf_models.make("vit_classifier")
    model.load_state_dict(plain.state_dict(), strict=False, assign=True)
    assert torch.equal(hf_models.run(base_of(model), images), hf_models.run(plain, images))
    assert torch.equal(hf_models.run(restore_(model), images), hf_models.run(plain, images))
    assert "forward" not in model.vit.layers[0].__dict__


def test_a_reduction_that_learned_cannot_be_offloaded():
    accelerate = pytest.importorskip("accelerate")
    images = hf_models.photos_for("vit_classifier")
    model = reduce_(hf_models.make("vit_classifier"), CONFIGS["tnt-merging"].changed(at=2))
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(UserError, match=r"accelerate offloaded what TNT learned.*expected the model offloaded first"):
        hf_models.run(model, images)


def test_twins_of_an_offloaded_model_run_their_own_reduction():
    pytest.importorskip("accelerate")
    images = hf_models.photos_for("vit_classifier")
    model = reduce_(offloaded("vit_classifier"), ToMe(r=5))
    other, base = reduce_(twin_of(model), CONFIGS["topk"]), base_of(model)
    for one, expected in ((other, CONFIGS["topk"]), (model, ToMe(r=5)), (base, None)):
        plain = hf_models.make("vit_classifier")
        wanted = hf_models.run(plain if expected is None else reduce_(plain, expected), images)
        torch.testing.assert_close(hf_models.run(one, images), wanted)


def test_a_forward_that_is_replaced_later_does_not_stand_for_the_unpruned_model():
    model = reduce_(make("plain"), ToMe(r=5))
    images = photos_for(model)
    model.forward = torch.no_grad()(model.forward)
    assert torch.equal(run(base_of(model), images), run(make("plain"), images))
    with pytest.raises(UserError, match=r"cannot be restored: forward .* has been replaced .*del model\.forward"):
        restore_(model)
    del model.forward
    assert torch.equal(run(restore_(model), images), run(make("plain"), images))


def test_a_twin_made_while_somebody_records_is_not_recorded():
    model = reduce_(make("plain"), ToMe(r=5))
    with record(model) as trace:
        run(model, photos_for(model))
        kept = {block: places.clone() for block, places in trace.kept.items()}
        other = reduce_(twin_of(model), TopK(at=2, keep=0.5))
        run(other, photos_for(model))
    assert list(trace.kept) == list(kept) and other.trace is None


def test_several_devices_are_refused():
    hooks = pytest.importorskip("accelerate.hooks")
    model = hf_models.make("vit_classifier")
    for number, device in enumerate(("cpu", "meta")):
        hooks.add_hook_to_module(model.vit.layers[number], hooks.AlignDevicesHook(execution_device=device))
    with pytest.raises(UserError, match=r"several devices \(cpu, meta\).*expected one device"):
        reduce_(model, ToMe(r=5))


@pytest.mark.parametrize("where", ["", "blocks.2", "blocks.2.attn"])
def test_a_replaced_forward_is_refused(where):
    model = make("plain")
    module = model.get_submodule(where)
    plain = type(module).forward
    module.forward = lambda *args, **kwargs: plain(module, *args, **kwargs)
    own = rf"get_submodule\('{where}'\)" if where else "model"
    with pytest.raises(UserError, match=rf"forward of .* has been replaced by .*lambda.*would bypass.*{own}\.forward"):
        reduce_(model, ToMe(r=5))
    assert not hasattr(model, "reduction")
    del module.forward
    assert macs(reduce_(model, ToMe(r=5))).macs < macs(restore_(model)).macs


def test_a_model_compiled_in_place_is_really_reduced():
    model = make("plain")
    images = photos_for(model)
    model.compile(backend="eager")
    run(model, images)
    reduce_(model, TopK(at=2, keep=0.5))
    torch.testing.assert_close(run(model, images), run(reduce_(make("plain"), TopK(at=2, keep=0.5)), images))
    torch._dynamo.reset()


def test_twins_share_weights_and_not_classes():
    model = reduce_(make("plain"), ToMe(r=5))
    images, kinds = photos_for(model), [type(block) for block in model.blocks]
    before = run(model, images)
    base, other = base_of(model), reduce_(twin_of(model), TopK(at=2))
    assert torch.equal(run(base, images), run(make("plain"), images))
    assert type(base.blocks[0]) is type(make("plain").blocks[0])
    run(other, images)
    assert [type(block) for block in model.blocks] == kinds and torch.equal(run(model, images), before)
    assert all(a is b for a, b in zip(base.parameters(), restore_(model).parameters()))


def test_restored_blocks_have_their_own_classes(model):
    kinds = [type(module) for module in model.modules()]
    restore_(reduce_(model, TNT(at=2)))
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", ["ats", "avit", "tnt-merging", "tome"])
def test_an_empty_batch_gives_no_logits(name):
    model = stirred(make("plain"), CONFIGS[name])
    assert run(model, torch.zeros(0, 3, 32, 32)).shape == (0, 7)


@pytest.mark.parametrize("wanted", [-2, [-2], [1, -1], True])
@pytest.mark.parametrize("kind", ["clip_vision", "siglip_vision"])
def test_single_hidden_states_as_vision_language_models_ask_for_them(kind, wanted):
    model, images = hf_models.make(kind), hf_models.photos_for(kind)
    with torch.inference_mode():
        expected = model(images, output_hidden_states=True).hidden_states
        reduce_(model, tntprune.Random(at=2, keep=1.0))
        found = model(images, output_hidden_states=wanted).hidden_states
    numbers = range(5) if wanted is True else {n % 5 for n in ([wanted] if isinstance(wanted, int) else wanted)}
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other) if number in numbers else one is None
    with pytest.raises(UserError, match=r"output_hidden_states=9: the model has 5 hidden states"):
        model(images, output_hidden_states=9)


@pytest.mark.parametrize("kind", ["plain", "hf"])
def test_lora_on_all_linear_layers_goes_with_a_reduction(kind, tmp_path):
    peft = pytest.importorskip("peft")
    plain = (lambda: make("plain")) if kind == "plain" else (lambda: hf_models.make("vit_classifier"))
    images = photos_for(make("plain")) if kind == "plain" else hf_models.photos_for("vit_classifier")
    model = stirred(plain(), CONFIGS["tnt-merging"])
    learned = list(model.state_dict())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    assert any("lora" in name for name in model.state_dict())
    assert not any("lora" in name and "reduction" in name for name in model.state_dict())
    with record(wrapped.get_base_model()) as trace, torch.no_grad():
        wrapped(images)
    assert list(trace.kept) == [2]
    for verb in (lambda m: reduce_(m, ToMe(r=5)), macs, restore_, lambda m: tntprune.save(m, tmp_path)):
        with pytest.raises(UserError, match=r"wraps a model; expected .* its \.get_base_model"):
            verb(wrapped)
    tntprune.save(model, tmp_path / "run")
    assert reduction_of(tntprune.load_(plain(), tmp_path / "run")).config == CONFIGS["tnt-merging"]
    with pytest.raises(UserError, match=r"has an adapter on it.*expected merged weights"):
        tntprune.save(model, tmp_path / "whole", weights=True)
    assert not (tmp_path / "whole" / "model.safetensors").exists()
    merged = wrapped.merge_and_unload()
    assert merged is model and list(merged.state_dict()) == learned
    tntprune.save(merged, tmp_path / "whole", weights=True)
    tntprune.load_(plain(), tmp_path / "whole")


def test_a_reduction_comes_upon_a_model_with_adapters():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(make("plain"), peft.LoraConfig(target_modules="all-linear", r=2))
    images = photos_for(make("plain"))
    reduce_(wrapped.get_base_model(), TNT(at=2, keep=0.5))
    tntprune.calibrate_(wrapped.get_base_model(), images.repeat(8, 1, 1, 1), epochs=1)
    with record(wrapped.get_base_model()) as trace, torch.no_grad():
        wrapped(images)
    assert trace.kept[2].shape == (3, 32)


def test_what_was_put_on_a_scorer_is_not_saved_in_silence(tmp_path):
    model = stirred(make("plain"), TNT(at=2, keep=0.5, recipe="relative"))
    prune.l1_unstructured(model.reduction.scorers["2"].layers[0], "weight", amount=0.5)
    with pytest.raises(UserError, match=r"scorers\.2\.layers\.0\.weight.*expected it to be taken off"):
        tntprune.save(model, tmp_path)
    prune.remove(model.reduction.scorers["2"].layers[0], "weight")
    tntprune.save(model, tmp_path)


def test_whoever_saves_a_larger_model_is_told_that_the_reduction_is_left_out(tmp_path):
    peft = pytest.importorskip("peft")
    model = stirred(make("plain"), CONFIGS["tnt-merging"])
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"], r=2))
    with pytest.warns(tntprune.errors.UserNote, match=r"holds a reduced one \(base_model\.model\).*tntprune\.save"):
        wrapped.save_pretrained(tmp_path / "peft")
    with pytest.warns(tntprune.errors.UserNote, match="holds a reduced one"):
        nn.ModuleDict({"tower": make("plain"), "other": reduce_(make("plain"), ToMe(r=5))}).state_dict()


@pytest.mark.parametrize("kind", hf_models.EVERY)
def test_models_that_save_their_reduction_are_saved_without_a_warning(kind, tmp_path):
    model = reduce_(hf_models.make(kind), ToMe(r=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", tntprune.errors.UserNote)
        model.state_dict()
        model.save_pretrained(tmp_path)
        nn.DataParallel(model).state_dict()
        reduce_(make("plain"), ToMe(r=5)).state_dict()
