"""Who can reach a Ray of ours, and whom its token is shown to."""

import os
import socket
import subprocess
import threading
from types import SimpleNamespace

import pytest
from expect import refuses

pytest.importorskip("ray")
from hfsdk.core.errors import PlacementError
from hfsdk.engine.ray import access, cluster, start

NOBODY = 65534
TOKEN = "0123456789abcdef" * 4

STRANGER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, in which a token is kept and an address may be written down."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("RAY_TMPDIR", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path


class Listener:
    """A server that accepts, writes down what it is sent, and says nothing."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.heard = b""
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.hear, args=(connection,), daemon=True).start()

    def hear(self, connection):
        with connection:
            while data := connection.recv(4096):
                self.heard += data


@pytest.fixture
def listener():
    server = Listener()
    yield server
    server.server.close()


def mode(path):
    return path.stat().st_mode & 0o777


# -- the token's file


def test_the_token_is_made_readable_by_its_user_alone(home):
    before = os.umask(0)
    try:
        assert access.secure_token() == []
    finally:
        os.umask(before)
    token = home / ".ray" / "auth_token"
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    text = token.read_text()
    assert access.secure_token() == []
    assert token.read_text() == text


def test_a_token_that_others_could_read_is_closed_and_that_is_said(home):
    token = home / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o755)
    token.parent.chmod(0o777)
    token.write_text(TOKEN)
    token.chmod(0o644)
    assert not next(seen for seen in cluster.look() if seen.name == "Ray's token").good
    folder, file = access.secure_token()
    assert "another token" in folder
    assert "0644" in file
    assert "delete the file" in file
    assert (mode(token), mode(token.parent)) == (0o600, 0o755)
    assert next(seen for seen in cluster.look() if seen.name == "Ray's token").good


@as_root
def test_a_token_that_another_user_made_is_refused(home):
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(TOKEN)
    os.chown(token, NOBODY, NOBODY)
    with refuses(PlacementError, "knows what is in it"):
        access.secure_token()


@as_root
def test_a_token_of_roots_that_everybody_can_read_is_refused(home, monkeypatch):
    token = home / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o755)
    token.write_text(TOKEN)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    token.chmod(0o640)
    assert access.secure_token() == []
    token.chmod(0o644)
    with refuses(PlacementError, "is root's and its mode is 0644"):
        access.secure_token()


def test_a_first_token_in_a_folder_that_others_can_write_closes_it(home):
    (home / ".ray").mkdir()
    (home / ".ray").chmod(0o777)
    (notice,) = access.secure_token()
    assert "other users could put another token" in notice
    assert mode(home / ".ray") == 0o755
    assert mode(home / ".ray" / "auth_token") == 0o600


@pytest.mark.parametrize(("authentication", "says"), [("DISABLED", True), ("TOKEN", False)])
def test_the_users_own_ray_without_a_token_is_said(monkeypatch, authentication, says):
    raylet = start._raylet
    monkeypatch.setattr(start.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(raylet, "get_authentication_mode", lambda: getattr(raylet.AuthenticationMode, authentication))
    monkeypatch.setattr(start.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(start, "_open_folder", list)
    notices = start.enter("job", None, None)
    assert ["127.0.0.1:6379 has no authentication" in notice for notice in notices] == [True] * says


def test_a_cluster_that_cannot_be_asked_about_its_authentication_is_said(home):
    (notice,) = start._open_to_strangers("10.0.0.1:6379", "unknown")
    assert "install grpcio" in notice


@pytest.mark.parametrize("value", ["disabled", "DISABLED", "", "none"])
def test_a_ray_without_authentication_is_not_started(home, monkeypatch, value):
    monkeypatch.setenv("RAY_AUTH_MODE", value)
    with refuses(PlacementError, "RAY_AUTH_MODE"):
        start.start(1)
    assert not next(seen for seen in cluster.look() if seen.name == "Ray's authentication").good


# -- the folder


def test_rays_folder_is_where_its_sockets_fit_and_nobody_else_can_rename_it(home, monkeypatch):
    import tempfile

    deep = home / ("x" * 100)
    deep.mkdir()
    shared = home / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for place in (deep, shared):
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        chosen = access.private_place()
        assert chosen != str(place)
        assert len(chosen) + len(access.SOCKET_TAIL) <= access.SOCKET_CHARS


def let_others_in(path):
    """Have every user get as far as a folder of this one."""
    for folder in [path, *path.parents]:
        if folder.stat().st_uid == os.geteuid() and str(folder) not in ("/", "/tmp"):
            folder.chmod(0o755)


def test_a_sessions_folder_is_where_nobody_else_can_rename_it_however_long_its_path(home, monkeypatch):
    import tempfile

    let_others_in(home)
    deep, shared = home / ("x" * 100), home / "shared"
    deep.mkdir()
    shared.mkdir()
    shared.chmod(0o777)
    for place, is_chosen in ((deep, True), (shared, False)):
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        assert (access.private_place("") == os.path.realpath(place)) is is_chosen


def test_a_folder_in_which_anybody_can_rename_is_named(tmp_path):
    let_others_in(tmp_path)
    inner = tmp_path / "shared" / "mine"
    inner.mkdir(parents=True)
    assert access.open_to_all(inner) is None
    (tmp_path / "shared").chmod(0o777)
    assert access.open_to_all(inner) == tmp_path / "shared"
    inner.chmod(0o700)
    assert access.open_to_all(inner) == tmp_path / "shared", "a closed folder can be put aside in an open one"
    (tmp_path / "shared").chmod(0o1777)
    assert access.open_to_all(inner) is None


# -- the address of "auto"


def poison(home, text):
    path = home / "ray" / "ray_current_cluster"
    path.write_text(text)
    return path


@as_root
def test_an_address_that_another_user_wrote_gets_nothing(home, listener, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    os.chown(poison(home, listener.address), NOBODY, NOBODY)
    with refuses(PlacementError, "was written by"):
        start.join("auto")
    assert "was written by" in repr(cluster.look())
    assert listener.heard == b""


@pytest.mark.parametrize("spoil", ["writable", "link", "words", "folder"])
def test_an_address_file_that_others_may_have_had_a_hand_in_is_not_believed(home, listener, spoil):
    path = poison(home, "words" if spoil == "words" else listener.address)
    if spoil == "writable":
        path.chmod(0o666)
    elif spoil in ("link", "folder"):
        path.rename(home / "elsewhere")
        path.symlink_to(home / "elsewhere") if spoil == "link" else path.mkdir()
    with refuses(PlacementError, "ray_current_cluster"):
        start.join("auto")
    assert listener.heard == b""


@as_root
@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="the system does not say who listens")
def test_a_port_of_an_old_cluster_that_another_user_listens_at_gets_nothing(home):
    stranger = subprocess.Popen(["python3", "-c", STRANGER], stdout=subprocess.PIPE, text=True, user=NOBODY, group=NOBODY, cwd="/")
    try:
        poison(home, f"127.0.0.1:{stranger.stdout.readline().strip()}")
        with refuses(PlacementError, "listens at"):
            start.join("auto")
    finally:
        stranger.kill()
        stranger.communicate()


@pytest.mark.parametrize("auto", [True, False])
def test_a_silent_address_is_given_up_soon_and_shown_no_token(home, listener, monkeypatch, auto):
    pytest.importorskip("grpc")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(cluster, "ANSWER_S", 1.0)
    poison(home, listener.address)
    with refuses(PlacementError, "did not answer"):
        start.join("auto" if auto else listener.address)
    assert listener.heard, "it was asked"
    assert TOKEN.encode() not in listener.heard


def test_without_a_cluster_auto_says_how_to_start_one(home, monkeypatch):
    monkeypatch.setattr(access, "_served_here", list)
    with refuses(PlacementError, "ray start --head"):
        start.join("auto")
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with refuses(PlacementError, "RAY_ADDRESS"):
        start.join("auto")
