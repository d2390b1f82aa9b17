"""A folder of saves: what is kept, what is refused, who waits, and what an index may say."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from edited_saves import reseal, save_of
from expect import each, refuses, until

import hfsdk as hf
from hfsdk.core.weight_files import weight_names
from hfsdk.session.parts import parts_of
from hfsdk.state import checkpoint, checkpoint_index
from hfsdk.state.folder_lock import LOCK, FolderLock
from hfsdk.viz.drawn import picture_of
from tests.session.scripted import learn, let_go_when, waits


def prepared(session):
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.critic("tiny", optimizer=hf.AdamW(lr=1e-5))
    return session


def names(folder):
    return sorted(p.name for p in Path(folder).iterdir())


# -- only its own


def test_what_else_is_in_the_folder_stays(session, tmp_path):
    mine = [tmp_path / name / "notes.txt" for name in ("state-of-the-art", "state-7", "state-9.partial", "state-x")]
    for file in mine:
        file.parent.mkdir()
        file.write_text("mine")
    prepared(session)
    for _ in range(2):
        session.save(tmp_path)
    assert [file.read_text() for file in mine] == ["mine"] * 4
    assert names(tmp_path) == sorted(["session.json", "state-11", *(file.parent.name for file in mine)])


@each("content", ["{}", "not json", '{"format": 99}', '{"format": 3, "saves": []}', "[]", "7", ""])
def test_a_foreign_index_is_not_overwritten(session, tmp_path, content):
    prepared(session)
    (tmp_path / "session.json").write_text(content)
    with refuses(hf.CheckpointError, tmp_path, "a session.json that hfsdk did not write"):
        session.save(tmp_path)
    assert (tmp_path / "session.json").read_text() == content
    assert names(tmp_path) == ["session.json"]


def test_a_link_in_place_of_a_save_is_not_followed(session, tmp_path):
    prepared(session)
    folder, elsewhere = tmp_path / "saves", tmp_path / "elsewhere"
    session.save(folder)
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    (folder / "state-1").rename(tmp_path / "moved")
    (folder / "state-1").symlink_to(elsewhere)
    session.save(folder)
    assert (elsewhere / "precious").exists()


# -- several saves


def test_the_last_three_are_kept_and_each_can_be_loaded(session, tmp_path):
    actor = prepared(session).models.actor
    for _ in range(5):
        session.save(tmp_path, keep=3)
        learn(actor, 1)
    assert names(tmp_path) == ["session.json", "state-3", "state-4", "state-5"]
    session.load(tmp_path)
    assert actor.version == 4
    session.load(tmp_path / "state-3")
    assert actor.version == 2
    with refuses(hf.CheckpointError, "state-2", "state-3, state-4, state-5"):
        session.load(tmp_path / "state-2")
    (tmp_path / "state-5" / "actor" / "simulated.json").write_text("9")
    with refuses(hf.CheckpointError, "state-3, state-4", f"session.load('{tmp_path}/state-4')"):
        session.load(tmp_path)
    assert actor.version == 2
    session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-6"]


def test_a_save_without_checksums_can_be_loaded_and_is_kept(session, tmp_path):
    """Format 2: one save, sizes only, its index the whole of it."""
    actor = prepared(session).models.actor
    learn(actor, 1)
    session.save(tmp_path)
    save, state = save_of(tmp_path)
    files = {name: noted[0] for name, noted in save["files"].items()}
    (state / "save.json").unlink()
    (tmp_path / "session.json").write_text(json.dumps({**save, "format": 2, "state": state.name, "files": files}))
    learn(actor, 1)
    with pytest.warns(UserWarning, match="without checksums"):
        session.load(tmp_path)
    assert actor.version == 1
    learn(actor, 2)
    session.save(tmp_path, keep=2)
    with pytest.warns(UserWarning, match="without checksums"):
        session.load(tmp_path / "state-1")
    assert actor.version == 1
    session.load(tmp_path)
    assert actor.version == 3


def test_a_simulated_session_leaves_a_folder_with_weights_alone(tmp_path):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny")
        session.save(tmp_path)
        session.save(tmp_path)
        save, index = tmp_path / "state-2" / "save.json", tmp_path / "session.json"
        inner = json.loads(save.read_text())
        inner["files"]["actor/__0_0.distcp"] = [0, 0]  # as a session with workers writes them
        save.write_text(json.dumps(inner))
        index.write_text(json.dumps({"format": 3, "saves": [["state-2", save.stat().st_size, zlib.crc32(save.read_bytes())]]}))
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with refuses(hf.CheckpointError, "state-2", "weights", "a simulated session has none"):
            session.save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_training_keeps_as_many_as_it_is_told(tmp_path):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny"), session.critic("tiny"), session.reference(session.models.actor), session.reward("tiny")
        prompts = session.prompts([[1, 2, 3]] * 8, batch_size=4)
        session.train(hf.PPO(max_new_tokens=4), prompts, steps=4, save_every=1, folder=tmp_path, keep=2, progress=False)
    assert names(tmp_path) == ["session.json", "state-3", "state-4"]


@each("given", [{"keep": 0}, {"keep": 1.5}, {"keep": True}, {"wait": "False"}])
def test_options_are_checked_before_anything_is_written(session, tmp_path, given):
    prepared(session)
    with refuses(hf.OptionError, *given):
        session.save(tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


@each("folder", ["a" * 5000, "", "a\0b", 3, None, "~nobody-of-this-name/x", b"bytes"])
def test_what_is_no_folder_is_refused(session, folder):
    prepared(session)
    for call in (session.save, session.load):
        with refuses((hf.CheckpointError, hf.OptionError)):
            call(folder)


# -- one at a time


def test_threads_take_turns(session, tmp_path):
    prepared(session)
    session.save(tmp_path)
    failures, begun = [], []

    def work(k):
        try:
            for _ in range(5):
                save = session.save(tmp_path / "b" if k == 3 else tmp_path, keep=2, wait=k != 2)
                begun.extend([save] if k == 2 else [])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for save in begun:
        save.wait()
    assert names(tmp_path) == ["b", "session.json", "state-15", "state-16"]
    assert names(tmp_path / "b") == ["session.json", "state-4", "state-5"]
    session.load(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from hfsdk.state.folder_lock import FolderLock
lock = FolderLock(Path({folder!r}))
lock.acquire()
lock.note(["state-2.partial", "state-1", "../precious", "state-2"])
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_and_its_death_lets_go(session, tmp_path):
    """After a kill only what its note names is removed, and nothing outside the folder."""
    prepared(session)
    folder = tmp_path / "saves"
    session.save(folder)
    (tmp_path / "precious").mkdir()
    command = [sys.executable, "-c", HOLDER.format(folder=str(folder))]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with refuses(hf.CheckpointError, f"another process ({holder.pid} on ", folder):
            session.save(folder)
        assert names(folder) == [LOCK, "session.json", "state-1"]
        (folder / "state-2.partial").mkdir()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    session.load(folder)
    session.save(folder, keep=2)
    assert names(folder) == ["session.json", "state-1", "state-2"]
    assert (tmp_path / "precious").is_dir()


def test_a_failed_save_lets_the_next_one_in(session, runtime, tmp_path):
    prepared(session)
    for failing in ("save_state", "saved"):
        runtime.failing[failing] = hf.CheckpointError("the disk is full")
        with refuses(hf.CheckpointError, "the disk is full"):
            session.save(tmp_path)
        runtime.failing.clear()
        assert names(tmp_path) == []
    session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-1"]


def test_a_folder_that_vanishes_is_told(session, runtime, tmp_path):
    prepared(session)
    runtime.hold("saved")
    saving = session.save(tmp_path / "a", wait=False)
    until("both roles have copied", lambda: len(list((tmp_path / "a").rglob("simulated.json"))) == 2)
    (tmp_path / "a").rename(tmp_path / "gone")
    runtime.let_go()
    with refuses(hf.CheckpointError, tmp_path / "a"):
        saving.wait(60)
    session.save(tmp_path / "b")


def free(monkeypatch, num_bytes):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=num_bytes))


def test_too_little_space_is_told_before_the_ranks_copy(session, runtime, tmp_path, monkeypatch):
    prepared(session)
    free(monkeypatch, 10**6)
    with refuses(hf.CheckpointError, tmp_path, "24.9 MB", "1.0 MB free"):
        session.save(tmp_path)
    assert names(tmp_path) == []
    assert not runtime.sent("save_state")


@pytest.mark.parametrize(
    ("there", "keep", "steps", "states"), [(0, 1, 1, 1), (0, 1, 9, 2), (0, 3, 2, 2), (0, 3, 9, 4), (2, 3, 9, 2), (1, 1, 9, 1)]
)
def test_a_run_whose_saves_would_not_fit_is_refused_before_its_first_step(
    session, tmp_path, monkeypatch, there, keep, steps, states
):
    prompts = prepared(session).prompts(["a", "b"], batch_size=2)
    session.reference(session.models.actor)
    session.reward(lambda completions: [0.0] * len(completions))
    for number in range(there):
        (tmp_path / f"state-{number}").mkdir()
    each = 2 * session.models.actor.spec.num_parameters() * 12  # actor and critic: weights and two moments in fp32

    def train(folder=tmp_path, steps=steps):
        """Take one step, if the run begins."""
        given = {"save_every": 1, "folder": folder, "keep": keep, "progress": False}
        session.train(hf.PPO(max_new_tokens=4), prompts, steps=steps, stop=lambda row: True, **given)

    free(monkeypatch, states * each)
    with refuses(hf.CheckpointError, f"keep={keep}", "Free some space"):
        train()
    assert session.run is None
    free(monkeypatch, states * each + checkpoint.SPARE_BYTES)
    train()
    train(tmp_path / "not" / "made", 1)


# -- what an index may say


def wrong_values(rng):
    deep = []
    for _ in range(50):
        deep = [deep]
    numbers, texts = [-1, 10**30, 1e308, float("nan")], ["", "x", "../outside", "a" * 10_000]
    return rng.choice([None, True, *numbers, *texts, [], {}, [None], {"": None}, deep])


def mutate(rng, value):
    """Replace, remove, add or swap something anywhere in plain data."""
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(value)
    node, key = rng.choice(places)
    how = rng.randrange(4)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, dict):
        node[str(wrong_values(rng))[:50]] = copy.deepcopy(rng.choice(places)[0])
    elif how == 2:
        other, there = rng.choice(places)
        node[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(node[key])
    else:
        node[key] = wrong_values(rng)


@pytest.mark.filterwarnings("ignore:.* was saved without checksums")
def test_whatever_an_index_says_is_loaded_whole_or_refused_at_once(tmp_path):
    """Also with checksums that fit: a wrong one changes nothing, and the session goes on."""
    rng = random.Random(0)
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny"), session.critic("tiny")
        session.record({"step": 0, "score_mean": 0.5})
        session.snapshot("before")
        session.rewind("before")
        session.save(tmp_path)
        index = json.loads((tmp_path / "session.json").read_text())
        save, state = save_of(tmp_path)
        refused = 0
        for k in range(400):
            changed = copy.deepcopy(index if k % 4 == 0 else save)
            for _ in range(rng.randrange(1, 3)):
                mutate(rng, changed)
            before = (session.seed, parts_of(session).context.counters.all(), repr(session.history))
            if k % 4 == 0:
                (tmp_path / "session.json").write_text(json.dumps(changed))
            else:
                (tmp_path / "session.json").write_text(json.dumps(index))
                reseal(tmp_path, lambda _, new=changed: new)
            try:
                session.load(tmp_path)
                repr(session.history), session.history.view()
            except hf.CheckpointError:
                refused += 1
                assert (session.seed, parts_of(session).context.counters.all(), repr(session.history)) == before
            (state / "save.json").write_text(json.dumps(save))
        assert refused > 200
        (tmp_path / "session.json").write_text(json.dumps(index))
        reseal(tmp_path, lambda _: save)
        session.load(tmp_path)


@each("content", [b"[" * 10**6, b"\xff\xfe{}", b'{"format":' + b"9" * 10**5 + b"}", b"", b"\0" * 4096])
def test_an_index_that_is_no_json_is_refused(session, tmp_path, content):
    prepared(session)
    (tmp_path / "session.json").write_bytes(content)
    with refuses(hf.CheckpointError, tmp_path):
        session.load(tmp_path)


WRONG = {
    "without cycles": lambda s: s["session"].update(branches=[["main", "b", "", 0], ["b", "main", "", 0]]),
    "parent": lambda s: s["session"].update(branches=[["main", "gone", "", 0]]),
    "session.branch": lambda s: s["session"].update(branch="elsewhere"),
    "actor/../../x": lambda s: s["files"].update({"actor/../../x": [0, 0]}),
    "/etc/passwd": lambda s: s["files"].update({"/etc/passwd": [0, 0]}),
    "session.seed": lambda s: s["session"].update(seed="0"),
    "session.positions": lambda s: s["session"].__delitem__("positions"),
    "plain name": lambda s: s["roles"].update({"../x": s["roles"]["actor"]}),
}
"""What a refusal names -> how the index is changed."""


def test_an_index_is_checked_as_a_whole_before_anything_is_replaced(session, tmp_path):
    actor = prepared(session).models.actor
    learn(actor, 1)
    session.save(tmp_path)
    save, _ = save_of(tmp_path)
    learn(actor, 1)

    @each("named, change", WRONG.items())
    def refused(named, change):
        reseal(tmp_path, lambda _: changed(change, copy.deepcopy(save)))
        with refuses(hf.CheckpointError, named):
            session.load(tmp_path)
        assert actor.version == 2

    refused()


def changed(change, save):
    change(save)
    return save


def test_a_saves_path_leads_nowhere_else(session, tmp_path):
    prepared(session)
    session.save(tmp_path / "saves")
    index = json.loads((tmp_path / "saves" / "session.json").read_text())
    index["saves"][0][0] = "../outside"
    (tmp_path / "saves" / "session.json").write_text(json.dumps(index))
    with refuses(hf.CheckpointError, "state-1"):
        session.load(tmp_path / "saves")


# -- other files


def test_a_report_is_written_beside_and_never_through_a_link(session, tmp_path):
    prepared(session)
    precious, report = tmp_path / "precious.html", tmp_path / "report.html"
    precious.write_text("mine")
    report.symlink_to(precious)
    with pytest.warns(UserWarning, match="the report replaced what was at"):
        session.report(report)
    assert precious.read_text() == "mine"
    assert not report.is_symlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.report(report)  # the same cell again
    assert names(tmp_path) == ["precious.html", "report.html"]


def test_what_cannot_be_written_leaves_what_was_there(session, tmp_path):
    prepared(session)
    picture = session.placement
    report = session.report(tmp_path / "report.html")
    before = report.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for write in (
            lambda: session.report(report), lambda: session.trace.snapshot().to_perfetto(tmp_path / "x" / "trace.json"),
            lambda: picture_of(picture).save(tmp_path / "p.html"),
        ):  # fmt: skip
            with refuses(hf.OutputError, "what was there is unchanged"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert report.read_bytes() == before
    assert names(tmp_path) == ["report.html"]


def read_only(folder):
    """Return a folder in which nothing can be made; ``folder`` unless this is root."""
    if os.geteuid() == 0:
        return Path("/proc/self")  # where not even root can
    folder.chmod(0o500)
    return folder


@pytest.mark.parametrize("place", ["read-only", "under a file"])
def test_a_place_that_takes_no_file_is_told(session, tmp_path, place):
    prepared(session)
    (tmp_path / "file").write_text("mine")
    folder = read_only(tmp_path) if place == "read-only" else tmp_path / "file"
    for write in (session.report, session.trace.snapshot().to_perfetto, picture_of(session.placement).save):
        with refuses(hf.HfsdkError, folder / "it.html") as told:
            write(folder / "it.html")
        assert "\n" not in str(told.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["file"]


def test_a_read_only_folder_is_told(session, tmp_path):
    prepared(session)
    folder = read_only(tmp_path)
    with refuses(hf.CheckpointError, folder.resolve() / "saves"):
        session.save(folder / "saves")


def test_branches_that_come_from_one_another_are_no_history():
    from hfsdk.core.history import Branch, History

    with refuses(hf.OptionError, "'a' from 'b' from 'a'"):
        History((), (Branch("main"), Branch("a", "b"), Branch("b", "a")), branch="a")
    assert len(History((), (Branch("main"), Branch("a", "main"), Branch("b", "a")), branch="b").path()) == 0


def length(num_bytes):
    return num_bytes.to_bytes(8, "little")


@each(
    "content, size",
    [(length(2**62), 8), (b"", 0), (b"\x04", 1), (length(4) + b"[1] ", 12), (length(9) + b"{", 9), (length(2 * 10**8), 3 * 10**8)],
)
def test_a_damaged_file_of_weights_is_told_by_its_header(tmp_path, content, size):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(content)
        file.truncate(size)
    with refuses(hf.ModelNotFoundError, "model.safetensors", "damaged"):
        weight_names(str(tmp_path))


def test_a_sample_of_two_million_tokens_makes_a_small_page():
    from hfsdk.core.table import Ragged, Table
    from hfsdk.core.tokens import Tokens
    from hfsdk.viz.pictures.tokens import tokens_view

    n = 2_000_000
    rng = np.random.default_rng(0)
    numbers = Ragged.of([rng.standard_normal(n).astype(np.float32), np.zeros(3, np.float32)])
    values = {"values": numbers, "rewards": numbers}
    ids = Ragged.of([rng.integers(0, 256, n), np.arange(3)])
    table = Table({"prompt": Ragged.of([rng.integers(0, 256, n), np.arange(5)]), "response": ids, **values})
    shown = Tokens.of(table, np.arange(2), 2, np.array([0, n]), lambda ids: [bytes([i]) for i in ids])
    page = picture_of(shown).to_html(full=True)
    assert len(page) < 3_000_000
    view = tokens_view(shown)
    assert [(len(s["prompt"]), len(s["response"])) for s in view["samples"]] == [(20_000, 20_000), (5, 3)]
    assert "at most 20,000 tokens are drawn" in view["note"]


def test_a_tracker_on_a_full_disk_is_given_up_and_training_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny"), session.critic("tiny"), session.reference(session.models.actor), session.reward("tiny")
        prompts = session.prompts([[1, 2, 3]] * 8, batch_size=4)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            with pytest.warns(UserWarning, match="TensorBoard is given up for this run"):
                run = session.train(hf.PPO(max_new_tokens=4), prompts, steps=6, track=hf.TensorBoard(str(tmp_path)), progress=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(run.rows) == 6


def test_an_exported_model_that_is_replaced_is_said(session, tmp_path):
    actor = prepared(session).models.actor
    (tmp_path / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match="save_pretrained replaced the model in"):
        actor.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actor.save_pretrained(tmp_path)


# -- what is saved can be loaded


class Numbers(hf.PPO):
    """Its metrics are what a user's own may be."""

    given: ClassVar[dict] = {}

    def metrics(self, step):
        return dict(self.given)


