"""Whether a role can learn a loss: said at the call, before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError

GIVES = {"lm": "log_probs", "scalar": "values"}
"""Head of a role -> what its output has for a loss."""

NEEDS = {"policy": "log_probs", "values": "values"}
"""What a loss learns -> what it reads of the output."""


def check_loss(what: str, loss: Any, head: str, num_rows: int) -> None:
    """Check that a loss is one, of this role, over so many rows.

    Args:
        what: the call, for messages.
        loss: a function of (out, b), or a loss of an algorithm.
        head: of the role: ``"lm"`` or ``"scalar"``.
        num_rows: of the batch.

    Raises:
        OptionError: it is a class, takes other arguments, reads what the role does not give, or the rows are no whole sets.
    """
    if isinstance(loss, type):
        raise OptionError(f"{what} takes a loss, a function of (out, b); got {shown(loss)}. Write e.g. ppo.PolicyLoss(clip=0.2).")
    if not _takes_both(loss):
        raise OptionError(
            f"{what} calls a loss with (out, b), the model's output and the batch's columns; {shown(loss)} does not take these two."
        )
    needs = NEEDS.get(getattr(loss, "learns", ""), GIVES[head])
    if needs != GIVES[head]:
        whose = "an actor" if needs == "log_probs" else "a critic"
        raise OptionError(
            f"{what}: {type(loss).__name__} reads out.{needs}, and this role's output has {GIVES[head]}. It is a loss of {whose}."
        )
    together = getattr(loss, "together", 1)
    if num_rows % together:
        raise OptionError(
            f"{what}: {type(loss).__name__} takes sets of {together} rows that stand one after the other; the batch has "
            f"{num_rows} rows. Pairs come from session.pairs(...)."
        )


def _takes_both(loss: Any) -> bool:
    """Whether a loss can be called with two arguments, as far as it says what it takes."""
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some that are written in C
        return True
    return True
