"""What the Ray of kept sessions writes down: logs that go, and one head at a time."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from expect import until

from hfsdk.engine.ray import head


@pytest.fixture
def state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return head.state_folder()


def test_logs_of_ended_sessions_go(state):
    folder = state / "logs"
    folder.mkdir()
    now = folder.stat().st_mtime
    for number in range(30):
        path = folder / f"s{number}-0123456789ab.log"
        path.write_text("said")
        os.utime(path, (now - 60.0 * number,) * 2)
    week = folder / "s5-0123456789ab.log"
    os.utime(week, (now - head.LOG_S - 1,) * 2)
    with open(folder / "s29-0123456789ab.log", "ab") as written:
        fcntl.flock(written, fcntl.LOCK_SH)  # as the process that keeps a session does
        assert head.log_file("new:0123456789ab") == str(folder / "new-0123456789ab.log")
    left = {path.name.partition("-")[0] for path in folder.iterdir()}
    assert left == {f"s{number}" for number in range(21) if number != 5} | {"s29"}, "the last twenty, none too old, none in use"


def waits_for_a_lock(pid):
    return any("->" in line and str(pid) in line.split() for line in Path("/proc/locks").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system does not say who waits for a lock")
def test_a_head_waits_for_the_one_before_it(state):
    with head._locked("head.alone", fcntl.LOCK_EX):
        second = subprocess.Popen([sys.executable, "-m", "hfsdk.engine.ray.head"], env=os.environ | {"PYTHONPATH": os.getcwd()})
        until("the second one to wait for the lock", lambda: waits_for_a_lock(second.pid) or second.poll() is not None)
        assert second.poll() is None
        assert not (state / "head.json").exists()
        second.terminate()
        second.wait(60)


def test_whoever_looks_keeps_the_head(state):
    with head.looking(), head.looking(), head._locked("head.looks", fcntl.LOCK_EX | fcntl.LOCK_NB) as unseen:
        assert not unseen
    with head._locked("head.looks", fcntl.LOCK_EX | fcntl.LOCK_NB) as unseen:
        assert unseen
