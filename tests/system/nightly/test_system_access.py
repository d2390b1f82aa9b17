"""Who can reach a Ray that hfsdk started, what its end and its interrupted start leave, and what it prints."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from expect import until

NOBODY = 65534

LISTENING = {"gcs_server", "raylet", "ray::RuntimeEnvAgent"}
"""Ray's processes that listen to the network, behind the token, beside workers and this process."""

STARTS = """
import json, os, signal, sys, threading, time, warnings
import psutil
import hfsdk as hf
from hfsdk.engine.ray import start as ray_start

signal.signal(signal.SIGINT, signal.default_int_handler)
me, places = psutil.Process(), []

def interrupt(when):
    def press():
        while not when():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()

def started(name):
    return any(child.name() == name for child in me.children())

def initialized():
    import ray
    return ray.is_initialized()

def interrupted(when):
    interrupt(when)
    try:
        session = hf.Session(devices=1)
    except KeyboardInterrupt:
        return [[p.name() for p in me.children(recursive=True)], initialized(), ray_start._folder is None]
    return "not interrupted"

moments = (lambda: started("gcs_server"), lambda: started("raylet"), initialized)
print(json.dumps([interrupted(when) for when in moments]), flush=True)

import ray
session = hf.Session(devices=1)
from hfsdk.session.parts import parts_of
folders = [str(ray_start._folder.path), str(parts_of(session).client._controller._runtime._own_folder.path)]
Sleeper = ray.remote(num_cpus=0)(type("Sleeper", (), {"pid": lambda self: os.getpid()}))
for _ in range(2):
    sleeper = Sleeper.remote()
    os.kill(ray.get(sleeper.pid.remote()), signal.SIGKILL)
    try:
        ray.get(sleeper.pid.remote())
    except ray.exceptions.ActorDiedError:
        pass
time.sleep(1)
print(json.dumps({"folders": folders, "pids": [p.pid for p in me.children(recursive=True)]}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


JOINS = """
import json, os, subprocess, sys
from pathlib import Path
import hfsdk as hf

HOLDER = '''
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False, object_store_memory=200 * 2**20))
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
'''
options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
holder = subprocess.Popen([sys.executable, "-c", HOLDER], **options)
try:
    address = holder.stdout.readline().strip()
    session = hf.Session("auto")
    told = {"messages": session.messages, "mode": os.environ.get("RAY_AUTH_MODE"), "report": repr(hf.doctor())}
    print(json.dumps(told), flush=True)
    session.close()
finally:
    holder.stdin.close()
    holder.wait(60)
"""


def processes_of(ray):
    import psutil

    gcs = next(p for p in psutil.Process().children() if p.name() == "gcs_server")
    return psutil.Process(), gcs, psutil.Process().children(recursive=True)


def test_rays_folder_is_closed_to_other_users_and_its_sockets_fit(ray_here):
    from hfsdk.engine.ray import access, start

    folder = start._folder.path
    assert folder.stat().st_mode & 0o777 == 0o700
    longest = max(len(str(path)) for path in folder.rglob("sockets/*"))
    assert longest <= access.SOCKET_CHARS
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o077 == 0 or access.token_file() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_can_neither_list_nor_read_nor_rename(ray_here):
    from hfsdk.engine.ray import access, start

    folder = start._folder.path
    log = next(folder.glob("r/session_2*/logs/raylet.out"))
    tries = [["ls", folder], ["cat", log], ["touch", folder / "x"]]
    tries += [["mv", folder / "r", folder / "s"], ["mv", folder, f"{folder}x"]]
    if access.token_file() is not None:
        tries.append(["cat", access.token_file()])
    for command in tries:
        done = subprocess.run(
            command, capture_output=True, text=True, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", check=False
        )
        assert done.returncode != 0, command
        assert "Permission denied" in done.stderr or "not permitted" in done.stderr, done.stderr


def test_only_rays_own_processes_listen_and_none_of_them_is_a_metrics_page(ray_here):
    import psutil

    me, _, children = processes_of(ray_here)
    listening = {}
    for process in [me, *children]:
        try:
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in ("127.0.0.1", "::1"):
                    listening.setdefault(process.name(), []).append(connection.laddr.port)
        except psutil.NoSuchProcess:
            continue
    workers = {name for name in listening if name.startswith("ray::") and "Agent" not in name}
    assert set(listening) - workers - {me.name()} <= LISTENING, listening
    assert len(listening.get(me.name(), [])) <= 1, "the driver's own port of Ray"
    scripts = {Path(option).name for process in children for option in process.cmdline()[:4] if option.endswith(".py")}
    assert scripts & {"dashboard.py", "monitor.py", "log_monitor.py"} == set()


def test_calls_without_the_token_or_with_a_wrong_one_are_refused(ray_here):
    grpc = pytest.importorskip("grpc")
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    from hfsdk.engine.ray.access import token_file
    from hfsdk.engine.ray.cluster import ask_alive

    address = ray_here.get_runtime_context().gcs_address
    assert ask_alive(address) == "token"
    token = token_file().read_text() if token_file() else os.environ["RAY_AUTH_TOKEN"]
    with grpc.insecure_channel(address) as channel:
        ask = gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel).InternalKVKeys
        request = gcs_service_pb2.InternalKVKeysRequest(prefix=b"")
        for metadata in ((), (("authorization", "Bearer " + "0" * 64),)):
            with pytest.raises(grpc.RpcError) as refused:
                ask(request, metadata=metadata, timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert ask(request, metadata=(("authorization", f"Bearer {token}"),), timeout=10) is not None


@pytest.mark.timeout(400)
def test_interrupted_starts_and_killed_drivers_leave_nothing(ray_here):
    """Ctrl-C while Ray starts, connects and starts workers; then a worker is killed, which is not printed; then the driver."""
    import psutil

    from hfsdk.engine.ray import access

    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, env=env, timeout=380, check=False)
    assert done.returncode == -9, done.stderr[-3000:]
    first, second = done.stdout.splitlines()
    assert json.loads(first) == [[[], False, True]] * 3
    assert "died" not in done.stdout + done.stderr
    known = json.loads(second)
    for place in {str(Path(folder).parent) for folder in known["folders"]}:
        access.clear_left(place)  # leaves to a Ray that starts beside this test what that one is clearing
    until("the end of every folder", lambda: not [folder for folder in known["folders"] if Path(folder).exists()])
    until("the end of every process", lambda: not [pid for pid in known["pids"] if psutil.pid_exists(pid)])


@pytest.fixture
def place():
    """A short path, for Ray's sockets, that others can look into."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.timeout(300)
def test_joining_a_cluster_that_is_open_to_others_is_said(ray_here, place):
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_TMPDIR")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[3]), "HOME": str(place), "TMPDIR": str(place)}
    done = subprocess.run([sys.executable, "-c", JOINS], capture_output=True, text=True, env=env, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    authentication, folder = told["messages"]
    assert "has no authentication" in authentication
    assert f"{place}/ray" in folder
    assert "ray start --temp-dir" in folder
    assert told["mode"] is None
    assert f"{place}/ray/ray_current_cluster says" in told["report"]
