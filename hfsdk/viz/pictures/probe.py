"""The probe picture: one small panel for each thing that scores may follow, one for seconds; a sample is a mark in each.

::

    score over tokens      score over place       seconds, slowest first
      |      . .             |  .   .  .            |#
      |   . .                | .  .   .             |##
      | ..                   |  .    .              |####....
      +--x-----o--           +----x--o--            +---------      x failed, o not scored
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Picture
from hfsdk.viz.plain import cut, finite

COLORS = {"scored": "#3b76c4", "flat": "#b06a00", "failed": "#c4291c", "unscored": "#77808a"}
MOST_SAMPLES = 600
"""Samples that are drawn: samples that failed or were not scored, the slowest, and of the others every so many."""
MOST_TEXT = 160

PANELS = {
    "tokens": "length in tokens", "place": "place in the batch", "place_in_group": "place in its group",
    "repetition": "repeated word pairs", "group": "group", "other_score": "",
}  # fmt: skip
"""The numbers that scores are drawn over, and their words."""


class PanelView(TypedDict):
    """Scores over one column; or seconds, the slowest first (``key`` is ``"seconds"``)."""

    key: str
    label: str
    note: str
    """The rank correlation, in words."""
    strong: bool


class ProbeSampleView(TypedDict, total=False):
    """One sample; ``None`` is missing."""

    row: int
    text: str
    prompt: str
    kind: str
    """``"scored"``, ``"flat"`` (in a group of equal scores), ``"failed"`` or ``"unscored"``."""
    score: float | None
    seconds: float | None
    tokens: int
    place: int
    place_in_group: int
    repetition: float
    group: int
    other_score: float | None
    message: str


class ProbeView(TypedDict):
    """All the picture needs."""

    picture: Literal["probe"]
    title: str
    summary: str
    colors: dict[str, str]
    panels: list[PanelView]
    rows: list[ProbeSampleView]
    left_out: int
    """Samples that are not drawn."""
    lines: list[str]
    findings: list[str]


def probe_view(data: Mapping[str, Any]) -> ProbeView:
    """Turn ``RewardProbe.view()`` into the view of the picture."""
    flat = set(data["flat_groups"])
    follows = {name.replace(" ", "_"): (rho, strong) for name, rho, strong in data["follows"]}
    rows = [_sample(row, entry, flat) for row, entry in enumerate(data["rows"])]
    first = data["rows"][0] if data["rows"] else {}
    panels: list[PanelView] = []
    for key, label in PANELS.items():
        if key != "place" and key not in first:
            continue
        rho, strong = follows.get(key, (None, False))
        rho = finite(rho)
        note = "" if key not in follows else "rank correlation –" if rho is None else f"rank correlation {round(rho, 2) + 0.0:+.2f}"
        if key == "group":
            note = f"{len(flat)} without variance"
        panels.append({"key": key, "label": label or f"score of {data['other']}", "note": note, "strong": strong})
    if data["timed"]:
        panels.append({"key": "seconds", "label": "samples, the slowest first", "note": "", "strong": False})
    drawn_rows = _drawn(rows)
    return {
        "picture": "probe", "title": f"{data['reward']}, sample by sample",
        "summary": "; ".join([*data["lines"], *data["findings"]]), "colors": COLORS, "panels": panels, "rows": drawn_rows,
        "left_out": len(rows) - len(drawn_rows), "lines": data["lines"], "findings": data["findings"],
    }  # fmt: skip


class ProbePicture(Picture):
    """``ProbePicture(probe_view(reward.probe(batch).view()))``."""

    name = "probe"

    def to_text(self) -> str:
        """Return the report's lines and findings."""
        return "\n".join([*self.view["lines"], *(f"! {sentence}" for sentence in self.view["findings"])])


def _sample(row: int, entry: Mapping[str, Any], flat: set[int]) -> ProbeSampleView:
    score = finite(entry["score"])
    of_flat = entry.get("group") in flat and score is not None
    kind = "failed" if entry["failure"] else "unscored" if score is None else "flat" if of_flat else "scored"
    sample: ProbeSampleView = {
        "row": row, "text": cut(entry["completion"], MOST_TEXT), "prompt": cut(entry["prompt"], MOST_TEXT), "kind": kind,
        "score": score, "seconds": finite(entry["seconds"]), "tokens": entry["tokens"], "place": row,
        "repetition": entry["repetition"], "message": " ".join(filter(None, [entry["message"], entry["line"]])),
    }  # fmt: skip
    for key in ("group", "place_in_group"):
        if key in entry:
            sample[key] = entry[key]
    if "other_score" in entry:
        sample["other_score"] = finite(entry["other_score"])
    return sample


def _drawn(rows: list[ProbeSampleView]) -> list[ProbeSampleView]:
    if len(rows) <= MOST_SAMPLES:
        return rows
    slowest = sorted(rows, key=lambda sample: -(sample["seconds"] or 0.0))[: MOST_SAMPLES // 6]
    striking = [sample["row"] for sample in rows if sample["kind"] in ("failed", "unscored")][: MOST_SAMPLES // 3]
    chosen = {sample["row"] for sample in slowest} | set(striking)
    others = [sample["row"] for sample in rows if sample["row"] not in chosen]
    step = -(-len(others) // (MOST_SAMPLES - len(chosen)))
    chosen |= set(others[::step])
    return [sample for sample in rows if sample["row"] in chosen]
