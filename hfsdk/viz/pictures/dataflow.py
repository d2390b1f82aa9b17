"""The dataflow picture: calls as boxes, the columns between them as lines with their bytes.

::

    inputs      | generation           | preparation                | learning
    [your data] | [actor.generate    ] | [critic.compute_values   ] | [critic.update          ]
    [ prompt  o-+-o prompt      1 kB ] | o response        4.1 kB ] | o response +2    5.5 kB ]
                | [ writes 5.5 kB    o-+-o ...                      | o advantages +3  8.2 kB ]

Every line ends at a row of the reading call's box, which names the columns and their bytes. Opening one (a click, or Enter)
shows who read which rows from whom: a matrix of the ranks that wrote and the ranks that read.

The view is ``Dataflow.view()`` with geometry and colours; ``static/dataflow.js`` draws it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from hfsdk.core.dataflow import PHASES
from hfsdk.core.methods import METHODS, PUT
from hfsdk.core.placement import is_shadow
from hfsdk.viz.frame import PHASE_COLORS, Picture, bytes_text, count_text, role_colors, seconds_text
from hfsdk.viz.plain import cut, letters, plain

MOST_CALLS = 120
"""Most calls of a step that are drawn; of more, only the last ones."""
TASK_COLOR = "#77808a"

ALL_ROWS = "every rank reads all rows"
RULES = {
    "ONE_TO_ALL": (ALL_ROWS, "every rank"),
    "THREE_D": ("rows are split over dp, all tp and pp ranks of a dp rank read the same", "tp 0 of each dp rank's last pp rank"),
    "MICRO_DP": ("rows are split over the rollout replicas, all ranks of one read the same", "the first rank of each replica"),
    "PP_ONLY": (ALL_ROWS, "tp 0, dp 0 of every pp rank"),
    "DP": ("rows are split over all ranks", "every rank"),
    "ALL_TO_ALL": (ALL_ROWS, "every rank"),
}
"""Protocol -> how its rows are read, and from whom its columns are kept."""


class CallView(TypedDict):
    """One box."""

    row: int | None
    """Row of ``to_pandas()``; ``None`` for an input from outside of the step."""
    id: int
    name: str
    role: str
    kind: Literal["model", "task", "data"]
    color: str
    state: str
    predicted: bool
    phase: str
    title: str
    under: str
    """Second line: time and place in the user's code."""
    out: str
    """Last line: the columns that it writes."""
    x: float
    y: float
    width: float
    height: float
    details: list[list[str | None]]


class EdgeView(TypedDict):
    """One line, and the matrix behind it."""

    row: int
    source: int
    target: int
    kind: Literal["columns", "weights"]
    predicted: bool
    color: str
    label: str
    bytes: str
    port_y: float
    path: str
    title: str
    details: list[list[str | None]]
    columns: list[str]
    column_bytes: list[int | None]
    num_bytes: int | None
    bytes_read: int | None
    network_bytes: int | None
    by: str
    writers: list[dict[str, Any]]
    readers: list[dict[str, Any]]
    cells: list[list[Any]]
    words: list[str]


class DataflowView(TypedDict):
    """All the picture needs."""

    picture: Literal["dataflow"]
    title: str
    summary: str
    width: float
    height: float
    calls: list[CallView]
    edges: list[EdgeView]
    bands: list[dict[str, Any]]
    roles: list[dict[str, Any]]
    nodes: int
    note: str
    left_out: int


