"""``Pending``, the result of a call before it is done, and its kinds ``Value`` and ``Metrics``; they ask a ``Client``.

A pending thing can be waited for (``wait``, ``await``), polled (``done``, ``state``) and cancelled. Looking at its content waits.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

import numpy as np

from hfsdk.core.checks import Name, Within, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.table import Array, Table

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.core.functions import Shipped

Timeout = Annotated[float, Within(0, 10**9)]
"""Seconds for which a caller waits."""

POLL_S = 0.02
"""How often an awaiting coroutine asks."""


class Lease:
    """A lease on a call's columns in the cluster: the last reference to go releases them."""

    def __init__(self, call_id: int, release: Callable[[int], None]) -> None:
        self.call_id = call_id
        weakref.finalize(self, release, call_id).atexit = False


@dataclass(frozen=True, eq=False)
class ColumnRef:
    """A column by reference: which call wrote it, under which name, and which of its rows."""

    call_id: int
    name: str
    rows: Array | None = None
    """Row numbers in the producer's numbering; ``None`` is all of them in order."""
    lease: Lease | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the lease, which belongs to the user's process."""
        return {"call_id": self.call_id, "name": self.name, "rows": self.rows, "lease": None}

    def take(self, rows: Array) -> ColumnRef:
        """Return the same column with other rows."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


@dataclass(frozen=True)
class ColumnInfo:
    """Facts of a written column that need no look at its values."""

    kind: str
    dtype: str
    num_bytes: int
    lengths: Array | None = None
    """The length of every row of the producer, for ragged columns."""
    unscored: Array | None = None
    """Numbers of the producer's rows that were not scored (:mod:`hfsdk.core.unscored`); ``None`` where all were."""


def scored_rows_of(columns: Iterable[tuple[ColumnRef, ColumnInfo | None]], num_rows: int) -> list[int] | None:
    """Return the rows of a batch that are scored in all of its columns; ``None`` where all are."""
    scored = np.ones(num_rows, dtype=bool)
    for ref, info in columns:
        if info is not None and info.unscored is not None:
            scored &= ~np.isin(np.arange(num_rows) if ref.rows is None else ref.rows, info.unscored)
    return None if scored.all() else np.flatnonzero(scored).tolist()


