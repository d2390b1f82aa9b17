"""``train(keep_best=...)``: the checkpoint of a run with the best score on held-out prompts is kept.

::

    run = session.train(hf.GRPO(), prompts, steps=60, folder="runs/sums", keep_best=hf.KeepBest(held_out, every=10))
    run.best                           BestCheckpoint(step 40: held-out score 0.83 (0.69 at the start), in runs/sums/best)
    session.load(run.best.folder)      weights, optimizers and all else, as they were after that step

A held-out score is that of :meth:`evaluate <hfsdk.run.best.evaluate>`: before the first step, then after every so many
steps and after the last, always of the same prompts with the same seed, so that scores differ by the weights alone. Nothing of the
training changes by it. Score and step of the best are counters of the session, so that every save has them: a run that goes on
from one, also in another process, goes on with the best there is, if that was measured on the same prompts with the same sampling
and reward; else it begins anew and says so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.algorithms.choices import Copies
from hfsdk.algorithms.pass_rate import pass_rates
from hfsdk.core.checks import Count, Index, NonNegative, check_fields, shown
from hfsdk.core.errors import CallError, CheckpointError, OptionError, SimulatedValueError
from hfsdk.core.field_texts import documented
from hfsdk.core.store import AnyPath, StorePath
from hfsdk.core.table import Table
from hfsdk.core.unscored import scored_rows
from hfsdk.models import ReferenceModel, RewardModel
from hfsdk.run.host import TrainHost
from hfsdk.session.context import MEASURE, SCORE, START, STEP, BestCheckpoint
from hfsdk.session.streams import PromptStream, RowStream
from hfsdk.state.checkpoint_index import BEST, folder_of, read_index, split

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.core.batch import Batch


COLUMN = "held_out_score"
"""The column of these scores, in the rows of the steps after which they were measured."""


@documented
@dataclass(frozen=True)
class KeepBest:
    """How ``session.train(keep_best=...)`` measures which checkpoint is the best."""

    prompts: PromptStream
    """The held-out prompts, from ``session.prompts``; nothing advances. What is trained on is no measure."""
    every: Count = 10
    """Steps from one measurement to the next."""
    num_prompts: Count = 128
    """The number of held-out prompts, at most as many as there are. The standard error of the mean of 128 scores of 0 or 1 is up
    to 0.044."""
    max_new_tokens: Count | None = None
    """Longest response, in tokens; by default the algorithm's."""
    temperature: NonNegative | None = None
    """The temperature of sampling, 0 is greedy; by default the algorithm's."""

    def __post_init__(self) -> None:
        check_fields(self)


def best_tracker(
    host: TrainHost, keep_best: KeepBest | PromptStream | None, algorithm: Any, folder: str | Path | None, resume: str | Path | None
) -> BestCheckpointTracker | None:
    """Return the tracker of a run's best checkpoint; ``None`` for a run that keeps none.

    Raises:
        OptionError: it is neither a stream nor a `KeepBest`, there is no folder, or the session is simulated.
        PlacementError: the session has no reward, which scores the responses.
        CheckpointError: the saves would not fit on the disk.
    """
    if keep_best is None:
        return None
    wanted = KeepBest(keep_best) if isinstance(keep_best, PromptStream) else keep_best
    if not isinstance(wanted, KeepBest):
        raise OptionError(
            f"keep_best takes held-out prompts, e.g. session.prompts(held_out, batch_size=64), or hf.KeepBest(prompts, every=10); "
            f"got {shown(keep_best)}"
        )
    if folder is None:
        raise OptionError("keep_best needs a folder to save to (folder=...)")
    if host.context.simulated:
        raise OptionError("keep_best needs scores, and a simulated session has none; leave it out")
    tokens = wanted.max_new_tokens or int(getattr(algorithm, "max_new_tokens", 32))
    temperature = float(getattr(algorithm, "temperature", 1.0)) if wanted.temperature is None else wanted.temperature
    _ = host.deployment.models.reward
    best = folder_of(folder, "a save") / BEST
    host.saves.check_space(best, 2, 1)
    if resume is None:
        host.saves.tell_of_anothers(best)
    return BestCheckpointTracker(
        host, wanted, tokens, temperature, best, resumed=resume is not None and _within(resume, best.parent)
    )