def dataflow_view(data: Mapping[str, Any]) -> DataflowView:
    """Turn ``Dataflow.view()`` into the view of the picture."""
    calls, edges, left_out = _shown(plain(data["calls"]), plain(data["edges"]))
    colors = _colors(calls)
    by_id = {call["id"]: call for call in calls}
    rows = {call["id"]: number for number, call in enumerate(c for c in plain(data["calls"]) if not c["input"])}
    boxes: list[Any] = [_box(call, rows.get(call["id"]), colors) for call in calls]
    lines: list[Any] = [_line(edge, by_id, colors, data["nodes"]) for edge in edges]
    width, height, bands = arrange(boxes, lines)
    for band in bands:
        band["color"] = PHASE_COLORS.get(band["phase"], TASK_COLOR)
    view: DataflowView = {
        "picture": "dataflow", "title": plain(str(data["title"])), "summary": _summary(calls, edges), "width": width,
        "height": height, "calls": boxes, "edges": lines, "bands": bands,
        "roles": _roles(calls, colors), "nodes": data["nodes"],
        "note": _note(data["controller_bytes"], calls), "left_out": left_out,
    }  # fmt: skip
    return view


class DataflowPicture(Picture):
    """Calls and the columns between them. ``DataflowPicture(dataflow_view(session.dataflow.view()))``."""

    name = "dataflow"

    def to_text(self) -> str:
        """Return one line per call and one per edge, in order."""
        view = self.view
        lines = [f"{view['title']}: {view['summary']}", f"  {view['note']}"]
        for call in view["calls"]:
            lines.append(f"#{call['id']} {call['name']}  {call['under']}".rstrip())
            for edge in view["edges"]:
                if edge["target"] == call["id"]:
                    lines.append(f"    <- #{edge['source']} {', '.join(edge['columns'])}: {edge['bytes']}")
        return "\n".join(lines)


def _shown(calls: list[Any], edges: list[Any]) -> tuple[list[Any], list[Any], int]:
    """Return the last calls, and the edges and inputs that belong to them."""
    step_calls = [call for call in calls if not call["input"]]
    keep = {call["id"] for call in step_calls[-MOST_CALLS:]}
    # A row is an edge's number among all edges of the step, so they are numbered before any is left out.
    drawn_edges = [dict(edge, row=row) for row, edge in enumerate(edges) if edge["target"] in keep]
    keep |= {edge["source"] for edge in drawn_edges}
    return [c for c in calls if c["id"] in keep], drawn_edges, max(0, len(step_calls) - MOST_CALLS)


def _colors(calls: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(call["role"] for call in calls)
    # A shadow has a shade of its owner's colour, so owners get theirs first, also where they do not call anything themselves.
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names if is_shadow(name))
    names = dict.fromkeys([*owners, *names])
    names.pop("session", None)
    kinds = {name: f"shadow of {name.rpartition('.')[0]}" if is_shadow(name) else name for name in names}
    return {"session": TASK_COLOR, **role_colors(kinds)}


