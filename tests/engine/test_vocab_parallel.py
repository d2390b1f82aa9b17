import itertools

import pytest
import torch
import torch.distributed as dist
from rows import every_row
from spawn import run

from hfsdk.engine.training import vocab_parallel
from hfsdk.engine.training.vocab_parallel import log_probs_and_entropy

N, VOCAB = 40, 260


def inputs():
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(N, VOCAB, generator=g)
    logits[0] *= 30  # nearly one-hot: probabilities that underflow
    targets = torch.randint(0, VOCAB, (N,), generator=g)
    targets[:2] = torch.tensor([0, VOCAB - 1])
    return logits, targets, torch.randn(N, generator=g), torch.randn(N, generator=g)


def reference():
    logits, targets, weight, entropy_weight = inputs()
    logits = logits.double().requires_grad_()
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    (chosen * weight + entropy * entropy_weight).sum().backward()
    return chosen.detach(), entropy.detach(), logits.grad


def shard(rank, world_size, width):
    """Rank's columns of the padded logits, their results and gradient; padding is large on purpose."""
    logits, targets, weight, entropy_weight = inputs()
    padded = torch.nn.functional.pad(logits, (0, width * world_size - VOCAB), value=100.0)
    mine = padded[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    group = dist.group.WORLD if world_size > 1 else None
    log_probs, entropy = log_probs_and_entropy(mine, targets, VOCAB, group)
    (log_probs * weight + entropy * entropy_weight).sum().backward()
    return [x.detach().numpy() for x in (log_probs, entropy, mine.grad)]


def shards(rank, world_size):
    # 160 columns: the last rank has 100 real ones; 320: the last rank has none
    return {width: shard(rank, world_size, width) for width in (160, 320)}


def check(parts, width):
    chosen, entropy, grad = reference()
    for log_probs, found, _ in parts:
        assert torch.allclose(torch.from_numpy(log_probs).double(), chosen, atol=2e-5, rtol=1e-6)
        assert torch.allclose(torch.from_numpy(found).double(), entropy, atol=2e-5)
    whole = torch.cat([torch.from_numpy(g) for *_, g in parts], 1)
    assert (whole[:, :VOCAB] - grad).norm() / grad.norm() < 1e-6
    assert not whole[:, VOCAB:].any()


def shards_in_chunks(rank, world_size):
    vocab_parallel.CHUNK_ELEMENTS = 7 * 160
    return shards(rank, world_size)


CHUNKS = (None, 1, 7, 39)
"""Positions at a time, of 40; ``None``: all, with the probabilities kept."""


def in_chunks(monkeypatch, rows, width):
    if rows is not None:
        monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", rows * width)
        monkeypatch.setattr(vocab_parallel._VocabParallel, "apply", None)


def test_one_rank_with_padding():
    with every_row() as row:
        for rows in CHUNKS:
            with pytest.MonkeyPatch.context() as patch, row(rows):
                check_one_rank_with_padding(patch, rows)


def check_one_rank_with_padding(monkeypatch, rows):
    in_chunks(monkeypatch, rows, 320)
    check([shard(0, 1, 320)], 320)


@pytest.mark.parametrize("work", [shards, shards_in_chunks])
def test_two_ranks_even_with_one_all_padding(work):
    results = run(work, 2)
    for width in (160, 320):
        check([result[width] for result in results], width)


def test_processors_take_fewer_positions_at_a_time(monkeypatch):
    monkeypatch.setattr(vocab_parallel, "CPU_CHUNK_ELEMENTS", 7 * 160)
    monkeypatch.setattr(vocab_parallel._VocabParallel, "apply", None)
    check([shard(0, 1, 320)], 320)


def test_in_chunks_nothing_of_n_times_v_is_kept_but_the_logits():
    logits = inputs()[0].requires_grad_()
    log_probs, _ = vocab_parallel._Chunked.apply(logits, torch.zeros(N, dtype=torch.long), VOCAB, None, True, 7, False)
    kept = log_probs.grad_fn.saved_tensors
    assert [x.shape for x in kept if x.numel() > N] == [logits.shape]
    assert any(x.data_ptr() == logits.data_ptr() for x in kept)


def test_the_gradient_may_take_the_place_of_the_logits():
    with every_row() as row:
        for dtype in [torch.float32, torch.bfloat16]:
            with pytest.MonkeyPatch.context() as patch, row(dtype):
                check_the_gradient_may_take_the_place_of_the_logits(patch, dtype)


def check_the_gradient_may_take_the_place_of_the_logits(monkeypatch, dtype):
    in_chunks(monkeypatch, 7, VOCAB)
    logits, targets, *_ = inputs()
    gradients = []
    for overwrite in (False, True):
        given = logits.to(dtype).requires_grad_()
        through = given * 1  # no leaf, as a model's logits are
        through.retain_grad()
        log_probs, entropy = log_probs_and_entropy(through, targets, VOCAB - 3, overwrite=overwrite)
        weighted = (log_probs * torch.arange(len(targets))).sum() + entropy.square().sum()
        weighted.backward(retain_graph=True)
        gradients.append(given.grad)
        assert torch.equal(through, through.grad) is overwrite
        if overwrite:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                weighted.backward()
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)


def test_entropy_is_optional():
    with every_row() as row:
        for entropy, rows in itertools.product([True, False], CHUNKS):
            with pytest.MonkeyPatch.context() as patch, row(entropy, rows):
                check_entropy_is_optional(entropy, patch, rows)


def check_entropy_is_optional(entropy, monkeypatch, rows):
    in_chunks(monkeypatch, rows, VOCAB)
    logits, targets, *_ = inputs()
    mine = logits.clone().requires_grad_()
    log_probs, found = log_probs_and_entropy(mine, targets, VOCAB, entropy=entropy)
    assert (found is None) is not entropy
    log_probs.sum().backward()
    other = logits.clone().requires_grad_()
    other.log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    assert torch.allclose(mine.grad, other.grad, atol=1e-5)


def test_entropy_alone_has_the_exact_gradient():
    with every_row() as row:
        for rows in CHUNKS:
            with pytest.MonkeyPatch.context() as patch, row(rows):
                check_entropy_alone_has_the_exact_gradient(patch, rows)


def check_entropy_alone_has_the_exact_gradient(monkeypatch, rows):
    in_chunks(monkeypatch, rows and min(rows, 7), VOCAB)
    logits = inputs()[0].double()[:8]
    entropy = log_probs_and_entropy(logits.float().requires_grad_(), torch.zeros(8, dtype=torch.long), VOCAB)[1]
    (grad,) = torch.autograd.grad(entropy.sum(), entropy.grad_fn.next_functions[0][0].variable)
    logits.requires_grad_()
    log_probs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(-(log_probs.exp() * log_probs).sum(), logits)
    assert (grad - exact).norm() / exact.norm() < 1e-6
