"""How this process gets to a Ray: one of its own, or a cluster that runs already; and how it leaves again.

A Ray of our own lives in a folder of mode 0700 (``access.py``), refuses calls without this user's token, and starts no
dashboard, no metrics page, and nothing that asks the network. Ray's GCS, raylet and workers listen on every interface, behind the
token; what they send is not encrypted. All sessions of a process share one Ray; the last one to close ends it. When the process is
killed, the next session of that user removes what is left (``access.py``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.worker
import ray._raylet

from hfsdk.core.errors import PlacementError
from hfsdk.engine.process.interrupts import deliver, held
from hfsdk.engine.ray import access as own_folders
from hfsdk.engine.ray import access as ray_access
from hfsdk.engine.ray.access import OwnFolder
from hfsdk.engine.ray.cluster import SHIPPED, Access, ask_alive, check_same
from hfsdk.engine.ray.fork_server import SCRIPT, WorkerForks, can_fork

START_TRIES = 8
"""A raylet ends itself when its agent takes more than about 15 s to start, as on a busy machine: then once more."""

OBJECT_STORE_BYTES = 512 * 2**20
"""Shared memory for columns, where hfsdk starts Ray itself."""

ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}
"""Settings of a Ray of our own, where the environment has none: no usage report; no metrics page, which would answer anybody."""

FORGO_S = 5.0
"""How long a session that has ended by itself uses its Ray."""

_raylet: Any = ray._raylet  # compiled, without types

_NODE_START = ray._private.node.Node.__init__.__code__
"""Starts Ray's processes and waits for them: may be interrupted, for they are known by their folder and can be ended."""

_lock = threading.RLock()
"""The lock of starting, joining, leaving or ending a Ray: sessions may be opened and closed on several threads."""

_own_ray: set[str] = set()
"""Job ids of the open sessions of this process on a Ray that hfsdk started or joined; the last one to close ends or leaves it."""

_forgone: set[str] = set()
"""Job ids, of these, whose session has ended by itself, perhaps with its cluster: they need not stay for a new session."""

_folder: OwnFolder | None = None
"""The folder of the Ray that hfsdk started; ``None`` without one."""

_forks: WorkerForks | None = None
"""The process that its workers are forked from; ``None`` where they cannot be."""

_mode_before: list[str | None] = []
"""The environment's ``RAY_AUTH_MODE``, while it is another one than the user's."""


def enter(job_id: str, num_devices: int | None, address: str | None, *, near: bool = False) -> list[str]:
    """Have a Ray for a session: the one of this process, else one of its own, or the cluster at an address.

    Args:
        job_id: the session's.
        num_devices: processors of a Ray of its own.
        address: ``None`` or ``"local"`` for that; else ``"auto"`` or ``host:port``.
        near: whether hfsdk itself started what is at the address, on this machine.

    Returns:
        What the user has to know about who can reach it.

    Raises:
        PlacementError: it cannot be had.
    """
    notices: list[str] = []
    with _lock:
        for user in list(_forgone):
            leave(user)
        if not ray.is_initialized():
            own_folders.clear_left(ray_access.private_place(""))
            notices = start(num_devices) if address in (None, "local") else join(str(address), near=near)
            _own_ray.add(job_id)
        elif address not in (None, "local", "auto"):
            check_same(str(address))
            if _own_ray:
                _own_ray.add(job_id)
        elif _own_ray:
            _own_ray.add(job_id)
        else:  # the user's own ray.init(...)
            notices = [*_without_token(), *_open_folder()]
    return notices


def owns(job_id: str) -> bool:
    """Return whether a session is on a Ray that hfsdk started or joined."""
    return job_id in _own_ray


def leave(job_id: str) -> None:
    """Have a session done with Ray; the last one ends it, or disconnects from the cluster."""
    with _lock:
        _forgone.discard(job_id)
        if job_id in _own_ray:
            _own_ray.discard(job_id)
            if not _own_ray:
                end()


