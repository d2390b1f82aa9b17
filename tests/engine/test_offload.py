import torch

from hfsdk.engine.offload import Offloaded
from hfsdk.engine.recorder import Recorder


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