class BestCheckpointTracker:
    """Measures a run on held-out prompts, and saves what is better than all before.

    Attributes:
        best: the best so far; ``None`` before anything was measured.
    """

    def __init__(self, host: TrainHost, wanted: KeepBest, tokens: int, temperature: float, folder: AnyPath, resumed: bool) -> None:
        self._host, self._wanted, self._tokens, self._temperature, self._folder = host, wanted, tokens, temperature, folder
        self._resumed = resumed
        self._address = str(folder) if isinstance(folder, StorePath) else folder
        """The same, for who asks where the best is."""
        self.best: BestCheckpoint | None = None

    def begin(self) -> None:
        """Measure and save the start, unless there is a best to go on with.

        Raises:
            CallError: the reward has no finite score for some of the responses.
        """
        self.best = self._saved_best()
        if self.best is None:
            score = self._score()
            if not math.isfinite(score):
                raise CallError(
                    f"the held-out score before the first step is {score}: the reward has no number for some responses. Look at "
                    "session.evaluate(prompts).attrs['samples'], and let the reward give a finite score for every text.",
                    role=self._host.deployment.models.reward.name,
                )
            self._save(BestCheckpoint(score, self._host.context.counters.count("steps") - 1, score, self._address))
        else:
            self._count(self.best)

    def measure(self, step: int, last: bool) -> dict[str, float]:
        """Return the held-out score after a step, where it is time for one, as a part of the step's row."""
        due = last or step % self._wanted.every == self._wanted.every - 1
        return {COLUMN: self._score()} if due else {}

    def take(self, row: Mapping[str, Any]) -> None:
        """Save what the step of this row left, if that is the best so far; between two steps."""
        score = row.get(COLUMN)
        if score is not None and self.best is not None and score > self.best.score:
            self._save(BestCheckpoint(score, row["step"], self.best.start, self._address))

    def _score(self) -> float:
        numbers = evaluate(
            self._host, self._wanted.prompts, num_prompts=self._wanted.num_prompts, max_new_tokens=self._tokens,
            temperature=self._temperature, num_samples=0,
        )  # fmt: skip
        return float(numbers["score_mean"][0])

    def _save(self, best: BestCheckpoint) -> None:
        before = self._host.context.counters.all()
        self._count(best)
        try:
            self._host.saves.save(self._folder)
        except BaseException:
            self._host.context.counters.replace(before)  # what is not saved is not the best there is
            raise
        self.best = best

    def count_again(self) -> None:
        """Count the best so far after a death, whose save knows of those before it alone."""
        if self.best is not None:
            self._count(self.best)

    def _count(self, best: BestCheckpoint) -> None:
        for name, value in ((SCORE, best.score), (STEP, best.step), (START, best.start), (MEASURE, self._measure())):
            self._host.context.counters.set(name, value)

    def _saved_best(self) -> BestCheckpoint | None:
        """Return the best that is in the folder, if it is of the run that goes on and was measured as this one."""
        counters = self._host.context.counters.all()
        try:
            index = read_index(self._folder)
            saved = index.read(index.saves[-1]).session["counters"]
        except CheckpointError:
            return None
        # a session whose counters are those of the saved best has loaded it, or made it
        same = self._resumed or all(counters.get(name) == saved.get(name) for name in (SCORE, STEP, START))
        if SCORE not in saved:
            return None
        best = BestCheckpoint(saved[SCORE], int(saved[STEP]), saved[START], self._address)
        alike = saved.get(MEASURE, self._measure()) == self._measure()  # older saves do not say
        if same and alike:
            return best
        why = "of another run" if not same else "measured on other prompts, with other sampling or by another reward"
        self._host.context.notice(f"keep_best: {best} is {why}; it is replaced by the best from here on")
        return None

    def _measure(self) -> float:
        """Return a number that identifies the measurement; a function by its text, which another kernel pickles otherwise."""
        wanted, role = self._wanted, self._host.deployment.models.reward.role
        reward = (role.function.name, role.function.source) if role.function else (role.folder, role.model)
        what = repr((wanted.prompts._fingerprint, wanted.num_prompts, self._tokens, self._temperature, reward))
        return float(int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "big"))


