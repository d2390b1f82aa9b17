"""Sizes of rollouts on GPUs: from the memory that is left while they generate, and never at the price of fitting."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hfsdk as hf
from hfsdk.core.cluster import DEVICES, ClusterSpec
from hfsdk.core.errors import DeviceMemoryError
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement
from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions
from hfsdk.core.rollout_sizes import LEAST_SEQS, MAX_SHARE, CacheUnits, choose_sizes, least_cache_bytes, most_seqs
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.memory import GPU_PROCESS_BYTES, check_fits, device_bytes, role_bytes
from hfsdk.planner.perf.setup import Setup
from hfsdk.planner.perf.sizing import sized, sizes_alone, with_least
from hfsdk.planner.search.search import FROM_MEMORY, Search
from hfsdk.session.parts import parts_of

LLAMA_8B = ModelSpec.preset("llama3-8b")
H100 = ClusterSpec.parse("1x8 H100")
SHARDED = AdamW(distributed=True)
UNITS = CacheUnits.of(LLAMA_8B, RolloutOptions(), 1, "bf16")


def actor(train="tp8", rollout="tp1", model=LLAMA_8B, name="actor", **more):
    more = {"optimizer": SHARDED, "recompute": "full", "dtype": "bf16", **more}
    return RoleSpec(
        name=name, kind="actor", model=model, train=Layout.parse(train).fill(8), rollout=Layout.parse(rollout).fill(8), **more,
    )  # fmt: skip


def frozen(name="reference", train="tp8", **more):
    return RoleSpec(name=name, kind="reference", model=LLAMA_8B, train=Layout.parse(train).fill(8), dtype="bf16", **more)


def shadow_of(role):
    return replace(role, name=f"{role.name}.rollout", optimizer=None, train=None, shadow_of=role.name)


def colocated(roles, cluster=H100):
    placement = Placement.of("colocate", ["actor"], cluster.num_devices)
    return replace(placement, roles=dict.fromkeys([role.name for role in roles], "all"))


def on(roles, cluster=H100):
    """Size roles that share all devices; the sizes by role."""
    return {role.name: role.rollout_options for role in sized(roles, colocated(roles, cluster), cluster)}


def device_of(roles, cluster=H100):
    return device_bytes(sized(roles, colocated(roles, cluster), cluster), colocated(roles, cluster), cluster)[0]


def generating(device, name="actor"):
    """Bytes on a device while a rollout generates."""
    return device.process + sum(e.resident for e in device.roles.values()) + device.roles[name].asleep


# -- the pure choice


def test_the_cache_is_what_is_free_less_what_vllm_works_with():
    free = 50 * 10**9
    made = choose_sizes(RolloutOptions(), LLAMA_8B, DEVICES["H100"], tp=1, dtype="bf16", free=free, at_most=free)
    works = 4096 * (4 * 4096 + 3 * 14336) * 2 + made.max_num_seqs * 4 * 4 * LLAMA_8B.vocab_size
    assert made.kv_cache_bytes <= free - works
    assert made.max_num_seqs == (made.kv_cache_bytes - 2 * UNITS.block) // UNITS.sequence > LEAST_SEQS
    one_more = works + 4 * 4 * LLAMA_8B.vocab_size + UNITS.holding(made.max_num_seqs + 1)
    assert one_more > free


def test_a_rank_of_more_holds_more_sequences_and_heads_are_replicated_beyond_their_number():
    one, *more = (
        choose_sizes(RolloutOptions(), LLAMA_8B, DEVICES["H100"], tp=tp, dtype="bf16", free=30 * 10**9, at_most=0)
        for tp in (1, 2, 4, 8, 16)
    )
    for tp, many in zip((2, 4, 8, 16), more, strict=True):
        assert many.max_num_seqs == pytest.approx(min(tp, LLAMA_8B.num_kv_heads) * one.max_num_seqs, rel=0.15), tp


def test_what_is_given_wins():
    def made(**given):
        free = 50 * 10**9
        return choose_sizes(RolloutOptions(**given), LLAMA_8B, DEVICES["H100"], tp=1, dtype="bf16", free=free, at_most=free)

    assert made(max_num_seqs=7, kv_cache_bytes=123) == RolloutOptions(max_num_seqs=7, kv_cache_bytes=123)
    assert made(max_num_seqs=7) == RolloutOptions(max_num_seqs=7, kv_cache_bytes=UNITS.holding(7))
    assert made(max_num_seqs=5000).max_num_seqs == 5000
    assert made(max_num_seqs=500).kv_cache_bytes < 50 * 10**9 < UNITS.holding(500)
    assert made(kv_cache_bytes=UNITS.holding(100)) == RolloutOptions(max_num_seqs=100, kv_cache_bytes=UNITS.holding(100))
    assert made(kv_cache_bytes=10**9) == RolloutOptions(max_num_seqs=LEAST_SEQS, kv_cache_bytes=10**9)
    assert made(max_model_len=8192).max_model_len == 8192
    assert made(max_model_len=512).max_num_seqs > made().max_num_seqs


def test_with_nothing_free_there_is_room_for_one_longest_sequence():
    least = least_cache_bytes(LLAMA_8B, RolloutOptions(), 1, "bf16")
    for free in (-(10**10), 0, 10**8, UNITS.sequence):
        made = choose_sizes(RolloutOptions(), LLAMA_8B, DEVICES["H100"], tp=1, dtype="bf16", free=free, at_most=free)
        assert made == RolloutOptions(max_num_seqs=LEAST_SEQS, kv_cache_bytes=least), free
    assert least == UNITS.sequence + 2 * UNITS.block


def test_no_margin_is_kept_at_the_price_of_8_gb():
    """What a rollout had before sizes came from memory it has still, where the plan has room for it."""

    def made(at_most, **given):
        return choose_sizes(RolloutOptions(**given), LLAMA_8B, DEVICES["H100"], tp=1, dtype="bf16", free=10**9, at_most=at_most)

    usual = 8 * 2**30 + 2 * UNITS.block
    assert made(20 * 10**9) == RolloutOptions(max_num_seqs=LEAST_SEQS, kv_cache_bytes=usual)
    assert made(5 * 10**9).kv_cache_bytes == 5 * 10**9
    assert made(20 * 10**9, max_num_seqs=4).kv_cache_bytes == UNITS.holding(4)


def test_no_more_sequences_than_vllms_own_default_nor_cache_than_they_fill():
    small = ModelSpec.preset("qwen2.5-0.5b")
    sequence = CacheUnits.of(small, RolloutOptions(), 2, "bf16")
    for name, most in (("H100", 1024), ("H200", 1024), ("A100-80GB", 256)):
        assert most_seqs(DEVICES[name]) == most
        made = choose_sizes(RolloutOptions(), small, DEVICES[name], tp=2, dtype="bf16", free=70 * 10**9, at_most=70 * 10**9)
        assert made == RolloutOptions(max_num_seqs=most, kv_cache_bytes=sequence.holding(most))
    assert most_seqs(replace(DEVICES["H100"], name="L4", memory_bytes=24 * 10**9)) == 256


# -- where it is placed


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_8b_alone_on_h100s_gets_most_of_the_memory(tp):
    role = actor(rollout=f"tp{tp}")
    made = on([role])["actor"]
    held = role_bytes(role, 8)
    left = int(MAX_SHARE * 80e9) - GPU_PROCESS_BYTES - held.resident - held.rollout_weights
    works = left - made.kv_cache_bytes
    assert 0 < works < 3.5e9, "what vLLM works with"
    assert made.max_num_seqs > 2 * LEAST_SEQS
    assert generating(device_of([role])) + works == pytest.approx(MAX_SHARE * 80e9, rel=1e-6)


def test_beside_a_trainer_that_sleeps_only_what_stays_is_missed():
    """A reference in the same memory costs its weights; offloaded it costs nothing, and so do the actor's own masters."""
    alone, beside = on([actor()])["actor"], on([actor(), frozen(train="tp1")])["actor"]
    weights = role_bytes(frozen(train="tp1"), 8).weights
    assert alone.kv_cache_bytes - beside.kv_cache_bytes == pytest.approx(weights, rel=0.05)
    assert on([actor(), frozen(train="tp1", offload=True)])["actor"] == alone
    assert on([actor(offload=True)])["actor"].kv_cache_bytes > alone.kv_cache_bytes


