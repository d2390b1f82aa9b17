"""The calls of one step as they were seen when it ran once; a planner lays them out for any algorithm.

Nothing here depends on a placement or a layout. Which rows a rank gets follows the engine's rules (``hfsdk.core.protocol``):
passes and updates are balanced over data parallel by tokens, generation over its replicas; only the rank that is slowest matters::

    1024 rows of equal length, dp 12        10 ranks with 85 rows, 2 with 86      -> 86 rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hfsdk.core.errors import OptionError
from hfsdk.core.methods import method_of
from hfsdk.core.protocol import balanced_split
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array, RowLengths
from hfsdk.planner.perf.decoding import ReplicaRows

MOST_STEPS = 8
"""Steps of the run by whose response lengths plans are judged, where these vary."""
MOST_DRAWN = 2**18
"""Lengths that are drawn for them in all; of so many rows one step says enough."""

REPLICAS_A_STEP = 3
"""Replicas of a step of which one is the slowest."""

UNSPLIT = ("ONE_TO_ALL", "PP_ONLY", "ALL_TO_ALL")
"""Transfer protocols by which every rank gets all rows."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedCall:
    """One call of the step."""

    id: int
    role: str
    """``"session"`` for the user's functions."""
    method: str
    phase: str
    inputs: tuple[int, ...] = ()
    """Ids of the recorded calls whose columns it reads."""
    num_rows: int = 0
    protocol: str = ""
    prompts: Array
    """Prompt length of every row; zeros where it reads none."""
    responses: Array
    """Response length of every row; of a generation those it writes."""
    num_read_tokens: int = 0
    """Entries of all variable-length columns that it reads."""
    drawn: tuple[Array, ...] = ()
    """The response lengths of a generation in further steps of the run; empty where all are as long."""
    mini_batches: tuple[Array, ...] = ()
    """The row numbers of every optimizer step of an update, in order."""
    on_host: bool = False
    """Whether it is a CPU task."""

    @property
    def name(self) -> str:
        """The call's role and method."""
        return f"{self.role}.{self.method}"

    @cached_property
    def alike(self) -> bool:
        """Whether all rows have the same lengths."""
        return all(len(x) == 0 or bool((x == x[0]).all()) for x in (self.prompts, self.responses))

    def slowest_rows(self, parts: int, rows: Array | None = None) -> list[RowLengths]:
        """Return the rows of those of ``parts`` ranks of which one is the slowest.

        With rows of equal lengths it is a rank with most rows; otherwise the ranks with most tokens, with most squares of lengths
        (attention) and with the longest response are looked at.
        """
        chosen = np.arange(len(self.prompts)) if rows is None else rows
        if not len(chosen):
            return [(self.prompts[:0], self.responses[:0])]
        if self.alike:
            picks = [chosen[: -(-len(chosen) // parts)]]
        elif parts == 1:
            picks = [chosen]
        else:
            weights = self.prompts if method_of(self.method).generates else self.prompts + self.responses
            shards = [chosen[shard] for shard in balanced_split(weights[chosen], parts) if len(shard)]
            total = (self.prompts + self.responses).astype(np.float64)
            measures = (total.sum, lambda s: total[s].sum(), lambda s: (total[s] ** 2).sum(), lambda s: self.responses[s].max())
            picks = list({id(best): best for best in (max(shards, key=m) for m in measures[1:])}.values())
        return [(self.prompts[pick], self.responses[pick]) for pick in picks]

    def slowest_replicas(self, parts: int) -> ReplicaRows:
        """Return the rows of those of ``parts`` replicas of which one is the slowest, for every step whose lengths are known.

        Which rows come together on a replica is chance: one step alone favours the sizes of pools that it happens to suit.

        Returns:
            Three replicas a step, one step after the other: of most tokens, most squares of lengths, and the longest response.
        """
        shards = [shard for shard in balanced_split(self.prompts, parts) if len(shard)] or [np.zeros(0, dtype=np.int64)]
        most = max(map(len, shards))
        places = np.full((len(shards), most), len(self.prompts))  # behind the last row stands one without tokens
        for number, shard in enumerate(shards):
            places[number, : len(shard)] = shard
        prompts = np.append(self.prompts, 0)[places]
        replicas = []
        for responses in (self.responses, *self.drawn):
            alone = np.append(responses, 0)[places]
            both = (prompts + alone).astype(np.float64)
            measured = both.sum(1), (both**2).sum(1), alone.max(1, initial=0)
            replicas += [(self.prompts[shard], responses[shard]) for shard in (shards[int(sizes.argmax())] for sizes in measured)]
        return ReplicaRows(replicas)


@dataclass(frozen=True, eq=False, kw_only=True)
class Recorded:
    """The calls of one step, in order of submission."""

    algorithm: str
    calls: tuple[RecordedCall, ...]

    def __post_init__(self) -> None:
        if not any(method_of(call.method).generates for call in self.calls):
            raise OptionError(
                f"a step of {self.algorithm} generates nothing, and a plan is of steps with a rollout (PPO, GRPO, ReMax, ...). "
                "Place its roles by a preset, e.g. session.place('colocate')."
            )

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that the step calls, in the order of their first calls."""
        return tuple(dict.fromkeys(call.role for call in self.calls if not call.on_host))

    def of(self, role: str, methods: Sequence[str] = ()) -> list[RecordedCall]:
        """Return a role's calls, of some methods or of all."""
        return [c for c in self.calls if c.role == role and not c.on_host and (not methods or c.method in methods)]

    def long_row(self, role: RoleSpec) -> int:
        """Return the tokens of the longest row of a role's passes where it is longer than a micro-batch, else 0."""
        passes = (c for c in self.of(role.name) if len(c.prompts) and not method_of(c.method).generates)
        longest = max((int((c.prompts + c.responses).max()) for c in passes), default=0)
        return longest if longest > role.micro_batch_tokens else 0
