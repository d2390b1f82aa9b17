// When what ran: one lane of calls per role, one lane per device, sub-spans nested, idle shaded, phases as bands.
import { hatched, legend, mark, paint, planned, redrawn, roomOf, sample, tableOf } from "./chart.js";
import {
  alpha,
  coalesced,
  fitText,
  fmtBytes,
  fmtCount,
  fmtSeconds,
  fmtShare,
  frame,
  freshId,
  H,
  hatches,
  inkOn,
  isMissing,
  keyboard,
  S,
  shade,
  stripes,
  titledSvg,
} from "./core.js";

const [ROW, LANE, SUB, DEPTH, START, DURATION, NAME, ROLE, METHOD, LABEL, FLAGS, CALL, RANK, ATTRS] = Array(14).keys();
const PREDICTED = 1,
  RUNNING = 2,
  PARENT = 4;
const DRAIN = "#2a78a8",
  GREY = "#77808a";
const CANVAS_ABOVE = 3000,
  MANY_GAPS = 60,
  LEFT = 150,
  RIGHT = 64,
  TOP = 24;

// ---- time: `now` is where marks without an end are drawn to
const endOf = (m, now) => (m[DURATION] === null ? Math.max(now, m[START]) : m[START] + m[DURATION]);
function timesOf(view, isOpen, now) {
  const running = view.live && isOpen,
    total = Math.max(view.duration_s, running ? now : 0, 1e-6);
  return { now, running, total, whole: [0, total * (isOpen ? 1.03 : 1)] }; // room for the open ends
}
// the part of all that is zoomed to, or null for all of it
function clamped(a, b, all) {
  const span = Math.min(b - a, all);
  if (span >= all * 0.999) return null;
  const from = Math.max(0, Math.min(a, all - span));
  return [from, from + Math.max(span, all * 1e-6)];
}

// ---- layout: `look` is {isOpen, now, zoomed, width}
function layout(view, look) {
  const at = placesOf(view, look);
  return { at, height: TOP + view.bands_height + view.height + 18, spans: spansOf(view, at), ...sceneryOf(view, at) };
}
function placesOf(view, { isOpen, now, zoomed, width }) {
  const times = timesOf(view, isOpen, now),
    [a, b] = zoomed || times.whole,
    plot = width - LEFT - RIGHT,
    scale = plot / (b - a),
    laneTop = TOP + view.bands_height;
  return { ...times, a, b, width, plot, laneTop, bottom: laneTop + view.height, X: (t) => LEFT + (t - a) * scale };
}
// the boxes of the marks in view, and where their texts go
function spansOf(view, at) {
  const colors = [],
    out = [];
  const colorOf = (m) => {
    const key = m[NAME] * view.roles.length + m[ROLE],
      name = view.names[m[NAME]];
    colors[key] ??= shade(name.color || view.roles[m[ROLE]].color, name.tone);
    return colors[key];
  };
  for (let i = 0; i < view.marks.length; i++) {
    const m = view.marks[i],
      end = endOf(m, at.now);
    if (m[START] > at.b || end < at.a) continue;
    const lane = view.lanes[m[LANE]],
      inset = lane.row_height >= 30 ? 13 : lane.row_height >= 16 ? 4 : 1,
      pad = lane.row_height >= 16 ? 2 : 0.5;
    const y = at.laneTop + lane.y + m[SUB] * lane.row_height + pad + m[DEPTH] * inset,
      h = Math.max(1.5, lane.row_height - 2 * pad - m[DEPTH] * (inset + 1)),
      x = Math.max(at.X(m[START]), LEFT - 4),
      x1 = Math.min(at.X(end), LEFT + at.plot + 4);
    const text = h >= 11 ? fitText(view.labels[m[LABEL]], x1 - Math.max(x, LEFT)) : "",
      ty = m[FLAGS] & PARENT && h > 20 ? y + 10 : y + h / 2 + 3.5;
    out.push({ i, m, x, y, w: Math.max(1, x1 - x), h, color: colorOf(m), text, ty });
  }
  return out;
}
// of the calls, without those that end where, to the eye, the one drawn before them in their row ends
function thinned(spans, at) {
  const calls = spans.filter((s) => s.m[DEPTH] === 0),
    rowOf = (s) => `${s.m[LANE]} ${s.m[SUB]}`;
  const least = Math.max(0.8, (new Set(calls.map(rowOf)).size * at.plot) / CANVAS_ABOVE),
    ends = new Map();
  return calls.filter((s) => {
    const end = Math.min(at.X(endOf(s.m, at.now)), LEFT + at.plot);
    if (end - (ends.get(rowOf(s)) ?? -Infinity) < least) return false;
    ends.set(rowOf(s), end);
    return true;
  });
}
function ticks({ a, b, plot }) {
  const raw = (b - a) / Math.max(2, plot / 110),
    p = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((k) => k * p).find((s) => s >= raw),
    out = [];
  for (let k = Math.ceil(a / size - 1e-9); k * size <= b + 1e-12; k++) out.push(k * size);
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(size) + 1e-9)));
  return out.map((t) => [t, t.toFixed(digits) + " s"]);
}

