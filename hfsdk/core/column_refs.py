"""``ColumnRefs``: which call wrote each column of a batch, and what is known of it without looking at values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from hfsdk.core.checks import shown
from hfsdk.core.columns import COLUMNS, hint_for
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.pending import Client, ColumnRef
from hfsdk.core.table import Array


class ColumnState(TypedDict):
    """What is known of a column without looking at its values; only name, state and writer before it is written."""

    name: str
    kind: str
    """As :class:`~hfsdk.core.pending.ColumnInfo` has it, or ``""``."""
    dtype: str
    state: str
    """``"ready"``; ``"lost"``: its values went with a closed session; or the state of the call that writes it."""
    bytes: int | None
    mean_length: float | None
    """Of ragged columns."""
    writer: str
    """Role and method."""


OTHERS = {
    "prompt": "prompts query queries question",
    "response": "responses completion completions output outputs response_ids completion_ids",
    "scores": "score reward rewards token_level_scores",
    "costs": "cost",
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
    "old_log_probs": "log_probs logprobs old_logprobs",
    "ref_log_probs": "ref_logprobs ref_log_prob",
    "rollout_log_probs": "log_probs logprobs sampling_logprobs",
}  # fmt: skip
"""hfsdk's column -> what it is called elsewhere, or in the singular."""


class ColumnRefs:
    """The columns of a batch by reference. Nothing here waits.

    Attributes:
        client: whom they are asked of.
        by_name: a reference for every column.
    """

    def __init__(self, client: Client, by_name: Mapping[str, ColumnRef]) -> None:
        self.client = client
        self.by_name = dict(by_name)

    def __getitem__(self, name: str) -> ColumnRef:
        """Return a column's reference.

        Raises:
            ColumnError: there is no such column.
        """
        if name not in self.by_name:
            ours = self.meant(name)
            said = "" if not ours else hint_for(ours) if ours not in self.by_name else f"hfsdk calls it {ours}."
            raise ColumnError(f"the batch has no column {shown(name)}; it has {', '.join(self.by_name)}. {said}".rstrip(". ") + ".")
        return self.by_name[name]

    def meant(self, name: str) -> str:
        """Return hfsdk's column of a name that people give it, of those that are there if it may be several; ``""`` for none."""
        found = [here for here, names in OTHERS.items() if name in names.split()] + [name] * (name in COLUMNS)
        return next((here for here in found if here in self.by_name), found[0] if found else "")

    def need(self, names: Sequence[str], what: str) -> dict[str, ColumnRef]:
        """Return the references of columns that ``what`` reads.

        Raises:
            ColumnError: one is missing; the message says which calls write it.
            OptionError: ``names`` is one text.
        """
        if isinstance(names, str):
            raise OptionError(f"{what} reads a list of columns, e.g. ['prompt']; got the text {shown(names)}")
        missing = [n for n in names if n not in self.by_name]
        if missing:
            hints = [f"{shown(n)} ({COLUMNS[n].meaning})" if n in COLUMNS else shown(n) for n in missing[:10]]
            raise ColumnError(
                f"{what} reads {', '.join(hints)}, which the batch does not have; it has {', '.join(self.by_name)}. "
                + " ".join(dict.fromkeys(map(hint_for, ["response"] if "response" in missing else missing[:4])))
            )
        return {name: self.by_name[name] for name in names}

    def lengths(self, name: str) -> Array | None:
        """Return the lengths of a variable-length column, or ``None`` while they are not known."""
        ref = self.by_name.get(name)
        info = None if ref is None else self.client.info(ref)
        if ref is None or info is None or info.lengths is None:
            return None
        return info.lengths if ref.rows is None else info.lengths[ref.rows]

    def check_aligned(self, names: Sequence[str], what: str) -> None:
        """Refuse columns per token that are not as long as the responses, where both lengths are known.

        Raises:
            ColumnError: names the column, the first sample that differs, and both lengths.
        """
        response = self.lengths("response")
        for name in names:
            lengths = self.lengths(name)
            if response is None or lengths is None or np.array_equal(lengths, response):
                continue
            row = int(np.flatnonzero(lengths != response)[0])
            raise ColumnError(
                f"{what}: column {name!r} has {lengths[row]} values for sample {row}, whose response has {response[row]} tokens; "
                "give one value per response token"
            )

    def states(self) -> list[ColumnState]:
        """Return name, kind, dtype, state, bytes, mean length and writer of every column."""
        states: list[ColumnState] = []
        for name, ref in self.by_name.items():
            state = self.client.state(ref.call_id)
            info = self.client.info(ref) if state == "done" else None
            lengths = None if info is None or info.lengths is None else info.lengths
            if lengths is not None and ref.rows is not None:
                lengths = lengths[ref.rows]
            states.append({
                "name": name, "kind": info.kind if info else "", "dtype": info.dtype if info else "",
                "state": state if state != "done" else "lost" if self.client.gone(ref) else "ready",
                "bytes": info.num_bytes if info else None,
                "mean_length": float(lengths.mean()) if lengths is not None and len(lengths) else None,
                "writer": self.client.writer(ref.call_id),
            })  # fmt: skip
        return states