def trained(session, given, metrics=()):
    algorithm = Numbers(max_new_tokens=4)
    object.__setattr__(algorithm, "given", given)
    return session.train(algorithm, session.prompts(["a", "b"], batch_size=2), steps=1, metrics=metrics, progress=False)


@pytest.fixture
def simulated():
    with hf.Session.simulated("1x2 A100-80GB") as made:
        made.reference(made.actor("tiny"))
        made.critic("tiny")
        made.reward(lambda prompts, completions, **columns: [0.0] * len(prompts))
        yield made


def test_numbers_of_any_kind_are_saved_as_numbers(simulated, tmp_path):
    trained(simulated, {"score_mean": np.float32(0.25), "size": np.array(3), "label": "x", "none": None, "whole": 2})
    simulated.save(tmp_path)
    simulated.load(tmp_path)
    row = dict(simulated.history.rows[0])
    assert {key: row[key] for key in ("score_mean", "size", "label", "none", "whole")} == {
        "score_mean": 0.25, "size": 3.0, "label": "x", "none": None, "whole": 2
    }  # fmt: skip


@each("name", ["branch", "kind", "parent", "line", "role", "snapshot", "algorithm", "step", "order"])
def test_a_number_with_the_name_of_a_column_of_the_history_is_refused(simulated, name):
    with refuses(hf.OptionError, "Numbers.metrics", repr(name)):
        trained(simulated, {name: 1.0})


