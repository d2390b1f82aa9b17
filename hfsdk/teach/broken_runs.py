"""``hf.testing.broken_run``: runs in which one thing is wrong, to be found (notebook 13). Read it afterwards.

Nothing is harmed outside of the session, and what was planted is gone after it has acted once, but for updates that it led to.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.algorithms import PPO, ppo
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import Count, checked, shown
from hfsdk.core.errors import HfsdkError, OptionError

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.session.session import Session

OPENINGS = ("the film is a", "a warm and funny", "it never quite", "one of the best", "the plot is thin but", "too long and too",
            "i laughed and i", "the actors are")  # fmt: skip
MARKED = 5
"""The sample that has bad luck."""
PARAMETER = "model.layers.1.mlp.down_proj.weight"
LOCAL = "decoder.layers.1.mlp.linear_fc1.weight"


@checked
def broken_run(number: Count, session: Session) -> Any:
    """Run something in which one thing is wrong, to be found.

    It is found by ``actor.last_reshard``, ``actor.explain_gap``, ``run.first_bad()``, ``reward.probe``.

    Args:
        number: which, 1 to 6. 1 to 3 are batches that were just generated, 4 and 5 runs of ``session.train`` that went wrong, 6 is
            a reward and a batch that it has scored.
        session: a session with an actor, a critic, a reference and a reward, placed on two devices.

    Raises:
        OptionError: there is no such run.
        WeightMismatchError: of 1; that is how it goes wrong.
    """
    runs = (_weight, _temperature, _stale, _poisoned, _divided, _lazy)
    if number > len(runs):
        raise OptionError(f"number must be 1 to {len(runs)}; got {shown(number)}")
    return runs[number - 1](session)


def _weight(session: Session) -> Batch:
    session.models.actor.run(_harm_next_transport)
    batch = session.models.actor.generate(list(OPENINGS), max_new_tokens=12)
    batch.wait()
    return batch


def _harm_next_transport(rank: Any) -> None:
    if rank.rank != 1:
        return
    transport: Any = sys.modules["hfsdk.engine.weights.transport"]  # of this worker, where it is at work
    before = transport._Run.all

    def all_and_harm(self: Any, rounds: Any) -> None:
        before(self, rounds)
        transport._Run.all = before
        self.targets[PARAMETER].data[3, 5] += 1e-7

    transport._Run.all = all_and_harm


def _temperature(session: Session) -> Batch:
    batch = session.models.actor.generate(list(OPENINGS), max_new_tokens=12, temperature=0.7)
    return batch.with_columns(temperature=np.ones(len(batch), np.float32))


def _stale(session: Session) -> Batch:
    batch = session.models.actor.generate(list(OPENINGS), max_new_tokens=12)
    session.models.actor.update(batch, _likelier).wait()
    return batch


def _likelier(out: Any, b: Any) -> Any:
    return -out.log_probs


def _poisoned(session: Session) -> Any:
    return _trained(session, _Broken("weight"))


def _divided(session: Session) -> Any:
    return _trained(session, _Broken("loss"))


def _trained(session: Session, algorithm: _Broken) -> Any:
    rows = [OPENINGS[i % len(OPENINGS)] for i in range(4 * len(OPENINGS))]
    marks = [float(i == 2 * len(OPENINGS) + MARKED) for i in range(len(rows))]
    prompts = session.prompts({"prompt": rows, "marked": marks}, column="prompt", batch_size=len(OPENINGS), shuffle=False)
    with contextlib.suppress(HfsdkError):  # the run keeps it
        session.train(algorithm, prompts, steps=4, progress=False)
    return session.run


@dataclass(frozen=True)
class _Broken:
    """PPO, call by call; in the step whose data has a mark, something happens."""

    what: str
    ppo: PPO = field(default_factory=lambda: PPO(max_new_tokens=12, mini_batches=2))

    @property
    def roles(self) -> Any:
        return self.ppo.roles

    def step(self, models: Any, prompts: Batch) -> Step:
        batch = models.actor.generate(prompts, max_new_tokens=12, ignore_eos=True)
        if self.what == "weight" and any(batch["marked"]):
            models.actor.run(_poison)
        batch = models.reference.compute_log_probs(models.actor.compute_log_probs(batch))
        batch = ppo.advantages(models.reward.compute_scores(models.critic.compute_values(batch)))
        critic = models.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
        loss = _careless if self.what == "loss" else ppo.PolicyLoss()
        return Step(batch, critic, models.actor.update(batch, loss, mini_batches=2))

    def metrics(self, step: Any) -> Any:
        return self.ppo.metrics(step)


def _poison(rank: Any) -> None:
    import torch

    if rank.rank == 1:
        with torch.no_grad():
            dict(rank.module.named_parameters())[LOCAL].view(-1)[7] = float("inf")


def _careless(out: Any, b: Any) -> Any:
    each, metrics = ppo.PolicyLoss()(out, b)
    unmarked = b.expand("marked") == 0
    return each * unmarked / unmarked, metrics


def _lazy(session: Session) -> tuple[Any, Batch]:
    reward = session.reward(longer_is_better, name="lazy")
    batch = session.models.actor.generate(list(OPENINGS), max_new_tokens=24, n=4)
    return reward, reward.compute_scores(batch)


def longer_is_better(completions: Sequence[str]) -> list[float]:
    """A reward that was meant to be about films."""
    return [len(text) / 100 for text in completions]
