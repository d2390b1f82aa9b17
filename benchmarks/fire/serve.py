"""A kept session from afar: connections that are cut, a server that is killed, and strangers at its door."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from fire import own, strangers
from fire.cutter import Cutter
from fire.kept_cells import NAME
from fire.kept_stage import KeptStage, ground
from fire.puppet import CellError, Puppet
from fire.trials import Note, TrialError
from hfsdk.kept.attach import package_version

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 600.0

CUT = "cut"
"""Tag of trials in which connections are cut."""

THIN = """
import sys
sys.modules.update(dict.fromkeys(["ray", "torch", "psutil", "vllm", "megatron", "transformers", "tokenizers", "safetensors"]))
"""

GROWN_BYTES = 120e6
"""How much a server may grow by a trial."""

SERVED_S = 10.0
"""How long a kernel may wait for a call while strangers are at the door."""

COUNTED = """
import hfsdk as hf
done = []
def counted(num):
    for _ in range(num):
        try:
            done.append(session.models.actor.run(c.count)[0])
        except hf.HfsdkError as error:
            if "not known whether it was done" not in str(error):
                raise
            done.append(0)
    return len(done)
"""


class Place:
    """A server of the stage's sessions, a proxy before it, and a kernel elsewhere that uses both."""

    def __init__(self, stage: KeptStage, thin: bool) -> None:
        self.stage, self.thin = stage, thin
        self.process, self.port = self._serve(0)
        self.token = (stage.state / "hfsdk" / "serve-token").read_text()
        self.cutter = Cutter(self.port)
        self.kernel: Puppet | None = None

    def _serve(self, port: int) -> tuple[subprocess.Popen[str], int]:
        stage = self.stage
        env = os.environ | {"XDG_STATE_HOME": str(stage.state), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        self.errors = stage.folder / f"server-{time.monotonic_ns()}"
        with self.errors.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "hfsdk.serve", "--port", str(port)], stdout=subprocess.PIPE, stderr=errors, text=True,
                env=env,
            )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if "/NAME" not in line:
            raise TrialError("unusable", f"the server does not start: {self.errors.read_text()[-2000:]}")
        return process, int(line.split("/NAME")[0].rpartition(":")[2])

    def attach(self, kernel: Puppet | None = None, more: str = "") -> Puppet:
        """Have a kernel elsewhere attach through the proxy."""
        here = Puppet(self.stage.state.parent / "elsewhere") if kernel is None else kernel
        self.kernel = here
        self.stage.others.append(here)
        address = f"hfsdk://127.0.0.1:{self.cutter.port}/{NAME}"
        begin = (THIN if self.thin else "") + "from fire import kept_cells as c\n" + COUNTED
        here.run(
            f"{begin}session = hf.Session.attach({address!r}, token={self.token!r}{more})\nsession.batches, c.prompts(session)",
            60.0,
        )
        return here

    def restart(self, kill: bool) -> None:
        """End the server, by SIGKILL or as an operator does, and start another one at its port."""
        self.end(kill)
        self.process, _ = self._serve(self.port)

    def end(self, kill: bool = False) -> None:
        """End the server.

        Raises:
            TrialError: it does not end, or ended before.
        """
        if self.process.poll() is not None:
            raise TrialError("ended", f"the server ended by itself ({self.process.returncode}): {self.errors.read_text()[-2500:]}")
        self.process.kill() if kill else self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise TrialError("hang", "the server did not end within 15 s of SIGTERM") from None

    def close(self) -> None:
        """End all of it."""
        self.cutter.close()
        if self.kernel is not None and self.kernel.process.poll() is None:
            self.kernel.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def trial(stage: KeptStage, note: Note) -> None:
    """Do one of ``TRIALS``; afterwards a kernel on the machine has the session again, as known as ever."""
    name = note.rng.choices(list(TRIALS), [share for share, _ in TRIALS.values()])[0] if note.number else "cuts"
    thin = note.rng.random() < 0.7
    note.doing(f"preparing {name}")
    stage.kernel.run("session.detach()")
    place = None
    try:
        place = Place(stage, thin)
        TRIALS[name][1](place, note)
        _well(place)
        if place.kernel is not None and place.kernel.process.poll() is None:
            place.kernel.run("session.detach()")
            place.kernel.end()
        place.end()
        stage.kernel.kill()
        stage.attach()
        stage.prove()
        stage.leave_others()
    except BaseException as error:
        if isinstance(error, CellError):
            error = TrialError("unusable", f"{error}")
        note.doing(f"{note.what}; that did not hold, and all is started over")
        stage.start_over()
        raise error from None
    finally:
        if place is not None:
            place.close()


