"""A reward's samples on real workers: what is not scored, processes of its own, and what the reward's bench reports."""

import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from expect import refuses, until
from system_helpers import fingerprint, lengths_reward, ppo_batch

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.core.errors import CallCancelledError, ColumnError, OptionError, RewardFunctionError
from hfsdk.core.unscored import is_unscored

pytestmark = pytest.mark.filterwarnings("ignore:reward goes on with", "ignore:judge. tiny has no trained scalar head")
OUT = [1, 6, 7]


@pytest.fixture(scope="module", autouse=True)
def reward_of_the_others(live):
    yield
    live.session.reward(lengths_reward)


@pytest.fixture(scope="module")
def responses(live):
    """Eight responses, whose texts the functions below know by their place in the batch."""
    batch = live.actor.generate(live.prompts[0][:8], max_new_tokens=6, seed=3)
    return batch.with_columns(number=list(range(8)))


def some(completions):
    """Scores that differ, and None for every third."""
    return [None if i in (1, 6, 7) else float(i) for i in range(len(completions))]


# ---- None


def updated(live, batch, *, mini_batches):
    """The actor's and the critic's weights and metrics after an update, which is undone."""
    before = live.session.snapshot("before")
    actor = live.actor.update(batch, ppo.PolicyLoss(entropy_coef=0.1, kl_coef=0.1), epochs=2, mini_batches=mini_batches, seed=5)
    critic = live.critic.update(batch, ppo.ValueLoss(), mini_batches=mini_batches, seed=5)
    after = live.actor.run(fingerprint), live.critic.run(fingerprint), actor.rows, critic.rows
    live.session.rewind(before)
    return after


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_is_bit_for_bit_that_of_the_batch_without_unscored_samples(live, mini_batches):
    live.session.reward(some)
    batch = ppo_batch(live)
    rest = [row for row in range(len(batch)) if row not in OUT]
    scores = batch["scores"]
    assert np.flatnonzero(is_unscored(scores)).tolist() == OUT
    without = ppo.advantages(batch.drop("advantages", "returns", "rewards").take(rest))
    assert batch["advantages"].take(rest) == without["advantages"]
    assert updated(live, batch, mini_batches=mini_batches) == updated(live, without, mini_batches=mini_batches)


def test_a_run_that_failed_tells_all_of_it_once(live):
    """Two calls of its step fail each by itself; neither ends what comes after, and others' failures are still told."""
    live.session.reward(lambda completions: [None] * len(completions))
    before = live.session.snapshot("before")
    algorithm = hf.GRPO(n=2, max_new_tokens=4)
    with refuses(hf.HfsdkError, "none of the", "scored"):
        live.session.train(algorithm, live.prompts, steps=1)
    live.session.snapshot("after it")
    live.session.reward(lengths_reward)
    assert live.session.train(algorithm, live.prompts, steps=1).steps == 1
    live.actor.update(live.actor.generate(live.prompts[0][:2], max_new_tokens=2), lambda out, b: out.nothing)
    with refuses(hf.HfsdkError, "nothing"):
        live.session.snapshot("again")
    live.session.rewind(before)


def test_a_column_of_the_data_never_stands_for_the_responses(live, responses):
    """Where it is not refused before, as on a worker of another release, what is scored are the responses."""
    seen = []
    live.session.reward(lambda completions: [float(len(text)) for text in completions])
    whole = live.session.models.reward.compute_scores(responses)["scores"].tolist()
    for name in ("prompts", "completions", "completion_ids"):
        named = responses.with_columns(**{name: ["gold"] * 8})
        with refuses(ColumnError, f"'{name}'"):
            live.session.models.reward.compute_scores(named)
        seen.append(live.session.models.reward.compute_scores(named.alias(f"own_{name}", name).drop(name))["scores"].tolist())
    assert seen == [whole] * 3


def test_a_step_counts_what_was_not_scored(live):
    live.session.reward(some)
    before = live.session.snapshot("before")
    step = hf.GRPO(n=2, max_new_tokens=4).step(live.session.models, live.prompts[0][:4])
    numbers = hf.GRPO(n=2).metrics(step)
    assert numbers["not_scored"] == 3
    assert numbers["actor_num_samples"] == 5
    assert numbers["score_mean"] == pytest.approx(2.8)
    live.session.rewind(before)


