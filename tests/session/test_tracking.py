"""Tracking: what a run leaves in TensorBoard, W&B and MLflow, read back; and what becomes of a tracker that fails."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from expect import each, refuses, until

import hfsdk as hf
from hfsdk.run.trackers import Tracking

TEXTS = [f"review number {i}" for i in range(10)]
PACKAGES = ("tensorboard", "wandb", "mlflow")


@dataclass
class Step:
    batch: hf.Batch


@dataclass(frozen=True)
class OneCall:
    """The smallest algorithm: generate and score."""

    temperature: float = 0.5
    note: str | None = None

    def step(self, models, prompts):
        return Step(models.reward.compute_scores(models.actor.generate(prompts, max_new_tokens=4)))

    def metrics(self, step):
        return {"score_mean": float(step.batch["scores"].mean()), "hole": math.nan}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """MLflow takes seconds to make one."""
    mlflow = pytest.importorskip("mlflow")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def name(request):
    """One of the trackers; where it is MLflow, with an empty database."""
    pytest.importorskip(request.param)
    if request.param == "mlflow":
        shutil.copy(request.getfixturevalue("empty_database"), "mlflow.db")
    return request.param


@pytest.fixture
def ready(session, actor, length_reward):
    session.reward(length_reward)
    return session.prompts(TEXTS, batch_size=2, seed=3)


def need(package):
    return pytest.importorskip(package)


# -- read back, by the packages' own readers


@dataclass
class Kept:
    """What a run left behind."""

    config: dict
    rows: dict
    """step -> numbers"""
    samples: dict
    """step -> rows of prompt, response, score"""
    state: str


def from_tensorboard(folder=Path("runs")):
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.plugins.hparams import metadata
    from tensorboard.util.tensor_util import make_ndarray

    (run,) = [p for p in folder.iterdir() if p.is_dir()]
    read = EventAccumulator(str(run), size_guidance={TENSORS: 0})
    read.Reload()
    rows, samples = {}, {}
    for tag in read.Tags()["tensors"]:
        for event in read.Tensors(tag):
            value = make_ndarray(event.tensor_proto)
            if tag == "samples":
                head, *body = [[cell.decode() for cell in row] for row in value]
                assert head == ["prompt", "response", "score"]
                samples[event.step] = body
            elif tag.startswith("train/"):
                rows.setdefault(event.step, {})[tag.removeprefix("train/")] = float(value)
    content = read.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    begun = metadata.parse_session_start_info_plugin_data(content)
    config = {k: getattr(v, v.WhichOneof("kind")) for k, v in begun.hparams.items()}
    content = read.summary_metadata[metadata.SESSION_END_INFO_TAG].plugin_data.content
    status = metadata.parse_session_end_info_plugin_data(content).status
    return Kept(config, rows, samples, {1: "well", 2: "failed"}[status])


def wandb_records(path):
    """W&B ships no Python reader any more; its file is leveldb's log format of its own protobuf records."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def from_wandb(folder=Path("wandb")):
    (run,) = folder.glob("offline-run-*")
    (path,) = run.glob("run-*.wandb")
    until("W&B's own process writes the end", lambda: any(record.HasField("exit") for record in wandb_records(path)))
    config, rows, samples, code, summary = {}, {}, {}, None, {}
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
        elif kind == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = int(row.pop("_step"))
            table = {k: row.pop(k) for k in list(row) if k.startswith("samples")}
            if table:
                found = table.get("samples") or {k.removeprefix("samples."): v for k, v in table.items()}
                samples[step] = [r[1:] for r in json.loads((run / "files" / found["path"]).read_text())["data"]]
            rows[step] = {k: float(v) for k, v in row.items() if not k.startswith("_")}
        elif kind == "summary":
            summary |= {u.key: json.loads(u.value_json) for u in record.summary.update}
        elif kind == "exit":
            code = record.exit.exit_code
    return Kept(config, rows, samples, summary.get("state", "") if code == 0 else "failed")


