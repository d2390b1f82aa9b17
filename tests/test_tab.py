"""What Tab offers in a notebook: what a user types, by both of IPython's ways to complete."""

from __future__ import annotations

import pytest
from expect import each, refuses

import hfsdk as hf

pytest.importorskip("IPython")

SESSION = {
    "actor", "attach", "batch", "batches", "branch", "calibrate", "close", "cluster", "compare", "cost", "critic",
    "dataflow", "demonstrations", "detach", "errors", "evaluate", "export_step", "forget", "fork", "history", "kept", "load",
    "logs", "memory", "messages", "models", "name", "pairs", "perf", "place", "placement", "plan", "predict", "prompts",
    "reference", "report", "reward", "rewind", "roles", "run", "save", "seed", "snapshot", "snapshots", "status",
    "subscribe", "trace", "train", "watch", "what_if",
}  # fmt: skip
BATCH = {
    "adopt", "alias", "cancel", "columns", "done", "drop", "inspect", "join", "map", "num_rows", "reduce", "state", "table",
    "take", "text", "to_pandas", "tokens", "wait", "with_columns",
}  # fmt: skip
STEP = {"actor", "batch", "critic", "numbers"}


@pytest.fixture(scope="module")
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    from hfsdk.viz.hooks import register

    shell = InteractiveShell()
    register(shell)
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.reference(session.actor("tiny"))
        session.reward(lambda completions: [0.0] * len(completions))
        step = hf.GRPO(n=2, max_new_tokens=3).step(session.models, session.prompts(["a", "b"], batch_size=2)[0])
        shell.user_ns.update(hf=hf, session=session, step=step, batch=step.batch)
        yield shell


@each("jedi", [False, True])
@each(
    "typed, wanted",
    [
        ("hf.", {*hf.__all__, "algorithms"}), ("session.", SESSION), ("batch.", BATCH), ("step.", STEP), ("step.batch.", BATCH),
        ("session.models.", {"actor", "reference", "reward"}),
    ],
)  # fmt: skip
def test_tab_offers_what_a_user_types_and_nothing_else(shell, jedi, typed, wanted):
    from IPython.core.completer import provisionalcompleter

    if jedi:
        pytest.importorskip("jedi")
    shell.Completer.use_jedi = jedi
    with provisionalcompleter():
        offered = {found.text.removeprefix(".") for found in shell.Completer.completions(typed, len(typed))}
    assert {name for name in offered if not name.startswith("_")} == wanted


@each("typed", ["session.trace.", "session.placement.", "session.dataflow.", "session.cluster."])
def test_tab_looks_into_what_a_session_holds(shell, typed):
    shell.Completer.use_jedi = False
    wanted = "num_devices" if "cluster" in typed else "to_pandas"
    assert any(found.endswith(wanted) for found in shell.Completer.attr_matches(typed))


def test_what_tab_looks_into_is_read_only(shell):
    session = shell.user_ns["session"]
    for name in ("models", "trace", "dataflow", "placement", "run", "cluster"):
        with refuses(AttributeError, f"Session.{name}", "read only"):
            setattr(session, name, None)