def test_what_is_no_number_is_refused(simulated):
    with refuses(hf.OptionError, "Numbers.metrics", "'rows'", "list"):
        trained(simulated, {"rows": [1, 2]})


def test_a_history_that_could_not_be_loaded_is_not_saved(session, tmp_path):
    prepared(session)
    session.save(tmp_path)
    before = (tmp_path / "session.json").read_bytes()
    session.record({"step": 0, "kl_mean": "much"})
    with refuses(hf.CheckpointError, "kl_mean", "a number"):
        session.save(tmp_path)
    assert (tmp_path / "session.json").read_bytes() == before
    assert names(tmp_path) == ["session.json", "state-1"]


def test_a_history_that_is_too_long_to_be_loaded_is_not_saved(session, tmp_path, monkeypatch):
    prepared(session)
    session.save(tmp_path)
    before = (tmp_path / "session.json").read_bytes()
    monkeypatch.setattr(checkpoint_index, "MOST_BYTES", 2000)
    for step in range(100):
        session.record({"step": step, "kl_mean": 0.5})
    with refuses(hf.CheckpointError, "100 rows"):
        session.save(tmp_path)
    assert (tmp_path / "session.json").read_bytes() == before
    assert names(tmp_path) == ["session.json", "state-1"]


def test_a_history_of_an_older_save_has_the_names_of_today(session, tmp_path):
    """An algorithm with a critic had them before; numbers of an algorithm of one's own keep their names."""
    old = {"kind": "step", "branch": "main", "parent": "", "step": 0, "score_mean": 1.0, "loss": 0.5, "grad_norm": 2.0}
    rows = [
        {**old, "algorithm": "GRPO(n=8)"}, {**old, "algorithm": "Mine(n=8)"}, {**old, "algorithm": "PPO()", "actor_loss": 0.1},
    ]  # fmt: skip
    prepared(session)
    session.save(tmp_path)
    reseal(tmp_path, lambda save: save["session"].update(history=rows))
    session.load(tmp_path)
    read = [{name: row[name] for name in row if name.endswith(("loss", "norm"))} for row in session.history]
    assert read == [
        {"actor_loss": 0.5, "actor_grad_norm": 2.0}, {"loss": 0.5, "grad_norm": 2.0},
        {"loss": 0.5, "grad_norm": 2.0, "actor_loss": 0.1},
    ]  # fmt: skip


