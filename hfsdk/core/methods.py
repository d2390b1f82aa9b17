"""The built-in calls, each declared once: its arguments, phase, columns and protocol, and what it does to a role.

A call is a node of the dataflow: a role, a method, what it reads and writes. Handles submit it, the controller plans one order per
rank, workers and the simulated runtime carry it out, the planner lays it out, pictures draw it; all of them read it here::

    actor.generate            generation   reads prompt, position     writes response, ...   MICRO_DP   generates
    actor.compute_log_probs   preparation  reads prompt, response     writes old_log_probs   THREE_D    a pass over whole sequences
    actor.update              learning     reads every column                                THREE_D    a loss; changes the weights

The user's own primitives are of the same type (``hfsdk.models.Primitive``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hfsdk.core.arguments import (
    Arguments,
    Folder,
    Generation,
    Learning,
    LogProbs,
    OnRanks,
    OwnPrimitive,
    Scoring,
    ToShadow,
)
from hfsdk.core.columns import COLUMNS, is_per_token
from hfsdk.core.protocol import MICRO_DP, ONE_TO_ALL, THREE_D, TransferProtocol
from hfsdk.core.roles import PARTS, RoleSpec

Work = Literal["generate", "pass", "loss", "step", "code", "state", "look", "move", "task", "data"]
"""What a method does: generates; passes a model over prompt + response; takes a loss over every column; takes an optimizer step;
runs the user's code on the ranks; writes or reads a role's state; only looks; hands weights to a shadow; runs the user's code over
columns in a CPU task; brings the user's own columns."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One kind of call."""

    name: str
    work: Work = "code"
    phase: str = "preparation"
    """``"generation"``, ``"preparation"``, ``"learning"``; ``"inspection"`` and ``"checkpoint"`` are no part of a step."""
    reads: tuple[str, ...] = ()
    """Columns that must be there; those that a loss reads besides are the loss's own."""
    reads_if_there: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    """``"*"``: as its arguments say."""
    protocol: TransferProtocol | None = THREE_D
    """How rows are spread over the ranks; ``None`` for CPU tasks."""
    arguments: type[Arguments] = Arguments
    roles: str = ""
    """Who has it, in words."""
    result: str = ""
    """What it returns besides columns, in words."""
    of_all_ranks: bool = False
    """Whether every rank's result is kept, or the first one's alone."""
    learns: bool = False
    """Whether it trains on a batch."""
    changes_weights: bool = False
    """Whether a new version of the weights is there afterwards, so that the generating engine's are stale."""
    needs: tuple[str, ...] = ("weights",)
    """Which :data:`~hfsdk.core.roles.PARTS` of a trained role it needs for its whole length. One that needs none leaves the
    weights with the generating engine where it shares them with the trainer, and lets rollouts beside it stay awake."""
    listed: bool = True
    """Whether it is shown among the session's calls."""

    @property
    def generates(self) -> bool:
        """Whether it is a call of the generating engine."""
        return self.work == "generate"

    @property
    def balanced(self) -> bool:
        """Whether its rows are balanced over data parallel by tokens and cut into micro-batches."""
        return self.work in ("pass", "loss")

    @property
    def touches_weights(self) -> bool:
        """Whether the weights may be others afterwards: also where the user's code ran on the ranks."""
        return self.changes_weights or self.work == "code"

    @property
    def uses_weights(self) -> bool:
        """Whether it uses a model's weights, so that a shadow's must be new."""
        return self.work != "look"

    @property
    def repeatable(self) -> bool:
        """Whether a simulated twin can carry it out again: it writes no files and runs nothing of which nobody knows the time."""
        return self.work not in ("state", "move") and self.name != "run"

    @property
    def in_step(self) -> bool:
        """Whether it can be a part of an algorithm's step."""
        return self.work in ("generate", "pass", "loss", "step", "code") and self.name != "grad_norm"


_TRAINED = "actor, critic, reward and cost with an optimizer"
_SEQUENCES = ("prompt", "response")

