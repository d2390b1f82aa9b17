"""A rollout that sleeps while its trainer works: the decisions, and vLLM's own sleep mode over storages that really are given up.

vLLM's GPU worker, executor, engine core and allocator are its own; what maps and unmaps a GPU's memory empties and fills storages
of the CPU engine here, with NaN, so that whatever is out of order crashes or is NaN.
"""

import gc

import numpy as np
import pytest
import torch
from expect import refuses
from spawn import JOB, run
from test_rollout import NEVER, PROMPTS
from test_transition import Loss, mine_of, plan_of

from hfsdk.core.arguments import Generation, Learning
from hfsdk.core.errors import CallError
from hfsdk.core.layout import Layout
from hfsdk.core.runtime import Assignment
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.generation import vllm_sleep
from hfsdk.engine.process.recorder import Recorder

KV_CACHE_BYTES = 8 * 2**20


# --- the decisions ----------------------------------------------------------------------------------------------------


def test_the_weights_are_woken_before_the_cache_and_nothing_twice():
    follows, told = {"asleep": "filling", "filling": "awake", "awake": "asleep"}, []
    state = "awake"
    for _ in range(4):
        assert vllm_sleep.step(state, state) == ""
        told.append(vllm_sleep.step(state, follows[state]))
        state = follows[state]
    assert told == ["sleep", "weights", "kv_cache", "sleep"]
    assert vllm_sleep.step("filling", "asleep") == "sleep", "cancelled in between"
    assert vllm_sleep.step("awake", "filling") == "", "several updates: filled again where it is"
    with refuses(RuntimeError, "asleep", "cannot be awake"):
        vllm_sleep.step("asleep", "awake")


class Device:
    """100 bytes, 70 of them an engine's; what is told to fail does, once."""

    def __init__(self):
        self.there, self.fails, self.told = {"weights": 40, "kv_cache": 30}, set(), []

    def _may(self, what):
        self.told.append(what)
        if what in self.fails:
            self.fails.remove(what)
            raise MemoryError(what)

    def sleep(self):
        self.there["weights"] = 0
        self._may("sleep")
        self.there["kv_cache"] = 0

    def wake(self, name):
        self.there[name] = 10
        self._may(name)
        self.there[name] = {"weights": 40, "kv_cache": 30}[name]

    def restore(self):
        self._may("restore")
        self.there = {"weights": 40, "kv_cache": 30}

    def drop(self):
        self._may("drop")
        self.there["weights"] = 0

    def free_bytes(self):
        return 100 - sum(self.there.values())


@pytest.fixture
def asleep():
    device, recorder = Device(), Recorder(device=0, rank=0)
    sleep = vllm_sleep.Sleep(device, recorder)
    assert sleep.to("asleep")
    return sleep, device, recorder


def test_spans_have_the_bytes_that_were_given_up_and_came_back(asleep):
    sleep, device, recorder = asleep
    assert (sleep.state, sleep.away_bytes, device.free_bytes()) == ("asleep", 70, 100)
    assert not sleep.to("asleep")
    assert sleep.to("filling")
    assert sleep.away_bytes == 30
    assert sleep.to("awake")
    assert sleep.away_bytes == 0
    spans = [(span.name, span.attrs["what"], span.attrs["bytes"]) for span in recorder.take()[0]]
    assert spans == [("sleep", "weights kv_cache", 70), ("wake", "weights", 40), ("wake", "kv_cache", 30)]


def test_a_sleep_that_fails_leaves_the_engine_awake(asleep):
    sleep, device, _ = asleep
    sleep.to("filling"), sleep.to("awake")
    device.fails.add("sleep")
    with pytest.raises(MemoryError):
        sleep.to("asleep")
    assert (sleep.state, sleep.away_bytes, device.free_bytes()) == ("awake", 0, 30)
    assert sleep.to("asleep")


@pytest.mark.parametrize(("name", "wish", "state"), [("weights", "filling", "asleep"), ("kv_cache", "awake", "filling")])
def test_a_waking_that_fails_can_be_tried_again_or_given_up(asleep, name, wish, state):
    for again in (wish, "asleep"):
        sleep, device, _ = asleep
        sleep.to("asleep")
        for before in ["filling"] * (name == "kv_cache"):
            sleep.to(before)
        device.fails.add(name)
        with pytest.raises(MemoryError):
            sleep.to(wish)
        assert sleep.state == state
        assert device.there["weights"] == (0 if name == "weights" else 40), "what came of the weights is given up"
        sleep.to(again)
        assert sleep.state == again
    assert device.free_bytes() == 100


def test_an_engine_that_cannot_be_put_right_says_so_each_time(asleep):
    sleep, device, _ = asleep
    device.fails |= {"weights", "drop"}
    with pytest.raises(MemoryError, match="drop"):
        sleep.to("filling")
    told = len(device.told)
    for wish in ("filling", "awake"):
        with refuses(CallError, "release it"):
            sleep.to(wish)
    assert not sleep.to("asleep"), "the trainer goes on"
    assert len(device.told) == told


