"""Items, jobs and groupings: the roles and shadows that are placed, their calls, and which items share devices.

The family of plans: every set partition of the items into pools; blocks of frozen models may instead lie side by side on parts of
a pool that a trained or generating model uses (interleaving, arXiv 2312.11819); an actor may generate by a shadow, a critic infer
by one (separation), on a pool other than its own. In 2312.11819's terms::

    {actor critic reference reward}                          flattening, HybridFlow's colocate
    {actor critic} with parts {reference}, {reward}          interleaving
    {actor} {critic} {actor.rollout} {critic.inference} ...  separation
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from hfsdk.core.layout import Layout
from hfsdk.core.methods import EXPORT_WEIGHTS, SHADOWED, method_of
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_weights import RolloutWeights
from hfsdk.planner.search.recorded import Recorded, RecordedCall

MOST_ITEMS = 6
"""Shadows are in the family while roles and shadows together are no more: six have 203 set partitions, nine 21,147."""

SHADOW_KINDS = {"rollout": "actor", "inference": "critic"}
"""Ending of a shadow's name -> the kind of role that can have it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """A call as it is laid out; with shadows there is one more for every export of weights."""

    item: str
    """The item that carries it out; empty for a CPU task."""
    role: str
    """The role whose call it is in the trace: the item's name, or ``"session"``."""
    method: str
    call: RecordedCall | None
    """``None`` for an export."""
    after: tuple[int, ...]
    """Numbers of the jobs it waits for, in the order of submission."""
    stale: bool = False
    """Whether the weights have changed since the last generation; of a generation."""
    away: bool = False
    """Whether the weights are with the other engine where only one has them at a time (CPU, ``cpu_weights="shared"``)."""
    sync: bool = False
    """Whether it takes the weights over first; of a shadow."""
    source: str = ""
    """The role whose weights a shadow takes over."""

    @property
    def phase(self) -> str:
        """Generation, preparation or learning."""
        return self.call.phase if self.call else "generation"


@dataclass(frozen=True, eq=False, kw_only=True)
class Item:
    """The unit of placement: a role, or a shadow of one (``actor.rollout``)."""

    name: str
    role: RoleSpec
    """The role, with ``rollout=None`` where a shadow generates."""
    trained: RoleSpec | None = None
    """The role whose weights a shadow takes."""
    like: RoleSpec
    """The role without its name and layouts: items alike in it cost the same."""
    long_row: int = 0
    """Tokens of the longest row of its passes where it is longer than a micro-batch, and so one by itself."""

    @property
    def frozen(self) -> bool:
        """Whether it may live on a part of another pool: neither trained nor generating, and no shadow."""
        return not (self.role.trainable or self.role.rollout or self.role.shadow_of)


@dataclass(frozen=True, eq=False, kw_only=True)
class Mode:
    """A choice of shadows, and with them the items and the jobs in the order of submission."""

    items: tuple[Item, ...]
    jobs: tuple[Job, ...]

    @property
    def shadows(self) -> tuple[str, ...]:
        """Names of the shadows."""
        return tuple(item.name for item in self.items if item.role.shadow_of)

    def jobs_of(self, item: str) -> list[int]:
        """Return the numbers of an item's jobs."""
        return [number for number, job in enumerate(self.jobs) if job.item == item]


@dataclass(frozen=True)
class Grouping:
    """Blocks of items (by number) that share devices, and the block that each lies on a part of (-1: its own pool)."""

    blocks: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]


def modes_of(roles: Sequence[RoleSpec], recorded: Recorded, shadows: bool = True) -> list[Mode]:
    """Return every way to have or not have shadows; only of roles whose calls a shadow would carry out, and of few."""
    possible = [
        f"{role.name}.{ending}" for ending, kind in SHADOW_KINDS.items() for role in roles
        if shadows and role.kind == kind and role.trainable and recorded.of(role.name, (SHADOWED[ending].name,))
    ]  # fmt: skip
    return [
        _mode(roles, recorded, [name for name, there in zip(possible, chosen, strict=True) if there])
        for chosen in product((False, True), repeat=len(possible))
        if not any(chosen) or len(roles) + sum(chosen) <= MOST_ITEMS
    ]