// what stands behind the spans, in SVG or on a canvas alike: `inner` is cut at the plot's ends, `outer` is not
function sceneryOf(view, at) {
  const { X, plot, laneTop, bottom } = at,
    panels = view.lanes.map((lane) =>
      mark("rect", { x: LEFT, y: laneTop + lane.y, width: plot, height: lane.height, class: "hf-panel" }),
    );
  const inner = view.lanes.flatMap((lane) => idleMarks(lane, at)),
    outer = view.lanes.flatMap((lane) => laneWords(lane, at));
  for (const p of view.phases) inner.push(...phaseMarks(view, p, at));
  for (const d of view.drains) {
    inner.push(...drainMarks(view, d, at));
    const top = laneTop + view.lanes[d.lane].y + 2;
    outer.push(mark("text", { x: at.width - RIGHT + 6, y: top + 12, class: "hf-sub", "font-size": 10.5 }, "most " + d.most));
  }
  for (const [t, text] of ticks(at)) {
    const x = X(t);
    inner.push(mark("line", { x1: x, x2: x, y1: laneTop, y2: bottom, class: "hf-grid" }));
    outer.push(mark("text", { x, y: 14, "text-anchor": "middle", "font-size": 10, class: "hf-sub" }, text));
  }
  for (const s of view.steps.length > 1 ? view.steps : []) {
    const x = X(s.start_s);
    inner.push(mark("line", { x1: x, x2: x, y1: TOP - 4, y2: bottom, class: "hf-edge", "stroke-width": 1.2 }));
    inner.push(mark("text", { x: x + 3, y: bottom + 12, "font-size": 10, class: "hf-sub" }, "step " + s.step));
  }
  const moment = { x1: X(at.now), x2: X(at.now), y1: TOP, y2: bottom, stroke: "#0a66c2", "stroke-width": 1.2 };
  if (at.running) inner.push(mark("line", { ...moment, "stroke-dasharray": "2 2", class: "hf-now" }));
  return { panels, inner, outer };
}
function laneWords(lane, at) {
  const y = at.laneTop + lane.y,
    middle = y + lane.height / 2 + 4,
    marks = [];
  if (lane.case)
    marks.push(mark("text", { x: 2, y: y - 6, "font-size": 12, "font-weight": 600, class: "hf-fg hf-case" }, lane.case));
  const pool = { x: LEFT, y: y - 4, "font-size": 10, "font-weight": 600, class: "hf-sub hf-pool" };
  if (lane.pool) marks.push(mark("text", pool, "pool " + lane.pool));
  if (!lane.show_label) return marks;
  const size = lane.height < 14 ? 9 : lane.label.length > 22 ? 9.5 : 11,
    label = { x: LEFT - 8, y: middle, "text-anchor": "end", class: "hf-fg", "font-size": size };
  marks.push(mark("text", { ...label, "font-style": lane.predicted ? "italic" : null }, lane.label));
  const busy = { x: at.width - RIGHT + 6, y: middle, class: "hf-sub", "font-size": lane.height < 14 ? 9 : 10.5 };
  if (lane.busy_share !== null) marks.push(mark("text", busy, fmtShare(lane.busy_share) + " busy"));
  return marks;
}
function idleMarks(lane, { X, a, b, laneTop }) {
  const y = laneTop + lane.y,
    idle = lane.idle.filter(([i0, i1]) => i1 >= a && i0 <= b),
    look = { class: "hf-idlefill hf-idle" };
  if (idle.length <= MANY_GAPS)
    return idle.map(([i0, i1]) =>
      mark("rect", { x: X(i0), y: y + 1, width: Math.max(0, X(i1) - X(i0)), height: lane.height - 2, ...look }),
    );
  const box = ([i0, i1]) => `M${X(i0).toFixed(1)},${y + 1}H${X(i1).toFixed(1)}V${y + lane.height - 1}H${X(i0).toFixed(1)}Z`;
  return [mark("path", { d: idle.map(box).join(""), ...look })];
}
function phaseMarks(view, p, { X, now, plot, laneTop }) {
  const x = X(p.start_s),
    x1 = X(p.end_s === null ? now : p.end_s),
    width = Math.max(1, x1 - x - 1),
    color = view.phase_colors[p.phase] || GREY,
    y = TOP + p.row * 16,
    from = Math.max(x, LEFT) + 4;
  return [
    mark("rect", { x, y: laneTop, width: Math.max(1, x1 - x), height: view.height, fill: alpha(color, 0.1) }),
    mark("rect", { x, y, width, height: 14, rx: 2, fill: alpha(color, 0.22), class: "hf-phase", "data-phase": p.phase }),
    mark("rect", { x, y: y + 12, width, height: 2, fill: color }),
    mark("text", { x: from, y: y + 10, "font-size": 10, class: "hf-fg" }, fitText(p.phase, Math.min(x1, LEFT + plot) - from + 4)),
  ];
}
// sequences running as an area of steps, the share of the cache in use dashed
function drainMarks(view, d, { X, laneTop }) {
  const lane = view.lanes[d.lane],
    top = laneTop + lane.y + 2,
    bottom = top + lane.height - 3,
    room = bottom - top;
  return d.runs.flatMap((run) => {
    let area = `M${X(run[0][0])},${bottom}`,
      usage = "";
    run.forEach(([t, n, , kv], i) => {
      const y = bottom - (room * n) / Math.max(1, d.most),
        x = X(t);
      area += `L${x},${y}L${i + 1 < run.length ? X(run[i + 1][0]) : x},${y}`;
      usage += `${i ? "L" : "M"}${x},${bottom - room * Math.min(1, kv)}`;
    });
    const end = `L${X(run[run.length - 1][0])},${bottom}Z`,
      look = { fill: alpha(DRAIN, 0.45), stroke: DRAIN, class: "hf-drain", "data-device": d.device };
    return [
      mark("path", { d: area + end, ...look }),
      mark("path", { d: usage, fill: "none", class: "hf-edge", "stroke-dasharray": "3 2" }),
    ];
  });
}
// a call on the critical path, where others are not, has a line below it
const isDecisive = (view, m, path) => view.decisive && view.lanes[m[LANE]].kind === "calls" && path.calls.has(m[CALL]);
// with the critical path shown: its calls and what ran for them keep their colour, the rest fades
const pathClass = (m, path) => (!path.shown ? "" : path.calls.has(m[CALL]) ? " hf-critical" : " hf-faded");
// `path` is {calls, shown}
function spanMarks(view, s, current, path) {
  const flags = s.m[FLAGS],
    predicted = flags & PREDICTED,
    plain = predicted || flags & PARENT,
    names = (predicted ? " hf-predicted" : "") + (flags & RUNNING ? " hf-running" : "") + (s.i === current ? " hf-current" : "");
  const box = { x: s.x, y: s.y, width: s.w, height: s.h, rx: s.w > 4 ? 2 : 0, "data-row": s.m[ROW], "data-mark": s.i };
  const marks = [
    mark("rect", {
      ...box,
      class: "hf-mark hf-span" + names + pathClass(s.m, path),
      fill: flags & PARENT ? alpha(s.color, predicted ? 0.08 : 0.3) : predicted ? hatched(s.color) : s.color,
      stroke: plain ? s.color : null,
      "stroke-dasharray": flags & RUNNING ? "3 2" : null,
      "fill-opacity": flags & RUNNING && !(flags & PARENT) ? 0.72 : null,
    }),
  ];
  const still = { "pointer-events": "none" },
    line = { x: s.x, y: s.y + s.h - 3, width: s.w, height: 3, class: "hf-on-path", fill: "var(--hf-mark)", ...still };
  if (isDecisive(view, s.m, path)) marks.push(mark("rect", line));
  if (flags & RUNNING) marks.push(mark("path", { d: `M${s.x + s.w},${s.y} l5,${s.h / 2} l-5,${s.h / 2} z`, fill: s.color }));
  if (!s.text) return marks;
  const x = Math.max(s.x, LEFT) + 4,
    back = { x: x - 2, y: s.ty - 9, width: s.text.length * 5.7 + 4, height: 12, class: "hf-paper", ...still };
  if (predicted && !(flags & PARENT)) marks.push(mark("rect", back));
  const ink = plain ? { class: "hf-fg" } : { fill: inkOn(s.color) };
  marks.push(mark("text", { x, y: s.ty, "font-size": 10, ...still, ...ink }, s.text));
  return marks;
}

