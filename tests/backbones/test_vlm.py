"""What must hold for every vision-language model: its tower is reduced, and what follows is given every patch."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers

import tntprune
from tntprune import ATS, TNT, EViT, Random, ToMe
from tntprune.backbones.attach import base_of, is_reduced, reduction_of
from tntprune.backbones.base import tower_of
from tntprune.reduce import reduce_, restore_
from vlm_models import CELLS_KEPT, KINDS, ONE, SEVERAL, SHORTENED, TEXT, TOKENS, VISION, make, prompts, usual

CLS = ("llava", "llava_vit", "llava_next", "vipllava", "internvl")  # kinds with a CLS token
CONFIGS = {
    "tnt": TNT(at=(1, 2), keep=0.6, similar=5),
    "tome": ToMe(r=5),
    "evit": EViT(at=2, keep=0.5),
    "ats": ATS(at=2, keep=0.5),
}


@pytest.fixture(params=usual(KINDS))
def kind(request):
    return request.param


def run(model, given, **options):
    with torch.inference_mode():
        return model(**given, **options).logits


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.wide)])
@pytest.mark.parametrize("every", KINDS)
def test_keep_one_is_the_base_bit_for_bit_and_so_is_a_restored_one(every, attention):
    kind, model = every, make(every, attention)
    given, plain, inner = prompts(kind, model, SEVERAL), type(model), type(model.model)
    names, before = list(model.state_dict()), run(model, given)
    for output in ("grid", "tokens") if kind in SHORTENED else ("grid",):
        reduce_(model, TNT(at=2, keep=1.0), output=output)
        assert type(model) is not plain and type(model).__name__ == plain.__name__ and isinstance(model.model, inner)
        assert torch.equal(run(model, given), before)
    reduce_(model, Random(at=2, keep=0.25))
    assert not torch.equal(run(model, given), before) and is_reduced(model) and is_reduced(model.model)
    assert torch.equal(run(base_of(model), given), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [name for name in model.state_dict() if "reduction." not in name] == names
    assert torch.equal(run(base_of(model), given), before)  # nothing that the first twin did stays on the model
    restore_(model)
    assert type(model) is plain and type(model.model) is inner and list(model.state_dict()) == names
    assert torch.equal(run(model, given), before) and not is_reduced(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_language_model_is_given_every_patch(kind, name):
    """Kept patches are themselves, and every place is a kept one's."""
    model = make(kind)
    if name in ("evit", "ats") and kind not in CLS:
        with pytest.raises(tntprune.UserError, match="the model has none"):
            reduce_(model, CONFIGS[name])
        return
    given, seen = prompts(kind, model, SEVERAL), []
    reduce_(model, CONFIGS[name])
    read = given.get("pixel_values").flatten(0, -4)
    read = read[(read != 0).flatten(1).any(1)]
    tower, layer = tower_of(model), getattr(model.config, "vision_feature_layer", -1)
    layer = layer if isinstance(layer, int) else layer[0]
    tower.register_forward_hook(lambda _, given, out: seen.append(out))
    assert run(model, given).isfinite().all()
    states = seen[0].hidden_states
    shown = seen[0].last_hidden_state if states is None else states[layer]
    assert shown.shape == (len(read), tower.num_prefix_tokens + 64, 32)
    left = []
    with torch.inference_mode():
        tower.walk(read, visit=lambda number, tokens: left.append(tokens), follow=True)
        tokens = reduction_of(model).unfold(left[layer])
        tokens = tower.final(tokens) if states is None else tokens
    for image, x, places, size in zip(shown, tokens.x, tokens.index, tokens.size if tokens.size is not None else left):
        patches, grid = x[tokens.prefix :], image[tokens.prefix :]
        for token, place in zip(patches, places.tolist()):
            there = place >= 0 and (tokens.size is None or float(size[places == place][0]) > 0)
            assert not there or torch.allclose(grid[place], token, atol=1e-5)
        assert (grid[:, None] - patches).abs().amax(2).amin(1).max() < 1e-4


