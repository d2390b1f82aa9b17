"""Loading from a model's folder with transformers, which would run a folder's own code where one says yes to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hfsdk.core.errors import UnsupportedModelError


def load_tokenizer(folder: str | Path, **options: Any) -> Any:
    """Return transformers' tokenizer of a model folder; no code that lies in the folder is run, and nobody is asked to.

    ``options`` are those of ``AutoTokenizer.from_pretrained``.

    Raises:
        UnsupportedModelError: the tokenizer is code of the folder's own.
        ImportError: transformers is not installed.
        OSError, ValueError: the folder has no tokenizer that transformers reads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
    except ValueError as error:
        named = [name for name in ("tokenizer_config.json", "config.json") if _names_code(Path(folder) / name)]
        if not named:
            raise
        raise UnsupportedModelError(
            f"the tokenizer of {folder} is code of the folder's own (auto_map in {' and '.join(named)}), and hfsdk runs no code "
            "of a model folder. Use a folder whose tokenizer is a tokenizer.json; save_pretrained of a fast tokenizer writes one."
        ) from error


def _names_code(path: Path) -> bool:
    return path.is_file() and "auto_map" in json.loads(path.read_text(encoding="utf-8"))
