"""Placement of roles on devices: ``Pool`` and ``Placement`` (HybridFlow's resource pools, section 4.1).

Roles in one pool share its devices and run one after the other; disjoint pools run at the same time. Pools do not overlap, but a
part of one can be a pool of its own for frozen models (interleaving, arXiv 2312.11819)::

    device        0   1   2   3
    "all"        [ actor, critic ]        run on all four, and nothing runs at the same time
    "reference"  [ ref. ]                 run at the same time, each on its half
    "reward"             [ reward ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hfsdk.core.checks import Within, check_fields, checked, is_whole, shown
from hfsdk.core.cluster import MOST_DEVICES
from hfsdk.core.errors import PlacementError
from hfsdk.core.field_texts import documented
from hfsdk.core.text import listed, nearest

ROLLOUT, INFERENCE = SHADOWS = ("rollout", "inference")
"""Endings of shadows' names, ``actor.rollout`` and ``critic.inference``; ``hfsdk.core.methods`` says what each carries out."""

PRESETS = ("colocate", "flattening", "split", "standalone", "interleaving", "separation", "disaggregated")
"""Placements with names: HybridFlow's and those of arXiv 2312.11819 (and of its newer versions)."""


NumDevices = Annotated[int, Within(1, MOST_DEVICES)]


@documented
@dataclass(frozen=True)
class Pool:
    """A named set of devices, in rank order."""

    name: str
    """Name for messages and pictures; unique in a placement."""
    devices: tuple[int, ...]
    """Numbers of the devices, rank 0's first."""
    within: str = ""
    """The pool of which this is a part, whose calls and this one's exclude each other."""

    def __post_init__(self) -> None:
        check_fields(self, PlacementError)

    @property
    def size(self) -> int:
        """Number of devices, which is the number of ranks of every role in the pool."""
        return len(self.devices)