// ---- layout: legend and tables
function legendOf(view) {
  const box = (more) => sample({ rx: 2, ...more }),
    entries = view.roles.map((r) => [r.name, [box({ fill: r.color })]]);
  for (const n of view.names) if (n.color) entries.push([`${n.name} (${n.note})`, [box({ fill: shade(n.color, n.tone) })]]);
  for (const n of view.names) if (!n.color && n.tone) entries.push([n.name, [box({ fill: shade(GREY, n.tone) })]]);
  for (const [p, color] of Object.entries(view.phase_colors))
    if (view.phases.some((q) => q.phase === p))
      entries.push([p, [box({ fill: alpha(color, 0.22) }), mark("rect", { x: 1, y: 8, width: 14, height: 2, fill: color })]]);
  const unended = box({ fill: GREY, "fill-opacity": 0.72, stroke: GREY, "stroke-dasharray": "3 2", width: 9 });
  entries.push(
    ["measured", [box({ fill: GREY })]],
    ["predicted", [planned(GREY, { rx: 2 })]],
    ["running", [unended, mark("path", { d: "M10,1 l5,4.5 l-5,4.5 z", fill: GREY })]],
    ["idle", [box({ class: "hf-idlefill" })]],
  );
  const under = mark("rect", { x: 1, y: 7, width: 14, height: 3, fill: "var(--hf-mark)" });
  if (view.decisive) entries.push(["on the critical path", [box({ fill: GREY }), under]]);
  const drained = "sequences running (dashed: share of the KV cache in use)";
  if (view.drains.length) entries.push([drained, [box({ fill: alpha(DRAIN, 0.45), stroke: DRAIN })]]);
  return entries;
}
const predictedName = (name, predicted) => name + (predicted ? " (predicted)" : "");
// [heads, rows]; a cell is a text, null where it is not measured, or {share}, which is drawn as a bar
function tablesOf(view) {
  return [
    [
      ["call", "time", "of the time", "cpu", "tokens", "tokens/s", "bytes"],
      view.breakdown.map((r) => [
        predictedName(r.call + (r.num_calls > 1 ? ` × ${r.num_calls}` : ""), r.predicted),
        fmtSeconds(r.seconds),
        { share: r.share, color: r.color, predicted: r.predicted },
        fmtSeconds(r.cpu_s),
        fmtCount(r.tokens),
        isMissing(r.tokens_per_s) ? null : fmtCount(Math.round(r.tokens_per_s)),
        fmtBytes(r.bytes),
      ]),
    ],
    [
      ["on the devices", "mean time", "of the time"],
      view.activities.map((r) => [
        predictedName(r.name, r.predicted),
        fmtSeconds(r.seconds),
        { share: r.share, predicted: r.predicted },
      ]),
    ],
    [
      ["stage", "micro-batches", "forward", "backward", "waiting", "bubble"],
      view.pipelines.map((r) => [
        `${r.call}, device ${r.device}`,
        fmtCount(r.micro_batches),
        fmtSeconds(r.forward_s),
        fmtSeconds(r.backward_s),
        fmtSeconds(r.wait_s),
        { share: r.bubble },
      ]),
    ],
    [
      ["trace", "time", "devices", "device-seconds", "of them idle", "idle"],
      view.cases.map((r) => [
        predictedName(r.title, r.predicted),
        fmtSeconds(r.seconds),
        fmtCount(r.num_devices),
        fmtSeconds(r.device_s),
        fmtSeconds(r.idle_device_s),
        { share: r.idle_share, predicted: r.predicted },
      ]),
    ],
    [["pools at work", "time", "of the time"], view.overlaps.map((r) => [r.pools, fmtSeconds(r.seconds), { share: r.share }])],
  ];
}
// what a mark's tip says
function describe(view, m, now) {
  const a = m[ATTRS] || {},
    seconds = m[DURATION],
    lane = view.lanes[m[LANE]],
    rest = { ...a };
  for (const k of ["tokens", "bytes", "cpu_s", "rss_bytes", "allocated_bytes", "reserved_bytes"]) delete rest[k];
  const unended = () => `${fmtSeconds(endOf(m, now) - m[START])} so far, ${view.live ? "running" : "no end recorded"}`;
  return [
    ["row", String(m[ROW])],
    ["role", view.roles[m[ROLE]].name],
    ["method", view.methods[m[METHOD]] || "–"],
    ...(lane.device === null ? [] : [["device", String(lane.device) + (m[RANK] === null ? "" : `, rank ${m[RANK]}`)]]),
    ["start", fmtSeconds(m[START])],
    ["wall time", seconds === null ? unended() : fmtSeconds(seconds)],
    ["cpu time", fmtSeconds(a.cpu_s)],
    ["tokens", fmtCount(a.tokens)],
    ["tokens/s", isMissing(a.tokens) || !seconds ? null : fmtCount(Math.round(a.tokens / seconds))],
    ["bytes", fmtBytes(a.bytes)],
    ...[
      ["resident in host memory", "rss_bytes"],
      ["allocated on the GPU", "allocated_bytes"],
      ["reserved on the GPU", "reserved_bytes"],
    ]
      .filter(([, k]) => !isMissing(a[k]))
      .map(([label, k]) => [label, fmtBytes(a[k])]),
    ...Object.keys(rest).map((k) => [
      k,
      k.endsWith("_bytes") ? fmtBytes(rest[k]) : k.endsWith("_s") ? fmtSeconds(rest[k]) : fmtCount(rest[k]),
    ]),
  ];
}

