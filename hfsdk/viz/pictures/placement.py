"""The placement picture: nodes > devices as columns, in each the shards of its roles and its memory.

::

    +-- node 0 ------------------------+
    | pool all ======================= |    a bracket over the devices of each pool
    | device 0   cpu    device 1   cpu |    a card per shard: role, rank, tp/pp/dp, rollout replica
    | |actor  tp0 ...|  |actor  tp1 .. |    dashed border: declared, not loaded yet
    | |critic tp0 ...|  |critic tp0 .. |    hollow bar: a shadow, which generates or infers for its role; how old its weights are
    | ////predicted///  ////predicted/ |    hatched: what the memory model says, against the device's limit
    | ####measured###   ####measured## |    solid: what was measured; a dashed box says "not measured"
    +----------------------------------+

``row`` of a shard counts shards role by role, in the order given: its row in the placement's ``to_pandas()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from hfsdk.core.methods import COMPUTE_VALUES, GENERATE
from hfsdk.viz.frame import Picture, bytes_text, role_colors
from hfsdk.viz.plain import clean, cut, finite, letters

WIDTH = 980
"""Nodes that do not fit side by side go below."""


def placement_view(placement_data: Mapping[str, Any]) -> PlacementView:
    """Turn a session's or a plan's placement data into the view of the picture."""
    data = placement_data
    colors = role_colors({r["name"]: r["kind"] for r in data["roles"]})
    roles, letters = [], set[str]()
    for role in data["roles"]:
        name = role["name"]
        letter = next((c for c in name.upper() + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c.isalpha() and c not in letters), "?")
        letters.add(letter)
        roles.append(_role(role, colors[name], letter))
    shards = _shards_by_device(data["roles"], sum(len(node["devices"]) for node in data["nodes"]))
    nodes: list[NodeView] = [
        {
            "name": cut(node["name"], max(8, 14 * len(node["devices"]))),
            "devices": [_device(d, data["devices"], shards.get(d, [])) for d in node["devices"]],
            "pools": [],
        }
        for node in data["nodes"]
    ]
    devices = [d for node in nodes for d in node["devices"]]
    density: Literal["full", "compact", "tiny"]
    density = "full" if len(devices) <= 5 else "compact" if len(devices) <= 16 else "tiny"
    geometry = _geometry(nodes, density)
    for node in nodes:
        node["pools"] = _pool_spans(node["devices"], geometry)
    if density == "tiny":
        for view in roles:
            view["label"] = f"{view['letter']}: {view['label']}"
    return {
        "picture": "placement",
        "title": data["title"] or "placement",
        "summary": _summary(roles, len(devices), len(nodes)),
        "density": density,
        "predicted": bool(data.get("predicted", False)),
        "memory_scale_bytes": max([_scale(d) for d in devices], default=1),
        "nodes": nodes,
        "roles": roles,
        "geometry": geometry,
        "before": placement_view(data["before"]) if data.get("before") else None,
    }


class PlacementPicture(Picture):
    """The devices of every role. ``PlacementPicture(placement_view(data))``."""

    name = "placement"

    def to_text(self) -> str:
        """Return one line per role and one per device."""
        view = self.view
        lines = [view["title"]] + ([] if view["nodes"] else ["  no devices"])
        lines += ["  " + role["label"] for role in view["roles"]]
        for node in view["nodes"]:
            lines.append(node["name"])
            for pool in node["pools"]:
                on = [str(d["number"]) for d in node["devices"][pool["first"] : pool["first"] + pool["num_devices"]]]
                lines.append(f"  pool {pool['pool']}: device{'s' * (len(on) > 1)} {', '.join(on)}")
            for device in node["devices"]:
                here = ", ".join(f"{view['roles'][s['role']]['name']} {s['place']}" for s in device["shards"])
                planned = bytes_text(sum(s["planned_bytes"] or 0 for s in device["shards"]))
                limit = "" if device["memory_bytes"] is None else f" of {bytes_text(device['memory_bytes'])}"
                memory = f"memory predicted {planned}{limit}, measured: {bytes_text(device['used_bytes'])}"
                lines.append(f"  device {device['number']} ({device['name']}): {here or 'no role'}; {memory}")
        return "\n".join(lines)


def _role(role: Mapping[str, Any], color: str, letter: str) -> RoleView:
    rollout = role.get("rollout")
    shadow_of, weights = role.get("shadow_of", ""), role.get("weights", "")
    parts = [role["name"], f"shadow of {shadow_of}" if shadow_of else role.get("model") or "a function"]
    parts += [role["lora"]] if role.get("lora") else []
    parts += [f"layout {role['train']}"] if role.get("train") else []
    parts += [f"rollout {rollout}"] if rollout else []
    parts += [f"{_verb(method)} in {shadow}" for method, shadow in role.get("elsewhere", {}).items()]
    parts += [role.get("dtype") or "", role["state"], weights, role.get("base", "")]
    return {
        "name": role["name"],
        "short": f".{role['name'].rpartition('.')[2]}" if shadow_of else role["name"][:9],
        "letter": letter,
        "label": " · ".join(p for p in parts if p),
        "color": color,
        "model": role.get("model") or "",
        "lora": role.get("lora", ""),
        "base": role.get("base", ""),
        "train": role.get("train") or "",
        "rollout": rollout,
        "dtype": role.get("dtype") or "",
        "state": role["state"],
        "shadow_of": shadow_of,
        "weights": weights,
    }


def _verb(method: str) -> str:
    return {GENERATE.name: "generates", COMPUTE_VALUES.name: "infers"}.get(method, method)


def _note(role: Mapping[str, Any], shard: Mapping[str, Any]) -> str:
    """Return the words of a card that its coordinates do not say."""
    if role.get("shadow_of"):
        weights = str(role.get("weights", ""))
        return weights.partition(" (")[0]
    if role.get("rollout") and shard.get("rollout_replica") is not None:
        return f"rollout {shard['rollout_replica']}"
    apart = {GENERATE.name: "rollout apart", COMPUTE_VALUES.name: "values apart"}
    words = [apart.get(method, f"{method} apart") for method in role.get("elsewhere", {})]
    return ", ".join(words) or (f"base: {shard['base_with']}" if shard.get("base_with") else "")


def _pool_spans(devices: list[DeviceView], geometry: GeometryView) -> list[PoolSpanView]:
    """Bring together neighbours of one pool, with its name cut to the room above them."""
    spans: list[PoolSpanView] = []
    for index, device in enumerate(devices):
        if spans and spans[-1]["pool"] == device["pool"]:
            spans[-1]["num_devices"] += 1
        else:
            spans.append({"pool": device["pool"], "text": "", "first": index, "num_devices": 1})
    for span in spans:
        name = f"pool {clean(span['pool'])}" if span["pool"] != "none" else "no pool"
        room = int((span["num_devices"] * (geometry["column"] + geometry["gap"]) - geometry["gap"] - 4) / 5.4)
        span["text"] = cut(name if letters(name) <= room else name.removeprefix("pool "), room)
    return spans


def _shards_by_device(roles: list[Mapping[str, Any]], num_devices: int) -> dict[int, list[ShardView]]:
    by_device: dict[int, list[ShardView]] = {}
    tiny = num_devices > 16
    row = 0
    for index, role in enumerate(roles):
        for shard in role["shards"]:
            view: ShardView = {
                "row": row,
                "role": index,
                "rank": shard["rank"],
                "tp": shard["tp"],
                "pp": shard["pp"],
                "dp": shard["dp"],
                "place": _place(role, shard),
                "note": _note(role, shard),
                "short": _short(role["shards"], shard, tiny),
                "rollout_replica": shard.get("rollout_replica") if role.get("rollout") else None,
                "planned_bytes": finite(shard.get("planned_bytes")),
                "measured_bytes": finite(shard.get("measured_bytes")),
                "base_with": shard.get("base_with", ""),
                "base_for": ", ".join(shard.get("base_for", ())),
            }
            by_device.setdefault(shard["device"], []).append(view)
            row += 1
    return by_device


def _place(role: Mapping[str, Any], shard: Mapping[str, Any]) -> str:
    if role.get("shadow_of") and not role.get("train"):
        return f"rollout {shard['rollout_replica']} tp{shard['tp']}"
    return f"tp{shard['tp']} pp{shard['pp']} dp{shard['dp']}"


def _short(shards: list[Mapping[str, Any]], shard: Mapping[str, Any], tiny: bool) -> str:
    if tiny:
        return f"{shard['tp']}.{shard['pp']}.{shard['dp']}"
    return " ".join(f"{axis[0]}{shard[axis]}" for axis in ("tp", "pp", "dp") if any(s[axis] for s in shards))


def _device(number: int, devices: Mapping[Any, Any], shards: list[ShardView]) -> DeviceView:
    data = devices[number] if number in devices else devices[str(number)]
    return {
        "number": number,
        "name": cut(data["name"], 16),
        "pool": data.get("pool") or "none",
        "pid": data.get("pid"),
        "memory_bytes": finite(data.get("memory_bytes")),
        "used_bytes": finite(data.get("used_bytes")),
        "shards": shards,
    }


def _scale(device: DeviceView) -> int:
    planned = sum(s["planned_bytes"] or 0 for s in device["shards"])
    measured = sum(s["measured_bytes"] or 0 for s in device["shards"])
    return max(device["memory_bytes"] or 0, device["used_bytes"] or 0, planned, measured, 1)


def _summary(roles: list[RoleView], num_devices: int, num_nodes: int) -> str:
    devices = f"{num_devices} device{'s' * (num_devices != 1)} on {num_nodes} node{'s' * (num_nodes != 1)}"
    return f"Placement of {len(roles)} roles on {devices}: " + "; ".join(r["label"] for r in roles)


def _geometry(nodes: list[NodeView], density: str) -> GeometryView:
    gap, widest = 8.0 if density != "tiny" else 4.0, max([len(n["devices"]) for n in nodes], default=1)
    column = {"full": 176.0, "compact": 106.0, "tiny": 54.0}[density]
    card, card_gap = {"full": (34.0, 5.0), "compact": (16.0, 3.0), "tiny": (12.0, 2.0)}[density]
    header, top = {"full": 32.0, "compact": 20.0, "tiny": 17.0}[density], 37.0
    memory = {"full": 54.0, "compact": 20.0, "tiny": 18.0}[density]
    if widest * (column + gap) + gap > WIDTH:
        column = max(46.0, (WIDTH - gap) / widest - gap)
    cards = max([len(d["shards"]) for n in nodes for d in n["devices"]], default=0)
    memory_top = top + header + max(1, cards) * (card + card_gap) + 4
    height = memory_top + memory + gap
    boxes: list[BoxView] = []
    x = y = right = 0.0
    for node in nodes:
        width = len(node["devices"]) * (column + gap) + gap
        if x > 0 and x + width > WIDTH + 1:
            x, y = 0.0, y + height + 10
        boxes.append({"x": x + 0.5, "y": y + 0.5, "width": width, "height": height})
        x += width + 10
        right = max(right, x - 10)
    return {
        "width": right + 1,
        "height": y + height + 1,
        "column": column,
        "gap": gap,
        "top": top,
        "header": header,
        "card": card,
        "card_gap": card_gap,
        "memory_top": memory_top,
        "nodes": boxes,
    }


# -- the view: plain data


class ShardView(TypedDict):
    """One role's part on one device."""

    row: int
    role: int
    rank: int
    tp: int
    pp: int
    dp: int
    place: str
    """Coordinates; of a shadow that only generates, those of its rollout."""
    note: str
    """The rest of the card: the rollout's replica, the role that generates instead, a shadow's age, the role whose base it has."""
    short: str
    """Coordinates for narrow columns: the axes that are split, or ``tp.pp.dp`` in the densest drawing."""
    rollout_replica: int | None
    planned_bytes: int | None
    measured_bytes: int | None
    base_with: str
    """The role on this device with which its frozen weights are counted."""
    base_for: str
    """The roles whose frozen weights are counted with it."""