def test_history_is_read_while_steps_are_recorded(session):
    """Each look at it has whole rows, as many as there were."""
    prepared(session)
    for step in range(50):
        session.record({"step": step, "kl_mean": float(step)})
    ended, failed = threading.Event(), []

    def look():
        while not ended.is_set():
            rows = list(session.history)
            failed.extend(row for row in rows if row["kl_mean"] != row["step"])

    thread = threading.Thread(target=look)
    thread.start()
    for step in range(50, 600):
        session.record({"step": step, "kl_mean": float(step)})
    ended.set()
    thread.join()
    assert not failed
    assert [row["step"] for row in session.history] == list(range(600))
    assert "order" not in session.history.rows[0]


def test_a_refused_save_does_not_forget_what_a_killed_one_left(session, tmp_path):
    prepared(session)
    folder = tmp_path / "saves"
    session.save(folder)
    (folder / "state-2.partial").mkdir()
    lock = FolderLock(folder)
    lock.acquire()
    lock.note(["state-2.partial"])
    lock.release(keep=True)
    good = (folder / "session.json").read_bytes()
    (folder / "session.json").write_text("{}")
    with refuses(hf.CheckpointError, "hfsdk did not write"):
        session.save(folder)
    (folder / "session.json").write_bytes(good)
    with pytest.warns(UserWarning, match="has a save of another session"):
        session.save(folder)
    assert names(folder) == ["session.json", "state-2"]


