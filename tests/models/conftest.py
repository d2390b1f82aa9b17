"""A session over the scripted runtime; see tests/session/conftest.py."""

from __future__ import annotations

from tests.session.conftest import actor, length_reward, runtime, session

__all__ = ["actor", "length_reward", "runtime", "session"]
