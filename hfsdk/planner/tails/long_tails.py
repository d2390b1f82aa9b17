"""``hf.long_tails``: a step's seconds when a few responses are much longer than the others, under six schemes.

::

    tails = hf.long_tails(plan, lengths=hf.ResponseLengths.measured("math-4b"))
    tails                               # the table
    tails["partial rollouts"].seconds
    tails.to_pandas()

All of it is simulated, with the seconds of ``PerfModel``; hfsdk's engines generate synchronously.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from hfsdk.core.checks import Within, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.plan import Lengths, Plan
from hfsdk.core.response_lengths import LENGTH_KINDS, MEASURED
from hfsdk.core.text import nearest
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.tails.scheme_steps import SCHEMES, SchemeStep
from hfsdk.planner.tails.tail_case import TailCase

if TYPE_CHECKING:
    import pandas as pd

MOST_STEPS = 100
"""Most steps that a mean is over."""


@documented
@dataclass(frozen=True, eq=False, kw_only=True)
class LongTails:
    """A step under six schemes of generation; ``tails["partial rollouts"]`` is one. Made by ``hf.long_tails``."""

    plan: Plan
    """The plan whose seconds are used: all roles on all devices, for these lengths."""
    schemes: Mapping[str, SchemeStep]
    """The step of each scheme, by name."""
    left_out: Mapping[str, str]
    """Schemes for which there is no room -> why."""

    @property
    def fastest(self) -> SchemeStep:
        """The scheme of most trained tokens a second."""
        return max(self.schemes.values(), key=lambda step: step.response_tokens / step.seconds)

    @checked
    def __getitem__(self, scheme: str) -> SchemeStep:
        """Return a step under one scheme.

        Raises:
            OptionError: there is no such scheme.
        """
        if scheme not in self.schemes:
            raise OptionError(f"there is no scheme {shown(scheme)} here; {nearest(scheme, self.schemes)}")
        return self.schemes[scheme]

    def to_pandas(self) -> pd.DataFrame:
        """Return a row for each scheme, indexed by its name.

        Returns:
            seconds of a step; ``speedup``, in trained tokens a second, over the synchronous one; ``tokens_per_device_s``, response
            tokens that are trained on per second and device; generation_s, rest_s (at the same time as generation where that is on
            other devices), moving_s; ``stale_share`` of trained tokens that an older policy wrote; ``idle_share`` of
            device-seconds; how.
        """
        import pandas as pd

        first = self.schemes["synchronous"]
        rate = first.response_tokens / first.seconds
        return pd.DataFrame([
            {
                "scheme": name, "seconds": step.seconds, "speedup": step.response_tokens / step.seconds / rate,
                "tokens_per_device_s": step.response_tokens / step.seconds / self.plan.cluster.num_devices,
                "generation_s": step.generation_s, "rest_s": step.rest_s, "moving_s": step.moving_s,
                "stale_share": step.stale_share, "idle_share": step.idle_share, "how": step.how,
            }
            for name, step in self.schemes.items()
        ]).set_index("scheme")  # fmt: skip

    def __repr__(self) -> str:
        lines = [f"LongTails({self.plan.algorithm} on {self.plan.cluster}, {self.plan.workload}; simulated"]
        first = self.schemes["synchronous"]
        for name, step in self.schemes.items():
            faster = step.response_tokens / step.seconds * first.seconds / first.response_tokens
            how = f"; {step.how}" if step.how else ""
            shares = f"stale {step.stale_share:4.0%}, idle {step.idle_share:4.0%}"
            lines.append(f"  {name:21} {step.seconds:8,.1f} s a step, {faster:.2f}x, {shares}{how}")
        lines += [f"  {name:21} {why}" for name, why in self.left_out.items()]
        return "\n".join(lines) + ")"


@checked
def long_tails(
    plan: Plan,
    *,
    lengths: str | Lengths | None = None,
    over_sampling: Annotated[float, Within(1, 100)] = 2.0,
    steps: Annotated[int, Within(1, MOST_STEPS)] = 2,
    seed: int = 0,
    perf: PerfModel | None = None,
) -> LongTails:
    """Simulate a plan's step under six schemes of generation, token by token; nothing runs, and no engine of hfsdk does these yet.

    The step is planned anew for the lengths, with all roles on all devices (*colocate*); schemes that need parts of the cluster,
    which may end inside a node, plan the rest of the step for those. Seconds of every decode step, pass and move are the
    performance model's.

    - *synchronous*: every replica has its own rows, and the step waits for the last one.
    - *shared queue*: a replica with room takes the next row; a replica that has none left takes half of the fullest one's, with
      their keys and values (a pool of all caches; Seer, arXiv 2511.14617).
    - *partial rollouts*: more prompts than needed are under way, all are stopped when enough are complete, and go on in the next
      step (APRIL, arXiv 2509.18521; Kimi k1.5, 2501.12599).
    - *one step off-policy*: rows for the next step are generated on devices of their own while this one is trained (as in
      LlamaRL, arXiv 2505.24034).
    - *one step off, partial*: both together. Rows are stopped when the trainer is done and enough are complete, and go on with the
      new weights (AReaL, arXiv 2505.24298).
    - *reallocation*: the last rows are brought together on a few replicas (Laminar, arXiv 2510.12633), and the other devices
      begin to train on what has ended, as DynaRL moves devices between both.

    Args:
        plan: a plan of ``session.plan``; its algorithm, roles, cluster and workload are asked again.
        lengths: the response lengths: ``"full"``, ``"uniform"``, ``"lognormal"`` or an ``hf.ResponseLengths``; by default the
            workload's.
        over_sampling: prompts under way over prompts trained, for both kinds of partial rollouts; APRIL's example has 2.
        steps: steps of the run over which the mean is taken (partial rollouts: after some that do not count). Where responses are
            about equally long and wait for room, partial rollouts take turns of long and short steps: take 50, say.
        seed: the seed of the lengths.
        perf: predicts decode steps and moves; by default the presets. Give a calibrated session's (``session.perf``) here as well.

    Raises:
        OptionError: no such lengths, the plan was loaded from a file, the cluster has several kinds of nodes, or the step
            generates more than once.
        DeviceMemoryError: the roles do not fit together on all devices.
    """
    chosen = plan.workload.response_lengths if lengths is None else lengths
    if isinstance(chosen, type) or (isinstance(chosen, str) and chosen not in LENGTH_KINDS):
        hint = f"; hf.ResponseLengths.measured({chosen!r}) is one" if isinstance(chosen, str) and chosen in MEASURED else ""
        kinds = ", ".join(map(repr, LENGTH_KINDS))
        raise OptionError(f"lengths are one of {kinds} or an hf.ResponseLengths; got {shown(chosen)}{hint}")
    case = TailCase.of(plan, chosen, perf or PerfModel(), seed, steps)
    steps_by_scheme, left_out = {}, {}
    for name, scheme in SCHEMES.items():
        step = scheme(case, over_sampling)
        if step is None:
            left_out[name] = "on no two parts of the cluster does one hold the rollout and the other the rest"
        else:
            steps_by_scheme[name] = step
    return LongTails(plan=case.plan, schemes=steps_by_scheme, left_out=left_out)
