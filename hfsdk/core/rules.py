"""What a type takes: one :class:`Rule` per annotation, for the checker of arguments (``core/checks.py``).

A rule hands back the value in plain Python, the very same object where nothing had to change, or :class:`Refused`. Numbers of
numpy and torch become Python's; lists become the tuples that were declared; the items of lists and mappings are looked at.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import itertools
import math
import operator
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from hfsdk.core.bounds import MOST_ITEMS, NO, Bounds, Length, OneOf, Refused, Rule
from hfsdk.core.scalars import ANYTHING, MOST_CHARACTERS, PATH, SCALARS, take_any_float, take_path, take_slice

LOOKED_AT = 1_000
"""Items checked of a sequence that is neither list nor tuple, whose items may have to be computed; of those two, all are."""


def shown(value: object, most: int = 80) -> str:
    """Return a value's ``repr`` in one line of at most about ``most`` characters, however large it is."""
    if isinstance(value, str | bytes | bytearray):
        keep = max(most - 20, 20)
        text = repr(value[:keep]) + (f"... ({len(value):,} long)" if len(value) > keep else "")
    elif type(value) is int and abs(value) >= 10**30:
        text = f"a whole number of {value.bit_length():,} bits"
    elif type(value) in (list, tuple, set, frozenset, dict) and most < 5:
        text = "..."  # lists in lists may go on for ever
    elif type(value) in (list, tuple, set, frozenset, dict):
        few = [shown(one, most // 2) for one in itertools.islice(cast(Iterable[Any], value), 3)]
        size = len(cast(Sequence[Any], value))
        text = f"{type(value).__name__} of {size:,}: {', '.join(few)}" + ", ..." * (size > len(few)) if few else repr(value)
    else:
        try:
            text = repr(value)
        except Exception:  # the user's own object: a message must not fail on it
            text = f"a {type(value).__name__}"
    text = "".join(c if c.isprintable() else " " for c in text[: 10 * most])
    text = " ".join(text.split())
    return text if len(text) <= most + 20 else text[:most] + "..."


@cache
def rule_of(hint: Any) -> Rule:
    """Return the rule of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return _either(args)
    if origin is Literal:
        words = " or ".join(map(repr, args))
        return Rule(lambda value: value if any(type(value) is type(a) and value == a for a in args) else NO, words, words)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is None:
        return SCALARS[type(None)]
    if isinstance(hint, type) and issubclass(hint, os.PathLike):
        return Rule(lambda value: take_path(value) if isinstance(value, os.PathLike) else NO, "a path", "paths")
    return _of_class(origin or hint, args)


def _of_class(kind: Any, args: tuple[Any, ...]) -> Rule:
    if not isinstance(kind, type) or kind is object or (getattr(kind, "_is_protocol", False) and not _is_checkable(kind)):
        return ANYTHING
    if kind is tuple:
        return _tuple(args)
    if kind is collections.abc.Callable:
        return _function(args)
    if kind is slice:
        return Rule(take_slice, "a slice of whole numbers", "slices of whole numbers")
    if kind is type:
        return Rule(lambda value: value if isinstance(value, type) else NO, "a class", "classes")
    if issubclass(kind, Mapping):
        return _mapping(kind, *(args or (Any, Any)))
    if kind in (list, set, frozenset) or kind.__module__ == "collections.abc":
        return _collection(kind, rule_of(args[0]) if args else ANYTHING)
    if kind.__name__ == "ndarray":
        words, many = "an array", "arrays"
    elif kind.__module__ == "builtins":
        words, many = f"a {kind.__name__}", f"{kind.__name__}s"
    else:
        ours = kind.__name__ in getattr(sys.modules.get("hfsdk"), "__all__", ())
        words, many = (f"an hf.{kind.__name__}" if ours else f"a {kind.__name__}"), f"{'hf.' * ours}{kind.__name__}s"
    return Rule(lambda value: value if isinstance(value, kind) else NO, words, many)


def _function(args: tuple[Any, ...]) -> Rule:
    """Return the rule of functions: one whose signature cannot take that many arguments is refused before it is called."""
    if not args or not isinstance(args[0], list):
        return Rule(lambda value: value if callable(value) else NO, "a function", "functions")
    num = len(args[0])
    words = f"a function of {num} argument{'s' * (num != 1)}"

    def take(value: Any) -> Any:
        if not callable(value):
            return NO
        try:
            signature = inspect.signature(value)
        except Exception:  # of a builtin, or the user's own object: it is seen when it is called
            return value
        try:
            signature.bind(*args[0])
        except TypeError:
            return NO
        return value

    return Rule(take, words, words.replace("a function", "functions", 1))


def _is_checkable(kind: type) -> bool:
    return kind.__module__ == "collections.abc" or bool(getattr(kind, "_is_runtime_protocol", False))


def _bounded(hint: Any, notes: tuple[Any, ...]) -> Rule:
    """Return the rule of ``Annotated[hint, *notes]``; in a union the notes are for the members that they can be about."""
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
        return _either(tuple(one if one is type(None) else Annotated[(one, *notes)] for one in members))
    rule = rule_of(hint)
    for note in notes:
        if isinstance(note, Bounds) and hint in (int, float):
            rule = _within(rule, hint, note)
        elif isinstance(note, OneOf) and hint is str:
            rule = _one_of(note.texts)
        elif isinstance(note, Length) and (hint is str or get_origin(hint) is not None):
            rule = _sized(rule, note)
    return rule


def _one_of(texts: tuple[str, ...]) -> Rule:
    words = f"one of {', '.join(map(repr, texts))}"
    return Rule(lambda value: value if isinstance(value, str) and value in texts else NO, words, words)


def _within(rule: Rule, hint: Any, bounds: Bounds) -> Rule:
    take_number = rule.take if bounds.finite else take_any_float
    bounded = max(bounds.least, bounds.above) > -math.inf and min(bounds.most, bounds.below) < math.inf
    number_words = "a whole number" if hint is int else "a number" if bounded else "a finite number"
    words = [number_words if bounds.finite else "a number, NaN or infinity", bounds.words]

    def take(value: Any) -> Any:
        number = take_number(value)
        return number if type(number) is Refused or not bounds.finite or bounds.holds(number) else NO

    one = " ".join(filter(None, words))
    return Rule(take, one, one.removeprefix("a ").replace("number", "numbers", 1))


def _sized(rule: Rule, length: Length) -> Rule:
    inner = rule.take

    def take(value: Any) -> Any:
        if isinstance(value, str) and len(value) > length.most:
            return NO
        as_it_is = isinstance(value, str) and (len(value) > MOST_CHARACTERS or not length.encoded)
        taken = value if as_it_is else inner(value)
        return taken if type(taken) is Refused or length.least <= len(taken) <= length.most else NO

    unit = "characters" if rule.one == "a text" else "items"
    return Rule(take, f"{rule.one} {length.words} {unit}", f"{rule.many} {length.words} {unit}")


# -- values of several


def _either(hints: tuple[Any, ...]) -> Rule:
    if str in hints and Path in hints:
        hints = (PATH, *(hint for hint in hints if hint not in (str, Path)))
    rules = [hint if isinstance(hint, Rule) else rule_of(hint) for hint in hints]
    if ANYTHING in rules:
        return ANYTHING
    takes = [rule.take for rule in sorted(rules, key=lambda rule: rule.one != "an array")]  # which stays one

    def take(value: Any) -> Any:
        most_telling = NO
        for one in takes:
            taken = one(value)
            if type(taken) is not Refused:
                return taken
            if taken is not NO:
                most_telling = taken
        return dataclasses.replace(most_telling, wanted=most_telling.wanted if not most_telling.at else "")

    words, many = dict.fromkeys(rule.one for rule in rules), dict.fromkeys(rule.many for rule in rules)
    return Rule(take, " or ".join(words), " or ".join(many))


def _listed(value: Any) -> Any:
    """Return an array of numpy or torch, or a series of pandas, with one axis as a list; everything else as it is."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch", "pandas") and getattr(value, "ndim", None) == 1:
        return value.tolist() if value.shape[0] <= MOST_ITEMS else value
    return value


def _collection(kind: type, item: Rule) -> Rule:
    """Return the rule of lists, sequences, sets and iterables of one kind of items; a text is none of these."""
    ordered = issubclass(kind, Sequence)
    words = "a list" if ordered else f"a {kind.__name__.lower()}" if issubclass(kind, collections.abc.Set) else "a collection"

    def take(value: Any) -> Any:
        if ordered:
            value = _listed(value)
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, kind) or getattr(value, "shape", None) == ():
            return NO
        return _items(value, item)

    more = "" if item is ANYTHING else f" of {item.many}"
    return Rule(take, words + more, words.split(" ", 1)[1] + "s" + more)