def _cuts(place: Place, note: Note) -> None:
    """Cut connections while a run goes on and calls are made: none of them is missed, none done twice."""
    note.tags.append(CUT)
    kernel, run = place.attach(), note.rng.random() < 0.6
    before = _counted(kernel)
    kernel.run(
        "raw = []\nsession._link.subscribe(lambda e: e['type'] in ('call_done', 'call_failed') and raw.append(e['call_id']))"
    )
    kernel.run(f"c.arrange(session, {place.stage.checkpoint!r})")
    if run:
        kernel.run("run = c.train(session, wait=False)")
    note.count, calls = note.rng.randint(6, 20), 0
    note.doing(f"{note.count} cuts of a{' thin' * place.thin} kernel's connection in {'a run and calls' if run else 'calls'}")
    with _cutting(place.cutter, note.count, note.rng) as over:
        while not over.is_set():
            kernel.run("counted(2)")
            calls += 2
            if note.rng.random() < 0.2:
                kernel.run("c.pictures(session)" if run else "c.many_messages(session, 4)")
    _all_counted(kernel, before, calls)
    place.stage.kernel.kill()
    if run:
        kernel.run("run.wait(120)", 130.0)
        if kernel.run("[c.rows(session), c.digest(session)]") != [place.stage.rows, _after_run(place.stage)]:
            raise TrialError("wrong state", "the run is not the recorded one")
    kernel.run("session.trace.snapshot(); import time; time.sleep(1.0)")
    told = kernel.run("raw")
    if len(told) != len(set(told)):
        raise TrialError("wrong state", f"events came twice: {sorted(one for one in set(told) if told.count(one) > 1)}")


def _after_run(stage: KeptStage) -> str:
    return next(digest for digest, words in stage.states.items() if words == f"after step {len(stage.rows) - 1} of the run")


def _counted(kernel: Puppet) -> int:
    return int(kernel.run("session.models.actor.run(c.count)[0]"))


def _all_counted(kernel: Puppet, before: int, calls: int) -> None:
    """Check that the worker has done each call once: those that are told as unknown at most once."""
    done = kernel.run("done")
    unknown = sum(not number for number in done)
    last = _counted(kernel)
    if not before + calls - unknown < last <= before + calls + 1 or sorted(set(done) - {0}) != [n for n in done if n]:
        raise TrialError(
            "wrong state", f"{calls} calls after {before}, {unknown} of them unknown, and the worker counts {last}: {done}"
        )


@contextmanager
def _cutting(cutter: Cutter, num: int, dice: random.Random) -> Iterator[threading.Event]:
    """Cut so many times, each after the connection has come back; give what is set when that is over."""
    over, stop = threading.Event(), threading.Event()

    def cut() -> None:
        for _ in range(num):
            since = cutter.num_connections
            while not stop.wait(dice.choice([0.0, 0.01, 0.1, 0.4]) * dice.random()) and not cutter.cut():
                pass
            if stop.is_set() or not cutter.await_connection(since, 15.0):
                break
        over.set()

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    try:
        yield over
    finally:
        stop.set()
        thread.join(20.0)


def _restarts(place: Place, note: Note) -> None:
    """End the server and start it again while calls are made: each is done once, or told as unknown; cuts on top."""
    note.tags.append("restart")
    kernel, num, calls = place.attach(), note.rng.randint(1, 3), 0
    before = _counted(kernel)
    note.doing(f"the server ended and started {num} times while a{' thin' * place.thin} kernel calls")
    for _ in range(num):
        kernel.send("counted(200)")
        calls += 200
        time.sleep(note.rng.uniform(0.0, 0.5))
        place.restart(kill=note.rng.random() < 0.7)
        kernel.answer(60.0)
    note.count = num
    _all_counted(kernel, before, calls)