// ---- which mark is where
// the deepest one under the pointer
function spanAt(spans, x, y) {
  let best = null;
  for (const s of spans)
    if (x >= s.x - 1 && x <= s.x + s.w + 1 && y >= s.y && y <= s.y + s.h && (!best || s.m[DEPTH] >= best.m[DEPTH])) best = s;
  return best;
}
// the last point of a drain at or before the pointer
function drainAt(view, { a, b, plot, laneTop }, x, y) {
  const t = a + ((x - LEFT) / plot) * (b - a);
  const d = view.drains.find((q) => {
    const lane = view.lanes[q.lane];
    return y >= laneTop + lane.y && y <= laneTop + lane.y + lane.height;
  });
  const run = d?.runs.find((r) => r[0][0] <= t && t <= r[r.length - 1][0]);
  return run && [d, run.filter((p) => p[0] <= t).pop()];
}
// the mark that an arrow key comes to: the next in its lane, or the nearest in time of the next lane that has any
function stepped(view, current, dx, dy) {
  const marks = view.marks;
  if (!marks.length) return current;
  if (current < 0) return 0;
  const here = marks[current],
    order = (i, j) => marks[i][START] - marks[j][START] || marks[i][DEPTH] - marks[j][DEPTH];
  const inLane = (lane) =>
    marks
      .map((_, i) => i)
      .filter((i) => marks[i][LANE] === lane)
      .sort(order);
  if (dx) {
    const list = inLane(here[LANE]);
    return list[list.indexOf(current) + dx] ?? current;
  }
  const away = (i) => Math.abs(marks[i][START] - here[START]);
  for (let lane = here[LANE] + dy; dy && lane >= 0 && lane < view.lanes.length; lane += dy) {
    const list = inLane(lane);
    if (list.length) return list.reduce((best, i) => (away(i) < away(best) ? i : best), list[0]);
  }
  return current;
}

