"""Where a configuration comes from: a YAML file, a dict, the words of a command line, or an object; and whose it is.

Nothing in it is run: YAML is read by ``yaml.safe_load``, words are cut as a shell cuts them, and what a shell or a resolver would
work out is refused, with what to write in its place.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.text import nearest
from hfsdk.core.untrusted import read_named
from hfsdk.planner.configs.openrlhf import OLD_NAMES, SWITCHES
from hfsdk.planner.configs.settings import flatten, parse_scalar

SYSTEMS = ("verl", "TRL", "OpenRLHF", "NeMo-RL", "hfsdk")
MOST_BYTES = 2_000_000
"""Of the largest file that is read."""
MOST_PARENTS = 16
"""Files that a configuration of NeMo-RL may inherit from."""

SIGNS: dict[str, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref.", "data.train_batch_size", "model_engine"),
    "NeMo-RL": ("grpo.num_", "ppo.num_", "policy.train_", "policy.generation.", "policy.dtensor_cfg.", "policy.model_name"),
    "OpenRLHF": (
        "rollout.batch_size", "rollout.n_samples_per_prompt", "train.micro_batch_size", "actor.model_name_or_path",
        "vllm.num_engines",
        "rollout_batch_size", "micro_train_batch_size", "n_samples_per_prompt", "colocate_all_models", "actor_num_gpus_per_node",
    ),
    "TRL": (
        "per_device_train_batch_size", "num_generations", "generation_batch_size", "max_completion_length", "num_ppo_epochs",
        "num_sample_generations", "steps_per_generation", "vllm_mode",
    ),
}  # fmt: skip
"""System -> how keys begin that only it has."""

MODULES = {"verl": "verl", "NeMo-RL": "nemo_rl", "OpenRLHF": "openrlhf", "TRL": "trl"}
"""System -> the package that a command line runs a module of."""

WRITE = (
    "a path of a YAML file, a dict, the words of a command line ('data.train_batch_size=1024 ...', '--train.batch_size 128 ...'), "
    "TRL's GRPOConfig, or an algorithm with session="
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A configuration as it was given."""

    what: str
    """Its name in messages."""
    system: str
    keys: dict[str, Any]
    """Dotted key -> value."""
    renamed: Mapping[str, str]
    """Keys of older releases -> what they are called now."""


def open_config(config: Any, overrides: Iterable[str], system: str | None) -> Given:
    """Return a configuration's keys and whose it is.

    Raises:
        OptionError: it is no configuration, cannot be read, or of no system that is known.
    """
    name, keys = _keys(config)
    keys = {**keys, **_overrides(list(overrides))}
    found = system_named(system) if system else _system(name, keys, config)
    renamed = {}
    if found == "OpenRLHF":
        renamed = {old: new for old, new in OLD_NAMES.items() if old in keys}
        keys = {OLD_NAMES.get(key, key): value for key, value in keys.items()}
    return Given(what=name, system=found, keys=keys, renamed=renamed)


def system_named(system: str) -> str:
    """Return a system by its name, in whatever case.

    Raises:
        OptionError: there is none.
    """
    plain = {re.sub(r"[^a-z]", "", one.lower()): one for one in SYSTEMS}
    asked = re.sub(r"[^a-z]", "", system.lower())
    if asked not in plain:
        raise OptionError(f"system={shown(system)} is none that is read; {nearest(system, SYSTEMS)}")
    return plain[asked]


def _system(name: str, keys: Mapping[str, Any], config: Any) -> str:
    counts = {system: sum(key.startswith(signs) for key in keys) for system, signs in SIGNS.items()}
    best = max(counts, key=lambda system: counts[system])
    if counts[best]:
        return best
    line = config if isinstance(config, str) else " ".join(config) if isinstance(config, Sequence) else ""
    for system, module in MODULES.items():
        if re.search(rf"(^|\s|/){module}[./]", line):
            return system
    has = ", ".join(list(keys)[:5]) or "no keys"
    raise OptionError(f"{name} is of no system that is read ({', '.join(SYSTEMS)}): it has {has}. Name it: system='verl'.")