def _is_short(values: Sequence[Any]) -> bool:
    try:
        return len(values) <= MOST_ITEMS
    except OverflowError:  # a range of more than 64 bits
        return False


def _items(values: Any, item: Rule) -> Any:
    if isinstance(values, list | tuple | set | frozenset):
        if len(values) > MOST_ITEMS:
            return Refused(f"at most {MOST_ITEMS:,} items")
        few: Iterable[Any] = values
    elif isinstance(values, Sequence):
        if not _is_short(values):
            return Refused(f"at most {MOST_ITEMS:,} items")
        few = itertools.islice(values, LOOKED_AT)
    else:
        return values  # looking would use a generator up
    if item is ANYTHING:
        return values
    changed = False
    taken = []
    for i, value in enumerate(few):
        new = item.take(value)
        if type(new) is Refused:
            return Refused(at=f"[{i}]{new.at}", value=new.value if new.at else value)
        changed = changed or new is not value
        taken.append(new)
    return type(values)(taken) if changed and type(values) in (list, tuple, set, frozenset) else values


def _tuple(args: tuple[Any, ...]) -> Rule:
    """Return the rule of tuples; a list is taken too and becomes one."""
    if not args or args[-1] is ...:
        item = rule_of(args[0]) if args else ANYTHING
        words = "a tuple" + (f" of {item.many}" if args else "")

        def take(value: Any) -> Any:
            value = _listed(value)
            return _items(value if isinstance(value, tuple) else tuple(value), item) if isinstance(value, list | tuple) else NO

        return Rule(take, words, words.removeprefix("a ").replace("tuple", "tuples", 1))
    rules = [rule_of(one) for one in args]
    kinds = list(dict.fromkeys(rule.many for rule in rules))
    words = f"a tuple of {len(rules)} {' and '.join(kinds)}"

    def take_each(value: Any) -> Any:
        value = _listed(value)
        if not isinstance(value, list | tuple) or len(value) != len(rules):
            return NO
        taken = tuple(rule.take(one) for rule, one in zip(rules, value, strict=True))
        for i, new in enumerate(taken):
            if type(new) is Refused:
                return Refused(at=f"[{i}]{new.at}", value=new.value if new.at else value[i])
        same = type(value) is tuple and all(map(operator.is_, taken, value))
        return value if same else taken

    return Rule(take_each, words, words.removeprefix("a ").replace("tuple", "tuples", 1))


def _mapping(kind: Any, key: Any, item: Any) -> Rule:
    keys, items = rule_of(key), rule_of(item)
    words = "a mapping" + ("" if (keys, items) == (ANYTHING, ANYTHING) else f" of {keys.many} to {items.many}")

    def take(value: Any) -> Any:
        if not isinstance(value, kind):
            return NO
        taken = {}
        for name, one in value.items():
            new_name, new = keys.take(name), items.take(one)
            if type(new_name) is Refused:
                return Refused(at=" with the key", value=name)
            if type(new) is Refused:
                return Refused(at=f"[{shown(name, 30)}]{new.at}", value=new.value if new.at else one)
            taken[new_name] = new
        same = all(map(operator.is_, taken, value)) and all(map(operator.is_, taken.values(), value.values()))
        return value if same else taken

    return Rule(take, words, words.removeprefix("a ").replace("mapping", "mappings", 1))
