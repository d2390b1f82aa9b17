"""The process of a kept session's keeper ends by itself where whoever started it was killed in the middle of that."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

START = """
import sys, threading
from hfsdk.engine.ray import kept
from hfsdk.kept.requests import About
kept.START_S, kept.GIVE_UP_S = 0.5, 0.5
process = kept.KeeperProcess(sys.argv[1], sys.argv[2], [])
asking, asked = threading.Event(), process.ask
def ask():
    asking.set()
    return asked(About())
"""


def ended(tmp_path, more):
    """Return (exit status, log) of a keeper's process."""
    log = tmp_path / "keeper.log"
    done = subprocess.run([sys.executable, "-c", START + more, log, tmp_path], timeout=300, check=False)
    return done.returncode, log.read_text()


def test_one_that_is_never_told_what_it_keeps_ends(tmp_path):
    status, said = ended(tmp_path, "threading.Event().wait()")
    assert status == 1
    assert "has not said what it keeps" in said


def test_one_that_cannot_begin_says_so_and_ends(tmp_path):
    status, said = ended(
        tmp_path,
        "def fails(options): asking.wait(60); raise ValueError('no such devices')\n"
        "threading.Thread(target=lambda: print(ask().errors[0], flush=True)).start()\n"
        "print(process.begin(fails, None).errors[0], flush=True); threading.Event().wait()",
    )
    assert status == 1
    assert "no such devices" in said
    assert "the session could not be started" in said


def test_what_is_asked_while_it_begins_is_answered_then(tmp_path):
    """And it stays: the thread that would have ended it is done."""
    status, said = ended(
        tmp_path,
        "import os\n"
        "(watch,) = (thread for thread in threading.enumerate() if thread.name == 'hfsdk-begin')\n"
        "class Answers:\n    def answer(self, request): return 'here'\n"
        "def makes(options):\n    asking.wait(60)\n    return Answers()\n"
        "asks = threading.Thread(target=lambda: print(ask(), flush=True)); asks.start()\n"
        "process.begin(makes, None); asks.join(); watch.join(60)\n"
        "print('goes on' if watch.is_alive() else 'stays', flush=True); os._exit(0)",
    )
    assert (status, said) == (0, "here\nstays\n")
