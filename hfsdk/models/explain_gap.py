"""``actor.explain_gap``: runs the experiments in an order in which none spoils the next, and names the causes.

The weights that the rollout has are looked at before anything else: a pass of the trainer may take them back, where both engines
have one copy, and so does whatever moves them anew. See :mod:`hfsdk.core.gap` for the three parts of a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hfsdk.core.arguments import OWN, Generation, LogProbs, OneSequence, Rescoring
from hfsdk.core.batch import Batch, refs_of, with_written
from hfsdk.core.errors import OptionError, UnsupportedModelError, WeightMismatchError
from hfsdk.core.gap import CAUSES, GAP_TOLERANCE, Gap, GapCause, HiddenStates, LayerGap, Scored, is_rounding, layer_gaps, size
from hfsdk.core.methods import COMPUTE_LOG_PROBS, GENERATE, LAYERS, RESCORE, RESCORE_AS_IS
from hfsdk.core.roles import Sampling
from hfsdk.core.table import Array, Ragged
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.host_memory import too_large
from hfsdk.models.handle import TextCodec, TrainedHandle

AS_LARGE = 4.0
"""A gap of unknown origin is as large as rounding in bf16 makes it where it is within this factor of that."""
LIKE = 10.0
"""A layer is off as rounding in bf16 is where its distance is within this factor of that of transformers in bf16."""
FAR = 20.0
"""A layer is off where its distance is this many times that of the other engine."""
CACHED_ROWS, CACHED_TOKENS = 2, 4
"""Rows, and first response tokens of each, that are scored behind the prefix cache, too."""
NEARER = 10.0
"""The prefix cache is a cause where what is behind it is so many times nearer to the record than what is not."""
ANEW = "the trainer's weights moved to the generating engine anew"
BESIDE = "transformers on the trainer's weights, in fp32 and bf16, beside both engines"
UNREAD = "the same tokens without reading the prefix cache"
OF_THEN = "the trainer's pass with its weights of then, which a snapshot has"
EXCLUDED = "nothing: no other change gives the recorded numbers"
BEFORE_TOKENS = 8
"""Tokens before the worst one that are shown."""


def explain(actor: TrainedHandle, batch: Batch) -> Gap:
    """See :meth:`ActorModel.explain_gap <hfsdk.models.ActorModel.explain_gap>`."""
    return _Explanation(actor, batch).gap()


class _Explanation:
    def __init__(self, actor: TrainedHandle, batch: Batch) -> None:
        self._start, self._actor = time.perf_counter(), actor
        self._dtype = actor.role.dtype
        self._passes = GapPasses(actor, batch)
        self._codec = _codec(actor)
        self._experiments: dict[str, GapCause] = {cause: GapCause(cause, "") for cause in CAUSES}
        self._parts: dict[str, Array] = {}
        self._insides: list[HiddenStates] = []

    def gap(self) -> Gap:
        passes = self._passes
        as_is, by_rollout = passes.rollout(fresh=False, through_cache=self._cached())
        try:
            trainer = passes.trainer()
        except WeightMismatchError:
            if not as_is.wrong:
                raise
            return self._damaged(as_is, by_rollout)
        gap = trainer - passes.recorded
        if is_rounding(gap, self._dtype):
            return self._done(trainer, self._agree(gap))
        self._take_apart(as_is, by_rollout, trainer)
        return self._done(trainer, self._verdict(gap))

    def _cached(self) -> list[tuple[int, int]]:
        """Return some tokens of the longest prompts, whose blocks are likeliest to stand in the prefix cache."""
        lengths = self._passes.responses.lengths
        rows = [int(row) for row in np.argsort(-self._passes.prompts.lengths, kind="stable")[:CACHED_ROWS] if lengths[row]]
        return [(row, token) for row in rows for token in range(min(int(lengths[row]), CACHED_TOKENS))]

    # -- the three parts

    def _take_apart(self, as_is: Scored, by_rollout: Array, trainer: Array) -> None:
        passes = self._passes
        moves = as_is.there and not is_rounding(trainer - by_rollout, self._dtype)
        at = passes.worst(trainer - by_rollout) if moves else passes.worst(trainer - passes.recorded)
        if moves:
            before, _ = passes.rollout(fresh=False, rows=np.array([at[0]]), inside=at)
            self._insides += [before.inside] if before.inside is not None else []
        fresh, by_fresh = passes.rollout(fresh=True) if moves or not as_is.there else (as_is, by_rollout)
        if not as_is.there:
            by_rollout = by_fresh
        # of the last token of a full context the rollout says nothing: nothing is said of the engines there
        by_rollout, by_fresh = (np.where(np.isnan(scored), trainer, scored) for scored in (by_rollout, by_fresh))
        own, moved, then = trainer - by_fresh, by_fresh - by_rollout, by_rollout - passes.recorded
        if not is_rounding(own, self._dtype):
            at, self._insides = passes.worst(own), []
        if not self._insides:
            again, _ = passes.rollout(fresh=True, rows=np.array([at[0]]), inside=at)
            self._insides += [again.inside] if again.inside is not None else []
        self._insides += passes.layers(*at)
        self._looked_at(bool(as_is.cached))
        if not is_rounding(moved, self._dtype):
            self._weights(as_is, moved, at)
        if not is_rounding(own, self._dtype):
            self._engines(fresh, own, passes.of_row(trainer, at[0]), passes.of_row(by_fresh, at[0]))
        if not is_rounding(then, self._dtype):
            self._then(as_is, by_rollout, trainer, then, at[0])

    def _looked_at(self, cached: bool) -> None:
        """Note the experiment behind each of the three parts, whether or not it explains anything."""
        for cause, changed in {
            "version": ANEW,
            "weights": ANEW,
            "dtype": BESIDE,
            "layer": BESIDE,
            "cache": UNREAD * cached,
        }.items():
            self._experiments[cause] = replace(self._experiments[cause], changed=changed)

    def _name(self, cause: str, changed: str, part: Array, detail: str) -> None:
        earlier = self._parts.get(cause)
        self._parts[cause] = part if earlier is None else earlier + part
        self._experiments[cause] = GapCause(cause, changed, named=True, detail=detail)

    def _weights(self, as_is: Scored, moved: Array, at: tuple[int, int]) -> None:
        """Name why the rollout's weights are not the trainer's."""
        now, versions = self._actor.version, self._passes.versions
        if as_is.num_updates < now:
            claimed = as_is.num_updates if versions is None else int(versions.max())
            # the batch's versions say what the engine was thought to have; the engine says what it has
            if claimed <= as_is.num_updates:
                detail = f"generated after {_updates(as_is.num_updates)}; the trainer has taken {now}"
                return self._name("version", ANEW, moved, detail)
            had = _updates(as_is.num_updates)
            detail = f"the generating engine had those of {had}, though the batch says {claimed}: they did not move"
            return self._name("weights", ANEW, moved, detail)
        if self._rounded(as_is, moved):
            return self._name("dtype", ANEW, moved, f"the generating engine's weights are rounded to bf16, {_list(as_is.wrong)}")
        place = self._first_off("rollout", "trainer")
        tensors = _list(as_is.wrong) or f"packed kernels hide which; first seen in {place}"
        self._name("weights", ANEW, moved, f"changed after they had arrived: {tensors}")
        return None

    def _engines(self, fresh: Scored, own: Array, trainer: Array, rollout: Array) -> None:
        """Name why the engines disagree on the same tokens with the same weights."""
        if self._rounded(fresh, own):
            return self._name("dtype", BESIDE, own, f"the generating engine's weights are rounded to bf16, {_list(fresh.wrong)}")
        if fresh.wrong:
            return self._name("weights", BESIDE, own, f"other numbers in {_list(fresh.wrong)}, though they moved just now")
        exact = self._oracle("fp32")
        if exact is None:
            return self._name("layer", BESIDE, own, "with the same weights; transformers does not fit into the host's memory")
        # transformers in fp32 judges: the engine that is farther from it is the one to look into
        off = {"trainer": np.nanmean(np.abs(trainer - exact)), "rollout": np.nanmean(np.abs(rollout - exact))}
        side, other = ("trainer", "rollout") if off["trainer"] > off["rollout"] else ("rollout", "trainer")
        if self._dtype == "fp32" and self._like_bf16(side) and _alike(float(off[side]), self._noise()):
            return self._name("dtype", BESIDE, own, f"the {_NAMES[side]} is off as bf16 rounds, the {_NAMES[other]} is exact")
        place = self._first_off(side, other)
        self._name("layer", BESIDE, own, f"{place} of the {_NAMES[side]} computes otherwise, with the same weights")
        return None

    def _then(self, as_is: Scored, by_rollout: Array, trainer: Array, then: Array, row: int) -> None:
        """Name what has changed since the log-probabilities were recorded."""
        passes, origin = self._passes, self._passes.origin()
        if as_is.cached:
            cached = np.array(list(as_is.cached.values()))
            scored, recorded = (
                np.array([passes.of_row(flat, row)[token] for row, token in as_is.cached]) for flat in (by_rollout, passes.recorded)
            )
            far, near = np.median(np.abs(scored - recorded)), np.median(np.abs(cached - recorded))
            # scored behind the cache the engine repeats the record, scored anew it does not
            if far > NEARER * near and far > GAP_TOLERANCE[self._dtype]["mean"] / NEARER:
                detail = f"behind the prefix cache {near:.1g} nats a token from the record, {far:.1g} without it"
                return self._name("cache", UNREAD, then, detail)
        fits = Fits(passes, trainer, then, origin, self._dtype, self._codec)
        fits.run()
        for cause, (changed, part, detail) in fits.tried.items():
            if len(part):
                self._name(cause, changed, part, detail)
            else:
                self._experiments[cause] = replace(self._experiments[cause], changed=changed)
        if not is_rounding(fits.rest, self._dtype):
            rest = self._older(fits.rest, then - trainer, fits.setting)
            if not is_rounding(rest, self._dtype):
                self._by_exclusion(rest, origin, row)
        return None

    def _older(self, rest: Array, less_trainer: Array, setting: Setting) -> Array:
        """Name older weights where the batch says so, tried with those of a snapshot if there is one; return what is left."""
        now, versions = self._actor.version, self._passes.versions
        if versions is None or int(versions.min()) >= now or "version" in self._parts:
            return rest
        old = int(versions.min())
        detail = f"generated after {_updates(old)}; the trainer has taken {now}"
        of_then = self._passes.of_version(old, setting) if old == int(versions.max()) else None
        if of_then is None:
            self._name("version", EXCLUDED, rest, detail)
            return np.zeros_like(rest)
        left = less_trainer + of_then
        if size(left)[0] > (1 - KNOWN) * size(rest)[0]:
            self._experiments["version"] = replace(self._experiments["version"], changed=OF_THEN)
            return rest
        self._name("version", OF_THEN, rest - left, f"{detail}; with the weights of then {size(left)[0]:.1g} nats a token are left")
        return left

    def _by_exclusion(self, rest: Array, origin: Origin | None, row: int) -> None:
        """Name what is left when no change explains the record."""
        if origin is not None and origin.replaced and origin.prompts is None:
            detail = "the batch has other prompts than those that it was generated from, which are gone"
            return self._name("prompt", EXCLUDED, rest, detail)
        noise, of_row = self._noise(), size(self._passes.of_row(rest, row))[0]
        other = "" if origin is None or origin.dtype == self._dtype else origin.dtype
        like_it = self._dtype == "fp32" and is_rounding(rest, "bf16") and _alike(of_row, noise, AS_LARGE)
        if other == "bf16" or like_it:
            who = f"{origin.role} generated in {other}, this actor has {self._dtype}" if origin is not None and other else "bf16"
            detail = f"{who}: {of_row:.2g} nats a token in row {row}, where rounding in bf16 makes {noise:.2g}"
            return self._name("dtype", BESIDE, rest, detail)
        detail = "no engine gives the recorded numbers for these tokens: others were generated from, or scored"
        self._name("tokens", EXCLUDED, rest, detail)
        return None

    # -- layers

    def _layers(self) -> tuple[LayerGap, ...]:
        if not self._insides:
            return ()
        spec = self._actor.spec
        assert spec is not None
        return layer_gaps(self._insides, ["embedding", *(f"layer {i}" for i in range(spec.num_layers)), "norm"])

    def _oracle(self, dtype: str) -> Array | None:
        """Return the log-probabilities by transformers of the row whose layers were looked at; ``None`` where it does not fit."""
        return next((states.log_probs for states in self._insides if states.engine == dtype), None)

    def _noise(self) -> float:
        """Return the effect of rounding in bf16 on that row: nats a token; NaN where nobody knows."""
        rounded, exact = self._oracle("bf16"), self._oracle("fp32")
        return float("nan") if rounded is None or exact is None else size(rounded - exact)[0]

    def _like_bf16(self, side: str) -> bool:
        """Whether an engine's hidden states are off by what rounding in bf16 makes, in every layer."""
        errors = [(getattr(layer, side), layer.bf16) for layer in self._layers() if layer.place.startswith("layer")]
        return all(np.isnan(error) or _alike(error, rounding) for error, rounding in errors)

    def _rounded(self, scored: Scored, part: Array) -> bool:
        """Whether an engine's weights are off everywhere, by what rounding them to bf16 makes."""
        many = len(scored.wrong) > len(self._layers())
        return many and self._dtype == "fp32" and self._like_bf16("rollout") and is_rounding(part, "bf16")

    def _first_off(self, side: str, other: str) -> str:
        """Return the first place where one engine's hidden states are off, and the other's are not."""
        for layer in self._layers():
            off, theirs = getattr(layer, side), getattr(layer, other)
            near = 1e-4 if self._dtype == "fp32" else 3 * layer.bf16
            if off > max(near, FAR * (0.0 if np.isnan(theirs) or self._dtype == "bf16" else theirs)):
                return layer.place
        return "the output layer"

    # -- what it comes to

    def _agree(self, gap: Array) -> str:
        mean, largest = size(gap)
        return f"they agree: {mean:.2g} nats a token and {largest:.2g} at most is what rounding in {self._dtype} makes"

    def _verdict(self, gap: Array) -> str:
        self._parts["rest"] = gap - sum(self._parts.values(), np.zeros_like(gap))
        for cause, part in self._parts.items():
            if cause != "rest":
                before, after = size(gap)[0], size(gap - part)[0]
                share = 1 - after / before if before else 0.0
                self._experiments[cause] = replace(self._experiments[cause], nats=size(part)[0], share=share)
        named = sorted((e for e in self._experiments.values() if e.named), key=lambda e: -e.nats)
        if not named:
            return f"{size(gap)[0]:.2g} nats a token, of several parts each within rounding"
        text = "; ".join(f"{CAUSES[e.cause]} ({100 * e.share:.0f} % of {size(gap)[0]:.2g} nats a token): {e.detail}" for e in named)
        return text

    def _damaged(self, as_is: Scored, by_rollout: Array) -> Gap:
        """Return the known facts where the trainer cannot take its weights back, as the rollout has changed them."""
        gap = by_rollout - self._passes.recorded
        detail = f"changed after they had arrived: {_list(as_is.wrong)}; the trainer cannot have them back"
        self._name("weights", "", np.zeros_like(gap), detail)
        verdict = f"{CAUSES['weights']}: {detail}; load a checkpoint with session.load(...), or rewind to a snapshot"
        return self._done(by_rollout, verdict)

    def _done(self, trainer: Array, verdict: str) -> Gap:
        passes = self._passes
        worst = passes.worst(trainer - passes.recorded)
        before = [*passes.prompts[worst[0]].tolist(), *passes.responses[worst[0]].tolist()[: worst[1] + 1]]
        text = self._codec.decode(before[-BEFORE_TOKENS - 1 :]) if self._codec is not None else ""
        parts = self._parts or {"rest": trainer - passes.recorded}
        return Gap(
            self._actor.name, self._dtype, verdict, tuple(self._experiments.values()), self._layers(), passes.responses.lengths,
            trainer, passes.recorded, parts, worst, text, time.perf_counter() - self._start,
        )  # fmt: skip


