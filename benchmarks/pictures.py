"""How quick the pictures are: a large timeline in a browser, a live one in the kernel, and their sizes.

Targets:

* a timeline of 20,000 spans is painted at most 1 s after the page was opened (headless Chromium; from the start of navigation,
  reading the file and its 1.5 MB of data included, to the frame after the drawing);
* zooming into it draws at least 20 frames a second (60 zoom steps, one a frame, measured in the page);
* one update of a live timeline costs the kernel at most 5 ms (a real IPython kernel, the spans of a real PPO step: taking the
  view and handing it to the widget; median of 50);
* the frozen timeline of one real step has at most 200 kB, and drawing it into a file (SVG) takes at most 100 ms (median of 5);
  20,000 spans take at most 5 s;
* every ES module has at most 30 kB.

    python benchmarks/pictures.py --check          about a minute
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Report, parser, say, table

import hfsdk as hf
from hfsdk.core.trace import Span, Trace
from hfsdk.viz import timelines_picture
from hfsdk.viz.frame import Picture
from hfsdk.viz.modules import static

FIRST_PAINT_S, FRAMES_PER_S, KERNEL_MS, FROZEN_BYTES, MODULE_BYTES = 1.0, 20.0, 5.0, 200_000, 30_000
FILE_MS, LARGE_FILE_S = 100.0, 5.0
SPANS, DEVICES = 20_000, 16
ZOOM_STEPS = 60

ZOOM = """
() => new Promise((done) => {
  const buttons = [...document.querySelectorAll('.hf-timeline button')];
  const nearer = buttons.find((b) => b.textContent === '+'), farther = buttons.find((b) => b.textContent === '−');
  const times = [];
  let left = STEPS;
  const frame = (now) => {
    times.push(now);
    if (!left--) { done((times.length - 1) / ((times[times.length - 1] - times[0]) / 1000)); return; }
    (left > STEPS / 2 ? nearer : farther).click();
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})
""".replace("STEPS", str(ZOOM_STEPS))
PAINTED = """
() => new Promise((done) => {
  const look = () => document.querySelector('.hf-picture[data-ready="1"]')
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now() / 1000))) : setTimeout(look, 1);
  look();
})
"""
IN_KERNEL = """
import json, pickle, time
from hfsdk.viz.frame import LivePicture
from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view
with open({path!r}, "rb") as file:
    trace = pickle.load(file)
live = LivePicture(TimelinePicture(timeline_view(trace)))
taken = []
for turn in range(60):
    started = time.perf_counter()
    view = timeline_view(trace, now_ns=trace.start_ns + turn)
    live._widget.view = {{**view, "title": str(turn)}}
    taken.append(time.perf_counter() - started)
