"""Model folders as Hugging Face libraries read them: the files beside the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from hfsdk.errors import OptionError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What is copied unchanged from the folder a model came from."""


def fresh_folder(folder: str | Path) -> Path:
    """Make a folder for a model and return its absolute path.

    Raises:
        OptionError: there is a file of that name.
    """
    target = Path(folder).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise OptionError(f"{target} is a file; give the folder to write the model to")
    target.mkdir(parents=True, exist_ok=True)
    return target


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copy the tokenizer's files where the target does not have them."""
    for name in TOKENIZER_FILES:
        file = Path(source) / name
        if source and file.is_file() and not (target / name).exists():
            shutil.copyfile(file, target / name)
