"""The exercises of the notebooks: a module for each notebook, at least three exercises in it, one of them code of the algorithm.

Their tasks stand in the notebooks; here is what a right answer is, and the hints to answers that are often given instead.
Solutions, with their reasons, are in ``notebooks/solutions/``.

May import: teach.exercise_kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfsdk.teach.exercises import (
    notebook_00,
    notebook_01,
    notebook_02,
    notebook_03,
    notebook_04,
    notebook_05,
    notebook_06,
    notebook_07,
    notebook_08,
    notebook_09,
    notebook_10,
    notebook_11,
    notebook_12,
    notebook_13,
    notebook_14,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hfsdk.teach.exercise_kinds import Exercise

EXERCISES: Mapping[str, Exercise] = {
    **notebook_00.EXERCISES,
    **notebook_01.EXERCISES,
    **notebook_02.EXERCISES,
    **notebook_03.EXERCISES,
    **notebook_04.EXERCISES,
    **notebook_05.EXERCISES,
    **notebook_06.EXERCISES,
    **notebook_07.EXERCISES,
    **notebook_08.EXERCISES,
    **notebook_09.EXERCISES,
    **notebook_10.EXERCISES,
    **notebook_11.EXERCISES,
    **notebook_12.EXERCISES,
    **notebook_13.EXERCISES,
    **notebook_14.EXERCISES,
}
"""Number -> exercise: ``"04.1"`` is the first of notebook 4."""
