"""``RolePlacer``: the roles and their pools, moves between them, and what roles come back with when their workers have ended.

A trained role's state is somewhere at every moment of a move, and whoever holds it may end::

    on its old pool  -->  exported: objects that the old workers own  -->  on its new pool
         |       |                     |                               |      |
         |       '-- on both, where it goes straight (``moves.py``)    '      |
         '------------- the worker ends: the state is gone, wherever it was --'
                                       |
           the newest of: a snapshot that still holds, the last checkpoint; else the initial weights

The loss is told once, as WorkerDiedError or CheckpointError that says what comes back and how many updates are lost; the next call
finds the role there.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from hfsdk.core.call_events import Listener
from hfsdk.core.errors import CallError, CheckpointError, HfsdkError, PlacementError, SessionClosedError, WorkerDiedError
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Runtime, StateGoneError, TransferBrokenError
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.queries import RoleStatus
from hfsdk.engine.controller.call_queue import CallQueue
from hfsdk.engine.controller.records import CallRecord, Ledger, RoleRecord, check_rollouts
from hfsdk.engine.controller.snapshots import SnapshotStore


class RolePlacer:
    """The place of every role, and its moves.

    ``place`` and ``remove`` are called under the controller's lock; the rest runs on lanes.

    Attributes:
        roles: every declared role, shadows included.
        placement: the present one; ``None`` before the first.
        open_pools: the open pools by name.
        lanes: the lanes by their pool's name.
    """

    def __init__(self, runtime: Runtime, ledger: Ledger, lane: Callable[[str], CallQueue], emit: Listener) -> None:
        self._runtime, self._ledger, self._lane, self._emit = runtime, ledger, lane, emit
        self.roles: dict[str, RoleRecord] = {}
        self.placement: Placement | None = None
        self.open_pools: dict[str, Pool] = {}
        self.lanes: dict[str, CallQueue] = {}
        self.keeping = SnapshotStore(runtime, self.roles, self.post_loaded)
        self._opening: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._loading: list[tuple[tuple[str, str], Callable[[], None]]] = []
        """Waits for the loads of the last place, in order, each with its role and, of a shadow, the role that it is one of."""
        self._failures: list[HfsdkError] = []
        """The errors of loads before these."""

    def role(self, name: str) -> RoleRecord:
        """Return a role.

        Raises:
            PlacementError: there is none of this name.
        """
        if name not in self.roles:
            raise PlacementError(f"no role {name!r}; the session has {', '.join(self.roles) or 'none'}")
        return self.roles[name]

    def drain(self, lane: str) -> None:
        """Wait until a lane has run what was put on it."""
        if lane in self.lanes:
            self.lanes[lane].post(lambda: None)()

    def before(self, pool: Pool) -> tuple[threading.Event, ...]:
        """Return what the next on a pool's lane has to wait for: all that is on lanes which share devices with it.

        Loads, copies and calls are collective: were two of them to reach common workers in another order on each, all would wait
        for each other for ever. Asked for and put under the controller's lock, so that no two wait for each other.
        """
        others = self.placement.overlapping(pool) if self.placement is not None else []
        return tuple(self.lanes[other.name].last for other in others if other.name in self.lanes)

    def _post(self, pool: Pool, function: Callable[[], None]) -> Callable[[], None]:
        return self._lane(pool.name).post(function, self.before(pool))

    # -- declaring and placing

    def declare(self, spec: RoleSpec) -> bool:
        """Add a role, or replace the one of this name; return whether anything changed."""
        old = self.roles.get(spec.name)
        if old is not None and old.spec == spec:
            return False
        if old is not None:
            self._unload(old)
        self.roles[spec.name] = RoleRecord(spec)
        return True

    def remove(self, name: str) -> None:
        """Free a role and its shadows, and forget them."""
        record = self.role(name)
        for shadow in [r for r in self.roles.values() if r.spec.shadow_of == name]:
            self._unload(shadow)
            del self.roles[shadow.spec.name]
        self._unload(record)
        del self.roles[name]

    def _unload(self, record: RoleRecord) -> None:
        if record.loaded and record.pool is not None:
            self.drain(record.pool.name)
            self._runtime.release(record.spec.name, record.pool)

    def place(self, message: m.PlaceRoles) -> None:
        """Drain what runs, take the state of roles that move, take pools apart; loading goes on on the lanes.

        What is lost on the way is told by :meth:`await_loads`: the roles come to their new places all the same.
        """
        placement, specs = message.placement, {spec.name: spec for spec in message.roles}
        check_rollouts(placement, message.roles)
        for lane in list(self.lanes):
            self.drain(lane)
        self._loading, self._failures = [], []
        crossing = {} if message.fresh else self._crossing(placement, specs)
        for name, record in [item for item in self.roles.items() if item[0] not in crossing]:
            if record.loaded and record.pool is not None and not self._stays(record, placement, specs.get(name)):
                self._take_out(record, record.pool, fresh=message.fresh)
            elif message.fresh and not record.loaded:
                self._start_again(record)
            if record.spec.shadow_of and name not in specs:
                del self.roles[name]
        sources = self._close_old(placement, set(crossing.values()))
        for name, spec in specs.items():
            self.roles.setdefault(name, RoleRecord(spec)).spec = spec
        self.placement = placement
        self._cross(crossing, sources)
        homes = {name: placement.pool_of(name) for name in specs}
        for name in sorted(homes, key=lambda name: bool(homes[name].within)):  # a part's workers are those of the whole
            self._loading.append(((name, specs[name].shadow_of), self._post(homes[name], self._loader(name))))

    def await_loads(self, role: str = "") -> None:
        """Wait until the roles of the last place are loaded, and raise what was lost.

        Raises:
            WorkerDiedError: a worker ended meanwhile; says what every role that lived there, or was on its way, comes back with.
            HfsdkError: ``role``, what generates for it or, without one, any role could not be loaded; its next call tries again.
        """
        while self._loading:
            names, wait = self._loading[0]
            try:
                wait()
            except (WorkerDiedError, CheckpointError, SessionClosedError) as error:  # told once, to whoever is there
                self._failures.append(error)
            except HfsdkError as error:
                if not role or role in names:
                    self._failures.append(error)
            self._loading.pop(0)  # only now: whoever is interrupted can wait again
        failures, self._failures = self._failures, []
        died = [error for error in failures if isinstance(error, WorkerDiedError)]
        if len(died) == len(failures) > 1:
            texts = dict.fromkeys(error.message for error in died)
            raise WorkerDiedError(" ".join(texts), **died[0].fields())
        others = [error for error in failures if error not in died]
        if failures:
            raise (others or died)[0]

    @staticmethod
    def _stays(record: RoleRecord, placement: Placement, spec: RoleSpec | None) -> bool:
        return spec is not None and spec == record.spec and placement.pool_of(spec.name) == record.pool

    # -- straight from pool to pool

    def _crossing(self, placement: Placement, specs: Mapping[str, RoleSpec]) -> dict[str, Pool]:
        """Return the roles whose state can go straight to where they shall live, while both pools are open, and their pools."""
        moving = {
            name: (record.pool, placement.pool_of(name)) for name, record in self.roles.items()
            if name in specs and record.spec.trainable and record.loaded and record.pool is not None
            and not self._stays(record, placement, specs[name])
        }  # fmt: skip
        straight = {
            name: (old, new) for name, (old, new) in moving.items()
            if not old.within and not new.within and self._runtime.goes_direct(old, new)
        }  # fmt: skip
        while True:  # whose new pool needs workers of an old one, which another state has yet to leave, goes the other way
            busy = {device for old, _ in straight.values() for device in old.devices}
            blocked = [
                name for name, (_, new) in straight.items()
                if self.open_pools.get(new.name) != new and not busy.isdisjoint(new.devices)
            ]  # fmt: skip
            if not blocked:
                return {name: old for name, (old, _) in straight.items()}
            for name in blocked:
                del straight[name]

    def _close_old(self, placement: Placement, sources: Container[Pool]) -> dict[Pool, Pool]:
        """Close the pools that are not in a placement, but for those that roles have yet to leave; return these, set aside."""
        wanted = {pool.name: pool for pool in placement.pools}
        gone = [pool for name, pool in self.open_pools.items() if wanted.get(name) != pool]
        aside = {pool: self._set_aside(pool) for pool in gone if pool in sources}
        for pool in sorted(gone, key=lambda pool: not pool.within):  # parts before the wholes
            if pool not in aside:
                self._close(pool)
        return aside

    def _set_aside(self, pool: Pool) -> Pool:
        """Free the name of an open pool, from which roles have yet to leave, for one of the new placement."""
        aside = replace(pool, name=f"{pool.name} (before)")
        self._runtime.rename_pool(pool.name, aside.name)
        self.open_pools[aside.name] = aside
        del self.open_pools[pool.name]
        for record in self.roles.values():
            if record.pool == pool:
                record.pool = aside
        return aside

    def _cross(self, crossing: Mapping[str, Pool], aside: Mapping[Pool, Pool]) -> None:
        """Move roles from pools, of which some were set aside, to those of the placement; close what was set aside."""
        for name, pool in crossing.items():
            record = self.roles[name]
            if record.loaded:  # else its pool was lost when another role left it
                self._cross_one(record, aside.get(pool, pool))
        for pool in aside.values():
            if pool.name in self.open_pools:
                self._close(pool)

    def _cross_one(self, record: RoleRecord, old: Pool) -> None:
        """Have a role's state go straight to its new pool; where that fails, take it out of the old one."""
        assert self.placement is not None
        new = self.placement.pool_of(record.spec.name)
        name = record.spec.name
        self._emit({"type": "role_loading", "role": name, "pool": new.name})
        try:
            self._open(new)
            self._runtime.load(record.spec, new, source=old)
        except TransferBrokenError as broken:
            self._failures += [self.pool_lost(pool, error) for pool, error in broken.lost]
        except WorkerDiedError as error:
            self._failures.append(self.pool_lost(new, error))
        except HfsdkError:  # the object store is still a way
            if new.name in self.open_pools:
                self._runtime.release(name, new)
        else:
            record.pool, record.synced, record.changes = new, -1, record.changes + 1
            self._runtime.release(name, old)
            self._emit({"type": "role_loaded", "role": name, "pool": new.name})
            return
        if record.loaded:
            self._take_out(record, old, fresh=False)

    def _close(self, pool: Pool) -> None:
        del self.open_pools[pool.name]
        self._runtime.close_pool(pool.name)

    # -- through the object store

    def _take_out(self, record: RoleRecord, pool: Pool, *, fresh: bool) -> None:
        try:
            self._lane(pool.name).post(self._taker(record, pool, fresh=fresh))()
        except WorkerDiedError as error:
            self._failures.append(error)

    def _taker(self, record: RoleRecord, pool: Pool, *, fresh: bool) -> Callable[[], None]:
        """Return the function that frees a role where it lives and keeps its state for its next place; for its lane."""

        def take_out() -> None:
            name = record.spec.name
            if record.spec.trainable and not fresh:
                try:
                    record.state = replace(self._runtime.export(name, pool), devices=pool.devices)
                except WorkerDiedError as error:
                    raise self.pool_lost(pool, error) from None
            record.loaded, record.pool, record.synced = False, None, -1
            record.changes += 1
            if fresh:
                self._start_again(record)
            self._runtime.release(name, pool)

        return take_out

    def _start_again(self, record: RoleRecord) -> None:
        record.num_updates, record.restore, record.restore_kept, record.state = 0, "", None, None
        record.checkpoint, record.checkpoint_updates, record.checkpoint_version = "", 0, None
        self.keeping.changed(record, 0, apart=True)

    # -- loading

    def _loader(self, role: str) -> Callable[[], None]:
        def load() -> None:
            self.ensure_loaded(self.role(role))

        return load

    def post_loaded(self, record: RoleRecord, function: Callable[[Pool], None]) -> Callable[[], None]:
        """Run a function on a role's lane, after the role is loaded where it is not; return what waits for it."""
        if self.placement is None:
            raise PlacementError("no placement yet; call session.place('colocate')")

        def run() -> None:
            pool = self.ensure_loaded(record)
            try:
                function(pool)
            except WorkerDiedError as error:
                raise self.pool_lost(pool, error) from None

        return self._post(self.placement.pool_of(record.spec.name), run)

    def ensure_loaded(self, record: RoleRecord) -> Pool:
        """Open the role's pool and load the role, if that has not happened; runs on the pool's lane.

        Raises:
            WorkerDiedError: a worker ended meanwhile, or with it the state that was to be loaded; says what comes back.
            CheckpointError: the checkpoint that was to be loaded cannot be; says what comes back instead.
        """
        if self.placement is None:
            raise PlacementError("no placement yet; call session.place('colocate')")
        pool = self.placement.pool_of(record.spec.name)
        self._open(pool)
        if record.loaded:
            return pool
        name = record.spec.name
        self._emit({"type": "role_loading", "role": name, "pool": pool.name})
        record.pool = pool
        try:
            self._load(record, pool)
        except WorkerDiedError as error:
            raise self.pool_lost(pool, error) from None
        except StateGoneError as gone:
            record.pool = None
            words = self.come_back(record)
            raise WorkerDiedError(f"{gone} At the next call {words}.", role=name, method="load") from None
        except CheckpointError as error:  # told once; the next call goes on without it
            record.pool, record.checkpoint, record.checkpoint_updates, record.checkpoint_version = None, "", 0, None
            raise CheckpointError(f"{error} At the next call {self.come_back(record)}.") from error
        except (CallError, SessionClosedError):  # which say whose they are
            raise
        except HfsdkError as error:
            raise type(error)(f"{name} cannot be loaded: {error}") from None
        record.loaded, record.restore, record.restore_kept, record.state = True, "", None, None
        self._emit({"type": "role_loaded", "role": name, "pool": pool.name})
        return pool

    def _load(self, record: RoleRecord, pool: Pool) -> None:
        """Load a role with what it has: its state on the way, a snapshot's, a checkpoint, or the initial weights."""
        state = record.restore_kept
        if state is not None and not self.keeping.has(state):
            raise StateGoneError(f"the snapshot that {record.spec.name} was to come back with was let go.")
        if state is not None and not self._runtime.holds(state):
            raise StateGoneError(f"what {record.spec.name} was to come back with, of a snapshot, is gone with a worker.")
        # built first: a snapshot's state goes into a role that is there
        self._runtime.load(replace(record.spec, restore=record.restore), pool, record.state)
        if state is None:
            return
        try:
            self._runtime.restore(record.spec, pool, state)
        except CheckpointError as error:
            self._runtime.release(record.spec.name, pool)
            raise StateGoneError(f"{error}.") from None
        record.kept = state

    def _open(self, pool: Pool) -> None:
        with self._opening[pool.within or pool.name]:
            whole = next((p for p in self.placement.pools if p.name == pool.within), None) if self.placement else None
            for part in (whole, pool):
                if part is not None and part.name not in self.open_pools:
                    self._runtime.open_pool(part)
                    self.open_pools[part.name] = part

    # -- when workers end

    def pool_lost(self, pool: Pool, error: WorkerDiedError, record: CallRecord | None = None) -> WorkerDiedError:
        """A worker ended, during the call ``record``: close its pool, so that the next call opens it again.

        Returns the error that says what is lost.
        """
        # a part and the whole share their workers: with one of them all are closed, parts first
        family = [p for p in self.open_pools.values() if (pool.within or pool.name) in (p.name, p.within)] or [pool]
        for member in sorted(family, key=lambda member: not member.within):
            self._runtime.close_pool(member.name, kill=True)
            self.open_pools.pop(member.name, None)
        dead = {device for member in family for device in member.devices}
        lost = []
        for role in list(self.roles.values()):
            lived = role.pool in family
            if lived:
                role.left()
            carried = role.state is not None and bool(dead.intersection(role.state.devices))
            if role.kept is not None and dead.intersection(role.kept.devices):
                role.kept = None
            if role.spec.trainable and (carried or (lived and role.state is None)):
                lost.append(self.come_back(role))
        for other in self._ledger:  # columns live where they were written, whatever pool that was
            parts = other.stored.parts if other.pool is not None and other.stored is not None else ()
            if any(p.rank is not None and other.pool and other.pool.devices[p.rank] in dead for p in parts):
                other.state, other.root = "lost", record
        words = "; ".join(lost) or "no trained role lived there"
        return WorkerDiedError(f"{error.message} The pool is started again at the next call; {words}.", **error.fields())

    def dead_pools(self) -> list[Pool]:
        """Return the open pools of which a worker has ended or hangs; while nothing runs, and without the controller's lock."""
        return [pool for pool in list(self.open_pools.values()) if not pool.within and not self._runtime.devices(pool)]

    def close_dead(self, pools: Sequence[Pool]) -> None:
        """Note the loss of pools; under the controller's lock."""
        for pool in pools:
            if self.open_pools.get(pool.name) == pool:
                self.pool_lost(pool, WorkerDiedError(f"a worker of pool {pool.name!r} ended or hangs."))

    def come_back(self, record: RoleRecord) -> str:
        """A role's state is gone: choose what it comes back with at the next call; return that in words."""
        state = self.keeping.newest(record)
        from_checkpoint = record.checkpoint_updates if record.checkpoint else 0
        # after a rewind the last checkpoint may be of another branch than the one that is trained now
        behind = record.checkpoint_version is None or self.keeping.head(record).made_of(record.checkpoint_version)
        record.state, record.restore, record.restore_kept = None, record.checkpoint, None
        back, updates = (f"checkpoint {record.checkpoint}" if record.checkpoint else "its initial weights"), from_checkpoint
        if state is not None and (state.num_updates >= from_checkpoint or not behind):
            record.restore, record.restore_kept, behind = "", state, True
            back, updates = f"what a snapshot kept of it at update {state.num_updates}", state.num_updates
        missing = record.num_updates - updates
        lost = f"{missing} update{'s' * (missing != 1)} lost"
        record.num_updates = updates
        self.keeping.changed(record, updates, apart=not behind)
        other = f"of another branch, at update {updates}; what was trained on this one is lost"
        return f"{record.spec.name} comes back with {back} ({lost if behind else other})"

    def recover(self, message: m.Recover) -> None:
        """Note a role's last checkpoint."""
        record = self.role(message.role)
        record.checkpoint, record.checkpoint_updates = message.folder, message.num_updates
        if record.spec.trainable:  # a save that ended after a rewind has more updates than what it would be behind
            head = self.keeping.head(record)
            behind = message.num_updates <= head.num_updates
            record.checkpoint_version = head if behind else self.keeping.lineage.first(record.spec.name)

    @property
    def states(self) -> Mapping[str, RoleStatus]:
        """The status of every role, by name."""
        records = list(self.roles.items())
        return {name: RoleStatus(r.spec, "loaded" if r.loaded else "declared", r.weights_updates) for name, r in records}
