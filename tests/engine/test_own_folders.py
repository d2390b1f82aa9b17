"""Only what provably belonged to a dead process of this user is removed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")
import psutil
from expect import refuses

from hfsdk.core.errors import PlacementError
from hfsdk.engine.ray import access

MAKER = """
import sys
from hfsdk.engine.ray import access
print(access.create("job", sys.argv[1]).path, flush=True)
sys.stdin.read()
"""

HELPER = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def maker(tmp_path):
    """A process that owns a folder in ``tmp_path``, and the folder."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], text=True, env=env, **pipes)
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def test_a_killed_processs_folder_and_helpers_go_and_a_living_ones_stay(maker, tmp_path):
    process, folder = maker
    (folder / "log").write_text("words")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert access.clear_left(str(tmp_path)) == []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    helper = subprocess.Popen([sys.executable, "-c", HELPER, f"--session-dir={folder}/r"], **pipes)
    reader = subprocess.Popen([sys.executable, "-c", HELPER, f"{folder}/log"], **pipes)
    try:
        assert (helper.stdout.readline(), reader.stdout.readline()) == (b"up\n", b"up\n")
        process.kill()
        process.wait()
        assert access.left_in(str(tmp_path)) == [folder]
        assert access.clear_left(str(tmp_path)) == [folder]
        assert not folder.exists()
        assert not psutil.pid_exists(helper.pid)
        assert reader.poll() is None, "somebody who looks at a file of it is no helper"
    finally:
        for child in (helper, reader):
            child.kill()
            child.communicate()


def test_a_process_with_the_same_id_is_another_one(maker, tmp_path):
    process, folder = maker
    process.kill()
    process.wait()
    known = json.loads((folder / "owner.json").read_text())
    (folder / "owner.json").write_text(json.dumps({"pid": os.getpid(), "started": known["started"] - 1000}))
    assert access.clear_left(str(tmp_path)) == [folder]


def test_a_locked_folder_stays_though_its_process_cannot_be_seen(maker, tmp_path):
    """As where two containers share a place for temporary files."""
    _, folder = maker
    (folder / "owner.json").write_text(json.dumps({"pid": 2**22, "started": 0.0}))
    assert access.clear_left(str(tmp_path)) == []
    assert folder.exists()


def test_what_is_not_surely_ours_stays(tmp_path):
    (tmp_path / "hfsdk-without-owner").mkdir(mode=0o700)
    broken = tmp_path / "hfsdk-broken"
    broken.mkdir(mode=0o700)
    (broken / "owner.json").write_text("words")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "owner.json").write_text(json.dumps({"pid": 2**22, "started": 0.0}))
    (tmp_path / "hfsdk-link").symlink_to(elsewhere)
    if os.geteuid() == 0:
        foreign = tmp_path / "hfsdk-foreign"
        foreign.mkdir(mode=0o700)
        (foreign / "owner.json").write_text(json.dumps({"pid": 2**22, "started": 0.0}))
        os.chown(foreign, 65534, 65534)
    before = sorted(tmp_path.iterdir())
    assert access.clear_left(str(tmp_path)) == []
    assert sorted(tmp_path.iterdir()) == before
    assert (elsewhere / "owner.json").exists()


def test_a_folder_of_another_machine_is_left_to_it(maker, tmp_path):
    process, folder = maker
    process.kill()
    process.wait()
    owner = json.loads((folder / access.OWNER).read_text())
    (folder / access.OWNER).write_text(json.dumps({**owner, "host": "another"}))
    assert access.left_in(str(tmp_path)) == access.clear_left(str(tmp_path)) == []
    (folder / access.OWNER).write_text(json.dumps(owner))
    assert access.clear_left(str(tmp_path)) == [folder]


def test_a_place_that_takes_no_folder_is_told_and_nothing_stays(tmp_path, monkeypatch):
    with refuses(PlacementError, "nowhere", "No such file"):
        access.create("job", str(tmp_path / "nowhere"))

    def no_locks(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(access.fcntl, "flock", no_locks)
    with refuses(PlacementError, "Function not implemented", "TMPDIR"):
        access.create("job", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