def forgo(job_id: str) -> None:
    """Have done with the Ray of a session that has ended by itself, soon, when nobody waits for its answers any more.

    That Ray may end too, and a process that uses one that has ended is ended by it, a minute later. The next session of this
    process may be on another Ray, also before.
    """
    with _lock:
        if job_id not in _own_ray or job_id in _forgone:
            return
        _forgone.add(job_id)
    timer = threading.Timer(FORGO_S, leave, (job_id,))
    timer.daemon = True
    timer.start()


def start(num_cpus: int | None) -> list[str]:
    """Start a Ray of this process's own; return what the user has to know.

    A Ctrl-C ends what was begun. Leftovers of killed processes are removed first.

    Raises:
        PlacementError: the environment switches authentication off, there is no place for the folder, or Ray is too slow.
    """
    global _folder, _forks
    ray_access.check_mode()
    place = ray_access.private_place()
    own_folders.clear_left(place)
    notices = ray_access.secure_token()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with held(_NODE_START):
        _folder = own_folders.create("ray", place)
        try:
            _require_token()
            if can_fork():
                _forks = WorkerForks(_folder.path)
            _init(num_cpus, str(_folder.path / "r"))  # Ray makes that one 0777
            deliver()
        except BaseException:
            end()
            raise
        _silence()
    return notices


def _require_token() -> None:
    """Have the next Ray of this process use the token, also where Ray was imported before; one that is started asks for it."""
    if not _mode_before:
        _mode_before.append(os.environ.get(ray_access.AUTH_MODE))
    os.environ[ray_access.AUTH_MODE] = "token"
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()
    if _raylet.get_authentication_mode() != _raylet.AuthenticationMode.TOKEN:
        raise PlacementError(f"Ray does not take token authentication, though {ray_access.AUTH_MODE} is 'token': not started")


def _restore_mode() -> None:
    """Give the user's environment back: else the next cluster would be shown the token."""
    if _mode_before:
        mode = _mode_before.pop()
        os.environ.pop(ray_access.AUTH_MODE, None)
        if mode is not None:
            os.environ[ray_access.AUTH_MODE] = mode
        _raylet.Config.initialize("")


