"""``PendingSave``: the save that is written in the background, for what has to wait for it."""

from __future__ import annotations

from typing import Protocol


class BackgroundSave(Protocol):
    """A save under way."""

    @property
    def looked(self) -> bool:
        """Whether someone has learned how it ended."""
        ...

    def settle(self) -> None:
        """Wait until it is over, however it ends."""
        ...

    def wait(self) -> object:
        """Wait until it is complete.

        Raises:
            HfsdkError: what it failed with.
        """
        ...


class PendingSave:
    """The last save in the background: it needs its roles and their workers until it is over."""

    def __init__(self) -> None:
        self._save: BackgroundSave | None = None

    def begin(self, save: BackgroundSave) -> None:
        """Take a save that has begun."""
        self._save = save

    def settle(self) -> None:
        """Wait until it is over, however it ends."""
        if self._save is not None:
            self._save.settle()

    def take(self) -> None:
        """Wait for a save that nobody has asked how it ended, and forget it.

        Raises:
            HfsdkError: what it failed with.
        """
        if self._save is not None and not self._save.looked:
            self._save.wait()
        self._save = None
