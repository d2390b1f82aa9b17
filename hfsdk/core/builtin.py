"""Declarations of a built-in call and of a built-in column. ``methods.py`` declares the calls with the columns they write.

All columns, those of the data and of algorithms too, are in ``columns.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hfsdk.core.arguments import Arguments
from hfsdk.core.protocol import THREE_D, TransferProtocol
from hfsdk.core.table import Array

Kind = Literal["prompt", "token", "sample", "text"]
"""``"prompt"``: a token id per prompt token; ``"token"``: one entry per response token; ``"sample"``: one number per sample;
``"text"``: one text per sample."""

SEQUENCES = ("prompt", "response")
"""The columns of token ids, in the order in which a model reads them."""


@dataclass(frozen=True)
class BuiltinColumn:
    """A column that hfsdk knows."""

    name: str
    kind: Kind
    dtype: str
    """The dtype in which it is written, e.g. ``"float32"``."""
    meaning: str
    writer: str
    """The call that writes it, as a user types it, e.g. ``"actor.generate"``; its arguments where they are not ``(batch)``."""
    label: str = ""
    """The name in pictures; empty: the column's own."""
    hint: str = ""
    """The advice in messages where it is missing; empty: to call the writer."""
    of_response: bool = True
    """Whether it belongs to one response, so that new responses drop it."""
    for_rewards: bool = False
    """Whether a reward function gets it as a keyword argument."""

    @property
    def remedy(self) -> str:
        """The advice in messages where the column is missing."""
        return self.hint or f"Call {self.writer if '(' in self.writer else f'{self.writer}(batch)'} first."


Work = Literal["generate", "score", "pass", "loss", "step", "code", "state", "look", "move", "task", "data", "transition"]
"""The work of a method: generate; have the generating engine score tokens that are there; pass a model over prompt + response;
take a loss over every column; take an optimizer step; run the user's code on the ranks; write or read a role's state; only
look; hand weights to a shadow; run the user's code over columns in a CPU task; bring the user's own columns; or, as no call but
before one, bring the weights back to the trainer."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One kind of call."""

    name: str
    work: Work = "code"
    phase: str = "preparation"
    """``"generation"``, ``"preparation"``, ``"learning"``; ``"inspection"`` and ``"checkpoint"`` are no part of a step."""
    reads: tuple[str, ...] = ()
    """Columns that must be there; those that a loss reads besides are the loss's own."""
    reads_if_there: tuple[str, ...] = ()
    columns: tuple[BuiltinColumn, ...] = ()
    """The built-in columns that it writes, or may."""
    writes: tuple[str, ...] = ()
    """The names of the columns that it writes, by default those of ``columns``. ``"*"``: as its arguments say."""
    of_scores: Callable[[Array], Array] | None = None
    """Function from the scores of a scoring model, shape [rows], to the pass's column; ``None``: the scores themselves."""
    protocol: TransferProtocol | None = THREE_D
    """How rows are spread over the ranks; ``None`` for CPU tasks."""
    arguments: type[Arguments] = Arguments
    roles: str = ""
    """The roles that have this method, in words."""
    result: str = ""
    """The result besides columns, in words."""
    of_all_ranks: bool = False
    """Whether every rank's result is kept, or the first one's alone."""
    learns: bool = False
    """Whether it trains on a batch."""
    changes_weights: bool = False
    """Whether a new version of the weights is there afterwards, so that the generating engine's are stale."""
    needs: tuple[str, ...] = ("weights",)
    """The :data:`~hfsdk.core.roles.PARTS` of a trained role that the method needs for its whole length. A method that needs none
    leaves the weights with the generating engine where it shares them with the trainer, and lets rollouts next to it stay
    awake."""
    files: Literal["", "weights", "state"] = ""
    """The content of the files that it writes or reads: the weights alone, or all of a trained role."""
    open_ended: bool = False
    """Whether the user's code decides how long it takes."""
    shadow: str = ""
    """The one of :data:`~hfsdk.core.placement.SHADOWS` that carries the call out in place of its role, where the role has it."""
    listed: bool = True
    """Whether it is shown among the session's calls."""

    def __post_init__(self) -> None:
        if not self.writes:
            object.__setattr__(self, "writes", tuple(column.name for column in self.columns))

    @property
    def generates(self) -> bool:
        """Whether it is a call of the generating engine."""
        return self.work == "generate"

    @property
    def balanced(self) -> bool:
        """Whether its rows are balanced over data parallel by tokens and cut into micro-batches."""
        return self.work in ("pass", "loss")

    @property
    def touches_weights(self) -> bool:
        """Whether the weights may be others afterwards: also where the user's code ran on the ranks."""
        return self.changes_weights or self.work == "code"

    @property
    def uses_weights(self) -> bool:
        """Whether it uses a model's weights, so that a shadow's must be new."""
        return self.work != "look" or bool(self.needs)

    @property
    def on_ranks(self) -> bool:
        """Whether the workers of a role carry it out."""
        return self.work not in ("task", "data", "transition")

    @property
    def reports_values(self) -> bool:
        """Whether its result is made of values, which a simulation does not have."""
        return bool(self.result) and self.work in ("loss", "look", "code")

    @property
    def repeatable(self) -> bool:
        """Whether a simulated twin can carry it out again: it writes no files and runs nothing of which nobody knows the time."""
        return self.work not in ("state", "move") and not self.open_ended

    @property
    def in_step(self) -> bool:
        """Whether it can be a part of an algorithm's step."""
        return self.work in ("generate", "pass", "loss", "step", "code")