def test_passes_of_training_take_nothing_from_a_rollout_that_sleeps():
    busy = actor(recompute="", micro_batch_tokens=8192)
    assert role_bytes(busy, 8).passes > 2 * role_bytes(actor(), 8).passes
    assert on([busy]) == on([actor()])


def test_a_rollout_that_never_sleeps_leaves_room_for_the_others_passes():
    generates = shadow_of(actor())
    reward = frozen(name="reward", micro_batch_tokens=16_384)
    assert role_bytes(reward, 8).passes > 10**9
    alone, beside = (on(roles)["actor.rollout"] for roles in ([generates], [generates, reward]))
    held = role_bytes(reward, 8)
    assert alone.kv_cache_bytes - beside.kv_cache_bytes == pytest.approx(held.resident + held.passes, rel=0.05)
    device = device_of([generates, reward])
    assert device.asked < MAX_SHARE * device.exists


def test_two_rollouts_that_are_awake_share_what_is_left():
    roles = [actor(name="actor", rollout="tp2"), actor(name="other", rollout="tp2")]
    made = on(roles)
    assert made["actor"] == made["other"]
    device = device_of(roles)
    assert {e.asleep for e in device.roles.values()} == {0}
    assert device.asked < MAX_SHARE * device.exists < device.asked + 8e9
    given = [roles[0], replace(roles[1], rollout_options=RolloutOptions(max_num_seqs=64, kv_cache_bytes=10**9))]
    assert on(given)["actor"].kv_cache_bytes > 1.5 * made["actor"].kv_cache_bytes


