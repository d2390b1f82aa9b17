"""``Census``: the weights that are on each rank of a role at one moment, next to those of its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.resharding.reshard_plan import size_text
from hfsdk.resharding.reshard_report import Resident

if TYPE_CHECKING:
    from pandas import DataFrame

HOLDERS = ("trainer", "base", "rollout", "shared", "aside")
"""The places of weights: in one engine alone (of a role with LoRA the trainer's adapters, and the base under them), in one
storage of both, or outside both while generating."""


@dataclass(frozen=True, repr=False)
class Census:
    """The weights that are on each rank at one moment, counted from storages that are not empty. A notebook draws it."""

    role: str
    ranks: tuple[Resident, ...]
    """The resident bytes of each rank."""
    planned: tuple[int, ...]
    """Bytes that the plan says for that moment, by rank; padding of the vocabulary is not among them."""

    @property
    def moment(self) -> str:
        """``"training"``, ``"generating"``, or ``"both"`` where the rollout keeps its own copy (mode ``packed``)."""
        return " and ".join(dict.fromkeys(resident.moment for resident in self.ranks))

    @property
    def title(self) -> str:
        """The role whose weights these are, and the moment: ``"actor's weights while training"``."""
        when = {"": "", "both": " in both engines"}.get(self.moment, f" while {self.moment}")
        return f"{self.role}'s weights{when}"

    @property
    def base_of(self) -> tuple[str, ...]:
        """The roles that share the frozen weights under adapters, the one that they are counted with first."""
        return tuple(dict.fromkeys(name for resident in self.ranks for name in resident.base_of))

    @property
    def total_bytes(self) -> int:
        """Bytes on all ranks."""
        return sum(resident.total for resident in self.ranks)

    @property
    def planned_bytes(self) -> int:
        """Bytes on all ranks, by the plan."""
        return sum(self.planned)

    @property
    def redundant_bytes(self) -> int:
        """The same numbers in the same dtype a second time, on all ranks."""
        return sum(resident.redundant for resident in self.ranks)

    def to_pandas(self) -> DataFrame:
        """Return a row per rank.

        Columns: moment, ``trainer_bytes`` and ``rollout_bytes`` (in one engine alone), ``base_bytes`` (in the trainer, the frozen
        weights under adapters, which other roles may have too), ``shared_bytes`` (one storage for both),
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
        return {"role": self.role, "title": self.title, "base_of": list(self.base_of), "ranks": ranks}

    def __repr__(self) -> str:
        lines = [
            f"{self.title}: {size_text(self.total_bytes)} on {len(self.ranks)} ranks, "
            f"{size_text(self.planned_bytes)} planned, {size_text(self.redundant_bytes)} redundant"
        ]
        others = [name for name in self.base_of if name != self.role]
        if others:
            lines[0] += f"; base shared with {', '.join(others)}"
        for rank, resident in enumerate(self.ranks):
            sizes = [f"{name} {size_text(getattr(resident, name))}" for name in HOLDERS if getattr(resident, name)]
            lines.append(f"  rank {rank}: " + (", ".join(sizes) or "nothing"))
        return "\n".join(lines)
