"""``hf.explain``: the meaning of a configuration's numbers, and whether they fit together.

::

    explained = hf.explain("grpo.yaml", gpu="H100")
    explained["optimizer steps"]        # 4.0
    explained                           # in a notebook: findings, batches, memory by phase, the step, roles, what was not read
    print(explained.code)               # the same step in hfsdk
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hfsdk.configs import nemo_rl, openrlhf, trl, verl
from hfsdk.configs.batch_arithmetic import batch_rows
from hfsdk.configs.model import COUNTED_WHOLE, Model, head_findings, lengthened, specs_of
from hfsdk.configs.phase_memory import PhaseMemory, fit_findings, layouts_text, memory_by_phase, states_text
from hfsdk.configs.settings import Settings
from hfsdk.configs.sources import SourceConfig, open_config, system_named
from hfsdk.configs.step_code import StepProgram, code_of
from hfsdk.configs.step_config import (
    BROKEN,
    NOTE,
    PHASES,
    UNREAD,
    ArithmeticRow,
    Finding,
    RoleConfig,
    RolloutConfig,
    States,
    StepConfig,
)
from hfsdk.configs.unread_keys import GENERATED, IN_WORDS, LEARNING, MEMORY, SECONDS, SIZES, Unread, unread_of
from hfsdk.core.checks import Count, Name, checked, shown
from hfsdk.core.cluster import DEVICES, ClusterSpec
from hfsdk.core.errors import OptionError
from hfsdk.core.frozen_bases import base_key, base_of
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec
from hfsdk.core.spec import DTYPE_BYTES, ModelSpec
from hfsdk.core.text import all_printable, nearest
from hfsdk.core.trace import Trace
from hfsdk.kept.attach import package_version
from hfsdk.session.session import Session

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.viz.frame import Picture


TABLES = ("arithmetic", "roles", "memory", "findings", "unread", "defaults")
"""The tables that ``Explanation.to_pandas`` gives."""
MOST_NAMED = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class Explanation:
    """The meaning of a configuration's numbers. It draws itself; ``explained["samples"]`` is a row of its arithmetic."""

    step: StepConfig
    """The step as the keys that were read have it: its numbers hold without those of :attr:`withheld`."""
    arithmetic: tuple[ArithmeticRow, ...]
    """The rows from prompts to optimizer steps and tokens."""
    memory: tuple[PhaseMemory, ...]
    """Memory of one device of each pool, by phase; empty where the actor's size is not known, or a key not read could change it."""
    findings: tuple[Finding, ...]
    """The findings in this order: what is left out for keys that are not read, is broken, does not fit, is worth to know."""
    unread: Mapping[str, str]
    """Keys that were given and not read -> what is known of them; and those that are read by another name."""
    withheld: Mapping[str, tuple[str, ...]]
    """The parts that are left out, of ``"sizes"`` (every number), ``"generated"``, ``"memory"``, ``"seconds"``, and
    ``"learning"``, which is not carried over -> the keys that could change them and are not read."""
    defaults: Mapping[str, Any]
    """Keys that were read and not given -> their default in :attr:`release`."""
    assumed: Mapping[str, str]
    """Values that the configuration does not give -> the assumed ones, with their sources."""
    code: str
    """The same step in hfsdk, to be pasted; ``""`` where every number is left out."""
    trace: Trace | None
    """The step, simulated; ``None`` where a model's size is not known, or a key that was not read could change its seconds."""
    no_trace: str
    """Why there is none."""
    cluster: ClusterSpec | None
    """The devices; ``None`` where every number is left out."""

    @property
    def system(self) -> str:
        """The system that the configuration is of, e.g. ``"verl"``."""
        return self.step.system

    @property
    def release(self) -> str:
        """The release whose keys, defaults and rules were used."""
        return self.step.release

    @checked
    def __getitem__(self, name: str) -> float | None:
        """Return the value of a row of the arithmetic.

        Raises:
            OptionError: there is no such row.
        """
        for row in self.arithmetic:
            if row.name == name:
                return row.value
        raise OptionError(f"the arithmetic has no row {shown(name)}; {nearest(str(name), [row.name for row in self.arithmetic])}")

    @checked
    def to_pandas(self, table: str = "arithmetic") -> pd.DataFrame:
        """Return one table.

        Args:
            table: ``"arithmetic"``, ``"roles"``, ``"memory"``, ``"findings"``, ``"unread"`` or ``"defaults"``.

        Raises:
            OptionError: there is no such table.
        """
        import pandas as pd

        if table not in TABLES:
            raise OptionError(f"an explanation has no table {shown(table)}; {nearest(str(table), TABLES)}")
        view = all_printable(self.view())
        if table == "memory":
            rows = [{**{k: v for k, v in phase.items() if k != "parts"}, **phase["parts"]} for phase in view["memory"]]
            return pd.DataFrame(rows)
        if table == "defaults":
            return pd.DataFrame([{"key": key, "value": value} for key, value in view["defaults"].items()], columns=["key", "value"])
        if table == "unread":
            return pd.DataFrame([{"key": key, "said": said} for key, said in view["unread"].items()], columns=["key", "said"])
        return pd.DataFrame(view[table])

    def view(self) -> dict[str, Any]:
        """Return plain data: rows, roles, memory, findings, the simulated calls, and the keys that were not read."""
        step = self.step
        rollout = step.rollout
        roles = [
            {
                "role": role.name, "model": role.model, "pool": role.pool, "devices": step.pools[role.pool],
                "layout": layouts_text(role, rollout), "states": "not said" if MEMORY in self.withheld else states_text(role),
                "trained": role.trained,
            }
            for role in step.roles if SIZES not in self.withheld
        ]  # fmt: skip
        if roles and rollout.pool != step.roles[0].pool:
            roles.append({
                "role": "actor.rollout", "model": step.roles[0].model, "pool": rollout.pool, "devices": step.pools[rollout.pool],
                "layout": str(rollout.layout), "states": rollout.engine, "trained": False,
            })  # fmt: skip
        return {
            "title": f"{step.system} {step.release}: {step.algorithm}" + (f" on {self.cluster}" if self.cluster else ""),
            "arithmetic": [{"name": row.name, "value": row.value, "how": row.how} for row in self.arithmetic],
            "roles": roles,
            "memory": [
                {
                    "pool": m.pool, "num_devices": m.num_devices, "device": m.device_name, "phase": m.phase,
                    "asked": m.asked,
                    "exists": m.exists, "worker": m.worker, "left_out": ", ".join(m.left_out), "parts": dict(m.parts),
                }
                for m in self.memory
            ],
            "findings": [
                {"kind": f.kind, "rule": f.rule, "got": f.got, "do": f.do, "source": f.source} for f in self.findings
            ],
            "calls": self._calls(), "seconds": None if self.trace is None else self.trace.duration_s, "no_trace": self.no_trace,
            "withheld": {kind: list(keys) for kind, keys in self.withheld.items()}, "unread": dict(self.unread),
            "defaults": {key: _plain(value) for key, value in self.defaults.items()},
            "assumed": dict(self.assumed), "code": self.code,
        }  # fmt: skip

    def _calls(self) -> list[dict[str, Any]]:
        if self.trace is None:
            return []
        start = self.trace.start_ns
        return [
            {
                "call": f"{span.role}.{span.method}", "role": span.role, "phase": span.phase,
                "start_s": (span.start_ns - start) / 1e9,
                "seconds": span.duration_s,
            }
            for span in self.trace.calls.spans if span.device is None
        ]  # fmt: skip

    def _picture_(self) -> Picture:
        from hfsdk.viz.pictures.explanation import ExplanationPicture, explanation_view

        return ExplanationPicture(explanation_view(self.view()))

    def _repr_html_(self) -> str | None:
        from hfsdk.viz.hooks import html_of

        return html_of(self)

    def __repr__(self) -> str:
        return self._picture_().to_text()


