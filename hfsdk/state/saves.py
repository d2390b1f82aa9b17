"""``Saves``: saving a session into a folder, and loading it from one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hfsdk.core.errors import CheckpointError, OptionError
from hfsdk.core.files import INDEX, is_ours
from hfsdk.core.store import any_path
from hfsdk.run.run import CurrentRun
from hfsdk.session.context import PendingSave
from hfsdk.session.streams import RowStream
from hfsdk.state.checkpoint import Saveable, Saving, check_space, load_session
from hfsdk.state.checkpoint_index import BEST, folder_of, split, tell_of_anothers


class Saves:
    """The saves of a session."""

    def __init__(self, session: Saveable, pending: PendingSave, run: CurrentRun) -> None:
        self._session, self._pending, self._run = session, pending, run

    def save(self, folder: str | Path, *, keep: int = 1, wait: bool = True) -> Path | str | Saving:
        """Carry out ``session.save``; its text says what the arguments are."""
        context = self._session.context
        context.client.check_open()
        self._run.check_between_steps("save")
        if context.far is not None:
            if not wait:
                raise OptionError("from outside the cluster a save is waited for; leave wait=False out")
            return any_path(context.far.saves("save", str(folder), keep))
        self._pending.take()
        saving = Saving(self._session, folder, keep)
        if wait:
            saving.run()
            return saving.folder
        saving.run_in_background()
        self._pending.begin(saving)
        return saving

    def export(self, folder: Path) -> None:
        """Save into a folder that goes elsewhere: after a worker's death roles come back from what they came back from before."""
        self._pending.take()
        Saving(self._session, folder, 1, recovers=False).run()

    def check_space(self, folder: str | Path, num_saves: int, keep: int) -> None:
        """Refuse a run whose saves would not fit.

        Raises:
            OptionError: ``folder`` is no path.
            CheckpointError: says how much the saves take and how much is free.
        """
        check_space(self._session, folder_of(folder, "a save"), num_saves, keep)

    def tell_of_anothers(self, folder: str | Path) -> None:
        """Say that a folder has a save which this process neither made nor loaded; see :func:`tell_of_anothers`."""
        tell_of_anothers(folder_of(folder, "a save"), self._session.context.notice)

    def tell_of_place(self, folder: str | Path | None, stream: RowStream) -> None:
        """Give a notice where a stream begins elsewhere than it was in the checkpoint that a run goes on from."""
        place = None if folder is None else self._session.places.passed_over(stream)
        if place is not None:
            self._session.context.notice(
                f"{folder} was at batch {place} of other data, or in another order: these rows, batch_size, seed or shuffle differ "
                f"from those it was trained on. They are gone through from batch {stream.position}"
            )

    def load(self, folder: str | Path) -> None:
        """Carry out ``session.load``; its text says what the arguments are."""
        self._run.check_between_steps("load")
        if self._session.context.far is not None:
            self._session.context.far.saves("load", str(folder), 1)
            return
        self._pending.settle()
        load_session(self._session, folder)
        root, _ = split(folder_of(folder, "a checkpoint"))
        for folder_of_saves in (root, root / BEST):  # its run goes on, with the best there was
            with suppress(CheckpointError):  # of a store that went away: all is loaded
                is_ours(folder_of_saves / INDEX)