class DeviceView(TypedDict):
    """One device and the shards on it."""

    number: int
    name: str
    pool: str
    pid: int | None
    memory_bytes: int | None
    used_bytes: int | None
    shards: list[ShardView]


class PoolSpanView(TypedDict):
    """Neighbouring devices of one pool on one node."""

    pool: str
    text: str
    """The pool's name, cut to the room above its devices."""
    first: int
    """The first of the node's devices, counted from 0."""
    num_devices: int


class NodeView(TypedDict):
    """One node, its devices and the pools above them."""

    name: str
    devices: list[DeviceView]
    pools: list[PoolSpanView]


class RoleView(TypedDict):
    """One role, as the legend names it."""

    name: str
    short: str
    letter: str
    label: str
    color: str
    model: str
    lora: str
    """The adapters, e.g. ``"LoRA rank 16"``; empty where the weights themselves are trained, or nothing is."""
    base: str
    """The roles with which it has its frozen weights together."""
    train: str
    rollout: str | None
    dtype: str
    state: str
    shadow_of: str
    weights: str
    """Updates its weights have seen or, of a shadow's, how old they are."""


class BoxView(TypedDict):
    """The place of a drawn node."""

    x: float
    y: float
    width: float
    height: float


class GeometryView(TypedDict):
    """Sizes in SVG units, shared by the static and the interactive drawing."""

    width: float
    height: float
    column: float
    gap: float
    top: float
    """Distance from a node's edge to its devices, for its name and the pools."""
    header: float
    card: float
    card_gap: float
    memory_top: float
    nodes: list[BoxView]


class PlacementView(TypedDict):
    """All the placement picture needs."""

    picture: Literal["placement"]
    title: str
    summary: str
    density: Literal["full", "compact", "tiny"]
    predicted: bool
    memory_scale_bytes: int
    nodes: list[NodeView]
    roles: list[RoleView]
    geometry: GeometryView
    before: PlacementView | None
    """The same before the last move."""
