"""The files of a tokenizer in a model's folder, and the tokenizer that ``tokenizers`` alone makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.untrusted import file_names, has_file, read_file, read_json, shown_text

TOKENIZER = "tokenizer.json"
"""All of a fast tokenizer."""

TOKENIZER_CONFIG = "tokenizer_config.json"

TOKENIZER_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model", "tokenizer.model.v3", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""The files that transformers reads of a folder to make its tokenizer."""

ADDED_TOKENS = "added_tokens.json"

NAMED_TEMPLATES = "additional_chat_templates"
"""A folder of further chat templates, ``NAME.jinja``, of which transformers takes ``tool_use`` where there are tools."""

MOST_TEMPLATES = 100
"""Most templates in that folder."""

SPECIAL_TOKENS, TEMPLATES = "special_tokens_map.json", ("chat_template.jinja", "chat_template.json")
"""The file in which texts of special tokens may stand, and files of chat templates besides tokenizer_config.json."""

COMPANIONS = (*TOKENIZER_FILES, "generation_config.json")
"""Files next to the weights that a written folder takes over unchanged from the one that its weights come from."""


def tokenizers_own(folder: str | Path) -> Any:
    """Return the ``tokenizers.Tokenizer`` of ``tokenizer.json``, which neither cuts nor pads a text.

    Raises:
        ModelNotFoundError: it is missing or damaged.
        ImportError: the package is not installed.
    """
    from tokenizers import Tokenizer

    content = read_file(folder, TOKENIZER)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except BaseException as error:  # it is Rust's: its panics are no Exception
        raise unreadable(folder, TOKENIZER, error) from None
    return tokenizer


def named_templates(folder: str | Path) -> dict[str, bytes]:
    """Return the further chat templates of a folder by the names of their files; none where it has no folder of them.

    Raises:
        ModelNotFoundError: one of them cannot be read, or is no file; or there are too many.
    """
    inside = Path(folder) / NAMED_TEMPLATES
    if not inside.is_dir() or inside.is_symlink():
        return {}
    names = [name for name in file_names(inside) if name.endswith(".jinja")]
    if len(names) > MOST_TEMPLATES:
        raise ModelNotFoundError(f"{inside} has {len(names):,} chat templates; at most {MOST_TEMPLATES} are read. Take some out.")
    return {name: read_file(inside, name) for name in names}


def named_tokens(folder: str | Path) -> set[str]:
    """Return the texts of all tokens that the files next to ``tokenizer.json`` name: special ones, and added ones.

    Raises:
        ModelNotFoundError: one of the files is damaged.
    """
    files = {name: read_json(folder, name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS) if has_file(folder, name)}
    named: list[Any] = list(files.pop(ADDED_TOKENS, {}))
    for entries in files.values():
        for key, value in entries.items():
            listed = value.values() if isinstance(value, dict) and "content" not in value else value
            if key.endswith("_token"):
                named.append(value)
            elif key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
                named += list(listed or [])
    texts = (token.get("content") if isinstance(token, dict) else token for token in named)
    return {text for text in texts if isinstance(text, str) and text}


def unreadable(folder: str | Path, name: str, error: BaseException) -> BaseException:
    """Return the error to raise where a library could not read a tokenizer: an interrupt itself, else one with a sentence."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    reason = shown_text(str(error)) or type(error).__name__
    return ModelNotFoundError(f"{folder}/{name} is damaged, or no tokenizer: {reason}. Take another copy.")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has a tokenizer, damaged or not."""
    return any(has_file(folder, name) for name in TOKENIZER_FILES if not name.startswith("chat_template"))
