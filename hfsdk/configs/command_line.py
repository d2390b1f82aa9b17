"""The words of a shell script, with its variables worked out as far as the script itself gives them.

Nothing is run. A variable has a value where the script assigns it outside of ``if``, ``case``, loops and functions, without asking
another command; ``$((8 * N))`` is worked out; ``${N:-8}`` is its default, which is noted, since the environment of a run may give
another. Everything else that a shell would work out stays as it is written, and is refused where it is looked at.
"""

from __future__ import annotations

import ast
import itertools
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfsdk.configs.openrlhf import OLD_NAMES, SWITCHES
from hfsdk.configs.settings import OfAShell, flatten, parse_scalar
from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError

ENDS = ("&&", "||", ";;", ";", "|", "&")
OPENING = ("if", "case", "for", "while", "until", "select", "{")
CLOSING = ("fi", "esac", "done", "}")
BETWEEN = ("then", "do", "else", "elif", "!")
"""Words before a command of the same line."""
DECLARING = ("export", "declare", "local", "readonly", "typeset")
MOST_CHARACTERS = 20_000
"""Most characters of a variable's value: ``A=$A$A`` in a hundred lines is longer than any memory."""

MOST_EXPANSIONS, MOST_LINES = 2_000, 500
"""Most expansions of a script, and most lines of a quotation or array: a stranger's file with more would be cut for hours."""

_DOCUMENT = re.compile(r"""(?<!<)<<-?\s*(?P<quote>['"]?)(?P<end>\w+)(?P=quote)""")
_NAME = r"[A-Za-z_]\w*"
_WORD = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<comment>\#[^\n]*)"
    r"|(?P<redirection>(?:&>>?|\d*>>?&?|\d*<<?<?[&-]?)\s*[^\s;|&<>]+)"
    r"|(?P<end>&&|\|\||;;|;|\||&)"
    r"""|(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|\\.|[^\s;|&<>'"`\\])+)""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=", re.DOTALL)
_ARRAY = re.compile(rf"\s*(?:(?:{'|'.join(DECLARING)})\s+(?:-\w+\s+)*)?({_NAME})(\+?)=\(", re.DOTALL)
_ASKED_OF_A_COMMAND = re.compile(rf"""\s*(?:export\s+)?({_NAME})=["']?(?:\$\((?!\()|`)[^;]*$""")
_WHOLE_ARRAY = re.compile(rf'"?\$\{{({_NAME})\[[@*]\]\}}"?')
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def words_of_script(text: str) -> tuple[list[list[str]], dict[str, str]]:
    """Return the words of each logical line, with ``ENDS`` between its commands, and the defaults that were taken by variable.

    Raises:
        OptionError: a quotation does not end, or there are more expansions than a script has.
    """
    expansions = len(re.findall(r"\$[({]|`", text))
    if expansions > MOST_EXPANSIONS:
        raise OptionError(
            f"the command line has {expansions:,} expansions; at most {MOST_EXPANSIONS:,} are read. Give its job alone."
        )
    variables = _Variables()
    return [variables.words(line) for line in _lines(text)], variables.defaults


def is_path_from_a_variable(value: str) -> bool:
    """Return whether a value is a path of which a variable is the beginning alone, ``$DATA/models/Qwen3-8B``: its name is known."""
    return re.fullmatch(r"\$(\w+|\{\w+\})(/[\w.@-]+)+/?", value) is not None


def _lines(text: str) -> Iterator[str]:
    """Yield the logical lines: the lines that a backslash, an open quotation or an open array continues as one.

    A here-document that ``read`` gives to a variable comes as its assignment; others are left out.
    """
    logical_line = ""
    lines = iter(text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines())
    for line in lines:
        logical_line = f"{logical_line}\n{line}" if logical_line else line
        if _is_open(logical_line):
            if logical_line.count("\n") >= MOST_LINES:
                raise OptionError(
                    f"the command line has a quotation of more than {MOST_LINES} lines: {shown(logical_line[:200])}. Close it."
                )
            continue
        document = _DOCUMENT.search(logical_line)
        if document:
            body = "\n".join(_until(document["end"], lines))
            # ``read -r -d '' NAME <<EOF`` is how scripts write an assignment of several lines.
            name = re.match(rf"\s*(?:IFS=\S*\s+)?read\s.*?({_NAME})\s*$", logical_line[: document.start()])
            escaped = re.sub(r'(["\\])', r"\\\1", body)
            value = shlex.quote(body) if document["quote"] else f'"{escaped}"'
            yield f"{name[1]}={value}" if name else logical_line
        else:
            yield logical_line
        logical_line = ""
    if logical_line:
        yield logical_line


