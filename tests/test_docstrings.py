"""What ``?`` shows: every argument of what a user makes, every column, every method's arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re

from expect import each

import hfsdk as hf
import hfsdk.models as models
from hfsdk.core.columns import COLUMNS
from hfsdk.core.field_texts import documented

MADE_BY_CALLS = ("Batch", "Metrics", "Primitive", "PromptStream", "ReshardPlan", "Run")
"""Classes whose constructors nobody types."""

CONSTRUCTED = [
    name for name in hf.__all__
    if isinstance(getattr(hf, name), type) and not issubclass(getattr(hf, name), Exception) and name not in MADE_BY_CALLS
]  # fmt: skip

HANDLES = ("ActorModel", "CriticModel", "ReferenceModel", "RewardModel", "CostModel")
METHODS = [
    (cls.__name__, name, getattr(cls, name))
    for cls in (hf.Session, hf.Batch, hf.Run, *(getattr(models, handle) for handle in HANDLES))
    for name in dir(cls) if not name.startswith("_") and inspect.isroutine(getattr(cls, name)) and name != "from_columns"
]  # fmt: skip


def unexplained(parameters, text):
    return [name for name in parameters if name != "self" and not re.search(rf"(?<![\w.]){name}\b", text)]


@each("name", CONSTRUCTED)
def test_every_argument_of_a_constructor_is_explained(name):
    cls = getattr(hf, name)
    text = (cls.__doc__ or "") + ("" if dataclasses.is_dataclass(cls) else cls.__init__.__doc__ or "")
    assert unexplained(inspect.signature(cls).parameters, text) == []


@each("cls, name, method", METHODS)
def test_every_argument_of_a_method_is_explained(cls, name, method):
    assert unexplained(inspect.signature(method).parameters, method.__doc__ or "") == []


@each("cls", [hf.PPO, hf.DPO, hf.SafeRLHF, hf.AdamW, hf.Workload, hf.RolloutOptions, hf.Layout])
def test_every_option_has_a_line_with_its_default(cls):
    for field in dataclasses.fields(cls):
        lines = [line for line in cls.__doc__.splitlines() if line.startswith(f"        {field.name}: ")]
        assert len(lines) == 1, field.name
        assert lines[0].endswith(f" Default {field.default!r}."), lines[0]


def test_a_batch_lists_its_columns():
    for name, column in COLUMNS.items():
        assert f"        {name}: {column.meaning}" in hf.Batch.__doc__


def test_a_class_without_text_below_its_fields_says_nothing_of_them():
    @documented
    @dataclasses.dataclass
    class Plain:
        """A class."""

        field: int = 1

    assert Plain.__doc__.split() == ["A", "class.", "Fields:"]
