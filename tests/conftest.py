"""Which tests a run takes (``--tier``, by ``tiers.toml``), and real workers: one Ray for the run and sessions that tests share.

Nothing heavy is imported before a test asks for one of these fixtures.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import tiers

sys.path.insert(0, str(Path(__file__).parent / "system"))
from system_helpers import declare, outcome, ppo_step

SEED = 7
RESULTS = None
"""Where this run writes down what ended (``--results``)."""

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: several threads of each of several processes stand in each other's way
STATE = tempfile.mkdtemp(prefix="state-of-tests-")
os.environ["XDG_STATE_HOME"] = STATE  # kept sessions of tests are nobody's else

OWN_SESSIONS = (
    "test_system_kept.py",
    "test_system_kept_kernels.py",
    "test_system_remote.py",
    "test_system_nodes.py",
    "test_system_node_gone.py",
    "test_system_gpus.py",
    "test_system_network.py",
)
"""Files of system tests whose sessions are in processes of their own: they share no workers with others."""
LONG_FIRST = ("workers", "engine", "viz")
"""Groups of tests that take long, in the order in which they begin: were they last, one process would wait for the other."""


def pytest_unconfigure(config):
    """Leave no folder behind: whoever ran the tests, and each process of xdist's, has made one."""
    shutil.rmtree(STATE, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--tier", choices=tiers.RUNS, help="the tests of one tier, or of `make test`, `make check` or `make nightly`")
    parser.addoption("--results", type=Path, metavar="FILE", help="write down each test as it ends; leave out what passed there")


def pytest_ignore_collect(collection_path, config):
    """Do not import a file that has nothing for this run."""
    tier = config.getoption("tier")
    if tier and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        file = collection_path.relative_to(config.rootpath).as_posix()
        return None if tiers.TIERS.may_hold(file, tier) else True
    return None


def group_of(nodeid):
    """Return the group that one process runs from its first test to its last: by shared workers, ranks or browser, else by file."""
    folder, _, file = nodeid.split("::")[0].removeprefix("tests/").rpartition("/")
    room = folder.split("/")[0]
    if room == "system" and file not in OWN_SESSIONS:
        return "workers"
    if room in ("engine", "viz") and tiers.TIERS.tier_of(nodeid) in ("engine", "system"):
        return room
    if room == "numerics" and tiers.TIERS.tier_of(nodeid) == "system":
        return "workers"
    return nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With two processes (``-n 2``) each takes the group that is next."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    config.option.loadscopereorder = False  # by the order below, and not by how many tests there are
    return ByGroup(config, log)


def pytest_collection_modifyitems(config, items):
    """Take what the run asks for, long groups first; what needs no order keeps its own."""
    tier, results = config.getoption("tier"), config.getoption("results")
    wanted = tiers.TIERS.ids_of(tier) if tier else None
    passed = tiers.passed_in(results) if results else frozenset()
    left_out = [item for item in items if (wanted and not wanted(item.nodeid)) or item.nodeid in passed]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]
    order = {group: place for place, group in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


def pytest_runtest_logreport(report):
    """Write down what ended, where the run was asked to: of all processes, by the one that started them."""
    if RESULTS is not None:
        RESULTS.add(report)


def pytest_configure(config):
    """Where all processes of a run are started from here, one more imports the engines for every Ray of theirs."""
    global RESULTS
    if config.getoption("results") and "PYTEST_XDIST_WORKER" not in os.environ:
        RESULTS = tiers.Results(config.getoption("results"))
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        from hfsdk.engine.ray import fork_server

        if fork_server.can_fork():
            meanwhile = contextlib.ExitStack()
            meanwhile.enter_context(fork_server.engines_imported())
            config.add_cleanup(meanwhile.close)


def pytest_runtest_setup(item):
    """Tests marked gpu are skipped where there is none; torch is asked for them alone."""
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


def pytest_runtest_teardown(item):
    """torch wraps the hook at every group of a process (``[rank0]: [rank0]: ...``): what this process says would be unreadable."""
    sys.excepthook = sys.__excepthook__


@pytest.fixture(scope="session")
def ray_here():
    """Ray, started once, with processors enough for several sessions."""
    torch = pytest.importorskip("torch")
    for package in ("ray", "vllm", "megatron.core"):
        pytest.importorskip(package)
    if torch.cuda.is_available():
        pytest.skip("these tests count processes on gloo; on CUDA each needs a device of its own")
    import ray

    from hfsdk.engine.ray import start

    if not ray.is_initialized():
        start.start(12)
    yield ray
    start.end()


def _open(name):
    import hfsdk as hf

    session = hf.Session(devices=2, seed=SEED, name=name)
    roles = declare(session)
    step = ppo_step(roles)
    roles.first = outcome(step)
    return roles


@pytest.fixture(scope="session")
def live(ray_here):
    """Two devices with the four roles of PPO loaded (actor dp2, rollout tp1, critic tp2), after one step."""
    roles = _open("live")
    yield roles
    roles.session.close()


@pytest.fixture(scope="session")
def twin(ray_here):
    """The same again, in workers of its own: to compare runs, and to kill workers in."""
    roles = _open("twin")
    yield roles
    roles.session.close()


@pytest.fixture(scope="session", autouse=True)
def nothing_kept():
    """What holds the Ray of kept sessions ends by itself when the last one is closed; the tests wait for that."""
    yield
    state = Path(os.environ["XDG_STATE_HOME"])
    head = state / "hfsdk" / "head.json"
    if head.exists():  # of a test that failed, perhaps: a session outlives its kernel
        close_all = "import hfsdk as hf\nfor one in hf.sessions(): one.close()"
        subprocess.run([sys.executable, "-c", close_all], timeout=60, check=False)
    deadline = time.monotonic() + 60
    while head.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Ctrl-C is ignored in whatever a shell starts in the background; tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals_are_as_before(interruptible):
    """What a test leaves of signals decides later tests of its process: with SIGINT blocked no Ctrl-C reaches them."""

    def now():
        return signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    before = now()
    yield
    assert now() == before


@pytest.fixture
def keyboard():
    """``keyboard(when)``: a Ctrl-C on the main thread as soon as ``when()`` is true."""
    threads, ended = [], threading.Event()

    def press(when, times=1, between_s=0.3):
        def wait():
            while not when():
                if ended.wait(0.02):
                    return
            for press in range(times):
                if press:
                    time.sleep(between_s)
                os.kill(os.getpid(), signal.SIGINT)

        threads.append(threading.Thread(target=wait, daemon=True))
        threads[-1].start()

    yield press
    ended.set()
    for thread in threads:
        thread.join(60)