def from_mlflow(uri=None):
    import mlflow

    client = mlflow.MlflowClient(uri or f"sqlite:///{Path('mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("hfsdk")
    (run,) = client.search_runs([experiment.experiment_id])
    rows, samples = {}, {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            rows.setdefault(point.step, {})[name] = point.value
    for item in client.list_artifacts(run.info.run_id, "samples"):
        table = json.loads(Path(client.download_artifacts(run.info.run_id, item.path)).read_text())
        assert table["columns"] == ["prompt", "response", "score"]
        samples[int(Path(item.path).stem.removeprefix("step_"))] = table["data"]
    state = {"FAILED": "failed", "KILLED": "stopped", "FINISHED": run.data.tags["state"]}[run.info.status]
    return Kept(dict(run.data.params), rows, samples, state)


READERS = {"tensorboard": from_tensorboard, "wandb": from_wandb, "mlflow": from_mlflow}
each_tracker = pytest.mark.parametrize("name", READERS, indirect=True)


def same(a, b):
    return a == pytest.approx(b, rel=1e-6) or (math.isnan(a) and math.isnan(b))


@each_tracker
def test_every_step_is_kept_with_its_samples(session, ready, name):
    run = session.train(OneCall(), ready, steps=3, track=name)
    kept = READERS[name]()
    assert sorted(kept.rows) == [0, 1, 2]
    for row in run.rows:
        found = kept.rows[row["step"]]
        wanted = {k: v for k, v in row.items() if k != "step"}
        assert set(found) == set(wanted)
        assert all(same(float(found[k]), float(v)) for k, v in wanted.items()), (found, wanted)
    assert sorted(kept.samples) == [0, 1, 2]
    last = run.last.batch
    prompts, responses = last.text("prompt"), last.text("response")
    for i, (prompt, response, score) in enumerate(kept.samples[2]):
        assert (prompt, response) == (prompts[i], responses[i])
        assert float(score) == pytest.approx(float(last["scores"][i]))
    config = {k: str(v) for k, v in kept.config.items()}
    wanted = {"algorithm": "OneCall", "temperature": "0.5", "note": "None", "batch_size": "2", "prompts_seed": "3", "steps": "3"}
    assert wanted.items() <= {**config, **{k: str(int(float(config[k]))) for k in ("batch_size", "prompts_seed", "steps")}}.items()
    assert config["actor.model"] == "tiny"
    assert config["reward.function"].startswith("lengths@")
    assert kept.state == ("well" if name == "tensorboard" else "finished")


@each_tracker
def test_a_run_that_fails_is_closed_as_failed(session, ready, runtime, name):

    def fail_then(row):
        runtime.failing["compute_scores"] = hf.RewardFunctionError("no", role="reward")
        return False

    with pytest.raises(hf.RewardFunctionError):
        session.train(OneCall(), ready, steps=3, stop=fail_then, track=name)
    kept = READERS[name]()
    assert (sorted(kept.rows), kept.state) == ([0], "failed")


@each_tracker
def test_a_run_in_the_background_is_closed_before_wait_returns(session, ready, name):
    session.train(OneCall(), ready, steps=4, track=name, wait=False).wait(60)
    assert sorted(READERS[name]().rows) == [0, 1, 2, 3]


def test_a_pause_in_the_background_goes_on_in_the_same_run(session, ready):
    need("tensorboard")
    run = session.train(OneCall(), ready, steps=50, track="tensorboard", wait=False)
    run.pause()
    run.wait(60)
    run.resume()
    run.wait(60)
    assert sorted(from_tensorboard().rows) == list(range(50))


@pytest.mark.parametrize("name", ["mlflow"], indirect=True)
def test_a_stop_and_an_interrupt_close_the_run(session, ready, name):
    session.train(OneCall(), ready, steps=9, stop=lambda row: row["step"] == 1, track="mlflow")
    kept = from_mlflow()
    assert (sorted(kept.rows), kept.state) == ([0, 1], "stopped")

    def interrupt(row):
        signal.raise_signal(signal.SIGINT)
        return False

    with pytest.warns(UserWarning, match="paused after step"):
        session.train(OneCall(), ready, steps=9, stop=interrupt, track=hf.MLflow(uri="sqlite:///other/db.sqlite"))
    kept = from_mlflow("sqlite:///other/db.sqlite")
    assert (sorted(kept.rows), kept.state) == ([2], "paused")
    assert list(Path("other/mlruns").rglob("step_000002.json"))


@pytest.mark.parametrize("name", ["mlflow"], indirect=True)
def test_several_at_once_and_options(session, ready, name):
    for package in PACKAGES:
        need(package)
    track = ["wandb", hf.TensorBoard("logs", name="mine"), hf.MLflow(name="mine")]
    session.train(OneCall(), ready, steps=1, track=track)
    session.train(OneCall(), ready, steps=1, track=hf.TensorBoard("logs", name="mine"))
    assert sorted(from_tensorboard(Path("logs")).rows) == [0, 1]  # the same name: the curves go on
    assert sorted(from_wandb().rows) == sorted(from_mlflow().rows) == [0]
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["mlflow"], indirect=True)
def test_the_process_s_own_runs_are_left_alone(session, ready, name):
    wandb, mlflow = need("wandb"), need("mlflow")
    session.train(OneCall(), ready, steps=1, track=["wandb", "mlflow"])
    assert wandb.run is None
    assert mlflow.active_run() is None


def test_simulated_runs_have_times_only():
    need("tensorboard")
    with hf.Session.simulated("1x8 A100-80GB") as session:
        actor = session.actor("llama-7b", train="tp8", rollout="tp2", dtype="bf16")
        session.critic("llama-7b", train="tp8", dtype="bf16"), session.reference(actor, layout="tp8")
        session.reward(lambda completions: [0.0] * len(completions))
        run = session.train(hf.PPO(), session.prompts(["a prompt"] * 8, batch_size=8), steps=2, track="tensorboard")
    kept = from_tensorboard()
    assert kept.rows[1]["seconds"] == pytest.approx(run.rows[1]["seconds"])
    assert kept.samples == {}
    assert kept.config["clip"] == 0.2


# -- failures


class Broken:
    """A tracker of the user's own, which stops working at its second step."""

    def __init__(self, at=1, error=None):
        self.at, self.steps, self.ended = at, [], []
        self.error = error or OSError(28, "No space left on device")

    def start(self, title, config):
        if self.at < 0:
            raise ConnectionError("no network")
        return self

    def step(self, step, values, samples):
        if step == self.at:
            raise self.error
        self.steps.append(step)

    def end(self, state):
        self.ended.append(state)
        if state == "failed":
            raise OSError("still full")


def test_a_step_taken_again_is_not_written_again():
    """As after a restore: the last steps come once more. What is measured at the end is added to the last one."""
    written = []
    record = SimpleNamespace(step=lambda number, values, samples: written.append((number, values)), end=lambda state: None)
    tracking = Tracking(pytest.fail)
    tracking.add(SimpleNamespace(start=lambda title, config: record), "run", {})
    for number in (0, 1, 2, 1, 2, 3):
        tracking.step({"step": number, "loss": 1.0}, [])
    tracking.amend({"step": 3, "held_out": 0.5})
    assert [number for number, _ in written] == [0, 1, 2, 3, 3]
    assert written[-1] == (3, {"held_out": 0.5})


def test_a_tracker_that_fails_is_given_up_with_one_notice(session, ready):
    broken, whole = Broken(at=1), Broken(at=99)
    with pytest.warns(UserWarning, match=r"Broken is given up for this run: OSError\(28, 'No space left") as warned:
        run = session.train(OneCall(), ready, steps=4, track=[broken, whole])
    assert len([w for w in warned if "given up" in str(w.message)]) == 1
    assert len(run.rows) == 4
    assert (broken.steps, broken.ended) == ([0], ["failed"])
    assert (whole.steps, whole.ended) == ([0, 1, 2, 3], ["finished"])
    assert [m for m in session.messages if "given up" in m]


def test_whatever_a_tracker_raises_the_run_goes_on(session, ready):
    broken = Broken(error=KeyError("its own server says nonsense"))
    with pytest.warns(UserWarning, match="Broken is given up"):
        assert len(session.train(OneCall(), ready, steps=3, track=broken).rows) == 3


def test_one_that_cannot_start_does_not_stop_training(session, ready):
    with pytest.warns(UserWarning, match="no network"):
        assert len(session.train(OneCall(), ready, steps=2, track=Broken(at=-1)).rows) == 2


def test_a_full_disk_under_tensorboard(session, ready, monkeypatch):
    """A real event file on a device that is always full."""
    need("tensorboard")
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda p, *a, **k: opened(Path("/dev/full") if "tfevents" in p.name else p, *a, **k))
    with pytest.warns(UserWarning, match=r"TensorBoard is given up .*No space left") as warned:
        run = session.train(OneCall(), ready, steps=3, track="tensorboard")
    assert len(run.rows) == 3
    assert len([w for w in warned if "given up" in str(w.message)]) == 1


