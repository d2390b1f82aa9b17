"""Every model's state from every layout to every other, fresh and trained, with both kinds of optimizer."""

import itertools

from share_laws import DTYPES
from test_moves import PAIRS, folders, test_the_state_is_the_same_bit_for_bit_in_another_layout_elsewhere  # noqa: F401

CASES = [(*pair, *rest) for pair, *rest in itertools.product(PAIRS, DTYPES, (False, True), (0, 2))]
