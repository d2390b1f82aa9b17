"""Exported steps without engines: what is refused before anything is taken again, and which difference is the first."""

import json
import pickle

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.table import Ragged, Table
from hfsdk.diagnose import replay as replaying
from hfsdk.diagnose.replay import _Compared, _first_call, _first_number, _first_weight
from hfsdk.diagnose.step_export import CONTENT, FORMAT, SUMMARY, ExportedCall, ExportedStep

TEXTS = ["a", "b", "c", "d"]


def length_reward(completions):
    return [float(len(text)) for text in completions]


def call(name="actor.generate", result=None, error="", **columns):
    return ExportedCall(name, "cell 3, line 1", Table(columns), result, error)


def first(then, now):
    found = _first_call(then, now, _Compared())
    return None if found is None else (found.call, found.what, found.then, found.now, found.row, found.token)


def ragged(*rows, dtype=np.float32):
    return Ragged.of(rows, dtype)


NAN = float("nan")
OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)[0]


@each(
    "then, now, difference",
    [
        (call(response=ragged([1, 2], [3])), call(response=ragged([1, 2], [3])), None),
        (call(response=ragged([1, 2], [3])), call(response=ragged([1, 2], [4])), ("response", 3.0, 4.0, 1, 0)),
        (call(response=ragged([1, 2], [3])), call(response=ragged([1], [3])), ("response", "2 tokens", "1 tokens", 0, None)),
        (call(response=ragged([], [0.0])), call(response=ragged([], [-0.0])), ("response", 0.0, -0.0, 1, 0)),
        (call(scores=np.float32([1, NAN])), call(scores=np.float32([1, NAN])), None),
        (call(scores=np.array([1, 2], np.float32)), call(scores=np.array([1, 2], np.float64)), ("scores", 1.0, 1.0, 0, None)),
        (call(scores=np.float32([1, 2])), call(scores=np.float32([1, 2.5])), ("scores", 2.0, 2.5, 1, None)),
        (call(text=np.array(["x", None], object)), call(text=np.array(["x", "y"], object)), ("text", None, "y", 1, None)),
        (call(), call("actor.update"), ("the call", "actor.generate", "actor.update", None, None)),
        (call(), call(error="failed"), ("how it ended", "done", "failed", None, None)),
        (call(a=np.float32([1])), call(b=np.float32([1])), ("the columns", ["a"], ["b"], None, None)),
        (call(result=[{"loss": 0.5}, {"loss": 0.25}]), call(result=[{"loss": 0.5}, {"loss": 0.5}]),
         ("loss of mini-batch 1", 0.25, 0.5, None, None)),
        (call(result=[{"loss": NAN}]), call(result=[{"loss": NAN}]), None),
        (call(result=3.5), call(result=4.5), None),  # seconds of a call, which no two runs share
    ],
)  # fmt: skip
def test_the_first_number_that_differs_is_named(then, now, difference):
    found = first([call("session.map"), then], [call("session.map"), now])
    if difference is None:
        assert found is None
        return
    what, *rest = difference
    assert found[0] == 1
    assert found[1].endswith(what)
    assert [str(value) for value in found[2:]] == [str(value) for value in rest]


def test_what_is_not_a_number_is_compared_by_its_bits():
    assert first([call(x=np.float32([NAN]))], [call(x=np.array([OTHER_NAN]))]) is not None


def test_calls_that_are_not_there_are_a_difference():
    assert first([call(), call("actor.update")], [call()]) == (1, "how many calls", 2, 1, None, None)


def test_metrics_and_weights_come_after_the_calls():
    assert str(_first_number({"loss": 0.5, "kl": 0.1}, {"loss": 0.5, "kl": 0.2}, _Compared())) == "kl: 0.1 then, 0.2 now"
    then, now = {"actor": [{"w": "a"}, {"w": "b"}]}, {"actor": [{"w": "a"}, {"w": "c"}]}
    assert "w of actor, rank 1" in str(_first_weight(then, now))
    assert _first_weight(then, then) is None
    assert "ranks of actor" in str(_first_weight(then, {"actor": [{"w": "a"}]}))


# -- what is refused


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny")
        session.reward(length_reward)
        yield session


def test_a_session_without_a_run_of_numbers_has_no_step_to_export(session, tmp_path):
    with refuses(hf.OptionError, "export_step", "session.train(...)"):
        session.export_step(0, tmp_path / "step")
    session.train(hf.GRPO(n=2, max_new_tokens=4, kl_coef=0.0), session.prompts(TEXTS, batch_size=2), steps=1, progress=False)
    with refuses(hf.OptionError, "simulated"):
        session.export_step(0, tmp_path / "step")
    assert not (tmp_path / "step").exists()


def exported(folder, record=None, **summary):
    """A folder with a step.json and a step.pkl that go together."""
    import zlib

    folder.mkdir(mode=0o700)
    content = pickle.dumps(record)
    (folder / CONTENT).write_bytes(content)
    (folder / CONTENT).chmod(0o600)
    told = {"format": FORMAT, "content": {"bytes": len(content), "crc32": zlib.crc32(content)}, **summary}
    (folder / SUMMARY).write_text(json.dumps(told))
    return folder


def test_what_is_no_exported_step_is_refused(tmp_path):
    with refuses(hf.CheckpointError, "no exported step", "session.export_step"):
        hf.replay(tmp_path)
    folder = exported(tmp_path / "a")
    with refuses(hf.CheckpointError, CONTENT, "no exported step"):
        hf.replay(folder)
    (folder / CONTENT).write_bytes(b"other")
    with refuses(hf.CheckpointError, CONTENT, "checksum"):
        hf.replay(folder)
    (folder / SUMMARY).write_text("{")
    with refuses(hf.CheckpointError, SUMMARY, "damaged"):
        hf.replay(folder)
    with refuses(hf.CheckpointError, "format 7"):
        hf.replay(exported(tmp_path / "b", format=7))


@each("what", ["folder", "file"])
def test_functions_that_others_may_have_written_are_not_run(tmp_path, monkeypatch, what):
    folder = exported(tmp_path / what)
    place = folder if what == "folder" else folder / CONTENT
    monkeypatch.setattr(replaying.pickle, "loads", lambda content: pytest.fail("it was run"))
    place.chmod(0o777)
    with refuses(hf.OptionError, place, "trusted=True"):
        hf.replay(folder)
    place.chmod(0o700)
    monkeypatch.setattr(replaying.os, "getuid", lambda: place.stat().st_uid + 1)
    with refuses(hf.OptionError, "another user", "trusted=True"):
        hf.replay(folder)
    monkeypatch.undo()
    with refuses(hf.CheckpointError, "no exported step"):
        hf.replay(folder, trusted=True)


def test_ones_own_group_may_write_as_a_umask_of_many_systems_has_it(tmp_path):
    folder = exported(tmp_path / "mine")
    folder.chmod(0o770)
    with refuses(hf.CheckpointError, "no exported step"):
        hf.replay(folder)


def test_a_record_travels_by_the_names_of_its_classes():
    """Another process reads it with the package alone: nothing of it may be a class of the session's own process."""
    assert {ExportedStep.__module__, ExportedCall.__module__} == {"hfsdk.diagnose.step_export"}