def _within(folder: str | Path, root: AnyPath) -> bool:
    """Whether a checkpoint is a save of the run in ``root``."""
    return split(folder_of(folder, "a checkpoint"))[0].resolve() in (root.resolve(), (root / BEST).resolve())


# -- ``evaluate``: generate and score without training


def evaluate(
    host: TrainHost,
    prompts: Any,
    *,
    reward: RewardModel | None = None,
    num_prompts: Count = 128,
    max_new_tokens: Count = 32,
    temperature: NonNegative = 1.0,
    seed: int | None = None,
    num_samples: Index = 3,
    n: Copies = 1,
    pass_at: Sequence[Copies] = (),
    pass_score: float = 0.5,
) -> pd.DataFrame:
    """Carry out ``session.evaluate``; its text says what the arguments are."""
    import pandas as pd

    if isinstance(prompts, RowStream) and not isinstance(prompts, PromptStream):
        raise OptionError(f"evaluate takes prompts, session.prompts(held_out), to generate for; got {prompts!r}")
    if pass_at and max(pass_at) > n:
        raise OptionError(f"pass_at must be at most n, the responses to a prompt; got pass_at={shown(tuple(pass_at))}, n={n}")
    models = host.deployment.models
    reward = reward or models.reward
    stream = prompts if isinstance(prompts, PromptStream) else host.sources.in_order(prompts)
    batch: Batch = stream.rows(0, min(num_prompts, stream.num_prompts))
    batch = models.actor.generate(batch, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, n=n)
    reads = ["response", "scores", "finish_reason", "policy_version", "group"]
    if any(isinstance(h, ReferenceModel) for h in host.deployment.book) and temperature > 0:
        batch = models.actor.compute_log_probs(batch)
        batch = models.reference.compute_log_probs(batch)
        reads += ["old_log_probs", "ref_log_probs"]
    batch = reward.compute_scores(batch)
    try:
        numbers = batch.reduce(_summary, reads=reads).value
        if pass_at:
            numbers = {**numbers, **pass_rates(batch, pass_at, pass_score)}
        frame = pd.DataFrame([numbers])
    except SimulatedValueError:
        words = "session.evaluate needs scores, and a simulated session has none; the trace has its calls"
        raise SimulatedValueError(words) from None
    frame.attrs["samples"] = _samples(batch, num_samples)
    return frame


def _summary(table: Table) -> dict[str, float]:
    scored = scored_rows({"scores": table["scores"]}, table.num_rows)
    scores = np.asarray(table["scores"], dtype=np.float64)[scored]
    lengths = table.ragged("response").lengths
    group = np.asarray(table["group"])
    _, of_prompt, counts = np.unique(group[scored], return_inverse=True, return_counts=True)
    of_prompts = np.bincount(of_prompt, scores) / counts
    numbers = {
        "num_prompts": len(np.unique(group)), "score_mean": float(scores.mean()), "score_std": float(scores.std()),
        "score_stderr": float(of_prompts.std() / np.sqrt(len(of_prompts))), "response_tokens_mean": float(lengths.mean()),
        "eos_rate": float(np.mean([str(r) == "stop" for r in table["finish_reason"]])),
        "policy_version": int(np.asarray(table["policy_version"]).max()),
    }  # fmt: skip
    if "ref_log_probs" in table:
        old, ref = table.ragged("old_log_probs"), table.ragged("ref_log_probs")
        numbers["kl_mean"] = float((old.flat.astype(np.float64) - ref.flat).sum() / table.num_rows)
    if len(scores) < table.num_rows:
        numbers["not_scored"] = table.num_rows - len(scores)
    return numbers


def _samples(batch: Batch, count: int) -> list[dict[str, Any]]:
    if count < 1:
        return []
    few = batch[: min(count, len(batch))]
    scores = few.table("scores")["scores"]
    texts = zip(few.text("prompt"), few.text("response"), scores, strict=True)
    return [{"prompt": prompt, "response": response, "score": float(score)} for prompt, response, score in texts]
