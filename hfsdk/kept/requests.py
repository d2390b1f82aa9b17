"""Requests of a kernel to the keeper of its session, and the replies; all of it pickles."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfsdk.core.cluster import ClusterSpec
from hfsdk.engine.calls import messages as m
from hfsdk.engine.process.process_alive import is_there
from hfsdk.kept.shared_state import SectionChange

_STARTED = time.time()

HELD = (m.Submit, m.Put, m.PutByReference)
"""Messages whose sender holds the columns of the call that they make."""


@dataclass(frozen=True)
class Kernel:
    """The process of a user's notebook or script."""

    pid: int
    host: str
    started: float
    """The time when the process started, as its system counts it."""

    @classmethod
    def here(cls) -> Kernel:
        """Return this process."""
        import psutil

        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time())

    @classmethod
    def elsewhere(cls) -> Kernel:
        """Return this process, as one outside the cluster: it is heard of, and not seen."""
        return cls(os.getpid(), f"{socket.gethostname()}, elsewhere", _STARTED)

    def lives(self) -> bool | None:
        """Whether the process is there; ``None`` where that cannot be seen from here."""
        import psutil

        if self.host != socket.gethostname():
            return None
        try:
            return is_there(self.pid, self.started)
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class KeepOptions:
    """How a session is kept."""

    name: str
    version: str
    """The version of hfsdk."""
    seed: int
    devices: int | None
    own_machine: bool
    unattended_s: float
    price_per_device_hour: float = 0.0
    runtime: Mapping[str, Any] = field(default_factory=dict)
    """Options of the runtime."""


@dataclass(frozen=True)
class Hello:
    """A kernel wants to attach. Reply: a :class:`Welcome`, or a :class:`Refused`."""

    kernel: Kernel
    version: str
    read_only: bool = False
    take_over: bool = False


@dataclass(frozen=True, eq=False)
class Welcome:
    """The reply to a kernel that is attached."""

    turn: int
    """Number of its turn: what an earlier one sends is refused. 0 of one that only looks."""
    name: str
    cluster: ClusterSpec
    notes: tuple[SectionChange, ...]
    """All that the session is."""
    heard: int
    """Number of the last event before that."""


@dataclass(frozen=True)
class SessionTaken:
    """Another kernel has the session."""

    kernel: Kernel
    heard_s: float
    """Seconds since it was heard of last."""
    seen: bool
    """Whether it was seen to live, and not only heard of."""


@dataclass(frozen=True, eq=False)
class News:
    """The changes in the kernel: taken over in the order of their numbers, however they arrive."""

    serial: int = 0
    """The number of these changes, from 1 on; 0 where there are none."""
    notes: tuple[SectionChange, ...] = ()


NO_NEWS = News()


@dataclass(frozen=True, eq=False)
class Ask:
    """A message to the controller, or none, with what has changed in the kernel. Reply: the controller's."""

    turn: int
    message: Any = None
    news: News = NO_NEWS
    released: tuple[int, ...] = ()
    """Calls to whose columns the kernel does not refer any more."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a call that is done."""

    writer: str
    result: Any


@dataclass(frozen=True)
class Listen:
    """Ask for the events after one; waits for some. Reply: a :class:`Heard`."""

    turn: int
    since: int
    timeout_s: float


@dataclass(frozen=True, eq=False)
class Heard:
    """Events, in their order."""

    events: tuple[Mapping[str, Any], ...]
    last: int
    """Number of the last of them."""
    missed: bool = False
    """Whether some before them are not kept any more."""


@dataclass(frozen=True, eq=False)
class Train:
    """Start a run of ``session.train`` beside the controller. Reply: its number."""

    turn: int
    packed: bytes
    """The arguments, see ``session_pickle.py``."""
    line: str
    news: News = NO_NEWS


@dataclass(frozen=True, eq=False)
class DeclareRemotely:
    """Declare a role near the models' folders. Reply: its name."""

    turn: int
    kind: str
    packed: bytes
    """The arguments, see ``session_pickle.py``."""
    news: News = NO_NEWS


@dataclass(frozen=True, eq=False)
class SaveOrLoad:
    """``save`` or ``load`` the session near its workers. Reply: the folder."""

    turn: int
    what: str
    folder: str
    keep: int
    news: News = NO_NEWS


@dataclass(frozen=True)
class Tokenise:
    """Ask what a text is in tokens, or the other way round; see ``near_cluster.py``."""

    turn: int
    folder: str
    what: str
    value: Any


@dataclass(frozen=True)
class Steer:
    """Pause, resume, step or stop the run."""

    turn: int
    what: str


@dataclass(frozen=True)
class LastStep:
    """Ask for the run's last step. Reply: packed, see ``session_pickle.py``; or as plain data, see ``codec.py``."""

    turn: int
    plain: bool = False


@dataclass(frozen=True)
class Everything:
    """Ask for all that the session is, where events were missed. Reply: a :class:`Welcome`."""

    turn: int


@dataclass(frozen=True)
class Leave:
    """The kernel has done; the session goes on without it."""

    turn: int
    news: News = NO_NEWS


@dataclass(frozen=True)
class End:
    """End the session, from wherever."""


@dataclass(frozen=True)
class About:
    """Ask what the session is and holds, without attaching. Reply: an :class:`Account`."""


@dataclass(frozen=True)
class Account:
    """The public facts of a kept session: what it is and holds."""

    name: str
    version: str
    devices: str
    """The session's cluster."""
    host: str
    """The host of its keeper."""
    pid: int
    started: float
    """The time of its start, as ``time.time()``."""
    roles: tuple[str, ...]
    run: str
    """The last run, in words; ``""`` without one."""
    attached: str
    """The kernel that has it; ``""`` without one."""
    unattended_s: float | None
    """Seconds since a kernel had it or a run went on; ``None`` while that is so."""
    most_unattended_s: float
    """The seconds without a kernel or a run after which it ends."""
    column_bytes: int
    """The bytes of columns that somebody still refers to."""
    closed: bool = False

    @property
    def words(self) -> str:
        """The session's state, in a line."""
        parts = [self.devices, f"since {self.since}", f"roles {', '.join(self.roles) or 'none'}", self.run]
        parts += [f"{self.column_bytes / 1e6:.1f} MB of columns", f"attached by {self.attached}" if self.attached else self.left]
        return "; ".join(filter(None, parts))

    @property
    def since(self) -> str:
        """The time of its beginning, for people."""
        return time.strftime("%d %b %H:%M", time.localtime(self.started))

    @property
    def left(self) -> str:
        """How long nobody has looked after it, of how long that may be; ``""`` while somebody does."""
        if self.unattended_s is None:
            return ""
        return f"{span(self.unattended_s)} unattended of {span(self.most_unattended_s)}"


def span(seconds: float) -> str:
    """Return some seconds as people say them."""
    for size, unit in ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


Request = (
    Hello | Ask | Listen | Train | DeclareRemotely | SaveOrLoad | Tokenise | Steer | LastStep | Everything | Leave | End | About
)
