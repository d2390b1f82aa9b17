"""``actor.explain_gap``: runs the experiments in an order in which none spoils the next, and says what they come to.

The weights that the rollout has are looked at before anything else: a pass of the trainer may take them back, where both engines
have one copy, and so does whatever moves them anew. See :mod:`hfsdk.core.gap` for the three parts of a gap.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from hfsdk.core.batch import Batch
from hfsdk.core.errors import OptionError, UnsupportedModelError, WeightMismatchError
from hfsdk.core.gap import CAUSES, GAP_TOLERANCE, Gap, GapCause, Inside, LayerGap, Scored, is_rounding, layer_gaps, size
from hfsdk.core.table import Array
from hfsdk.models.gap_fits import KNOWN, Fits
from hfsdk.models.gap_passes import GapPasses, Origin, Setting
from hfsdk.models.handle import TrainedHandle
from hfsdk.models.host import TextCodec

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
        self._insides: list[Inside] = []

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
        """Note what was changed to measure the three parts, whatever they come to."""
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
            found = np.array(list(as_is.cached.values()))
            scored, recorded = (
                np.array([passes.of_row(flat, row)[token] for row, token in as_is.cached]) for flat in (by_rollout, passes.recorded)
            )
            far, near = np.median(np.abs(scored - recorded)), np.median(np.abs(found - recorded))
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
        return next((found.log_probs for found in self._insides if found.engine == dtype), None)

    def _noise(self) -> float:
        """Return what rounding in bf16 makes of that row: nats a token; NaN where nobody knows."""
        rounded, exact = self._oracle("bf16"), self._oracle("fp32")
        return float("nan") if rounded is None or exact is None else size(rounded - exact)[0]

    def _like_bf16(self, side: str) -> bool:
        """Whether an engine's hidden states are off by what rounding in bf16 makes, in every layer."""
        found = [(getattr(layer, side), layer.bf16) for layer in self._layers() if layer.place.startswith("layer")]
        return all(np.isnan(mine) or _alike(mine, rounding) for mine, rounding in found)

    def _rounded(self, scored: Scored, part: Array) -> bool:
        """Whether an engine's weights are off everywhere, by what rounding them to bf16 makes."""
        many = len(scored.wrong) > len(self._layers())
        return many and self._dtype == "fp32" and self._like_bf16("rollout") and is_rounding(part, "bf16")

    def _first_off(self, side: str, other: str) -> str:
        """Return the first place where one engine's hidden states are off, and the other's are not."""
        for layer in self._layers():
            mine, theirs = getattr(layer, side), getattr(layer, other)
            near = 1e-4 if self._dtype == "fp32" else 3 * layer.bf16
            if mine > max(near, FAR * (0.0 if np.isnan(theirs) or self._dtype == "bf16" else theirs)):
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
        told = "; ".join(f"{CAUSES[e.cause]} ({100 * e.share:.0f} % of {size(gap)[0]:.2g} nats a token): {e.detail}" for e in named)
        return told

    def _damaged(self, as_is: Scored, by_rollout: Array) -> Gap:
        """Return what is known where the trainer cannot take its weights back, as the rollout has changed them."""
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


def _alike(one: float, other: float, factor: float = LIKE) -> bool:
    return other / factor <= one <= other * factor


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
