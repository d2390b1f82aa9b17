"""What the system tests ask of a session: what runs where, and functions slow enough to stop in the middle."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hfsdk as hf
from hfsdk.engine.calls import queries as q
from hfsdk.session.session_parts import parts_of

OPENINGS = [
    "the film is a", "a warm and funny", "it never quite", "one of the best", "the plot is thin but", "too long and too",
    "i laughed and i", "the actors are", "an odd little story", "nothing here is", "bright , quick and", "the director has a",
    "dull", "it is hard to say what the point of all this might be , but", "a small", "this is the kind of movie that",
]  # fmt: skip
"""Prompts of very different lengths."""

SCRIPT_S = 900
"""How long a script on nodes of its own may take; on a quiet machine it takes about a fifth."""


def lengths_reward(completions):
    return [float(len(text) % 7) - 3.0 for text in completions]


WAIT_S = 60.0
"""Longest wait for something that should be there at once, on a busy machine."""


def declare(session, train="dp2", rollout="tp1", **more):
    """Declare and place the four roles of PPO on a session."""
    actor = session.actor("tiny", train=train, rollout=rollout, optimizer=hf.AdamW(lr=3e-4), **more)
    critic = session.critic("tiny", train="tp2", optimizer=hf.AdamW())  # with the rate that is suggested
    reference = session.reference(actor)
    reward = session.reward(lengths_reward)
    prompts = session.prompts(OPENINGS, batch_size=16, seed=1)
    return SimpleNamespace(session=session, actor=actor, critic=critic, reference=reference, reward=reward, prompts=prompts)


def ppo_batch(roles, k=0, max_new_tokens=12, **sampling):
    """Generate and prepare a batch as PPO does, up to the advantages."""
    from hfsdk.algorithms import ppo

    batch = roles.actor.generate(roles.prompts[k], max_new_tokens=max_new_tokens, **sampling)
    batch = roles.reward.compute_scores(batch)
    batch = roles.actor.compute_log_probs(batch)
    batch = roles.reference.compute_log_probs(batch)
    batch = roles.critic.compute_values(batch)
    return ppo.advantages(batch)


def ppo_step(roles, k=0, **options):
    """One PPO step by hand: the batch and both updates' metrics."""
    from hfsdk.algorithms import ppo

    batch = ppo_batch(roles, k, **options)
    critic = roles.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
    actor = roles.actor.update(batch, ppo.PolicyLoss(), mini_batches=2)
    return SimpleNamespace(batch=batch, critic=critic, actor=actor)


def outcome(step):
    """Everything a step computed, as plain data that compares bit for bit."""
    table = step.batch.table()
    columns = {}
    for name, column in table.items():
        ragged = isinstance(column, hf.Ragged)
        columns[name] = (column.flat.tobytes(), tuple(column.lengths)) if ragged else list(column)
    return columns, step.critic.rows, step.actor.rows


def until(what, wanted, timeout_s=WAIT_S):
    """Wait until ``wanted()`` is true and return it; say what did not come otherwise."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = wanted()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")


def call_id(pending):
    return max(pending.call_ids)


def at_work(session, call, name=None, rank=None):
    """Whether a worker (that of ``rank``) is inside a call now (inside its sub-span ``name``)."""
    spans = [s for s in parts_of(session).client.send(q.SpansOf()) if s.device is not None and s.duration_s is None]
    return any(s.call_id == call and name in (None, s.name) and rank in (None, s.rank) for s in spans)


def running(session):
    """Whether a worker call of the session runs, whichever."""
    spans = parts_of(session).client.send(q.SpansOf())
    return any(s.device is not None and s.duration_s is None for s in spans)


def long_generation(roles, **more):
    """A generation of a second or more: can be stopped in the middle."""
    return roles.actor.generate(roles.prompts[0], max_new_tokens=450, ignore_eos=True, **more)


def pids(session):
    """Process ids of the session's workers, by rank."""
    return [s.pid for s in sorted(parts_of(session).client.send(q.Devices()), key=lambda s: s.rank)]


def fingerprint(rank):
    """Hash this rank's weights, bit for bit."""
    digest = hashlib.sha256()
    for _, tensor in sorted(rank.module.named_parameters()):
        digest.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return rank.num_updates, digest.hexdigest()


def state_of(handle):
    """The whole state under Hugging Face names, put together from all ranks."""

    def export(rank):
        summary, packed = rank._hosted.states.export().packed()
        return summary, [(p.kind, p.tensor, p.shape, p.start, bits) for p, bits, _ in packed]

    found, exported = {}, handle.run(export)
    for _, pieces in exported:
        for kind, tensor, shape, start, bits in pieces:
            whole = found.setdefault((kind, tensor), np.full(shape, np.nan, np.float32))
            whole[tuple(slice(a, a + n) for a, n in zip(start, bits.shape, strict=True))] = bits
    assert not any(np.isnan(whole).any() for whole in found.values())
    return exported[0][0], found


def slow_loss(seconds):
    """A loss that takes its time in every micro-batch."""

    def slow(out, b):
        time.sleep(seconds)
        return -out.log_probs * 1e-3

    return slow


def gap(batch):
    """Largest difference between the rollout's and the trainer's log-probs."""
    table = batch.table("rollout_log_probs", "old_log_probs")
    return float(abs(table["rollout_log_probs"].flat - table["old_log_probs"].flat).max())


def check_works(roles):
    """Generation, a forward pass and a CPU task go through: nothing is stuck behind what the test did."""
    batch = roles.actor.generate(roles.prompts[0][:4], max_new_tokens=4)
    batch = roles.actor.compute_log_probs(roles.reward.compute_scores(batch)).wait(timeout=120)
    assert gap(batch) <= 1e-4


def own_processes(pids_then):
    """Those of some process ids that still run; Ray's own agents, which end themselves a minute later, left out."""
    import psutil

    alive = []
    for pid in pids_then:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "Agent" not in command:
                alive.append((pid, command))
        except psutil.NoSuchProcess:
            continue
    return alive


def column(values):
    return hf.Ragged.of(values)


def told_by(script):
    """Run a script of this folder on nodes of its own; return what it told as lines of JSON ``[name, value, seconds]``, by name."""
    torch = pytest.importorskip("torch")
    for package in ("ray", "vllm", "megatron.core"):
        pytest.importorskip(package)
    if torch.cuda.is_available():
        pytest.skip("the nodes of this test have processors only")
    path = Path(__file__).with_name(script)
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"PYTHONPATH": str(path.parents[2])},
        cwd=path.parent,  # Ray puts the working directory on workers' path
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=SCRIPT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it tells where each of its threads is
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nit took longer than {SCRIPT_S} s"
    lines = [line for line in out.splitlines() if line.startswith('["')]  # raylets say there that a worker was killed
    told = [json.loads(line) for line in lines]
    assert process.returncode == 0, f"it came as far as {[(name, seconds) for name, _, seconds in told]}\n{err[-6000:]}"
    return {name: value for name, value, _ in told}
