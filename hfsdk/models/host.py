"""What a handle needs of its session, as Protocols: handles stand below the session and know nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.core.pending import Client, Lease

if TYPE_CHECKING:
    from hfsdk.engine.calls.messages import Submit
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

    def send(self, message: Any) -> Any:
        """Send one message and return its reply."""
        ...

    def submit(self, message: Submit) -> Lease:
        """Start a call."""
        ...

    def need_tokenizer(self) -> TextCodec:
        """Return the tokenizer."""
        ...


class Host(Protocol):
    """The session, as handles see it."""

    @property
    def client(self) -> CallClient:
        """Who calls are sent through."""
        ...

    @property
    def seed(self) -> int:
        """The session's seed, which calls without one of their own use."""
        ...

    @property
    def tokenizer_folder(self) -> str:
        """The model folder whose tokenizer turns text into tokens, or ``""``."""
        ...

    @property
    def simulated_time(self) -> bool:
        """Whether seconds are those of a virtual clock."""
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

    def next_count(self, name: str) -> int:
        """Count up and return a named counter that is saved with the session, starting at 0."""
        ...

    def number(self, name: str) -> float | None:
        """Return a named number that is saved with the session; ``None`` where nobody has set it."""
        ...

    def set_number(self, name: str, value: float) -> None:
        """Set such a number."""
        ...