def _roles(calls: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> list[dict[str, Any]]:
    names = dict.fromkeys(call["role"] for call in calls)
    return [{"name": "the session (CPU tasks, your data)" if n == "session" else n, "color": colors[n]} for n in names]


def _box(call: Mapping[str, Any], row: int | None, colors: Mapping[str, str]) -> dict[str, Any]:
    kind = "data" if call["method"] == PUT.name else "model" if call["pool"] else "task"
    function = call["function"].split("@")[0]
    short = call["name"].replace("compute_", "")
    titles = ["your data"] if kind == "data" else [f"{call['name']} {function}".rstrip(), f"{short} {function}".rstrip(), short]
    room = int((WIDTH - 20) / 6.9)
    title = next((t for t in titles if letters(t) <= room), cut(titles[-1], room))
    columns = call["writes"]
    sizes = [size for size in columns.values() if size is not None]
    size = bytes_text(sum(sizes)) if sizes else "not written yet"
    out = f"{len(columns)} column{'s' * (len(columns) != 1)}, {size}" if columns else ""
    return {
        "row": row, "id": call["id"], "name": titles[0], "role": call["role"], "kind": kind,
        "color": colors[call["role"]], "state": call["state"], "predicted": call["predicted"], "title": title,
        "phase": "" if call["input"] else call["phase"] or "?",
        "under": _under(call, kind), "out": out, "details": _call_details(call, kind),
    }  # fmt: skip


def _under(call: Mapping[str, Any], kind: str) -> str:
    if call["input"]:
        return f"{count_text(call['rows'])} rows" + ("" if kind == "data" else f", step {call['step']}")
    time = seconds_text(call["seconds"]) if call["state"] == "done" and call["seconds"] is not None else call["state"]
    return " · ".join(part for part in (time, call["line"]) if part)


def _call_details(call: Mapping[str, Any], kind: str) -> list[list[str | None]]:
    pool = f"pool {call['pool']}, {call['ranks']} rank{'s' * (call['ranks'] != 1)}"
    where = pool if call["pool"] else "a process on the user's node"
    rows: list[list[str | None]] = [
        ["call", f"#{call['id']}, step {call['step']}"], ["state", call["state"]], ["started at", call["line"] or None],
        ["time" + " (predicted)" * call["predicted"], seconds_text(call["seconds"]) if call["seconds"] is not None else None],
        ["rows", count_text(call["rows"])], ["runs in", where],
    ]  # fmt: skip
    if kind == "data":
        rows = [["call", f"#{call['id']}"], ["rows", count_text(call["rows"])], ["lies in", "the user's node's object store"]]
    if call["layout"]:
        rows.append(["layout", call["layout"]])
    if call["protocol"]:
        rows.append(["protocol", call["protocol"]])
    if call["function"]:
        rows.append(["function", call["function"]])
    if call["fetched"] is not None:
        rows.append(["mapped by its ranks, measured", bytes_text(call["fetched"])])
    if call["resharded"] is not None:
        rows.append(["weights resharded before it" + " (predicted)" * call["predicted"], bytes_text(call["resharded"])])
    return rows + [[f"writes {name}", bytes_text(size) if size is not None else None] for name, size in call["writes"].items()]


def _line(
    edge: Mapping[str, Any], by_id: Mapping[int, Mapping[str, Any]], colors: Mapping[str, str], num_nodes: int
) -> dict[str, Any]:
    source, target = by_id[edge["source"]], by_id[edge["target"]]
    planned = edge["num_bytes"] is not None
    more = len(edge["columns"]) - 1
    words = f"{_name(source)} → {_name(target)}"
    far = edge["network_bytes"]
    details: list[list[str | None]] = [
        ["columns", ", ".join(edge["columns"]) or "none"],
        ["bytes, each row once", bytes_text(edge["num_bytes"]) if planned else None],
        ["bytes read, all ranks", bytes_text(edge["bytes_read"]) if planned else None],
    ]  # fmt: skip
    if num_nodes > 1:
        details.append(["of these across nodes", bytes_text(far) if far is not None else None])
    missing = "not read yet" if target["state"] in ("pending", "running") else "not known"
    return {
        "row": edge["row"], "source": edge["source"], "target": edge["target"], "kind": edge["kind"],
        "predicted": target["predicted"], "color": colors[source["role"]],
        "label": (edge["columns"] or ["nothing"])[0] + (f" +{more}" if more > 0 else ""),
        "bytes": bytes_text(edge["num_bytes"]) if planned else missing,
        "title": words, "details": details, "columns": edge["columns"], "column_bytes": edge["column_bytes"],
        "num_bytes": edge["num_bytes"], "bytes_read": edge["bytes_read"], "network_bytes": far, "by": edge["by"],
        "writers": edge["writers"], "readers": edge["readers"], "cells": edge["cells"],
        "words": _words(edge, source, target, num_nodes) if planned else [],
    }  # fmt: skip


def _name(call: Mapping[str, Any]) -> str:
    return f"your data #{call['id']}" if call["method"] == PUT.name else f"{call['name']} #{call['id']}"


def _words(edge: Mapping[str, Any], source: Mapping[str, Any], target: Mapping[str, Any], num_nodes: int) -> list[str]:
    """Say by which rules the matrix came about, and which way the bytes went."""
    if edge["kind"] == "weights":
        return [
            "Every holder put its part of the weights into its node's object store.",
            "Every rank of the shadow maps all of them and copies what falls into its boxes; the bytes are what it copied"
            + (" (predicted)." if target["predicted"] else ", as it measured them."),
        ]
    words = [f"Written: {_rule(source, 1)}.", f"Read: {_rule(target, 0)}."]
    far, read = edge["network_bytes"], edge["bytes_read"]
    if num_nodes > 1:
        words.append(
            f"{bytes_text(read - far)} are mapped from the same node's object store without a copy, {bytes_text(far)} are read "
            "across the network (an object crosses whole, once to each node)."
        )
    else:
        words.append(
            "Everyone maps the objects in the node's object store: nothing travels. Rows of several objects are put together where "
            "they are read."
        )
    return words


def _rule(call: Mapping[str, Any], part: int) -> str:
    if not call["pool"]:
        return "by the user's process, as one object" if call["method"] == PUT.name else "by one process, which has all rows"
    name = call["protocol"] or "THREE_D"
    rule = ("as its own scatter says", "as its own gather says")[part] if name not in RULES else RULES[name][part]
    if part:
        return f"{name}, kept from {rule}" if name in RULES else f"{name}, {rule}"
    method = METHODS.get(call["method"])
    balanced = "; every dp rank has about as many tokens" if method and method.balanced and name == "THREE_D" else ""
    return f"{name}, {rule}{balanced}"


def _note(controller_bytes: int | None, calls: Sequence[Mapping[str, Any]]) -> str:
    if controller_bytes is None:
        return "Column bytes through the controller: not measured"
    simulated = any(call["predicted"] for call in calls)
    how = "simulated: there are none" if simulated else "counted over the session"
    return f"Column bytes through the controller: {count_text(controller_bytes)} ({how})"


def _summary(calls: Sequence[Mapping[str, Any]], edges: Sequence[Mapping[str, Any]]) -> str:
    step_calls = [call for call in calls if not call["input"]]
    by_phase = [f"{sum(c['phase'] == p for c in step_calls)} in {p}" for p in PHASES if any(c["phase"] == p for c in step_calls)]
    total = sum(edge["num_bytes"] or 0 for edge in edges if edge["kind"] == "columns")
    words = f"{len(step_calls)} call{'s' * (len(step_calls) != 1)}" + (f" ({', '.join(by_phase)})" if by_phase else "")
    return f"{words}, {len(edges)} edges that carry {bytes_text(total)}"


# -- layout: phases from left to right, in each a column per level of dependence

WIDTH, GAP_X, GAP_Y, TOP, LEFT = 186.0, 52.0, 14.0, 36.0, 32.0
HEADER, PORT, OUT, TRUNK = 37.0, 15.0, 17.0, 8.0
BAND_ORDER = ("", "generation", "preparation", "learning")

_Slot = tuple[int, int]
"""(call, level) of a trunk, or (call, -1) of a box."""


def arrange(calls: list[dict[str, Any]], edges: list[dict[str, Any]]) -> tuple[float, float, list[dict[str, Any]]]:
    """Set ``x, y, width, height`` of boxes, ``port_y`` and ``path`` of lines; return width, height and the phases' bands.

    A line that passes columns runs through free slots of theirs; lines from one call share them::

        level   0         1          2          3
                [a o------o b  o-----o c  o-----o d]
                   `------ trunk ---- trunk ----o     (a -> d; a -> c would leave the same trunk earlier)
    """
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
        phase_calls = [call["id"] for call in calls if phases[call["id"]] == name]
        for number in phase_calls:  # calls come in submission order, so a source stands before its readers
            levels[number] = max([begin, *(levels[s] + 1 for s in sources[number] if s in levels)])
        if phase_calls:
            first, begin = min(levels[n] for n in phase_calls), max(begin, *(levels[n] + 1 for n in phase_calls))
            x, width = LEFT + first * (WIDTH + GAP_X) - GAP_X / 2 + 2, (begin - first) * (WIDTH + GAP_X) - 4
            bands.append({"phase": name or "inputs", "x": x, "width": width})
    # Phases stand left to right, yet a call may read from a later phase: it moves right of what it reads, and so do its readers.
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
            # Lines of one call share a trunk: the slot is made by the first of them.
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
