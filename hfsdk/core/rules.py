"""Rules of types: one :class:`Rule` per annotation says which values it takes, for the checker of arguments (``core/checks.py``).

A rule hands back the value in plain Python, the very same object where nothing had to change, or :class:`Refusal`. Numbers of
numpy and torch become Python's; lists become the tuples that were declared; the items of lists and mappings are looked at.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import itertools
import math
import numbers
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

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
        few = [shown(item, most // 2) for item in itertools.islice(cast(Iterable[Any], value), 3)]
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
    # A protocol that cannot be checked at run time, a TypeVar or ``object`` says nothing to compare a value with.
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
        # Users write ``hf.Batch``: messages name a class as they would.
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
        return _either(tuple(member if member is type(None) else Annotated[(member, *notes)] for member in members))
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
        return number if type(number) is Refusal or not bounds.finite or bounds.holds(number) else NO

    singular = " ".join(filter(None, words))
    return Rule(take, singular, singular.removeprefix("a ").replace("number", "numbers", 1))


def _sized(rule: Rule, length: Length) -> Rule:
    inner = rule.take

    def take(value: Any) -> Any:
        if isinstance(value, str) and len(value) > length.most:
            return NO
        as_it_is = isinstance(value, str) and (len(value) > MOST_CHARACTERS or not length.encoded)
        checked_value = value if as_it_is else inner(value)
        return checked_value if type(checked_value) is Refusal or length.least <= len(checked_value) <= length.most else NO

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
        # A refusal with a place in it ("[3] must be ...") says more than that the whole is none of the types.
        most_telling = NO
        for take_member in takes:
            checked_value = take_member(value)
            if type(checked_value) is not Refusal:
                return checked_value
            if checked_value is not NO:
                most_telling = checked_value
        return dataclasses.replace(most_telling, wanted=most_telling.wanted if not most_telling.at else "")

    words, many = dict.fromkeys(rule.one for rule in rules), dict.fromkeys(rule.many for rule in rules)
    return Rule(take, " or ".join(words), " or ".join(many))


def _listed(value: Any) -> Any:
    """Return an array of numpy or torch, or a series of pandas, with one axis as a list; everything else as it is."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch", "pandas") and getattr(value, "ndim", None) == 1:
        # An array longer than the limit stays as it is: the rule of its length refuses it without making a list.
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
            return Refusal(f"at most {MOST_ITEMS:,} items")
        few: Iterable[Any] = values
    elif isinstance(values, Sequence):
        if not _is_short(values):
            return Refusal(f"at most {MOST_ITEMS:,} items")
        # A sequence of the user's own may compute its items: a few tell whether it is of the right kind.
        few = itertools.islice(values, LOOKED_AT)
    else:
        return values  # looking would use a generator up
    if item is ANYTHING:
        return values
    changed = False
    checked_items = []
    for i, value in enumerate(few):
        new = item.take(value)
        if type(new) is Refusal:
            return Refusal(at=f"[{i}]{new.at}", value=new.value if new.at else value)
        changed = changed or new is not value
        checked_items.append(new)
    return type(values)(checked_items) if changed and type(values) in (list, tuple, set, frozenset) else values


def _tuple(args: tuple[Any, ...]) -> Rule:
    """Return the rule of tuples; a list is taken too and becomes one."""
    if not args or args[-1] is ...:
        item = rule_of(args[0]) if args else ANYTHING
        words = "a tuple" + (f" of {item.many}" if args else "")

        def take(value: Any) -> Any:
            value = _listed(value)
            return _items(value if isinstance(value, tuple) else tuple(value), item) if isinstance(value, list | tuple) else NO

        return Rule(take, words, words.removeprefix("a ").replace("tuple", "tuples", 1))
    rules = [rule_of(arg) for arg in args]
    kinds = list(dict.fromkeys(rule.many for rule in rules))
    words = f"a tuple of {len(rules)} {' and '.join(kinds)}"

    def take_each(value: Any) -> Any:
        value = _listed(value)
        if not isinstance(value, list | tuple) or len(value) != len(rules):
            return NO
        checked_items = tuple(rule.take(arg) for rule, arg in zip(rules, value, strict=True))
        for i, new in enumerate(checked_items):
            if type(new) is Refusal:
                return Refusal(at=f"[{i}]{new.at}", value=new.value if new.at else value[i])
        same = type(value) is tuple and all(map(operator.is_, checked_items, value))
        return value if same else checked_items

    return Rule(take_each, words, words.removeprefix("a ").replace("tuple", "tuples", 1))


