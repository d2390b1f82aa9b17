"""The public names and signatures are pinned: a change here is a decision. ``python tests/test_public_api.py`` writes them anew."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import hfsdk as hf

PINNED = Path(__file__).parent / "data" / "public_api.json"
CLASSES = ["Session", "Batch", "Layout", "ModelSpec", "ClusterSpec", "ReshardPlan", "PromptStream", "Run", "Metrics", "Trace"]
HANDLES = ["ActorModel", "CriticModel", "ReferenceModel", "RewardModel", "CostModel"]


def members(cls) -> dict[str, str]:
    found = {}
    for name, _ in inspect.getmembers(cls):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(cls, name)
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        found[name] = str(inspect.signature(function)) if callable(function) else "property"
    return found


def current() -> dict[str, object]:
    import hfsdk.models as models

    classes = {name: members(getattr(hf, name)) for name in CLASSES}
    classes |= {name: members(getattr(models, name)) for name in HANDLES}
    classes["Session"]["__init__"] = str(inspect.signature(hf.Session.__init__))
    return {"names": sorted(hf.__all__), "classes": classes, "primitive": str(inspect.signature(hf.primitive))}


def test_names_and_signatures_are_as_pinned():
    assert current() == json.loads(PINNED.read_text())


def test_a_run_shows_on_tab_what_is_pinned():
    assert {name for name in dir(hf.Run()) if not name.startswith("_")} == set(members(hf.Run)), "its attributes are shown too"


def test_every_public_method_says_what_it_does():
    import hfsdk.models as models

    for cls in [hf.Session, hf.Run, *(getattr(models, name) for name in HANDLES)]:
        for name in members(cls):
            assert (getattr(cls, name).__doc__ or "").strip(), f"{cls.__name__}.{name} has no docstring"


def test_all_names_resolve():
    for name in hf.__all__:
        assert getattr(hf, name) is not None
    assert set(hf.__all__) <= set(dir(hf))


if __name__ == "__main__":
    PINNED.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
