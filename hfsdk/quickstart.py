"""``python -m hfsdk.quickstart``: a few PPO steps of a small model on movie reviews, call by call, with a report at the end.

The task: continue the beginning of a review so that VADER finds the continuation positive. This is the one place in hfsdk that
prints.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.core.errors import HfsdkError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hfsdk.core.batch import Batch
    from hfsdk.session.session import Session

OUT = "out/quickstart.html"
PROMPT_WORDS = 8
"""Words of each review that are given to the model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quickstart and return the exit status."""
    options = _options(arguments)
    try:
        _run(options)
    except HfsdkError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hfsdk.quickstart", description="A few PPO steps on movie reviews.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="PPO steps (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="worker processes, or GPUs where there are some (default: 1)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts per step (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens per response (default: %(default)s)")
    parser.add_argument("--out", default=OUT, help="the report (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("steps", "devices", "batch_size", "max_new_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def sentiment(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Score each continuation by VADER's compound sentiment, from -1 to 1."""
    from hfsdk.data import vader_sentiment

    return vader_sentiment(completions)


def beginnings() -> list[str]:
    """Return the first words of the reviews that have more of them."""
    from hfsdk.data import movie_reviews

    texts = [str(text).split() for text in movie_reviews("train")["text"]]
    return [" ".join(words[:PROMPT_WORDS]) for words in texts if len(words) > PROMPT_WORDS]


@contextmanager
def _timed(name: str) -> Iterator[None]:
    started = time.perf_counter()
    _say(f"  {name:<28}", end="")
    yield
    _say(f"{time.perf_counter() - started:7.2f} s")


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def _run(options: argparse.Namespace) -> None:
    from hfsdk.core.files import is_ours
    from hfsdk.core.roles import AdamW
    from hfsdk.session.session import Session

    began = time.perf_counter()
    _say(f"hfsdk quickstart: PPO on movie reviews, {options.model}, {options.devices} device{'s' * (options.devices > 1)}")
    with _timed("start Ray"):
        session = Session(devices=options.devices, wait=True, name="quickstart")
    with session:
        actor = session.actor(options.model, optimizer=AdamW(lr=1e-5))
        session.critic(options.model, optimizer=AdamW(lr=2e-5))
        session.reference(actor)
        session.reward(sentiment)
        prompts = session.prompts(beginnings(), batch_size=options.batch_size)
        with _timed("load actor, critic, reference"):
            session.place("colocate")
        for step in range(options.steps):
            _say(f"step {step + 1} of {options.steps}")
            batch, row = _step(session, next(prompts), options.max_new_tokens)
            session.record({"step": step, **row})
            _say(f"  score {row['score_mean']:+.3f}, KL {row['kl_mean']:.4f}, loss {row['actor_loss']:+.4f}")
            _show_sample(batch)
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        if options.out == OUT:
            is_ours(out)  # what is there the quickstart before wrote: to replace it is no news
        session.report(out, batch=batch)
    _say(f"wrote {options.out}; {time.perf_counter() - began:.0f} s in all")
    _say("open it in a browser: its pictures need no network. To go on: make notebook")


def _step(session: Session, batch: Batch, max_new_tokens: int) -> tuple[Batch, dict[str, float]]:
    """One PPO step, call by call, as a notebook would do it."""
    from hfsdk.algorithms import ppo
    from hfsdk.algorithms.step import Step

    models, algorithm = session.models, ppo.PPO(max_new_tokens=max_new_tokens)
    with _timed("actor.generate"):
        batch = models.actor.generate(batch, max_new_tokens=max_new_tokens)
    with _timed("actor.compute_log_probs"):
        batch = models.actor.compute_log_probs(batch)
    with _timed("reference.compute_log_probs"):
        batch = models.reference.compute_log_probs(batch)
    with _timed("critic.compute_values"):
        batch = models.critic.compute_values(batch)
    with _timed("reward.compute_scores"):
        batch = models.reward.compute_scores(batch)
    with _timed("ppo.advantages"):
        batch = ppo.advantages(batch, gamma=1.0, lam=0.95, kl_coef=0.05)
    with _timed("critic.update"):
        critic = models.critic.update(batch, ppo.ValueLoss(clip=0.2), mini_batches=2)
    with _timed("actor.update"):
        actor = models.actor.update(batch, ppo.PolicyLoss(clip=0.2), mini_batches=2)
    return batch, algorithm.metrics(Step(batch, critic, actor))


def _show_sample(batch: Batch) -> None:
    few = batch[:1]
    prompt, response, score = few.text("prompt")[0], few.text("response")[0], float(few.table("scores")["scores"][0])
    _say(f"  {score:+.2f}  {prompt!r} -> {response!r}")


if __name__ == "__main__":
    sys.exit(main())
