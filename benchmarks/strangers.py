"""What it costs that nobody else gets in: half-open connections of strangers beside a step, and groups that are proven.

Targets:

a. 500 connections of another program (another user's, where this one may become one) to the listeners of a session's own processes
   (gloo, a store as workers of several machines meet in, the server of kept sessions) say sixteen bytes, as TLS begins, and wait;
   those that are ended come again a second later: a PPO step of `tiny` takes at most 3 % more seconds than alone, and the sums
   of the weights after it are the same.
b. groups that are proven, against the same groups of gloo without a filter, a meeting and proofs, in the same workers: `place`, a
   call and a step take at most 3 % more seconds.

Each round measures both sides, in an order that changes; a figure is the median over the rounds of the ratio of the two. No other
port is connected to than those that the session's own processes, and the server that is started here, say they listen on.

Uses: 2 workers of one thread; a: a server and one process with 500 connections.

    python benchmarks/strangers.py --check                about 4 minutes on two cores; --only a, --rounds 40
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from common import Report, parser, say

import hfsdk as hf
from hfsdk.algorithms import ppo

MOST_RATIO, CONNECTIONS, ROUNDS = 1.03, 500, 24
NUM_PROMPTS, NEW_TOKENS = 16, 16
OPENINGS = [f"The film about the number {number} was" for number in range(NUM_PROMPTS)]

STRANGER = r"""
import os, resource, select, socket, sys, time
wanted, ports = int(sys.argv[1]), [int(port) for port in sys.argv[2:]]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
lines, waits = {}, select.epoll()
TLS_BEGINS = bytes.fromhex("16030102000100") + bytes(9)  # the rest never comes

def begin(port):
    line = socket.socket()
    line.setblocking(False)
    line.connect_ex(("127.0.0.1", port))
    lines[line.fileno()] = (line, port)
    waits.register(line.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

def hear(number, what):
    line, port = lines[number]
    try:
        if what & (select.EPOLLERR | select.EPOLLHUP) or (what & select.EPOLLIN and not line.recv(4096)):
            raise OSError
        if what & select.EPOLLOUT:
            line.send(TLS_BEGINS)
    except BlockingIOError:
        return None
    except OSError:
        line.close()
        del lines[number]
        return port

for ordered in sys.stdin:
    for place in range(wanted if ordered == "on\n" else 0):
        begin(ports[place % len(ports)])
    print("there", flush=True)
    ended, again_s = [], time.monotonic() + 1
    waits.register(0, select.EPOLLIN)
    while ordered == "on\n":
        ready = dict(waits.poll(max(0.0, again_s - time.monotonic())))
        if ready.pop(0, None):
            break
        ended += [port for number, what in ready.items() if number in lines and (port := hear(number, what)) is not None]
        if time.monotonic() >= again_s:
            for port in ended:
                begin(port)
            ended, again_s = [], time.monotonic() + 1
    waits.unregister(0)
    for line, _ in lines.values():
        line.close()
    lines.clear()
"""
"""Another program: ``on`` opens so many connections over the ports, and keeps them; the next line closes them."""


class Strangers:
    """The process of :data:`STRANGER`."""

    def __init__(self, ports: list[int]) -> None:
        command = [sys.executable, "-c", STRANGER, str(CONNECTIONS), *map(str, ports)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")

    def order(self, what: str) -> None:
        """Have them come (``on``) or go (``off``)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "there\n":
            raise RuntimeError("the strangers' program has ended")

    def standing(self) -> int:
        """Return how many connections stand, or wait to be answered."""
        found = psutil.Process(self._process.pid).net_connections("tcp")
        return sum(one.status in (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_SENT) for one in found)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


# -- what workers do


def listeners(rank: Any) -> list[int]:
    """Return the ports on which this worker listens: gloo's, and a store as of several machines, which is started here."""
    from hfsdk.engine.process import gloo_groups, keyed_store

    if not hasattr(listeners, "store"):
        listeners.store = keyed_store.StoreServer("127.0.0.1", b"a secret of this benchmark's alone")
    found = [listeners.store.port]
    for device in gloo_groups._devices.values():
        with device._socket() as listener:
            found.append(int(listener.getsockname()[1]))
    return found


def weights_sum(rank: Any) -> float:
    """Return a sum over this rank's weights."""
    return float(sum(parameter.double().abs().sum() for parameter in rank.module.parameters()))


def prove_groups(rank: Any, proven: bool) -> int:
    """Have the groups that this worker makes from now on be proven, or not; return how many were made since the last time."""
    from contextlib import ExitStack

    from torch.distributed import ProcessGroupGloo

    from hfsdk.engine.process import gloo_groups

    plain: Any = ProcessGroupGloo
    if not hasattr(gloo_groups, "measured"):
        gloo_groups.measured = SimpleNamespace(prove=gloo_groups.make, made=0, open=ExitStack())
    measured = gloo_groups.measured

    def counted(*of_group: Any) -> Any:
        measured.made += 1
        return measured.prove(*of_group)

    def unproven(store: Any, place: int, size: int, timeout: Any) -> Any:
        measured.made += 1
        devices = gloo_groups._current(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        for device in devices:
            measured.open.enter_context(device.opened())
        options = plain._Options()
        options._devices, options._threads, options._timeout = [device.gloo for device in devices], 2 * len(devices), timeout
        return plain(store, place, size, options)

    if proven:
        measured.open.close()
    gloo_groups.make = counted if proven else unproven
    made, measured.made = measured.made, 0
    return made


# -- what is measured


def seconds(deed: Callable[[], Any]) -> float:
    """Return the wall clock of a deed."""
    begun = time.perf_counter()
    deed()
    return time.perf_counter() - begun


def declared(session: Any, **layouts: str) -> SimpleNamespace:
    """Declare what PPO needs."""
    actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4), **layouts)
    critic = session.critic("tiny", optimizer=hf.AdamW(lr=1e-4))
    reference, reward = session.reference(actor), session.reward(vowels)
    return SimpleNamespace(session=session, actor=actor, critic=critic, reference=reference, reward=reward)


