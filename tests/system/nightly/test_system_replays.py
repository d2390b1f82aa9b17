"""Exported steps of GRPO, of adapters and of a sum of rewards; and what was planted in one, named."""

import dataclasses
import json
import zlib

import cloudpickle
import numpy as np
import pytest

import hfsdk as hf
from hfsdk.core.table import Ragged, Table
from hfsdk.diagnose.step_export import CONTENT, SUMMARY, _write
from tests.system.system_helpers import OPENINGS, lengths_reward
from tests.system.test_system_export_step import replayed


def vowels(completions):
    return [sum(text.count(vowel) for vowel in "aeiou") / (len(text) + 1) for text in completions]


@pytest.fixture(scope="module", params=["grpo", "lora"])
def exported(request, ray_here, tmp_path_factory):
    lora = hf.LoRA(rank=4, alpha=8) if request.param == "lora" else None
    folder = tmp_path_factory.mktemp(request.param) / "step"
    with hf.Session(devices=2, seed=7) as session:
        actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-3), lora=lora)
        session.reference(actor)
        session.reward([lengths_reward, vowels], weights=[1.0, 0.5])
        prompts = session.prompts(OPENINGS, batch_size=4, seed=2)
        run = session.train(hf.GRPO(n=4, max_new_tokens=8), prompts, steps=3, progress=False)
        session.export_step(run.rows[-1]["step"], folder)
        went_on = session.train(hf.GRPO(n=4, max_new_tokens=8), prompts, steps=1, progress=False)
        assert went_on.rows[-1]["step"] == run.rows[-1]["step"] + 1
    return folder


def test_it_is_the_same_bit_for_bit(exported):
    same, *_, notes, difference = replayed(exported)
    assert (same, difference, notes) == (True, None, [])


def test_a_planted_difference_is_named(exported, tmp_path):
    record = cloudpickle.loads((exported / CONTENT).read_bytes())
    index = next(i for i, call in enumerate(record.calls) if "ref_log_probs" in call.columns)
    column = record.calls[index].columns["ref_log_probs"]
    flat = column.flat.copy()
    place = int(column.offsets[3]) + 1
    flat[place] = np.nextafter(flat[place], np.float32(0))
    changed = Table({**dict(record.calls[index].columns), "ref_log_probs": Ragged(flat, column.offsets)})
    calls = list(record.calls)
    calls[index] = dataclasses.replace(calls[index], columns=changed)
    folder = tmp_path / "planted"
    folder.mkdir(mode=0o700)
    (folder / "state").symlink_to(exported / "state")
    _write(folder, dataclasses.replace(record, calls=tuple(calls)))
    content = (folder / CONTENT).read_bytes()
    assert json.loads((folder / SUMMARY).read_text())["content"]["crc32"] == zlib.crc32(content)
    same, *_, difference = replayed(folder)
    assert not same
    assert f"call {index}, {record.calls[index].name}, ref_log_probs, sample 3, token 1" in difference
