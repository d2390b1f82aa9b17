"""Texts, templates, conversations and ends of turns: which tokens a row becomes, or why it is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import hfsdk as hf
from tests.strangers.frame import Bench, Case, Refused

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}T{{ tools | length }}{% endif %}{% for m in messages %}<{{ m.role[0] }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}.{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
THINKS = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if loop.last and m.role == 'assistant' %}#{% endif %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
REWRITES = (
    "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
NEXT_ROLE = (
    "{% for m in messages %}{{ {'user': '<bos>', 'tool': '<pad>'}.get(m.role, '<a>') }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""As GLM's: no token ends an answer, and the next turn's first one is among the ends."""
FORGETS = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content if loop.last else m.content.split('</think>')[-1] }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""As Qwen3's: thoughts of earlier turns are left out."""
PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
PAD, BOS, EOS = 256, 257, 258


def said(role, content, **more):
    return {"role": role, "content": content, **more}


USER, HELLO, NO = said("user", "Hi"), said("assistant", "Hello"), said("assistant", "No")
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def with_bos(tokenizer: dict[str, Any]) -> None:
    """Have ``<bos>`` put before a whole text, as Llama's, Mistral's and Gemma's tokenizers do."""
    tokenizer["post_processor"] |= {
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }


def with_both(tokenizer: dict[str, Any]) -> None:
    """Put ``<eos>`` behind a whole text too, as ``add_eos_token`` does."""
    with_bos(tokenizer)
    tokenizer["post_processor"]["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    tokenizer["post_processor"]["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [EOS], "tokens": ["<eos>"]}


def prompts(it: Bench, *rows, folder="tiny", **options):
    """Return the token ids of prompts."""
    batch = it.session_of(folder).prompts(list(rows), batch_size=len(rows), shuffle=False, **options)[0]
    return [row.tolist() for row in batch["prompt"]]


def examples(it: Bench, data, *, folder="tiny", pairs=False, **options):
    """Return (prompt, response) of demonstrations or of pairs, in token ids."""
    session = it.session_of(folder)
    rows = len(next(iter(data.values()))) if isinstance(data, dict) else len(data)
    batch = (session.pairs if pairs else session.demonstrations)(data, batch_size=rows, shuffle=False, **options)[0]
    return [(p.tolist(), r.tolist()) for p, r in zip(batch["prompt"], batch["response"], strict=True)]


def learned(it: Bench, data, *, template=CHATML, pairs=False, **model):
    """Return (prompt, response) as texts, with a template of this module's."""
    folder = it.model(template=template, **model)
    found = examples(it, data, folder=folder, pairs=pairs)
    return [tuple("".join(chr(t) if t < 256 else f"<{t}>" for t in side) for side in row) for row in found]


def ids(text):
    return list(text.encode())


def byte_level(it: Bench, **names):
    """Return a folder with a byte-level tokenizer.json, and changes of what its configuration says of it."""
    return it.model("smollm2", names=names)


def of_the_file(it: Bench):
    """Return what ``tokenizers`` makes of `SPACED`, by the file alone."""
    from tokenizers import Tokenizer

    return [Tokenizer.from_file(str(it.folder / "model1" / "tokenizer.json")).encode(SPACED, add_special_tokens=False).ids]


def of_transformers(it: Bench):
    """Return what transformers makes of `SPACED`."""
    from transformers import AutoTokenizer

    return [AutoTokenizer.from_pretrained(it.folder / "model1").encode(SPACED)]


