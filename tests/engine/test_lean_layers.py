import pytest
import torch
from torch.nn.functional import rms_norm, silu

from hfsdk.engine.training import megatron_model
from hfsdk.engine.training.megatron_model import Norm, make_inputs_again, swiglu

TOKENS, WIDTH, EPS = 7, 48, 1e-2


def norm(x, weight):
    module = Norm(None, WIDTH, EPS).to(x.dtype)
    module.weight = weight
    return module(x)


def composed_norm(x, weight):
    return rms_norm(x, (WIDTH,), weight, EPS)


def composed_swiglu(halves):
    gate, up = halves.chunk(2, -1)
    return silu(gate) * up


def outputs_and_gradients(function, *inputs):
    torch.manual_seed(1)
    given = [torch.nn.Parameter(x.clone()) for x in inputs]
    out = function(*given)
    out.backward(torch.randn_like(out))
    return [out.detach(), *(x.grad for x in given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_compute_what_the_composed_operations_do(dtype):
    torch.manual_seed(0)
    x, weight, halves = (torch.randn(shape).to(dtype) for shape in ((TOKENS, 1, WIDTH), (WIDTH,), (TOKENS, 1, 2 * WIDTH)))
    x[0] = 0  # the norm of nothing is eps alone
    for found, wanted in (
        (outputs_and_gradients(norm, x, weight), outputs_and_gradients(composed_norm, x, weight)),
        (outputs_and_gradients(swiglu, halves), outputs_and_gradients(composed_swiglu, halves)),
    ):
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype == dtype
            torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_what_is_not_trained_gets_no_gradient():
    x, weight = torch.randn(TOKENS, 1, WIDTH, requires_grad=True), torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    norm(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_only_their_inputs_are_kept():
    kept = []

    def keep(x):
        kept.append(x.untyped_storage().data_ptr())
        return x

    x, weight, halves = (
        torch.nn.Parameter(torch.randn(shape)) for shape in ((TOKENS, 1, WIDTH), (WIDTH,), (TOKENS, 1, 2 * WIDTH))
    )  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = norm(x, weight), swiglu(halves)
    assert len(found) == 2
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (x, weight, halves)}
    assert inputs <= set(kept)
    assert len(set(kept) - inputs) == 1  # one number per token: of the norm, 1 / rms


class Layer(torch.nn.Module):
    """What a layer does with norms and the activation, with linears that keep their input or have it made again."""

    def __init__(self, again, *, trained=True):
        super().__init__()
        torch.manual_seed(2)
        self.norm = Norm(None, WIDTH, EPS)
        self.fc1, self.fc2 = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        if not trained:
            self.requires_grad_(False)
            self.beside = torch.nn.Parameter(torch.randn(3, WIDTH))
            self.fc2.register_forward_hook(lambda linear, given, out: out + torch.nn.functional.linear(given[0], self.beside).sum())
        if again:
            make_inputs_again([self.fc1, self.fc2])

    def forward(self, x):
        return self.fc2(swiglu(self.fc1(self.norm(x))))


def test_inputs_of_linears_are_made_again_bit_for_bit():
    x = torch.randn(TOKENS, 1, WIDTH)
    for trained in (True, False):
        gradients = []
        for again in (False, True):
            layer, given = Layer(again, trained=trained), x.clone().requires_grad_()
            layer(given).square().sum().backward()
            gradients.append([given.grad, *(p.grad for p in layer.parameters() if p.requires_grad)])
        assert len(gradients[0]) == (4 if trained else 2)
        for kept, made in zip(*gradients, strict=True):
            assert torch.equal(kept, made)


def test_a_linear_does_not_keep_what_is_made_again(monkeypatch):
    layer, kept, instead = Layer(again=True), [], megatron_model._instead
    monkeypatch.setattr(megatron_model, "_instead", lambda tensor: kept.append(instead(tensor)) or kept[-1])
    make_inputs_again([layer.fc1, layer.fc2])
    x = torch.randn(TOKENS, 1, WIDTH, requires_grad=True)
    layer(x).sum()
    weights = {layer.fc1.weight.data_ptr(), layer.fc2.weight.data_ptr()}
    assert {tensor.data_ptr() for tensor in kept if isinstance(tensor, torch.Tensor)} == weights
    assert sum(isinstance(tensor, megatron_model._Recomputed) for tensor in kept) == 2, "the normed x, and the product"


def test_a_linear_that_fails_leaves_nothing_behind():
    layer = Layer(again=True)
    with pytest.raises(RuntimeError):
        layer.fc1(torch.randn(TOKENS, WIDTH + 1))
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(torch.randn(TOKENS, 2 * WIDTH, requires_grad=True)).sum()
    assert held, "the hooks of the linear that failed are gone"


def test_a_second_backward_pass_works_where_the_graph_is_kept():
    layer, x = Layer(again=True), torch.randn(TOKENS, 1, WIDTH)
    out = layer(x).sum()
    out.backward(retain_graph=True)
    once = layer.fc2.weight.grad.clone()
    out.backward()
    assert torch.equal(layer.fc2.weight.grad, 2 * once)
