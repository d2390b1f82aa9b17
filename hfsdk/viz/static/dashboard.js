// A training run: curves over its steps; a click or the arrow keys open a step: its time, numbers and samples.
import { hatched, mark, paint, penPath, redrawn, tableOf } from "./chart.js";
import {
  coalesced,
  fitText,
  fmtBytes,
  fmtCount,
  fmtSeconds,
  fmtShare,
  frame,
  H,
  hatches,
  inkOn,
  isMissing,
  KERNEL_GONE,
  keyboard,
  S,
  shorten,
} from "./core.js";

const PANEL_W = 268,
  PANEL_H = 124,
  PAD_L = 50,
  PAD_T = 22,
  PAD_R = 10,
  PAD_B = 18,
  RIGHT_EDGE = PANEL_W - PAD_R,
  BASE = PANEL_H - PAD_B,
  LINE = "#3b76c4";

function fmtValue(name, v) {
  if (name.endsWith("_bytes")) return Math.abs(v) >= 1e9 ? (v / 1e9).toFixed(3) + " GB" : fmtBytes(v);
  if (name.endsWith("_share") || name.endsWith("_fraction")) return fmtShare(v);
  if (v && Math.abs(v) < 1e-3) return v.toExponential(1);
  return Number.isInteger(v) ? fmtCount(v) : String(Number(v.toPrecision(3)));
}

// ---- layout of a curve: its marks, and `places`, where each step that has a value stands
function layout(curve, selected, predicted) {
  const known = curve.points.filter((p) => !isMissing(p[1])),
    title = mark(
      "text",
      { x: PAD_L, y: 13, "font-weight": 600, class: "hf-fg" },
      curve.name === "cost" ? "cost so far" : curve.name,
    );
  if (!known.length) {
    const none = { x: PAD_L + 8, y: 60, "font-style": "italic", class: "hf-sub" };
    return { marks: [title, mark("text", none, "not measured")], places: [] };
  }
  const at = scalesOf(curve, known),
    here = known.find((p) => p[0] === selected),
    [, last] = known[known.length - 1],
    words = here && here[1] !== last ? `step ${selected}: ${fmtValue(curve.name, here[1])}` : "last " + fmtValue(curve.name, last);
  return {
    marks: [
      title,
      ...axisMarks(curve, at),
      ...lineMarks(curve, known, at, predicted),
      ...(here ? hereMarks(here, at, predicted) : []),
      mark("text", { x: RIGHT_EDGE, y: 13, "text-anchor": "end", class: "hf-sub hf-last" }, words),
    ],
    places: known.map((p) => [at.X(p[0]), p[0]]),
  };
}
function scalesOf(curve, known) {
  const xs = curve.points.map((p) => p[0]),
    x0 = Math.min(...xs),
    x1 = Math.max(...xs),
    ys = known.map((p) => p[1]);
  const y0 = Math.min(...ys),
    y1 = Math.max(...ys),
    pad = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 1,
    low = y0 - pad,
    high = y1 + pad;
  const X = (x) => (x1 === x0 ? (PAD_L + RIGHT_EDGE) / 2 : PAD_L + ((x - x0) / (x1 - x0)) * (RIGHT_EDGE - PAD_L)),
    Y = (y) => BASE - ((y - low) / (high - low)) * (BASE - PAD_T);
  return { x0, x1, y0, y1, X, Y };
}
function axisMarks(curve, { x0, x1, y0, y1, X, Y }) {
  const small = { "font-size": 9, class: "hf-sub" };
  return [
    mark("rect", { x: PAD_L, y: PAD_T, width: RIGHT_EDGE - PAD_L, height: BASE - PAD_T, class: "hf-panel" }),
    ...[y0, (y0 + y1) / 2, y1]
      .slice(0, y1 > y0 ? 3 : 1)
      .flatMap((y) => [
        mark("line", { x1: PAD_L, x2: RIGHT_EDGE, y1: Y(y), y2: Y(y), class: "hf-grid" }),
        mark("text", { x: PAD_L - 4, y: Y(y) + 3.5, "text-anchor": "end", ...small }, fmtValue(curve.name, y)),
      ]),
    ...(x1 > x0 ? [x0, x1] : [x0]).map((x) =>
      mark("text", { x: X(x), y: BASE + 12, "text-anchor": "middle", ...small }, String(x)),
    ),
  ];
}
const dotLook = (predicted) => (predicted ? { stroke: LINE, class: "hf-paper" } : { fill: LINE });
// the line, and dots where there is room for them or no line reaches
function lineMarks(curve, known, { X, Y }, predicted) {
  const line = { d: penPath(curve.points, X, Y), fill: "none", stroke: LINE, "stroke-width": 1.6, "stroke-linejoin": "round" },
    look = { "stroke-dasharray": predicted ? "4 3" : null, class: predicted ? "hf-predicted" : null },
    isAlone = (i) => [i - 1, i + 1].every((k) => !curve.points[k] || isMissing(curve.points[k][1]));
  const dots = curve.points.flatMap(([x, y], i) =>
    !isMissing(y) && (known.length <= 40 || isAlone(i))
      ? [mark("circle", { cx: X(x), cy: Y(y), r: 2.2, ...dotLook(predicted), "data-step": x })]
      : [],
  );
  return [mark("path", { ...line, ...look }), ...dots];
}
function hereMarks([step, value], { X, Y }, predicted) {
  const look = { ...dotLook(predicted), class: "hf-current" + (predicted ? " hf-paper" : "") };
  return [
    mark("line", { x1: X(step), x2: X(step), y1: PAD_T, y2: BASE, class: "hf-edge" }),
    mark("circle", { cx: X(step), cy: Y(value), r: 4, ...look }),
  ];
}
const nearest = (places, x) => places.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best), places[0])[1];
// the value of each main curve at a step: [name, text or null]
const valuesAt = (view, step) =>
  view.curves
    .filter((c) => c.main)
    .map((c) => {
      const p = c.points.find((q) => q[0] === step);
      return [c.name, p && !isMissing(p[1]) ? fmtValue(c.name, p[1]) : null];
    });

