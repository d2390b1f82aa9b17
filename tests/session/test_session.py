"""Roles and places: idempotent handles, what is refused at the call, notices."""

from __future__ import annotations

import gc
import inspect
import json
import shutil
import sys
import warnings
from types import ModuleType

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.assets import model_folder
from hfsdk.core.batch import refs_of
from hfsdk.core.hints import AttributeHints, PublicNames
from hfsdk.core.spec import PRESETS, ModelSpec
from hfsdk.core.weight_files import WeightFiles
from tests.session.scripted import ScriptedRuntime, learn


@pytest.fixture
def loaded(runtime, monkeypatch):
    """What was built on workers, in order."""
    specs, load = [], runtime.load
    monkeypatch.setattr(runtime, "load", lambda role, *given, **named: (specs.append(role), load(role, *given, **named)))
    return specs


def roles_of(session):
    """Return the roles as the placement shows them, by name."""
    return {role["name"]: role for role in session.placement.view()["roles"]}


def test_the_same_arguments_give_the_same_handle(session, actor):
    assert session.actor("tiny") is actor
    assert session.critic("tiny") is session.critic("tiny")
    assert session.reference(actor) is session.reference(actor)
    assert session.messages == []


def test_the_notice_names_what_differs(session):
    first = hf.AdamW(lr=1e-4)
    session.critic("tiny", optimizer=first)
    with pytest.warns(UserWarning, match=r"optimizer distributed=False, offload=False -> distributed=True, offload=True;"):
        session.critic("tiny", optimizer=hf.AdamW(lr=1e-4, distributed=True, offload=True))
    with pytest.warns(UserWarning, match=r"recompute none -> full"):
        session.critic("tiny", optimizer=hf.AdamW(lr=1e-4, distributed=True, offload=True), recompute="full")


def test_changed_arguments_replace_the_handle_with_a_notice(session, actor):
    with pytest.warns(UserWarning, match=r"actor is replaced: layout tp1 pp1 -> tp2 pp1"):
        new = session.actor("tiny", train="tp2")
    assert new is not actor
    assert session.models.actor is new
    with refuses(hf.OptionError, "actor", "replaced", "declare it again"):
        actor.generate("x")
    assert session.messages


def test_a_trained_role_is_replaced_only_where_that_is_asked_for(session, actor):
    learn(actor, 1)
    for declare in (
        lambda: session.actor("tiny", train="tp2"),
        lambda: session.reference("tiny", name="actor"),
        lambda: session.reward(lambda completions: [0.0], name="actor"),
    ):
        with refuses(hf.OptionError, "actor", "1 update", "save_pretrained", "name='actor2'", "replace=True"):
            declare()
    assert session.models.actor is actor is session.actor("tiny")
    assert actor.version == 1, "it was not removed"
    assert session.actor("tiny", train="tp2", name="actor2") is not actor
    with pytest.warns(UserWarning, match="actor is replaced"):
        new = session.actor("tiny", train="tp2", replace=True)
    with pytest.warns(UserWarning, match="actor is replaced"):
        assert session.actor("tiny") is not new


def test_a_new_function_is_a_new_version_of_the_same_handle(session, actor):
    def first(prompts, completions):
        return [0.0] * len(prompts)

    def second(prompts, completions):
        return [1.0] * len(prompts)

    reward, batch = session.reward(first), actor.generate("x")
    assert session.reward(first) is reward
    assert reward.compute_scores(batch)["scores"].tolist() == [0.0]
    with pytest.warns(UserWarning, match="reward goes on with second@"):
        assert session.reward(second) is reward
    assert reward.compute_scores(batch)["scores"].tolist() == [1.0]


def test_a_released_handle_is_gone(session, actor):
    actor.generate("x")
    actor.release()
    assert roles_of(session) == {}
    with refuses(hf.OptionError, "released"):
        actor.generate("x")
    assert session.actor("tiny") is not actor


