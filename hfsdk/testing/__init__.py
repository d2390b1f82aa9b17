"""Helpers for tests of training, and the exercises of the notebooks.

The assertions raise ``AssertionError`` that says what is wrong. They need no pytest, and fit into it::

    def test_ppo_still_learns(session, prompts):
        experiment = session.compare([hf.PPO()], prompts, steps=20, seeds=[0, 1, 2], baseline="ppo.json")
        hf.testing.assert_finite(experiment)
        hf.testing.assert_not_below("ppo.json", experiment)

``hf.testing.exercise("04.1", answer)`` looks at an answer to an exercise of a notebook and gives a hint where it is wrong.

``hf.testing.broken_run(1, session)`` is one of six runs in which something is wrong, to practise on (notebook 13).

May import: algorithms, core, session.
"""

from hfsdk.testing.assertions import assert_finite, assert_invariants, assert_not_below
from hfsdk.testing.broken_runs import broken_run
from hfsdk.testing.grading import Feedback, exercise

__all__ = ["Feedback", "assert_finite", "assert_invariants", "assert_not_below", "broken_run", "exercise"]
