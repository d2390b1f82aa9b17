"""Where a configuration comes from: a YAML file, a dict, the words of a command line, or an object; and whose it is.

Nothing in it is run: YAML is read by ``yaml.safe_load``, words are cut as a shell cuts them, and what a shell or a resolver would
work out is refused, with what to write in its place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.text import nearest
from hfsdk.core.untrusted import read_named
from hfsdk.planner.configs import openrlhf, trl, verl, zero_and_fsdp
from hfsdk.planner.configs.command_words import arguments_of, commands_of, job_words, program_of
from hfsdk.planner.configs.settings import OfAShell, flatten
from hfsdk.planner.configs.unread_keys import is_of_release
from hfsdk.planner.configs.whose_config import SYSTEMS, is_read, refuse_others, system_of

MOST_BYTES = 2_000_000
"""Of the largest file that is read."""
MOST_PARENTS = 16
"""Files that a configuration of NeMo-RL may inherit from."""
FILES_OF_TRL = {
    "deepspeed": "deepspeed.",
    "deepspeed_config_file": "deepspeed.",
    "fsdp_config": "fsdp_config.",
    "accelerate_config": "",
}
"""Keys of TRL, transformers and accelerate that may name a file -> how its keys begin."""

CONFIGS_OF_TRL = {"GRPOConfig", "PPOConfig"}

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
    """Keys as they were given, in names of other releases or of a launcher -> as they are read."""
    apart: Mapping[str, str]
    """Keys that are no part of it -> what they are."""
    runs: str = ""
    """What a command line runs."""
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of a script -> the defaults that it has for them, which were taken."""


@dataclasses.dataclass(frozen=True)
class _Command:
    """What a command line says."""

    keys: dict[str, Any]
    runs: str = ""
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)


def open_config(config: Any, overrides: Iterable[str], system: str | None) -> Given:
    """Return a configuration's keys and whose it is.

    Raises:
        OptionError: it is no configuration, cannot be read, or of no system that is known.
    """
    name, command = _keys(config)
    more, dropped = _overrides(list(overrides))
    keys, runs = _without({**command.keys, **more}, dropped), command.runs
    found = system_named(system) if system else "TRL" if name in CONFIGS_OF_TRL else system_of(name, keys, runs)
    renamed: dict[str, str] = {}
    apart: dict[str, str] = {}
    if found == "OpenRLHF":
        keys, renamed = openrlhf.named_now(keys)
    elif found == "verl":
        keys, renamed = verl.named_now(keys)
    elif found == "TRL":
        keys, apart = trl.saved_by_a_run(keys, known=lambda key: is_of_release("TRL", key))
        keys, renamed = zero_and_fsdp.named_now(_of_trl_files(keys))
    return Given(what=name, system=found, keys=keys, renamed=renamed, apart=apart, runs=runs, assumed=command.assumed)


def _without(keys: dict[str, Any], dropped: Iterable[str]) -> dict[str, Any]:
    for key in dropped:
        there = [one for one in keys if one == key or one.startswith(f"{key}.")]
        if not there:
            raise OptionError(f"'~{key}' leaves out a key that is not given; {nearest(key, list(keys))}")
        keys = {one: value for one, value in keys.items() if one not in there}
    return keys


