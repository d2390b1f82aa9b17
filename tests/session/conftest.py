"""Fixtures over the fake controller; see tests/session/fakes.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "session"))

from fakes import actor, controller, length_reward, session

__all__ = ["actor", "controller", "length_reward", "session"]
