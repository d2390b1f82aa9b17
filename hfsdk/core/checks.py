"""The one checker of what a user gives: ``@checked`` functions and ``check_fields`` of dataclasses read the annotations.

An annotation becomes once, at the first call, a rule (``hfsdk/core/rules.py``), which takes a value or refuses it. Numbers of numpy
and torch (arrays without axes too) are taken wherever numbers are, and become plain Python here: nothing behind this line meets
a numpy bool. What a type alone cannot say stands next to it in ``Annotated``::

    @checked
    def generate(prompts: Sequence[str], n: Annotated[int, Within(1, 4096)] = 1, seed: int | None = None) -> Batch: ...

What is not looked at: ``Any``, ``object``, type variables, protocols that are not ``runtime_checkable``, what a function takes
and returns, the numbers inside an array. A class that is imported for type checkers alone is known by its name.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, overload

from hfsdk.core.errors import HfsdkError, OptionError
from hfsdk.core.other_names import ARGUMENTS, ELSEWHERE, unknown_name
from hfsdk.core.rules import ANYTHING, NONFINITE, Length, OneOf, Refusal, Rule, Within, is_whole, rule_of, shown

__all__ = [
    "AnyNumber", "Count", "Fraction", "Index", "Length", "Name", "NamedFields", "NonNegative", "OneOf", "Positive", "Title",
    "Within", "check_fields", "check_options", "checked", "is_whole", "shown", "with_checked",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Count = Annotated[int, Within(1, 10**9)]
"""How many of something there are: at least one."""

Index = Annotated[int, Within(0, 10**9)]
"""A place counted from 0, or a count that may be 0."""

NonNegative = Annotated[float, Within(0)]
Positive = Annotated[float, Within(above=0)]
Fraction = Annotated[float, Within(0, 1)]
AnyNumber = Annotated[float, NONFINITE]
"""A number that may be infinite or NaN."""

Name = Annotated[str, Length(1, 200)]
"""The name of something: a role, a column, a branch."""

Title = Annotated[str, Length(0, 10_000, encoded=False)]
"""A text that is only shown."""


@overload
def checked(function: F) -> F: ...


@overload
def checked(*, error: type[HfsdkError]) -> Callable[[F], F]: ...


def checked(function: F | None = None, *, error: type[HfsdkError] = OptionError) -> Any:
    """Check the arguments of a function or method by its annotations before it runs; defaults are not checked.

    Signature, docstring and source stay those of the function. Stand it below ``classmethod``, ``staticmethod`` and
    ``contextmanager``. A call costs about a microsecond and a quarter of one per argument.

    Args:
        function: the function whose arguments are checked.
        error: the error to raise, where a more telling one than ``OptionError`` exists.
    """
    if function is None:
        return functools.partial(checked, error=error)
    wrapped: Callable[..., Any] = function
    parameters: _Parameters | None = None

    @functools.wraps(wrapped)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal parameters
        if parameters is None:
            parameters = _Parameters(wrapped, error)
        return wrapped(*parameters.of_positional(args), **parameters.of_named(kwargs, args))

    return call


class NamedFields:
    """Base of dataclasses that users make: a field that does not exist is refused with more words than Python has."""

    _refusal: ClassVar[type[HfsdkError]] = OptionError

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse fields that do not exist, and too many by their place.

        Raises:
            OptionError: says the nearest field, or what hfsdk calls that of another library.
        """
        if args or not kwargs.keys() <= _field_names(cast(Any, cls)):
            fields = [field for field in dataclasses.fields(cast(Any, cls)) if field.init]
            most, names = sum(not field.kw_only for field in fields), [field.name for field in fields]
            if len(args) > most:
                raise cls._refusal(f"{cls.__name__} takes its options by name: {', '.join(f'{name}=...' for name in names)}")
            for name in kwargs:
                if name not in names:
                    raise cls._refusal(unknown_name(cls.__name__, name, names, ARGUMENTS, ELSEWHERE))
        return super().__new__(cls)


@cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cast(Any, kind)) if field.init)


def check_fields(options: Any, error: type[HfsdkError] = OptionError) -> None:
    """Check that the fields of a dataclass are what they are declared as; scalars of numpy and torch become plain Python.

    Raises:
        OptionError: names the first that is not, and what it should be (or the ``error`` given).
    """
    for name, rule in _field_rules(cast(Any, type(options))).items():
        value = getattr(options, name)
        checked_value = rule.take(value)
        if checked_value is not value:
            if type(checked_value) is Refusal:
                raise error(_complaint(type(options).__name__, name, rule, value, checked_value))
            object.__setattr__(options, name, checked_value)  # the dataclass may be frozen


def with_checked(options: T, **values: Any) -> T:
    """Return a dataclass with other values of some fields, which were checked where they come from: nothing is checked again.

    ``dataclasses.replace`` checks every field anew, which a search that does so hundreds of times would notice.
    """
    copy: T = object.__new__(type(options))
    names = _field_names(cast(Any, type(options)))
    vars(copy).update({name: value for name, value in vars(options).items() if name in names}, **values)
    return copy


def check_options(what: str, **values: tuple[object, Any]) -> None:
    """Check ``name=(value, type)``, for values that are in no signature of their own.

    Raises:
        OptionError: names the first that is of another type, and what it should be.
    """
    for name, (value, wanted) in values.items():
        rule = rule_of(wanted)
        checked_value = rule.take(value)
        if type(checked_value) is Refusal:
            raise OptionError(_complaint(what, name, rule, value, checked_value))


