"""Everything a session with workers is asked to do while something is killed or interrupted, one entry each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hfsdk as hf
from fire.stage import FORMS, Stage
from fire.trials import TrialError
from hfsdk.algorithms import ppo

LONG_TOKENS = 200
"""Of a generation that takes a second."""

SLOW_S = 0.05
"""What each micro-batch of an update, and each rank of ``run`` and ``call``, takes at least."""


@dataclass(frozen=True)
class Deed:
    """Something to do in the middle of which something happens."""

    name: str
    do: Callable[[Stage, str], Any]
    """Given the stage and the form it is in; waits for its end."""
    seconds: float
    """About what it takes; what it has taken here counts more."""
    trained: bool = False
    """Whether roles have learned since the checkpoint when it begins."""
    start_up: bool = False
    """Whether it starts something: processes, models, a run, a save."""
    parts: tuple[Callable[[Stage, str], Any], ...] = ()
    """Of one that learns: what leads, one after the other, to the states that it may leave; none: it changes nothing."""
    prepare: Callable[[Stage, str], Any] = lambda stage, form: None
    """Done before the state that it begins with is noted."""
    check: Callable[[Stage], None] = lambda stage: None
    """Looks at what it has left; raises TrialError where that is wrong."""
    adapters: bool = False
    """Whether it is for roles with adapters alone."""
    tagged: bool = False
    """Whether the ledger counts it by its name."""
    share: float = 1.0


def other(form: str) -> str:
    """Return the form that ``place`` goes to from one: each is left and reached in turn."""
    return FORMS[(FORMS.index(form) + 1) % len(FORMS)]


@hf.primitive(reads=["prompt"], writes=["slept"], protocol=hf.protocols.DP)
def sleepy(model: Any, rows: Any) -> dict[str, Any]:
    """A user's own primitive that takes a moment."""
    import time

    import numpy as np

    time.sleep(0.3)
    return {"slept": np.zeros(rows.num_rows)}


def slow_loss(out: Any, b: Any) -> Any:
    """A loss that takes a moment in every micro-batch."""
    import time

    time.sleep(0.05)
    return -out.log_probs * 1e-3


def nap(rank: Any) -> int:
    """What ``run`` runs."""
    import time

    time.sleep(0.4)
    return int(rank.num_updates)


def _many(stage: Stage) -> hf.Batch:
    return stage.session.batch(prompt=[[1] * 60] * 32, response=[[2] * 200] * 32)


def _update(stage: Stage, form: str) -> None:
    batch = stage.batch()
    stage.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
    stage.actor.update(batch, slow_loss, mini_batches=4).wait()


def _halves(stage: Stage, form: str) -> None:
    batch = stage.batch()
    stage.actor.forward_backward(batch, slow_loss).wait()
    stage.actor.step().wait()


def _train(stage: Stage, form: str) -> None:
    stage.session.train(hf.PPO(max_new_tokens=6, mini_batches=2), stage.prompts, steps=2, progress=False)


def _save(stage: Stage, form: str) -> None:
    stage.session.save(stage.folder / "second")


def _save_behind(stage: Stage, form: str) -> None:
    saving = stage.session.save(stage.folder / "second", wait=False)
    stage.batch()
    saving.wait()


def _rewind(stage: Stage, form: str) -> None:
    before = stage.session.snapshot("before")
    stage.step()
    stage.session.rewind(before)


def _one_step(stage: Stage, form: str) -> None:
    stage.session.train(hf.PPO(max_new_tokens=6, mini_batches=2), stage.prompts, steps=1, progress=False)


def _age(stage: Stage, form: str) -> None:
    """Have a batch of weights that a snapshot keeps, while the generating engine has newer ones."""
    stage.session.snapshot("then")
    stage.older = stage.batch().wait()
    stage.step()
    stage.actor.generate(stage.prompts[0], max_new_tokens=2).wait()


def _age_as_wanted(stage: Stage, form: str) -> None:
    """As :func:`_age`; once a form it is seen that the deed looks at the weights of the snapshot."""
    _age(stage, form)
    if f"explain_gap in {form}" not in stage.known:
        verdict = stage.actor.explain_gap(stage.older).verdict
        if "with the weights of then" not in verdict:
            raise TrialError("wrong state", f"explain_gap did not look at the weights of the snapshot: {verdict}")
        stage.known[f"explain_gap in {form}"] = stage.digests()


def _two_steps(stage: Stage, form: str) -> None:
    """Have a run whose last step can be done again."""
    stage.session.train(
        hf.PPO(max_new_tokens=6, mini_batches=2), stage.prompts, steps=2, look_back=2, progress=False
    )  # fmt: skip


def _first_bad(stage: Stage, form: str) -> None:
    run = stage.session.run
    assert run is not None
    run.first_bad(step=run.rows[-1]["step"])


def _exporter(*, merge: bool) -> Callable[[Stage, str], None]:
    def export(stage: Stage, form: str) -> None:
        for role in (stage.actor, stage.critic):
            role.save_pretrained(stage.folder / "exported" / role.name, merge=merge)

    return export


