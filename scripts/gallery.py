"""Draws every picture from real runs, photographs it light and dark, and writes ``docs/gallery.md``: ``make gallery``.

The runs: PPO of ``tiny`` on two worker processes (tp2, then pp2), runs in which something is wrong, and a simulated cluster. About
three minutes.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.quickstart import beginnings
from hfsdk.viz.frame import Picture, html_page
from hfsdk.viz.tables import first_bad_html

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 1180
MOST_PIXELS = 1400
"""Taller pictures are cut; the whole is in the notebook."""
CARD = ".hf-first-bad"
"""The card among the pictures, which is there at once."""

BOTTOM = """
() => Math.ceil(Math.max(...[...document.querySelectorAll('.hf-picture, .hf-first-bad, .hf-tip:not([hidden])')]
  .map((e) => e.getBoundingClientRect().bottom))) + 12
"""


@dataclass(frozen=True)
class Plate:
    """One picture of the gallery: how it comes about, and what to do in the browser before it is photographed."""

    name: str
    title: str
    code: str
    picture: Picture | str
    """A card, which has no script, as HTML."""
    words: str
    act: Callable[[Any], None] = lambda page: None


def positive(prompts: list[str], completions: list[str]) -> list[float]:
    """Score by VADER's lexicon."""
    return hf.data.vader_sentiment(completions)


def session_plates(plates: list[Plate]) -> None:
    """Pictures of one PPO session, trained for a few steps."""
    with hf.Session(devices=2, wait=True, name="tp2") as session:
        actor = session.actor("tiny", train="tp2", rollout="dp2", optimizer=hf.AdamW(lr=3e-4))
        critic = session.critic("tiny", train="tp2", optimizer=hf.AdamW(lr=1e-3))
        reference, reward = session.reference(actor), session.reward(positive)
        session.place("colocate")
        prompts = session.prompts(beginnings(), batch_size=24)
        run = session.train(hf.PPO(max_new_tokens=40), prompts, steps=12, progress=False)
        batch = actor.generate(next(prompts), max_new_tokens=40)
        batch = critic.compute_values(reference.compute_log_probs(actor.compute_log_probs(batch)))
        batch = ppo.advantages(reward.compute_scores(batch), gamma=1.0, lam=0.95, kl_coef=0.05)
        critic.update(batch, ppo.ValueLoss(clip=0.2))
        actor.update(batch, ppo.PolicyLoss(clip=0.2), epochs=4, mini_batches=4)
        now = actor.compute_log_probs(batch)
        step, second = session.trace[-2].snapshot(), session.trace.snapshot()
        plates += [
            Plate("placement", "Placement", "session.placement", hf.viz.picture(session.placement),
                  "Who lives where, memory as planned and as measured; the rank under the pointer shows its groups.",
                  lambda page: page.locator(".hf-cell").nth(1).hover()),
            Plate("dataflow", "Dataflow", "session.dataflow", hf.viz.picture(session.dataflow[-2]),
                  "Calls of one step and the columns between them; an opened edge shows which rank reads how much from which.",
                  open_an_edge),
            Plate("timeline", "Timeline", "session.trace", hf.viz.picture(step),
                  "One PPO step: calls by role, spans by device, idle time shaded, sequences running while it generates; "
                  "a line says which calls are on the critical path."),
            Plate("memory", "Memory through a step", "session.memory", hf.viz.picture(session.memory),
                  "What every device holds after each call, the whole process, and beside it the plan.",
                  lambda page: page.locator(".hf-held").nth(1).hover()),
            Plate("dashboard", "Training", "session.train(hf.PPO(), prompts, steps=12)", hf.viz.picture(run),
                  "Curves over the steps; every step opens its calls and samples. Live, it can be paused and stopped."),
            Plate("tokens", "Token inspector", "batch.tokens(new=actor.compute_log_probs(batch))",
                  hf.viz.tokens_picture(batch, range(8), new=now), "Samples token by token; clipped tokens are marked."),
            Plate("credit", "Credit", "hf.viz.credit_picture(batch, row=0)", hf.viz.credit_picture(batch, row=longest(batch)),
                  "A score flowing back through GAE, with sliders for gamma and lambda."),
            Plate("clip", "Clipped ratios", "hf.viz.clip_picture(batch, new=...)",
                  hf.viz.clip_picture(batch.with_columns(new_log_probs=now["old_log_probs"])),
                  "Probability ratios after four epochs of four mini-batches, and which of them get no gradient."),
            Plate("resharding", "Resharding", "actor.last_reshard", hf.viz.picture(actor.last_reshard),
                  "Weights on their way from training (tp2) to generation (two replicas), box by box.", second_step),
            Plate("census", "Weights on each rank", "actor.census()", hf.viz.picture(actor.census()),
                  "The weights that are on each rank now, by which engine holds them, beside what the plan says."),
            Plate("calibration", "Calibration", "session.calibrate()", hf.viz.picture(session.calibrate([-2])),
                  "The performance model fitted to a step of this machine: calls as measured, and as predicted before and after."),
            Plate("comparison", "A guess, scored", "session.trace.compare({'generate': 0.3, 'update': 1.0})",
                  hf.viz.picture(step.compare({"generate": 0.3, "compute_log_probs": 0.3, "update": 1.0})),
                  "Guess first, then look: seconds by call against what was measured; predictions are compared the same way."),
        ]  # fmt: skip
        del second
    plates.append(pipelines(step))
    plates.append(grouping())


