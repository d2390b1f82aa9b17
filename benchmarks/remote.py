"""A kernel outside the cluster, through a line of 50 ms and 20 Mbit/s: what calls, pictures and a live timeline cost.

The kernel has neither Ray nor torch; server, session and the proxy that delays and throttles are processes of this machine.

Targets:

a. a call that does nothing, waited for: at most two round trips of the line more than the same call near the session.
b. a placement picture: from the question until its HTML is there, at most 1 s.
c. while a run goes on: the newest span that a timeline shows is at most 1.5 s old when it is drawn (median of 20 looks).
d. attach: at most 3 s.

One worker process of one thread.

    python benchmarks/remote.py --check
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Report, parser, say, table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "system" / "nightly"))

from tcp_proxy import Proxy  # noqa: E402 - the tests' own

ROUND_TRIP_S, BYTES_PER_S = 0.050, 20e6 / 8
PICTURE_S, LAG_S, ATTACH_S, CALLS = 1.0, 1.5, 3.0, 30
THIN = ("ray", "torch", "psutil", "vllm", "megatron", "transformers", "tokenizers", "safetensors")
NAME = "benchmark-remote"


def begin() -> None:
    """Start the session, measure the call near it, and leave."""
    import hfsdk as hf

    session = hf.Session(devices=1, name=NAME, keep=True)
    actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
    session.reference(actor)
    session.reward(_score)
    session.place("colocate")
    print("told", json.dumps({"near_s": median_of(lambda: actor.run(_nothing))}), flush=True)
    session.detach()


def kernel(address: str, token: str) -> None:
    """Be the kernel elsewhere."""
    sys.modules.update(dict.fromkeys(THIN))  # type: ignore[arg-type]  # as if they were not installed
    import hfsdk as hf
    from hfsdk.viz.drawn import picture_of

    begun = time.perf_counter()
    session = hf.Session.attach(address, token=token)
    told: dict[str, Any] = {"attach_s": time.perf_counter() - begun}
    actor = session.models.actor
    told["call_s"] = median_of(lambda: actor.run(_nothing))
    told["picture_s"] = median_of(lambda: picture_of(session.placement).to_html(), 5)
    prompts = session.prompts([[i, 2, 3] for i in range(1, 17)], batch_size=4)
    run = session.train(hf.GRPO(n=2, max_new_tokens=8), prompts, steps=500, wait=False, progress=False)
    while len(run.rows) < 3:
        time.sleep(0.05)
    lags, took = [], []
    for _ in range(20):
        looked = time.perf_counter()
        trace = session.trace.snapshot()
        picture_of(trace).to_html()
        took.append(time.perf_counter() - looked)
        newest = max(span.start_ns + int((span.duration_s or 0.0) * 1e9) for span in trace)
        lags.append(time.time() - newest / 1e9)
        time.sleep(0.2)
    run.stop()
    run.wait(60)
    told |= {"lag_s": statistics.median(lags), "timeline_s": statistics.median(took), "steps": len(run.rows)}
    print("told", json.dumps(told), flush=True)
    session.close()


def median_of(do: Callable[[], Any], num: int = CALLS) -> float:
    """Return the median seconds of doing something."""
    took = []
    for _ in range(num):
        begun = time.perf_counter()
        do()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def _nothing(rank: Any) -> int:
    return 0


def _score(prompts: Any, completions: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start a process of this file, or the server."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment)


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a process tells, and wait for its end."""
    said, _ = process.communicate()
    lines = [line for line in said.splitlines() if line.startswith("told ")]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("told "))
    return found


@contextmanager
def line_to(state: Path) -> Iterator[tuple[Proxy, str]]:
    """Serve the sessions kept in a state folder; give the throttled proxy to them, and the token."""
    server = start("-m", "hfsdk.serve", "--port", "0")
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline().partition("/NAME")[0].rpartition(":")[2])
        proxy = Proxy(port, ROUND_TRIP_S / 2, BYTES_PER_S)
        try:
            yield proxy, (state / "hfsdk" / "serve-token").read_text()
        finally:
            proxy.close()
    finally:
        server.terminate()
        server.communicate()


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--be", nargs="+", help="be one of the processes")
    given = made.parse_args()
    warnings.simplefilter("ignore")
    if given.be:
        if given.be[0] == "begin":
            begin()
        else:
            kernel(*given.be[1:])
        return 0
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        near = heard(start(__file__, "--be", "begin"))
        with line_to(Path(state)) as (proxy, token):
            far = heard(start(__file__, "--be", "kernel", f"hfsdk://127.0.0.1:{proxy.port}/{NAME}", token))
            sent = proxy.num_bytes
    report = Report("remote", "one worker process of one thread; a proxy of 50 ms and 20 Mbit/s")
    report.add("attach, the imports of a fresh kernel included", far["attach_s"], "s", at_most=ATTACH_S)
    report.add("a call near the session", near["near_s"] * 1e3, "ms")
    report.add("a call from elsewhere", far["call_s"] * 1e3, "ms")
    trips = (far["call_s"] - near["near_s"]) / ROUND_TRIP_S
    report.add("more, in round trips", trips, at_most=2.0)
    report.add("a placement picture", far["picture_s"], "s", at_most=PICTURE_S)
    report.add("a timeline while a run goes on", far["timeline_s"], "s")
    report.add("age of its newest span", far["lag_s"], "s", at_most=LAG_S)
    report.add("bytes over the line", sent)
    say(table(("what went over the line", "MB"), [("all of it", f"{sent / 1e6:.1f}")]))
    return report.finish(given)


if __name__ == "__main__":
    sys.exit(main())
