"""The keys that a release has, and their defaults: what is told from a slip of the pen, and changes nothing where it is given.

``keys/NAME.txt`` holds one key a line, with its default where that is a plain value, as facts of a release;
``tests/data/make_config_keys.py`` writes them from its sources.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "keys"
FILES = {"verl": ("verl",), "TRL": ("trl", "accelerate"), "OpenRLHF": ("openrlhf", "openrlhf_old"), "NeMo-RL": ("nemo_rl",)}
"""System -> the files of its keys, those that win first."""


@cache
def _lines(name: str) -> Mapping[str, str]:
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    pairs = (line.partition(" = ") for line in text.splitlines() if line and not line.startswith("#"))
    return {key: default for key, _, default in pairs}


@cache
def known_keys(system: str) -> frozenset[str]:
    """Return the keys of a system's release, and of its earlier ones where those are read; none of hfsdk's own."""
    return frozenset(key for name in FILES.get(system, ()) for key in _lines(name))


@cache
def known_defaults(system: str) -> Mapping[str, Any]:
    """Return the defaults of its keys that are plain values; those of another key refer to it as the release has it."""
    found: dict[str, Any] = {}
    for name in reversed(FILES.get(system, ())):
        found |= {key: json.loads(default) for key, default in _lines(name).items() if default}
    return found


def is_known(system: str, key: str) -> bool:
    """Return whether a release has a key, or keys below it."""
    known = known_keys(system)
    return key in known or any(one.startswith(f"{key}.") for one in known)


def is_of_now(system: str, key: str) -> bool:
    """Return whether its newest release that is read has a key, or keys below it."""
    newest = [known for name in FILES.get(system, ()) if not name.endswith("_old") for known in _lines(name)]
    return any(known == key or known.startswith(f"{key}.") for known in newest)


def nearest_key(system: str, key: str) -> str:
    """Return the key of a release that one is a slip of, as words; ``""`` where none is near."""
    near = difflib.get_close_matches(key, known_keys(system), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""
