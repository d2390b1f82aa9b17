"""``RayKeeper``: a process of the cluster that outlives the one that started it; how it is started, found and called.

It is a detached, named actor: Ray ends it, and the workers that it has started, only when it is killed or its cluster ends. What it
does is given to it by the session (``make``); this module knows nothing of that.

On one machine the cluster is a Ray of hfsdk's own, which a process of its own holds (``head.py``).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hfsdk.core.errors import PlacementError, SessionClosedError
from hfsdk.core.runtime import Pick
from hfsdk.core.table import Table
from hfsdk.engine.calls.replies import Reply
from hfsdk.engine.process.interrupts import held
from hfsdk.engine.ray import head as ray_head
from hfsdk.engine.ray import ray_store
from hfsdk.engine.ray import start as ray_start
from hfsdk.engine.ray.head import NAMESPACE
from hfsdk.engine.ray.ray_process import LoggedProcess
from hfsdk.engine.ray.ray_store import WORKER_GONE, reason_of

ASKED_AT_ONCE = 64
"""Threads of a keeper: messages that wait, for a call or for roles to load, hold one each."""

SWITCH_S = 0.00005
"""How long a thread of a keeper computes while others want to: they are many, and each has little to do before somebody waits."""

GIVE_UP_S = 5.0
"""How long one that could not be begun stays: that is answered first."""

START_S = 120.0
"""The seconds that a keeper may take to start, and waits for its session: the process that started it may have been killed."""

ANSWER_S = 10.0
"""How long a keeper may take to say what it holds."""


class KeeperProcess(LoggedProcess):
    """The process: what :meth:`begin` is given builds what answers."""

    temporary_here = False  # its folder has the logs of all, and stays

    def __init__(self, log_file: str, folder: str, path: Sequence[str]) -> None:
        from hfsdk.engine.worker import environment  # here, for whoever asks a keeper loads no engine

        super().__init__(log_file, environment.of_process(1))
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_SH)  # so long the file is not removed
        os.chdir(folder)
        sys.setswitchinterval(SWITCH_S)
        sys.path += [place for place in path if place not in sys.path]
        self._keeper: Any = None
        self._begin_asked, self._begun = threading.Event(), threading.Event()
        threading.Thread(target=self._end_unless_begun, name="hfsdk-begin", daemon=True).start()

    def _end_unless_begun(self) -> None:
        """End where the process that started this one was killed before it said what to build, or where that failed."""
        if not self._begin_asked.wait(START_S):
            print("whoever started this process has not said what it keeps: it ends", flush=True)
            os._exit(1)
        self._begun.wait()
        if self._keeper is None:
            time.sleep(GIVE_UP_S)
            os._exit(1)

    def begin(self, make: Callable[..., Any], options: Any) -> Reply:
        """Build what answers."""

        def begun() -> None:
            try:
                self._keeper = make(options)
            finally:
                self._begun.set()

        self._begin_asked.set()
        return Reply.of(begun)

    def ask(self, request: Any) -> Reply:
        """Answer one request, as soon as there is what answers."""
        self._begun.wait()
        if self._keeper is None:
            return Reply(errors=(SessionClosedError("the session could not be started"),))
        reply: Reply = self._keeper.answer(request)
        return reply

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


@dataclass(eq=False)
class RayKeeper:
    """A keeper, as another process of the cluster asks it."""

    actor: Any
    name: str
    """The keeper's name in Ray: the session's, and something that tells it from those before it."""
    user: str
    """The name under which this process uses Ray, for :meth:`leave`."""
    client: Any = None
    """The client of this side's session; what comes from a keeper finds it by itself."""
    near: ClassVar[bool] = True
    """Whether this process can use the cluster's store."""

    def ask(self, request: Any, timeout_s: float | None = None) -> Reply:
        """Ask, and wait for the answer.

        Raises:
            SessionClosedError: the keeper has ended.
            TimeoutError: it did not answer in time.
        """
        return self.start(request)(timeout_s)

    def start(self, request: Any) -> Callable[[float | None], Reply]:
        """Ask; return what waits for the answer, at most so many seconds.

        Raises:
            SessionClosedError: the keeper has ended, or this process has done with Ray.
        """
        if not ray.is_initialized():  # at the interpreter's exit: Ray would start another one
            raise SessionClosedError("this process has done with Ray")
        pending = self.actor.ask.remote(request)

        def answer(timeout_s: float | None) -> Reply:
            try:
                reply: Reply = ray.get(pending, timeout=timeout_s)
            except WORKER_GONE as error:
                raise SessionClosedError(reason_of(error)) from None
            except ray.exceptions.GetTimeoutError:
                raise TimeoutError(f"no answer within {timeout_s} s") from None
            return reply

        return answer

    def tell(self, request: Any) -> None:
        """Ask, and wait for nothing."""
        self.start(request)

    def lives(self) -> bool:
        """Whether its process is there, as far as can be told in a moment."""
        try:
            ray.get(self.actor.pid.remote(), timeout=ANSWER_S)
        except WORKER_GONE:
            return False
        except ray.exceptions.GetTimeoutError:
            return True
        return True

    def put(self, table: Table) -> list[Any]:
        """Put a table into this node's store."""
        return [ray.put(dict(table))]

    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Bring columns to this process."""
        return ray_store.fetch(picks)

    def leave(self) -> None:
        """Have done with Ray in this process, unless another session uses it."""
        ray_start.leave(self.user)

    def forgo(self) -> None:
        """Have done with a keeper that has ended: the Ray that this process uses next need not be its cluster's."""
        ray_start.forgo(self.user)