// ---- draw
function drawScenery(svg, { at, panels, inner, outer }) {
  const clip = freshId();
  S("rect", { x: LEFT, y: 0, width: at.plot, height: at.bottom + 22 }, S("clipPath", { id: clip }, svg));
  paint(panels, svg, null);
  const host = S("g", { "clip-path": `url(#${clip})` }, svg);
  paint(outer, svg, null);
  paint(inner, host, null);
  return host;
}
function drawCanvas(canvas, view, { at, height, spans }, { current, path }, css) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = at.width * ratio;
  canvas.height = height * ratio;
  canvas.style.cssText = `position:absolute;left:0;top:0;width:${at.width}px;height:${height}px;pointer-events:none`;
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  c.beginPath();
  c.rect(LEFT, 0, at.plot, height);
  c.clip();
  c.font = "10px system-ui, sans-serif";
  for (const s of spans) {
    const flags = s.m[FLAGS];
    c.globalAlpha = pathClass(s.m, path) === " hf-faded" ? 0.12 : flags & PREDICTED ? 0.25 : flags & PARENT ? 0.3 : 1;
    c.fillStyle = s.color;
    c.fillRect(s.x, s.y, s.w, s.h);
    c.globalAlpha = 1;
    if (flags & (PREDICTED | PARENT) && s.w > 2) {
      c.strokeStyle = s.color;
      c.strokeRect(s.x + 0.5, s.y + 0.5, s.w - 1, s.h - 1);
    }
    if (isDecisive(view, s.m, path)) {
      c.fillStyle = css.getPropertyValue("--hf-mark");
      c.fillRect(s.x, s.y + s.h - 3, s.w, 3);
    }
    if (s.text) {
      c.fillStyle = flags & (PREDICTED | PARENT) ? css.getPropertyValue("--hf-fg") : inkOn(s.color);
      c.fillText(s.text, Math.max(s.x, LEFT) + 4, s.ty);
    }
  }
  const here = spans.find((s) => s.i === current);
  if (here) {
    c.strokeStyle = css.getPropertyValue("--hf-mark");
    c.lineWidth = 2;
    c.strokeRect(here.x, here.y, here.w, here.h);
  }
}
function shareBar(row, { share, color = "var(--hf-dim)", predicted }) {
  const td = H("td", {}, row),
    track = H("span", { class: "hf-track", style: "width:70px;margin-right:6px" }, td),
    paintOf = predicted ? stripes(color) : color;
  H("i", { style: `width:${Math.min(100, 100 * (share || 0))}%;background:${paintOf}` }, track);
  H("span", {}, td, fmtShare(share) || "–");
}
function drawTables(view, host) {
  host.replaceChildren();
  legend(host, legendOf(view));
  const details = H("details", { open: "" }, host);
  H("summary", {}, details, "Share of the time");
  const grid = H("div", { style: "display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 36px" }, details);
  for (const [heads, rows] of tablesOf(view)) {
    const body = rows.length ? tableOf(grid, heads) : null;
    for (const cells of rows) {
      const row = H("tr", {}, body);
      cells.forEach((c, i) => {
        if (c && c.share !== undefined) shareBar(row, c);
        else {
          const look = {
            class: (i ? "" : "hf-left") + (c === null ? " hf-missing" : ""),
            title: c === null ? "not measured" : null,
          };
          H("td", look, row, c === null ? "–" : c);
        }
      });
    }
  }
}
// the bar above the picture; `act` is what its buttons do
function drawBar(f, act) {
  const quiet = { "data-lm-suppress-shortcuts": "true" };
  f.button("fit", "show the whole trace", act.fit).classList.add("hf-fit");
  f.button("+", "zoom in", () => act.zoom(0.7));
  f.button("−", "zoom out", () => act.zoom(1 / 0.7));
  const path = f.button("critical path", "mark the calls that decided how long it took", act.path),
    pipe = f.button("pipeline", "zoom to the next call that ran through pipeline stages", act.pipe),
    steps = H("select", { "aria-label": "step", ...quiet }, f.bar);
  steps.onchange = () => act.step(steps.selectedIndex - 1);
  const info = H("span", { class: "hf-dim hf-info" }, f.bar),
    words = H("div", { class: "hf-dim hf-path-words" }, f.below);
  return { path, pipe, steps, info, words };
}
function updateBar(bar, view, { at, spans }, { zoomed, path }) {
  bar.info.textContent =
    `${view.marks.length} span${view.marks.length === 1 ? "" : "s"}` +
    (spans.length < view.marks.length ? `, ${spans.length} in view` : "") +
    `, ${fmtSeconds(at.b - at.a)}` +
    (zoomed ? ` of ${fmtSeconds(at.total)}` : "") +
    (at.running ? ", running" : "");
  bar.path.hidden = !view.decisive;
  bar.words.textContent = view.critical_words;
  bar.path.setAttribute("aria-pressed", String(path.shown));
  bar.pipe.hidden = !view.pipelines.length;
  const words = view.steps.length > 1 ? ["all steps", ...view.steps.map((s) => "step " + s.step)] : [];
  bar.steps.hidden = !words.length;
  if (!words.length || bar.steps.options.length === words.length) return;
  bar.steps.replaceChildren();
  for (const w of words) H("option", {}, bar.steps, w);
}