def _in_handshake(place: Place, note: Note) -> None:
    """Cut connections in the first moments of an attach: it succeeds, or says that nothing answers."""
    note.tags.append(CUT)
    note.count, kernel = note.rng.randint(2, 6), None
    note.doing(f"{note.count} attaches whose connection is cut in its first moments")
    for _ in range(note.count):
        kernel = Puppet(place.stage.state.parent / "elsewhere") if kernel is None else kernel
        kernel.run("import hfsdk.kept.remote_session, hfsdk.kept.attach, asyncio, ssl")
        since, wait_s = place.cutter.num_connections, note.rng.uniform(0.0, 0.06)
        thread = threading.Thread(
            target=lambda s=since, w=wait_s: (place.cutter.await_connection(s, 20.0), time.sleep(w), place.cutter.cut())
        )
        thread.start()
        try:
            place.attach(kernel, ", take_over=True")
        except CellError as error:
            if error.kind not in ("OptionError", "SessionClosedError") or "nothing answers" not in error.text:
                raise TrialError("unusable", f"{error}") from error
        else:
            kernel.run("session.models.actor.run(c.nothing); session.detach()")
        thread.join()
    place.attach(kernel, ", take_over=True")


def _kernel_killed(place: Place, note: Note) -> None:
    """Kill a kernel elsewhere; the next one gets the session when nothing was heard of that one for a while, or takes it."""
    kernel = place.attach()
    note.tags.append("kernel")
    kernel.send(note.rng.choice(["counted(1000)", "c.many_messages(session, 300)", "c.train(session)"]))
    at = note.rng.uniform(0.0, 2.0)
    note.doing(f"SIGKILL of a{' thin' * place.thin} kernel elsewhere {at:.2f} s after a cell began")
    time.sleep(at)
    kernel.kill()
    if note.rng.random() < 0.5:
        place.attach(None, ", take_over=True")
    else:
        time.sleep(6.0)
        place.attach()
    assert place.kernel is not None
    place.kernel.run("session.run is None or session.run.wait(100)")


def _garbage(place: Place, note: Note) -> None:
    """Strangers come in crowds while a kernel works: nothing of theirs is unpickled, and the kernel is served."""
    kernel, mark = place.attach(), place.stage.folder / "unpickled"
    note.tags.append("strangers")
    num, kinds = note.rng.randint(20, 60), list(strangers.STRANGERS)
    note.doing(f"{num} strangers: {', '.join(kinds)}, and some with the token that make no sense")
    threads = []
    for _ in range(num):
        dice = random.Random(note.rng.random())
        say, arguments = strangers.say_in_tls, (place.port, place.token, strangers.known(dice, package_version()))
        if dice.random() < 0.2:
            arguments = (place.port, *strangers.without_token(dice, mark))
        elif dice.random() < 0.7:
            say, arguments = strangers.say, (place.port, strangers.STRANGERS[dice.choice(kinds)](dice, mark))
        threads.append(threading.Thread(target=say, args=arguments, daemon=True))
        threads[-1].start()
        if dice.random() < 0.2:
            _served(kernel)
    for thread in threads:
        thread.join(30.0)
    _served(kernel)
    if mark.exists():
        mark.unlink()
        raise TrialError("wrong state", "the server has loaded a pickle of somebody without the token")


def _served(kernel: Puppet) -> None:
    begun = time.monotonic()
    kernel.run("session.models.actor.run(c.nothing)", 60.0)
    if time.monotonic() - begun > SERVED_S:
        raise TrialError("hang", f"a kernel was served after {time.monotonic() - begun:.1f} s only, strangers at the door")


