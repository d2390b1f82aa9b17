import pickle
from dataclasses import replace

import pytest
from expect import refuses

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import DeviceMemoryError, LayoutError
from hfsdk.core.functions import Shipped
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions
from hfsdk.core.rollout_sizes import BLOCK_TOKENS, cache_bytes
from hfsdk.core.spec import ModelSpec
from hfsdk.core.training_choices import TrainingChoices
from hfsdk.planner.perf.memory import adamw_temporary_bytes, check_fits, device_bytes, role_bytes, rollout_parameters

SMOL = ModelSpec(
    name="SmolLM2-135M", num_layers=30, hidden_size=576, mlp_hidden_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
    vocab_size=49152, max_positions=8192, tied_embeddings=True,
)  # fmt: skip
SMOL_8_HEADS = ModelSpec(
    name="Smol, 8 heads", num_layers=30, hidden_size=576, mlp_hidden_size=1536, num_heads=8, num_kv_heads=4, head_dim=64,
    vocab_size=49152, max_positions=8192, tied_embeddings=True,
)  # fmt: skip
LLAMA_70B = ModelSpec.preset("llama-70b")
IMPORTS_WITHOUT_VLLM = 600 * 10**6


def trained(spec, train="tp1", dtype="fp32", kind="actor", name=None, **more):
    return RoleSpec(
        name=name or kind, kind=kind, model=spec, train=Layout.parse(train), dtype=dtype, **{"optimizer": AdamW(), **more},
    )  # fmt: skip


def ppo_70b(train="tp8 pp4", rollout="tp8"):
    adamw = AdamW(distributed=True)
    both = {"model": LLAMA_70B, "train": Layout.parse(train), "dtype": "bf16"}
    return [
        RoleSpec(name="actor", kind="actor", rollout=Layout.parse(rollout), optimizer=adamw, **both),
        RoleSpec(name="critic", kind="critic", head="scalar", optimizer=adamw, **both),
        RoleSpec(name="reference", kind="reference", **both),
        RoleSpec(name="reward", kind="reward", head="scalar", **both),
    ]


def place(roles, what, cluster):
    return Placement.of(what, [r.name for r in roles if r.model is not None], cluster.num_devices)


def test_a_part_of_a_pool_that_is_too_full_is_told_as_any_other():
    """Its roles' layouts cover the part, and not the pool."""
    cluster = ClusterSpec.parse("1x8 A100-80GB")
    reward = RoleSpec(name="reward", kind="reward", model=SMOL, head="scalar", train=Layout(dp=4), dtype="bf16")
    placement = Placement((Pool("all", tuple(range(8))), Pool("part", (0, 1, 2, 3), "all")), {"actor": "all", "reward": "part"})
    with refuses(DeviceMemoryError, "What helps", "devices 0-7", "'all'"):
        check_fits([trained(LLAMA_70B, "tp8", "bf16"), reward], placement, cluster)


def test_fp32_is_16_bytes_a_parameter():
    estimate = role_bytes(trained(SMOL), 1, on_cpu=True)
    assert estimate.weights + estimate.gradients + estimate.optimizer == 16 * SMOL.num_parameters()


