"""Starting a session that is kept, coming back to it, and the list of those there are: ``hf.Session.attach``, ``hf.sessions()``."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Name, checked, shown
from hfsdk.core.errors import HfsdkError, ModelNotFoundError, OptionError, SessionInUseError
from hfsdk.core.pending import ColumnRef
from hfsdk.core.user_line import warn_user
from hfsdk.kept import requests as k
from hfsdk.kept.near_cluster import RemoteTokenizer
from hfsdk.kept.remote_controller import RemoteController, left
from hfsdk.kept.remote_session import RemoteSession, is_remote
from hfsdk.kept.runs import RemoteRuns
from hfsdk.kept.session_actor import make_keeper
from hfsdk.kept.shared_state import OF_KERNELS, SECTIONS, KnownBatch, SharedState, history_rows, run_rows, run_sections
from hfsdk.session.parts import Parts
from hfsdk.session.session_pickle import pack
from hfsdk.session.start import Started

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.engine.ray.kept import RayKeeper

NAME = re.compile(r"\w[\w.+-]{0,99}")

DAY_S = 86_400.0

TOKEN = "HFSDK_TOKEN"
"""The environment variable with the token of a server of sessions elsewhere."""

ABOUT_S = 5.0
"""How long a keeper may take to say what it is."""

STARTS_S = 60.0
"""How long one of the name that is wanted may: it may just be starting."""


@dataclass(frozen=True, eq=False)
class KeptStart(Started):
    """A session's controller that lives in a keeper, and the way to it."""

    link: RemoteController | None = None
    welcome: k.Welcome | None = None


def _ray_keeper() -> Any:
    try:
        return importlib.import_module("hfsdk.engine.ray.kept")
    except ModuleNotFoundError as error:
        raise ModelNotFoundError(
            f"kept sessions need the package {error.name!r}, which is not installed here: pip install 'hfsdk[cpu]' or 'hfsdk[cuda]'"
        ) from error


def package_version() -> str:
    """Return which hfsdk this is: both sides of a kept session must be the same."""
    try:
        return version("hfsdk")
    except PackageNotFoundError:
        return "0"


def start_keeper(
    devices: int | str | None, name: str | None, seed: int, price: float, unattended_s: float, options: Mapping[str, Any]
) -> KeptStart:
    """Start a kept session, and have it.

    Raises:
        OptionError: it has no name, or there is one of this name.
        PlacementError: there is no such cluster, or it has fewer devices.
    """
    if name is None or not NAME.fullmatch(name):
        raise OptionError(
            "a kept session needs a name of letters, digits, '_', '.', '+' and '-', by which it is found again: "
            f'hf.Session(..., name="exp7", keep=True); got name={shown(name)}'
        )
    address = devices if isinstance(devices, str) else None

    def refuse(keepers: Sequence[RayKeeper]) -> None:
        for _, account in _accounts(keepers, name):
            raise OptionError(
                f"there is a session {name!r} already ({account.words}); hf.Session.attach({name!r}) goes on with it, "
                f"hf.sessions()[{name!r}].close() ends it"
            )

    wanted = k.KeepOptions(
        name=name, version=package_version(), seed=seed, devices=None if isinstance(devices, str) else devices,
        own_machine=address is None, unattended_s=unattended_s, price_per_device_hour=price, runtime=dict(options),
    )  # fmt: skip
    keeper, notices = _ray_keeper().start(name, address, make_keeper, wanted, refuse)
    return _attached(keeper, read_only=False, take_over=False, notices=notices)


def attach_link(name: str, address: str | None, token: str | None, *, read_only: bool, take_over: bool) -> KeptStart:
    """Come back to a kept session.

    Raises:
        OptionError: there is none of this name, or it is another version's.
        SessionInUseError: another kernel has it.
        SessionClosedError: the process at a session's address does not know the token, or is another version's.
    """
    if is_remote(name):
        return _attached(_remote(name, token), read_only=read_only, take_over=take_over)
    keepers = _ray_keeper().keepers_of(address)
    account_here = next(_accounts(keepers, name), None)
    if account_here is None:
        there = ", ".join(account.name for _, account in _accounts(keepers, "")) or "none"
        if keepers:
            done_with(keepers[0])
        where = "on this machine" if address is None else f"on the cluster at {address}"
        raise OptionError(f"there is no session {name!r} {where} (there: {there}); hf.sessions() lists them")
    keeper, account = account_here
    if account.version != package_version():
        done_with(keeper)
        raise OptionError(
            f"the session {name!r} is kept by hfsdk {account.version}, and this is {package_version()}; nothing was sent. Attach "
            "with the same version."
        )
    return _attached(keeper, read_only=read_only, take_over=take_over)


