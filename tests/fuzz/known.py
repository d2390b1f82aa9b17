"""Callables that still break the law, to be mended; this only ever gets shorter."""

KNOWN: frozenset[str] = frozenset()
