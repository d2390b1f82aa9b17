"""Saves in an object store, fsspec's one in memory: complete or not there, and clear about what the store refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core import store
from hfsdk.core.store import StorePath
from hfsdk.state.checkpoint_index import folder_of
from tests.session.scripted import learn

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory(monkeypatch):
    """The objects that there are, by name."""
    monkeypatch.setattr(store, "_stores", {})
    kept = fsspec.filesystem("memory").store
    kept.clear()
    yield kept
    kept.clear()


@pytest.fixture
def simulated(memory):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny"), session.critic("tiny")
        yield session


AT = "memory://bucket/run"


def states(memory, at="/bucket/run/"):
    """Which saves have objects, by their numbers; the random ends differ."""
    return sorted({name.removeprefix(at).split("/")[0] for name in memory if name.startswith(at + "state-")})


def refuse(monkeypatch, what, error, name=""):
    """Have the store refuse what it is asked about objects of this name."""
    kind = fsspec.get_filesystem_class("memory")
    whole = getattr(kind, what)

    def refused(self, path, *args, **kwargs):
        if path.endswith(name):
            raise error
        return whole(self, path, *args, **kwargs)

    monkeypatch.setattr(kind, what, refused)


def learned(session, num_updates):
    """Have the actor take optimizer steps until it has had so many."""
    learn(session.models.actor, num_updates - session.models.actor.version)


def updates(session):
    return session.models.actor.version


def test_what_is_saved_comes_back_and_the_last_ones_are_kept(simulated, memory):
    for step in range(3):
        learned(simulated, step)
        assert simulated.save(AT, keep=2) == AT
    there = states(memory)
    assert [name[:8] for name in there] == ["state-2-", "state-3-"]
    simulated.load(f"{AT}/{there[0]}")
    assert updates(simulated) == 1
    simulated.load(AT + "/")
    assert updates(simulated) == 2
    learned(simulated, 7)
    saving = simulated.save(AT, wait=False)
    assert saving.wait().folder == AT
    assert [name[:8] for name in states(memory)] == ["state-4-"]
    simulated.load(AT)
    assert updates(simulated) == 7


def test_a_run_saves_there_and_goes_on_from_there(memory):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        session.reference(actor), session.critic("tiny"), session.reward(lambda completions: [0.0] * len(completions))
        prompts = session.prompts(["a", "b"], batch_size=2)
        given = {"folder": AT, "save_every": 2, "progress": False}
        session.train(hf.PPO(max_new_tokens=4), prompts, steps=4, keep=2, **given)
        first = states(memory)[0]
        run = session.train(hf.PPO(max_new_tokens=4), prompts, steps=1, resume=f"{AT}/{first}", **given)
        assert [row["step"] for row in run.rows] == [2]


def test_objects_without_an_index_are_no_save(simulated, memory):
    simulated.save(AT)
    del memory["/bucket/run/session.json"]
    with refuses(hf.CheckpointError, AT, "unfinished", "session.json"):
        simulated.load(AT)
    with pytest.warns(UserWarning, match="has objects of unfinished saves, state-1-.*hfsdk leaves them"):
        simulated.save(AT)
    simulated.save(AT)
    assert [name[:8] for name in states(memory)] == ["state-1-", "state-3-"], "said once; only its own were removed"


@pytest.mark.parametrize("name", ["save.json", "session.json"])
def test_a_save_that_the_store_does_not_take_is_none(simulated, memory, monkeypatch, name):
    simulated.save(AT)
    before = states(memory)
    learned(simulated, 5)
    with monkeypatch.context() as patch:
        refuse(patch, "pipe_file", ConnectionResetError("gone"), name)
        with refuses(hf.CheckpointError, AT, name, "gone", "credentials"):
            simulated.save(AT)
    assert (states(memory) == before) is (name == "save.json"), "whether the index arrived is for the next save to see"
    simulated.load(AT)
    assert updates(simulated) == 0
    simulated.save(AT)
    assert len(states(memory)) == 1


def test_an_index_that_arrived_though_nobody_heard_of_it_is_believed(simulated, memory, monkeypatch):
    simulated.save(AT)
    learned(simulated, 5)
    whole = StorePath.write_bytes

    def unheard(self, content):
        whole(self, content)
        if self.name == "session.json":
            raise hf.CheckpointError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "write_bytes", unheard)
        with refuses(hf.CheckpointError, "no answer"):
            simulated.save(AT)
    simulated.load(AT)
    assert updates(simulated) == 5
    simulated.save(AT)
    assert [name[:8] for name in states(memory)] == ["state-3-"]


def test_what_a_failed_save_could_not_remove_goes_with_the_next(simulated, memory, monkeypatch):
    simulated.save(AT)
    with monkeypatch.context() as patch:
        refuse(patch, "pipe_file", OSError("full"), "save.json")
        refuse(patch, "rm", OSError("down"))
        with refuses(hf.CheckpointError, "full"):
            simulated.save(AT)
    left = states(memory)
    assert len(left) == 2
    simulated.save(AT)
    assert len(states(memory)) == 1
    assert states(memory)[0] not in left


def test_two_that_save_at_once_do_not_mix(simulated, memory, monkeypatch):
    """Another process reads the index, then this one saves, then the other one is done: its save is whole."""
    import hfsdk.state.checkpoint as checkpoint

    monkeypatch.setattr("hfsdk.state.folder_lock._turns", {})
    simulated.save(AT)
    learned(simulated, 1)
    new = checkpoint.new_state

    def meanwhile(root, number):
        monkeypatch.setattr(checkpoint, "new_state", new)
        monkeypatch.setattr("hfsdk.state.folder_lock._turns", {})
        with hf.Session.simulated("1x2 A100-80GB") as other:
            other.actor("tiny"), other.critic("tiny")
            other.save(AT)
        return new(root, number)

    monkeypatch.setattr(checkpoint, "new_state", meanwhile)
    simulated.save(AT)
    simulated.load(AT)
    assert updates(simulated) == 1


def test_damage_is_told_by_the_checksum(simulated, memory):
    simulated.save(AT)
    [name] = [name for name in memory if name.endswith("actor/simulated.json")]
    whole = memory[name].getvalue()
    path = StorePath(f"memory:/{name}")
    path.write_bytes(whole.replace(b"0", b"1"))
    with refuses(hf.CheckpointError, "damaged", f"memory:/{name}", "content"):
        simulated.load(AT)
    path.write_bytes(whole[:-1])
    with refuses(hf.CheckpointError, "damaged", f"{len(whole) - 1} bytes", f"{len(whole)} were saved"):
        simulated.load(AT)
    path.unlink()
    with refuses(hf.CheckpointError, "incomplete", f"memory:/{name}", "missing"):
        simulated.load(AT)


def test_an_object_that_a_worker_put_elsewhere_is_missed(simulated, memory, monkeypatch):
    """A store of each process's own, as memory:// is: nothing of it is a save."""
    sizes = StorePath.sizes
    monkeypatch.setattr(StorePath, "sizes", lambda self: {n: s for n, s in sizes(self).items() if n != "actor/simulated.json"})
    files = {"actor/simulated.json": hf.core.files.FileSum(1, 1)}
    monkeypatch.setattr("hfsdk.engine.simulation.runtime.SimulatedRuntime.saved", lambda *_: {"simulated.json": files})
    monkeypatch.setattr("hfsdk.state.checkpoint.save_bytes", lambda *_: b"{}")
    with refuses(hf.CheckpointError, "incomplete", AT, "actor/simulated.json", "missing"):
        simulated.save(AT)
    assert states(memory) == []


