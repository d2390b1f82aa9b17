"""The plan picture: who lives where, the step as predicted, and the plans that lost.

::

    plan for PPO on 16x8 A100-80GB: 41 s a step
    [pool all     ▤▤▤▤▤▤▤▤ ▤▤▤▤▤▤▤▤   actor tp8 pp2, rollout tp4   ////////////|  61 of 80 GB ]   a block per pool
    [             ▤▤▤▤▤▤▤▤ ▤▤▤▤▤▤▤▤   critic tp8 pp2                                         ]
                  | generation        | preparation | learning   |
    pool all      |/actor.generate////|/...///|/...//|/update///|            predicted, hatched; below each call its parts
                  0 s                                      |----o----|       the band of the prediction
    1  actor critic reference reward (128)    41 s  ////////|-o-|  the plan
    2  actor reference (64) | critic ... (64) 45 s  /////////|-o-| + 3 s of actor.update       choose one: its blocks, its step

``row`` of a call is its position in ``plan.calls``; row i of the table is row i of ``plan.to_pandas()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import PHASE_COLORS, Picture, bytes_text, count_text, role_colors, seconds_text
from hfsdk.viz.plain import cut, finite

CPU_LANE = "CPU tasks"


class PoolRoleView(TypedDict):
    """A role in a pool; ``role`` is its place in the view's roles."""

    role: int
    name: str
    layout: str


class PoolMemoryView(TypedDict):
    """The fullest device of a pool; ``role`` of a part is -1 where it belongs to none."""

    asked_bytes: float | None
    exists_bytes: float | None
    parts: list[dict[str, Any]]


class PlanPoolView(TypedDict):
    """A block of devices."""

    name: str
    title: str
    devices: list[list[int]]
    """Runs of device numbers, ``[first, one past the last]``."""
    numbers: str
    num_devices: int
    roles: list[PoolRoleView]
    memory: PoolMemoryView | None


class PlanCallView(TypedDict):
    """A call of the step; ``lane`` is its place in the choice's lanes."""

    row: int
    call: str
    role: int
    lane: int
    phase: str
    start_s: float | None
    seconds: float | None
    parts: list[dict[str, Any]]


class ChoiceView(TypedDict):
    """The plan (the first) or a runner-up."""

    text: str
    step_s: float | None
    low_s: float | None
    high_s: float | None
    dollars_step: float | None
    dollars_run: float | None
    close: bool
    why: str
    pools: list[PlanPoolView]
    lanes: list[str]
    calls: list[PlanCallView]


class PlanView(TypedDict):
    """All the picture needs."""

    picture: Literal["plan"]
    title: str
    subtitle: str
    summary: str
    node_sizes: list[int]
    roles: list[dict[str, str]]
    phase_colors: dict[str, str]
    scale_s: float
    memory_scale_bytes: float
    steps: int
    choices: list[ChoiceView]
    rejected: list[str]
    """Placements in which nothing fits, and by how much."""
    close: str
    """Says so where it is too close to call; empty elsewhere."""
    sensitivity: list[str]
    band_words: str
    """The meaning of the bands; empty where that is not known."""
    family: str
    searched: str


def plan_view(data: Mapping[str, Any]) -> PlanView:
    """Turn ``Plan.view()`` into the view of the picture."""
    best = {**data["best"], "timeline": data["calls"], "memory": data["memory"]} if data["best"] else None
    alternatives = [best, *data["runners_up"]] if best else []
    names = dict.fromkeys([*data["models"], *(r for plan in alternatives for pool in plan["pools"] for r in pool["roles"])])
    names |= dict.fromkeys(call["role"] for plan in alternatives for call in plan["timeline"] if call["pool"])
    order = {name: i for i, name in enumerate(names)}
    colors = role_colors({name: name for name in names})
    choices = [_choice(plan, data, order) for plan in alternatives]
    steps = finite(data["workload"].get("steps")) or 1
    title = f"plan for {data['algorithm']} on {data['cluster']}"
    title += f": {step_text(choices[0]['step_s'])} a step" if choices else ""
    top = [n for c in choices for n in (c["step_s"], c["high_s"]) if n is not None]
    memories = [p["memory"] for c in choices for p in c["pools"] if p["memory"]]
    most_bytes = max([b for m in memories for b in (m["asked_bytes"], m["exists_bytes"]) if b] or [1.0])
    blocks = [f"{p['title']}: {', '.join(r['name'] for r in p['roles']) or 'idle'} on {_devices(p)}"
              for c in choices[:1] for p in c["pools"]]  # fmt: skip
    return {
        "picture": "plan", "title": title, "subtitle": _subtitle(data, steps),
        "summary": "; ".join([title, *blocks]),
        "node_sizes": list(data["nodes"]), "roles": [{"name": name, "color": colors[name]} for name in names],
        "phase_colors": PHASE_COLORS, "scale_s": max([*top, 1e-9]), "memory_scale_bytes": most_bytes,
        "steps": int(steps), "choices": choices,
        "rejected": [f"{r['preset']} does not fit: {r['why']}" for r in data["rejected"]],
        "close": _close(choices), "sensitivity": [*data.get("notices", ()), *(str(turn["text"]) for turn in data["sensitivity"])],
        "band_words": data.get("band_words", ""),
        "family": data["search"]["family"], "searched": _searched(data["search"]),
    }  # fmt: skip


