from contextlib import contextmanager

import pytest
import torch

from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.weights.offload import CopyLane, HostMemory, Offloaded


def test_tensors_leave_and_come_back_bit_for_bit():
    weight = torch.nn.Parameter(torch.randn(5, 3))
    view, state = weight.data[1:3], {"moment": torch.randn(4).to(torch.bfloat16)}
    kept = weight.detach().clone(), state["moment"].clone()
    recorder = Recorder(0, 0)
    offloaded = Offloaded(lambda: [weight, *state.values()], recorder)
    assert weight.untyped_storage().nbytes() == state["moment"].untyped_storage().nbytes() == 0
    assert offloaded.host_bytes == 5 * 3 * 4 + 4 * 2
    with offloaded.on_device():
        assert offloaded.host_bytes == 0
        assert torch.equal(weight, kept[0])
        assert torch.equal(view, kept[0][1:3])
        assert torch.equal(state["moment"], kept[1])
        with offloaded.on_device():
            weight.data.add_(1)
        assert torch.equal(weight, kept[0] + 1)  # whoever asked first still needs it
        state["new"] = torch.ones(2)
    assert state["new"].untyped_storage().nbytes() == 0
    with offloaded.on_device():
        assert torch.equal(weight, kept[0] + 1)
        assert torch.equal(state["new"], torch.ones(2))
    spans = [(span.name, span.attrs["bytes"]) for span in recorder.take()[0]]
    assert spans == [("offload", 68), ("onload", 68), ("offload", 76), ("onload", 76), ("offload", 76)]


def test_what_goes_wrong_inside_sends_them_back_too():
    weight = torch.randn(4)
    kept = weight.clone()
    offloaded = Offloaded(lambda: [weight], Recorder(0, 0))
    try:
        with offloaded.on_device():
            raise ValueError("a loss of the user's")
    except ValueError:
        pass
    assert weight.untyped_storage().nbytes() == 0
    with offloaded.on_device():
        assert torch.equal(weight, kept)


def test_memory_that_numpy_saw_leaves_too_unless_others_lie_on_it():
    alone, flat = torch.nn.Parameter(torch.randn(4)), torch.randn(8)
    views = flat[:4], flat[4:]
    kept = alone.detach().clone(), flat.clone()
    seen = alone.detach().numpy(), flat.numpy()
    offloaded = Offloaded(lambda: [alone, *views], Recorder(0, 0))
    assert offloaded.host_bytes == alone.nbytes
    assert alone.untyped_storage().nbytes() == 0 < flat.untyped_storage().nbytes()
    with offloaded.on_device():
        assert torch.equal(alone, kept[0])
        assert torch.equal(flat, kept[1])
    assert seen[0].tolist() == kept[0].tolist()


class Streams:
    """In torch.cuda's place: says what was launched where, in order."""

    def __init__(self):
        self.said, self.now = [], "compute"

    def Stream(self):  # noqa: N802 - torch's name
        return SideStream(self)

    def current_stream(self):
        return SideStream(self, self.now)

    @contextmanager
    def stream(self, stream):
        self.now, before = stream.name, self.now
        yield
        self.now = before


class SideStream:
    def __init__(self, streams, name="side"):
        self.streams, self.name = streams, name

    def wait_stream(self, other):
        self.streams.said.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.streams.said.append(f"{self.name} marks")
        return self.name

    def wait_event(self, event):
        self.streams.said.append(f"{self.name} waits for the mark of {event}")


class SaidLane(CopyLane):
    def __init__(self, streams):
        super().__init__(streams)
        self.streams = streams

    def copy(self, target, source):
        super().copy(target, source)
        self.streams.said.append("copy")


def test_compute_waits_for_what_came_and_copies_for_what_was_computed():
    streams = Streams()
    weight = torch.randn(4)
    offloaded = Offloaded(lambda: [weight], Recorder(0, 0), lane=SaidLane(streams))
    sent = ["side waits for compute", "copy", "side marks"]
    assert streams.said == sent
    streams.said.clear()
    with offloaded.coming():
        assert streams.said == sent, "nobody waits before it is used"
        with offloaded.on_device():
            assert streams.said == [*sent, "compute waits for the mark of side"]
        streams.said.clear()
    assert streams.said == sent


def test_gradients_that_are_zero_do_not_travel_and_others_are_kept():
    buffer = torch.zeros(6)
    view, recorder = buffer[2:4], Recorder(0, 0)
    offloaded = Offloaded(lambda: [buffer, view], recorder, part="gradients", skip_zeros=True)
    assert buffer.untyped_storage().nbytes() == 0 == offloaded.host_bytes
    with offloaded.on_device():
        assert view.tolist() == [0, 0]
        view += torch.tensor([1.0, -0.0])
    assert offloaded.host_bytes == 24
    with offloaded.on_device():
        assert buffer.tolist() == [0, 0, 1, 0, 0, 0]
        buffer.zero_()[5] = -0.0
    with offloaded.on_device():
        assert torch.signbit(buffer).tolist() == [False] * 5 + [True]
    spans = [(span.name, span.attrs["bytes"], span.attrs["part"]) for span in recorder.take()[0]]
    ways = [("offload", 0), ("onload", 0), ("offload", 24), ("onload", 24), ("offload", 24), ("onload", 24), ("offload", 24)]
    assert spans == [(*way, "gradients") for way in ways]


@pytest.mark.parametrize("kept", [True, False])
def test_host_memory_is_used_again_or_given_back(kept):
    memory = HostMemory(pinned=False, keeps=kept, chunk_bytes=16)
    tensors = [torch.arange(n, dtype=torch.float32) for n in (3, 11, 1, 0)]
    copies = [tensor.clone() for tensor in tensors]
    offloaded = Offloaded(lambda: tensors, Recorder(0, 0), memory=memory)
    places = [piece.data_ptr() for piece in memory.at(0, 60)]
    assert (memory.num_bytes, len(places)) == (64, 4)
    for _ in range(2):
        with offloaded.on_device():
            assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))
            assert memory.num_bytes == 64 * kept
            tensors[1].add_(1)
            copies[1].add_(1)
    assert not kept or [piece.data_ptr() for piece in memory.at(0, 60)] == places


def test_a_device_without_room_loses_nothing(monkeypatch):
    tensors = [torch.randn(4), torch.randn(5), torch.randn(6)]
    copies = [tensor.clone() for tensor in tensors]
    offloaded = Offloaded(lambda: tensors, Recorder(0, 0), memory=HostMemory(pinned=False, keeps=True, chunk_bytes=8))
    resize = torch.UntypedStorage.resize_

    def full(storage, size):
        if size == tensors[1].nbytes:
            raise torch.OutOfMemoryError("no room")
        resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(torch.OutOfMemoryError), offloaded.on_device():
        pass
    assert offloaded.host_bytes == 15 * 4
    monkeypatch.undo()
    with offloaded.on_device():
        assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))


def test_what_stays_does_not_leave_again():
    weight = torch.randn(4)
    kept = weight.clone()
    offloaded = Offloaded(lambda: [weight], Recorder(0, 0))
    offloaded.stay()
    with offloaded.on_device():
        pass
    assert torch.equal(weight, kept)
    assert offloaded.host_bytes == 0
