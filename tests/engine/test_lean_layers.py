import pytest
import torch
from torch.nn.functional import rms_norm, silu

from hfsdk.engine.training.lean_layers import Norm, swiglu

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
