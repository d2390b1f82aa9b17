"""The models that a step of an algorithm is given: `StepModels`, as ``session.models`` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.core.checks import shown
from hfsdk.core.errors import HfsdkError, OptionError, PlacementError
from hfsdk.core.roles import DECLARED_BY

if TYPE_CHECKING:
    from hfsdk.models import ActorModel, CostModel, CriticModel, ReferenceModel, RewardModel


class StepModels(Protocol):
    """Handles by role. A step uses the ones that its algorithm's ``roles`` names; any object with these attributes will do."""

    @property
    def actor(self) -> ActorModel:
        """The policy: generates, gives log-probabilities, learns."""

    @property
    def critic(self) -> CriticModel:
        """The value function."""

    @property
    def cost_critic(self) -> CriticModel:
        """The value function of costs (Safe-RLHF)."""

    @property
    def reference(self) -> ReferenceModel:
        """The frozen policy that the KL is measured against."""

    @property
    def reward(self) -> RewardModel:
        """The model or function that scores responses."""

    @property
    def cost(self) -> CostModel:
        """The model or function whose scores are kept below a limit (Safe-RLHF)."""


def need_roles(models: Any, roles: Sequence[str]) -> None:
    """Look at every handle that a step uses, so that missing ones are told before anything runs.

    Raises:
        PlacementError: names all that the session lacks.
        OptionError: ``models`` are none.
    """
    missing: dict[str, PlacementError] = {}
    for role in roles:
        try:
            handle = getattr(models, role)
        except PlacementError as error:
            missing[role] = error
            continue
        except HfsdkError:
            raise
        except Exception as error:  # the user's own models
            raise _not_models(models, role, roles) from error
        if isinstance(models, type) or handle is None:
            raise _not_models(models, role, roles)
    if len(missing) == 1:
        raise next(iter(missing.values()))
    if missing:
        calls = ", ".join(DECLARED_BY[role] for role in missing if role in DECLARED_BY)
        raise PlacementError(
            f"the algorithm needs {', '.join(roles)}, and of these the session lacks {', '.join(missing)}: call {calls} first"
        )


def reference_of(models: StepModels) -> ReferenceModel | None:
    """Return the frozen policy where there is one: the KL to it is measured whatever its weight is."""
    try:
        return models.reference
    except (PlacementError, AttributeError):  # the session has none; the user's own models
        return None


def check_same_vocabulary(actor: ActorModel, teacher: ReferenceModel) -> None:
    """Refuse a teacher whose tokens are not the student's: the columns hold the student's token ids.

    Raises:
        OptionError: their vocabularies differ in size.
    """
    spec, theirs = actor.spec, teacher.spec
    if spec is not None and theirs is not None and spec.vocab_size != theirs.vocab_size:
        raise OptionError(
            f"a teacher must have the student's tokenizer; {theirs} has {theirs.vocab_size} tokens, {spec} has {spec.vocab_size}. "
            "Declare one of the same family: session.reference(...)"
        )


def _not_models(models: object, role: str, roles: Sequence[str]) -> OptionError:
    return OptionError(f"models must have {role}: a step uses {', '.join(roles)}, as session.models has them; got {shown(models)}")
