"""Making a view safe to show: no text that XML or UTF-8 cannot carry, no number that JSON cannot."""

from __future__ import annotations

import math
import re
from typing import Any

_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
"""Control characters and lone surrogates."""


def plain(value: Any) -> Any:
    """Return plain data with such characters replaced by U+FFFD, and NaN and infinity by ``None``."""
    if isinstance(value, str):
        return _NO_XML.sub("\ufffd", value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
