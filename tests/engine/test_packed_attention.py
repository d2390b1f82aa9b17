from itertools import pairwise, product

import pytest
import torch

from hfsdk.engine.training import megatron_model
from hfsdk.engine.training.megatron_model import PackedAttention, attend_in_one, attend_packed, attend_row_by_row, choose


def by_hand(query, key, value, offsets, scale, window=None):
    """Softmax over what a token may see, one token and one head at a time."""
    out = torch.zeros_like(query)
    per_kv_head = query.shape[1] // key.shape[1]
    for first, last in pairwise(offsets):
        for t in range(first, last):
            oldest = first if window is None else max(first, t + 1 - window)
            for h in range(query.shape[1]):
                keys, values = key[oldest : t + 1, h // per_kv_head], value[oldest : t + 1, h // per_kv_head]
                out[t, h] = torch.softmax(keys @ query[t, h] * scale, 0) @ values
    return out


@pytest.mark.parametrize("attend", [attend_row_by_row, attend_in_one])
def test_a_token_sees_its_own_row_up_to_itself(attend):
    for lengths, window in product(([5, 3, 2], [1], [4, 4], [1, 7, 1]), (None, 1, 3, 100)):
        torch.manual_seed(0)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        shapes = [(int(offsets[-1]), heads, 16) for heads in (4, 2, 2)]
        query, key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
        expected = by_hand(query, key, value, offsets.tolist(), 0.25, window)
        found = attend(query, key, value, offsets, 0.25, window)
        torch.testing.assert_close(found, expected, msg=lambda text, at=(lengths, window): f"{at}: {text}")
        direction = torch.randn_like(expected)
        gradients = [torch.autograd.grad(out, (query, key, value), direction) for out in (expected, found)]
        torch.testing.assert_close(gradients[1], gradients[0], msg=lambda text, at=(lengths, window): f"{at}: {text}")


def test_takes_the_place_of_megatrons_core_attention():
    class Config:
        kv_channels, window_size = 16, None

    attention = PackedAttention(Config, layer_number=1, attn_mask_type=None, attention_type="self")
    query, key, value = (torch.randn(6, 1, heads, 16) for heads in (4, 2, 2))
    out = attention(query, key, value, torch.tensor([0, 2, 6]), packed_seq_params=None)
    assert out.shape == (6, 1, 64)
    expected = attend_row_by_row(query[:, 0], key[:, 0], value[:, 0], torch.tensor([0, 2, 6]), 0.25)
    assert torch.equal(out[:, 0].unflatten(1, (4, 16)), expected)
    Config.window_size = (1, 0)  # one before itself
    windowed = PackedAttention(Config, layer_number=1, attn_mask_type=None, attention_type="self")
    expected = by_hand(query[:, 0], key[:, 0], value[:, 0], [0, 2, 6], 0.25, 2)
    torch.testing.assert_close(windowed(query, key, value, torch.tensor([0, 2, 6]))[:, 0].unflatten(1, (4, 16)), expected)


def test_which_kernel_is_taken():
    kernels = [
        ("cpu", torch.bfloat16, 64, attend_row_by_row), ("cpu", torch.float32, 64, attend_row_by_row),
        ("cuda", torch.bfloat16, 64, attend_packed), ("cuda", torch.float16, 256, attend_packed),
        ("cuda", torch.float32, 64, attend_in_one), ("cuda", torch.bfloat16, 288, attend_in_one),
        ("cuda", torch.bfloat16, 60, attend_in_one),
    ]  # fmt: skip
    assert [row for row in kernels if choose(*row[:3]) is not row[3]] == []


def test_an_older_torch_pads(monkeypatch):
    monkeypatch.setattr(megatron_model, "has_packed_kernel", lambda: False)
    assert choose("cuda", torch.bfloat16, 64) is attend_in_one


def test_the_packed_kernel_takes_what_it_is_given_and_gives_gradients():
    """On meta, where shapes are checked and nothing is computed: groups of query heads, a causal window, rows of any length."""
    query, key, value = (torch.randn(10, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2))
    offsets = torch.tensor([0, 5, 8, 10])
    out = attend_packed(query, key, value, offsets, 0.125)
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    out.sum().backward()
    assert [x.grad.shape for x in (query, key, value)] == [x.shape for x in (query, key, value)]


def test_offsets_are_copied_once_a_micro_batch(monkeypatch):
    offsets, told = torch.tensor([0, 5, 8, 10]), []
    from torch.nn.attention import varlen

    def kernel(query, key, value, starts, ends, max_q, max_k, **options):
        told.append((starts, ends, max_q, max_k, options))
        return query

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    heads = torch.randn(10, 2, 8)
    for _layer in range(3):
        attend_packed(heads, heads, heads, offsets, 0.5)
    starts, ends, *rest = told[0]
    assert starts is ends
    assert all(one[0] is starts for one in told)
    assert (starts.dtype, starts.tolist()) == (torch.int32, [0, 5, 8, 10])
    assert rest == [5, 5, {"scale": 0.5, "window_size": (-1, 0), "enable_gqa": True}], "each token up to itself"
    attend_packed(heads, heads, heads, offsets, 0.5, 4)
    assert told[-1][-1]["window_size"] == (3, 0), "itself and three before it"


def test_places_are_made_once_a_micro_batch(monkeypatch):
    """A copy to the device for each layer would have the host wait for it."""
    calls, places = [], megatron_model._places
    monkeypatch.setattr(megatron_model, "_places", lambda offsets: calls.append(len(offsets)) or places(offsets))
    heads = torch.randn(10, 2, 8)
    for offsets in (torch.tensor([0, 5, 8, 10]), torch.tensor([0, 10])):
        for _ in range(3):
            attend_in_one(heads, heads, heads, offsets, 0.5)
    assert calls == [4, 2]