@pytest.fixture
def anothers(session, tmp_path, monkeypatch):
    """A folder with a save of another process."""
    prepared(session)
    session.save(tmp_path / "run")
    session.save(tmp_path / "run" / "best")
    monkeypatch.setattr("hfsdk.core.files._written", {})
    return tmp_path / "run"


class TestAnothersSave:
    def test_is_told_of_before_a_save_takes_its_place_and_once(self, session, anothers):
        with pytest.warns(UserWarning, match=r"has a save of another session, state-1: .* session\.load\("):
            session.save(anothers)
        session.save(anothers)

    def test_is_told_of_before_a_run_begins(self, session, anothers):
        prompts = session.prompts(["a", "b"], batch_size=2)
        session.reference(session.models.actor), session.reward(lambda completions: [0.0] * len(completions))
        with pytest.raises(UserWarning, match="has a save of another session"):  # warnings are errors here
            session.train(hf.PPO(max_new_tokens=4), prompts, steps=1, save_every=1, folder=anothers, progress=False)
        assert names(anothers) == ["best", "session.json", "state-1"]

    @pytest.mark.parametrize("name", ["", "best"])
    def test_is_the_sessions_own_once_it_is_loaded(self, session, anothers, name):
        session.load(anothers)
        session.save(anothers / name)


