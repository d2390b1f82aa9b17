"""SIGKILL of a kernel that has a kept session, at any moment; of its keeper and workers; sessions that go from kernel to kernel."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fire import own
from fire.kept_cells import NAME
from fire.kept_stage import ATTACH, GONE, IMPORTS, START_S, TOLD_S, KeptStage, ground
from fire.puppet import CellError, Puppet
from fire.trials import Note, TrialError

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 600.0

KERNEL = "kernel"
"""Tag of trials in which a kernel is killed."""

CHECKPOINT = ("the checkpoint",)
STEP = (*CHECKPOINT, "after the step by hand")

BESIDE = "session.snapshot('a'); x = c.step(session); session.models.actor.generate(c.prompts(session)[0], adapter='a').wait()"

CELLS: Mapping[str, tuple[str, float, tuple[str, ...]]] = {
    "generate": ("x = session.models.actor.generate([[1, 2, 3]] * 8, max_new_tokens=150).text()", 1.5, CHECKPOINT),
    "a step": ("c.step(session)", 1.0, STEP),
    "train": ("c.train(session, folder={saves!r}, save_every=2)", 5.0, ()),
    "train beside": ("run = c.train(session, wait=False)\nwhile len(run.rows) < 6: x = c.many_messages(session, 1)", 6.0, ()),
    "pictures": ("c.pictures(session)", 0.5, CHECKPOINT),
    "move": ("session.place(c.POOLS)", 3.0, CHECKPOINT),
    "save": ("session.save({saves!r}); session.load({saves!r})", 0.6, CHECKPOINT),
    "rewind": (
        "session.snapshot('a'); x = c.step(session); session.rewind('a')",
        1.3,
        STEP,
    ),
    "sync": ("x = c.step(session); session.models.actor.generate([[1, 2, 3]] * 8, max_new_tokens=2).wait()", 1.3, STEP),
    "explain_gap": ("session.models.actor.explain_gap(c.age(session))", 2.5, STEP),
    "probe": ("session.models.reward.probe(['a fine film', 'dull'], prompts=['it is', 'this is'])", 0.5, CHECKPOINT),
    "export": ("session.models.actor.save_pretrained({saves!r} + '/model')", 0.3, CHECKPOINT),
    "merge": ("session.models.actor.save_pretrained({saves!r} + '/model', merge=True)", 0.3, CHECKPOINT),
    "messages": ("c.many_messages(session, 60)", 1.2, CHECKPOINT),
    "declare": ("session.critic('tiny', optimizer=hf.AdamW(lr=1e-3)); session.place('colocate')", 3.0, CHECKPOINT),
    "detach": ("session.detach()", 0.3, CHECKPOINT),
}
"""A cell -> its code, about what it takes, and the states that it may leave; none: those of a run."""

WITH_ADAPTERS = {**CELLS, "beside": (BESIDE, 1.5, STEP)}


def trial(stage: KeptStage, note: Note) -> None:
    """Do one of ``TRIALS``; afterwards a kernel has the session, its state is known and its next step the recorded one."""
    name = note.rng.choices(list(TRIALS), [share for share, _ in TRIALS.values()])[0] if note.number else "a kernel in a cell"
    note.doing(f"preparing {name}")
    try:
        TRIALS[name][1](stage, note)
        stage.leave_others()
    except BaseException as error:
        if isinstance(error, CellError):
            error = TrialError("unusable", f"{error}")
        note.doing(f"{note.what}; that did not hold, and all is started over")
        stage.start_over()
        raise error from None


def _kernel_in_a_cell(stage: KeptStage, note: Note) -> None:
    """Kill the kernel in a cell; the next one gets the session."""
    note.tags.append(KERNEL)
    cells = WITH_ADAPTERS if own.ADAPTERS in os.environ else CELLS
    name, part = note.rng.choice(list(cells)), note.rng.uniform(0.0, 1.1)
    code, seconds, states = cells[name]
    note.doing(f"SIGKILL of a kernel in {name}")
    at = stage.do_and_kill(stage.kernel, name, code.replace("{saves!r}", repr(stage.saves)), part, seconds)
    note.doing(f"SIGKILL of a kernel {at:.3f} s after it began: {name}")
    stage.attach()
    if name == "move":  # it is finished, or not begun; then everything moves back
        stage.kernel.run("session.placement.view(); session.place('colocate')")
    stage.is_known(*states)
    if not states:
        stage.run_is_known()
    stage.prove()


def _kernel_in_attach(stage: KeptStage, note: Note) -> None:
    """Kill kernels while they attach, one after another."""
    note.tags.append(KERNEL)
    stage.kernel.kill()
    moments = []
    note.count = note.rng.randint(1, 3)
    for _ in range(note.count):
        kernel = stage.new_kernel()
        moments.append(stage.do_and_kill(kernel, "attach", ATTACH + "c.pictures(session)", note.rng.uniform(0.4, 1.1), 2.0))
    note.doing(f"SIGKILL of kernels {', '.join(f'{at:.2f} s' for at in moments)} after they began to attach")
    stage.attach()
    stage.is_known("the checkpoint")
    stage.prove()
    note.count = max(1, note.count)


def _kernel_in_start(stage: KeptStage, note: Note) -> None:
    """Kill the kernel while it starts the session and declares its roles; the next one finds it, or is told that there is none."""
    note.tags += [KERNEL, "start-up"]
    stage.kernel.run("session.close(); session.detach()")
    stage.ended()
    if note.rng.random() < 0.5:
        stage.kernel.kill()
        stage.all_ended()
    kernel, code = stage.new_kernel(), IMPORTS + "session = c.begin()\nc.declare(session)"
    at = stage.do_and_kill(kernel, "start", code, note.rng.uniform(0.02, 1.05), 28.0)
    note.doing(f"SIGKILL of a kernel {at:.2f} s after it began to start the session")
    if stage.kernel.process.poll() is None:
        stage.kernel.kill()
    kernel = stage.kernel = stage.new_kernel()
    until = time.monotonic() + START_S
    while True:  # what the dead kernel has begun may be on its way still, and says so
        try:
            kernel.run(f"{IMPORTS}try:\n    session = hf.Session.attach({NAME!r})\nexcept hf.OptionError as error:\n"
                       "    assert 'there is no session' in str(error), error\n    session = c.begin()\n"
                       "c.declare(session); c.prompts(session)", START_S)  # fmt: skip
            break
        except CellError as error:
            if "is being started" not in error.text or time.monotonic() > until:
                raise TrialError("unusable", f"neither attached nor started: {error}") from error
            time.sleep(0.5)
    stage.know()
    stage.prove()


def _keeper(stage: KeptStage, note: Note) -> None:
    """Kill the keeper in a run, or what holds its Ray; who has the session is told, with the save; then from the save."""
    saved, idle, who = note.rng.random() < 0.7, note.rng.random() < 0.4, note.rng.choice(["keeper", "keeper", "head"])
    pid = stage.pids[0] if who == "keeper" else json.loads((stage.state / "hfsdk" / "head.json").read_text())["pid"]
    options = f", folder={stage.saves!r}, save_every=1" if saved else ""
    stage.kernel.run(f"run = c.train(session, wait=False{options})")
    at = note.rng.uniform(0.0, 4.0)
    time.sleep(at)
    note.doing(f"SIGKILL of the {who} {at:.2f} s after a run began")
    _kill(pid)
    stage.ended()
    complete = saved and json.loads((Path(stage.saves) / "session.json").read_text()) if _is_saved(stage) else None
    if idle:  # its Ray has ended when it looks again, perhaps so long that Ray would end who still used it
        stage.all_ended()
        time.sleep(note.rng.choice([0.0, 0.0, 65.0]))
    _is_told(stage, stage.kernel, "session.models.actor.run(c.nothing)", stage.saves if complete and not idle else "")
    stage.kernel.run("session.detach()")
    stage.begin()
    if complete:
        stage.kernel.run(f"session.load({stage.saves!r})")
        stage.run_is_known()
    stage.prove()


def _is_saved(stage: KeptStage) -> bool:
    return (Path(stage.saves) / "session.json").exists()


def _is_told(stage: KeptStage, kernel: Puppet, code: str, names: str = "") -> None:
    """Check that a kernel is told, in time, that its session is gone."""
    until, said = time.monotonic() + TOLD_S, ""
    while GONE not in said:
        try:
            kernel.run(code, TOLD_S)
        except CellError as error:
            said = f"{error}"
        if time.monotonic() > until:
            raise TrialError("hang", f"not told within {TOLD_S:.0f} s that the session is gone: {said}")
    if names and names not in said:
        raise TrialError("wrong state", f"the error does not name the save {names}: {said}")


def _worker(stage: KeptStage, note: Note) -> None:
    """Kill a worker while no kernel has the session; a run that restores goes on, all else is told to the next kernel."""
    restores, runs = note.rng.random() < 0.5, note.rng.random() < 0.7
    if runs:
        options = f", folder={stage.saves!r}, save_every=2, on_death='restore'" if restores else ""
        stage.kernel.run(f"run = c.train(session, wait=False{options})")
        time.sleep(note.rng.uniform(0.0, 2.0))
    stage.kernel.run("session.detach()") if note.rng.random() < 0.5 else stage.kernel.kill()
    pid = note.rng.choice(stage.pids[1:])
    words = f"a run that {'restores' if restores else 'does not restore'}" if runs else "nothing"
    note.doing(f"SIGKILL of a worker while no kernel has the session, in {words}")
    time.sleep(note.rng.uniform(0.0, 1.5))
    _kill(pid)
    old, stage.kernel = stage.kernel, stage.new_kernel()
    if note.rng.random() < 0.5:
        time.sleep(note.rng.uniform(0.0, 10.0))
    stage.kernel.run(ATTACH)
    if old.process.poll() is None:
        old.end()
    if runs and restores:
        _went_on(stage, note)
    stage.prove(news=1)
    stage.know()


def _went_on(stage: KeptStage, note: Note) -> None:
    state, restores = stage.kernel.run(
        "session.run.wait(200); [session.run.state, [str(one) for one in session.run.restores]]", 220.0
    )
    if state != "finished":
        raise TrialError("unusable", f"the run is {state}, after {restores}")
    if len(restores) > 1:
        note.tags.append("one death twice")
    if len(stage.kernel.run("c.rows(session)")) != len(stage.rows):
        raise TrialError("wrong state", f"the run is finished, and not all of it is in the history; {restores}")
    stage.run_is_known()


def _take_over(stage: KeptStage, note: Note) -> None:
    """Two kernels take the session from each other, in the middle of what the other does; one of them has it at the end."""
    kernels, cells = (
        [stage.kernel, stage.new_kernel()],
        ["c.step(session)", "c.many_messages(session, 40)", "session.place(c.POOLS)"],
    )
    kernels[1].run(IMPORTS)
    note.count = note.rng.randint(2, 5)
    note.doing(f"{note.count} times taken over in the middle of a cell")
    for _ in range(note.count):
        has, wants = kernels
        has.send(note.rng.choice(cells))
        time.sleep(note.rng.uniform(0.0, 1.0))
        wants.run(f"session = hf.Session.attach({NAME!r}, take_over=True)", 60.0)
        with contextlib.suppress(CellError):  # as far as it came
            has.answer()
        _is_told(stage, has, "session.models.actor.run(c.nothing)")
        has.run("session.detach()")
        kernels.reverse()
    stage.kernel = kernels[0]
    stage.is_known("the checkpoint", "after the step by hand") if note.count < 2 else None
    stage.prove()


def _closed_elsewhere(stage: KeptStage, note: Note) -> None:
    """Another process closes the session during a run; who has it is told, nothing is left, and the name is free."""
    other = stage.new_kernel()
    other.run(IMPORTS)
    stage.kernel.send(f"c.train(session, folder={stage.saves!r}, save_every=2)")
    time.sleep(note.rng.uniform(0.0, 3.0))
    note.doing("closed by another process in a run")
    other.run(f"hf.sessions()[{NAME!r}].close()", 60.0)
    stage.ended(stage.pids[1:])  # the keeper stays to show what was measured
    with contextlib.suppress(CellError):
        stage.kernel.answer()
    _is_told(stage, stage.kernel, "session.models.actor.run(c.nothing)")
    stage.kernel.run("len(session.history), c.pictures(session)")
    stage.kernel.run("session.detach()") if note.rng.random() < 0.5 else stage.kernel.kill()
    stage.ended()
    stage.begin_again(note.rng, [other.process.pid])


def _many_want_it(stage: KeptStage, note: Note) -> None:
    """Several kernels attach, or start a session of the name, at once: one has it, the others are told who."""
    stage.kernel.run("session.detach()")
    note.count = 3
    note.doing("three kernels attach, look or start at once")
    wanted = [note.rng.choice([ATTACH, ATTACH, IMPORTS + "session = c.begin()"]) for _ in range(note.count)]
    kernels = [stage.new_kernel() for _ in wanted]
    for kernel, code in zip(kernels, wanted, strict=True):
        kernel.send(code)
    have = []
    for kernel in kernels:
        try:
            kernel.answer(60.0)
            have.append(kernel)
        except CellError as error:
            if error.kind not in ("SessionInUseError", "OptionError"):
                raise TrialError("unusable", f"{error}") from error
    attached = [code for code in wanted if "attach" in code]
    if len(have) != min(1, len(attached)):
        raise TrialError("wrong state", f"{len(have)} of {len(attached)} kernels that attached at once have the session")
    stage.kernel.kill()
    if have:
        stage.kernel = have[0]
    else:
        stage.attach()
    stage.prove()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


TRIALS: Mapping[str, tuple[float, Callable[[KeptStage, Note], None]]] = {
    "a kernel in a cell": (0.5, _kernel_in_a_cell),
    "kernels that attach": (0.12, _kernel_in_attach),
    "a kernel that starts the session": (0.07, _kernel_in_start),
    "the keeper": (0.07, _keeper),
    "a worker without a kernel": (0.07, _worker),
    "taking over": (0.07, _take_over),
    "many at once": (0.05, _many_want_it),
    "closing from elsewhere": (0.05, _closed_elsewhere),
}
"""What is tried -> how often, and how."""