def test_a_batch_that_nobody_scores_is_refused(live, responses):
    live.session.reward(lambda completions: [None] * len(completions))
    batch = live.reward.compute_scores(responses)
    assert is_unscored(batch["scores"]).all()
    with refuses(ColumnError, "none of the 8", "scored"):
        live.actor.update(batch, lambda out, b: -out.log_probs).wait()


def test_scores_of_ones_own_may_have_none(live, responses):
    batch = responses.with_columns(scores=[1.0, None, 3, 0, 0, 0, 0, 0])
    rows = live.actor.compute_loss(batch, lambda out, b: -out.log_probs).value
    assert rows == live.actor.compute_loss(responses.take([0, 2, 3, 4, 5, 6, 7]), lambda out, b: -out.log_probs).value


# ---- processes of its own


def slowly(completions, number):
    """Hangs on sample 2 with the interpreter's lock held, raises on 5."""
    import re

    if number == [2]:
        re.match(r"(a+)+$", "a" * 64 + "b")
    if number == [5]:
        raise ValueError("no answer")
    assert len(completions) == len(number) == 1
    return [float(number[0])]


def test_the_sample_that_hangs_and_the_one_that_raises_are_named(live, responses):
    reward = live.session.reward(slowly, timeout_s=2.0, workers=2, name="slowly")
    text = responses.text()
    with pytest.raises(RewardFunctionError) as caught:
        reward.compute_scores(responses).table("scores")
    words = str(caught.value)
    first = f"sample 2 ({text[2]!r}): slowly took longer than 2 s and was ended (at test_system_reward_bench.py:"
    assert first in words
    assert "in slowly); so did sample 5. " in words
    assert 'failures="skip"' in words
    reward.release()


def children():
    """Return the processes of samples that this process's sessions have started, and not those of tests beside it."""
    return [
        p
        for p in psutil.process_iter(["cmdline", "environ"])
        if "hfsdk.engine.process.sample_process" in (p.info["cmdline"] or ())
        and (p.info["environ"] or {}).get("PYTEST_XDIST_WORKER") == os.environ.get("PYTEST_XDIST_WORKER")
    ]


def test_what_fails_may_be_skipped_and_says_why(live, responses):
    reward = live.session.reward(slowly, timeout_s=2.0, workers=2, failures="skip", name="slowly")
    batch = reward.compute_scores(responses)
    scores, why = batch["scores"], batch["score_failures"]
    assert np.flatnonzero(is_unscored(scores)).tolist() == [2, 5]
    assert [float(s) for i, s in enumerate(scores) if i not in (2, 5)] == [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    assert [bool(words) for words in why] == [i in (2, 5) for i in range(8)]
    assert why[5].endswith("in slowly)")
    assert "slowly raised ValueError('no answer')" in why[5]
    assert "not scored: sample 2" in live.session.logs("slowly")
    assert live.actor.compute_loss(batch, lambda out, b: -out.log_probs).value > 0
    reward.release()


def test_a_cancelled_call_leaves_no_process(live, responses, tmp_path):
    folder = str(tmp_path)

    def forever(completions):
        import os
        import re

        open(os.path.join(folder, str(os.getpid())), "w").close()
        re.match(r"(a+)+$", "a" * 64 + "b")

    reward = live.session.reward(forever, timeout_s=500.0, workers=2, name="forever")
    before = {p.pid for p in children()}
    batch = reward.compute_scores(responses)
    mine = until("two processes", lambda: [p for p in children() if p.pid not in before][1:])
    until("both inside the function", lambda: len(list(tmp_path.iterdir())) == 2)
    batch.cancel()
    with pytest.raises(CallCancelledError):
        batch.table("scores")
    until("their end", lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in mine))
    reward.release()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"failures": "skip"}, ['failures="skip"', "workers=N"]), ({"workers": 0}, ["workers"]),
        ({"failures": "ignore", "workers": 1}, ["failures"]),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(live, more, words):
    with refuses(OptionError, *words):
        live.session.reward(lengths_reward, **more)
    with refuses(OptionError, "workers", "function"):
        live.session.reward("tiny", workers=2, name="model")


