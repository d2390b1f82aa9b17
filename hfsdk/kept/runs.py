"""Runs of a kept session: they go on beside its controller, and a kernel starts, sees and steers them from afar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hfsdk.algorithms import DPO
from hfsdk.core.call_events import Event
from hfsdk.core.errors import OptionError, SessionClosedError
from hfsdk.core.user_line import warn_user
from hfsdk.engine.calls.replies import joined
from hfsdk.kept import requests as k
from hfsdk.kept.codec import from_plain
from hfsdk.kept.remote_controller import RemoteController
from hfsdk.kept.shared_state import CONTROL, RECORD, Entries
from hfsdk.run.notebook import watcher_of
from hfsdk.run.run import Run, RunControl, progress_bar
from hfsdk.run.train import Interrupts, interrupts_held
from hfsdk.run.train_config import TrainConfig
from hfsdk.session.client import user_line
from hfsdk.session.parts import Parts
from hfsdk.session.session_pickle import pack, unpack
from hfsdk.session.streams import streams_of

LOOK_S = 0.1
"""How often a cell that waits for a run looks at it."""


class RemoteRunControl(RunControl):
    """A run that goes on elsewhere, as its last news say; what steers it is passed on."""

    steer: Callable[[str], None]
    bring_last: Callable[[], Any]

    def take(self, entries: Mapping[str, Any]) -> None:
        """Take over news of the run."""
        with self._changed:
            for name in CONTROL:
                setattr(self, name, entries[name])
            for name in RECORD:
                setattr(self.record, name, entries[name])
            self._pause_asked, self._stop_asked, self._steps_asked = entries["asked"]
            self.error = joined(entries["error"]) if entries["error"] else None
            self.record.warnings, self.record.restores = list(entries["warnings"]), list(entries["restores"])
            self.record.resized = list(entries["resized"])
            self._changed.notify_all()

    def take_steps(self, entries: Entries, gone: Sequence[Any]) -> None:
        """Take over news of the run's last steps."""
        record = self.record
        for step, (calls, trace_step, samples) in entries.items():
            record.calls[step], record.trace_steps[step], record.samples[step] = calls, trace_step, samples or []
        for step in gone:
            for by_step in (record.calls, record.trace_steps, record.samples):
                by_step.pop(step, None)

    def lose(self, why: str) -> None:
        """Fail the run as lost: no news of it can come any more."""
        with self._changed:
            if self.running:
                self.running, self.error = False, SessionClosedError(why)
            self._changed.notify_all()

    def await_change(self, timeout_s: float) -> None:
        """Wait for news."""
        with self._changed:
            self._changed.wait(timeout_s)

    def last(self) -> Any:
        """Return the last step, with its batch."""
        return self.bring_last()

    def pause(self) -> None:
        """Pause after the step that is running; nothing when the run has ended."""
        if self.running:
            self.steer("pause")

    def resume(self) -> None:
        """Go on with a paused run in the background."""
        self._need_background("resume")
        self.steer("resume")

    def step(self) -> None:
        """Run one more step of a paused run in the background, and pause again."""
        self._need_background("step")
        self.steer("step")

    def stop(self) -> None:
        """End the run now."""
        if self.running:
            self.steer("stop")

    def close(self, timeout_s: float = 30.0) -> None:
        """Leave the run to its keeper, which stops it where the session is closed."""