@documented
@dataclass(frozen=True)
class Placement:
    """Pools and who lives in them."""

    pools: tuple[Pool, ...]
    """Sets of devices that no two pools share, but for parts (``Pool.within``)."""
    roles: Mapping[str, str]
    """Role name -> pool name."""

    def __post_init__(self) -> None:
        check_fields(self, PlacementError)

    @checked(error=PlacementError)
    def pool_of(self, role: str) -> Pool:
        """Return the pool a role lives in.

        Raises:
            PlacementError: the placement forgets this role.
        """
        name = self.roles.get(role)
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise PlacementError(
            f"the placement has no pool for role {shown(role)}; it places {shown(dict(self.roles))}. "
            "Name every role, e.g. session.place('colocate')."
        )

    @classmethod
    @checked(error=PlacementError)
    def of(cls, what: str | Mapping[str, float] | Placement, roles: Sequence[str], num_devices: NumDevices) -> Placement:
        """Build a placement from a preset's name or from ``{"actor reference": 2, "critic reward": 2}``.

        Whole numbers count devices; shares such as ``{"actor critic": 1.0, "reference": 0.5, "reward": 0.5}`` are of all devices
        (2312.11819): roles with 1.0 live on all of them, the others side by side on parts.

        ==============  =====================================================================================================
        colocate        all roles on all devices, one after the other (HybridFlow, section 8.3); also ``flattening`` (2312.11819)
        split           actor and reference on one half, critic and reward on the other (HybridFlow)
        standalone      every role on devices of its own, evenly (HybridFlow)
        interleaving    actor and critic on all devices, each frozen model on a part of its own: these overlap (2312.11819)
        separation      training, generating and inferring on devices of their own: shadows of the actor and the critic
                        generate and infer with weights they get once per rollout (2312.11819); also ``disaggregated``
        ==============  =====================================================================================================

        In a dict, ``actor.rollout`` and ``critic.inference`` name such shadows: ``{"actor critic": 2, "actor.rollout": 2}``.

        Raises:
            PlacementError: an unknown preset, a forgotten or unknown role, or more devices than there are.
        """
        if not roles:
            raise PlacementError("a placement needs at least one role; roles is empty")
        if isinstance(what, Placement):
            what.check(roles, num_devices)
            return what
        if isinstance(what, Mapping):
            _check_sizes(what, roles, num_devices)
        if isinstance(what, Mapping) and any(isinstance(share, float) for share in what.values()):
            placement = cls._from_shares(what, num_devices)
        elif isinstance(what, Mapping):
            placement = cls._from_counts({names: int(count) for names, count in what.items()})
        elif what in ("colocate", "flattening"):
            placement = cls((Pool("all", tuple(range(num_devices))),), dict.fromkeys(roles, "all"))
        elif what == "split":
            first = [r for r in roles if r in ("actor", "reference")]
            placement = cls._evenly([first, [r for r in roles if r not in first]], num_devices)
        elif what == "standalone":
            placement = cls._evenly([[r] for r in roles], num_devices)
        elif what == "interleaving":
            # A single frozen model still gets half of the devices, not all: on all of them nothing would be apart.
            frozen = [r for r in roles if r not in ("actor", "critic")]
            shares = dict.fromkeys(frozen, 1 / max(2, len(frozen)))
            placement = cls._from_shares({" ".join(r for r in roles if r not in frozen): 1.0, **shares}, num_devices)
        elif what in ("separation", "disaggregated"):
            placement = cls._evenly(_separated(roles, num_devices), num_devices)
        else:
            raise PlacementError(
                f"no placement {shown(what)}; {nearest(what[:60], PRESETS)}, "
                "or give a dict such as {'actor reference': 2, 'critic': 2}"
            )
        placement.check(roles, num_devices)
        return placement

    @classmethod
    def _from_counts(cls, counts: Mapping[str, int]) -> Placement:
        pools, roles, first = [], {}, 0
        for names, count in counts.items():
            pool = Pool(names.replace(" ", "+"), tuple(range(first, first + count)))
            first += count
            pools.append(pool)
            for role in names.split():
                if role in roles:
                    raise PlacementError(f"role {shown(role)} stands in two pools of {shown(dict(counts))}; name it once")
                roles[role] = pool.name
        return cls(tuple(pools), roles)

    @classmethod
    def _from_shares(cls, shares: Mapping[str, float], num_devices: int) -> Placement:
        whole = " ".join(names for names, share in shares.items() if share == 1 and names)
        pools = [Pool("all", tuple(range(num_devices)))] if whole else []
        roles, first = dict.fromkeys(whole.split(), "all"), 0
        for names, share in shares.items():
            if share == 1:
                continue
            count = round(share * num_devices) if 0 < share < 1 else 0
            if count < 1 or first + count > num_devices:
                raise PlacementError(
                    f"the share {share!r} of {shown(names)} does not fit: shares are above 0 and at most 1, each at least one of "
                    f"the {num_devices} devices, and those below 1 together at most 1; got {shown(dict(shares))}"
                )
            pool = Pool(names.replace(" ", "+"), tuple(range(first, first + count)), "all" if whole else "")
            first += count
            pools.append(pool)
            roles |= dict.fromkeys(names.split(), pool.name)
        return cls(tuple(pools), roles)

    @classmethod
    def _evenly(cls, groups: Sequence[Sequence[str]], num_devices: int) -> Placement:
        groups = [g for g in groups if g]
        if num_devices < len(groups):
            raise PlacementError(
                f"{len(groups)} pools ({', '.join('+'.join(g) for g in groups)}) need at least as many devices; "
                f"there are {num_devices}. Use 'colocate' or more devices."
            )
        sizes = _even_sizes(len(groups), num_devices)
        return cls._from_counts({" ".join(group): size for group, size in zip(groups, sizes, strict=True)})

    @checked(error=PlacementError)
    def check(self, roles: Sequence[str], num_devices: NumDevices) -> None:
        """Check that pools are disjoint, exist, and hold every role.

        Raises:
            PlacementError: with what was asked, what exists and what to do.
        """
        owners: dict[tuple[str, int], str] = {}
        names = [pool.name for pool in self.pools]
        for pool in self.pools:
            if names.count(pool.name) > 1:
                raise PlacementError(f"two pools are called {pool.name!r}; give each its own name")
            self._check_part(pool)
            for device in pool.devices:
                # Parts of a pool share its devices, so devices only have to be disjoint among pools within the same one.
                if (pool.within, device) in owners:
                    raise PlacementError(
                        f"device {device} is in pools {owners[pool.within, device]!r} and {pool.name!r}; pools may not overlap"
                    )
                if not 0 <= device < num_devices:
                    raise PlacementError(f"pool {pool.name!r} asks for device {device}; the session has {num_devices} devices")
                owners[pool.within, device] = pool.name
            if not pool.devices:
                raise PlacementError(f"pool {pool.name!r} has no device; give it at least one")
        missing = [r for r in roles if r not in self.roles]
        if missing:
            unknown = [name for name in self.roles if name not in roles]
            near = nearest(unknown[0], roles).partition("? ") if unknown else ("", "", "")
            # A misspelt role shows up twice: the right name is missing, and the wrong one is placed. Both are said at once.
            typo = f" There is no role {unknown[0]!r}; {near[0]}?" if near[1] else ""
            raise PlacementError(f"the placement forgets {listed(missing)}; it places {listed(self.roles)}. Name every role.{typo}")
        unknown = [r for r in self.roles if r not in roles and not (is_shadow(r) and r.rpartition(".")[0] in roles)]
        if unknown:
            raise PlacementError(f"the placement names {listed(unknown)}, which the session does not have; roles: {listed(roles)}")

    def _check_part(self, pool: Pool) -> None:
        """Check that a pool within another one is a run of its devices."""
        if not pool.within:
            return
        whole = next((p for p in self.pools if p.name == pool.within and not p.within), None)
        first = whole.devices.index(pool.devices[0]) if whole and pool.devices and pool.devices[0] in whole.devices else 0
        if whole is None or whole.devices[first : first + pool.size] != pool.devices:
            raise PlacementError(
                f"pool {pool.name!r} has devices {pool.devices}; within {pool.within!r} they must be a run of its devices: "
                f"{whole.devices if whole else 'no pool of this placement'}"
            )

    @checked(error=PlacementError)
    def overlapping(self, pool: Pool) -> list[Pool]:
        """Return the pools whose calls exclude this one's: the one it is a part of, or its own parts."""
        return [p for p in self.pools if p.name == pool.within or (pool.name and p.within == pool.name)]