def _keys(config: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(config, Mapping):
        return "the dict", flatten(config, "the dict")
    if isinstance(config, Path):
        return config.name, _file(config)
    if isinstance(config, str):
        return _text(config)
    if isinstance(config, Sequence) and all(isinstance(word, str) for word in config):
        return "the arguments", _arguments(list(config))
    kinds = {base.__name__ for base in type(config).__mro__}
    if dataclasses.is_dataclass(config) and not isinstance(config, type) and kinds & {"GRPOConfig", "PPOConfig"}:
        return type(config).__name__, _object(config)
    raise OptionError(f"hf.explain takes {WRITE}; got {shown(config)}")


def _object(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration object whose values are not their defaults, and how many processes it was made for.

    Made, a GRPOConfig has both generation_batch_size and steps_per_generation.
    """
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if hasattr(config, field.name)}
    kept = {field.name: field.default for field in dataclasses.fields(config)}
    keys = {name: value for name, value in given.items() if value != kept[name]}
    batch, steps, each = (
        given.get(key) for key in ("generation_batch_size", "steps_per_generation", "per_device_train_batch_size")
    )
    if batch and steps and each:
        keys["num_processes"] = max(1, batch // (steps * each))
    if not any(key.startswith(SIGNS["TRL"]) for key in keys):
        keys["per_device_train_batch_size"] = each
    return flatten(keys, type(config).__name__)


def _text(text: str) -> tuple[str, dict[str, Any]]:
    if "\n" not in text and len(text) < 4096 and (os.path.isfile(os.path.expanduser(text)) or _is_path(text)):
        path = Path(text).expanduser()
        return path.name, _file(path)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise OptionError(
            f"the command line cannot be cut into words: {error}; close the quotation in {shown(text[-200:])}"
        ) from error
    return "the command line", _arguments(words)


def _is_path(text: str) -> bool:
    return re.search(r"\.(ya?ml|json|sh|txt)$", text) is not None and " " not in text.strip()


def _file(path: Path) -> dict[str, Any]:
    """Return the keys of a file: YAML (JSON is YAML), or a command line.

    Raises:
        OptionError: it is missing, too large, or no configuration.
    """
    text = _read(path)
    if path.suffix in (".sh", ".txt"):
        return _text(text)[1] if "\n" in text else _text(text + "\n")[1]
    return flatten(_inherited(path, text, []), path.name)


def _read(path: Path) -> str:
    try:
        return read_named(path, MOST_BYTES, error=OptionError).decode("utf-8")
    except (OptionError, UnicodeDecodeError) as error:
        there = sorted(one.name for one in path.parent.glob("*.y*ml"))[:5] if path.parent.is_dir() else []
        beside = f"beside it are {', '.join(there)}" if there else "there is no YAML file beside it"
        raise OptionError(f"{path} cannot be read: {str(error).rstrip('.')}; {beside}. Check the path.") from error


def _inherited(path: Path, text: str, read: list[Path]) -> Mapping[str, Any]:
    """Return a file's mapping over that of the files which its ``defaults`` name, as NeMo-RL inherits; ``read`` is what was."""
    found = _yaml(path, text)
    parents = found.get("defaults")
    if isinstance(parents, list) and all(isinstance(one, str) and one.endswith((".yaml", ".yml")) for one in parents):
        names = parents
    elif isinstance(parents, str):
        names = [parents]
    else:  # hydra's groups: their values are the release's defaults
        return {key: value for key, value in found.items() if key not in ("defaults", "hydra")}
    whole: dict[str, Any] = {}
    for name in names:
        read.append(path.parent / name)
        if len(read) > MOST_PARENTS:
            raise OptionError(f"{path} inherits from more than {MOST_PARENTS} files; does one name itself?")
        if os.path.isabs(name):
            raise OptionError(f"{path} inherits from {shown(name)}; files are named from where it lies, e.g. '../base.yaml'")
        whole = _over(whole, _inherited(path.parent / name, _read(path.parent / name), read))
    return _over(whole, {key: value for key, value in found.items() if key != "defaults"})


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("YAML files need pyyaml, which is not installed; pip install pyyaml", name="yaml") from error
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise OptionError(f"{path} is no YAML: {' '.join(str(error).split())[:300]}. Correct it there.") from error
    if not isinstance(found, dict):
        raise OptionError(f"{path} holds {shown(found)}; a configuration is a mapping of keys to values. Name another file.")
    flatten(found, path.name)  # counts what its aliases stand for, before anything goes through them
    return found


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    if isinstance(words, str) or not all(isinstance(word, str) and ("=" in word or word.startswith("-")) for word in words):
        raise OptionError(f"overrides are texts such as 'data.train_batch_size=1024'; got {shown(words)}")
    return _arguments(words)


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of ``key=value``, ``--key value`` and ``--key=value``; a file that the launcher names is read.

    Raises:
        OptionError: a shell would have to work out a value.
    """
    found: dict[str, Any] = {}
    words = [word for word in words if word.strip()]
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        flag = word.startswith("--")
        key, equals, value = word.lstrip("-+~").partition("=") if flag else word.lstrip("+~").partition("=")
        if not flag and (not equals or not re.fullmatch(r"[\w.@/-]+", key)):
            continue  # the program, its module
        if flag and not equals:
            taken: list[str] = []
            while position < len(words) and not words[position].startswith("--") and not (taken and _is_program(words[position])):
                taken.append(words[position])
                position += 1
                if key.replace("-", "_") in ("config", "config_file"):
                    break
            if _is_switch(key):
                taken = []
            value = " ".join(taken)
            parsed: Any = [parse_scalar(one) for one in taken] if len(taken) > 1 else parse_scalar(value) if taken else True
        else:
            parsed = parse_scalar(value)
        if "$" in value.replace("${oc.", "").replace("${mul:", "") and not value.startswith("${"):
            raise OptionError(f"{key} is {shown(value)}, which a shell would work out; write its value: {key}=...")
        if re.fullmatch(r"\$\{?[A-Za-z_]\w*(\[@\])?\}?", value):
            raise OptionError(f"{key} is {shown(value)}, a variable of a shell; write its value: {key}=...")
        if key in ("config", "config_file") and flag and isinstance(parsed, str):
            found.update(_file(Path(parsed).expanduser()))
        else:
            found[key if "." in key else key.replace("-", "_")] = parsed
    return found


def _is_program(word: str) -> bool:
    """Whether a launcher's arguments end before a word: a script, or a module's ``-m``."""
    return word == "-m" or word.endswith(".py")


def _is_switch(key: str) -> bool:
    return key in SWITCHES or OLD_NAMES.get(key) in SWITCHES
