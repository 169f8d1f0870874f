"""The last block for the prefix tokens alone: the same logits, and all tokens for everyone who asks for them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

import tntprune
from configs import CONFIGS, EACH, first, run, stirred
from conftest import BACKBONES, make, photos_for
from tntprune import TNT, AViT, EViT, Random, ToMe, UsageError, reduce_
from tntprune.analysis.speed_bound import Slicing, beside
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.base import find_backbone, tower_of

TAKEN = ("plain", "distilled", "registers", "layer_scale", "qk_norm", "pre_norm", "post_norm", "swiglu", "non_square",
         "dynamic", "patch_8x4", "dinov3", "test_vit")  # fmt: skip
WHOLE = [kind for kind in BACKBONES if kind not in TAKEN]
COUNTED = (Random(at=2, keep=0.5), ToMe(r=5), EViT(at=(2, 6), keep=0.7))  # with steps in the last block too
METHODS = [name for name in CONFIGS if name != "avit"]


def both(kind, config):
    """A reduced model whose last block is whole, one where it is not, and images."""
    whole = stirred(make(kind), config)
    short = reduce_(make(kind), config, last_block="prefix")
    for model in (whole, short):  # counts that are learned are settled by loading
        reduction_of(model).load_state_dict(reduction_of(whole).state_dict())
    return whole, short, photos_for(whole)


class Rows(TorchFunctionMode):
    """Notes how many tokens go through a linear layer, without a hook."""

    def __init__(self, layer):
        self.layer, self.seen = layer, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear and args[1] is self.layer.weight:
            self.seen.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


def rows(model, images, call=None):
    """How many tokens go through the MLP of the last block."""
    layers = [m for m in model.blocks[-1].mlp.modules() if isinstance(m, nn.Linear)]
    with Rows(layers[-1]) as noted, torch.inference_mode():
        (call or model)(images)
    return noted.seen


@pytest.mark.parametrize("name", first(METHODS, EACH))
@pytest.mark.parametrize("kind", first(TAKEN, ("plain", "registers", "dinov3")))
def test_the_logits_are_the_same(kind, name):
    whole, short, images = both(kind, CONFIGS[name])
    torch.testing.assert_close(run(short, images), run(whole, images), rtol=1e-5, atol=1e-6)
    assert rows(short, images) == [short.num_prefix_tokens] and rows(whole, images)[0] > short.num_prefix_tokens


def test_unfused_attention_and_half_precision():
    whole, short, images = both("registers", CONFIGS["tnt-merging"])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(short, images), run(whole, images), rtol=0.05, atol=0.05)
    for model in (whole, short):
        for block in model.blocks:
            block.attn.fused_attn = False
    torch.testing.assert_close(run(short, images), run(whole, images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", WHOLE)
def test_where_the_head_reads_patches_it_is_refused(kind):
    model = make(kind)
    with pytest.raises(UsageError, match=r"last_block='prefix' of \w+: its head reads the patch tokens .*'all'"):
        reduce_(model, Random(at=2, keep=0.5), last_block="prefix")
    assert not hasattr(model, "reduction")


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="avit does behind that block changes prefix tokens too; expected 'all'"):
        reduce_(make("plain"), AViT(), last_block="prefix")
    with pytest.raises(UsageError, match="last_block='cls'; expected 'all' or 'prefix'"):
        reduce_(make("plain"), Random(at=2), last_block="cls")
    with pytest.raises(
        UsageError, match=r"last_block='prefix': evit acts in the last block alone.*expected an earlier"
    ):
        reduce_(make("plain"), EViT(at=6), last_block="prefix")


def test_whoever_asks_for_tokens_gets_all_of_them():
    whole, short, images = both("registers", TNT(at=2, keep=0.5))
    for call in (
        lambda m: m.forward_features(images),
        lambda m: m.forward_intermediates(images, intermediates_only=True)[-1],
        lambda m: tntprune.features(m, images),
        lambda m: m.forward_head(m.forward_features(images)),
    ):
        with torch.inference_mode():
            assert torch.equal(call(short), call(whole))
    with tntprune.record(short) as trace, torch.inference_mode():
        assert torch.equal(short(images), whole(images))
    assert len(trace.counts) == 13 and int(trace.counts[-1][0]) == 32
    assert rows(short, images) == [5]  # and then it is short again


@pytest.mark.parametrize("where", ["block", "attn", "qkv", "mlp", "norm", "before", "backward"])
def test_hooks_see_all_tokens_once(where):
    whole, short, images = both("plain", ToMe(r=5))
    block = short.blocks[-1]
    module = {"attn": block.attn, "qkv": block.attn.qkv, "mlp": block.mlp, "norm": short.norm}.get(where, block)
    seen = []
    if where == "before":
        handle = module.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    elif where == "backward":
        handle = module.register_full_backward_hook(lambda m, given, out: seen.append(out[0].shape[1]))
        short(images).sum().backward()
    else:
        handle = module.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    if where != "backward":
        assert torch.equal(run(short, images), run(whole, images))
    count = tntprune.macs(whole).tokens[-1] + 1
    ends = count - 5  # five are merged inside the block
    assert seen == [{"block": ends, "mlp": ends, "norm": ends, "backward": ends}.get(where, count)]
    handle.remove()
    assert rows(short, images) == [1]


def test_a_forward_that_was_replaced_sees_all_tokens():
    whole, short, images = both("plain", ToMe(r=5))
    mlp, seen = short.blocks[-1].mlp, []
    before = mlp.forward

    def forward(x):
        seen.append(x.shape[1])
        return before(x)

    mlp.forward = forward
    assert torch.equal(run(short, images), run(whole, images))
    assert seen == [tntprune.macs(whole).tokens[-1] + 1 - 5]  # five are merged inside the block
    del mlp.forward
    assert rows(short, images) == [1]


class Doubled(nn.Module):
    """What an adapter does: a layer beside the one that it wraps."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.calls = base_layer, 0
        self.in_features = base_layer.in_features  # as peft's layers have it
        self.extra = nn.Linear(base_layer.in_features, base_layer.out_features)

    def forward(self, x):
        self.calls += 1
        return self.base_layer(x) + 0.1 * self.extra(x)