def _devices(pool: Mapping[str, Any]) -> str:
    return f"{pool['num_devices']} device{'s' * (pool['num_devices'] != 1)}"


def money_text(amount: float | None) -> str:
    """Money for people, without a currency."""
    if amount is None:
        return "–"
    return count_text(round(amount)) if abs(amount) >= 100 else f"{amount:.{2 if abs(amount) >= 1 or amount == 0 else 4}f}"


def step_text(seconds: float | None) -> str:
    """Seconds of a step; steps of plans differ by little, and minutes would hide it."""
    if seconds is None:
        return "not predicted"
    return f"{seconds:.1f} s" if 120 <= seconds < 6000 else seconds_text(seconds)


def band_text(choice: Mapping[str, Any]) -> str:
    """Say between which seconds a step lies."""
    low, high = choice["low_s"], choice["high_s"]
    return "" if low is None or high is None else f"{step_text(low)} to {step_text(high)}"


class PlanPicture(Picture):
    """``PlanPicture(plan_view(plan.view()))``."""

    name = "plan"

    def to_text(self) -> str:
        """Return the pools, the calls with bars, and a line per plan that lost."""
        view = self.view
        lines = [view["title"], f"  {view['subtitle']}"]
        for choice in view["choices"][:1]:
            for pool in choice["pools"]:
                memory = _memory_words(pool["memory"])
                lines.append(f"  {pool['title']}, {_devices(pool)} ({pool['numbers']}){memory}")
                lines += [f"    {role['name']} {role['layout']}".rstrip() for role in pool["roles"]]
            lines += _bars(choice, view["scale_s"])
        for i, choice in enumerate(view["choices"], start=1):
            band = band_text(choice)
            cost = "" if choice["dollars_step"] is None else f", {money_text(choice['dollars_step'])} a step"
            close = " (too close to call)" if choice["close"] and i > 1 else ""
            why = f": {choice['why']}" if choice["why"] else ""
            seconds = step_text(choice["step_s"]) + (f" ({band})" if band else "")
            lines.append(f"  {i}. {choice['text']}: {seconds}{cost}{close}{why}")
        words = (*view["rejected"], view["close"], *view["sensitivity"], view["band_words"], view["family"], view["searched"])
        return "\n".join([*lines, *(f"  {text}" for text in words if text)])


def _choice(plan: Mapping[str, Any], data: Mapping[str, Any], order: Mapping[str, int]) -> ChoiceView:
    seconds, price = finite(plan["seconds"]), finite(data["price_per_device_hour"])
    dollars = None if seconds is None or not price else finite(seconds * data["num_devices"] / 3600 * price)
    steps = data["workload"].get("steps") or 1
    low, high = (finite(s) for s in plan["band"])
    pools = [_pool(pool, plan, order) for pool in plan["pools"]]
    used = {d for pool in plan["pools"] for d in pool["devices"]}
    idle = [d for d in range(data["num_devices"]) if d not in used]
    # Devices without a role are drawn, too: they are paid for.
    if idle:
        pools.append({
            "name": "idle", "title": "idle", "devices": _runs(idle), "numbers": _numbers(idle), "num_devices": len(idle),
            "roles": [], "memory": None,
        })  # fmt: skip
    lanes = [p["name"] for p in plan["pools"]] + [CPU_LANE]
    return {
        "text": f"{plan['preset']}: {plan['title']}" if plan["preset"] else plan["title"],
        "step_s": seconds,
        "low_s": low, "high_s": high, "dollars_step": dollars,
        "dollars_run": finite(dollars * steps) if dollars is not None and steps > 1 else None,
        "close": bool(plan["too_close"]), "why": plan["why"], "pools": pools, "lanes": [cut(lane, 40) for lane in lanes],
        "calls": [_call(row, call, lanes, order) for row, call in enumerate(plan["timeline"])],
    }  # fmt: skip


def _pool(pool: Mapping[str, Any], plan: Mapping[str, Any], order: Mapping[str, int]) -> PlanPoolView:
    roles: list[PoolRoleView] = []
    for role in pool["roles"]:
        uses = plan["layouts"].get(role, {})
        words = [f"{use if use != 'train' else ''} {layout}".strip() for use, layout in uses.items()]
        roles.append({"role": order.get(role, -1), "name": role, "layout": ", ".join(words)})
    return {
        "name": pool["name"], "title": cut(pool["name"], 40), "devices": _runs(pool["devices"]),
        "numbers": _numbers(pool["devices"]), "num_devices": len(pool["devices"]), "roles": roles,
        "memory": _memory([m for m in plan["memory"] if m["pool"] == pool["name"]], order),
    }  # fmt: skip


