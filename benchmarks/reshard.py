"""Moving the actor's weights into the rollout as planned, against gathering them: bytes, seconds, memory.

Targets, for four transitions of a model shaped like SmolLM2-135M (with 8 query and 4 kv heads, so that tp divides them) in fp32,
mode ``shared``, four ranks:

* bytes received by every rank: measured = planned = what it lacks;
* the slowest rank takes at most 1.15 x the largest bytes / bandwidth over ranks and links. Bandwidths are measured in this run,
  with the same ranks sending at once and each copying within itself meanwhile (ranks share the cores, so these links slow each
  other), in messages of 4 MB without boxes, into memory that is there already: what moving so many bytes costs by itself.
  Beside it, without a target: the same exchange into memory taken anew ("anew s"), since the rollout's memory has to be taken
  when it comes, and the plan carried out into memory that is there ("in room s");
* where a rank receives at most half the bytes of the gather it is at least twice as fast, and never slower;
* weights that are on a rank twice, by the census of storages: none, while training and while generating;
* memory beside the training shard grows by at most what the rank lacks and one bucket (from the process's own high-water mark).

The gather is what most systems do (per tensor: all-gather over tp, broadcast over pp, keep one's shard), in the same processes,
groups and rollout parameters, taking turns with the transition.

Uses four worker processes of one thread each on whatever cores there are: with two cores, four ranks share them.

    python benchmarks/reshard.py --check          about 5 minutes
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, parser, quiet_transformers, say, short, table

import hfsdk as hf

PAIRS = (("tp4", "tp2"), ("tp2 pp2", "tp2"), ("tp2 dp2", "tp1"), ("tp4", "tp1"))
SLOWEST, TWICE, NEVER_SLOWER = 1.15, 2.0, 1.0
DEVICES = 4
CENSUS = ["total_bytes", "planned_bytes", "trainer_bytes", "rollout_bytes", "shared_bytes", "aside_bytes", "redundant_bytes"]
MESSAGE = 2**20
"""Numbers in a message when the bare links are measured."""


def make_model(folder: Path, layers: int) -> None:
    """Write random weights in the shape of SmolLM2-135M with 8 and 4 heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    quiet_transformers()
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)


