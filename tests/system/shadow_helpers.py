"""What is looked at where weights travel to a shadow on another pool: the plan, what came, and what the engines then hold."""

import numpy as np
from system_helpers import OPENINGS, likelihood, state_of

import hfsdk as hf
from hfsdk.resharding.boxes import vllm_boxes
from hfsdk.session.parts import parts_of

PROMPTS = [text + " " for text in OPENINGS[:4]]
__all__ = ["PROMPTS", "at", "check_by_plan", "check_weights", "declared", "likelihood", "shadow_parameters", "trained_weights"]


def declared(session, train, rollout):
    return session.actor("tiny", train=train, rollout=rollout, cpu_weights="shared", optimizer=hf.AdamW(lr=1e-3), replace=True)


def shadow_parameters(session, ray, devices, shadow="actor.rollout"):
    """vLLM's parameters on every rank of a shadow: no handle leads to it."""

    def read(process):
        rollout = process._worker.roles[shadow].rollout
        return {name: parameter.detach().numpy().copy() for name, parameter in rollout.parameters().items()}

    workers = parts_of(session).client._controller._runtime.pools.devices
    return ray.get([workers[device].handle.__ray_call__.remote(read) for device in devices])


def trained_weights(actor):
    return {tensor: whole for (kind, tensor), whole in state_of(actor)[1].items() if kind == "weights"}


def at(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def check_weights(session, ray, actor, devices):
    """The engine on every one of the shadow's devices has the trained weights, bit for bit."""
    full, tp = trained_weights(actor), actor.layouts["rollout"].tp
    for rank, local in enumerate(shadow_parameters(session, ray, devices, f"{actor.name}.rollout")):
        for box in vllm_boxes(actor.spec, tp, rank % tp):
            part = local[box.local][at(box.local_start, box.size)]
            assert np.array_equal(part, full[box.tensor][at(box.start, box.size)]), (rank, box)
    return full


def check_by_plan(session, actor, trained, num_targets):
    """Span by span and rank by rank, what came is what was planned."""
    plan, report = actor.reshard_plan, actor.last_reshard
    assert report.plan == plan
    assert plan.apart
    assert report.ratio == 1.0
    assert report.measured_bytes == plan.bytes_moved > 0
    assert [rank.bytes_received for rank in report.ranks] == [plan.bytes_received(rank) for rank in range(plan.num_ranks)]
    assert [rank.bytes_sent for rank in report.ranks] == [plan.bytes_sent(rank) for rank in range(plan.num_ranks)]
    assert [list(rank.received_from) for rank in report.ranks] == plan.matrix.T.tolist()
    assert report.bytes_by_link() == {link: (count, count) for link, count in plan.bytes_by_link().items()}
    assert report.seconds > 0
    spans = [s for s in session.trace.spans if s.name == "sync"][-num_targets:]
    assert {s.rank: s.attrs["bytes"] for s in spans} == {r: plan.bytes_received(trained + r) for r in range(num_targets)}
    exports = [s for s in session.trace.spans if s.name == "export"][-trained:]
    assert {s.rank: s.attrs["bytes_sent"] for s in exports} == {r: plan.bytes_sent(r) for r in range(trained)}
    return sum(s.attrs["bytes"] for s in exports)
