"""How handles reach the controller and the tokenizer, as Protocols; what else they need of their session is ``handle.Host``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.core.conversations import Chat, Message
from hfsdk.core.pending import Client, Lease

if TYPE_CHECKING:
    from hfsdk.engine.calls.messages import Submit


class TextCodec(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def encode_chat(self, chat: Chat | Sequence[Message]) -> list[int]:
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

    def send(self, message: Any) -> Any:
        """Send one message and return its reply."""
        ...

    def submit(self, message: Submit, *, waits: bool = False) -> Lease:
        """Start a call; ``waits``: whoever starts it waits for it next."""
        ...

    def need_tokenizer(self) -> TextCodec:
        """Return the tokenizer."""
        ...
