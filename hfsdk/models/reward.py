"""``RewardModel`` and ``CostModel``: one number per response, from a Python function or from a model with a scalar head."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hfsdk.core.arguments import Scoring
from hfsdk.core.batch import Batch, refs_of, with_written
from hfsdk.core.builtin import SEQUENCES, Method
from hfsdk.core.checks import Positive, checked, shown
from hfsdk.core.columns import NOT_FOR_REWARDS
from hfsdk.core.errors import CheckpointError, ColumnError, OptionError, SimulatedValueError
from hfsdk.core.files import is_ours, write_file
from hfsdk.core.functions import Shipped
from hfsdk.core.lora import ADAPTER_CONFIG
from hfsdk.core.methods import COMPUTE_COSTS, COMPUTE_SCORES, PROBE
from hfsdk.core.pending import ColumnRef
from hfsdk.core.reward_arguments import GIVEN, check_columns, check_reward_function
from hfsdk.core.reward_probe import RewardProbe, summed
from hfsdk.core.sample_outcome import SampleOutcome
from hfsdk.core.table import Array, Ragged, Table
from hfsdk.core.unscored import NOT_SCORED, PART, is_unscored
from hfsdk.engine.calls.messages import Submit
from hfsdk.models.handle import CallClient, Loss, TrainedHandle
from hfsdk.models.normalisation import NORMALISATION, Moments, saved_normalisation

FAILURES = "score_failures"
"""The column that says why samples were skipped; of a part of a sum, with ``_of_<name>`` behind it."""

SCORER_NUMBERS = ("score_mean", "score_std", "multiplier")
"""Numbers of a scorer that belong to the session's state."""


