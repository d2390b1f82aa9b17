"""Weights straight from rank to rank of two pools, in real processes over gloo: bit for bit, counted, never waited for in vain."""

import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from expect import until
from spawn import run
from test_bridge import blank, boxes_of, check_taken, cut, full_of, roles
from torch.distributed import distributed_c10d as c10d
from turns import let_others_run

from hfsdk.engine.calls.shadow_plan import plan_between
from hfsdk.engine.process import gloo_groups, rendezvous
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.process.safepoint import PeerFailed, SafePoint
from hfsdk.engine.weights import direct, transport
from hfsdk.engine.weights.bridge import Route
from hfsdk.engine.weights.direct import NOTHING, DirectLinks, Way
from hfsdk.engine.weights.role_state import SCALAR_HEAD, Shard

NEVER = SafePoint(lambda: False)

PAIRS = {
    2: [("tp1", "tp1")],
    4: [("tp2", "tp1 dp2"), ("tp2", "tp2"), ("tp1 dp2", "tp2"), ("pp2", "tp2"), ("tp1", "tp1 dp3")],
    5: [("tp4", "tp1"), ("tp2 pp2", "tp1"), ("tp1", "tp4"), ("tp2 dp2", "tp1")],
}
"""Ranks of both pools -> (trained layout, rollout's)."""


FOR_EVER_S = 3600.0
"""Of a link whose ranks must not wait for its limit: longer than any test may take."""


def link_of(folder, num_ranks, number=0, timeout_s=FOR_EVER_S):
    return Link(number, ("train", "rollout"), f"file://{folder}/link{number}", num_ranks, timeout_s=timeout_s)


class End:
    """One rank of a transfer: which tensors it has, and its way."""

    def __init__(self, rank, model, train, rollout="", dtype="fp32"):
        trained, self.shadow = roles(model, train, rollout, dtype)
        self.full, self.rank, self.first = full_of(model, dtype), rank, trained.train.size
        self.gives = rank < self.first
        where = {"source": rank} if self.gives else {"target": rank - self.first}
        self.way = Way.between(trained, self.shadow, Route.between(trained, self.shadow, **where))
        self.sources = self.targets = NOTHING
        if self.gives:
            at = trained.train.coordinates(rank)
            shard = Shard(spec=trained.model, layout=trained.train, at=at, scalar=trained.head == "scalar")
            self.sources = cut(shard.boxes, self.full, trained.model, trained.train.tp)
        else:
            tp = self.shadow.rollout.tp if self.shadow.rollout is not None else 1
            self.targets = blank(boxes_of(self.shadow, rank - self.first), self.full, trained.model, tp)
        self.plan = plan_between(trained, self.shadow) if rollout else None

    def go(self, group):
        NEVER.agree(group, self.way.problem(self.sources, self.targets))
        sums = self.way.fingerprints(self.sources)
        report = self.way.move(self.sources, self.targets, group)
        return replace(report, proof=self.way.proof(sums, self.targets, group))

    def check(self, report):
        """What arrived, and what was counted on the way."""
        route = self.way.route
        if self.gives:
            assert report.bytes_sent == sum(route.planned) == sum(bundle.num_bytes for bundle in self.way.given())
            assert report.bytes_received == 0
            assert report.proof is None
        else:
            assert list(report.received_from) == list(route.planned)
            assert sum(report.proof.proven) == report.proof.num_boxes == sum(move.target == self.rank for move in route.moves)
            check_taken(self.shadow, self.rank - self.first, self.targets, self.full)
        if self.plan is not None:
            assert (report.bytes_sent, report.bytes_received) == (
                self.plan.bytes_sent(self.rank), self.plan.bytes_received(self.rank),
            )  # fmt: skip


def pairs(rank, world_size, folder):
    torch.manual_seed(rank)
    links, link, made = DirectLinks(), link_of(folder, world_size), []
    for train, rollout in PAIRS[world_size]:
        for model, dtype in (("untied", "fp32"), ("tied", "bf16")):
            for bucket in (transport.BUCKET_BYTES["cpu"], 2**12):  # the small one cuts every tensor into rounds
                transport.BUCKET_BYTES["cpu"], before = bucket, transport.BUCKET_BYTES["cpu"]
                end = End(rank, model, train, rollout, dtype)
                with links.using(link, rank, 1) as group:
                    end.check(end.go(group))
                    made.append(id(group))
                transport.BUCKET_BYTES["cpu"] = before
    links.leave_all()
    return len(set(made)), dist.get_world_size()