def _exports_whole(stage: Stage) -> None:
    """Check that a model that is there is there with all its numbers."""
    from safetensors import SafetensorError, safe_open

    for folder in (stage.folder / "exported").glob("[!.]*"):
        files = list(folder.glob("*.safetensors"))
        try:
            names = [name for file in files for name in safe_open(file, "np").keys()]  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise TrialError("wrong state", f"half a model is in {folder}: {error}") from error
        if not names or not list(folder.glob("*config.json")):
            raise TrialError("wrong state", f"half a model is in {folder}: {sorted(path.name for path in folder.iterdir())}")


def _loads(stage: Stage, form: str) -> None:
    stage.reference.release()
    stage.reference = stage.session.reference(stage.actor)
    stage.reference.compute_log_probs(stage.session.batch(prompt=[[1]], response=[[2]])).wait()


DEEDS = (
    Deed("generate", lambda s, f: s.actor.generate(s.prompts[0], max_new_tokens=LONG_TOKENS, ignore_eos=True).wait(), 1.0),
    Deed("log-probs", lambda s, f: s.actor.compute_log_probs(_many(s)).wait(), 0.8),
    Deed("values", lambda s, f: s.critic.compute_values(_many(s)).wait(), 0.8),
    Deed("update", _update, 1.5, parts=(_update,)),
    Deed("forward_backward and step", _halves, 1.0, parts=(_halves,)),
    Deed("run", lambda s, f: s.actor.run(nap), 0.5),
    Deed("call", lambda s, f: s.critic.call(sleepy, s.session.batch(prompt=[[1], [2]])).wait(), 0.4),
    Deed("train", _train, 3.0, parts=(_one_step, _one_step), start_up=True),
    Deed("place", lambda s, f: s.place(other(f)), 5.0, trained=True, start_up=True, tagged=True, share=10.0),
    Deed("save", _save, 0.8, trained=True, start_up=True),
    Deed("save behind", _save_behind, 1.5, trained=True, start_up=True),
    Deed("load", lambda s, f: s.session.load(s.checkpoint), 0.5, trained=True),
    Deed("snapshot", lambda s, f: s.session.snapshot("one"), 0.4, trained=True),
    Deed("rewind", _rewind, 1.5, parts=(lambda s, f: s.step(),)),
    Deed("first loads", _loads, 1.0, start_up=True),
    Deed("sync", lambda s, f: s.actor.generate(s.prompts[0], max_new_tokens=2).wait(), 0.4, trained=True, tagged=True),
    Deed("explain_gap", lambda s, f: s.actor.explain_gap(s.older), 2.0, trained=True, prepare=_age_as_wanted, tagged=True,
         share=2.5),
    Deed("probe", lambda s, f: s.reward.probe(s.older), 0.5, prepare=_age, tagged=True),
    Deed("first_bad", _first_bad, 4.0, prepare=_two_steps, tagged=True, share=1.5),
    Deed("export", _exporter(merge=False), 0.3, trained=True, check=_exports_whole, tagged=True),
    Deed("merge", _exporter(merge=True), 0.3, trained=True, check=_exports_whole, adapters=True, tagged=True),
    Deed("beside", lambda s, f: s.actor.generate(s.prompts[0], max_new_tokens=60, adapter="then").wait(), 0.8, trained=True,
         prepare=_age, adapters=True, tagged=True),
)  # fmt: skip


def deeds_of(stage: Stage) -> list[Deed]:
    """Return what a stage's roles can do."""
    return [deed for deed in DEEDS if stage.lora or not deed.adapters]


def arrange(stage: Stage, deed: Deed, form: str) -> tuple[str, ...]:
    """Go to the state that a deed begins with, which is noted as ``"before"``; return the names of those that it may leave."""
    names = tuple(f"{deed.name} in {form}, part {number}" for number in range(len(deed.parts)))
    if any(name not in stage.known for name in names):
        stage.arrange(form, trained=deed.trained)
        for name, part in zip(names, deed.parts, strict=True):
            part(stage, form)
            stage.known[name] = stage.digests()
    stage.arrange(form, trained=deed.trained)
    deed.prepare(stage, form)
    stage.known["before"] = stage.digests()
    return "before", *names


def seconds(stage: Stage, deed: Deed) -> float:
    """Return what a deed takes here, as far as that is known."""
    return stage.typical.get(deed.name, deed.seconds)


def took(stage: Stage, deed: Deed, elapsed_s: float, *, whole: bool) -> None:
    """Remember what a deed took; where it was stopped, it would have taken more."""
    stage.typical[deed.name] = elapsed_s if whole else max(seconds(stage, deed), elapsed_s)


def tidy(stage: Stage) -> None:
    """Remove what deeds leave on purpose: snapshots, the second checkpoint, exported models."""
    stage.older = None
    for name in list(stage.session.snapshots):
        stage.session.forget(name)
    for name in ("second", "exported"):
        shutil.rmtree(stage.folder / name, ignore_errors=True)
