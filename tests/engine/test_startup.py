"""What makes workers start quickly changes nothing else."""

import gc
import importlib
import sys
import weakref

import pytest

from hfsdk.engine.process import startup


class Knot:
    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def as_before():
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_is_off_meanwhile_and_what_was_imported_is_set_aside():
    with startup.importing():
        assert not gc.isenabled()
        with pytest.raises(KeyError), startup.importing():
            raise KeyError
        assert not gc.isenabled(), "the inner one leaves it to the outer one"
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000


def test_modules_that_freeze_and_melt_are_kept_from_it_and_collect(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "freezing.py").write_text("""
import gc
def make(kind):
    made = kind()
    gc.freeze()
    return made
def end():
    gc.unfreeze()
    assert gc.isenabled()
    gc.collect()
""")
    with startup.importing():
        imported = Knot()
        freezing = importlib.import_module("freezing")
    startup.keep_frozen("freezing")
    set_aside = gc.get_freeze_count()
    made, old = weakref.ref(freezing.make(Knot)), weakref.ref(imported)
    del imported
    freezing.end()
    assert made() is None, "what it made was not frozen"
    assert old() is not None
    assert 0.9 * set_aside < gc.get_freeze_count() <= set_aside, "and what was before still is"


def test_a_module_is_not_there_unless_it_was_imported_before(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "optional_of_someone.py").write_text("here = True")
    with startup.not_there("optional_of_someone"), pytest.raises(ImportError):
        importlib.import_module("optional_of_someone")
    try:
        assert importlib.import_module("optional_of_someone").here
        with startup.not_there("optional_of_someone"):
            assert importlib.import_module("optional_of_someone").here
    finally:
        sys.modules.pop("optional_of_someone", None)


def test_a_module_is_stood_in_for_and_whoever_imports_it_later_gets_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "with_a_server"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the packages around it are not imported')")
    (package / "protocol.py").write_text("class Request: pass")
    try:
        with startup.stood_in("with_a_server.protocol"):
            from with_a_server.protocol import Request

            assert Request is startup.NotImported
            assert not isinstance(startup, Request)
            assert getattr(sys.modules["with_a_server.protocol"], "__file__", None) is None
        (package / "__init__.py").write_text("")
        importlib.invalidate_caches()
        found = importlib.import_module("with_a_server.protocol").Request
        assert found is not Request
        with startup.stood_in("with_a_server.protocol"):
            assert importlib.import_module("with_a_server.protocol").Request is found, "it was imported before"
    finally:
        for name in ("with_a_server.protocol", "with_a_server"):
            sys.modules.pop(name, None)
