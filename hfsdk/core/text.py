"""What a terminal may be given: user texts reach it as text, never as orders to it."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Return text in which control characters (C0 but tab and line feed, DEL, C1) and what is no UTF-8 are ``�``.

    An escape sequence in a name or a sample could otherwise clear a terminal, retitle it or hide what follows.
    """
    return _ORDERS.sub("�", text)


def listed(names: Iterable[str]) -> str:
    """Return names in one line, those with line feeds or other control characters as ``repr`` writes them."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)
