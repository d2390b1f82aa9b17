"""LoRA on one GPU without vLLM: adapters that learn beside a frozen base, what is held for them, and what a step takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hfsdk.core.lora import LoRA
from hfsdk.core.roles import AdamW
from on_gpu.stage import QWEN_1_5B, Setting, role, rows, update, worker

MOST_SHARE = 0.6
"""Bytes held for adapters, with a rank of 16, at most of those held to train all weights: 18 bytes a number against 2."""


def lora(setting: Setting) -> None:
    """A frozen 1.5B with adapters: only they change, they learn, and what is counted for them is what torch has allocated."""
    spec = setting.model(QWEN_1_5B)
    table = rows(spec, [setting.size(200, 20)] * 8)
    held, seconds = {}, {}
    for name, adapters in (("full", None), ("lora", LoRA(rank=setting.size(16, 2)))):
        folder = setting.folder / name
        folder.mkdir()
        here = worker(replace(setting, folder=folder))
        before = setting.used_bytes()
        here.load(role(setting, spec, lora=adapters, optimizer=AdamW(lr=1e-3 if adapters else 1e-4)))
        hosted = here.roles["actor"]
        trained = {key for key, parameter in hosted.trainer.model.named_parameters() if parameter.requires_grad}
        first = {key: parameter.detach().clone() for key, parameter in hosted.trainer.model.named_parameters()}
        losses = [update(hosted, table)[0]["loss"] for _ in range(4)]
        changed = {key for key, value in hosted.trainer.model.named_parameters() if not torch.equal(value, first.pop(key))}
        setting.need(changed <= trained, f"{len(changed - trained)} frozen weights have changed: {sorted(changed - trained)[:2]}")
        setting.need(len(changed) > 0.5 * len(trained), f"{len(changed)} of {len(trained)} weights that train have changed")  # bf16
        setting.need(np.isfinite(losses).all() and losses[-1] < losses[0], f"the loss of {name} did not fall: {losses}")
        seconds[name] = setting.seconds(lambda hosted=hosted: update(hosted, table), 3)
        held[name] = setting.used_bytes() - before
        counted = hosted.memory_bytes()
        setting.note(**{f"{name}_step_s": seconds[name], f"{name}_gb": held[name] / 1e9, f"{name}_counted_gb": counted / 1e9})
        if setting.cuda:
            setting.need(
                abs(counted / held[name] - 1) < 0.03, f"{name}: counted {counted / 1e9:.2f} GB, torch has {held[name] / 1e9:.2f}"
            )
        setting.note(**{f"{name}_peak_gb": setting.peak_bytes(lambda hosted=hosted: update(hosted, table)) / 1e9})
        here.leave()
    if setting.cuda:
        setting.need(
            held["lora"] < MOST_SHARE * held["full"], f"adapters hold {held['lora'] / held['full']:.2f} of what all weights do"
        )
