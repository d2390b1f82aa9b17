"""``hf.doctor()`` says what is here, what lacks, and what Ray listens on."""

from __future__ import annotations

import importlib.metadata

import hfsdk as hf
from hfsdk import doctor as doctor_function


def test_the_report_is_readable():
    report = hf.doctor()
    text = repr(report)
    for words in ("python", "numpy", "/dev/shm", "tiny", "listen on every network interface", "127.0.0.1", "token"):
        assert words in text
    assert "<table>" in report._repr_html_()
    assert doctor_function is hf.doctor


def test_missing_packages_name_the_extra(monkeypatch):
    def version(name):
        if name in ("ray", "anywidget"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.13.0+cpu"

    monkeypatch.setattr(importlib.metadata, "version", version)
    report = hf.doctor()
    assert {f.name for f in report.missing} >= {"ray", "anywidget"}
    assert not report.can_run
    assert "pip install 'hfsdk[cpu]'" in repr(report)
    assert "only simulated sessions can run here" in repr(report)
    assert "break a CPU torch" in repr(report)