def vowels(completions: list[str]) -> list[float]:
    """Score responses by how many vowels they have."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def a_batch(roles: Any) -> Any:
    """Generate and score a batch, up to the advantages."""
    batch = roles.actor.generate(OPENINGS, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    batch = roles.critic.compute_values(roles.reference.compute_log_probs(roles.actor.compute_log_probs(batch)))
    return ppo.advantages(roles.reward.compute_scores(batch))


def a_step(roles: Any) -> None:
    """One PPO step, whose last numbers are waited for."""
    batch = a_batch(roles)
    for done in (
        roles.critic.update(batch, ppo.ValueLoss(), mini_batches=2),
        roles.actor.update(batch, ppo.PolicyLoss(), mini_batches=2),
    ):
        done.wait()


@contextmanager
def server_port() -> Iterator[int]:
    """Serve kept sessions, in a process and a state of its own; give where it listens."""
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        token = Path(folder) / "token"
        token.write_text("of-no-use-outside-this-benchmark-0123456789")
        command = [sys.executable, "-m", "hfsdk.serve", "--port", "0", "--token-file", str(token)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        process = subprocess.Popen(command, env=os.environ | {"XDG_STATE_HOME": folder}, **pipes)
        try:
            said = process.stdout.readline()
            yield int(said.partition("://127.0.0.1:")[2].partition("/")[0])
        finally:
            process.terminate()
            process.wait(60)


def beside_strangers(report: Report, rounds: int) -> None:
    """Part a."""
    with hf.Session(devices=2, seed=3, name="beside") as session, server_port() as port:
        roles = declared(session, train="tp2", rollout="tp1")
        a_step(roles)
        ports = [*sorted({found for of_rank in roles.actor.run(listeners) for found in of_rank}), port]
        strangers = Strangers(ports)
        start = session.snapshot("start")
        taken: dict[bool, list[float]] = {True: [], False: []}
        sums: dict[bool, set[tuple[float, ...]]] = {True: set(), False: set()}
        standing: list[int] = []
        try:
            for number in range(rounds):
                for there in (True, False) if number % 2 else (False, True):
                    session.rewind(start)
                    strangers.order("on" if there else "off")
                    taken[there].append(seconds(lambda: a_step(roles)))
                    sums[there].add(tuple(roles.actor.run(weights_sum)))
                    standing += [strangers.standing()] if there else []
                say(f"round {number}: alone {taken[False][-1]:.3f} s, beside strangers {taken[True][-1]:.3f} s")
        finally:
            strangers.end()
        told = sum("somebody else" in text for text in session.messages)
    report.add("a: listeners of the session and its server", len(ports), at_least=4)
    report.add("a: connections that stood after a step, median", statistics.median(standing), at_least=CONNECTIONS // 2)
    report.add("a: a step alone", statistics.median(taken[False]), "s")
    report.add(f"a: a step beside {CONNECTIONS} half-open connections", statistics.median(taken[True]), "s")
    report.add("a: beside / alone", _ratio(taken[True], taken[False]), at_most=MOST_RATIO)
    report.add("a: weights after a step that differ", len(sums[True] ^ sums[False]), at_most=0)
    report.add("a: times that the session's owner was told", told, at_least=1, at_most=1)
    report.details["a"] = {"alone_s": taken[False], "beside_s": taken[True]}


def proven_groups(report: Report, rounds: int) -> None:
    """Part b."""
    deeds = ("place", "call", "step")
    taken: dict[bool, dict[str, list[float]]] = {kind: {deed: [] for deed in deeds} for kind in (True, False)}
    made: dict[bool, list[int]] = {True: [], False: []}
    with hf.Session(devices=2, seed=3, name="proven") as session:
        roles = declared(session)
        session.place("colocate")
        a_step(roles)
        for number in range(rounds + 1):
            for proven in (True, False) if number % 2 else (False, True):
                roles.actor.run(prove_groups, proven)
                session.place({"actor reference": 1, "critic": 1})
                times = {"place": seconds(lambda: session.place("colocate"))}
                made[proven] += roles.actor.run(prove_groups, proven)
                batch = a_batch(roles)
                times["call"] = statistics.median(
                    seconds(lambda batch=batch: roles.actor.compute_log_probs(batch).wait()) for _ in range(5)
                )
                times["step"] = statistics.median(seconds(lambda: a_step(roles)) for _ in range(3))
                for deed in deeds if number else ():  # the first round warms up
                    taken[proven][deed].append(times[deed])
            say(f"round {number}: place {times['place']:.3f} s, call {times['call']:.3f} s, step {times['step']:.3f} s")
    for deed in deeds:
        report.add(f"b: {deed}, groups not proven", statistics.median(taken[False][deed]), "s")
        report.add(f"b: {deed}, proven", statistics.median(taken[True][deed]), "s")
        report.add(f"b: {deed}, proven / not", _ratio(taken[True][deed], taken[False][deed]), at_most=MOST_RATIO)
    report.add("b: groups that a place makes of two ranks", statistics.median(made[True]), at_least=1)
    report.details["b"] = {"proven_s": taken[True], "not_proven_s": taken[False], "made": {str(k): v for k, v in made.items()}}


def _ratio(with_it: list[float], without: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(with_it, without, strict=True))


def main() -> int:
    """Measure what was asked for."""
    options = parser(__doc__)
    options.add_argument("--only", default="a,b", help="parts, e.g. a")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = options.parse_args()
    report = Report("strangers", "2 workers of one thread")
    parts = {"a": beside_strangers, "b": proven_groups}
    for part in arguments.only.split(","):
        parts[part](report, arguments.rounds)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
