"""Built-in calls and columns are declared once, and what is declared is what the engine has."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hfsdk.core.arguments import Arguments
from hfsdk.core.columns import COLUMNS, OF_RESPONSE, PER_TOKEN, is_per_token
from hfsdk.core.methods import METHODS, UNKNOWN, method_of, onloads, writes_per_token
from hfsdk.core.roles import PARTS, AdamW, RoleSpec

ROOT = Path(__file__).parents[1]


def test_the_page_of_methods_is_printed_from_their_declarations():
    script = ROOT / "scripts" / "print_methods.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", METHODS.values(), ids=str)
def test_a_method_names_columns_and_arguments_that_exist(method):
    assert {*method.reads, *method.reads_if_there, *method.writes} - {"*"} <= set(COLUMNS)
    assert issubclass(method.arguments, Arguments)
    assert "function" in {f.name for f in fields(method.arguments)}
    assert set(method.needs) <= set(PARTS)


def test_the_worker_carries_out_every_call_of_a_model():
    hosted = (ROOT / "hfsdk/engine/worker/hosted.py").read_text(encoding="utf-8")
    for method in METHODS.values():
        if method.work not in ("task", "data"):
            assert f'"{method.name}":' in hosted, method.name


def test_who_changes_weights_also_touches_them_and_who_only_looks_needs_nothing():
    assert {m.name for m in METHODS.values() if m.changes_weights} == {"update", "step", "load_state"}
    assert {m.name for m in METHODS.values() if m.touches_weights} == {"update", "step", "load_state", "run", "call"}
    assert {m.name for m in METHODS.values() if not m.uses_weights} == {"last_reshard", "census"}
    assert not any(m.needs for m in METHODS.values() if m.work in ("look", "generate"))
    assert method_of("no such call") is UNKNOWN
    assert UNKNOWN.needs == ("weights",)
    assert not UNKNOWN.touches_weights


def test_an_update_brings_what_is_offloaded_but_adamw_s_state_where_that_comes_for_steps():
    role = RoleSpec(name="actor", kind="actor", model=None, optimizer=AdamW(offload=True), offload=True)
    assert onloads("update", role) == ("weights", "gradients")
    assert onloads("compute_log_probs", role) == ("weights",)
    assert onloads("generate", role) == ()


@pytest.mark.parametrize(
    ("method", "column", "expected"),
    [
        ("generate", "response", True), ("generate", "group", False), ("compute_log_probs", "anything", True),
        ("compute_scores", "scores", False), ("compute_scores", "token_scores", True), ("compute_costs", "token_costs", True),
        ("map", "my_advantages", True), ("map", "my_ratio", True), ("map", "length", False), ("call", "my_mask", True),
    ],
)  # fmt: skip
def test_which_columns_a_call_writes_per_token(method, column, expected):
    assert writes_per_token(method, column) is expected


def test_columns_of_a_response_go_with_it():
    assert set(COLUMNS) - OF_RESPONSE == {"prompt", "position"}
    assert PER_TOKEN <= OF_RESPONSE
    assert all(is_per_token(name) for name in PER_TOKEN)
    assert not any(is_per_token(name) for name, column in COLUMNS.items() if column.kind != "token")
