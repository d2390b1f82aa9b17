"""Text to token ids and back, loaded at the first use from a model's folder.

``tokenizers`` alone reads a fast tokenizer's file in milliseconds; transformers, whose import takes seconds, is asked only for
chat templates and for folders whose tokenizer needs its conversion.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hfsdk.assets.pretrained import load_tokenizer, no_tokenizer
from hfsdk.core.checks import shown
from hfsdk.core.errors import HfsdkError, ModelNotFoundError, OptionError
from hfsdk.core.prompt_data import NO_UTF_8
from hfsdk.core.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, has_tokenizer, tokenizers_own, unreadable
from hfsdk.core.untrusted import has_file, read_json
from hfsdk.session.chat_templates import ChatMessage, apply_template

T = TypeVar("T")

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that are exactly their ``tokenizer.json``."""

MOST_WORDS = 100
"""Pieces of text whose ids the core remembers. It would keep 10,000: 45 MB where a tokenizer takes a whole text for one word."""

NUM_BYTES, MOST_OF_BYTES = 256, 512
"""A vocabulary of a size between these is one of bytes, and of special tokens."""


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with whatever the model's tokenizer puts around it."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a chat in the model's template, ready for the assistant's turn."""
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


class FolderTokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._core: Any = None
        self._full: Any = None
        self._piece = lru_cache(maxsize=65536)(self._one_piece)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the folder it is read from."""
        return FolderTokenizer, (self.folder,)

    @property
    def core(self) -> Any:
        """The ``tokenizers.Tokenizer``."""
        if self._core is None:
            self._core = self._load_plain() or self._backend()
            resize = getattr(self._core.model, "_resize_cache", None)  # of byte-pair models
            if resize is not None:
                resize(MOST_WORDS)
        return self._core

    @property
    def full(self) -> Any:
        """The transformers tokenizer, for chat templates.

        Raises:
            UnsupportedModelError: it is code of the folder's own, which is not run.
        """
        if self._full is None:
            try:
                self._full = load_tokenizer(self.folder)
            except ImportError as error:
                raise _missing("transformers") from error
        return self._full

    def _load_plain(self) -> Any:
        if not has_tokenizer(self.folder):
            raise no_tokenizer(self.folder)
        known = has_file(self.folder, TOKENIZER) and has_file(self.folder, TOKENIZER_CONFIG)
        if not known or read_json(self.folder, TOKENIZER_CONFIG).get("tokenizer_class") not in PLAIN_CLASSES:
            return None
        try:
            return tokenizers_own(self.folder)
        except ImportError as error:
            raise _missing("tokenizers") from error

    def _backend(self) -> Any:
        core = getattr(self.full, "backend_tokenizer", None)
        if core is None:
            raise ModelNotFoundError(f"{self.folder} has a tokenizer that only Python runs; give a folder with a {TOKENIZER}.")
        return core

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with whatever the model's tokenizer puts around it.

        Raises:
            OptionError: the text has no UTF-8 form.
        """
        try:
            return self._asked(lambda core: list(core.encode(text).ids))
        except (TypeError, UnicodeEncodeError) as error:  # the first is what tokenizers says
            raise OptionError(f"the prompt {shown(text)} {NO_UTF_8}") from error

    def _asked(self, ask: Callable[[Any], T]) -> T:
        """Ask the core something; what it says of itself, a panic of Rust's too, is damage of the file it comes from.

        Raises:
            ModelNotFoundError: it failed at a text or at tokens that are such.
        """
        core = self.core
        try:
            return ask(core)
        except (TypeError, UnicodeEncodeError, OverflowError):  # what it is given is no text, or no tokens
            raise
        except BaseException as error:
            raise unreadable(self.folder, TOKENIZER, error) from None

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a chat in the model's template, ready for the assistant's turn.

        Raises:
            OptionError: the model has no chat template, or one that does not take the chat or does not come to an end.
        """
        if not self.full.chat_template:
            raise OptionError(f"{self.folder.name} has no chat template; give the text itself to actor.generate(text)")
        text = apply_template(self.full, messages, str(self.folder))
        return self._asked(lambda core: list(core.encode(text, add_special_tokens=False).ids))

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids; without ``special`` the special tokens are left out."""
        ids = [int(t) for t in token_ids]
        return self._asked(lambda core: str(core.decode(ids, skip_special_tokens=not special)))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token (a token that is part of a character gives the replacement sign)."""
        return [self._piece(int(t)) for t in token_ids]

    def _one_piece(self, token_id: int) -> str:
        text, raw = self.decode([token_id]), self.core.id_to_token(token_id) or ""
        # sentencepiece-like decoders drop the leading space of the first token
        return " " + text if raw.startswith("▁") and not text.startswith(" ") else text

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; a token that is part of a character has only some of its bytes."""
        return [self._bytes(int(t)) for t in token_ids]

    def _bytes(self, token_id: int) -> bytes:
        text = self._piece(token_id)
        if "\ufffd" not in text:
            return text.encode("utf-8", "surrogatepass")
        raw = str(self.core.id_to_token(token_id) or "")
        if raw.startswith("<0x") and len(raw) == 6:  # sentencepiece's byte fallback
            return bytes.fromhex(raw[3:5])
        alphabet = byte_alphabet()
        return bytes(alphabet[c] for c in raw) if all(c in alphabet for c in raw) else text.encode()


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class StandInTokenizer:
    """For simulated sessions of models without files: about four characters a token, ids by hash. Cannot decode."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return one made-up id per four characters."""
        return [zlib.crc32(text[i : i + 4].encode()) % self._vocab_size for i in range(0, len(text), 4)]

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of the turns, each with eight tokens around it."""
        return [t for m in messages for t in [0] * 8 + self.encode(m["content"])]

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return a placeholder that says how many tokens there are."""
        return f"<{len(token_ids)} simulated tokens>"

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the ids as text."""
        return [f"<{t}>" for t in token_ids]

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the ids as text, encoded."""
        return [piece.encode() for piece in self.pieces(token_ids)]


class ByteTokenizer:
    """One token a byte, as ``tiny`` has them, for simulated sessions where the package ``tokenizers`` is not installed."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode("utf-8", "replace"))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the bytes of the turns, each with eight tokens around it."""
        return [t for m in messages for t in [0] * 8 + self.encode(m["content"])]

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of bytes; what is none is left out."""
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


def _missing(package: str) -> HfsdkError:
    return ModelNotFoundError(
        f"turning text into tokens needs the package {package!r}, which is not installed here; "
        "pip install 'hfsdk[cpu]' (or 'hfsdk[cuda]') brings it. Prompts given as token ids need none."
    )
