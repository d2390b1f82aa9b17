"""The keys that a release has, so that a slip of the pen can be told from an option that is not read.

``keys/NAME.txt`` holds one key a line, as facts of a release; ``tests/data/make_config_keys.py`` writes them from its sources.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILES = {"verl": "verl", "TRL": "trl", "OpenRLHF": "openrlhf", "NeMo-RL": "nemo_rl"}
OPEN = (
    "override_config",
    "engine_kwargs",
    "vllm_kwargs",
    "env_vars",
    "sampler_kwargs",
    "model_init_kwargs",
    "override_transformer_config",
)
"""Parts of keys below which a user may write anything."""


@cache
def known_keys(system: str) -> frozenset[str]:
    """Return the keys of a system's release; none of hfsdk's own."""
    if system not in FILES:
        return frozenset()
    text = (Path(__file__).parent / "keys" / f"{FILES[system]}.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def said_of_keys(system: str, release: str, unread: Mapping[str, Any]) -> dict[str, str]:
    """Return what is to be said of each key that was not read."""
    known = known_keys(system)
    return {key: _said(key, known, f"{system} {release}") for key in unread}


def _said(key: str, known: frozenset[str], release: str) -> str:
    plain = key.split("@")[0]
    if plain in known or any(one.startswith(f"{plain}.") for one in known):
        return f"a key of {release}"
    if any(part in OPEN for part in plain.split(".")):
        return "passed on to another library"
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    return f"{release} has no such key" + (f"; did you mean {near[0]}?" if near else "")