def _init(num_cpus: int | None, folder: str) -> None:
    """Start Ray, again where its helpers were too slow."""
    for tries_left in reversed(range(START_TRIES)):
        begun = time.time()
        try:
            with _without_helpers(), _with_forks():
                ray.init(
                    address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_BYTES, _temp_dir=folder,
                )  # fmt: skip
            return
        except BaseException as error:  # Ray raises a bare Exception here; a Ctrl-C comes here too
            ray.shutdown()
            own_folders.end_new_children(Path(folder).parent, begun)  # Ray forgets the helpers of a start that failed
            if "timed out during startup" not in str(error):
                raise
            if not tries_left:
                raise PlacementError(
                    f"Ray did not start within {START_TRIES} tries of 30 s: its own helper processes were too slow. "
                    "Is the machine busy or out of memory? End other work and try again."
                ) from error
        deliver()


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Start Ray without three helpers that do nothing on one machine and that no option of ``ray.init`` leaves out.

    The API server, without a dashboard, only asks the network which cloud this is. The autoscaler would start nodes, of which there
    is one, and has a metrics page that answers anybody. The log monitor reads every log file ten times a second, and publishes new
    lines to drivers that want none (``log_to_driver=False``): workers write their own.
    """
    node: Any = ray._private.node.Node
    originals = node.start_api_server, node.start_monitor, node.start_log_monitor

    def start_none(self: Any, **options: Any) -> None:
        self._webui_url = ""

    node.start_api_server, node.start_monitor, node.start_log_monitor = start_none, lambda self: None, lambda self: None
    try:
        yield
    finally:
        node.start_api_server, node.start_monitor, node.start_log_monitor = originals


@contextmanager
def _with_forks() -> Iterator[None]:
    """Start Ray so that it asks for forks where it would start Python for workers."""
    node: Any = ray._private.node.Node
    original = node.start_raylet

    def start_raylet(self: Any, *arguments: Any, **options: Any) -> None:
        self._ray_params.worker_path = self._ray_params.setup_worker_path = SCRIPT
        original(self, *arguments, **options)

    if _forks is not None:
        node.start_raylet = start_raylet
    try:
        yield
    finally:
        node.start_raylet = original


def join(address: str, *, near: bool = False) -> list[str]:
    """Connect to a cluster that runs already; return what the user has to know.

    ``near``: hfsdk itself started it, on this machine, with this user's token and this package.

    With ``"auto"`` the token is shown only to what this user or root started. To an address that the user names it is shown where
    ``RAY_AUTH_MODE=token`` says so, as Ray does.

    Raises:
        PlacementError: there is none, it does not answer, or another user has to do with its address.
    """
    cluster = ray_access.find_cluster() if address == "auto" else ray_access.ClusterAddress(address, "the user")
    gcs = cluster.address
    notices: list[str] = []
    with held(_NODE_START):
        try:
            access = ask_alive(gcs)
            if access == "token" or (access == "unknown" and ray_access.has_token()):
                notices = ray_access.secure_token(make=False)
                discovered = address == "auto" and cluster.source != "RAY_ADDRESS"
                if near or (discovered and ray_access.AUTH_MODE not in os.environ):
                    _require_token()
            if access == "token" and _raylet.get_authentication_mode() != _raylet.AuthenticationMode.TOKEN:
                raise PlacementError(
                    f"the Ray cluster at {gcs} asks for a token, and to an address that is given by hand this process shows "
                    f"none: set {ray_access.AUTH_MODE}=token in the environment before Python starts, with the cluster's token in "
                    "~/.ray/auth_token"
                )
            # the nodes of our own Ray have this package already
            shipped = None if near else SHIPPED
            ray.init(address=gcs, log_to_driver=False, logging_level=logging.ERROR, runtime_env=shipped)
            deliver()
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            end()
            if isinstance(error, PlacementError):
                raise
            raise PlacementError(
                f"no Ray cluster at {gcs!r} can be used from here: {error}. Start one with `ray start --head`, give its "
                "address as host:port, and open the session on one of its nodes."
            ) from error
        except BaseException:
            end()
            raise
        _silence()
    return [*notices, *_open_to_strangers(gcs, access), *_open_folder()]


def _open_to_strangers(address: str, access: Access) -> list[str]:
    if access == "unknown" and not ray_access.has_token():
        return [f"whether the Ray cluster at {address} has authentication could not be asked: install grpcio to have it asked."]
    if access != "open":
        return []
    return [
        f"the Ray cluster at {address} has no authentication: whoever reaches its ports can run code in your session. Make a token "
        "(`ray get-auth-token --generate`) and start the cluster again with RAY_AUTH_MODE=token in the environment, on every node."
    ]


def _without_token() -> list[str]:
    """Return a notice where the Ray that this process already uses asks nobody for a token."""
    if _raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN:
        return []
    return _open_to_strangers(ray.get_runtime_context().gcs_address, "open")


def _open_folder() -> list[str]:
    """Return a notice where others can put their own files in place of the cluster's on this machine."""
    node: Any = ray._private.worker._global_node
    try:
        folder = ray_access.open_to_all(Path(node.get_session_dir_path()))
    except OSError:
        return []  # not there for this user at all
    if folder is None:
        return []
    return [
        f"every user of this machine can replace what is in {folder}, where the Ray cluster keeps code and sockets of your "
        "session: start the cluster with `ray start --temp-dir` in a folder of mode 0700."
    ]


def end() -> None:
    """End the Ray of this process, or disconnect from the cluster, and remove its folder."""
    global _folder, _forks
    with _lock, held():
        _own_ray.clear()
        _forgone.clear()
        ray.shutdown()
        _silence(False)
        if _forks is not None:
            _forks.end()
            _forks = None
        if _folder is not None:
            own_folders.end_processes(_folder.path)
            _folder.remove()
            _folder = None
        _restore_mode()


def _silence(silent: bool = True) -> None:
    """Keep what Ray says about its workers ("(raylet) A worker died ...") from this process's output.

    Ray prints that whatever ``log_to_driver`` is. A session says it itself, with the call and the line.
    """
    ray._private.worker._worker_logs_enabled = not silent  # the switch that Ray's own debugger uses
