"""Which change of the trainer's pass makes the recorded log-probabilities: temperature, top-k, top-p, the prompt, found by trying.

All of it is about the part of the gap that the engines of today do not have: the rollout's log-probabilities now less the recorded
ones. A change moves the trainer's; it explains that part as far as it moves it to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from hfsdk.core.gap import GAP_TOLERANCE, is_rounding, size
from hfsdk.core.table import Array, Ragged
from hfsdk.models.gap_passes import GapPasses, Origin, Setting
from hfsdk.models.host import TextCodec

FOCUS_ROWS = 8
"""Rows that the experiments look at: those with the largest gap."""
KNOWN, FOUND = 0.5, 0.8
"""Share of the gap that has to go for a change to be a cause: one that the origin tells, one that was searched for."""
TEMPERATURES = (0.1, 4.0)
MOST_HALVINGS = 14
"""Of the range in which top-p is searched for."""
NONE_NATS = 1e-5
"""Mean over tokens of what is left where the same tokens are."""
TURN = "what the user says"
"""A text that is put into the chat template to see what that puts around it."""
ONE_SIDED = 0.98
"""Share of tokens that must be likelier in the record: a distribution over fewer tokens makes every one of them likelier."""


class Fits:
    """Tries changes one after the other, and keeps those that explain the gap.

    Args:
        passes: the engines.
        trainer: its log-probabilities of the batch as it is, flat.
        then: the part of the gap to be explained, flat.
        origin: how the recorded ones were made, where it is known.
        dtype: of the trainer.
        codec: the tokenizer; ``None`` where there is none.
    """

    def __init__(
        self, passes: GapPasses, trainer: Array, then: Array, origin: Origin | None, dtype: str, codec: TextCodec | None
    ) -> None:
        self._passes, self._trainer, self._then, self._origin = passes, trainer, then, origin
        self._dtype, self._codec = dtype, codec
        self._given = None if origin is None else origin.prompts
        sums = np.array([np.nansum(np.abs(passes.of_row(then, row))) for row in range(len(passes.prompts))])
        self._focus = np.sort(np.argsort(-sums, kind="stable")[:FOCUS_ROWS])
        self._near = passes.of_rows(trainer, self._focus), passes.of_rows(then, self._focus)
        self.setting = Setting()
        self.rest = then
        """What is left, flat over all tokens."""
        self.tried: dict[str, tuple[str, Array, str]] = {}
        """Cause -> (what was changed, its part, what exactly), of those that explain something; else the part is empty."""

    def run(self) -> None:
        """Try all; stop where nothing but rounding is left."""
        for name, changes in self._all().items():
            self.tried[name] = "", np.zeros(0), ""
            if is_rounding(self.rest, self._dtype):
                continue
            for known, setting, words, detail in changes():
                self.tried[name] = words, np.zeros(0), ""
                if self._explains(setting, KNOWN if known else FOUND):
                    rest = self._then + self._passes.trainer(setting) - self._trainer
                    self.tried[name] = words, self.rest - rest, detail
                    self.setting, self.rest = setting, rest
                    break

    def _all(self) -> dict[str, Callable[[], Iterator[tuple[bool, Setting, str, str]]]]:
        first, last = {"prompt": self._prompt}, {"template": self._template}
        sampling = {
            "temperature": self._temperature, "min_new_tokens": self._min_new_tokens, "top_k": self._top_k, "top_p": self._top_p,
        }  # fmt: skip
        return first | last | sampling if self._given is not None else first | sampling | last

    def _left(self, setting: Setting) -> Array:
        """Return what a setting leaves, on the rows in focus."""
        trainer, then = self._near
        return np.asarray(np.clip(then + self._passes.trainer(setting, self._focus) - trainer, -20, 20))

    def _explains(self, setting: Setting, share: float) -> bool:
        before = size(self._left(self.setting))[0] if self.setting != Setting() else size(self._near[1])[0]
        return size(self._left(setting))[0] <= (1 - share) * before

    # -- changes

    def _prompt(self) -> Iterator[tuple[bool, Setting, str, str]]:
        given = self._given
        if given is None or _same(given, self._passes.prompts) or any(_same(given, prompts) for _, prompts in self._tokenised()):
            return
        words = "the prompts that were given to the generating engine"
        yield True, replace(self.setting, prompts=given), words, self._difference(given)

    def _temperature(self) -> Iterator[tuple[bool, Setting, str, str]]:
        column = f"{float(self._passes.temperatures[self._focus[0]]):.3g}"
        said = "the trainer's pass at temperature {:.3g}", "generated at {:.3g}; the batch says {}"
        if self._origin is not None:
            known = self._origin.sampling.temperature or 1.0
            if any(abs(self._passes.temperatures - self._origin.sampling.temperature) > 1e-6):
                setting = replace(self.setting, temperature=known)
                yield True, setting, said[0].format(known), said[1].format(known, column)
        best = self._best_temperature()
        yield False, replace(self.setting, temperature=best), said[0].format(best), said[1].format(best, column)

    def _best_temperature(self) -> float:
        """Return the one that leaves least: the best of a few, then Gauss and Newton's steps on its inverse."""
        trainer, then = self._near

        def left(temperatures: list[float]) -> Array:
            found = self._passes.at_temperatures(self.setting, self._focus, temperatures)
            return np.asarray(np.clip(np.nan_to_num(then + found - trainer), -20, 20))

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
        known = 0 if self._origin is None else self._origin.sampling.top_k
        said = "the trainer's pass over the {} likeliest tokens", "top_k={}: recorded over the tokens it left, renormalised"
        if known:
            yield True, replace(self.setting, top_k=known), said[0].format(known), said[1].format(known)
        elif self._origin is None and self._one_sided():
            low, high = 1, self._passes.vocab_size
            while low < high:
                middle = (low + high) // 2
                more = self._more_than(replace(self.setting, top_k=middle))
                low, high = (middle + 1, high) if more > 0 else (low, middle) if more < 0 else (middle, middle)
            yield False, replace(self.setting, top_k=low), said[0].format(low), said[1].format(low)

    def _top_p(self) -> Iterator[tuple[bool, Setting, str, str]]:
        known = 1.0 if self._origin is None else self._origin.sampling.top_p
        said = "the trainer's pass over the likeliest {:.3g} of probability", "top_p={:.3g}: recorded over the tokens it left"
        if known < 1:
            yield True, replace(self.setting, top_p=known), said[0].format(known), said[1].format(known)
        elif self._origin is None and self._one_sided():
            low, high = 0.0, 1.0
            for _ in range(MOST_HALVINGS):
                middle = (low + high) / 2
                more = self._more_than(replace(self.setting, top_p=middle))
                if not more:
                    high = middle
                    break
                low, high = (middle, high) if more > 0 else (low, middle)
            yield False, replace(self.setting, top_p=high), said[0].format(high), said[1].format(high)

    def _min_new_tokens(self) -> Iterator[tuple[bool, Setting, str, str]]:
        known = 0 if self._origin is None else self._origin.sampling.min_new_tokens
        said = (
            "the trainer's pass without an end in the first {} tokens",
            "min_new_tokens={}: recorded without the end's probability",
        )
        if known:
            yield True, replace(self.setting, min_new_tokens=known), said[0].format(known), said[1].format(known)
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
        known = self._given is not None
        for words, prompts in self._tokenised():
            if self._given is None or _same(self._given, prompts):
                detail = f"{words}: {self._difference(prompts)}"
                yield known, replace(self.setting, prompts=prompts), f"the prompts: {words}", detail

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
        mine = [self._passes.prompts[row].tolist() for row in range(len(self._passes.prompts))]
        for words, way in ways.items():
            try:
                prompts = Ragged.of([way(tokens) for tokens in mine], np.int32)
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

    def _difference(self, given: Ragged) -> str:
        """Say where prompts differ first, and by which tokens."""
        for row in range(len(given)):
            mine, theirs = self._passes.prompts[row].tolist(), given[row].tolist()
            if mine == theirs:
                continue
            both = zip(mine, theirs, strict=False)
            at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(mine), len(theirs)))
            one, other = self._around(mine, at), self._around(theirs, at)
            return f"row {row}, prompt token {at}: {other} was generated from, the batch has {one}"
        return ""

    def _around(self, tokens: list[int], at: int) -> str:
        piece = tokens[at : at + 4]
        if not piece:
            return f"its end, after {len(tokens)} tokens"
        return repr(self._codec.decode(piece)) if self._codec is not None else str(piece)


def _in_template(codec: TextCodec, text: str) -> list[int]:
    return codec.encode_chat([{"role": "user", "content": text}])


def _out_of_template(codec: TextCodec, text: str) -> str:
    """Return what the user's turn says, if a text is one in the chat template; else the text."""
    before, _, after = codec.decode(_in_template(codec, TURN)).partition(TURN)
    return text.removeprefix(before).removesuffix(after) if text.startswith(before) and text.endswith(after) else text


def _same(one: Ragged, other: Ragged) -> bool:
    return bool(np.array_equal(one.lengths, other.lengths) and np.array_equal(one.flat, other.flat))
