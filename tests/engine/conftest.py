"""What several tests of the engine have."""

import pytest

pytest.register_assert_rewrite("trainer_harness", "trainer_laws", "whole_state")

from hfsdk.engine.process import gpus  # noqa: E402


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Have a machine with an NVIDIA driver, as far as files tell."""
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05")
    monkeypatch.setattr(gpus, "DRIVER_FILE", file)
