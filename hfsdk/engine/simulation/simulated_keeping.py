"""What a simulated role keeps in a checkpoint: its number of updates."""

from __future__ import annotations

import json

from hfsdk.core.errors import CheckpointError
from hfsdk.core.files import content_of
from hfsdk.core.store import any_path
from hfsdk.core.untrusted import parse_json

CHECKPOINT = "simulated.json"
"""All that a simulated checkpoint holds: how many updates the state had seen."""


def write_checkpoint(folder: str, role: str, num_updates: int) -> None:
    """Write a role's checkpoint.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        place = any_path(folder) / role
        place.mkdir(parents=True, exist_ok=True)
        (place / CHECKPOINT).write_bytes(json.dumps({"num_updates": num_updates}).encode())
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot save to {folder}: {error.strerror or error}") from error


def read_checkpoint(folder: str, role: str) -> int:
    """Return the number of updates in a role's checkpoint.

    Raises:
        CheckpointError: there is none of a simulated session.
    """
    files = [any_path(folder) / role / CHECKPOINT, any_path(folder) / CHECKPOINT]  # the second is where all roles had it before
    file = next((path for path in files if path.is_file()), files[0])
    try:
        num_updates = parse_json(content_of(file))["num_updates"]
        if type(num_updates) is not int or not 0 <= num_updates < 2**62:
            raise ValueError("num_updates is no whole number of at least 0")
        return num_updates
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} holds no checkpoint of a simulated session ({error}); give a folder that a simulated session saved"
        ) from error
