"""Both engines over tokens that are there, for ``actor.explain_gap``: the rollout's log-probabilities, hidden states of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.core.arguments import OneSequence, Rescoring
from hfsdk.core.gap import Inside, Scored
from hfsdk.core.table import Column, Ragged, Table
from hfsdk.engine.generation.rescoring import Sequences
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.training import inside as inside_of
from hfsdk.engine.worker.role_host import RoleOnRank
from hfsdk.engine.worker.transition import Transition

if TYPE_CHECKING:
    from torch import Tensor

SPARE = 1.5
"""Times the bytes of a model that must be free for it."""


def log_probs(
    rollout: Rollout, transition: Transition, num_updates: int, group: Any, table: Table, asked: Rescoring, safe: SafePoint
) -> tuple[dict[str, Column], Scored]:
    """Have the rollout score this rank's rows with the weights that it has; NaN where it has none.

    Args:
        rollout: this rank's.
        transition: by which it gets weights, where it is beside its trainer.
        num_updates: optimizer steps that its weights have seen.
        group: of its replica's ranks.
        table: prompt, response and, where there is one, temperature of this rank's rows.
        asked: what is wanted besides.
        safe: where the call may stop.
    """
    prompts, responses = table.ragged("prompt"), table.ragged("response")
    if not (transition.rollout_has_some() if transition.plan is not None else rollout.ready):
        nothing = Ragged.from_lengths(np.full(len(responses.flat), np.nan, np.float32), responses.lengths)
        return {asked.column: nothing}, Scored(False, num_updates)
    proof, unproven = transition.look() if transition.plan is not None else (None, 0)
    temperatures = np.asarray(table["temperature"]) if "temperature" in table else np.ones(table.num_rows)
    here = {int(row): place for place, row in enumerate(table.row_ids)}
    inside = asked.inside if asked.inside is not None and asked.inside[0] in here else None
    cached = [at for at in asked.through_cache if at[0] in here]
    asked_of = Sequences(
        prompts, responses, temperatures.astype(np.float32), inside=None if inside is None else (here[inside[0]], inside[1]),
        through_cache=[(here[row], token) for row, token in cached],
    )  # fmt: skip
    found = rollout.score(safe, group, asked_of)
    scored = Scored(
        True, num_updates, () if proof is None else tuple(dict.fromkeys(box.tensor for box in proof.wrong)),
        0 if proof is None else proof.num_boxes - len(proof.wrong), unproven, found.inside,
        {at: found.cached[here[at[0]], at[1]] for at in cached},
    )  # fmt: skip
    return {asked.column: found.log_probs}, scored


def layers(hosted: RoleOnRank, asked: OneSequence, safe: SafePoint) -> tuple[Inside, ...]:
    """Return the trainer's hidden states that this rank sees, and on rank 0 those of transformers on the same weights."""
    trainer, groups = hosted.trainer, hosted.groups
    table = inside_of.one_row(asked.prompt, asked.response)
    position = len(asked.prompt) + asked.token - 1
    with inside_of.of_trainer(trainer.model, position, groups.tp_rank) as seen:
        found = trainer.log_probs(table, [tuple(table.row_ids.tolist())], asked.temperature, safe)
    mine = Inside("trainer", seen, found["log_probs"].flat if found else None)
    full, error, oracle = trainer.weights(), None, []
    if full is not None and fits_host(full):
        try:
            oracle = inside_of.of_transformers(full, hosted.spec.folder, table, position, asked.temperature)
        except Exception as problem:  # the other ranks wait to hear of it
            error = problem
    safe.agree(groups.world, error)
    return (mine, *oracle)


def fits_host(full: Mapping[str, Tensor]) -> bool:
    """Return whether the host has room for a model of these weights in fp32, with some to spare."""
    import psutil

    return bool(psutil.virtual_memory().available > SPARE * 4 * sum(tensor.numel() for tensor in full.values()))
