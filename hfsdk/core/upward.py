"""What a lower layer asks of a higher one without importing it: filled in by ``hfsdk/__init__.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

write_report: list[Callable[[Any, Path, Any], Path]] = []
"""Writes a session's report: (session, path, batch or None) -> the path."""

exiting = threading.Event()
"""The interpreter ends: nothing is shown any more, for whoever looked may be gone already."""
