"""``Saves``: saving a session into a folder, and loading it from one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol, overload

from hfsdk.core.checks import Count, checked
from hfsdk.core.errors import CheckpointError, OptionError
from hfsdk.core.files import INDEX, is_ours
from hfsdk.core.store import any_path
from hfsdk.run.run import CurrentRun
from hfsdk.session.context import PendingSave
from hfsdk.session.streams import RowStream
from hfsdk.state.checkpoint import Saveable, Saving, check_space, load_session
from hfsdk.state.checkpoint_index import BEST, folder_of, split, tell_of_anothers


class SaveFunction(Protocol):
    """How a session saves: :meth:`Saves.save`."""

    @overload
    def __call__(self, folder: str | Path, *, keep: int = 1, wait: Literal[True] = True) -> Path | str: ...

    @overload
    def __call__(self, folder: str | Path, *, keep: int = 1, wait: Literal[False]) -> Saving: ...

    def __call__(self, folder: str | Path, *, keep: int = 1, wait: bool = True) -> Path | str | Saving:
        """Save everything into a folder."""
        ...


class Saves:
    """The saves of a session."""

    def __init__(self, session: Saveable, pending: PendingSave, run: CurrentRun) -> None:
        self._session, self._pending, self._run = session, pending, run

    @overload
    def save(self, folder: str | Path, *, keep: int = 1, wait: Literal[True] = True) -> Path | str: ...

    @overload
    def save(self, folder: str | Path, *, keep: int = 1, wait: Literal[False]) -> Saving: ...

    @checked
    def save(self, folder: str | Path, *, keep: Count = 1, wait: bool = True) -> Path | str | Saving:
        """Save everything: weights, optimizers, schedules, the prompts' places, counters, history.

        The folder holds the last complete save at every moment, also when this one is interrupted or its processes are killed.
        Only what earlier saves wrote there is removed; where that is a save of another process, which this one has not loaded, a
        notice says so. Threads that save take turns; a folder that another process is saving to
        is refused (a store has no locks: there the save that ends last counts).

        Args:
            folder: where; it may hold other files as well. Or an address in an object store, e.g. ``"s3://bucket/runs/1"``, which
                fsspec and the protocol's package reach from every node; see docs/clusters.md.
            keep: how many complete saves the folder holds when this one is complete, this one included; older ones are removed.
            wait: whether the save is complete on return. Otherwise the roles' pools are held only while they copy their state,
                the files are written in the background, and what is returned can be waited for. A later save, ``load``,
                ``place`` and ``close`` wait for it.

        Raises:
            OptionError: ``folder`` is no path, ``keep`` is below 1, ``wait`` is no bool, the store's package is missing, or a step
                of a run is under way.
            CheckpointError: the folder or store cannot be written, has too little space, is saved to by another process, or holds
                a ``session.json`` that hfsdk did not write; also where the save before it failed and nobody has looked.
        """
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
        """Tell that a stream begins elsewhere than where the checkpoint that a run goes on from had one."""
        place = None if folder is None else self._session.places.passed_over(stream)
        if place is not None:
            self._session.context.notice(
                f"{folder} was at batch {place} of other data, or in another order: these rows, batch_size, seed or shuffle differ "
                f"from those it was trained on. They are gone through from batch {stream.position}"
            )

    @checked
    def load(self, folder: str | Path) -> None:
        """Load what :meth:`save` wrote into the same roles, in whatever layout they are here; waits.

        Weights and optimizer state are those that were saved, bit for bit: every file is compared with its checksum before
        anything of the session is replaced. Nothing in a checkpoint is run.

        Args:
            folder: a path or an address, for the last save in it; of those that ``save(folder, keep=3)`` kept,
                ``"folder/state-2"`` is an earlier one.

        Raises:
            OptionError: ``folder`` is no path, or a step of a run is under way.
            CheckpointError: no checkpoint, an incomplete or a damaged one (names the file, and earlier saves that are there), or
                one of other roles or models.
        """
        self._run.check_between_steps("load")
        if self._session.context.far is not None:
            self._session.context.far.saves("load", str(folder), 1)
            return
        self._pending.settle()
        load_session(self._session, folder)
        root, _ = split(folder_of(folder, "a checkpoint"))
        for one in (root, root / BEST):  # its run goes on, with the best there was
            with suppress(CheckpointError):  # of a store that went away: all is loaded
                is_ours(one / INDEX)
