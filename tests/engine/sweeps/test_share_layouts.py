"""Shares of every model in every layout, with both kinds of optimizer."""

from share_laws import *  # noqa: F403  (its fixtures and tests, asked of KEYS and FILES)
from share_laws import DTYPES, OTHERS

KEYS = [(layout, name, distributed) for layout in OTHERS for name in DTYPES for distributed in (False, True)]
FILES = list(OTHERS)