def test_a_save_that_another_process_removes_meanwhile_is_not_missed(session, tmp_path, monkeypatch):
    prepared(session)
    session.save(tmp_path)
    check, seen = checkpoint.check_files, []

    def saved_meanwhile(folder, files):
        seen.append(folder.name)
        if len(seen) == 1:
            session.save(tmp_path)
        check(folder, files)

    monkeypatch.setattr(checkpoint, "check_files", saved_meanwhile)
    session.load(tmp_path)
    assert seen == ["state-1", "state-2"]


def test_declaring_a_role_anew_waits_for_the_save_that_needs_it(session, runtime, tmp_path):
    actor = prepared(session).models.actor
    runtime.hold("saved")
    saving = session.save(tmp_path, wait=False)
    with let_go_when(runtime, lambda: waits(checkpoint.Saving.settle)):
        with pytest.warns(UserWarning, match="actor is replaced: optimizer"):
            session.actor("tiny", optimizer=hf.AdamW(lr=0.5))
        done = saving.done
    assert done
    assert saving.wait().folder == tmp_path
    assert actor is not session.models.actor


@pytest.mark.filterwarnings("ignore:actor is replaced")
@pytest.mark.parametrize("what", ["snapshot", "place", "release", "declare", "rewind"])
def test_an_interrupt_ends_the_waiting_for_what_runs(session, runtime, keyboard, what):
    """The call goes on, and nothing was begun."""
    actor = prepared(session).models.actor
    session.place("colocate")
    mark, placement = session.snapshot("before"), repr(session.placement)
    runtime.hold("generate")
    batch = actor.generate(session.batch(prompt=[[1]]), max_new_tokens=1)
    until("it runs", lambda: batch.state == "running")
    acts = {
        "snapshot": lambda: session.snapshot("a"), "place": lambda: session.place("split"), "release": actor.release,
        "declare": lambda: session.actor("tiny", optimizer=hf.AdamW(lr=0.5)), "rewind": lambda: session.rewind(mark),
    }  # fmt: skip
    keyboard(waits)
    with pytest.raises(KeyboardInterrupt):
        acts[what]()
    assert (list(session.snapshots), repr(session.placement), session.branch) == (["before"], placement, "main")
    assert not runtime.asked_to_stop
    assert batch.state == "running"
    assert session.models.actor is actor
    runtime.let_go()
    acts[what]()


