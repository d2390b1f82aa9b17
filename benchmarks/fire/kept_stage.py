"""The kept session that ``attach`` and ``serve`` share: what it computes is recorded once, and compared after every trial."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from fire import own
from fire.kept_cells import NAME, STEPS
from fire.puppet import CellError, Puppet
from fire.trials import TrialError

START_S = 300.0
"""Ceiling for a session and its roles: Ray, a keeper and two workers, on a machine with other work."""

ATTACH_S = 30.0
"""Ceiling for an attach, the imports of a fresh kernel included, on a machine with other work."""

TOLD_S = 15.0
"""How long a kernel may take to be told that its session is gone."""

HEAD_S = 8.0
"""How much longer the Ray of kept sessions stays than the last of them."""

IMPORTS = "import hfsdk as hf\nfrom fire import kept_cells as c\n"
ATTACH = IMPORTS + f"session = hf.Session.attach({NAME!r})\n"

GONE = "SessionClosedError"


class KeptStage:
    """See the module's text.

    Attributes:
        kernel: the one that has the session, attached.
        states: digest of the actor -> what it is: the checkpoint, after each step of the run, after the step by hand.
        pids: of the session's keeper and workers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.state.mkdir()
        self.checkpoint, self.saves = str(folder / "checkpoint"), str(folder / "saves")
        self.typical: dict[str, float] = {}
        self.states: dict[str, str] = {}
        self.step, self.rows, self.pids = "", list[Any](), list[int]()
        self.column_bytes = 0
        self.others: list[Puppet] = []
        self.kernel = self.new_kernel()
        self.begin()
        self._record()

    def new_kernel(self, **environment: str) -> Puppet:
        """Start a kernel; those that a trial leaves are ended with it."""
        made = Puppet(self.state, **environment)
        self.others.append(made)
        return made

    def begin(self) -> None:
        """Start the session in the kernel, with its roles."""
        self.kernel.run(IMPORTS + "session = c.begin()\nc.declare(session)\nc.prompts(session)", START_S)
        self.know()

    def know(self) -> None:
        """Note the session's processes."""
        workers = self.kernel.run("[d['pid'] for d in session.placement.view()['devices'].values()]")
        self.pids = [self.kernel.run(f"hf.sessions()[{NAME!r}].pid"), *sorted({pid for pid in workers if pid})]

    def _record(self) -> None:
        run, at = self.kernel.run, repr(self.checkpoint)
        run(f"session.save({at})")
        self.states[run("c.digest(session)")] = "the checkpoint"
        run(f"c.arrange(session, {at})")
        self.step = run("c.step(session)")
        self.states[run("c.digest(session)")] = "after the step by hand"
        run(f"c.arrange(session, {at})")
        for number in range(STEPS):
            run("c.train(session, 1)")
            self.states.setdefault(run("c.digest(session)"), f"after step {number} of the run")
        self.rows = run("c.rows(session)")
        run(f"c.arrange(session, {at})\nimport gc; gc.collect()")
        self.column_bytes = run(f"hf.sessions()[{NAME!r}].column_bytes")

    # -- what is known of it

    def arrange(self) -> None:
        """Go to the checkpoint's state."""
        self.kernel.run(
            f"c.arrange(session, {self.checkpoint!r})\nfor name in ('x', 'own', 'batch', 'run'): globals().pop(name, None)"
        )
        shutil.rmtree(self.saves, ignore_errors=True)

    def is_known(self, *states: str) -> str:
        """Check that the actor's state is one of those named (all, where none is), and return which.

        Raises:
            TrialError: it is none of them.
        """
        found = self.states.get(self.kernel.run("c.digest(session)"), "none that is known")
        if found == "none that is known" or (states and found not in states):
            raise TrialError("wrong state", f"the actor is {found}; {' or '.join(states) or 'a known one'} was expected")
        return found

    def run_is_known(self) -> None:
        """Wait for the run, if there is one under way, and check that all of it was done as recorded.

        Raises:
            TrialError: it was not.
        """
        self.kernel.run("session.run is None or session.run.wait(100)")
        rows, found = self.kernel.run("c.rows(session)"), self.is_known()
        if rows != self.rows[: len(rows)] or (rows and found != f"after step {len(rows) - 1} of the run"):
            raise TrialError(
                "wrong state", f"the history has {len(rows)} steps, the actor is {found}; recorded: {self.rows}, got {rows}"
            )

    def prove(self, news: int = 0) -> None:
        """Check that the session is usable, and the step after ``load`` the recorded one.

        Args:
            news: how many errors may come first: what nobody has looked at is told at the next call.

        Raises:
            TrialError: it is not.
        """
        for left in reversed(range(news + 1)):
            try:
                self.arrange()
                found = self.kernel.run("c.step(session)")
                break
            except CellError as error:
                if not left:
                    raise TrialError("unusable", f"place, load and step: {error}") from error
        if found != self.step:
            raise TrialError("wrong state", "the step after load is not the recorded one")
        self.arrange()
        self._nothing_held()

    def _nothing_held(self) -> None:
        """Check that no columns stay that nobody refers to."""
        until = time.monotonic() + own.GONE_S
        while True:
            held = self.kernel.run(f"import gc; gc.collect()\nhf.sessions()[{NAME!r}].column_bytes")
            if held <= self.column_bytes + 20_000:
                return
            if time.monotonic() > until:
                raise TrialError("left behind", f"{held} bytes of columns, {self.column_bytes} at the start")
            time.sleep(0.3)

    # -- kernels

    def do_and_kill(self, kernel: Puppet, name: str, code: str, part: float, otherwise_s: float) -> float:
        """Start a cell in a kernel and kill that at a part of what the cell usually takes; return when."""
        at, begun = part * self.typical.get(name, otherwise_s), time.monotonic()
        kernel.send(code)
        while time.monotonic() - begun < at and not kernel.done:
            time.sleep(min(0.005, at))
        if kernel.done:
            self.typical[name] = time.monotonic() - begun
            kernel.answer()  # whatever it raised is no news: it would be a bare error
        kernel.kill()
        return time.monotonic() - begun

    def attach(self, code: str = ATTACH) -> None:
        """Attach with a new kernel.

        Raises:
            CellError: there is no session.
            TrialError: it took too long.
        """
        self.kernel, begun = self.new_kernel(), time.monotonic()
        self.kernel.run(code, ATTACH_S)
        self.typical["attach"] = time.monotonic() - begun

    def leave_others(self) -> None:
        """Kill the kernels of a trial but for the one that has the session."""
        for one in self.others:
            if one is not self.kernel and one.process.poll() is None:
                one.kill()
        self.others = [self.kernel]

    # -- its end

    def ended(self, pids: Sequence[int] = ()) -> None:
        """Check that the keeper and the workers of a session that has ended, or some of them, are gone.

        Raises:
            TrialError: they are not.
        """
        until = time.monotonic() + own.GONE_S
        while left := [pid for pid in pids or self.pids if _lives(pid)]:
            if time.monotonic() > until:
                raise TrialError("left behind", f"of a session that has ended: {[own.words(psutil.Process(pid)) for pid in left]}")
            time.sleep(0.1)

    def all_ended(self, but: Collection[int] = ()) -> None:
        """Check that nothing at all is left of kept sessions.

        Raises:
            TrialError: something is.
        """
        until = time.monotonic() + own.GONE_S + HEAD_S
        mine = {one.process.pid for one in self.others} | set(but)
        while left := [p for p in self.processes() if p.pid not in mine]:
            if time.monotonic() > until:
                raise TrialError("left behind", "of kept sessions: " + "; ".join(own.words(p) for p in left))
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """Return all that uses this stage's state folder."""
        found = []
        for process in own.marked(os.environ.get(own.MARK, "")):
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("XDG_STATE_HOME") == str(self.state):
                    found.append(process)
        return found

    def begin_again(self, rng: random.Random, but: Collection[int] = ()) -> None:
        """Start the session anew after it has ended, in the kernel or a fresh one, at once or when all else has ended."""
        if rng.random() < 0.5:
            self.all_ended(but)
        if self.kernel.process.poll() is not None:
            self.kernel = self.new_kernel()
        self.begin()
        self.prove()

    def start_over(self) -> None:
        """End all there is and begin anew, after something did not hold."""
        self._end_all()
        self.kernel = self.new_kernel()
        self.begin()
        self.arrange()

    def _end_all(self) -> None:
        until = time.monotonic() + own.GONE_S
        while (left := self.processes()) and time.monotonic() < until:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.1)
        for one in self.others:
            one.kill()
        self.others = []
        for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("hfsdk-*"):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """End the session and see that nothing is left."""
        self.leave_others()
        with contextlib.suppress(CellError):
            self.kernel.run("session.close(); session.detach()", 60.0)
        self.ended()
        self.kernel.end()
        self.others = []
        try:
            self.all_ended()
        finally:
            self._end_all()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


_stages: dict[int, KeptStage] = {}


def ground(folder: Path) -> KeptStage:
    """Set up the kept session of this process."""
    if os.getpid() not in _stages:
        _stages[os.getpid()] = KeptStage(folder)
    return _stages[os.getpid()]