def test_one_that_sleeps_and_one_that_does_not_share_while_the_first_generates():
    roles = [actor(), replace(shadow_of(actor()), name="other.rollout", shadow_of="other")]
    made = on(roles)
    assert {o.kv_cache_bytes > 10**9 for o in made.values()} == {True}
    device = device_of(roles)
    assert device.asked < MAX_SHARE * device.exists < device.asked + 12e9


def test_processors_keep_64_sequences_and_their_small_cache():
    cluster = ClusterSpec.parse("1x8 cpu").with_memory(500 * 10**9)
    assert on([actor()], cluster)["actor"] == RolloutOptions(max_num_seqs=64)
    before, after = (
        device_bytes(roles, colocated([actor()]), cluster) for roles in ([actor()], sized([actor()], colocated([actor()]), cluster))
    )
    assert before == after
    where = Setup.of(actor(), cluster, range(8))
    assert (where.max_num_seqs, where.kv_cache_bytes) == (64, 256 * 2**20 + 2 * UNITS.block), "what the engine is told to take"


def test_what_was_given_is_placed():
    given = RolloutOptions(max_num_seqs=48, kv_cache_bytes=3 * 10**9)
    assert on([actor(rollout_options=given)])["actor"] == given
    roles = [replace(role, rollout_options=given) if role.rollout else role for role in (actor(), frozen())]
    assert sized(roles, colocated(roles), H100) == roles


def test_sizes_that_were_chosen_stay_when_they_are_chosen_again():
    roles = [actor(), frozen()]
    once = sized(roles, colocated(roles), H100)
    assert sized(once, colocated(roles), H100) == once


def test_a_full_device_gets_one_longest_sequence_and_is_not_refused():
    """What fits with the least cache fits: the margin and vLLM's working bytes never make a placement refused."""
    roles = [actor(), frozen()]
    least = least_cache_bytes(LLAMA_8B, RolloutOptions(), 1, "bf16")
    asked = device_bytes(map(with_least, roles), colocated(roles), H100)[0].asked
    for extra in (0, 10**6, 10**9, 5 * 10**9, 20 * 10**9, 40 * 10**9):
        cluster = H100.with_memory(asked + extra)
        made = sized(roles, colocated(roles), cluster)
        check_fits(made, colocated(roles), cluster)
        cache = made[0].rollout_options.kv_cache_bytes
        assert cache >= least
        assert extra > 5 * 10**9 or cache == least + extra
        assert extra < 20 * 10**9 or cache > 10**10
    with pytest.raises(DeviceMemoryError):
        check_fits(sized(roles, colocated(roles), H100.with_memory(asked - 1)), colocated(roles), H100.with_memory(asked - 1))


