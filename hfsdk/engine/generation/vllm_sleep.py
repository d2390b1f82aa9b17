"""Sleep of a generating engine: when its memory is there, and when a trainer on the same GPU has it.

vLLM *sleeps* between phases: weights and cache are given up, their addresses stay reserved, so that CUDA graphs stay valid (its
sleep mode, level 2). It wakes in two parts: the cache is not there yet while the weights travel::

    state      weights  cache   target: asleep     target: filling           target: awake
    asleep     -        -       nothing            wake weights -> filling   an error: the weights come first
    filling    there    -       sleep -> asleep    nothing                   wake kv_cache -> awake
    awake      there    there   sleep -> asleep    nothing: filled again     nothing

    training   asleep ... | filling: the plan writes all weights | awake: prefill, decode, ... | asleep ... training

A step that fails is put right at once: vLLM brings everything back that a failed sleep took (awake), and drops what a failed waking
brought of the weights (asleep). Where that fails too the engine is *lost*: it says so when it is to generate. The numbers are gone
in each of these cases: the weights must be filled again before the engine generates.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hfsdk.core.errors import CallError
from hfsdk.engine.process.recorder import Recorder

STEPS: dict[tuple[str, str], str] = {
    ("awake", "asleep"): "sleep", ("filling", "asleep"): "sleep", ("asleep", "asleep"): "",
    ("asleep", "filling"): "weights", ("filling", "filling"): "", ("awake", "filling"): "",
    ("filling", "awake"): "kv_cache", ("awake", "awake"): "",
}  # fmt: skip
"""(state, target) -> the order to vLLM: to sleep, to wake the memory of this name, or nothing."""


def step(state: str, target: str) -> str:
    """Return the order by which vLLM reaches the state ``target``, ``""`` for none.

    Raises:
        RuntimeError: it cannot be reached from this state in one step.
    """
    if (state, target) not in STEPS:
        raise RuntimeError(f"the rollout is {state} and cannot be {target} next; its weights come first, then its cache")
    return STEPS[state, target]


class Sleeper(Protocol):
    """An engine that sleeps."""

    def sleep(self) -> None:
        """Give weights and cache up."""
        ...

    def wake(self, name: str) -> None:
        """Bring the memory of ``"weights"`` or ``"kv_cache"``; its content is undefined."""
        ...

    def restore(self) -> None:
        """Bring everything back after a failed :meth:`sleep`."""
        ...

    def drop(self) -> None:
        """Give up the weights that a failed waking brought."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes of the device that nobody has."""
        ...


class Sleep:
    """The parts of an engine's memory that are there; it starts awake."""

    def __init__(self, engine: Sleeper, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self.state = "awake"
        """``"awake"``, ``"asleep"``, ``"filling"`` or ``"lost"``."""
        self.away_bytes = 0
        """Bytes of the device that others have meanwhile, as measured when they were given up."""

    def to(self, target: str) -> bool:
        """Reach ``"asleep"``, ``"filling"`` or ``"awake"``; return whether anything was done. Spans: ``sleep`` and ``wake``.

        Raises:
            CallError: the engine is lost.
            Exception: of the engine, as it is; the state is then one of the table's, or ``"lost"``.
        """
        if self.state == "lost":
            if target == "asleep":
                return False  # what can be done without it goes on
            raise CallError(
                "the rollout failed to sleep or to wake, and what it holds of the device is unknown since. "
                "Save the role's state, release it and declare it again."
            )
        action = step(self.state, target)
        if not action:
            return False
        with self._recorder.span("sleep" if action == "sleep" else "wake") as attrs:
            before = self._engine.free_bytes()
            try:
                self._do(action)
            except BaseException:
                self._put_right(action)
                raise
            change = self._engine.free_bytes() - before
            attrs.update(bytes=abs(change), what="weights kv_cache" if action == "sleep" else action)
        self.away_bytes = max(0, self.away_bytes + change) if target != "awake" else 0
        self.state = target
        return True

    def close(self) -> None:
        """Bring everything, before the engine frees it: vLLM's allocator cannot free memory that is not mapped."""
        if self.state == "asleep":
            self.to("filling")
        if self.state == "filling":
            self.to("awake")

    def _do(self, action: str) -> None:
        if action == "sleep":
            self._engine.sleep()
        else:
            self._engine.wake(action)

    def _put_right(self, action: str) -> None:
        """Return to a state of the table; a cache that failed to wake is tried again, or given up, as if it had not been."""
        before, self.state = self.state, "lost"
        if action == "sleep":
            self._engine.restore()
            self.state, self.away_bytes = "awake", 0
        else:
            if action == "weights":
                self._engine.drop()
            self.state = before


class VllmSleep:
    """vLLM's own sleep mode (``vllm/device_allocator``); the engine is built with ``enable_sleep_mode``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def sleep(self) -> None:
        """Level 2: buffers (of rotary positions) are kept in host memory, weights and cache nowhere."""
        self._engine.sleep(level=2)

    def wake(self, name: str) -> None:
        """Map memory to the addresses again; after the cache vLLM schedules again."""
        self._engine.wake_up(tags=[name])

    def restore(self) -> None:
        """Have the worker map all that is not mapped: the executor does not know yet that it slept."""
        self._engine.collective_rpc("wake_up")
        core = self._engine.engine_core.engine_core
        core.model_executor.sleeping_tags.clear()
        core.resume_scheduler()

    def drop(self) -> None:
        """Have the worker unmap the weights; those that were never mapped are passed over."""
        self._engine.collective_rpc("discard", args=(("weights",),))

    def free_bytes(self) -> int:
        """Return the free bytes of this GPU, torch's own cache emptied, as vLLM does when it sleeps and wakes."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


def forget_shared_buffers() -> None:
    """Have the next engine of this process make its own rotary positions: vLLM's kept ones sleep with this engine."""
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()


def pool_is_free() -> bool:
    """Whether an engine of this process can have the memory that vLLM can give up: there is one pool of it, for one engine."""
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.instance
    return cumem.cumem_available and (allocator is None or allocator.get_current_usage() == 0)
