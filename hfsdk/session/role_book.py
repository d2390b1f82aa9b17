"""The roles of a session: ``RoleBook`` keeps the handles, ``Models`` shows them to algorithms."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError, PlacementError
from hfsdk.core.hints import CompletableProperty, PublicNames
from hfsdk.core.roles import DECLARED_BY, AdamW, RoleSpec, RolloutOptions
from hfsdk.core.spec import ModelSpec
from hfsdk.models import ActorModel, CostModel, CriticModel, ModelHandle, ReferenceModel, RewardModel
from hfsdk.models.handle import set_role
from hfsdk.models.reward import RewardSum

H = TypeVar("H", bound=ModelHandle)

KINDS: Mapping[str, type[ModelHandle]] = {
    cls.__name__: cls for cls in (ActorModel, CriticModel, ReferenceModel, RewardModel, CostModel, RewardSum)
}
"""The handles' classes by name."""

NAME = re.compile(r"\w[\w.+-]*")


def opened(role: RoleSpec) -> RoleSpec:
    """Return the role without facts that no comparison needs: a function's source, and the seed, which is the session's.

    ``session.load`` changes the latter, and must not make another role of each that is declared again afterwards.
    """
    return replace(role, seed=0, function=None if role.function is None else replace(role.function, source=""))


class RoleBook:
    """The handles by name; declaring the same again gives the same handle."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._handles: dict[str, ModelHandle] = {}
        self._declared: dict[str, RoleSpec] = {}
        self._gone: weakref.WeakKeyDictionary[ModelHandle, str] = weakref.WeakKeyDictionary()
        """The end of every handle that is not in use any more: a text that says what became of it."""
        self._notice = notice

    def take(self, cls: type[H], role: RoleSpec, make: Callable[[], H]) -> tuple[H, bool]:
        """Return (handle, whether the role is new or changed).

        Raises:
            OptionError: the role's name is none.
        """
        if not NAME.fullmatch(role.name):
            raise OptionError(
                "a role's name has letters, digits, '_', '.', '+' and '-' alone, because placements list names and saves have a "
                f"folder of each name; got name={shown(role.name)}"
            )
        old, before = self._handles.get(role.name), self._declared.get(role.name)
        if type(old) is cls and before is not None:
            if opened(before) == opened(role):
                return old, False
            # a function has no weights to lose: the handle goes on with the new version
            if before.function is not None and role.function is not None:
                version = f"{role.function.name}@{role.function.version}"
                self._notice(f"{role.name} goes on with {version}; what it scored before stays as it is")
                set_role(old, role)
                self._declared[role.name] = role
                return old, True
        if old is not None and before is not None:
            self._gone[old] = f"was replaced by {'an' if role.kind == 'actor' else 'a'} {role.kind} with other arguments"
            lost = "; updates of the old one are gone" if before.trainable else ""
            self._notice(f"{role.name} is replaced: {_changes(before, role)}{lost}")
        handle = make()
        self._handles[role.name], self._declared[role.name] = handle, role
        return handle, True

    def replaces(self, cls: type[H], role: RoleSpec) -> bool:
        """Return whether :meth:`take` would give this role another handle, and its weights up."""
        old, before = self._handles.get(role.name), self._declared.get(role.name)
        return before is not None and not (type(old) is cls and opened(before) == opened(role))

    def check_untrained(self, role: RoleSpec) -> None:
        """Refuse to replace a role that has learned something.

        Raises:
            OptionError: says how much, and how to keep it.
        """
        old, before, name = self._handles[role.name], self._declared[role.name], role.name
        if updates := old.version:
            had = f"{updates:,} update{'s' * (updates != 1)}"
            raise OptionError(
                f"{name} has had {had}, which are lost if it is declared otherwise ({_changes(before, role)}). To go on with it, "
                "use its handle, or the same arguments; to start from its weights, write them with "
                f"save_pretrained(folder) and give that folder as the model; to have both, pass name='{name}2'; to drop what it "
                "has learned, pass replace=True."
            )

    def remove(self, handle: ModelHandle) -> None:
        """Forget a handle's role."""
        self.check(handle)
        del self._handles[handle.name], self._declared[handle.name]
        self._gone[handle] = "was released"

    def put(self, handle: ModelHandle, role: RoleSpec) -> None:
        """Add a role as another process has declared it."""
        old = self._handles.get(role.name)
        if old is not None and old is not handle:
            self._gone[old] = "was replaced in another process of this session"
        self._handles[role.name], self._declared[role.name] = handle, role

    def drop(self, name: str) -> None:
        """Forget a role that another process has released."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            del self._declared[name]
            self._gone[handle] = "was released in another process of this session"

    def check(self, handle: ModelHandle) -> None:
        """Refuse a handle that is not in use any more.

        Raises:
            OptionError: says why, and how to get one.
        """
        if self._handles.get(handle.name) is not handle:
            why = self._gone.get(handle, "belongs to another session")
            raise OptionError(f"this handle of {handle.name!r} {why}; declare it again, e.g. {DECLARED_BY.get(handle.kind, '')}")

    def declared(self, handle: ModelHandle) -> RoleSpec:
        """Return a handle's role as the user declared it, its layouts perhaps open."""
        return self._declared[handle.name] if self._handles.get(handle.name) is handle else handle.role

    def find(self, name: str) -> ModelHandle:
        """Return a handle by name.

        Raises:
            PlacementError: there is none.
        """
        if name not in self._handles:
            raise PlacementError(f"no role {shown(name)}; the session has {', '.join(self._handles) or 'none'}")
        return self._handles[name]

    @property
    def models(self) -> list[ModelHandle]:
        """The handles that are models, in the order of declaration."""
        return [h for h in self._handles.values() if h.role.function is None]

    @property
    def functions(self) -> list[ModelHandle]:
        """The handles that are functions."""
        return [h for h in self._handles.values() if h.role.function is not None]

    def __iter__(self) -> Iterator[ModelHandle]:
        return iter(self._handles.values())

    def __contains__(self, name: object) -> bool:
        return name in self._handles


