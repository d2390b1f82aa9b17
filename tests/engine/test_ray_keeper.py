"""The process of a kept session's keeper ends by itself where whoever started it was killed in the middle of that."""

import subprocess
import sys
import time

import pytest

pytest.importorskip("ray")

START = """
import sys, time
from hfsdk.engine.ray import ray_keeper
from hfsdk.session.keeper_requests import About
ray_keeper.START_S, ray_keeper.GIVE_UP_S = 0.5, 0.5
process = ray_keeper.KeeperProcess(sys.argv[1], sys.argv[2], [])
"""


def ended(tmp_path, more):
    """Return (exit status, seconds, log) of a keeper's process."""
    begun, log = time.monotonic(), tmp_path / "keeper.log"
    done = subprocess.run([sys.executable, "-c", START + more, log, tmp_path], timeout=120, check=False)
    return done.returncode, time.monotonic() - begun, log.read_text()


def test_one_that_is_never_told_what_it_keeps_ends(tmp_path):
    status, _, said = ended(tmp_path, "time.sleep(100)")
    assert (status, said) == (1, "whoever started this process has not said what it keeps: it ends\n")


def test_one_that_cannot_begin_says_so_and_ends(tmp_path):
    status, _, said = ended(
        tmp_path,
        "def fails(options): time.sleep(0.3); raise ValueError('no such devices')\n"
        "import threading; threading.Thread(target=lambda: print(process.ask(About()).errors[0], flush=True)).start()\n"
        "print(process.begin(fails, None).errors[0], flush=True); time.sleep(100)",
    )
    assert status == 1
    assert "no such devices" in said
    assert "the session could not be started" in said


def test_what_is_asked_while_it_begins_is_answered_then(tmp_path):
    status, _, said = ended(
        tmp_path,
        "import threading, os\n"
        "class Answers:\n    def answer(self, request): return 'here'\n"
        "def makes(options):\n    time.sleep(0.8)\n    return Answers()\n"
        "asks = threading.Thread(target=lambda: print(process.ask(About()), flush=True)); asks.start()\n"
        "process.begin(makes, None); asks.join(); time.sleep(1.2); print('stays', flush=True); os._exit(0)",
    )
    assert (status, said) == (0, "here\nstays\n")