class Lab:
    """One rank's side: the transition, the gather and the bare links, each timed with all ranks starting at once."""

    def __init__(self, rank: Any) -> None:
        self.hosted, self.me = rank._hosted, rank.rank
        transition, self.world = self.hosted.transition, self.hosted.groups.world
        self.residency, self.plan = transition.residency, transition.plan
        self.sources = dict(self.residency._trainer)
        self.room: Any = None
        self.targets: dict[str, Any] = {}

    def timed(self, action: Any) -> tuple[float, Any, int]:
        """Return seconds, the result, and by how much the process grew meanwhile."""
        import time

        import torch.distributed as dist

        dist.barrier(self.world)
        with open("/proc/self/clear_refs", "w") as marks:
            marks.write("5")  # forget the high-water mark
        before = _memory("VmRSS")
        started = time.perf_counter()
        result = action()
        seconds = time.perf_counter() - started
        grown = _memory("VmHWM") - before
        dist.barrier(self.world)
        return seconds, result, grown

    def in_room(self) -> None:
        """Carry out the plan into tensors that are there already: nothing is shared, given up or taken anew."""
        import torch

        from hfsdk.engine.weights import transport

        if not self.targets:
            for name, tensor in self.residency._rollout.items():
                self.targets[name] = torch.ones(tensor.shape)
        transport.execute(self.plan, self.me, self.sources, self.targets, self.world, checked=True)

    # -- the gather

    def prepare_gather(self) -> None:
        """List every training parameter of every stage, and what this rank keeps of it."""
        import torch.distributed as dist

        plan = self.plan
        self.at = {rank: plan.train_at(rank) for rank in range(plan.num_ranks)}
        shapes: list[Any] = [None] * plan.num_ranks
        dist.all_gather_object(shapes, {name: tuple(t.shape) for name, t in self.sources.items()}, group=self.world)
        first = {stage: next(r for r, at in self.at.items() if at.pp == stage) for stage in range(plan.train.pp)}
        self.units = [(stage, name, shape) for stage, rank in first.items() for name, shape in shapes[rank].items()]
        self.kept: dict[Any, list[Any]] = {}
        for move in plan.moves:
            if move.target == self.me and move.target_local not in self.residency.shared:
                at = self.at[move.source]
                self.kept.setdefault((at.pp, move.source_local), []).append((at.tp, move))

    def gather(self) -> int:
        """Assemble every tensor, keep this rank's shard; return the bytes received."""
        residency, received = self.residency, 0
        for name, tensor in residency._rollout.items():
            if name not in residency.shared:
                residency._fill(tensor, residency._bytes[name])
        for stage, name, shape in self.units:
            shards, count = self._assembled(stage, name, shape)
            received += count
            for tp, move in self.kept.get((stage, name), ()):
                target = residency._rollout[move.target_local][_box(move.target_start, move.size)]
                target.copy_(shards[tp][_box(move.source_start, move.size)])
        return received

    def _assembled(self, stage: int, name: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        import torch
        import torch.distributed as dist

        tp, mine, received = self.plan.train.tp, self.at[self.me], 0
        shards = torch.empty((tp, *shape))
        if stage == mine.pp and tp > 1:
            dist.all_gather_into_tensor(shards.view(-1, *shape[1:]), self.sources[name], group=self.hosted.groups.tp)
            received = shards.nbytes * (tp - 1) // tp
        elif stage == mine.pp:
            shards[0] = self.sources[name]
        if self.plan.train.pp > 1:
            owner = next(r for r, at in self.at.items() if (at.pp, at.tp, at.dp) == (stage, mine.tp, mine.dp))
            dist.broadcast(shards, src=owner, group=self.hosted.groups.pp)
            received += 0 if stage == mine.pp else shards.nbytes
        return shards, received

    def drop(self) -> None:
        """Give up what the gather made."""
        for name in self.residency._rollout:
            self.residency._empty_rollout(name)

    # -- the bare links

    def bare(self, copied: int, anew: bool = False) -> None:
        """Send, receive and copy within as many bytes as the transition does, in large messages; ``anew`` into new memory."""
        import torch
        import torch.distributed as dist

        peers, matrix = [r for r in range(self.plan.num_ranks) if r != self.me], self.plan.matrix
        ways = [(dist.isend, peer, int(matrix[self.me, peer]) // 4) for peer in peers if matrix[self.me, peer]]
        ways += [(dist.irecv, peer, int(matrix[peer, self.me]) // 4) for peer in peers if matrix[peer, self.me]]
        source = self.sources["embedding.word_embeddings.weight"] if self.at[self.me].pp == 0 else self._largest()
        if self.room is None and not anew:  # memory that is there, and touched
            self.room = [None if send is dist.isend else torch.ones(count) for send, _, count in ways], torch.ones(copied // 4)
        new = [None if send is dist.isend else torch.empty(count) for send, _, count in ways] if anew else []
        there, inside = (new, torch.empty(copied // 4)) if anew else self.room
        rounds = max([1, *(-(-count // MESSAGE) for _, _, count in ways), -(-len(inside) // MESSAGE)])
        under_way: list[Any] = []
        for number in range(rounds):
            operations = []
            for (way, peer, count), into in zip(ways, there, strict=True):
                first, last = number * MESSAGE, min(count, (number + 1) * MESSAGE)
                if first < last:
                    buffer = _slice(source, first, last) if into is None else into[first:last]
                    operations.append(dist.P2POp(way, buffer, group=self.world, group_peer=peer))
            under_way.append(dist.batch_isend_irecv(operations) if operations else [])
            first, last = number * len(inside) // rounds, (number + 1) * len(inside) // rounds
            inside[first:last] = _slice(source, first, last)
            for work in under_way.pop(0) if len(under_way) > 1 else ():
                work.wait()
        for works in under_way:
            for work in works:
                work.wait()

    def _largest(self) -> Any:
        return max(self.sources.values(), key=lambda tensor: int(tensor.numel()))


def _slice(source: Any, first: int, last: int) -> Any:
    """Return so many numbers of a tensor, going round its memory."""
    flat = source.detach().view(-1)
    at = first % max(1, len(flat) - (last - first))
    return flat[at : at + last - first]


def _memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _box(start: Any, size: Any) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def on_rank(rank: Any, repeats: int) -> dict[str, Any]:
    """Runs on every rank: take turns with the transition, the gather and the bare links; seconds, bytes and memory of each."""
    import torch

    lab = Lab(rank)
    found: dict[str, Any] = {name: [] for name in ("transition", "gather", "bare", "anew", "in_room", "peak", "gather_peak")}
    with torch.no_grad():
        lab.prepare_gather()
        for _ in range(repeats + 1):
            seconds, report, grown = lab.timed(lambda: lab.residency.to_rollout(lab.world))
            lab.residency.to_training()
            found["transition"].append(seconds)
            found["peak"].append(grown)
            found["wire"], found["copied"] = report.bytes_received, report.bytes_copied
            seconds, found["gather_bytes"], grown = lab.timed(lab.gather)
            lab.drop()
            found["gather"].append(seconds)
            found["gather_peak"].append(grown)
            found["bare"].append(lab.timed(lambda: lab.bare(found["copied"]))[0])
            found["anew"].append(lab.timed(lambda: lab.bare(found["copied"], anew=True))[0])
            found["in_room"].append(lab.timed(lab.in_room)[0])
    return {name: what[1:] if isinstance(what, list) else what for name, what in found.items()}  # the first warms up


def measure(session: Any, folder: Path, train: str, rollout: str, repeats: int) -> dict[str, Any]:
    """Measure one transition."""
    from hfsdk.engine.weights.transport import BUCKET_BYTES

    actor = session.actor(
        str(folder), train=train, rollout=rollout, cpu_weights="shared", optimizer=hf.AdamW(lr=1e-5),
        rollout_options=hf.RolloutOptions(max_model_len=64, max_num_seqs=4, cpu_weights="shared"),
    )  # fmt: skip
    actor.generate([[5, 6, 7]] * 4, max_new_tokens=2).wait()
    generating = actor.census().to_pandas()
    ranks = actor.run(on_rank, repeats)
    census = [(str(found["moment"].iloc[0]), *found[CENSUS].max()) for found in (actor.census().to_pandas(), generating)]
    plan = actor.reshard_plan
    everyone = range(plan.num_ranks)
    timed = ("transition", "gather", "bare", "anew", "in_room")
    slowest = {name: np.max([rank[name] for rank in ranks], axis=0) for name in timed}
    allowed = [plan.bytes_missing(r) + BUCKET_BYTES["cpu"] for r in everyone]
    peaks = [int(np.median(rank["peak"])) for rank in ranks]
    return {
        "train": train, "rollout": rollout,
        "planned": [plan.bytes_received(r) for r in everyone], "wire": [rank["wire"] for rank in ranks],
        "bound": [plan.bytes_missing(r) for r in everyone], "gather_bytes": [rank["gather_bytes"] for rank in ranks],
        "seconds": float(np.median(slowest["transition"])), "gather_seconds": float(np.median(slowest["gather"])),
        "speedup": float(np.median(slowest["gather"] / slowest["transition"])),
        "in_room_seconds": float(np.median(slowest["in_room"])),
        "there_seconds": float(np.median(slowest["bare"])), "over_there": float(np.median(slowest["transition"] / slowest["bare"])),
        "anew_seconds": float(np.median(slowest["anew"])), "over_anew": float(np.median(slowest["transition"] / slowest["anew"])),
        "census": [[moment, *map(int, numbers)] for moment, *numbers in census],
        "peak_extra": peaks, "allowed": allowed, "gather_peak": [int(np.median(rank["gather_peak"])) for rank in ranks],
    }  # fmt: skip


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5, help="measurements of each, after one to warm up (default 5)")
    made.add_argument("--layers", type=int, default=30, help="fewer, an even number, to try the benchmark out (default 30)")
    arguments = made.parse_args()
    report = Report("reshard", f"{DEVICES} worker processes of one thread each")
    rows = []
    with tempfile.TemporaryDirectory(prefix="hfsdk-reshard-") as name:
        make_model(Path(name), arguments.layers)
        for train, rollout in PAIRS:
            with hf.Session(devices=DEVICES, seed=0) as session:
                rows.append(measure(session, Path(name), train, rollout, arguments.repeats))
            say(f"{train} to {rollout}: {rows[-1]['seconds']:.3f} s, gather {rows[-1]['gather_seconds']:.3f} s")
    head = (
        "train", "rollout", "plan MB", "wire MB", "bound MB", "gather MB", "s", "in room s", "bytes/bw s", "x", "anew s",
        "gather s", "grown MB", "allowed MB", "gather grown MB",
    )  # fmt: skip
    mega = [
        (r["train"], r["rollout"], *(short(max(r[n]) / 1e6) for n in ("planned", "wire", "bound", "gather_bytes")),
         *(short(r[n]) for n in ("seconds", "in_room_seconds", "there_seconds", "over_there", "anew_seconds")),
         short(r["gather_seconds"]),
         *(short(max(r[n]) / 1e6) for n in ("peak_extra", "allowed", "gather_peak")))
        for r in rows
    ]  # fmt: skip
    say("\nbytes received and memory of the fullest rank, seconds of the slowest (medians)\n", table(head, mega), sep="\n")
    where = ("train", "rollout", "moment", *(name.replace("_bytes", " MB") for name in CENSUS))
    counted = [
        (r["train"], r["rollout"], moment, *(short(number / 1e6) for number in numbers))
        for r in rows for moment, *numbers in r["census"]
    ]  # fmt: skip
    say("\nweights on the fullest rank, counted from storages; planned: by the boxes\n", table(where, counted), sep="\n")
    report.details["rows"] = rows
    for r in rows:
        name = f"{r['train']} to {r['rollout']}"
        off = max(abs(a - b) + abs(a - c) for a, b, c in zip(r["planned"], r["wire"], r["bound"], strict=True))
        report.add(f"{name}: wire, plan and bound differ by", off, "bytes", at_most=0)
        report.add(f"{name}: slowest rank / largest bytes per bandwidth", r["over_there"], "x", at_most=SLOWEST)
        report.add(f"{name}: slowest rank / the bare bytes into memory taken anew", r["over_anew"], "x")
        half = max(r["planned"]) <= max(r["gather_bytes"]) / 2
        report.add(f"{name}: gather / transition", r["speedup"], "x", at_least=TWICE if half else NEVER_SLOWER)
        twice = max(numbers[-1] for _, *numbers in r["census"])
        report.add(f"{name}: weights there twice", twice, "bytes", at_most=0)
        over = max((p - a) / 1e6 for p, a in zip(r["peak_extra"], r["allowed"], strict=True))
        report.add(f"{name}: memory above what is missing and a bucket", over, "MB", at_most=0)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