function render({ model, el }) {
  const f = frame(el, "timeline", model),
    picture = f.host,
    still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let view,
    arrived,
    isOpen = false, // whether a mark has no end yet
    canvas = null,
    scene = { spans: [] },
    drawnAt = 0,
    lastTables = "",
    pipe = 0;
  const look = { width: 900, zoomed: null, current: -1, path: { calls: new Set(), shown: false } };

  const now = () => view.now_s + (view.live && !still ? Math.min(5, (performance.now() - arrived) / 1000) : 0);
  const places = () => placesOf(view, { ...look, isOpen, now: now() });
  const request = coalesced(draw);
  // shows what is between two seconds
  function zoomTo(a, b) {
    look.zoomed = clamped(a, b, places().total);
    request();
  }
  function zoom(factor, at) {
    const { a, b } = places(),
      c = at === undefined ? (a + b) / 2 : at;
    zoomTo(c - (c - a) * factor, c + (b - c) * factor);
  }
  function fit() {
    look.zoomed = null;
    request();
  }
  const bar = drawBar(f, {
    fit,
    zoom,
    path() {
      look.path.shown = !look.path.shown;
      request();
    },
    pipe() {
      const calls = [...new Map(view.pipelines.map((r) => [r.call_id, 0])).keys()];
      const rows = view.pipelines.filter((r) => r.call_id === calls[pipe++ % calls.length]);
      zoomTo(Math.min(...rows.map((r) => r.start_s)), Math.max(...rows.map((r) => r.end_s)));
    },
    step(k) {
      const starts = view.steps.map((s) => s.start_s);
      if (k < 0) fit();
      else zoomTo(starts[k], k + 1 < starts.length ? starts[k + 1] : places().total);
    },
  });
  const breakdown = H("div", {}, f.below);

  function draw() {
    if (!f.root.isConnected && drawnAt) return;
    drawnAt = performance.now();
    look.width = roomOf(f, 520, 1180);
    f.title.textContent = view.title;
    scene = layout(view, { ...look, isOpen, now: now() });
    const svg = titledSvg(view, look.width, scene.height, { style: "touch-action:none" }),
      inner = drawScenery(svg, scene),
      many = view.marks.length > CANVAS_ABOVE;
    if (many && f.paper) scene.spans = thinned(scene.spans, scene.at);
    picture.style.position = "relative";
    if (many && !f.paper) {
      canvas = canvas || H("canvas", { "aria-hidden": "true" });
      drawCanvas(canvas, view, scene, look, getComputedStyle(f.root));
      picture.replaceChildren(svg, canvas);
    } else {
      const hatch = hatches(svg);
      for (const s of scene.spans) paint(spanMarks(view, s, look.current, look.path), inner, hatch);
      picture.replaceChildren(svg);
    }
    updateBar(bar, view, scene, look);
    const key = JSON.stringify([view.breakdown, view.activities, view.overlaps, view.cases, view.pipelines, view.decisive]);
    if (key !== lastTables) drawTables(view, breakdown);
    lastTables = key;
    if (scene.at.running && !still)
      setTimeout(() => {
        if (performance.now() - drawnAt > 80) request();
      }, 100);
  }

  const leavePointer = interact(f, { look, now, places, zoomTo, zoom, fit, draw, shown: () => ({ view, scene }) });
  function take() {
    view = model.get("view");
    look.path.calls = new Set(view.critical.map((row) => view.marks[row][CALL]));
    look.path.shown &&= view.decisive;
    isOpen = view.marks.some((m) => m[FLAGS] & RUNNING);
    arrived = performance.now();
    if (look.current >= view.marks.length) look.current = -1;
  }
  f.onlost = () => {
    view = { ...view, live: false, now_s: now() };
    request();
  };
  take();
  draw();
  const onView = () => {
    take();
    request();
  };
  const onResize = () => {
    if (Math.abs(Math.min(1180, f.root.clientWidth - 16) - look.width) > 2) request();
  };
  const leave = redrawn({ model, f, onView, onResize });
  return () => {
    leave();
    leavePointer();
  };
}