@checked
def explain(
    config: Any,
    overrides: Iterable[str] = (),
    *,
    system: Name | None = None,
    model: Model | Mapping[str, Model] | None = None,
    gpu: Name = "H100",
    cluster: str | ClusterSpec | None = None,
    prompts: Count | None = None,
    prompt_tokens: Count | None = None,
    session: Session | None = None,
) -> Explanation:
    """Explain the numbers of a configuration: batches, roles, memory by phase, a simulated step, and its mistakes.

    Args:
        config: a configuration of verl, TRL, OpenRLHF, NeMo-RL or hfsdk: a path of a YAML file, a dict (nested, or with dotted
            keys), the words of a command line as a text or a list, TRL's ``GRPOConfig``, or an algorithm with ``session``.
        overrides: texts such as ``"data.train_batch_size=512"``, which win over it, or ``"~data.seed"``, which leaves a key out.
        system: the system that reads it, where its keys do not tell.
        model: the architecture, where the configuration's name of it is no preset's: a preset, a folder, an ``hf.ModelSpec``, or by
            role, ``{"critic": "qwen2.5-7b"}``.
        gpu: the kind of its GPUs, one of ``hfsdk.core.cluster.DEVICES``.
        cluster: the devices, e.g. ``"2x8 H100"``; by default as many as the configuration says, of kind ``gpu``.
        prompts: prompts of one step; for hfsdk's own configuration alone.
        prompt_tokens: tokens of the longest prompt, where the configuration does not limit it.
        session: the session whose roles and placement an algorithm runs on; for hfsdk's own configuration alone.

    Returns:
        The explanation; nothing is run but one step of the simulation. A number that a key which is not read could change is left
        out.

    Raises:
        OptionError: it is no configuration, cannot be read, is of a system that is not read, or a value is of the wrong kind; there
            is no such GPU.
        ModelNotFoundError: ``model`` is none.
    """
    devices = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    if gpu not in DEVICES:
        raise OptionError(f"gpu={shown(gpu)} is no known device; {nearest(gpu, DEVICES)}")
    if callable(getattr(config, "step", None)) and not isinstance(config, type):
        return _own(config, session, prompts, prompt_tokens, system)
    opened = open_config(config, overrides, system)
    settings, step = _read(opened, None if devices is None else devices.num_devices, prompt_tokens)
    assumed = {**step.assumed, **opened.assumed}
    if devices is None:
        devices = _cluster(step, gpu)
        assumed["devices"] = f"{gpu}s of {devices.devices[0].memory_bytes / 1e9:.0f} GB: the configuration names no kind; gpu= does"
    unread = _in_given_names(unread_of(settings, step.system, step.release), opened.renamed)
    unread = replace(unread, said={**unread.said, **opened.apart})
    return _explained(step, specs_of(step, model), devices, unread, settings.at_default, assumed)