def test_anothers_save_is_told_of_once(simulated, memory, monkeypatch):
    simulated.save(AT)
    monkeypatch.setattr("hfsdk.core.files._written", {})
    with pytest.warns(UserWarning, match="memory://bucket/run has a save of another session, state-1-"):
        simulated.save(AT)
    simulated.save(AT)


@each(
    "address, named",
    [
        ("s3:///", "looks like"), ("simplecache::memory://x", "looks like"), ("a/b://c", "looks like"), ("://", "looks like"),
        ("nothing://x/y", "nothing://"), ("memory://x?token=abc", "no password"), ("memory://me:abc@x/y", "no password"),
        ("memory://x/lr[1e-5]", "patterns"),
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(simulated, address, named):
    with refuses(hf.OptionError, named) as caught:
        simulated.save(address)
    assert "abc" not in str(caught.value)


def test_what_a_store_says_is_shown_without_secrets(simulated, monkeypatch):
    says = "403, url='https://me:hidden@host/x?sig=hidden', see https://host/y?X-Amz-Signature=hidden"
    refuse(monkeypatch, "info", PermissionError(says))
    with refuses(hf.CheckpointError, "PermissionError: 403", "https://...@host/x?...") as caught:
        simulated.load(AT)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None or "hidden" not in str(caught.value.__cause__)


def test_packages_that_are_missing_are_named(simulated, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        patch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
        with refuses(hf.OptionError, "s3://", "pip install s3fs"):
            simulated.save("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with refuses(hf.OptionError, "pip install 'hfsdk[store]'"):
        simulated.save(AT)


def test_other_files_do_not_go_there(simulated):
    with refuses(hf.OptionError, "of an object store"):
        simulated.report("s3://bucket/report.html")
    with refuses(hf.OptionError, "of an object store"):
        simulated.models.actor.save_pretrained("s3://bucket/model")


def test_an_address_that_a_path_has_spoilt_is_told(simulated):
    with refuses(hf.OptionError, "pathlib.Path", "s3://"):
        simulated.save(Path("s3://bucket/run"))


def test_a_file_address_is_a_path(tmp_path):
    assert folder_of((tmp_path / "a b").as_uri(), "a save") == tmp_path / "a b"
