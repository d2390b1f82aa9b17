"""Programs of another user connect to everything that a live session's workers listen on, while it trains: nothing changes."""

import contextlib
import subprocess
import sys

import pytest
from system_helpers import OPENINGS, fingerprint

from hfsdk.algorithms import ppo

BECOME_NOBODY = """
import os, socket, struct, sys
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""
"""A program's first lines: from here on it is another user's, where we may."""
CONNECTIONS = 500
STRANGER = """
kept, taken = [], 0
print("begun", flush=True)
for number in range(int(sys.argv[1])):
    for port in map(int, sys.argv[2:]):
        one = socket.socket()
        one.settimeout(0.002)
        try:
            one.connect(("127.0.0.1", port))
            one.sendall(struct.pack("<Q", number) + b"\\xff" * 512)
            taken += 1
        except OSError:
            pass
        one.setblocking(False)
        kept = [*kept[-200:], one]
print(taken)
"""


@contextlib.contextmanager
def program(code, *arguments):
    """Run another user's program, from when it has begun; it is ended afterwards."""
    command = [sys.executable, "-c", BECOME_NOBODY + code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as running:
        try:
            assert running.stdout.readline() == "begun\n"
            yield running
        finally:
            running.kill()


def ports(rank):
    """Return the loopback ports of gloo in this worker, as its user's own tools see them."""
    from hfsdk.engine.process import gloo_groups

    found = []
    for device in gloo_groups._devices.values():
        with device._socket() as listener:
            found.append(listener.getsockname())
    return found


def a_step(roles, batch):
    critic = roles.critic.update(batch, ppo.ValueLoss(), mini_batches=2).rows
    actor = roles.actor.update(batch, ppo.PolicyLoss(), mini_batches=2).rows
    return critic, actor, roles.actor.run(fingerprint)


@pytest.fixture
def batch(live):
    batch = live.actor.generate(OPENINGS, max_new_tokens=8, ignore_eos=True)
    batch = live.critic.compute_values(live.reference.compute_log_probs(live.actor.compute_log_probs(batch)))
    return ppo.advantages(live.reward.compute_scores(batch)).adopt()


@pytest.mark.filterwarnings("ignore:somebody else's program")
def test_five_hundred_strangers_change_no_number_of_a_step_and_are_told_of_once(live, batch):
    addresses = [where for of_rank in live.actor.run(ports) for where in of_rank]
    assert len(addresses) >= 2
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    start = live.session.snapshot("before strangers")
    alone = a_step(live, batch)
    live.session.rewind(start)
    with program(STRANGER, CONNECTIONS, *(port for _, port in addresses)) as stranger:
        beside = a_step(live, batch)
        assert int(stranger.stdout.read()) == 0, "nobody could connect"
    assert beside == alone
    live.actor.compute_log_probs(batch).wait()
    assert len([text for text in live.session.messages if "somebody else's program" in text]) == 1
    live.session.rewind(start)
    live.session.forget(start)
