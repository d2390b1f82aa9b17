"""How handles reach the controller and the tokenizer, as Protocols; what else they need of their session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.core.pending import Client, Lease

if TYPE_CHECKING:
    from hfsdk.core.snapshot import Snapshot
    from hfsdk.engine.calls.messages import Submit
    from hfsdk.models.counters import Counters
    from hfsdk.models.handle import ModelHandle


class TextCodec(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat, ready for the assistant's turn."""
        ...

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids."""
        ...


class CallClient(Client, Protocol):
    """The session's side of the controller, as handles use it."""

    @property
    def tokenizer_folder(self) -> str:
        """The model folder whose tokenizer turns text into tokens, or ``""``."""
        ...

    @property
    def run_goes_on(self) -> Callable[[], bool]:
        """Whether a run is under way, also between two of its calls."""
        ...

    def send(self, message: Any) -> Any:
        """Send one message and return its reply."""
        ...

    def submit(self, message: Submit, *, waits: bool = False) -> Lease:
        """Start a call; ``waits``: whoever starts it waits for it next."""
        ...

    def need_tokenizer(self) -> TextCodec:
        """Return the tokenizer."""
        ...


class Host(Protocol):
    """What handles need of their session; they stand below it and know nothing else of it."""

    @property
    def client(self) -> CallClient:
        """Who calls are sent through."""
        ...

    @property
    def seed(self) -> int:
        """The session's seed, which calls without one of their own use."""
        ...

    @property
    def simulated(self) -> bool:
        """Whether seconds are those of a virtual clock."""
        ...

    @property
    def counters(self) -> Counters:
        """Numbers that are saved with the session."""
        ...

    def ready(self, handle: ModelHandle) -> None:
        """Place and load the handle's role where that has not happened; refuse a handle that was replaced or released."""
        ...

    def release(self, handle: ModelHandle) -> None:
        """Free the handle's role and forget it."""
        ...

    def notice(self, text: str) -> None:
        """Tell the user something that is no failure."""
        ...

    def find_snapshot(self, snapshot: Snapshot | str) -> Snapshot:
        """Return a snapshot of the session by its name, or as it is."""
        ...
