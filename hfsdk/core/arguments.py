"""Arguments of the built-in calls besides columns: one frozen dataclass for each kind (``hfsdk.core.methods`` says which)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np

from hfsdk.core.functions import Shipped
from hfsdk.core.roles import RoleSpec, Sampling
from hfsdk.core.table import Array


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a call besides its columns; the base class is for calls that take none."""

    function: Shipped | None = None
    """The user's code that travels with the call: a loss, a reward, a primitive."""

    def without_function(self) -> Self:
        """Return the same without the user's code."""
        return replace(self, function=None)

    @property
    def shipped(self) -> Shipped:
        """The user's code, of a call that has some."""
        assert self.function is not None
        return self.function


NO_ARGUMENTS = Arguments()

Inventory = TypeVar("Inventory")
"""The parts of a state that one rank has, or lacks; the engine has its own type (``hfsdk.engine.weights.moves``)."""


OWN, BASE_ALONE = 0, -1
"""Weights that no snapshot keeps: the role's own, and the frozen ones that its adapters belong to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation(Arguments):
    """Arguments of ``generate``."""

    sampling: Sampling
    seed: int = 0
    copies: int = 1
    """Rows per prompt: row = prompt * copies + copy."""
    adapter: int = OWN
    """The adapters to generate with: the role's own, none (``BASE_ALONE``), or those of the state kept under this number."""
    lengths: Array | None = None
    """Tokens of each row's response where they are known: those of the call that a simulated twin repeats; shape [rows]."""


@dataclass(frozen=True, kw_only=True)
class LogProbs(Arguments):
    """Arguments of ``compute_log_probs``."""

    column: str
    """The column that it writes."""
    entropy: bool = False
    """Whether it writes ``entropy`` too, in nats."""
    top_k: int = 0
    """Number of likeliest tokens that the distribution is of, renormalised; 0: all."""
    top_p: float = 1.0
    """Probability that the likeliest tokens of the distribution have together, renormalised; 1: all."""
    without_ends: bool = False
    """The tokens that end a sequence have no probability, as below ``min_new_tokens``."""
    weights: int = OWN
    """Number of the kept state whose weights this pass alone uses; ``OWN``: the role's."""


@dataclass(frozen=True, kw_only=True)
class Rescoring(Arguments):
    """Arguments of ``rescore`` and ``rescore_as_is``."""

    column: str
    """The column that it writes."""
    inside: tuple[int, int] | None = None
    """The (row, response token) before which the hidden states of every layer are kept."""
    through_cache: tuple[tuple[int, int], ...] = ()
    """The (row, response token)s that are scored once more, behind what the prefix cache has of the tokens before them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OneSequence(Arguments):
    """Arguments of ``layers``."""

    prompt: Array
    """Token ids, int32."""
    response: Array
    token: int
    """The response token before which hidden states are kept."""
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Scoring(Arguments):
    """Arguments of ``compute_scores`` and ``compute_costs``, by a model or (``function``) by the user's code."""

    column: str
    """``"scores"`` or ``"costs"``."""
    normalisation: tuple[float, float] = (0.0, 1.0)
    """Mean that is taken off a model's scores, and deviation that they are divided by."""
    tokenizer: str = ""
    """Folder of the tokenizer that makes texts for a function."""
    per_token: bool = False
    """Whether the function scores every response token."""
    workers: int = 0
    """Processes in which the function runs on one sample each; 0: on the whole batch, in the process of all functions."""
    timeout_s: float = 60.0
    """Most seconds of one sample, with workers."""
    failures: str = "raise"
    """``"raise"``, or ``"skip"``: a sample that raises or takes too long is not scored."""

    @property
    def failures_column(self) -> str:
        """The column that says why samples were skipped: ``"score_failures"``."""
        return f"{self.column.removesuffix('s')}_failures"

    def normalised(self, raw: Array) -> Array:
        """Return a model's scores as they are written, float32."""
        mean, std = self.normalisation
        return ((raw - mean) / std).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Learning(Arguments):
    """Arguments of the calls that take a loss (``function``)."""

    epochs: int = 1
    mini_batches: int = 1
    seed: int = 0
    """Seed of the shuffle."""
    micro_batch_tokens: int = 0
    """0: as the role was declared."""
    together: int = 1
    """Rows 0 to together - 1, and so on, are in one micro-batch: 2 for a loss over pairs."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an update."""
        return self.epochs * self.mini_batches


@dataclass(frozen=True, kw_only=True)
class OnRanks(Arguments):
    """Arguments of ``run``, which calls ``function(rank, *values)`` on every rank."""

    values: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OwnPrimitive(Arguments):
    """Arguments of ``call``, the user's own primitive."""

    writes: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""


@dataclass(frozen=True, kw_only=True)
class Folder(Arguments):
    """Arguments of the calls that write or read files."""

    folder: str
    checked: bool = False
    """Whether the files have been compared with their checksums."""
    merge: bool = True
    """Whether adapters are written as a part of their weights."""


@dataclass(frozen=True, kw_only=True)
class ToShadow(Arguments):
    """Arguments of ``export_weights``."""

    shadow: RoleSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class StateMove(Arguments, Generic[Inventory]):
    """Arguments of ``give_state`` and ``take_state``, by which ranks move a role's state over a link."""

    rank: int
    """This rank's number in the link, which counts the old placement's ranks first."""
    given: Sequence[Inventory]
    """The parts of the state that each rank of the old placement has, by rank."""
    taken: Sequence[Inventory]
    """The parts of the state that each rank of the new placement is to have, by rank."""
    nodes: Sequence[int]
    """The node of each rank of the link."""
