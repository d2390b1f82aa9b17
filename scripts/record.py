"""Records what hfsdk computes and draws, so that two commits can be compared number by number.

    python scripts/record.py OUT.json [--only NAME ...]                  about 3 minutes; each section in a process of its own
    python scripts/record.py --compare A.json B.json [--ignore KEY ...]  what differs; exit code 1 where anything does

The sections: ``real`` (two seeded steps on Ray, Megatron and vLLM; CPU), ``simulated`` (spans on the virtual clock), ``plans``
(each from empty caches), ``reshard`` (bytes between ranks), ``views`` (every picture: its data, text, SVG and HTML). What a clock
measured, random ids and this checkout's path are left out. Of HTML ``html`` is the hash of the whole and ``page`` of what is not
script or style; after a change of the JavaScript alone compare with ``--ignore html``.

Only hfsdk's public names are used, but for two things: functions with a cache are looked for in all of hfsdk's modules, and the
pictures of bad input are those of ``tests.viz.bad_pictures``; where that cannot be imported they are missing.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import hfsdk as hf  # noqa: E402
from hfsdk.session.parts import parts_of  # noqa: E402

CLOCKED = ("seconds", "tokens_per_s", "busy_share", "memory_bytes", "cost")
"""Of a row of a real step what is measured."""
UNCLOCKED = {"seconds": 0.0, "tables_s": 0.0, "record_s": 0.0}
"""Instead of what a search took."""
PLANS, LARGE = 200, 4000
PRESETS = ("colocate", "split", "standalone", "interleaving", "separation")


# ---------------------------------------------------------------- values as they are written


def digest(data: bytes | str) -> str:
    """Return length and hash."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return f"{len(raw)} {hashlib.sha256(raw).hexdigest()[:24]}"


def column(values: Any) -> dict[str, Any]:
    """Return a column's bytes as a hash, its shape and its first numbers."""
    lengths = values.lengths.tolist() if hasattr(values, "lengths") else None
    flat = np.asarray(values if lengths is None else values.flat)
    raw = repr(flat.tolist()).encode() if flat.dtype.kind == "O" else flat.tobytes()
    return {"dtype": flat.dtype.str, "shape": flat.shape, "lengths": lengths, "hash": digest(raw), "first": flat.ravel()[:6]}


def placeless(text: str) -> str:
    """Return a text without this checkout's path and this file's lines."""
    return re.sub(r"record\.py, line \d+", "record.py", text.replace(str(ROOT), "<root>"))