def test_generation_with_a_cache_is_generation_without(kind):
    model = reduce_(make(kind), TNT(at=2, keep=0.5))
    given = prompts(kind, model, ONE)
    cached, plain = (model.generate(**given, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain) and cached.shape[1] <= given["input_ids"].shape[1] + 4


def test_saved_and_put_back_together(kind, tmp_path):
    model = make(kind)
    given, output = prompts(kind, model, ONE), "tokens" if kind in SHORTENED else "grid"
    before = run(model, given)
    reduce_(model, TNT(at=2, keep=0.5), output=output)
    reduction_of(model).set_calibrated()
    after = run(model, given)
    model.save_pretrained(tmp_path)
    loaded, about = type(base_of(model)).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about.values()) and loaded.config.architectures == [type(model).__name__]
    assert torch.equal(run(loaded.eval(), given), before)
    tntprune.load_(loaded, tmp_path)
    assert reduction_of(loaded).output == output and torch.equal(run(loaded, given), after)
    if kind in CELLS_KEPT:
        with pytest.raises(tntprune.UserError, match="trained with output='tokens', where a token has 2 x 2 patches"):
            tntprune.load_(loaded, tmp_path, output="grid")
        return
    tntprune.load_(loaded, tmp_path, keep=1.0, output="grid")
    assert reduction_of(loaded).output == "grid" and torch.equal(run(loaded, given), before)


def test_copies_are_independent_and_equal(kind):
    model = reduce_(make(kind), ToMe(r=3))
    given = prompts(kind, model, ONE)
    expected = run(model, given)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, given), expected)
        restore_(twin)
    assert is_reduced(model)


def test_every_block_is_called_once_with_what_it_works_on(kind):
    model = reduce_(make(kind), Random(at=2, keep=0.5))
    given, widths = prompts(kind, model, ONE), []
    for block in tower_of(model).blocks:
        block.register_forward_hook(lambda _, given, out: widths.append(given[0].shape[1]))
    with tntprune.record(model) as trace:
        run(model, given)
    prefix = tower_of(model).num_prefix_tokens
    assert widths == [64 + prefix, 64 + prefix, 32 + prefix, 32 + prefix]
    assert trace.kept[2].shape[1] == 32


def test_a_tower_alone_is_as_it_was():
    """Without a whole model around it, nobody asks for the grid; that tower says so when it is saved in one."""
    model = make("llava")
    tower = reduce_(model.model.vision_tower, Random(at=2, keep=0.5))
    with torch.inference_mode():
        out = tower(torch.randn(2, 3, 32, 32))
    assert out.last_hidden_state.shape == (2, 33, 32)
    with pytest.warns(tntprune.errors.UserNote, match="holds a reduced one"):
        model.state_dict()
    with pytest.raises(tntprune.UsageError, match="output='grid' of CLIPVisionModel; expected a whole vision-language"):
        reduce_(restore_(tower), Random(at=2), output="grid")


def test_what_is_not_supported_is_refused_by_name_and_with_the_reason():
    text = {"model_type": "llama", **TEXT}
    pixtral = {"model_type": "pixtral", **VISION, "image_size": 32}
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=pixtral, text_config=text, **TOKENS)
    )
    with pytest.raises(
        tntprune.UserError, match=r"vision tower PixtralVisionModel of a LlavaFor\w+ \(supported: CLIPV"
    ):
        reduce_(model, Random(at=2))
    for kind in sorted(set(KINDS) - set(SHORTENED)):
        with pytest.raises(tntprune.UsageError, match=r"output='tokens' of \w+: it.*; expected 'grid'"):
            reduce_(make(kind), Random(at=2), output="tokens")
    with pytest.raises(tntprune.UsageError, match="output='all' of LlavaForConditionalGeneration; expected 'grid' or"):
        reduce_(make("llava"), Random(at=2), output="all")
    model = make("llava")
    model.config.vision_feature_layer = 1
    with pytest.raises(tntprune.UsageError, match=r"at=2: LlavaFor.* reads the tokens that leave block 1 of the 4"):
        reduce_(model, Random(at=2))


def test_images_without_words_and_padded_images_are_refused():
    model = reduce_(make("llava"), TNT(at=2, keep=0.5))
    for use in (tntprune.evaluate, tntprune.calibrate_):
        with pytest.raises(tntprune.UserError, match="answers images with words"):
            use(model, torch.randn(4, 3, 32, 32), progress=False)
    model = reduce_(make("smolvlm"), TNT(at=2, keep=0.5))
    given = prompts("smolvlm", model, ONE)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.long)
    assert torch.equal(run(model, given, pixel_attention_mask=mask), run(model, given))
    mask[..., 16:] = 0
    with pytest.raises(tntprune.UserError, match="takes no padded images"):
        model(**given, pixel_attention_mask=mask)


def test_features_are_the_towers(kind):
    images = torch.randn(2, 3, 32, 32)
    model = make(kind)
    whole = tntprune.features(tower_of(model), images)
    reduce_(model, TNT(at=2, keep=1.0))
    with torch.inference_mode():
        assert torch.equal(tntprune.features(model, images), whole) and whole.shape == (2, 32, 8, 8)
