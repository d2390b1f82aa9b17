"""Saves on real workers in other layouts, to a store, to disks that are full, and with a worker killed in the middle."""

import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from edited_saves import reseal, save_of
from expect import until
from system_helpers import OPENINGS, fingerprint, pids

import hfsdk as hf


def value_loss(out, b):
    return (out.values - b["goal"]) ** 2


def slow_writes(rank):
    """Make the files of this worker's saves take half a minute."""
    from hfsdk.engine.training import checkpoint

    quick = checkpoint._Writer.write

    def slow(self):
        time.sleep(30)
        return quick(self)

    checkpoint._Writer.write = slow


def rows(session):
    rng = np.random.default_rng(0)
    prompts = [list(text.encode()) for text in OPENINGS]
    responses = [rng.integers(32, 120, n).tolist() for n in rng.integers(1, 12, len(prompts))]
    goal = [rng.standard_normal(len(r)).tolist() for r in responses]
    return session.batch(prompt=prompts, response=responses, goal=goal)


def learn(critic, batch):
    return critic.update(batch, value_loss, mini_batches=2).rows


def store(folder):
    """An address that fsspec reaches by itself: what of an object store matters is that it renames nothing."""
    pytest.importorskip("fsspec")
    return f"local://{folder}/store"


def opened(name, layout):
    session = hf.Session(devices=2, seed=3, name=name)
    critic = session.critic("tiny", train=layout, optimizer=hf.AdamW(lr=1e-3))
    return session, critic, rows(session)


@pytest.fixture(scope="module")
def home(ray_here):
    """A critic at tp2 that has learned a little."""
    session, critic, batch = opened("home", "tp2")
    learn(critic, batch)
    yield session, critic, batch
    session.close()


def test_another_layout_goes_on_alike(home, tmp_path):
    """Saved in the background while the next update runs; what was saved is the state before it."""
    session, critic, mine = home
    before = critic.version
    saving = session.save(tmp_path, wait=False)
    after = learn(critic, mine)
    assert saving.wait().done
    assert save_of(tmp_path)[0]["roles"]["critic"]["num_updates"] == before
    values = critic.compute_values(mine)["values"].flat
    weights = critic.run(fingerprint)
    with hf.Session(devices=2, seed=3, name="elsewhere") as other:
        batch = rows(other)
        for layout in ("dp2", "pp2"):
            there = other.critic("tiny", train=layout, optimizer=hf.AdamW(lr=1e-3))
            other.load(tmp_path)
            assert there.version == before
            for row, expected in zip(learn(there, batch), after, strict=True):
                assert row == pytest.approx(expected, rel=1e-4)
            assert np.abs(there.compute_values(batch)["values"].flat - values).max() <= 1e-4
            other.save(tmp_path / layout)
            if layout == "dp2":
                other.save(store(tmp_path))
            else:
                other.load(tmp_path / "dp2")
                weights_there = there.run(fingerprint)
                other.load(store(tmp_path))
                assert there.run(fingerprint) == weights_there, "from a store, in another layout than it was saved in"
            there.release()
    session.load(tmp_path / "pp2")  # and back: what it learned there
    assert critic.version == before + 2
    assert critic.run(fingerprint) != weights
    assert np.abs(critic.compute_values(mine)["values"].flat - values).max() <= 1e-4
    session.load(tmp_path)
    assert learn(critic, mine) == after, "its own layout: to the bit"
    assert critic.run(fingerprint) == weights


def test_a_store_gives_to_the_bit_what_it_was_given(home, tmp_path):
    """Every worker sends its share, and reads what it needs."""
    session, critic, batch = home
    address = store(tmp_path)
    assert session.save(address) == address
    files, state = save_of(tmp_path / "store")
    assert {name.split("/")[1] for name in files["files"]} == {
        ".metadata", "common.pt", "metadata.json", "__0_0.distcp", "__1_0.distcp",
    } == {path.name for path in (state / "critic").iterdir()}  # fmt: skip
    after = learn(critic, batch)
    session.load(address)
    assert learn(critic, batch) == after, "weights and optimizer"
    weights = critic.run(fingerprint)
    middle = (state / "critic" / "__1_0.distcp").stat().st_size // 2
    with (state / "critic" / "__1_0.distcp").open("rb+") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 8]))
    with pytest.raises(hf.CheckpointError, match=r"damaged: local://.*__1_0\.distcp has other content"):
        session.load(address)
    assert critic.run(fingerprint) == weights


def test_other_models_are_refused(home, tmp_path):
    session, critic, _ = home
    session.save(tmp_path)
    reseal(tmp_path, lambda save: save["roles"]["critic"]["model"].update(num_layers=2))
    weights = critic.run(fingerprint)
    with pytest.raises(hf.CheckpointError, match="num_layers 2 -> 4"):
        session.load(tmp_path)
    assert critic.run(fingerprint) == weights


def limit_files(rank, num_bytes):
    """Let no file of this process grow beyond so many bytes."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_disk_that_takes_no_more_leaves_the_last_save(home, tmp_path):
    session, critic, batch = home
    session.save(tmp_path)
    saved = critic.run(fingerprint)
    learn(critic, batch)
    critic.run(lambda rank: limit_files(rank, 300_000))
    try:
        with pytest.raises(hf.CheckpointError, match="File too large"):
            session.save(tmp_path)
    finally:
        critic.run(lambda rank: limit_files(rank, -1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-1"]
    assert len(session.predict()) > 0, "who saved was told; nobody else is"
    session.load(tmp_path)
    assert critic.run(fingerprint) == saved


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_before_and_survived(home, small_disk, monkeypatch):
    session, critic, _ = home
    with pytest.raises(hf.CheckpointError, match=r"the state takes .* MB and the disk has .* MB free"):
        session.save(small_disk)
    assert list(small_disk.iterdir()) == []
    with monkeypatch.context() as patch:  # as if somebody else filled it in between
        patch.setattr("hfsdk.state.checkpoint.Saving._check_space", lambda self: None)
        with pytest.raises(hf.CheckpointError, match="No space left"):
            session.save(small_disk)
    assert list(small_disk.iterdir()) == []
    with pytest.raises(hf.CheckpointError, match=r"cannot write the model .* MB free"):
        critic.save_pretrained(small_disk / "model")
    assert list(small_disk.rglob("*.*")) == []
    assert critic.run(lambda rank: 1) == [1, 1]


def test_a_worker_killed_while_it_writes(home, tmp_path):
    """Training goes on while files are written; the last complete save is what comes back."""
    session, critic, batch = home
    session.save(tmp_path)
    session.save(store(tmp_path / "elsewhere"))  # what comes back
    saved = critic.run(fingerprint)
    critic.run(slow_writes)
    learn(critic, batch)
    saving = session.save(tmp_path, wait=False)
    learn(critic, batch)
    assert not saving.done, "the pool was held for the copy only"
    until("the second state", lambda: list(tmp_path.glob("state-2.partial/critic/common.pt")))
    os.kill(pids(session)[1], signal.SIGKILL)
    with pytest.raises(hf.CheckpointError, match="ended while it wrote critic's state; save again"):
        saving.wait(60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "session.json", "state-1"]
    with pytest.raises(hf.WorkerDiedError, match=r"critic comes back with checkpoint local://.*state-1-\w+ \(4 updates lost\)"):
        critic.compute_values(batch).wait(timeout=120)
    assert critic.run(fingerprint) == saved
    session.save(tmp_path)
    session.load(tmp_path)
    assert critic.run(fingerprint) == saved
