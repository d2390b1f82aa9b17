"""Causal attention for rows that lie one behind the other, without padding between them.

A micro-batch of rows of 5, 3 and 2 tokens is one sequence of 10, and every layer but this one treats its tokens alike::

    offsets   0         5     8   10
    tokens    a a a a a b b b c c          a sees a only, b only b, c only c

Padded to the longest row the same micro-batch would have 15 tokens. Megatron's own local core attention builds the whole score
matrix and refuses packed rows; its fast one needs Transformer Engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
"""Queries, keys, values [tokens, heads, head_dim]; offsets of the rows, [rows + 1], on the CPU; scale; window -> as the queries.

A token sees the last ``window`` tokens of its row up to itself, or with ``None`` all of them."""

FLASH_HEAD_DIM = 256
"""The widest head of the kernel for packed rows."""


class PackedAttention(torch.nn.Module):
    """Takes the place of Megatron's core attention; on CPU and CUDA."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        self.scale: float = config.kv_channels**-0.5
        self.window: int | None = config.window_size[0] + 1 if config.window_size else None  # Megatron counts those before

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Attend; tensors are [tokens, 1, heads, head_dim], the result is [tokens, 1, heads * head_dim].

        ``attention_mask`` says which token sees which in short: the offsets of the rows, [rows + 1], on the CPU. It comes as an
        argument because activation recompute passes arguments on, and nothing else.
        """
        attend = choose(query.device.type, query.dtype, query.shape[-1])
        heads = attend(query[:, 0], key[:, 0], value[:, 0], attention_mask, self.scale, self.window)
        return heads.flatten(1)[:, None]


def choose(device_type: str, dtype: torch.dtype, head_dim: int) -> Attend:
    """Return how to attend: on a GPU without padding where the kernel takes the numbers, which are 16 bits wide. Pure."""
    if device_type == "cpu":
        return attend_row_by_row
    flash = dtype in (torch.float16, torch.bfloat16) and head_dim <= FLASH_HEAD_DIM and head_dim % 8 == 0
    return attend_packed if flash and has_packed_kernel() else attend_in_one


@lru_cache
def has_packed_kernel() -> bool:
    """Whether this torch has the kernel with groups of query heads, and a causal window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attend within each row by FlashAttention's kernel for rows of any length: nothing is padded, nothing is O(longest^2)."""
    from torch.nn.attention.varlen import varlen_attn

    longest = int(offsets.diff().max())
    starts = _once(offsets, query.device, _starts)
    seen = (-1 if window is None else window - 1, 0)
    heads = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scale, window_size=seen, enable_gqa=True)
    assert isinstance(heads, torch.Tensor)  # a pair only where more is asked for
    return heads


def _once(offsets: torch.Tensor, device: torch.device, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return on the device what is made of the offsets; once a micro-batch, for they come again with each layer."""
    made: dict[object, torch.Tensor] | None = getattr(offsets, "made", None)
    if made is None:
        made = offsets.made = {}  # type: ignore[attr-defined]
    if (make, device) not in made:
        made[make, device] = make(offsets).to(device, non_blocking=True)
    return made[make, device]


def _starts(offsets: torch.Tensor) -> torch.Tensor:
    """Return the offsets as the kernel for packed rows reads them."""
    return offsets.to(torch.int32)


def _places(offsets: torch.Tensor) -> torch.Tensor:
    """Return where each token is once rows are padded to the longest and laid one behind the other."""
    lengths = offsets.diff()
    shift = torch.arange(len(lengths)) * lengths.max() - offsets[:-1]
    return torch.arange(int(offsets[-1])) + shift.repeat_interleave(lengths)


def _mask(length: int, window: int | None, device: torch.device) -> dict[str, Any]:
    """Return who sees whom in a row, as PyTorch's attention is told: a mask only where the window is shorter than the row."""
    if window is None or length <= window:
        return {"is_causal": True}
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)}


def attend_row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attend within each row; tensors are [tokens, heads, head_dim]. What costs least where a call costs little: on a CPU.

    Rows are split, not sliced one by one, or the gradient of each would be as long as all of them; rows of one length need one
    call. Values are a part of the fused rows of q, k and v, and are copied, or all of those would be kept for the backward pass.
    """
    lengths = offsets.diff().tolist()
    if len(set(lengths)) == 1:
        q, k, v = (x.unflatten(0, (-1, lengths[0])).transpose(1, 2) for x in (query, key, value.contiguous()))
        out = scaled_dot_product_attention(q, k, v, **_mask(lengths[0], window, q.device), scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)
    found = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value.contiguous())), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, **_mask(q.shape[2], window, q.device), scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def attend_in_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """The same in one call, for devices where many small ones cost more: rows are padded for this call only.

    Causal rows need no mask: a token never sees the padding behind it.
    """
    lengths = offsets.diff()
    longest, count = int(lengths.max()), len(lengths)
    place = _once(offsets, query.device, _places)
    q, k, v = (
        x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, place, x).unflatten(0, (count, longest)).transpose(1, 2)
        for x in (query, key, value)
    )
    out = scaled_dot_product_attention(q, k, v, **_mask(longest, window, q.device), scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, place)
