"""How long ranks of two pools wait for each other: as long as a link's limit, on a real clock, and no longer for one that died."""

import os
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from expect import until
from spawn import forked, run
from test_direct import NEVER, End, TroubleError, link_of

from hfsdk.engine.process.safepoint import PeerFailed
from hfsdk.engine.weights import transport
from hfsdk.engine.weights.direct import NOTHING, DirectLinks
from hfsdk.resharding.box_moves import Move

WEIGHT = (Move("w", 0, 1, "w", (0,), "w", (0,), (2**25,)),)
"""One message of 128 MB, of which a connection never holds the whole."""


def half_way(rank, dies, folder, pipe):
    """One rank stops with the message half way; the other one says how its wait ended when that one is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{rank}", rank=0, world_size=1)
    transport.BUCKET_BYTES["cpu"] = 2**30
    weight = {"w": torch.ones(2**25)}
    sources, targets = (weight, NOTHING) if rank == 0 else (NOTHING, weight)
    before = written_bytes()

    def stop(self, step):
        while rank == 0 and written_bytes() < before + 2**20:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == dies:
        transport._Run._copy = stop
    links = DirectLinks()
    try:
        with links.using(link_of(folder, 2), rank, 1) as group:
            NEVER.agree(group)
            pipe.send("begun")
            transport.execute_moves(WEIGHT, "fp32", rank, 2, sources, targets, group)
    except RuntimeError as error:
        pipe.send((str(error), len(links._joined), float(weight["w"].sum())))


def written_bytes():
    """Bytes that this process has written, to its connections too."""
    with open("/proc/self/io") as counts:
        return next(int(line.split()[1]) for line in counts if line.startswith("wchar"))


@pytest.mark.parametrize("dies", [0, 1], ids=["giver", "taker"])
def test_a_rank_that_dies_with_a_message_half_way_lets_the_other_go(dies, tmp_path):
    """Gloo itself does not tell: what is half written, or half read, waits for the group's limit."""
    from hfsdk.engine.ray.pools import PEER_LEFT

    context, pipes, processes = forked(), [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=half_way, args=(rank, dies, str(tmp_path), theirs), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    try:
        for pipe in pipes:
            assert pipe.poll(60.0)
            assert pipe.recv() == "begun"
        until("the stop", lambda: psutil.Process(processes[dies].pid).status() == psutil.STATUS_STOPPED)
        assert not pipes[1 - dies].poll(), "it waits for what is to come"
        processes[dies].kill()
        assert pipes[1 - dies].poll(60.0), "it still waits for one that is gone"
        told, num_links, total = pipes[1 - dies].recv()
        assert any(words in told for words in PEER_LEFT), told
        assert num_links == 0
        assert dies == 0 or total == 2**25, "what it gave is as it was"
    finally:
        for process in processes:
            process.kill()


def alone(rank, world_size, folder):
    """The other rank never comes: a cut ends the wait for it, and the limit does."""
    links, outcome = DirectLinks(), []
    for limit_s, call_id in ((60.0, 1), (1.0, 2)):
        start = time.monotonic()
        timer = threading.Timer(0.5, links.cut, (1,))
        timer.start()
        try:
            with links.using(link_of(folder, 2, call_id, limit_s), 0, call_id):
                outcome.append("joined")
        except (PeerFailed, RuntimeError) as error:
            outcome.append((type(error).__name__, str(error)))
        timer.join()
        assert time.monotonic() - start < 5.0
    return outcome


def test_nobody_waits_for_a_rank_that_never_comes(tmp_path):
    cut, late = run(alone, 1, str(tmp_path))[0]
    assert cut == ("PeerFailed", "")
    assert late == ("RuntimeError", "1 of the 2 ranks of train and rollout met within 1 s")


def silent(rank, world_size, folder):
    """Rank 0 joins and never gives: the others wait as long as the link's limit."""
    end, links, start = End(rank, "untied", "tp1", "tp1"), DirectLinks(), time.monotonic()
    link = link_of(folder, world_size, timeout_s=3.0)
    try:
        with links.using(link, rank, 1) as group:
            NEVER.agree(group, None)
            if rank == 0:
                time.sleep(8.0)
                raise TroubleError
            end.way.move(end.sources, end.targets, group)
    except TroubleError:
        return "silent"
    except RuntimeError as error:
        assert time.monotonic() - start < 7.0
        return str(error)
    return "ok"


def test_nobody_waits_longer_than_the_limit(tmp_path):
    first, other = run(silent, 2, str(tmp_path))
    assert first == "silent"
    assert "3000ms" in other
