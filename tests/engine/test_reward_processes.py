"""What a reward function may give and leave behind: as many scores as samples, and no process of its own."""

import sys

import psutil
import pytest
from expect import refuses

from hfsdk.core.errors import RewardFunctionError
from hfsdk.core.functions import Shipped
from hfsdk.engine.process.sample_workers import SampleWorkers
from hfsdk.engine.process.tasks import check_scores


def starts_another(completions):
    """Starts a process that outlives it unless it is ended, says which, and hangs."""
    import subprocess
    import sys
    import threading

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(completions[0], "w", encoding="utf-8") as file:
        file.write(str(child.pid))
    threading.Event().wait()


def test_as_many_scores_as_samples():
    for given in ([1.0], [1.0, 2.0, 3.0], []):
        with refuses(RewardFunctionError, "judge", len(given), 2):
            check_scores(given, "judge", 2)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
def test_what_a_function_that_hangs_has_started_ends_with_it(tmp_path):
    told = tmp_path / "pid"
    workers = SampleWorkers(Shipped.of(starts_another), 1)
    try:
        sample = {"prompts": [""], "completions": [str(told)], "completion_ids": [[1]]}
        (outcome,) = workers.run([(sample, None)], timeout_s=5.0)
        assert outcome.failure == "took too long"
        child = int(told.read_text(encoding="utf-8"))
        _, alive = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=60)
        assert alive == []
    finally:
        workers.close()
