"""A role on one worker: its trainer, its rollout, and what each method does with them."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch.distributed as dist

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.core import methods
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
from hfsdk.core.functions import Shipped
from hfsdk.core.gap import HiddenStates, Scored
from hfsdk.core.lora import BESIDE, SLOTS
from hfsdk.core.methods import method_of
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.runtime import Assignment, Weights
from hfsdk.core.table import Column, Ragged, Table, as_column
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.generation.scoring import Sequences
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.process.tasks import USER_ERRORS, as_it_travels, user_traceback
from hfsdk.engine.training import hidden_states as inside_of
from hfsdk.engine.training import megatron_model
from hfsdk.engine.training.loss import sampled_at
from hfsdk.engine.training.megatron_groups import RoleGroups, group_of
from hfsdk.engine.training.trainer import NonFiniteRows, Trainer
from hfsdk.engine.training.vocab_parallel import KeptTokens
from hfsdk.engine.worker.hybrid_engine import HybridEngine, ShadowWeights
from hfsdk.engine.worker.kept_share import KeptShare
from hfsdk.engine.worker.probe import Probe
from hfsdk.engine.worker.role_host import RoleHost, RoleOnRank
from hfsdk.engine.worker.role_state import RoleStateTransfer
from hfsdk.resharding.reshard_report import TransportReport

if TYPE_CHECKING:
    from torch import Tensor


A = TypeVar("A", bound=Arguments)

Outcome = tuple[Mapping[str, Column] | None, Any]
"""The columns that a call writes, and what it returns besides."""

Handler = Callable[["RoleEngine", Table, Assignment, SafePoint], Outcome]
"""Carries out one method with this rank's rows."""


