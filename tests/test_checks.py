"""The one checker of arguments: what it takes and what it says."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import time
import unittest.mock
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.checks import AnyNumber, Length, Name, Within, check_fields, checked, shown
from hfsdk.core.errors import LayoutError, OptionError
from hfsdk.core.rules import MOST_CHARACTERS, Refusal, rule_of

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.core.table import Array, Table

Percent = Annotated[float, Within(0, 100)]


@checked
def call(
    count: int = 0, share: float = 0.0, *rest: str, flag: bool = False, at: str | Path = ".", many: Sequence[int] = (),
    table: Mapping[str, float] = {}, percent: Percent | None = None, kind: Literal["a", "b"] = "a", **more: int,
) -> Any:  # fmt: skip
    """Hand back what came."""
    return count, share, rest, flag, at, many, table, percent, kind, more


def refusal(**given: Any) -> str:
    with pytest.raises(OptionError) as caught:
        call(**given)
    return str(caught.value)


@each(
    "name, value, plain",
    [
        ("count", np.int64(3), 3), ("count", np.array(3), 3), ("share", np.float32(0.5), 0.5), ("share", np.int32(2), 2),
        ("flag", np.True_, True), ("many", np.arange(3), [0, 1, 2]), ("many", (np.int8(1), 2), (1, 2)),
        ("table", {"a": np.float64(2)}, {"a": 2.0}), ("percent", np.float64(50), 50.0), ("extra", np.int64(1), 1),
    ],
)  # fmt: skip
def test_numbers_of_numpy_become_plain_python(name, value, plain):
    def kinds(found: Any) -> Any:
        if isinstance(found, list | tuple):
            return [kinds(one) for one in found]
        return {k: kinds(v) for k, v in found.items()} if isinstance(found, dict) else (type(found), found)

    assert kinds(plain) in [kinds(found) for found in (*call(**{name: value}), call(**{name: value})[-1].get("extra"))]


def test_numbers_of_torch_become_plain_python():
    torch = pytest.importorskip("torch")
    assert type(call(count=torch.tensor(3))[0]) is int
    assert type(call(share=torch.tensor(0.5, dtype=torch.bfloat16))[1]) is float
    assert call(flag=torch.tensor(True))[3] is True
    assert call(many=torch.arange(2))[5] == [0, 1]


@each(
    "name, value, said",
    [
        ("count", True, "count must be a whole number; got count=True"),
        ("count", 1.0, "a whole number"), ("count", "3", "got count='3'"), ("count", 1 << 64, "at most 64 bits"),
        ("count", 1 << 20_000, "at most 64 bits"), ("share", float("nan"), "a finite number; got share=nan"),
        ("share", 10**400, "a finite number"), ("share", 1j, "a finite number"), ("flag", 1, "True or False"),
        ("flag", np.array([True]), "True or False"), ("at", "a\0b", "without control characters"),
        ("at", "x" * 300, "255 in each name"),
        ("at", Path("x" * 5000), "4,096 bytes"), ("at", "\ud800", "lone surrogates"), ("at", b"x", "a path"),
        ("many", "12", "a list of whole numbers; got many='12'"), ("many", [1, "2"], "got many[1]='2'"),
        ("many", {1}, "a list"), ("table", {"a": "1"}, "got table['a']='1'"), ("table", {1: 1.0}, "with the key=1"),
        ("percent", 101, "a number from 0 to 100 or None; got percent=101"), ("percent", float("nan"), "from 0 to 100"),
        ("kind", "c", "'a' or 'b'"), ("extra", 1.5, "extra must be a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_is_taken(name, value, said):
    message = refusal(**{name: value})
    assert said in message
    assert message.startswith(f"call: {name}")
    assert "\n" not in message
    assert len(message) < 300


def test_a_slice_is_of_whole_numbers():
    take = rule_of(slice).take
    assert take(slice(np.int64(1), None)) == slice(1, None)
    for wrong in (slice("a", 2), slice(0, 1.5), slice(0, 2, 0), 3):
        assert isinstance(take(wrong), Refusal)


@each("function", [lambda: 0, lambda a, b: 0, lambda *, a: 0])
def test_a_function_that_cannot_take_what_it_will_get_is_refused_before_it_is_called(function):
    @checked
    def train(stop: Callable[[dict[str, Any]], bool]) -> None:
        raise AssertionError

    with refuses(OptionError, "train: stop", "a function of 1 argument", "stop=<function"):
        train(function)


@each("function", [lambda a: 0, lambda *a: 0, lambda a, b=0: 0, print, max, dict, unittest.mock.Mock()])
def test_a_function_that_can_take_it_or_does_not_say_is_taken(function):
    @checked
    def train(stop: Callable[[dict[str, Any]], bool]) -> Any:
        return stop

    assert train(function) is function


def test_the_rest_is_checked_too():
    assert call(1, 2.0, "a", "b")[2] == ("a", "b")
    with refuses(OptionError, "rest", "a text", "rest=3"):
        call(1, 2.0, "a", 3)


def test_missing_and_doubled_arguments_are_pythons_to_refuse():
    @checked
    def two(a: int, b: int = 0) -> None: ...

    for args, named in [((), {}), ((1,), {"a": 1})]:
        with pytest.raises(TypeError, match=r"two\(\)"):
            two(*args, **named)


def test_unknown_and_too_many_arguments_are_refused_with_what_there_is():
    class Owner:
        @checked
        def train(self, a: int, *, steps: int = 0, folder: str = "") -> None: ...

    owner = Owner()
    with refuses(OptionError, "Owner.train", "'stepps'", "'steps'", "a, steps, folder"):
        owner.train(1, stepps=1)
    with refuses(OptionError, "'max_steps'", "Owner.train(steps=...)"):
        owner.train(1, max_steps=1)
    with refuses(OptionError, "'eval_dataset'", "keep_best="):
        owner.train(1, eval_dataset=[])
    with refuses(OptionError, "'callbacks'", "stop=f"):
        owner.train(1, callbacks=[])
    with refuses(OptionError, "takes 1 argument", "got 2", "steps=..., folder="):
        owner.train(1, 10)


def test_a_function_that_takes_any_names_takes_them():
    @checked
    def any_of(a: int, **others: int) -> dict[str, int]:
        return others

    assert any_of(1, anything=2) == {"anything": 2}


@each(
    "make, named",
    [
        (lambda: hf.AdamW(learning_rate=1e-5), ["'learning_rate'", "AdamW(lr="]),
        (lambda: hf.AdamW(1e-5), ["AdamW", "lr=..., betas="]),
        (lambda: hf.AdamW(warmup_ratio=0.1), ["'warmup_ratio'", "warmup_steps=10"]),
        (lambda: hf.Workload(batch_size=3), ["'batch_size'", "hf.Workload(prompts=32)"]),
        (lambda: hf.Layout(tensor_parallel_size=2), ["'tensor_parallel_size'", "Layout(tp="]),
        (lambda: hf.RolloutOptions(max_length=9), ["'max_length'", "max_model_len"]),
    ],
)
def test_fields_that_do_not_exist_are_refused_with_what_there_is(make, named):
    with refuses(OptionError, *named):
        make()


def test_named_fields_travel_and_are_replaced():
    adam = hf.AdamW(lr=1e-4, weight_decay=0.1)
    assert pickle.loads(pickle.dumps(adam)) == adam
    assert dataclasses.replace(adam, lr=1e-3).weight_decay == 0.1
    assert copy.deepcopy(hf.Layout(tp=2)) == hf.Layout(tp=2)


def test_a_large_value_is_shown_in_one_short_line():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    long = "x" * 10**6
    big = [list(range(10**6)), dict.fromkeys(range(10), long), np.zeros((1000, 1000)), "\x1b[31m" * 10**5, 10**9999, Broken()]
    for value in [*big, [big], (Broken(),)]:
        assert len(shown(value)) < 200
        assert shown(value).isprintable()


def test_of_a_large_list_a_few_items_are_looked_at():
    class Counts:
        looked_at = 0

        def __repr__(self) -> str:
            Counts.looked_at += 1
            return "one"

    one = Counts()
    for value in ([one] * 10**6, [[one] * 1000] * 1000, dict.fromkeys(Counts() for _ in range(10**4))):
        Counts.looked_at = 0
        shown(value)
        assert 0 < Counts.looked_at < 30


def test_a_text_beyond_a_stated_length_is_refused():
    with refuses(OptionError, f"{MOST_CHARACTERS:,} characters", "rest='xxx", f"{MOST_CHARACTERS + 1:,} long"):
        call(1, 1.0, "x" * (MOST_CHARACTERS + 1))


def test_signature_docstring_and_source_stay():
    assert list(inspect.signature(call).parameters)[:3] == ["count", "share", "rest"]
    assert call.__doc__ == "Hand back what came."
    assert "return count, share" in inspect.getsource(call)


def test_methods_class_methods_and_a_telling_error():
    class Thing:
        @checked
        def __init__(self, size: int) -> None:
            self.size = size

        @checked
        def grown(self, by: Thing | int) -> int:
            return self.size + (by.size if isinstance(by, Thing) else by)

        @classmethod
        @checked(error=LayoutError)
        def of(cls, text: str) -> Thing:
            return cls(len(text))

    assert Thing(2).grown(np.int64(3)) == 5
    assert Thing.of("abc").size == 3
    with refuses(OptionError, "Thing: size", "a whole number", "size='2'"):
        Thing("2")
    with refuses(LayoutError, "Thing.of: text", "text=3"):
        Thing.of(3)


def test_classes_imported_for_type_checkers_alone_are_known_by_name():
    import pandas

    from hfsdk.core.table import Table

    @checked
    def look(frame: pd.DataFrame | None, table: Table | str, array: Array | None = None) -> None: ...

    look(pandas.DataFrame(), Table({}))
    look(None, "x", np.zeros(3))
    for wrong, named in [((3, "x"), "frame=3"), ((None, 3), "table=3"), ((None, "x", 3), "array=3")]:
        with refuses(OptionError, "look", named):
            look(*wrong)


def test_an_annotation_may_import_while_it_is_made():
    """From C, as strptime does, and ``NDArray[...]`` on Python 3.12, whose TypeVar asks typing."""

    @checked
    def at(number: Annotated[int, time.strptime("1", "%d")]) -> int:
        return number

    assert at(3) == 3


def test_what_a_generator_gives_is_not_used_up():
    @checked
    def total(items: Iterable[int], do: Callable[[int], int]) -> int:
        return sum(map(do, items))

    assert total((i for i in range(3)), abs) == 3
    for wrong in [("ab", abs), (3, abs), ([1, "2"], abs), ([1], 2)]:
        with pytest.raises(OptionError):
            total(*wrong)


@dataclass(frozen=True, kw_only=True)
class Options:
    lr: Annotated[float, Within(above=0)] = 1e-5
    betas: tuple[float, float] = (0.9, 0.99)
    name: Name = "x"
    limit: AnyNumber = float("inf")
    sizes: Annotated[tuple[int, ...], Length(0, 3)] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def test_fields_are_checked_by_their_declaration_and_made_plain():
    options = Options(lr=np.float64(0.1), betas=[np.float32(0.5), 0], sizes=np.arange(2))
    assert (type(options.lr), options.betas, options.sizes) == (float, (0.5, 0), (0, 1))
    hash(options)
    wrongs: list[dict[str, Any]] = [{"lr": 0}, {"lr": "1"}, {"betas": (1,)}, {"betas": (1, "2")}]
    for wrong in [*wrongs, {"name": ""}, {"name": "x" * 201}, {"sizes": (1,) * 4}]:
        with refuses(OptionError, f"Options: {next(iter(wrong))}"):
            Options(**wrong)


def test_a_refusal_inside_a_union_is_told_where_it_is():
    taken = rule_of(str | Sequence[int]).take([1, "2"])
    assert isinstance(taken, Refusal)
    assert (taken.at, taken.value) == ("[1]", "2")


def test_an_annotation_is_read_once_and_not_at_every_call(monkeypatch):
    """Checking hardly costs: what a type takes is worked out at the first call."""

    @checked
    def taken_apart(number: Annotated[int, Within(1, 2)], path: str | Path | None = None) -> int:
        return number

    taken_apart(1)
    made: list[object] = []
    monkeypatch.setattr("hfsdk.core.checks.rule_of", made.append)
    assert [taken_apart(number, "x") for number in (1, 2)] == [1, 2]
    assert made == []
