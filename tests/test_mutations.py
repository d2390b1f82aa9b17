"""What ``scripts/mutate.py`` breaks: every line is there, every room has a mutation, every test it names exists."""

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FEWEST = 100


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
    sys.modules["mutate"] = module = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutate"]


@pytest.fixture(scope="module")
def mutations(mutate):
    return mutate.entries()


def test_every_line_that_is_broken_is_there_once(mutate, mutations):
    assert [m.name for m in mutate.stale(mutations)] == []


def test_there_are_enough_mutations_and_each_has_a_name_of_its_own(mutations):
    names = [m.name for m in mutations]
    assert len(names) >= FEWEST
    assert sorted(names) == sorted(set(names))
    changes = [(m.file, m.old, m.new) for m in mutations]
    assert len(changes) == len(set(changes))


def test_every_room_has_a_mutation(mutate, mutations):
    package = ROOT / "hfsdk"
    files = [path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"]
    rooms = {mutate.Mutation(name="", file=file, old="", new="", tests="").room for file in files}
    assert {room for room in rooms - {m.room for m in mutations} if (package / room).is_dir()} == set()
    assert any(m.file.endswith(".js") for m in mutations)


def test_the_tests_that_a_mutation_names_exist(mutations):
    missing = []
    for mutation in mutations:
        for word in (one for one in shlex.split(mutation.tests) if one.startswith("tests")):
            file, _, test = word.partition("::")
            path = ROOT / file
            name = test.partition("[")[0].split("::")[-1]
            if not path.exists() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
                missing.append(f"{mutation.name}: {word}")
    assert not missing


def test_a_stale_line_is_told(mutate, tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "x.py").write_text("one = 1\ntwo = 2\ntwo = 2\n")

    def is_stale(old, new="three = 3", file="core/x.py"):
        return mutate.Mutation(name="", file=file, old=old, new=new, tests="").is_stale(tmp_path)

    assert not is_stale("one = 1")
    assert is_stale("two = 2")
    assert is_stale("four = 4")
    assert is_stale("one = 1", "one = 1")
    assert is_stale("one = 1", file="core/y.py")


def test_what_was_found_is_kept_while_the_entry_is_the_same(mutate, tmp_path, capsys):
    file = tmp_path / "found.json"
    entry = {"name": "a", "file": "core/x.py", "old": "1", "new": "2", "tests": "tests/test_text.py"}
    same, other = mutate.Mutation(**entry), mutate.Mutation(**entry | {"new": "3"})
    mutate.Findings(file).add(mutate.Finding("a", "core", "make test", "tests/test_text.py::test_x", 1.0, same.text))
    assert [one.who for one in mutate.Findings(file).of([same])] == ["make test"]
    assert mutate.Findings(file).of([other]) == []
    assert "make test" in capsys.readouterr().out


def test_a_share_begins_with_what_was_tried_longest_ago(mutate, tmp_path, capsys):
    three = [mutate.Mutation(name=name, file="core/x.py", old="1", new="2", tests="") for name in "abc"]
    findings = mutate.Findings(tmp_path / "found.json")
    for mutation, when in ((three[0], 20.0), (three[1], 10.0)):
        findings.add(mutate.Finding(mutation.name, "core", "make test", "", 1.0, mutation.text, when))
    assert [m.name for m in findings.oldest_first(three)] == ["c", "b", "a"]
    assert [one.name for one in findings.now(three, since=15.0)] == ["a"]


def test_one_survivor_or_too_few_in_make_test_is_not_enough(mutate, capsys):
    def found(*who):
        return [mutate.Finding(str(k), "core", w, "", 1.0, "") for k, w in enumerate(who)]

    ten = ["make test"] * 9
    assert mutate.told(found(*ten, "make check"), 10)
    assert not mutate.told(found(*ten, mutate.SURVIVED), 10)
    assert not mutate.told(found(*ten[1:], "make check", "make check"), 10)
    assert not mutate.told(found(*ten), 10)
    assert "not killed: 9: SURVIVED" in capsys.readouterr().out