def _mapping(kind: Any, key: Any, item: Any) -> Rule:
    keys, items = rule_of(key), rule_of(item)
    words = "a mapping" + ("" if (keys, items) == (ANYTHING, ANYTHING) else f" of {keys.many} to {items.many}")

    def take(value: Any) -> Any:
        if not isinstance(value, kind):
            return NO
        checked_items = {}
        for name, item_value in value.items():
            new_name, new = keys.take(name), items.take(item_value)
            if type(new_name) is Refusal:
                return Refusal(at=" with the key", value=name)
            if type(new) is Refusal:
                return Refusal(at=f"[{shown(name, 30)}]{new.at}", value=new.value if new.at else item_value)
            checked_items[new_name] = new
        same = all(map(operator.is_, checked_items, value)) and all(map(operator.is_, checked_items.values(), value.values()))
        return value if same else checked_items

    return Rule(take, words, words.removeprefix("a ").replace("mapping", "mappings", 1))


# -- the notes of an ``Annotated`` type, and the rule that they make

MOST_ITEMS = 10_000_000
"""Longest list that is taken where nothing else is said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Ends of a range of numbers."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    finite: bool = True

    def holds(self, number: float) -> bool:
        """Return whether a number is within."""
        return self.least <= number <= self.most and self.above < number < self.below

    @property
    def words(self) -> str:
        """``"from 1 to 4,096"``, ``"of at least 0"``, ``"above 0 and at most 1"``."""
        if self.least > -math.inf and self.most < math.inf:
            return f"from {figure(self.least)} to {figure(self.most)}"
        lower = {"of at least": self.least, "above": self.above}
        upper = {"at most": self.most, "below": self.below}
        return " and ".join(f"{word} {figure(bound)}" for word, bound in (lower | upper).items() if math.isfinite(bound))


class Within(Bounds):
    """Bounds of a number, next to its type: ``Annotated[int, Within(1, 4096)]``, ``Annotated[float, Within(above=0)]``."""

    def __init__(
        self, least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf, below: float = math.inf
    ) -> None:
        super().__init__(least=least, most=most, above=above, below=below)


@dataclasses.dataclass(frozen=True)
class Length:
    """Bounds of the number of characters of a text, or of the items of a list or a mapping: ``Annotated[str, Length(1, 200)]``."""

    least: int = 0
    most: int = MOST_ITEMS
    encoded: bool = True
    """Whether a text is refused that has no UTF-8 form; one that is only shown may have none."""

    @property
    def words(self) -> str:
        """``"of 1 to 200"``."""
        return f"of at least {self.least:,}" if self.most >= MOST_ITEMS else f"of {self.least:,} to {self.most:,}"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The texts that are taken: ``Annotated[str, OneOf("token_mean", "sequence_mean")]``."""

    texts: tuple[str, ...]

    def __init__(self, *texts: str) -> None:
        object.__setattr__(self, "texts", texts)


NONFINITE = Bounds(finite=False)
"""The note for a ``float`` that takes infinite numbers and NaN too."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A rule's no.

    Attributes:
        wanted: the accepted values in words, where the rule's own words do not tell.
        at: the place inside the value, e.g. ``"[3]"``.
        value: the value that stands there.
    """

    wanted: str = ""
    at: str = ""
    value: Any = None