class Models(PublicNames):
    """The session's handles by kind, as algorithms take them: ``models.actor``, ``models.critic``, ..."""

    def __init__(self, book: RoleBook) -> None:
        self._book = book

    @CompletableProperty
    def actor(self) -> ActorModel:
        """The policy."""
        return self._of(ActorModel)

    @CompletableProperty
    def critic(self) -> CriticModel:
        """The value function."""
        return self._of(CriticModel)

    @CompletableProperty
    def cost_critic(self) -> CriticModel:
        """The value function of costs (Safe-RLHF), by this name."""
        critic = self._book.find("cost_critic") if "cost_critic" in self._book else None
        if not isinstance(critic, CriticModel):
            has = ", ".join(h.name for h in self._book) or "no role"
            raise PlacementError(
                f"the session has {has}; the algorithm needs a cost_critic: call {DECLARED_BY['cost_critic']} first"
            )
        return critic

    @CompletableProperty
    def reference(self) -> ReferenceModel:
        """The frozen policy."""
        return self._of(ReferenceModel)

    @CompletableProperty
    def reward(self) -> RewardModel:
        """The model that scores responses."""
        return self._of(RewardModel)

    @CompletableProperty
    def cost(self) -> CostModel:
        """The model whose score is kept below a limit."""
        return self._of(CostModel)

    def _of(self, cls: type[H]) -> H:
        handles = [h for h in self._book if isinstance(h, cls)]
        named = [h for h in handles if h.name == cls.kind]
        if not named and len(handles) != 1:
            has = ", ".join(h.name for h in self._book) or "no role"
            many = f", and of its {len(handles)} {cls.kind} roles none is named {cls.kind!r}" if handles else ""
            needed = f"{'an' if cls.kind == 'actor' else 'a'} {cls.kind}: call {DECLARED_BY[cls.kind]} first"
            raise PlacementError(f"the session has {has}{many}; the algorithm needs {needed}")
        return (named or handles)[0]

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name.startswith("_") or self._has(name)]

    def _has(self, role: str) -> bool:
        try:
            return getattr(self, role) is not None
        except PlacementError:
            return False

    def __repr__(self) -> str:
        return f"Models({', '.join(h.name for h in self._book) or 'no roles yet'})"


def _changes(before: RoleSpec, after: RoleSpec) -> str:
    """Name the fields in which two declarations differ."""
    names = {"folder": "model", "train": "layout"}
    changes: list[str] = []
    compared = (
        "kind", "folder", "model", "train", "rollout", "dtype", "optimizer", "rollout_options", "micro_batch_tokens", "recompute",
        "offload",
    )  # fmt: skip
    for field in compared:
        old, new = getattr(before, field), getattr(after, field)
        if old != new and names.get(field, field) not in [f.split(" ")[0] for f in changes]:
            changes.append(f"{names.get(field, field)} {change_of(old, new)}")
    return ", ".join(changes) or "other arguments"


def change_of(old: Any, new: Any) -> str:
    """Say how an argument of a role was and is; of options those that differ."""
    if isinstance(old, AdamW | RolloutOptions | ModelSpec) and type(old) is type(new):
        parts = [f.name for f in fields(old) if getattr(old, f.name) != getattr(new, f.name)]
        parts = ["name"] if "name" in parts else parts  # of another model the name says it
        old, new = (", ".join(_option(part, getattr(side, part)) for part in parts) for side in (old, new))
    return f"{_short(old)} -> {_short(new)}"


def _option(name: str, value: object) -> str:
    return f"{name}=suggested" if (name, value) == ("lr", None) else f"{name}={value!r}"


def _short(value: object) -> str:
    text = str(value) or "none"
    if Path(text).is_absolute():
        return Path(text).name
    return text if len(text) < 60 else text[:57] + "..."


class KnownRole(NamedTuple):
    """A role as a session has it."""

    kind: str
    """The class of its handle."""
    declared: RoleSpec
    live: RoleSpec
    parts: tuple[str, ...] = ()
    """The names of a weighted sum's parts."""
    weights: tuple[float, ...] = ()


def known_role(handle: ModelHandle, declared: RoleSpec) -> KnownRole:
    """Return a role as another process can know it."""
    if isinstance(handle, RewardSum):
        return KnownRole(type(handle).__name__, declared, handle.role, tuple(p.name for p in handle.parts), handle.weights)
    return KnownRole(type(handle).__name__, declared, handle.role)


def sum_as_known(handle: ModelHandle, role: KnownRole, book: RoleBook) -> None:
    """Give the handle of a weighted sum its parts, as far as they are here."""
    if isinstance(handle, RewardSum):
        parts = [book.find(part) for part in role.parts if part in book]
        handle.parts, handle.weights = tuple(part for part in parts if isinstance(part, RewardModel)), role.weights