def named_templates(it: Bench, how: str):
    """Return a folder with a chat template for chats, and one for tools."""
    if how == "a list":
        both = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
        return it.model(template="", names={"chat_template": both})
    folder = it.model(template=PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    return folder


SPACED = "Hello  world, it's 3 plus 3?\n x<zz> y"
LONG = {"prompt": ["You are a helpful assistant. What is 3 plus 3?"], "completion": [" The answer is 6."]}


def refused(*named):
    return Refused(hf.OptionError, *named)


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def through_arrow(messages, tools):
    """Return columns of one row as a table gives them back: each struct has the fields of all."""
    import pyarrow

    (row,) = pyarrow.Table.from_pylist([{"messages": messages, "tools": tools}]).to_pylist()
    return {name: [value] for name, value in row.items()}


STRING, MAYBE = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
SHOWS_TOOLS = "{% for t in tools or [] %}{{ t.function.parameters.properties | tojson }}{% endfor %}" + TOOLS

TEXTS = [
    Case(
        "a text as it is", "kept from the first release",
        lambda it: prompts(it, "abc"), [[97, 98, 99]], "the bytes of the text, in ASCII",
    ),
    Case(
        "a prompt that is no text", "kin of trl#4923",
        lambda it: prompts(it, "a", None), refused("prompt 1 of the data", "NoneType"), "it has no tokens",
    ),
    Case(
        "bos before a prompt", "trl#1073",
        lambda it: prompts(it, "ab", folder=it.model(tokenizer=with_bos)), [[BOS, 97, 98]], "transformers' encode of the text",
    ),
    Case(
        "bos is in the text already", "OpenRLHF#393",
        lambda it: prompts(it, "<bos>ab", folder=it.model(tokenizer=with_bos)), [[BOS, 97, 98]], "one beginning is one <bos>",
    ),
    Case(
        "eos is put behind texts: not behind a prompt", "kin of trl#1073",
        lambda it: prompts(it, "ab", folder=it.model(tokenizer=with_both)), [[BOS, 97, 98]], "a prompt goes on",
    ),
    Case(
        "bos in a demonstration", "trl#1073",
        lambda it: examples(it, {"prompt": ["ab"], "completion": ["cd"]}, folder=it.model(tokenizer=with_bos)),
        [([BOS, 97, 98], [99, 100, EOS])], "transformers' encode of 'abcd', and eos",
    ),
    Case(
        "eos that the tokenizer puts behind is there once", "kin of trl#1073",
        lambda it: examples(it, {"prompt": ["ab"], "completion": ["cd"]}, folder=it.model(tokenizer=with_both)),
        [([BOS, 97, 98], [99, 100, EOS])], "transformers' encode of 'abcd'",
    ),
    Case(
        "bos in pairs", "OpenRLHF#393",
        lambda it: examples(it, {"prompt": ["ab"], "chosen": ["c"], "rejected": ["d"]}, folder=it.model(tokenizer=with_bos),
        pairs=True),
        [([BOS, 97, 98], [99, EOS]), ([BOS, 97, 98], [100, EOS])], "transformers' encode of 'abc' and 'abd', and eos",
    ),
    Case(
        "bos in a text that is learned whole", "LiveCodeBench#146",
        lambda it: examples(it, ["ab"], folder=it.model(tokenizer=with_bos)),
        [([BOS], [97, 98, EOS])], "the first token is given: of such a text <bos>",
    ),
    Case(
        "a template that writes bos", "sambanova generative_data_prep PR#60",
        lambda it: prompts(it, [USER], folder=it.model(tokenizer=with_bos, template="{{ bos_token }}{{ messages[0].content }}:")),
        [[BOS, *ids("Hi:")]], "apply_chat_template tokenizes without special tokens",
    ),
    Case(
        "a completion that ends with eos", "kin of trl#1073",
        lambda it: examples(it, {"prompt": ["ab"], "completion": ["cd<eos>"]}), [([97, 98], [99, 100, EOS])], "it has its end",
    ),
    Case(
        "a prompt of token ids and a completion of text", "kept from the first release",
        lambda it: examples(it, {"prompt": [[5, 6]], "completion": ["cd"]}, folder=it.model(tokenizer=with_bos)),
        [([5, 6], [99, 100, EOS])], "a completion begins no text",
    ),
    Case(
        "token ids that have their end", "kept from the first release",
        lambda it: examples(it, {"prompt": [[5, 6]], "completion": [[7, EOS]]}), [([5, 6], [7, EOS])], "they are taken as they are",
    ),
    Case(
        "an empty completion", "kin of trl#4923",
        lambda it: examples(it, {"prompt": ["ab"], "completion": [""]}), [([97, 98], [EOS])], "to end at once is an answer",
    ),
    Case(
        "an empty prompt", "kin of trl#4923",
        lambda it: examples(it, {"prompt": [""], "completion": ["a"]}), refused("row 0 of the data", "empty prompt"), "no token",
    ),
    Case(
        "a completion that max_tokens cuts away", "trl#6668", lambda it: examples(it, LONG, max_tokens=46),
        refused("row 0 of the data", "46 + 18 tokens", "46 fit", "max_tokens of more than 46"), "no label would be left: loss 0",
    ),
    Case(
        "a completion of which max_tokens leaves one token", "trl#6668", lambda it: examples(it, LONG, max_tokens=47)[0][1],
        ids(" "), "46 bytes of prompt, one of the answer, no end",
    ),
    Case(
        "a lone surrogate", "kin of trl#4923",
        lambda it: examples(it, {"prompt": ["a", "a"], "completion": ["b", "\ud800"]}),
        refused("row 1 of the data", "lone surrogates"), "it has no UTF-8 form",
    ),
]  # fmt: skip

TOKENIZERS = [
    *(
        Case(
            f"a byte-level tokenizer.json that says {name}", "transformers#45920 (DeepSeek-R1-Distill-Llama)",
            lambda it, name=name: prompts(it, SPACED, folder=byte_level(it, tokenizer_class=name)), of_the_file,
            "tokenizers on the same file, with which the model was trained",
        )
        for name in ("LlamaTokenizerFast", "LlamaTokenizer")
    ),
    Case(
        "GPT-2's class with a space before a text", "kin of transformers#45920",
        lambda it: prompts(it, SPACED, folder=byte_level(it, tokenizer_class="GPT2Tokenizer", add_prefix_space=True)),
        of_transformers, "transformers on the same folder",
    ),
    Case(
        "a special token that tokenizer_config.json alone has", "kin of transformers#45920",
        lambda it: prompts(it, SPACED, folder=it.model(names={"extra_special_tokens": ["<zz>"]})), of_transformers,
        "transformers on the same folder: it gives it the next id",
    ),
]  # fmt: skip

ENDS = [
    Case(
        "an answer that the next role ends", "trl#5988 (GLM-4.5)",
        lambda it: learned(it, {"messages": [[USER, HELLO]]}, template=NEXT_ROLE, generation={"eos_token_id": [EOS, BOS, PAD]}),
        [(f"<{BOS}>Hi<a>", f"Hello<{BOS}>")], "TRL's glm4moe_training.jinja ends the last answer with <|user|>",
    ),
    Case(
        "a call that the tool's role ends", "trl#5988 (GLM-4.5)",
        lambda it: learned(it, {"messages": [[USER, {"role": "assistant", "tool_calls": [CALL]}]]}, template=NEXT_ROLE,
                           generation={"eos_token_id": [EOS, BOS, PAD]}),
        [(f"<{BOS}>Hi<a>", f"(add)<{PAD}>")], "TRL's glm4moe_training.jinja ends a call with <|observation|>",
    ),
    Case(
        "a next role that ends nothing", "kin of trl#5988",
        lambda it: learned(it, {"messages": [[USER, HELLO]]}, template=NEXT_ROLE), [(f"<{BOS}>Hi<a>", f"Hello<{EOS}>")],
        "no file says that it ends a response: the tokenizer's eos does",
    ),
    Case(
        "the first of several ends does not end a turn", "trl#7039",
        lambda it: examples(
            it, {"messages": [[USER, HELLO]]}, folder=it.model("smollm2", generation={"eos_token_id": [0, 2]}),
        )[0][1][-1], 2, "the template writes <|im_end|>, 2, behind an answer",
    ),
    Case(
        "a text ends with the tokenizer's eos, not with the first of a list", "trl#7039",
        lambda it: examples(it, ["a"], folder=it.model("smollm2", generation={"eos_token_id": [0, 2]}))[0][1][-1], 2,
        "eos_token of tokenizer_config.json is <|im_end|>, 2",
    ),
    Case(
        "the template ends turns with another token than the files", "kin of trl#7039",
        lambda it: examples(
            it, {"messages": [[USER, HELLO]]}, folder=it.model(generation={"eos_token_id": 7}, template="{% for m in messages %}"
            "{{ m.content }}<bos>{% endfor %}"),
        )[0][1], [*ids("Hello"), BOS], "the template's own end of an answer",
        notices=("the tokenizer's eos_token is '<eos>' (258)", "the chat template ends an answer with '<bos>' (257)"),
    ),
    Case(
        "generation_config and config disagree", "kin of trl#7039",
        lambda it: examples(it, ["ab"], folder=it.model(generation={"eos_token_id": 258}, config={"eos_token_id": 9})),
        [([97], [98, EOS])], "transformers generates until generation_config's",
        notices=("config.json ends a text with",),
    ),
    Case(
        "a template without an end", "kin of Qwen3#1522",
        lambda it: learned(it, {"messages": [[USER, HELLO]]}, template="{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n"
                           "{% endfor %}"
                           "{% if add_generation_prompt %}a:{% endif %}"),
        [("u:Hi\na:", f"Hello<{EOS}>")], "the next turn's line is not the answer's; the tokenizer's eos ends it",
    ),
]  # fmt: skip

TEMPLATES = [
    *(
        Case(
            f"templates by name in {how}, with tools", "transformers#31429",
            lambda it, how=how: prompts(it, {"prompt": [USER], "tools": [tool("f", a=STRING)]}, folder=named_templates(it, how)),
            [ids("T1<u>Hi.<a>")], "apply_chat_template takes tool_use where there are tools",
        )
        for how in ("a list", "a folder")
    ),
    *(
        Case(
            f"templates by name in {how}, without tools", "transformers#31429",
            lambda it, how=how: prompts(it, [USER], folder=named_templates(it, how)), [ids("u:Hi\na:")],
            "apply_chat_template takes the default",
        )
        for how in ("a list", "a folder")
    ),
    Case(
        "a call that only the template for tools reads, without tools", "kin of transformers#31429",
        lambda it: examples(it, {"messages": [[USER, {"role": "assistant", "tool_calls": [CALL]}]]},
                            folder=named_templates(it, "a list")),
        refused("row 0 of the data", "does not read tool_calls", "give that column"), "the default would write None in its place",
    ),
    Case(
        "thoughts that the template leaves out of earlier turns", "NeMo-RL#2821",
        lambda it: learned(it, {"messages": [[said("user", "q"), said("assistant", "<think>x</think>one"), said("user", "r"),
                                              said("assistant", "<think>y</think>two")]]}, template=FORGETS),
        [("<u>q;<a>one;<u>r;<a>", f"<think>y</think>two;<{EOS}>")], "the template of both less that of the prompt: no answer twice",
    ),
    Case(
        "a template that writes around an answer", "NVIDIA Automodel#3024",
        lambda it: learned(it, {"messages": [[USER, HELLO]]}, template=THINKS), [("<u>Hi;<a>", f"#Hello;<{EOS}>")],
        "the template of both less the template of the prompt",
    ),
    Case(
        "chatml with what follows an end", "trl#6044",
        lambda it: learned(it, {"messages": [[USER, HELLO]]}, names={"eos_token": "<eos>"}),
        [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", f"Hello<|im_end|><{EOS}>")],
        "tiny has no such token: the words are text, and the line behind them is the next turn's",
    ),
    Case(
        "a template that writes earlier turns otherwise", "Qwen3#1522",
        lambda it: learned(it, {"messages": [[USER, HELLO, USER, NO]]}, template=REWRITES),
        refused("row 0 of the data", "message 2", "'user'", "otherwise once an answer follows"),
        "no response goes on with the prompt",
    ),
    Case(
        "a template that leaves out a role", "kin of trl#4923",
        lambda it: learned(it, {"messages": [[said("critic", "x"), USER, HELLO]]}, template="{% for m in messages %}"
                           "{% if m.role != 'critic' %}{{ m.content }}{% endif %}{% endfor %}"),
        refused("row 0 of the data", "leaves out messages of 'critic'", "message 0"), "its text would be lost",
    ),
    Case(
        "a template that does not read calls of tools", "trl#4923",
        lambda it: learned(it, {"messages": [[USER, said("assistant", None, tool_calls=[CALL])]]}),
        refused("row 0 of the data", "does not read tool_calls", "message 1"), "the call would be lost",
    ),
    Case(
        "a template that does not read thoughts", "Qwen3#1522",
        lambda it: learned(it, {"messages": [[USER, said("assistant", "Hello", reasoning_content="x")]]}),
        refused("row 0 of the data", "does not read reasoning_content", "message 1"), "the thoughts would be lost",
    ),
    Case(
        "a template that does not read tools", "kin of trl#4923",
        lambda it: learned(it, {"messages": [[USER, HELLO]], "tools": [[{"type": "function", "function": {"name": "f"}}]]}),
        refused("row 0 of the data", "does not read tools"), "they would be lost",
    ),
    Case(
        "no template", "kin of trl#4923",
        lambda it: prompts(it, [USER], folder=it.model(template="")),
        refused("no chat template", "give texts"), "nothing to write it in",
    ),
    Case(
        "a template that raises", "kin of trl#4923",
        lambda it: prompts(it, [USER], folder=it.model(template="{{ raise_exception('only twice') }}")),
        refused("prompt 0 of the data", "only twice"), "what the template says",
    ),
    Case(
        "options of the template by row", "TRL's dataset formats",
        lambda it: learned(it, {"messages": [[USER, HELLO]], "chat_template_kwargs": [{"mood": "!"}]},
                           template="{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"),
        [("Hi!", f"Hello!<{EOS}>")], "TRL passes chat_template_kwargs of the row",
    ),
]  # fmt: skip

CONVERSATIONS = [
    Case(
        "a system message in a column of its own", "LlamaFactory#7592",
        lambda it: learned(it, {"messages": [[USER, HELLO]], "system": ["Be brief."]}, template=TOOLS),
        refused("row 0 of the data", "the column system", "Be brief."), "LLaMA-Factory's data have it there",
    ),
    Case(
        "the same beside texts", "kin of LlamaFactory#7592",
        lambda it: learned(it, {"prompt": ["Hi"], "completion": ["Hello"], "system": ["Be brief."]}),
        refused("row 0 of the data", "the column system"), "it would be left out",
    ),
    Case(
        "the same beside prompts", "kin of LlamaFactory#7592",
        lambda it: prompts(it, {"prompt": [USER], "system": "Be brief."}, folder=it.model(template=TOOLS)),
        refused("prompt 0 of the data", "the column system"), "it would be left out",
    ),
    Case(
        "a system message in the column and in the conversation", "kin of LlamaFactory#7592",
        lambda it: learned(it, {"messages": [[said("system", "Be brief."), USER, HELLO]], "system": ["Be brief."]}, template=TOOLS),
        [("<s>Be brief..<u>Hi.<a>", f"Hello.<{EOS}>")], "nothing is left out",
    ),
    Case(
        "no content beside calls of tools", "trl#4923",
        lambda it: learned(it, {"messages": [[USER, said("assistant", None, tool_calls=[CALL]), said("tool", "2"), HELLO]]},
                           template=TOOLS),
        [('<u>Hi.<a>(add {"a": 1}).<t>2.<a>', f"Hello.<{EOS}>")], "the template on the same messages, arguments as a dict",
    ),
    Case(
        "a call is the answer", "trl#4923",
        lambda it: learned(it, {"messages": [[USER, {"role": "assistant", "tool_calls": [CALL]}]]}, template=TOOLS),
        [("<u>Hi.<a>", f'(add {{"a": 1}}).<{EOS}>')], "the template on the same messages",
    ),
    Case(
        "thoughts that the template reads", "trl#6044",
        lambda it: learned(it, {"messages": [[USER, said("assistant", "Hello", reasoning_content="x")]]}, template=TOOLS),
        [("<u>Hi.<a>", f"Hello[x].<{EOS}>")], "the template on the same messages",
    ),
    Case(
        "tools by row, as JSON", "TRL's dataset formats",
        lambda it: learned(it, {"messages": [[USER, HELLO]], "tools": ['[{"type": "function"}]']}, template=TOOLS),
        [("T1<u>Hi.<a>", f"Hello.<{EOS}>")], "TRL parses tools given as JSON",
    ),
    Case(
        "tools and calls that a table has aligned", "ms-swift#10110, ms-swift#10125, axolotl#2909",
        lambda it: learned(
            it, through_arrow(
                [USER, {"role": "assistant", "tool_calls": [call("f", {"a": 1}), call("g", {"b": "x"})]}],
                [tool("f", a=STRING), tool("g", b=STRING)],
            ), template=SHOWS_TOOLS,
        ),
        [('{"a": {"type": "string"}}{"b": {"type": "string"}}T2<u>Hi.<a>', f'(f {{"a": 1}})(g {{"b": "x"}}).<{EOS}>')],
        "the template on what went into the table: Arrow gave each function the other's fields, as nulls",
    ),
    Case(
        "nulls that a JSON text says", "kin of ms-swift#10110",
        lambda it: learned(
            it, {"messages": [[USER, {"role": "assistant", "tool_calls": [call("f", '{"a": null}')]}]],
                 "tools": [json.dumps([tool("f", a={"enum": [None, "x"], "default": None})])]}, template=SHOWS_TOOLS,
        ),
        [('{"a": {"enum": [null, "x"], "default": null}}T1<u>Hi.<a>', f'(f {{"a": null}}).<{EOS}>')],
        "no table has come between: they are meant",
    ),
    Case(
        "null as the default of what may be null", "ms-swift#10110 (as pydantic writes it)",
        lambda it: learned(it, {"messages": [[USER, HELLO]], "tools": [[tool("f", a=MAYBE)]]}, template=SHOWS_TOOLS),
        [(f"{json.dumps({'a': MAYBE})}T1<u>Hi.<a>", f"Hello.<{EOS}>")], "the schema says it",
    ),
    Case(
        "a call without arguments in a table", "kin of axolotl#2909",
        lambda it: learned(it, {"messages": [[USER, {"role": "assistant", "tool_calls": [call("f", None)]}]]}, template=TOOLS),
        [("<u>Hi.<a>", f"(f {{}}).<{EOS}>")], "no arguments are an empty object, which JSON has for them",
    ),
    Case(
        "tools by row in prompts", "TRL's dataset formats",
        lambda it: prompts(it, {"prompt": [USER], "tools": [{"type": "function"}]}, folder=it.model(template=TOOLS)),
        [ids("T1<u>Hi.<a>")], "GRPO passes tools of the row to the template",
    ),
    Case(
        "contents in parts", "castform benchmax#34",
        lambda it: learned(it, {"messages": [[said("user", [{"type": "text", "text": text} for text in "Hi"]), HELLO]]},
                           template=TOOLS),
        [("<u>Hi.<a>", f"Hello.<{EOS}>")], "parts of text are one text",
    ),
    Case(
        "a picture among the parts", "castform benchmax#34",
        lambda it: learned(it, {"messages": [[said("user", [{"type": "image_url", "image_url": "x"}]), HELLO]]}),
        refused("part 0 of message 0", "image_url"), "models of texts alone",
    ),
    Case(
        "ShareGPT's names", "oumi#2392",
        lambda it: learned(it, {"conversations": [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]]},
                           template=TOOLS),
        [("<u>Hi.<a>", f"Hello.<{EOS}>")], "human is the user, gpt the assistant",
    ),
    Case(
        "ShareGPT's names in prompts", "oumi#2392",
        lambda it: prompts(it, [{"from": "human", "value": "Hi"}], folder=it.model(template=TOOLS)), [ids("<u>Hi.<a>")],
        "human is the user",
    ),
    Case(
        "entries that are None in a table", "trl#4923",
        lambda it: learned(it, {"messages": [[{**USER, "tool_calls": None, "name": None}, {**HELLO, "tool_calls": None}]]},
                           template=TOOLS),
        [("<u>Hi.<a>", f"Hello.<{EOS}>")], "Arrow gives every row of a column the same fields",
    ),
    Case(
        "conversations in arrays", "kept from the first release",
        lambda it: learned(it, {"messages": [np.array([USER, HELLO], dtype=object)]}, template=TOOLS),
        [("<u>Hi.<a>", f"Hello.<{EOS}>")], "parquet as pandas reads it",
    ),
    Case(
        "a message without a role", "castform benchmax#34",
        lambda it: prompts(it, [{"content": "Hi"}]), refused("message 0 of prompt 0 of the data", "without a role"), "no template",
    ),
    Case(
        "a message without a text", "castform benchmax#34",
        lambda it: learned(it, {"messages": [[said("user", None), HELLO]]}),
        refused("message 0", "without a text"), "nothing to say",
    ),
    Case(
        "a content that is a dict", "castform benchmax#34",
        lambda it: prompts(it, [said("user", {"a": 1})]), refused("message 0 of prompt 0", "json.dumps"), "no text",
    ),
    Case(
        "the old function_call", "oumi#2392",
        lambda it: learned(it, {"messages": [[USER, said("assistant", None, function_call={"name": "f"})]]}),
        refused("message 1", "function_call", "tool_calls"), "no template reads it",
    ),
    Case(
        "arguments that are no JSON", "trl#4923",
        lambda it: learned(it, {"messages": [[USER, said("assistant", None, tool_calls=[
            {"function": {"name": "f", "arguments": "{"}}])]]}, template=TOOLS),
        refused("message 1", "no JSON"), "the template would write them otherwise",
    ),
    Case(
        "a conversation that ends with the user", "trl#4923",
        lambda it: learned(it, {"messages": [[USER, HELLO, USER]]}),
        refused("row 0 of the data", "the last the assistant's"), "no answer",
    ),
    Case(
        "an answer of weight 0", "OpenAI's format of chats to learn from",
        lambda it: learned(it, {"messages": [[USER, {**HELLO, "weight": 0}]]}),
        refused("row 0", "weight 0"), "it is not to be learned",
    ),
    Case(
        "a completion of several messages beside a prompt", "TRL's dataset formats",
        lambda it: learned(it, {"prompt": [[USER]], "completion": [[HELLO, USER, NO]]}),
        refused("the completion of row 0", "3 messages", "into the prompt"), "one answer is learned",
    ),
    Case(
        "a prompt in messages and a completion as a text", "kept from the first release",
        lambda it: learned(it, {"prompt": [[USER]], "completion": ["Hello"]}, template=TOOLS), [("<u>Hi.<a>", f"Hello.<{EOS}>")],
        "the text is the assistant's message",
    ),
    Case(
        "a prompt as a text and a completion in messages", "TRL's dataset formats",
        lambda it: learned(it, {"prompt": ["Hi"], "completion": [[HELLO]]}),
        refused("the completion of row 0", "both as messages"), "whether the prompt is a turn is not said",
    ),
]  # fmt: skip


def pair(chosen, rejected, **more):
    return {"chosen": [chosen], "rejected": [rejected], **{name: [value] for name, value in more.items()}}


PAIRS = [
    Case(
        "Alpaca's columns beside answers with the same first words", "LlamaFactory#5455",
        lambda it: learned(it, pair("The answer is D.", "The answer is C.", instruction="Choose.", input="C or D?"), pairs=True),
        refused("pair 0", "no prompt", "instruction and input"), "the question is there, and is no common beginning",
    ),
    Case(
        "a conversation beside two answers as texts", "kin of LlamaFactory#5455",
        lambda it: learned(it, pair("The sky", "The sea", conversations=[{"from": "human", "value": "Blue?"}]), pairs=True),
        refused("pair 0", "conversations"), "LLaMA-Factory's preferences in ShareGPT's form",
    ),
    Case(
        "an empty column beside answers that begin with their prompt", "kin of LlamaFactory#5455",
        lambda it: learned(it, pair("Q: a", "Q: b", input=""), pairs=True), [("Q: ", f"a<{EOS}>"), ("Q: ", f"b<{EOS}>")],
        "there is nothing in it",
    ),
    Case(
        "one answer is the beginning of the other", "trl#6960",
        lambda it: learned(it, pair("Q: a", "Q: a b"), pairs=True), [("Q: a", f"<{EOS}>"), ("Q: a", f" b<{EOS}>")],
        "the prompt is all of the shorter one",
    ),
    Case(
        "pairs without spaces", "kin of trl#6960",
        lambda it: [p for p, _ in examples(it, pair("天空？蓝", "天空？红"), pairs=True)], [ids("天空？")] * 2,
        "what both begin with",
    ),
    Case(
        "pairs in lines", "kin of trl#6960",
        lambda it: learned(it, pair("Q:\nsky?\nA:\nblue", "Q:\nsky?\nA:\nred"), pairs=True),
        [("Q:\nsky?\nA:\n", f"blue<{EOS}>"), ("Q:\nsky?\nA:\n", f"red<{EOS}>")], "what both begin with, in whole words",
    ),
    Case(
        "words with the same first letter", "kept from the first release",
        lambda it: learned(it, pair("a good", "a gone"), pairs=True),
        [("a ", f"good<{EOS}>"), ("a ", f"gone<{EOS}>")], "whole words",
    ),
    Case(
        "pairs with nothing in common", "kept from the first release",
        lambda it: learned(it, pair("good", "bad"), pairs=True), refused("pair 0", "no prompt"), "no prompt",
    ),
    Case(
        "a text beside whole conversations", "kin of trl#6960 (UltraFeedback)",
        lambda it: learned(it, pair([USER, HELLO], [USER, NO], prompt="Hi"), template=TOOLS, pairs=True),
        [("<u>Hi.<a>", f"Hello.<{EOS}>"), ("<u>Hi.<a>", f"No.<{EOS}>")], "TRL takes the prompt out of the conversations",
    ),
    Case(
        "whole conversations beside their prompt", "kin of trl#6960",
        lambda it: learned(it, pair([USER, HELLO], [USER, NO], prompt=[USER]), template=TOOLS, pairs=True),
        [("<u>Hi.<a>", f"Hello.<{EOS}>"), ("<u>Hi.<a>", f"No.<{EOS}>")], "they begin with it",
    ),
    Case(
        "the same answer twice", "kin of trl#6960",
        lambda it: learned(it, pair([USER, HELLO], [USER, HELLO]), template=TOOLS, pairs=True),
        [("<u>Hi.<a>", f"Hello.<{EOS}>")] * 2, "the last message is the answer",
    ),
    Case(
        "a response as one message", "kin of castform benchmax#34",
        lambda it: learned(it, pair(HELLO, NO, prompt=[USER]), template=TOOLS, pairs=True),
        [("<u>Hi.<a>", f"Hello.<{EOS}>"), ("<u>Hi.<a>", f"No.<{EOS}>")], "a message alone is a conversation of one",
    ),
    Case(
        "conversations with different prompts", "kin of trl#6960",
        lambda it: learned(it, pair([USER, HELLO], [said("user", "Ho"), NO]), template=TOOLS, pairs=True),
        refused("pair 0", "no prompt"), "they cannot be compared",
    ),
    Case(
        "a text and a conversation", "kin of trl#6960",
        lambda it: learned(it, pair([USER, HELLO], "Hi No"), template=TOOLS, pairs=True),
        refused("pair 0", "two kinds"), "not one form",
    ),
    Case(
        "a response that is the user's", "kin of trl#4923",
        lambda it: learned(it, pair([said("user", "x")], [NO], prompt=[USER]), template=TOOLS, pairs=True),
        refused("the chosen response of pair 0", "'user'", "'assistant'"), "answers are the assistant's",
    ),
]  # fmt: skip

CASES = [*TEXTS, *TOKENIZERS, *ENDS, *TEMPLATES, *CONVERSATIONS, *PAIRS]