@pytest.mark.parametrize("part", ["attn.qkv", "attn.proj", "mlp.fc1"])
def test_an_adapter_on_a_layer_is_not_bypassed(part):
    whole, short, images = both("plain", TNT(at=2))
    wrapped = Doubled(whole.blocks[-1].get_submodule(part))
    before = run(short, images)
    for model in (whole, short):
        holder, name = part.split(".")
        setattr(model.blocks[-1].get_submodule(holder), name, copy.deepcopy(wrapped))
    out = run(short, images)
    assert short.blocks[-1].get_submodule(part).calls == 1 and not torch.allclose(out, before)
    torch.testing.assert_close(out, run(whole, images), rtol=1e-5, atol=1e-6)


def test_changed_weights_count():
    whole, short, images = both("plain", TNT(at=2))
    for model in (whole, short):
        parametrize.register_parametrization(model.blocks[-1].attn.qkv, "weight", nn.Softplus())
    torch.testing.assert_close(run(short, images), run(whole, images), rtol=1e-5, atol=1e-6)
    whole, short, images = both("plain", TNT(at=2))
    for model in (whole, short):
        prune.l1_unstructured(model.blocks[-1].attn.qkv, "weight", amount=0.5)
    assert torch.equal(run(short, images), run(whole, images))  # it works by a hook
    whole, short, images = both("plain", TNT(at=2))
    weights = {name: 1.1 * value for name, value in whole.named_parameters()}
    with torch.inference_mode():
        found = [torch.func.functional_call(model, weights, (images,)) for model in (whole, short)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_dynamic_quantization():
    whole, short, images = both("plain", TNT(at=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = [torch.ao.quantization.quantize_dynamic(model, {nn.Linear}) for model in (whole, short)]
    assert nn.functional.cosine_similarity(run(small[1], images), run(small[0], images)).min() > 0.99


def test_a_pooling_that_was_changed_afterwards_counts():
    whole, short, images = both("plain", TNT(at=2))
    for model in (whole, short):
        torch.manual_seed(0)
        model.reset_classifier(7, global_pool="avg")
    assert torch.equal(run(short, images), run(whole, images))
    assert tntprune.macs(short) == tntprune.macs(whole)


@pytest.mark.parametrize("method", ["forward_head", "pool"])
def test_a_head_that_was_replaced_afterwards_gets_all_tokens(method):
    short = reduce_(make("plain"), Random(at=2, keep=0.5), last_block="prefix")
    images, seen = photos_for(short), []
    plain = getattr(short, method)
    setattr(short, method, lambda x, *args: seen.append(x.shape[1]) or plain(x, *args))
    run(short, images)
    assert seen == [33] and tntprune.macs(short).last_block == "all"
    delattr(short, method)
    assert rows(short, images) == [1]


def test_in_training_mode_it_is_whole_and_gradients_are_the_same():
    whole, short, images = both("plain", Random(at=2, keep=0.5))
    grads = []
    for model in (whole, short):
        model.train()(images).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])
    for model in (whole, short):
        model.eval().zero_grad()
        model(images).square().sum().backward()
    for one, other in zip(whole.parameters(), short.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_it_is_taken_off_without_a_trace():
    model = make("distilled")
    images, before = photos_for(model), None
    before, names = run(model, images), list(model.state_dict())
    reduce_(model, ToMe(r=5), last_block="prefix")
    assert torch.equal(run(base_of(model), images), before)
    assert reduction_of(reduce_(model, ToMe(r=5))).last_block == "all"
    tntprune.restore_(reduce_(model, ToMe(r=5), last_block="prefix"))
    assert torch.equal(run(model, images), before) and list(model.state_dict()) == names


@pytest.mark.parametrize("kind", first([k for k in TAKEN if k != "swiglu"], ("registers", "dinov3", "post_norm")))
@pytest.mark.parametrize("config", COUNTED, ids=lambda config: config.method)
def test_macs_are_those_that_are_counted(kind, config, monkeypatch):
    from fvcore.nn import FlopCountAnalysis

    whole, short, images = both(kind, config)
    for module in short.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    for home in ("reduced", "timm.block"):  # the counter works by hooks
        monkeypatch.setattr(f"tntprune.backbones.{home}.is_hooked", lambda module: False)
    found, base = tntprune.macs(short), tntprune.macs(whole)
    counter = FlopCountAnalysis(short, images[:1]).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    assert abs(counter.total() - found.macs) <= 0.002 * found.macs
    assert found.per_block[:-1] == base.per_block[:-1] and found.per_block[-1] < base.per_block[-1]
    assert found.macs == sum(found.per_block) + sum(found.reduction.values()) + found.embed + found.head
    assert found.base_macs == base.base_macs and found.tokens == base.tokens and found.mlp_tokens[-1] == 0
    assert found.last_block == "prefix" and "keys and values alone" in str(found) and base.last_block == "all"
    bound = tntprune.macs(beside(short, Slicing))
    assert bound.per_block == found.per_block and rows(beside(short, Slicing), images) == [short.num_prefix_tokens]


def test_macs_of_an_adapter_count_the_whole_layer():
    short = reduce_(make("plain"), Random(at=2, keep=0.5), last_block="prefix")
    before = tntprune.macs(short).per_block[-1]
    attention = short.blocks[-1].attn
    attention.qkv = Doubled(attention.qkv)
    attention.qkv.extra = nn.Identity()  # costs nothing
    assert tntprune.macs(short).per_block[-1] == before + 32 * 32 * 32  # a query for each of 32 patches


def test_copies_compile_and_are_counted_per_image():
    whole, short, images = both("plain", CONFIGS["ats"])
    with tntprune.record(short) as trace:
        run(short, images)
    counted = [tntprune.analysis.macs.macs_by_image(model, trace.counts) for model in (whole, short)]
    assert all(one > other for one, other in zip(*counted))
    twin = copy.deepcopy(short)
    assert reduction_of(twin).last_block == "prefix" and torch.equal(run(twin, images), run(short, images))


@pytest.mark.parametrize("name", first(("tnt-merging", "tome", "evit"), ("evit",)))
def test_it_compiles_in_one_graph(name):
    whole, short, images = both("plain", CONFIGS[name])
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(short, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
    torch.testing.assert_close(run(compiled, images), run(whole, images), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
    layers = [node for graph in graphs for node in graph.graph.nodes if node.target is nn.functional.linear]
    assert len(graphs) == 1 and layers[-2].meta["example_value"].shape == (3, 1, 32)  # before the head: the last MLP


def test_it_is_saved_and_loaded(tmp_path):
    model = reduce_(make("plain"), ToMe(r=5), last_block="prefix")
    images = photos_for(model)
    tntprune.save(model, tmp_path)
    for found in (tntprune.load_(make("plain"), tmp_path), reduce_(make("plain"), tmp_path)):
        assert reduction_of(found).last_block == "prefix" and torch.equal(run(found, images), run(model, images))
    for found in (tntprune.load_(make("plain"), tmp_path, last_block="all"), reduce_(make("plain"), ToMe(r=5))):
        assert reduction_of(found).last_block == "all"
    pooled = make("avg_with_cls")
    with pytest.raises(UsageError, match="its head reads the patch tokens"):
        tntprune.load_(pooled, tmp_path)
    assert not hasattr(pooled, "reduction")


HF = ("vit_classifier", "deit_classifier", "deit_teacher", "msn_classifier")


@pytest.mark.parametrize("name", first(METHODS, ("random", "tnt-merging", "tome", "evit")))
@pytest.mark.parametrize("kind", first(HF, ("vit_classifier", "deit_teacher")))
def test_classifiers_of_transformers(kind, name):
    models = pytest.importorskip("hf_models")
    config, images = CONFIGS[name], models.photos_for(kind)
    try:
        whole = stirred(models.make(kind), config)
    except tntprune.UserError:
        pytest.skip("its places are not in this model")
    short = reduce_(models.make(kind), config, last_block="prefix")
    for model in (whole, short):  # counts that are learned are settled by loading
        reduction_of(model).load_state_dict(reduction_of(whole).state_dict())
    tower = tower_of(short)
    layers = [m for m in tower.blocks[-1].mlp.modules() if isinstance(m, nn.Linear)]
    with Rows(layers[-1]) as noted, torch.inference_mode():
        found = short(pixel_values=images)
        outputs = [find_backbone(model).output(model, images) for model in (short, whole)]
        assert noted.seen == [tower.num_prefix_tokens] * 2
        wanted = whole(pixel_values=images)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        tokens = tower(images).last_hidden_state
        assert torch.equal(tokens, tower_of(whole)(images).last_hidden_state)
        states = [model(pixel_values=images, output_hidden_states=True) for model in (short, whole)]
        assert all(map(torch.equal, states[0].hidden_states, states[1].hidden_states))
        short(images, return_dict=False)
    assert tntprune.macs(short).macs < tntprune.macs(whole).macs
    seen = []
    tower.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state.shape[1]))
    short(pixel_values=images)
    assert seen == [tokens.shape[1]]


def test_other_models_of_transformers_are_refused():
    models = pytest.importorskip("hf_models")
    for kind in ("vit", "ijepa_classifier", "dinov2_classifier", "clip_projection"):
        with pytest.raises(UsageError, match=r"last_block='prefix' of \w+: its (output holds|head reads) the patch"):
            reduce_(models.make(kind), Random(at=2, keep=0.5), last_block="prefix")


@pytest.mark.parametrize("kind", ["plain", "vit_classifier"])
def test_lora_and_offloading(kind):
    peft, accelerate = pytest.importorskip("peft"), pytest.importorskip("accelerate")
    models = pytest.importorskip("hf_models")

    def build(last_block):
        model = make(kind) if kind == "plain" else models.make(kind)
        return reduce_(model, ToMe(r=5), last_block=last_block)

    def answer(model):
        with torch.inference_mode():
            out = model(images)
        return getattr(out, "logits", out)

    images = photos_for(make("plain")) if kind == "plain" else models.photos_for(kind)
    plain = answer(build("all"))
    offloaded = accelerate.cpu_offload(build("prefix"), execution_device="cpu")
    torch.testing.assert_close(answer(offloaded), plain, rtol=1e-5, atol=1e-6)
    found = []
    for which in ("all", "prefix"):
        torch.manual_seed(0)
        options = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
        found.append(answer(peft.get_peft_model(build(which), options).eval()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], plain, atol=1e-3)
