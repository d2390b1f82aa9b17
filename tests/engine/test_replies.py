"""What a reply carries to another process: a value, or an error with all that it came from."""

import pickle

import pytest

import hfsdk as hf
from hfsdk.engine.calls.replies import Reply


class OwnError(Exception):
    """An error of the user's that pickles into nothing."""

    def __reduce__(self):
        raise TypeError("not this one")


def travelled(ask):
    return pickle.loads(pickle.dumps(Reply.of(ask)))


def test_a_value_comes_as_it_is():
    assert travelled(lambda: {"a": [1, 2]}).unpack() == {"a": [1, 2]}
    assert Reply.of(lambda: Reply(3, heard=7)).heard == 7


def test_an_error_comes_with_what_it_came_from_nearest_first():
    def ask():
        try:
            try:
                raise OSError("the disk is gone")
            except OSError as error:
                raise hf.WorkerDiedError("the worker of device 0 ended", role="actor", rank=1) from error
        except hf.WorkerDiedError as error:
            raise hf.DependencyError("its input failed") from error

    with pytest.raises(hf.DependencyError) as caught:
        travelled(ask).unpack()
    died = caught.value.__cause__
    assert (type(died), died.role, died.rank) == (hf.WorkerDiedError, "actor", 1)
    assert (type(died.__cause__), str(died.__cause__)) == (OSError, "the disk is gone")
    assert died.__cause__.__cause__ is None


def test_an_error_that_cannot_travel_is_told_by_its_class_and_words():
    def ask():
        raise OwnError("of mine")

    with pytest.raises(hf.HfsdkError, match="OwnError: of mine"):
        travelled(ask).unpack()