@pytest.mark.parametrize("world_size", PAIRS)
def test_a_rollout_gets_what_the_plan_says(world_size, tmp_path):
    """Over one link, whatever goes over it, and the process's own world stays as it is."""
    assert run(pairs, world_size, str(tmp_path)) == [(1, world_size)] * world_size


def critics(rank, world_size, folder):
    links, link = DirectLinks(), link_of(folder, world_size)
    for model, dtype in (("untied scalar", "fp32"), ("tied scalar", "bf16")):
        end = End(rank, model, "tp2", "", dtype)
        with links.using(link, rank, 1) as group:
            report = end.go(group)
        if not end.gives:
            assert end.targets[SCALAR_HEAD].dtype == torch.float32
        end.check(report)


def test_a_critic_that_infers_gets_a_training_layout(tmp_path):
    run(critics, 4, str(tmp_path))


def unfit(rank, world_size, folder):
    """One taker's tensors are of another dtype than the plan's: every rank hears of it before anything is written."""
    end, links = End(rank, "untied", "tp2", "tp1 dp2"), DirectLinks()
    if rank == 3:
        end.targets = {name: tensor.to(torch.bfloat16) for name, tensor in end.targets.items()}
    try:
        with links.using(link_of(folder, world_size), rank, 1) as group:
            end.go(group)
    except Exception as error:
        assert not any(tensor.any() for tensor in end.targets.values())
        return type(error).__name__
    return "ok"


def test_what_does_not_fit_is_said_before_anything_is_written(tmp_path):
    assert run(unfit, 4, str(tmp_path)) == ["PeerFailed", "PeerFailed", "PeerFailed", "RuntimeError"]


class TroubleError(Exception):
    pass


def failing(rank, world_size, folder):
    """Rank 1 fails after its first round; nobody waits for it, and over a new link all goes well."""
    transport.BUCKET_BYTES["cpu"] = 2**12
    links, told = DirectLinks(), ""
    end = End(rank, "untied", "tp2", "tp1 dp2")
    if rank == 1:
        before = transport._Run._copy

        def copy(self, step):
            raise TroubleError

        transport._Run._copy = copy
    try:
        with links.using(link_of(folder, world_size), rank, 1) as group:
            end.go(group)
    except TroubleError:
        told = "TroubleError"
    except RuntimeError as error:
        told = str(error)
    if rank == 1:
        transport._Run._copy = before
    end = End(rank, "untied", "tp2", "tp1 dp2")
    with links.using(link_of(folder, world_size, 1), rank, 2) as group:
        end.check(end.go(group))
    return told


def test_a_rank_that_fails_lets_all_others_go(tmp_path):
    from hfsdk.engine.ray.pools import PEER_LEFT

    found = run(failing, 4, str(tmp_path))
    assert found[1] == "TroubleError"
    for told in found:
        assert told == "TroubleError" or any(words in told for words in PEER_LEFT), told


def cut_while_waiting(rank, world_size, folder):
    """Rank 0 gives nothing until rank 1 is gone, which is cut, from another thread; nor does rank 0 wait when it looks."""
    end, links, gone = End(rank, "untied", "tp1", "tp1"), DirectLinks(), Path(folder) / "gone"

    def cut():
        let_others_run(200)
        links.cut(1)

    try:
        with links.using(link_of(folder, world_size), rank, 1) as group:
            NEVER.agree(group)
            if rank == 0:
                until("the end of rank 1's wait", gone.exists)
            else:
                threading.Thread(target=cut).start()
            end.way.move(end.sources, end.targets, group)
    except (PeerFailed, RuntimeError) as error:
        if rank == 1:
            gone.touch()
        return type(error).__name__, len(links._joined)
    return "ok"


def test_a_cut_ends_a_wait_at_once(tmp_path):
    assert run(cut_while_waiting, 2, str(tmp_path)) == [("RuntimeError", 0), ("PeerFailed", 0)]


class Kernels:
    """What CUDA says of kernels that wait for a peer for ever."""

    def record(self, stream):
        self.stream = stream

    def query(self):
        return False


