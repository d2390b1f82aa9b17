"""Prompts to play with, none of which need a hub: movie reviews, small additions, and a sentiment score for replies."""

from __future__ import annotations

import importlib.util
import json
import random
from typing import Any, Literal

import pandas as pd

from hfsdk.assets import reviews_file, sentiment
from hfsdk.errors import OptionError

Split = Literal["train", "test"]


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
    if split not in ("train", "test", None):
        raise OptionError(f'movie_reviews has the splits "train", "test" and None (both); got {split!r}')
    lines = reviews_file().read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if split is None or row["split"] == split]
    return _table({name: [row[name] for row in rows] for name in ("text", "rating", "id")})


def additions(num: int, seed: int = 0, largest: int = 99) -> Any:
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
    if num < 0 or largest < 0:
        raise OptionError(f"num and largest must not be negative; got num={num}, largest={largest}")
    generator = random.Random(seed)
    pairs = [(generator.randint(0, largest), generator.randint(0, largest)) for _ in range(num)]
    return _table({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})


def vader_sentiment(texts: list[str]) -> list[float]:
    """Return VADER's compound score of each text, from -1 (most negative) to 1; see `hfsdk.assets.sentiment`."""
    return sentiment(texts)


def _table(columns: dict[str, list[Any]]) -> Any:
    if importlib.util.find_spec("datasets") is None:
        return pd.DataFrame(columns)
    from datasets import Dataset

    return Dataset.from_dict(columns)