# ---- the bench


def test_probe_tells_seconds_failures_and_lines(live, responses):
    reward = live.session.reward(slowly, timeout_s=2.0, name="slowly")
    columns = responses.columns
    probe = reward.probe(responses)
    assert responses.columns == columns
    assert list(probe.failed) == [2, 5]
    assert [one.failure for one in probe.failed.values()] == ["took too long", "raised"]
    assert probe.slowest(1) == [2]
    assert probe.failed[5].line.startswith("test_system_reward_bench.py:")
    assert "raise ValueError" in probe.failed[5].details
    assert probe.table["score"].dropna().tolist() == [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    assert probe.table["completion"].tolist() == responses.text()
    assert not children()
    reward.release()


def test_probe_of_texts_and_against_another(live):
    def longest(completions, answer):
        return [float(len(text)) for text in completions]

    def shouted(completions, **_):
        return [float(text.count("A")) for text in completions]

    reward = live.session.reward(longest, name="longest")
    texts = ["a film", "a longer film", "A", "AAA of the longest kind", "a film"]
    probe = reward.probe(texts, prompts=["why?"] * 5, answer=["x"] * 5, against=shouted)
    assert probe.scores.tolist() == [float(len(text)) for text in texts]
    assert probe.other_scores.tolist() == [0.0, 0.0, 1.0, 3.0, 0.0]
    assert probe.other == "shouted"
    assert probe.duplicates == [[0, 4]]
    with refuses(ColumnError, "'answer'"):
        reward.probe(texts)
    with refuses(OptionError, "samples", "hf.Batch"):
        reward.probe("a film")
    reward.release()


def test_probe_of_a_model_and_of_a_sum(live, responses):
    model = live.session.reward("tiny", name="judge")
    brief = live.session.reward([model, lambda completions: [-float(len(t)) for t in completions]], weights=[2.0, 0.5], name="both")
    scores = model.compute_scores(responses)["scores"]
    of_model, of_both = model.probe(responses), brief.probe(responses, against=model)
    np.testing.assert_array_equal(of_model.scores, scores)
    assert np.isnan(of_model.seconds).all()
    np.testing.assert_allclose(of_both.scores, [2 * s - 0.5 * len(t) for s, t in zip(scores, responses.text(), strict=True)])
    assert of_both.agreement.samples == 8
    assert (of_both.seconds >= 0).all()
    for handle in (brief, *brief.parts):
        handle.release()


# ---- nothing is left


SCRIPT = """
import signal, sys
import hfsdk as hf

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it

def hang(completions):
    import re
    re.match(r"(a+)+$", "a" * 64 + "b")

session = hf.Session(devices=1)
session.actor("tiny")
reward = session.reward(hang, workers=2, timeout_s=500.0)
scored = reward.compute_scores(session.batch(prompt=[[65]] * 2, response=[[65]] * 2))
print("started", flush=True)
if sys.argv[1] == "close":
    sys.stdin.readline()
    session.close()
else:
    scored.table("scores")
"""


@pytest.mark.parametrize("how", ["killed", "interrupted", "close"])
def test_no_process_is_left_when_the_controllers_process_ends(how, tmp_path):
    before = {p.pid for p in children()}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with open(tmp_path / "log", "wb") as log:
        run = subprocess.Popen([sys.executable, str(script), how], stdin=subprocess.PIPE, stdout=log, stderr=log)
    mine = until("two processes", lambda: [p for p in children() if p.pid not in before][1:] and children())
    mine = [p for p in mine if p.pid not in before]
    if how == "close":
        run.stdin.write(b"\n")
        run.stdin.close()
    else:
        run.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
    run.stdin.close()
    gone, left = psutil.wait_procs(mine, timeout=60)
    assert (len(gone), left) == (2, []), (tmp_path / "log").read_text()
    run.wait(60)