UNFIT = [
    ({"train": "tp3"}, hf.LayoutError, ["8 attention heads", "4 kv heads", "tp=3"]),
    ({"rollout": "tp3"}, hf.LayoutError, ["tp=3"]),
    ({"train": "tp4"}, hf.LayoutError, ["4 devices", "has 2"]),
    ({"train": "pp3"}, hf.LayoutError, ["4 layers", "pp"]),
    ({"rollout": "pp2"}, hf.LayoutError, ["rollout", "tp and dp"]),
    ({"train": "tp2 tp2"}, hf.LayoutError, ["tp2 tp2"]),
    ({"train": "fast"}, hf.LayoutError, ["fast"]),
    ({"model": "llama-70b"}, hf.ModelNotFoundError, ["llama-70b"]),
    ({"model": "/nowhere"}, hf.ModelNotFoundError, ["/nowhere"]),
    ({"model": PRESETS["llama-7b"]}, hf.ModelNotFoundError, ["llama-7b", "weights"]),
    ({"model": 3}, hf.OptionError, ["model=3"]),
    ({"dtype": "fp8"}, hf.OptionError, ["dtype", "fp8"]),
    ({"optimizer": None}, hf.OptionError, ["AdamW"]),
    ({"micro_batch_tokens": 0}, hf.OptionError, ["micro_batch_tokens"]),
    ({"cpu_weights": "other"}, hf.OptionError, ["cpu_weights"]),
    ({"recompute": "some"}, hf.OptionError, ["'selective', 'full'", "recompute='some'"]),
    ({"rollout_options": hf.RolloutOptions(max_model_len=600)}, hf.OptionError, [600, "512 positions"]),
]


@each("options, error, named", UNFIT)
def test_what_does_not_fit_is_refused_at_the_call(session, loaded, options, error, named):
    with refuses(error, *named):
        session.actor(**{"model": "tiny", **options})
    assert loaded == []
    assert session.actor("tiny").name == "actor"  # the session is usable


def test_recompute_and_distributed_optimizer_are_part_of_the_role(session):
    optimizer = hf.AdamW(lr=1e-5, distributed=True)
    actor = session.actor("tiny", recompute="full", optimizer=optimizer)
    critic = session.critic("tiny", recompute="selective", optimizer=optimizer)
    assert (actor.role.recompute, critic.role.recompute) == ("full", "selective")
    assert actor.role.optimizer.distributed
    assert session.critic("tiny", name="plain").role.recompute == ""
    assert not hf.AdamW().distributed