_NAMES = {"trainer": "trainer", "rollout": "generating engine"}


def _alike(error: float, other: float, factor: float = LIKE) -> bool:
    return other / factor <= error <= other * factor


def _updates(count: int) -> str:
    return f"{count} update{'s' * (count != 1)}"


def _list(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _codec(actor: TrainedHandle) -> TextCodec | None:
    try:
        codec = actor._client.need_tokenizer()
        codec.encode("a")
    except (OptionError, UnsupportedModelError, LookupError):
        return None
    return codec


# -- changes of the trainer's pass that may make the recorded log-probabilities: temperature, top-k, top-p, the prompt, by trying

FOCUS_ROWS = 8
"""Rows that the experiments look at: those with the largest gap."""
KNOWN, FOUND = 0.5, 0.8
"""Share of the gap that has to go for a change to be a cause: one that the origin names, one that was searched for."""
TEMPERATURES = (0.1, 4.0)
MOST_HALVINGS = 14
"""The number of halvings of the range in which top-p is searched for."""
NONE_NATS = 1e-5
"""Mean over tokens of what is left where the same tokens are."""
TURN = "what the user says"
"""A text that is put into the chat template to see what that puts around it."""
ONE_SIDED = 0.98
"""Share of tokens that must be likelier in the record: a distribution over fewer tokens makes every one of them likelier."""


class Fits:
    """Tries changes one after the other, and keeps those that explain the gap.

    All of it is about the part of the gap that the engines of today do not have: the rollout's log-probabilities now less the
    recorded ones. A change moves the trainer's; it explains that part as far as it moves it to zero.

    Args:
        passes: the engines.
        trainer: the trainer's log-probabilities of the batch as it is, flat.
        then: the part of the gap to be explained, flat.
        origin: how the recorded ones were made, where it is known.
        dtype: the trainer's dtype.
        codec: the tokenizer; ``None`` where there is none.
    """

    def __init__(
        self, passes: GapPasses, trainer: Array, then: Array, origin: Origin | None, dtype: str, codec: TextCodec | None
    ) -> None:
        self._passes, self._trainer, self._then, self._origin = passes, trainer, then, origin
        self._dtype, self._codec = dtype, codec
        self._prompts_given = None if origin is None else origin.prompts
        sums = np.array([np.nansum(np.abs(passes.of_row(then, row))) for row in range(len(passes.prompts))])
        self._focus = np.sort(np.argsort(-sums, kind="stable")[:FOCUS_ROWS])
        self._near = passes.of_rows(trainer, self._focus), passes.of_rows(then, self._focus)
        self.setting = Setting()
        self.rest = then
        """The rest of the gap, flat over all tokens."""
        self.tried: dict[str, tuple[str, Array, str]] = {}
        """Cause -> (what was changed, its part, what exactly), of those that explain something; else the part is empty."""

    def run(self) -> None:
        """Try all; stop where nothing but rounding is left."""
        for name, changes in self._all().items():
            self.tried[name] = "", np.zeros(0), ""
            if is_rounding(self.rest, self._dtype):
                continue
            for from_origin, setting, words, detail in changes():
                self.tried[name] = words, np.zeros(0), ""
                if self._explains(setting, KNOWN if from_origin else FOUND):
                    rest = self._then + self._passes.trainer(setting) - self._trainer
                    self.tried[name] = words, self.rest - rest, detail
                    self.setting, self.rest = setting, rest
                    break

    def _all(self) -> dict[str, Callable[[], Iterator[tuple[bool, Setting, str, str]]]]:
        first, last = {"prompt": self._prompt}, {"template": self._template}
        sampling = {
            "temperature": self._temperature, "min_new_tokens": self._min_new_tokens, "top_k": self._top_k, "top_p": self._top_p,
        }  # fmt: skip
        return first | last | sampling if self._prompts_given is not None else first | sampling | last

    def _left(self, setting: Setting) -> Array:
        """Return the rest of the gap under a setting, on the rows in focus."""
        trainer, then = self._near
        return np.asarray(np.clip(then + self._passes.trainer(setting, self._focus) - trainer, -20, 20))

    def _explains(self, setting: Setting, share: float) -> bool:
        before = size(self._left(self.setting))[0] if self.setting != Setting() else size(self._near[1])[0]
        return size(self._left(setting))[0] <= (1 - share) * before

    # -- changes

    def _prompt(self) -> Iterator[tuple[bool, Setting, str, str]]:
        prompts_then = self._prompts_given
        if (
            prompts_then is None
            or _same(prompts_then, self._passes.prompts)
            or any(_same(prompts_then, prompts) for _, prompts in self._tokenised())
        ):
            return
        words = "the prompts that were given to the generating engine"
        yield True, replace(self.setting, prompts=prompts_then), words, self._difference(prompts_then)

    def _temperature(self) -> Iterator[tuple[bool, Setting, str, str]]:
        column = f"{float(self._passes.temperatures[self._focus[0]]):.3g}"
        said = "the trainer's pass at temperature {:.3g}", "generated at {:.3g}; the batch says {}"
        if self._origin is not None:
            temperature = self._origin.sampling.temperature or 1.0
            if any(abs(self._passes.temperatures - self._origin.sampling.temperature) > 1e-6):
                setting = replace(self.setting, temperature=temperature)
                yield True, setting, said[0].format(temperature), said[1].format(temperature, column)
        best = self._best_temperature()
        yield False, replace(self.setting, temperature=best), said[0].format(best), said[1].format(best, column)

    def _best_temperature(self) -> float:
        """Return the one that leaves least: the best of a few, then Gauss and Newton's steps on its inverse."""
        trainer, then = self._near

        def left(temperatures: list[float]) -> Array:
            scores = self._passes.at_temperatures(self.setting, self._focus, temperatures)
            return np.asarray(np.clip(np.nan_to_num(then + scores - trainer), -20, 20))

        grid = np.geomspace(*TEMPERATURES, 9).tolist()
        inverse = 1 / grid[int(np.abs(left(grid)).mean(1).argmin())]
        for _ in range(5):
            step = 1e-3 * inverse
            here, there = left([1 / inverse, 1 / (inverse + step)])
            slope = (there - here) / step
            bottom = float((slope * slope).sum())
            if bottom == 0:
                break
            inverse = float(np.clip(inverse - (slope * here).sum() / bottom, inverse / 2, inverse * 2))
        return round(1.0 / float(inverse), 4)

    def _top_k(self) -> Iterator[tuple[bool, Setting, str, str]]:
        top_k = 0 if self._origin is None else self._origin.sampling.top_k
        said = "the trainer's pass over the {} likeliest tokens", "top_k={}: recorded over the tokens it left, renormalised"
        if top_k:
            yield True, replace(self.setting, top_k=top_k), said[0].format(top_k), said[1].format(top_k)
        elif self._origin is None and self._one_sided():
            low, high = 1, self._passes.vocab_size
            while low < high:
                middle = (low + high) // 2
                more = self._more_than(replace(self.setting, top_k=middle))
                low, high = (middle + 1, high) if more > 0 else (low, middle) if more < 0 else (middle, middle)
            yield False, replace(self.setting, top_k=low), said[0].format(low), said[1].format(low)

    def _top_p(self) -> Iterator[tuple[bool, Setting, str, str]]:
        top_p = 1.0 if self._origin is None else self._origin.sampling.top_p
        said = "the trainer's pass over the likeliest {:.3g} of probability", "top_p={:.3g}: recorded over the tokens it left"
        if top_p < 1:
            yield True, replace(self.setting, top_p=top_p), said[0].format(top_p), said[1].format(top_p)
        elif self._origin is None and self._one_sided():
            low, high = 0.0, 1.0
            # the smaller top_p, the likelier the tokens that are left: the sign says on which side the recorded one is
            for _ in range(MOST_HALVINGS):
                middle = (low + high) / 2
                more = self._more_than(replace(self.setting, top_p=middle))
                if not more:
                    high = middle
                    break
                low, high = (middle, high) if more > 0 else (low, middle)
            yield False, replace(self.setting, top_p=high), said[0].format(high), said[1].format(high)

    def _min_new_tokens(self) -> Iterator[tuple[bool, Setting, str, str]]:
        min_new_tokens = 0 if self._origin is None else self._origin.sampling.min_new_tokens
        said = (
            "the trainer's pass without an end in the first {} tokens",
            "min_new_tokens={}: recorded without the end's probability",
        )
        if min_new_tokens:
            yield (
                True,
                replace(self.setting, min_new_tokens=min_new_tokens),
                said[0].format(min_new_tokens),
                said[1].format(min_new_tokens),
            )
        elif self._origin is None and self._one_sided():
            longest = int(self._passes.responses.lengths[self._focus].max())
            without = self._left(replace(self.setting, min_new_tokens=longest))
            within = self._left(self.setting)
            places = np.concatenate([np.arange(n) for n in self._passes.responses.lengths[self._focus]])
            sums = [np.nansum(np.abs(np.where(places < count, without, within))) for count in range(longest + 1)]
            best = int(np.argmin(sums))
            if best:
                yield False, replace(self.setting, min_new_tokens=best), said[0].format(best), said[1].format(best)

    def _template(self) -> Iterator[tuple[bool, Setting, str, str]]:
        from_origin = self._prompts_given is not None
        for words, prompts in self._tokenised():
            if self._prompts_given is None or _same(self._prompts_given, prompts):
                detail = f"{words}: {self._difference(prompts)}"
                yield from_origin, replace(self.setting, prompts=prompts), f"the prompts: {words}", detail

    # -- what they need

    def _tokenised(self) -> Iterator[tuple[str, Ragged]]:
        """Yield in which other way the prompts' texts may have been tokenised, and the tokens that it gives."""
        codec = self._codec
        if codec is None:
            return
        ways: dict[str, Callable[[list[int]], list[int]]] = {
            "their text tokenised anew": lambda tokens: codec.encode(codec.decode(tokens)),
            "their text in the chat template": lambda tokens: _in_template(codec, codec.decode(tokens)),
            "their text without the chat template": lambda tokens: codec.encode(_out_of_template(codec, codec.decode(tokens))),
            "with their first token once": lambda tokens: tokens[1:] if tokens[:1] == tokens[1:2] else tokens,
        }
        token_ids = [self._passes.prompts[row].tolist() for row in range(len(self._passes.prompts))]
        for words, way in ways.items():
            try:
                prompts = Ragged.of([way(tokens) for tokens in token_ids], np.int32)
            except Exception:  # whatever a tokenizer has against it: then nothing was tokenised so
                continue
            if prompts.lengths.min() and not _same(prompts, self._passes.prompts):
                yield words, prompts

    def _one_sided(self) -> bool:
        """Whether tokens are likelier in the record than over the whole vocabulary."""
        left = self._left(self.setting)
        return float((left <= GAP_TOLERANCE[self._dtype]["mean"]).mean()) >= ONE_SIDED

    def _more_than(self, setting: Setting) -> int:
        """Return 1 where the record has more tokens than a setting leaves (one is missing, or all are too likely), -1 for fewer."""
        left = self._left(setting)
        mean = float(np.nanmean(left))
        return 1 if (left <= -19).any() else 0 if abs(mean) <= NONE_NATS else int(np.sign(mean))

    def _difference(self, generated_from: Ragged) -> str:
        """Say where prompts differ first, and by which tokens."""
        for row in range(len(generated_from)):
            own, theirs = self._passes.prompts[row].tolist(), generated_from[row].tolist()
            if own == theirs:
                continue
            both = zip(own, theirs, strict=False)
            at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(own), len(theirs)))
            own_tokens, other = self._around(own, at), self._around(theirs, at)
            return f"row {row}, prompt token {at}: {other} was generated from, the batch has {own_tokens}"
        return ""

    def _around(self, tokens: list[int], at: int) -> str:
        piece = tokens[at : at + 4]
        if not piece:
            return f"its end, after {len(tokens)} tokens"
        return repr(self._codec.decode(piece)) if self._codec is not None else str(piece)