def planned_plates(plates: list[Plate]) -> None:
    """Pictures of a plan for four 70B models on 128 GPUs; nothing runs."""
    session = hf.Session.simulated("16x8 A100-80GB", price_per_device_hour=2.0)
    actor = session.actor("llama-70b", dtype="bf16", optimizer=hf.AdamW(distributed=True))
    session.critic("llama-70b", dtype="bf16", optimizer=hf.AdamW(distributed=True))
    session.reference(actor)
    session.reward("llama-70b", dtype="bf16")
    workload = hf.Workload(prompts=1024, prompt_tokens=1024, response_tokens=1024, steps=500)
    plan = session.plan(hf.PPO(), workload)
    sys.stdout.write("\n".join(map(str, plan.sensitivity)) + "\n")  # found when it is asked for, and drawn from then on
    what_if = session.what_if(hf.PPO(), workload)
    what_if.draw("response_tokens")
    plates += [
        Plate("plan", "Plan", "session.plan(hf.PPO(), hf.Workload(...))", hf.viz.picture(plan),
              "Four 70B models on 128 GPUs: who shares devices, the step as predicted, and the runners-up with why they lost; "
              "here the second one is looked at.", lambda page: page.locator(".hf-plan-row").nth(1).click()),
        Plate("what_if", "What if", "session.what_if(hf.PPO(), hf.Workload(...))", hf.viz.picture(what_if),
              "The same with sliders: in a notebook the plan is found anew while one is dragged. A saved one keeps the last plan."),
    ]  # fmt: skip


def why_plates(plates: list[Plate]) -> None:
    """Pictures of what was wrong: the runs of notebook 13."""
    with hf.Session(devices=2, wait=True, name="why") as session:
        actor = session.actor("tiny", train="tp2", rollout="dp2", optimizer=hf.AdamW(lr=3e-4))
        session.critic("tiny", train="dp2", optimizer=hf.AdamW(lr=1e-3))
        session.reference(actor)
        session.reward(positive)
        session.place("colocate")
        with contextlib.suppress(hf.WeightMismatchError):
            hf.testing.broken_run(1, session)
        proof = hf.viz.picture(actor.last_reshard)
        gap = actor.explain_gap(hf.testing.broken_run(2, session))
        start = session.snapshot("before")
        bad = hf.testing.broken_run(5, session).first_bad()
        session.rewind(start)
        reward, batch = hf.testing.broken_run(6, session)
        plates += [
            Plate("proof", "Proof of weights", "actor.last_reshard", proof,
                  "One number changed on its way: the box that is not what left, among those that are proven by fingerprint.",
                  lambda page: page.locator(".hf-reshard select").first.select_option("model.layers.0.mlp.down_proj.weight")),
            Plate("gap", "Why trainer and generating engine differ", "actor.explain_gap(batch)", hf.viz.picture(gap),
                  "Generated at temperature 0.7, and the batch says 1: what each cause has of the gap, and both engines by layer."),
            Plate("first_bad", "The first bad number", "run.first_bad()", first_bad_html(bad.view()),
                  "A loss that divides by zero for one sample: the call, the sample, the columns there, a cell to get it again."),
            Plate("probe", "The reward's bench", "reward.probe(batch)", hf.viz.picture(reward.probe(batch)),
                  "A reward that follows length: seconds, failures, what scores follow, groups without variance."),
        ]  # fmt: skip
    explained = hf.explain([
        "algorithm.adv_estimator=grpo", "data.train_batch_size=1024", "actor_rollout_ref.rollout.n=5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160", "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8", "trainer.save_freq=5",
    ])  # fmt: skip
    plates.append(
        Plate("explanation", "What a configuration means", "hf.explain(config)", hf.viz.picture(explained),
              "A configuration of verl: prompts to optimizer steps, memory by phase, the rule that it breaks and what mends it.")
    )  # fmt: skip


