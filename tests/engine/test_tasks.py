"""The user's functions over columns, without the process they run in."""

import asyncio
import itertools
import math
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from expect import CEILING_S, refuses
from turns import let_others_run

import hfsdk
from hfsdk.core.arguments import Arguments, Scoring
from hfsdk.core.errors import CallError, OptionError, RewardFunctionError
from hfsdk.core.functions import Shipped
from hfsdk.core.reward_arguments import check_columns
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.process.tasks import call_reward, check_scores, run_task

TINY = str(Path(hfsdk.__file__).parent / "assets" / "tiny")
TABLE = Table({"prompt": Ragged.of([[72], [73]]), "response": Ragged.of([[72], [73]])})


def leave(*_, **__):
    raise SystemExit(2)


def stop(*_, **__):
    raise KeyboardInterrupt


def test_exit_and_interrupt_are_failures_of_the_function():
    kinds = {"reduce": CallError, "map": CallError, "compute_scores": RewardFunctionError}
    for (function, raised), (method, kind) in itertools.product(((leave, SystemExit), (stop, KeyboardInterrupt)), kinds.items()):
        given = Scoring if method == "compute_scores" else Arguments
        more = {"tokenizer": TINY, "column": "scores"} if given is Scoring else {}
        with refuses(kind, f"{function.__name__} raised {raised.__name__}"):
            run_task(method, TABLE, given(function=Shipped.of(function), **more), ["x"])


def test_what_a_function_keeps_is_there_at_its_next_call():
    def count(completions, kept=[]):  # noqa: B006  kept on purpose
        kept.append(len(completions))
        return [float(len(kept))] * len(completions)

    for number in (1, 2):
        again = Scoring(function=Shipped.of(count), tokenizer=TINY, column="scores")
        columns, _ = run_task("compute_scores", TABLE, again, ["scores"])
        assert list(columns["scores"]) == [number] * 2


def test_async_functions_are_awaited_on_one_loop():
    """What a function keeps, e.g. a client with its connections, belongs to the loop it was made on."""

    async def judge(completions, loops=[]):  # noqa: B006  kept on purpose
        loops.append(asyncio.get_running_loop())
        first, second = await asyncio.gather(asyncio.sleep(0, 1.0), asyncio.sleep(0, 2.0))
        return [first, second + len(set(loops))]

    for _ in range(2):
        scoring = Scoring(function=Shipped.of(judge), tokenizer=TINY, column="scores")
        columns, _ = run_task("compute_scores", TABLE, scoring, ["scores"])
        assert list(columns["scores"]) == [1.0, 3.0]


def test_an_async_function_that_is_interrupted_is_named_and_leaves_the_loop_to_the_next_call():
    async def breaks(completions):
        raise KeyboardInterrupt

    with refuses(RewardFunctionError, "breaks raised KeyboardInterrupt"):
        call_reward(breaks, "breaks", {"prompts": [], "completions": []})
    assert call_reward(lambda completions: asyncio.sleep(0, [1.0]), "f", {"prompts": [], "completions": ["a"]}) == [1.0]


def test_scores_may_be_tensors_of_one_number():
    assert check_scores([torch.tensor(1.5), np.array(2.0), torch.tensor(True)], "f", 3) == [1.5, 2.0, 1.0]
    with refuses(RewardFunctionError, "sample 1", "Tensor"):
        check_scores([torch.tensor(1.5), torch.tensor([2.0])], "f", 2)


def test_scores_that_float32_cannot_hold():
    for score in (1e300, -1e39, math.inf, math.nan, 10**400, np.float64(1e300)):
        with refuses(RewardFunctionError, "f returned", "sample 1", "finite"):
            check_scores([0.0, score], "f", 2)
    assert check_scores([np.float16(3), True, 3.4e38], "f", 3) == [3.0, 1.0, 3.4e38]


def test_a_reward_function_gets_the_completions_by_name_or_alone():
    functions = [
        hfsdk.data.vader_sentiment, lambda texts: hfsdk.data.vader_sentiment(texts), lambda answer, /: [len(t) for t in answer],
        lambda texts, scale=2.0: [scale * len(t) for t in texts], lambda completions, /: [len(t) for t in completions],
        lambda texts, **columns: [len(t) + len(columns["answer"]) for t in texts],
        lambda answer, **columns: [len(t) for t in columns["completions"]],
        lambda **columns: [len(t) for t in columns["completions"]],
        lambda completions, answer: [len(a) for a in answer],
    ]  # fmt: skip
    table = Table({**TABLE, "answer": ["12", "345"]})
    for number, function in enumerate(functions):
        scoring = Scoring(function=Shipped.of(function), tokenizer=TINY, column="scores")
        columns, _ = run_task("compute_scores", table, scoring, ["scores"])
        assert len(columns["scores"]) == 2, number


def test_a_column_that_a_function_must_be_given_is_told_with_those_there_are():
    functions = [
        (lambda completions, answer: [0.0], "'answer'"),
        (lambda prompts, completions, *, answer, level, **columns: [0.0], "'answer', 'level'"),
        (lambda completions, answer="": [0.0], ""),
        (lambda completions, finish_reason: [0.0], ""),
        (lambda texts: [0.0], ""),
        (lambda answer: [0.0], ""),
        (lambda completion_ids, completions, prompts: [0.0], ""),
        (lambda **columns: [0.0], ""),
    ]
    for number, (function, lacks) in enumerate(functions):
        words = check_columns(function, "exact_match", ["finish_reason", "group"])
        named = (f"needs {lacks}", "prompts, completions, completion_ids", "finish_reason, group", "with_columns(answer=[...])")
        assert bool(words) == bool(lacks), number
        assert not lacks or [name for name in named if name not in words] == [], (number, words)


def test_a_task_refuses_a_function_whose_column_is_missing():
    scoring = Scoring(function=Shipped.of(lambda completions, answer: [0.0]), tokenizer=TINY, column="scores")
    with refuses(RewardFunctionError, "needs 'answer'"):
        run_task("compute_scores", TABLE, scoring, ["scores"])


@pytest.mark.parametrize("method", ["map", "reduce"])
def test_results_that_cannot_travel_say_so(method):
    def lock(table):
        made = [threading.Lock() for _ in range(table.num_rows)]
        return {"x": made} if method == "map" else made

    with refuses(CallError, "lock", "returned list", "cannot travel", "numbers, texts"):
        run_task(method, TABLE, Arguments(function=Shipped.of(lock)), ["x"])


def test_functions_that_cannot_travel_say_so():
    held = threading.Lock()

    def closed_over(completions):
        with held:
            return [0.0 for _ in completions]

    with refuses(OptionError, "closed_over cannot travel", "lock", "inside the function"):
        Shipped.of(closed_over)


def test_functions_may_be_shipped_from_several_threads(monkeypatch):
    failures, real = [], cloudpickle.dumps

    def slow(function):
        let_others_run()
        return real(function)

    monkeypatch.setattr(cloudpickle, "dumps", slow)

    def ship():
        try:
            for _ in range(5):
                Shipped.of(leave)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ship) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CEILING_S)
    assert not failures