// ---- interact: looking at one mark; `shown` is the view and what is drawn of it. Returns what ends listening to the page's wheel
function interact(f, { look, now, places, zoomTo, zoom, fit, draw, shown }) {
  const picture = f.host;
  function point(i, x, y, spoken) {
    const { view } = shown(),
      m = view.marks[i],
      heading = predictedName(view.labels[m[LABEL]], m[FLAGS] & PREDICTED);
    f.showTip(x, y, heading, describe(view, m, now()), spoken);
  }
  function pointAt(x, y, ev) {
    const { view, scene } = shown(),
      s = spanAt(scene.spans, x, y),
      dry = s ? null : drainAt(view, places(), x, y);
    if (s) point(s.i, ev.clientX, ev.clientY, false);
    else if (dry)
      f.showTip(ev.clientX, ev.clientY, `device ${dry[0].device}`, [
        ["at", fmtSeconds(dry[1][0])],
        ["sequences running", `${dry[1][1]} of ${dry[0].most}`],
        ["waiting", fmtCount(dry[1][2])],
        ["KV cache in use", fmtShare(dry[1][3])],
      ]);
    else f.hideTip();
  }
  // brings the mark that the keyboard is at into view, and tells of it
  function show() {
    if (look.current < 0) return;
    const m = shown().view.marks[look.current],
      { a, b, total } = places();
    if (m[START] > b || endOf(m, now()) < a) look.zoomed = clamped(m[START] - (b - a) / 4, m[START] + (3 * (b - a)) / 4, total);
    draw();
    const { scene } = shown(),
      s = scene.spans.find((q) => q.i === look.current),
      r = picture.getBoundingClientRect();
    if (!s) return;
    point(look.current, r.left + Math.max(s.x, LEFT) + Math.min(s.w, scene.at.plot) / 2, r.top + s.y + s.h, true);
  }
  keyboard(picture, {
    step: (dx, dy) => {
      look.current = stepped(shown().view, look.current, dx, dy);
    },
    show,
    keys: { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: fit, Escape: () => f.hideTip() },
  });
  picture.addEventListener("blur", () => f.hideTip());
  return followPointer(f, { places, zoomTo, zoom, pointAt, isWhole: () => !look.zoomed });
}