def test_of_two_that_share_neither_is_driven_out_by_the_other():
    """Longer sequences need more at least; what is over is divided, not what there is."""
    longer = replace(actor(name="other", rollout="tp1"), rollout_options=RolloutOptions(max_model_len=8192))
    roles = [actor(rollout="tp8"), longer]
    asked = device_bytes(map(with_least, roles), colocated(roles), H100)[0].asked
    for extra in (0, 10**8, 10**9, 8 * 10**9, 16 * 10**9):
        cluster = H100.with_memory(asked + extra)
        check_fits(sized(roles, colocated(roles), cluster), colocated(roles), cluster)


def test_the_fullest_device_of_a_pool_decides():
    cluster = ClusterSpec.parse("1x4 H100 + 1x4 A100-80GB")
    reward = replace(frozen(name="reward"), train=Layout(dp=4))
    placement = Placement.of({"actor": 1.0, "reward": 0.5}, ["actor", "reward"], 8)
    made = sized([actor(), reward], placement, cluster)[0].rollout_options
    whole = sized([actor()], colocated([actor()]), ClusterSpec.parse("1x8 A100-80GB"))[0].rollout_options
    assert made.kv_cache_bytes < whole.kv_cache_bytes
    assert made.max_num_seqs <= 256


def test_a_role_that_nobody_has_placed_is_predicted_as_if_alone():
    role = actor()
    where = Setup.of(role, H100, range(8))
    placed = on([role])["actor"]
    assert (where.max_num_seqs, where.kv_cache_bytes) == (placed.max_num_seqs, placed.kv_cache_bytes)
    assert sizes_alone(frozen(), role_bytes(frozen(), 8), [H100.devices[0]]) == RolloutOptions()


# -- in a session


def ppo_session(cluster="1x8 H100", **options):
    session = hf.Session.simulated(cluster)
    both = {"dtype": "bf16", "optimizer": SHARDED, "recompute": "full", "offload": True}
    role = session.actor("llama3-8b", train="tp8", rollout="tp1", **both, **options)
    session.critic("llama3-8b", train="tp8", **both)
    session.reference(role, offload=True)
    session.reward("llama3-8b", layout="tp8", dtype="bf16")
    return session, role


def test_a_placed_role_its_memory_picture_and_its_prediction_have_the_same_sizes():
    session, role = ppo_session()
    session.place("colocate")
    options = role.role.rollout_options
    assert options.max_num_seqs > LEAST_SEQS
    assert options.kv_cache_bytes > 8 * 2**30
    prompts = session.batch(prompt=[[1] * 1024] * 2048)
    role.generate(prompts, max_new_tokens=1024, ignore_eos=True).wait()
    generated = session.memory.to_pandas().query("call == 'actor.generate'")
    assert set(generated.kv_cache_bytes) == {options.kv_cache_bytes}
    assert {d["planned"]["asked"] for d in session.memory.view()["devices"]} == {device_asked(session)}
    took, predicted = session.trace.snapshot(), session.predict()
    assert predicted.duration_s == pytest.approx(took.duration_s, rel=1e-6)
    narrow, slower = ppo_session(rollout_options=hf.RolloutOptions(max_num_seqs=64, kv_cache_bytes=8 * 2**30))
    narrow.place("colocate")
    slower.generate(narrow.batch(prompt=[[1] * 1024] * 2048), max_new_tokens=1024, ignore_eos=True).wait()
    assert took.duration_s < 0.8 * narrow.trace.snapshot().duration_s


def device_asked(session):
    return device_bytes(parts_of(session).deployment.specs.values(), parts_of(session).deployment.placement, session.cluster)[
        0
    ].asked


def test_an_actor_with_a_shadow_shows_the_shadows_sizes():
    session, role = ppo_session("2x8 H100")
    session.place({"actor critic reference reward": 8, "actor.rollout": 8})
    alone = role.role.rollout_options
    assert alone == parts_of(session).deployment.specs["actor.rollout"].rollout_options
    assert parts_of(session).deployment.specs["actor"].rollout is None
    session.place("colocate")
    assert 0 < role.role.rollout_options.kv_cache_bytes < alone.kv_cache_bytes


