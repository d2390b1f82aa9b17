"""Texts for a terminal: a user's words reach it as text, never as orders to it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Return text in which control characters (C0 but tab and line feed, DEL, C1) and bytes that are no UTF-8 are ``�``.

    An escape sequence in a name or a sample could otherwise clear a terminal, retitle it or hide what follows. Characters that turn
    the direction of what follows (embeddings, overrides, isolates: Unicode's annex 9) could show it in another order.
    """
    return _ORDERS.sub("�", text)


def one_line(text: str) -> str:
    """Return a printable text on one line: in a comment of code nothing of it is a line of code."""
    return " ".join(printable(text).split())


def all_printable(data: Any) -> Any:
    """Return plain data with every text in it as :func:`printable` makes it."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {all_printable(key): all_printable(value) for key, value in data.items()}
    return [all_printable(item) for item in data] if isinstance(data, list | tuple) else data


def listed(names: Iterable[str]) -> str:
    """Return names in one line, those with line feeds or other control characters as ``repr`` writes them."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return words for the known names nearest to an unknown one, e.g. ``"did you mean 'llama-70b'?"``, or all of them."""
    names = list(choices)
    folded = {candidate.lower(): candidate for candidate in names}
    typed = name.strip().lower()
    close = difflib.get_close_matches(typed, list(folded), n=3, cutoff=0.5)
    suggestions = [
        folded[candidate]
        for candidate in dict.fromkeys([candidate for candidate in folded if typed and candidate.startswith(typed)] + close)
    ][:3]
    every = f"here are {', '.join(names)}"
    return f"did you mean {' or '.join(map(repr, suggestions))}? T{every}" if suggestions else f"t{every}"


def millions(count: int) -> str:
    """Return a number of parameters as people say it: 1.1M, 135M, 7B."""
    return f"{count / 1e9:.3g}B" if count >= 999.5e6 else f"{count / 1e6:.3g}M"
