"""``Deployment``: the declared roles and their placement; placing, moving and releasing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import ModelNotFoundError, PlacementError, UnsupportedModelError
from hfsdk.core.generation_config import not_applied
from hfsdk.core.lora import AdapterSpec
from hfsdk.core.placement import Placement
from hfsdk.core.plan import Alternative, Plan
from hfsdk.core.roles import RoleSpec
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.spec import SCALAR_HEAD_NAMES
from hfsdk.core.tokenizer_files import TOKENIZER
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.core.untrusted import has_file
from hfsdk.core.weight_files import ADAPTER_WEIGHTS, WeightFiles, weight_names
from hfsdk.core.whole_folders import check_adapter_weights, check_model_weights, check_no_adapters, own_template
from hfsdk.engine.calls import messages as m
from hfsdk.models import ModelHandle
from hfsdk.models.counters import Counters
from hfsdk.models.handle import set_role
from hfsdk.models.normalisation import saved_normalisation
from hfsdk.models.reward import SCORER_NUMBERS
from hfsdk.planner.notices import costly
from hfsdk.planner.perf.memory import check_fits
from hfsdk.session.client import ControllerClient, uninterrupted
from hfsdk.session.context import MEASURE, SCORE, START, STEP, Context, PendingSave
from hfsdk.session.role_book import H, Models, RoleBook
from hfsdk.session.role_specs import placed, planned, with_layouts
from hfsdk.session.tokenizer import StandInTokenizer, stand_in
from hfsdk.session.views import LivePlacement

Asked = str | Mapping[str, float] | Placement | Plan | Alternative
"""The forms in which ``place`` takes a placement."""


class Deployment:
    """The declared roles, and the devices on which they live.

    Attributes:
        book: the roles' handles.
        placement: the roles on their devices; ``None`` before that.
        specs: roles as they were placed, shadows included, by name.
        asked: the last argument of ``place``.
        loaded: names of the roles that are, or are being, loaded.
        absent: numbers of the nodes that the placement goes without, since they have left the cluster (:mod:`shrinking`).
        host: the part of the session that handles see.
    """

    def __init__(self, context: Context, save: PendingSave) -> None:
        self.book = RoleBook(context.notice)
        self.placement: Placement | None = None
        self.specs: dict[str, RoleSpec] = {}
        self._context, self._client, self._save = context, context.client, save
        self.host = HandleHost(context, self)
        self.asked: Asked = "colocate"
        self._before: dict[str, Any] | None = None
        """The placement's picture data before the last move."""
        self.loaded: set[str] = set()
        self.absent: frozenset[int] = frozenset()

    # -- roles

    def take_known(self, cls: type[ModelHandle], declared: RoleSpec) -> ModelHandle:
        """Return the handle of a role that another process of this session has declared: the one there is, or a new one."""
        old = self.book.find(declared.name) if declared.name in self.book else None
        same = old is not None and type(old) is cls and self.book.declared(old).folder == declared.folder
        handle = old if same and old is not None else cls(self.host, declared)
        self.book.put(handle, declared)
        if declared.model is not None and (declared.kind == "actor" or self._client.tokenizer is None):
            self._set_tokenizer(declared)
        return handle

    def declare(self, cls: type[H], role: RoleSpec, *, replace: bool = False) -> H:
        """Return the handle of a role: the one there is, or a new one in its place.

        Raises:
            OptionError: the one there is was trained, and may not be replaced.
        """
        self._client.check_open()
        notes = list[str]()
        if role.folder and not self._context.simulated:
            try:
                notes = _check_folders(role)  # damage is told before anything is changed, and before a worker opens the files
            except (ModelNotFoundError, UnsupportedModelError) as error:
                raise type(error)(f"{role.name}: {error}") from None
        if role.name in self.loaded and self.book.replaces(cls, role):
            self._save.settle()
            self._client.drain(role.name)
            if not replace:
                self.book.check_untrained(role)
        with uninterrupted():  # the book and the controller go over together
            return self._exchange(cls, role, notes)

    def _exchange(self, cls: type[H], role: RoleSpec, notes: Sequence[str]) -> H:
        handle, changed = self.book.take(cls, role, lambda: cls(self.host, role))
        if not changed:
            return handle
        if role.function is not None:
            self._client.send(m.Declare(role))
            return handle
        if role.name in self.loaded:  # the one of before goes with all it learned; only placing moves a role
            self._client.send(m.Remove(role.name))
        self.loaded.discard(role.name)
        self._forget_numbers(role.name)
        if role.kind == "actor":  # what the one before reached is not the best of this one
            self._context.counters.forget((SCORE, STEP, START, MEASURE))
        scorer = role.kind in ("reward", "cost") and not role.trainable
        if scorer and not self._context.simulated and not _has_head(role):
            self._context.notice(
                f"{role.name}: {role.model} has no trained scalar head ({' or '.join(SCALAR_HEAD_NAMES)} in {role.folder}), so it "
                "scores with a random one. Give a reward model, a function, or optimizer=hf.AdamW(...) to train it here."
            )
        for note in notes:
            self._context.notice(f"{role.name}: {note}")
        self.specs.pop(role.name, None)
        if role.kind == "actor" or self._client.tokenizer is None:
            self._set_tokenizer(role)
        return handle

    def _set_tokenizer(self, role: RoleSpec) -> None:
        assert role.model is not None
        # the folder is on the cluster's disk, not on this machine's
        if self._context.far is not None:
            self._client.use_tokenizer(self._context.far.tokenizer(role.folder))
            return
        has_texts = role.folder and has_file(role.folder, TOKENIZER)
        if not self._context.simulated or (has_texts and find_spec("tokenizers") is not None):
            self._client.use_tokenizer(role.folder)
            return
        chosen = stand_in(role.model.vocab_size)
        self._client.use_tokenizer(chosen)
        if has_texts and isinstance(chosen, StandInTokenizer):
            self._context.notice(
                f"{role.name}: the package tokenizers is not installed, so a text of this simulation counts as one token for every "
                "four characters; pip install tokenizers"
            )

    @property
    def models(self) -> Models:
        """The handles as algorithms take them: ``session.models.actor`` and so on."""
        return Models(self.book)

    def ready(self, handle: ModelHandle) -> None:
        """Place and load the handle's role where that has not happened; handles call it before every call."""
        self._client.check_open()
        self.book.check(handle)
        if handle.role.function is None and handle.name not in self.loaded:
            self._place(self.asked, needed=handle.name)

    def release(self, handle: ModelHandle) -> None:
        """Free the handle's role and forget it."""
        self._save.settle()
        self._client.drain(handle.name)
        loaded = handle.name in self.loaded or handle.role.function is not None
        with uninterrupted():  # the book and the controller go over together
            self.book.remove(handle)
            self._forget_numbers(handle.name)
            self.loaded.discard(handle.name)
            self.specs = {n: spec for n, spec in self.specs.items() if handle.name not in (n, spec.shadow_of)}
            if loaded:
                self._client.send(m.Remove(handle.name))

    def _forget_numbers(self, role: str) -> None:
        self._context.counters.forget([f"{role}.{name}" for name in SCORER_NUMBERS])

    # -- placement

    def place(self, what: Asked = "colocate", *, fresh: bool = False) -> LivePlacement:
        """Carry out ``session.place``; its text says what the arguments are."""
        self._place(what, fresh=fresh)
        return self.live()

    def _place(self, what: Asked, *, fresh: bool = False, needed: str = "") -> None:
        """Put the models on devices, and raise why a role is not loaded: the role ``needed`` for a call, or any."""
        self._client.check_open()
        handles = self.book.models
        if not handles:
            raise PlacementError("there is no model to place yet; declare some first, e.g. session.actor('tiny')")
        declared = [self.book.declared(h) for h in handles]
        if isinstance(what, Plan):
            declared = planned(what, declared, self._context.cluster)
            wanted: str | Mapping[str, float] | Placement = what.placement
        elif isinstance(what, Alternative):
            declared, wanted = with_layouts(what.layouts, declared), what.placement
        else:
            wanted = _without(what, {h.name for h in self.book.functions})
        placement = Placement.of(wanted, [h.name for h in handles], self._context.cluster.num_devices)
        self.place_as(placement, declared, fresh=fresh, requested=what, needed=needed)

    def place_as(
        self,
        placement: Placement,
        declared: Sequence[RoleSpec],
        *,
        fresh: bool,
        requested: Asked | None = None,
        absent: frozenset[int] = frozenset(),
        needed: str = "",
    ) -> None:
        """Put the roles on devices as :meth:`place` does, in layouts that may be others than they were declared with.

        Args:
            placement: the roles on their devices.
            declared: the roles with these layouts.
            fresh: the same as in :meth:`place`.
            requested: the argument of ``place``; by default the one before stays.
            absent: numbers of the nodes that this goes without.
            needed: the role whose failure to load is raised; "" for every one's.

        Raises: as :meth:`place`.
        """
        handles = self.book.models
        roles = placed(declared, placement, self._context.cluster)
        check_fits(roles, placement, self._context.cluster)
        for words in costly(roles, placement, self._context.cluster):
            if words not in self._context.messages:
                self._context.notice(words)
        self._save.settle()
        self._client.drain()
        moves = self.placement is not None and placement != self.placement
        before = {**self.live().view(), "before": None} if moves else self._before
        with uninterrupted():  # the controller and the handles go over together; loading then goes on by itself
            self._client.send(m.PlaceRoles(placement, tuple(roles), fresh, wait=False))
            self.asked, self.placement, self._before = self.asked if requested is None else requested, placement, before
            self.absent = absent
            named = self.specs = {role.name: role for role in roles}
            for handle in handles:
                shadow = named.get(f"{handle.name}.rollout")
                role = named[handle.name]
                if shadow:  # ranks of two pools
                    role = replace(
                        role, rollout=shadow.rollout, rollout_options=shadow.rollout_options, generated_by=shadow.name,
                        nodes=role.nodes + shadow.nodes,
                    )  # fmt: skip
                set_role(handle, role)
                self.loaded.add(handle.name)
        self._client.send(m.AwaitLoads(needed))

    def live(self) -> LivePlacement:
        """The roles on their devices, with memory; drawn live while calls run."""
        context = self._context
        return LivePlacement(
            self._client, self.book, self.placement, self.specs, context.cluster, context.name, context.simulated, self._before
        )


