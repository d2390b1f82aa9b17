"""A role saved at tp2 pp2 goes on in every other layout."""

from checkpoint_laws import *  # noqa: F403  (its fixtures and tests, asked of MOVES)
from checkpoint_laws import MOVED

MOVES = dict.fromkeys(["dp4", "pp4", "tp4", "tp2 dp2", "tp4 for rollout 2"], MOVED)
