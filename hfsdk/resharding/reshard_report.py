"""The report of a weight transition, next to its plan: bytes and seconds by rank, and the weights that are on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.resharding.proof import Proof, WrongBox
from hfsdk.resharding.reshard_plan import LINKS, ReshardPlan, size_text

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class TransportReport:
    """Bytes and seconds of one rank's moves."""

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    """Bytes copied between this rank's own tensors, in the plan's dtype."""
    bytes_shared: int
    """Bytes that stayed where they are, because both engines use the same storage."""
    received_from: tuple[int, ...]
    """Bytes received from every rank."""
    seconds: float
    proof: Proof | None = None
    """The proof of the boxes that it took; ``None`` on a rank that only gives, and where nothing was measured."""


@dataclass(frozen=True)
class Resident:
    """Bytes of weights that are on a rank at one moment, counted from storages."""

    moment: str
    """``"training"``, ``"generating"``, or ``"both"`` where each engine keeps its own weights."""
    trainer: int
    """Bytes in Megatron's parameters alone."""
    rollout: int
    """Bytes in vLLM's parameters alone."""
    shared: int
    """Bytes in storages that both use."""
    aside: int
    """Bytes of the training shard that are outside both while generating."""
    redundant: int
    """Numbers that are there twice in the same dtype."""
    base: int = 0
    """Bytes of frozen weights under adapters in Megatron's parameters; not in ``trainer``."""
    base_of: tuple[str, ...] = ()
    """The roles of the rank that have that base together, which is there once."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.trainer + self.rollout + self.shared + self.aside + self.base


@dataclass(frozen=True, repr=False)
class ReshardReport:
    """The report of a weight transition, next to its plan."""

    plan: ReshardPlan
    ranks: tuple[TransportReport, ...]
    """The measured bytes and seconds by rank."""
    predicted: bool = False
    """Whether nothing was measured: the session is simulated, the bytes are the plan's and the seconds a performance model's."""

    @property
    def planned_bytes(self) -> int:
        """Bytes that were to cross between ranks."""
        return self.plan.bytes_moved

    @property
    def measured_bytes(self) -> int:
        """Bytes that were received from other ranks."""
        return sum(rank.bytes_received for rank in self.ranks)

    @property
    def ratio(self) -> float:
        """The ratio of measured to planned bytes; 1 where nothing was to move and nothing did."""
        return self.measured_bytes / self.planned_bytes if self.planned_bytes else 1.0 + self.measured_bytes

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank; with the rollout apart, of the slowest that gives and then of the slowest that takes."""
        first = self.plan.train.size if self.plan.apart else 0
        return sum(max(rank.seconds for rank in ranks) for ranks in (self.ranks[:first], self.ranks[first:]) if ranks)

    @property
    def wrong(self) -> tuple[WrongBox, ...]:
        """Boxes whose values are not those that left, of all ranks."""
        return tuple(box for rank in self.ranks if rank.proof is not None for box in rank.proof.wrong)

    @property
    def verified(self) -> bool:
        """Whether every box is proven: its fingerprint is the same where it left and where it is, or it never moved.

        ``False`` where one is wrong, and in a simulated session, in which nothing moved.
        """
        takers = [rank for number, rank in enumerate(self.ranks) if self.plan.bytes_needed(number)]
        return not (self.predicted or self.wrong) and all(rank.proof is not None for rank in takers)

    def boxes(self) -> dict[str, int]:
        """Return how many boxes are ``proven``, ``unproven`` and ``wrong``."""
        proofs = [rank.proof for rank in self.ranks if rank.proof is not None]
        wrong = sum(len(proof.wrong) for proof in proofs)
        proven = sum(proof.num_boxes for proof in proofs) - wrong
        return {"proven": proven, "unproven": len(self.plan.moves) - proven - wrong, "wrong": wrong}

    def bytes_by_link(self) -> dict[str, tuple[int, int]]:
        """Return (planned, measured) bytes of each way a piece goes."""
        planned, measured = self.plan.bytes_by_link(), dict.fromkeys(LINKS, 0)
        for target, rank in enumerate(self.ranks):
            measured[LINKS[0]] += rank.bytes_copied + rank.bytes_shared
            for source, count in enumerate(rank.received_from):
                if source != target:
                    measured[self.plan.link(source, target)] += count
        return {link: (planned[link], measured[link]) for link in LINKS}

    def to_pandas(self) -> DataFrame:
        """Return a table with a row per rank: planned and measured bytes, and seconds."""
        import pandas as pd

        rows = [
            {
                "rank": number, "planned_received_bytes": self.plan.bytes_received(number), "received_bytes": rank.bytes_received,
                "planned_sent_bytes": self.plan.bytes_sent(number), "sent_bytes": rank.bytes_sent,
                "planned_own_bytes": self.plan.bytes_copied(number), "copied_bytes": rank.bytes_copied,
                "shared_bytes": rank.bytes_shared, "seconds": rank.seconds,
            }
            for number, rank in enumerate(self.ranks)
        ]  # fmt: skip
        return pd.DataFrame(rows).set_index("rank")

    def view(self) -> dict[str, Any]:
        """Return plain data for a picture: the plan's, with the measurements next to it."""
        view = self.plan.view()
        received = [None if self.predicted else rank.bytes_received for rank in self.ranks]
        ranks = [{**rank, "measured": count} for rank, count in zip(view["ranks"], received, strict=True)]
        how = "predicted" if self.predicted else "measured"
        wire = {
            "name": "wire", "received": max(rank.bytes_received for rank in self.ranks), "peak": None,
            "counts": f"{how}: the fullest rank's, in {self.seconds:.3f} s", "measured": not self.predicted,
        }  # fmt: skip
        return {**view, "title": repr(self), "ranks": ranks, "ladder": [*view["ladder"], wire]}

    def __repr__(self) -> str:
        return (
            f"ReshardReport {self.plan.spec}: planned {size_text(self.planned_bytes)} between ranks, "
            f"{'predicted' if self.predicted else 'measured'} "
            f"{size_text(self.measured_bytes)} (ratio {self.ratio:.3f}) in {self.seconds:.3f} s"
        )