class Client(Protocol):
    """The session's side of the controller, which answers for pending things."""

    def state(self, call_id: int) -> str:
        """Return pending, running, done, failed, cancelled or lost."""
        ...

    def wait(self, call_ids: Sequence[int], timeout: float | None) -> None:
        """Wait until all are done; raise their failure, or TimeoutError."""
        ...

    def cancel(self, call_ids: Sequence[int]) -> None:
        """Ask to stop them and the calls that depend on them."""
        ...

    def result(self, call_id: int) -> Any:
        """Return a done call's small result."""
        ...

    def info(self, ref: ColumnRef) -> ColumnInfo | None:
        """Return a column's kind and shape, or ``None`` while it is pending."""
        ...

    def gone(self, ref: ColumnRef) -> bool:
        """Whether a column's values went with a closed session."""
        ...

    def writer(self, call_id: int) -> str:
        """Return the call's name, e.g. ``actor.generate``."""
        ...

    def fetch(self, columns: Mapping[str, ColumnRef]) -> Table:
        """Wait for columns and bring their values here."""
        ...

    def put(self, table: Table) -> Lease:
        """Store local columns in the cluster."""
        ...

    def task(self, method: str, function: Shipped, inputs: Mapping[str, ColumnRef], writes: Sequence[str], num_rows: int) -> Lease:
        """Run a function over columns in a CPU task."""
        ...

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Turn rows of token ids into one text each."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Turn token ids into one text per token."""
        ...

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; a token may be part of a character."""
        ...


class Awaited(ABC):
    """A thing that ``await`` polls and then waits for, in an event loop as in a notebook's."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it is over."""

    @abstractmethod
    def wait(self, timeout: Timeout | None = None) -> Self:
        """Wait until it is over and return self; raise its error if it failed."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self._poll().__await__()

    async def _poll(self) -> Self:
        while not self.done:
            await asyncio.sleep(POLL_S)
        return self.wait()


class Pending(Awaited):
    """A result that one or more calls will fill."""

    def __init__(self, client: Client, leases: Sequence[Lease]) -> None:
        self._client = client
        self._leases = tuple(leases)

    @property
    def call_ids(self) -> tuple[int, ...]:
        """The calls this waits for."""
        return tuple(dict.fromkeys(lease.call_id for lease in self._leases))

    @property
    def state(self) -> str:
        """``"failed"``, ``"cancelled"``, ``"lost"``, ``"running"``, ``"pending"`` or ``"done"``, the worst of its calls first."""
        states = {self._client.state(call_id) for call_id in self.call_ids}
        order = ("failed", "cancelled", "lost", "running", "pending")
        return next((s for s in order if s in states), "done")

    @property
    def done(self) -> bool:
        """Whether nothing is pending or running any more."""
        return self.state not in ("pending", "running")

    @checked
    def wait(self, timeout: Timeout | None = None) -> Self:
        """Wait until done and return self.

        Raises:
            TimeoutError: not done after ``timeout`` seconds; the calls go on.
            CallError: what failed, naming role, call and line.
        """
        self._client.wait(self.call_ids, timeout)
        return self

    def cancel(self) -> None:
        """Stop at the next safe point; calls that depend on it are cancelled too."""
        self._client.cancel([c for c in self.call_ids if self._client.state(c) in ("pending", "running")])


class Value(Pending):
    """One small value to come: ``.value`` waits for it."""

    def __init__(self, client: Client, lease: Lease) -> None:
        super().__init__(client, [lease])

    @property
    def value(self) -> Any:
        """The value; waits."""
        self.wait()
        return self._client.result(self.call_ids[0])

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        name = self._client.writer(self.call_ids[0])
        if self.state == "done":
            return repr(self._client.result(self.call_ids[0]))
        return f"<{self.state}: {name}>"


class Metrics(Pending):
    """The numbers of an update, one row per mini-batch. ``metrics["loss"]`` is a list, ``metrics.mean("loss")`` one number."""

    def __init__(self, client: Client, lease: Lease, dtype: str = "fp32") -> None:
        super().__init__(client, [lease])
        self.dtype = dtype
        """The dtype in which the model computed: how far its numbers may be rounded."""

    @property
    def rows(self) -> list[dict[str, float]]:
        """One dict per mini-batch; waits."""
        self.wait()
        rows: list[dict[str, float]] = self._client.result(self.call_ids[0])
        return rows

    @checked
    def __getitem__(self, name: Name) -> list[float]:
        try:
            return [row[name] for row in self.rows]
        except KeyError:
            raise KeyError(f"no metric {shown(name)}; there are {', '.join(self.rows[0])}") from None

    @checked
    def mean(self, name: Name) -> float:
        """Return the mean of one metric over the mini-batches.

        Raises:
            OptionError: there is no such metric.
        """
        if any(name not in row for row in self.rows):
            raise OptionError(f"name must be one of the metrics {', '.join(self.rows[0])}; got name={shown(name)}")
        values = self[name]
        return sum(values) / len(values) if values else float("nan")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.rows)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per mini-batch."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def view(self) -> dict[str, Any]:
        """Return plain data for display, without waiting."""
        name = self._client.writer(self.call_ids[0])
        return {"call": name, "state": self.state, "rows": self.rows if self.state == "done" else []}

    def __repr__(self) -> str:
        if self.state != "done":
            return f"<Metrics {self.state}: {self._client.writer(self.call_ids[0])}>"
        last = self.rows[-1] if self.rows else {}
        return f"Metrics({len(self.rows)} mini-batches; last: " + ", ".join(f"{k}={v:.4g}" for k, v in last.items()) + ")"
