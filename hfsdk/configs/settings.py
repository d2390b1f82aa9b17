"""The keys of a configuration: the given ones, those at their defaults, and those that nobody read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NoReturn

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError

MOST_KEYS = 100_000
"""Keys of the largest configuration that is read; aliases of YAML can name one many times."""

MOST_NESTED = 64

MOST = 10**9
"""The largest whole number of a configuration that is taken."""

AT_LEAST_ONE = (
    "trainer.n_gpus_per_node", "trainer.nnodes", "data.train_batch_size", "data.max_response_length", "rollout.n",
    "actor.ppo_mini_batch_size", "actor.ppo_epochs", "critic.ppo_epochs",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations", "max_completion_length",
    "num_processes", "response_length", "num_ppo_epochs", "num_mini_batches",
    "train.batch_size", "train.micro_batch_size", "rollout.batch_size", "rollout.micro_batch_size", "n_samples_per_prompt",
    "actor.num_nodes", "actor.num_gpus_per_node", "train.max_epochs",
    "cluster.num_nodes", "cluster.gpus_per_node", "num_prompts_per_step", "num_generations_per_prompt", "train_global_batch_size",
    "train_micro_batch_size", "max_total_sequence_length", "tensor_parallel_size", "pipeline_parallel_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
)  # fmt: skip
"""How keys end of which nothing is left where they are 0: verl's, TRL's, OpenRLHF's and NeMo-RL's, in this order."""

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_KINDS = {"whole": "a whole number", "number": "a number", "yes": "true or false", "text": "a text"}
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}


class OfAShell(str):
    """A text that a shell would work out, e.g. ``"$HOME/data"``: none that is looked at has a value."""

    __slots__ = ()


def parse_scalar(text: str) -> Any:
    """Return the value of a word on a command line: a number, true, false, nothing, or the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def flatten(keys: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return nested keys as one level, joined by dots.

    Raises:
        OptionError: a key is no text, or it is nested without end or has too many keys.
    """
    return dict(_leaves(keys, what, "", 0, [0]))


def _leaves(keys: Mapping[str, Any], what: str, before: str, depth: int, count: list[int]) -> Iterator[tuple[str, Any]]:
    if depth > MOST_NESTED:
        raise OptionError(f"{what} is nested more than {MOST_NESTED} levels deep at {shown(before[:80])}; no configuration is")
    for key, value in keys.items():
        count[0] += 1
        if count[0] > MOST_KEYS:
            raise OptionError(f"{what} has more than {MOST_KEYS:,} keys; no configuration has")
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, what, f"{name}.", depth + 1, count)
        else:
            yield name, value


@dataclass(kw_only=True)
class Settings:
    """Keys as they were given, over the defaults of one release. Every look is noted."""

    what: str
    """The configuration in messages, e.g. ``"grpo.yaml"``."""
    release: str
    """The release whose defaults these are, e.g. ``"verl 0.9.1"``."""
    given: dict[str, Any]
    """Dotted key -> value."""
    defaults: Mapping[str, Any]
    """The same of the release, of every key that is read."""
    runs: str = ""
    """The program that a command line of it runs, with its launcher."""
    read: dict[str, Any] = field(default_factory=dict)
    """Keys that were looked at and given."""
    at_default: dict[str, Any] = field(default_factory=dict)
    """Keys that were looked at and not given."""
    odd: dict[str, tuple[Any, tuple[str, ...]]] = field(default_factory=dict)
    """Keys whose value is none that is read -> that value, and which kinds of numbers it could change."""
    unused: list[str] = field(default_factory=list)
    """How keys begin of parts that this configuration does not use."""

    def whole(self, key: str) -> int:
        """Return a whole number.

        Raises:
            OptionError: it is none, or nothing.
        """
        value = self.maybe_whole(key)
        return value if value is not None else self._refuse(key, "whole", None)

    def maybe_whole(self, key: str, least: int = 0) -> int | None:
        """Return a whole number, or ``None`` where it is left open.

        Raises:
            OptionError: it is none, or below ``least``.
        """
        value = self.value(key)
        if isinstance(value, str):
            value = parse_scalar(value)
        if value is None:
            return None
        if not _is_number(value) or int(value) != value:
            return self._refuse(key, "whole", value)
        if any(key == last or key.endswith((f".{last}", f"_{last}")) for last in AT_LEAST_ONE):
            least = max(1, least)
        if not least <= value <= MOST:
            raise OptionError(f"{self.what}: {key} must be from {least} to {MOST:,}; got {shown(value)}. Correct it there.")
        return int(value)

    def number(self, key: str) -> float:
        """Return a number, also of the form ``1e-6`` that YAML takes for a text.

        Raises:
            OptionError: it is none.
        """
        value = self.value(key)
        if isinstance(value, str):
            value = parse_scalar(value)
        if not _is_number(value):
            return self._refuse(key, "number", value)
        return float(value)

    def share(self, key: str) -> float:
        """Return a number above 0 and at most 1.

        Raises:
            OptionError: it is none.
        """
        value = self.number(key)
        if not 0 < value <= 1:
            raise OptionError(f"{self.what}: {key} must be above 0 and at most 1; got {shown(value)}. Correct it there.")
        return value

    def yes(self, key: str) -> bool:
        """Return true or false; nothing is false.

        Raises:
            OptionError: it is neither.
        """
        value = self.value(key)
        if isinstance(value, str):
            value = parse_scalar(value)
        return bool(value) if value is None or isinstance(value, bool) else self._refuse(key, "yes", value)

    def text(self, key: str) -> str:
        """Return a text, ``""`` where there is none.

        Raises:
            OptionError: it is something else.
        """
        value = self.value(key)
        if value is None:
            return ""
        return value if isinstance(value, str) else self._refuse(key, "text", value)

    def value(self, key: str) -> Any:
        """Return a key's value, given or at its default, with references to other keys resolved."""
        if key in self.given:
            value = self._resolved(self.given[key], key, 0)
            self.read[key] = value
            return value
        if key not in self.defaults:
            return None
        value = self._resolved(self.defaults[key], key, 0)
        self.at_default[key] = value
        return value

    def one_of(self, key: str, values: Sequence[str], *could_change: str) -> str:
        """Return a text that is one of those that are read; for another one, note which kinds of numbers it could change.

        Raises:
            OptionError: it is no text.
        """
        value = self.text(key)
        if value and value not in values:
            self.odd[key] = (value, could_change)
        return value

    def leave_out(self, *beginnings: str) -> None:
        """Note that keys which begin so are of parts that this configuration does not use."""
        self.unused += beginnings

    def is_left_out(self, key: str) -> bool:
        """Return whether a key is of a part that this configuration does not use."""
        return key.startswith(tuple(self.unused))

    def unread_value(self, key: str, value: Any, defaults: Mapping[str, Any]) -> Any:
        """Return a value of a key that is not read, with references to other keys resolved where they can be.

        Args:
            key: the key with its dots.
            value: given, or its default.
            defaults: the release's defaults of all keys.
        """
        apart = replace(self, defaults={**defaults, **self.defaults}, read={}, at_default={})
        try:
            return apart._resolved(value, key, 0)
        except OptionError:
            return value

    def has(self, key: str) -> bool:
        """Return whether a key, or one below it, was given."""
        return any(name == key or name.startswith(f"{key}.") for name in self.given)

    def lays_out_layers(self) -> bool:
        """Return whether a key says which of Megatron's pipeline stages has which layers."""
        parts = ("num_layers_in_", "account_for_", "pipeline_model_parallel_layout")
        return any(key.rsplit(".", 1)[-1].startswith(parts) and value is not None for key, value in self.given.items())

    def unread(self) -> dict[str, Any]:
        """Return the given keys that nothing looked at."""
        return {key: value for key, value in self.given.items() if key not in self.read}

    def _resolved(self, value: Any, key: str, depth: int) -> Any:
        if isinstance(value, OfAShell):
            raise OptionError(
                f"{self.what}: {key} is {shown(str(value))}, which a shell would work out; write its value: {key}=..."
            )
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > MOST_NESTED:
            raise OptionError(f"{self.what}: {key} refers to itself: {shown(value)}. Give it a value.")
        match = _REFERENCE.search(value)
        if match is None:
            raise OptionError(f"{self.what}: {key} has a reference that does not close: {shown(value)}. Write ${{other.key}}.")
        referred = self._reference(match[1].strip(), key, depth)
        if match[0] == value:
            return self._resolved(referred, key, depth + 1)
        return self._resolved(value[: match.start()] + str(referred) + value[match.end() :], key, depth + 1)

    def _reference(self, inside: str, key: str, depth: int) -> Any:
        name, _, rest = inside.partition(":")
        arguments = [argument.strip() for argument in rest.split(",")]
        if not rest and not inside.startswith("oc."):
            return self._lookup(inside, key, depth)
        if name == "oc.select":
            referred = self._lookup(arguments[0], key, depth, missing=None)
            return parse_scalar(arguments[1]) if referred is None and len(arguments) > 1 else referred
        if name == "mul":
            return self._product(arguments, inside, key)
        raise OptionError(
            f"{self.what}: {key} asks for ${{{inside}}}, which is worked out when the job runs; resolvers that are read are "
            f"oc.select and mul. Give the value: {key}=..."
        )

    def _product(self, arguments: Sequence[str], inside: str, key: str) -> Any:
        product: Any = 1
        for factor in map(parse_scalar, arguments):
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise OptionError(f"{self.what}: {key} multiplies ${{{inside}}}; {shown(factor)} is no number. Correct it there.")
            product *= factor
        return product

    def _lookup(self, name: str, key: str, depth: int, missing: Any = ...) -> Any:
        dots = len(name) - len(name.lstrip("."))
        if dots:
            name = ".".join([*key.split(".")[:-dots], name.lstrip(".")])
        for values in (self.given, self.defaults):
            if name in values:
                if values is self.given:
                    self.read[name] = values[name]
                return self._resolved(values[name], name, depth + 1)
        if missing is ...:
            raise OptionError(f"{self.what}: {key} refers to {shown(name)}, which it does not have. Give {name}, or {key} itself.")
        return missing

    def _refuse(self, key: str, kind: str, value: Any) -> NoReturn:
        where = "has no value" if value is None else f"got {shown(value)}"
        raise OptionError(f"{self.what}: {key} must be {_KINDS[kind]}; {where}. Correct it there.")
