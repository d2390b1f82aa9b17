"""Moves of weights in a simulated session: what the plan moves is what is reported, over links and to shadows."""

from expect import refuses

import hfsdk as hf


def test_simulated_sessions_report_what_the_plan_moves_and_have_no_bytes_to_count():
    with hf.Session.simulated("1x4 A100-80GB") as session:
        actor = session.actor("llama-7b", train="tp4", rollout="tp2")
        session.place("colocate")
        actor.generate([[1, 2, 3]] * 4, max_new_tokens=4)
        assert actor.reshard_plan.bytes_moved > 0
        assert actor.last_reshard.measured_bytes == actor.reshard_plan.bytes_moved
        with refuses(hf.SimulatedValueError, "simulated"):
            actor.census()


def test_shadows_and_nodes_are_in_the_plan():
    with hf.Session.simulated("2x4 A100-80GB") as session:
        actor = session.actor("llama-7b", train="tp2 pp2", rollout="tp2")
        session.place("colocate")
        assert actor.reshard_plan.nodes == (0,) * 4 + (1,) * 4
        assert actor.reshard_plan.bytes_by_link()["network"] > 0
        session.place({"actor": 4, "actor.rollout": 2})
        plan = actor.reshard_plan
        assert (plan.apart, plan.num_ranks, plan.nodes) == (True, 6, (0,) * 4 + (1,) * 2)
        actor.generate([[1, 2, 3]] * 4, max_new_tokens=4).wait()
        assert actor.last_reshard.measured_bytes == plan.bytes_moved
        synced = [s for s in session.trace.spans if s.name == "sync"]
        assert {s.rank: s.attrs["bytes"] for s in synced} == {0: plan.bytes_received(4), 1: plan.bytes_received(5)}
        assert actor.version == 0
