"""Where roles live: declaring, placing and releasing them, as part of a session."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.core.alternative import Alternative
from hfsdk.core.checks import checked
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import PlacementError
from hfsdk.core.placement import Placement
from hfsdk.core.plan import Plan
from hfsdk.core.roles import RoleSpec
from hfsdk.engine.calls import messages as m
from hfsdk.models import ModelHandle
from hfsdk.models.reward import SCORER_NUMBERS
from hfsdk.planner.notices import costly
from hfsdk.planner.perf.memory import check_fits
from hfsdk.resharding.boxes import SCALAR_HEAD_NAMES
from hfsdk.session.client import ControllerClient, uninterrupted
from hfsdk.session.declarations import Declarations, H
from hfsdk.session.declare import Ground, placed, planned, weight_names, with_layouts
from hfsdk.session.folder_lock import Turns
from hfsdk.session.roles import Models, RoleBook
from hfsdk.session.tokenizer import FolderTokenizer, StandInTokenizer
from hfsdk.session.views import LivePlacement

if TYPE_CHECKING:
    from hfsdk.session.checkpoint import Saving

Wish = str | Mapping[str, float] | Placement | Plan | Alternative
"""What ``place`` takes."""


class Placing(Declarations):
    """The part of a session that knows its roles and puts them on devices."""

    name: str
    cluster: ClusterSpec
    messages: list[str]

    def _begin(self, client: ControllerClient, kind: str) -> None:
        self._client = client
        self._kind = kind
        self._book = RoleBook(self.notice)
        self._wish: Wish = "colocate"
        self._placement: Placement | None = None
        self._specs: dict[str, RoleSpec] = {}
        """Roles as they were placed, shadows included."""
        self._before: dict[str, Any] | None = None
        """The placement's picture data before the last move."""
        self._loaded: set[str] = set()
        self._counters: dict[str, float] = {}
        """Counters and other numbers that belong to the session's state, by name."""
        self._saving: Saving | None = None
        self.save_turns = Turns()
        """Of the threads that save this session."""

    def notice(self, text: str) -> None:
        """Keep a notice for the session's picture, and warn."""
        self.messages.append(text)
        warnings.warn(text, UserWarning, stacklevel=2)

    @property
    def simulated_time(self) -> bool:
        """Whether seconds are those of a virtual clock."""
        return self._kind == "simulated"

    # -- roles

    @property
    def _ground(self) -> Ground:
        return Ground(self.cluster, simulated=self._kind == "simulated")

    @property
    def tokenizer_folder(self) -> str:
        """The model folder whose tokenizer the session uses, or ``""``."""
        tokenizer = self._client.tokenizer
        return str(tokenizer.folder) if isinstance(tokenizer, FolderTokenizer) else ""

    def _declare(self, cls: type[H], role: RoleSpec) -> H:
        self._client.check_open()
        if role.folder and not self._ground.simulated:
            weight_names(role.folder)  # damage is told before anything is changed, and before a worker opens the files
        if role.name in self._loaded and self._book.replaces(cls, role):
            self._settle_save()
            self._client.drain(role.name)
        with uninterrupted():  # the book and the controller go over together
            return self._exchange(cls, role)

    def _exchange(self, cls: type[H], role: RoleSpec) -> H:
        handle, changed = self._book.take(cls, role, lambda: cls(self, role))
        if not changed:
            return handle
        if role.function is not None:
            self._client.send(m.Declare(role))
            return handle
        if role.name in self._loaded:  # the one of before goes with all it learned; only placing moves a role
            self._client.send(m.Remove(role.name))
        self._loaded.discard(role.name)
        self._forget_numbers(role.name)
        scorer = role.kind in ("reward", "cost") and not role.trainable
        if scorer and not self._ground.simulated and not weight_names(role.folder) & set(SCALAR_HEAD_NAMES):
            self.notice(
                f"{role.name}: {role.model} has no trained scalar head ({' or '.join(SCALAR_HEAD_NAMES)} in {role.folder}), so it "
                "scores with a random one. Give a reward model, a function, or optimizer=hf.AdamW(...) to train it here."
            )
        self._specs.pop(role.name, None)
        if role.kind == "actor" or self._client.tokenizer is None:
            self._set_tokenizer(role)
        return handle

    def _declared(self, handle: ModelHandle) -> RoleSpec:
        return self._book.declared(handle)

    def _set_tokenizer(self, role: RoleSpec) -> None:
        assert role.model is not None
        has_texts = role.folder and (Path(role.folder) / "tokenizer.json").is_file()
        if has_texts or not self._ground.simulated:
            self._client.use_tokenizer(role.folder)
        else:
            self._client.use_tokenizer(StandInTokenizer(role.model.vocab_size))

    @property
    def models(self) -> Models:
        """The handles as algorithms take them: ``session.models.actor`` and so on."""
        return Models(self._book)

    @property
    def client(self) -> ControllerClient:
        """Who calls are sent through."""
        return self._client

    def ready(self, handle: ModelHandle) -> None:
        """Place and load the handle's role where that has not happened; handles call it before every call."""
        self._client.check_open()
        self._book.check(handle)
        if handle.role.function is None and handle.name not in self._loaded:
            self.place(self._wish)

    def _settle_save(self) -> None:
        """Wait until a save in the background is over: it needs its roles and their workers."""
        if self._saving is not None:
            self._saving.settle()

    def release(self, handle: ModelHandle) -> None:
        """Free the handle's role and forget it."""
        self._settle_save()
        self._client.drain(handle.name)
        loaded = handle.name in self._loaded or handle.role.function is not None
        with uninterrupted():  # the book and the controller go over together
            self._book.remove(handle)
            self._forget_numbers(handle.name)
            self._loaded.discard(handle.name)
            self._specs = {n: spec for n, spec in self._specs.items() if handle.name not in (n, spec.shadow_of)}
            if loaded:
                self._client.send(m.Remove(handle.name))

    def next_count(self, name: str) -> int:
        """Count up and return a named counter that is saved with the session, starting at 0."""
        self._counters[name] = count = int(self._counters.get(name, -1)) + 1
        return count

    def number(self, name: str) -> float | None:
        """Return a named number that is saved with the session; ``None`` where nobody has set it."""
        return self._counters.get(name)

    def set_number(self, name: str, value: float) -> None:
        """Set such a number."""
        self._counters[name] = float(value)

    def _forget_numbers(self, role: str) -> None:
        for name in SCORER_NUMBERS:
            self._counters.pop(f"{role}.{name}", None)

    def counts(self) -> dict[str, float]:
        """Return the named counters and numbers as they are."""
        return dict(self._counters)

    def recount(self, counts: Mapping[str, float]) -> None:
        """Set the named counters and numbers back."""
        self._counters = dict(counts)

    # -- placement

    @checked
    def place(self, what: Wish = "colocate", *, fresh: bool = False) -> LivePlacement:
        """Put the declared models on devices and load them; waits.

        On live models: what runs is finished first; roles whose devices, layouts or (on GPUs) share of the memory for generating
        change move with their weights and optimizer state, bit for bit; the others are left alone. Handles stay valid and batches
        readable. An interrupt while it waits for what runs leaves all as it was; one after that is heard once roles are on their
        way, and they are loaded in the background.

        Args:
            what: a preset (``"colocate"``, ``"split"``, ``"standalone"``, ``"flattening"``, ``"separation"``; see
                :meth:`hfsdk.Placement.of`), ``{"actor reference": 2, "critic": 2}``, a :class:`hfsdk.Placement`, or a plan or one
                of its runners-up, which also set the layouts that were left open.
            fresh: whether models whose place or layout changes start again from their initial weights.

        Returns:
            Who lives where, with memory; it draws itself, after a move with what was before.

        Raises:
            PlacementError: it does not fit the roles or devices.
            DeviceMemoryError: the models would not fit into memory; nothing was loaded.
            WorkerDiedError: a worker ended meanwhile. The placement is the new one all the same; the message says what each role
                comes back with at the next call (the newest of snapshot, checkpoint and initial weights) and the updates lost.
        """
        self._client.check_open()
        handles = self._book.models
        if not handles:
            raise PlacementError("there is no model to place yet; declare some first, e.g. session.actor('tiny')")
        declared = [self._book.declared(h) for h in handles]
        if isinstance(what, Plan):
            declared = planned(what, declared, self.cluster)
            wanted: str | Mapping[str, float] | Placement = what.placement
        elif isinstance(what, Alternative):
            declared, wanted = with_layouts(what.layouts, declared), what.placement
        else:
            wanted = _without(what, {h.name for h in self._book.functions})
        placement = Placement.of(wanted, [h.name for h in handles], self.cluster.num_devices)
        roles = placed(declared, placement, self.cluster)
        check_fits(roles, placement, self.cluster)
        for words in costly(roles, placement, self.cluster):
            if words not in self.messages:
                self.notice(words)
        self._settle_save()
        self._client.drain()
        moves = self._placement is not None and placement != self._placement
        before = {**self.placement.view(), "before": None} if moves else self._before
        with uninterrupted():  # the controller and the handles go over together; loading then goes on by itself
            self._client.send(m.Place(placement, tuple(roles), fresh, wait=False))
            self._wish, self._placement, self._before = what, placement, before
            named = self._specs = {role.name: role for role in roles}
            for handle in handles:
                shadow = named.get(f"{handle.name}.rollout")
                role = named[handle.name]
                if shadow:  # ranks of two pools
                    role = replace(
                        role, rollout=shadow.rollout, rollout_options=shadow.rollout_options, generated_by=shadow.name,
                        nodes=role.nodes + shadow.nodes,
                    )  # fmt: skip
                handle.settle(role)
                self._loaded.add(handle.name)
        self._client.send(m.AwaitLoads())
        return self.placement

    @property
    def placement(self) -> LivePlacement:
        """Who lives where, with memory; drawn live while calls run."""
        return LivePlacement(
            self._client, self._book, self._placement, self._specs, self.cluster, self.name, self.simulated_time, self._before
        )


def _without(what: str | Mapping[str, float] | Placement, functions: set[str]) -> str | Mapping[str, float] | Placement:
    """Take functions out of a placement by names: they run in CPU tasks and need no device."""
    if not isinstance(what, Mapping):
        return what
    kept = {" ".join(n for n in names.split() if n not in functions): count for names, count in what.items()}
    return {names: count for names, count in kept.items() if names}
