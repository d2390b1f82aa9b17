"""Every error hfsdk raises, as one tree.

Each message says what was asked, what exists, and what to do. Each class also inherits the standard error it replaces,
so that ``except ValueError`` keeps working, and each pickles, because errors cross process borders::

    HfsdkError
    |-- LayoutError (ValueError)            a layout does not fit a model, a pool or an engine
    |-- PlacementError (ValueError)         roles, pools and devices do not fit together
    |-- DeviceMemoryError (MemoryError)     refused before loading: it would not fit
    |-- ModelNotFoundError (LookupError)    no such folder, hub id, or no weights in it
    |-- UnsupportedModelError (ValueError)  an architecture the engines do not know
    |-- ColumnError (LookupError)           missing, extra or misaligned columns
    |-- OptionError (ValueError)            an argument out of range
    |-- SimulatedValueError (RuntimeError)  a value was asked of a simulated run
    |-- StaleBatchError (ValueError)        training on a batch that weights of another branch wrote
    |-- SessionClosedError (RuntimeError)
    |-- SessionInUseError (RuntimeError)    another kernel has this kept session
    |-- CheckpointError (OSError)
    |-- OutputError (OSError)               a report, picture or export cannot be written
    `-- CallError (RuntimeError)            a call failed while it ran: names role, rank, call and line
        |-- RewardFunctionError             the user's reward function raised, hung or returned nonsense
        |-- NonFiniteLossError              the loss or a gradient was NaN or infinite; the step was refused
        |-- WeightMismatchError             weights that moved are not those that left, by their fingerprints
        |-- WorkerDiedError                 a worker process ended; its pool was rebuilt
        |-- LostColumnError                 the column's owner died; says which call to run again
        |-- CallCancelledError
        `-- DependencyError                 an input of this call failed; carries that failure as its cause

There is one warning as well, ``InvariantWarning``.
"""

from __future__ import annotations

from typing import Any

from hfsdk.core.text import printable


class HfsdkError(Exception):
    """Base class of every error hfsdk raises; as text it gives a terminal no orders, even where it quotes names and samples."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InvariantWarning(UserWarning):
    """A number of a step that must hold by construction does not, e.g. the ratio of the first mini-batch is not 1."""


class LayoutError(HfsdkError, ValueError):
    """A parallel layout does not fit a model, a pool or an engine."""


class PlacementError(HfsdkError, ValueError):
    """Roles, pools and devices do not fit together."""


class DeviceMemoryError(HfsdkError, MemoryError):
    """The declared roles would not fit into a device's memory, and are refused before they load."""


class ModelNotFoundError(HfsdkError, LookupError):
    """No such model folder or name, or a folder without weights."""


class UnsupportedModelError(HfsdkError, ValueError):
    """An architecture or a size that the engines cannot run."""


class ColumnError(HfsdkError, LookupError):
    """A batch lacks columns, or has some too many, or rows that do not match."""


class OptionError(HfsdkError, ValueError):
    """An argument is out of its range."""


class SimulatedValueError(HfsdkError, RuntimeError):
    """A value was asked of a simulated run, which has shapes and times only."""


class StaleBatchError(HfsdkError, ValueError):
    """A batch was written by weights that today's do not come from: the session was rewound since."""


class SessionClosedError(HfsdkError, RuntimeError):
    """The session is closed."""


class SessionInUseError(HfsdkError, RuntimeError):
    """Another kernel has this kept session; the message says which, and how to take it over or only to look."""


class CheckpointError(HfsdkError, OSError):
    """A checkpoint is missing, incomplete or of another model."""


class OutputError(HfsdkError, OSError):
    """A file that was asked for, e.g. a report or a picture, cannot be written."""


class CallError(HfsdkError, RuntimeError):
    """A call failed while it ran.

    Attributes:
        role: the role whose call failed, e.g. ``"actor"``.
        method: the method, e.g. ``"generate"``.
        rank: the worker's rank in the role, or ``None`` when it is not one rank's failure.
        line: the line that started the call, e.g. ``"cell 4, line 2"``.
        details: the worker's traceback or its last spans, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        method: str = "",
        rank: int | None = None,
        line: str = "",
        details: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.role = role
        self.method = method
        self.rank = rank
        self.line = line
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the keyword arguments, which ``Exception`` alone would lose."""
        return _rebuild_call_error, (type(self), self.message, self.fields())

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments this error was made with."""
        return {
            "role": self.role,
            "method": self.method,
            "rank": self.rank,
            "line": self.line,
            "details": self.details,
        }

    def __str__(self) -> str:
        where = f"{self.role}.{self.method}" if self.method else self.role
        head = where + (f" on rank {self.rank}" if self.rank is not None else "")
        head += f" (started at {self.line})" if self.line else ""
        text = f"{head}: {self.message}" if head else self.message
        return printable(text + (f"\n{self.details}" if self.details else ""))


class RewardFunctionError(CallError):
    """A reward function raised, hung, or returned something that is not one number per sample."""


class NonFiniteLossError(CallError):
    """The loss or a gradient was NaN or infinite; that optimizer step was refused on every rank."""


class WeightMismatchError(CallError):
    """Weights that moved are not those that left, by their fingerprints; nothing was generated or computed with them."""


class WorkerDiedError(CallError):
    """A worker process ended or hung; its pool was killed and rebuilt."""


class LostColumnError(CallError):
    """A column is gone because the worker that held it died; the message names the call to run again."""


class CallCancelledError(CallError):
    """The call was cancelled at a safe point."""


class DependencyError(CallError):
    """An input of this call failed; ``__cause__`` is that failure."""


def unsaved(role: str) -> CheckpointError:
    """Return the error of a save whose workers ended while they wrote a role's state."""
    error = CheckpointError(f"a worker ended while it wrote {role}'s state; save again")
    error.__cause__ = WorkerDiedError("a worker ended", role=role, method="save")
    return error


def _rebuild_call_error(cls: type[CallError], message: str, fields: dict[str, Any]) -> CallError:
    return cls(message, **fields)
