"""A role on one worker: its trainer, its rollout, and what each method does with them."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.core.arguments import (
    BASE_ALONE,
    OWN,
    Arguments,
    Folder,
    Generation,
    LogProbs,
    OneSequence,
    OnRanks,
    OwnPrimitive,
    Rescoring,
    Scoring,
    StateMove,
    ToShadow,
)
from hfsdk.core.builtin import Method
from hfsdk.core.errors import CallError, HfsdkError, NonFiniteLossError
from hfsdk.core.lora import BESIDE, SLOTS
from hfsdk.core.methods import METHODS, method_of
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Assignment, Weights
from hfsdk.core.table import Column, Table
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.training.kept_tokens import KeptTokens
from hfsdk.engine.training.loss_io import sampled_at
from hfsdk.engine.training.megatron_groups import RoleGroups, group_of
from hfsdk.engine.training.trainer import NonFiniteRows, Trainer
from hfsdk.engine.worker import rescored, user_code
from hfsdk.engine.worker.kept_share import KeptShare
from hfsdk.engine.worker.non_finite import why_refused
from hfsdk.engine.worker.rank_view import RankView
from hfsdk.engine.worker.role_host import RoleHost
from hfsdk.engine.worker.role_states import RoleStates
from hfsdk.engine.worker.shadow_weights import ShadowWeights
from hfsdk.engine.worker.transition import Transition
from hfsdk.resharding.reshard_report import TransportReport

A = TypeVar("A", bound=Arguments)

Outcome = tuple[Mapping[str, Column] | None, Any]
"""The columns that a call writes, and what it returns besides."""

Handler = Callable[["HostedRole", Table, Assignment, SafePoint], Outcome]
"""Carries out one method with this rank's rows."""