NO = Refusal()


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """The values that one annotation takes: ``take`` gives the value in plain Python, or :class:`Refusal`.

    Attributes:
        take: the rule itself.
        one: its words, ``"a whole number"``.
        many: the same of several, ``"whole numbers"``.
    """

    take: Callable[[Any], Any]
    one: str
    many: str


def figure(number: float) -> str:
    """Return a bound as people read it."""
    return f"{number:,}" if isinstance(number, int) and abs(number) < 10**13 else f"{number:g}"


# -- rules of single values

MOST_CHARACTERS = 1_000_000
"""Longest text that is taken where nothing else is said."""

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters and ends of lines, which a path may have and nobody means."""

MOST_OF_PATH, MOST_OF_PART = 4096, 255
"""Longest path, and longest name in one, in bytes (Linux's PATH_MAX and NAME_MAX)."""


def is_whole(value: object) -> bool:
    """Whether a value is a whole number (numpy's too; ``True`` is none)."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def plain_scalar(value: Any) -> Any:
    """Return a scalar of numpy or torch, or an array of theirs without axes, as plain Python; everything else as it is."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "shape", None) == ():
        try:
            return value.item()
        except (AttributeError, RuntimeError):  # a dtype; a tensor without storage
            return value
    return value


def _take_int(value: Any) -> Any:
    if type(value) is not int:
        value = plain_scalar(value)
        if not is_whole(value):
            return NO
        value = int(value)
    return value if -(2**63) <= value < 2**63 else Refusal("a whole number of at most 64 bits")


def take_any_float(value: Any) -> Any:
    """Take a number, infinite ones and NaN too."""
    if type(value) is float:
        return value
    value = plain_scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return NO
    try:
        number = float(value)
    except OverflowError:
        return NO
    return int(value) if isinstance(value, numbers.Integral) else number


def _take_float(value: Any) -> Any:
    value = take_any_float(value)
    return value if type(value) is Refusal or math.isfinite(value) else NO


def _take_bool(value: Any) -> Any:
    value = value if type(value) is bool else plain_scalar(value)
    return value if type(value) is bool else NO


def _take_text(value: Any) -> Any:
    if not isinstance(value, str):
        return NO
    if len(value) > MOST_CHARACTERS:
        return Refusal(f"a text of at most {MOST_CHARACTERS:,} characters")
    if not value.isascii() and not _is_unicode(value):
        return Refusal("a text without lone surrogates (U+D800 to U+DFFF), which have no UTF-8 form")
    return value if type(value) is str else "".join([value])


def take_slice(value: Any) -> Any:
    """Take a slice of whole numbers."""
    if not isinstance(value, slice) or value.step == 0:
        return NO
    ends = [end if end is None else _take_int(end) for end in (value.start, value.stop, value.step)]
    return NO if any(type(end) is Refusal for end in ends) else slice(*ends)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def take_path(value: Any) -> Any:
    """Take a text or a path that can be the name of a file."""
    try:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else b""
    except Exception:  # of the user's own kind of path
        return NO
    if not isinstance(text, str):
        return NO
    if len(text) > MOST_OF_PATH or CONTROL.search(text) or not _is_unicode(text):
        return Refusal(f"a path of at most {MOST_OF_PATH:,} bytes without control characters or lone surrogates")
    if len(text) > MOST_OF_PART or not text.isascii():
        longest = max(len(part.encode()) for part in text.split(os.sep))
        if longest > MOST_OF_PART or len(text.encode()) > MOST_OF_PATH:
            return Refusal(f"a path of at most {MOST_OF_PATH:,} bytes, {MOST_OF_PART} in each name")
    return value


ANYTHING = Rule(lambda value: value, "anything", "things")
SCALARS = {
    Any: ANYTHING,
    int: Rule(_take_int, "a whole number", "whole numbers"),
    float: Rule(_take_float, "a finite number", "finite numbers"),
    bool: Rule(_take_bool, "True or False", "truth values"),
    str: Rule(_take_text, "a text", "texts"),
    type(None): Rule(lambda value: value if value is None else NO, "None", "None"),
}
PATH = Rule(take_path, "a path", "paths")