@dataclass(frozen=True, eq=False)
class HandleHost:
    """The part of a session that handles see: :class:`hfsdk.models.handle.Host`."""

    _context: Context
    _deployment: Deployment

    @property
    def client(self) -> ControllerClient:
        """The client that calls are sent through."""
        return self._context.client

    @property
    def seed(self) -> int:
        """The session's seed, which calls without one of their own use."""
        return self._context.seed

    @property
    def simulated(self) -> bool:
        """Whether seconds are those of a virtual clock."""
        return self._context.simulated

    @property
    def counters(self) -> Counters:
        """Numbers that are saved with the session."""
        return self._context.counters

    def ready(self, handle: ModelHandle) -> None:
        """Place and load the handle's role where that has not happened."""
        self._deployment.ready(handle)

    def release(self, handle: ModelHandle) -> None:
        """Free the handle's role and forget it."""
        self._deployment.release(handle)

    def notice(self, text: str) -> None:
        """Give the user a notice that is no failure."""
        self._context.notice(text)

    def find_snapshot(self, snapshot: Snapshot | str) -> Snapshot:
        """Return a snapshot of the session by its name, or as it is."""
        return self._context.find_snapshot(snapshot)


def _without(what: str | Mapping[str, float] | Placement, functions: set[str]) -> str | Mapping[str, float] | Placement:
    """Take functions out of a placement by names: they run in CPU tasks and need no device."""
    if not isinstance(what, Mapping):
        return what
    models = {" ".join(n for n in names.split() if n not in functions): count for names, count in what.items()}
    return {names: count for names, count in models.items() if names}


