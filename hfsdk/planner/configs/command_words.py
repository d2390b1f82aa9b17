"""The words of a command line: of the job, of what launches it, and of a shell around both.

A script is cut into commands; those that train nothing (``ray start``, ``export``, a server) are passed over. What only a run of a
shell would work out stays a text that is refused where it is looked at, with what to write in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hfsdk.planner.configs.openrlhf import OLD_NAMES, SWITCHES
from hfsdk.planner.configs.settings import OfAShell, flatten, parse_scalar
from hfsdk.planner.configs.shell_words import ENDS, is_path_from_a_variable, words_of_script

NO_JOBS = (
    "ray start", "ray stop", "ray status", "export", "set", "cd", "source", "echo", "pip", "conda", "mkdir", "sleep", "pkill",
    "kill", "unset", "module", "wait", "trl vllm-serve", "vllm serve", "swift rollout", "python -m sglang.launch_server", "tee",
    "nvidia-smi", "ulimit", "wandb", "huggingface-cli", "hf", "exit", "trap", ".", "apt", "git", "rm", "cp", "ls", "cat",
    "python -m sglang_router", "if", "elif", "for", "while", "case", "[", "[[", "fi", "done", "esac", "local", "return", "shift",
)  # fmt: skip
"""How commands begin that train nothing."""

BEFORE_A_JOB = ("nohup", "then", "do", "else", "exec", "time", "env")

LAUNCHER_SWITCHES = (
    "multi_gpu", "use_deepspeed", "use_fsdp", "standalone", "no_python", "module", "cpu", "debug", "use_megatron_lm", "tpu",
)  # fmt: skip
"""Flags of ``accelerate launch`` and ``torchrun`` that take no value."""

CONFIG_FLAGS = ("config", "config_file")


def commands_of(text: str) -> tuple[list[list[str]], dict[str, str]]:
    """Return the commands of a script or a line that may be a job, each as its words, and the variables' defaults that were taken.

    Raises:
        OptionError: a quotation does not end.
    """
    lines, defaults = words_of_script(text)
    found: list[list[str]] = []
    for line in lines:
        command: list[str] = []
        for word in [*line, ";"]:
            if word not in ENDS:
                command.append(word)
            elif command:
                found += [command] if _may_train(command) else []
                command = []
    return found, defaults


def _may_train(command: Sequence[str]) -> bool:
    words = [word for word in command if not re.match(r"[A-Z_][A-Z0-9_]*=", word)]
    while words[:1] and words[0] in BEFORE_A_JOB:
        words = words[1:]
    begins = re.sub(r"^python3\b", "python", " ".join(words))
    return not any(begins == one or begins.startswith(f"{one} ") for one in NO_JOBS)


def program_of(words: Sequence[str]) -> str:
    """Return what a command line runs: its first words, scripts and modules, without the values of flags."""
    words = [word for word in words if not re.match(r"[A-Z_][A-Z0-9_]*=", word)]
    first = next((number for number, word in enumerate(words) if word.startswith("-") or "=" in word), len(words))
    runs = [
        word for number, word in enumerate(words)
        if (word.endswith(".py") and "=" not in word) or number < first or words[number - 1] in ("-m", "--module")
    ]  # fmt: skip
    return " ".join(runs)


def job_words(words: Sequence[str]) -> list[str]:
    """Return the words of a job, without those of ``ray job submit``, which end with ``--``."""
    words = [word for word in words if word.strip()]
    if "--" in words and "ray" in words[: words.index("--")]:
        words = words[words.index("--") + 1 :]
    return [word for word in words if word != "--"]


def arguments_of(words: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the keys of ``key=value``, ``--key value`` and ``--key=value``, files that are named, keys to leave out (``~key``).

    A value that a shell would work out is refused where it is looked at.
    """
    found: dict[str, Any] = {}
    files: list[str] = []
    dropped: list[str] = []
    words, position = job_words(words), 0
    while position < len(words):
        word = words[position]
        position += 1
        flag = word.startswith("--")
        if word.startswith("~") and "=" not in word:
            dropped.append(word[1:])
            continue
        key, equals, value = word.lstrip("-+~").partition("=") if flag else word.lstrip("+~").partition("=")
        if not flag and (not equals or not re.fullmatch(r"[\w.@/-]+", key)):
            continue  # the program, its module
        parsed: Any = parse_scalar(value)
        if flag and not equals:
            taken, position = _taken(words, position, key)
            value = " ".join(taken)
            parsed = [parse_scalar(one) for one in taken] if len(taken) > 1 else parse_scalar(value) if taken else True
        name = key if "." in key else key.replace("-", "_")
        if is_path_from_a_variable(value):
            parsed = re.sub(r"^\$\{(\w+)\}", r"$\1", value)
        elif _of_a_shell(value):
            parsed = OfAShell(value)
        if name in CONFIG_FLAGS and flag and isinstance(parsed, str):
            files.append(parsed)
        else:
            found |= _structured(name, value) or {name: parsed}
    return found, files, dropped


def _taken(words: Sequence[str], position: int, key: str) -> tuple[list[str], int]:
    """Return the values of a flag, and where the next word is."""
    taken: list[str] = []
    plain = key.replace("-", "_")
    if plain in SWITCHES or OLD_NAMES.get(plain) in SWITCHES or plain in LAUNCHER_SWITCHES:
        most = 1 if position < len(words) and words[position].lower() in ("true", "false") else 0
    else:
        most = 1 if plain in CONFIG_FLAGS else len(words)
    while (
        len(taken) < most and position < len(words) and not words[position].startswith("--")
        and not (taken and _is_program(words[position]))
    ):  # fmt: skip
        taken.append(words[position])
        position += 1
    return taken, position


def _structured(name: str, value: str) -> dict[str, Any]:
    """Return the keys of a value that is a mapping as JSON writes it."""
    if not value.startswith("{"):
        return {}
    try:
        made = json.loads(value)
    except ValueError:
        return {}
    return flatten({name: made}, name) if isinstance(made, dict) and made else {}


def _of_a_shell(value: str) -> bool:
    """Whether a shell would work out a value."""
    outside = value.replace("${oc.", "").replace("${mul:", "")
    variable = re.fullmatch(r"\$\{?[A-Za-z_]\w*(\[@\])?\}?", value) is not None
    return variable or ("$" in outside and not value.startswith("${"))


def _is_program(word: str) -> bool:
    """Whether a launcher's arguments end before a word: a script, or a module's ``-m``."""
    return word == "-m" or word.endswith(".py")