class _Parameters:
    """The rules of a function's parameters, made at its first call."""

    def __init__(self, function: Callable[..., Any], error: type[HfsdkError]) -> None:
        self._function = function
        self._error = error
        self._positional: list[tuple[str, Rule]] = []
        self._named: dict[str, Rule] = {}
        self._rest: tuple[str, Rule] | None = None
        self._others = ANYTHING
        self._any_name = False
        hints = _hints(function.__annotations__, function.__globals__)
        for name, parameter in inspect.signature(function).parameters.items():
            rule = rule_of(hints.get(name, Any))
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = (name, rule)
            elif parameter.kind is parameter.VAR_KEYWORD:
                self._others, self._any_name = rule, True
            else:
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    self._positional.append((name, rule))
                if parameter.kind is not parameter.POSITIONAL_ONLY:
                    self._named[name] = rule

    def of_positional(self, args: tuple[Any, ...]) -> Sequence[Any]:
        """Return positional arguments as they are taken; refuse too many of them."""
        rules: Iterable[tuple[str, Rule]] = self._positional
        if len(args) > len(self._positional):
            if self._rest is None:
                raise self._error(self._too_many(args))
            rules = itertools.chain(rules, itertools.repeat(self._rest))
        checked_args: Sequence[Any] = args
        for i, (value, (name, rule)) in enumerate(zip(args, rules, strict=False)):
            checked_value = rule.take(value)
            if checked_value is not value:
                if type(checked_value) is Refusal:
                    raise self._error(_complaint(self._what(args), name, rule, value, checked_value))
                checked_args = [*checked_args[:i], checked_value, *checked_args[i + 1 :]]
        return checked_args

    def of_named(self, kwargs: dict[str, Any], args: tuple[Any, ...]) -> dict[str, Any]:
        """Return named arguments as they are taken; refuse unknown names."""
        for name, value in kwargs.items():
            rule = self._named.get(name, self._others)
            if name not in self._named and not self._any_name:
                raise self._error(unknown_name(self._what(args), name, self._names(), ARGUMENTS, ELSEWHERE, "argument"))
            checked_value = rule.take(value)
            if checked_value is not value:
                if type(checked_value) is Refusal:
                    raise self._error(_complaint(self._what(args), name, rule, value, checked_value))
                kwargs[name] = checked_value
        return kwargs

    def _names(self) -> list[str]:
        return [name for name in self._named if name not in ("self", "cls", "parts")]

    def _too_many(self, args: tuple[Any, ...]) -> str:
        by_place = [name for name, _ in self._positional]
        names = [name for name in self._names() if name not in by_place]
        shift = len(by_place) - len([name for name in by_place if name in self._names()])
        most, count = len(by_place) - shift, len(args) - shift
        by_name = f"; give the others by name: {', '.join(f'{name}=...' for name in names)}" if names else ""
        return f"{self._what(args)} takes {most} argument{'s' * (most != 1)} by their place, and got {count}{by_name}"

    def _what(self, args: tuple[Any, ...]) -> str:
        """Name the function as a user calls it: by the class of its object, or by the facade that passed the call on."""
        owner, _, name = self._function.__qualname__.rpartition("<locals>.")[2].rpartition(".")
        if owner and args:
            cls = args[0] if isinstance(args[0], type) else type(args[0])
            owner = cls.__name__ if owner in [base.__name__ for base in cls.__mro__] else owner
        return f"{owner}.{name}".removesuffix(".__init__") if owner else name


def _complaint(what: str, name: str, rule: Rule, value: object, refused: Refusal) -> str:
    actual = f"{name}{refused.at}={shown(refused.value if refused.at else value)}"
    return f"{what + ': ' if what else ''}{name} must be {refused.wanted or rule.one}; got {actual}"


# -- reading annotations


class _Late(type):
    """A stand-in for a class that is imported for type checkers alone: its instances are known by their class's name."""

    def __instancecheck__(cls, value: object) -> bool:
        return any(base.__name__ == cls.__name__ for base in type(value).__mro__)

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Late(name, (), {})  # of a module: pd.DataFrame

    def __getitem__(cls, _: object) -> type:
        return cls


class _Names(dict[str, Any]):
    """The names of a module as its annotations see them."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        ours = [vars(module) for title, module in list(sys.modules.items()) if title.startswith("hfsdk.")]
        return next((names[name] for names in ours if name in names), _Late(name, (), {}))


def _hints(annotations: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return annotations, which are texts, as types."""
    local_names, around = (
        _Names(names),
        {"__builtins__": {"__import__": __import__}},
    )  # Python 3.12 imports typing when NDArray[...] is made
    return {
        name: eval(text, around, local_names) if isinstance(text, str) else text
        for name, text in annotations.items()
        if name != "return"
    }


@cache
def _field_rules(kind: type) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    names = {field.name for field in dataclasses.fields(kind)}
    for base in reversed(kind.__mro__):
        own = {name: text for name, text in vars(base).get("__annotations__", {}).items() if name in names}
        rules |= {name: rule_of(hint) for name, hint in _hints(own, vars(sys.modules[base.__module__])).items()}
    return {name: rule for name, rule in rules.items() if rule is not ANYTHING}