def _slow_loris(place: Place, note: Note) -> None:
    """Hundreds of lines that say half a request: a kernel is served, and the lines are ended."""
    kernel = place.attach()
    note.tags.append("strangers")
    num = note.rng.choice([100, 300])
    note.doing(f"{num} lines that say half a request")
    lines = strangers.slow(place.port, num)
    for _ in range(5):
        _served(kernel)
    if not strangers.are_ended(lines, 25.0):
        raise TrialError("left behind", "lines that say half a request are open 25 s later")
    _served(kernel)


def _heavy(place: Place, note: Note) -> None:
    """Move hundreds of megabytes through the server: it keeps none of them."""
    kernel = place.attach()
    note.tags.append("heavy")
    note.doing("300 MB of columns there and back")
    kernel.run(
        "import numpy as np\nfor number in range(30):\n    own = session.batch(x=[np.full(312_500, float(number))] * 4)\n"
        "    assert float(own['x'].flat[0]) == number\ndel own",
        100.0,
    )


def _keeper_killed(place: Place, note: Note) -> None:
    """Kill the keeper under a kernel elsewhere: it is told; the server stays, and serves the next session of the name."""
    kernel, stage = place.attach(), place.stage
    note.tags.append("keeper")
    kernel.send("counted(1000)")
    time.sleep(note.rng.uniform(0.0, 1.0))
    note.doing("SIGKILL of the keeper under a kernel elsewhere")
    with contextlib.suppress(ProcessLookupError):
        os.kill(stage.pids[0], 9)
    begun = time.monotonic()
    try:
        kernel.answer(30.0)
        raise TrialError("wrong state", "calls went on after the keeper was killed")
    except CellError as error:
        if error.kind != "SessionClosedError":
            raise TrialError("wrong state", f"{error}") from error
    if time.monotonic() - begun > 15.0:
        raise TrialError("hang", f"told {time.monotonic() - begun:.0f} s after the keeper was killed")
    kernel.run("session.detach()")
    try:
        place.attach(kernel)
        raise TrialError("wrong state", "attached to a session that has ended")
    except CellError as error:
        if "there is no session" not in error.text:
            raise TrialError("wrong state", f"{error}") from error
    stage.ended()
    if note.rng.random() < 0.7:
        stage.kernel.kill()
        stage.all_ended([place.process.pid])
        stage.kernel = stage.new_kernel()
    stage.begin()
    stage.kernel.run("session.detach()")
    _served(place.attach(kernel))


def _well(place: Place) -> None:
    """Check that the server is there, small, and quiet.

    Raises:
        TrialError: it is not.
    """
    if place.process.poll() is not None:
        raise TrialError("ended", f"the server ended by itself ({place.process.returncode}): {place.errors.read_text()[-2500:]}")
    until = time.monotonic() + own.GONE_S
    process = psutil.Process(place.process.pid)
    while True:
        threads, size = process.num_threads(), process.memory_info().rss
        if threads < 200 and size < BASE_BYTES + GROWN_BYTES:
            break
        if time.monotonic() > until:
            raise TrialError("left behind", f"the server has {threads} threads, and {size / 1e6:.0f} MB")
        time.sleep(0.3)
    lines = place.errors.read_text(errors="replace").splitlines()
    said = "\n".join(line for line in lines if " refused: " not in line)
    if said or len(lines) > MOST_LINES:
        raise TrialError("bare error", f"the server says {len(lines)} lines, among them: {said[-2500:]}")


MOST_LINES = 30
"""Of a server's log: it says seldom whom it has refused."""

BASE_BYTES = 330e6
"""What a server has when it has joined Ray."""


TRIALS: Mapping[str, tuple[float, Callable[[Place, Note], Any]]] = {
    "cuts": (0.4, _cuts),
    "cuts in a handshake": (0.1, _in_handshake),
    "restarts": (0.12, _restarts),
    "a kernel elsewhere": (0.1, _kernel_killed),
    "strangers": (0.12, _garbage),
    "slow lines": (0.06, _slow_loris),
    "hundreds of megabytes": (0.06, _heavy),
    "the keeper": (0.06, _keeper_killed),
}
"""What is tried -> how often, and how."""
