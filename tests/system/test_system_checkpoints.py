"""A session's checkpoint on real workers: from two devices to one and back, and what is damaged or planted in it."""

import pickle
import shutil

import numpy as np
import pytest
from edited_saves import reseal, save_of
from expect import refuses
from system_helpers import declare, fingerprint, ppo_batch

import hfsdk as hf
from hfsdk.algorithms import ppo


@pytest.fixture(scope="module")
def single(live):
    """The roles of the shared session on one device, with its seed."""
    with hf.Session(devices=1, seed=live.session.seed, name="single") as session:
        yield declare(session, train="tp1", train_critic="tp1")


def learn(roles, batch):
    critic = roles.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
    actor = roles.actor.update(batch, ppo.PolicyLoss(), mini_batches=2)
    return [*critic.rows, *actor.rows]


def weights(roles):
    return [role.run(fingerprint) for role in (roles.actor, roles.critic)]


def close(rows, expected):
    """Whether updates computed the same but for the rounding of another layout."""
    return [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-3, abs=1e-5) and [
        row["grad_norm"] for row in rows
    ] == pytest.approx([row["grad_norm"] for row in expected], rel=1e-3)


def test_two_devices_go_on_alike_on_one_and_back(live, single, tmp_path):
    """Saved in the background while the next update runs; what was saved is the state before it."""
    before = [live.actor.version, live.critic.version]
    columns = ppo_batch(live).table()
    names = ("prompt", "response", "old_log_probs", "ref_log_probs", "values", "advantages", "returns", "temperature")
    given = {name: columns[name] for name in names}
    batch, there = live.session.batch(**given), single.session.batch(**given)
    saving = live.session.save(tmp_path / "two", wait=False)
    after = learn(live, batch)
    assert saving.wait().done
    values, learnt = live.critic.compute_values(batch)["values"].flat, weights(live)
    assert [save_of(tmp_path / "two")[0]["roles"][role]["num_updates"] for role in ("actor", "critic")] == before

    single.session.load(tmp_path / "two")
    assert [single.actor.version, single.critic.version] == before
    assert close(learn(single, there), after)
    assert np.abs(single.critic.compute_values(there)["values"].flat - values).max() <= 1e-4
    single.session.save(tmp_path / "one")

    live.session.load(tmp_path / "one")  # and back: what it learned there
    assert [live.actor.version, live.critic.version] == [updates + 2 for updates in before]
    assert weights(live) != learnt
    assert np.abs(live.critic.compute_values(batch)["values"].flat - values).max() <= 1e-4
    live.session.load(tmp_path / "two")
    assert learn(live, batch) == after, "its own layout: to the bit"
    assert weights(live) == learnt


def damages(state, files):
    """Yield (what was done, name of the file) with every file of a save damaged in every way, and mended again."""
    whole = {name: (state / name).read_bytes() for name in files}
    for name, content in whole.items():
        middle = len(content) // 2
        for how, other in {
            "truncated": content[:-1], "flipped": content[:middle] + bytes([content[middle] ^ 8]) + content[middle + 1 :],
            "swapped": next(x for n, x in whole.items() if n != name), "foreign": b"not ours", "empty": b"", "missing": None,
        }.items():  # fmt: skip
            (state / name).unlink() if other is None else (state / name).write_bytes(other)
            yield how, name
            (state / name).write_bytes(content)


def test_every_damage_is_seen_before_anything_is_replaced(single, tmp_path):
    batch = ppo_batch(single)
    single.session.save(tmp_path)
    learn(single, batch)
    before, version = weights(single), single.critic.version
    save, state = save_of(tmp_path)
    files = [name for name in save["files"] if name.startswith("critic/")]
    assert {"critic/.metadata", "critic/common.pt", "critic/__0_0.distcp"} < set(files)
    seen = 0
    for how, name in damages(state, [*files, "save.json", "../session.json"]):
        with refuses(hf.CheckpointError, name.split("/")[-1]):
            single.session.load(tmp_path)
        seen += 1
        assert single.critic.version == version, how
    assert seen == 6 * (len(files) + 2)
    assert weights(single) == before
    single.session.load(tmp_path)
    assert weights(single) != before


class Canary:
    """A pickle that leaves a file when it is read as torch reads an index."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.filterwarnings("ignore:actor came from .* before loading ended")
def test_nothing_in_a_strangers_checkpoint_is_run(single, tmp_path):
    """Checksums that fit do not help: every pickle is read by what knows a few names only."""
    single.session.save(tmp_path / "good")
    before, canary = weights(single), tmp_path / "canary"
    for name in ("critic/.metadata", "critic/common.pt", "critic/__0_0.distcp", "save.json", "session.json"):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        _, state = save_of(tmp_path / "bad")
        file = tmp_path / "bad" / name if name == "session.json" else state / name
        content = b"" if name.endswith("n") or name.endswith("pt") else file.read_bytes()
        file.write_bytes(pickle.dumps(Canary(canary)) + content)
        if "/" in name:
            reseal(tmp_path / "bad")
        with pytest.raises(hf.CheckpointError):
            single.session.load(tmp_path / "bad")
        shutil.rmtree(tmp_path / "bad")
        assert not canary.exists(), name
        assert weights(single) == before, name
