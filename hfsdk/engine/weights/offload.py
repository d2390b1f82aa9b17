"""Tensors that stay in host memory and come to the device only while something needs them.

A role's weights are needed during its own calls, its gradients from the first backward pass to the step, masters and moments of
AdamW during the step alone; between them roles that share a device can have that memory (ZeRO-Offload, Ren et al., arXiv
2101.06840, keeps them there too, but steps on the host)::

    device   | actor's weights ....................................................... |
             |            [ reference ]                [ moments ]                     |   onload / offload: spans with bytes
    host     | reference  -----------   moments ------ ---------   reference, moments  |

A tensor keeps its identity: only its storage is emptied and filled again, so parameters, views and optimizers need not know.
Without CUDA the host's memory is the device's: everything happens as it would, and nothing is saved.

On a GPU the host's memory is pinned, and kept for the next round. Copies run on their own stream, so that neither the host nor
the GPU stands still: what was asked for ahead (:meth:`Offloaded.coming`) travels during the passes, what leaves does so during the
call after::

    compute   | forward, backward ......... (wait) AdamW ......... | the next call
    copies    [ moments to the device ]                            [ moments to the host ]   memory is free when they are through
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hfsdk.engine.process.recorder import Recorder

CHUNK_BYTES = 64 * 2**20
"""One allocation of host memory: a power of two, to which torch rounds whatever is pinned (pytorch issue 150517)."""


def empty(tensor: torch.Tensor, *, alone: bool) -> bool:
    """Free a tensor's storage and return whether that was possible; the tensor keeps its shape and can be filled again.

    A storage whose memory numpy saw (the user's ``.numpy()``) cannot be freed under it: the tensor then gets another one, unless
    others lie on the same (not ``alone``).
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
        return True
    if not alone:
        return False
    hollow = torch.empty_like(tensor)
    hollow.untyped_storage().resize_(0)
    tensor.data = hollow
    return True


class HostMemory:
    """Host memory in chunks, filled from its start.

    Args:
        pinned: whether it is pinned, for a GPU to copy from and to it by itself.
        keeps: whether it stays for the next round when it is not used: pinning takes longer than a copy.
        chunk_bytes: bytes of a chunk.
    """

    def __init__(self, *, pinned: bool, keeps: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned, self._keeps, self._chunk_bytes = pinned, keeps, chunk_bytes
        self._chunks: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the machine."""
        return len(self._chunks) * self._chunk_bytes

    def at(self, start: int, size: int) -> list[torch.Tensor]:
        """Return ``size`` bytes from ``start`` on, as the uint8 pieces that they lie in."""
        pieces, end = [], start + size
        while start < end:
            number, offset = divmod(start, self._chunk_bytes)
            while number >= len(self._chunks):
                self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            length = min(end - start, self._chunk_bytes - offset)
            pieces.append(self._chunks[number][offset : offset + length])
            start += length
        return pieces

    def used_up_to(self, end: int) -> None:
        """Say that nothing from ``end`` on is needed."""
        if not self._keeps:
            # Chunks behind the end have nothing in them; the one that the end falls into stays.
            del self._chunks[-(-end // self._chunk_bytes) :]


class CopyLane:
    """The stream for copies between host and device: on a GPU a separate one; on a processor they run at once.

    Args:
        streams: torch's module of the device's streams: ``torch.cuda``, or ``torch.cpu``, whose streams do nothing.
    """

    def __init__(self, streams: Any) -> None:
        self._streams = streams
        self._stream = self._streams.Stream()
        self._arrived: Any = None

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Run the copies made inside after earlier kernels, which wrote the leaving tensors or used the memory to be filled."""
        # Without this wait a copy could read what a kernel has not written yet.
        self._stream.wait_stream(self._streams.current_stream())
        try:
            yield
        finally:
            self._arrived = self._stream.record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, inside :meth:`copies`; the host does not wait for it."""
        with self._streams.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def hold(self, memory: torch.Tensor) -> None:
        """Keep memory that is about to be freed from being given to others before the copies from it are through."""
        if memory.is_cuda:
            memory.record_stream(self._stream)

    def wait(self) -> None:
        """Let kernels that are launched from now on run after the copies; the host goes on."""
        if self._arrived is not None:
            self._streams.current_stream().wait_event(self._arrived)


@dataclass(frozen=True)
class _Away:
    """A storage that was emptied: a tensor on it, its size, and where in host memory how many of its bytes are."""

    tensor: torch.Tensor
    size: int
    start: int
    copied: int


class Offloaded:
    """Tensors that lie in host memory except inside :meth:`on_device`.

    Args:
        tensors: everything that lies on the storages.
        recorder: takes a span of each way.
        device: the device they are on otherwise; by default the processor's memory.
        part: the part's name in spans.
        skip_zeros: whether a storage that is zero throughout need not travel, as gradients are after a step: it comes back zero.
        memory, lane: where they are meanwhile, and how they get there; by default what suits the device.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], recorder: Recorder, *, device: torch.device | None = None,
        part: str = "weights", skip_zeros: bool = False, memory: HostMemory | None = None, lane: CopyLane | None = None,
    ) -> None:  # fmt: skip
        self._tensors, self._recorder, self._part, self._skip_zeros = tensors, recorder, part, skip_zeros
        on_gpu = device is not None and device.type == "cuda"
        self._memory = memory or HostMemory(pinned=on_gpu, keeps=on_gpu)
        self._lane = lane or CopyLane(torch.cuda if on_gpu else torch.cpu)
        self._away: list[_Away] = []
        self._users = 1
        self._leave()

    @property
    def host_bytes(self) -> int:
        """Bytes that are in host memory now, instead of on the device."""
        return sum(storage.copied for storage in list(self._away))  # asked from another thread too

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Bring the tensors to the device, and back when the last who asked is done."""
        with self.coming():
            self._lane.wait()
            yield

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Begin to bring the tensors; who uses them inside asks for :meth:`on_device`, which waits for them."""
        self._users += 1
        try:
            if self._users == 1:
                self._come()
            yield
        finally:
            self._leave()

    def stay(self) -> None:
        """Bring the tensors to the device for good."""
        self._users += 1
        if self._users == 1:
            self._come()
        self._lane.wait()

    def _come(self) -> None:
        with self._recorder.span("onload", bytes=self.host_bytes, part=self._part), self._lane.copies():
            while self._away:
                # From the last to the first: so host memory is given up from its end while the device fills.
                away = self._away[-1]
                storage = away.tensor.untyped_storage()
                storage.resize_(away.size)
                content = _bytes_of(storage)
                if away.copied:
                    pieces = self._memory.at(away.start, away.copied)
                    for part, piece in zip(content.split([len(piece) for piece in pieces]), pieces, strict=True):
                        self._lane.copy(part, piece)
                else:
                    content.zero_()
                self._away.pop()  # not before it is there: a device without room must not lose it
                self._memory.used_up_to(away.start)

    def _leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        together: dict[int, list[torch.Tensor]] = {}
        for tensor in self._tensors():
            if tensor.untyped_storage().nbytes():
                together.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        with self._recorder.span("offload", part=self._part) as attrs, self._lane.copies():
            for first, *others in together.values():
                self._send(first, alone=not others)
            attrs["bytes"] = self.host_bytes

    def _send(self, tensor: torch.Tensor, *, alone: bool) -> None:
        content = _bytes_of(tensor.untyped_storage())
        size = len(content)
        start = self._away[-1].start + self._away[-1].copied if self._away else 0
        copied = 0 if self._skip_zeros and not content.any() else size
        pieces = self._memory.at(start, copied)
        for part, piece in zip(content.split([len(piece) for piece in pieces]) if pieces else (), pieces, strict=True):
            self._lane.copy(piece, part)
        self._lane.hold(content)
        del content
        if empty(tensor, alone=alone):
            self._away.append(_Away(tensor, size, start, copied))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
