"""Keys that nobody read, and the numbers that they could change: none, how the model learns, memory, seconds, or every number.

A number is given only where no key that was given and not read could change it. Which could is a table of each system,
``keys/NAME_unread.txt``: sections of patterns of keys, ``"*"`` for any text, ``"=value"`` for one value. Of several that match, one
that says how a key ends counts before one that leaves it open, and then the one with most letters::

    a key at its release's default          nothing
    a key of a part that is not in use      nothing (the critic's, of GRPO)
    a key of the release, or an earlier     as its table says
    any other                               everything: it may be a slip of one that counts
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hfsdk.configs.settings import Settings, parse_scalar
from hfsdk.configs.step_config import UNREAD, Finding
from hfsdk.core.checks import shown

SIZES, GENERATED, MEMORY, SECONDS, LEARNING = "sizes", "generated", "memory", "seconds", "learning"
"""Kinds of explained numbers: the batches; how much of them is generated; bytes; seconds; options of the loss and the optimizer."""

EVERYTHING = (SIZES, GENERATED, MEMORY, SECONDS, LEARNING)
TABLES = {"verl": "verl", "TRL": "trl", "OpenRLHF": "openrlhf", "NeMo-RL": "nemo_rl"}
IN_WORDS = {
    SIZES: "every number", GENERATED: "how much is generated", MEMORY: "memory", SECONDS: "seconds",
    LEARNING: "how the model learns",
}  # fmt: skip
MOST_NAMED = 6


@dataclass(frozen=True)
class Pattern:
    """Keys, or keys of one value, and the numbers that they could change."""

    of_keys: re.Pattern[str]
    value: str | None
    weight: tuple[bool, int]
    """Whether it says how keys end, and its letters: the greatest counts."""
    kinds: tuple[str, ...]


@cache
def _table(system: str) -> Mapping[str, tuple[Pattern, ...]]:
    """Return the patterns of a system: ``"now"``, ``"earlier"`` releases, and ``"open"``, below which anything may stand."""
    by_part: dict[str, list[Pattern]] = {"now": [], "earlier": [], "open": []}
    if system not in TABLES:
        return dict.fromkeys(by_part, ())
    part = "now"
    kinds: tuple[str, ...] = ()
    for line in (FOLDER / f"{TABLES[system]}_unread.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name, _, rest = line.strip("[]").partition(": ")
            part, words = (name, rest) if name in ("earlier", "open") else ("now", name)
            kinds = EVERYTHING if words == SIZES else tuple(word for word in words.split() if word != "nothing")
        elif not line.startswith("#"):
            by_part[part] += [_pattern(text, kinds) for text in line.split()]
    return {part: tuple(patterns) for part, patterns in by_part.items()}


def _pattern(text: str, kinds: tuple[str, ...]) -> Pattern:
    key, _, value = text.partition("=")
    of_keys = re.compile(".*".join(map(re.escape, key.split("*"))))
    return Pattern(of_keys, value or None, (not key.endswith("*"), len(text.replace("*", ""))), kinds)


def _matching(patterns: Iterable[Pattern], key: str, value: Any) -> tuple[str, ...] | None:
    fitting = [
        pattern
        for pattern in patterns
        if pattern.of_keys.fullmatch(key) and (pattern.value is None or pattern.value == str(value).lower())
    ]
    return max(fitting, key=lambda pattern: pattern.weight).kinds if fitting else None


def is_listed(system: str, key: str) -> bool:
    """Return whether the table of a system has a key."""
    return _matching((pattern for pattern in _table(system)["now"] if pattern.value is None), key, None) is not None


def is_of_release(system: str, key: str) -> bool:
    """Return whether a system has a key, had it in earlier releases, or passes it on."""
    plain, tables = key.split("@")[0], _table(system)
    listed = (_matching(tables[part], plain, None) is not None for part in ("earlier", "open"))
    return is_known(system, plain) or is_environment(plain) or any(listed)


def is_environment(key: str) -> bool:
    """Return whether a key is a variable of the job's environment, ``NAME=value`` before its program."""
    return re.fullmatch(r"[A-Z][A-Z0-9_]*", key) is not None


def could_change(system: str, key: str, value: Any) -> tuple[tuple[str, ...], str]:
    """Return the numbers that a key that is not read could change, and where it comes from in words."""
    tables, plain = _table(system), key.split("@")[0]
    earlier = _matching(tables["earlier"], plain, value)
    if is_environment(plain):
        return _matching(tables["now"], plain, value) or (), "a variable of the environment"
    if is_known(system, plain):
        listed = _matching(tables["now"], plain, value)
        words = "a key of {release}" if is_of_now(system, plain) else "a key of other releases than {release}"
        return EVERYTHING if listed is None else listed, words
    if earlier is not None:
        return earlier, "a key of other releases than {release}"
    if _matching(tables["open"], plain, value) is not None:
        listed = _matching(tables["now"], plain, value)
        return EVERYTHING if listed is None else listed, "passed on by {release}"
    return EVERYTHING, "{release} has no such key" + nearest_key(system, plain)