class RemoteRuns:
    """The runs of a kept session, as its kernel has them; what ``session.train`` passes on to."""

    def __init__(self, parts: Parts, link: RemoteController) -> None:
        self._parts, self._link = parts, link
        self._entries: dict[str, Any] = {}
        self._step: tuple[int, Any] = (-1, None)
        """The last step that was brought here, and after how many it was."""

    # -- what is told

    @property
    def control(self) -> RemoteRunControl | None:
        """The last run's."""
        run = self._parts.runs.run
        control = None if run is None else run._control
        return control if isinstance(control, RemoteRunControl) else None

    def take(self, entries: Entries) -> None:
        """Take over news of the run; another number is another run."""
        new = entries.get("number", self._entries.get("number")) != self._entries.get("number")
        self._entries |= entries
        control = self.control
        if new or control is None:
            control = RemoteRunControl(kept_as=self._link.name)
            control.steer, control.bring_last = self._steer, self._last
            control.take(self._entries)
            self._step = (-1, None)
            self._parts.runs.run = Run(control)
        else:
            control.take(self._entries)

    def take_steps(self, entries: Entries, gone: Sequence[Any]) -> None:
        """Take over news of the run's last steps."""
        if self.control is not None:
            self.control.take_steps(entries, gone)

    def on_event(self, event: Event) -> None:
        """Take an event of the controller: which call runs now."""
        control = self.control
        if control is not None and control.running and "call_id" in event:
            control.calls.on_event(event)

    def lose(self, why: str) -> None:
        """Fail the current run as lost, where there is one: a cell that waits for it hears so."""
        if self.control is not None:
            self.control.lose(why)

    @property
    def saved(self) -> Mapping[str, Any] | None:
        """The run's last save."""
        return None if self.control is None else self.control.record.saved

    # -- what is asked

    def _steer(self, what: str) -> None:
        self._link.ask_and_hear(lambda: k.Steer(self._link.turn, what))

    def _last(self) -> Any:
        control = self.control
        done = -1 if control is None else len(control.record.rows)
        if self._step[0] != done:
            packed = self._link.ask_and_hear(lambda: k.LastStep(self._link.turn))
            if isinstance(packed, bytes):
                packed = unpack(self._parts, packed)
            elif packed is not None:
                packed = from_plain(packed, self._parts.client)
            self._step = (done, packed)
        return self._step[1]

    def train(self, config: TrainConfig, shown: bool) -> Run:
        """Start a run beside the controller; wait for it where that is wanted. For the rest see ``session.train``."""
        parts = self._parts
        config.validate(parts.deployment.models)
        stream = parts.sources.stream_of(config.prompts, pairs=isinstance(config.algorithm, DPO))
        for row_stream in streams_of(config.algorithm, stream):
            parts.places.adopt(row_stream)
        packed = pack(parts, config.from_anywhere().of(stream))
        with interrupts_held(lambda: None) as interrupts:
            line = user_line()
            self._link.ask_and_hear(lambda: k.Train(self._link.turn, packed, line, self._link.news()))
            run, control = parts.runs.run, self.control
            if run is None or control is None:
                raise OptionError("the run was started, and nothing was told of it; session.watch() looks at it")
            if config.wait:
                self._attend(run, control, interrupts, shown)
            elif shown:
                watcher_of(run)
        return run

    def _attend(self, run: Run, control: RemoteRunControl, interrupts: Interrupts, shown: bool) -> None:
        """Wait for a run. The first interrupt pauses it, the second stops it, the third leaves it alone."""
        watcher = watcher_of(run) if shown else None
        said = len(self._parts.context.messages)
        try:
            with progress_bar(control.steps, shown and watcher is None) as bar:
                done, handled = 0, 0
                while control.running:
                    control.await_change(LOOK_S)
                    seen = control.record.rows
                    # a death took the run back to its last save
                    if len(seen) < done:
                        bar.back_to(len(seen))
                        done = len(seen)
                    for row in seen[done:]:
                        bar.show(row)
                    done = len(seen)
                    said = self._say(said)
                    if interrupts.count > handled:
                        handled = interrupts.count
                        if handled > 2:
                            raise KeyboardInterrupt
                        control.pause() if handled == 1 else control.stop()
        finally:
            if watcher is not None:
                watcher.ended()
        self._say(said)
        if control.paused and control.record.rows:
            left = control.steps - len(control.record.rows)
            text = f"paused after step {control.record.rows[-1]['step']}, with {left} of {control.steps} steps left"
            warn_user(f"{text}: session.train(..., steps={left}) goes on")
        # the run was asked to stop, and the cell ends as an interrupted one does
        if interrupts.count > 1:
            raise KeyboardInterrupt
        if control.error is not None:
            raise control.error

    def _say(self, said: int) -> int:
        """Warn of the notices that came meanwhile; return how many there are now."""
        messages = self._parts.context.messages
        for text in messages[said:]:
            warn_user(text)
        return len(messages)