def test_on_gpus_the_host_never_waits_in_cuda(monkeypatch):
    """A kernel of NCCL waits for its peers for ever, and with it whoever asks CUDA to wait for the kernel."""
    monkeypatch.setattr(torch.cuda, "Event", Kernels)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: f"stream {gpu}")
    with pytest.raises(RuntimeError, match=r"not there within 0\.2 s"):
        direct._await_stream(0, 0.2, lambda: False)
    with pytest.raises(PeerFailed):
        direct._await_stream(0, 60.0, lambda: True)


def half_done(rank, world_size, folder):
    """Rank 3 fails when it has all it needs: no other rank goes on as if all had, to wait for rank 3 in its own pool."""
    end, links = End(rank, "untied", "tp2", "tp1 dp2"), DirectLinks()
    try:
        with links.using(link_of(folder, world_size), rank, 1) as group:
            end.go(group)
            if rank == 3:
                raise TroubleError("trouble")
    except (TroubleError, RuntimeError) as error:
        return str(error)
    return "ok"


def test_it_is_done_on_all_ranks_or_on_none(tmp_path):
    from hfsdk.engine.ray.pools import PEER_LEFT

    *others, last = run(half_done, 4, str(tmp_path))
    assert last == "trouble"
    assert all(any(words in told for words in PEER_LEFT) for told in others), others


def cutting(rank, world_size, folder):
    """A link that is cut while it is used is gone; another call's cut is nobody's business."""
    links, link, outcome = DirectLinks(), link_of(folder, world_size), []
    for call_id in (7, 8):
        end = End(rank, "untied", "tp1", "tp1")
        try:
            with links.using(link, rank, 8) as group:
                end.go(group)
                links.cut(call_id)
            outcome.append("ok")
        except PeerFailed:
            outcome.append("cut")
    return outcome, len(links._joined)


def test_a_cut_transfer_is_not_taken_for_a_whole_one(tmp_path):
    assert run(cutting, 2, str(tmp_path)) == [(["ok", "cut"], 0)] * 2


def replacing(rank, world_size, folder):
    """A link between the same pools, opened again, takes the place of the old one; one of other pools stays."""
    links = DirectLinks()
    other = Link(5, ("train", "critic.inference"), f"file://{folder}/link5", world_size)
    for link in (link_of(folder, world_size), other, link_of(folder, world_size, 1)):
        with links.using(link, rank, 1) as group:
            NEVER.agree(group)
    kept = sorted(links._joined)
    links.leave(5)
    return kept, sorted(links._joined), len(c10d._world.pg_group_ranks)


def test_a_pool_s_old_link_goes_when_the_new_one_comes(tmp_path):
    assert run(replacing, 2, str(tmp_path)) == [([1, 5], [1], 2)] * 2  # the default world, and link 1


def test_on_gpus_nccl_connects_before_the_first_batch(monkeypatch, tmp_path):
    """Some ranks have no part in a first batch, and would be waited for: NCCL's connections stand before."""
    said, handling = [], []

    class Backend:
        def __init__(self, store, rank, size, options=None, timeout=None):
            self.timeout = options._timeout if options else timeout
            said.append((type(self).__name__, rank, size, self.timeout.total_seconds()))
            handling.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))

        def _set_sequence_number_for_group(self):
            pass

    class Gloo(Backend):
        pass

    class Nccl(Backend):
        Options = SimpleNamespace

        def eager_connect_single_device(self, device):
            said.append(("connected", str(device)))

    class Group:
        BackendType = dist.ProcessGroup.BackendType

        def __init__(self, *given):
            self.backends = {}

        def _register_backend(self, device, kind, backend):
            self.backends[device.type] = backend

        def _set_default_backend(self, kind):
            self.kind = kind

        def _set_group_name(self, name):
            pass

    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(gloo_groups, "make", lambda store, rank, size, timeout: Gloo(store, rank, size, timeout=timeout))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    link = Link(3, ("a", "b"), f"file://{tmp_path}/store", 4, ("127.0.0.1",) * 4)
    rendezvous._store_of(link, timedelta(seconds=5))[1].add("here", 3)  # the others
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    group = rendezvous.meet(link, 2, gpu=6)
    c10d._world.pg_group_ranks.pop(group)
    assert said == [("Gloo", 2, 4, 600.0), ("Nccl", 2, 4, 600.0), ("connected", "cuda:6")]
    assert (sorted(group.backends), group.kind) == (["cpu", "cuda"], Group.BackendType.NCCL)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "the pool's own groups are made on its own interface"
    assert handling == ["0", "0"], "torch's watchdog would end a process whose peer has died"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ, "of the pool's own groups it is torch's to choose"