def _mode(roles: Sequence[RoleSpec], recorded: Recorded, shadows: Sequence[str]) -> Mode:
    items = []
    for role in roles:
        generates = f"{role.name}.rollout" not in shadows
        own = role if generates else replace(role, rollout=None)
        items.append(Item(name=role.name, role=own, like=_like(own), long_row=recorded.long_row(role)))
    for name in shadows:
        base, _, ending = name.rpartition(".")
        trained = next(role for role in roles if role.name == base)
        shadow = replace(trained, name=name, optimizer=None, shadow_of=base)
        shadow = replace(shadow, train=None) if ending == "rollout" else replace(shadow, train=Layout(), auto=())
        items.append(Item(name=name, role=shadow, trained=trained, like=_like(shadow), long_row=recorded.long_row(trained)))
    return Mode(items=tuple(items), jobs=tuple(_jobs(recorded, shadows, _sharing(roles, shadows))))


def _like(role: RoleSpec) -> RoleSpec:
    return replace(
        role, name="", folder="", train=None, rollout=Layout() if role.rollout else None, auto=(), seed=0, restore="", nodes=(),
        timeout_s=60.0, generated_by="", shadow_of="shadow" if role.shadow_of else "",
    )  # fmt: skip


def _sharing(roles: Sequence[RoleSpec], shadows: Sequence[str]) -> set[str]:
    """Return the roles whose trainer and rollout live side by side and, on CPU, have one copy of the weights between them."""
    return {
        role.name for role in roles
        if role.rollout and role.rollout_options.cpu_weights == "shared" and not role.lora and f"{role.name}.rollout" not in shadows
    }  # fmt: skip


def _jobs(recorded: Recorded, shadows: Sequence[str], sharing: Collection[str]) -> Iterator[Job]:
    """Yield the step's jobs; a shadow's first call after its role has changed waits for an export of the weights."""
    number_of: dict[int, int] = {}
    weights = {role: RolloutWeights(shared=role in sharing) for role in recorded.roles}  # a step begins with the trainer's
    synced = dict.fromkeys(shadows, False)
    number = 0
    for call in recorded.calls:
        after = tuple(number_of[i] for i in call.inputs if i in number_of)
        shadow = f"{call.role}.{method_of(call.method).shadow}"
        by = shadow if shadow in synced else ""
        own = None if by or call.on_host else weights[call.role]
        sync = bool(by) and not synced[by]
        if sync:
            yield Job(item=call.role, role=call.role, method=EXPORT_WEIGHTS.name, call=None, after=())
            after, number, synced[by] = (*after, number), number + 1, True
        item = "" if call.on_host else by or call.role
        yield Job(item=item, role=item or call.role, method=call.method, call=call, after=after,
                  stale=own is not None and own.stale_for(call.method), away=own is not None and own.away_for(call.method),
                  sync=sync, source=call.role if sync else "")  # fmt: skip
        if own is not None:
            own.note(call.method)
        if method_of(call.method).changes_weights:
            synced |= {name: False for name in synced if name.rpartition(".")[0] == call.role}
        number_of[call.id] = number
        number += 1


def groupings_of(mode: Mode) -> list[Grouping]:
    """Return every way to share devices; a shadow never shares them with its role."""
    names = [item.name for item in mode.items]
    return list(_groupings(
        tuple(item.frozen for item in mode.items),
        tuple(names.index(item.role.shadow_of) if item.role.shadow_of else -1 for item in mode.items),
    ))  # fmt: skip


@lru_cache(maxsize=64)
def _groupings(frozen: tuple[bool, ...], shadow_of: tuple[int, ...]) -> tuple[Grouping, ...]:
    """Return them by which items are frozen, and of each the item it is a shadow of (-1: none)."""
    groupings = []
    for blocks in _partitions(len(frozen)):
        if any(shadow_of[i] in block for block in blocks for i in block):
            continue
        parts = [b for b, block in enumerate(blocks) if all(frozen[i] for i in block)]
        hosts = [b for b in range(len(blocks)) if b not in parts]
        for chosen in product((-1, *hosts), repeat=len(parts)):
            homes = [-1] * len(blocks)
            for part, host in zip(parts, chosen, strict=True):
                homes[part] = host
            if any(chosen.count(host) == 1 for host in hosts):  # nothing runs at the same time as a part that is alone
                continue
            groupings.append(Grouping(blocks, tuple(homes)))
    return tuple(groupings)


def _partitions(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the set partitions of 0, ..., count - 1 (Bell(4) = 15)."""

    def grow(blocks: list[list[int]], number: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if number == count:
            yield tuple(map(tuple, blocks))
            return
        for block in blocks:
            block.append(number)
            yield from grow(blocks, number + 1)
            block.pop()
        yield from grow([*blocks, [number]], number + 1)

    yield from grow([], 0)
