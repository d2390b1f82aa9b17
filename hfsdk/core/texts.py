r"""``Texts``: the one place where text becomes tokens; prompts, demonstrations, pairs, probes and chats all ask it.

::

    prompt        <bos> The sky is                          a text, after what the tokenizer puts before a whole one, once
    response      <bos> The sky is| blue.                   both together less the prompt: without a <bos> or <eos> of its own

    prompt        <|im_start|>user ... <|im_start|>assistant\n
    response      <|im_start|>user ... <|im_start|>assistant\n|<think>\n\n</think>\n\nblue.<|im_end|>|\n
                  the template of the whole conversation, less the template of the prompt as generation gets it:
                  with what the template writes around the answer, up to the token that ends a response

Text behind the end of a turn belongs to the next one, and no rollout ever writes it. So a text that is learned, or scored as one of
a pair, has the tokens that it has where the model itself wrote it.

A prompt keeps the tokens that generation gives it, also where its last characters and the first of the response would be one
token (``"The sky is "`` and ``"blue"``); only a prompt that nobody wrote, the common beginning of a pair, ends before that token.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NotRequired, Protocol, TypedDict

from hfsdk.core.checks import shown
from hfsdk.core.conversations import ASSISTANT, TOOLS, Chat, Message
from hfsdk.core.errors import OptionError
from hfsdk.core.turn_ends import TurnEnds

Encoded = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


class Example(TypedDict):
    """A prompt and the text that goes on with it, as plain data: it may be turned into tokens on another machine."""

    prompt: str | Chat | None
    """A text, a conversation before the answer, or ``None`` where the prompt is token ids, or there is none."""
    response: str | Message
    """A text, or the assistant's message."""
    begins: NotRequired[bool]
    """Whether the response is a whole text: one without a prompt."""
    cut_back: NotRequired[bool]
    """Whether the prompt ends before a token that it has in common with the response, instead of keeping its own."""


PROBE = "xyzzy"
"""A text that no template writes, to see the tokens around it."""

FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Entries of a message that a template has to read, or its reader would learn another text."""


class Codec(Protocol):
    """The answers of a tokenizer and its template; where a text begins or ends is decided elsewhere."""

    @property
    def whose(self) -> str:
        """The model's folder, for messages."""
        ...

    def plain(self, text: str) -> list[int]:
        """Return the token ids of a text, with nothing around it."""
        ...

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids."""
        ...

    @property
    def before(self) -> list[int]:
        """Return the token ids that the tokenizer puts before a whole text: ``<bos>`` or none."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are special, as ``<|im_end|>``."""
        ...

    @property
    def template(self) -> str:
        """The chat template, several of them one behind the other; ``""`` for none."""
        ...

    def template_of(self, chat: Chat) -> str:
        """Return the one of them that a conversation is written in."""
        ...

    def render(self, chat: Chat, ready: bool) -> str:
        """Return a conversation in the template; ``ready``: for the assistant's turn."""
        ...

    def ends_of_files(self, behind_answers: Sequence[int]) -> TurnEnds:
        """Return the tokens that end a turn by the model's files, and by its template."""
        ...


