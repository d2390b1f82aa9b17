"""The picture of an explained configuration: its mistakes, its batches, memory by phase, and a simulated step.

::

    verl 0.9.1: grpo on 2x8 H100
    broken: a rank's part of a mini-batch must be a multiple of ppo_micro_batch_size_per_gpu; got 40 samples, 3. Take 2.
    prompts                1 024   data.train_batch_size, counted in prompts
    samples                5 120   data.train_batch_size 1,024 x rollout.n 5
    ...
    memory of a device     [weights][optimizer][rollout][kv cache///////////]      |           59 of 80 GB
      learning             [weights][gradients][optimizer][working]                |           47 of 80 GB
    a simulated step
      actor.generate       [//////////////////////////////]                                    12.0 s
      actor.update                                        [///////////////]                     8.1 s

All bytes and seconds are predicted, and hatched. ``data-row`` of a bar is its place in ``to_pandas("memory")``, of a call in the
calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Picture, bytes_text, count_text, role_colors, seconds_text
from hfsdk.viz.pictures.memory import PARTS, WORDS
from hfsdk.viz.plain import cut, finite

CLASSES = {"not read": "hf-bad", "broken": "hf-bad", "does not fit": "hf-bad", "note": "hf-busy"}
MOST_CALLS = 40
MOST_KEYS = 400
MOST_TEXT = 600


class FindingView(TypedDict):
    """One finding: a mistake, or something worth knowing."""

    kind: str
    css: str
    text: str
    do: str
    source: str


class BarView(TypedDict):
    """One row of the drawing: ``kind`` is ``"heading"``, ``"memory"`` or ``"call"``."""

    kind: str
    row: int
    label: str
    text: str
    over: bool
    parts: list[dict[str, Any]]
    """The parts of a bar of memory: ``{"name", "label", "color", "bytes"}``."""
    exists_bytes: float | None
    start_s: float | None
    seconds: float | None
    color: str
    tip: list[list[str]]


class ExplanationView(TypedDict):
    """All the picture needs."""

    picture: Literal["explanation"]
    title: str
    subtitle: str
    summary: str
    findings: list[FindingView]
    arithmetic: list[dict[str, str]]
    bars: list[BarView]
    parts: list[dict[str, str]]
    most_bytes: float
    step_s: float
    roles: list[list[str]]
    words: list[str]
    unread: list[list[str]]
    defaults: list[list[str]]
    code: str


def explanation_view(data: Mapping[str, Any]) -> ExplanationView:
    """Turn ``Explanation.view()`` into the view of the picture."""
    seconds = finite(data["seconds"]) or 0.0
    findings: list[FindingView] = [
        {
            "kind": finding["kind"], "css": CLASSES.get(finding["kind"], "hf-dim"), "source": cut(finding["source"], MOST_TEXT),
            "text": cut(f"{finding['rule']}; got {finding['got']}.", MOST_TEXT), "do": cut(finding["do"], MOST_TEXT),
        }
        for finding in data["findings"]
    ]  # fmt: skip
    subtitle = _verdict(data)
    rows = [f"{row['name']} {_number(row['value'])}" for row in data["arithmetic"]]
    memory = list(data["memory"])
    words = [f"Taken, for it is not said: {what}: {said}" for what, said in data["assumed"].items()]
    none = "sizes" in data["withheld"]  # told above, once
    if data["no_trace"] and not none:
        words.append(f"No {'' if data['memory'] else 'memory and no '}step: {data['no_trace']}")
    return {
        "picture": "explanation", "title": cut(data["title"], 200), "subtitle": subtitle,
        "summary": cut("; ".join([data["title"], subtitle, *rows]), 2000), "findings": findings,
        "arithmetic": [{"name": r["name"], "value": _number(r["value"]), "how": r["how"]} for r in data["arithmetic"] if not none],
        "bars": _bars(data, memory),
        "parts": [{"label": WORDS.get(name, name), "color": color} for name, color in PARTS.items() if _has(memory, name)],
        "most_bytes": max([1.0, *(n for device in memory for n in (finite(device["asked"]), finite(device["exists"])) if n)]),
        "step_s": max(seconds, 1e-9),
        "roles": [
            [r["role"], r["model"] or "no name", f"{r['pool']} ({r['devices']})", r["layout"],
            r["states"] + ("" if r["trained"] else ", frozen")]
            for r in data["roles"]
        ],
        "words": words,
        "unread": [[key, said] for key, said in list(data["unread"].items())[:MOST_KEYS]],
        "defaults": [[key, cut(str(value), 120)] for key, value in list(data["defaults"].items())[:MOST_KEYS]],
        "code": data["code"],
    }  # fmt: skip


class ExplanationPicture(Picture):
    """``ExplanationPicture(explanation_view(explained.view()))``."""

    name = "explanation"

    def to_text(self) -> str:
        """Return the same as text: findings, rows, bars, roles, and how many keys were not read."""
        view = self.view
        lines = [view["title"], f"  {view['subtitle']}"]
        for finding in view["findings"]:
            lines.append(
                f"  {finding['kind']}: {finding['text']} {finding['do']}" + (f" ({finding['source']})" if finding["source"] else "")
            )
        width = max([len(r["name"]) for r in view["arithmetic"]], default=0)
        figures = max([len(r["value"]) for r in view["arithmetic"]], default=0)
        lines += [f"  {r['name']:<{width}} {r['value']:>{figures}}  {r['how']}" for r in view["arithmetic"]]
        wide = max([len(b["label"]) for b in view["bars"]], default=0)
        for bar in view["bars"]:
            lines.append(f"  {bar['label']}" if bar["kind"] == "heading" else f"    {bar['label']:<{wide}} {bar['text']}")
        lines += [f"  {' | '.join(role)}" for role in view["roles"]]
        lines += [f"  {word}" for word in view["words"]]
        odd = [f"{key} ({said})" for key, said in view["unread"] if "could change" in said or said.startswith("read as")]
        count = sum(not said.startswith("read as") for _, said in view["unread"])
        count_words = f"{count} key{'s' * (count != 1)} not read, {len(view['defaults'])} at their defaults"
        lines.append("; ".join([f"  {count_words}", *odd]))
        return "\n".join(lines)


def _number(value: Any) -> str:
    return "not said" if value is None else count_text(value)


def _has(memory: Sequence[Mapping[str, Any]], part: str) -> bool:
    return any(device["parts"].get(part) for device in memory)


def _verdict(data: Mapping[str, Any]) -> str:
    kinds = [entry["kind"] for entry in data["findings"]]
    broken, misfits = kinds.count("broken"), kinds.count("does not fit")
    if "sizes" in data["withheld"]:
        return "no numbers: keys that are not read could change them"
    refused = bool(broken) or data["no_trace"].startswith("hfsdk refuses")
    words = [f"{broken} rule{'s' * (broken != 1)} broken" if broken else "no rule broken"]
    if misfits:
        words.append(
            "does not fit in "
            + ", ".join(dict.fromkeys(entry["phase"] for entry in data["memory"] if entry["asked"] > entry["exists"]))
        )
    elif data["memory"]:
        least = min((finite(entry["exists"]) or 0) - (finite(entry["asked"]) or 0) for entry in data["memory"])
        partly = refused or any(entry["left_out"] for entry in data["memory"])
        words.append(("" if partly else "fits, with ") + f"{bytes_text(least)} free on the fullest device")
    else:
        words.append("memory left out" if "memory" in data["withheld"] else "memory not worked out")
    if finite(data["seconds"]):
        words.append(f"a step of {seconds_text(data['seconds'])} simulated")
    return "; ".join(words)


def _bars(data: Mapping[str, Any], memory: Sequence[Mapping[str, Any]]) -> list[BarView]:
    bars: list[BarView] = []
    for pool in dict.fromkeys(device["pool"] for device in memory):
        rows_of_pool = [(row, device) for row, device in enumerate(memory) if device["pool"] == pool]
        first = rows_of_pool[0][1]
        heading = f"memory of a device, pool {pool} ({first['num_devices']} x {first['device']})"
        bars.append(_heading(heading))
        bars += [_memory_bar(row, device) for row, device in rows_of_pool]
    calls = data["calls"][:MOST_CALLS]
    if calls:
        left = len(data["calls"]) - len(calls)
        bars.append(_heading("the same step in hfsdk, simulated" + (f" (and {left} more calls)" if left else "")))
    colors = role_colors({call["role"]: call["role"] for call in calls})
    bars += [_call_bar(row, call, colors) for row, call in enumerate(calls)]
    return bars


def _heading(label: str) -> BarView:
    return {
        "kind": "heading", "row": -1, "label": label, "text": "", "over": False, "parts": [], "exists_bytes": None, "start_s": None,
        "seconds": None, "color": "", "tip": [],
    }  # fmt: skip


def _memory_bar(row: int, device: Mapping[str, Any]) -> BarView:
    over = (finite(device["asked"]) or 0) - (finite(device["exists"]) or 0)
    room = f"{bytes_text(over)} too much" if over > 0 else f"{bytes_text(-over)} free"
    without = [["without", device["left_out"]]] if device["left_out"] else []
    parts = [
        {"name": name, "label": WORDS.get(name, name), "color": color, "bytes": finite(device["parts"].get(name)) or 0}
        for name, color in PARTS.items() if device["parts"].get(name, 0)
    ]  # fmt: skip
    part_bytes = [(WORDS.get(name, name), finite(device["parts"].get(name)) or 0) for name in PARTS if device["parts"].get(name, 0)]
    return {
        "kind": "memory", "row": row, "label": device["phase"],
        "text": f"{bytes_text(device['asked'])} of {bytes_text(device['exists'])}, {room}",
        "over": over > 0, "parts": parts, "exists_bytes": finite(device["exists"]), "start_s": None, "seconds": None, "color": "",
        "tip": [
            *[[words, bytes_text(bytes_)] for words, bytes_ in part_bytes], ["in all", bytes_text(device["asked"])],
            ["the device has", bytes_text(device["exists"])], ["works", device["worker"] or "nothing"], *without,
        ],
    }  # fmt: skip


def _call_bar(row: int, call: Mapping[str, Any], colors: Mapping[str, str]) -> BarView:
    return {
        "kind": "call", "row": row, "label": call["call"], "text": seconds_text(call["seconds"]), "over": False, "parts": [],
        "exists_bytes": None, "start_s": finite(call["start_s"]), "seconds": finite(call["seconds"]), "color": colors[call["role"]],
        "tip": [["phase", call["phase"] or "none"], ["begins at", seconds_text(call["start_s"])], ["takes",
        seconds_text(call["seconds"])]],
    }  # fmt: skip
