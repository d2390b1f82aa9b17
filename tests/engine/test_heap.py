"""The heap of workers on processors, looked at from processes that begin with its settings."""

import ctypes
import os
import subprocess
import sys

import pytest

from hfsdk.engine.process import malloc_settings

glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library has no such heap")

FAULTS = """
import resource, sys, torch
torch.set_num_threads(1)
def step():
    kept = [torch.ones(1 << 20) for _ in range(24)]
    whole = torch.ones(12 << 20)
    return kept, whole
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints the page faults of a step that allocates 24 times 4 MB and once 48 MB, once it has done so before."""

GIVEN_BACK = """
import psutil, torch
from hfsdk.engine.process import malloc_settings
held = [torch.ones(1 << 20) for _ in range(100)]
last = torch.ones(1)
full = psutil.Process().memory_info().rss
del held
malloc_settings.give_back()
print(full - psutil.Process().memory_info().rss)
"""


def printed(program, environment):
    told = {name: value for name, value in environment.items() if name != malloc_settings.TUNABLES or value}
    return int(subprocess.run([sys.executable, "-c", program], env=told, capture_output=True, text=True, check=True).stdout)


@glibc
def test_a_step_that_is_taken_again_touches_no_new_memory():
    plain = {name: value for name, value in os.environ.items() if name != malloc_settings.TUNABLES}
    assert printed(FAULTS, plain) > 48 * 2**20 // 4096 // 2, "without the settings the large block is new every time"
    assert printed(FAULTS, malloc_settings.variables(plain)) < 500


@glibc
def test_it_is_given_back():
    assert printed(GIVEN_BACK, malloc_settings.variables(os.environ)) > 350 * 10**6


def test_what_the_user_has_set_wins():
    mine = malloc_settings.variables({})[malloc_settings.TUNABLES]
    theirs = malloc_settings.variables({"A": "1", malloc_settings.TUNABLES: "glibc.malloc.arena_max=4"})
    assert theirs == {"A": "1", malloc_settings.TUNABLES: f"{mine}:glibc.malloc.arena_max=4"}
    assert "glibc.malloc.tcache_count=0" in mine.split(":")
