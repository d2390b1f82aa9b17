"""Conversion between columns of a table and the flat tensors of `hfsdk.algorithms.rlmath`, in float64 unless a dtype is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hfsdk.core.errors import ColumnError

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.table import Column, Ragged, Table


def flat(table: Table, name: str, dtype: str = "float64") -> Tensor:
    """Return a column with one number per response token, shape [T]."""
    import torch

    return torch.tensor(table.ragged(name).flat, dtype=getattr(torch, dtype))


def lengths(table: Table, name: str = "response") -> Tensor:
    """Return the response lengths, shape [N], as any column with numbers per token has them."""
    import torch

    return torch.tensor(table.ragged(name).lengths)


def finite(table: Table, name: str) -> Tensor:
    """Return a column with one number per sample, shape [N].

    Raises:
        ColumnError: a number is NaN or infinite; the means it enters would be so too, and with them whole groups.
    """
    import torch

    numbers = np.asarray(table[name], dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise ColumnError(
            f"column {name!r} is {numbers[bad[0]]} for sample {bad[0]}{more}; advantages need finite numbers. Clip it in the "
            "reward, or leave these samples out with batch.take([...])."
        )
    return torch.tensor(numbers)


def groups(table: Table) -> Tensor:
    """Return the number of the prompt that each sample answers, shape [N]."""
    import torch

    return torch.tensor(np.asarray(table["group"], dtype=np.int64))


def on_tokens(table: Table, x_T: Tensor, like: str = "response") -> Ragged:
    """Return one number per response token as a column, in float32; ``like`` is a column of the same lengths."""
    return table.ragged(like).map(x_T.numpy().astype(np.float32))


def all_on_tokens(table: Table, columns: Mapping[str, Tensor], like: str = "response") -> dict[str, Column]:
    """Return several of them by name."""
    return {name: on_tokens(table, x_T, like) for name, x_T in columns.items()}


def on_every_token(table: Table, x_N: Tensor) -> Ragged:
    """Return one number per sample as a column that repeats it on every token of the response, in float32."""
    return on_tokens(table, x_N.repeat_interleave(lengths(table)))
