"""Tensors that stay in host memory and come to the device only while something needs them.

A frozen model is needed during its own calls, masters and moments of AdamW during the optimizer's step alone; between them
roles that share a device can have that memory (ZeRO-Offload, Ren et al., arXiv 2101.06840, keeps them there too, but steps on the
host)::

    device   | actor's weights ....................................................... |
             |            [ reference ]                [ moments ]                     |   onload / offload: spans with bytes
    host     | reference  -----------   moments ------ ---------   reference, moments  |

A tensor keeps its identity: only its storage is emptied and filled again, so parameters, views and optimizers need not know.
Without CUDA the host's memory is the device's: everything happens as it would, and nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from hfsdk.engine.recorder import Recorder


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


class Offloaded:
    """What ``tensors`` returns, in host memory except inside :meth:`on_device`."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], recorder: Recorder) -> None:
        self._tensors, self._recorder = tensors, recorder
        self._host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._users = 1
        self._leave()

    @property
    def host_bytes(self) -> int:
        """Bytes that are in host memory now, instead of on the device."""
        return sum(copy.nbytes for _, copy in self._host)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Bring the tensors to the device, and back when the last who asked is done."""
        self._users += 1
        try:
            if self._users == 1:
                with self._recorder.span("onload", bytes=self.host_bytes):
                    self._come()
            yield
        finally:
            self._leave()

    def _come(self) -> None:
        while self._host:
            tensor, copy = self._host[-1]
            storage = tensor.untyped_storage()
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
            self._host.pop()  # not before it is there: a device without room must not lose it

    def _leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        together: dict[int, list[torch.Tensor]] = {}
        for tensor in self._tensors():
            if tensor.untyped_storage().nbytes():
                together.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        with self._recorder.span("offload") as attrs:
            for first, *others in together.values():
                held = _bytes_of(first.untyped_storage())
                copy = torch.empty(held.shape, dtype=held.dtype, pin_memory=held.is_cuda)
                copy.copy_(held)
                del held
                if empty(first, alone=not others):
                    self._host.append((first, copy))
            attrs["bytes"] = self.host_bytes


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
