"""Another user of the machine looks for a way into a session: its shared memory, what Ray writes to disk, whatever listens."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from expect import until

import hfsdk as hf

NOBODY = 65534
RANDOM_CHARS = 12
"""Of a job, and again of each engine, in the names of shared memory: 48 bits each."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_nobody(*command):
    """Run a command as another user; return how it ended and what it said."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(
        list(map(str, command)), **pipes, text=True, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", check=False
    )


def watch_segments(rank):
    """From now on, this worker writes down the segments of an engine before their names go, and what another user gets of them."""
    from hfsdk.engine.generation import rollout_engine

    remove = rollout_engine.cpu.remove_segments
    rollout_engine.cpu.seen = seen = []

    def looked_at(job_id, token="*"):
        for path in rollout_engine.cpu.SEGMENTS.glob(f"hfsdk.{job_id}.{token}*"):
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                info = path.stat()
                tried = None
                if os.geteuid() == 0:
                    reader = ["/usr/bin/head", "-c", "1", str(path)]
                    tried = subprocess.run(reader, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False)
                    path.stat()
                seen.append([path.name, info.st_mode & 0o777, info.st_uid, tried and tried.stderr.decode()])
        return remove(job_id, token)

    rollout_engine.cpu.remove_segments = looked_at


def seen_segments(rank):
    from hfsdk.engine.generation import rollout_engine

    return rollout_engine.cpu.seen


def segments_of_a_session():
    """Return what the ranks of a rollout wrote down of its segments, and the names that are still there."""
    with hf.Session(devices=2, seed=3, name="segments") as session:
        session.critic("tiny").run(watch_segments)
        actor = session.actor("tiny", rollout="tp2")
        actor.generate([[1, 2, 3]] * 2, max_new_tokens=2).wait()
        seen = [one for of_rank in actor.run(seen_segments) for one in of_rank]
        return seen, {path.name for path in Path("/dev/shm").glob("hfsdk.*")} & {name for name, *_ in seen}


def test_shared_memory_of_a_rollout_is_its_users_alone_and_nobody_guesses_its_names(ray_here):
    drawn = []
    for _ in range(2):
        seen, left = segments_of_a_session()
        assert seen, "the ranks share memory"
        assert left == set(), "nobody finds them by name once all ranks have them"
        for _, mode, user, tried in seen:
            assert (mode, user) == (0o600, os.geteuid())
            assert tried is None or "Permission denied" in tried, tried
        (words,) = {tuple(name.partition("-")[0].split(".")[1:]) for name, *_ in seen}
        drawn += words
    assert len(set(drawn)) == 4, "a session's word and an engine's, neither of which comes again"
    assert all(len(word) >= RANDOM_CHARS and int(word, 16) for word in drawn)


@as_root
def test_what_ray_spills_to_disk_is_read_by_nobody_else(ray_here):
    from hfsdk.engine.ray import start

    folder = start._folder.path
    more = [ray_here.put(np.full(start.OBJECT_STORE_BYTES // 32, number, dtype=np.float64)) for number in range(6)]

    def spilled():
        return [path for path in folder.rglob("ray_spilled_objects*/*") if path.is_file()]

    until("objects on disk", spilled)
    for path in spilled()[:2]:
        for command in (["cat", path], ["ls", path.parent], ["ls", folder]):
            done = as_nobody(*command)
            assert done.returncode != 0, command
            assert "Permission denied" in done.stdout
    del more


def listening(processes):
    """Return by (address, port) the name of the process that listens there."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    host = one.laddr.ip if one.laddr.ip not in ("0.0.0.0", "::") else "127.0.0.1"
                    found[host, one.laddr.port] = process.name()
    return found


def ask_all(where, asks, answers):
    """Ask by HTTP, as a dashboard's user or ``ray job submit`` would; note each status, or what came instead."""
    for method, path, body in asks:
        line = http.client.HTTPConnection(*where, timeout=10)
        try:
            line.request(method, path, body=body, headers={"Content-Type": "application/json"})
            answer = line.getresponse()
            answers[where, path] = answer.status, answer.read(2000)
        except TimeoutError:
            answers[where, path] = 0, b"nothing"
            return  # as at a closed port of gloo: to none of them
        except Exception as error:
            answers[where, path] = 0, repr(error).encode()
        finally:
            line.close()


def test_jobs_and_dashboards_answer_nobody(live, tmp_path):
    """Each port of the session's processes is asked for what Ray's dashboard and its agents serve."""
    mark = tmp_path / "ran"
    job = json.dumps({"entrypoint": f"touch {mark}"})
    context = json.dumps({"serialized_runtime_env": json.dumps({"env_vars": {"A": "1"}}), "job_id": "01000000"})
    asks = [
        ("GET", "/", None), ("GET", "/api/version", None), ("GET", "/api/jobs/", None), ("POST", "/api/jobs/", job),
        ("POST", "/api/job_agent/jobs/", job), ("GET", "/nodes?view=summary", None), ("GET", "/metrics", None),
        ("GET", "/api/local_raylet_healthz", None), ("POST", "/get_or_create_runtime_env", context), ("GET", "/logs", None),
    ]  # fmt: skip
    me = psutil.Process()
    ports = listening([me, *me.children(recursive=True)])
    assert {"gcs_server", "raylet", "ray::RuntimeEnvAgent"} <= set(ports.values())
    answers = {}
    askers = [threading.Thread(target=ask_all, args=(where, asks, answers)) for where in ports]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert {where for where, _ in answers} == set(ports)
    agent = next(where for where, name in ports.items() if name == "ray::RuntimeEnvAgent")
    assert answers[agent, "/get_or_create_runtime_env"][0] == http.HTTPStatus.UNAUTHORIZED, "it was asked where it listens"
    assert {key: answer for key, answer in answers.items() if answer[0] and answer[0] < 400} == {}
    assert not mark.exists()
    assert len(live.actor.generate([[1, 2, 3]] * 2, max_new_tokens=2)["response"]) == 2, "and the session goes on"


LOOKS = """
import os, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in filter(str.isdigit, os.listdir("/proc")):
    for file in ("cmdline", "environ"):
        try:
            with open(f"/proc/{name}/{file}", "rb") as one:
                sys.stdout.buffer.write(one.read().replace(bytes(1), b" ") + b"\\n")
        except OSError:
            pass
"""


@as_root
def test_no_process_shows_another_user_a_secret(live):
    """As ``ps aux`` and ``ps e`` show it: neither Ray's token nor what a pool's processes meet by."""
    from hfsdk.engine.ray import access

    file = access.token_file()
    token = file.read_text().strip() if file else os.environ["RAY_AUTH_TOKEN"]
    seen = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, errors="replace", check=True).stdout
    assert "raylet" in seen, "it sees every process"
    assert token not in seen
    assert "keyed://" not in seen
