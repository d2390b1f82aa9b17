"""Where the boxes and lines of a dataflow stand: phases from left to right, in each a column per level of dependence.

A line that passes columns runs through free slots of theirs; lines from one call share them::

    level   0         1          2          3
            [a o------o b  o-----o c  o-----o d]
               `------ trunk ---- trunk ----o     (a -> d; a -> c would leave the same trunk earlier)
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

WIDTH, GAP_X, GAP_Y, TOP, LEFT = 186.0, 52.0, 14.0, 36.0, 32.0
HEADER, PORT, OUT, TRUNK = 37.0, 15.0, 17.0, 8.0
BAND_ORDER = ("", "generation", "preparation", "learning")

_Slot = tuple[int, int]
"""(call, level) of a trunk, or (call, -1) of a box."""


def arrange(calls: list[dict[str, Any]], edges: list[dict[str, Any]]) -> tuple[float, float, list[dict[str, Any]]]:
    """Set ``x, y, width, height`` of boxes, ``port_y`` and ``path`` of lines; return width, height and the phases' bands."""
    levels, bands = _levels(calls, edges)
    ports: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for edge in edges:
        ports[edge["target"]].append(edge)
    for call in calls:
        call["height"] = HEADER + PORT * len(ports[call["id"]]) + (OUT if call["out"] else 4.0)
        call["width"], call["x"] = WIDTH, LEFT + levels[call["id"]] * (WIDTH + GAP_X)
    columns = _columns(calls, edges, levels)
    places = _stack(columns, {call["id"]: call["height"] for call in calls})
    bottom = max(places.values(), default=TOP) + TRUNK
    for call in calls:
        call["y"] = places[call["id"], -1]
        bottom = max(bottom, call["y"] + call["height"])
        for number, edge in enumerate(ports[call["id"]]):
            edge["port_y"] = call["y"] + HEADER + PORT * (number + 0.5)
    by_id = {call["id"]: call for call in calls}
    for edge in edges:
        edge["path"] = _path(edge, by_id, levels, places)
    last = max(levels.values(), default=0)
    return LEFT * 2 + (last + 1) * WIDTH + last * GAP_X, bottom + 12, bands


def _levels(calls: list[dict[str, Any]], edges: list[dict[str, Any]]) -> tuple[dict[int, int], list[dict[str, Any]]]:
    """Return every call's column, and the bands of the phases (with rows of their own where phases overlap)."""
    sources: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        sources[edge["target"]].append(edge["source"])
    phase = ""
    phases: dict[int, str] = {}
    for call in calls:  # a call without a phase belongs to that of the call before it
        phase = call["phase"] if call["phase"] != "?" else phase or BAND_ORDER[1]
        phases[call["id"]] = phase
        call["phase"] = phase
    order = [*BAND_ORDER, *sorted({p for p in phases.values() if p not in BAND_ORDER})]
    levels: dict[int, int] = {}
    begin = 0
    bands = []
    for name in order:
        mine = [call["id"] for call in calls if phases[call["id"]] == name]
        for number in mine:  # calls come in submission order, so a source stands before its readers
            levels[number] = max([begin, *(levels[s] + 1 for s in sources[number] if s in levels)])
        if mine:
            first, begin = min(levels[n] for n in mine), max(begin, *(levels[n] + 1 for n in mine))
            x, width = LEFT + first * (WIDTH + GAP_X) - GAP_X / 2 + 2, (begin - first) * (WIDTH + GAP_X) - 4
            bands.append({"phase": name or "inputs", "x": x, "width": width})
    late = [edge for edge in edges if levels[edge["target"]] <= levels[edge["source"]]]  # read from a later phase
    while late:
        for edge in late:
            levels[edge["target"]] = levels[edge["source"]] + 1
        late = [edge for edge in edges if levels[edge["target"]] <= levels[edge["source"]]]
    return levels, bands


def _columns(calls: list[dict[str, Any]], edges: list[dict[str, Any]], levels: dict[int, int]) -> list[list[_Slot]]:
    """Return the slots of every column from top to bottom, near those they come from."""
    before: dict[_Slot, list[_Slot]] = defaultdict(list)
    columns: list[list[_Slot]] = [[] for _ in range(max(levels.values(), default=0) + 1)]
    for call in calls:
        columns[levels[call["id"]]].append((call["id"], -1))
    for edge in edges:
        came = (edge["source"], -1)
        for level in range(levels[edge["source"]] + 1, levels[edge["target"]]):
            slot = (edge["source"], level)
            if slot not in before:
                columns[level].append(slot)
                before[slot].append(came)
            came = slot
        before[edge["target"], -1].append(came)
    at = {slot: float(number) for column in columns for number, slot in enumerate(column)}
    for column in columns[1:]:
        # the mean place of what comes in; a trunk goes below the boxes of equal rank
        column.sort(key=lambda slot: (sum(at[s] for s in before[slot]) / max(1, len(before[slot])), slot[1] >= 0))
        at |= {slot: float(number) for number, slot in enumerate(column)}
    return columns


def _stack(columns: list[list[_Slot]], heights: dict[int, float]) -> dict[_Slot, float]:
    """Return the y of every slot; the columns are centred."""
    sizes = [[heights[call] if level < 0 else TRUNK for call, level in column] for column in columns]
    totals = [sum(size) + GAP_Y * max(0, len(size) - 1) for size in sizes]
    tallest = max(totals, default=0.0)
    places = {}
    for column, size, total in zip(columns, sizes, totals, strict=True):
        y = TOP + (tallest - total) / 2
        for slot, height in zip(column, size, strict=True):
            places[slot] = y
            y += height + GAP_Y
    return places


def _path(edge: dict[str, Any], calls: dict[int, dict[str, Any]], levels: dict[int, int], places: dict[_Slot, float]) -> str:
    source, target = calls[edge["source"]], calls[edge["target"]]
    x, y = source["x"] + WIDTH, source["y"] + source["height"] - (OUT / 2 if source["out"] else HEADER / 2)
    parts = [f"M{x:.0f} {y:.1f}"]
    for level in range(levels[edge["source"]] + 1, levels[edge["target"]]):
        next_x, next_y = LEFT + level * (WIDTH + GAP_X), places[edge["source"], level] + TRUNK / 2
        parts.append(_curve(x, y, next_x, next_y) + f"H{next_x + WIDTH:.0f}")
        x, y = next_x + WIDTH, next_y
    return "".join(parts) + _curve(x, y, target["x"], edge["port_y"])


def _curve(x0: float, y0: float, x1: float, y1: float) -> str:
    bend = max(16.0, (x1 - x0) * 0.55)
    return f"C{x0 + bend:.0f} {y0:.1f} {x1 - bend:.0f} {y1:.1f} {x1:.0f} {y1:.1f}"
