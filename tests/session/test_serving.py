"""What the server of kept sessions remembers: each request once, answers no longer than needed, no keeper that has ended."""

from concurrent.futures import Future

import pytest

from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.session import keeper_requests as k
from hfsdk.session import serving

ACT, LOOK = k.Ask(1, m.Release((1,))), k.Ask(1, q.StateOf(3))


class Done:
    """Counts what is done."""

    def __init__(self):
        self.num = 0

    def __call__(self):
        self.num += 1
        done = Future()
        done.set_result(Reply(self.num))
        return done


def test_asked_again_is_not_done_again_and_what_has_come_is_forgotten():
    answers, done = serving.Answers(1), Done()
    assert [answers.once(number, 1, ACT, done).result().value for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    for number in range(3, 3000):  # one request is not answered, however many are after it
        answers.once(number, 2, ACT, done)
    assert answers.once(2, 2, ACT, done).result().value == 2
    answers.once(3000, 3000, ACT, done)
    assert list(answers._known) == [3000]


def test_what_a_forgotten_kernel_asks_again_is_told_as_unknown():
    answers, done = serving.Answers(8), Done()
    assert "not known whether it was done" in str(answers.once(7, 7, ACT, done).result().errors[0])
    assert answers.once(6, 6, LOOK, done).result().value == 1
    assert answers.once(8, 8, ACT, done).result().value == 2


def test_the_server_has_done_with_a_keeper_that_has_ended(monkeypatch):
    class Keeper:
        alive = True

        def lives(self):
            return self.alive

    first, left = Keeper(), []
    there = [first]
    monkeypatch.setattr(serving, "keeper_of", lambda name, address: there[0])
    monkeypatch.setattr(serving, "done_with", left.append)
    keepers = serving.Keepers(None)
    assert keepers.enter("a") is first
    first.alive, there[0] = False, None
    assert keepers.enter("a") is None
    assert left == [first], "or its Ray would be used for ever"
    keepers.leave("a")
    keepers.rest(0.0)
    assert left == [first]


@pytest.mark.parametrize("path", ["http://[", "/fire"])
def test_a_damaged_request_is_refused_in_a_line(path):
    from types import SimpleNamespace

    class Twice(dict):
        def get(self, name, default=""):
            raise LookupError("said twice")

    server = object.__new__(serving.Server)
    server._respond = lambda connection, status, text: (status, text)
    headers = {} if "[" in path else Twice()
    assert server._admit(None, SimpleNamespace(path=path, headers=headers)) == (400, "what came is no request\n")
