"""Loading from a model's folder with transformers: from a copy of the files that were checked, and without the folder's own code.

transformers opens files by their names, follows links, waits at a named pipe, and would run a folder's code where one says yes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import HfsdkError, ModelNotFoundError, UnsupportedModelError
from hfsdk.core.private_places import keep_compiled
from hfsdk.core.spec import ModelSpec, only_read
from hfsdk.core.tokenizer_files import (
    NAMED_TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    has_tokenizer,
    named_templates,
    tokenizers_own,
    unreadable,
)  # fmt: skip
from hfsdk.core.untrusted import has_file, private_copy, read_json, shown_reason

CONFIG = "config.json"

LENGTHS, MOST_NUMBER = ("model_max_length", "max_length", "max_len"), 1_000_000
"""Numbers of a tokenizer's configuration that are any length, 10**30 where none is meant; and the largest of the others."""


def load_tokenizer(folder: str | Path) -> Any:
    """Return transformers' tokenizer of a model folder; no code that lies in the folder is run, and nobody is asked to.

    Raises:
        UnsupportedModelError: the tokenizer is code of the folder's own.
        ModelNotFoundError: the folder has no tokenizer, or one that cannot be read.
        ImportError: transformers is not installed.
    """
    keep_compiled()
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        raise no_tokenizer(folder)
    named = [name for name in (TOKENIZER_CONFIG, CONFIG) if has_file(folder, name) and "auto_map" in read_json(folder, name)]
    bounded = partial(_with_bounded_numbers, folder)
    with private_copy(folder, (CONFIG, *TOKENIZER_FILES), change={CONFIG: _of_the_tokenizer, TOKENIZER_CONFIG: bounded}) as copy:
        for name, content in named_templates(folder).items():
            Path(copy, NAMED_TEMPLATES).mkdir(exist_ok=True)
            Path(copy, NAMED_TEMPLATES, name).write_bytes(content)
        try:
            tokenizer = AutoTokenizer.from_pretrained(copy, trust_remote_code=False, local_files_only=True)
        except HfsdkError:
            raise
        except BaseException as error:  # transformers does not look at what it reads, and Rust's panics are no Exception
            if named and isinstance(error, ValueError):
                raise UnsupportedModelError(
                    f"the tokenizer of {folder} is code of the folder's own (auto_map in {' and '.join(named)}), and hfsdk runs no "
                    "code of a model folder. Use a folder whose tokenizer is a tokenizer.json; save_pretrained of a fast tokenizer "
                    "writes one."
                ) from error
            _check_each(folder)
            raise unreadable(folder, "tokenizer*", error) from None
    tokenizer.name_or_path = str(folder)
    if has_file(folder, TOKENIZER) and getattr(tokenizer, "backend_tokenizer", None) is not None:
        tokenizer._tokenizer = _core_of_the_file(folder, tokenizer.backend_tokenizer)
    return tokenizer


def _core_of_the_file(folder: str | Path, made: Any) -> Any:
    """Return the core that ``tokenizer.json`` is, with the tokens that transformers puts around texts and adds to special ones.

    transformers 5 builds the core of some classes again out of the vocabulary, as their name has it: of a byte-level file that
    says ``LlamaTokenizer`` (DeepSeek-R1-Distill-Llama) sentencepiece's, which loses the spaces. The model has learned the file's.

    Raises:
        ModelNotFoundError: the files have a special token twice, under two ids.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    core = tokenizers_own(folder)
    config = read_json(folder, TOKENIZER_CONFIG) if has_file(folder, TOKENIZER_CONFIG) else {}
    if isinstance(config.get("add_prefix_space"), bool) and type(core.pre_tokenizer) is type(made.pre_tokenizer) is ByteLevel:
        core.pre_tokenizer = made.pre_tokenizer  # GPT-2's class takes it from there, in every version
    core.post_processor, core.encode_special_tokens = made.post_processor, made.encode_special_tokens
    there = core.get_added_tokens_decoder()
    for token_id, token in sorted(made.get_added_tokens_decoder().items()):
        if token_id not in there or (token.special and not there[token_id].special):
            (core.add_special_tokens if token.special else core.add_tokens)([token])
        if core.token_to_id(token.content) != token_id:
            raise ModelNotFoundError(
                f"{folder}/{TOKENIZER} has {shown(token.content)} as token {core.token_to_id(token.content)}, and the files beside "
                f"it as {token_id}. Take another copy."
            )
    return core


def _of_the_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a model's configuration that are about its tokenizer."""
    return {key: config[key] for key in ("model_type", "tokenizer_class", "auto_map") if key in config}


def _with_bounded_numbers(folder: str | Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's configuration, of whose numbers none asks for much memory: T5's makes ``extra_ids`` tokens.

    Raises:
        ModelNotFoundError: one does.
    """
    for key, value in config.items():
        if type(value) in (int, float) and key not in LENGTHS and not abs(value) <= MOST_NUMBER:
            raise ModelNotFoundError(
                f"{folder}/{TOKENIZER_CONFIG} has {shown(key)}={shown(value)}; at most {MOST_NUMBER:,} is taken. Mend it."
            )
    return config


def _check_each(folder: str | Path) -> None:
    """Read the files of a tokenizer one by one, to say which of them is damaged.

    Raises:
        ModelNotFoundError: one is.
    """
    for name in TOKENIZER_FILES:
        if name.endswith(".json") and has_file(folder, name):
            tokenizers_own(folder) if name == TOKENIZER else read_json(folder, name)


def load_config(folder: str | Path) -> Any:
    """Return transformers' configuration of a model folder.

    Raises:
        UnsupportedModelError: transformers does not take it.
        ModelNotFoundError: it cannot be read.
        ImportError: transformers is not installed.
    """
    keep_compiled()
    from transformers import AutoConfig

    ModelSpec.from_folder(folder)  # tells what is wrong with the file

    def checked(config: dict[str, Any]) -> dict[str, Any]:
        ModelSpec.from_hf_config(config)
        return only_read(config)

    with private_copy(folder, [CONFIG], change={CONFIG: checked}) as copy:
        try:
            return AutoConfig.from_pretrained(copy, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever is in the file, transformers does not look at it first
            raise not_taken(folder, "transformers", error) from error


def not_taken(folder: str | Path, library: str, error: Exception) -> UnsupportedModelError:
    """Return the error to raise where a library does not take a model's configuration."""
    return UnsupportedModelError(
        f"{library} does not take {folder}/{CONFIG}: {shown_reason(error)}. Mend it, or use another model."
    )


def no_tokenizer(folder: str | Path) -> ModelNotFoundError:
    """Return the error to raise where a folder has none."""
    return ModelNotFoundError(
        f"{folder} has no tokenizer (tokenizer.json); texts need one. Save it beside the weights with "
        "tokenizer.save_pretrained(folder), or give prompts as token ids."
    )
