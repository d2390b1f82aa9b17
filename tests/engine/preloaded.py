"""Imported once by the server that forks the processes of ``spawn``: the engines, set aside from their garbage collectors."""

import atexit
import os

from hfsdk.engine.generation import cpu_support_vllm
from hfsdk.engine.worker.environment import import_engines

os.environ.update(cpu_support_vllm.environment(num_threads=1) | {"PYTHONWARNINGS": "ignore"})
import_engines()
atexit.register(os._exit, 0)  # what is set aside is not taken apart in the end, which some libraries would report as a leak
