"""What a simulated role keeps: its number of updates, in memory and in a checkpoint, and the bytes a real one would."""

from __future__ import annotations

import json
from pathlib import Path

from hfsdk.boxes import megatron_boxes
from hfsdk.engine.dispatch import mesh_of
from hfsdk.errors import CheckpointError
from hfsdk.roles import RoleSpec, state_bytes


def kept_bytes(role: RoleSpec, rank: int, trained: bool) -> int:
    """Return the bytes of a rank's weights, their fp32 masters where they are not fp32, and the moments after the first step."""
    assert role.model is not None
    mesh = mesh_of(role)
    at = mesh.coordinates(rank)
    numbers = sum(box.numel for box in megatron_boxes(role.model, mesh.layout, at.tp, at.pp))
    return numbers * state_bytes(role.dtype, trained)


CHECKPOINT = "simulated.json"
"""All that a simulated checkpoint holds: how many updates the state had seen."""


def write_checkpoint(folder: str, role: str, num_updates: int) -> None:
    """Write a role's checkpoint.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        (Path(folder) / role).mkdir(parents=True, exist_ok=True)
        (Path(folder) / role / CHECKPOINT).write_text(json.dumps({"num_updates": num_updates}))
    except OSError as error:
        raise CheckpointError(f"cannot save to {folder}: {error.strerror or error}") from error


def read_checkpoint(folder: str, role: str) -> int:
    """Return the number of updates in a role's checkpoint.

    Raises:
        CheckpointError: there is none of a simulated session.
    """
    files = [Path(folder) / role / CHECKPOINT, Path(folder) / CHECKPOINT]  # the second is where all roles had it before
    file = next((path for path in files if path.is_file()), files[0])
    try:
        num_updates = json.loads(file.read_text())["num_updates"]
        if type(num_updates) is not int or not 0 <= num_updates < 2**62:
            raise ValueError("num_updates is no whole number of at least 0")
        return num_updates
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} holds no checkpoint of a simulated session ({error}); give a folder that a simulated session saved"
        ) from error
