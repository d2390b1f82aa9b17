"""The census picture: the weights on each rank, by who holds them, as counted; below each bar the plan's.

::

    rank 0  [rollout.....................][shared]     6.24 MB        counted: solid
            [////////////////////////////////////]     6.24 MB        planned: hatched
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Picture, bytes_text

HOLDERS = {
    "trainer": ("#3b76c4", "in the trainer alone"), "base": ("#c4a02e", "in the trainer: the frozen base"),
    "rollout": ("#4f9d55", "in the rollout alone"),
    "shared": ("#7a6cc9", "one storage for both"), "aside": ("#8c6d46", "kept aside while generating"),
}  # fmt: skip
"""Colour and words of the holders of weights, left to right."""
MOST_RANKS = 32


class HeldView(TypedDict):
    """One rank; bytes."""

    rank: int
    moment: str
    trainer_bytes: int
    base_bytes: int
    rollout_bytes: int
    shared_bytes: int
    aside_bytes: int
    redundant_bytes: int
    total_bytes: int
    planned_bytes: int


class CensusView(TypedDict):
    """All the picture needs."""

    picture: Literal["census"]
    title: str
    summary: str
    holders: list[dict[str, str]]
    ranks: list[HeldView]
    left_out: int
    """Ranks that are not drawn: those with the least."""
    base_of: list[str]
    """Roles that share the frozen weights under adapters."""
    redundant_bytes: int
    most_bytes: int


def census_view(data: Mapping[str, Any]) -> CensusView:
    """Turn ``Census.view()`` into the view of the picture."""
    ranks: list[HeldView] = list(data["ranks"])
    fullest = sorted(ranks, key=lambda r: (-r["total_bytes"], r["rank"]))[:MOST_RANKS]
    shown = sorted(fullest, key=lambda r: r["rank"])
    total, planned, redundant = (sum(r[key] for r in data["ranks"]) for key in ("total_bytes", "planned_bytes", "redundant_bytes"))
    title = data["title"]
    words = f"{bytes_text(total)} on {len(ranks)} rank{'s' * (len(ranks) != 1)}, {bytes_text(planned)} planned, "
    words += f"{bytes_text(redundant)} of them twice" if redundant else "nothing twice"
    others = ", ".join(name for name in data.get("base_of", ()) if name != data["role"])
    words += f", base shared with {others}" if others else ""
    return {
        "picture": "census", "title": title, "summary": f"{title}: {words}", "ranks": shown, "left_out": len(ranks) - len(shown),
        "holders": [
            {"name": name, "color": color, "words": _label(name, label, bool(data.get("base_of")), others)}
            for name, (color, label) in HOLDERS.items()
        ],
        "base_of": list(data.get("base_of", ())),
        "redundant_bytes": redundant, "most_bytes": max([max(r["total_bytes"], r["planned_bytes"]) for r in shown], default=0) or 1,
    }  # fmt: skip


def _label(holder: str, words: str, adapters: bool, others: str) -> str:
    """Return a colour's meaning in words, of a role with adapters too."""
    if holder == "base" and others:
        return f"{words}, shared with {others}"
    return "in the trainer: adapters" if holder == "trainer" and adapters else words


class CensusPicture(Picture):
    """``CensusPicture(census_view(actor.census().view()))``."""

    name = "census"

    def to_text(self) -> str:
        """Return a line per rank."""
        lines = [self.view["summary"]]
        for r in self.view["ranks"]:
            holder_bytes = [f"{name} {bytes_text(r[f'{name}_bytes'])}" for name in HOLDERS if r[f"{name}_bytes"]]
            planned = f"{bytes_text(r['total_bytes'])}, {bytes_text(r['planned_bytes'])} planned"
            lines.append(f"  rank {r['rank']}: {planned} ({', '.join(holder_bytes) or 'nothing'})")
        return "\n".join(lines)
