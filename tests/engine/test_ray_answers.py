"""What the ranks of a call answered, put together: lengths by row of the batch, bytes over ranks, rows that are not scored."""

import numpy as np
import pytest

pytest.importorskip("ray")

from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallCancelledError, CallError, ColumnError
from hfsdk.core.table import Ragged
from hfsdk.core.unscored import NOT_SCORED
from hfsdk.engine.ray.runtime import failure, store_of
from hfsdk.engine.worker.answer import Answer


def call_of(num_rows):
    return Call(id=3, role="actor", method="generate", writes=("response", "scores"), num_rows=num_rows)


def answer_of(rows, responses, scores):
    answer = Answer(rows=np.array(rows), part=f"of {rows}")
    answer.describe({"response": Ragged.of(responses, np.int32), "scores": np.array(scores, np.float32)})
    return answer


def test_lengths_and_rows_not_scored_are_by_row_of_the_batch_whoever_had_the_row():
    answers = [answer_of([3, 0], [[1], [1, 2, 3]], [NOT_SCORED, 1.0]), answer_of([1, 2], [[], [5, 6]], [0.0, NOT_SCORED])]
    stored = store_of(call_of(4), answers)
    assert stored.columns["response"].lengths.tolist() == [3, 0, 2, 1]
    assert sorted(stored.columns["scores"].unscored.tolist()) == [2, 3]
    assert [part.rows.tolist() for part in stored.parts] == [[3, 0], [1, 2]]
    assert stored.columns["response"].num_bytes == sum(one.columns["response"].num_bytes for one in answers)


def test_a_rank_without_rows_says_nothing_of_a_column_that_others_wrote():
    stored = store_of(call_of(1), [answer_of([], [], []), answer_of([0], [[1, 2]], [1.0])])
    assert [part.rank for part in stored.parts] == [1]
    assert store_of(call_of(1), [Answer(rows=np.array([0]))]) is None


def test_a_call_ends_with_the_error_of_the_rank_that_had_it():
    peer, cancelled = Answer("peer"), Answer("cancelled")
    error = failure([peer, Answer("error", error=CallError("out of memory"))], call_of(1))
    assert (type(error), error.rank) == (CallError, 1)
    assert isinstance(failure([peer, Answer("error", error=ColumnError("gone"))], call_of(1)), ColumnError)
    assert isinstance(failure([peer, cancelled], call_of(1)), CallCancelledError)
    assert failure([Answer(), Answer()], call_of(1)) is None
