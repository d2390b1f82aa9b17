"""``Reply``: the answer to a message, on its way to another process; an error keeps its causes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hfsdk.core.errors import HfsdkError


@dataclass(frozen=True, eq=False)
class Reply:
    """A value, or an error with its causes, the nearest first: pickling alone would lose them."""

    value: Any = None
    errors: tuple[Exception, ...] = ()
    besides: Any = None
    """An answer that the asker will want next."""
    heard: int = 0
    """Number of the last event before the answer: whoever has it knows all that the answer rests on."""

    @classmethod
    def of(cls, ask: Callable[[], Any], heard: Callable[[], int] = lambda: 0) -> Reply:
        """Return what ``ask`` returns or raises; a reply that it returns as it is."""
        try:
            value = ask()
        except Exception as error:
            return cls(None, errors_of(error), heard=heard())
        return value if isinstance(value, cls) else cls(value, heard=heard())

    def unpack(self) -> Any:
        """Return the value, or raise the error."""
        if self.errors:
            raise joined(self.errors)
        return self.value


def errors_of(error: BaseException | None) -> tuple[Exception, ...]:
    """Return an error and its causes, as far as they can travel."""
    errors: list[Exception] = []
    while isinstance(error, Exception) and error not in errors:
        errors.append(_portable(error))
        error = error.__cause__
    return tuple(errors)


def joined(errors: tuple[Exception, ...]) -> Exception:
    """Return the first of some errors, with the others as its causes."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # the user's own class, or one that pickles into nothing
        return HfsdkError(f"{type(error).__name__}: {error}")
    return error
