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


class Offloaded:
    """What ``tensors`` returns, in host memory except inside :meth:`on_device`."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], recorder: Recorder) -> None:
        self._tensors, self._recorder = tensors, recorder
        self._host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
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
            storage, copy = self._host.pop()
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)

    def _leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._tensors() if t.untyped_storage().nbytes()}
        with self._recorder.span("offload", bytes=sum(storage.nbytes() for storage in storages.values())):
            for storage in storages.values():
                held = _bytes_of(storage)
                copy = torch.empty(held.shape, dtype=held.dtype, pin_memory=storage.device.type == "cuda")
                copy.copy_(held)
                storage.resize_(0)
                self._host.append((storage, copy))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