def test_an_interrupted_turn_leaves_nothing_taken():
    """Whatever line a Ctrl-C falls on, another thread can go on."""
    from hfsdk.state import folder_lock

    for k in range(1, 30):
        turns, seen = folder_lock.Turns(), []

        def at_line(frame, event, argument, k=k, seen=seen):
            if frame.f_code.co_filename == folder_lock.__file__ and event == "line":
                seen.append(frame.f_lineno)
                if len(seen) == k:
                    raise KeyboardInterrupt
            return at_line

        sys.settrace(at_line)
        try:
            turns.take("first")
            turns.give("first")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        turns.give("first")
        done = threading.Event()
        threading.Thread(target=lambda turns=turns, done=done: (turns.take("second"), turns.give("second"), done.set())).start()
        assert done.wait(60), f"line {seen[-1]}"
        if len(seen) < k:
            break
    assert 3 < len(seen) < k, "every line was one of them"


def test_a_save_that_hosts_cannot_copy_is_refused_before_anything_is_there(session, runtime, tmp_path):
    session.actor("tiny")
    session.save(tmp_path)
    num_bytes = 4 * session.models.actor.spec.num_parameters()  # in fp32, without moments before the first step
    runtime.free_host_bytes = lambda devices: {0: num_bytes // 10}
    with refuses(hf.CheckpointError, f"{num_bytes / 1e6:.1f} MB", "node 0", f"{num_bytes / 1e7:.1f} MB are free"):
        session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-1"]
    runtime.free_host_bytes = lambda devices: {0: num_bytes * 3 // 2}
    with pytest.warns(UserWarning, match=rf"takes {num_bytes / 1e6:.1f} MB of the {num_bytes * 1.5e-6:.1f} MB of .* on node 0"):
        session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-2"]
