"""What is learned of a conversation is what its template writes behind the prompt: transformers is asked, for each family.

For every template, tokenizer and conversation, in token ids: the prompt is ``apply_chat_template`` of the messages before the
answer with the generation prompt; prompt and response together are that of all messages, up to the token that ends the answer,
behind which only white space or the end of the whole text stands. Where TRL has a template that marks what is learned, the
response is what transformers' mask of it has.
"""

from __future__ import annotations

from collections import Counter

import pytest

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.assets.pretrained import load_tokenizer
from hfsdk.core.conversations import read_chat
from hfsdk.core.errors import OptionError
from hfsdk.core.texts import Example
from tests.strangers.families import BEHAVIOURS, FAMILIES, TEMPLATES, folder_of


def said(role, content, **more):
    return {"role": role, "content": content, **more}


USER, BLUE = said("user", "What colour is the sky?"), said("assistant", "Blue.")
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
CALLS, RESULT = said("assistant", "", tool_calls=[CALL]), said("tool", "2", tool_call_id="abcdef123", name="add")
TOOL = {
    "type": "function",
    "function": {
        "name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}  # fmt: skip
CONVERSATIONS = {
    "one turn": ([USER, BLUE], {}),
    "system": ([said("system", "Be brief."), USER, BLUE], {}),
    "two turns": ([USER, BLUE, said("user", "And at night?"), said("assistant", "Black, with stars")], {}),
    "white space around": ([USER, said("assistant", "  Blue. \n")], {}),
    "lines": ([said("user", "A poem\n\nof two lines"), said("assistant", "\nRoses\n\nare red\n")], {}),
    "other scripts": ([said("user", "天空是什么颜色？"), said("assistant", "蓝色 🙂")], {}),
    "special words": ([USER, said("assistant", "[INST] user assistant <tool> {{x}}")], {}),
    "thoughts": ([USER, said("assistant", "Blue.", reasoning_content="It is day.")], {}),
    "thoughts in the text": ([USER, said("assistant", "<think>\nIt is day.\n</think>\n\nBlue.")], {}),
    "a call of a tool": ([said("user", "1+1?"), CALLS], {"tools": [TOOL]}),
    "a tool's answer": ([said("user", "1+1?"), CALLS, RESULT, said("assistant", "Two.")], {"tools": [TOOL]}),
    "tools that are not used": ([USER, BLUE], {"tools": [TOOL]}),
}


def rendered(tokenizer, messages, ready, tools=None):
    """Return transformers' token ids of a conversation; ``None`` where the template does not take it."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=ready, tools=tools, return_dict=False)
    except Exception:  # a template is a program
        return None


def compared(ours, theirs, messages, besides):
    """Return how an example came out: equal, or why there was nothing to compare."""
    asked = rendered(theirs, messages[:-1], ready=True, **besides)
    whole = rendered(theirs, messages, ready=False, **besides)
    chat = read_chat(messages[:-1], "it", besides.get("tools"))
    try:
        prompt, response = ours.encode_example(Example(prompt=chat, response=read_chat(messages[-1:], "it")["messages"][0]))
    except OptionError as error:
        refused = asked is None or whole is None
        named = any(word in str(error) for word in ("does not read", "leaves out", "otherwise once an answer"))
        if refused or named:
            return "refused by the template" if refused else "refused: it would be left out"
        raise AssertionError(str(error)) from error
    assert asked is not None, "the template does not take the prompt"
    assert whole is not None, "the template does not take the whole"
    ends = ours.turn_ends(chats=True)
    assert response[-1] in ends.ids, "an answer ends"
    learned = prompt + response
    if learned != whole[: len(learned)]:  # without an end of its own, or with a token across the boundary
        learned = learned if learned[:-1] != whole else whole
    if learned != whole[: len(learned)]:
        assert prompt == asked != whole[: len(asked)], "a prompt is what generation gets"
        assert ours.decode(whole).startswith(ours.decode(learned)), "the same text"
        return "equal in its text: a token of the whole reaches across the boundary"
    behind = whole[len(learned) :]
    assert not [token for token in behind if token not in ends.ids and ours.decode([token]).strip()], "nothing is left out"
    assert asked[: len(prompt)] == prompt
    return "equal" if prompt == asked else "equal, from where the template goes on"


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_response_is_the_whole_less_the_prompt(tmp_path, behaviour):
    counts, wrong = Counter(), {}
    for name in FAMILIES:
        folder = folder_of(tmp_path / name, name, behaviour)
        ours, theirs = FolderTokenizer(folder), load_tokenizer(folder)
        for what, (messages, besides) in CONVERSATIONS.items():
            try:
                counts[compared(ours, theirs, messages, besides)] += 1
            except AssertionError as error:
                wrong[f"{name}, {what}"] = str(error).splitlines()[0]
    assert not wrong, "\n".join(f"{row}: {why}" for row, why in wrong.items())
    print(behaviour, dict(counts))
    assert counts["equal"] >= 130


@pytest.mark.parametrize("name", sorted(path.stem.removesuffix("_training") for path in TEMPLATES.glob("*_training.jinja")))
def test_a_response_is_what_a_template_for_training_marks(tmp_path, name):
    """But for white space around it, ends, and what asks for an answer: each template marks other parts of these."""
    folder = folder_of(tmp_path / name, name, "bytes", template=f"{name}_training")
    ours, theirs, compared_rows = FolderTokenizer(folder), load_tokenizer(folder), 0
    ends = ours.turn_ends(chats=True).ids
    for what, (messages, besides) in CONVERSATIONS.items():
        try:
            chat = read_chat(messages[:-1], "it", besides.get("tools"))
            _, response = ours.encode_example(Example(prompt=chat, response=read_chat(messages[-1:], "it")["messages"][0]))
        except OptionError:
            continue
        given = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **besides)
        ids, mask = given["input_ids"], given["assistant_masks"]
        last = max(i for i, marked in enumerate(mask) if marked) + 1
        first = next((i for i in range(last - 1, -1, -1) if not mask[i]), -1) + 1
        marked, answer = (ours.decode([token for token in row if token not in ends]).strip() for row in (ids[first:last], response))
        assert marked.endswith(answer) or answer.endswith(marked), what
        assert answer, what
        compared_rows += 1
    assert compared_rows >= 4
