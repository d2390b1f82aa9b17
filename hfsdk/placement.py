"""Which devices a role lives on: ``Pool`` and ``Placement`` (HybridFlow's resource pools, section 4.1).

Roles in one pool share its devices and run one after the other; disjoint pools run at the same time. Pools never overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfsdk.errors import PlacementError

TRAINED = ("actor", "critic")
"""Roles that HybridFlow's `split` puts on one side each, with the frozen model that resembles them."""


@dataclass(frozen=True)
class Pool:
    """A named set of devices, in rank order."""

    name: str
    devices: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of devices, which is the number of ranks of every role in the pool."""
        return len(self.devices)


@dataclass(frozen=True)
class Placement:
    """Pools and who lives in them."""

    pools: tuple[Pool, ...]
    roles: Mapping[str, str]
    """Role name -> pool name."""

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
            f"the placement has no pool for role {role!r}; it places {dict(self.roles)}. "
            "Name every role, e.g. session.place('colocate')."
        )

    @classmethod
    def of(cls, what: str | Mapping[str, int] | Placement, roles: Sequence[str], num_devices: int) -> Placement:
        """Build a placement from a preset's name or from ``{"actor reference": 2, "critic reward": 2}``.

        Presets (HybridFlow, section 8.3): ``colocate`` (all roles on all devices), ``split`` (actor and reference on one
        half, critic and reward on the other), ``standalone`` (every role on devices of its own, evenly).

        Raises:
            PlacementError: an unknown preset, a forgotten or unknown role, or more devices than there are.
        """
        if isinstance(what, Placement):
            what.check(roles, num_devices)
            return what
        if isinstance(what, Mapping):
            placement = cls._from_counts(what)
        elif what == "colocate":
            placement = cls((Pool("all", tuple(range(num_devices))),), dict.fromkeys(roles, "all"))
        elif what == "split":
            first = [r for r in roles if r in ("actor", "reference")]
            placement = cls._evenly([first, [r for r in roles if r not in first]], num_devices)
        elif what == "standalone":
            placement = cls._evenly([[r] for r in roles], num_devices)
        else:
            raise PlacementError(
                f"no placement {what!r}; there are 'colocate', 'split', 'standalone', "
                "or a dict such as {'actor reference': 2, 'critic': 2}"
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
                    raise PlacementError(f"role {role!r} stands in two pools of {dict(counts)}; name it once")
                roles[role] = pool.name
        return cls(tuple(pools), roles)

    @classmethod
    def _evenly(cls, groups: Sequence[Sequence[str]], num_devices: int) -> Placement:
        groups = [g for g in groups if g]
        if num_devices < len(groups):
            raise PlacementError(
                f"{len(groups)} pools ({', '.join('+'.join(g) for g in groups)}) need at least as many devices; "
                f"there are {num_devices}. Use 'colocate' or more devices."
            )
        share, extra = divmod(num_devices, len(groups))
        counts = {" ".join(g): share + (i < extra) for i, g in enumerate(groups)}
        return cls._from_counts(counts)

    def check(self, roles: Sequence[str], num_devices: int) -> None:
        """Check that pools are disjoint, exist, and hold every role.

        Raises:
            PlacementError: with what was asked, what exists and what to do.
        """
        taken: dict[int, str] = {}
        for pool in self.pools:
            for device in pool.devices:
                if device in taken:
                    raise PlacementError(
                        f"device {device} is in pools {taken[device]!r} and {pool.name!r}; pools may not overlap"
                    )
                if not 0 <= device < num_devices:
                    raise PlacementError(
                        f"pool {pool.name!r} asks for device {device}; the session has {num_devices} devices"
                    )
                taken[device] = pool.name
            if not pool.devices:
                raise PlacementError(f"pool {pool.name!r} has no device; give it at least one")
        missing = [r for r in roles if r not in self.roles]
        if missing:
            raise PlacementError(
                f"the placement forgets {', '.join(missing)}; it places {', '.join(self.roles)}. Name every role."
            )
        unknown = [r for r in self.roles if r not in roles]
        if unknown:
            raise PlacementError(
                f"the placement names {', '.join(unknown)}, which the session does not have; roles: {', '.join(roles)}"
            )