def _in_template(codec: TextCodec, text: str) -> list[int]:
    return codec.encode_chat([{"role": "user", "content": text}])


def _out_of_template(codec: TextCodec, text: str) -> str:
    """Return the user's turn of a text in the chat template; of another text, the text."""
    before, _, after = codec.decode(_in_template(codec, TURN)).partition(TURN)
    return text.removeprefix(before).removesuffix(after) if text.startswith(before) and text.endswith(after) else text


def _same(own: Ragged, other: Ragged) -> bool:
    return bool(np.array_equal(own.lengths, other.lengths) and np.array_equal(own.flat, other.flat))


LOG_PROBS = "gap_log_probs"
"""The column that the experiments write; it is in no batch of the user's."""


@dataclass(frozen=True, eq=False)
class Setting:
    """Replacements for what the batch has, in a pass of the trainer."""

    temperature: float | None = None
    """The temperature; ``None``: the batch's column."""
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0
    prompts: Ragged | None = None
    """The prompts; ``None``: the batch's column."""
    weights: int = OWN
    """Number of the kept state that has them."""


@dataclass(frozen=True, eq=False)
class Origin:
    """How the batch's log-probabilities were made, as the controller remembers it."""

    role: str
    """The role that generated them."""
    dtype: str
    sampling: Sampling
    prompts: Ragged | None
    """The prompts that were given to the engine; ``None`` where they are gone."""
    replaced: bool
    """Whether the batch's prompts are another column than the one that was given."""


