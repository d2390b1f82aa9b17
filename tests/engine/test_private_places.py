"""No process of a session uses a place that others share: where its temporary files, its log and its compiled code lie."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from expect import refuses

pytest.importorskip("psutil")
from hfsdk.core import private_places
from hfsdk.core.errors import PlacementError

NOBODY = 65534
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user would")

LOGGED = """
import json, os, sys, tempfile
tempfile.gettempdir()  # as whoever it was forked from
from hfsdk.engine.ray.ray_process import LoggedProcess
said = os.dup(1)
LoggedProcess(sys.argv[1], {"OMP_NUM_THREADS": "1"})
print("into the log", flush=True)
names = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
os.write(said, json.dumps([tempfile.gettempdir(), *(os.environ.get(name) for name in names)]).encode())
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A home, a shared place for temporary files, and a session's folder in it."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and str(folder) not in ("/", "/tmp"):
            folder.chmod(0o755)
    for name, mode in (("home", 0o755), ("shared", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "shared" / "session").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def logged(log):
    """Return where a process of a session has its temporary files and its compiled code, and how it ended."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", LOGGED, str(log)], env=env, capture_output=True, text=True, check=False)


def test_a_process_of_a_session_has_its_files_where_nobody_else_can_put_any(places):
    session, compiled = places / "shared" / "session", places / "home" / ".cache" / "hfsdk" / "compiled"
    done = logged(session / "device0.log")
    assert done.stdout, done.stderr[-2000:]
    inside = [str(compiled / name) for name in ("inductor", "triton", "vllm")]
    assert json.loads(done.stdout) == [str(session), str(session), *inside]
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert (session / "device0.log").read_text() == "into the log\n"


def test_what_the_user_chose_stays(places, monkeypatch):
    own = places / "home" / "scratch"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    chosen = private_places.in_use(places / "shared" / "session")
    assert "TMPDIR" not in chosen
    assert "TRITON_CACHE_DIR" not in chosen


@pytest.mark.parametrize("wrong", ["shared", "anothers", "above"])
def test_code_is_not_looked_for_where_others_could_have_put_it(places, wrong):
    """It lies with the session then, and goes with it."""
    folder = places / "home" / ".cache" / "hfsdk"
    (folder / "compiled").mkdir(parents=True, mode=0o700)
    if wrong == "shared":
        (folder / "compiled").chmod(0o777)
    elif wrong == "above":
        folder.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(folder / "compiled", NOBODY, NOBODY)
    else:
        pytest.skip("only root can make what another user would")
    session = places / "shared" / "session"
    chosen = private_places.in_use(session)
    assert [chosen[name] for name in VARIABLES] == [str(session / name) for name in ("inductor", "triton", "vllm")]


def test_what_can_be_renamed_or_belongs_to_another_is_nobodys_own(places):
    shared, home = places / "shared", places / "home"
    assert private_places.is_mine(home)
    assert private_places.is_mine(shared / "session"), "in a sticky folder nobody renames what is another's"
    assert not private_places.is_mine(shared)
    assert not private_places.is_mine(places / "nowhere")
    shared.chmod(0o777)
    assert not private_places.is_mine(shared / "session")
    shared.chmod(0o775)
    os.chown(shared, -1, os.getegid() if os.geteuid() else NOBODY)
    assert os.geteuid() != 0 or not private_places.is_mine(shared), "a group of others"


@as_root
def test_whose_folder_holds_mine_can_rename_it(places):
    os.chown(places / "shared", NOBODY, NOBODY)
    assert not private_places.is_mine(places / "shared" / "session"), "the sticky bit does not bind its owner"


def test_a_log_is_not_written_through_a_link(places):
    victim = places / "home" / "victim"
    victim.write_text("mine")
    (places / "shared" / "session" / "device0.log").symlink_to(victim)
    done = logged(places / "shared" / "session" / "device0.log")
    assert done.returncode != 0
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("wrong", ["open", "link", "anothers"])
def test_a_folder_that_was_there_first_is_refused(places, wrong):
    """On another node its name is known before it is made."""
    folder = places / "shared" / "job"
    if wrong == "link":
        folder.symlink_to(places / "home")
    else:
        folder.mkdir()
        folder.chmod(0o755 if wrong == "open" else 0o700)
    if wrong == "anothers":
        if os.geteuid() != 0:
            pytest.skip("only root can make what another user would")
        os.chown(folder, NOBODY, NOBODY)
    with refuses(PlacementError, folder, "TMPDIR"):
        private_places.enter(folder)
    assert logged(folder / "device0.log").returncode != 0
    assert not (folder / "device0.log").exists()


READS = """
import sys
from hfsdk.assets.pretrained import load_tokenizer
import hfsdk.assets
print(len(load_tokenizer(hfsdk.assets.model_folder("tiny"))))
"""


def test_a_kernel_that_reads_a_tokenizer_needs_nothing_of_a_shared_place(places):
    """Another user had torch's name there first, with something that is no folder."""
    import getpass

    name = places / "shared" / f"torchinductor_{getpass.getuser()}"
    name.write_text("")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", READS], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 256, "all bytes and what ends a text"
    assert sorted(path.name for path in (places / "shared").iterdir()) == ["session", name.name]
