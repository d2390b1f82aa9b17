"""``HeldBatches``: the batches of a session that the user can come back to, by name or number."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hfsdk.core.batch import Batch, refs_of
from hfsdk.core.checks import Name, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.session.client import ControllerClient


class HeldBatches(Mapping[str, Batch]):
    """The batches that variables of the notebook, or script, refer to; in an attached session those of the kernel before, too.

    ``session.batches["rollout"]`` is the batch that the variable ``rollout`` refers to, ``session.batches[17]`` the one to which
    call 17 added a column last. A batch of an earlier kernel stays here, and its columns in the cluster, until a variable of its
    name refers to another one, or ``session.batches.drop("rollout")``.
    """

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._earlier: dict[str, Batch] = {}

    def take(self, batches: Mapping[str, Batch]) -> None:
        """Hold what the variables of an earlier kernel referred to."""
        self._earlier.update(batches)

    @checked
    def drop(self, name: Name) -> None:
        """Let a batch of an earlier kernel go, where there is one of this name."""
        self._earlier.pop(name, None)

    def _all(self) -> dict[str, Batch]:
        ask = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be about to import it
        shell = ask() if ask is not None else None
        names: Mapping[str, Any] = shell.user_ns if shell is not None else vars(sys.modules["__main__"])
        now = {
            name: value for name, value in list(names.items())
            if type(value) is Batch and not name.startswith("_") and refs_of(value).client is self._client and value.columns
        }  # fmt: skip
        for name in now:
            self._earlier.pop(name, None)
        return {**self._earlier, **now}

    def __getitem__(self, key: str | int) -> Batch:
        """Return a batch by its variable's name, or by the number of the call that wrote last.

        Raises:
            OptionError: there is none.
        """
        known = self._all()
        if isinstance(key, str) and key in known:
            return known[key]
        for batch in known.values():
            if type(key) is int and number_of(batch) == key:
                return batch
        there = ", ".join(f"{name!r} ({number_of(batch)})" for name, batch in known.items()) or "none"
        raise OptionError(f"there is no batch {shown(key)}; the session has {there}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._all()

    def __repr__(self) -> str:
        lines = [f"{name} ({number_of(b)}): {len(b)} rows of {', '.join(b.columns)}" for name, b in self._all().items()]
        return "\n".join(lines) or "no batches"


def number_of(batch: Batch) -> int:
    """Return the number of the call that wrote a batch's newest column."""
    return max(ref.call_id for ref in refs_of(batch).by_name.values())
