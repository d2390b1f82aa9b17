"""``track=``: the steps of ``session.train`` also go to TensorBoard, Weights & Biases or MLflow, by their own packages.

    session.train(hf.PPO(), prompts, steps=50, track="tensorboard")
    session.train(hf.PPO(), prompts, steps=50, track=["wandb", hf.TensorBoard("logs", name="first try")])

Each ``train`` is one run there: the algorithm's fields and the roles as its configuration, every number of every step, a few
samples (prompt, response, score), and how it ended. Runs stay on this machine unless asked otherwise (``WandB(mode="online")``,
``MLflow(uri=...)``); the packages' own reports to their makers are off where the environment does not ask for them
(``MLFLOW_DISABLE_TELEMETRY``, ``WANDB_ERROR_REPORTING``). A tracker that fails, e.g. because the disk is full, is given up with
one notice; training goes on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import logging
import numbers
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hfsdk.core.checks import check_fields, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented

if TYPE_CHECKING:
    from hfsdk.run.host import TrainHost
    from hfsdk.session.streams import RowStream

Sample = Mapping[str, Any]
"""``{"prompt": str | None, "response": str | None, "score": float | None}``."""
COLUMNS = ("prompt", "response", "score")


class Record(Protocol):
    """One run as a tracker keeps it, open until ``end``."""

    def step(self, step: int, values: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Keep a step's numbers and samples."""
        ...

    def end(self, state: str) -> None:
        """Close: the run is ``"finished"``, ``"paused"``, ``"stopped"`` or ``"failed"``."""
        ...


class Tracker(Protocol):
    """A place where runs are recorded. Yours may be one too: any object with such a ``start``."""

    def start(self, title: str, config: Mapping[str, Any]) -> Record:
        """Open a run: ``title`` is unique, ``config`` has numbers and texts."""
        ...


@documented
@dataclass(frozen=True)
class TensorBoard:
    """Event files for TensorBoard (package ``tensorboard``); ``tensorboard --logdir runs`` shows them, live too."""

    folder: str = "runs"
    """Each run has a folder in this one."""
    name: str = ""
    """The folder's name, by default session, algorithm and time; given again, its curves go on. ``"a/b"`` is a folder in one."""

    def __post_init__(self) -> None:
        check_fields(self)

    def start(self, title: str, config: Mapping[str, Any]) -> Record:
        """See `Tracker`.

        Raises:
            OptionError: the package is missing, or the run's folder is not in ``folder`` or cannot be made.
        """
        _need("tensorboard", "tensorboard")
        folder = Path(self.folder)
        run = folder / (self.name or _file_name(title))
        if not run.resolve().is_relative_to(folder.resolve()):
            raise OptionError(f"TensorBoard: a run lies in its folder {self.folder!r}; name={self.name!r} leads out of it")
        return _Events(_made(run), config)


@documented
@dataclass(frozen=True)
class WandB:
    """Weights & Biases (package ``wandb``). Offline, so that no account is needed: ``wandb sync`` uploads a run later."""

    project: str = "hfsdk"
    """The project under which runs are listed."""
    name: str = ""
    """The run's name, by default session, algorithm and time."""
    folder: str = "."
    """Runs are kept in ``wandb`` in this folder."""
    mode: str = "offline"
    """``"offline"``, or ``"online"``: uploaded as it goes on, for the user who is logged in."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mode not in ("offline", "online"):
            raise OptionError(f"WandB: mode is offline or online; got {shown(self.mode)}")

    def start(self, title: str, config: Mapping[str, Any]) -> Record:
        """See `Tracker`.

        Raises:
            OptionError: the package is missing, or the folder cannot be made.
        """
        _need("wandb", "wandb")
        return _WandBRun(self, _made(Path(self.folder)), title, config)


@documented
@dataclass(frozen=True)
class MLflow:
    """MLflow (package ``mlflow``, or ``mlflow-skinny`` with ``sqlalchemy`` and ``alembic``)."""

    experiment: str = "hfsdk"
    """The experiment under which runs are listed."""
    name: str = ""
    """The run's name, by default session, algorithm and time."""
    uri: str = ""
    """A database, e.g. ``"sqlite:///runs/mlflow.db"`` (samples lie beside it in ``mlruns``), or a server's address. By default
    MLflow's own: ``mlflow.db`` in the current folder, which ``mlflow ui`` shows, unless ``MLFLOW_TRACKING_URI`` says otherwise."""

    def __post_init__(self) -> None:
        check_fields(self)

    def start(self, title: str, config: Mapping[str, Any]) -> Record:
        """See `Tracker`.

        Raises:
            OptionError: the package is missing, or the database's folder cannot be made.
        """
        local = not self.uri or self.uri.startswith("sqlite:")
        for package in ("mlflow", *(("sqlalchemy", "alembic") if local else ())):
            _need(package, "mlflow-skinny sqlalchemy alembic")
        return _MLflowRun(self, title, config)