class Texts:
    """Texts and conversations as tokens of one model."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ends: dict[bool, TurnEnds] = {}
        self._writes: dict[tuple[str, str], bool] = {}
        """Whether a template writes the messages of a role, by role and template."""
        self._openings: dict[bool, int | None] = {}
        """The end with which the next turn begins, by whether the answer before it calls tools."""
        self._notes: list[str] = []

    # -- what is asked

    def whole(self, text: str) -> list[int]:
        """Return the token ids of a text that begins here: a prompt, or all that is learned."""
        ids, before = self._codec.plain(text), self._codec.before
        return ids if ids[: len(before)] == before else before + ids

    def prompt(self, chat: Chat) -> list[int]:
        """Return the token ids of a conversation that the model is to answer.

        Raises:
            OptionError: the template does not take it, or would leave something out.
        """
        return self._codec.plain(self._render(chat, ready=True))

    def example(self, example: Example) -> Encoded:
        """Return the token ids of a prompt and of its response, which has its end.

        Raises:
            OptionError: the template does not take it, or writes earlier turns otherwise once there is an answer.
        """
        prompt, response = example["prompt"], example["response"]
        if prompt is not None and not isinstance(prompt, str):
            return self._answer(prompt, response if isinstance(response, dict) else _said(ASSISTANT, response))
        assert isinstance(response, str)
        if prompt is None:
            return [], self._ended(self.whole(response) if example.get("begins") else self._codec.plain(response))
        # Tokens may join across the border of prompt and response, so both are encoded as one text and then parted.
        start, both = self.whole(prompt), self.whole(prompt + response)
        start, answer = self._split(start, both, response, cut_back=example.get("cut_back", False))
        return start, self._ended(answer)

    @property
    def notes(self) -> list[str]:
        """The choices made so far where files and template leave one, a sentence each."""
        return list(dict.fromkeys([*(note for ends in self._ends.values() for note in ends.notes), *self._notes]))

    def ends(self, *, chats: bool) -> TurnEnds:
        """Return the tokens that end a turn.

        Args:
            chats: whether to look at the chat template, which takes transformers seconds to import.
        """
        if chats not in self._ends:
            self._ends[chats] = self._codec.ends_of_files(self._behind_answers() if chats and self._codec.template else ())
        return self._ends[chats]

    # -- where prompt and response part, and end

    def _ended(self, response: list[int]) -> list[int]:
        """Put the end of a text behind one that has none."""
        return self.ends(chats=not self._codec.special_ids.isdisjoint(response[-1:])).behind(response)

    def _split(self, start: list[int], both: list[int], response: str, *, cut_back: bool = False) -> Encoded:
        same = common_beginning(start, both)
        if same == len(start) or cut_back:
            return both[:same], both[same:]
        # The last token of the prompt goes on into the response; what was generated began with its own token, so the response
        # is encoded alone.
        alone = self._codec.plain(response)
        if self._codec.decode(start + alone) != self._codec.decode(start) + response:  # it puts a space before a first word
            line, behind_line = self._codec.plain("\n"), self._codec.plain("\n" + response)
            alone = behind_line[len(line) :] if behind_line[: len(line)] == line else alone
        return start, alone

    def _answer(self, chat: Chat, message: Message) -> Encoded:
        whole_chat = _with(chat, [*chat["messages"], message])
        question, answered = self._render(chat, ready=True), self._render(whole_chat, ready=False, learned=True)
        start, response = self._parted(chat, whole_chat, question, answered)
        end = self._end_of(response)
        if end is not None:
            return start, response[:end]
        # The template has written white space behind the answer and no end: that space belongs to the next turn.
        behind = _spaces(answered) - _spaces(message["content"] or "")
        if behind > 0:  # the space between turns, where the template ends none
            start, response = self._parted(chat, whole_chat, question, answered[:-behind])
        last = self._opening(calls=bool(message.get("tool_calls")))
        last = self.ends(chats=True).text if last is None else last
        return start, response + ([] if last is None else [last])

    def _parted(self, chat: Chat, whole_chat: Chat, question: str, answered: str) -> Encoded:
        start, both = self._codec.plain(question), self._codec.plain(answered)
        same = common_beginning(start, both)
        if same == len(start):
            return start, both[same:]
        if answered.startswith(question):
            return self._split(start, both, answered[len(question) :])
        own = common_beginning(question, self._render(chat, ready=False))  # behind it stands what asks for an answer
        if common_beginning(question, answered) < own:
            raise OptionError(self._rewritten(chat, question, answered))
        self._note(
            f"the chat template writes {shown(self._codec.decode(start[same:]))} before an answer that is to be generated, and not "
            "before one that is given: a learned answer follows a prompt without it, as in TRL"
        )
        return both[:same], both[same:]

    def _rewritten(self, chat: Chat, prompt: str, answered: str) -> str:
        """Say which earlier message the template writes otherwise once there is an answer."""
        messages, same = chat["messages"], common_beginning(prompt, answered)
        at = len(messages) - 1
        for place in range(at):
            try:
                beginning = self._render(_with(chat, messages[: place + 1]), ready=False)
            except OptionError:  # the template takes no conversation that ends there
                continue
            if common_beginning(beginning, prompt) > same:
                at = place
                break
        return (
            f"the chat template of {self._codec.whose} writes message {at}, of {shown(messages[at]['role'])}, otherwise once an "
            f"answer follows: {shown(prompt[same : same + 40])} is then {shown(answered[same : same + 40])}, and no response goes "
            "on with the prompt. Leave out or change what it rewrites there, or give prompt and completion as texts"
        )

    def _end_of(self, response: list[int]) -> int | None:
        """Return where the turn that a template has written ends: behind the first end after the last token of the answer."""
        ends = self.ends(chats=True).ids
        written = len(response)
        # The answer's own text may have an end in the middle (a quoted template); only what stands behind its last word counts.
        while written and self._is_behind(response[written - 1], ends):
            written -= 1
        first_end = next((i for i in range(written, len(response)) if response[i] in ends), None)
        return None if first_end is None else first_end + 1

    def _is_behind(self, token: int, ends: tuple[int, ...]) -> bool:
        return token in ends or token in self._codec.special_ids or not self._codec.decode([token]).strip()

    def _behind_answers(self) -> list[int]:
        """Return the special tokens that the template writes behind an answer."""
        try:
            text = self._codec.render(Chat(messages=[_said("user", PROBE), _said(ASSISTANT, PROBE)]), ready=False)
        except OptionError:  # the template wants another conversation, or is none
            return []
        before, probe, behind = text.rpartition(PROBE)
        return [token for token in self._codec.plain(behind) if token in self._codec.special_ids] if probe and before else []

    def _opening(self, *, calls: bool) -> int | None:
        """Return what the turn behind an answer begins with, where that ends a response and the template has no other end of one.

        GLM's answers end with the next role, ``<|user|>`` or behind calls of tools ``<|observation|>``, which its
        ``generation_config.json`` lists.
        """
        if calls not in self._openings:
            answer, result = _calling(PROBE) if calls else (_said(ASSISTANT, PROBE), _said("user", "a"))
            try:
                before, both = (
                    self._codec.render(Chat(messages=[_said("user", "a"), *more]), ready=False)
                    for more in ([answer], [answer, result])
                )
            except OptionError:  # the template wants another conversation
                before, both = PROBE, ""
            same = before.rstrip()
            behind = self._codec.plain(both[len(same) :].lstrip()) if both.startswith(same) else []
            self._openings[calls] = next((token for token in behind[:1] if token in self.ends(chats=True).ids), None)
        return self._openings[calls]

    # -- what a template leaves out

    def _render(self, chat: Chat, *, ready: bool, learned: bool = False) -> str:
        if not self._codec.template:
            raise OptionError(f"{self._codec.whose} has no chat template; give texts instead of messages")
        self._check_read(chat, learned=learned)
        try:
            return self._codec.render(chat, ready)
        except OptionError:
            as_texts = [_with_json(message) for message in chat["messages"]]
            if as_texts == chat["messages"]:
                raise
            return self._codec.render(_with(chat, as_texts), ready)  # of templates that put the arguments of a call into a text

    def _check_read(self, chat: Chat, *, learned: bool) -> None:
        template, subject = self._codec.template_of(chat), f"the chat template of {self._codec.whose}"
        for i, message in enumerate(chat["messages"]):
            # What is learned must be read whole; of earlier messages only calls of tools change what the answer should be.
            last = learned and i == len(chat["messages"]) - 1
            unread = [name for name in (FIELDS if last else FIELDS[:1]) if message.get(name) and not _names(template, name)]
            if unread:
                another = "Write it into the message's content, or use a model whose template reads it"
                if _names(self._codec.template, unread[0]):  # it has several
                    another = f"Another one of its templates does, which is taken where there are {TOOLS}: give that column"
                raise OptionError(f"{subject} does not read {unread[0]}, which message {i} has: it would be left out. {another}")
            if not self._writes_role(message["role"], chat):
                raise OptionError(
                    f"{subject} leaves out messages of {shown(message['role'])}, as message {i} is. Put its text into a message of "
                    "another role, or use a model whose template has it"
                )
        if chat.get("tools") and not _names(template, "tools"):
            raise OptionError(f"{subject} does not read tools, which are given: they would be left out. Describe them in a message")

    def _writes_role(self, role: str, chat: Chat) -> bool:
        """Return whether a chat's template writes a message of this role, tried once; where it refuses one, it says so itself."""
        key = (role, self._codec.template_of(chat))
        if key not in self._writes:
            self._writes[key] = self._probed(role, chat)
        return self._writes[key]

    def _probed(self, role: str, chat: Chat) -> bool:
        probe, user = _said(role, PROBE), _said("user", "a")
        calling, answer = _calling("a", PROBE)
        tries: dict[str, list[list[Message]]] = {
            "user": [[probe]], ASSISTANT: [[user, probe, user]],
            "tool": [[user, calling, answer], [user, _said(ASSISTANT, "a"), answer]],
        }  # fmt: skip
        for messages in tries.get(role, [[probe, user]]):
            try:
                return PROBE in self._codec.render(_with(chat, messages), ready=True)
            except OptionError:
                continue
        # No conversation with this role was taken: the template refuses it, and says so itself when it is asked for a real one.
        return True

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _calling(content: str, result: str = "a") -> tuple[Message, Message]:
    """Return an answer that calls a tool, and the tool's result."""
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer: Message = {"role": "tool", "content": result, "tool_call_id": "123456789", "name": "f"}
    return {**_said(ASSISTANT, content), "tool_calls": [call]}, answer


