"""``LoggedProcess``: what the processes that Ray starts for a session share, an environment and a log file of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


class LoggedProcess:
    """A process whose output goes to a file."""

    def __init__(self, log_file: str, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        Path(log_file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # of the session; on other nodes it is made here
        log = os.open(log_file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
