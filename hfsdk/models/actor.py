"""``ActorModel``: the policy. It generates, gives log-probabilities, and is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np

from hfsdk.core.arguments import BASE_ALONE, OWN, Generation, LogProbs
from hfsdk.core.batch import Batch, refs_of, with_written
from hfsdk.core.builtin import Method
from hfsdk.core.checks import Count, Fraction, Index, NonNegative, Within, checked, shown
from hfsdk.core.columns import COLUMNS, OF_RESPONSE
from hfsdk.core.errors import ColumnError, LayoutError, OptionError, SimulatedValueError
from hfsdk.core.gap import Gap
from hfsdk.core.methods import CENSUS, COMPUTE_LOG_PROBS, GENERATE, LAST_RESHARD
from hfsdk.core.pending import ColumnRef
from hfsdk.core.prompt_data import as_values, foresee, is_token_ids, left_out, naming, question_of, read_source
from hfsdk.core.roles import RoleSpec, Sampling
from hfsdk.core.rollout_sizes import context_tokens
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.table import Ragged, Table
from hfsdk.core.unscored import PART
from hfsdk.models.handle import Host, TrainedHandle
from hfsdk.models.replays import REPLAYED, sample_of
from hfsdk.resharding.census import Census
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import ReshardReport, Resident, TransportReport

T = TypeVar("T")

Copies = Annotated[int, Within(1, 65_536)]

Prompts = Any
"""A batch with a column ``prompt``, one text, the token ids of one prompt, or data as ``session.prompts`` takes them."""

MIN_TEMPERATURE = 0.01
"""Smallest temperature above 0 that the generating engine takes as it is."""
MAX_TEMPERATURE = 2.0
"""Largest one that it takes."""


class ActorModel(TrainedHandle):
    """The policy being trained: a trainer (Megatron-core) and a generating engine (vLLM) on the same devices.

    The generating engine's weights are stale after an update; the next :meth:`generate` moves them (``reshard_plan``).
    """

    kind: ClassVar[str] = "actor"

    def __init__(self, host: Host, role: RoleSpec) -> None:
        super().__init__(host, role)
        self._chat: list[dict[str, str]] = []

    # -- generation

    @checked
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: Count = 64,
        min_new_tokens: Index = 0,
        temperature: NonNegative = 1.0,
        top_k: Index = 0,
        top_p: Fraction = 1.0,
        n: Copies = 1,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        adapter: Snapshot | str | None = "",
    ) -> Batch:
        """Generate responses (HybridFlow, table 4: generate_sequences).

        Args:
            prompts: a batch with a column ``prompt``; one text, token ids, or one conversation; or data as ``session.prompts``
                takes them (texts, a Series, a DataFrame, ...), whose other columns are passed on to reward functions.
            max_new_tokens: longest response, in tokens.
            min_new_tokens: shortest response, in tokens.
            temperature: logits are divided by it; 0 is greedy. It travels in the batch into every log-prob pass.
            top_k: keep the k likeliest tokens; 0 keeps all.
            top_p: keep the likeliest tokens that together have this probability.
            n: responses per prompt; the batch gets n rows per prompt, one after the other, and ``group`` says whose they are.
            stop: texts that end a response; they stay in it.
            stop_token_ids: tokens that end a response, besides the model's own.
            ignore_eos: go on past the end-of-sequence token.
            seed: with the prompt's position and the copy's number it seeds each sample; by default the session's.
            adapter: for an actor with LoRA: a snapshot, or its name, for the adapters it had then; ``None`` for the base alone. By
                default those that it has now. ``policy_version`` is then the snapshot's, and -1 for the base.

        Returns:
            The batch with response (token ids, end token included), rollout_log_probs (one per response token),
            finish_reason (``"stop"`` or ``"length"``), policy_version, temperature and group. Columns of older
            responses are dropped.

        Raises:
            ColumnError: the batch has no prompts, or one is empty.
            OptionError: an option is out of its range, a prompt plus ``max_new_tokens`` is longer than the context, or the actor
                has no adapters to choose from.
        """
        sampling = Sampling(
            max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            stop=_tuple("stop", stop), stop_token_ids=_tuple("stop_token_ids", stop_token_ids), ignore_eos=ignore_eos,
        )  # fmt: skip
        self._check_sampling(sampling)
        batch = self._prompt_batch(prompts)
        self._need(batch, ["prompt"], GENERATE.name)
        self._check_prompts(batch, max_new_tokens)
        batch = batch.drop(*[name for name in batch if name in OF_RESPONSE or name.startswith(PART)])
        if "position" not in batch:
            batch = batch.with_columns(position=np.arange(len(batch), dtype=np.int64))
        if n > 1:
            batch = batch.take(np.repeat(np.arange(len(batch)), n))
        chosen = self._adapter(adapter)
        arguments = Generation(sampling=sampling, seed=self._host.seed if seed is None else seed, copies=n, adapter=chosen)
        lease = self._submit(GENERATE, arguments, {name: refs_of(batch)[name] for name in GENERATE.reads}, len(batch))
        generated = with_written(batch, lease, GENERATE.writes)
        replayed = REPLAYED.get()
        if replayed is not None and chosen == OWN and (rows := sample_of(generated, sampling)) is not None:
            replayed.append((self.compute_log_probs(rows), self._role.dtype))
        return generated

    def _adapter(self, adapter: Snapshot | str | None) -> int:
        """Return which adapters a call generates with, as workers know them."""
        if adapter == "":
            return OWN
        if self._role.lora is None or self._role.generated_by:
            what = "generates on a pool of its own" if self._role.lora is not None else "has no LoRA"
            raise OptionError(f"{self.name} {what}, so there are no adapters to choose from; leave adapter={adapter!r} out")
        if adapter is None:
            return BASE_ALONE
        snapshot = self._host.find_snapshot(adapter)
        copy = next((copy for copy in snapshot.kept if copy.role == self.name), None)
        if copy is None:
            raise OptionError(
                f"the snapshot {snapshot.name!r} has no {self.name}; it has {', '.join(k.role for k in snapshot.kept)}"
            )
        return copy.number

    @checked
    def chat(
        self,
        message: str,
        *,
        max_new_tokens: Count = 128,
        temperature: NonNegative = 0.7,
        top_p: Fraction = 1.0,
        system: str | None = None,
        new: bool = False,
        seed: int | None = None,
    ) -> str:
        """Say something to the model in its chat template, wait, and return its answer. The conversation goes on.

        Args:
            message: the user's turn.
            max_new_tokens: longest answer, in tokens.
            temperature: 0 is greedy.
            top_p: the same as in :meth:`generate`.
            system: a system message; it starts a new conversation.
            new: forget the conversation so far.
            seed: the same as in :meth:`generate`.

        Raises:
            OptionError: the model has no chat template, or the conversation has grown beyond the context.
        """
        start = [] if new or system is not None else list(self._chat)
        if system is not None:
            start.append({"role": "system", "content": system})
        turns = [*start, {"role": "user", "content": message}]
        codec = self._client.need_tokenizer()
        ids = codec.encode_chat(turns)
        prompt = Batch.from_columns(self._client, {"prompt": Ragged.of([ids], np.int32), "position": np.array([len(turns)])})
        batch = self.generate(prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
        answer = codec.decode(batch.table("response").ragged("response")[0].tolist(), special=False).strip()
        self._chat = [*turns, {"role": "assistant", "content": answer}]
        return answer

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The turns of :meth:`chat` so far."""
        return [dict(turn) for turn in self._chat]

    # -- preparation

    @checked
    def compute_log_probs(self, batch: Batch, *, entropy: bool = False) -> Batch:
        """Write ``old_log_probs``: the trainer's log-probability of every response token, at the row's temperature.

        These are the ratio's denominator (HybridFlow, table 4: compute_log_prob).

        Args:
            batch: rows with prompt and response.
            entropy: also write ``entropy``, of the distribution each token was drawn from, in nats.

        Raises:
            ColumnError: the batch lacks a column.
        """
        writes = ["old_log_probs"] + ["entropy"] * entropy
        return self._forward(batch, COMPUTE_LOG_PROBS, LogProbs(column="old_log_probs", entropy=bool(entropy)), writes)

    @checked
    def explain_gap(self, batch: Batch) -> Gap:
        """Say why trainer and generating engine disagree on the batch's log-probabilities, by experiments; waits.

        Each experiment has an engine score the very same tokens with one thing changed: the weights moved anew, another
        temperature, top-k or top-p, the prompts as they were given or tokenised anew, the prefix cache not read, the weights of
        then where a snapshot has them, transformers in fp32 and bf16.
        What a change takes away of the gap is its share. Where the engines agree within rounding nothing is a cause.

        It takes two passes over the batch where they agree, and about a dozen over some rows where not. Weights are as before; the
        next :meth:`generate` moves them anew.

        Args:
            batch: rows with prompt, response, rollout_log_probs, and temperature and policy_version as :meth:`generate` writes.

        Returns:
            A verdict, a row per experiment, and of every token what each cause has of its gap. A notebook draws it; ``to_pandas()``
            has a row per experiment, ``to_pandas("tokens")`` one per response token, ``to_pandas("layers")`` one per layer.

        Raises:
            ColumnError: the batch lacks a column, or has no response token.
            SimulatedValueError: the session is simulated.
        """
        from hfsdk.models.explain_gap import explain

        self._need(batch, [*GENERATE.reads[:1], "response", "rollout_log_probs"], "explain_gap")
        if self._host.simulated:
            raise SimulatedValueError(
                f"{self.name}.explain_gap compares log-probabilities, and a simulated session has shapes and times only. "
                "Run the same cells on a real session."
            )
        refs_of(batch).check_aligned(["rollout_log_probs"], f"{self.name}.explain_gap")
        lengths = batch.known_lengths("response")
        if lengths is not None and not lengths.sum():
            raise ColumnError(f"{self.name}.explain_gap: the batch has no response token; call {self.name}.generate(...) first")
        self._check_sequences(batch, "explain_gap")
        return explain(self, batch)

    # -- layouts

    @property
    def reshard_plan(self) -> ReshardPlan:
        """The plan of the moves between ranks when the generating engine takes the trainer's weights.

        Where a shadow generates, on a pool of its own, its ranks are numbered after the trainer's.

        Raises:
            LayoutError: the actor is not placed yet and its layouts are open.
        """
        spec, train, rollout = self._need_model("reshard"), self._role.train, self._role.rollout
        if train is None or rollout is None or train.dp is None:
            raise LayoutError(
                f"{self.name}'s layouts are open until it is placed ({self!r}); call session.place('colocate') first, "
                "or hf.ReshardPlan.between(spec, train, rollout)"
            )
        apart, nodes = bool(self._role.generated_by), self._role.nodes or None
        return ReshardPlan.between(self._role.learned or spec, train, rollout, self._role.dtype, nodes=nodes, apart=apart)

    @property
    def last_reshard(self) -> ReshardReport:
        """The report of the last time that the generating engine took the trainer's weights, beside the plan; waits.

        In a simulated session the report is predicted: bytes of the plan, seconds of the performance model. Where a shadow
        generates, on a pool of its own, its ranks come after the trainer's, as in the plan.

        Raises:
            OptionError: they have not moved yet.
        """
        self._host.ready(self)
        plan, shadow = self.reshard_plan, self._role.generated_by
        sides = [self._of_ranks(LAST_RESHARD, TransportReport, role) for role in (self.name, shadow) if role]
        if not all(sides):
            raise OptionError(f"{self.name}'s weights have not moved yet; call {self.name}.generate(...) first")
        reports = tuple(report for side in sides for report in side)
        return ReshardReport(plan, reports, predicted=self._host.simulated)

    def census(self) -> Census:
        """Count the weights that are on each rank now, from storages that are not empty, beside the plan; waits.

        A notebook draws it; ``to_pandas()`` has a row per rank.

        Raises:
            SimulatedValueError: the session is simulated.
        """
        self._host.ready(self)
        plan, ranks = self.reshard_plan, self._of_ranks(CENSUS, Resident)
        plans = [plan]
        if self._role.lora is not None:
            plans.append(ReshardPlan.between(self._need_model("reshard"), plan.train, plan.rollout, plan.dtype, apart=plan.apart))

        def planned(moment: str, rank: int) -> int:
            if moment == "generating":
                return sum(plan.bytes_peak(rank) for plan in plans)
            return sum(plan.bytes_held(rank) + (plan.bytes_needed(rank) if moment == "both" else 0) for plan in plans)

        return Census(self.name, ranks, tuple(planned(r.moment, rank) for rank, r in enumerate(ranks)))

    def _of_ranks(self, method: Method, kind: type[T], role: str = "") -> tuple[T, ...]:
        """Ask every rank of this role, or of its shadow, for something measured; empty where a rank has nothing yet."""
        results = self._result(self._submit(method, role=role, waits=True))
        for result in results:
            if result is not None and not isinstance(result, kind):
                int(result)  # a simulated value says that it is none
        return () if any(result is None for result in results) else tuple(results)

    # -- checks

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus response, in tokens."""
        return context_tokens(self._need_model(GENERATE.name), self._role.rollout_options)

    def _check_sampling(self, sampling: Sampling) -> None:
        vocab = self._need_model(GENERATE.name).vocab_size
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise OptionError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}; got {sampling.temperature}")
        if sampling.temperature > MAX_TEMPERATURE:
            raise OptionError(f"temperature must be at most {MAX_TEMPERATURE:g}, as vLLM has it; got {sampling.temperature:g}")
        for token in sampling.stop_token_ids:
            if not 0 <= token < vocab:
                raise OptionError(f"stop_token_ids must be tokens of {self.spec} (0 to {vocab - 1}); got {token}")
        if any(not text for text in sampling.stop):
            raise OptionError(f"stop must be texts that are not empty; got {sampling.stop}")

    def _prompt_batch(self, prompts: Prompts) -> Batch:
        if isinstance(prompts, Batch):
            return prompts
        if isinstance(prompts, str) or (is_token_ids(prompts) and len(prompts)):
            prompts = [prompts]
        try:
            rows, extra = read_source(prompts)
        except (ColumnError, OptionError) as error:
            raise type(error)(f"{self.name}.generate cannot take these prompts: {error}") from None
        if not rows:
            raise OptionError(f"{self.name}.generate got no prompts; give a batch, texts, or token ids")
        whats = [f"{self.name}.generate: prompt {i}" for i in range(len(rows))]
        questions = [question_of(row, whats[i], row=i, columns=extra) if len(row) else None for i, row in enumerate(rows)]
        if any(questions):
            foresee(self._client.need_tokenizer(), [question for question in questions if question])
        ids = [self._token_ids(*of_row) for of_row in zip(rows, whats, questions, strict=True)]
        vocab = self._need_model(GENERATE.name).vocab_size
        for i, tokens in enumerate(ids):
            wrong = [t for t in tokens if not 0 <= t < vocab]
            if wrong:
                raise OptionError(f"prompt {i} has token {wrong[0]}; {self.spec} has tokens 0 to {vocab - 1}")
            if not tokens:
                raise OptionError(f"{self.name}.generate: prompt {i} is empty; give at least one token")
        columns: dict[str, Any] = {"prompt": Ragged.of(ids, np.int32)}
        columns |= {name: as_values(list(values)) for name, values in extra.items() if name not in COLUMNS}
        if reserved := [name for name in extra if name in COLUMNS]:
            self._host.notice(left_out(reserved))
        lease = self._client.put(Table(columns))  # as they are: from_columns would make lists of numbers ragged
        return Batch(self._client, {name: ColumnRef(lease.call_id, name, lease=lease) for name in columns}, len(ids))

    def _token_ids(self, prompt: Any, what: str, question: tuple[str, Any] | None) -> list[int]:
        if question is not None:
            with naming(what):
                return list(getattr(self._client.need_tokenizer(), question[0])(question[1]))
        if isinstance(prompt, str) or is_token_ids(prompt):
            return [int(token) for token in prompt]
        raise OptionError(f"{what} is {shown(prompt)}; prompts are texts, token ids or lists of messages")

    def _check_prompts(self, batch: Batch, max_new_tokens: int) -> None:
        lengths = batch.known_lengths("prompt")
        if lengths is None:
            return
        if lengths.min() < 1:
            raise OptionError(f"{self.name}.generate: prompt {int(lengths.argmin())} is empty; give at least one token")
        row = int(lengths.argmax())
        if lengths[row] + max_new_tokens > self.context_tokens:
            raise OptionError(
                f"{self.name}.generate: sample {row} has {lengths[row]} prompt tokens, with max_new_tokens={max_new_tokens} "
                f"that is {lengths[row] + max_new_tokens}; the context of {self.spec} is {self.context_tokens}. Shorten the prompt "
                "(session.prompts(..., max_prompt_tokens=...) keeps its end), lower max_new_tokens, or raise "
                "RolloutOptions(max_model_len=...) where the model has more positions."
            )


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    """Return one text or several things as a tuple; their types are checked with the other options."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (Sequence, np.ndarray)):
        raise OptionError(f"{name} must be a list; got {name}={shown(value)}")
    return tuple(value)
