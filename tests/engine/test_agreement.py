"""At a safe point every rank ends as all of them do: with its own error, another's, a difference, or a cancel, in this order."""

import pytest

pytest.importorskip("torch")
import torch

from hfsdk.engine.process.safepoint import Cancelled, PeerFailed, RanksDiffer, SafePoint


class Peer:
    """Stands for a group of two: the other rank's (cancelled, failed, state) are taken into the maximum."""

    def __init__(self, cancelled=False, failed=False, state=0):
        self.flags = torch.tensor([int(cancelled), int(failed), state, -state])

    def size(self):
        return 2

    def allreduce(self, tensors, op):
        tensors[0].copy_(torch.maximum(tensors[0], self.flags))
        return self

    def wait(self):
        return True


def ended(group, *, cancelled=False, error=None, state=0):
    try:
        SafePoint(lambda: cancelled).agree(group, error, state)
    except Exception as found:
        return type(found)
    return None


def test_what_one_rank_has_ends_all():
    assert ended(Peer(), state=0) is None
    assert ended(Peer(failed=True)) is PeerFailed
    assert ended(Peer(cancelled=True)) is Cancelled
    assert ended(Peer(state=5), state=6) is RanksDiffer
    assert ended(Peer(state=5), state=5) is None
    assert ended(Peer(), cancelled=True) is Cancelled
    assert ended(Peer(), error=ValueError("mine")) is ValueError


def test_an_error_comes_before_another_ranks_and_both_before_a_difference_and_a_cancel():
    everything = Peer(cancelled=True, failed=True, state=1)
    assert ended(everything, cancelled=True, error=ValueError("mine")) is ValueError
    assert ended(everything, cancelled=True) is PeerFailed
    assert ended(Peer(cancelled=True, state=1), cancelled=True) is RanksDiffer


def test_a_rank_alone_agrees_with_itself():
    assert ended(None) is None
    assert ended(None, cancelled=True) is Cancelled
    with pytest.raises(ValueError, match="mine"):
        SafePoint(lambda: True).agree(None, ValueError("mine"))