def _memory(devices: Sequence[Mapping[str, Any]], order: Mapping[str, int]) -> PoolMemoryView | None:
    """Return the memory of a pool; for devices of several kinds, of the one that has least left."""
    if not devices:
        return None
    fullest = max(devices, key=lambda m: (finite(m["asked"]) or 0) - (finite(m["exists"]) or 0))
    parts: list[dict[str, Any]] = [
        {"label": f"{name}, all the time", "role": order.get(name, -1), "bytes": finite(parts.get("resident"))}
        for name, parts in fullest["roles"].items()
    ]
    greedy = max(fullest["roles"].items(), key=lambda item: finite(item[1].get("working")) or 0, default=None)
    if greedy is not None:
        label = f"{greedy[0]}, while its greediest call runs"
        parts.append({"label": label, "role": -1, "bytes": finite(greedy[1].get("working"))})
    parts.append({"label": "the process itself", "role": -1, "bytes": finite(fullest["process"])})
    return {"asked_bytes": finite(fullest["asked"]), "exists_bytes": finite(fullest["exists"]), "parts": parts}


def _call(row: int, call: Mapping[str, Any], lanes: Sequence[str], order: Mapping[str, int]) -> PlanCallView:
    lane = lanes.index(call["pool"]) if call["pool"] in lanes else len(lanes) - 1
    parts = [{"name": p["name"], "start_s": finite(p["start_s"]), "seconds": finite(p["seconds"])} for p in call["parts"]]
    return {
        "row": row, "call": call["name"], "role": order.get(call["role"], -1), "lane": lane, "phase": call["phase"],
        "start_s": finite(call["start_s"]), "seconds": finite(call["seconds"]), "parts": parts,
    }  # fmt: skip


def _runs(devices: Iterable[int]) -> list[list[int]]:
    """Return the runs of device numbers as [first, one past the last]."""
    runs: list[list[int]] = []
    for number in sorted(devices):
        if runs and runs[-1][1] == number:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    return runs


def _numbers(devices: Iterable[int]) -> str:
    runs = _runs(devices)
    words = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in runs[:6]]
    return ", ".join(words) + (f" and {len(runs) - 6} more runs" if len(runs) > 6 else "")


def _subtitle(data: Mapping[str, Any], steps: float) -> str:
    hours, price = finite(data["device_hours"]), finite(data["price_per_device_hour"])
    words = [str(data["workload"]["text"])]
    words += [f"{hours:.3g} device-hours a step"] if hours is not None else []
    if price and hours is not None:
        words.append(f"{money_text(finite(hours * price))} a step at {price:.4g} a device-hour")
        words += [f"{money_text(finite(hours * price * steps))} for {count_text(steps)} steps"] if steps > 1 else []
    if data["num_idle"]:
        words.append(f"{data['num_idle']} devices idle")
    return "; ".join(words)


def _close(choices: Sequence[ChoiceView]) -> str:
    near = [str(i) for i, c in enumerate(choices, start=1) if c["close"] and i > 1]
    which = f"plan {near[0]}" if len(near) == 1 else f"plans {', '.join(near)}"
    return f"Too close to call: the model's error is larger than what tells plan 1 from {which}." if near else ""


def _searched(search: Mapping[str, Any]) -> str:
    considered, pruned, seconds = (finite(search[name]) for name in ("num_considered", "num_pruned", "seconds"))
    took = "" if seconds is None else f", in {seconds_text(seconds)}"
    return f"{count_text(considered)} placements considered, {count_text(pruned)} of them ruled out by a bound{took}."


def _memory_words(memory: PoolMemoryView | None) -> str:
    if memory is None or memory["asked_bytes"] is None:
        return ""
    return f": {bytes_text(memory['asked_bytes'])} of {bytes_text(memory['exists_bytes'])} on its fullest device"


def _bars(choice: Mapping[str, Any], scale_s: float) -> list[str]:
    """Return a line per call with a bar where it runs."""
    width, lines = max([len(c["call"]) for c in choice["calls"]], default=0), []
    for call in choice["calls"]:
        if call["start_s"] is not None and call["seconds"] is not None:
            start, end = (round(36 * min(1.0, s / scale_s)) for s in (call["start_s"], call["start_s"] + call["seconds"]))
            bar = (" " * start + "/" * max(1, end - start)).ljust(37)
            lines.append(f"    {call['call']:<{width}} |{bar}| {seconds_text(call['seconds'])} in {choice['lanes'][call['lane']]}")
    return lines