def test_before_it_is_freed_all_of_it_is_there(asleep):
    sleep, device, _ = asleep
    sleep.close()
    assert (sleep.state, device.free_bytes()) == ("awake", 30)
    sleep.close()


# --- vLLM's own ------------------------------------------------------------------------------------------------------


class Mapped(vllm_sleep.VllmSleep):
    """Of a CPU engine the storages, in vLLM's own allocator, as if they had been made in its pools."""

    storages = ()
    fails = ""
    """What is to fail next: ``"sleep"`` at its end, ``"unmap"``, or to map ``"weights"`` or ``"kv_cache"``, at a last storage."""

    def __init__(self, engine):
        super().__init__(engine)
        from vllm.device_allocator import AllocationData, cumem

        runner = engine.model_executor.driver_worker.worker.model_runner
        allocator = cumem.CuMemAllocator()
        by_tag = {"weights": [*runner.model.parameters(), *runner.model.buffers()], "kv_cache": runner.kv_caches}
        Mapped.storages, Mapped.last = [], {}
        for tag, tensors in by_tag.items():
            for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values():
                number, size = len(Mapped.storages), storage.nbytes()
                Mapped.storages.append(storage)
                Mapped.last[tag] = number
                allocator.pointer_to_data[number] = AllocationData((0, size, number, number), tag)
        cumem.CuMemAllocator.instance = allocator

    @staticmethod
    def map(handle):
        _, size, number, _ = handle
        if Mapped.last.get(Mapped.fails) == number:
            Mapped.fails = ""
            raise RuntimeError("CUDA Error: out of memory")
        storage = Mapped.storages[number]
        assert not storage.nbytes(), "mapped twice"
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN in every floating dtype

    @staticmethod
    def unmap(handle):
        number = handle[2]
        if Mapped.fails == "unmap" and number == Mapped.last["kv_cache"]:
            Mapped.fails = ""
            raise RuntimeError("CUDA Error: unknown error")
        assert Mapped.storages[number].nbytes(), "unmapped twice"
        Mapped.storages[number].resize_(0)

    @staticmethod
    def there():
        return sum(storage.nbytes() for storage in Mapped.storages)

    def free_bytes(self):
        return 2**40 - Mapped.there()

    @staticmethod
    def info():
        """Return (free, total); vLLM refuses to have slept where another process took more than it gave up."""
        taken = 0
        if Mapped.fails == "sleep" and not Mapped.there():
            Mapped.fails, taken = "", 2**30
        return 2**40 - Mapped.there() - taken, 2**40


def sleep_on_cpu():
    """Have rollouts of this process sleep: vLLM's GPU worker's methods over ``Mapped``."""
    import vllm.device_allocator as device_allocator
    from vllm.device_allocator import cumem
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from hfsdk.engine.process import gpus

    for name in ("sleep", "wake_up", "discard"):
        setattr(CPUWorker, name, getattr(Worker, name))
    device_allocator.get_mem_allocator_instance = lambda: cumem.CuMemAllocator.instance
    cumem.create_and_map, cumem.unmap_and_release = Mapped.map, Mapped.unmap
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.get_memory_info = Mapped.info
    vllm_sleep.VllmSleep = Mapped
    gpus.sleeps = lambda device_type, *, trained, pool_is_free: trained


class Whole:
    """A role on this rank, and what it has recorded."""

    def __init__(self, rank, world_size, folder, name):
        from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions
        from hfsdk.engine.worker.role_engine import RoleEngine
        from hfsdk.engine.worker.role_host import WorkerSetup
        from hfsdk.engine.worker.worker import Worker

        self.worker = Worker(rank)
        self.worker.setup = WorkerSetup(device=rank, rank=rank, world_size=world_size, pool="all", job_id=JOB, store="")
        options = RolloutOptions(max_model_len=128, max_num_seqs=16, cpu_weights="shared", kv_cache_bytes=KV_CACHE_BYTES)
        role = RoleSpec(
            name=name, kind="actor", folder=folder, model=ModelSpec.from_folder(folder), train=Layout(tp=2).fill(world_size),
            rollout=Layout(tp=1).fill(world_size), optimizer=AdamW(lr=1e-2), rollout_options=options,
        )  # fmt: skip
        self.hosted = self.worker.roles[name] = RoleEngine(role, self.worker)
        self.rollout = self.hosted.rollout

    def spans(self):
        return [span.name for span in self.worker.recorder.take()[0] if span.name in ("sleep", "wake", "reshard", "decode")]

    def generate(self, cancelled=False):
        from hfsdk.core.roles import Sampling
        from hfsdk.engine.process.safepoint import SafePoint

        table = Table({"prompt": PROMPTS, "position": np.arange(len(PROMPTS))})
        greedy = Assignment(arguments=Generation(sampling=Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)))
        out, _ = self.hosted.run("generate", table, greedy, SafePoint(lambda: cancelled))
        assert np.isfinite(out["rollout_log_probs"].flat).all()
        return out["response"].flat.tolist()

    def update(self):
        from hfsdk.engine.process.safepoint import SafePoint

        rows = Table({"prompt": PROMPTS, "position": np.arange(len(PROMPTS))})
        rows = rows.with_columns({"response": Ragged.of([np.arange(5)] * len(PROMPTS), np.int64)})
        options = Assignment(arguments=Learning(function=Loss()), mini_batches=plan_of(self.hosted, rows))
        self.hosted.run("update", rows.take(mine_of(self.hosted, rows)), options, SafePoint(lambda: False))


