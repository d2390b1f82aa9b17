"""Imported once by the server that forks the processes of ``spawn``: the engines, set aside from their garbage collectors."""

import atexit
import os

from hfsdk.engine.generation import cpu_support_vllm
from hfsdk.engine.process import startup

os.environ.update(cpu_support_vllm.environment(num_threads=1) | {"PYTHONWARNINGS": "ignore"})
with startup.making_what_stays():
    from hfsdk.engine.training import cpu_support_megatron

    cpu_support_megatron.install()
    from hfsdk.engine.generation import rollout_engine
    from hfsdk.engine.worker import hosted  # noqa: F401

    rollout_engine.import_engine()

atexit.register(os._exit, 0)  # what is set aside is not taken apart in the end, which some libraries would report as a leak