def _check_sizes(what: Mapping[Any, Any], roles: Sequence[str], num_devices: int) -> None:
    if not what:
        raise PlacementError(f"an empty placement; name every role, e.g. {{{' '.join(roles)!r}: {num_devices}}}, or say 'colocate'")
    for names, size in what.items():
        if is_whole(size) and size > num_devices:
            raise PlacementError(f"{shown(names)} asks for {size:,} devices; the session has {num_devices} devices")
        if not names.split():
            raise PlacementError(
                f"a placement names roles and how many devices (or which share of all) they get, e.g. {{'actor reference': 2, "
                f"'critic': 2}}; got {shown(names)}: {size!r}"
            )


def _even_sizes(num_groups: int, num_devices: int) -> list[int]:
    """Divide devices about evenly, in powers of two where that leaves none over: layouts fit such pools more often.

    Example: 16 devices for 5 groups are 4 4 4 2 2, 7 devices for 3 are 3 2 2.
    """
    share, extra = divmod(num_devices, num_groups)
    sizes = [2 ** (share.bit_length() - 1)] * num_groups
    left = num_devices - sum(sizes)
    for i in range(num_groups):
        if left >= sizes[i]:
            left -= sizes[i]
            sizes[i] *= 2
    return [share + (i < extra) for i in range(num_groups)] if left else sizes


def is_shadow(name: str) -> bool:
    """Return whether a role's name is that of a shadow, e.g. ``actor.rollout``."""
    base, _, ending = name.rpartition(".")
    return bool(base) and ending in SHADOWS


def _separated(roles: Sequence[str], num_devices: int) -> list[list[str]]:
    """Group roles for ``separation``: apart as far as the devices go, training ones never with generating or inferring ones."""
    trained = [[r] for r in ("actor", "critic") if r in roles]
    shadows = [[f"{r}.{ending}"] for r, ending in (("actor", "rollout"), ("critic", "inference")) if r in roles]
    frozen = [[r] for r in roles if r not in ("actor", "critic")]
    rest = [*shadows, *frozen]
    if num_devices < len(trained) + 1:
        trained = [[r for group in trained for r in group]]
    while len(trained) + len(rest) > num_devices and len(rest) > 1:
        rest[-2:] = [rest[-2] + rest[-1]]
    return [*trained, *rest]