def _in_given_names(unread: Unread, renamed: Mapping[str, str]) -> Unread:
    """Return the same by the names that were given; of those that are read by another name it is said."""
    old = {new: name for name, new in renamed.items()}
    said = {old.get(key, key): words for key, words in unread.said.items()}
    renamed_words = {name: f"read as {new}" for name, new in renamed.items() if name not in said}
    return Unread(
        said=said | renamed_words,
        withheld={kind: tuple(old.get(key, key) for key in keys) for kind, keys in unread.withheld.items()},
    )


def _read(opened: SourceConfig, num_gpus: int | None, prompt_tokens: int | None) -> tuple[Settings, StepConfig]:
    def settings(release: str, defaults: Mapping[str, Any]) -> Settings:
        return Settings(
            what=opened.what, release=f"{opened.system} {release}", given=opened.keys, defaults=defaults, runs=opened.runs
        )

    if opened.system == "verl":
        s = settings(verl.RELEASE, verl.DEFAULTS)
        return s, verl.read_verl(s)
    if opened.system == "OpenRLHF":
        s = settings(openrlhf.RELEASE, openrlhf.defaults_of(opened.keys, opened.renamed))
        return s, openrlhf.read_openrlhf(s)
    if opened.system == "NeMo-RL":
        is_ppo = any(key.startswith("ppo.") for key in opened.keys)
        s = settings(nemo_rl.RELEASE, nemo_rl.PPO_DEFAULTS if is_ppo else nemo_rl.GRPO_DEFAULTS)
        return s, nemo_rl.read_nemo_rl(s, prompt_tokens)
    if opened.system == "TRL":
        ppo_alone = trl.PPO_DEFAULTS.keys() - trl.GRPO_DEFAULTS.keys()
        is_ppo = opened.what == "PPOConfig" or bool(opened.keys.keys() & ppo_alone)
        if is_ppo:
            s = settings(trl.PPO_RELEASE, trl.PPO_DEFAULTS)
            return s, trl.read_ppo(s, num_gpus, prompt_tokens)
        s = settings(trl.RELEASE, trl.GRPO_DEFAULTS)
        return s, trl.read_grpo(s, num_gpus, prompt_tokens)
    raise OptionError("hfsdk's own configuration is an algorithm: hf.explain(hf.GRPO(n=8), session=session)")


