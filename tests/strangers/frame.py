"""What strangers bring: a table of cases that were reported of this or of other systems, each tried as whoever brought it would.

A :class:`Case` says in a row what is brought, where it was reported, what is right and where the right value comes from. The
tables are the lists ``CASES`` of the modules ``tests/strangers/*_cases.py``; one loop (``test_strangers.py``) tries them all.

To add a case, put it into the module of its kind, or begin one: ``NAME_cases.py`` with a list ``CASES``. Nothing lists the modules.

    Case(
        "eos ids in a list whose first does not end a turn", "trl#7039",
        bring=lambda it: it.session_of(it.model("smollm2", generation={"eos_token_id": [0, 2]})).demonstrations(...)[0],
        right=[2], because="Llama 3.1 Instruct: the template writes <|eot_id|>, the third of the list",
    )

- ``bring`` gets a :class:`Bench`, which builds model folders and sessions in a temporary folder, and returns what comes of it.
- ``right`` is what that has to be equal to; :class:`Refused` where it has to be refused, with values that the message names; or a
  function of the bench that computes it with another program (transformers, peft) on the same files.
- ``because`` names that program, document or arithmetic. A right value that was copied from what hfsdk said is none.

A case is quick (no Ray, no engine; those go where tests of the engines are) and is named once: its ``what`` is the test's id. Break
the product once to see it fail.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hfsdk as hf
from hfsdk.assets import model_folder
from hfsdk.core.tokenizer_files import COMPANIONS
from hfsdk.core.weight_files import WEIGHTS
from tests.session.scripted import ScriptedRuntime

MODELS = {"tiny": "tiny", "smollm2": "smollm2-135m-instruct"}
"""What a folder's tokenizer, template and ends are taken from: one token a byte, and a byte-level BPE of 49,152 tokens."""
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
"""Of the model in a folder; its weights are zeros in a file without content, so that it is made in a millisecond."""


@dataclass(frozen=True)
class Refused:
    """Right is a refusal: an error of this class whose text names these values."""

    error: type[Exception]
    named: tuple[Any, ...]

    def __init__(self, error: type[Exception], *named: Any) -> None:
        object.__setattr__(self, "error", error)
        object.__setattr__(self, "named", named)


@dataclass(frozen=True)
class Case:
    """One row of the table; see the module's text."""

    what: str
    """What is brought, in a few words of its own."""
    source: str
    """Where it was reported, as ``project#number``, or of which report it is kin."""
    bring: Callable[[Bench], Any]
    right: Any
    because: str
    """Where the right value comes from."""
    notices: tuple[str, ...] = field(default=())
    """What has to be told meanwhile: a part of each notice. Any other notice is a failure."""


class Bench:
    """Builds model folders, and sessions that need no engine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack, self._made = folder, stack, 0

    def session(self) -> hf.Session:
        """Return a session whose calls go to a scripted runtime: all above the engines is the real thing."""
        return self._stack.enter_context(hf.Session(runtime=ScriptedRuntime()))

    def session_of(self, folder: str | Path) -> hf.Session:
        """Return a session whose actor is the model of a folder, or ``"tiny"``."""
        session = self.session()
        session.actor(str(folder))
        return session

    def model(
        self, base: str = "tiny", *, template: str | None = None, tokenizer: Callable[[dict[str, Any]], Any] | None = None,
        names: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Return a new model folder.

        Args:
            base: of `MODELS`, whose tokenizer, template and ends it has, but for what is changed.
            template: the chat template; ``""`` for none.
            tokenizer: changes what ``tokenizer.json`` says, in place or by returning another.
            names: changes of ``tokenizer_config.json``, e.g. ``eos_token``; ``None`` takes an entry out, here and below.
            config: changes of ``config.json``.
            generation: changes of ``generation_config.json``.
        """
        self._made += 1
        folder = self.folder / f"model{self._made}"
        folder.mkdir()
        source = model_folder(MODELS[base])
        for name in ("config.json", *COMPANIONS):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
            if not template:
                (folder / "chat_template.jinja").unlink()
        if tokenizer is not None:
            content = json.loads((folder / "tokenizer.json").read_text())
            content = tokenizer(content) or content
            (folder / "tokenizer.json").write_text(json.dumps(content))
        for name, changes in (
            ("tokenizer_config.json", names), ("generation_config.json", generation), ("config.json", {**SIZES, **(config or {})}),
        ):  # fmt: skip
            if changes is not None:
                entries = json.loads((folder / name).read_text()) | dict(changes)
                (folder / name).write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
        write_zeros(folder)
        return folder


def write_zeros(folder: Path) -> None:
    """Write the weights that a folder's ``config.json`` asks for: zeros, in a file without content."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in hf.ModelSpec.from_folder(folder).tensors().items():
        begin = end
        end += 2 * int.__mul__(*shape) if len(shape) == 2 else 2 * shape[0]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)