def _until(end: str, lines: Iterator[str]) -> Iterator[str]:
    return itertools.takewhile(lambda line: line.strip() != end, lines)


def _is_open(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    array = _ARRAY.match(line)
    return array is not None and _end_of_array(line, array.end()) is None


def _end_of_array(line: str, position: int) -> int | None:
    """Return where the parenthesis stands that closes an array whose first word may be at ``position``."""
    while position < len(line):
        match = _WORD.match(line, position)
        if match is None:
            return None
        position = match.end()
        if match["word"] and match[0].endswith(")") and match[0].count(")") > match[0].count("("):
            return position - 1
    return None


def _raw_words(line: str) -> list[str]:
    """Return the words of a line as they are written, quotations and all, without comments and redirections."""
    words: list[str] = []
    position = 0
    while position < len(line):
        match = _WORD.match(line, position)
        if match is None:  # a quotation that does not end
            return [*words, line[position:]]
        if match["end"] or match["word"]:
            words.append(match[0])
        position = match.end()
    return words


def _cut(raw: str) -> list[str]:
    try:
        return shlex.split(raw)
    except ValueError as error:
        problem = f"the command line cannot be cut into words: {error}; close the quotation in {shown(raw[-200:])}"
        raise OptionError(problem) from error


@dataclass
class _Variables:
    """The variables that a script has assigned so far."""

    values: dict[str, str | list[str] | None] = field(default_factory=dict)
    """``None``: something that only a run of the script knows."""
    defaults: dict[str, str] = field(default_factory=dict)
    depth: int = 0
    """Number of conditions, loops and functions around a line."""

    def words(self, line: str) -> list[str]:
        array = _ARRAY.match(line)
        if array:
            self._assign_array(array[1], line[array.end() : _end_of_array(line, array.end())], added=bool(array[2]))
            return []
        match = _ASKED_OF_A_COMMAND.match(line)
        if match:
            self.values[match[1]] = None
            return []
        expanded: list[str] = []
        command: list[str] = []
        may_skip = False
        for raw in [*_raw_words(line), ";"]:
            if raw in ENDS:
                expanded += [*self._command(command, may_skip), raw]
                # Behind ``||`` a command may not run; behind ``&&`` only where the one before it may fail. What it assigns is not
                # certain then.
                may_skip = raw == "||" or (raw == "&&" and (may_skip or not _always_succeeds(command)))
                command = []
            else:
                command.append(raw)
        return expanded

    def _command(self, command: Sequence[str], may_skip: bool) -> list[str]:
        """Return a command's words; note its assignments, where it does nothing else."""
        first = 0
        while first < len(command) and command[first] in (*OPENING, *CLOSING, *BETWEEN):
            self.depth += (command[first] in OPENING) - (command[first] in CLOSING)
            first += 1
        rest = command[first:]
        if rest and re.fullmatch(rf"{_NAME}\(\)\{{?|function", rest[0]):
            self.depth += "{" in "".join(rest)
            return []
        declared = rest[1:] if rest and rest[0] in DECLARING else rest
        declared = [word for word in declared if not (rest is not declared and word.startswith("-"))]
        if declared and all(_ASSIGNMENT.match(word) for word in declared):
            return [self._assigned(word, certain=not (may_skip or self.depth > 0)) for word in declared]
        return [word for raw in command for word in self._expanded(raw)]

    def _assigned(self, raw: str, *, certain: bool) -> str:
        """Note an assignment, and return it with its value."""
        match = _ASSIGNMENT.match(raw)
        assert match is not None
        text, is_known = self._text(raw[match.end() :])
        value = " ".join(_cut(text))
        is_known = is_known or is_path_from_a_variable(value)
        if match[2]:
            before = self.values.get(match[1])
            is_known, value = is_known and isinstance(before, str), f"{before}{value}"
        # An uncertain value overwrites a certain one: the variable may have either from here on.
        self.values[match[1]] = value if is_known and certain and len(value) <= MOST_CHARACTERS else None
        return f"{match[1]}={value}"

    def _assign_array(self, name: str, inside: str, *, added: bool) -> None:
        before = self.values.get(name, [])
        words = [word for raw in _raw_words(inside) if raw not in ENDS for word in self._expanded(raw)]
        if self.depth or not isinstance(before, list):
            self.values[name] = None
        else:
            self.values[name] = [*before, *words] if added else words

    def _expanded(self, raw: str) -> list[str]:
        """Return the words that a word as it is written stands for."""
        if raw in ('"$@"', "$@", '"$*"', "$*"):  # the script is explained without arguments of its own
            return []
        whole = _WHOLE_ARRAY.fullmatch(raw)
        if whole and isinstance(words := self.values.get(whole[1]), list):
            return words
        return _cut(self._text(raw)[0])

    def _text(self, raw: str, *, quoted: bool = False) -> tuple[str, bool]:
        """Return a word with its variables' values in it, still to be cut, and whether all of them are known.

        Args:
            raw: the word as it is written, or what stands between its double quotes.
            quoted: it stands between double quotes.
        """
        pieces, position, all_known = "", 0, True
        while position < len(raw):
            end = _end_of_expansion(raw, position)
            if end > position:
                value = self._value(raw[position:end])
                all_known = all_known and value is not None
                # A value is put in as text that the shell would not read again: its quotes and signs are escaped before words are
                # cut.
                special = r'(["\\])' if quoted else r"""(["'\\$`;|&<>#])"""
                pieces += raw[position:end] if value is None else re.sub(special, r"\\\1", value)
            elif raw[position] == '"' and not quoted:
                end = _end_of_quotation(raw, position)
                text, is_known = self._text(raw[position + 1 : end - 1], quoted=True)
                pieces, all_known = f'{pieces}"{text}"', all_known and is_known
            else:
                end = position + 2 if raw[position] == "\\" else position + 1
                if raw[position] == "'" and not quoted:
                    end = raw.find("'", position + 1) + 1 or len(raw)
                pieces += raw[end - 1] if quoted and raw[position:end] in ("\\$", "\\`") else raw[position:end]
            position = end
        return pieces, all_known

    def _value(self, expansion: str) -> str | None:
        """Return the value of ``$NAME``, ``${NAME}``, ``${NAME:-default}`` or ``$((...))``; ``None`` where only a run knows it."""
        if expansion.startswith("$(("):
            return self._number(expansion[3:-2])
        if expansion.startswith(("$(", "`")):
            return None
        inside = expansion[2:-1] if expansion.startswith("${") else expansion[1:]
        match = re.fullmatch(rf"({_NAME}|\d)(?:(:?[-=])(.*))?", inside, re.DOTALL)
        if match is None:
            return None
        name, how, default = match[1], match[2] or "", match[3]
        value = self.values.get(name, _environment(name))
        if value is None and name in self.values:
            return None
        if isinstance(value, list):
            return value[0] if value else ""
        if how and (value is None or (not value and how.startswith(":"))):
            text, is_known = self._text(default)
            value = " ".join(_cut(text))
            if not is_known and not is_path_from_a_variable(value):
                return None
            # Only a default of a variable that the script never sets can be overridden from outside, so only those are noted.
            if name not in self.values:
                self.defaults[f"${name}"] = value
            if how.endswith("="):
                self.values[name] = value
        return value

    def _number(self, expression: str) -> str | None:
        text, is_known = self._text(expression, quoted=True)

        def named(match: re.Match[str]) -> str:
            value = self.values.get(match[0])
            return value if isinstance(value, str) and re.fullmatch(r"-?\d+", value) else match[0]

        text = re.sub(_NAME, named, text)
        if not is_known or not re.fullmatch(r"[\d\s+*/%()-]{1,500}", text):
            return None
        try:
            number = _worked_out(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
            return None
        return None if number is None else str(number)


def _worked_out(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _worked_out(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _worked_out(node.left), _worked_out(node.right)
        # Numbers of a stranger's file stay below 64 bits, or multiplying them would take for ever; Python and shells divide
        # negative numbers differently.
        if left is not None and right is not None and max(left.bit_length(), right.bit_length()) < 64 and min(left, right) >= 0:
            return _ARITHMETIC[type(node.op)](left, right)
    return None


def _environment(name: str) -> str | None:
    return str(Path.home()) if name == "HOME" else None


def _end_of_expansion(text: str, position: int) -> int:
    """Return where an expansion that begins at ``position`` ends; ``position`` where none begins."""
    if text[position] == "`":
        return text.find("`", position + 1) + 1 or len(text)
    if text[position] != "$":
        return position
    for begins, opening, closing in (("${", "{", "}"), ("$(", "(", ")")):
        if text.startswith(begins, position):
            depth = 0
            for end in range(position + 1, len(text)):
                depth += (text[end] == opening) - (text[end] == closing)
                if depth == 0:
                    return end + 1
            return position
    match = re.compile(rf"\$(?:{_NAME}|\d)").match(text, position)
    return match.end() if match else position


def _end_of_quotation(text: str, position: int) -> int:
    """Return where double quotes that open at ``position`` are closed."""
    position += 1
    while position < len(text) and text[position] != '"':
        position = max(_end_of_expansion(text, position), position + 1 + (text[position] == "\\"))
    return min(position + 1, len(text))


def _always_succeeds(command: Sequence[str]) -> bool:
    words = [word for word in command if word not in DECLARING]
    return bool(words) and (words[0] in ("set", "cd", "echo") or all(_ASSIGNMENT.match(word) for word in words))


# -- the words of a job, of what launches it, and of a shell around both

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

    A script is cut into commands; commands that train nothing (``ray start``, ``export``, a server) are passed over. A word that
    only a run of a shell would work out stays a text that is refused where it is looked at, with what to write in its place.

    Raises:
        OptionError: a quotation does not end.
    """
    lines, defaults = words_of_script(text)
    commands: list[list[str]] = []
    for line in lines:
        command: list[str] = []
        for word in [*line, ";"]:
            if word not in ENDS:
                command.append(word)
            elif command:
                commands += [command] if _may_train(command) else []
                command = []
    return commands, defaults


def _may_train(command: Sequence[str]) -> bool:
    words = [word for word in command if not re.match(r"[A-Z_][A-Z0-9_]*=", word)]
    while words[:1] and words[0] in BEFORE_A_JOB:
        words = words[1:]
    begins = re.sub(r"^python3\b", "python", " ".join(words))
    return not any(begins == start or begins.startswith(f"{start} ") for start in NO_JOBS)


def program_of(words: Sequence[str]) -> str:
    """Return the program that a command line runs: its first words, scripts and modules, without the values of flags."""
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
    arguments: dict[str, Any] = {}
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
            values, position = _flag_values(words, position, key)
            value = " ".join(values)
            parsed = [parse_scalar(item) for item in values] if len(values) > 1 else parse_scalar(value) if values else True
        name = key if "." in key else key.replace("-", "_")
        if is_path_from_a_variable(value):
            parsed = re.sub(r"^\$\{(\w+)\}", r"$\1", value)
        elif _of_a_shell(value):
            parsed = OfAShell(value)
        if name in CONFIG_FLAGS and flag and isinstance(parsed, str):
            files.append(parsed)
        else:
            arguments |= _structured(name, value) or {name: parsed}
    return arguments, files, dropped


def _flag_values(words: Sequence[str], position: int, key: str) -> tuple[list[str], int]:
    """Return the values of a flag, and where the next word is."""
    values: list[str] = []
    plain = key.replace("-", "_")
    if plain in SWITCHES or OLD_NAMES.get(plain) in SWITCHES or plain in LAUNCHER_SWITCHES:
        most = 1 if position < len(words) and words[position].lower() in ("true", "false") else 0
    else:
        most = 1 if plain in CONFIG_FLAGS else len(words)
    while (
        len(values) < most and position < len(words) and not words[position].startswith("--")
        and not (values and _is_program(words[position]))
    ):  # fmt: skip
        values.append(words[position])
        position += 1
    return values, position


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
