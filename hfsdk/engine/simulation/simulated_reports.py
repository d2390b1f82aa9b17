"""What a simulated weight transition reports: the plan's bytes, and the seconds that were predicted for it."""

from __future__ import annotations

from hfsdk.core.roles import RoleSpec
from hfsdk.engine.calls.shadow_plan import plan_between
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import TransportReport


def transport_reports(
    role: RoleSpec, seconds: float | None, apart: tuple[RoleSpec, RoleSpec] | None
) -> tuple[TransportReport | None, ...]:
    """Return a report for every rank of an actor or of its shadow; ``None`` for each where nothing has moved yet.

    Every rank is said to take as long as the slowest, which is what is predicted.

    Args:
        role: the actor, or its shadow.
        seconds: of the transition, or of this role's side of it.
        apart: the trained role and its shadow, where the rollout is apart.
    """
    first = 0
    if seconds is None:
        return (None,)
    if apart is not None:
        plan = plan_between(*apart)
        first = plan.train.size if role.shadow_of else 0
        last = plan.num_ranks if role.shadow_of else plan.train.size
    else:
        assert role.learned is not None
        assert role.train is not None
        assert role.rollout is not None
        plan = ReshardPlan.between(role.learned, role.train, role.rollout, role.dtype, nodes=role.nodes or None)
        last = plan.num_ranks
    return tuple(_report(plan, rank, seconds) for rank in range(first, last))


def _report(plan: ReshardPlan, rank: int, seconds: float) -> TransportReport:
    received = tuple(int(count) if source != rank else 0 for source, count in enumerate(plan.matrix[:, rank]))
    return TransportReport(plan.bytes_sent(rank), sum(received), plan.bytes_copied(rank), 0, received, seconds)