GENERATE = Method(
    name="generate",
    work="generate",
    phase="generation",
    reads=("prompt", "position"),
    protocol=MICRO_DP,
    arguments=Generation,
    writes=("response", "rollout_log_probs", "finish_reason", "policy_version", "temperature", "group"),
    roles="actor",
    needs=(),
)
COMPUTE_LOG_PROBS = Method(
    name="compute_log_probs",
    work="pass",
    reads=_SEQUENCES,
    reads_if_there=("temperature",),
    writes=("*",),
    arguments=LogProbs,
    roles="actor, reference",
)
COMPUTE_VALUES = Method(name="compute_values", work="pass", reads=_SEQUENCES, writes=("values",), roles="critic")
COMPUTE_SCORES = Method(name="compute_scores", work="pass", reads=_SEQUENCES, writes=("*",), arguments=Scoring, roles="reward")
COMPUTE_COSTS = Method(name="compute_costs", work="pass", reads=_SEQUENCES, writes=("*",), arguments=Scoring, roles="cost")
UPDATE = Method(
    name="update",
    work="loss",
    phase="learning",
    reads=_SEQUENCES,
    arguments=Learning,
    roles=_TRAINED,
    learns=True,
    changes_weights=True,
    needs=PARTS,
    result="a dict per mini-batch: loss, grad_norm, lr, the loss's own metrics",
)
FORWARD_BACKWARD = Method(
    name="forward_backward",
    work="loss",
    phase="learning",
    reads=_SEQUENCES,
    arguments=Learning,
    roles=_TRAINED,
    learns=True,
    needs=("weights", "gradients"),
    result="a dict: loss and the loss's own metrics",
)
COMPUTE_LOSS = Method(
    name="compute_loss",
    work="loss",
    reads=_SEQUENCES,
    arguments=Learning,
    roles="actor, critic, reward and cost models",
    result="the loss, a float",
)
STEP = Method(
    name="step",
    work="step",
    phase="learning",
    protocol=ONE_TO_ALL,
    roles=_TRAINED,
    changes_weights=True,
    needs=PARTS,
    result="a dict: grad_norm, lr",
)
GRAD_NORM = Method(
    name="grad_norm",
    work="step",
    phase="learning",
    protocol=ONE_TO_ALL,
    roles=_TRAINED,
    needs=("weights", "gradients"),
    result="the norm, a float",
)
RUN = Method(
    name="run",
    work="code",
    phase="inspection",
    protocol=ONE_TO_ALL,
    arguments=OnRanks,
    roles="any with a model",
    of_all_ranks=True,
    needs=("weights", "gradients"),
    result="what the function returned, by rank",
)
CALL = Method(
    name="call",
    work="code",
    writes=("*",),
    arguments=OwnPrimitive,
    roles="any with a model",
    of_all_ranks=True,
    needs=("weights", "gradients"),
    result="what the primitive returned, by rank, where it writes nothing",
)
LAST_RESHARD = Method(
    name="last_reshard",
    work="look",
    phase="inspection",
    protocol=ONE_TO_ALL,
    roles="actor, its shadow",
    of_all_ranks=True,
    needs=(),
    listed=False,
    result="`TransportReport` by rank, or None",
)
CENSUS = Method(
    name="census",
    work="look",
    phase="inspection",
    protocol=ONE_TO_ALL,
    roles="actor",
    of_all_ranks=True,
    needs=(),
    listed=False,
    result="`Resident` by rank",
)
SAVE_PRETRAINED = Method(
    name="save_pretrained",
    work="state",
    phase="checkpoint",
    protocol=ONE_TO_ALL,
    arguments=Folder,
    roles="actor, critic, reward, cost",
)
SAVE_STATE = Method(
    name="save_state",
    work="state",
    phase="checkpoint",
    protocol=ONE_TO_ALL,
    arguments=Folder,
    roles=_TRAINED,
    needs=("weights", "optimizer"),
    result="a dict: num_updates; it copies, `Saved` asks whether the files are complete",
)
LOAD_STATE = Method(
    name="load_state",
    work="state",
    phase="checkpoint",
    protocol=ONE_TO_ALL,
    arguments=Folder,
    roles=_TRAINED,
    changes_weights=True,
    needs=PARTS,
    result="a dict: num_updates",
)
NUM_UPDATES = Method(
    name="num_updates",
    work="state",
    phase="checkpoint",
    protocol=ONE_TO_ALL,
    roles="the controller, of what is trained",
    needs=(),
    result="optimizer steps so far, an int",
)
EXPORT_WEIGHTS = Method(
    name="export_weights",
    work="move",
    protocol=ONE_TO_ALL,
    arguments=ToShadow,
    roles="the controller, of a role with a shadow",
    of_all_ranks=True,
)
TAKE_WEIGHTS = Method(name="take_weights", work="move", protocol=ONE_TO_ALL, roles="the controller, of a shadow", needs=())
PUT = Method(
    name="put", work="data", phase="inspection", writes=("*",), protocol=None, needs=(), listed=False,
    roles="the controller, of the user's own data",
)  # fmt: skip
MAP = Method(name="map", work="task", writes=("*",), protocol=None, roles="session", needs=())
REDUCE = Method(name="reduce", work="task", phase="inspection", protocol=None, roles="session", needs=(), result="the value")

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        GENERATE,
        COMPUTE_LOG_PROBS,
        COMPUTE_VALUES,
        COMPUTE_SCORES,
        COMPUTE_COSTS,
        UPDATE,
        FORWARD_BACKWARD,
        COMPUTE_LOSS,
        STEP,
        GRAD_NORM,
        RUN,
        CALL,
        LAST_RESHARD,
        CENSUS,
        SAVE_PRETRAINED,
        SAVE_STATE,
        LOAD_STATE,
        NUM_UPDATES,
        EXPORT_WEIGHTS,
        TAKE_WEIGHTS,
        PUT,
        MAP,
        REDUCE,
    )
}
"""Name -> method."""

UNKNOWN = Method(name="", work="state")
"""Stands for what is no call of the list, e.g. ``give_state``: nothing is known of it but that it may need the weights."""


def method_of(name: str) -> Method:
    """Return the method of a name, :data:`UNKNOWN` where there is none."""
    return METHODS.get(name, UNKNOWN)


def writes_per_token(method: str, column: str) -> bool:
    """Return whether a call writes one value per response token into a column, where its values are not there to look at."""
    kind = method_of(method)
    if kind.generates:
        return COLUMNS[column].kind == "token"
    if kind.arguments is Scoring:
        return column.startswith("token_")
    return kind.work == "pass" or is_per_token(column)


def onloads(method: str, role: RoleSpec) -> tuple[str, ...]:
    """Return what a role has in host memory and a call needs on the device for its whole length.

    AdamW's state is none of it where it comes for the optimizer's steps alone.
    """
    if not role.offload:
        return ()
    alone = role.optimizer is not None and role.optimizer.offload
    return tuple(part for part in method_of(method).needs if part in role.offloads and not (alone and part == "optimizer"))
