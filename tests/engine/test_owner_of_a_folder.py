"""A folder whose lock is free is still somebody's while the process that it names lives: on a network a lock may not hold."""

import json
import os
import socket

import pytest

pytest.importorskip("psutil")
import psutil

from hfsdk.engine.ray import access


@pytest.fixture
def owned_by(tmp_path):
    """``owned_by(pid, started, host)``: a folder with that owner, which nobody has locked."""

    def made(pid, started, host):
        folder = access.create("job", str(tmp_path))
        os.close(folder.lock)
        owner = {"pid": pid, "started": started, "host": host}
        (folder.path / access.OWNER).write_text(json.dumps(owner), encoding="utf-8")
        return folder.path

    return made


def test_a_living_process_keeps_its_folder_without_a_lock(owned_by, tmp_path):
    me = psutil.Process()
    kept = owned_by(me.pid, me.create_time(), socket.gethostname())
    assert access.left_in(str(tmp_path)) == []
    assert access.clear_left(str(tmp_path)) == []
    assert kept.is_dir()


def test_what_a_process_of_another_machine_made_is_left_to_that_machine(owned_by, tmp_path):
    kept = owned_by(1, 0.0, "another-machine")
    assert access.clear_left(str(tmp_path)) == []
    assert kept.is_dir()
