"""Processes that run a reward function on one sample each: what hangs or dies is named, the rest goes on, none is left."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from expect import refuses

import hfsdk
from hfsdk.core.errors import RewardFunctionError
from hfsdk.core.functions import Shipped
from hfsdk.engine.process.sample_workers import SampleWorkers
from hfsdk.engine.process.user_lines import line_of_trace

ROOT = Path(hfsdk.__file__).parents[1]


def judge(completions):
    """Hangs in C with the interpreter's lock held, raises, dies, gives no number, or scores."""
    import re

    text = completions[0]
    if text == "hang":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if text.startswith(("r ", "w ")):  # a pipe, which opens when another process opens its other end
        open(text[2:], text[0]).close()
    if text == "raise":
        raise ValueError("no such answer")
    if text == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "leave":
        sys.exit(3)
    return {"nan": [float("nan")], "none": [None], "two": [1.0, 2.0]}.get(text, [float(len(text))])


def samples(*texts):
    return [({"prompts": ["p"], "completions": [text], "completion_ids": [[1]]}, None) for text in texts]


@pytest.fixture(scope="module")
def workers():
    """In a process that has as many files open as a long session may have: more than select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    made = SampleWorkers(Shipped.of(judge), 2)
    yield made
    pids = made.pids
    made.close()
    assert not any(map(psutil.pid_exists, pids))
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_each_failure_is_told_of_its_sample_and_the_others_go_on(workers):
    texts = ["ab", "hang", "raise", "die", "abc", "none", "nan", "two", "leave", "abcd"]
    judged = workers.run(samples(*texts), timeout_s=3.0)
    assert [one.score for one in judged] == [2.0, None, None, None, 3.0, None, None, None, None, 4.0]
    kinds = ["", "took too long", "raised", "ended its process", "", "", "is no score", "is no score", "raised", ""]
    assert [one.failure for one in judged] == kinds
    words = [one.message for one in judged]
    assert words[1] == "judge took longer than 3 s and was ended"
    assert words[2] == "judge raised ValueError('no such answer')"
    assert words[3] == "the process that ran judge ended by signal 11"
    assert words[6].startswith("judge returned nan; return a finite number")
    assert words[7].startswith("judge returned 2 scores for 1 completions")
    lines = Path(__file__).read_text().splitlines()
    for row, text in ((1, 're.match(r"(a+)+$"'), (2, 'raise ValueError("no such answer")')):
        number = next(n for n, line in enumerate(lines, 1) if text in line)
        assert judged[row].line == f"test_sample_workers.py:{number} in judge"
    assert judged[0].seconds < 3.0 <= judged[1].seconds
    assert 'raise ValueError("no such answer")' in judged[2].details


def test_what_the_function_keeps_stays_and_a_process_that_died_is_replaced(workers):
    workers.run(samples("a", "b"), timeout_s=60)
    before = set(workers.pids)
    assert len(before) == 2
    assert workers.run(samples("a", "b"), timeout_s=60)[0].score == 1.0
    assert set(workers.pids) == before
    os.kill(workers.pids[0], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(workers.pids[0])], timeout=60)
    judged = workers.run(samples("abc", "abcd", "a"), timeout_s=60)
    assert [one.score for one in judged] == [3.0, 4.0, 1.0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_samples_run_side_by_side(workers, tmp_path):
    """Each waits for the other one: one after the other the first would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    judged = workers.run(samples(f"w {tmp_path}/pipe", f"r {tmp_path}/pipe"), timeout_s=60)
    assert [one.failure for one in judged] == ["", ""]


def test_no_more_are_begun_after_so_many_failures():
    alone = SampleWorkers(Shipped.of(judge), 1)
    judged = alone.run(samples(*["raise"] * 5), timeout_s=60, most_failures=2)
    assert [one is None for one in judged] == [False, False, True, True, True]
    alone.close()


def test_a_function_that_cannot_be_loaded_is_an_error():
    class Broken:
        def __reduce__(self):
            return eval, ("1 / 0",)

    broken = Broken()
    alone = SampleWorkers(Shipped.of(lambda completions: [broken]), 1)
    with refuses(RewardFunctionError, "could not be loaded", "ZeroDivisionError"):
        alone.run(samples("a"), timeout_s=60)
    assert alone.pids == []


SCRIPT = """
import sys
from hfsdk.core.functions import Shipped
from hfsdk.engine.process.sample_workers import SampleWorkers

def hang(completions):
    import re
    print(completions[0], flush=True)
    if completions[0] == "hang":
        re.match(r"(a+)+$", "a" * 64 + "b")
    return [1.0]

workers = SampleWorkers(Shipped.of(hang), 3)
given = {"prompts": [""], "completion_ids": [[]]}
workers.run([(given | {"completions": ["idle"]}, None)] * 3, 5.0)
print(*workers.pids, flush=True)
workers.run([(given | {"completions": ["hang"]}, None)] * 2, 500.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that holds the interpreter's lock sees it at its end")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_none_is_left_when_the_process_that_started_them_dies(how):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    lines = []
    while "".join(lines).count("hang") < 2:  # two that print at once may share a line
        line = parent.stdout.readline()
        assert line, lines
        lines.append(line.strip())
    pids = [int(pid) for line in lines if line[:1].isdigit() for pid in line.split()]
    assert 2 <= len(pids) <= 3
    assert all(map(psutil.pid_exists, pids))
    children = [psutil.Process(pid) for pid in pids]
    parent.send_signal(how)
    parent.wait(60)
    parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_the_line_of_a_trace_is_the_innermost_of_the_users():
    trace = f'''Current thread 0x1 (most recent call first):
  File "{os.__file__}", line 3 in walk
  File "/tmp/ipykernel_12/345.py", line 7 in inner
  File "/tmp/ipykernel_12/346.py", line 2 in score
  File "{ROOT}/hfsdk/engine/process/tasks.py", line 9 in call_reward
'''
    line, frames = line_of_trace(trace)
    assert line == "345.py:7 in inner"
    assert frames.count("\n") == 1
    assert line_of_trace("") == ("", "")
