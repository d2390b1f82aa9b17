"""What the cells of kept sessions do, in kernels on the machine and elsewhere: everything in it is known bit for bit."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import hfsdk as hf
from fire import own
from fire.state_digest import of_parts, parts_of_rank
from hfsdk.run.run import MEASURED

NAME = "fire"

PROMPTS = [[number, 2, 3] for number in range(1, 33)]

STEPS = 6
"""Of a run."""

POOLS = {"actor": 1, "reference": 1}
"""Where the roles are moved to."""


def brevity(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Score by length: any number does."""
    return [float(len(text) % 7) - 3.0 for text in completions]


def loss(out: Any, b: Any) -> Any:
    """Any loss does."""
    return -out.log_probs


def begin(**options: Any) -> Any:
    """Start the session."""
    return hf.Session(devices=2, name=NAME, keep=True, seed=3, **options)


def declare(session: Any) -> None:
    """Declare the roles, or find them."""
    actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-3), **own.adapters(4))
    session.reference(actor)
    session.reward(brevity)
    session.place("colocate")


_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def prompts(session: Any) -> Any:
    """Make the prompts, once in a kernel: the next one's find their place."""
    if session not in _made:
        _made[session] = session.prompts(PROMPTS, batch_size=4, seed=1)
    return _made[session]


def train(session: Any, steps: int = STEPS, **options: Any) -> Any:
    """Start a run."""
    return session.train(hf.GRPO(n=2, max_new_tokens=4), prompts(session), steps=steps, progress=False, **options)


def arrange(session: Any, checkpoint: str) -> None:
    """Go to the recorded state, without what earlier trials have left."""
    for role in list(session.roles):
        if role.name not in ("actor", "reference", "reward"):
            role.release()
    for name in list(session.batches):
        session.batches.drop(name)
    for name in list(session.snapshots):
        session.forget(name)
    session.place("colocate")
    session.load(checkpoint)


def step(session: Any) -> str:
    """Do one step by hand; return a digest of everything that it computed."""
    actor = session.models.actor
    batch = actor.generate(prompts(session)[0], max_new_tokens=6)
    batch = session.models.reward.compute_scores(actor.compute_log_probs(batch))
    done = actor.update(batch, loss, mini_batches=2)
    found = hashlib.sha256(repr([{k: v for k, v in row.items() if "second" not in k} for row in done.rows]).encode())
    for name, column in sorted(batch.table().items()):
        found.update(name.encode() + (column.flat.tobytes() if isinstance(column, hf.Ragged) else repr(list(column)).encode()))
    return found.hexdigest()


def age(session: Any) -> Any:
    """Return a batch of weights that a snapshot keeps, while the generating engine has newer ones: those after the step by hand."""
    actor = session.models.actor
    session.snapshot("then")
    batch = actor.generate(prompts(session)[0], max_new_tokens=6)
    step(session)
    actor.generate(prompts(session)[0], max_new_tokens=2).wait()
    return batch


def digest(session: Any) -> str:
    """Return a digest of the actor's whole state, whatever its layout: weights, moments, step counts."""
    return of_parts(session.models.actor.run(parts_of_rank))


def rows(session: Any) -> list[dict[str, Any]]:
    """Return the history without what is measured."""
    left = {*MEASURED, "reward_function"}
    return [{name: value for name, value in row.items() if name not in left} for row in session.history if row["kind"] == "step"]


def pictures(session: Any) -> int:
    """Draw what there is to draw; return its size."""
    drawn = [session.placement, session.trace, session.dataflow, session.memory, session.history]
    return sum(len(getattr(one, "_repr_html_", one.__repr__)() or "") + len(str(one)) for one in drawn)


def many_messages(session: Any, num: int) -> int:
    """Send small messages and some of a megabyte, one after another."""
    import numpy as np

    actor, total = session.models.actor, 0
    for number in range(num):
        total += len(actor.run(nothing))
        if number % 10 == 5:
            own = session.batch(x=[np.full(32_000, float(number))] * 4)
            total += int(own["x"].flat[0])
    return total


def nothing(rank: Any) -> int:
    """What ``run`` runs."""
    return 0


def count(rank: Any) -> int:
    """Count the calls of this function in the worker: each is done once, and not twice."""
    import hfsdk

    hfsdk.fire_count = getattr(hfsdk, "fire_count", 0) + 1  # type: ignore[attr-defined]
    return int(hfsdk.fire_count)  # type: ignore[attr-defined]