def _remote(name: str, token: str | None) -> RemoteSession:
    shown = token or os.environ.get(TOKEN, "")
    if not shown:
        raise OptionError(f"a session elsewhere asks for its server's token: attach(..., token=...), or {TOKEN} in the environment")
    try:
        return RemoteSession(name, shown, package_version())
    except OSError as error:
        raise OptionError(
            f"nothing answers at {name} as it should: {error}. Does `python -m hfsdk.serve` run on the cluster's head node, and is "
            "the tunnel open?"
        ) from error


def keeper_of(name: str, address: str | None) -> RayKeeper | None:
    """Return the keeper of an open session of this name; ``None`` without one. The caller calls :func:`done_with`, once."""
    keepers = _ray_keeper().keepers_of(address)
    for keeper, _ in _accounts(keepers, name, ABOUT_S):
        return keeper
    for keeper in keepers[:1]:
        done_with(keeper)
    return None


def _attached(keeper: RayKeeper | RemoteSession, *, read_only: bool, take_over: bool, notices: Sequence[str] = ()) -> KeptStart:
    here = k.Kernel.here() if keeper.near else k.Kernel.elsewhere()
    try:
        answer = keeper.ask(k.Hello(here, package_version(), read_only, take_over)).unpack()
    except HfsdkError:
        done_with(keeper)
        raise
    if isinstance(answer, k.SessionTaken):
        done_with(keeper)
        name = keeper.name.partition(":")[0]
        raise SessionInUseError(
            f"{answer.kernel} has the session {name!r} (it {'lives' if answer.seen else 'was heard of'}"
            f"{'' if answer.seen else f' {answer.heard_s:.1f} s ago'}). hf.Session.attach({name!r}, take_over=True) takes it from "
            f"there, and hf.Session.attach({name!r}, read_only=True) only looks."
        )
    link = RemoteController(keeper, answer)
    return KeptStart(link, answer.cluster, "ray", notices, link, answer)


def connect(parts: Parts, start: KeptStart) -> RemoteRuns:
    """Let a session's parts know the kept session's state, and follow its changes."""
    assert start.link is not None
    assert start.welcome is not None
    link, client = start.link, parts.client
    runs = RemoteRuns(parts, link)
    sections = (*SECTIONS, OF_KERNELS) if link.turn else ()
    rows = (history_rows(parts), run_rows(lambda: runs.control))
    shared = SharedState(parts, sections, (*SECTIONS, *run_sections(runs.take, runs.take_steps)), rows, frozenset({rows[0].name}))
    parts.runs.elsewhere, client.kept_as = runs, link.name
    link.belongs_to(client)
    if not link.near:
        parts.context.far = FromAfar(parts, link)
    entries: Mapping[str, Any] = next((note.entries for note in start.welcome.notes if note.section == OF_KERNELS.name), {})
    parts.batches.take({name: _batch(parts, batch, leased=bool(link.turn)) for name, batch in entries.items()})
    link.subscribe(runs.on_event)

    def closed(why: str) -> None:
        client.closed_because, client.closed = why, True

    link.begin(shared, lambda: runs.saved, closed, runs.lose)
    return runs


