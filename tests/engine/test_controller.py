"""The controller over a runtime on a virtual clock: who hears of a failure, and what is kept."""

import gc
import threading
import weakref

import pytest
from expect import CEILING_S, refuses, until

import hfsdk as hf
from hfsdk.core.errors import CallError, CheckpointError, ColumnError, DependencyError, WorkerDiedError
from hfsdk.engine.calls import messages as m
from hfsdk.session.parts import parts_of


def score(completions):
    return [0.0 for _ in completions]


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as session:
        yield session


@pytest.fixture
def runtime(session):
    return parts_of(session).client._controller._runtime


@pytest.fixture
def roles(session):
    actor = session.actor("tiny")
    return actor, session.critic("tiny"), session.reward(score)


def failing(runtime, monkeypatch, where, method, error):
    """Let calls of ``method`` fail."""
    before = getattr(runtime, where)

    def broken(work):
        if work.call.method == method:
            raise error
        return before(work)

    monkeypatch.setattr(runtime, where, broken)
    return lambda: monkeypatch.setattr(runtime, where, before)


def settle(session):
    parts_of(session).client.settle(parts_of(session).client.open_calls())


@pytest.fixture
def broken(session, runtime, roles, monkeypatch):
    """A reward that fails, and updates of actor and critic that fail for it."""
    actor, critic, reward = roles
    mend = failing(runtime, monkeypatch, "task", "compute_scores", CallError("no score today"))
    batch = actor.generate(["one", "two"], max_new_tokens=4)
    scored = reward.compute_scores(batch)
    doubled = scored.map(lambda table: {"twice": table["scores"]}, ["scores"], ["twice"])
    updates = [role.update(doubled, lambda out, b: b["twice"]) for role in (actor, critic)]
    settle(session)
    mend()
    return batch, scored, updates


@pytest.mark.parametrize("look", ["root", "dependent", "fetch"])
def test_a_failure_that_was_seen_is_not_raised_again_by_what_depends_on_it(roles, broken, look):
    batch, scored, updates = broken
    with refuses(CallError, "no score today"):
        {"root": scored.wait, "dependent": updates[0].wait, "fetch": lambda: scored["scores"]}[look]()
    for use in (roles[0].compute_log_probs, roles[1].compute_values, roles[2].compute_scores):
        use(batch).wait()
    with refuses(DependencyError, "no score today"):  # a look says it whenever it is taken
        updates[1].wait()


def test_a_failure_nobody_looked_at_is_raised_once_at_the_next_call(roles, broken):
    with refuses(DependencyError, "no score today"):
        roles[1].compute_values(broken[0])
    roles[0].compute_log_probs(broken[0]).wait()
    roles[2].compute_scores(broken[0]).wait()


def test_every_failure_says_role_call_and_line(session, runtime, roles, monkeypatch):
    failing(runtime, monkeypatch, "call", "compute_values", ColumnError("no column 'zz'"))
    values = roles[1].compute_values(session.batch(prompt=[[1]], response=[[2]]))
    with refuses(ColumnError, "critic.compute_values (started at test_controller.py, line ", "): no column 'zz'"):
        values.wait()


def test_columns_released_while_the_call_ends_are_dropped(session, runtime, roles, monkeypatch):
    controller = parts_of(session).client._controller
    execution = controller._execution
    count, released = execution._count_updates, []

    def late(role, record):
        controller.send(m.Release((record.call.id,)))
        released.append(record)
        count(role, record)

    monkeypatch.setattr(execution, "_count_updates", late)
    roles[0].generate(["one"], max_new_tokens=4).wait()
    assert [record.stored for record in released] == [None]


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("released", ["when all is over", "while the first call runs"])
def test_nothing_keeps_what_released_calls_have_written(session, runtime, roles, monkeypatch, released):
    """Neither the calls that read it, nor what is remembered of them for pictures and for carrying them out again."""
    written, let_in = [], threading.Event()

    def watched(do):
        def done(work):
            assert let_in.wait(CEILING_S)
            outcome = do(work)
            written.extend(weakref.ref(part.handle) for part in outcome.stored.parts) if outcome.stored else None
            return outcome

        return done

    for where in ("call", "task"):
        monkeypatch.setattr(runtime, where, watched(getattr(runtime, where)))

    def step():
        actor, critic, reward = roles
        actor.generate(["nobody reads it"], max_new_tokens=4)
        batch = reward.compute_scores(critic.compute_values(actor.generate(["one", "two"], max_new_tokens=4)))
        batch = batch.map(lambda table: {"twice": table["scores"]}, ["scores"], ["twice"])
        return batch, [role.update(batch, lambda out, b: b["twice"]) for role in (actor, critic)]

    batch, updates = step()
    if released == "when all is over":
        let_in.set()
        settle(session)
        assert alive(written) == 6, "two ranks generate, two compute values, one task scores, one maps"
    del batch
    gc.collect()
    settle(session) if let_in.is_set() else session.batch(prompt=[[1]])  # whatever is sent takes releases along
    let_in.set()
    assert [update.wait().state for update in updates] == ["done", "done"], "who reads them has them"
    assert written
    until("a lane to let go of its last call, after that is told to be over", lambda: alive(written) == 0)


def test_a_checkpoint_that_is_gone_is_told_once(session, runtime, roles, monkeypatch):
    actor, batch = roles[0], session.batch(prompt=[[1]], response=[[2]])
    actor.update(batch, lambda out, b: out.log_probs).wait()
    parts_of(session).client.send(m.Recover("actor", "/gone", 1))
    mend = failing(runtime, monkeypatch, "call", "compute_log_probs", WorkerDiedError("it ended."))
    with refuses(WorkerDiedError, "checkpoint /gone"):
        actor.compute_log_probs(batch).wait()
    mend()
    load = runtime.load

    def missing(role, pool, state=None):
        if role.restore:
            raise CheckpointError(f"there is no {role.restore}.")
        load(role, pool, state)

    monkeypatch.setattr(runtime, "load", missing)
    with refuses(CheckpointError, "no /gone", "actor comes back", "initial weights"):
        actor.compute_log_probs(batch).wait()
    actor.compute_log_probs(batch).wait()
    assert actor.version == 0


def test_columns_per_token_are_compared_when_their_lengths_are_known_at_last(session, roles):
    actor, critic, _ = roles
    batch = critic.compute_values(actor.generate(["one", "two"], max_new_tokens=4))
    batch = batch.with_columns(old_log_probs=[[0.5] * 99, [0.5]])
    task = batch.drop("response").map(lambda table: {"x": table["values"]}, ["values", "old_log_probs"], ["x"])
    with refuses(ColumnError, "'old_log_probs'", "'values'", "sample 0 has 99 values"):
        task.wait()