class GapPasses:
    """Passes of both engines over a batch's tokens, each with one thing changed: the experiments of ``actor.explain_gap``.

    Args:
        actor: the actor whose engines are compared.
        batch: rows with prompt, response, rollout_log_probs.

    Attributes:
        prompts, responses: token ids.
        recorded: flat over response tokens.
        temperatures, versions: of each row.
        vocab_size: the size of the actor's vocabulary.
    """

    def __init__(self, actor: TrainedHandle, batch: Batch) -> None:
        self._actor, self._batch = actor, batch
        spec = actor.spec
        assert spec is not None
        self.vocab_size = spec.vocab_size
        names = [name for name in ("prompt", "response", "rollout_log_probs", "temperature", "policy_version") if name in batch]
        table = batch.table(*names)
        self.prompts, self.responses = table.ragged("prompt"), table.ragged("response")
        self.recorded = np.asarray(table.ragged("rollout_log_probs").flat, dtype=np.float64)
        count = len(batch)
        self.temperatures = np.asarray(table["temperature"]) if "temperature" in table else np.ones(count, np.float32)
        self.versions = np.asarray(table["policy_version"]) if "policy_version" in table else None

    def origin(self) -> Origin | None:
        """Return how the log-probabilities were made; ``None`` where they are the user's own, or nobody remembers."""
        ref, client = refs_of(self._batch)["rollout_log_probs"], self._actor._client
        reruns = [rerun for rerun in client.send(q.RerunsOf(None)) if rerun.call.id == ref.call_id]
        if not reruns or reruns[0].request.method != GENERATE.name or ref.name != "rollout_log_probs":
            return None
        request = reruns[0].request
        assert isinstance(request.arguments, Generation)
        prompt = request.inputs["prompt"]
        now, engine_prompts = refs_of(self._batch)["prompt"], None
        if client.send(q.StoredOf(prompt.call_id)) is not None:  # nothing but the record may refer to it by now
            engine_prompts = client.fetch({"prompt": prompt if ref.rows is None else prompt.take(ref.rows)}).ragged("prompt")
        spec, replaced = client.send(q.Roles()).get(request.role), (now.call_id, now.name) != (prompt.call_id, prompt.name)
        return Origin(
            request.role, spec.spec.dtype if spec is not None else "", request.arguments.sampling, engine_prompts, replaced
        )

    # -- the trainer

    def trainer(self, setting: Setting = Setting(), rows: Array | None = None) -> Array:
        """Return the trainer's log-probabilities, flat over the response tokens of these rows, by default all."""
        rows = np.arange(len(self._batch)) if rows is None else rows
        temperatures = self.temperatures[rows] if setting.temperature is None else np.full(len(rows), setting.temperature)
        log_probs = self._pass(rows, temperatures, setting)
        if setting.min_new_tokens:
            places = np.concatenate([np.arange(n) for n in self.responses.lengths[rows]])
            ended = self._pass(rows, temperatures, setting, without_ends=True)
            log_probs = np.where(places < setting.min_new_tokens, ended, log_probs)
        return log_probs

    def at_temperatures(self, setting: Setting, rows: Array, temperatures: Sequence[float]) -> Array:
        """Return the trainer's log-probabilities of these rows at several temperatures; shape [temperatures, tokens]."""
        each = np.repeat(np.asarray(temperatures), len(rows))
        return self._pass(np.tile(rows, len(temperatures)), each, setting).reshape(len(temperatures), -1)

    def _pass(self, rows: Array, temperatures: Array, setting: Setting, *, without_ends: bool = False) -> Array:
        columns: dict[str, Any] = {"temperature": temperatures.astype(np.float32)}
        batch = self._batch.take(rows)
        if setting.prompts is not None:
            columns["prompt"] = setting.prompts.take(rows)
        batch = Batch(batch._client, {n: refs_of(batch)[n] for n in ("prompt", "response")}, len(batch)).with_columns(**columns)
        arguments = LogProbs(
            column=LOG_PROBS, top_k=setting.top_k, top_p=setting.top_p, without_ends=without_ends, weights=setting.weights
        )  # fmt: skip
        scored = self._actor._forward(batch, replace(COMPUTE_LOG_PROBS, phase="inspection"), arguments, [LOG_PROBS])
        return np.asarray(scored.table(LOG_PROBS).ragged(LOG_PROBS).flat, dtype=np.float64)

    def of_version(self, num_updates: int, setting: Setting) -> Array | None:
        """Return :meth:`trainer` with the weights after so many updates; ``None`` where no snapshot has them.

        The ranks hold those weights within each pass alone: whatever ends it, the role's state is at every other moment its own.
        Nothing is done where the hosts have no room for a copy of the weights of now.
        """
        client, name = self._actor._client, self._actor.name
        state = client.send(q.KeptOf(name, num_updates))
        if state is None or too_large(client.send(m.AskHostRoom((name,), unless_kept=False)), 1.0):
            return None
        return self.trainer(replace(setting, weights=state.number))

    # -- the generating engine

    def rollout(
        self,
        *,
        fresh: bool,
        rows: Array | None = None,
        inside: tuple[int, int] | None = None,
        through_cache: Sequence[tuple[int, int]] = (),
    ) -> tuple[Scored, Array]:
        """Return the generating engine's answer about these rows, and its log-probabilities, flat.

        Args:
            fresh: whether it takes the trainer's weights first, or has those that it has.
            rows: the batch's rows; by default all.
            inside: the (row of the batch, response token) before which it keeps hidden states.
            through_cache: (row of the batch, response token)s that are scored behind the prefix cache, too.
        """
        rows = np.arange(len(self._batch)) if rows is None else rows
        batch, here = self._batch.take(rows), {int(row): place for place, row in enumerate(rows)}
        method = replace(RESCORE if fresh else RESCORE_AS_IS, writes=(LOG_PROBS,))
        inputs = {name: refs_of(batch)[name] for name in (*method.reads, *method.reads_if_there) if name in batch}
        arguments = Rescoring(
            column=LOG_PROBS, inside=None if inside is None else (here[inside[0]], inside[1]),
            through_cache=tuple((here[row], token) for row, token in through_cache),
        )  # fmt: skip
        lease = self._actor._submit(method, arguments, inputs, len(batch))
        flat = with_written(batch, lease, method.writes).table(LOG_PROBS).ragged(LOG_PROBS).flat
        return self._merged(self._actor._result(lease), rows), np.asarray(flat, dtype=np.float64)

    def _merged(self, ranks: Sequence[Scored], rows: Array) -> Scored:
        """Return the answers of all ranks as one; rows are those of the batch."""
        cached = {(int(rows[row]), token): value for rank in ranks for (row, token), value in rank.cached.items()}
        return Scored(
            all(rank.there for rank in ranks), min(rank.num_updates for rank in ranks),
            tuple(dict.fromkeys(name for rank in ranks for name in rank.wrong)), sum(rank.proven for rank in ranks),
            sum(rank.unproven for rank in ranks), next((rank.inside for rank in ranks if rank.inside is not None), None), cached,
        )  # fmt: skip

    # -- inside

    def layers(self, row: int, token: int) -> list[HiddenStates]:
        """Return hidden states of the trainer, by what each rank sees, and of transformers."""
        arguments = OneSequence(
            prompt=self.prompts[row], response=self.responses[row], token=token, temperature=float(self.temperatures[row])
        )
        ranks = self._actor._result(self._actor._submit(LAYERS, arguments, waits=True))
        return [inside for rank in ranks for inside in rank]

    def of_row(self, flat: Array, row: int) -> Array:
        """Return a row's part of something flat over response tokens."""
        first = int(self.responses.lengths[:row].sum())
        return flat[first : first + int(self.responses.lengths[row])]

    def of_rows(self, flat: Array, rows: Array) -> Array:
        """Return the part of some rows."""
        return np.concatenate([self.of_row(flat, int(row)) for row in rows])

    def worst(self, flat: Array) -> tuple[int, int]:
        """Return (row, response token) of the largest absolute value."""
        at = int(np.nanargmax(np.abs(flat)))
        ends = np.cumsum(self.responses.lengths)
        row = int(np.searchsorted(ends, at, side="right"))
        return row, at - int(ends[row] - self.responses.lengths[row])