def test_models_that_cannot_run(session, tmp_path):
    config = {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refuses(hf.ModelNotFoundError, "safetensors"):
        session.actor(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with refuses(hf.UnsupportedModelError, "GPT2LMHeadModel"):
        session.actor(tmp_path)
    odd = {
        "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 96,
        "intermediate_size": 64, "vocab_size": 320, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(odd))
    pytest.importorskip("torch")
    with refuses(hf.UnsupportedModelError, "head_dim 48"):
        session.actor(tmp_path)
    with refuses(hf.ModelNotFoundError, "model.safetensors", "2 layers"):  # only the generating engine minds the size of a head
        session.critic(tmp_path)


@pytest.mark.filterwarnings("ignore:reward goes on with")
@each(
    "score",
    [
        hf.data.vader_sentiment, lambda texts: [], lambda responses, scale=1.0: [], lambda prompts, completions, **columns: [],
        lambda completions, answer: [], lambda **columns: [], lambda completions, /: [],
    ],
)  # fmt: skip
def test_functions_take_completions_by_name_or_alone(session, score):
    assert session.reward(score).role.function is not None


@each("score", [lambda prompts: [], lambda texts, answer: [], lambda: [], lambda *, texts: [], lambda *texts: []])
def test_functions_without_completions_are_refused(session, score):
    with refuses(hf.OptionError, "takes no completions", "completions, **columns"):
        session.reward(score)


def test_a_function_s_timeout_is_above_zero(session):
    with refuses(hf.OptionError, "timeout_s"):
        session.reward(lambda prompts, completions: [], timeout_s=0)


def test_missing_roles_say_how_to_declare_them(session, actor):
    with refuses(hf.PlacementError, "has actor", "session.critic"):
        _ = session.models.critic
    assert session.models.actor is actor
    session.actor("tiny", name="other")
    assert session.models.actor is actor


def test_all_missing_roles_are_told_at_once_before_anything_is_loaded(session, actor, loaded):
    """Also where a checkpoint is to be gone on with, or the first algorithm of a comparison has all it needs."""
    session.reward(lambda completions: [0.0] * len(completions))
    prompts = session.prompts(["a", "b"], batch_size=2)
    for act in (
        lambda: session.train(hf.PPO(kl_coef=0.1), prompts, steps=1, resume="no folder"),
        lambda: session.compare([hf.GRPO(kl_coef=0.0), hf.PPO(kl_coef=0.1)], prompts, steps=1),
        lambda: hf.PPO(kl_coef=0.1).step(session.models, prompts[0]),
    ):
        with refuses(hf.PlacementError, "lacks critic, reference", "session.critic('tiny')", "session.reference"):
            act()
    assert loaded == []


def test_roles_of_an_algorithm_of_one_s_own_are_its_business(session, actor, length_reward):
    class Mine(hf.GRPO):
        roles = ("actor", "judge", 3)

        def step(self, models, prompts):
            return hf.GRPO(n=2, max_new_tokens=4, kl_coef=0.0).step(models, prompts)

    session.reward(length_reward)
    assert len(session.train(Mine(n=2, kl_coef=0.0), ["a", "b"], steps=1, progress=False).rows) == 1


# -- placement


def test_the_first_call_places_everything_once(session, actor, length_reward, loaded):
    session.critic("tiny", train="tp2")
    session.reward(length_reward)
    actor.generate("x").wait()
    actor.generate("x").wait()
    session.models.critic.compute_values(actor.generate("x")).wait()
    assert sorted(role.name for role in loaded) == ["actor", "critic"], "each once"
    roles = roles_of(session)
    assert (roles["actor"]["pool"], roles["critic"]["pool"]) == ("all", "all")
    assert (roles["actor"]["train"], roles["critic"]["train"]) == ("tp1 pp1 dp2", "tp2 pp1 dp1")
    assert str(actor.role.rollout) == "tp1 pp1 dp2"


def test_a_later_role_is_placed_at_its_first_use_and_moves_no_other(session, actor, loaded):
    batch = actor.generate("x").wait()
    session.critic("tiny").compute_values(batch).wait()
    assert [role.name for role in loaded] == ["actor", "critic"]


def test_places(session, actor, length_reward):
    session.critic("tiny")
    session.reward(length_reward)
    session.place({"actor": 1, "critic reward": 1})
    assert session.placement.view()["pools"] == {"actor": [0], "critic": [1]}
    session.place("split")
    wrong = [("nowhere", "'nowhere'"), ({"actor": 1}, "critic"), ({"actor critic": 3}, "2 devices")]
    for what, named in wrong:
        with refuses(hf.PlacementError, named):
            session.place(what)
    text = repr(session.placement)
    assert "pool 'actor' on device 0" in text
    assert "tiny fp32" in text


def test_a_layout_that_does_not_fit_its_pool(session):
    session.actor("tiny", train="tp2")
    session.critic("tiny")
    with refuses(hf.PlacementError, "actor", "pool 'actor'", "has 1"):
        session.place("split")


def test_nothing_to_place(session):
    with refuses(hf.PlacementError, "declare"):
        session.place()


def test_models_that_do_not_fit_are_refused_before_loading(monkeypatch):
    runtime = ScriptedRuntime(hf.ClusterSpec.parse("1x2 cpu").with_memory(10**9))
    monkeypatch.setattr(runtime, "load", lambda *given: pytest.fail("it is loaded"))
    with hf.Session(runtime=runtime) as session:
        actor = session.actor("smollm2-135m-instruct")
        with refuses(hf.DeviceMemoryError, "1.00"):
            actor.generate("x")


def test_placing_again_moves_or_starts_fresh_as_asked(session, actor):
    session.critic("tiny")
    learn(actor, 2)
    session.place("split")
    assert (roles_of(session)["actor"]["train"], actor.version) == ("tp1 pp1 dp1", 2)
    session.place("colocate", fresh=True)
    assert (roles_of(session)["actor"]["train"], actor.version) == ("tp1 pp1 dp2", 0)


@pytest.mark.filterwarnings("ignore:actor is replaced")
def test_a_role_declared_differently_does_not_move_but_begins_anew(session, actor):
    learn(actor, 2)
    session.place("standalone")
    assert actor.version == 2
    new = session.actor("tiny", train="tp2", replace=True)
    session.place("standalone")
    assert new.version == 0


def test_shadows_are_roles_of_the_placement(session, actor, loaded):
    critic = session.critic("tiny")
    session.place({"actor critic": 1, "actor.rollout critic.inference": 1})
    roles = {role.name: role for role in loaded}
    assert roles["actor"].rollout is None
    assert str(actor.role.rollout) == str(roles["actor.rollout"].rollout) == "tp1 pp1 dp1"
    assert roles["actor.rollout"].train is None
    assert (roles["critic.inference"].shadow_of, roles["critic.inference"].optimizer) == ("critic", None)
    assert not roles["actor.rollout"].trainable
    assert critic.role.trainable
    with refuses(hf.PlacementError, "only a critic has a shadow for inference"):
        session.place({"actor critic": 1, "actor.inference": 1})
    with refuses(hf.PlacementError, "critic.rollouts"):
        session.place({"actor critic": 1, "critic.rollouts": 1})


def test_shadows_stand_in_the_picture(session, actor, tmp_path):
    before = session.place("colocate")
    session.place({"actor": 1, "actor.rollout": 1})
    learn(actor, 1)
    session.save(tmp_path)
    learn(actor, 2)
    trained, shadow = session.placement.view()["roles"]
    assert (trained["elsewhere"], trained["weights"]) == ({"generate": "actor.rollout"}, "3 updates")
    assert (shadow["kind"], shadow["train"], shadow["weights"]) == ("shadow of actor", None, "no weights yet")
    assert [(s["device"], s["rollout_replica"]) for s in shadow["shards"]] == [(1, 0)]

    actor.generate("x").wait()
    assert roles_of(session)["actor.rollout"]["weights"] == "fresh (3 updates)"
    learn(actor, 2)
    assert roles_of(session)["actor.rollout"]["weights"] == "2 updates behind"
    session.load(tmp_path)
    assert roles_of(session)["actor.rollout"]["weights"] == "of another version"
    assert "actor.rollout: shadow of actor, rollout 'tp1 pp1 dp1', pool 'actor.rollout'" in repr(session.placement)
    assert "generate in actor.rollout" in repr(session.placement)
    assert len(before.view()["roles"][0]["shards"]) == 2, "a picture taken before shows what was then"
    actor.release()
    assert session.placement.view()["roles"] == []


def test_a_shadow_s_weights_age_until_it_is_used():
    with hf.Session.simulated("1x2 A100-80GB") as simulated:
        actor = simulated.actor("tiny")
        simulated.place({"actor": 1, "actor.rollout": 1})
        found = [simulated.placement.view()["roles"][1]["weights"]]
        for _ in range(2):
            batch = actor.generate(["hello"] * 4, max_new_tokens=4)
            batch.wait()
            found.append(simulated.placement.view()["roles"][1]["weights"])
            actor.update(batch, lambda out, b: -out.log_probs, mini_batches=2).wait()
            found.append(simulated.placement.view()["roles"][1]["weights"])
        assert found == ["no weights yet", "fresh (0 updates)", "2 updates behind", "fresh (2 updates)", "2 updates behind"]
        critic = simulated.critic("tiny")
        simulated.place({"actor critic": 1, "critic.inference": 1})
        critic.compute_values(batch).wait()
        assert [s.phase for s in simulated.trace.calls if s.method == "export_weights" and s.role == "critic"] == ["preparation"]
        assert set(simulated.trace[0].overlap()) <= {(), ("actor",), ("actor.rollout",), ("actor", "actor.rollout")}


def test_the_picture_s_data(session, actor):
    session.place()
    data = session.placement.view()
    assert [n["devices"] for n in data["nodes"]] == [[0, 1]]
    assert data["pools"] == {"all": [0, 1]}
    (role,) = data["roles"]
    assert [s["rollout_replica"] for s in role["shards"]] == [0, 1]
    assert role["shards"][0]["planned_bytes"] > 10**6
    card = session.view()
    assert card["roles"][0]["name"] == "actor"
    assert card["devices"] == "1x2 cpu"


def test_logs_are_those_of_a_rank_and_unknown_roles_are_named(session, actor):
    session.place()
    assert "rank 1 of pool 'all'" in session.logs("actor", rank=1)
    with refuses(hf.PlacementError, "'critic'", "has actor"):
        session.logs("critic")


@each("devices", [0, True, "two", 1.5, "ray://localhost:1"])
def test_bad_devices(devices):
    with pytest.raises(hf.OptionError):
        hf.Session(devices)


def test_declaring_again_after_a_load_keeps_what_was_loaded(session, actor, tmp_path):
    reference, critic = session.reference(actor), session.critic("tiny")
    with hf.Session(runtime=ScriptedRuntime(), seed=5) as other:
        other.actor("tiny"), other.critic("tiny")
        other.save(tmp_path)
    session.load(tmp_path)
    assert session.seed == 5
    assert session.actor("tiny") is actor
    assert session.reference(actor) is reference
    assert session.critic("tiny") is critic
    assert not session.messages


def test_a_reference_declared_again_after_placing_is_the_same(session, actor):
    reference = session.reference(actor)
    session.place()
    assert actor.role.train.dp == 2
    assert session.reference(actor) is reference
    assert not session.messages
    with pytest.warns(UserWarning, match=r"reference is replaced: layout .*") as caught:
        session.reference(actor, layout="tp2")
    assert "updates" not in str(caught[0].message), "a frozen model has none to lose"


def test_a_model_without_a_scalar_head_scores_with_a_notice(session, tmp_path):
    with pytest.warns(UserWarning, match=r"reward: tiny has no trained scalar head .*random one"):
        session.reward("tiny")
    folder = tmp_path / "scorer"
    shutil.copytree(model_folder("tiny"), folder)
    width = ModelSpec.from_folder(folder).hidden_size
    header = json.dumps({"score.weight": {"dtype": "F32", "shape": [1, width], "data_offsets": [0, 4 * width]}}).encode()
    (folder / "head.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * width))
    with WeightFiles(folder) as files:
        index = {"weight_map": {**dict.fromkeys(files.files, "body.safetensors"), "score.weight": "head.safetensors"}}
    (folder / "model.safetensors").rename(folder / "body.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.cost(str(folder))


def test_the_version_of_a_handle_is_its_own(session, actor):
    learn(actor, 3)
    assert actor.version == 3
    with pytest.warns(UserWarning, match="replaced"):
        new = session.actor("tiny", dtype="bf16", replace=True)
    assert new.version == 0, "it is not placed yet; the old one still is"


def test_a_closed_real_session_s_placement_is_not_a_prediction(session, actor):
    assert session.placement.view()["predicted"] is False
    session.place()
    session.close()
    assert session.placement.view()["predicted"] is False
    with hf.Session.simulated("1x2 A100-80GB") as simulated:
        assert simulated.placement.view()["predicted"] is True


def test_the_dataflow_keeps_aliased_columns():
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        batch = actor.generate(["one"], max_new_tokens=4)
        batch = batch.alias("old_log_probs", "rollout_log_probs")
        actor.update(batch, lambda out, b: b["old_log_probs"]).wait()
        columns = {edge.source: edge.columns for edge in session.dataflow.edges}
        assert "old_log_probs" in columns[refs_of(batch)["old_log_probs"].call_id]


@pytest.mark.parametrize(
    ("cluster", "kind", "dtype"),
    [
        ("1x2 cpu", "ray", "fp32"),
        ("1x2 H100", "ray", "bf16"),
        ("2x8 A100-80GB", "ray", "bf16"),
        ("1x2 cpu", "simulated", "fp32"),
        ("1x2 H100", "simulated", "fp32"),
    ],
)
def test_models_are_bf16_on_gpus_unless_the_user_says_otherwise(cluster, kind, dtype):
    other = {"fp32": "bf16", "bf16": "fp32"}[dtype]
    with hf.Session.simulated(cluster) if kind == "simulated" else hf.Session(runtime=ScriptedRuntime(cluster)) as session:
        actor = session.actor("tiny")
        declared = [actor, session.critic("tiny"), session.reference(actor), session.reward("tiny", optimizer=hf.AdamW())]
        asked = session.actor("tiny", name="asked", dtype=other)
        follows = session.reference(asked, name="follows")
        declared_otherwise = [asked, follows, session.critic("tiny", name="judge", dtype=other)]
        session.place("colocate")
        placed = {name: role["dtype"] for name, role in roles_of(session).items()}
        assert placed == {model.name: dtype for model in declared} | {model.name: other for model in declared_otherwise}
        assert session.reference(asked, name="own", dtype=dtype).role.dtype == dtype, "its own wins over the actor's"


def test_a_session_is_open_as_long_as_a_handle_of_it_is_there(runtime):
    def handle():
        return hf.Session(runtime=runtime).actor("tiny")

    actor = handle()
    gc.collect()
    assert runtime.closed == 0
    assert actor.generate("x").wait().done
    del actor
    gc.collect()
    assert runtime.closed == 1


def test_tab_shows_what_a_user_would_type():
    public = {name for name in dir(hf.Session.simulated("1x1 H100")) if not name.startswith("_")}
    assert not public & {"client", "ready", "release", "notice", "next_count", "persistent", "restore", "find_snapshot", "resume"}
    assert hf.Session.__bases__ == (AttributeHints, PublicNames)


def test_the_facade_passes_on_with_its_own_name():
    with hf.Session.simulated("1x1 H100") as session:
        with refuses(hf.OptionError, "Session.prompts", "batch_size"):
            session.prompts(["a"], batch_size=0)
        with pytest.raises(TypeError, match=r"^Session\.train\(\) missing"):
            session.train()
        assert "compute_values" not in session.actor.__doc__
        assert str(inspect.signature(session.place)).startswith("(what: ")


def test_batches_are_found_while_another_thread_imports_ipython(session, actor, monkeypatch):
    """The module is there then, and has nothing in it yet."""
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    assert list(session.batches) == []
