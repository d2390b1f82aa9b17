"""The same step in hfsdk: the calls of a session, as text to paste and as they are run in a simulated session.

hfsdk trains with Megatron: tp, pp and a distributed optimizer. Where a system cuts weights over data-parallel ranks (FSDP,
ZeRO-3), the smallest tensor parallelism is taken with which the roles fit.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hfsdk.configs.batch_arithmetic import mini_batches
from hfsdk.configs.phase_memory import Specs
from hfsdk.configs.step_config import RoleConfig, StepConfig
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import DeviceMemoryError, HfsdkError, OptionError
from hfsdk.core.lora import LoRA
from hfsdk.core.placement import Placement
from hfsdk.core.plan import MOST_SAMPLES
from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions
from hfsdk.core.spec import PRESETS, ModelSpec
from hfsdk.core.text import one_line
from hfsdk.core.trace import Trace
from hfsdk.run.notebook import calls_hidden
from hfsdk.session.session import Session

TOKENS_A_SAMPLE = 20
"""Prompt tokens that are held for a simulated step count as one of its ``MOST_SAMPLES`` samples each so many."""

ENDLESS = 10**15
"""Bytes of a device on which a step is simulated that fits on none."""

SCORE = ("def score(completions):  # the reward: yours in its place", "    return [0.0] * len(completions)")


@dataclass(frozen=True)
class Written:
    """Text that stands in the code as it is: the name of a variable."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One call that declares a role."""

    role: str
    method: str
    """The session's method that declares this kind of role."""
    source: Any
    """A model, a :class:`Written` name, or the reward function."""
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The calls of one step."""

    cluster: ClusterSpec
    declarations: tuple[Declaration, ...]
    placement: str | dict[str, int] | Placement
    prompts: int
    prompt_tokens: int
    algorithm: Any
    comments: tuple[str, ...] = ()

    def text(self) -> str:
        """Return it as Python."""
        needs_score = any(declaration.source == Written("score") for declaration in self.declarations)
        lines = ["import hfsdk as hf", "", *(f"# {one_line(comment)}" for comment in self.comments)]
        lines += [*SCORE, ""] if needs_score else []
        count = self.cluster.num_devices
        lines.append(
            f'session = hf.Session.simulated("{self.cluster}")  # with GPUs: hf.Session(devices={count}), or hf.Session("auto")'
        )
        for declaration in self.declarations:
            options = [f"{name}={_literal(value)}" for name, value in declaration.options.items()]
            lines.append(
                f"{declaration.role} = session.{declaration.method}({', '.join([_literal(declaration.source), *options])})"
            )
        lines += [
            f"session.place({_literal(self.placement)})",
            f"prompts = session.prompts([[1] * {self.prompt_tokens}] * {self.prompts}, batch_size={self.prompts})  # your data",
            f"algorithm = {_algorithm_text(self.algorithm)}",
            "step = algorithm.step(session.models, prompts[0])",
        ]
        return "\n".join(lines) + "\n"

    def simulate(self) -> Trace:
        """Run it in a simulated session and return the step's trace.

        Raises:
            HfsdkError: the step cannot be run so.
        """
        with warnings.catch_warnings(), calls_hidden(), Session.simulated(self.cluster) as session:
            warnings.simplefilter("ignore")
            handles: dict[str, Any] = {"score": _score}
            for declaration in self.declarations:
                source = handles[declaration.source.text] if isinstance(declaration.source, Written) else declaration.source
                handles[declaration.role] = getattr(session, declaration.method)(source, **declaration.options)
            session.place(self.placement)
            prompts = session.prompts([[1] * self.prompt_tokens] * self.prompts, batch_size=self.prompts)
            step = self.algorithm.step(session.models, prompts[0])
            for made in (step.actor, step.critic):
                if made is not None:
                    made.wait()
            return Trace.of(session.trace.spans, title=f"one step, simulated on {self.cluster}")


def _score(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def code_of(
    step: StepConfig, specs: Specs, cluster: ClusterSpec, *, simulated: bool = True
) -> tuple[StepProgram, Trace | None, str]:  # fmt: skip
    """Return the step in hfsdk, its simulated trace, and why there is none.

    Args:
        step: the configuration's step.
        specs: architecture of every role.
        cluster: a cluster with as many devices as the step's pools have.
        simulated: whether it is run at all.
    """
    refused = ""
    if not simulated:
        return next(_candidates(step, specs, cluster)), None, ""
    if max(step.samples, step.prompts * step.prompt_tokens // TOKENS_A_SAMPLE) > MOST_SAMPLES:
        reason = f"{step.samples:,} samples of {step.sample_tokens:,} tokens are more than a simulated step has here"
        return next(_candidates(step, specs, cluster)), None, reason
    if any(specs[role.name] is None for role in step.roles):
        return next(_candidates(step, specs, cluster)), None, _unknown(step, specs)
    first: StepProgram | None = None
    for candidate in _candidates(step, specs, cluster):
        first = first or candidate
        try:
            return candidate, candidate.simulate(), ""
        except DeviceMemoryError:
            continue
        except HfsdkError as error:
            refused = refused or str(error)
    assert first is not None
    comment = refused or "it does not fit here as hfsdk counts, whatever the tensor parallelism: session.place says by how much"
    first = replace(first, comments=(*first.comments, comment.splitlines()[0][:110]))
    if refused:
        return first, None, f"hfsdk refuses this step: {refused}"
    endless = replace(first, cluster=cluster.with_memory(ENDLESS))
    return first, endless.simulate(), ""


def _unknown(step: StepConfig, specs: Specs) -> str:
    roles: dict[str, list[str]] = {}
    for role in step.roles:
        if specs[role.name] is None:
            roles.setdefault(role.model or "no name", []).append(role.name)
    names = ", ".join(f"{name!r} ({', '.join(which)})" for name, which in roles.items())
    return (
        f"the size of {names} is not known: explain(..., model='qwen2.5-7b'), a folder, hf.ModelSpec(...), or one by role, says it"
    )


def _candidates(step: StepConfig, specs: Specs, cluster: ClusterSpec) -> Iterator[StepProgram]:
    """Yield the step in its own layouts; where weights are cut over dp with more and more tensor parallelism; and offloaded."""
    cut, tp = any(role.states.weights_over > 1 for role in step.roles), 1
    yield _step_code(step, specs, cluster, None)
    if step.own:
        return
    while cut and 2 * tp <= min(8, step.gpus_per_node):
        tp *= 2
        yield _step_code(step, specs, cluster, tp)
    yield _step_code(step, specs, cluster, tp if cut else None, offload=True)


def _step_code(step: StepConfig, specs: Specs, cluster: ClusterSpec, tp: int | None, *, offload: bool = False) -> StepProgram:
    comments = [f"one step of {step.system} {step.release} ({step.algorithm})"]
    if tp is not None:
        comments.append(f"{step.roles[0].states.name} cuts weights over its ranks; here tensor parallelism of {tp} does")
    if any(specs[role.name] is None for role in step.roles):
        comments.append('MODEL is yours to say first: a name like "qwen2.5-7b", a folder, or an hf.ModelSpec')
    if offload:
        comments.append("offload=True: without it, it does not fit here")
    algorithm, refused = _algorithm(step)
    comments += refused
    if not step.ours:
        comments.append(f"hfsdk has no {step.algorithm}; {type(algorithm).__name__} in its place makes the same calls")
    declared = [_declaration(step, role, specs, tp, offload) for role in step.roles]
    for name in ("reward", "cost"):
        if name not in {role.name for role in step.roles} and (name == "reward" or name in getattr(algorithm, "roles", ())):
            declared.append(Declaration(role=name, method=name, source=Written("score"), options={}))
    groups: dict[str, list[str]] = {pool: [] for pool in step.pools}
    for role in step.roles:
        groups[role.pool].append(role.name)
    # An engine on devices of its own is a shadow of the actor in hfsdk.
    if step.rollout.pool != step.roles[0].pool:
        groups[step.rollout.pool].append("actor.rollout")
    sized = {" ".join(names): step.pools[pool] for pool, names in groups.items() if names}
    placement: str | dict[str, int] | Placement = sized
    if len(sized) == 1 and step.num_devices == cluster.num_devices:
        placement = "colocate"
    elif step.placed is not None:
        placement = step.placed
    return StepProgram(
        cluster=cluster, declarations=tuple(declared), placement=placement, prompts=step.prompts,
        prompt_tokens=step.prompt_tokens, algorithm=algorithm, comments=tuple(comments),
    )  # fmt: skip


def _declaration(step: StepConfig, role: RoleConfig, specs: Specs, tp: int | None, offload: bool) -> Declaration:
    spec = specs[role.name]
    actor = specs["actor"]
    source: Any = Written("MODEL") if spec is None else spec.name if PRESETS.get(spec.name) == spec else spec
    layout = replace(role.layout, dp=None)
    layout = replace(layout, tp=tp) if tp else layout
    options: dict[str, Any] = {}
    words = str(layout).replace(" pp1", "")
    own = step.own.get(role.name)
    method = own.kind if own else role.name
    options["layout" if method in ("reference", "reward", "cost") else "train"] = words
    if method != role.name:
        options["name"] = role.name
    if own is not None:
        return Declaration(
            role=role.name, method=method, source=Written("actor") if role.name == "reference" and spec == actor else source,
            options=options | _own_options(own),
        )  # fmt: skip
    if role.name == "actor":
        rollout = step.rollout.layout
        options["rollout"] = f"tp{rollout.tp * rollout.pp}" + f" ep{rollout.ep}" * (rollout.ep > 1)
        sizes = RolloutOptions(max_model_len=step.sample_tokens, max_num_seqs=step.rollout.max_num_seqs)
        tokens = step.rollout.max_num_batched_tokens or sizes.max_num_batched_tokens
        options["rollout_options"] = replace(sizes, max_num_batched_tokens=tokens)
    if role.name == "reference" and spec == actor:
        source = Written("actor")
    else:
        options["dtype"] = "bf16"
    # hfsdk offloads a role as a whole or its optimizer alone, so what is away in any phase decides.
    gone = {part for parts in role.away.values() for part in parts} | set(role.never)
    if role.lora is not None:
        options["lora"] = role.lora
    if role.trained:
        cut = step.pools[role.pool] > layout.size
        moments = offload or ("optimizer" in gone and "weights" not in gone)
        options["optimizer"] = AdamW(lr=role.lr, distributed=cut, offload=moments)
        options["recompute"] = role.recompute
    options |= {"offload": True} if offload or "weights" in gone else {}
    options["micro_batch_tokens"] = max(1, role.train_tokens if role.trained else role.pass_tokens)
    return Declaration(role=role.name, method=method, source=source, options={k: v for k, v in options.items() if v != ""})


def _own_options(role: RoleSpec) -> dict[str, Any]:
    """Return the options with which a role of a session is declared, those at their defaults left out."""
    options: dict[str, Any] = {"dtype": role.dtype}
    if role.rollout is not None:
        options["rollout"] = str(replace(role.rollout, dp=None)).replace(" pp1", "")
        options["rollout_options"] = role.rollout_options
    if role.trainable:
        options |= {"optimizer": role.optimizer, "recompute": role.recompute, "lora": role.lora}
    plain = {field.name: field.default for field in dataclasses.fields(RoleSpec)}
    options |= {name: getattr(role, name) for name in ("offload", "micro_batch_tokens") if getattr(role, name) != plain[name]}
    return {name: value for name, value in options.items() if value not in ("", None, RolloutOptions())}


def _algorithm(step: StepConfig) -> tuple[Any, list[str]]:
    """Return hfsdk's algorithm, and words for each option that it refuses; those are left at their defaults."""
    import hfsdk.algorithms as algorithms

    cls = getattr(algorithms, step.ours or ("PPO" if any(role.name == "critic" for role in step.roles) else "GRPO"))
    field_names = {field.name for field in dataclasses.fields(cls)}
    wanted = {**step.options, "n": step.copies, "mini_batches": min(mini_batches(step), step.samples), "epochs": step.epochs}
    if getattr(cls, "compares", False):
        wanted["n"] = max(2, step.copies)
    chosen: dict[str, Any] = {}
    refused = []
    for name in [name for name in wanted if name in field_names]:
        try:
            cls(**chosen, **{name: wanted[name]})
        except OptionError:
            refused.append(f"hfsdk does not take {name}={wanted[name]!r}; it is at its default")
        else:
            chosen[name] = wanted[name]
    return cls(**chosen), refused


def _algorithm_text(algorithm: Any) -> str:
    """Return the call that makes it, without options that are at their defaults."""
    arguments = [
        f"{field.name}={getattr(algorithm, field.name)!r}"
        for field in dataclasses.fields(algorithm)
        if getattr(algorithm, field.name) != field.default
    ]
    return f"hf.{type(algorithm).__name__}({', '.join(arguments)})"


def _literal(value: Any) -> str:
    if isinstance(value, Written):
        return value.text
    if isinstance(value, LoRA) and value.rank == LoRA.rank:
        return _algorithm_text(value).replace("hf.LoRA(", f"hf.LoRA(rank={value.rank}, ").replace(", )", ")")
    if isinstance(value, (AdamW, LoRA, RolloutOptions)):
        return _algorithm_text(value)
    if isinstance(value, ModelSpec):
        return f"hf.{value!r}"
    if isinstance(value, Placement):
        return repr(value).replace("Placement(", "hf.Placement(").replace("Pool(", "hf.Pool(")
    return repr(value)
