"""Sizes count in attention in the same way whether a mask or a part of the keys carries them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import make, photos_for
from tntprune import TNT, ToMe, reduce_
from tntprune.backbones import reduced
from tntprune.backbones.attach import reduction_of
from tntprune.ops import attention, tokens
from tntprune.ops.attention import attend, log_size, wants_mask, widened
from tntprune.ops.tokens import size_bias, sized, start, take

DTYPES = {torch.float32: 12.0, torch.float16: 1.5, torch.bfloat16: 1.5}  # errors allowed, in units of rounding


def drawn(dtype, seed, batch=2, heads=3, n=9, width=20, largest=4096):
    """Queries, keys, values between -1 and 1, and sizes of all tokens but the first."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(batch, heads, n, width, generator=generator).to(dtype) for _ in range(2))
    value = (2 * torch.rand(batch, heads, n, width, generator=generator) - 1).to(dtype)
    return query, key, value, torch.randint(0, largest + 1, (batch, n - 1), generator=generator).float()


def naive(query, key, value, scale, size, power):
    """The softmax in which a token of a size has size ** power times its weight, in double precision."""
    logits = query.double() @ key.double().transpose(-2, -1) * scale
    times = F.pad(torch.where(size > 0, size.double() ** power, 0.0), (1, 0), value=1.0)[:, None, None]
    weight = (logits - logits.amax(-1, keepdim=True)).exp() * times
    return weight @ value.double() / weight.sum(-1, keepdim=True)


@given(
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**20),
    n=st.integers(1, 70),
    width=st.integers(1, 130),
    largest=st.sampled_from([1, 8, 4096]),
    power=st.floats(0, 1.5),
)
@settings(max_examples=120, deadline=None)
def test_a_part_of_the_keys_counts_sizes_like_the_softmax_that_is_written_out(dtype, seed, n, width, largest, power):
    query, key, value, size = drawn(dtype, seed, n=n, width=width, largest=largest)
    scale = width**-0.5
    wide = widened(query, key, value, scale, log_size(size, 1, power))
    assert {one.shape[-1] % 8 for one in wide} == {0}
    assert width + 2 <= wide[0].shape[-1] < width + 10
    out = F.scaled_dot_product_attention(*wide, scale=scale)
    assert not out[..., width:].any()
    error = (out[..., :width].double() - naive(query, key, value, scale, size, power)).abs().max()
    assert error <= DTYPES[dtype] * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_as_exact_as_the_mask(dtype):
    for seed in range(5):
        query, key, value, size = drawn(dtype, seed, n=60, width=64)
        bias = log_size(size, 1, 1)
        wanted = naive(query, key, value, 0.125, size, 1)
        by_mask = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(dtype), scale=0.125)
        by_key = F.scaled_dot_product_attention(*widened(query, key, value, 0.125, bias), scale=0.125)[..., :64]
        errors = [float((out.double() - wanted).abs().max()) for out in (by_mask, by_key)]
        assert errors[1] <= errors[0] + 4 * torch.finfo(torch.float32).eps


def test_gradients_reach_queries_keys_values_and_sizes_alike():
    query, key, value, size = drawn(torch.float32, 0)
    inputs = [one.requires_grad_() for one in (query, key, value, log_size(size, 1, 1))]
    found = []
    for out in (
        attend(*inputs[:3], 0.3, inputs[3]),
        F.scaled_dot_product_attention(*inputs[:3], attn_mask=inputs[3], scale=0.3),
    ):
        found.append(torch.autograd.grad(out.square().sum(), inputs))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_where_nothing_is_left_a_part_of_the_keys_gives_no_nan():
    for dtype in DTYPES:
        query, key, value, _ = drawn(dtype, 0)
        bias = log_size(torch.zeros(2, 9), 0, power=1)
        assert F.scaled_dot_product_attention(*widened(query, key, value, 0.125, bias), scale=0.125).isfinite().all()


@pytest.fixture
def masks(monkeypatch):
    """The masks of all fused attention from now on."""
    seen = []
    fused = F.scaled_dot_product_attention

    def note(*args, attn_mask=None, **kwargs):
        seen.append(attn_mask)
        return fused(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    return seen


@pytest.fixture
def without_masks(monkeypatch):
    """Choose as on CUDA."""

    def choose():
        for module in (attention, reduced):
            monkeypatch.setattr(module, "wants_mask", lambda bias: False)

    return choose


KINDS = ["plain", "distilled", "registers", "no_cls", "qk_norm", "post_norm", "eva02", "dinov3", "test_vit4"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [ToMe(r=5), TNT(at=2)], ids=["tome", "tnt"])
def test_a_model_gives_the_same_with_and_without_masks(kind, config, masks, without_masks):
    model = reduce_(make(kind), config)
    reduction_of(model).warned = True
    images = photos_for(model)
    with torch.inference_mode():
        by_mask = model(images)
        assert any(mask is not None for mask in masks)
        masks.clear()
        without_masks()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            by_key = model(images)
    assert masks.count(None) == len(masks) > 0
    torch.testing.assert_close(by_key, by_mask, atol=2e-5, rtol=1e-4)


def test_biases_of_pairs_stay_masks(masks, without_masks):
    model = reduce_(make("beit"), ToMe(r=5))
    without_masks()
    with torch.inference_mode():
        model(photos_for(model))
    assert all(mask is not None for mask in masks)


def test_on_cpu_sizes_that_have_a_gradient_are_no_mask_and_flash_attention_takes_them(masks):
    """FlashAttention on CPU takes a mask, but none that has a gradient: then the whole map is built."""
    model = reduce_(make("plain"), TNT(at=2))
    reduction_of(model).warned = True
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model(photos_for(model)).sum().backward()
        assert masks.count(None) == len(masks) == 6
        assert reduction_of(model).powers.grad[3:].abs().min() > 0
        query = torch.randn(1, 1, 4, 8)
        with pytest.raises(RuntimeError, match="kernel"):
            F.scaled_dot_product_attention(query, query, query, attn_mask=torch.zeros(4, 4, requires_grad=True))


def test_the_device_decides():
    assert wants_mask(torch.zeros(1, 1, 1, 3))
    assert not wants_mask(torch.zeros(1, 1, 1, 3, requires_grad=True))
    assert not wants_mask(torch.empty(1, 1, 1, 3, device="meta").as_subclass(_OnCuda))


class _OnCuda(torch.Tensor):
    device = torch.device("cuda")


def test_logarithms_are_taken_once_for_all_blocks_that_see_the_same_sizes(monkeypatch):
    taken = []
    logs = tokens.size_logs
    monkeypatch.setattr(tokens, "size_logs", lambda *args: taken.append(1) or logs(*args))
    model = reduce_(make("plain"), TNT(at=(1, 3), keep=(0.7, 0.4)))
    reduction_of(model).warned = True
    with torch.inference_mode():
        model(photos_for(model))
    assert len(taken) == 2


def test_logarithms_of_other_sizes_are_not_used_again():
    before = sized(replace(start(torch.randn(1, 5, 8), 1), size=torch.tensor([[1.0, 2, 3, 4]])))
    assert sized(before) is before
    after = take(before, torch.tensor([[3, 1]]))
    assert torch.equal(size_bias(after, 1), log_size(torch.tensor([[4.0, 2]]), 1, power=1))