@pytest.mark.parametrize("name", ["mlflow"], indirect=True)
def test_a_database_that_goes_away(session, ready, name):

    def remove(row):
        if row["step"] == 1:
            Path("mlflow.db").write_bytes(b"no database")
        return False

    with pytest.warns(UserWarning, match="MLflow is given up"):
        assert len(session.train(OneCall(), ready, steps=4, stop=remove, track="mlflow").rows) == 4


@each(
    "track, named",
    [
        ("tensorbord", ["'tensorbord'", "'tensorboard', 'wandb', 'mlflow'"]),
        ("tensorboard:runs/a", ['hf.TensorBoard("folder")']),
        (["wandb", 3], [3]), (hf.TensorBoard, ["<class"]), (None, [None]),
    ],
)  # fmt: skip
def test_bad_names_are_told_before_anything_runs(session, ready, track, named):
    with refuses(hf.OptionError, *named):
        session.train(OneCall(), ready, steps=1, track=track)
    assert session.run is None


def test_bad_options_of_a_tracker_are_named():
    with refuses(hf.OptionError, "offline", "online", "'of'"):
        hf.WandB(mode="of")
    with refuses(hf.OptionError, "folder", 3):
        hf.TensorBoard(3)


def test_a_missing_package_says_what_to_install(session, ready, monkeypatch):
    find, missing = importlib.util.find_spec, ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda package, *more: None if package == missing else find(package, *more))
    for missing in READERS:
        with refuses(hf.OptionError, f"pip install {missing}"):
            session.train(OneCall(), ready, steps=1, track=missing)
    assert session.run is None


