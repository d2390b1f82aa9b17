"""Built-in calls and columns are declared once, and what is declared is what the engine has."""

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from expect import each, refuses

from hfsdk.core import methods
from hfsdk.core.arguments import Arguments, Scoring
from hfsdk.core.builtin import Method
from hfsdk.core.columns import COLUMNS, OF_RESPONSE, PER_TOKEN, hint_for, is_per_token, label_of, writes_per_token
from hfsdk.core.errors import OptionError
from hfsdk.core.methods import METHODS, SHADOWED, method_of, onloads
from hfsdk.core.placement import SHADOWS
from hfsdk.core.roles import PARTS, AdamW, RoleSpec

ROOT = Path(__file__).parents[1]


def test_the_page_of_methods_is_printed_from_their_declarations():
    script = ROOT / "scripts" / "print_methods.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@each("method", METHODS.values())
def test_a_method_names_columns_and_arguments_that_exist(method):
    assert {*method.reads, *method.reads_if_there, *method.writes} - {"*"} <= set(COLUMNS)
    assert issubclass(method.arguments, Arguments)
    assert "function" in {f.name for f in fields(method.arguments)}
    assert set(method.needs) <= set(PARTS)


def test_every_declared_call_is_known_by_its_name():
    declared = [value for value in vars(methods).values() if isinstance(value, Method)]
    assert {id(method) for method in declared} == {id(method) for method in METHODS.values()}
    assert set(SHADOWED) == set(SHADOWS)


def test_a_call_that_nobody_declared_is_refused_with_the_nearest():
    with refuses(OptionError, "'compute_value'", "'compute_values'"):
        method_of("compute_value")


def test_the_worker_has_a_handler_for_every_call_of_a_model_and_no_other():
    tree = ast.parse((ROOT / "hfsdk/engine/worker/role_engine.py").read_text(encoding="utf-8"))
    role = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RoleEngine")
    functions = [node for node in role.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")]
    handlers = {f.name[1:] for f in functions if f.returns is not None and ast.unparse(f.returns) == "Outcome"}
    (table,) = [node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "HANDLERS"]
    listed = {ast.unparse(key): ast.unparse(value) for key, value in zip(table.value.keys, table.value.values, strict=True)}
    expected = {
        f"methods.{m.name.upper()}.name":
        f"partial(RoleEngine._score, method=methods.{m.name.upper()})" if m.arguments is Scoring else f"RoleEngine._{m.name}"
        for m in METHODS.values() if m.on_ranks
    }  # fmt: skip
    assert listed == expected
    assert handlers == {method.removeprefix("RoleEngine._") for method in listed.values() if "partial" not in method} | {"score"}


def test_a_column_is_one_call_s_or_an_algorithm_s_and_says_how_to_get_it():
    of_calls = [column.name for method in METHODS.values() for column in method.columns]
    assert len(of_calls) == len(set(of_calls))
    assert all(column.writer for column in COLUMNS.values())
    assert hint_for("ref_log_probs") == "Call reference.compute_log_probs(batch) first."
    assert hint_for("entropy") == "Call actor.compute_log_probs(batch, entropy=True) first."
    assert hint_for("mine") == "Write it first, e.g. with batch.with_columns(...)."
    assert (label_of("advantages"), label_of("kl"), label_of("mine")) == ("advantage", "kl", "mine")


def test_who_changes_weights_also_touches_them_and_who_only_looks_needs_nothing():
    assert {m.name for m in METHODS.values() if m.changes_weights} == {"update", "step", "load_state"}
    assert {m.name for m in METHODS.values() if m.touches_weights} == {"update", "step", "load_state", "run", "call"}
    assert {m.name for m in METHODS.values() if not m.uses_weights} == {"last_reshard", "census", "rescore_as_is"}
    assert {m.name for m in METHODS.values() if m.needs and m.work in ("look", "generate")} == {"grad_norm", "layers"}


def test_a_step_and_its_repetition_hold_what_they_can():
    others = {"generate", "update", "forward_backward", "compute_loss", "step", "run", "call"}
    assert {m.name for m in METHODS.values() if m.in_step} == {m.name for m in METHODS.values() if m.work == "pass"} | others
    assert not METHODS["run"].repeatable
    assert METHODS["call"].repeatable
    assert {m.name for m in METHODS.values() if m.reports_values and not m.learns} == {
        "compute_loss", "grad_norm", "run", "call", "last_reshard", "census", "rescore_as_is", "layers",
    }  # fmt: skip


def test_an_update_brings_what_is_offloaded_but_adamw_s_state_where_that_comes_for_steps():
    role = RoleSpec(name="actor", kind="actor", model=None, optimizer=AdamW(offload=True), offload=True)
    assert onloads("update", role) == ("weights", "gradients")
    assert onloads("compute_log_probs", role) == ("weights",)
    assert onloads("generate", role) == ()


@each(
    "method, column, expected",
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
