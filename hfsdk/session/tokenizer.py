"""The tokenizer as a session uses it, and the tokenizers of simulated sessions whose models have none."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from hfsdk.core.conversations import Chat, Message
from hfsdk.core.texts import Encoded, Example, as_chat
from hfsdk.core.turn_ends import TurnEnds

NUM_BYTES, MOST_OF_BYTES = 256, 512
"""A vocabulary of a size between these is one of bytes, and of special tokens."""


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a whole text, after what the model's tokenizer puts before one."""
        ...

    def encode_chat(self, chat: Chat | Sequence[Message]) -> list[int]:
        """Return the token ids of a chat in the model's template, ready for the assistant's turn."""
        ...

    def encode_example(self, example: Example) -> Encoded:
        """Return the token ids of a prompt and of what goes on with it."""
        ...

    def turn_ends(self, *, chats: bool) -> TurnEnds:
        """Return which tokens end a turn; ``chats``: by the chat template too."""
        ...

    def notes(self) -> list[str]:
        """Return the choices so far where the model's files leave one, a sentence each."""
        ...

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids; without ``special`` the special tokens are left out."""
        ...

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token."""
        ...

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; a token that is part of a character has only some of its bytes."""
        ...


class _Simulated:
    """Texts of a simulated session: conversations with eight tokens around each turn, and no end of a turn."""

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_chat(self, chat: Chat | Sequence[Message]) -> list[int]:
        """Return the ids of the turns, each with eight tokens around it."""
        return [t for m in as_chat(chat)["messages"] for t in [0] * 8 + self.encode(m["content"] or "")]

    def encode_example(self, example: Example) -> Encoded:
        """Return the ids of both."""
        prompt, response = example["prompt"], example["response"]
        start = self.encode(prompt) if isinstance(prompt, str) else [] if prompt is None else self.encode_chat(prompt)
        return start, self.encode(response if isinstance(response, str) else response["content"] or "")

    def turn_ends(self, *, chats: bool) -> TurnEnds:
        """Return none."""
        return TurnEnds()

    def notes(self) -> list[str]:
        """Return none."""
        return []


class StandInTokenizer(_Simulated):
    """A tokenizer for simulated sessions of models without files: about four characters a token, ids by hash. Cannot decode."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return one made-up id per four characters."""
        return [zlib.crc32(text[i : i + 4].encode()) % self._vocab_size for i in range(0, len(text), 4)]

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return a placeholder that says how many tokens there are."""
        return f"<{len(token_ids)} simulated tokens>"

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the ids as text."""
        return [f"<{t}>" for t in token_ids]

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the ids as text, encoded."""
        return [piece.encode() for piece in self.pieces(token_ids)]


class ByteTokenizer(_Simulated):
    """One token a byte, as ``tiny`` has them, for simulated sessions where the package ``tokenizers`` is not installed."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of bytes; ids that are none are left out."""
        return bytes(int(t) for t in token_ids if 0 <= t < NUM_BYTES).decode("utf-8", "replace")

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token."""
        return [self.decode([t]) for t in token_ids]

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the byte of each token."""
        return [bytes([t]) if 0 <= t < NUM_BYTES else b"" for t in map(int, token_ids)]


def stand_in(vocab_size: int) -> Tokenizer:
    """Return a tokenizer that needs no package, for a simulated session."""
    return ByteTokenizer() if NUM_BYTES <= vocab_size < MOST_OF_BYTES else StandInTokenizer(vocab_size)
