"""The campaign's bookkeeping: what was tried, against its targets, summed over runs, each failure with what repeats it."""

import contextlib
import json
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def fire(monkeypatch):
    """The campaign's modules that need no session."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    from fire import campaign, ledger, own, trials

    yield {"campaign": campaign, "ledger": ledger, "own": own, "trials": trials}
    for name in set(sys.modules) - before:
        if name == "common" or name.split(".")[0] == "fire":
            del sys.modules[name]


def ledger_of(ledger, minutes, *trials):
    return ledger.Ledger(minutes, [ledger.Trial(**{"trial": 0, "what": "", "seconds": 1.0, **t}) for t in trials], [{"seed": 1}])


def full(ledger):
    """Enough of everything for an hour."""
    counts = {k.name: k.target or 1 for k in ledger.KINDS}
    trials = [{"kind": name, "count": count} for name, count in counts.items()]
    trials += [{"kind": k.name, "count": count, "tags": (tag,)} for k in ledger.KINDS for tag, count in k.tags.items()]
    return [*trials, {"kind": "lines", "count": 500}, {"kind": "starts", "count": 50, "tags": ("start-up",)}]


def missed(found, only=()):
    return {figure.name for figure in found.report(only).missed}


def test_an_hour_has_the_whole_targets_and_less_time_half_of_its_share(fire):
    ledger = fire["ledger"]
    assert missed(ledger_of(ledger, 60.0, *full(ledger))) == set()
    few = ledger_of(ledger, 60.0, *[t for t in full(ledger) if t["kind"] != "fuzz"], {"kind": "fuzz", "count": 9_999})
    assert missed(few) == {"fuzz tried"}
    wanted = {name: target for name, _, target in ledger_of(ledger, 12.0).targets()}
    assert (wanted["kills tried"], wanted["kills (place) tried"], wanted["fuzz tried"], wanted["kernel tried"]) == (6, 2, 1000, 1)
    assert {target for _, _, target in ledger_of(ledger, 4.0).targets()} == {1}, "how much four minutes hold is the machine's pace"


def test_a_failure_misses_whatever_was_tried(fire):
    ledger = fire["ledger"]
    bad = {"kind": "damage", "failure": "wrong state", "why": "loaded", "num_failed": 1, "trial": 7, "seed": 3, "what": "flipped"}
    found = ledger_of(ledger, 60.0, *full(ledger), bad)
    assert missed(found) == {"damage failed"}
    assert "--seed 3 --only damage --trial 7" in found.failures()
    assert missed(found, only=["kills"]) == set(), "what was not asked for is not missed"
    with_adapters = ledger_of(ledger, 60.0, {**bad, "kind": "kills", "tags": ("LoRA", "explain_gap")})
    assert "--seed 3 --only kills --trial 7 --lora" in with_adapters.failures()
    assert "1 in `explain_gap`, 1 with LoRA roles" in with_adapters.markdown()
    assert "61" in next(line for line in found.counts().splitlines() if line.startswith("damage"))


def test_runs_add_up_and_read_back(fire, tmp_path):
    ledger = fire["ledger"]
    half = ledger_of(ledger, 30.0, {"kind": "kills", "count": 30, "tags": ("place",)})
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text(json.dumps(half.as_dict()))
    both = ledger.Ledger.merged(map(ledger.Ledger.read, paths))
    assert (both.minutes, both.tried("kills", tag="place"), len(both.runs)) == (60.0, 60, 2)
    assert "kills tried" not in missed(both)
    done = subprocess.run(
        [sys.executable, FOLDER / "under_fire.py", "--merge", *paths, "--check"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "missed: interrupts tried is 0" in done.stdout


def test_a_trial_has_dice_of_its_own(fire):
    rng_of = fire["trials"].rng_of
    assert rng_of(1, "kills", 3).random() == rng_of(1, "kills", 3).random() != rng_of(1, "kills", 4).random()


def test_what_a_trial_raises_is_told_and_goes_no_further(fire, tmp_path):
    trials = fire["trials"]
    with contextlib.closing(trials.Log(tmp_path / "log", 5)) as log:
        with log.trial("damage", 2, 1.0) as note:
            note.doing("flipped")
            raise trials.TrialError("wrong state", "loaded")
        assert not log.useless
        with log.trial("kills", 0, 1.0):
            raise ValueError("bare")
        assert log.useless
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    first, second = [line for line in lines if "kind" in line]
    assert [first[key] for key in ("kind", "trial", "what", "failure", "seed")] == ["damage", 2, "flipped", "wrong state", 5]
    assert second["failure"] == "unusable"
    assert second["why"].startswith("ValueError: bare")


def test_a_silent_child_is_ended_with_its_stacks(fire, monkeypatch, tmp_path):
    campaign = fire["campaign"]
    script = tmp_path / "hangs.py"
    script.write_text(
        "import faulthandler, json, signal, sys\n"
        "plan = json.loads(sys.argv[2])\n"
        "faulthandler.register(signal.SIGUSR1, file=open(plan['folder'] + '/stacks', 'w'))\n"
        "def waits_for_ever():\n"
        "    print(json.dumps({'begins': 'kills', 'number': 4, 'ceiling_s': 0.5}), file=open(plan['log'], 'w'), flush=True)\n"
        "    signal.sigwait([signal.SIGINT])\n"
        "waits_for_ever()\n"
    )
    monkeypatch.setattr(campaign, "SCRIPT", script)
    monkeypatch.setattr(campaign, "STACKS_S", 1.0)
    found = campaign.Campaign(9, 0.02, only=["kills"], trial=4).run()
    (trial,) = found.failed
    assert (trial.failure, trial.trial) == ("hang", 4)
    assert "waits_for_ever" in trial.why
    assert fire["own"].marked("no such mark") == []


class Remembers:
    """A kind that remembers what was tried."""

    CEILING_S = 60.0

    def __init__(self, tried):
        self.tried = tried

    def ground(self, folder):
        return (folder / "ground").open("w")

    def trial(self, ground, note):
        self.tried.append((note.kind, note.number))


@pytest.mark.parametrize(
    ("each", "tried"), [((), []), (("kills", "cells"), [("cells", 0), ("kills", 3)]), (("kills",), [("kills", 3)])]
)
def test_a_short_run_tries_each_kind_though_its_time_is_over(fire, monkeypatch, tmp_path, each, tried):
    trials, found = fire["trials"], []
    monkeypatch.setattr(trials, "faulthandler", unittest.mock.MagicMock())  # pytest has its own
    module = Remembers(found)
    with contextlib.closing(trials.Log(tmp_path / "log", 0)) as log:
        shares, first = {"cells": 0.2, "kills": 0.8}, {"cells": 0, "kills": 3}
        trials.run_child({"cells": module, "kills": module}, shares, first, log, tmp_path, -1.0, False, each)
    assert found == tried


class Child:
    """A child process that tries "kills" once and then nothing more; it has ended when it is looked at."""

    returncode = 0

    def __init__(self, plan, tries):
        begun = {"begins": "kills", "number": 1, "ceiling_s": 60.0}
        tried = {"kind": "kills", "trial": 1, "what": "", "seconds": 1.0, "tags": []}
        lines = [begun, tried] if tries else [{}]
        Path(plan["log"]).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def poll(self):
        return 0

    def wait(self, timeout):
        return 0


def test_rounds_with_adapters_take_turns_with_those_without(fire, monkeypatch):
    """Also where only one kind is asked for; a single trial has them when it is told to."""
    campaign, asked = fire["campaign"], []

    def start(command, **options):
        asked.append(fire["own"].ADAPTERS in options["env"])
        return Child(json.loads(command[command.index("--child") + 1]), tries=False)

    monkeypatch.setattr(campaign, "LANES", ((campaign.Job({"kills": 1.0}, 1.0),),))
    monkeypatch.setattr(campaign.subprocess, "Popen", start)
    campaign.Campaign(5, 20.0).run()
    assert asked == [True] * 3 + [False] * 3
    asked.clear()
    campaign.Campaign(5, 4.0, only=["kills"], trial=2, lora=False).run()
    assert asked == [False]


@pytest.mark.parametrize(("minutes", "expected"), [(4.0, [["kills", "disk"], ["disk"]]), (60.0, [[], []])])
def test_what_a_short_run_has_not_tried_it_asks_of_each_child(fire, monkeypatch, minutes, expected):
    campaign, asked = fire["campaign"], []

    def start(command, **options):
        plan = json.loads(command[command.index("--child") + 1])
        asked.append(plan["each"])
        return Child(plan, tries=len(asked) == 1)

    monkeypatch.setattr(campaign, "LANES", ((campaign.Job({"kills": 0.5, "disk": 0.5}, 1.0),),))
    monkeypatch.setattr(campaign.subprocess, "Popen", start)
    ledger = campaign.Campaign(0, minutes).run()
    assert ledger.tried("kills") == 1
    assert asked[:2] == expected
    assert asked[1:] == [asked[1]] * (len(asked) - 1)
