"""What a save says of itself is not believed where a byte of it is another one than was saved."""

from expect import refuses

import hfsdk as hf
from hfsdk.core.errors import CheckpointError


def test_a_save_that_says_something_else_than_it_did_is_refused_and_nothing_is_taken(tmp_path):
    with hf.Session.simulated("1x2 A100-80GB", seed=7) as session:
        session.actor("tiny")
        session.save(tmp_path)
        file = tmp_path / "state-1" / "save.json"
        said = file.read_text(encoding="utf-8")
        assert said.count('"seed": 7') == 1
        file.write_text(said.replace('"seed": 7', '"seed": 8'), encoding="utf-8")
        with refuses(CheckpointError, "save.json", "damaged"):
            session.load(tmp_path)
        file.write_text(said, encoding="utf-8")
        session.load(tmp_path)
