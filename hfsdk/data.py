"""Prompts to play with, none of which need a hub: movie reviews and small additions; and what scores the replies to them."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

import pandas as pd

from hfsdk.assets import reviews_file, sentiment
from hfsdk.core.checks import Positive, Within, checked
from hfsdk.core.errors import OptionError

Split = Literal["train", "test"]

RowCount = Annotated[int, Within(0, 10**6)]
"""Of a table that is made here."""

Pairs = Annotated[int, Within(0, 10**5)]
"""Of reviews: each holds two texts of its own; eight times as many took 1.1 GB."""


@checked
def movie_reviews(split: Split | None = "train") -> Any:
    """Return about 10,600 movie-review snippets with human ratings (Hutto and Gilbert 2014, MIT licence).

    The split depends on the text alone (about one in ten is ``"test"``), so it is the same everywhere.

    Args:
        split: ``"train"``, ``"test"``, or ``None`` for both.

    Returns:
        A ``datasets.Dataset`` (or, where ``datasets`` is not installed, a ``pandas.DataFrame``) with the columns
        ``text``, ``rating`` (-4 to 4, the mean of 20 raters) and ``id`` (the review's number in the publication).

    Raises:
        OptionError: for another split.
        ModelNotFoundError: the reviews are not prepared and cannot be fetched; the message says what to do.
    """
    lines = reviews_file().read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if split is None or row["split"] == split]
    return _table({name: [row[name] for row in rows] for name in ("text", "rating", "id")})


REVIEW_PROMPT = "Review: "
"""What both reviews of a pair answer."""


@checked
def review_pairs(split: Split = "train", num: Pairs = 1000, *, gap: Positive = 2.0, seed: int = 0) -> Any:
    """Return pairs of reviews of which people rated one better: preferences that need no annotators.

    Args:
        split: as in `movie_reviews`; a review is in pairs of its own split only, several perhaps.
        num: number of pairs.
        gap: least difference of the two ratings, on the scale from -4 to 4.
        seed: the same seed gives the same pairs.

    Returns:
        A table as in `movie_reviews`, with the columns ``prompt`` (`REVIEW_PROMPT`), ``chosen``, ``rejected``, ``margin`` (the
        difference of the ratings), ``chosen_rating`` and ``rejected_rating``.

    Raises:
        OptionError: no two ratings differ by ``gap``, or ``num`` is not from 0 to 100,000.
        ModelNotFoundError: as in `movie_reviews`.
    """
    table = movie_reviews(split)
    texts, ratings = list(table["text"]), [float(rating) for rating in table["rating"]]
    widest = max(ratings) - min(ratings)
    if gap > widest:
        raise OptionError(f"gap must be at most {widest:.1f}, the largest difference of two ratings; got gap={gap}")
    generator = random.Random(seed)
    rows: list[tuple[int, int]] = []
    while len(rows) < num:
        a, b = generator.randrange(len(texts)), generator.randrange(len(texts))
        if abs(ratings[a] - ratings[b]) >= gap:
            rows.append((a, b) if ratings[a] > ratings[b] else (b, a))
    return _table({
        "prompt": [REVIEW_PROMPT] * num, "chosen": [texts[a] for a, _ in rows], "rejected": [texts[b] for _, b in rows],
        "margin": [round(ratings[a] - ratings[b], 3) for a, b in rows],
        "chosen_rating": [ratings[a] for a, _ in rows], "rejected_rating": [ratings[b] for _, b in rows],
    })  # fmt: skip


@checked
def additions(num: RowCount, seed: int = 0, largest: Annotated[int, Within(0, 10**18)] = 99) -> Any:
    """Return ``num`` additions with their answers: a task whose reward needs no model.

    Args:
        num: number of prompts.
        seed: the same seed gives the same prompts.
        largest: the summands are drawn from 0 to ``largest``, both included.

    Returns:
        A table as in `movie_reviews`, with the columns ``prompt`` (``"12+34="``) and ``answer`` (``"46"``).

    Raises:
        OptionError: a negative ``num`` or ``largest``.
    """
    generator = random.Random(seed)
    pairs = [(generator.randint(0, largest), generator.randint(0, largest)) for _ in range(num)]
    return _table({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})


@checked
def exact_match(completions: Sequence[str], answer: Sequence[str | float], **columns: Any) -> list[float]:
    """Reward that can be verified: 1 where the first number of a completion's first line is the answer, and 0 elsewhere.

    Numbers are compared as numbers: ``"046"``, ``"46.0"`` and ``"= +46 apples"`` match ``"46"``; ``"46.5"``, ``"4 6"`` and
    ``"-46"`` do not, nor does ``""``. Commas between thousands are left out. A completion that was cut off in the middle of its
    number is read as it is: leave it a token more than the longest answer.

    Args:
        completions: replies to the prompts.
        answer: the data's column ``answer``, as `additions` has it: numbers, or texts whose first number counts.
        columns: the data's other columns, which are not used.

    Raises:
        OptionError: an answer has no number.

    Example: ``session.reward(hf.data.exact_match)`` with ``session.prompts(hf.data.additions(1000), column="prompt", ...)``.
    """
    right = [_number(one if isinstance(one, str) else format(Decimal(str(one)), "f") if abs(one) < 1e300 else "") for one in answer]
    if None in right:
        raise OptionError(f"exact_match compares numbers; answer {right.index(None)} has none: {answer[right.index(None)]!r}")
    if len(answer) != len(completions):
        raise OptionError(f"completions and answer must be as many; got {len(completions)} and {len(answer)}")
    replies = [_number(text.lstrip().partition("\n")[0]) for text in completions]
    return [float(reply == wanted) for reply, wanted in zip(replies, right, strict=True)]


_NUMBER = re.compile(r"([-+]?)(?=\.?[0-9])([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]*)(?:\.([0-9]+))?")


def _number(text: str) -> tuple[bool, str, str] | None:
    """Return the first number as (negative, digits before and after the point without idle zeros), however long it is."""
    found = _NUMBER.search(text)
    if found is None:
        return None
    sign, whole, fraction = found.groups(default="")
    whole, fraction = whole.replace(",", "").lstrip("0"), fraction.rstrip("0")
    return (sign == "-" and bool(whole or fraction), whole, fraction)


@checked
def vader_sentiment(texts: list[str]) -> list[float]:
    """Return VADER's compound score of each text, from -1 (most negative) to 1; see `hfsdk.assets.sentiment`.

    Example: ``session.reward(hf.data.vader_sentiment)``.
    """
    return sentiment(texts)


def _table(columns: dict[str, list[Any]]) -> Any:
    if importlib.util.find_spec("datasets") is None:
        return pd.DataFrame(columns)
    from datasets import Dataset

    return Dataset.from_dict(columns)
