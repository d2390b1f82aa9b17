"""What Tab offers after an object's dot: `Offering` leaves out what nobody types, `Computed` are attributes that Tab may look into.

A property may do anything, so that IPython computes none for Tab, and ``session.models.`` would offer nothing. What stands below
``@Computed`` waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, overload

S = TypeVar("S")
T = TypeVar("T")


class Offering:
    """Base of classes some of whose public names are for the rest of hfsdk alone."""

    _inner: ClassVar[tuple[str, ...]] = ()
    """These names."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in type(self)._inner]


class Computed(Generic[S, T]):
    """A read-only attribute of a class, like a property."""

    def __init__(self, function: Callable[[S], T]) -> None:
        self.fget = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: S, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.fget(instance)

    def __set__(self, instance: S, value: object) -> NoReturn:
        raise AttributeError(f"{type(instance).__name__}.{self._name} is read only")
