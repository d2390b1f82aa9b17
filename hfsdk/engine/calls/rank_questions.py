"""The functions by which ``run.first_bad()`` and exported steps ask the ranks of a role; the worker's ``Probe`` answers.

They travel by name, and load nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfsdk.core.functions import Shipped
from hfsdk.core.table import Ragged, Table


def bad_weights(rank: Any) -> tuple[int, dict[str, float]]:
    """Return the optimizer steps done, and this rank's parameters that hold NaN or infinity, each with that."""
    bad: tuple[int, dict[str, float]] = rank.probe.bad_weights()
    return bad


def weight_sums(rank: Any) -> tuple[int, dict[str, str]]:
    """Return the optimizer steps done, and a checksum of every parameter that this rank has."""
    sums: tuple[int, dict[str, str]] = rank.probe.weight_sums()
    return sums


def layer_outputs(rank: Any, rows: Table) -> tuple[int, list[tuple[str, float]]]:
    """Return the pipeline stage, and of its modules in the order they end the largest absolute number of their output for rows."""
    outputs: tuple[int, list[tuple[str, float]]] = rank.probe.layer_outputs(rows)
    return outputs


def gradients(rank: Any, rows: Table, loss: Shipped) -> tuple[int, dict[str, float]]:
    """Return the pipeline stage, and the parameters whose gradient of a loss over rows is not finite."""
    bad: tuple[int, dict[str, float]] = rank.probe.gradients(rows, loss)
    return bad


def token_losses(rank: Any, rows: Table, **options: Any) -> Mapping[str, Ragged]:
    """Return ``token_loss`` and ``token_loss_gradient`` of rows: a primitive."""
    losses: Mapping[str, Ragged] = rank.probe.token_losses(rows, **options)
    return losses
