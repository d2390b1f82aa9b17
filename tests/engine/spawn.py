"""Run one function in several gloo processes of this machine and bring back what each returned."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait

from expect import until

if multiprocessing.parent_process() is None:
    os.environ["TEST_JOB"] = f"test{os.getpid()}"  # the processes started here inherit it
JOB = os.environ["TEST_JOB"]
"""Name of this test process's shared memory, which other tests and sessions of the machine do not have."""


AFTER_A_FAILURE_S = 3.0
"""How long the other ranks may take to end when one has failed: they may be inside a collective for ever."""


class SpawnError(AssertionError):
    pass


def run(function, world_size, *args, timeout_s=450.0):
    """Return ``[function(rank, world_size, *args) for every rank]``, each in a process of its own.

    ``function`` must be importable. When one process fails or none says anything for so long, all are killed and the tracebacks
    raised, and where the others were. A process is a fork, which costs a tenth of a second: none knows what another test left. On a
    machine with many times more work than cores gloo may lose a connection while it makes a group:
    then all start anew, once.
    """
    try:
        return _run(function, world_size, args, timeout_s)
    except SpawnError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        return _run(function, world_size, args, timeout_s)


def forked():
    """Return the context of a server that has imported the engine once: importing it in each process would take most of the time.

    Python 3.11 does not tell the server where this process looks for modules, and skips what the server does not find.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(place for place in sys.path if place)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _run(function, world_size, args, timeout_s):
    context = forked()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, function, rank, world_size, folder, args), daemon=True)
            process.start()
            theirs.close()
            pipes[mine] = rank
            processes.append(process)
        try:
            return _collect(pipes, world_size, timeout_s, lambda rank: _where(folder, rank, processes[rank]))
        finally:
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes, world_size, timeout_s, where):
    results, failures = [None] * world_size, []
    while pipes:
        ready = wait(list(pipes), timeout=AFTER_A_FAILURE_S if failures else timeout_s)
        if not ready:
            break
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failed, value = True, "the process ended without a word"
            if failed:
                failures.append(f"rank {rank}:\n{value}")
            else:
                results[rank] = value
    if failures or pipes:
        silent = [f"no answer from rank {rank}, it was at\n{where(rank)}" for rank in sorted(pipes.values())]
        raise SpawnError("\n".join(failures + silent))
    return results


def _where(folder, rank, process):
    """Let the process write where its threads are, and read it."""
    path = os.path.join(folder, f"where{rank}")
    if not os.path.exists(path) or not process.is_alive():
        return "(not known: it has not begun, or ended)"
    os.kill(process.pid, signal.SIGUSR1)

    def read():
        with open(path) as written:
            return written.read()

    return until("a process to say where it is", lambda: read() or not process.is_alive()) and read()


def _child(pipe, function, rank, world_size, folder, args):
    told = open(os.path.join(folder, f"where{rank}"), "w")  # noqa: SIM115  (open for the life of the process)
    faulthandler.register(signal.SIGUSR1, file=told)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    try:
        assert "preloaded" in sys.modules, "each process imports the engine anew: its server has not found the module"
        import torch

        from hfsdk.engine.process import rendezvous

        torch.set_num_threads(1)
        rendezvous.set_interface("")
        rendezvous.join(f"file://{folder}/store", rank, world_size)
        answer = (False, function(rank, world_size, *args))
    except BaseException:
        answer = (True, traceback.format_exc())
    # bytes, because torch's own way of sending tensors needs this process to live on
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
