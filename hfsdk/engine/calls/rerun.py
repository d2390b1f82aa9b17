"""Calls that ran, kept so that they can be carried out again on a simulated twin: roles, requests, and all lengths.

Kept are references and lengths, no columns and none of the user's functions, and those of the controller's last calls alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hfsdk.core.dataflow import Call
from hfsdk.core.runtime import Stored
from hfsdk.core.table import Array
from hfsdk.engine.calls import messages as m


@dataclass(frozen=True, eq=False)
class Rerun:
    """A call as it was carried out."""

    call: Call
    request: m.Submit
    """The message without functions; its references keep nothing alive."""
    lengths: Mapping[str, Array | None]
    """Input -> the length of each of its rows as they were read; ``None`` for one value per sample."""
    responses: Array | None = None
    """Lengths of the responses it generated."""

    @classmethod
    def of(cls, call: Call, request: m.Submit, stored: Mapping[int, Stored]) -> Rerun:
        """Note a call that is about to run."""
        lengths: dict[str, Array | None] = {}
        inputs = {}
        for name, ref in request.inputs.items():
            info = stored[ref.call_id].columns.get(ref.name)
            all_lengths = None if info is None else info.lengths
            lengths[name] = all_lengths if all_lengths is None or ref.rows is None else all_lengths[ref.rows]
            inputs[name] = replace(ref, lease=None)
        return cls(call, replace(request, inputs=inputs, arguments=request.arguments.without_function()), lengths)

    def ended(self, stored: Stored | None) -> Rerun:
        """Note the response lengths of a call that generates."""
        info = stored.columns.get("response") if stored is not None else None
        return self if info is None or info.lengths is None else replace(self, responses=info.lengths)
