"""What the placement picture is drawn from: plain data."""

from __future__ import annotations

from typing import Literal, TypedDict


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
    """What the card says besides: the rollout's replica, who generates instead, a shadow's age, whose base it has."""
    short: str
    """Coordinates for narrow columns: the axes that are split, or ``tp.pp.dp`` in the densest drawing."""
    rollout_replica: int | None
    planned_bytes: int | None
    measured_bytes: int | None
    base_with: str
    """The role on this device with which its frozen weights are counted."""
    base_for: str
    """Those whose frozen weights are counted with it."""


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
    """As much of the pool's name as fits above them."""
    first: int
    """Of the node's devices, counted from 0."""
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
    """E.g. ``"LoRA rank 16"``; empty where the weights themselves are trained, or nothing is."""
    base: str
    """With which roles it has its frozen weights together."""
    train: str
    rollout: str | None
    dtype: str
    state: str
    shadow_of: str
    weights: str
    """Updates its weights have seen or, of a shadow's, how old they are."""


class BoxView(TypedDict):
    """Where a node is drawn."""

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
    """From a node's edge to its devices: its name and the pools."""
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