class FromAfar:
    """The work that a kernel outside the cluster has done near it: :class:`hfsdk.session.context.Far`."""

    def __init__(self, parts: Parts, link: RemoteController) -> None:
        self._parts, self._link = parts, link

    def declare(self, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Declare a role where the models' folders are; return its handle here."""
        packed = pack(self._parts, (args, dict(kwargs)))
        said = len(self._parts.context.messages)
        name = self._link.ask_and_hear(lambda: k.DeclareRemotely(self._link.turn, kind, packed, self._link.news()))
        for text in self._parts.context.messages[said:]:
            warn_user(text)
        return self._parts.deployment.book.find(name)

    def saves(self, what: str, folder: str, keep: int) -> Any:
        """Save or load the session where its workers are."""
        return self._link.ask_and_hear(lambda: k.SaveOrLoad(self._link.turn, what, folder, keep, self._link.news()))

    def tokenizer(self, folder: str) -> RemoteTokenizer:
        """Return the tokenizer of a folder there."""
        return RemoteTokenizer(folder, lambda *request: self._link.ask(lambda: k.Tokenise(self._link.turn, *request)).unpack())


def leave(parts: Parts, link: RemoteController) -> None:
    """Have done with a kept session in this process; it goes on."""
    client = parts.client
    if not client.closed:
        parts.pending_save.settle()
        client.closed_because = left(link.name)
        client.closed = True
        if isinstance(parts.runs.elsewhere, RemoteRuns):
            parts.runs.elsewhere.lose(client.closed_because)
    link.leave()


def _batch(parts: Parts, saved: KnownBatch, *, leased: bool) -> Batch:
    client = parts.client
    columns = {
        name: ColumnRef(call_id, there, rows, client.lease(call_id) if leased else None)
        for name, call_id, there, rows in saved.columns
    }
    return Batch(client, columns, saved.num_rows)


# -- the list


@dataclass(frozen=True)
class KeptSession(k.Account):
    """A session that is kept: what it is, holds, and who has it. Made by ``hf.sessions()``."""

    address: str = ""
    """The address of its cluster; ``""``: this machine."""

    @checked
    def close(self) -> None:
        """End the session, with its workers, even where another kernel has it."""
        keepers = _ray_keeper().keepers_of(self.address or None)
        try:
            for keeper, _ in _accounts(keepers, self.name):
                keeper.ask(k.End()).unpack()
                return
        finally:
            for keeper in keepers[:1]:
                done_with(keeper)

    def __repr__(self) -> str:
        return f"KeptSession({self.name!r}: {self.words})"


class Sessions(Sequence[KeptSession]):
    """The kept sessions of a cluster: by number, or by name."""

    def __init__(self, sessions: Sequence[KeptSession]) -> None:
        self._sessions = tuple(sessions)

    def __getitem__(self, key: Any) -> Any:
        """``hf.sessions()["exp7"]``: the session of this name.

        Raises:
            OptionError: there is none.
        """
        if not isinstance(key, str):
            return self._sessions[key]
        for session in self._sessions:
            if session.name == key:
                return session
        raise OptionError(f"there is no session {shown(key)}; there are {', '.join(s.name for s in self._sessions) or 'none'}")

    def __len__(self) -> int:
        return len(self._sessions)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per session."""
        import pandas as pd

        names = [field.name for field in fields(KeptSession)]
        return pd.DataFrame([{name: getattr(session, name) for name in names} for session in self._sessions], columns=names)

    def _repr_html_(self) -> str:
        from hfsdk.viz.tables import sessions_html

        shown = ("name", "devices", "since", "roles", "run", "attached", "left", "column_bytes")
        return sessions_html([{name: getattr(session, name) for name in shown} for session in self._sessions])

    def __repr__(self) -> str:
        return "\n".join(f"{session.name}: {session.words}" for session in self._sessions) or "no kept sessions"


@checked
def sessions(address: Name | None = None) -> Sessions:
    """Return the kept sessions of this user: what each holds, since when it runs, and who has it.

    Args:
        address: the address of a Ray cluster, ``"auto"`` or ``"host:port"``; by default the sessions of this machine alone.

    Raises:
        PlacementError: there is no such cluster.
        ModelNotFoundError: Ray is not installed here.
    """
    keepers = _ray_keeper().keepers_of(address)
    accounts = list(_accounts(keepers, ""))
    for keeper in keepers[:1]:
        done_with(keeper)
    names = [field.name for field in fields(k.Account)]
    return Sessions([
        KeptSession(**{name: getattr(account, name) for name in names}, address=address or "") for _, account in accounts
    ])  # fmt: skip


def _accounts(keepers: Sequence[RayKeeper], name: str, most_s: float = STARTS_S) -> Iterator[tuple[RayKeeper, k.Account]]:
    """Yield the keepers of open sessions, of one name or all, each with its account.

    Raises:
        OptionError: one of that name does not answer.
    """
    for keeper in keepers:
        if name and keeper.name.partition(":")[0] != name:
            continue
        try:
            # a named session is waited for while it starts; a list must not hang of one that does
            account: k.Account = keeper.ask(k.About(), most_s if name else ABOUT_S).unpack()
        except HfsdkError:
            continue
        except TimeoutError as error:
            if not name:
                continue
            done_with(keeper)
            raise OptionError(
                f"the session {name!r} is being started, or its process hangs: {error}. Try again, or end it (its log is in "
                "~/.local/state/hfsdk/logs, and its processes are named ray::KeeperProcess)."
            ) from None
        if not account.closed:
            yield keeper, account


def done_with(keeper: RayKeeper | RemoteSession) -> None:
    """Have done with a keeper in this process."""
    keeper.leave()