NAMES: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def trackers(track: str | Tracker | Sequence[str | Tracker]) -> list[Tracker]:
    """Return the trackers that ``track`` names; ``()`` is none.

    Raises:
        OptionError: there is no such tracker, or one is a class where an instance is meant.
    """
    choices = [track] if isinstance(track, str) or not isinstance(track, Sequence) else list(track)
    return [_tracker(choice) for choice in choices]


def _tracker(choice: object) -> Tracker:
    if isinstance(choice, str) and choice in NAMES:
        return NAMES[choice]()
    if isinstance(choice, str | type) or not callable(inspect.getattr_static(choice, "start", None)):
        wanted = f'{", ".join(map(repr, NAMES))}, or with options hf.TensorBoard("folder"), hf.WandB(...), hf.MLflow(...)'
        raise OptionError(f"track knows {wanted}; got {shown(choice)}")
    return choice  # type: ignore[return-value]  # it has a start


def start(host: TrainHost, algorithm: Any, prompts: RowStream, steps: int, chosen: Sequence[Tracker]) -> Tracking:
    """Open a run with every tracker.

    Raises:
        OptionError: a package is missing, or a folder cannot be made. Whatever else fails is only noticed.
    """
    title = f"{host.context.name}-{type(algorithm).__name__}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1_000_000:06d}"
    tracking = Tracking(host.context.notice)
    config = described(host, algorithm, prompts, steps) if chosen else {}
    try:
        for tracker in chosen:
            tracking.add(tracker, title, config)
    except OptionError:
        tracking.close("failed")
        raise
    return tracking


def described(host: TrainHost, algorithm: Any, prompts: RowStream, steps: int) -> dict[str, Any]:
    """Return a run's configuration: the algorithm's fields, the prompts', the seed, each role's model, layouts and lr."""
    fields = dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ()
    config: dict[str, Any] = {"algorithm": type(algorithm).__name__, **{f.name: getattr(algorithm, f.name) for f in fields}}
    config |= {"steps": steps, "seed": host.context.seed, "batch_size": prompts.batch_size, "prompts_seed": prompts.seed}
    for handle in host.deployment.book:
        role = handle.role
        if role.function is not None:
            config[f"{role.name}.function"] = f"{role.function.name}@{role.function.version}"
        if role.model is not None:
            config[f"{role.name}.model"] = role.model.name
        config |= {f"{role.name}.{use}": str(layout) for use, layout in handle.layouts.items()}
        if role.optimizer is not None:
            config[f"{role.name}.lr"] = "suggested" if role.optimizer.lr is None else role.optimizer.lr
    return {name: value if isinstance(value, bool | int | float) else str(value)[:500] for name, value in config.items()}


class Tracking:
    """The trackers of one run of ``train``. What fails is given up, with one notice."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._records: dict[str, Record] = {}
        self._last = -1

    def add(self, tracker: Tracker, title: str, config: Mapping[str, Any]) -> None:
        """Open a run with a tracker.

        Raises:
            OptionError: its arguments are wrong.
        """
        name = type(tracker).__name__
        name += f" {len(self._records) + 1}" * (name in self._records)
        with self._given_up(name):
            try:
                self._records[name] = tracker.start(title, config)
            except ImportError as error:
                raise OptionError(f"tracking by {name} needs a package that is not installed here: {error}") from error

    def step(self, row: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        """Keep a step's row; not once more where a run takes steps again after a death."""
        if row["step"] > self._last:
            self._write(row, samples)

    def amend(self, row: Mapping[str, Any]) -> None:
        """Add to the last step's row."""
        self._write(row, ())

    def _write(self, row: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        self._last = int(row["step"])
        values = {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, numbers.Real)}
        for name, record in list(self._records.items()):
            with self._given_up(name):
                record.step(int(row["step"]), values, samples)

    def close(self, state: str) -> None:
        """Close every run that is open."""
        while self._records:
            name, record = self._records.popitem()
            with self._given_up(name):
                record.end(state)

    @contextmanager
    def _given_up(self, name: str) -> Iterator[None]:
        try:
            yield
        except OptionError:
            raise
        except Exception as error:  # whatever a full disk or a missing network makes of a package
            record = self._records.pop(name, None)
            if record is not None:
                with suppress(Exception):
                    record.end("failed")
            self._notice(f"{name} is given up for this run: {error!r}. Training goes on without it; run.history has every step.")


