"""Sentiment without a model: the VADER lexicon and rules (Hutto and Gilbert, ICWSM 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hfsdk.core.errors import ModelNotFoundError


def sentiment(texts: Sequence[str]) -> list[float]:
    """Return VADER's compound score of each text, from -1 (most negative) to 1 (most positive); 0.0 for no sentiment.

    Raises:
        ModelNotFoundError: the package ``vaderSentiment`` is not installed.
    """
    analyzer = _analyzer()
    return [float(analyzer.polarity_scores(text)["compound"]) for text in texts]


@cache
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ModelNotFoundError(
            "asked for VADER sentiment scores; the package vaderSentiment is not installed here. "
            "Install it: pip install --no-deps vaderSentiment==3.3.2"
        ) from error
    return SentimentIntensityAnalyzer()
