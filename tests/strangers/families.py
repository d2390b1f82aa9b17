"""Chat templates that models were published with, each with the special tokens of its family, and tokenizers of four behaviours."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

from hfsdk.assets import model_folder
from tests.strangers.frame import MODELS

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"
SPECIAL = re.compile(r"<\|[^|<>]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")


class Family(NamedTuple):
    """What a model's tokenizer_config.json says beside its template."""

    bos: str | None
    eos: str
    end: str
    """Ends an answer, as its template writes it."""
    more: tuple[str, ...] = ()
    """More tokens that end one."""


FAMILIES = {
    "llama2": Family("<s>", "</s>", "</s>"),
    "llama3": Family("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    "llama3_1": Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "llama3_2": Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "mistral": Family("<s>", "</s>", "</s>"),
    "zephyr": Family("<s>", "</s>", "</s>"),
    "chatml": Family(None, "<|endoftext|>", "<|im_end|>"),
    "qwen2_5": Family(None, "<|im_end|>", "<|im_end|>"),
    "qwen3": Family(None, "<|im_end|>", "<|im_end|>"),
    "qwen3_instruct_2507": Family(None, "<|im_end|>", "<|im_end|>"),
    "gemma": Family("<bos>", "<eos>", "<end_of_turn>"),
    "gemma3": Family("<bos>", "<eos>", "<end_of_turn>"),
    "phi3": Family("<s>", "<|endoftext|>", "<|end|>"),
    "phi3_5": Family("<s>", "<|endoftext|>", "<|end|>"),
    "deepseek_r1_distill": Family("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseekv3": Family("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "glm4moe": Family(None, "<|endoftext|>", "<|endoftext|>", ("<|user|>", "<|observation|>")),
    "cohere": Family("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": Family("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "lfm2": Family("<|startoftext|>", "<|im_end|>", "<|im_end|>"),
    "gptoss": Family("<|startoftext|>", "<|return|>", "<|return|>", ("<|call|>",)),
    "nemotron_3_nano": Family("<s>", "<|im_end|>", "<|im_end|>"),
    "smolvlm": Family("<|im_start|>", "<end_of_utterance>", "<end_of_utterance>"),
}

BEHAVIOURS = ("bytes", "byte-level BPE", "sentencepiece", "sentencepiece without a first space")
"""Of tokenizers: tiny's, SmolLM2's, and Llama-2's with and without the space that it puts before a text."""


@cache
def _trained() -> str:
    """Return a sentencepiece-like vocabulary, made once out of the templates' own text."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=alphabet, show_progress=False)
    texts = [line for path in sorted(TEMPLATES.glob("*.jinja")) for line in path.read_text().splitlines() if line.isascii()]
    made.train_from_iterator([*texts, "Blue. The sky is blue, and the sum is two."], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "<unk>"]
    return json.dumps(content)


def _sentencepiece(first_space: bool) -> Tokenizer:
    made = Tokenizer.from_str(_trained())
    prepend = [normalizers.Prepend("▁")] if first_space else []
    made.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if first_space else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made


def _of_folder(model: str) -> Tokenizer:
    made = Tokenizer.from_file(str(model_folder(MODELS[model]) / "tokenizer.json"))
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: _of_folder("tiny"),
    "byte-level BPE": lambda: _of_folder("smollm2"),
    "sentencepiece": lambda: _sentencepiece(first_space=True),
    "sentencepiece without a first space": lambda: _sentencepiece(first_space=False),
}


def folder_of(into: Path, name: str, behaviour: str, *, template: str | None = None, adds_bos: bool = True) -> Path:
    """Make a folder with a family's template and special tokens around a tokenizer.

    Args:
        into: the new folder.
        name: of `FAMILIES`.
        behaviour: of `BEHAVIOURS`.
        template: of the files; by default the family's.
        adds_bos: whether the tokenizer puts the family's ``<bos>`` before a whole text.
    """
    family, text = FAMILIES[name], (TEMPLATES / f"{template or name}.jinja").read_text()
    made = MAKERS[behaviour]()
    special = dict.fromkeys([family.bos, family.eos, family.end, *SPECIAL.findall(text)])
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special if token])
    if family.bos and adds_bos:
        single = f"{family.bos}:0 $A:0"
        made.post_processor = processors.TemplateProcessing(single, f"{single} $B:1", [(family.bos, made.token_to_id(family.bos))])
    into.mkdir(parents=True)
    made.save(str(into / "tokenizer.json"))
    names: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "chat_template": text}
    if family.bos:
        names["bos_token"] = family.bos
    (into / "tokenizer_config.json").write_text(json.dumps(names))
    shutil.copy(model_folder("tiny") / "config.json", into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({key: value for key, value in config.items() if "token_id" not in key}))
    ends = [made.token_to_id(token) for token in (family.end, *family.more)]
    (into / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return into
