"""What several tests of the engine have."""

import pytest

pytest.register_assert_rewrite(
    "trainer_harness",
    "trainer_laws",
    "choice_laws",
    "lora_laws",
    "family_laws",
    "share_laws",
    "checkpoint_laws",
    "whole_state",
)

from hfsdk.engine.process import gpus  # noqa: E402


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Have a machine with an NVIDIA driver, as far as files tell."""
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05")
    monkeypatch.setattr(gpus, "DRIVER_FILE", file)


def pytest_generate_tests(metafunc):
    """Ask each law of the layouts that its check is made on (``layout_sweep``)."""
    if hasattr(metafunc.function, "check"):
        metafunc.parametrize("layout", metafunc.module.SWEEP.checks[metafunc.function.check])


@pytest.fixture(scope="module")
def results(case, request):
    """``results(layout, check)`` -> one entry per rank; only the layouts of this run's tests are computed."""
    from trainer_harness import all_checks, once_for_each_size

    here, module = [item for item in request.session.items if item.path == request.path], request.module
    asked = {"tp1"} | {item.callspec.params.get("layout") for item in here if hasattr(item, "callspec")}
    sizes = {name: size for name, size in module.SWEEP.layouts.items() if name in asked}
    return once_for_each_size(all_checks, sizes, case["root"], module.SWEEP, module.CHECKS, module.HARNESS)
