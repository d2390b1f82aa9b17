"""Chats as a model's own template writes them; a template is a program that the folder's author wrote, and is bounded.

transformers runs it in Jinja's sandbox, which has no files, no imports and no private attributes. It can still go on for hours
(loops in loops) and write without end, so its steps and characters are counted, by Python's own tracing of the template's lines:
the same chat ends at the same step everywhere. A single operation that asks for much memory is not seen.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.conversations import Chat
from hfsdk.core.errors import OptionError
from hfsdk.core.untrusted import shown_text

MOST_STEPS, MOST_WRITTEN = 1_000_000, 16_000_000
"""Lines of a template that one chat may run, and characters that it may write."""

TEMPLATE = "<template>"
"""Name of the file that Jinja gives a template's code."""


class _TooLongError(Exception):
    """A template does not come to an end."""


class _Counter:
    """A counter of a template's steps; ``sys.settrace`` takes its :meth:`call`."""

    def __init__(self) -> None:
        self._steps = self._written = 0

    def call(self, frame: FrameType, event: str, value: Any) -> Any:
        return self.step if frame.f_code.co_filename == TEMPLATE else None

    def step(self, frame: FrameType, event: str, value: Any) -> Any:
        self._steps += 1
        if event == "return" and isinstance(value, str):  # a piece that it yields
            self._written += len(value)
        if self._steps > MOST_STEPS or self._written > MOST_WRITTEN:
            raise _TooLongError(f"it runs more than {MOST_STEPS:,} lines, or writes more than {MOST_WRITTEN:,} characters")
        return self.step


def apply_template(tokenizer: Any, chat: Chat, folder: str, *, ready: bool = True) -> str:
    """Return a chat in the template of transformers' tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        chat: the conversation.
        folder: the model's folder, for messages.
        ready: whether the text ends with the header that asks the assistant for an answer.

    Raises:
        OptionError: the template does not take the chat, is no template, or does not come to an end.
    """
    besides = dict(chat.get("options", {})) | ({"tools": chat["tools"]} if chat.get("tools") else {})
    messages = [dict(m) for m in chat["messages"]]
    before = sys.gettrace()
    sys.settrace(_Counter().call)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ready, **besides)
    except Exception as error:  # a template is a program, which may raise anything
        reason = shown_text(str(error)) or type(error).__name__
        chat_text = shown(messages)
        raise OptionError(f"the chat template of {folder} does not take {chat_text}: {reason}. Change the chat.") from error
    finally:
        sys.settrace(before)
    if not isinstance(text, str):
        raise OptionError(f"the chat template of {folder} gives {type(text).__name__} and no text. Use another model.")
    return text
