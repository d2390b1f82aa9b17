"""The built-in calls, each declared once: its arguments, phase, columns and protocol, and its effect on a role.

A call is a node of the dataflow: a role, a method, what it reads and writes. Handles submit it, the controller plans one order per
rank, workers and the simulated runtime carry it out, the planner lays it out, pictures draw it; all of them read it here::

    actor.generate            generation   reads prompt, position     writes response, ...   MICRO_DP   generates
    actor.compute_log_probs   preparation  reads prompt, response     writes old_log_probs   THREE_D    a pass over whole sequences
    actor.update              learning     reads every column                                THREE_D    a loss; changes the weights

A column that a call writes is declared with it. The user's own primitives are of the same type (``hfsdk.models.Primitive``).
"""

from __future__ import annotations

from dataclasses import replace

from hfsdk.core.arguments import (
    Folder,
    Generation,
    Learning,
    LogProbs,
    OneSequence,
    OnRanks,
    OwnPrimitive,
    Rescoring,
    Scoring,
    StateMove,
    ToShadow,
)
from hfsdk.core.builtin import SEQUENCES, BuiltinColumn, Method
from hfsdk.core.errors import OptionError
from hfsdk.core.placement import INFERENCE, ROLLOUT
from hfsdk.core.protocol import MICRO_DP, ONE_TO_ALL
from hfsdk.core.roles import PARTS, RoleSpec
from hfsdk.core.text import nearest

_TRAINED = "actor, critic, reward and cost with an optimizer"
_GENERATE = "actor.generate"

