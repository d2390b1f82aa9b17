from itertools import pairwise

import pytest
import torch

from hfsdk.engine.packed_attention import PackedAttention, attend_in_one, attend_row_by_row


def by_hand(query, key, value, offsets, scale):
    """Softmax over what a token may see, one token and one head at a time."""
    out = torch.zeros_like(query)
    per_kv_head = query.shape[1] // key.shape[1]
    for first, last in pairwise(offsets):
        for t in range(first, last):
            for h in range(query.shape[1]):
                keys, values = key[first : t + 1, h // per_kv_head], value[first : t + 1, h // per_kv_head]
                out[t, h] = torch.softmax(keys @ query[t, h] * scale, 0) @ values
    return out


@pytest.mark.parametrize("attend", [attend_row_by_row, attend_in_one])
@pytest.mark.parametrize("lengths", [[5, 3, 2], [1], [4, 4], [1, 7, 1]])
def test_a_token_sees_its_own_row_up_to_itself(attend, lengths):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    query, key, value = (torch.randn(offsets[-1], heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    expected, found = by_hand(query, key, value, offsets, 0.25), attend(query, key, value, offsets, 0.25)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad(out, (query, key, value), direction) for out in (expected, found)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_takes_the_place_of_megatrons_core_attention():
    class Config:
        kv_channels = 16

    attention = PackedAttention(Config, layer_number=1, attn_mask_type=None, attention_type="self")
    query, key, value = (torch.randn(6, 1, heads, 16) for heads in (4, 2, 2))
    out = attention(query, key, value, torch.tensor([0, 2, 6]), packed_seq_params=None)
    assert out.shape == (6, 1, 64)
    expected = attend_row_by_row(query[:, 0], key[:, 0], value[:, 0], [0, 2, 6], 0.25)
    assert torch.equal(out[:, 0].unflatten(1, (4, 16)), expected)
