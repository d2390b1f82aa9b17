// The histogram of the ratio, A > 0 above and A < 0 below the line, with what clipping leaves without gradient.
import { group, legend, mark, paint, redrawn, sample, sliderOf } from "./chart.js";
import { coalesced, fmtCount, frame, H, keyboard, shorten, titledSvg, unpack } from "./core.js";

const BLUE = "#2f7fd0",
  ORANGE = "#e0761b",
  GREY = "#8b949e";
const LEFT = 70,
  RIGHT = 20,
  HALF = 120,
  TOP = 20,
  BINS = 61;
const CSS = `
.hf-clip .hf-controls{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:center;margin:2px 0 6px}
.hf-clip label{display:inline-flex;gap:6px;align-items:center}.hf-clip input[type=range]{width:170px;accent-color:var(--hf-busy)}
.hf-clip output{min-width:36px;font-variant-numeric:tabular-nums}.hf-clip button[aria-pressed=true]{background:var(--hf-idle);
border-color:var(--hf-dim)}`;
const percent = (x) => (x === null ? "not known" : (100 * x).toFixed(2) + " %");
const f32 = Math.fround;

const digits = (x) => String(Number(x.toFixed(4)));
// unlike the diagonal hatch, which is what is predicted
const CROSS = { url: "cross" };
function crosshatch() {
  const size = { width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    lines = mark("path", { d: "M0,0H4M0,0V4", fill: "none", stroke: "var(--hf-fg)", "stroke-width": 1 });
  return mark("defs", {}, [mark("pattern", { id: { id: "cross" }, ...size }, [lines])]);
}

// ---- numbers: what each bin of the logarithm of the ratio holds, and what clipping leaves without gradient in all
function counted(view, g, low, high) {
  const top = f32(1 + high),
    bottom = f32(1 - low),
    n = { positive: 0, negative: 0, lost: 0, mass: 0 };
  const bins = Array.from({ length: BINS }, () => ({
    positive: 0,
    positiveCut: 0,
    negative: 0,
    negativeCut: 0,
    zero: 0,
    lost: 0,
  }));
  for (let i = 0; i < g.ratio.length; i++) {
    const above = f32(g.ratio[i]) > top,
      below = f32(g.ratio[i]) < bottom;
    const bin = bins[Math.max(0, Math.min(BINS - 1, Math.floor(((g.log_ratio[i] + view.span) / (2 * view.span)) * BINS)))];
    bin[above ? "positiveCut" : "positive"] += g.positive[i];
    bin[below ? "negativeCut" : "negative"] += g.negative[i];
    bin.zero += g.zero[i];
    const lost = (above ? g.positive_mass[i] : 0) + (below ? g.negative_mass[i] : 0);
    bin.lost += lost;
    n.lost += lost;
    n.mass += g.positive_mass[i] + g.negative_mass[i];
    if (above) n.positive += g.positive[i];
    if (below) n.negative += g.negative[i];
  }
  const clipped = n.positive + n.negative,
    total = view.num_tokens;
  return { bins, ...n, clipped, share: total ? clipped / total : null, mass: n.mass ? n.lost / n.mass : null };
}

// ---- layout: `look` is {low, high, logCounts, current, width}
const upOf = (b) => b.positive + b.positiveCut + b.zero;
const downOf = (b) => b.negative + b.negativeCut;
function layout(view, { bins }, look) {
  const plot = look.width - LEFT - RIGHT,
    middle = TOP + HALF,
    bottom = middle + HALF,
    scaled = (x) => (look.logCounts ? Math.log10(1 + x) : x),
    top = Math.max(...bins.map((b) => Math.max(upOf(b), downOf(b)))),
    most = Math.max(1e-9, ...bins.map((b) => scaled(Math.max(upOf(b), downOf(b))))),
    places = bins.map((_, k) => ({ left: LEFT + (k / BINS) * plot, w: Math.max(1, plot / BINS - 1) })),
    at = { X: (logRatio) => LEFT + ((logRatio + view.span) / (2 * view.span)) * plot, middle, bottom },
    heights = (count) => (scaled(count) / most) * (HALF - 6);
  const words = `ratio exp(${shorten(view.new, 30)} − ${shorten(view.old, 30)}), logarithmic; beyond the ends: in the last bars`;
  const marks = [
    crosshatch(),
    mark("rect", { x: LEFT, y: TOP, width: plot, height: 2 * HALF, class: "hf-panel" }),
    ...sideMarks(middle, top),
    ...bins.map((b, k) => binMark(b, k, places[k], middle, heights, k === look.current)),
    mark("line", { x1: LEFT, x2: LEFT + plot, y1: middle, y2: middle, class: "hf-edge" }),
    ...tickMarks(view, at),
    ...boundMarks(view, look, at),
    mark("text", { x: LEFT + plot / 2, y: bottom + 32, "text-anchor": "middle", class: "hf-sub" }, words),
  ];
  return { width: look.width, height: bottom + 44, marks, places };
}
function sideMarks(middle, top) {
  const end = (y, more) => ({ x: LEFT - 8, y, "text-anchor": "end", ...more }),
    bold = { "font-weight": 600, class: "hf-fg" };
  return [
    mark("text", end(middle - HALF / 2 + 4, bold), "A > 0"),
    mark("text", end(middle + HALF / 2 + 4, bold), "A < 0"),
    mark("text", end(TOP + 10, { class: "hf-sub", "font-size": 9.5 }), `${top} token${top === 1 ? "" : "s"}`),
  ];
}
// above the line what is pushed up, below it what is pushed down; each stack is as high as its sum, its parts in proportion
function binMark(b, k, { left, w }, middle, heights, isCurrent) {
  const up = [
      [b.positive, BLUE, false, "hf-positive"],
      [b.zero, GREY, false, "hf-zero"],
      [b.positiveCut, BLUE, true, "hf-positive hf-clipped"],
    ],
    down = [
      [b.negative, ORANGE, false, "hf-negative"],
      [b.negativeCut, ORANGE, true, "hf-negative hf-clipped"],
    ],
    marks = [...stackMarks(-1, up, left, w, middle, heights), ...stackMarks(1, down, left, w, middle, heights)],
    ring = { x: left, y: TOP, width: w + 1, height: 2 * HALF, fill: "none", class: "hf-current" };
  if (isCurrent) marks.push(mark("rect", ring));
  return group({ class: "hf-mark hf-bin", "data-bin": k }, marks);
}
function stackMarks(sign, parts, left, width, middle, heights) {
  const sum = parts.reduce((s, p) => s + p[0], 0),
    all = heights(sum),
    marks = [];
  let at = 0;
  for (const [c, color, cut, name] of parts) {
    if (!c) continue;
    const height = (all * c) / sum,
      box = { x: left + 0.5, y: sign < 0 ? middle - at - height : middle + at, width, height },
      look = { fill: color, "fill-opacity": cut ? 0.25 : null, stroke: cut ? color : null };
    marks.push(mark("rect", { ...box, ...look, "data-count": c, class: name }));
    if (cut) marks.push(mark("rect", { ...box, fill: CROSS }));
    at += height;
  }
  return marks;
}
function tickMarks(view, { X, bottom }) {
  const drawn = [];
  for (const t of [1, 0.5, 2, 0.2, 5, 0.1, 10, 0.05, 20, 0.8, 1.25, 0.9, 1.1]) {
    const x = X(Math.log(t));
    if (Math.abs(Math.log(t)) <= view.span && !drawn.some((d) => Math.abs(d[0] - x) < 30)) drawn.push([x, t]);
  }
  return drawn.map(([x, t]) =>
    mark("text", { x, y: bottom + 14, "text-anchor": "middle", class: "hf-sub", "font-size": 10 }, digits(t)),
  );
}
function boundMarks(view, { low, high }, { X, bottom }) {
  const bounds = [
    [1 - low, "end", -4],
    [1 + high, "start", 4],
  ];
  return bounds
    .filter(([bound]) => !(Math.abs(Math.log(bound)) > view.span))
    .flatMap(([bound, side, away]) => {
      const x = X(Math.log(bound)),
        line = { x1: x, x2: x, y1: TOP - 4, y2: bottom, stroke: "var(--hf-mark)", "stroke-dasharray": "4 3", class: "hf-bound" };
      return [mark("line", line), mark("text", { x: x + away, y: TOP - 6, "text-anchor": side, class: "hf-fg" }, digits(bound))];
    });
}
function legendOf(g) {
  return [
    ["A > 0: pushed up", [sample({ fill: BLUE })]],
    ["A < 0: pushed down", [sample({ fill: ORANGE })]],
    ...(g.zero.some((z) => z) ? [["A = 0", [sample({ fill: GREY })]]] : []),
    ["clipped: zero gradient", [sample({ fill: "none", stroke: GREY }), crosshatch(), sample({ fill: CROSS })]],
  ];
}
function sumWords(view, sums, { low, high }) {
  const total = view.num_tokens,
    missing = view.num_missing ? `; ${view.num_missing} tokens without a number are not counted` : "";
  if (!total) return "no token has a ratio";
  return (
    `${sums.clipped} of ${total} tokens (${percent(sums.share)}) have zero gradient: ` +
    `${sums.positive} with A > 0 above ${digits(1 + high)}, ${sums.negative} with A < 0 below ${digits(1 - low)}; ` +
    `they hold ${percent(sums.mass)} of all |A|${missing}`
  );
}
function tipOf(view, b, k) {
  const at = (i) => digits(Math.exp(-view.span + (2 * view.span * i) / BINS)),
    rows = [
      ["tokens", fmtCount(upOf(b) + downOf(b))],
      ["A > 0", `${b.positive} + ${b.positiveCut} clipped`],
      ["A < 0", `${b.negative} + ${b.negativeCut} clipped`],
      ...(b.zero ? [["A = 0", String(b.zero)]] : []),
      ["clipped |A|", fmtCount(b.lost)],
    ];
  return { heading: `ratio ${k ? at(k) : "below " + at(1)}${k && k < BINS - 1 ? " to " + at(k + 1) : k ? " and more" : ""}`, rows };
}

// ---- draw
function drawBins(view, { width, height, marks }, host) {
  const svg = titledSvg(view, width, height);
  paint(marks, svg, null);
  host.replaceChildren(svg);
}
function drawBelow(view, g, below) {
  below.replaceChildren();
  const words = "outside the bounds but solid: the loss moves it back inside",
    dim = (text, more) => H("div", { class: "hf-dim", ...more }, below, text);
  H("span", {}, legend(below, legendOf(g)), words);
  if (view.merged) dim(`${view.num_tokens} tokens, merged into ${g.ratio.length} groups; exact at every step of the slider`);
  dim("← → bars · Esc", { "data-paper": "no" });
}
// the sliders and buttons of a view, which change `look`; returns what shows where the sliders are
function drawControls(view, look, controls, request) {
  controls.replaceChildren();
  const slider = (name, label, max, keys) =>
      sliderOf(controls, name, label, { min: 0.01, max, step: 0.01 }, (x) => {
        for (const key of keys) look[key] = x;
        request();
      }),
    showLow = slider("clip", view.linked ? "clip ε" : "clip ε below", 0.99, view.linked ? ["low", "high"] : ["low"]),
    showHigh = view.linked ? null : slider("clip-high", "above", Math.max(2, view.high), ["high"]);
  const reset = { type: "button", class: "hf-reset", title: "back to the clip given" };
  H("button", reset, controls, "reset").onclick = () => {
    Object.assign(look, { low: view.low, high: view.high });
    request();
  };
  const pressed = { "aria-pressed": String(look.logCounts), title: "logarithmic counts" },
    log = H("button", { type: "button", class: "hf-log", ...pressed }, controls, "log counts");
  log.onclick = () => {
    look.logCounts = !look.logCounts;
    log.setAttribute("aria-pressed", String(look.logCounts));
    request();
  };
  return () => {
    showLow(look.low, 2);
    if (showHigh) showHigh(look.high, 2);
  };
}

function render({ model, el }) {
  const f = frame(el, "clip");
  H("style", {}, f.root, CSS);
  const controls = H("div", { class: "hf-controls" }),
    words = H("div", { class: "hf-num hf-words", role: "status" });
  for (const e of [controls, words]) f.root.insertBefore(e, f.host);
  const look = { low: 0, high: 0, logCounts: false, current: -1, width: 980 },
    wide = () => Math.max(480, Math.min(1180, f.root.clientWidth - 16)),
    request = coalesced(draw);
  let view, g, sums, scene, showSliders;

  function take() {
    const first = view === undefined;
    view = model.get("view");
    g = {};
    for (const k in view.groups) g[k] = unpack(view.groups[k]);
    g.ratio = g.log_ratio.map((x) => Math.exp(x));
    if (first) Object.assign(look, { low: view.low, high: view.high });
    showSliders = drawControls(view, look, controls, request);
  }
  function draw() {
    look.width = wide();
    f.title.textContent = view.title;
    showSliders();
    sums = counted(view, g, look.low, look.high);
    const { clipped, positive, negative, share, mass } = sums;
    Object.assign(words.dataset, { clipped, positive, negative, share: share ?? "", mass: mass ?? "" });
    words.textContent = sumWords(view, sums, look);
    scene = layout(view, sums, look);
    drawBins(view, scene, f.host);
    drawBelow(view, g, f.below);
  }

  // ---- interact
  function point(k, x, y, spoken) {
    const { heading, rows } = tipOf(view, sums.bins[k], k);
    f.showTip(x, y, heading, rows, spoken);
  }
  f.host.addEventListener("pointermove", (ev) => {
    const left = ev.clientX - f.host.getBoundingClientRect().left,
      k = scene.places.findIndex((b) => left >= b.left && left < b.left + b.w + 1);
    if (k >= 0) point(k, ev.clientX, ev.clientY, false);
    else f.hideTip();
  });
  f.host.addEventListener("pointerleave", () => f.hideTip());
  const clear = () => {
    look.current = -1;
    f.hideTip();
    draw();
  };
  keyboard(f.host, {
    step: (dx) => {
      look.current = look.current < 0 ? Math.floor(BINS / 2) : Math.max(0, Math.min(BINS - 1, look.current + dx));
      draw();
    },
    show: () => {
      const r = f.host.getBoundingClientRect();
      point(look.current, r.left + scene.places[look.current].left, r.top + TOP + 2 * HALF, true);
    },
    keys: { Escape: clear },
  });
  f.host.addEventListener("blur", () => f.hideTip());
  take();
  draw();
  const onView = () => {
    take();
    request();
  };
  return redrawn({ model, f, onView, onResize: () => Math.abs(wide() - look.width) > 2 && request() });
}
export default { render };
