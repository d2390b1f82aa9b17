"""Attributes that are not there say what does that here."""

import copy
import pickle

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core import hints
from hfsdk.models import ActorModel, CostModel, CriticModel, ReferenceModel, RewardModel

HANDLES = (ActorModel, CriticModel, ReferenceModel, RewardModel, CostModel)


@pytest.fixture(scope="module")
def session():
    with hf.Session.simulated("1x1 A100-80GB") as session:
        yield session


@pytest.fixture(scope="module")
def actor(session):
    return session.actor("tiny")


@pytest.fixture(scope="module")
def batch(session):
    return session.batch(prompt=["the film is", "a dull"])


def said_of(thing, name):
    with pytest.raises(AttributeError) as error:
        getattr(thing, name)
    return str(error.value)


class TestSaid:
    @each(
        "name, hint",
        [("fit", "session.train("), ("save_model", "actor.save_pretrained(folder)"), ("traces", "did you mean 'trace' or")],
    )
    def test_of_a_session(self, session, name, hint):
        assert said_of(session, name).startswith(f"Session has no '{name}'; ")
        assert hint in said_of(session, name)

    @each(
        "name, hint",
        [("save_model", "save_pretrained(folder)"), ("compute_values", "session.critic(model)"), ("state_dict", "run(f)")],
    )
    def test_of_a_model(self, actor, name, hint):
        assert said_of(actor, name).startswith(f"ActorModel has no '{name}'; ")
        assert hint in said_of(actor, name)

    @each(
        "name, hint",
        [
            ("prompt", "a column is batch['prompt']"),
            ("union", "batch.join("),
            ("numpy", "batch.table("),
            ("rewards", "a column is batch['scores']. "),
            ("responses", "batch.text()"),
        ],
    )
    def test_of_a_batch(self, batch, name, hint):
        assert hint in said_of(batch, name)

    def test_of_a_ragged_column(self):
        column = hf.Ragged.of([[1, 2], [3]])
        assert "column.flat has all values" in said_of(column, "mean")

    @each("name", ["to_pandas", "metrics", "df"])
    def test_of_a_run(self, name):
        assert "run.history is a DataFrame" in said_of(hf.Run(), name)

    def test_of_a_column_by_another_name(self, session):
        batch = session.batch(prompt=["a"], scores=[1.0])
        with refuses(hf.ColumnError, "'rewards'", "prompt, scores", "calls it scores"):
            batch["rewards"]


class TestHarmless:
    def test_private_names_are_plainly_missing(self, batch):
        assert said_of(batch, "_repr_svg_") == "'Batch' object has no attribute '_repr_svg_'"
        assert not hasattr(batch, "__array__")

    def test_an_error_inside_a_property_is_its_own(self):
        class Broken(hints.AttributeHints):
            @property
            def size(self):
                return self.nothing.of_it

        assert "Broken has no 'nothing'" in said_of(Broken(), "size")

    def test_a_column_is_copied_and_pickled(self):
        column = hf.Ragged.of([[1, 2], [3]], np.int64)
        assert copy.deepcopy(column) == column
        assert pickle.loads(pickle.dumps(column)) == column


@each(
    "table, kinds",
    [(hints.SESSION, [hf.Session]), (hints.HANDLE, HANDLES), (hints.BATCH, [hf.Batch]), (hints.RAGGED, [hf.Ragged]),
     (hints.RUN, [hf.Run])],
)  # fmt: skip
def test_no_hint_is_for_what_is_there(table, kinds):
    names = [name for names in table for name in names.split()]
    assert len(names) == len(set(names)), "a name has one hint"
    assert not [name for name in names if all(hasattr(kind, name) for kind in kinds)]