print("MS", sorted(taken[10:])[25] * 1e3)
"""


def large_trace() -> Trace:
    """Return made-up spans of a long run: calls, and in each sub-spans on every device."""
    rng, spans, now, call_id = random.Random(0), [], 1_790_000_000.0, 0
    while len(spans) < SPANS:
        role = ("actor", "critic", "reference")[call_id % 3]
        seconds = rng.uniform(0.4, 1.4)
        shared: dict[str, Any] = {"role": role, "method": "update", "call_id": call_id, "phase": "learning"}
        spans.append(Span(name="update", start_ns=int(now * 1e9), duration_s=seconds, **shared))
        for device in range(DEVICES):
            at = now
            for k in range(8):
                took = seconds / 8 * rng.uniform(0.7, 1.0)
                kind = ("forward", "backward")[k % 2]
                attrs = {"tokens": 512, "rss_bytes": 10**9, "cpu_s": took}
                spans.append(
                    Span(name=kind, device=device, rank=device, start_ns=int(at * 1e9), duration_s=took, attrs=attrs, **shared)
                )
                at += took
        now, call_id = now + seconds, call_id + 1
    return Trace.of(spans[:SPANS], f"{SPANS} spans")


def real_trace() -> Trace:
    """Return the spans of a real PPO step of ``tiny`` on two devices."""

    def vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]

    with hf.Session(devices=2, wait=True, name="pictures") as session:
        actor = session.actor("tiny", train="tp2", rollout="dp2", optimizer=hf.AdamW(lr=1e-5))
        session.critic("tiny", optimizer=hf.AdamW(lr=1e-5))
        session.reference(actor)
        session.reward(vowels)
        session.place("colocate")
        prompts = session.prompts(hf.data.movie_reviews(), batch_size=16, max_prompt_tokens=64)
        session.train(hf.PPO(max_new_tokens=32), prompts, steps=2, progress=False)
        return session.trace.snapshot()


def in_browser(page_file: Path) -> tuple[float, float]:
    """Return seconds to the first painted frame, and frames a second while zooming."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, headless=True, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            paints, rates = [], []
            for _ in range(3):
                page = browser.new_page(viewport={"width": 1240, "height": 900})
                page.goto(page_file.as_uri(), wait_until="commit")
                paints.append(page.evaluate(PAINTED))
                rates.append(page.evaluate(ZOOM))
                page.close()
            return statistics.median(paints), statistics.median(rates)
        finally:
            browser.close()


def in_kernel(trace: Trace, folder: Path) -> float:
    """Return the milliseconds that one live update costs a real kernel."""
    from jupyter_client.manager import start_new_kernel

    path = folder / "trace.pkl"
    path.write_bytes(pickle.dumps(trace))
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        told: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            if message["msg_type"] in ("stream", "error"):
                told.append(message["content"].get("text", "") or "\n".join(message["content"].get("traceback", ())))

        client.execute_interactive(IN_KERNEL.format(path=str(path)), output_hook=hear, timeout=120)
        words = "".join(told).split()
        if "MS" not in words:
            raise RuntimeError("the kernel said: " + "".join(told))
        return float(words[words.index("MS") + 1])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def file_s(picture: Picture, times: int = 5) -> float:
    """Return the seconds that drawing a picture into a file takes."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        picture.to_svg()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("pictures", "one headless Chromium, one kernel; a session of two workers of one thread each")
    with tempfile.TemporaryDirectory(prefix="hfsdk-pictures-") as name:
        folder = Path(name)
        large: Picture = hf.viz.picture(large_trace())
        page = large.save(folder / "large.html")
        paint_s, frames = in_browser(page)
        step = real_trace()
        kernel_ms = in_kernel(step, folder)
    frozen = len(hf.viz.picture(step).to_html().encode())
    two = len(timelines_picture({"one": step, "two": step}).to_html().encode())
    report.add(f"first paint of {SPANS} spans", paint_s, "s", at_most=FIRST_PAINT_S)
    report.add("zoom", frames, "frames/s", at_least=FRAMES_PER_S)
    report.add(f"a live update of {len(step)} spans in the kernel", kernel_ms, "ms", at_most=KERNEL_MS)
    report.add("frozen timeline of one step", frozen / 1000, "kB", at_most=FROZEN_BYTES / 1000)
    report.add("that timeline as SVG", file_s(hf.viz.picture(step)) * 1e3, "ms", at_most=FILE_MS)
    report.add(f"{SPANS} spans as SVG", file_s(large, 1), "s", at_most=LARGE_FILE_S)
    modules = sorted(Path(hf.viz.__file__).parent.joinpath("static").glob("*.js"))
    sizes = [(m.stem, len(static(m.name).encode())) for m in modules]
    for module, size in sizes:
        report.add(f"module {module}", size / 1000, "kB", at_most=MODULE_BYTES / 1000)
    data = len(json.dumps(large.view))
    say(table(("module", "bytes"), [(module, str(size)) for module, size in sizes]))
    say(f"\ntwo steps on one axis: {two} bytes frozen; {SPANS} spans: {data} bytes of data")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