def _cluster(step: StepConfig, gpu: str) -> ClusterSpec:
    """Return the cluster of all pools' devices, in nodes as the configuration has them."""
    whole = step.num_devices
    each = min(max(1, step.gpus_per_node), whole)
    if whole % each:
        return ClusterSpec.parse(f"{whole // each}x{each} {gpu} + 1x{whole % each} {gpu}")
    return ClusterSpec.parse(f"{whole // each}x{each} {gpu}")


def _own(
    algorithm: Any, session: Session | None, prompts: int | None, prompt_tokens: int | None, system: str | None
) -> Explanation:
    if system is not None and system_named(system) != "hfsdk":
        raise OptionError(f"{type(algorithm).__name__} is an algorithm of hfsdk, and system={shown(system)}; leave it out")
    step, specs = read_own(algorithm, session, prompts, prompt_tokens)
    assert session is not None
    return _explained(step, specs, session.cluster, Unread(said={}, withheld={}), {}, dict(step.assumed))


def _explained(
    step: StepConfig, specs: Mapping[str, Any], cluster: ClusterSpec, unread: Unread, defaults: Mapping[str, Any],
    assumed: Mapping[str, str],
) -> Explanation:  # fmt: skip
    specs, too_long = lengthened(step, specs)
    withheld = unread.withheld
    memory = () if MEMORY in withheld else memory_by_phase(step, specs, cluster.devices[0])
    dense = all(spec is not None and not spec.experts for spec in specs.values())
    read = [finding for finding in step.findings if not (dense and finding.rule == COUNTED_WHOLE)]
    findings, needed = [*read, *head_findings(step, specs), *fit_findings(step, memory), *too_long], step.num_devices
    if needed != cluster.num_devices and not step.own:
        findings.append(Finding(
            kind=NOTE if needed < cluster.num_devices else BROKEN, rule="the cluster has as many devices as the configuration uses",
            got=f"{cluster.num_devices} of {cluster}, {needed}", do="Give the cluster it is meant for, or leave cluster= out.",
        ))  # fmt: skip
        on: ClusterSpec | None = _cluster(step, cluster.devices[0].name)
    else:
        on = cluster
    assert on is not None
    code, trace, no_trace = "", None, ""
    if SIZES in withheld:
        findings, on = [], None
    else:
        made, trace, no_trace = code_of(step, specs, on, simulated=SECONDS not in withheld)
        code = _with_comment(made, withheld).text()
    if SECONDS in withheld:
        no_trace = f"{', '.join(withheld[SECONDS][:MOST_NAMED])} could change it, and is not read"
    order = (UNREAD, BROKEN, "does not fit", NOTE)
    return Explanation(
        step=step, arithmetic=tuple(_shown(row, withheld) for row in batch_rows(step)), memory=memory,
        findings=(*unread.finding(), *sorted(findings, key=lambda finding: order.index(finding.kind))),
        unread=unread.said, withheld=withheld, defaults=defaults, assumed={} if SIZES in withheld else assumed, code=code,
        trace=trace, no_trace=no_trace, cluster=on,
    )  # fmt: skip


