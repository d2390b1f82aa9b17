"""Names of choices that losses offer and ``rlmath`` carries out; here, because only the latter needs torch to be imported."""

from __future__ import annotations

LOG_RATIO_CLAMPS = ("above", "both", "none")
"""Where log-ratios are cut before ``exp``: at +20; at -20 too, and k3 itself at 10 (verl); nowhere (TRL)."""