def written(value: Any) -> Any:
    """Return JSON data: numpy's numbers as Python's, texts without places."""
    if isinstance(value, dict):
        return {str(k): written(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return list(map(written, value))
    if isinstance(value, np.ndarray | np.generic):
        return written(value.tolist())
    return value if value is None or isinstance(value, bool | int | float) else placeless(str(value))


def short(value: Any) -> Any:
    """Return data whose large lists, and what is large in their entries, are hashes."""
    text = json.dumps(value := written(value), sort_keys=True)
    if len(text) <= LARGE:
        return value
    if isinstance(value, list) and len(value) > 9:
        return digest(text)
    return {k: short(v) for k, v in value.items()} if isinstance(value, dict) else list(map(short, value))


def outcome(make: Callable[..., Any], *given: Any) -> Any:
    """Return what a function returns, or what it raises."""
    try:
        return make(*given)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def spans(trace: Any) -> list[str]:
    """Return every field of every span that is not empty, in order."""
    empty = ("", None, False, {})
    return [" ".join(f"{f.name}={v!r}" for f in fields(s) if (v := getattr(s, f.name)) not in empty) for s in trace]


def clear_caches() -> None:
    """Forget what functions of hfsdk remember, in whichever module they are."""
    for name in [name for name in sys.modules if name.split(".")[0] == "hfsdk"]:
        for thing in list(vars(sys.modules[name]).values()):
            if callable(getattr(thing, "cache_clear", None)):
                thing.cache_clear()


# ---------------------------------------------------------------- sessions


def vowels(completions: list[str], **columns: Any) -> list[float]:
    """Score by the share of vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def declare(session: Any, algorithm: Any, model: str, train: str, rollout: str, scorer: Any = None, **options: Any) -> Any:
    """Declare the roles that an algorithm names; return the actor."""
    shared = {name: value for name, value in options.items() if name != "cpu_weights"}
    scores = {"layout": train, "dtype": options.get("dtype")} if scorer is None else {}
    actor = session.actor(model, train=train, rollout=rollout, **options)
    for name in algorithm.roles:
        if name.endswith("critic"):
            session.critic(model, train=train, name=name, **shared)
        elif name == "reference":
            session.reference(actor)
        elif name in ("reward", "cost"):
            getattr(session, name)(scorer or model, **scores)
    return actor


def steps_of(session: Any, algorithm: Any, prompts: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Take two steps; yield each with the metrics of its updates once they are done."""
    for number in range(2):
        step = algorithm.step(session.models, prompts[number])
        updates = {name: getattr(step, name, None) for name in ("critic", "actor", "cost_critic")}
        yield step, {name: metrics.wait() for name, metrics in updates.items() if metrics is not None}


def token_prompts(session: Any, count: int, batch_size: int) -> Any:
    """Return prompts of made-up tokens."""
    return session.prompts([[1 + (i + k) % 100 for k in range(40 - i % 3)] for i in range(count)], batch_size=batch_size)


def real() -> dict[str, Any]:
    """Two steps of three algorithms on real engines: columns, metrics, bytes between ranks; pictures of PPO's last batch."""
    from hfsdk.algorithms import GRPO, PPO, SafeRLHF

    cases = (
        (PPO(max_new_tokens=24), "tp2", "dp2", {"optimizer": hf.AdamW(lr=3e-4)}),
        (GRPO(max_new_tokens=24, n=4), "pp2", "tp2", {"optimizer": hf.AdamW(lr=3e-4), "recompute": "full"}),
        (SafeRLHF(max_new_tokens=24, cost_limit=0.2), "dp2", "tp2", {"optimizer": hf.AdamW(lr=3e-4, distributed=True)}),
    )
    openings = ["The plot is ", "The acting was ", "I left the cinema ", "dull", "a warm and funny ", "it never quite "]
    found: dict[str, Any] = {}
    for algorithm, train, rollout, options in cases:
        made: dict[str, Any] = {}
        with hf.Session(devices=2, seed=11) as session:
            actor = declare(session, algorithm, "tiny", train, rollout, vowels, **options)
            for step, updates in steps_of(session, algorithm, session.prompts(openings * 2, batch_size=6)):
                rows = {"all": [algorithm.metrics(step)], **{name: metrics.rows for name, metrics in updates.items()}}
                made[f"step {len(made)}"] = {
                    "columns": {name: column(step.batch[name]) for name in step.batch.columns},
                    "texts": step.batch.text(),
                    "metrics": {k: [{n: v for n, v in row.items() if n not in CLOCKED} for row in v] for k, v in rows.items()},
                }
            report, batch, after = actor.last_reshard, step.batch, actor.compute_log_probs(step.batch)
            made["reshard"] = {"plan": actor.reshard_plan.bytes_matrix(), "received": [r.bytes_received for r in report.ranks]}
            made["after"] = column(after["old_log_probs"])
            lanes = {f"{s.role}.{s.method} {s.name} {s.device} {s.rank} {s.parent} {s.phase}" for s in session.trace}
            made["lanes"] = sorted(lanes)
            if isinstance(algorithm, PPO):
                made["tokens"] = picture(hf.viz.tokens_picture(batch, range(4), new=after))
                made["credit"] = picture(hf.viz.credit_picture(batch, row=1))
                made["clip"] = picture(hf.viz.clip_picture(batch, after))
                made["batch"] = batch.view()
        found[type(algorithm).__name__] = made
    return found


def simulated() -> dict[str, Any]:
    """Spans of two simulated steps: algorithms by placements, odd clusters and lengths; then pairs and demonstrations."""
    algorithms = (
        hf.PPO(max_new_tokens=48, epochs=2), hf.GRPO(max_new_tokens=48, n=2), hf.RLOO(max_new_tokens=48, n=2),
        hf.ReMax(max_new_tokens=48), hf.ReinforcePlusPlus(max_new_tokens=48), hf.SafeRLHF(max_new_tokens=48),
    )  # fmt: skip
    odd = ("1x4 cpu", "2x2 cpu", "1x4 H100 + 1x4 A100-80GB", "1x6 H200")
    cases = [(c, a, "full", p, {}) for c, a, p in product(("1x8 A100-80GB", "2x4 H100"), algorithms, PRESETS)]
    cases += [(c, a, n, "colocate", {}) for c, a, n in product(odd, algorithms[:2], ("lognormal", "uniform"))]
    cases += [("1x4 cpu", algorithms[0], "full", "colocate", {"cpu_weights": mode}) for mode in ("packed", "shared")]
    cases += [("2x4 A100-80GB", algorithm, "full", "colocate", {"offload": True}) for algorithm in algorithms[:2]]
    found: dict[str, Any] = {}
    for cluster, algorithm, lengths, placement, options in cases:
        with hf.Session.simulated(cluster, response_lengths=lengths, seed=3) as session:
            key = f"{type(algorithm).__name__} on {cluster}, {placement}, {lengths} {options}"
            found[key] = outcome(one_simulated, session, algorithm, placement, options)
    with hf.Session.simulated("1x4 A100-80GB", seed=3) as session:
        actor = session.actor("tiny", train="tp2")
        session.reference(actor)
        reward = session.reward("tiny", optimizer=hf.AdamW(lr=1e-4))
        texts = {"prompt": ["a film "] * 8, "chosen": ["good " * (i + 1) for i in range(8)], "rejected": ["bad"] * 8}
        pairs = session.pairs(texts, batch_size=4)
        hf.DPO(mini_batches=2).step(session.models, next(pairs)).actor.wait()
        reward.update(next(pairs), hf.BradleyTerry()).wait()
        actor.update(next(session.demonstrations(["a text"] * 8, batch_size=4)), hf.CrossEntropy()).wait()
        found["pairs and demonstrations"] = spans(session.trace)
    return found


def one_simulated(session: Any, algorithm: Any, placement: str, options: dict[str, Any]) -> dict[str, Any]:
    """Take two steps and return their spans and idle times."""
    cpu, odd = session.cluster.devices[0].name == "cpu", session.cluster.num_devices % 4 != 0
    model, train, dtype = ("tiny", "tp2", "fp32") if cpu else ("qwen2.5-0.5b", "tp1" if odd else "auto", "bf16")
    declare(session, algorithm, model, train, "auto", dtype=dtype, optimizer=hf.AdamW(distributed=not cpu), **options)
    session.place(placement)
    done = len(list(steps_of(session, algorithm, token_prompts(session, 24, 12))))
    trace = session.trace[0:done].snapshot()
    return {
        "layouts": {h.name: h.layouts for h in session.roles}, "spans": spans(trace), "idle": trace.idle(),
        "path": [s.call_id for s in trace.critical_path()], "overlap": trace.overlap(),
        "memory": {h.name: outcome(lambda h=h: h.memory) for h in session.roles},
    }  # fmt: skip


# ---------------------------------------------------------------- plans and resharding


def plans() -> dict[str, Any]:
    """Random plans, each from empty caches: all that is found but the seconds of the search, or the error."""
    found = {}
    for number in range(PLANS):
        clear_caches()
        found[f"{number:03d}"] = random_plan(np.random.default_rng([41, number]))
    return found


def random_plan(rng: Any) -> Any:
    """Draw a question and answer it."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    small = rng.integers(5) > 0
    nodes, size = one(*product((1, 2), (1, 2, 4, 8)), (1, 6), (3, 3)) if small else one((4, 8), (8, 8), (3, 8), (6, 4))
    text = f"{nodes}x{size} {one('A100-80GB', 'H100', 'H200', 'A100-80GB-PCIe', 'cpu')}"
    cluster = hf.ClusterSpec.parse(text + one(*[""] * 6, f" + 1x{size} A100-80GB"), one(0.0, 2.5))
    if rng.integers(4) == 0:
        cluster = cluster.with_memory(one(16, 48, 400) * 10**9)
    algorithm = one(hf.PPO(), hf.PPO(kl_coef=0.0, epochs=2), hf.GRPO(n=4), hf.ReMax(), hf.RLOO(n=2), hf.SafeRLHF())
    model = one("qwen2.5-0.5b", "smollm2-1.7b", "qwen3-0.6b", "smollm2-135m", "qwen3-4b", "tiny")
    model = model if small else one("llama-7b", "llama-13b", "qwen2.5-14b", "llama3-70b")
    options = {
        "dtype": one("bf16", "bf16", "bf16", "fp32"), "offload": one(False, False, False, True),
        "optimizer": hf.AdamW(distributed=one(False, True), offload=one(False, False, True)),
        "recompute": one("", "selective", "full"), "micro_batch_tokens": one(1024, 4096),
    }  # fmt: skip
    layouts = one("auto", "auto", "auto", "tp1", "tp2", "pp2"), one(*["auto", "tp1", "tp2"] * 6, "pp2")
    workload = hf.Workload(
        prompts=one(16, 100, 512), prompt_tokens=one(64, 250, 1000), response_tokens=one(64, 250, 777), steps=one(1, 100),
        response_lengths=one("full", "full", "uniform", "lognormal"), mini_batches=one(None, 1, 4),
    )  # fmt: skip
    asked = {"top": one(1, 5), "by_placement": one(False, True), "shadows": one(False, True, True)}

    def answer() -> dict[str, Any]:
        with hf.Session.simulated(cluster, response_lengths=workload.response_lengths, seed=5) as session:
            declare(session, algorithm, model, *layouts, **options)
            plan = unclocked(session.plan(algorithm, workload, **asked))
            return {"why": plan.why(), **{name: short(part) for name, part in plan.view().items()}}

    return {"asked": f"{algorithm} {model} {layouts} on {cluster}: {workload} {asked} {options}", "found": outcome(answer)}


def unclocked(plan: Any) -> Any:
    """Return a plan without the seconds that its search took."""
    return replace(plan, search=replace(plan.search, **UNCLOCKED))


def reshard() -> dict[str, Any]:
    """Bytes between ranks for pairs of layouts, on the same ranks and with the rollout on its own."""
    found: dict[str, Any] = {}
    for model, size in (("smollm2-135m", 6), ("qwen2.5-0.5b", 8), ("llama-7b", 8), ("qwen3-0.6b", 4), ("llama3-70b", 16)):
        sizes = [d for d in range(1, size + 1) if size % d == 0]
        train = [f"tp{tp} pp{pp} dp{size // tp // pp}" for tp, pp in product(sizes, sizes) if size % (tp * pp) == 0]
        ways = (("strided", False), ("vanilla", False), ("strided", True))
        for before, tp, way in product(train, sizes, ways):
            after = f"tp{tp} dp{size // tp}"
            found[f"{model} {before} -> {after} {way}"] = outcome(one_reshard, model, before, after, *way, 4)
    found["large"] = outcome(one_reshard, "llama3-70b", "tp8 pp4 dp2", "tp8 dp8", "strided", False, 8)
    return found


def one_reshard(model: str, before: str, after: str, grouping: str, apart: bool, nodes: int) -> dict[str, Any]:
    """Return a plan's numbers."""
    spec = hf.ModelSpec.preset(model)
    plan = hf.ReshardPlan.between(spec, before, after, "bf16", grouping=grouping, nodes=nodes, apart=apart)
    each = ("bytes_held", "bytes_needed", "bytes_peak", "bytes_redundant")
    few = plan.num_ranks <= 8
    return {
        "title": repr(plan), "moved": plan.bytes_moved, "links": plan.bytes_by_link(), "nests": plan.nests,
        **{name: [getattr(plan, name)(rank) for rank in range(plan.num_ranks)] for name in each},
        "matrix": plan.bytes_matrix() if few else digest(str(plan.bytes_matrix())), "volumes": digest(repr(plan.volumes())),
        "moves": digest(repr(plan.moves)) if few else "", "back": digest(str(plan.inverse().bytes_matrix())) if few else "",
    }  # fmt: skip


# ---------------------------------------------------------------- pictures


def masked(text: str) -> str:
    """Return HTML or SVG without random ids, hashes of scripts and this checkout's path; images inside as text."""
    text = re.sub("data:image/svg[+]xml;base64,([A-Za-z0-9+/=]+)", lambda m: masked(base64.b64decode(m[1]).decode()), text)
    text = placeless(re.sub("script-src[^;]*;", "", text))
    text = re.sub(r"hf-[0-9a-z]{1,8}-(?=\d)", "hf-", text)  # prefixes of ids that a module draws by chance
    for number, name in enumerate(dict.fromkeys(re.findall('id="([a-z-]{1,4}[0-9a-f]{6,32})[-"]', text))):
        text = text.replace(name, f"id{number}")
    return text


def page(html: str) -> dict[str, str]:
    """Return hashes of HTML whole, and of what Python made of it: without scripts and style sheets."""
    html = masked(html)
    made = re.sub("<(script|style)[^>]*>.*?</(script|style)>", "", html, flags=re.DOTALL)
    return {"html": digest(html), "page": digest(made)}


def picture(drawn: Any) -> dict[str, Any]:
    """Return a picture's data and hashes of its forms; a what-if's without the seconds that its answer took."""
    drawn = type(drawn)({**drawn.view, "took_s": 0.0}) if "took_s" in drawn.view else drawn
    forms = {"svg": digest(masked(drawn.to_svg())), "full": page(drawn.to_html(full=True)), **page(drawn.to_html())}
    return {"view": short(drawn.view), "text": short(masked(drawn.to_text()).split("\n")), **forms}


def drawn(thing: Any) -> Any:
    """Return the record of a noun's picture, or of the error."""
    return outcome(lambda: picture(hf.viz.picture(thing)))


def made_up_trace(title: str, shift: float = 0.0, predicted: bool = False, running: bool = False) -> Any:
    """Return a step on two devices with nested spans, a generation that drains and a stage that waits."""
    made, now = [], 1_790_000_000_000_000_000
    drain = json.dumps([[0.0, 3, 1, 0.5], [0.1, 2, 0, 0.4], [0.2, 0, 0, 0.0]])
    held = {"rss_bytes": 10**9, "weights_bytes": 5 * 10**8, "optimizer_bytes": 2 * 10**8}
    step = "actor generate reshard decode", "reference compute_log_probs forward", "actor update forward wait backward optimizer"
    for number, call in enumerate(step):
        role, method, *parts = call.split()
        took = 0.4 + 0.3 * number + shift
        shared = {"role": role, "method": method, "call_id": number, "pool": "all", "predicted": predicted}
        ended = None if running and number == 2 else took
        after = {"after": str(number - 1)} if number else {}
        made.append(hf.Span(name=method, start_ns=now, duration_s=ended, attrs={"tokens": 512, **after}, **shared))
        for device in range(2):
            on = {"device": device, "rank": device, **shared}
            made.append(hf.Span(name=method, start_ns=now, duration_s=ended, attrs=held, **on))
            for k, part in enumerate(parts):
                begin, seconds = now + round(took * k / len(parts) * 1e9), took / len(parts) * (0.8 + 0.1 * device)
                attrs = {"drain": drain} if part == "decode" else {"bytes": 77}
                made.append(hf.Span(name=part, start_ns=begin, duration_s=seconds, parent=method, attrs=attrs, **on))
        now += round((took + 0.02) * 1e9)
    return hf.Trace.of(made, title)


def views() -> dict[str, Any]:
    """Every kind of picture: of simulated sessions, made-up traces and experiments, and the tests' bad input."""
    one, two = made_up_trace("one"), made_up_trace("two", 0.2)
    traces = {"one": one, "two": two, "plan": made_up_trace("plan", 0.1, predicted=True), "now": made_up_trace("now", running=True)}
    found = {f"timeline {name}": drawn(trace) for name, trace in {**traces, "path": one.critical_path()}.items()}
    found |= {f"comparison {name}": drawn(one.compare(other)) for name, other in {**traces, "guess": {"generate": 0.5}}.items()}
    found["timelines"] = picture(hf.viz.timelines_picture(traces))
    spec, small = hf.ModelSpec.preset("llama-7b"), hf.ModelSpec.preset("qwen2.5-0.5b")
    found["grouping"] = picture(hf.viz.grouping_picture(spec, "tp4 dp2", "tp2 dp4", nodes=4))
    pipelined = hf.ReshardPlan.between(small, "tp2 pp2 dp1", "tp1 dp4", "bf16")
    found["resharding"], found["resharding back"] = drawn(pipelined), drawn(pipelined.inverse())
    found["resharding apart"] = drawn(hf.ReshardPlan.between(spec, "tp4", "tp2 dp2", "bf16", nodes=4, apart=True))
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        found[name] = picture(hf.viz.parameter_picture(pipelined, f"model.layers.0.{name}.weight"))
    same = {"length": 20.0, "seconds": 1.5, "tokens": 64.0}
    cells = product(("PPO", "GRPO"), (0, 1), range(5))
    rows = [{"algorithm": a, "seed": s, "step": t, "score": t / 9 + s / 7, "kl": 0.01 * t, **same} for a, s, t in cells]
    for baseline in (None, {"algorithms": {"PPO": {"final_scores": {"0": 0.2, "1": 0.4}}}}):
        made = hf.Experiment(tuple(rows), {"PPO": "PPO()", "GRPO": "GRPO()"}, (0, 1), 5, baseline)
        found[f"experiment {baseline}"] = drawn(made)
    for placement in PRESETS:
        with hf.Session.simulated("2x4 A100-80GB", price_per_device_hour=2.0, seed=4, name=placement) as session:
            found |= {f"{placement}: {name}": value for name, value in session_views(session, placement).items()}
    with hf.Session.simulated("2x8 A100-80GB", price_per_device_hour=2.0) as session:
        found |= planned_views(session)
    with suppress(ImportError):  # hostile texts, no numbers, a thousand devices
        from tests.viz.bad_pictures import PICTURES

        found |= {f"bad {name}": outcome(lambda m=make: picture(m())) for name, make in PICTURES.items()}
    return found


def session_views(session: Any, placement: str) -> dict[str, Any]:
    """Pictures of a session that trains, goes back, trains again and is moved."""
    algorithm = hf.PPO(max_new_tokens=32, n=2)
    actor = declare(session, algorithm, "qwen2.5-0.5b", "tp1" if placement == "standalone" else "auto", "auto", dtype="bf16")
    found = {"declared": session.view()}
    session.place(placement)
    found["placement before"] = drawn(session.placement)
    prompts = token_prompts(session, 24, 8)
    session.train(algorithm, prompts, steps=2, progress=False)
    session.snapshot("before")
    session.train(algorithm, prompts, steps=1, progress=False)
    session.rewind("before")
    run = session.train(replace(algorithm, kl_coef=0.2), prompts, steps=2, progress=False)
    batch = actor.generate(prompts[0], max_new_tokens=16).wait()
    metrics = actor.update(run.last.batch, hf.CrossEntropy()).wait()
    things = {
        "placement": session.placement, "dataflow": session.dataflow, "dataflow before": session.dataflow[-2],
        "trace": session.trace, "trace before": session.trace[-2], "trace of two": session.trace[0:2], "memory": session.memory,
        "run": run, "history": session.history, "reshard plan": actor.reshard_plan, "reshard report": actor.last_reshard,
        "comparison": session.trace[-2].compare(session.predict(-2)),
    }  # fmt: skip
    found |= {name: drawn(thing) for name, thing in things.items()}
    found |= {"session": session.view(), "batch": batch.view(), "history rows": session.history.view()}
    tables = {"session": session, "batch": batch, "metrics": metrics, "snapshot": parts_of(session).snapshots.find("before")}
    found["tables"] = outcome(shown_in_notebook, tables)
    with tempfile.TemporaryDirectory() as folder:
        found["report"] = page(session.report(Path(folder) / "report.html").read_text(encoding="utf-8"))
    session.place("split" if placement == "colocate" else "colocate")
    return {**found, "placement moved": drawn(session.placement)}


def shown_in_notebook(things: dict[str, Any]) -> dict[str, Any]:
    """Return hashes of the HTML that IPython's display hooks make."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    hf.viz.register_hooks()
    html = {name: shell.display_formatter.formatters["text/html"](thing) for name, thing in things.items()}
    return {name: None if text is None else page(text) for name, text in html.items()}


def planned_views(session: Any) -> dict[str, Any]:
    """Pictures of a plan with what turns it, and of a what-if whose lengths and devices were moved."""
    algorithm, workload = hf.PPO(), hf.Workload(prompts=256, prompt_tokens=512, response_tokens=512, steps=100)
    declare(session, algorithm, "llama-7b", "auto", "auto", dtype="bf16", optimizer=hf.AdamW(distributed=True))
    plan = unclocked(session.plan(algorithm, workload))
    found = {"plan": drawn(plan), "plan sensitivity": list(map(str, plan.sensitivity)), "plan turns": drawn(plan)}
    found |= {"plan trace": drawn(plan.trace), "plan rows": plan.to_pandas().to_dict("index"), "plan why": plan.why()}
    what_if = session.what_if(algorithm, workload)
    for name in ("response_tokens", "devices"):
        what_if.draw(name)
        what_if.plan = unclocked(what_if.plan)
        found[f"what if {name}"] = drawn(what_if)
    return {**found, "what if split": repr(what_if.set(response_tokens=2048, placement="split"))}


# ---------------------------------------------------------------- recording and comparing

SECTIONS = {"real": real, "simulated": simulated, "plans": plans, "reshard": reshard, "views": views}


def record(names: list[str], out: Path) -> None:
    """Write sections to a file; where they are several, each is made in a process of its own."""
    found: dict[str, Any] = {}
    if len(names) == 1:
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        found = {name: written(SECTIONS[name]()) for name in names}
        took = time.perf_counter() - began
        sys.stdout.write(f"{names[0]}: {len(found[names[0]])} entries in {took:.0f} s\n")
    else:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                subprocess.run([sys.executable, __file__, f"{folder}/part.json", "--only", name], check=True)
                found |= json.loads(Path(folder, "part.json").read_text())
    out.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def differences(a: Any, b: Any, path: str, ignored: list[str]) -> Iterator[str]:
    """Yield where two records differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted((a.keys() | b.keys()) - set(ignored)):
            yield from differences(a.get(key, "(missing)"), b.get(key, "(missing)"), f"{path} / {key}", ignored)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{path} / {number}", ignored)
    elif json.dumps(a) != json.dumps(b):
        yield f"  {path}\n    {json.dumps(a)[:300]}\n    {json.dumps(b)[:300]}\n"


def compare(first: Path, second: Path, ignored: list[str], most: int) -> int:
    """Print what differs between two files and return the exit code."""
    a, b = (json.loads(path.read_text()) for path in (first, second))
    total = 0
    for section in sorted(a.keys() | b.keys()):
        found = list(differences(a.get(section), b.get(section), section, ignored))
        total += len(found)
        sys.stdout.write(f"{section}: {len(found)} differences in {len(a.get(section) or ())} entries\n" + "".join(found[:most]))
    return 1 if total else 0


def main() -> int:
    """Record or compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    parser.add_argument("--ignore", nargs="+", default=[], metavar="KEY", help="keys that are not compared, e.g. html")
    parser.add_argument("--most", type=int, default=20, help="differences that are printed of a section")
    given = parser.parse_args()
    if given.compare:
        return compare(*given.compare, given.ignore, given.most)
    if given.out is None:
        parser.error("name the file to write, or --compare two files")
    record(given.only, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
