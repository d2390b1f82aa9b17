"""Run a function on n gloo ranks whose environment is that of a worker with vLLM."""

from __future__ import annotations

import os

import spawn

from hfsdk.engine.cpu_support_vllm import environment


def run(function, world_size, *args, timeout_s=450.0):
    """Return ``[function(rank, world_size, *args) for every rank]``, each in a fresh process with one thread."""
    before = dict(os.environ)
    os.environ.update(environment(num_threads=1) | {"PYTHONWARNINGS": "ignore"})
    try:
        return spawn.run(function, world_size, *args, timeout_s=timeout_s)
    finally:
        os.environ.clear()
        os.environ.update(before)