def _shown(row: ArithmeticRow, withheld: Mapping[str, tuple[str, ...]]) -> ArithmeticRow:
    """Return a row of the arithmetic, without its number where a key that is not read could change it."""
    kind = SIZES if SIZES in withheld else GENERATED if row.name == "tokens generated" else ""
    if kind not in withheld:
        return row
    keys = ", ".join(withheld[kind][:MOST_NAMED])
    return ArithmeticRow(name=row.name, value=None, how=f"{keys} could change {IN_WORDS[kind]}, and is not read")


def _with_comment(code: StepProgram, withheld: Mapping[str, tuple[str, ...]]) -> StepProgram:
    keys = withheld.get(LEARNING, ())
    return replace(code, comments=(*code.comments, *(f"not carried over: {key}" for key in keys)))


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


# -- hfsdk's own configuration: an algorithm, and the session that it runs on

BATCH_SIZE, PROMPT_TOKENS = 32, 512
"""Batch size of ``session.prompts`` where nothing is said, and tokens of a prompt that nothing limits."""


def read_own(
    algorithm: Any, session: Session | None, prompts: int | None, prompt_tokens: int | None
) -> tuple[StepConfig, Mapping[str, ModelSpec | None]]:
    """Return the step of an algorithm on a session, and its roles' architectures.

    Args:
        algorithm: e.g. ``hf.GRPO(n=8)``.
        session: the session that has the roles it uses.
        prompts: prompts of one step; by default those of ``session.prompts``.
        prompt_tokens: tokens of the longest prompt.

    Raises:
        OptionError: there is no session, or it has no actor.
    """
    if session is None:
        raise OptionError(
            f"{type(algorithm).__name__} says nothing of models and devices; give hf.explain(algorithm, session=session)"
        )
    models = {role.name: role for handle in session.roles for role in [handle.role] if role.model is not None}
    if "actor" not in models:
        raise OptionError(
            f"the session has no actor (it has {', '.join(models) or 'no model'}); session.actor('tiny') declares one"
        )
    cluster, placement = session.cluster, session.placement.placement
    placement = placement or Placement.of("colocate", [*models], cluster.num_devices)
    assumed = {}
    if prompts is None:
        assumed["prompts"] = f"{BATCH_SIZE}, the batch_size of session.prompts; explain(..., prompts=...) says it"
    if prompt_tokens is None:
        assumed["prompt tokens"] = f"{PROMPT_TOKENS}; explain(..., prompt_tokens=...) says it"
    number, prompt = prompts or BATCH_SIZE, prompt_tokens or PROMPT_TOKENS
    copies, parts = getattr(algorithm, "n", 1), getattr(algorithm, "mini_batches", 1)
    response = getattr(algorithm, "max_new_tokens", 0)
    if not response:
        raise OptionError(f"{shown(type(algorithm).__name__)} generates nothing: it learns from pairs, one batch a step")
    samples, actor = number * copies, models["actor"]
    used = [name for name in _needed(algorithm, session) if name in models]
    placed = _of_these(placement, used)
    pools = {pool.name: pool.size for pool in placed.pools}
    layout = _filled(actor, placement)
    how = {
        "prompts": "batch_size of session.prompts", "responses per prompt": "n",
        "mini-batch": f"{samples:,} samples / mini_batches {parts}" + "; uneven ones are fine" * bool(samples % parts),
        "data-parallel ranks": f"dp of the actor's layout '{layout}'",
        "micro-batch per rank": "micro_batch_tokens of session.actor",
        "epochs": "epochs",
    }  # fmt: skip
    shadow = placement.roles.get("actor.rollout")
    rollout = actor.rollout or Layout()
    pool = shadow or placement.pool_of("actor").name
    config = StepConfig(
        system="hfsdk", release=package_version(), algorithm=type(algorithm).__name__, ours=type(algorithm).__name__,
        options={name: getattr(algorithm, name) for name in getattr(algorithm, "__dataclass_fields__", ())}, prompts=number,
        copies=copies, prompt_tokens=prompt, response_tokens=response, mini_batch=-(-samples // parts), micro_batch=None,
        micro_tokens=actor.micro_batch_tokens, epochs=getattr(algorithm, "epochs", 1), dp=layout.num_replicas, pools=pools,
        roles=_with_bases([_role(models[name], placement) for name in used], [models[name] for name in used]),
        rollout=RolloutConfig(
            pool=pool, layout=replace(rollout, dp=None).fill(pools[pool]), engine="vllm", sleeps=not shadow,
            cache_bytes=actor.rollout_options.kv_cache_bytes, rows=actor.rollout_options.max_num_seqs or 64,
        ),
        nodes=len(cluster.node_devices), gpus_per_node=len(cluster.node_devices[0]), rounding="up", how=how, assumed=assumed,
        reward=str(models["reward"].model) if "reward" in models else "a function",
        own={name: models[name] for name in used}, placed=placed,
    )  # fmt: skip
    return config, {name: models[name].model for name in used}


def _needed(algorithm: Any, session: Session) -> Sequence[str]:
    """Return the roles of a step.

    Raises:
        OptionError: the session lacks one.
    """
    needed: Sequence[str] = getattr(algorithm, "roles", ())
    missing = [name for name in needed if name not in {handle.name for handle in session.roles}]
    if missing:
        raise OptionError(
            f"a step of {type(algorithm).__name__} needs {', '.join(needed)}, and the session has no {' and no '.join(missing)}; "
            f"declare session.{missing[0]}(...)"
        )
    return needed


def _of_these(placement: Placement, roles: Sequence[str]) -> Placement:
    """Return the placement of these roles and their shadows alone."""
    homes = {name: pool for name, pool in placement.roles.items() if name.partition(".")[0] in roles}
    wholes = {pool.within for pool in placement.pools if pool.name in homes.values()}
    return Placement(tuple(pool for pool in placement.pools if pool.name in {*homes.values(), *wholes}), homes)


def _filled(role: RoleSpec, placement: Placement) -> Layout:
    layout, size = role.train or Layout(), placement.pool_of(role.name).size
    return replace(layout, dp=None).fill(size)


def _role(role: RoleSpec, placement: Placement) -> RoleConfig:
    layout, size = _filled(role, placement), DTYPE_BYTES[role.dtype]
    distributed = role.optimizer is not None and role.optimizer.distributed
    states = States(
        name="Megatron", weights=size, gradients=4, optimizer=8 if role.dtype == "fp32" else 12,
        optimizer_over=layout.num_copies if distributed else 1, gradients_stay=True,
    )  # fmt: skip
    return RoleConfig(
        name=role.name, model=str(role.model), pool=placement.pool_of(role.name).name, layout=layout, states=states,
        trained=role.trainable, train_tokens=role.micro_batch_tokens, pass_tokens=role.micro_batch_tokens, recompute=role.recompute,
        away=dict.fromkeys(PHASES, role.offloads), head=role.head, lr=role.optimizer.lr if role.optimizer else None, lora=role.lora,
    )  # fmt: skip


def _with_bases(roles: Sequence[RoleConfig], models: Sequence[RoleSpec]) -> tuple[RoleConfig, ...]:
    """Return the roles, those that begin with the frozen weights of one before them in the same pool without these."""
    sharing: list[RoleConfig] = []
    keys = [
        (role.pool, base_key(replace(model, train=role.layout))) if base_of(model) is not None else None
        for role, model in zip(roles, models, strict=True)
    ]
    for number, role in enumerate(roles):
        first = number if keys[number] is None else keys.index(keys[number])
        sharing.append(replace(role, base_of=roles[first].name) if first < number else role)
    return tuple(sharing)