def longest(batch: hf.Batch) -> int:
    """Return the row with the longest response."""
    return int(batch["response"].lengths.argmax())


def pipelines(step: hf.Trace) -> Plate:
    """The same step with pipeline stages, beside the first."""
    with hf.Session(devices=2, wait=True, name="pp2") as session:
        actor = session.actor("tiny", train="pp2", rollout="dp2", optimizer=hf.AdamW(lr=3e-4))
        session.critic("tiny", train="pp2", optimizer=hf.AdamW(lr=1e-3))
        session.reference(actor)
        session.reward(positive)
        session.place("colocate")
        prompts = session.prompts(beginnings(), batch_size=24)
        session.train(hf.PPO(max_new_tokens=40), prompts, steps=2, progress=False)
        pp2 = session.trace.snapshot()
    return Plate(
        "timelines", "Two layouts on one time axis", "hf.viz.timelines_picture({'tp2': ..., 'pp2': ...})",
        hf.viz.timelines_picture({"tp2": step, "pp2": pp2}),
        "The same step with tensor and with pipeline parallelism: waiting stages are grey; a table totals idle device-seconds.",
    )  # fmt: skip


def grouping() -> Plate:
    """The paper's example of 8 GPUs."""
    return Plate(
        "grouping", "Strided and vanilla groups", "hf.viz.grouping_picture(spec, 'tp4 dp2', 'tp2 dp4')",
        hf.viz.grouping_picture(hf.ModelSpec.preset("llama-7b"), "tp4 dp2", "tp2 dp4"),
        "HybridFlow's example of 8 GPUs (arXiv 2409.19256, figure 8): with its strided groups nobody holds a weight twice.",
        second_step,
    )  # fmt: skip


def open_an_edge(page: Any) -> None:
    """Open the edge that carries most."""
    page.locator(".hf-port").nth(4).click()
    page.mouse.move(600, 5)


def second_step(page: Any) -> None:
    """Go on to the moving boxes."""
    page.locator(".hf-reshard input[type=range]").first.fill("2")


def photograph(plates: list[Plate]) -> None:
    """Write two PNGs of every picture."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    folder = DOCS / "gallery"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=flags)
        for plate in plates:
            file, ready = Path(name) / f"{plate.name}.html", '.hf-picture[data-ready="1"]'
            if isinstance(plate.picture, str):
                ready = CARD
                file.write_text(html_page(plate.title, plate.picture), encoding="utf-8")
            else:
                plate.picture.save(file)
            for theme in ("light", "dark"):
                page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=theme)
                page.goto(file.as_uri())
                page.wait_for_selector(ready)
                plate.act(page)
                page.wait_for_timeout(400)
                height = page.evaluate(BOTTOM)
                clip = {"x": 0, "y": 0, "width": WIDTH, "height": min(MOST_PIXELS, height)}
                page.screenshot(path=folder / f"{plate.name}_{theme}.png", clip=clip, full_page=True)
                page.close()
        browser.close()


def main() -> None:
    """Run, draw, photograph, write the page."""
    plates: list[Plate] = []
    session_plates(plates)
    why_plates(plates)
    planned_plates(plates)
    photograph(plates)
    parts = [
        "# Gallery\n\nEvery picture from real runs: PPO of `tiny` on two worker processes of a CPU; plans are of a simulated\n"
        "cluster. `make gallery` draws them again. "
        "In a notebook they are live while calls run and can be hovered, zoomed and walked through with the keyboard.\n"
    ]
    for plate in plates:
        parts.append(
            f"## {plate.title}\n\n`{plate.code}`\n\n{plate.words}\n\n![{plate.title}, light](gallery/{plate.name}_light.png)\n"
            f"![{plate.title}, dark](gallery/{plate.name}_dark.png)\n"
        )
    (DOCS / "gallery.md").write_text("\n".join(parts), encoding="utf-8")
    size = sum(f.stat().st_size for f in (DOCS / "gallery").glob("*.png"))
    sys.stdout.write(f"docs/gallery.md: {len(plates)} pictures, {size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