// ---- layout of a step's calls, a row for each role
function callsLayout(s, width, predicted) {
  const end = Math.max(...s.calls.map((c) => c.start_s + c.seconds), 0);
  if (!(end > 0)) return null;
  const rows = [...new Set(s.calls.map((c) => c.row))].sort((a, b) => a - b),
    height = rows.length * 18 + 18,
    L = 84,
    scale = (width - L) / end;
  const names = rows.map((row, i) => {
    const role = s.calls.find((c) => c.row === row).call.split(".")[0];
    return mark("text", { x: L - 6, y: i * 18 + 13, "text-anchor": "end", class: "hf-sub" }, shorten(role, 14));
  });
  const ends = [0, end].map((t) =>
    mark(
      "text",
      { x: L + t * scale, y: height - 3, "text-anchor": t ? "end" : "start", class: "hf-sub", "font-size": 9 },
      fmtSeconds(t),
    ),
  );
  const bars = s.calls.flatMap((c) => callMarks(c, L + c.start_s * scale, rows.indexOf(c.row) * 18, c.seconds * scale, predicted));
  return { width, height, marks: [...names, ...bars, ...ends] };
}
function callMarks(c, x, y, w, predicted) {
  const text = fitText(c.call.replace(/^[^.]*\./, ""), w),
    box = { x, y: y + 1, width: Math.max(1, w - 0.5), height: 16, rx: 2, "data-call": c.call },
    look = predicted ? { fill: hatched(c.color), stroke: c.color, class: "hf-predicted" } : { fill: c.color },
    still = { "pointer-events": "none" },
    bar = mark("rect", { ...box, ...look }, [mark("title", {}, `${c.call}: ${fmtSeconds(c.seconds)}`)]);
  if (!text) return [bar];
  const back = mark("rect", { x: x + 2, y: y + 4, width: text.length * 5.7 + 4, height: 11, class: "hf-paper", ...still }),
    ink = predicted ? { class: "hf-fg" } : { fill: inkOn(c.color) };
  return [bar, ...(predicted ? [back] : []), mark("text", { x: x + 4, y: y + 13, ...ink, ...still }, text)];
}

// ---- layout: words
function stateWords(view, lost, kept) {
  const live = view.live && !lost,
    asked = { pause: ", pauses after this step", stop: ", stopping" }[live && view.asked] || "",
    now = lost ? (kept ? " when the kernel ended" : ", unfinished") : `, ${view.state}`;
  return `${view.steps_done} of ${view.steps_asked} steps${now}${asked}` + (view.error ? `: ${view.error}` : "");
}
function nowWords({ call, done, total, unit }) {
  if (!call) return "";
  return call + (isMissing(done) || isMissing(total) ? "" : ` ${fmtCount(done)} of ${fmtCount(total)} ${unit || ""}`);
}
function goneWords({ saved }) {
  if (!saved)
    return `${KERNEL_GONE}This run kept no saves of its own. With session.train(..., save_every=10, folder="runs/1") the next one does, and resume="runs/1" goes on from its last.`;
  const { folder, step } = saved;
  return `${KERNEL_GONE}Its save after step ${step} is in ${folder}: run the notebook from its first cell, with session.train(..., resume=${JSON.stringify(folder)}) to go on from there.`;
}