def _need(package: str, install: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name in the current one, as W&B makes it, is no package
        raise OptionError(f"tracking needs the package {package}, which is not installed: pip install {install}")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"a tracker's folder cannot be made: {error}; give it another") from error
    return folder.absolute()


def _file_name(text: str) -> str:
    """Return a text as the name of one file or folder."""
    return re.sub(r"[^\w.-]+", "-", text).lstrip(".-") or "run"


class _Events:
    """An event file, written step by step."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{int(time.time()):010d}.hfsdk.{time.monotonic_ns()}"
        self._event = event_pb2.Event
        self._writer = RecordWriter((folder / name).open("wb"))
        with ExitStack() as unfinished:
            unfinished.callback(self._writer.close)
            self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
            self._summary(hparams_pb(dict(config), trial_id=folder.name), 0)
            self._writer.flush()
            unfinished.pop_all()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _summary(self, summary: Any, step: int) -> None:
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def step(self, step: int, values: Mapping[str, float], samples: Sequence[Sample]) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        for name, value in values.items():
            self._summary(scalar_pb(f"train/{name}", value), step)
        if samples:
            rows = [COLUMNS, *([_text(sample.get(column)) for column in COLUMNS] for sample in samples)]
            self._summary(text_pb("samples", np.array(rows, dtype=object)), step)
        self._writer.flush()

    def end(self, state: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        try:
            status = api_pb2.STATUS_FAILURE if state == "failed" else api_pb2.STATUS_SUCCESS
            ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
            data = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=ended))
            self._summary(Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=data)]), 0)
        finally:
            self._writer.close()


class _WandBRun:
    """A run of Weights & Biases beside whatever other runs the process has."""

    def __init__(self, tracker: WandB, folder: Path, title: str, config: Mapping[str, Any]) -> None:
        if tracker.mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._table = wandb.Table
        mode: Any = tracker.mode
        self._run = wandb.init(
            project=tracker.project, name=tracker.name or title, dir=str(folder), mode=mode, config=dict(config),
            reinit="create_new", settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def step(self, step: int, values: Mapping[str, float], samples: Sequence[Sample]) -> None:
        shown: dict[str, Any] = dict(values)
        if samples:
            rows: list[Any] = [[step, *(sample.get(column) for column in COLUMNS)] for sample in samples]
            shown["samples"] = self._table(columns=["step", *COLUMNS], data=rows)
        self._run.log(shown, step=step)

    def end(self, state: str) -> None:
        self._run.summary["state"] = state
        self._run.finish(exit_code=int(state == "failed"))


class _MLflowRun:
    """A run of MLflow, written by a client of its own: the process's active run stays what it was."""

    def __init__(self, tracker: MLflow, title: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        from mlflow.entities import Metric, Param

        if os.environ["MLFLOW_DISABLE_TELEMETRY"].lower() in ("true", "1"):
            with suppress(ImportError):  # older ones report nothing
                from mlflow.telemetry import set_telemetry_client

                set_telemetry_client()  # it may have been imported, and begun to report, before
        self._metric = Metric
        uri = tracker.uri or mlflow.get_tracking_uri()
        with _quiet("mlflow", "alembic"):  # which tell of every table they make
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            existing = self._client.get_experiment_by_name(tracker.experiment)
            experiment = existing.experiment_id if existing else self._client.create_experiment(tracker.experiment, _beside(uri))
        self._id = self._client.create_run(experiment, run_name=tracker.name or title).info.run_id
        params = [Param(_mlflow_name(name), str(value)) for name, value in config.items()]
        for at in range(0, len(params), 100):  # as many as a server takes at once
            self._client.log_batch(self._id, params=params[at : at + 100])

    def step(self, step: int, values: Mapping[str, float], samples: Sequence[Sample]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(_mlflow_name(name), value, now_ms, step) for name, value in values.items()])
        if samples:
            rows = [[sample.get(column) for column in COLUMNS] for sample in samples]
            self._client.log_dict(self._id, {"columns": list(COLUMNS), "data": rows}, f"samples/step_{step:06d}.json")

    def end(self, state: str) -> None:
        self._client.set_tag(self._id, "state", state)
        self._client.set_terminated(self._id, {"failed": "FAILED", "stopped": "KILLED"}.get(state, "FINISHED"))


def _beside(uri: str) -> str | None:
    """Return where the files of an experiment in a local database go: into its folder, which is made."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri else (_made(Path(path).parent) / "mlruns").as_uri()


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
