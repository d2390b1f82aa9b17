"""``TurnEnds``: which tokens end a response, and which one is put behind a text that is learned; read from four places at once.

==========================  ========================================================  =========================================
``generation_config.json``  ``eos_token_id``, one or several                          end a response
``config.json``             the same                                                  where generation_config.json has none
the tokenizer               its ``eos_token``                                         ends a response; put behind learned texts
the chat template           the special token that it writes behind an answer         ends a response, and answers of chats
==========================  ========================================================  =========================================

They are written by different programs at different times, and often disagree: a model trained further with another template keeps
the ``generation_config.json`` of its base, and would never stop. So a response ends at any of them (config.json's only where
nothing else says it, as in transformers), and each disagreement is a sentence in ``notes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfsdk.core.checks import is_whole, shown
from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.untrusted import has_file, read_json

GENERATION, CONFIG = "generation_config.json", "config.json"

MOST_ENDS = 1000
"""End-of-sequence tokens of a model."""


@dataclass(frozen=True)
class TurnEnds:
    """The tokens that end a model's turn."""

    ids: tuple[int, ...] = ()
    """The token ids that end a response: of a rollout, a demonstration or a pair."""
    text: int | None = None
    """Put behind a learned text that ends with none of them; ``None`` where the model has no such token."""
    notes: tuple[str, ...] = ()
    """The disagreements of the sources, a sentence each, with the choice."""

    def behind(self, response: list[int]) -> list[int]:
        """Return a learned text with its end behind it, where it has none."""
        has_one = bool(response) and response[-1] in self.ids
        return response if has_one or self.text is None else [*response, self.text]

    @classmethod
    def of(
        cls, folder: str | Path, tokenizer: int | None = None, behind_answers: Iterable[int] = (), *,
        name: Callable[[int], str] = str,
    ) -> TurnEnds:  # fmt: skip
        """Read a folder's files, and put the ends from all sources together.

        Args:
            folder: the model's folder.
            tokenizer: the id of its tokenizer's ``eos_token``.
            behind_answers: the special tokens that its chat template writes behind an answer, in their order.
            name: says a token in a note.

        Raises:
            ModelNotFoundError: one of the files is damaged.
        """
        generation, config = eos_of(folder, GENERATION), eos_of(folder, CONFIG)
        ids = list(generation or config)
        file = GENERATION if generation else CONFIG
        notes = []

        def listed(tokens: Iterable[int]) -> str:
            return ", ".join(map(name, dict.fromkeys(tokens)))

        # A note is only worth reading where an id is lost: one that the tokenizer names is added below anyway.
        unused = [token for token in config if token not in ids]
        if unused and set(unused) != {tokenizer}:
            notes.append(
                f"config.json ends a text with {listed(config)}, generation_config.json with {listed(ids)}: the latter is used, as "
                "transformers does"
            )
        if tokenizer is not None and tokenizer not in ids:
            if ids:
                notes.append(
                    f"the tokenizer's eos_token is {name(tokenizer)}, and {file} ends a text with {listed(ids)}: any of them ends "
                    f"a response, and {name(tokenizer)} is put behind learned texts"
                )
            ids.append(tokenizer)
        behind = list(behind_answers)
        if behind and not set(behind) & set(ids):
            if ids:
                notes.append(
                    f"the chat template ends an answer with {name(behind[-1])}, and {file} and the tokenizer end a text with "
                    f"{listed(ids)}: any of them ends a response"
                )
            ids.append(behind[-1])
        return cls(tuple(ids), tokenizer if tokenizer is not None else next(iter(ids), None), tuple(notes))


def eos_of(folder: str | Path, name: str) -> tuple[int, ...]:
    """Return the ``eos_token_id`` of one of a folder's files; none where it has none.

    Raises:
        ModelNotFoundError: it is damaged.
    """
    ids: Any = read_json(folder, name).get("eos_token_id") if has_file(folder, name) else None
    if ids is None:
        return ()
    end_ids = ids if isinstance(ids, list) else [ids]
    if len(end_ids) > MOST_ENDS or not all(is_whole(token) and 0 <= token < 2**31 for token in end_ids):
        raise ModelNotFoundError(
            f"{folder}/{name} is damaged: it has eos_token_id={shown(ids)}, and a token id is a whole number from 0. Mend it."
        )
    return tuple(end_ids)
