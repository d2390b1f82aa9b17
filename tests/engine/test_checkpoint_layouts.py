"""A role saved at tp2 pp2 goes on where ranks only share out rows, and where they cut layers twice as often.

Other layouts are in ``sweeps/test_checkpoint_moves.py``.
"""

from checkpoint_laws import *  # noqa: F403  (its fixtures and tests, asked of MOVES)

MOVES = {"dp4": ("critic", "half"), "tp4 for rollout 2": ("tied", "half")}