// ---- draw
// `over` and `choose` are called with the step under the pointer
function drawCurve(view, curve, selected, host, { over, choose, leave }) {
  const size = { width: PANEL_W, height: PANEL_H, viewBox: `0 0 ${PANEL_W} ${PANEL_H}`, role: "img", class: "hf-curve" },
    last = isMissing(curve.last) ? "not measured" : fmtValue(curve.name, curve.last),
    name = { "data-curve": curve.name, "font-size": 10, "aria-label": `${curve.name}, last ${last}` };
  const svg = S("svg", { ...size, ...name }, host),
    { marks, places } = layout(curve, selected, view.predicted);
  paint(marks, svg, null);
  if (!places.length) return;
  const stepAt = (ev) => {
    const r = svg.getBoundingClientRect();
    return nearest(places, ((ev.clientX - r.left) / r.width) * PANEL_W);
  };
  svg.addEventListener("pointermove", (ev) => over(stepAt(ev), ev.clientX, ev.clientY));
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("click", (ev) => choose(stepAt(ev)));
}
function drawStep(view, s, width, host) {
  const seconds = isMissing(s.seconds) ? "" : `, ${fmtSeconds(s.seconds)}`;
  H("div", { class: "hf-title" }, host, `step ${s.step}${seconds}` + (view.predicted ? " (predicted)" : ""));
  H("div", { class: "hf-dim" }, host, `its timeline: session.trace[${s.trace_step}]`);
  const calls = callsLayout(s, width, view.predicted);
  if (calls) {
    const words = s.calls.map((c) => `${c.call} ${fmtSeconds(c.seconds)}`).join(", "),
      size = { width, height: calls.height, viewBox: `0 0 ${width} ${calls.height}`, role: "img", "aria-label": words };
    const svg = S("svg", { ...size, "font-size": 10, class: "hf-calls-bar" }, host);
    paint(calls.marks, svg, hatches(svg));
  }
  if (s.samples.length) drawSamples(s.samples, host);
  const all = H("details", {}, host);
  H("summary", {}, all, "all numbers");
  const body = H("tbody", {}, H("table", {}, all));
  for (const [name, v] of s.numbers) {
    const row = H("tr", {}, body);
    H("td", { class: "hf-left" }, row, name);
    H("td", isMissing(v) ? { class: "hf-missing" } : {}, row, isMissing(v) ? "–" : fmtValue(name, v));
  }
}
function drawSamples(samples, host) {
  const body = tableOf(host, ["prompt", "response", "score"], (i) => i < 2);
  for (const q of samples) {
    const row = H("tr", {}, body);
    for (const word of ["prompt", "response"]) {
      const text = q[word] === null ? "not there" : q[word] || "(empty)";
      H("td", { class: "hf-wrap" + (q[word] ? "" : " hf-missing"), dir: "auto" }, row, text);
    }
    H("td", isMissing(q.score) ? { class: "hf-missing" } : {}, row, isMissing(q.score) ? "–" : q.score.toFixed(3));
  }
}
function drawProgress(f) {
  const bar = H("div", { class: "hf-bar" });
  f.root.insertBefore(bar, f.host);
  const label = { role: "progressbar", "aria-label": "steps done", "aria-valuemin": 0 },
    track = H("span", { class: "hf-track", style: "width:220px", ...label }, bar),
    done = H("i", {}, track),
    words = H("span", { class: "hf-dim hf-now-text" }, bar);
  const show = (view) => {
    done.style.width = `${view.steps_asked ? (100 * view.steps_done) / view.steps_asked : 0}%`;
    track.setAttribute("aria-valuemax", view.steps_asked);
    track.setAttribute("aria-valuenow", view.steps_done);
  };
  return { words, show };
}
// what may be pressed now; drawn anew only where that changes
function buttonsOf(host, press) {
  let key = "";
  const add = (action, title) => {
    H("button", { type: "button", title, "data-action": action }, host, action).onclick = () => press(action);
  };
  return (view, lost) => {
    const going = view.live && !lost && ["running", "paused"].includes(view.state),
      wanted = going + view.state + view.background;
    if (wanted === key) return;
    key = wanted;
    host.replaceChildren();
    if (!going) return;
    if (view.state === "running") add("pause", "pause after the running step");
    if (view.state === "paused" && view.background) {
      add("resume", "go on");
      add("step", "run one more step");
    }
    add("stop", "cancel the running call and end the run");
  };
}

