"""Tables of cases that are looked at in one test, which names every row that failed."""

import contextlib


@contextlib.contextmanager
def every_row():
    """Yield ``row``: what fails inside ``with row(*values)`` is raised with these values, when all rows were tried."""
    failures = []

    @contextlib.contextmanager
    def row(*values):
        try:
            yield
        except Exception as failed:
            failed.add_note(f"in the row {values}")
            failures.append(failed)

    yield row
    if len(failures) > 1:
        raise ExceptionGroup(f"{len(failures)} rows failed", failures)
    if failures:
        raise failures[0]