def test_a_role_declared_later_takes_its_part_and_the_same_declaration_stays_the_same():
    session, role = ppo_session()
    session.place("colocate")
    before = role.role.rollout_options
    other = session.reference(role, name="second")
    session.place("colocate")
    assert role.role.rollout_options.kv_cache_bytes < before.kv_cache_bytes
    assert parts_of(session).deployment.book.declared(role).rollout_options == RolloutOptions()
    other.release()
    session.place("colocate")
    assert role.role.rollout_options == before


def test_a_plan_is_what_the_placed_session_takes_where_the_cache_decides():
    """Eight thousand long samples on eight devices: slots, not rows, limit what a replica decodes at once."""
    workload = hf.Workload(prompts=8192, prompt_tokens=1024, response_tokens=1024)
    session, _ = ppo_session()
    plan = session.plan(hf.PPO(), workload, top=3)
    assert FROM_MEMORY in plan.search.family
    assert [one.seconds for one in plan.runners_up] == sorted(one.seconds for one in plan.runners_up)
    assert all(plan.seconds <= one.seconds for one in plan.runners_up)
    for one in (plan.best, *plan.runners_up):
        fresh, role = ppo_session()
        fresh.place(one)
        rows = {name: held for row in one.memory or plan.memory for name, held in row.roles.items()}
        name = "actor.rollout" if "actor.rollout" in rows else "actor"
        assert rows[name]["kv_cache"] == role.role.rollout_options.kv_cache_bytes
        made = role.generate(fresh.batch(prompt=[[1] * 1024] * 8192), max_new_tokens=1024, ignore_eos=True)
        made.wait()
        took = fresh.trace.snapshot().seconds_by_call()["actor.generate" if name == "actor" else "actor.rollout.generate"]
        assert one.calls["actor.generate" if name == "actor" else "actor.rollout.generate"] == pytest.approx(took, rel=0.02)


def test_where_only_the_smallest_cache_fits_it_is_planned_and_placed():
    """The search leaves rollouts 8 GB; where nothing fits with that it asks for one longest sequence, as ``place`` does."""
    roles = [actor()]
    asked = device_bytes(map(with_least, roles), colocated(roles), H100)[0].asked

    def session(memory):
        made = hf.Session.simulated(H100.with_memory(memory))
        role = made.actor(LLAMA_8B, train="tp8", rollout="tp1", dtype="bf16", optimizer=SHARDED, recompute="full")
        made.reward(lambda prompts, completions: [0.0] * len(completions))
        return made, role

    made, role = session(asked + 10**9)
    plan = made.plan(hf.RLOO(n=2, kl_coef=0.0), hf.Workload(prompts=16, prompt_tokens=64, response_tokens=64), shadows=False)
    made.place(plan)
    cache = role.role.rollout_options.kv_cache_bytes
    assert cache == UNITS.holding(1) + 10**9
    assert plan.memory[0].roles["actor"]["kv_cache"] == cache
    with pytest.raises(DeviceMemoryError):
        session(asked - 1)[0].plan(hf.RLOO(n=2, kl_coef=0.0), plan.workload, shadows=False)


@pytest.mark.parametrize(("devices", "searches"), [(64, [True, False]), (256, [True])])
def test_the_search_is_made_again_only_where_other_roles_cost_a_rollout_time(devices, searches, monkeypatch):
    ran, run = [], Search.run
    monkeypatch.setattr(Search, "run", lambda self: (ran.append(self.spaces[0].tables.alone), run(self))[1])

    def planned():
        session = hf.Session.simulated(f"{devices // 8}x8 A100-80GB")
        role = session.actor("llama-70b", dtype="bf16", optimizer=SHARDED)
        session.critic("llama-70b", dtype="bf16", optimizer=SHARDED)
        session.reference(role)
        session.reward("llama-70b", dtype="bf16")
        return session.plan(hf.PPO(), hf.Workload())

    plan = planned()
    assert ran == searches
    again = planned()  # which begins with what the one before found
    assert [(one.title, one.seconds) for one in again.runners_up] == [(one.title, one.seconds) for one in plan.runners_up]
    assert (again.best.title, again.seconds) == (plan.best.title, plan.seconds)
