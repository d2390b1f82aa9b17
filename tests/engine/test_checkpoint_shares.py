"""What ranks compare before they read a role back after a death: their share of the save's files, and the save's own word."""

import json
import zlib
from types import SimpleNamespace

import pytest
from expect import refuses

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
from hfsdk.core.errors import CheckpointError
from hfsdk.core.files import FORMAT, INDEX, SAVE, WITHOUT_CHECKSUMS, FileSum
from hfsdk.engine.training.checkpoint import _check_share

FILES = ("actor/common.pt", "actor/__0_0.distcp", "critic/common.pt")


@pytest.fixture
def state(tmp_path):
    """A folder of one save: of files that hold their names."""
    root = tmp_path / "state-1"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    content = json.dumps({"files": {name: [len(name), zlib.crc32(name.encode())] for name in FILES}}).encode()
    (root / SAVE).write_bytes(content)
    index = {"format": FORMAT, "saves": [["state-1", len(content), zlib.crc32(content)]]}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return root


def check(state, ranks=2):
    for rank in range(ranks):
        _check_share(state / "actor", SimpleNamespace(rank=rank, mesh=SimpleNamespace(layout=SimpleNamespace(size=ranks))))


def test_a_whole_save_is_taken(state):
    assert FileSum.of(state / FILES[0]).num_bytes == len(FILES[0])
    check(state)
    (state.parent / INDEX).unlink()  # a save after it, which was interrupted, may have taken the index's place
    check(state)


@pytest.mark.parametrize("name", FILES[:2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_flipped_byte_is_seen_by_the_rank_whose_share_it_is(state, name, ranks):
    (state / name).write_text("?" + name[1:])
    with refuses(CheckpointError, name.split("/")[1]):
        check(state, ranks)


def test_another_roles_damage_is_not_looked_for(state):
    (state / "critic/common.pt").write_text("?")
    check(state)


def test_a_save_whose_own_word_is_missing_is_not_believed(state):
    (state / SAVE).unlink()
    with refuses(CheckpointError, SAVE):
        check(state)


def test_a_save_whose_own_word_was_changed_is_not_believed(state):
    told = json.loads((state / SAVE).read_text())
    told["files"]["actor/common.pt"][1] ^= 1
    (state / SAVE).write_text(json.dumps(told, separators=(",", ": ")))
    with refuses(CheckpointError, SAVE):
        check(state)


def test_a_save_without_checksums_is_taken_where_the_index_says_that_it_is_one(state):
    (state / SAVE).unlink()
    (state.parent / INDEX).write_text(json.dumps({"format": WITHOUT_CHECKSUMS, "state": "state-1"}))
    check(state)
    (state.parent / INDEX).write_text(json.dumps({"format": WITHOUT_CHECKSUMS, "state": "state-2"}))
    with refuses(CheckpointError, SAVE):
        check(state)
