"""A call says which step it is of: steps under way at once are told apart, those by hand begin by a generation after learning."""

import pytest

import hfsdk as hf
from hfsdk.session.parts import parts_of

TEXTS = ["a", "bb", "ccc", "dddd"]


@pytest.fixture
def session():
    with hf.Session.simulated("1x4 A100-80GB") as session:
        session.actor("tiny")
        session.reward(lambda completions: [0.0 for _ in completions])
        session.place("colocate")
        yield session


def generate(session, k):
    return session.models.reward.compute_scores(session.models.actor.generate(session.prompts(TEXTS)[k], max_new_tokens=4))


def learn(session, batch):
    return session.models.actor.update(session.models.actor.compute_log_probs(batch), lambda out, b: out.log_probs)


def calls(session, step):
    return [f"{call.role}.{call.method}" for call in session.dataflow[step].calls if call.role != "session"]


GENERATED = ["actor.generate", "reward.compute_scores"]
LEARNED = ["actor.compute_log_probs", "actor.update"]


def test_a_generation_of_the_next_step_while_a_step_learns_is_told_apart(session):
    client = parts_of(session).client
    batches, numbers = [], []
    for k in range(3):  # one step ahead: k + 1 generates, then k learns
        numbers.append(client.begin_step(k))
        with client.in_step(numbers[k]):
            batches.append(generate(session, k))
        if k:
            with client.in_step(numbers[k - 1]):
                learn(session, batches[k - 1]).wait()
    with client.in_step(numbers[2]):
        learn(session, batches[2]).wait()
    assert numbers == [0, 1, 2]
    assert [calls(session, k) for k in numbers] == [GENERATED + LEARNED] * 3
    assert {span.step for span in session.trace[1].spans} == {1}
    assert client.begin_step(0) == 3, "the next one is a step of its own"


def test_by_hand_a_generation_after_learning_begins_the_next_step(session):
    for k in range(2):
        learn(session, generate(session, k)).wait()
        generate(session, k)
    assert calls(session, 0) == GENERATED + LEARNED
    assert calls(session, 1) == GENERATED * 2 + LEARNED
    assert calls(session, 2) == GENERATED


def test_a_step_in_which_nothing_was_learned_goes_on(session):
    client = parts_of(session).client
    assert [client.begin_step(0), client.begin_step(0)] == [0, 0]
    with client.in_step(0):
        learn(session, generate(session, 0)).wait()
    assert client.begin_step(0) == 1
    assert client.begin_step(7) == 7, "the number that a loaded session goes on with"
    generate(session, 0)
    assert calls(session, 7) == GENERATED


def test_another_threads_calls_are_of_no_step_but_their_own(session):
    import threading

    client = parts_of(session).client
    with client.in_step(client.begin_step(5)):
        learn(session, generate(session, 0)).wait()
        thread = threading.Thread(target=generate, args=(session, 1))
        thread.start()
        thread.join()
    assert calls(session, 5) == GENERATED + LEARNED
    assert calls(session, 6) == GENERATED