class _Scorer(TrainedHandle):
    """A model that scores: reward or cost. With an optimizer it is trained here, e.g. on pairs (``session.pairs``)."""

    _writes: ClassVar[str] = ""
    _scoring: ClassVar[Method]

    def _score(self, batch: Batch) -> Batch:
        role, per_token = self._role, f"token_{self._writes}"
        of_earlier = [name for name in (per_token, FAILURES) if name in batch and self._writes == "scores"]
        batch = batch.drop(*of_earlier)  # of an earlier reward: advantages would use its token scores, not these scores
        if role.function is None:
            return self._forward(
                batch, self._scoring, Scoring(column=self._writes, normalisation=self.normalisation), [self._writes]
            )
        arguments, inputs = self._function_arguments(batch, self._scoring, role.timeout_s, role.function)
        skipped = [arguments.failures_column] * (role.failures == "skip")
        method = replace(self._scoring, protocol=None, writes=(self._writes, *[per_token] * role.per_token, *skipped))
        whole_s = None if role.workers else role.timeout_s  # its workers watch each sample's
        lease = self._submit(method, arguments, inputs, len(batch), timeout_s=whole_s)
        return with_written(batch, lease, method.writes)

    def _function_arguments(
        self, batch: Batch, method: Method, timeout_s: float, function: Shipped
    ) -> tuple[Scoring, dict[str, ColumnRef]]:
        """Return the arguments of a call of a function, and the columns that it reads."""
        role = self._role
        arguments = Scoring(
            column=self._writes, function=function, tokenizer=self._client.tokenizer_folder, per_token=role.per_token,
            workers=role.workers, timeout_s=timeout_s, failures=role.failures,
        )  # fmt: skip
        extra = self._extra_columns(batch)
        own = [name for name in extra if name in GIVEN]
        if own:
            raise ColumnError(
                f"{self.name} is given {', '.join(GIVEN)} of the responses, and the batch has a column {own[0]!r} of its own; "
                f"give that another name where the data is made, or batch.alias('own_{own[0]}', {own[0]!r}).drop({own[0]!r})"
            )
        inputs = self._need(batch, method.reads, method.name) | extra
        lacking = "" if self._host.simulated else _lacking(function, tuple(extra))  # a plan knows no columns of the data
        if lacking:
            raise ColumnError(f"{self.name}: {lacking}")
        return arguments, inputs

    def _extra_columns(self, batch: Batch) -> dict[str, ColumnRef]:
        """Return the columns with one entry per sample: the data's own, and those of the generation."""
        columns = {}
        for name in batch:
            info = None if name in NOT_FOR_REWARDS else self._client.info(refs_of(batch)[name])
            if name not in NOT_FOR_REWARDS and (info is None or info.kind != "ragged"):
                columns[name] = refs_of(batch)[name]
        return columns

    @checked
    def probe(
        self,
        samples: Batch | Sequence[str],
        /,
        *,
        prompts: Sequence[str] | None = None,
        against: RewardModel | CostModel | Callable[..., Any] | None = None,
        timeout_s: Positive | None = None,
        **columns: Any,
    ) -> RewardProbe:
        """Run the reward on some samples, one by one, and return what there is to see; waits. Nothing is written into the batch.

        A function is called with lists of length 1 in a process of its own (as with ``workers``, whose processes it uses where
        there are some): a sample that raises, hangs or takes its process with it is a row of the report with the user's line, and
        the others go on. Of a model, and of a sum's models, there are scores without seconds. What the report says of a reward's
        scores: what they follow (length, place, repetition), groups without variance, duplicates, agreement with another reward.

        Args:
            samples: a batch with prompt and response, or completions as texts (which are tokenized, and read back).
            prompts: the prompts of completions given as texts, one each; empty without.
            against: another reward, or function, to run on the same samples: the report then says how far the two agree.
            timeout_s: most seconds of a sample; by default as declared.
            columns: for completions given as texts: what the function is given besides, e.g. ``answer=[...]``.

        Raises:
            ColumnError: the batch lacks a column, or one that the function must be given; or numbers of texts differ.
            OptionError: prompts or columns are given with a batch, or texts are no texts.
            RewardFunctionError: the function cannot be loaded in its process.
            SimulatedValueError: the session is simulated and has no scores.
        """
        if self._host.simulated:
            raise SimulatedValueError(f"{self.name}.probe needs scores, and a simulated session has none; probe in a real one")
        batch, texts = samples_of(self._client, samples, prompts, columns)
        others: list[SampleOutcome] = []
        other = ""
        if against is not None:
            other, others = self._outcomes_of(against, batch, timeout_s)
        group = batch.table("group")["group"] if "group" in batch else None
        return RewardProbe(
            self.name, *texts, self._outcomes(batch, timeout_s), batch.table("response").ragged("response").lengths,
            groups=None if group is None else np.asarray(group), timed=self._timed, other=other, other_outcomes=others,
        )  # fmt: skip

    @property
    def _timed(self) -> bool:
        """Whether probing takes the time of a function."""
        return self._role.function is not None

    def _outcomes(self, batch: Batch, timeout_s: float | None) -> list[SampleOutcome]:
        """Run each sample; of a model score all at once."""
        role = self._role
        if role.function is None:
            scores = np.asarray(self._score(batch).table(self._writes)[self._writes], dtype=np.float64)
            return [scored_by_model(float(score)) for score in scores]
        return self._outcomes_of_function(batch, role.function, timeout_s)

    def _outcomes_of(self, other: Any, batch: Batch, timeout_s: float | None) -> tuple[str, list[SampleOutcome]]:
        """Return the name of the reward that this one is compared with, and its outcomes."""
        if isinstance(other, _Scorer):
            return other.name, other._outcomes(batch, timeout_s)
        check_reward_function(other, self.kind)
        shipped = Shipped.of(other)
        return shipped.name, self._outcomes_of_function(batch, shipped, timeout_s, per_token=False, workers=0)

    def _outcomes_of_function(
        self, batch: Batch, function: Shipped, timeout_s: float | None, **instead: Any
    ) -> list[SampleOutcome]:
        """Run each sample through this reward's function, or another in its place."""
        self._host.ready(self)
        arguments, inputs = self._function_arguments(batch, PROBE, timeout_s or self._role.timeout_s, function)
        message = Submit.of("session", PROBE, replace(arguments, **instead), inputs, len(batch))
        return list(self._result(self._client.submit(message, waits=True)))

    @property
    def normalisation(self) -> tuple[float, float]:
        """(mean, standard deviation): a model's raw score has the mean taken off and is divided by the deviation; (0, 1) at first.

        Kept with the session, and in the folder that :meth:`save_pretrained` writes.
        """
        mean, std = self._host.counters.get(f"{self.name}.score_mean"), self._host.counters.get(f"{self.name}.score_std")
        if mean is None or std is None:
            return saved_normalisation(self._role)
        return mean, std

    @checked
    def normalise(
        self, batch: Batch | None = None, *, mean: float | None = None, std: Positive | None = None
    ) -> tuple[float, float]:
        """Bring this model's scores to mean 0 and variance 1 on reference samples, from the next call on; waits.

        (Stiennon et al., arXiv 2009.01325; Ziegler et al., 1909.08593: responses of the initial policy.) Scores written before
        stay as they are.

        Args:
            batch: reference samples, with prompt and response, at least two; scored here.
            mean: instead of a batch: the raw scores' mean ...
            std: ... and their standard deviation, above 0.

        Returns:
            The mean and the standard deviation (unbiased) of the raw scores.

        Raises:
            OptionError: the role is a function, neither a batch nor both numbers are given, or all scores are the same.
        """
        self._need_model("be normalised; do that in the function")
        if (batch is None) != (mean is not None) or (mean is None) != (std is None):
            raise OptionError(f"{self.name}.normalise takes a batch of reference samples, or mean=... and std=..., not both")
        if batch is not None:
            before = self.normalisation
            raw = self._score(batch).reduce(Moments(column=self._writes), reads=[self._writes])
            m, s = raw.value
            mean, std = before[0] + before[1] * m, before[1] * s
        assert mean is not None
        assert std is not None
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise OptionError(
                f"{self.name}.normalise found mean {mean:g} and standard deviation {std:g}; the deviation must be above 0. Give "
                "more samples, and such that their scores differ."
            )
        self._host.counters.set(f"{self.name}.score_mean", mean)
        self._host.counters.set(f"{self.name}.score_std", std)
        return mean, std

    def save_pretrained(self, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the weights as the actor does; the normalisation goes into ``config.json``, where ``session.reward`` finds it.

        Beside adapters it goes into theirs, ``adapter_config.json``.

        Args:
            folder: the folder to write to.
            merge: the same as the actor's.
        """
        target = super().save_pretrained(folder, merge=merge)
        file = target / ("config.json" if merge or self._role.lora is None else ADAPTER_CONFIG)
        if self._host.simulated:
            return target  # nothing was written
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.get(NORMALISATION, [0.0, 1.0]) == list(self.normalisation):
            return target  # it says so already
        config[NORMALISATION] = list(self.normalisation)
        try:
            write_file(file, json.dumps(config, indent=2) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write to {target}: {error.strerror or error}") from error
        is_ours(file)
        return target

    def _check_learn(self, method: Method, batch: Batch, loss: Loss) -> None:
        self._need_model("be trained")
        if not self._role.trainable and method.phase == "learning":
            raise OptionError(
                f"{self.name} is frozen: it was declared without an optimizer. Declare it as session.{self.kind}(model, "
                "optimizer=hf.AdamW(lr=1e-5)) to train it."
            )
        super()._check_learn(method, batch, loss)


@lru_cache(maxsize=64)
def _lacking(function: Shipped, columns: Sequence[str]) -> str:
    """Name the columns that a function needs and that are not there; ``""`` where all are."""
    return check_columns(function.load(), function.name, columns)


class RewardModel(_Scorer):
    """Scores responses. A function has TRL's form ``f(prompts, completions, **columns) -> list[float | None]``.

    ``prompts`` and ``completions`` are texts, special tokens left out; ``completion_ids`` and the data's other columns come by
    name. A function of one argument under another name gets the completions there; an async one is awaited. It runs in a CPU task
    of its own, with a timeout; ``None`` is a sample that is not scored. A model reads its scalar head at the last token of prompt
    plus response; declared with an optimizer it is trained by ``reward.update(pairs, hf.BradleyTerry())``. ``probe`` looks at the
    reward itself.
    """

    kind: ClassVar[str] = "reward"
    _writes: ClassVar[str] = "scores"
    _scoring: ClassVar[Method] = COMPUTE_SCORES

    @checked
    def compute_scores(self, batch: Batch) -> Batch:
        """Write ``scores``: one number per response (HybridFlow, table 4: compute_reward).

        Args:
            batch: rows with prompt and response.

        Token scores that another reward has written are left out of the batch.

        Raises:
            ColumnError: the batch lacks a column, or one that the function must be given.
            RewardFunctionError: at the first look: the function raised, took too long, or did not return one finite
                number (or ``None``) per completion; with workers it names the sample.
        """
        return self._score(batch)


class RewardSum(RewardModel):
    """A weighted sum of rewards, models and functions: ``session.reward([model, brevity], weights=[1.0, 0.1])``.

    Attributes:
        parts: the rewards summed, in order.
        weights: one each.
    """

    parts: tuple[RewardModel, ...] = ()
    weights: tuple[float, ...] = ()

    @checked
    def compute_scores(self, batch: Batch) -> Batch:
        """Write ``scores``, the weighted sum, and ``scores_of_<name>`` for each part; as ``RewardModel.compute_scores``.

        A part's ``None`` leaves that part out of the sample's sum, as in TRL; a sample to which all parts give ``None`` is not
        scored. Of a part that scores per token the sums count. One that skips what fails has ``score_failures_of_<name>``, and the
        samples that failed are not scored: what such a part would have given is not known.
        """
        names, failures = [f"{PART}{part.name}" for part in self.parts], [f"{FAILURES}_of_{name}" for name in names_of(self)]
        batch = batch.drop(*(name for name in failures if name in batch))  # of an earlier call
        for part, name in zip(self.parts, names, strict=True):
            batch = part.compute_scores(batch).alias(name, "scores")
            if FAILURES in batch:
                batch = batch.alias(f"{FAILURES}_of_{part.name}", FAILURES).drop(FAILURES)
        if "token_scores" in batch:
            batch = batch.drop("token_scores")
        failed = [name for name in failures if name in batch]
        return batch.map(WeightedScores(tuple(names), self.weights, tuple(failed)), reads=[*names, *failed], writes=["scores"])

    @property
    def _timed(self) -> bool:
        return any(part._timed for part in self.parts)

    def _outcomes(self, batch: Batch, timeout_s: float | None) -> list[SampleOutcome]:
        parts = zip(self.parts, self.weights, strict=True)
        return summed({part.name: (weight, part._outcomes(batch, timeout_s)) for part, weight in parts})

    def __repr__(self) -> str:
        words = " + ".join(f"{weight:g} {part.name}" for weight, part in zip(self.weights, self.parts, strict=True))
        return f"RewardModel({self.name!r}: {words})"


def names_of(reward: RewardModel) -> tuple[str, ...]:
    """Return a reward's name and, of a sum, those of its parts and theirs."""
    parts = reward.parts if isinstance(reward, RewardSum) else ()
    return (reward.name, *(name for part in parts for name in names_of(part)))


class WeightedScores:
    """The sum of several columns with one number per sample, each times its weight; runs where the columns are.

    A column that does not score a sample is left out of its sum. A sample that none scores is not scored, nor is one that failed.
    """

    def __init__(self, columns: tuple[str, ...], weights: tuple[float, ...], failures: tuple[str, ...] = ()) -> None:
        """Say what is summed.

        Args:
            columns: the columns of scores.
            weights: one each.
            failures: columns of texts, which are empty for samples that did not fail.
        """
        self.columns, self.weights, self.failures = columns, weights, failures

    def __call__(self, table: Table) -> dict[str, Any]:
        """Return the column ``scores``, in float32."""
        left_out = np.array([is_unscored(np.asarray(table[name])) for name in self.columns])
        both = zip(self.columns, self.weights, strict=True)
        numbers = np.array([weight * np.asarray(table[name], dtype=np.float64) for name, weight in both])
        total: Array = np.where(left_out, 0.0, numbers).sum(axis=0).astype(np.float32)
        failed = np.array([[bool(text) for text in table[name]] for name in self.failures], dtype=bool).reshape(-1, len(total))
        total[left_out.all(axis=0) | failed.any(axis=0)] = NOT_SCORED
        return {"scores": total}


class CostModel(_Scorer):
    """The cost of Safe-RLHF (arXiv 2310.12773): like a reward, but to be kept below a limit, by a multiplier."""

    kind: ClassVar[str] = "cost"
    _writes: ClassVar[str] = "costs"
    _scoring: ClassVar[Method] = COMPUTE_COSTS

    @checked
    def compute_costs(self, batch: Batch) -> Batch:
        """Write ``costs`` into the batch: one number per response (HybridFlow, table 4: compute_cost).

        Args:
            batch: the same as in :meth:`RewardModel.compute_scores`.
        """
        return self._score(batch)

    @property
    def multiplier(self) -> float:
        """lambda, the Lagrange multiplier: what one unit of cost weighs against one of reward; 1 at first.

        Part of the session's state: saved, loaded and rewound with it.
        """
        multiplier = self._host.counters.get(f"{self.name}.multiplier")
        return 1.0 if multiplier is None else multiplier

    @multiplier.setter
    @checked
    def multiplier(self, value: Positive) -> None:
        self._host.counters.set(f"{self.name}.multiplier", value)

    @checked
    def adapt_multiplier(self, batch: Batch, *, limit: float, lr: Positive, most: Positive | None = None) -> float:
        """Move lambda by how far the batch's mean cost is above the limit, and return it; waits for the costs.

        ``ln lambda += lr * lambda * (mean cost - limit)`` (Safe RLHF, arXiv 2310.12773, eq. 10 and appendix B.3; gradient ascent
        on ln lambda, which keeps it above 0). In a simulated session there are no costs and it stays.

        Args:
            batch: rows with costs.
            limit: d, in cost units.
            lr: alpha, above 0.
            most: lambda's upper bound.

        Raises:
            OptionError: ``lr`` or ``most`` is not above 0, or an argument is no number.
            ColumnError: the batch has no costs, or one is not finite.
        """
        self._need(batch, ["costs"], "adapt_multiplier")
        try:
            mean, _ = batch.reduce(Moments(column="costs"), reads=["costs"]).value
        except SimulatedValueError:
            return self.multiplier
        if not math.isfinite(mean):
            raise ColumnError(f"the mean of column 'costs' is {mean}; the multiplier moves by finite costs alone")
        grown = self.multiplier * math.exp(min(lr * self.multiplier * (mean - limit), 50.0))
        self.multiplier = max(min(grown, math.inf if most is None else most), 1e-12)
        return self.multiplier


# -- ``reward.probe``: samples as a batch with their texts, and a model's scores as outcomes


def samples_of(
    client: CallClient, samples: Any, prompts: Any, columns: Mapping[str, Any]
) -> tuple[Batch, tuple[list[str], list[str]]]:
    """Return samples as a batch, and the texts of prompts and completions as a function is given them: read back from their tokens.

    Raises: as :meth:`hfsdk.models.reward.RewardModel.probe`.
    """
    if isinstance(samples, Batch):
        if prompts is not None or columns:
            names = ", ".join(["prompts"] * (prompts is not None) + list(columns))
            raise OptionError(f"{names} go with completions given as texts; a batch has its own: batch.with_columns(name=[...])")
        samples.need(SEQUENCES, "probe")
        return samples, (samples.text("prompt"), samples.text("response"))
    completions = _texts(samples, "samples must be a batch, or a list of completions as texts")
    prompt_texts = (
        [""] * len(completions) if prompts is None else _texts(prompts, "prompts must be a list of texts, one per completion")
    )
    if len(prompt_texts) != len(completions):
        raise ColumnError(f"there are {len(prompt_texts)} prompts for {len(completions)} completions; give one each")
    encode = client.need_tokenizer().encode
    tokens = {
        name: Ragged.of([encode(text) if text else [] for text in texts], "int32")
        for name, texts in zip(SEQUENCES, (prompt_texts, completions), strict=True)
    }
    batch = Batch.from_columns(client, {**tokens, **columns})
    return batch, (batch.text("prompt"), batch.text("response"))


def scored_by_model(score: float) -> SampleOutcome:
    """Return the outcome of a model's score; a score that is not finite is a failure."""
    if math.isfinite(score):
        return SampleOutcome(score=score)
    return SampleOutcome(failure="is no score", message=f"the model's score is {score}")


def _texts(texts: Any, wanted: str) -> list[str]:
    listed = list(texts) if isinstance(texts, Sequence) and not isinstance(texts, str) else []
    if not listed or not all(isinstance(text, str) for text in listed):
        raise OptionError(f"{wanted}; got {shown(texts)}")
    return listed