def start(
    name: str, address: str | None, make: Callable[..., Any], options: Any, refuse: Callable[[list[RayKeeper]], None]
) -> tuple[RayKeeper, list[str]]:
    """Start a keeper on this process's node; return it, and what the user has to know about who can reach it.

    Args:
        name: the session's.
        address: the address of a cluster, ``"auto"``, or ``None`` for this machine alone.
        make: makes what answers, in the keeper's process, of ``options``.
        options: picklable.
        refuse: a function of the keepers there are, which raises where there may not be this one too.

    Raises:
        PlacementError: there is no such cluster, this process uses another one, or the keeper cannot start.
    """
    with ray_head.staying() if address is None else nullcontext():
        user, notices = _enter(address, begin=True)
        try:
            refuse(_keepers(user))
        except BaseException:
            ray_start.leave(user)
            raise
        return _start(name, user, make, options), notices


def _start(name: str, user: str, make: Callable[..., Any], options: Any) -> RayKeeper:
    own_name = f"{name}:{secrets.token_hex(6)}"
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made: Any = ray.remote(KeeperProcess)
    with held():
        actor = made.options(
            name=own_name, namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_concurrency=ASKED_AT_ONCE,
            scheduling_strategy=here,
        ).remote(ray_head.log_file(own_name), os.getcwd(), sys.path)  # fmt: skip
    try:
        ray.get(actor.begin.remote(make, options), timeout=START_S).unpack()
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        _give_up(actor, user)
        raise PlacementError(f"the process that keeps session {name!r} did not start: {error}") from error
    except BaseException:
        _give_up(actor, user)
        raise
    return RayKeeper(actor, own_name, user)


def _give_up(actor: Any, user: str) -> None:
    ray.kill(actor)
    ray_start.leave(user)


def keepers_of(address: str | None) -> list[RayKeeper]:
    """Return the keepers of a cluster, or of this machine where ``address`` is ``None``; none where there is no cluster.

    Whoever has done with them calls :meth:`RayKeeper.leave`, once.
    """
    with ray_head.looking() if address is None else nullcontext():
        if address is None and ray_head.running() is None:
            return []
        user, _ = _enter(address, begin=False)
        keepers = _keepers(user)
        if not keepers:
            ray_start.leave(user)
        return keepers


def _keepers(user: str) -> list[RayKeeper]:
    keepers = []
    for name in ray_head.keeper_names():
        with suppress(ValueError):  # it has ended meanwhile
            keepers.append(RayKeeper(ray.get_actor(name, namespace=NAMESPACE), name, user))
    return keepers


def _enter(address: str | None, *, begin: bool) -> tuple[str, list[str]]:
    """Have this process use the cluster at an address, or this machine's."""
    user = f"keeper-{secrets.token_hex(4)}"
    if address is not None:
        return user, ray_start.enter(user, None, address)
    head = ray_head.running() or (ray_head.start() if begin else None)
    if head is None:
        raise PlacementError("no session is kept on this machine")
    return user, ray_start.enter(user, None, head.address, near=True)
