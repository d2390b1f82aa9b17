"""Causal attention for rows that lie one behind the other, without padding between them.

A micro-batch of rows of 5, 3 and 2 tokens is one sequence of 10, and every layer but this one treats its tokens alike::

    offsets   0         5     8   10
    tokens    a a a a a b b b c c          a sees a only, b only b, c only c

Padded to the longest row the same micro-batch would have 15 tokens. Megatron's own local core attention builds the whole score
matrix and refuses packed rows; its fast one needs Transformer Engine.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(torch.nn.Module):
    """Takes the place of Megatron's core attention; on CPU and CUDA."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        self.scale: float = config.kv_channels**-0.5

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Attend; tensors are [tokens, 1, heads, head_dim], the result is [tokens, 1, heads * head_dim].

        ``attention_mask`` says which token sees which in short: the offsets of the rows, [rows + 1], on the CPU. It comes as an
        argument because activation recompute passes arguments on, and nothing else.
        """
        attend = attend_in_one if query.is_cuda else attend_row_by_row
        heads = attend(query[:, 0], key[:, 0], value[:, 0], attention_mask.tolist(), self.scale)
        return heads.flatten(1)[:, None]


def attend_row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: list[int], scale: float
) -> torch.Tensor:
    """Attend within each row; tensors are [tokens, heads, head_dim]. What costs least where a call costs little: on a CPU."""
    found = []
    for first, last in itertools.pairwise(offsets):
        q, k, v = (x[first:last].transpose(0, 1)[None] for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def attend_in_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: list[int], scale: float
) -> torch.Tensor:
    """The same in one call, for devices where many small ones cost more: rows are padded for this call only.

    Causal rows need no mask: a token never sees the padding behind it.
    """
    lengths = [last - first for first, last in itertools.pairwise(offsets)]
    longest, count = max(lengths), len(lengths)
    starts = torch.tensor([i * longest - first for i, first in enumerate(offsets[:-1])], device=query.device)
    sizes = torch.tensor(lengths, device=query.device)
    place = torch.arange(len(query), device=query.device) + starts.repeat_interleave(sizes, output_size=len(query))
    q, k, v = (
        x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, place, x).unflatten(0, (count, longest)).transpose(1, 2)
        for x in (query, key, value)
    )
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, place)
