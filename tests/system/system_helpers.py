"""What the system tests ask of a session: PPO's roles and steps, what runs where, and calls that wait for the test."""

import hashlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import hfsdk as hf
from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of

OPENINGS = [
    "the film is a", "a warm and funny", "it never quite", "one of the best", "the plot is thin but", "too long and too",
    "i laughed and i", "the actors are", "an odd little story", "nothing here is", "bright , quick and", "the director has a",
    "dull", "it is hard to say what the point of all this might be , but", "a small", "this is the kind of movie that",
]  # fmt: skip
"""Prompts of very different lengths."""


def lengths_reward(completions):
    return [float(len(text) % 7) - 3.0 for text in completions]


def likelihood(out, b):
    """A loss that makes what was generated likelier."""
    return -out.log_probs


def declare(session, train="dp2", rollout="tp1", train_critic="tp2", **more):
    """Declare the four roles of PPO on a session."""
    actor = session.actor("tiny", train=train, rollout=rollout, optimizer=hf.AdamW(lr=3e-4), **more)
    critic = session.critic("tiny", train=train_critic, optimizer=hf.AdamW())  # with the rate that is suggested
    reference = session.reference(actor)
    reward = session.reward(lengths_reward)
    prompts = session.prompts(OPENINGS, batch_size=16, seed=1)
    return SimpleNamespace(session=session, actor=actor, critic=critic, reference=reference, reward=reward, prompts=prompts)


def declare_lora(session, train="tp2", rollout="tp1", **more):
    """Declare the four roles of PPO with adapters on actor and critic, over one base."""
    lora = hf.LoRA(rank=4, alpha=16)
    actor = session.actor("tiny", train=train, rollout=rollout, lora=lora, optimizer=hf.AdamW(lr=3e-3), **more)
    critic = session.critic("tiny", train=train, lora=hf.LoRA(rank=2), optimizer=hf.AdamW(lr=3e-3))
    reference = session.reference(actor)
    reward = session.reward(lengths_reward)
    prompts = session.prompts(OPENINGS, batch_size=16, seed=1)
    return SimpleNamespace(session=session, actor=actor, critic=critic, reference=reference, reward=reward, prompts=prompts)


# ---- steps by hand


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


def gap(batch):
    """Largest difference between the rollout's and the trainer's log-probs."""
    table = batch.table("rollout_log_probs", "old_log_probs")
    return float(abs(table["rollout_log_probs"].flat - table["old_log_probs"].flat).max())


def check_works(roles):
    """Generation, a forward pass and a CPU task go through: nothing is stuck behind what the test did."""
    batch = roles.actor.generate(roles.prompts[0][:4], max_new_tokens=4)
    batch = roles.actor.compute_log_probs(roles.reward.compute_scores(batch)).wait(timeout=120)
    assert gap(batch) <= 1e-4


# ---- what is where


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


def same_state(one, other):
    """Whether two whole states are the same bit for bit."""
    return one[0] == other[0] and one[1].keys() == other[1].keys() and all(np.array_equal(one[1][k], other[1][k]) for k in one[1])


def pids(session):
    """Process ids of the session's workers, by device: of those that have one."""
    devices = session.placement.view()["devices"].values()
    return [device["pid"] for device in devices if device["pid"] is not None]


def kept_states(handle):
    """How many states of snapshots each of the role's workers keeps: a worker's own affair, which no handle tells."""
    return handle.run(lambda rank: len(rank._hosted.worker.kept))


def stored_of(session, call):
    """What of a call's columns is in the cluster; ``None`` once it was freed. Nobody but a test asks: it needs no reference."""
    return parts_of(session).client.send(q.StoredOf(call))


# ---- calls under way


def call_id(pending):
    return max(pending.call_ids)


def working(session):
    """The spans that run on workers now."""
    return [s for s in session.trace[:].spans if s.device is not None and s.duration_s is None]


def at_work(session, call, name=None, rank=None):
    """Whether a worker (that of ``rank``) is inside a call now (inside its sub-span ``name``)."""
    return any(s.call_id == call and name in (None, s.name) and rank in (None, s.rank) for s in working(session))


def endless_generation(roles):
    """A generation of a minute and more, to be stopped in the middle."""
    return roles.actor.generate(roles.prompts[0], max_new_tokens=450, ignore_eos=True, n=24)


AT_MOST = 120 * 50
"""How often a worker looks whether it may go on, before it gives the test up."""


def gate(folder, name="gate"):
    """A place in functions on workers at which they wait for the test, across processes.

    ``stay()``, called there, says that it was ``reached()`` and comes back once the test calls ``open()``.
    """
    reached, opened = str(folder / f"{name}-reached"), str(folder / f"{name}-open")

    def stay():
        Path(reached).touch()
        for _ in range(AT_MOST):
            if Path(opened).exists():
                return
            threading.Event().wait(0.02)
        raise TimeoutError(f"nobody made {opened}")

    return SimpleNamespace(stay=stay, reached=lambda: Path(reached).exists(), open=lambda: Path(opened).touch())


def meet(folder, name, other):
    """Return a function for workers that comes back when one with the names the other way round is called as well."""
    mine, theirs = gate(folder, name), gate(folder, other)

    def arrive():
        theirs.open()
        mine.stay()

    return arrive


def gated_loss(entrance, number=1):
    """A loss that waits at a gate in its ``number``-th micro-batch, on every rank."""
    stay, seen = entrance.stay, []

    def gated(out, b):
        seen.append(None)
        if len(seen) == number:
            stay()
        return -out.log_probs * 1e-3

    return gated


def heard(session):
    """Come back when every worker has heard what it was told before, a cancel too: both take the same lane."""
    return len(pids(session)) == session.cluster.num_devices


def waits(place="wait", thread=None):
    """Whether a thread, the main one, waits for a call (``"settle"``: for one to be over, however it ends).

    A test that starts a thread waits for that too; this one waits in hfsdk.
    """
    frame = sys._current_frames()[(thread or threading.main_thread()).ident]
    if frame.f_code.co_name != place:
        return False
    modules = []
    while frame is not None:
        modules.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return any(module.startswith("hfsdk.") for module in modules)
