"""Folders of Hugging Face files by the name of a model: named models, local folders, hub ids."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfsdk.assets import smollm2
from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.untrusted import absolute, file_names, shown_text

TINY_FOLDER = Path(__file__).parent / "tiny"


def tiny_folder() -> Path:
    """Return the folder of ``tiny``, which ships inside the package."""
    return TINY_FOLDER


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model that needs no hub."""

    place: Callable[[], Path]
    """Returns the place of its folder, there or not."""
    prepare: Callable[[], Path]
    """Makes the folder when it is missing, and returns it."""


MODELS = {
    "tiny": NamedModel(place=tiny_folder, prepare=tiny_folder),
    smollm2.NAME: NamedModel(place=smollm2.smollm2_place, prepare=smollm2.prepare_smollm2),
}
"""Models that need no hub, by name."""


def model_folder(name_or_path: str | Path) -> Path:
    """Return a local folder with ``config.json``, weights and tokenizer.

    Args:
        name_or_path: ``"tiny"``, ``"smollm2-135m-instruct"``, a local folder, or a hub id like
            ``"HuggingFaceTB/SmolLM2-360M"``. A named model is prepared, a hub id downloaded, when it is missing.

    Raises:
        ModelNotFoundError: nothing of that name, an incomplete folder, or no network; the message says what to do.
    """
    name = str(name_or_path)
    if name.lower() in MODELS:
        return checked(MODELS[name.lower()].prepare(), name=name)
    path = absolute(name)
    if path.exists():
        return checked(path, name=name)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return checked(_from_hub(name), name=name)
    raise ModelNotFoundError(f"asked for the model {name!r}; there is no such folder. {_what_exists()}")


def checked(folder: Path, name: str) -> Path:
    """Return ``folder`` if it has a config and weights.

    Raises:
        ModelNotFoundError: it is no folder, or one of the two is missing.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"asked for the model {name!r}; {folder} is not a folder. {_what_exists()}")
    names = file_names(folder)
    if "adapter_config.json" in names and "config.json" not in names:
        raise ModelNotFoundError(
            f"asked for the model {name!r}; {folder} has adapters of a model, and not its weights. Declare the model "
            f"with them: session.actor(model, lora={name!r})"
        )
    if "config.json" not in names:
        raise ModelNotFoundError(
            f"asked for the model {name!r}; {folder} has no config.json ({_brief(names)}). "
            f"Give the folder that save_pretrained wrote. {_what_exists()}"
        )
    if not any(file.endswith(".safetensors") for file in names):
        raise ModelNotFoundError(
            f"asked for the model {name!r}; {folder} has a config.json and no *.safetensors "
            f"({_brief(names)}). Save the weights beside it: model.save_pretrained(folder)."
        )
    return folder


def _from_hub(name: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelNotFoundError(
            f"asked for the model {name!r}; it looks like a hub id, and huggingface_hub is not "
            f"installed here. Install it, or give a local folder. {_what_exists()}"
        )
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.errors")
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelNotFoundError(
            f"asked for the model {name!r}; it is no folder here, and the hub did not give it ({type(error).__name__}: "
            f"{reason}). Connect to the hub, or download it elsewhere and give its folder. {_what_exists()}"
        ) from error


def _what_exists() -> str:
    return f"Models that need no hub: {', '.join(MODELS)}; else a local folder or a hub id like owner/name."


def _brief(names: list[str]) -> str:
    if not names:
        return "it is empty"
    listed = ", ".join(shown_text(name, 60) for name in names[:6])
    return f"it has {listed}" + (f" and {len(names) - 6} more" if len(names) > 6 else "")
