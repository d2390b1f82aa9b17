"""``LoggedProcess``: what processes that Ray starts for a session share: environment, log file, a place for temporary files."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hfsdk.core import private_places


class LoggedProcess:
    """A process whose output goes to a file, and whose temporary files lie beside that where others share the usual place."""

    temporary_here = True
    """Whether what it leaves in its folder goes with the session."""

    def __init__(self, log_file: str, variables: Mapping[str, str]) -> None:
        folder = Path(log_file).parent
        private_places.enter(folder)  # of the session; on other nodes it is made here
        private = private_places.in_use(folder)
        if not self.temporary_here:
            private.pop("TMPDIR", None)
        os.environ.update({**variables, **private})
        tempfile.tempdir = None  # as it was for whoever this process was forked from
        log = os.open(log_file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