// drags and wheels over the picture; returns what ends listening to the page's wheel
function followPointer(f, { places, zoomTo, zoom, pointAt, isWhole }) {
  const picture = f.host,
    local = (ev) => {
      const r = picture.getBoundingClientRect();
      return [ev.clientX - r.left, ev.clientY - r.top];
    };
  let drag = null;
  picture.addEventListener("pointerdown", (ev) => {
    const [x] = local(ev),
      { a, b, plot } = places();
    if (ev.button === 0 && x > LEFT && x < LEFT + plot) {
      drag = { x, range: [a, b] };
      picture.setPointerCapture(ev.pointerId);
    }
  });
  picture.addEventListener("pointermove", (ev) => {
    const [x, y] = local(ev);
    if (!drag) {
      pointAt(x, y, ev);
      return;
    }
    const [a, b] = drag.range,
      shift = ((drag.x - x) / places().plot) * (b - a);
    if (Math.abs(drag.x - x) > 2) {
      zoomTo(a + shift, b + shift);
      f.hideTip();
    }
  });
  for (const end of ["pointerup", "pointercancel"])
    picture.addEventListener(end, () => {
      drag = null;
    });
  picture.addEventListener("pointerleave", () => f.hideTip());
  // the wheel zooms, unless this turn of the wheel began outside: then the page goes on scrolling
  let wheelAt = 0,
    wheelOurs = false;
  const watchWheel = (ev) => {
    if (ev.timeStamp - wheelAt > 250) wheelOurs = picture.contains(ev.target);
    wheelAt = ev.timeStamp;
  };
  window.addEventListener("wheel", watchWheel, { capture: true, passive: true });
  picture.addEventListener(
    "wheel",
    (ev) => {
      const [x] = local(ev),
        { a, b, plot } = places();
      if (!wheelOurs || x < LEFT || x > LEFT + plot || (isWhole() && ev.deltaY > 0)) return;
      ev.preventDefault();
      if (ev.shiftKey || Math.abs(ev.deltaX) > Math.abs(ev.deltaY)) {
        const shift = ((ev.deltaX || ev.deltaY) / plot) * (b - a);
        zoomTo(a + shift, b + shift);
      } else zoom(Math.exp(Math.max(-100, Math.min(100, ev.deltaY)) * 0.002), a + ((x - LEFT) / plot) * (b - a));
    },
    { passive: false },
  );
  return () => window.removeEventListener("wheel", watchWheel, { capture: true });
}
export default { render };
