"""The session with workers that several kinds share: the roles of PPO on `tiny`, two devices, four ways to place them.

In some rounds of a campaign actor and critic have adapters of low rank over one base.

Every trial begins at a state that is known bit for bit (``arrange``), and ends with ``prove``: the checkpoint loads, and the next
step is bit-equal to the one that was recorded when the stage was set up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hfsdk as hf
from fire import own
from fire.state_digest import of_parts, parts_of_rank
from fire.trials import TrialError
from hfsdk.algorithms import ppo
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement
from hfsdk.core.plan import Alternative
from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of

OPENINGS = ["the film is a", "a warm and funny", "it never quite", "one of the best", "the plot is thin but", "too long",
            "i laughed and", "dull"]  # fmt: skip

FORMS = ("dp2", "two pools", "tp2", "interleaving")
"""Ways to place: data parallel on both devices; actor and critic on a device each; tensor parallel on both devices; data parallel
with the reference on a part, one device of the two."""

PLACED = {"two pools": {"actor reference": 1, "critic": 1}, "interleaving": {"actor critic": 1.0, "reference": 0.5}}
"""Those that hfsdk finds the layouts for."""

USABLE_S = 240.0
"""Ceiling for being usable again after a kill: processes start anew, on a machine with other work."""


def reward(completions: list[str]) -> list[float]:
    """Score by length: any number does."""
    return [float(len(text) % 7) - 3.0 for text in completions]


class Stage:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.session = session = hf.Session(devices=2, seed=7, name="under fire")
        lora = own.adapters(4)
        self.lora = bool(lora)
        self.actor = session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=3e-3 if lora else 3e-4), **lora)
        self.critic = session.critic("tiny", optimizer=hf.AdamW(lr=1e-3), **own.adapters(2))
        self.reference = session.reference(self.actor)
        self.reward = session.reward(reward)
        self.prompts = session.prompts(OPENINGS, batch_size=8, seed=1)
        self.known: dict[str, dict[str, str]] = {}
        """Name of a state -> role -> its digest."""
        self.expected: dict[str, Any] = {}
        """Form -> what the step after the checkpoint computes."""
        self.older: Any = None
        """A batch that was generated for the deed under way."""
        self.typical: dict[str, float] = {}
        """What is done -> seconds it took."""
        self.place("dp2")
        self.known["initial"] = self.digests()
        self.step()
        session.save(self.checkpoint)
        self.known["checkpoint"] = self.digests()
        self.kept = self.persistent()

    # -- what is done to it

    def place(self, form: str) -> None:
        """Place the roles in one of ``FORMS``."""
        self.reference = self.session.reference(self.actor)  # the same handle, but where it was released and then interrupted
        if form in PLACED:
            self.session.place(PLACED[form])
            return
        both = Placement.of("colocate", ["actor", "critic", "reference"], 2)
        layout, one = Layout.parse(form), Layout.parse("tp1 dp2")
        layouts = {
            "actor": {"train": layout, "rollout": one}, "critic": {"train": layout}, "reference": {"train": layout},
        }  # fmt: skip
        self.session.place(
            Alternative(
                title="", preset="", placement=both, layouts=layouts, seconds=0.0, band=(0.0, 0.0), calls={}, facts={}, peak_bytes=0
            )
        )

    def batch(self, tokens: int = 6, **options: Any) -> hf.Batch:
        """Generate and prepare a batch as PPO does."""
        batch = self.actor.generate(self.prompts[0], max_new_tokens=tokens, **options)
        batch = self.reward.compute_scores(batch)
        batch = self.actor.compute_log_probs(batch)
        batch = self.reference.compute_log_probs(batch)
        return ppo.advantages(self.critic.compute_values(batch))

    def step(self) -> Any:
        """One step by hand; returns everything that it computed, as data that compare bit for bit."""
        batch = self.batch()
        critic = self.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
        actor = self.actor.update(batch, ppo.PolicyLoss(), mini_batches=2)
        columns = {}
        for name, column in batch.table().items():
            ragged = isinstance(column, hf.Ragged)
            columns[name] = (column.flat.tobytes(), tuple(column.lengths)) if ragged else list(column)
        return columns, critic.rows, actor.rows

    # -- what it is known by

    def digests(self) -> dict[str, str]:
        """Return a digest of each trained role's whole state, whatever its layout: weights, moments, step counts."""
        return {handle.name: of_parts(handle.run(parts_of_rank)) for handle in (self.actor, self.critic)}

    def persistent(self) -> Any:
        """Return what a checkpoint keeps besides weights, without what counts calls."""
        kept = dict(parts_of(self.session).saved.to_save())
        return {key: kept[key] for key in ("seed", "counters", "positions", "branch") if key in kept}

    def is_known(self, *names: str) -> None:
        """Check that every role's state is one of those named, or of the initial one and the checkpoint's.

        Raises:
            TrialError: it is none of them.
        """
        now = self.digests()
        for role, digest in now.items():
            allowed = {self.known[name][role]: name for name in ("initial", "checkpoint", *names)}
            if digest not in allowed:
                raise TrialError("wrong state", f"{role} is none of {', '.join(allowed.values())}")

    def arrange(self, form: str, *, trained: bool = False) -> None:
        """Go to the checkpoint's state in a form; with ``trained`` a step further."""
        self.place(form)
        self.session.load(self.checkpoint)
        if form not in self.expected:
            self.expected[form] = self.step()
            if not trained:
                self.session.load(self.checkpoint)
        elif trained:
            self.step()

    def prove(self, form: str, *, news: int = 0) -> None:
        """Check that the session is usable, and the step after ``load`` the recorded one.

        Args:
            form: how the roles are placed for it.
            news: how many errors may come first: what nobody has looked at is told at the next call.

        Raises:
            TrialError: it is not.
        """
        from_here = time.monotonic()
        for left in reversed(range(news + 1)):
            try:
                self.place(form)
                self.session.load(self.checkpoint)
                step = self.step()
                break
            except hf.HfsdkError as error:
                if not left:
                    raise TrialError("unusable", f"place, load and step: {type(error).__name__}: {error}") from error
        if step != self.expected[form]:
            raise TrialError("wrong state", "the step after load is not the recorded one: " + difference(step, self.expected[form]))
        if time.monotonic() - from_here > USABLE_S:
            raise TrialError("hang", f"usable after {time.monotonic() - from_here:.0f} s only")

    # -- its processes

    @property
    def job(self) -> str:
        """The session's name in shared memory."""
        return str(parts_of(self.session).client._controller._runtime._job_id)  # type: ignore[attr-defined]

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        seen = sorted(parts_of(self.session).client.send(q.Devices()), key=lambda s: (s.pool, s.rank))
        return [s.pid for s in seen if s.pid]

    def segments(self) -> set[str]:
        """Return the session's segments of shared memory."""
        shared = Path("/dev/shm")
        return {path.name for path in shared.glob(f"hfsdk.{self.job}*")} if shared.is_dir() else set()

    def idle(self, within_s: float = 60.0) -> None:
        """Check that nothing runs any more, soon.

        Raises:
            TrialError: something still does.
        """
        until = time.monotonic() + within_s
        while self.session.status != "idle":
            if time.monotonic() > until:
                raise TrialError("hang", f"{self.session.status} {within_s:g} s later")
            time.sleep(0.05)

    def close(self) -> None:
        """End it; what is left behind is seen by whoever started this process, and in /dev/shm here."""
        job = self.job
        self.session.close()
        left = list(Path("/dev/shm").glob(f"hfsdk.{job}*"))
        if left:
            raise RuntimeError(f"close left {left}")


def difference(one: Any, other: Any) -> str:
    """Say in what two steps differ."""
    columns = [name for name in one[0] if one[0].get(name) != other[0].get(name)]
    parts = [f"columns {', '.join(columns)}"] * bool(columns)
    parts += [f"{name} rows {a} and {b}" for name, a, b in zip(("critic", "actor"), one[1:], other[1:], strict=True) if a != b]
    return "; ".join(parts)[:2000]


@contextmanager
def typed(*also: type[BaseException]) -> Iterator[list[str]]:
    """Take the errors that hfsdk raises, and some more; any other is a bare one. Gives a list with the error's name.

    Raises:
        TrialError: a bare error.
    """
    seen: list[str] = []
    try:
        yield seen
    except (hf.HfsdkError, *also) as error:
        seen.append(type(error).__name__)
    except TrialError:
        raise
    except Exception as error:
        import traceback

        raise TrialError("bare error", f"{type(error).__name__}: {error}\n" + traceback.format_exc()[-2500:]) from error


_stages: dict[int, Stage] = {}


def ground(folder: Path) -> Stage:
    """Set up the stage of this process."""
    if os.getpid() not in _stages:
        _stages[os.getpid()] = Stage(folder)
    return _stages[os.getpid()]