def phases(rank, world_size, folder):
    """Return by name what happened, for the test to judge."""
    from hfsdk.engine.process.safepoint import Cancelled, PeerFailed

    plain = Whole(rank, world_size, folder, "plain")
    assert plain.rollout.in_place
    expected = [plain.generate()]
    plain.update()
    expected.append(plain.generate())
    plain.worker.release("plain")
    del plain
    gc.collect()

    sleep_on_cpu()
    actor, seen = Whole(rank, world_size, folder, "actor"), {}
    rollout, worker, hosted = actor.rollout, actor.worker, actor.hosted
    all_of_it = sum(data.handle[1] for data in _allocator().pointer_to_data.values())
    seen["at the start"] = rollout.awake, Mapped.there(), actor.spans()
    seen["asleep"] = hosted.memory_parts()["rollout"], hosted.memory_parts()["kv_cache"], worker.memory()[3]["actor"]
    seen["asleep by plan"] = rollout.memory_bytes()
    seen["first"] = actor.generate() == expected[0], Mapped.there() == all_of_it, actor.spans()
    seen["awake"] = hosted.memory_parts()["rollout"] + hosted.memory_parts()["kv_cache"], worker.memory()[3]["actor"]
    seen["again"] = actor.generate() == expected[0], actor.spans()
    actor.update()
    seen["update"] = rollout.awake, Mapped.there(), actor.spans(), rollout.away_bytes == all_of_it
    with refuses(RuntimeError, "no weights yet"):
        rollout.generate(PROMPTS, [], actor_sampling(), (), NEVER, None, [])
    seen["after"] = actor.generate() == expected[1], actor.spans()
    if rank == 0:  # as a call of a role on a part of the pool does
        worker.rest()
    seen["one of two"] = actor.generate() == expected[1], [name for name in actor.spans() if name == "reshard"]

    def state_after(what, error, do):
        Mapped.fails = what
        with pytest.raises(error):
            do()
        assert not Mapped.fails, "it did not fail"
        return rollout._sleep.state

    seen["failed sleep"] = state_after("sleep", AssertionError, worker.rest), Mapped.there() == all_of_it
    seen["after a failed sleep"] = actor.generate() == expected[1]
    worker.rest()
    for name in ("weights", "kv_cache"):
        one_fails = name if rank else "", RuntimeError if rank else PeerFailed, actor.generate
        seen[f"{name} not woken"] = state_after(*one_fails), Mapped.there() == 0
        seen[f"{name} woken at last"] = actor.generate() == expected[1]
        worker.rest()
    worker.rest()
    with pytest.raises(Cancelled):
        actor.generate(cancelled=True)
    seen["cancelled"] = rollout._sleep.state
    seen["after a cancel"] = actor.generate() == expected[1]
    worker.rest()
    worker.release("actor")
    seen["closed"] = Mapped.there() == all_of_it
    actor = Whole(rank, world_size, folder, "actor")
    actor.generate()
    rollout = actor.rollout
    seen["lost"] = state_after("unmap", AssertionError, actor.worker.rest)  # to map what is mapped fails in turn
    actor.update()
    with refuses(CallError, "release it"):
        actor.generate()
    return seen


def actor_sampling():
    from hfsdk.core.roles import Sampling

    return Sampling(max_new_tokens=8)


def _allocator():
    from vllm.device_allocator import cumem

    return cumem.CuMemAllocator.instance


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() == 2 else 1.0)
    path = tmp_path_factory.mktemp("untied")
    model.save_pretrained(path)
    return str(path)


def test_a_rollout_sleeps_between_phases_and_generates_as_if_it_had_not(folder):
    for rank, seen in enumerate(run(phases, 2, folder)):
        asleep = seen.pop("asleep by plan")
        assert seen == {
            "at the start": (False, 0, ["sleep"]),
            "asleep": (0, 0, asleep),
            "first": (True, True, ["wake", "reshard", "wake", "decode"]),
            "awake": (asleep, 0),
            "again": (True, ["decode"]),
            "update": (False, 0, ["sleep"], True),
            "after": (True, ["wake", "reshard", "wake", "decode"]),
            "one of two": (True, ["reshard"]),
            "failed sleep": ("awake", True),
            "after a failed sleep": True,
            "weights not woken": ("asleep" if rank else "filling", bool(rank)),
            "weights woken at last": True,
            "kv_cache not woken": ("filling" if rank else "awake", False),
            "kv_cache woken at last": True,
            "cancelled": "filling",
            "after a cancel": True,
            "closed": True,
            "lost": "lost",
        }