def sample_seed(seed: int, position: int, copy: int) -> int:
    """Return a sample's seed: a stable hash of (session seed, place in the prompt stream, copy number), never the rank."""
    digest = hashlib.blake2b(f"{seed}/{position}/{copy}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class HostedRole:
    """One role's engines on this worker."""

    def __init__(self, spec: RoleSpec, worker: RoleHost, state: Sequence[Any] = (), first: int | None = None) -> None:
        """Build them; collective over the pool.

        Args:
            spec: what to build.
            worker: where.
            state: its parts, packed by the ranks of the place the role comes from.
            first: the first rank of the part of the pool where the role lives; ``None`` for the whole pool.
        """
        self.spec, self.worker = spec, worker
        worker.rest()
        self.mesh = mesh_of(spec)
        self.groups = RoleGroups(self.mesh, first)
        self._trainer = Trainer(spec, self.mesh, self.groups, worker.recorder) if spec.train is not None else None
        self.rollout = self._make_rollout(spec) if spec.rollout is not None else None
        self.rollout_group = _replica_group(spec)
        self.last_transport: TransportReport | None = None
        self.transition = Transition(spec, worker, self.groups, self._trainer, self.rollout)
        self.shadow = ShadowWeights(spec, worker, self.groups, self._trainer, self.rollout)
        self._states = RoleStates(spec, worker, self.groups, self._trainer, self.transition) if self._trainer is not None else None
        if spec.restore:
            try:
                self.states.load(Folder(folder=spec.restore))
            except BaseException:
                self.close()
                raise
        if state:
            self.states.restore_parts(state)

    def _make_rollout(self, spec: RoleSpec) -> Rollout:
        assert spec.model is not None
        assert spec.rollout is not None
        setup = self.worker.setup
        rollout = Rollout(
            spec.folder, spec.model, tp=spec.rollout.tp, rank=setup.rank, world_size=setup.world_size, dtype=spec.dtype,
            options=spec.rollout_options, seed=spec.seed, job_id=setup.job_id, recorder=self.worker.recorder,
            load_weights=spec.train is None and spec.lora is not None, trained=spec.train is not None, lora=spec.lora,
            adapters=SLOTS,
        )  # fmt: skip
        rollout.rest()
        return rollout

    @property
    def trainer(self) -> Trainer:
        """The role's Megatron model.

        Raises:
            CallError: the role is a shadow that only generates.
        """
        if self._trainer is None:
            raise CallError(f"{self.spec.name} only generates; call {self.spec.shadow_of} for anything else")
        return self._trainer

    @property
    def states(self) -> RoleStates:
        """Exports and restores the role's state; raises as :attr:`trainer` does."""
        assert self.trainer is not None
        assert self._states is not None
        return self._states

    def run(self, method: str, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """Carry out one method."""
        try:
            if method_of(method).needs:
                self.transition.to_training(safe)
            with self._trainer.during(method) if self._trainer is not None else nullcontext():
                return HANDLERS[method](self, table, given, safe)
        except NonFiniteRows as bad:
            optimizer, num_updates = self.trainer.optimizer_taken, self.trainer.num_updates
            raise NonFiniteLossError(why_refused(bad.row_ids, self.spec.name, optimizer, num_updates)) from None

    # -- generation

    def _generate(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        assert self.rollout is not None
        asked = _as(given, Generation)
        try:
            self.transition.to_rollout(safe)
        finally:
            self.last_transport = self.transition.last_report or self.last_transport
        copies = table.row_ids % asked.copies
        positions = np.asarray(table["position"])
        seeds = np.array([sample_seed(asked.seed, int(p), int(c)) for p, c in zip(positions, copies, strict=True)])
        slot, version = self._adapter(asked.adapter, safe)
        columns = self.rollout.generate(
            table.ragged("prompt"), seeds.astype(np.int64), asked.sampling, self._ends, safe, self.rollout_group, table.row_ids,
            adapter=slot,
        )  # fmt: skip
        extra: dict[str, Column] = {
            "policy_version": np.full(table.num_rows, version, dtype=np.int64),
            "temperature": np.full(table.num_rows, asked.sampling.temperature, dtype=np.float32),
            "group": np.asarray(table.row_ids // asked.copies),
        }
        return {**columns, **extra}, None

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The tokens that end a response: those that learned texts end with too."""
        try:
            return FolderTokenizer(self.spec.folder).turn_ends(chats=True).ids
        except (HfsdkError, ImportError):  # without a tokenizer, or with one that cannot be read: prompts are token ids
            return TurnEnds.of(self.spec.folder).ids

    def _adapter(self, asked: int, safe: SafePoint) -> tuple[int | None, int]:
        """Return the rollout's slot with the adapters that are asked for, and the optimizer steps that they have seen."""
        if asked == OWN:
            return 0, self._num_updates_of_weights
        if asked == BASE_ALONE:
            return None, -1
        kept = self._kept(asked)
        self.transition.put_beside(asked, kept, safe)
        return BESIDE, kept.num_updates

    def _kept(self, number: int) -> KeptShare:
        """Return this rank's share of a kept state; collective over the role.

        Raises:
            CallError: on every rank, where one of them has none of this layout.
        """
        kept = self.worker.kept.get(number)
        there = kept is not None and (kept.layout, kept.share.rank) == (str(self.mesh), self.groups.rank)
        if kept is None or not all(self.groups.gather(there, bool)):
            raise CallError(
                f"{self.spec.name}'s weights of that snapshot are not on these devices in this layout: it is from before the last "
                "place, or a worker that kept them has ended. Take another snapshot, or rewind to this one where it still holds"
            )
        return kept

    @property
    def _num_updates_of_weights(self) -> int:
        return self.shadow.num_updates if self._trainer is None else self._trainer.num_updates

    def _rescore(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        self.transition.stale = True
        try:
            self.transition.to_rollout(safe)
        finally:
            self.last_transport = self.transition.last_report or self.last_transport
        return self._rescore_as_is(table, given, safe)

    def _rescore_as_is(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        assert self.rollout is not None
        num_updates = self.shadow.num_updates if self._trainer is None else self.transition.num_updates
        asked = _as(given, Rescoring)
        return rescored.log_probs(self.rollout, self.transition, num_updates, self.rollout_group, table, asked, safe)

    def _layers(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, rescored.layers(self, _as(given, OneSequence), safe)

    def _last_reshard(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.last_transport

    def _census(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.transition.census()

    def rest(self) -> None:
        """Have the rollout give up its memory, where it sleeps, until this role generates again."""
        if self.rollout is not None:
            self.rollout.rest()

    # -- passes

    def _compute_log_probs(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        asked = _as(given, LogProbs)
        kept = KeptTokens(asked.top_k, asked.top_p, self._ends if asked.without_ends else ())
        held = nullcontext() if asked.weights == OWN else self.trainer.shares.borrowed(self._kept(asked.weights).share)
        with held:
            found = self.trainer.log_probs(table, given.micro_batches, sampled_at(table), safe, asked.entropy, kept)
        return {asked.column if name == "log_probs" else name: column for name, column in found.items()}, None

    def _compute_values(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return self.trainer.values(table, given.micro_batches, safe), None

    def _score(self, table: Table, given: Assignment, safe: SafePoint, *, method: Method) -> Outcome:
        """Carry out any pass of a scoring model: what it writes follows from its declaration."""
        asked, of_scores = _as(given, Scoring), method.of_scores or np.asarray
        found = self.trainer.scores(table, given.micro_batches, safe)
        columns = [of_scores(asked.normalised(raw)).astype(np.float32) for raw in found.values()]
        return dict(zip([asked.column], columns, strict=False)), None  # empty before the last pipeline stage

    # -- learning

    def _update(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        before = self.trainer.num_updates
        try:
            loss = given.arguments.shipped.load()
            rows = self.trainer.update(table, given.mini_batches, loss, sampled_at(table), safe)
        finally:
            self.transition.stale = self.transition.stale or self.trainer.num_updates > before
        return None, rows

    def _forward_backward(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        loss = given.arguments.shipped.load()
        return None, self.trainer.forward_backward(table, given.mini_batches[0], loss, sampled_at(table), safe)

    def _compute_loss(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        loss = given.arguments.shipped.load()
        return None, self.trainer.compute_loss(table, given.mini_batches[0], loss, sampled_at(table), safe)

    def _step(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        result = self.trainer.step()
        self.transition.stale = True
        return None, result

    def _grad_norm(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.trainer.grad_norm()

    # -- the user's own

    def _run(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        view = RankView(self)
        self._touched()
        return None, user_code.on_rank(_as(given, OnRanks), view)

    def _touched(self) -> None:
        """Know that the user's function may change the weights."""
        self.transition.stale = self.transition.touched = True
        if self._states is not None:
            self._states.forget_base()

    def _call(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        view = RankView(self)
        self._touched()
        return user_code.primitive(_as(given, OwnPrimitive), view, table)

    # -- keeping

    def _save_pretrained(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        assert self.spec.model is not None
        asked = _as(given, Folder)
        return None, self.trainer.save_folder(asked.folder, merge=asked.merge)

    def _save_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.states.save(_as(given, Folder).folder)

    def _load_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.states.load(_as(given, Folder))

    def _give_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        self.last_transport = self.states.give(_as(given, StateMove), given.link, safe)
        return None, self.last_transport

    def _take_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        self.last_transport = self.states.take(_as(given, StateMove), given.link, safe)
        return None, self.last_transport

    def _export_weights(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        found, self.last_transport = self.shadow.give(_as(given, ToShadow).shadow, given.link, safe)
        return None, found

    def take_weights(self, weights: Weights, version: int, safe: SafePoint) -> TransportReport:
        """Take the trained role's weights, before a call that needs them."""
        try:
            return self.shadow.take(weights, version, safe)
        finally:
            self.last_transport = self.shadow.last_report or self.last_transport

    def _take_weights(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """A call that is over when the weights that came with it are taken."""
        return None, None

    def _num_updates(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.trainer.num_updates

    def memory_parts(self) -> dict[str, int]:
        """Return this rank's bytes of ``weights``, ``gradients``, ``optimizer``, ``rollout`` (beyond those), ``kv_cache``."""
        parts = dict(self._trainer.memory_bytes()) if self._trainer is not None else {}
        if self.rollout is not None:
            awake = self.rollout.awake
            cache = parts["kv_cache"] = self.rollout.kv_cache_bytes if awake else 0
            residency = self.transition.residency
            beside = residency.bytes_beside() if residency is not None else self.rollout.memory_bytes() - cache
            parts["rollout"] = beside if awake else 0
        return parts

    def asleep_bytes(self) -> int:
        """Return the bytes of the rollout's weights and cache that are not there because it sleeps."""
        return 0 if self.rollout is None or self.rollout.awake else self.rollout.memory_bytes()

    def memory_bytes(self) -> int:
        """Return the bytes of weights, gradients, optimizer state and rollout on this rank."""
        return sum(self.memory_parts().values())

    def offloaded_bytes(self) -> int:
        """Return the bytes of this rank that are in host memory now, instead of on the device."""
        return 0 if self._trainer is None else self._trainer.offloaded_bytes()

    def close(self) -> None:
        """Free the engines."""
        if self.rollout is not None:
            self.rollout.close()
            self.rollout = None
        self.transition.close()
        self._states = None
        del self.shadow
        self._trainer = None
        del self.groups
        self.rollout_group = None
        gc.collect()  # its models hold themselves in cycles


def _handler_of(method: Method) -> Handler:
    """Return who carries a method out: of a scoring model's passes one for all, else what is called as the method is."""
    if method.arguments is Scoring:
        return partial(HostedRole._score, method=method)
    handler: Handler = getattr(HostedRole, f"_{method.name}")
    return handler


HANDLERS: Mapping[str, Handler] = {method.name: _handler_of(method) for method in METHODS.values() if method.on_ranks}
"""Name of a method -> who carries it out; importing this module fails where one is missing."""


def _as(given: Assignment, kind: type[A]) -> A:
    """Return a call's arguments, which are of the kind that its method declares."""
    assert isinstance(given.arguments, kind), f"{type(given.arguments).__name__} in place of {kind.__name__}"
    return given.arguments


def _replica_group(spec: RoleSpec) -> Any:
    """Return the group of this rank's replica of the rollout, ``None`` where a replica is one rank."""
    if spec.rollout is None or spec.rollout.tp == 1:
        return None
    first = dist.get_rank() // spec.rollout.tp * spec.rollout.tp
    return group_of(range(first, first + spec.rollout.tp))
