"""Work that a kernel outside the cluster has done near it, because it needs files there: models, texts, saves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.core.conversations import Chat, Message
from hfsdk.core.errors import HfsdkError
from hfsdk.core.texts import Encoded, Example, as_chat
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.session.context import Context

P = ParamSpec("P")
R = TypeVar("R")


class HasContext(Protocol):
    """A part of a session."""

    _context: Context


def near_the_models(
    method: Callable[Concatenate[Any, P], R], is_near: Callable[[Any], bool] = lambda first: callable(first)
) -> Callable[Concatenate[Any, P], R]:
    """Return a declaration that is carried out where the models' folders are; one of a function is so everywhere.

    Args:
        method: a method of a part of a session; its first argument says what is declared.
        is_near: whether that argument needs no folder.
    """
    first_name = list(inspect.signature(method).parameters)[1]

    @functools.wraps(method)
    def declared(self: HasContext, /, *args: P.args, **kwargs: P.kwargs) -> R:
        far = self._context.far
        first = args[0] if args else kwargs.get(first_name)
        if far is None or is_near(first) or isinstance(first, (list, tuple)):
            return method(self, *args, **kwargs)
        made: R = far.declare(method.__name__, args, kwargs)
        return made

    return declared


class RemoteTokenizer(FolderTokenizer):
    """The tokenizer of a folder that is near the session's workers: texts go there, and what they are comes back."""

    MOST_KNOWN, AT_ONCE = 65536, 4096

    def __init__(self, folder: str | Path, ask: Callable[[str, str, Any], Any]) -> None:
        super().__init__(folder)
        self._ask = ask
        self._answers: dict[Any, Any] = {}

    def _texts(self, what: str, value: Any) -> Any:
        key = (what, repr(value))
        if key not in self._answers:
            if len(self._answers) >= self.MOST_KNOWN:
                self._answers.clear()
            self._answers[key] = self._ask(str(self.folder), what, value)
        return self._answers[key]

    def foresee(self, questions: Sequence[tuple[str, Any]]) -> None:
        """Have the answers to several questions come in one message, before they are needed."""
        new = list(
            {key: question for question in questions if (key := (question[0], repr(question[1]))) not in self._answers}.items()
        )
        for first in range(0, len(new) if len(new) > 1 else 0, self.AT_ONCE):
            part = new[first : first + self.AT_ONCE]
            if len(self._answers) + len(part) > self.MOST_KNOWN:
                self._answers.clear()
            try:
                answers = self._ask(str(self.folder), "several", [question for _, question in part])
            except HfsdkError:  # one of them has none: whoever asks for that one is told, by its row
                continue
            self._answers |= {key: answer for (key, _), answer in zip(part, answers, strict=True)}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with those that the model's tokenizer puts around it."""
        return list(self._texts("encode", text))

    def encode_chat(self, chat: Chat | Sequence[Message]) -> list[int]:
        """Return the token ids of a chat in the model's template, ready for the assistant's turn."""
        return list(self._texts("encode_chat", as_chat(chat)))

    def encode_example(self, example: Example) -> Encoded:
        """Return the token ids of a prompt and of what goes on with it."""
        start, response = self._texts("encode_example", example)
        return list(start), list(response)

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids; without ``special`` the special tokens are left out."""
        return str(self._texts("decode" if special else "decode_plain", [int(token) for token in token_ids]))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token."""
        return list(self._texts("pieces", [int(token) for token in token_ids]))

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        return list(self._texts("token_bytes", [int(token) for token in token_ids]))

    def turn_ends(self, *, chats: bool) -> TurnEnds:
        """Return which tokens end a turn."""
        ids, text, notes = self._texts("turn_ends", chats)
        return TurnEnds(tuple(ids), text, tuple(notes))

    def notes(self) -> list[str]:
        """Return the choices so far where the model's files leave one."""
        return list(self._ask(str(self.folder), "notes", None))


def text_of(folder: str, what: str, value: Any, tokenizer: Callable[[str], FolderTokenizer]) -> Any:
    """Answer a :class:`RemoteTokenizer`, near the folder."""
    if what == "several":
        return [text_of(folder, item_kind, item, tokenizer) for item_kind, item in value]
    folder_tokenizer = tokenizer(folder)
    answers: dict[str, Callable[[], Any]] = {
        "encode": lambda: folder_tokenizer.encode(value),
        "encode_chat": lambda: folder_tokenizer.encode_chat(value),
        "encode_example": lambda: folder_tokenizer.encode_example(value),
        "turn_ends": lambda: astuple(folder_tokenizer.turn_ends(chats=value)),
        "notes": folder_tokenizer.notes,
        "decode": lambda: folder_tokenizer.decode(value),
        "decode_plain": lambda: folder_tokenizer.decode(value, special=False),
        "pieces": lambda: folder_tokenizer.pieces(value),
        "token_bytes": lambda: folder_tokenizer.token_bytes(value),
    }
    return answers[what]()