def sample_seed(seed: int, position: int, copy: int) -> int:
    """Return a sample's seed: a stable hash of (session seed, place in the prompt stream, copy number), never the rank."""
    digest = hashlib.blake2b(f"{seed}/{position}/{copy}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class RoleEngine:
    """One role's engines on this worker."""

    def __init__(self, spec: RoleSpec, worker: RoleHost, state: Sequence[Any] = (), first: int | None = None) -> None:
        """Build them; collective over the pool.

        Args:
            spec: the role to build.
            worker: the worker that hosts it.
            state: the state's parts, packed by the ranks of the place the role comes from.
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
        self.transition = HybridEngine(spec, worker, self.groups, self._trainer, self.rollout)
        self.shadow = ShadowWeights(spec, worker, self.groups, self._trainer, self.rollout)
        self._states = (
            RoleStateTransfer(spec, worker, self.groups, self._trainer, self.transition) if self._trainer is not None else None
        )
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
    def states(self) -> RoleStateTransfer:
        """Exports and restores the role's state; raises as :attr:`trainer` does."""
        assert self.trainer is not None
        assert self._states is not None
        return self._states

    def run(self, method: str, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        """Carry out one method."""
        try:
            if method_of(method).needs:
                self.transition.to_training(safe)
            with self._trainer.during(method) if self._trainer is not None else nullcontext():
                return HANDLERS[method](self, table, assignment, safe)
        except NonFiniteRows as bad:
            optimizer, num_updates = self.trainer.optimizer_taken, self.trainer.num_updates
            raise NonFiniteLossError(why_refused(bad.row_ids, self.spec.name, optimizer, num_updates)) from None

    # -- generation

    def _generate(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        assert self.rollout is not None
        arguments = _as(assignment, Generation)
        try:
            self.transition.to_rollout(safe)
        finally:
            self.last_transport = self.transition.last_report or self.last_transport
        copies = table.row_ids % arguments.copies
        positions = np.asarray(table["position"])
        seeds = np.array([sample_seed(arguments.seed, int(p), int(c)) for p, c in zip(positions, copies, strict=True)])
        slot, version = self._adapter(arguments.adapter, safe)
        columns = self.rollout.generate(
            table.ragged("prompt"), seeds.astype(np.int64), arguments.sampling, self._ends, safe, self.rollout_group, table.row_ids,
            adapter=slot,
        )  # fmt: skip
        extra: dict[str, Column] = {
            "policy_version": np.full(table.num_rows, version, dtype=np.int64),
            "temperature": np.full(table.num_rows, arguments.sampling.temperature, dtype=np.float32),
            "group": np.asarray(table.row_ids // arguments.copies),
        }
        return {**columns, **extra}, None

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The tokens that end a response: those that learned texts end with too."""
        try:
            return FolderTokenizer(self.spec.folder).turn_ends(chats=True).ids
        except (HfsdkError, ImportError):  # without a tokenizer, or with one that cannot be read: prompts are token ids
            return TurnEnds.of(self.spec.folder).ids

    def _adapter(self, adapter: int, safe: SafePoint) -> tuple[int | None, int]:
        """Return the rollout's slot with these adapters, and the optimizer steps that they have seen."""
        if adapter == OWN:
            return 0, self._num_updates_of_weights
        if adapter == BASE_ALONE:
            return None, -1
        kept_share = self._kept_share(adapter)
        self.transition.put_beside(adapter, kept_share, safe)
        return BESIDE, kept_share.num_updates

    def _kept_share(self, number: int) -> KeptShare:
        """Return this rank's share of a kept state; collective over the role.

        Raises:
            CallError: on every rank, where one of them has none of this layout.
        """
        kept_share = self.worker.kept.get(number)
        there = kept_share is not None and (kept_share.layout, kept_share.share.rank) == (str(self.mesh), self.groups.rank)
        if kept_share is None or not all(self.groups.gather(there, bool)):
            raise CallError(
                f"{self.spec.name}'s weights of that snapshot are not on these devices in this layout: it is from before the last "
                "place, or a worker that kept them has ended. Take another snapshot, or rewind to this one where it still holds"
            )
        return kept_share

    @property
    def _num_updates_of_weights(self) -> int:
        return self.shadow.num_updates if self._trainer is None else self._trainer.num_updates

    def _rescore(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        self.transition.stale = True
        try:
            self.transition.to_rollout(safe)
        finally:
            self.last_transport = self.transition.last_report or self.last_transport
        return self._rescore_as_is(table, assignment, safe)

    def _rescore_as_is(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        assert self.rollout is not None
        num_updates = self.shadow.num_updates if self._trainer is None else self.transition.num_updates
        arguments = _as(assignment, Rescoring)
        return log_probs(self.rollout, self.transition, num_updates, self.rollout_group, table, arguments, safe)

    def _layers(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        return None, layers(self, _as(assignment, OneSequence), safe)

    def _last_reshard(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        return None, self.last_transport

    def _census(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        return None, self.transition.census()

    def rest(self) -> None:
        """Have the rollout give up its memory, where it sleeps, until this role generates again."""
        if self.rollout is not None:
            self.rollout.rest()

    # -- passes

    def _compute_log_probs(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        arguments = _as(assignment, LogProbs)
        tokens = KeptTokens(arguments.top_k, arguments.top_p, self._ends if arguments.without_ends else ())
        weights = (
            nullcontext() if arguments.weights == OWN else self.trainer.shares.borrowed(self._kept_share(arguments.weights).share)
        )
        with weights:
            columns = self.trainer.log_probs(table, assignment.micro_batches, sampled_at(table), safe, arguments.entropy, tokens)
        return {arguments.column if name == "log_probs" else name: column for name, column in columns.items()}, None

    def _compute_values(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        return self.trainer.values(table, assignment.micro_batches, safe), None

    def _score(self, table: Table, assignment: Assignment, safe: SafePoint, *, method: Method) -> Outcome:
        """Carry out any pass of a scoring model: what it writes follows from its declaration."""
        arguments, of_scores = _as(assignment, Scoring), method.of_scores or np.asarray
        scores = self.trainer.scores(table, assignment.micro_batches, safe)
        columns = [of_scores(arguments.normalised(raw)).astype(np.float32) for raw in scores.values()]
        return dict(zip([arguments.column], columns, strict=False)), None  # empty before the last pipeline stage

    # -- learning

    def _update(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        before = self.trainer.num_updates
        try:
            loss = assignment.arguments.shipped.load()
            rows = self.trainer.update(table, assignment.mini_batches, loss, sampled_at(table), safe)
        finally:
            self.transition.stale = self.transition.stale or self.trainer.num_updates > before
        return None, rows

    def _forward_backward(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        loss = assignment.arguments.shipped.load()
        return None, self.trainer.forward_backward(table, assignment.mini_batches[0], loss, sampled_at(table), safe)

    def _compute_loss(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        loss = assignment.arguments.shipped.load()
        return None, self.trainer.compute_loss(table, assignment.mini_batches[0], loss, sampled_at(table), safe)

    def _step(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        result = self.trainer.step()
        self.transition.stale = True
        return None, result

    def _grad_norm(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        return None, self.trainer.grad_norm()

    # -- the user's own

    def _run(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        view = RankView(self)
        self._touched()
        return None, on_rank(_as(assignment, OnRanks), view)

    def _touched(self) -> None:
        """Note that the user's function may change the weights."""
        self.transition.stale = self.transition.touched = True
        if self._states is not None:
            self._states.forget_base()

    def _call(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        view = RankView(self)
        self._touched()
        return primitive(_as(assignment, OwnPrimitive), view, table)

    # -- keeping

    def _save_pretrained(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        assert self.spec.model is not None
        arguments = _as(assignment, Folder)
        return None, self.trainer.save_folder(arguments.folder, merge=arguments.merge)

    def _save_state(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        return None, self.states.save(_as(assignment, Folder).folder)

    def _load_state(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        return None, self.states.load(_as(assignment, Folder))

    def _give_state(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        self.last_transport = self.states.give(_as(assignment, StateMove), assignment.link, safe)
        return None, self.last_transport

    def _take_state(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        self.last_transport = self.states.take(_as(assignment, StateMove), assignment.link, safe)
        return None, self.last_transport

    def _export_weights(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        bundles, self.last_transport = self.shadow.give(_as(assignment, ToShadow).shadow, assignment.link, safe)
        return None, bundles

    def take_weights(self, weights: Weights, version: int, safe: SafePoint) -> TransportReport:
        """Take the trained role's weights, before a call that needs them."""
        try:
            return self.shadow.take(weights, version, safe)
        finally:
            self.last_transport = self.shadow.last_report or self.last_transport

    def _take_weights(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
        """A call that is over when the weights that came with it are taken."""
        return None, None

    def _num_updates(self, table: Table, assignment: Assignment, safe: SafePoint) -> Outcome:
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


HANDLERS: Mapping[str, Handler] = {
    methods.GENERATE.name: RoleEngine._generate,
    methods.COMPUTE_LOG_PROBS.name: RoleEngine._compute_log_probs,
    methods.RESCORE.name: RoleEngine._rescore,
    methods.RESCORE_AS_IS.name: RoleEngine._rescore_as_is,
    methods.LAYERS.name: RoleEngine._layers,
    methods.COMPUTE_VALUES.name: RoleEngine._compute_values,
    methods.COMPUTE_SCORES.name: partial(RoleEngine._score, method=methods.COMPUTE_SCORES),
    methods.COMPUTE_COSTS.name: partial(RoleEngine._score, method=methods.COMPUTE_COSTS),
    methods.UPDATE.name: RoleEngine._update,
    methods.FORWARD_BACKWARD.name: RoleEngine._forward_backward,
    methods.COMPUTE_LOSS.name: RoleEngine._compute_loss,
    methods.STEP.name: RoleEngine._step,
    methods.GRAD_NORM.name: RoleEngine._grad_norm,
    methods.RUN.name: RoleEngine._run,
    methods.CALL.name: RoleEngine._call,
    methods.LAST_RESHARD.name: RoleEngine._last_reshard,
    methods.CENSUS.name: RoleEngine._census,
    methods.SAVE_PRETRAINED.name: RoleEngine._save_pretrained,
    methods.SAVE_STATE.name: RoleEngine._save_state,
    methods.LOAD_STATE.name: RoleEngine._load_state,
    methods.NUM_UPDATES.name: RoleEngine._num_updates,
    methods.GIVE_STATE.name: RoleEngine._give_state,
    methods.TAKE_STATE.name: RoleEngine._take_state,
    methods.EXPORT_WEIGHTS.name: RoleEngine._export_weights,
    methods.TAKE_WEIGHTS.name: RoleEngine._take_weights,
}
"""Name of a method -> who carries it out."""


def _as(assignment: Assignment, kind: type[A]) -> A:
    """Return a call's arguments, which are of the kind that its method declares."""
    assert isinstance(assignment.arguments, kind), f"{type(assignment.arguments).__name__} in place of {kind.__name__}"
    return assignment.arguments


def _replica_group(spec: RoleSpec) -> Any:
    """Return the group of this rank's replica of the rollout, ``None`` where a replica is one rank."""
    if spec.rollout is None or spec.rollout.tp == 1:
        return None
    first = dist.get_rank() // spec.rollout.tp * spec.rollout.tp
    return group_of(range(first, first + spec.rollout.tp))


# -- an optimizer step that was refused because a number was NaN or infinite: which samples, or which learning rate

LARGE_LR = 1e-2
"""An AdamW step moves a weight by about the learning rate (Kingma and Ba, arXiv 1412.6980, 2.1); weights are about 0.02."""


def why_refused(row_ids: Sequence[int], name: str, optimizer: AdamW | None, num_updates: int) -> str:
    """Return the words for the user.

    Args:
        row_ids: samples whose loss was not finite; empty when only the gradient was.
        name: the name of the role whose step it was.
        optimizer: the role's optimizer, with a learning rate; ``None`` where it has none.
        num_updates: optimizer steps that its weights have had.
    """
    what = f"the loss of samples {list(row_ids)}" if row_ids else "the gradient"
    words = f"{what} is NaN or infinite; this optimizer step was refused on every rank and the weights are as before it. "
    lr = optimizer.lr_at(num_updates - 1) if optimizer is not None and num_updates else 0.0
    had = f"{num_updates} step{'s' * (num_updates != 1)}"
    if lr >= LARGE_LR:
        return words + (
            f"They have had {had} with a learning rate of {lr:g}, which ruins them: each moves every weight by about that much, "
            f"and weights are about 0.02. Declare {name} again with a smaller one, e.g. optimizer=hf.AdamW(lr=1e-5), or go "
            "back with session.rewind(...)."
        )
    after = f" The weights have had {had}, the last with a learning rate of {lr:g}: try a smaller one." if lr else ""
    return f"{words}Look at these samples with batch.inspect(i) and at the loss function.{after}"


# -- the user's own functions and primitives on a rank, and what they may return


def on_rank(arguments: OnRanks, view: RankView) -> Any:
    """Call a function of ``handle.run``; return its value as it travels."""
    return as_it_travels(_run(arguments.shipped, view, *arguments.values), arguments.shipped.name)


def primitive(arguments: OwnPrimitive, view: RankView, table: Table) -> tuple[Mapping[str, Column] | None, Any]:
    """Return the columns that a primitive wrote, or else its value.

    Raises:
        CallError: they are not those it declares, or not of the rank's rows.
    """
    value, writes = _run(arguments.shipped, view, table, **arguments.keywords), arguments.writes
    if not writes:
        return None, as_it_travels(value, arguments.shipped.name)
    if not isinstance(value, Mapping) or set(value) != set(writes):
        got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise CallError(f"the primitive must return a dict with exactly the columns {sorted(writes)}; it returned {got}")
    for name, column in value.items():
        if len(column) != table.num_rows:
            num_rows = table.num_rows
            raise CallError(
                f"the primitive returned {len(column)} entries for column {name!r}; this rank has {num_rows} rows (rows.num_rows)"
            )
    copied = as_it_travels(dict(value), arguments.shipped.name)
    return {name: as_column(column) for name, column in copied.items()}, None


def _run(shipped: Shipped, *args: Any, **more: Any) -> Any:
    function = shipped.load()
    try:
        return function(*args, **more)
    except USER_ERRORS as error:  # whatever the user's function raises is reported at the user's line
        raise CallError(f"{shipped.name} raised {error!r}", details=user_traceback(error)) from None


# -- both engines over tokens that are there, for ``actor.explain_gap``: log-probabilities of the rollout, hidden states of both

SPARE = 1.5
"""Times the bytes of a model that must be free for it."""


def log_probs(
    rollout: Rollout, transition: HybridEngine, num_updates: int, group: Any, table: Table, arguments: Rescoring, safe: SafePoint
) -> tuple[dict[str, Column], Scored]:
    """Have the rollout score this rank's rows with the weights that it has; NaN where it has none.

    Args:
        rollout: this rank's.
        transition: the engine that gives it weights, where it is beside its trainer.
        num_updates: optimizer steps that its weights have seen.
        group: the process group of its replica's ranks.
        table: prompt, response and, where there is one, temperature of this rank's rows.
        arguments: the column to write and, besides, the token whose hidden states and those whose cached scores are wanted.
        safe: the point at which the call may stop.
    """
    prompts, responses = table.ragged("prompt"), table.ragged("response")
    if not (transition.rollout_has_some() if transition.plan is not None else rollout.ready):
        nothing = Ragged.from_lengths(np.full(len(responses.flat), np.nan, np.float32), responses.lengths)
        return {arguments.column: nothing}, Scored(False, num_updates)
    proof, unproven = transition.look() if transition.plan is not None else (None, 0)
    temperatures = np.asarray(table["temperature"]) if "temperature" in table else np.ones(table.num_rows)
    # the question names rows of the batch; this rank has some of them
    here = {int(row): place for place, row in enumerate(table.row_ids)}
    inside = arguments.inside if arguments.inside is not None and arguments.inside[0] in here else None
    cached = [at for at in arguments.through_cache if at[0] in here]
    asked_of = Sequences(
        prompts, responses, temperatures.astype(np.float32), inside=None if inside is None else (here[inside[0]], inside[1]),
        through_cache=[(here[row], token) for row, token in cached],
    )  # fmt: skip
    scores = rollout.score(safe, group, asked_of)
    scored = Scored(
        True, num_updates, () if proof is None else tuple(dict.fromkeys(box.tensor for box in proof.wrong)),
        0 if proof is None else proof.num_boxes - len(proof.wrong), unproven, scores.inside,
        {at: scores.cached[here[at[0]], at[1]] for at in cached},
    )  # fmt: skip
    return {arguments.column: scores.log_probs}, scored


def layers(hosted: RoleOnRank, arguments: OneSequence, safe: SafePoint) -> tuple[HiddenStates, ...]:
    """Return the trainer's hidden states that this rank sees, and on rank 0 those of transformers on the same weights."""
    trainer, groups = hosted.trainer, hosted.groups
    table = inside_of.one_row(arguments.prompt, arguments.response)
    position = len(arguments.prompt) + arguments.token - 1
    with inside_of.of_trainer(trainer.model, position, groups.tp_rank) as seen:
        columns = trainer.log_probs(table, [tuple(table.row_ids.tolist())], arguments.temperature, safe)
    own = HiddenStates("trainer", seen, columns["log_probs"].flat if columns else None)
    full, error, oracle = trainer.weights(), None, []
    if full is not None and fits_host(full):
        try:
            oracle = inside_of.of_transformers(full, hosted.spec.folder, table, position, arguments.temperature)
        except Exception as problem:  # the other ranks wait to hear of it
            error = problem
    safe.agree(groups.world, error)
    return (own, *oracle)


def fits_host(full: Mapping[str, Tensor]) -> bool:
    """Return whether the host has room for a model of these weights in fp32, with some to spare."""
    import psutil

    return bool(psutil.virtual_memory().available > SPARE * 4 * sum(tensor.numel() for tensor in full.values()))


class RankView:
    """One rank of one role, as ``handle.run(fn)`` and primitives see it.

    Attributes:
        role: the role's name.
        rank, device: this rank in the role, and its device number.
        coordinates: this rank's (tp, pp, dp) position.
        layout: the role's training layout.
        module: the Megatron model (a ``torch.nn.Module``) of this rank.
        groups: process groups (tp, dp, pp, world) for collectives.
    """

    def __init__(self, hosted: RoleOnRank) -> None:
        self._hosted = hosted
        self.role = hosted.spec.name
        self.rank = hosted.groups.rank
        self.device = hosted.worker.setup.device
        self.layout = hosted.mesh.layout
        self.coordinates = hosted.mesh.coordinates(self.rank)
        self.module = hosted.trainer.model
        self.groups = hosted.groups

    @property
    def num_updates(self) -> int:
        """Optimizer steps done."""
        return self._hosted.trainer.num_updates

    @property
    def probe(self) -> Probe:
        """The measurements that ``run.first_bad()`` takes of it."""
        return Probe(self._hosted)

    def memory(self) -> dict[str, int]:
        """Return the bytes of this process and of each role in it."""
        used, roles, _, _ = self._hosted.worker.memory()
        return {"process": used, **roles}

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every local parameter."""
        return {name: tuple(t.shape) for name, t in megatron_model.local_tensors(self.module).items()}

    def log_probs(self, rows: Table, temperature: float = 1.0) -> Any:
        """Return the log-probs of the response tokens of ``rows`` (ragged, as given); collective over the role.

        With pipeline stages the last one returns them, and the others ``None``.
        """
        micro_batches = [tuple(int(r) for r in rows.row_ids)]
        return self._hosted.trainer.log_probs(rows, micro_batches, temperature).get("log_probs")

    def __repr__(self) -> str:
        at = self.coordinates
        return f"<{self.role} rank {self.rank}: device {self.device}, tp {at.tp}, pp {at.pp}, dp {at.dp}>"
