"""Tables of cases that are looked at in one test."""

import contextlib


@contextlib.contextmanager
def naming(*row):
    """Say of which row of a table a check failed."""
    try:
        yield
    except BaseException as failed:
        failed.add_note(f"in the row {row}")
        raise
