"""Whether what is to be saved will fit: told before anything is written."""

from __future__ import annotations

import shutil

from hfsdk.core.errors import CheckpointError
from hfsdk.core.files import existing_parent
from hfsdk.core.roles import state_bytes
from hfsdk.core.store import AnyPath, StorePath
from hfsdk.models import ModelHandle
from hfsdk.session.checkpoint_index import states_in
from hfsdk.session.saveable import Saveable

SPARE_BYTES = 1 << 20
"""What a save takes beside the numbers: indexes of files, the history."""


def check_space(session: Saveable, folder: AnyPath, num_saves: int, keep: int) -> None:
    """Refuse a run whose saves would not fit, before it begins; the one before stays until a new one is complete.

    A store is asked whether it answers: how much it takes it does not say.

    Raises:
        CheckpointError: says how much the saves take and how much is free.
    """
    if isinstance(folder, StorePath):
        folder.exists()
        return
    if session.context.simulated or not num_saves:
        return
    each = sum(num_bytes(handle, stepped=True) for handle in session.trained())
    there = len(states_in(folder)) if folder.is_dir() else 0
    more = max(1, min(num_saves, keep + 1 - there))
    needed, free = more * each + SPARE_BYTES, shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise CheckpointError(
            f"the saves of this run would not fit into {folder}: each takes {each / 1e6:,.1f} MB, with keep={keep} there are up to "
            f"{keep + 1} at a time, and the disk has {free / 1e6:,.1f} MB free. Free some space, or give a folder on another disk."
        )


def num_bytes(handle: ModelHandle, stepped: bool) -> int:
    """Return the bytes of a role's state in a save."""
    assert handle.role.learned is not None
    return handle.role.learned.num_parameters() * state_bytes(handle.role.dtype, stepped)