def test_bf16_is_18_bytes_a_parameter_and_dp_shares_a_distributed_optimizer():
    role = trained(SMOL, dtype="bf16")
    shared = replace(role, optimizer=AdamW(distributed=True))
    for on_cpu in (False, True):
        one, four, shard = (role_bytes(r, n, on_cpu=on_cpu) for r, n in ((role, 1), (role, 4), (shared, 4)))
        assert (one.weights, one.gradients, one.optimizer) == tuple(n * SMOL.num_parameters() for n in (2, 4, 12)), on_cpu
        assert (four.weights, four.gradients, four.optimizer) == (one.weights, one.gradients, one.optimizer), on_cpu
        assert (shard.weights, shard.gradients, shard.optimizer) == (one.weights, one.gradients, one.optimizer // 4), on_cpu


@pytest.mark.parametrize(("on_cpu", "tp"), [(False, 8), (True, 2)])
def test_recompute_keeps_less(on_cpu, tp):
    """On processors with less tp: what recomputed MLPs begin with is kept whole by each rank, which is much beside an eighth."""
    roles = [trained(LLAMA_70B, f"tp{tp}", dtype="bf16", recompute=how) for how in ("", "selective", "full")]
    none, selective, full = (role_bytes(role, tp, on_cpu=on_cpu) for role in roles)
    assert full.activations < selective.activations / 3 < none.activations / 3
    assert (full.weights, full.gradients, full.optimizer, full.logits) == (
        none.weights, none.gradients, none.optimizer, none.logits,
    )  # fmt: skip
    layer_inputs = 80 * 2048 * 2 * LLAMA_70B.hidden_size / (1 if on_cpu else 8)
    assert layer_inputs < full.activations < layer_inputs + none.activations / 80


def test_what_is_offloaded_counts_while_it_is_used():
    frozen = RoleSpec(name="reference", kind="reference", model=SMOL, train=Layout.parse("tp1"), dtype="bf16")
    actor = trained(SMOL, dtype="bf16")
    for role, part, after in (
        (frozen, "weights", replace(frozen, offload=True)),
        (actor, "optimizer", replace(actor, optimizer=AdamW(offload=True))),
    ):
        stays, leaves, on_cpu = role_bytes(role, 1), role_bytes(after, 1), role_bytes(after, 1, on_cpu=True)
        assert leaves.resident == stays.resident - getattr(stays, part)
        assert on_cpu == role_bytes(role, 1, on_cpu=True)
        working = stays.activations + stays.logits
        step = stays.optimizer + stays.temporaries
        assert leaves.working == (working + stays.weights if part == "weights" else max(working, step))


def test_a_trained_role_in_host_memory_leaves_its_rollout_and_comes_for_its_calls():
    actor = trained(SMOL, dtype="bf16", rollout=Layout(tp=1))
    stays, leaves = role_bytes(actor, 1), role_bytes(replace(actor, offload=True), 1)
    steps = role_bytes(replace(actor, offload=True, optimizer=AdamW(offload=True)), 1)
    assert leaves.resident == steps.resident == 0, "the rollout sleeps while the trainer works, and the other way round"
    passes, held = stays.activations + stays.logits, stays.weights + stays.gradients
    assert leaves.passes == held + stays.optimizer + max(passes, stays.temporaries)
    assert steps.passes == held + max(passes, stays.optimizer + stays.temporaries)
    generating = stays.rollout_weights + stays.kv_cache
    assert (leaves.working, steps.working) == (max(leaves.passes, generating), max(steps.passes, generating))
    large = replace(leaves, weights=10**12, gradients=0, optimizer=0, rollout_weights=10**12, kv_cache=1, asleep=10**12 + 1)
    assert large.working == 2 * 10**12, "while it is given weights that come from the host, both copies are there"
    assert role_bytes(replace(actor, offload=True), 1, on_cpu=True) == role_bytes(actor, 1, on_cpu=True)


def test_adamw_has_a_temporary_for_each_parameter_it_steps_unless_it_is_fused(monkeypatch):
    def both():
        return [role_bytes(trained(SMOL, optimizer=AdamW(distributed=d)), 4) for d in (False, True)]

    assert [estimate.temporaries for estimate in both()] == [0, 0], "trainers on accelerators have the fused one"
    monkeypatch.setattr("hfsdk.planner.perf.memory.choose_training", lambda **_: TrainingChoices())
    one, shared = both()
    assert one.temporaries == 4 * SMOL.num_parameters() == 4 * shared.temporaries
    assert role_bytes(trained(SMOL), 1, on_cpu=True).temporaries == 0
    assert adamw_temporary_bytes(10, on_cpu=False, fused=True) == 0 < adamw_temporary_bytes(10, on_cpu=False)


def test_a_refusal_names_the_roles_that_need_to_be_in_host_memory():
    spec, cluster = ModelSpec.preset("qwen3-8b"), ClusterSpec.parse("1x8 H100")
    both = {"model": spec, "train": Layout.parse("tp4"), "dtype": "bf16", "optimizer": AdamW(distributed=True)}
    roles = [
        RoleSpec(name="actor", kind="actor", rollout=Layout(tp=1), **both),
        RoleSpec(name="critic", kind="critic", head="scalar", **both),
        RoleSpec(name="reference", kind="reference", model=spec, train=Layout.parse("tp4"), dtype="bf16"),
    ]
    placement = place(roles, "colocate", cluster)

    def asked(*away):
        return device_bytes([replace(role, offload=role.name in away) for role in roles], placement, cluster)[0].asked

    def refusal(num_bytes):
        with pytest.raises(DeviceMemoryError) as caught:
            check_fits(roles, placement, cluster.with_memory(num_bytes))
        return str(caught.value)

    singles = {role.name: asked(role.name) for role in roles}
    best = min(singles, key=singles.get)
    one, two = singles[best], min(asked(*(other.name for other in roles if other is not left)) for left in roles)
    assert asked() > one > two > asked("actor", "critic", "reference")
    assert f"With offload=True for {best} it fits: asked {one / 1e9:.2f}." in refusal(one)
    assert f"With offload=True for actor and critic it fits: asked {two / 1e9:.2f}." in refusal(two)
    assert "it fits" not in refusal(asked("actor", "critic", "reference") - 1)
    away = [replace(role, offload=True) for role in roles]
    check_fits(away, placement, cluster.with_memory(two))
    gradients = device_bytes(roles, placement, cluster)[0].roles["actor"].gradients
    with refuses(DeviceMemoryError, f"({gradients / 1e9:.2f})"):
        check_fits(away, placement, cluster.with_memory(10**9))


def test_biases_and_norms_of_other_families_count():
    for name in ("qwen2.5-0.5b", "qwen3-0.6b"):
        spec = ModelSpec.preset(name)
        assert role_bytes(trained(spec), 1).weights == 4 * spec.num_parameters()


@pytest.mark.parametrize(("spec", "train", "size", "measured_gb"), [(SMOL, "tp1", 1, 3.8), (SMOL_8_HEADS, "tp2", 2, 2.2)])
def test_one_training_process_as_measured(spec, train, size, measured_gb):
    """Measured on a CPU with the heap of workers: resident bytes of 1 x 1024 tokens, forward + backward + step.

    At tp2 a model with 8 heads of 72 was measured, of nearly as many weights as the one here.
    """
    role = trained(spec, train, micro_batch_tokens=1024)
    predicted = role_bytes(role, size, on_cpu=True).total + IMPORTS_WITHOUT_VLLM
    assert predicted == pytest.approx(measured_gb * 1e9, rel=0.1)


def test_packed_rollout_holds_two_copies():
    def rollout(mode, on_cpu=True):
        role = trained(SMOL, rollout=Layout(tp=1), rollout_options=RolloutOptions(cpu_weights=mode))
        return role_bytes(role, 1, on_cpu=on_cpu)

    assert rollout("shared").rollout_weights == 0, "one engine's weights are there at a time"
    assert rollout("packed").rollout_weights == 2 * SMOL.num_bytes("fp32")
    assert rollout("packed", on_cpu=False).rollout_weights == SMOL.num_bytes("fp32")
    spare = 2 * BLOCK_TOKENS * SMOL.kv_bytes_per_token("fp32")  # vLLM keeps a block for itself, and one is to spare
    assert rollout("packed").kv_cache == 256 * 2**20 + spare
    wider = trained(SMOL_8_HEADS, "tp2", rollout=Layout(tp=1), rollout_options=RolloutOptions(cpu_weights="shared"))
    both = role_bytes(wider, 2, on_cpu=True)
    assert both.weights + both.rollout_weights == SMOL_8_HEADS.num_bytes("fp32"), "the larger of the two"
    assert rollout("shared", on_cpu=False).kv_cache == 64 * 2048 * SMOL.kv_bytes_per_token("fp32") + spare


@pytest.mark.parametrize("mode", ["packed", "shared"])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_shadow_that_generates_has_no_trainer(mode, on_cpu):
    """The engine makes a ``Trainer`` only where there is a ``train`` layout (``hfsdk/engine/worker/role_engine.py``)."""
    actor = trained(SMOL_8_HEADS, "tp2", rollout=Layout(tp=2), rollout_options=RolloutOptions(cpu_weights=mode))
    shadow = replace(actor, name="actor.rollout", shadow_of="actor", train=None, optimizer=None)
    held = role_bytes(shadow, 4, on_cpu=on_cpu)
    assert (held.weights, held.gradients, held.optimizer, held.activations, held.logits, held.working) == (0,) * 6
    copies = 2 if on_cpu and mode == "packed" else 1
    assert held.rollout_weights == copies * 4 * rollout_parameters(SMOL_8_HEADS, 2), "none is the trainer's: it has none"
    assert held.resident == held.rollout_weights + role_bytes(actor, 4, on_cpu=on_cpu).kv_cache, "nobody would fill it again"
    infers = replace(trained(SMOL, kind="critic", head="scalar"), name="critic.inference", shadow_of="critic", optimizer=None)
    alike = RoleSpec(name="reward", kind="reward", model=SMOL, train=Layout(), head="scalar")
    assert role_bytes(infers, 1, on_cpu=on_cpu) == role_bytes(alike, 1, on_cpu=on_cpu), "one that infers is a frozen model"


def test_kv_cache_as_asked_and_kv_heads_replicated():
    asked = trained(SMOL, rollout=Layout(tp=1), rollout_options=RolloutOptions(kv_cache_bytes=10**8))
    assert role_bytes(asked, 1, on_cpu=True).kv_cache == 10**8
    llama = trained(LLAMA_70B, "tp16", rollout=Layout(tp=16))
    token = LLAMA_70B.kv_bytes_per_token("fp32") // 8
    spare = 2 * BLOCK_TOKENS * token
    assert 64 * 2048 * token > role_bytes(llama, 16).kv_cache == 8 * 2**30 + spare  # the most that is taken unless asked for


def test_the_cache_that_is_planned_is_the_one_that_the_engine_takes():
    """In whole blocks, with the two that vLLM has besides: 100 tokens are 4 blocks of 32."""
    role = trained(SMOL, rollout=Layout(tp=1), rollout_options=RolloutOptions(max_model_len=100, max_num_seqs=3))
    block = 32 * SMOL.kv_bytes_per_token("fp32")
    for on_cpu in (False, True):
        assert role_bytes(role, 1, on_cpu=on_cpu).kv_cache == (3 * 4 + 2) * block, on_cpu
        assert cache_bytes(SMOL, role.rollout_options, 1, "fp32", on_cpu=on_cpu) == (3 * 4 + 2) * block, on_cpu


def test_layouts_split_the_model():
    whole, half, stages = (role_bytes(trained(LLAMA_70B, t, "bf16"), 8).weights for t in ("tp1", "tp2", "tp1 pp2"))
    assert whole == LLAMA_70B.num_bytes("bf16")
    assert half == pytest.approx(whole / 2, rel=0.001)
    assert stages == pytest.approx(whole / 2, rel=0.01)
    with pytest.raises(LayoutError):
        role_bytes(trained(LLAMA_70B, "tp8 pp4"), 8)


def test_frozen_and_function_roles():
    frozen = role_bytes(RoleSpec(name="reference", kind="reference", model=SMOL, train=Layout()), 1, on_cpu=True)
    assert frozen.weights == SMOL.num_bytes("fp32")
    assert frozen.activations > 0
    assert (frozen.gradients, frozen.optimizer, frozen.rollout_weights) == (0, 0, 0)
    assert frozen.activations < role_bytes(trained(SMOL), 1, on_cpu=True).activations / 10
    assert role_bytes(RoleSpec(name="reward", kind="reward", function=Shipped.of(len)), 1).total == 0
    scalar = role_bytes(trained(SMOL, kind="critic", head="scalar"), 1, on_cpu=True)
    assert scalar.logits < 10**6 < role_bytes(trained(SMOL), 1, on_cpu=True).logits


def test_on_gpus_a_rollout_beside_its_trainer_counts_while_it_generates():
    for tokens, fuller in ((16, "generating"), (65_536, "training")):
        actor = trained(SMOL, dtype="bf16", rollout=Layout(tp=1), micro_batch_tokens=tokens)
        gpu, cpu = (role_bytes(actor, 1, on_cpu=on_cpu) for on_cpu in (False, True))
        state = gpu.weights + gpu.gradients + gpu.optimizer
        generating, training = gpu.rollout_weights + gpu.kv_cache, gpu.activations + gpu.logits
        assert fuller == ("generating" if generating > training else "training")
        assert (gpu.resident, gpu.passes, gpu.working) == (state, training, max(generating, training))
        assert gpu.asleep == generating
        assert cpu.asleep == 0
        assert cpu.resident == cpu.weights + cpu.gradients + cpu.optimizer + cpu.rollout_weights + cpu.kv_cache
        assert cpu.working == cpu.activations + cpu.logits


def ppo_8b(train):
    model, adamw = ModelSpec.preset("qwen3-8b"), AdamW(distributed=True)
    both = {"model": model, "train": Layout.parse(train), "dtype": "bf16"}
    return [
        RoleSpec(name="actor", kind="actor", rollout=Layout(tp=1), optimizer=adamw, recompute="selective", **both),
        RoleSpec(name="critic", kind="critic", head="scalar", optimizer=adamw, recompute="selective", **both),
        RoleSpec(name="reference", kind="reference", **both),
    ]


def test_8b_ppo_colocated_fits_because_the_rollout_sleeps():
    cluster = ClusterSpec.parse("1x8 H100")
    roles = ppo_8b("tp4")
    placement = place(roles, "colocate", cluster)
    (device, *_) = device_bytes(roles, placement, cluster)
    assert device.asked <= device.exists < device.asked + min(device.roles["actor"].asleep, device.roles["actor"].passes)
    check_fits(roles, placement, cluster)
    roles = ppo_8b("tp2")
    with pytest.raises(DeviceMemoryError) as caught:
        check_fits(roles, place(roles, "colocate", cluster), cluster)
    asleep = device_bytes(roles, placement, cluster)[0].roles["actor"].asleep
    assert f"actor's rollout sleeps while it does not generate: its {asleep / 1e9:.2f} do not stay" in str(caught.value)
    assert "while it generates, + process" in str(caught.value)


def test_of_two_rollouts_on_a_device_none_is_counted_on_to_sleep():
    cluster = ClusterSpec.parse("1x1 A100-80GB")
    roles = [trained(SMOL, name=name, dtype="bf16", rollout=Layout(tp=1)) for name in ("actor", "other")]
    (device,) = device_bytes(roles, place(roles, {"actor other": 1}, cluster), cluster)
    one = role_bytes(roles[0], 1)
    assert device.asked == device.process + 2 * (one.resident + one.asleep) + one.passes


def test_70b_ppo_on_128_a100_fits_colocated_and_not_on_16():
    cluster = ClusterSpec.parse("16x8 A100-80GB")
    check_fits(ppo_70b(), place(ppo_70b(), "colocate", cluster), cluster)
    small = ClusterSpec.parse("2x8 A100-80GB")
    roles = ppo_70b("tp8 pp2")
    with pytest.raises(DeviceMemoryError) as caught:
        check_fits(roles, place(roles, "colocate", small), small)
    text = str(caught.value)
    assert "devices 0-15 (A100-80GB, pool 'all'): asked " in text
    assert "exists 80.00" in text
    for word in ("weights", "optimizer", "kv_cache", "actor", "reward", "process", "What helps, most first: a larger tp or pp"):
        assert word in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_roles_on_one_device_add_up_but_run_one_after_the_other():
    cluster = ClusterSpec.parse("1x1 cpu")
    roles = [trained(SMOL), trained(SMOL, kind="critic", head="scalar")]
    (device,) = device_bytes(roles, place(roles, "colocate", cluster), cluster)
    actor, critic = (role_bytes(r, 1, on_cpu=True) for r in roles)
    assert device.asked == device.process + actor.resident + critic.resident + max(actor.working, critic.working)


def test_cpu_message_names_what_helps_and_functions_need_no_place():
    cluster = ClusterSpec.parse("1x2 cpu").with_memory(4 * 10**9)
    roles = [
        trained(SMOL, rollout=Layout(tp=1)), trained(SMOL, kind="critic", head="scalar"),
        RoleSpec(name="reward", kind="reward", function=Shipped.of(len)),
    ]  # fmt: skip
    with refuses(DeviceMemoryError, "dtype='bf16'", "micro_batch_tokens below 2048"):
        check_fits(roles, place(roles, "colocate", cluster), cluster)
    check_fits(roles, place(roles, "colocate", cluster), cluster.with_memory(24 * 10**9))


def test_only_the_pool_that_is_too_full_is_shown():
    cluster = ClusterSpec.parse("1x1 cpu + 1x1 A100-80GB")
    roles = [trained(SMOL), trained(SMOL, kind="critic", name="critic")]
    with pytest.raises(DeviceMemoryError) as caught:
        check_fits(roles, place(roles, {"actor": 1, "critic": 1}, cluster), cluster.with_memory(9 * 10**9 // 2))
    text = str(caught.value)
    assert "pool 'actor'" in text
    small = place(roles, {"actor": 1, "critic": 1}, cluster)
    check_fits(roles, small, cluster.with_memory(20 * 10**9))
