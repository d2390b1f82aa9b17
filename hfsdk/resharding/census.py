"""``Census``: the weights that are on each rank of a role at one moment, beside what its plan says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.resharding.reshard_plan import size_text
from hfsdk.resharding.reshard_report import Resident

if TYPE_CHECKING:
    from pandas import DataFrame

HOLDERS = ("trainer", "rollout", "shared", "aside")
"""Where weights are: in one engine alone, in one storage of both, or kept outside both while generating."""


@dataclass(frozen=True, repr=False)
class Census:
    """The weights that are on each rank at one moment, counted from storages that are not empty. A notebook draws it."""

    role: str
    ranks: tuple[Resident, ...]
    """By rank."""
    planned: tuple[int, ...]
    """Bytes that the plan says for that moment, by rank; padding of the vocabulary is not among them."""

    @property
    def moment(self) -> str:
        """``"training"``, ``"generating"``, or ``"both"`` where the rollout keeps a copy of its own (mode ``packed``)."""
        return " and ".join(dict.fromkeys(resident.moment for resident in self.ranks))

    @property
    def total_bytes(self) -> int:
        """On all ranks."""
        return sum(resident.total for resident in self.ranks)

    @property
    def planned_bytes(self) -> int:
        """Of all ranks, by the plan."""
        return sum(self.planned)

    @property
    def redundant_bytes(self) -> int:
        """The same numbers in the same dtype a second time, on all ranks."""
        return sum(resident.redundant for resident in self.ranks)

    def to_pandas(self) -> DataFrame:
        """Return a row per rank.

        Columns: moment, ``trainer_bytes`` and ``rollout_bytes`` (in one engine alone), ``shared_bytes`` (one storage for both),
        ``aside_bytes`` (of the training shard, kept outside both while generating), ``redundant_bytes`` (the same numbers in
        the same dtype a second time), ``total_bytes``, and the plan's ``planned_bytes`` for that moment.
        """
        import pandas as pd

        return pd.DataFrame(self.view()["ranks"]).set_index("rank")

    def view(self) -> dict[str, Any]:
        """Return plain data."""
        ranks = [
            {
                "rank": rank, "moment": r.moment, **{f"{name}_bytes": getattr(r, name) for name in HOLDERS},
                "redundant_bytes": r.redundant, "total_bytes": r.total, "planned_bytes": planned,
            }
            for rank, (r, planned) in enumerate(zip(self.ranks, self.planned, strict=True))
        ]  # fmt: skip
        return {"role": self.role, "moment": self.moment, "ranks": ranks}

    def __repr__(self) -> str:
        lines = [
            f"{self.role}'s weights while {self.moment}: {size_text(self.total_bytes)} on {len(self.ranks)} ranks, "
            f"{size_text(self.planned_bytes)} planned, {size_text(self.redundant_bytes)} redundant"
        ]
        for rank, resident in enumerate(self.ranks):
            held = [f"{name} {size_text(getattr(resident, name))}" for name in HOLDERS if getattr(resident, name)]
            lines.append(f"  rank {rank}: " + (", ".join(held) or "nothing"))
        return "\n".join(lines)
