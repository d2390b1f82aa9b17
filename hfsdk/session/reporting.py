"""``report``: a session as one offline HTML file; what draws it is loaded when one is asked for."""

from __future__ import annotations

from pathlib import Path

from hfsdk.core.batch import Batch
from hfsdk.core.checks import checked
from hfsdk.core.errors import OptionError
from hfsdk.core.files import as_path
from hfsdk.session.session_parts import Parts


@checked
def report(parts: Parts, path: str | Path, *, batch: Batch | None = None) -> Path:  # noqa: D417
    """Write one offline HTML file with everything that can be looked at: placement, training, dataflow, timeline, memory, ...

    A file that is there is replaced when this one is complete, with a notice unless this process wrote it; a link there is
    replaced too, never followed.

    Of a closed session it has what stays readable (see :meth:`close`).

    Args:
        path: the file to write, ``.html``; its folder must exist.
        batch: whose samples to show; by default the last one of :meth:`train`.

    Returns:
        The path.

    Raises:
        OptionError: the file's name does not end with .html, or its folder does not exist.
        OutputError: it cannot be written; what was there is unchanged.
    """
    target = as_path(path, "a report")
    if target.suffix != ".html" or not target.parent.is_dir():
        raise OptionError(f"a report is an .html file in a folder that exists; got {str(target)!r}")
    from hfsdk.session.report_sections import session_report  # the pictures are loaded when one is asked for

    return session_report(parts, target, batch)
