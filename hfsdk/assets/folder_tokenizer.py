"""``FolderTokenizer``: text to token ids and back, loaded at the first use from a model's folder.

``tokenizers`` alone reads a fast tokenizer's file in milliseconds; transformers, whose import takes seconds, is asked only for chat
templates and for folders whose tokenizer needs its conversion. The rules of what a text or a
conversation becomes are in :class:`hfsdk.core.texts.Texts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from hfsdk.assets.pretrained import load_tokenizer, no_tokenizer
from hfsdk.core.chat_templates import apply_template
from hfsdk.core.checks import shown
from hfsdk.core.conversations import Chat, Message
from hfsdk.core.errors import HfsdkError, ModelNotFoundError, OptionError
from hfsdk.core.prompt_data import NO_UTF_8
from hfsdk.core.texts import Encoded, Example, Texts, as_chat
from hfsdk.core.tokenizer_files import (
    NAMED_TEMPLATES,
    SPECIAL_TOKENS,
    TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    has_tokenizer,
    named_tokens,
    tokenizers_own,
    unreadable,
)  # fmt: skip
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.core.untrusted import has_file, read_json, shown_reason

T = TypeVar("T")

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that are exactly their ``tokenizer.json``, where it has every token that the files next to it name."""

MOST_WORDS = 100
"""Pieces of text whose ids the core remembers. It would keep 10,000: 45 MB where a tokenizer takes a whole text for one word."""


class FolderTokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.texts = Texts(self)
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
        if not self._is_plain:
            return None
        try:
            core = tokenizers_own(self.folder)
        except ImportError as error:
            raise _missing("tokenizers") from error
        is_whole = all(core.token_to_id(text) is not None for text in named_tokens(self.folder))
        return core if is_whole else None  # transformers gives the others ids of their own

    @cached_property
    def _is_plain(self) -> bool:
        has_both = has_file(self.folder, TOKENIZER) and has_file(self.folder, TOKENIZER_CONFIG)
        return has_both and read_json(self.folder, TOKENIZER_CONFIG).get("tokenizer_class") in PLAIN_CLASSES

    def _backend(self) -> Any:
        core = getattr(self.full, "backend_tokenizer", None)
        if core is None:
            raise ModelNotFoundError(f"{self.folder} has a tokenizer that only Python runs; give a folder with a {TOKENIZER}.")
        return core

    # -- what a text or a conversation becomes

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a whole text, after those that the model's tokenizer puts before one.

        Raises:
            OptionError: the text has no UTF-8 form.
        """
        return self.texts.whole(text)

    def encode_chat(self, chat: Chat | Sequence[Message]) -> list[int]:
        """Return the token ids of a chat in the model's template, ready for the assistant's turn.

        Raises:
            OptionError: the model has no chat template, or one that does not take the chat or does not come to an end.
        """
        return self.texts.prompt(as_chat(chat))

    def encode_example(self, example: Example) -> Encoded:
        """Return the token ids of a prompt and of the text that goes on with it."""
        return self.texts.example(example)

    def notes(self) -> list[str]:
        """Return the choices made so far where the folder's files and its template leave one, a sentence each."""
        return self.texts.notes

    def turn_ends(self, *, chats: bool) -> TurnEnds:
        """Return which tokens end a turn; ``chats``: by the chat template too, which takes transformers seconds to import."""
        return self.texts.ends(chats=chats)

    # -- what the texts are made of

    @property
    def whose(self) -> str:
        """The folder, for messages."""
        return str(self.folder)

    def plain(self, text: str) -> list[int]:
        """Return the token ids of a text, with nothing around it.

        Raises:
            OptionError: the text has no UTF-8 form.
        """
        try:
            return self._answer(lambda core: list(core.encode(text, add_special_tokens=False).ids))
        except (TypeError, UnicodeEncodeError) as error:  # the first is what tokenizers says
            raise OptionError(f"the text {shown(text)} {NO_UTF_8}") from error

    @cached_property
    def before(self) -> list[int]:
        """The token ids that the tokenizer puts before a whole text."""
        encoding = self._answer(lambda core: core.encode("a"))
        count = next((i for i, added in enumerate(encoding.special_tokens_mask) if not added), 0)
        return list(encoding.ids[:count])

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are special."""
        return self._answer(lambda core: frozenset(i for i, t in core.get_added_tokens_decoder().items() if t.special))

    @cached_property
    def template(self) -> str:
        """The chat template, several of them one behind the other; ``""`` for none."""
        config = read_json(self.folder, TOKENIZER_CONFIG) if has_file(self.folder, TOKENIZER_CONFIG) else {}
        if not config.get("chat_template") and not any(has_file(self.folder, name) for name in (*TEMPLATES, NAMED_TEMPLATES)):
            return ""  # without transformers
        templates = self.full.chat_template
        return "\n".join(map(str, templates.values())) if isinstance(templates, Mapping) else str(templates or "")

    def template_of(self, chat: Chat) -> str:
        """Return the template that a conversation is written in: where a model has several, one of them is for tools."""
        wanted = dict(chat.get("options", {})).get("chat_template")
        try:
            return str(self.full.get_chat_template(wanted, chat.get("tools") or None))
        except ValueError as error:  # there are several, and none is for this
            raise OptionError(f"{self.folder} has several chat templates: {shown_reason(error)}") from error

    def render(self, chat: Chat, ready: bool) -> str:
        """Return a conversation in the template; ``ready``: for the assistant's turn."""
        return apply_template(self.full, chat, str(self.folder), ready=ready)

    def ends_of_files(self, behind_answers: Sequence[int]) -> TurnEnds:
        """Return the tokens that end a turn by the folder's files, and by its template."""
        return TurnEnds.of(self.folder, self._eos(), behind_answers, name=lambda token: f"{self.decode([token])!r} ({token})")

    def _eos(self) -> int | None:
        """Return the id of the tokenizer's own end of a text."""
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
            token = read_json(self.folder, name).get("eos_token") if has_file(self.folder, name) else None
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str):
                return self._id_of(text)
        return None if self._is_plain else cast("int | None", self.full.eos_token_id)

    def _id_of(self, token: str) -> int | None:
        return self._answer(lambda core: cast("int | None", core.token_to_id(token)))

    def _answer(self, ask: Callable[[Any], T]) -> T:
        """Ask the core something; its own error, a panic of Rust's too, is damage of the file it comes from.

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

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids; without ``special`` the special tokens are left out."""
        ids = [int(t) for t in token_ids]
        return self._answer(lambda core: str(core.decode(ids, skip_special_tokens=not special)))

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


def _missing(package: str) -> HfsdkError:
    return ModelNotFoundError(
        f"turning text into tokens needs the package {package!r}, which is not installed here; "
        "pip install 'hfsdk[cpu]' (or 'hfsdk[cuda]') brings it. Prompts given as token ids need none."
    )
