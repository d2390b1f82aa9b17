"""What to say of an optimizer step that was refused because a number was NaN or infinite: which samples, or which learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from hfsdk.core.roles import AdamW

LARGE_LR = 1e-2
"""An AdamW step moves a weight by about the learning rate (Kingma and Ba, arXiv 1412.6980, 2.1); weights are about 0.02."""


def why_refused(row_ids: Sequence[int], name: str, optimizer: AdamW | None, num_updates: int) -> str:
    """Return the words for the user.

    Args:
        row_ids: samples whose loss was not finite; empty when only the gradient was.
        name: of the role whose step it was.
        optimizer: its own, with a learning rate; ``None`` where it has none.
        num_updates: optimizer steps that its weights have had.
    """
    what = f"the loss of samples {list(row_ids)}" if row_ids else "the gradient"
    words = f"{what} is NaN or infinite; this optimizer step was refused on every rank and the weights are as before it. "
    lr = optimizer.lr_at(num_updates - 1) if optimizer is not None and num_updates else 0.0
    had = f"{num_updates} step{'s' * (num_updates != 1)}"
    if lr >= LARGE_LR:
        return words + (
            f"They have had {had} with a learning rate of {lr:g}, which ruins them: each moves every weight by about that much, "
            f"and weights are about 0.02. Declare {name} again with a smaller one, e.g. optimizer=hf.AdamW(lr=1e-5), or go "
            "back with session.rewind(...)."
        )
    after = f" The weights have had {had}, the last with a learning rate of {lr:g}: try a smaller one." if lr else ""
    return f"{words}Look at these samples with batch.inspect(i) and at the loss function.{after}"