def _of_trl_files(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with those of the JSON files that they name; a file that is not here stays named."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        last = key.rsplit(".", 1)[-1]
        path = Path(os.path.expanduser(value)) if isinstance(value, str) and value and last in FILES_OF_TRL else None
        if path is None or not os.path.isfile(path):
            found[key] = value
            continue
        inside = _json(path) if path.suffix == ".json" else _yaml(path, _read(path))
        found = {f"{FILES_OF_TRL[last]}{name}": one for name, one in flatten(inside, path.name).items()} | found
    return found


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is no JSON: {str(error)[:300]}. Correct it there.") from error
    if not isinstance(found, dict):
        raise OptionError(f"{path} holds {shown(found)}; a configuration is a mapping of keys to values. Name another file.")
    return found


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


def _keys(config: Any) -> tuple[str, _Command]:
    """Return the name of a configuration, and what it says."""
    if isinstance(config, Mapping):
        return "the dict", _Command(flatten(_logged(config), "the dict"))
    if isinstance(config, Path):
        return config.name, _file(config)
    if isinstance(config, str):
        return _text(config)
    if isinstance(config, Sequence) and all(isinstance(word, str) for word in config):
        return "the arguments", _command(list(config), {})
    kinds = {base.__name__ for base in type(config).__mro__}
    if dataclasses.is_dataclass(config) and not isinstance(config, type) and (of_trl := kinds & CONFIGS_OF_TRL):
        return of_trl.pop(), _Command(_object(config))
    raise OptionError(f"hf.explain takes {WRITE}; got {shown(config)}")


def _logged(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what Weights & Biases saved: its ``config.yaml`` holds ``{key: {"desc": ..., "value": ...}}``."""
    kept = {key: value for key, value in config.items() if key not in ("wandb_version", "_wandb")}
    if kept and all(isinstance(one, Mapping) and "value" in one and set(one) <= {"value", "desc"} for one in kept.values()):
        return {key: one["value"] for key, one in kept.items()}
    return config


def _command(words: Sequence[str], defaults: Mapping[str, str]) -> _Command:
    """Return the keys of a command line over those of the files that it names, and what it runs."""
    words = job_words(words)
    found, files, dropped = arguments_of(words)
    below: dict[str, Any] = {}
    for name in files:
        if isinstance(name, OfAShell):
            raise OptionError(f"the command line names the file {shown(str(name))}, which a shell would work out; write its path")
        if not os.path.isfile(os.path.expanduser(name)):
            refuse_others("the command line", program_of(words))  # rather than for the file
        below |= _file(Path(name).expanduser()).keys
    taken = {
        name: f"{value or 'nothing'}, the script's own default: the environment of a run may give another"
        for name, value in defaults.items() if "/" not in value
    }  # fmt: skip
    return _Command(_without({**below, **found}, dropped), program_of(words), taken)


def _object(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration object whose values are not their defaults, and how many processes it was made for.

    Made, a GRPOConfig has both generation_batch_size and steps_per_generation.
    """
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if hasattr(config, field.name)}
    kept = {field.name: field.default for field in dataclasses.fields(config)}
    keys = {name: value for name, value in given.items() if value != kept[name]}
    keys |= {name: value for name, value in trl.with_processes(given).items() if name not in given}
    return flatten(keys, type(config).__name__)


def _text(text: str) -> tuple[str, _Command]:
    if "\n" not in text and len(text) < 4096 and (os.path.isfile(os.path.expanduser(text)) or _is_path(text)):
        path = Path(text).expanduser()
        return path.name, _file(path)
    all_commands, defaults = commands_of(text)
    commands = [one for one in all_commands if any("=" in word or word.startswith("--") for word in one)]
    jobs = [one for one in commands if program_of(one)]
    if jobs:  # what stands alone before it are variables of the shell
        commands = [one for one in commands if not all(re.match(r"[A-Za-z_]\w*=", word) for word in one)]
    trains = [one for one in jobs if is_read(program_of(one))]
    if len(trains) == 1:  # the others prepare data, or convert a model
        jobs, commands = trains, [one for one in commands if one in trains or not program_of(one)]
    if len(jobs) > 1:
        for one in jobs:
            refuse_others("the command line", program_of(one))
        told = " and ".join(shown(" ".join(one)[:60]) for one in jobs[:3])
        raise OptionError(f"the command line has {len(jobs)} commands that may be the job: {told}. Give one of them.")
    return "the command line", _command([word for one in commands for word in one], defaults)


def _is_path(text: str) -> bool:
    return re.search(r"\.(ya?ml|json|sh|txt)$", text) is not None and " " not in text.strip()


def _file(path: Path) -> _Command:
    """Return what a file says: YAML (JSON is YAML), or a script.

    Raises:
        OptionError: it is missing, too large, or no configuration.
    """
    text = _read(path)
    if path.suffix in (".sh", ".txt"):
        return _text(text if "\n" in text else text + "\n")[1]
    return _Command(flatten(_logged(_inherited(path, text, [])), path.name))


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


def _overrides(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that are given anew, and those that are left out."""
    if isinstance(words, str) or not all(isinstance(word, str) and ("=" in word or word.startswith(("-", "~"))) for word in words):
        told = "overrides are texts such as 'data.train_batch_size=1024', or '~data.seed', which leaves a key out"
        raise OptionError(f"{told}; got {shown(words)}")
    found, _, dropped = arguments_of(words)
    return found, dropped