def _check_folders(role: RoleSpec) -> list[str]:
    """Read a role's folders as a worker will, but for the numbers of its weights; return notices for the user.

    Raises:
        ModelNotFoundError: a file is missing or damaged, or of another model.
    """
    assert role.model is not None
    TurnEnds.of(role.folder)
    notes, unheard = [], not_applied(role.folder) if role.rollout is not None else {}
    if unheard:
        ignored = ", ".join(f"{key}={shown(value)}" for key, value in unheard.items())
        notes.append(
            f"{role.folder}/generation_config.json asks for {ignored}, which no rollout applies: what is learned from has to be of "
            "the distribution that it was drawn from"
        )
    if role.kind in ("reward", "cost"):
        saved_normalisation(role)
    scalar = role.head == "scalar"
    with WeightFiles(role.folder) as files:
        check_model_weights(files, role.model, scalar=scalar)
    if role.adapters != role.folder:
        check_no_adapters(role.folder)
    if role.adapters:
        assert role.lora is not None
        with WeightFiles(role.adapters, ADAPTER_WEIGHTS) as files:
            check_adapter_weights(files, AdapterSpec.of(role.model, role.lora), scalar=scalar)
        if role.kind == "actor" and own_template(role.adapters, role.folder):
            notes.append(
                f"{role.adapters} has a chat template of its own, and that of {role.folder} is used: copy the files of the "
                "tokenizer into the model's folder where the adapters were trained with them"
            )
    return notes


def _has_head(role: RoleSpec) -> bool:
    """Whether there is a scalar head in a role's folder, or beside its adapters."""
    names = weight_names(role.folder) | (weight_names(role.adapters, ADAPTER_WEIGHTS) if role.adapters else set())
    return any(name in SCALAR_HEAD_NAMES or name.endswith(f".{SCALAR_HEAD_NAMES[0]}") for name in names)
