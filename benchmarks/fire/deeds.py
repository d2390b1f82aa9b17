"""Everything a session with workers is asked to do while something is killed or interrupted, one entry each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hfsdk as hf
from fire.stage import FORMS, Stage
from hfsdk.algorithms import ppo

LONG_TOKENS = 200
"""Of a generation that takes a second."""

SLOW_S = 0.05
"""What each micro-batch of an update, and each rank of ``run`` and ``call``, takes at least."""


@dataclass(frozen=True)
class Deed:
    """Something to do in the middle of which something happens."""

    name: str
    do: Callable[[Stage, str], Any]
    """Given the stage and the form it is in; waits for its end."""
    seconds: float
    """About what it takes; what it has taken here counts more."""
    trained: bool = False
    """Whether roles have learned since the checkpoint when it begins."""
    start_up: bool = False
    """Whether it starts something: processes, models, a run, a save."""
    changes: bool = False
    """Whether it learns: the state may be another one afterwards, also one in between."""
    share: float = 1.0


def other(form: str) -> str:
    """Return the form that ``place`` goes to from one: each is left and reached in turn."""
    return FORMS[(FORMS.index(form) + 1) % len(FORMS)]


@hf.primitive(reads=["prompt"], writes=["slept"], protocol=hf.protocols.DP)
def sleepy(model: Any, rows: Any) -> dict[str, Any]:
    """A user's own primitive that takes a moment."""
    import time

    import numpy as np

    time.sleep(0.3)
    return {"slept": np.zeros(rows.num_rows)}


def slow_loss(out: Any, b: Any) -> Any:
    """A loss that takes a moment in every micro-batch."""
    import time

    time.sleep(0.05)
    return -out.log_probs * 1e-3


def nap(rank: Any) -> int:
    """What ``run`` runs."""
    import time

    time.sleep(0.4)
    return int(rank.num_updates)


def _many(stage: Stage) -> hf.Batch:
    return stage.session.batch(prompt=[[1] * 60] * 32, response=[[2] * 200] * 32)


def _update(stage: Stage, form: str) -> None:
    batch = stage.batch()
    stage.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
    stage.actor.update(batch, slow_loss, mini_batches=4).wait()


def _halves(stage: Stage, form: str) -> None:
    batch = stage.batch()
    stage.actor.forward_backward(batch, slow_loss).wait()
    stage.actor.step().wait()


def _train(stage: Stage, form: str) -> None:
    stage.session.train(hf.PPO(max_new_tokens=6, mini_batches=2), stage.prompts, steps=2, progress=False)


def _save(stage: Stage, form: str) -> None:
    stage.session.save(stage.folder / "second")


def _save_behind(stage: Stage, form: str) -> None:
    saving = stage.session.save(stage.folder / "second", wait=False)
    stage.batch()
    saving.wait()


def _rewind(stage: Stage, form: str) -> None:
    before = stage.session.snapshot("before")
    stage.step()
    stage.session.rewind(before)


def _loads(stage: Stage, form: str) -> None:
    stage.reference.release()
    stage.reference = stage.session.reference(stage.actor)
    stage.reference.compute_log_probs(stage.session.batch(prompt=[[1]], response=[[2]])).wait()


DEEDS = (
    Deed("generate", lambda s, f: s.actor.generate(s.prompts[0], max_new_tokens=LONG_TOKENS, ignore_eos=True).wait(), 1.0),
    Deed("log-probs", lambda s, f: s.actor.compute_log_probs(_many(s)).wait(), 0.8),
    Deed("values", lambda s, f: s.critic.compute_values(_many(s)).wait(), 0.8),
    Deed("update", _update, 1.5, changes=True),
    Deed("forward_backward and step", _halves, 1.0, changes=True),
    Deed("run", lambda s, f: s.actor.run(nap), 0.5),
    Deed("call", lambda s, f: s.critic.call(sleepy, s.session.batch(prompt=[[1], [2]])).wait(), 0.4),
    Deed("train", _train, 3.0, changes=True, start_up=True),
    Deed("place", lambda s, f: s.place(other(f)), 5.0, trained=True, start_up=True, share=10.0),
    Deed("save", _save, 0.8, trained=True, start_up=True),
    Deed("save behind", _save_behind, 1.5, trained=True, start_up=True),
    Deed("load", lambda s, f: s.session.load(s.checkpoint), 0.5, trained=True),
    Deed("snapshot", lambda s, f: s.session.snapshot("one"), 0.4, trained=True),
    Deed("rewind", _rewind, 1.5, changes=True),
    Deed("first loads", _loads, 1.0, start_up=True),
)


def seconds(stage: Stage, deed: Deed) -> float:
    """Return what a deed takes here, as far as that is known."""
    return stage.typical.get(deed.name, deed.seconds)


def took(stage: Stage, deed: Deed, elapsed_s: float, *, whole: bool) -> None:
    """Remember what a deed took; where it was stopped, it would have taken more."""
    stage.typical[deed.name] = elapsed_s if whole else max(seconds(stage, deed), elapsed_s)


def tidy(stage: Stage) -> None:
    """Remove what deeds leave on purpose: snapshots and the second checkpoint."""
    for name in list(stage.session.snapshots):
        stage.session.forget(name)
    shutil.rmtree(stage.folder / "second", ignore_errors=True)
