"""Whether the interpreter ends."""

from __future__ import annotations

import threading

exiting = threading.Event()
"""The interpreter ends: nothing is shown any more, for whoever looked may be gone already."""
