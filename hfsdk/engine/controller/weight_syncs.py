"""``WeightSyncs``: a trained role's weights on their way to its shadow on another pool, by the order of submission.

A call that a shadow carries out must have the weights as they are where it was submitted. They are taken out of the trained role by
a call of their own, once for however many calls use them; where they go straight from pool to pool, the shadow's lane is held free
for that call.
"""

from __future__ import annotations

from collections.abc import Callable

from hfsdk.core.arguments import ToShadow
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallCancelledError, DependencyError
from hfsdk.core.methods import EXPORT_WEIGHTS
from hfsdk.core.placement import Pool
from hfsdk.core.protocol import ONE_TO_ALL
from hfsdk.core.runtime import Runtime, ShadowReceiver, Weights
from hfsdk.engine.calls import messages as m
from hfsdk.engine.controller.call_queue import WAIT_S, ShutdownFlag
from hfsdk.engine.controller.records import CallRecord, LaneReservation, RoleRecord, WeightSync
from hfsdk.engine.controller.role_placement import RolePlacer


class WeightSyncs:
    """Brings trained weights to shadows. ``sync`` is called under the controller's lock, the rest on lanes.

    Args:
        runtime: carries calls out.
        homes: the roles and their pools.
        closing: whether the controller is closed.
        make_call: gives a message of a step its number.
        enqueue: puts a call on a lane.
    """

    def __init__(
        self,
        runtime: Runtime,
        homes: RolePlacer,
        closing: ShutdownFlag,
        make_call: Callable[[m.Submit, int], Call],
        enqueue: Callable[[CallRecord, str], None],
    ) -> None:
        self._runtime, self._homes, self._closing = runtime, homes, closing
        self._make_call, self._enqueue = make_call, enqueue

    def shadow_for(self, message: m.Submit) -> RoleRecord | None:
        """Return the shadow that carries a call out in place of the trained role it is submitted to."""
        ending = message.kind.shadow
        return self._homes.roles.get(f"{message.role}.{ending}") if ending else None

    def sync(self, role: RoleRecord, shadow: RoleRecord, phase: str, step: int) -> WeightSync:
        """Have the weights as they are at this point of the submission order; requested once, however many calls use them.

        The phase and the step are those of the first call that uses them.
        """
        last = role.sync
        if last is not None and last.version == role.changes and last.usable(shadow):
            return last
        assert self._homes.placement is not None
        name = role.spec.name
        request = m.Submit(name, EXPORT_WEIGHTS.name, phase, {}, (), 0, ONE_TO_ALL, ToShadow(shadow=shadow.spec), result="all")
        record = CallRecord(self._make_call(request, step), request)
        role.sync = record.sync = sync = WeightSync(role.changes, record, shadow.spec)
        giver, taker = self._homes.placement.pool_of(name), self._homes.placement.pool_of(shadow.spec.name)
        if self._runtime.goes_direct(giver, taker):
            sync.meeting = LaneReservation()
        self._enqueue(record, giver.name)
        if sync.meeting is not None:
            self._hold(shadow, taker, sync.meeting, record)
        return sync

    def _hold(self, shadow: RoleRecord, pool: Pool, meeting: LaneReservation, record: CallRecord) -> None:
        """Hold a shadow's lane for the call that gives it weights, from when it gets there until that call is over."""

        def hold(pool: Pool) -> None:
            meeting.pool = pool
            meeting.arrived.set()
            while not record.finished.wait(WAIT_S):
                self._closing.check()

        meeting.wait = self._homes.post_loaded(shadow, hold)
        meeting.over = self._homes.lanes[pool.name].last

    def taker(self, record: CallRecord, role: RoleRecord, sync: WeightSync, meeting: LaneReservation) -> ShadowReceiver:
        """Wait until the shadow's lane is held for a call that gives it weights; return who takes them.

        Raises:
            CallCancelledError: the call was cancelled meanwhile.
            HfsdkError: the shadow cannot be loaded.
        """
        while not meeting.arrived.wait(WAIT_S):
            if record.cancel_asked or self._closing.begun:
                raise CallCancelledError("cancelled before it started")
            # the lane went on without the shadow: its loading has failed, and wait raises the error
            if meeting.over.is_set() and not meeting.arrived.is_set():
                meeting.wait()
        assert meeting.pool is not None
        shadow = self._homes.roles.get(sync.shadow.name)
        if shadow is not None:
            shadow.synced = -1  # until it has all of them
        return ShadowReceiver(role.spec, sync.shadow, meeting.pool, sync.version, role.num_updates)

    @staticmethod
    def weights_for(shadow: RoleRecord, sync: WeightSync) -> Weights | None:
        """Return the weights a shadow must take over before its call; ``None`` where it has them."""
        if sync.call.error is not None:
            raise DependencyError(f"the weights for {shadow.spec.name} did not come: {sync.call.error}")
        return None if shadow.synced == sync.version else sync.weights

    def keep(self, role: RoleRecord, record: CallRecord, sync: WeightSync) -> None:
        """Settle a sync after a call: a transfer leaves the weights ready, or given; the shadow's own call lets them go."""
        if sync.meeting is not None and not role.spec.shadow_of:
            sync.taken, record.result = tuple(bundle for sent in record.result for bundle in sent), None
            shadow = self._homes.roles.get(sync.shadow.name)
            if shadow is not None:
                shadow.num_updates, shadow.synced = role.num_updates, sync.version
        elif role.spec.shadow_of:
            if sync.weights is not None:
                role.num_updates = sync.weights.num_updates
            role.synced, sync.weights = sync.version, None
        else:
            sync.weights = Weights(role.spec, tuple(bundle for sent in record.result for bundle in sent), role.num_updates)
            record.result = None
