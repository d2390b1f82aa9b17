"""One test over many rows: every row that fails is named, with what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def check_each(rows: Iterable[str], check: Callable[[str], None]) -> None:
    """Check every row, and fail once at the end with the names of those that failed."""
    failed = []
    for name in rows:
        try:
            check(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} failed\n" + "\n".join(failed)