def is_default(value: Any, default: Any) -> bool:
    """Return whether a value that was given is the default, as a command line or YAML may write it."""
    plain = [_plain(item) for item in (value, default)]
    same_kind = isinstance(plain[0], bool) == isinstance(plain[1], bool)
    return bool(same_kind and plain[0] == plain[1]) or (plain[0] in ({}, [], "") and plain[1] in (None, {}, [], ""))


def _plain(value: Any) -> Any:
    return parse_scalar(value) if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class Unread:
    """The keys of a configuration that were not read, and the numbers that are not given because of them."""

    said: Mapping[str, str]
    """Key -> the note on it."""
    withheld: Mapping[str, tuple[str, ...]]
    """Kind of explained numbers -> the keys that could change them."""

    def finding(self) -> tuple[Finding, ...]:
        """Return the note that comes first: which numbers are not given, and for which keys."""
        kinds = [kind for kind in (SIZES, GENERATED, MEMORY, SECONDS) if kind in self.withheld]
        if not kinds:
            return ()
        kinds = [SIZES] if SIZES in kinds else kinds
        keys = list(dict.fromkeys(key for kind in kinds for key in self.withheld[kind]))
        named = ", ".join(keys[:MOST_NAMED]) + f" and {len(keys) - MOST_NAMED} more" * (len(keys) > MOST_NAMED)
        words, first = " and ".join(IN_WORDS[kind] for kind in kinds), keys[0]
        without = "none is given" if SIZES in kinds else "what hangs on them is left out"
        said = self.said[first].split("; it could change")[0]
        return (Finding(
            kind=UNREAD, rule=f"keys that are not read here could change {words}, and {without}", got=f"{named}: {said}",
            do=f"{'Correct it, or' if 'no such key' in said else 'Where it has no effect,'} leave it out: "
            f"hf.explain(..., ['~{first}']).",
        ),)  # fmt: skip


def unread_of(s: Settings, system: str, release: str) -> Unread:
    """Return a note on each key that was not read, and the kinds of numbers that it could change."""
    said: dict[str, str] = {}
    withheld: dict[str, list[str]] = {}
    defaults = known_defaults(system)
    for key, raw in s.unread().items():
        value = s.unread_value(key, raw, defaults)
        kinds, words = could_change(system, key, value)
        words = words.format(release=f"{system} {release}")
        switch = key.endswith((".enable", ".enabled"))
        if (s.is_left_out(key) and not switch) or (key in s.defaults and kinds):
            kinds, words = (), f"{words}, of a part that is not in use"
        elif key in defaults and is_default(value, s.unread_value(key, defaults[key], defaults)):
            kinds, words = (), f"{words}, at its default"
        said[key] = words + ("" if not kinds else f"; it could change {' and '.join(_brief(kinds))}")
        for kind in kinds:
            withheld.setdefault(kind, []).append(key)
    for key, (value, kinds) in s.odd.items():
        kinds = EVERYTHING if SIZES in kinds else kinds
        said[key] = f"{shown(value)} is none of its values that are read here; it could change {' and '.join(_brief(kinds))}"
        for kind in kinds:
            withheld.setdefault(kind, []).append(key)
    return Unread(said=said, withheld={kind: tuple(keys) for kind, keys in withheld.items()})


def _brief(kinds: Iterable[str]) -> list[str]:
    return [IN_WORDS[SIZES]] if SIZES in kinds else [IN_WORDS[kind] for kind in kinds]


# -- the keys of a release and their defaults

FOLDER = Path(__file__).parent / "keys"
FILES = {"verl": ("verl",), "TRL": ("trl", "accelerate"), "OpenRLHF": ("openrlhf", "openrlhf_old"), "NeMo-RL": ("nemo_rl",)}
"""System -> the files of its keys, those that win first."""


@cache
def _lines(name: str) -> Mapping[str, str]:
    """Return key -> default, as JSON, of ``keys/NAME.txt``, which ``tests/data/make_config_keys.py`` writes from a release."""
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
    defaults: dict[str, Any] = {}
    for name in reversed(FILES.get(system, ())):
        defaults |= {key: json.loads(default) for key, default in _lines(name).items() if default}
    return defaults


def is_known(system: str, key: str) -> bool:
    """Return whether a release has a key, or keys below it."""
    keys = known_keys(system)
    return key in keys or any(name.startswith(f"{key}.") for name in keys)


def is_of_now(system: str, key: str) -> bool:
    """Return whether its newest release that is read has a key, or keys below it."""
    newest = [name for file in FILES.get(system, ()) if not file.endswith("_old") for name in _lines(file)]
    return any(name == key or name.startswith(f"{key}.") for name in newest)


def nearest_key(system: str, key: str) -> str:
    """Return the key of a release that one is a slip of, as words; ``""`` where none is near."""
    near = difflib.get_close_matches(key, known_keys(system), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""