def test_a_folder_that_cannot_be_made_closes_the_others(session, ready):
    need("tensorboard")
    Path("file").write_text("")
    whole = Broken(at=99)
    whole.end = whole.ended.append
    with refuses(hf.OptionError, "file/logs"):
        session.train(OneCall(), ready, steps=1, track=[whole, hf.TensorBoard("file/logs")])
    assert whole.ended == ["failed"]


def test_the_interpreter_s_end_closes_a_run_in_the_background(tmp_path):
    for package in PACKAGES:
        need(package)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, threading
        sys.path[:0] = sys.argv[1:]
        import hfsdk as hf
        from tests.session.scripted import ScriptedRuntime
        from tests.session.test_tracking import OneCall, TEXTS
        session = hf.Session(runtime=ScriptedRuntime())
        session.actor("tiny"); session.reward(lambda completions: [0.0] * len(completions))
        prompts, third = session.prompts(TEXTS, batch_size=2), threading.Event()
        track = ["wandb", "mlflow", "tensorboard"]
        session.train(OneCall(), prompts, steps=10**6, wait=False, track=track, stop=lambda row: row["step"] == 3 and third.set())
        third.wait()
        """)
    )
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    done = subprocess.run([sys.executable, script, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    assert {name: reader().state for name, reader in READERS.items()} == {
        "tensorboard": "well", "wandb": "stopped", "mlflow": "stopped"}  # fmt: skip
    assert all(len(reader().rows) >= 3 for reader in READERS.values())


# -- what leaves the folder, and the machine


def test_a_session_name_is_no_path_out_of_the_folder(session, ready, tmp_path):
    need("tensorboard")
    session.name = "../../out\\of/here \x1b[31m"
    session.train(OneCall(), ready, steps=1, track=hf.TensorBoard("logs"))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"logs"}
    (run,) = (tmp_path / "logs").iterdir()
    assert run.name.startswith("out-of-here-")


def test_a_tensorboard_name_that_leads_out_is_refused(session, ready, tmp_path):
    need("tensorboard")
    for name in ("../elsewhere", "/tmp/elsewhere", "a/../../elsewhere"):
        with refuses(hf.OptionError, name, "leads out"):
            session.train(OneCall(), ready, steps=1, track=hf.TensorBoard("logs", name=name))
    session.train(OneCall(), ready, steps=1, track=hf.TensorBoard("logs", name="first/try"))
    assert (tmp_path / "logs" / "first" / "try").is_dir()
