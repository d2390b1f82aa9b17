"""docs/checklist.md is true: forty rows, each with a place in the code and with tests of its own in this folder."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.*?) \| (.*?) \|$", (ROOT / "docs" / "checklist.md").read_text(encoding="utf-8"), re.M)
DEFINED = [
    name for file in Path(__file__).parent.glob("test_*.py")
    for name in re.findall(r"^ *def (test_\w+)", file.read_text(encoding="utf-8"), re.M)
]  # fmt: skip


def test_every_point_has_a_row_and_a_test_in_this_folder():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 41))
    for number, point, _, tests in ROWS:
        named = re.findall(r"`(test_\w+)`", tests)
        assert any(name.startswith(f"test_point_{int(number):02d}_") for name in named), (number, point)
        assert set(named) <= set(DEFINED), (number, set(named) - set(DEFINED))


def test_every_place_is_there():
    for number, _, where, _ in ROWS:
        for path in re.findall(r"`([a-z_/]+\.py)`", where):
            assert (ROOT / "hfsdk" / path).is_file(), (number, path)
        for module, name in re.findall(r"`(rlmath|groups|grpo|rloo)\.(\w+)`", where):
            assert f"def {name}(" in (ROOT / "hfsdk" / "algorithms" / f"{module}.py").read_text(encoding="utf-8"), (number, name)


def test_names_of_tests_have_two_digits():
    """So that ``-k point_04`` is point 4 alone."""
    assert [name for name in DEFINED if re.match(r"test_point_\d(?!\d)", name)] == []
