"""A session over the scripted runtime; see tests/session/scripted.py."""

from __future__ import annotations

import pytest

import hfsdk as hf
from tests.session.scripted import ScriptedRuntime, lengths


@pytest.fixture
def runtime():
    return ScriptedRuntime()


@pytest.fixture
def session(runtime):
    with hf.Session(runtime=runtime) as session:
        yield session


@pytest.fixture
def actor(session):
    return session.actor("tiny")


@pytest.fixture
def length_reward():
    return lengths