function render({ model, el }) {
  const f = frame(el, "dashboard", model),
    drawButtons = buttonsOf(H("span", {}, f.bar), press),
    state = H("span", { class: "hf-dim hf-state", role: "status" }, f.bar),
    progress = drawProgress(f),
    more = H("details", {}, f.below),
    chosen = H("div", { class: "hf-step" }, f.below);
  H("summary", {}, more, "all curves");
  const rest = H("div", {}, more);
  let view,
    selected = null,
    follow = true;

  // a cell that blocks cannot hear messages: there the kernel's interrupt pauses (once) and cancels (twice)
  function press(action) {
    if (view.background) {
      model.send({ action });
      return;
    }
    const kernel = model.widget_manager?.kernel;
    if (!kernel || !kernel.interrupt) {
      progress.words.textContent =
        "this notebook gives no access to its kernel: interrupt it yourself, once to pause, twice to stop";
      return;
    }
    model.send({ action }); // heard at once, or when the run is over and it means nothing
    kernel.interrupt();
    if (action === "stop")
      setTimeout(() => {
        if (view.live && view.state === "running") kernel.interrupt();
      }, 600);
  }
  function open(step) {
    selected = step;
    follow = view.steps.length && step === view.steps[view.steps.length - 1].step;
    draw();
  }
  const leave = () => f.hideTip();
  const curves = (list) => {
    const grid = H("div", { style: "display:flex;flex-wrap:wrap;gap:4px 5px" });
    const over = (step, x, y) => f.showTip(x, y, "step " + step, valuesAt(view, step), false);
    for (const c of list) drawCurve(view, c, selected, grid, { over, choose: open, leave });
    return grid;
  };
  function drawChosen() {
    const wasOpen = chosen.querySelector("details")?.open,
      s = view.steps.find((q) => q.step === selected);
    chosen.replaceChildren();
    if (s) drawStep(view, s, Math.max(340, Math.min(780, f.root.clientWidth - 16 || 780)), chosen);
    else if (selected !== null && view.steps.length) {
      const kept = `step ${selected}: its samples are kept no more; of ${view.steps[0].step} and later they are`;
      H("p", { class: "hf-dim" }, chosen, kept);
    }
    if (wasOpen && chosen.querySelector("details")) chosen.querySelector("details").open = true;
  }
  function draw() {
    view = model.get("view");
    if (follow && view.steps.length) selected = view.steps[view.steps.length - 1].step;
    f.title.textContent = view.predicted ? "train (simulated)" : "train";
    state.textContent = stateWords(view, f.lost, f.lost && model.get("kept_as"));
    state.classList.toggle("hf-bad", view.state === "failed");
    drawButtons(view, f.lost);
    progress.show(view);
    progress.words.textContent = f.lost ? "" : nowWords(view.now);
    const others = view.curves.filter((c) => !c.main),
      grid = curves(view.curves.filter((c) => c.main)),
      warned = H("div", {});
    if (!view.curves.length) H("p", { class: "hf-dim" }, grid, "no step has ended yet");
    for (const text of view.restores || []) H("p", { class: "hf-wrap" }, warned, text);
    for (const text of view.warnings) H("p", { class: "hf-bad hf-wrap" }, warned, text);
    f.host.replaceChildren(warned, grid);
    more.hidden = !others.length;
    more.ontoggle = () => {
      if (more.open) rest.replaceChildren(curves(others));
    };
    more.ontoggle();
    drawChosen();
  }

  // ---- interact
  keyboard(f.host, {
    step: (dx, dy) => {
      const at = view.steps.findIndex((s) => s.step === selected),
        next = view.steps[Math.max(0, Math.min(view.steps.length - 1, at + (dx || dy)))];
      if (next) open(next.step);
    },
    show: () => {
      const words = ([name, text]) => (text === null ? "" : `, ${name} ${text}`);
      if (selected !== null) f.say(`step ${selected}` + valuesAt(view, selected).map(words).join(""));
    },
    keys: { Escape: leave },
  });
  draw();
  f.onlost = draw;
  f.gone = () => goneWords(view);
  return redrawn({ model, f, onView: coalesced(draw) });
}
export default { render };