GENERATE = Method(
    name="generate",
    work="generate",
    phase="generation",
    reads=("prompt", "position"),
    protocol=MICRO_DP,
    arguments=Generation,
    columns=(
        BuiltinColumn("response", "token", "int32", "token ids the actor produced, end-of-sequence token included", _GENERATE),
        BuiltinColumn(
            "rollout_log_probs",
            "token",
            "float32",
            "log-probability of each response token, from the generating engine",
            _GENERATE,
            label="log-prob (rollout)",
        ),
        BuiltinColumn("finish_reason", "text", "<U6", "stop or length", _GENERATE, for_rewards=True),
        BuiltinColumn(
            "policy_version", "sample", "int64", "optimizer updates the generating weights had seen", _GENERATE, for_rewards=True
        ),
        BuiltinColumn(
            "temperature",
            "sample",
            "float32",
            "sampling temperature, used again in every log-prob pass",
            _GENERATE,
            for_rewards=True,
        ),
        BuiltinColumn("group", "sample", "int64", "number of the prompt a response belongs to", _GENERATE, for_rewards=True),
    ),
    roles="actor",
    needs=(),
    shadow=ROLLOUT,
)
COMPUTE_LOG_PROBS = Method(
    name="compute_log_probs",
    work="pass",
    reads=SEQUENCES,
    reads_if_there=("temperature",),
    columns=(
        BuiltinColumn(
            "old_log_probs",
            "token",
            "float32",
            "log-probability of each response token, from the trainer: the ratio's denominator",
            "actor.compute_log_probs",
            label="log-prob (old, trainer)",
            hint="Call actor.compute_log_probs(batch) first, or batch.alias('old_log_probs', 'rollout_log_probs').",
        ),
        BuiltinColumn(
            "ref_log_probs",
            "token",
            "float32",
            "log-probability of each response token, under the frozen reference",
            "reference.compute_log_probs",
            label="log-prob (reference)",
        ),
        BuiltinColumn(
            "entropy",
            "token",
            "float32",
            "entropy of the distribution each response token was drawn from, in nats",
            "actor.compute_log_probs(batch, entropy=True)",
        ),
    ),
    writes=("*",),
    arguments=LogProbs,
    roles="actor, reference",
)
RESCORE = Method(
    name="rescore",
    work="score",
    phase="inspection",
    reads=SEQUENCES,
    reads_if_there=("temperature",),
    writes=("*",),
    protocol=MICRO_DP,
    arguments=Rescoring,
    roles="actor",
    of_all_ranks=True,
    needs=(),
    shadow=ROLLOUT,
    listed=False,
    result="`Scored` by rank",
)
"""Score with the trainer's weights as they are now, moved anew."""
RESCORE_AS_IS = replace(RESCORE, name="rescore_as_is", work="look")
"""Score with the weights that the generating engine has."""
LAYERS = Method(
    name="layers",
    work="look",
    phase="inspection",
    protocol=ONE_TO_ALL,
    arguments=OneSequence,
    roles="actor",
    of_all_ranks=True,
    needs=("weights",),
    listed=False,
    result="`HiddenStates` by rank",
)
COMPUTE_VALUES = Method(
    name="compute_values",
    work="pass",
    reads=SEQUENCES,
    columns=(
        BuiltinColumn(
            "values", "token", "float32", "critic's value before each response token", "critic.compute_values", label="value"
        ),
    ),
    roles="critic",
    shadow=INFERENCE,
)
COMPUTE_SCORES = Method(
    name="compute_scores",
    work="pass",
    reads=SEQUENCES,
    columns=(
        BuiltinColumn("scores", "sample", "float32", "one number per sequence, from the reward", "reward.compute_scores"),
        BuiltinColumn(
            "token_scores",
            "token",
            "float32",
            "per token: what the reward gave it, where it is a per-token reward; their sum is the score",
            "reward.compute_scores",
            for_rewards=True,
        ),
        BuiltinColumn(
            "score_failures",
            "text",
            "<U160",
            'why the reward failed on a sample and skipped it, with failures="skip"; empty where it did not',
            "reward.compute_scores",
        ),
    ),
    writes=("*",),
    arguments=Scoring,
    roles="reward",
)
COMPUTE_COSTS = Method(
    name="compute_costs",
    work="pass",
    reads=SEQUENCES,
    columns=(
        BuiltinColumn("costs", "sample", "float32", "one number per sequence, from the cost model", "cost.compute_costs"),
        BuiltinColumn("cost_failures", "text", "<U160", "as score_failures, of the cost", "cost.compute_costs"),
    ),
    writes=("*",),
    arguments=Scoring,
    roles="cost",
)
PROBE = Method(
    name="probe",
    work="task",
    phase="inspection",
    reads=SEQUENCES,
    protocol=None,
    arguments=Scoring,
    roles="reward, cost, of a function",
    needs=(),
    result="a `SampleOutcome` per sample",
)
UPDATE = Method(
    name="update",
    work="loss",
    phase="learning",
    reads=SEQUENCES,
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
    reads=SEQUENCES,
    arguments=Learning,
    roles=_TRAINED,
    learns=True,
    needs=("weights", "gradients"),
    result="a dict: loss and the loss's own metrics",
)
COMPUTE_LOSS = Method(
    name="compute_loss",
    work="loss",
    reads=SEQUENCES,
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
    work="look",
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
    open_ended=True,
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
    files="weights",
    result="why files beside the weights are left out, a sentence each",
)
SAVE_STATE = Method(
    name="save_state",
    work="state",
    phase="checkpoint",
    protocol=ONE_TO_ALL,
    arguments=Folder,
    roles=_TRAINED,
    needs=("weights", "optimizer"),
    files="state",
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
    files="state",
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
GIVE_STATE = Method(
    name="give_state",
    work="state",
    phase="checkpoint",
    protocol=ONE_TO_ALL,
    arguments=StateMove,
    roles="the controller, of a trained role that goes to other devices",
    of_all_ranks=True,
    listed=False,
    result="`TransportReport` by rank",
)
TAKE_STATE = replace(GIVE_STATE, name="take_state")
EXPORT_WEIGHTS = Method(
    name="export_weights",
    work="move",
    protocol=ONE_TO_ALL,
    arguments=ToShadow,
    roles="the controller, of a role with a shadow",
    of_all_ranks=True,
)
TAKE_WEIGHTS = Method(name="take_weights", work="move", protocol=ONE_TO_ALL, roles="the controller, of a shadow", needs=())
TO_TRAINING = Method(
    name="to_training", work="transition", protocol=None, needs=(), listed=False,
    roles="no call: before one that needs weights which the generating engine has",
)  # fmt: skip
PUT = Method(
    name="put", work="data", phase="inspection", writes=("*",), protocol=None, needs=(), listed=False,
    roles="the controller, of the user's own data",
)  # fmt: skip
RESTORE = Method(
    name="restore", work="transition", phase="checkpoint", protocol=None, needs=(),
    roles="no call: a run that goes on after a death",
)  # fmt: skip
MAP = Method(name="map", work="task", writes=("*",), protocol=None, roles="session", needs=())
REDUCE = Method(name="reduce", work="task", phase="inspection", protocol=None, roles="session", needs=(), result="the value")

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        GENERATE,
        COMPUTE_LOG_PROBS,
        RESCORE,
        RESCORE_AS_IS,
        LAYERS,
        COMPUTE_VALUES,
        COMPUTE_SCORES,
        COMPUTE_COSTS,
        PROBE,
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
        GIVE_STATE,
        TAKE_STATE,
        EXPORT_WEIGHTS,
        TAKE_WEIGHTS,
        TO_TRAINING,
        PUT,
        RESTORE,
        MAP,
        REDUCE,
    )
}
"""Name -> method."""

SHADOWED: dict[str, Method] = {
    method.shadow: method for method in METHODS.values() if method.shadow and method.phase != "inspection"
}
"""The method of a step that each of :data:`~hfsdk.core.placement.SHADOWS` carries out in place of its role."""


def method_of(name: str) -> Method:
    """Return the method of a name.

    Raises:
        OptionError: there is none of this name.
    """
    method = METHODS.get(name)
    if method is None:
        raise OptionError(f"there is no call {name!r}; {nearest(name, METHODS)}")
    return method


def onloads(method: str, role: RoleSpec) -> tuple[str, ...]:
    """Return the parts that a role has in host memory and that a call needs on the device for its whole length.

    AdamW's state is none of it where it comes for the optimizer's steps alone.
    """
    if not role.offload:
        return ()
    alone = role.optimizer is not None and role.optimizer.offload
    return tuple(part for part in method_of(method).needs if part in role.offloads and not (alone and part == "optimizer"))
