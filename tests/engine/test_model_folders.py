"""A model's folder on its way to another node, and the address at which processes of several nodes meet."""

from pathlib import Path

import numpy as np
from expect import refuses

from hfsdk.engine.process import rendezvous
from hfsdk.engine.weights import model_folders
from hfsdk.engine.weights.model_folders import Manifest, Receiver


def test_folder_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setenv("HFSDK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_folders, "PIECE_BYTES", 1000)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").write_text("")
    (folder / "model.safetensors").write_bytes(np.random.default_rng(0).bytes(2500))
    (folder / "training.log").write_text("not the model's")
    manifest = Manifest.of(folder)
    assert model_folders.find(manifest) == str(folder)
    assert model_folders.find(manifest, own_path=False) == ""
    pieces = list(model_folders.read_pieces(manifest))
    assert [len(piece) for _, piece in pieces] == [2, 0, 1000, 1000, 500]
    for _ in range(2):  # two sessions may bring the same
        receiver = Receiver(manifest)
        for name, piece in pieces:
            receiver.write(name, piece)
        receiver.finish()
    found = Path(model_folders.find(manifest, own_path=False))
    assert sorted(p.name for p in found.iterdir()) == ["config.json", "empty.txt", "model.safetensors"]
    assert list(found.parent.iterdir()) == [found]
    (folder / "config.json").write_text("[]")
    assert model_folders.find(manifest) == str(found), "another version at the same path is not taken for it"
    with refuses(OSError, "changed"):
        Receiver(manifest).finish()
    assert list(found.parent.iterdir()) == [found]


def test_large_files_are_told_apart_by_samples(tmp_path):
    size = 3 * model_folders.NUM_SAMPLES * model_folders.SAMPLE_BYTES
    content, length = bytearray(size), 3 * model_folders.SAMPLE_BYTES
    path = tmp_path / "model.safetensors"
    marks = set()
    for changed in (None, 0, size // 2 // model_folders.SAMPLE_BYTES * model_folders.SAMPLE_BYTES, size - 1):
        if changed is not None:
            content[changed : changed + length] = b"1" * min(length, size - changed)
        path.write_bytes(content)
        marks.add(model_folders.FileMark.of(path))
    assert len(marks) == 4


def test_interfaces():
    assert rendezvous.interface_of("127.0.0.1").startswith("lo")
    assert rendezvous.interface_of("127.0.0.2") == "lo"
    assert rendezvous.interface_of("203.0.113.9") == ""
