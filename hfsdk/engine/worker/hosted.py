"""A role on one worker: its trainer, its rollout, and what each method does with them."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from hfsdk.core.arguments import Arguments, Folder, Generation, LogProbs, OnRanks, OwnPrimitive, Scoring, ToShadow
from hfsdk.core.errors import CallError, CheckpointError, NonFiniteLossError
from hfsdk.core.functions import Shipped
from hfsdk.core.methods import method_of
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Assignment, Weights
from hfsdk.core.table import Array, Column, Table, as_column
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.process import startup
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.process.tasks import USER_ERRORS, as_it_travels, user_traceback
from hfsdk.engine.training import megatron_checkpoint, megatron_model
from hfsdk.engine.training.megatron_groups import RoleGroups, group_of
from hfsdk.engine.training.trainer import NonFiniteRows, Trainer
from hfsdk.engine.weights import bridge, shares, transport
from hfsdk.engine.weights.direct import NOTHING, Tensors, Way
from hfsdk.engine.weights.model_folders import eos_token_ids
from hfsdk.engine.weights.moves import Inventory, StateMove, inventory, way_of_state
from hfsdk.engine.weights.residency import Residency
from hfsdk.engine.weights.role_state import Summary
from hfsdk.engine.worker.keepsake import Keepsake
from hfsdk.engine.worker.role_host import Parcel, RoleHost
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import Resident, TransportReport

A = TypeVar("A", bound=Arguments)

Outcome = tuple[Mapping[str, Column] | None, Any]


def sample_seed(seed: int, position: int, copy: int) -> int:
    """Return a sample's seed: a stable hash of (session seed, place in the prompt stream, copy number), never the rank."""
    digest = hashlib.blake2b(f"{seed}/{position}/{copy}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class RankView:
    """What ``handle.run(fn)`` and primitives see: one rank of one role.

    Attributes:
        role: the role's name.
        rank, device: this rank in the role, and its device number.
        coordinates: its (tp, pp, dp) position.
        layout: the role's training layout.
        module: the Megatron model (a ``torch.nn.Module``) of this rank.
        groups: process groups (tp, dp, pp, world) for collectives.
    """

    def __init__(self, hosted: HostedRole) -> None:
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


class HostedRole:
    """One role's engines on this worker."""

    def __init__(self, spec: RoleSpec, worker: RoleHost, state: Sequence[Any] = (), first: int | None = None) -> None:
        """Build them; collective over the pool.

        Args:
            spec: what to build.
            worker: where.
            state: what :meth:`export` returned on the ranks of the place the role comes from.
            first: the first rank of the part of the pool where the role lives; ``None`` for the whole pool.
        """
        self.spec, self.worker = spec, worker
        worker.rest()
        self.mesh = mesh_of(spec)
        self.groups = RoleGroups(self.mesh, first)
        recorder, setup = worker.recorder, worker.setup
        self._trainer = Trainer(spec, self.mesh, self.groups, recorder) if spec.train is not None else None
        self.version, self._num_updates_taken = 0, 0
        self.rollout: Rollout | None = None
        self.plan: ReshardPlan | None = None
        self.stale = True
        self.rollout_group = _replica_group(spec)
        self.last_transport: TransportReport | None = None
        self._planned: tuple[RoleSpec, RoleSpec, bridge.Route] | None = None
        self._last_way: Way | None = None
        assert spec.model is not None
        if spec.rollout is not None:
            if spec.train is not None:
                self.plan = ReshardPlan.between(spec.model, spec.train, spec.rollout, spec.dtype, nodes=spec.nodes or None)
            self.rollout = Rollout(
                spec.folder, spec.model, tp=spec.rollout.tp, rank=setup.rank, world_size=setup.world_size, dtype=spec.dtype,
                options=spec.rollout_options, seed=spec.seed, job_id=setup.job_id, recorder=recorder, load_weights=False,
                trained=spec.train is not None,
            )  # fmt: skip
            self.rest()
        self.residency: Residency | None = None
        if self.rollout is not None and self._trainer is not None and self.rollout.in_place:
            assert self.plan is not None
            self._trainer.keep_weights()  # the transition itself leaves no weight there twice
            parameters = dict(self._trainer.model.named_parameters())
            self.residency = Residency(self.plan, setup.rank, parameters, self.rollout.parameters())
        self._eos = eos_token_ids(spec.folder)
        self._methods: dict[str, Callable[[Table, Assignment, SafePoint], Outcome]] = {
            "generate": self._generate, "compute_log_probs": self._log_probs, "compute_values": self._values,
            "compute_scores": self._scores, "compute_costs": self._scores, "update": self._update,
            "forward_backward": self._forward_backward, "compute_loss": self._compute_loss, "step": self._step,
            "grad_norm": self._grad_norm, "run": self._run, "call": self._call, "save_pretrained": self._save_pretrained,
            "save_state": self._save_state, "load_state": self._load_state, "num_updates": self._num_updates,
            "export_weights": self._export_weights, "take_weights": self._taken, "last_reshard": self._last_reshard,
            "census": self._census, "give_state": self._give_state, "take_state": self._take_state,
        }  # fmt: skip
        if spec.restore:
            try:
                self._load_state(Table({}), Assignment(arguments=Folder(folder=spec.restore)), SafePoint(lambda: False))
            except BaseException:
                self.close()
                raise
        if state:
            self.take_pieces(state)

    @property
    def trainer(self) -> Trainer:
        """The role's Megatron model.

        Raises:
            CallError: the role is a shadow that only generates.
        """
        if self._trainer is None:
            raise CallError(f"{self.spec.name} only generates; call {self.spec.shadow_of} for anything else")
        return self._trainer

    # -- moving

    def export(self) -> Parcel:
        """Return this rank's part of the role's state, readable by any layout: (summary, pieces); collective."""
        self._to_training()
        return Keepsake(self.trainer.share(), self.trainer.shard).parcel()

    def take_pieces(self, holders: Sequence[tuple[Summary, bridge.Packed]]) -> None:
        """Take a state over that another place or layout has sent; collective."""
        self._to_training()
        share, problem = self.trainer.blank_share(holders[0][0]), None
        try:
            with bridge.unpacked(packed for _, packed in holders) as pieces:
                shares.fill(share, self.trainer.shard, pieces)
        except CheckpointError as error:
            problem = str(error)
        problems = [text for text in self.groups.gather_objects(problem) if text]
        if problems:
            raise CheckpointError(problems[0])
        self.trainer.take_share(share)
        self.stale = True

    def offer(self) -> Inventory:
        """Say what this rank gives of the role's state to another pool; collective."""
        self._to_training()
        with self.trainer.giving_share() as share:
            return inventory(share, self.trainer.shard, gives=True)[0]

    def need(self, summary: Summary) -> Inventory:
        """Say what this rank takes of a state that comes from another pool."""
        return inventory(self.trainer.blank_share(summary, "meta"), self.trainer.shard, gives=False)[0]

    def _give_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """Give the role's state to the pool where it will live; it stays here too. Collective over both."""
        with self.trainer.giving_share() as share:
            sources = inventory(share, self.trainer.shard, gives=True)[1]
            self.last_transport = self._exchange(self._way_of_state(given), given.link, sources, NOTHING, safe)
        return None, self.last_transport

    def _take_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """Take the role's state over from the pool where it lived; collective over both."""
        with self.trainer.taking_share(_as(given, StateMove).given[0].summary) as share:
            targets = inventory(share, self.trainer.shard, gives=False)[1]
            self.last_transport = self._exchange(self._way_of_state(given), given.link, NOTHING, targets, safe)
        self.stale = True
        return None, self.last_transport

    def _way_of_state(self, given: Assignment) -> Way:
        move = _as(given, StateMove)
        return way_of_state(self.spec.name, move.rank, move.given, move.taken, move.nodes)

    def keep(self) -> Keepsake:
        """Return a copy of this rank's share of the role's state; collective."""
        self._to_training()
        return Keepsake(self.trainer.share(), self.trainer.shard)

    def restore(self, kept: Keepsake) -> None:
        """Take a state back of which this rank, in this layout, kept its share; collective."""
        self._to_training()
        self.trainer.take_share(kept.share)
        self.stale = True

    def _export_weights(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """Put the weights where the ranks of a shadow find what each of them needs."""
        shadow = _as(given, ToShadow).shadow
        dtype = transport.TORCH_DTYPES[self.spec.dtype] if shadow.rollout is not None else None
        with self.worker.recorder.span("export") as attrs:
            route = self._route(self.spec, shadow, source=self.groups.rank)
            if given.link is not None:
                way = self._way(self.spec, shadow, route)
                self.last_transport = self._exchange(way, given.link, self.trainer.local_tensors(), NOTHING, safe)
                attrs.update(bytes=self.last_transport.bytes_sent, bytes_sent=self.last_transport.bytes_sent)
                return None, way.given()
            bundles, report = bridge.give(route, self.trainer.local_tensors(), self.worker.keep, dtype)
            attrs.update(bytes=sum(bundle.num_bytes for bundle in bundles), bytes_sent=report.bytes_sent)
        self.last_transport = report
        return None, bundles

    def take_over(self, weights: Callable[[], Weights], version: int, safe: SafePoint) -> TransportReport:
        """Take the trained role's weights into a shadow."""
        start, given = time.perf_counter(), weights()
        route = self._route(given.role, self.spec, target=self.groups.rank)
        if given.link is not None:
            self.version = -1  # nobody uses weights of which a part is new
            self.last_transport = self._take_directly(self._way(given.role, self.spec, route), given.link, safe)
            self.version, self._num_updates_taken = version, given.num_updates
            return self.last_transport
        if self.rollout is not None:
            received = bridge.take(route, given, self.rollout.weight_targets)
            self.rollout.finish_update()
        else:
            with self.trainer.on_device("weights"):
                received = bridge.take(route, given, self.trainer.local_tensors)
        self.last_transport = TransportReport(0, sum(received), 0, 0, received, time.perf_counter() - start)
        self.version, self._num_updates_taken = version, given.num_updates
        return self.last_transport

    def _take_directly(self, way: Way, link: Link, safe: SafePoint) -> TransportReport:
        if self.rollout is None:
            with self.trainer.on_device("weights"):
                return self._exchange(way, link, NOTHING, self.trainer.local_tensors(), safe)
        report = self._exchange(way, link, NOTHING, self.rollout.weight_targets(), safe)
        self.rollout.finish_update()
        return report

    def _exchange(self, way: Way, link: Link, sources: Tensors, targets: Tensors, safe: SafePoint) -> TransportReport:
        """Give or take weights over a link, once all of its ranks have agreed that they can; collective over both pools."""
        with self.worker.link(link, way.route.rank) as group:
            safe.agree(group, way.problem(sources, targets))
            return way.move(sources, targets, group)

    def _way(self, trained: RoleSpec, shadow: RoleSpec, route: bridge.Route) -> Way:
        if self._last_way is None or self._last_way.route is not route:
            self._last_way = Way.between(trained, shadow, route)
        return self._last_way

    def _taken(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """A call that is over when the weights that came with it are taken."""
        return None, None

    def _route(self, trained: RoleSpec, shadow: RoleSpec, **rank: int) -> bridge.Route:
        """Plan this rank's way to or from another pool, once for a pair of places."""
        if self._planned is None or self._planned[:2] != (trained, shadow):
            self._planned = trained, shadow, bridge.Route.between(trained, shadow, **rank)
        return self._planned[2]

    def check_version(self, version: int) -> None:
        """Refuse to use weights that are not those the call was submitted for.

        Raises:
            CallError: a shadow's weights are old.
        """
        if self.spec.shadow_of and self.version != version:
            raise CallError(
                f"{self.spec.name} has weights of version {self.version}, the call needs {version}; a stale shadow is never used"
            )

    def run(self, method: str, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """Carry out one method."""
        try:
            if method_of(method).needs:
                self._to_training()
            with self._trainer.during(method) if self._trainer is not None else nullcontext():
                return self._methods[method](table, given, safe)
        except NonFiniteRows as bad:
            raise NonFiniteLossError(_non_finite_words(bad)) from None

    # -- generation

    def _generate(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        assert self.rollout is not None
        asked = _as(given, Generation)
        self._refresh_rollout(safe)
        copies = table.row_ids % asked.copies
        positions = np.asarray(table["position"])
        seeds = np.array([sample_seed(asked.seed, int(p), int(c)) for p, c in zip(positions, copies, strict=True)])
        control = self.rollout_group
        columns = self.rollout.generate(
            table.ragged("prompt"), seeds.astype(np.int64), asked.sampling, self._eos, safe, control, table.row_ids
        )
        extra: dict[str, Column] = {
            "policy_version": np.full(table.num_rows, self._num_updates_of_weights, dtype=np.int64),
            "temperature": np.full(table.num_rows, asked.sampling.temperature, dtype=np.float32),
            "group": np.asarray(table.row_ids // asked.copies),
        }
        return {**columns, **extra}, None

    @property
    def _num_updates_of_weights(self) -> int:
        return self._num_updates_taken if self._trainer is None else self._trainer.num_updates

    def _refresh_rollout(self, safe: SafePoint) -> None:
        """Give the rollout the trainer's weights, if they changed since or are not there (HybridFlow section 5.2, step 1)."""
        assert self.rollout is not None
        if self.plan is None:  # a shadow's weights came before the call
            return
        if not self._lacks_weights(self.rollout):
            return
        self._take_back()
        rank, world = self.worker.setup.rank, self.groups.world
        self._together(self.rollout, self.rollout.wake_weights, safe)
        with self.trainer.on_device("weights"), self.worker.recorder.span("reshard") as attrs:
            sources = self.trainer.local_tensors()
            if self.residency is None:
                targets = self.rollout.weight_targets()
                self._agree_on_plan(transport.problem(self.plan, rank, sources, targets), safe)
                report = transport.execute(self.plan, rank, sources, targets, world, checked=True)
            else:
                targets = {name: parameter.data for name, parameter in self.rollout.parameters().items()}
                self._agree_on_plan(transport.problem(self.plan, rank, sources, targets), safe)
                report = self.residency.to_rollout(world)
            self.rollout.finish_update()
            attrs.update(bytes=report.bytes_received, bytes_copied=report.bytes_copied, bytes_shared=report.bytes_shared)
        self.last_transport, self.stale = report, False
        self._together(self.rollout, self.rollout.wake_cache, safe)

    def _lacks_weights(self, rollout: Rollout) -> bool:
        """Whether the rollout's weights are old or not there, on any rank: one may have slept while another did not."""
        lacks = self.stale or (self.residency is not None and not self.residency.generating)
        return any(self.groups.gather_objects(lacks or not rollout.ready)) if rollout.sleeps else lacks

    def _together(self, rollout: Rollout, wake: Callable[[], None], safe: SafePoint) -> None:
        """Wake the rollout's memory on every rank, or fail on every rank: those that wait for weights must not wait for ever."""
        if not rollout.sleeps:
            return
        error: Exception | None = None
        try:
            wake()
        except Exception as problem:
            error = problem
        safe.agree(self.groups.world, error)

    def _agree_on_plan(self, error: Exception | None, safe: SafePoint) -> None:
        """Make sure, before anything moves, that all ranks carry out the same plan with weights of the same version.

        Raises:
            CallError: they do not.
            Cancelled, PeerFailed: as at any safe point.
        """
        plan = self.plan
        assert plan is not None
        words = f"{plan.spec}|{plan.train}|{plan.rollout}|{plan.dtype}|{plan.grouping}"
        mine = [zlib.crc32(words.encode()), self.trainer.num_updates]
        all_ranks = self.groups.gather_objects(mine)
        if error is None and any(theirs != mine for theirs in all_ranks):
            error = CallError(
                f"{self.spec.name}'s ranks differ in what they would move; (plan, version) by rank: {all_ranks}. Nothing moved. "
                "Load a checkpoint with session.load(...), or declare the role again."
            )
        safe.agree(self.groups.world, error)

    def rest(self) -> None:
        """Have the rollout give up its memory, where it sleeps, until this role generates again."""
        if self.rollout is not None:
            self.rollout.rest()

    def _to_training(self) -> None:
        """Give the trainer its weights back, if they are with the rollout, and the memory of the rollouts here that sleep."""
        self.worker.rest()
        self._take_back()

    def _take_back(self) -> None:
        if self.residency is not None and self.residency.generating:
            with self.worker.recorder.span("reshard") as attrs:
                attrs.update(bytes=0, bytes_copied=self.residency.to_training())

    def _last_reshard(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.last_transport

    def _census(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        if self.residency is not None:
            return None, self.residency.census()
        trainer = self._trainer.memory_bytes()["weights"] if self._trainer is not None else 0
        if self.rollout is None or not self.rollout.awake:
            return None, Resident("training", trainer, 0, 0, 0, 0)
        rollout = self.rollout.memory_bytes() - self.rollout.kv_cache_bytes
        twice = self.plan.bytes_copied(self.worker.setup.rank) if self.plan is not None else 0
        return None, Resident("both", trainer, rollout, 0, 0, twice)

    # -- passes

    def _log_probs(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        asked = _as(given, LogProbs)
        found = self.trainer.log_probs(table, given.micro_batches, self._temperature(table), safe, asked.entropy)
        return {asked.column if name == "log_probs" else name: column for name, column in found.items()}, None

    def _values(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return self.trainer.values(table, given.micro_batches, safe), None

    def _scores(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        asked = _as(given, Scoring)
        found = self.trainer.scores(table, given.micro_batches, safe)
        mean, std = asked.normalisation
        columns = [((scores - mean) / std).astype(np.float32) for scores in found.values()]
        return dict(zip([asked.column], columns, strict=False)), None  # empty before the last pipeline stage

    @staticmethod
    def _temperature(table: Table) -> Array | float:
        return np.asarray(table["temperature"]) if "temperature" in table else 1.0

    # -- learning

    def _update(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        before = self.trainer.num_updates
        try:
            loss = given.arguments.shipped.load()
            rows = self.trainer.update(table, given.mini_batches, loss, self._temperature(table), safe)
        finally:
            self.stale = self.stale or self.trainer.num_updates > before
        return None, rows

    def _forward_backward(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        loss = given.arguments.shipped.load()
        return None, self.trainer.forward_backward(table, given.mini_batches[0], loss, self._temperature(table), safe)

    def _compute_loss(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        loss = given.arguments.shipped.load()
        return None, self.trainer.compute_loss(table, given.mini_batches[0], loss, self._temperature(table), safe)

    def _step(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        result = self.trainer.step()
        self.stale = True
        return None, result

    def _grad_norm(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.trainer.grad_norm()

    # -- the user's own

    def _run(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        asked = _as(given, OnRanks)
        return None, as_it_travels(self._user(asked.shipped, *asked.values), asked.shipped.name)

    def _call(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        asked = _as(given, OwnPrimitive)
        value, writes = self._user(asked.shipped, table, **asked.keywords), asked.writes
        if not writes:
            return None, as_it_travels(value, asked.shipped.name)
        if not isinstance(value, Mapping) or set(value) != set(writes):
            got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise CallError(f"the primitive must return a dict with exactly the columns {sorted(writes)}; it returned {got}")
        for name, column in value.items():
            if len(column) != table.num_rows:
                raise CallError(
                    f"the primitive returned {len(column)} entries for column {name!r}; this rank has {table.num_rows} rows"
                )
        copied = as_it_travels(dict(value), asked.shipped.name)
        return {name: as_column(column) for name, column in copied.items()}, None

    def _user(self, shipped: Shipped, *args: Any, **more: Any) -> Any:
        function = shipped.load()
        self.stale = True  # it may change the weights
        try:
            return function(RankView(self), *args, **more)
        except USER_ERRORS as error:  # whatever the user's function raises is reported at the user's line
            raise CallError(f"{shipped.name} raised {error!r}", details=user_traceback(error)) from None

    # -- keeping

    def _save_pretrained(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        assert self.spec.model is not None
        folder, source = _as(given, Folder).folder, self.spec.folder
        megatron_model.save_folder(self.trainer.model, self.spec.model, self.groups, folder, source)
        return None, None

    def _save_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        """Copy this rank's share and leave the writing to a thread, which ``Worker.saved`` asks."""
        name, folder = self.spec.name, Path(_as(given, Folder).folder) / self.spec.name
        share = self.trainer.share()
        self.worker.saves[name] = megatron_checkpoint.begin_save(name, share, self.trainer.shard, self.groups, folder)
        return None, {"num_updates": self.trainer.num_updates}

    def _load_state(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        asked = _as(given, Folder)
        folder = Path(asked.folder) / self.spec.name
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.spec.name}'s checkpoint is gone: there is no {folder}. Put it back, or load another with session.load(...)."
            )
        share = self.trainer.blank_share(megatron_checkpoint.read_checked(folder, self.groups, checked=asked.checked))
        megatron_checkpoint.load(folder, share, self.trainer.shard)
        self.trainer.take_share(share)
        self.stale = True
        return None, {"num_updates": self.trainer.num_updates}

    def _num_updates(self, table: Table, given: Assignment, safe: SafePoint) -> Outcome:
        return None, self.trainer.num_updates

    def memory_parts(self) -> dict[str, int]:
        """Return this rank's bytes of ``weights``, ``gradients``, ``optimizer``, ``rollout`` (beyond those), ``kv_cache``."""
        parts = dict(self._trainer.memory_bytes()) if self._trainer is not None else {}
        if self.rollout is not None:
            awake = self.rollout.awake
            cache = parts["kv_cache"] = self.rollout.kv_cache_bytes if awake else 0
            beside = self.residency.bytes_beside() if self.residency is not None else self.rollout.memory_bytes() - cache
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
        self.residency = None
        self._methods.clear()  # they hold this object
        self._trainer = None
        del self.groups
        self.rollout_group = None
        startup.collect_everything()


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


def _non_finite_words(bad: NonFiniteRows) -> str:
    what = f"the loss of samples {bad.row_ids}" if bad.row_ids else "the gradient"
    return (
        f"{what} is NaN or infinite; this optimizer step was refused on every rank and the weights are as before it. "
        "Look at these samples with batch.inspect(i) and at the loss function."
    )
