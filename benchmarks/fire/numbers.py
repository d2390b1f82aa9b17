"""NaN in weights that are used; and shapes at the border: nothing generated, batches of one, uneven ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import hfsdk as hf
from fire.stage import FORMS, OPENINGS, Stage, ground, typed
from fire.trials import Note, TrialError
from hfsdk.algorithms import ppo

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 240.0


def poison(rank: Any, which: float, value: float) -> str:
    """Runs on every rank: one number of one weight is not one any more."""
    import torch

    named = sorted(rank.module.named_parameters())
    name, tensor = named[int(which * len(named))]
    with torch.no_grad():
        tensor.view(-1)[0] = value
    return str(name)


def bad(rank: Any) -> list[str]:
    """Runs on every rank: the weights that are not finite."""
    return [name for name, tensor in rank.module.named_parameters() if not bool(tensor.isfinite().all())]


def _poisoned(stage: Stage, note: Note, form: str) -> None:
    role = note.rng.choice([stage.actor, stage.critic])
    value = note.rng.choice([math.nan, math.inf, 1e38])
    which = note.rng.random()
    prepared = stage.batch().wait()
    names = role.run(poison, which, value)
    note.doing(f"{value} in {role.name}'s {names[0]} ({form}), then every kind of call")
    with typed() as said:
        stage.batch()["advantages"]
    loss = policy_loss if role is stage.actor else ppo.ValueLoss()
    with typed() as updated:
        role.update(prepared, loss).wait()
    broken = {name for names in role.run(bad) for name in names}
    if value != value and not updated:
        raise TrialError("wrong state", f"an update of weights with NaN went through without a word (a step before it: {said})")
    if value != 1e38 and not updated and len(broken) > 1:
        raise TrialError("wrong state", f"an update went through and spread it to {sorted(broken)[:5]}")


def policy_loss(out: Any, b: Any) -> Any:
    """A loss of the log-probs alone."""
    return -out.log_probs


def _given_empty(stage: Stage, note: Note, form: str) -> None:
    responses = note.rng.choice([[[], [3], [], [4, 5]], [[], [], [], []], [[3], [], [4], []]])
    note.doing(f"responses {responses} ({form})")
    batch = stage.session.batch(prompt=[[1, 2]] * 4, response=responses)
    _learn(stage, batch)


def _generated_empty(stage: Stage, note: Note, form: str) -> None:
    """Every token ends a response: each has the end token alone."""
    vocabulary = stage.actor.spec.vocab_size if stage.actor.spec else 320
    note.doing(f"responses that end at once ({form})")
    batch = stage.actor.generate(stage.prompts[0], max_new_tokens=8, stop_token_ids=list(range(vocabulary)))
    if set(map(int, batch["response"].lengths)) != {1}:
        raise TrialError("wrong state", f"lengths {list(batch['response'].lengths)}")
    _learn(stage, batch)


def _few(stage: Stage, note: Note, form: str) -> None:
    count = note.rng.choice([1, 1, 3, 5, 7])
    note.doing(f"a batch of {count} ({form})")
    batch = stage.actor.generate(OPENINGS[:count], max_new_tokens=note.rng.choice([1, 5]))
    _learn(stage, batch, note.rng.choice([1, 2]))


def _learn(stage: Stage, batch: hf.Batch, mini_batches: int = 1) -> None:
    """Prepare and learn from it; what goes through must be finite."""
    with typed():
        batch = stage.reference.compute_log_probs(stage.actor.compute_log_probs(stage.reward.compute_scores(batch)))
        batch = ppo.advantages(stage.critic.compute_values(batch))
        rows = [*stage.critic.update(batch, ppo.ValueLoss(), mini_batches=mini_batches).rows]
        rows += stage.actor.update(batch, ppo.PolicyLoss(), mini_batches=mini_batches).rows
        for name in ("advantages", "values", "old_log_probs"):
            if not np.isfinite(batch[name].flat).all():
                raise TrialError("wrong state", f"{name} are not finite, and nothing said so")
        odd = [(k, v) for row in rows for k, v in row.items() if isinstance(v, float) and math.isinf(v)]
        if odd:
            raise TrialError("wrong state", f"metrics {odd}")
    broken = [name for role in (stage.actor, stage.critic) for names in role.run(bad) for name in names]
    if broken:
        raise TrialError("wrong state", f"weights are not finite: {broken[:5]}")


CASES: tuple[Callable[[Stage, Note, str], None], ...] = (_poisoned, _poisoned, _given_empty, _generated_empty, _few, _few)


def trial(stage: Stage, note: Note) -> None:
    """Try one case; then the step after ``load`` is the recorded one."""
    form = FORMS[note.number // 4 % len(FORMS)]
    note.doing(f"preparing {form}")
    stage.arrange(form)
    CASES[note.number % len(CASES)](stage, note, form)
    stage.prove(form)
