"""The protocol of what ``train``, ``compare`` and ``plan`` run: anything with a step; see ``hfsdk.algorithms``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from hfsdk.algorithms.handles import need_roles
from hfsdk.core.batch import Batch
from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.roles import DECLARED_BY


class Algorithm(Protocol):
    """An algorithm as ``train`` runs it; see ``hfsdk.algorithms``."""

    def step(self, models: Any, prompts: Batch) -> Any:
        """Run one step; return something with the ``batch`` and what ``metrics`` needs."""
        ...

    def metrics(self, step: Any) -> Mapping[str, float]:
        """Return the numbers of a step; waits."""
        ...


def check_algorithm(algorithm: Any) -> None:
    """Check that it is something with a step.

    Raises:
        OptionError: it is not.
    """
    if isinstance(algorithm, type) or not callable(inspect.getattr_static(algorithm, "step", None)):
        raise OptionError(f"train takes an algorithm with a step, e.g. hf.PPO(clip=0.2); got {shown(algorithm)}{_cure(algorithm)}")


def _cure(algorithm: Any) -> str:
    """Return the text to write where a class was given for its instance, or a loss for an algorithm."""
    if isinstance(algorithm, type) and callable(getattr(algorithm, "step", None)):
        return f". Write {algorithm.__name__}(), with its options"
    if callable(algorithm):
        return ". A loss is an update's: actor.update(batch, loss), e.g. with batches of session.demonstrations(data)"
    return ""


def check_roles(algorithm: Any, models: Any) -> None:
    """Look at the roles that the algorithm says it uses (``roles``, as those of hfsdk do) before anything is loaded.

    Raises:
        PlacementError: names all that the session lacks.
    """
    roles = getattr(algorithm, "roles", ())
    if isinstance(roles, (list, tuple)):
        need_roles(models, [role for role in DECLARED_BY if role in roles])  # one's own algorithm may have others
