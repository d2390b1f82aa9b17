"""Kernels outside the cluster, through the server and a proxy: without Ray or torch, with connections that are cut."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from kept_kernel import Kernel, KernelError
from tcp_proxy import Proxy

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]

BEGIN = """
import hfsdk as hf
session = hf.Session(devices=1, name="far", keep=True)
actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
session.reference(actor)
session.reward(lambda prompts, completions: [-float(len(c)) for c in completions])
session.place("colocate")
rollout = actor.generate([[1, 2, 3]] * 4, max_new_tokens=4)
rollout["response"].flat.tolist()
"""

THIN = """
import sys
sys.modules.update(dict.fromkeys(["ray", "torch", "psutil", "vllm", "megatron", "transformers", "tokenizers", "safetensors"]))
import hfsdk as hf
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def far(state):
    """A session that nobody has, and the server; (values of its batch, port, token)."""
    kernel = Kernel(state)
    values = kernel.run(BEGIN)
    kernel.kill()
    server = serve(state)
    port = int(server.stdout.readline().split("/NAME")[0].rpartition(":")[2])
    token = (state / "hfsdk" / "serve-token").read_text()
    yield values, port, token
    last = Kernel(state)
    last.run("import hfsdk as hf\nfor one in hf.sessions(): one.close()")
    last.end()
    server.terminate()
    _, said = server.communicate(timeout=30)
    assert server.returncode == 0
    assert [line for line in said.splitlines() if " refused: " not in line] == [], "it says nothing of Ray"
    deadline = time.monotonic() + 60
    while (state / "hfsdk" / "head.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)


STARTED = []
"""Servers."""


@pytest.fixture(autouse=True)
def no_server_is_left():
    """End what a test that failed has left: it would use the session's Ray for ever."""
    before = len(STARTED)
    yield
    for server in STARTED[before:]:
        server.kill()
        server.communicate()


def serve(state, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state)}
    server = subprocess.Popen(
        [sys.executable, "-m", "hfsdk.serve", "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    STARTED.append(server)
    return server


@pytest.fixture
def thin(state):
    """A kernel that has neither Ray nor torch nor psutil."""
    kernel = Kernel(state / "elsewhere")
    kernel.run(THIN)
    yield kernel
    kernel.kill()


def attach(port, token, more=""):
    return f"session = hf.Session.attach('hfsdk://127.0.0.1:{port}/far', token={token!r}{more})"


def test_a_thin_kernel_calls_trains_and_looks(far, thin, state):
    values, port, token = far
    thin.run(attach(port, token))
    assert thin.run("session.batches['rollout']['response'].flat.tolist()") == values
    thin.run("actor = session.models.actor; batch = actor.generate([[5, 6, 7]] * 4, max_new_tokens=4)")

    assert thin.run("len(batch['response'])") == 4
    assert thin.run("actor.run(lambda rank: rank.rank)") == [0]
    big = thin.run("import numpy as np\nown = session.batch(x=[np.arange(5000.0)] * 60)\nfloat(own['x'].flat.sum())")
    assert big == 60 * 4999 * 5000 / 2
    thin.run("prompts = session.prompts([[i, 2, 3] for i in range(1, 17)], batch_size=4)")
    thin.run("run = session.train(hf.GRPO(n=2, max_new_tokens=4), prompts, steps=3, progress=False)")
    assert thin.run("[run.state, len(run.rows), prompts.position, len(session.history)]") == ["finished", 3, 3, 3]
    assert thin.run("run.last.batch['scores'].shape[0]") == 8
    assert thin.run("run.last.actor.rows[0]['num_samples']") == 8
    assert thin.run("[len(session.trace.snapshot()) > 5, len(session.dataflow.snapshot().calls) > 4]") == [True, True]
    assert "actor" in thin.run("str(session.placement)")
    thin.run("session.snapshot('here'); session.rewind('here')")

    with pytest.raises(KernelError) as failed:
        thin.run("actor.update(run.last.batch, lambda out, b: out.log_probs / 0 * float('nan')).wait()")
    assert failed.value.kind == "NonFiniteLossError"
    assert thin.run("[name for name in ('ray', 'torch', 'psutil') if sys.modules.get(name)]") == []
    thin.run("session.detach()")
    assert thin.end() == 0


def test_a_thin_kernel_declares_writes_texts_and_saves(far, thin, tmp_path):
    """What needs files is done near them: models by name, a tokenizer, checkpoints."""
    _, port, token = far
    thin.run(attach(port, token) + "\nimport warnings; warnings.simplefilter('ignore')")
    thin.run("critic = session.critic('tiny', optimizer=hf.AdamW(lr=1e-4)); session.place('colocate')")
    assert thin.run("[critic is session.models.critic, critic.spec.name, critic.kind]") == [True, "tiny", "critic"]
    assert thin.run("session.critic('tiny', optimizer=hf.AdamW(lr=1e-4)) is critic")
    with pytest.raises(KernelError) as unknown:
        thin.run("session.reward('no-such-model')")
    assert unknown.value.kind == "ModelNotFoundError"
    thin.run(
        "def brevity(prompts, completions):\n    return [-float(len(c)) for c in completions]\nreward = session.reward(brevity)"
    )
    thin.run("prompts = session.prompts(['the film is', 'a nice day'] * 4, batch_size=4, seed=1)")
    thin.run("batch = session.models.actor.generate(prompts[0], max_new_tokens=6, temperature=0.0)")
    texts = thin.run("batch.text()")
    scores = thin.run("reward.compute_scores(batch)['scores'].tolist()")
    assert [-float(len(text)) for text in texts] == scores, "as the function near the workers reads them"
    assert thin.run("len(session.models.actor.generate('the film', max_new_tokens=3).text()[0]) > 0")
    thin.run("run = session.train(hf.PPO(max_new_tokens=6), prompts, steps=2, progress=False)")
    assert thin.run("run.rows[-1]['step']") >= 1
    thin.run(f"session.save({str(tmp_path / 'saved')!r})")
    assert json.loads((tmp_path / "saved" / "session.json").read_text())
    at = thin.run("critic.version")
    thin.run("session.train(hf.PPO(max_new_tokens=6), prompts, steps=1, progress=False)")
    assert thin.run("critic.version") > at
    thin.run(f"session.load({str(tmp_path / 'saved')!r})")
    assert thin.run("[critic.version, prompts.position]") == [at, 2]
    thin.run("critic.release(); session.detach()")


def test_notebook_01_runs_from_outside(far, thin, state):
    """Its cells as they stand, but for the one that opens the session; in fewer steps. ``benchmarks/remote_notebook.py`` does it
    in an environment of its own, and compares the numbers."""
    _, port, token = far
    near = Kernel(state)
    near.run("import hfsdk as hf\nhf.Session(devices=2, seed=0, name='notebook', keep=True).detach()")
    assert near.end() == 0
    proxy = Proxy(port, delay_s=0.025, bytes_per_s=20e6 / 8)
    cells = json.loads((ROOT / "notebooks" / "01_ppo_step_by_step.ipynb").read_text())["cells"]
    sources = [
        "".join(cell["source"])
        for cell in cells
        if cell["cell_type"] == "code" and "stored" not in cell["metadata"].get("tags", ())
    ]
    opens, attaches = "hf.Session(devices=2, wait=True, seed=0)", f"hf.Session.attach('hfsdk://127.0.0.1:{proxy.port}/notebook'"
    try:
        assert sum(source.count(opens) + source.count("steps=10") for source in sources) == 2
        thin.run("import sys; sys.modules.update(dict.fromkeys(['vaderSentiment', 'datasets']))")
        for source in sources:
            source = source.replace(opens, f"{attaches}, token={token!r}, wait=True)")
            thin.run(source.replace("steps=10", "steps=2"))
        assert thin.run("[len(run.rows), session.status]") == [2, "closed"]
    finally:
        proxy.close()


def test_nobody_without_the_token_gets_anything(far, thin):
    _, port, token = far
    for shown, words in ((token[:-1] + "x", "does not know this token"), ("", "asks for its server's token")):
        with pytest.raises(KernelError, match=words):
            thin.run(attach(port, shown).replace(f"token={shown!r}", f"token={shown!r} or None"))
    with pytest.raises(KernelError, match="nothing answers"):
        thin.run(attach(1, token))
    with pytest.raises(KernelError, match="there is no session 'none' at hfsdk://") as nowhere:
        thin.run(attach(port, token).replace("/far", "/none"))
    assert nowhere.value.kind == "OptionError"
    with pytest.raises(KernelError, match=r"the server of hfsdk://\S+ is hfsdk [0-9.]+, and this is 99; nothing was sent"):
        thin.run(f"import hfsdk.kept.attach as a\nthis, a.package_version = a.package_version, lambda: '99'\n{attach(port, token)}")
    for path in ("/far", f"/far?token={token}"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}")
        assert refused.value.code == 401
        refused.value.close()


def test_a_browser_sees_a_session_by_a_link(far, state):
    _, port, token = far
    made = subprocess.run(
        [sys.executable, "-m", "hfsdk.serve", "--link", f"hfsdk://127.0.0.1:{port}/far"], text=True, stdout=subprocess.PIPE,
        check=True, env=os.environ | {"PYTHONPATH": str(ROOT), "HFSDK_TOKEN": token},
    )  # fmt: skip
    link = made.stdout.strip()
    with urllib.request.urlopen(link) as answer:
        cookie = answer.headers["Set-Cookie"].partition(";")[0]
        page = re.search('url=([^"]+)"', answer.read().decode()).group(1)
    with pytest.raises(urllib.error.HTTPError) as again:
        urllib.request.urlopen(link)
    assert again.value.code == 401
    again.value.close()

    def asked(path):
        return urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Cookie": cookie})

    with urllib.request.urlopen(asked(page)) as answer:
        assert "who lives where" in answer.read().decode()
        assert "HttpOnly" in answer.headers["Set-Cookie"]
        rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
        assert rules["script-src"].startswith("blob: 'sha256-"), "pictures are modules, and no other script runs"
        assert "unsafe" not in rules["script-src"]
    with urllib.request.urlopen(asked(page.replace("/far", "/"))) as answer:
        assert 'href="far"' in answer.read().decode()
    with pytest.raises(urllib.error.HTTPError) as unknown:
        urllib.request.urlopen(asked(page.replace("/far", "/none")))
    assert unknown.value.code == 404
    unknown.value.close()


LOOKS = """
import os
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in filter(str.isdigit, os.listdir("/proc")):
    for file in ("cmdline", "environ"):
        try:
            with open(f"/proc/{name}/{file}", encoding="utf-8", errors="replace") as one:
                print(one.read().replace(chr(0), " "))
        except OSError:
            pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_ps_shows_another_user_no_token_of_a_server_or_a_kept_session(far):
    _, _, token = far
    seen = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=True).stdout
    assert "hfsdk.serve" in seen, "it sees every process"
    assert "ray_head" in seen
    ray = os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").read_text().strip()
    assert [secret for secret in (token, ray) if secret in seen] == []


def test_the_token_of_another_server_is_refused(far, thin, tmp_path):
    _, port, token = far
    own = tmp_path / "token"
    own.write_text("another-server-of-the-same-user-has-this-one")
    other = serve(tmp_path, "--token-file", str(own))
    other_port = int(other.stdout.readline().split("/NAME")[0].rpartition(":")[2])
    for where, what in ((port, own.read_text()), (other_port, token)):
        with pytest.raises(KernelError, match="does not know this token"):
            thin.run(attach(where, what))
    other.terminate()
    other.communicate(timeout=30)


SQUATS = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
assert os.getuid() == 65534
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("there", flush=True)
for _ in range(4):
    line, _ = listener.accept()
    line.settimeout(0.2)
    said = b""
    try:
        while part := line.recv(65536):
            said += part
            line.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\n\\r\\n")
    except OSError:
        pass
    line.close()
    print(said.hex(), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_at_the_servers_port_gets_nothing(far, state, thin):
    _, _, token = far
    first = serve(state)
    port = int(first.stdout.readline().split("/NAME")[0].rpartition(":")[2])
    thin.run(attach(port, token, ", read_only=True"))
    first.kill()
    first.communicate()
    squatter = subprocess.Popen([sys.executable, "-c", SQUATS, str(port)], stdout=subprocess.PIPE, text=True, cwd="/")
    assert squatter.stdout.readline() == "there\n"
    said, _ = squatter.communicate(timeout=120)
    heard = [bytes.fromhex(line) for line in said.split()]
    assert len(heard) == 4
    assert all(token.encode() not in one and b"Bearer" not in one and one[:1] == b"\x16" for one in heard)
    second = serve(state, "--port", str(port))
    try:
        second.stdout.readline()
        assert thin.run("len(session.roles)") == 3
        thin.run("session.detach()")
    finally:
        second.terminate()
        second.communicate()


def test_a_hundred_cuts_lose_no_event_and_do_nothing_twice(far, thin):
    _, port, token = far
    proxy = Proxy(port, delay_s=0.002)
    try:
        thin.run(attach(proxy.port, token) + "\nimport time")
        thin.run("ended = []\nsession.subscribe(lambda e: e['type'] == 'call_done' and ended.append(e['call_id']))")
        thin.run("ends = ('call_done', 'call_failed', 'call_cancelled')\nraw = []")
        thin.run("session._link.subscribe(lambda e: e['type'] in ends and raw.append(e['call_id']))")
        before = thin.run("len(session.history)")
        thin.run("prompts = session.prompts([[i, 2, 3] for i in range(1, 17)], batch_size=4)")
        thin.run("run = session.train(hf.GRPO(n=2, max_new_tokens=4), prompts, steps=400, wait=False, progress=False)")
        dice, over = random.Random(0), threading.Event()

        def cutting():
            for number in range(100):
                while proxy.num_connections <= number:  # it has come back from the cut before
                    if over.wait(0.01):
                        return
                over.wait(dice.uniform(0.0, 0.1))
                proxy.cut()

        cutter = threading.Thread(target=cutting)
        cutter.start()
        calls = 0
        while cutter.is_alive():
            calls += thin.run("len(actor.run(lambda rank: 1))") if calls else thin.run("actor = session.models.actor\n1")
        over.set()
        cutter.join()
        assert proxy.num_connections >= 100
        thin.run("run.stop(); run.wait(60)")
        done = thin.run("len(run.rows)")
        assert thin.run("len(session.history)") == before + done
        assert [row["step"] for row in json.loads(thin.run("import json; json.dumps(list(run.rows))"))] == list(
            range(before, before + done)
        )
        thin.run("time.sleep(1.0)")
        told = thin.run("raw")
        assert len(told) == len(set(told)), "no event twice"
        known = thin.run("[c.id for c in session._link.send(__import__('hfsdk.engine.calls.queries', fromlist=['q']).CallsOf())]")
        kept = [number for number in known if number > min(told)]
        assert set(kept) <= set(told), "no event missed"
        thin.run("session.detach()")
    finally:
        proxy.close()


def test_a_server_that_starts_anew_is_found_again(far, state, thin):
    """By kernels that are attached: what was asked of the old one may be asked of the new one, or is told."""
    _, _, token = far
    first = serve(state)
    port = int(first.stdout.readline().split("/NAME")[0].rpartition(":")[2])
    thin.run(attach(port, token, ", read_only=True"))
    assert thin.run("len(session.roles)") == 3
    first.kill()
    first.communicate()
    second = serve(state, "--port", str(port))
    try:
        second.stdout.readline()
        assert thin.run("session.status") in ("idle", "working")
        thin.run("session.detach()")
    finally:
        second.terminate()
        second.communicate()


def test_an_interrupt_ends_the_waiting_for_a_server_that_is_gone(far, state, thin):
    """Whoever waits is told, too; what is asked when the server is there again is done."""
    _, _, token = far
    first = serve(state)
    port = int(first.stdout.readline().split("/NAME")[0].rpartition(":")[2])
    thin.run(attach(port, token, ", take_over=True") + "\nactor = session.models.actor")
    assert thin.run("actor.run(lambda rank: 1)") == [1]
    first.kill()
    first.communicate()
    thin.run(
        "import warnings; told = warnings.catch_warnings(record=True); said = told.__enter__(); warnings.simplefilter('always')"
    )
    thin.send("actor.run(lambda rank: 1)")
    time.sleep(5)
    thin.interrupt()
    with pytest.raises(KernelError) as ended:
        thin.answer()
    assert ended.value.kind == "KeyboardInterrupt"
    assert "is lost" in thin.run("str([str(one.message) for one in said])")
    second = serve(state, "--port", str(port))
    try:
        second.stdout.readline()
        assert thin.run("actor.run(lambda rank: 2)") == [2]
        thin.run("session.detach()")
    finally:
        second.terminate()
        second.communicate()


def test_others_are_listened_to_without_a_page_and_a_guessable_token_is_refused(far, state, tmp_path, thin):
    _, _, token = far
    open_to_others = serve(state, "--host", "0.0.0.0")
    line = open_to_others.stdout.readline()
    assert "browser" not in line, "its certificate is one that no browser knows"
    thin.run(attach(int(line.split("/NAME")[0].rpartition(":")[2]), token, ", read_only=True"))
    assert thin.run("len(session.roles)") == 3
    thin.run("session.detach()")
    open_to_others.terminate()
    open_to_others.communicate()
    (tmp_path / "token").write_text("short")
    refused = serve(state, "--token-file", str(tmp_path / "token"))
    _, said = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "16" in said