def as_chat(chat: Chat | Sequence[Message]) -> Chat:
    """Return a conversation given as its messages alone, or as it is."""
    return chat if isinstance(chat, dict) else Chat(messages=list(chat))


def common_beginning(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))


def shared_beginning(first: Any, other: Any) -> Any:
    """Return the common beginning of two texts or two lists of token ids; of texts whole words, where words are written apart."""
    same = common_beginning(first, other)
    if not isinstance(first, str) or same == min(len(first), len(other)):
        return first[:same]
    at = same
    # Half a word is no prompt: the cut goes back to where the word begins.
    while at and _is_of_a_word(first[at - 1]) and (_is_of_a_word(first[at]) or _is_of_a_word(other[at])):
        at -= 1
    return first[: at or same]


def _is_of_a_word(character: str) -> bool:
    """Whether a letter, a digit or a mark belongs to the one next to it; those of East Asia stand for words of their own."""
    return character < "\u2e80" and unicodedata.category(character)[0] in "LMN"


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with(chat: Chat, messages: list[Message]) -> Chat:
    changed = chat.copy()
    changed["messages"] = messages
    return changed


def _with_json(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON texts."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments"), ensure_ascii=False)}}
        for call in message["tool_calls"]
        if "function" in call
    ]
    return {**message, "tool_calls": calls or message["tool_calls"]}


def _names(template: str, name: str) -> bool:
    """Return whether a template has a name in it."""
    return re.search(rf"\b{name}\b", template) is not None


def _spaces(text: str) -> int:
    """Return how many characters of white space a text ends with."""
    return len(text) - len(text.rstrip())
